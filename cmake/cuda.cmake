# SPDX-License-Identifier: Apache-2.0
# Looks for a CUDA compiler. Sets ESPALIER_HAS_CUDA. CUDA 12.8 is the first that knows sm_120.
set(ESPALIER_CUDA AUTO CACHE STRING "Build the cuda executor: AUTO (if nvcc is found), ON, OFF")
set_property(CACHE ESPALIER_CUDA PROPERTY STRINGS AUTO ON OFF)

set(ESPALIER_HAS_CUDA OFF)
if(NOT ESPALIER_CUDA STREQUAL OFF)
  # Machine code for every family, so that no start waits for a compiler; PTX of the last one for what comes.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES "80-real;86-real;89-real;90a-real;100-real;120" CACHE STRING
        "Architectures of the cuda executor")
  endif()
  if(ESPALIER_CUDA STREQUAL AUTO)
    include(CheckLanguage)
    check_language(CUDA)
    # Asked before CMake tries the compiler on architectures that an older one refuses.
    set(ESPALIER_NVCC_RELEASE 0)
    if(CMAKE_CUDA_COMPILER)
      execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE ESPALIER_NVCC_TEXT ERROR_QUIET)
      if(ESPALIER_NVCC_TEXT MATCHES "release ([0-9]+\\.[0-9]+)")
        set(ESPALIER_NVCC_RELEASE ${CMAKE_MATCH_1})
      endif()
      if(ESPALIER_NVCC_RELEASE VERSION_LESS 12.8)
        message(WARNING "no cuda executor: ${CMAKE_CUDA_COMPILER} is release ${ESPALIER_NVCC_RELEASE}, older than 12.8")
      endif()
    endif()
  endif()
  if(ESPALIER_CUDA STREQUAL ON OR NOT ESPALIER_NVCC_RELEASE VERSION_LESS 12.8)
    enable_language(CUDA)
    set(ESPALIER_HAS_CUDA ON)
  endif()
endif()

if(ESPALIER_HAS_CUDA)
  # Without its `a` that family would get code whose kernels for many rows are empty and trap.
  if(CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)(90(-|;|$)|native|all|all-major)")
    message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES is ${CMAKE_CUDA_ARCHITECTURES}; name the families by number, and "
                        "Hopper as 90a: the kernels of that family need it")
  endif()
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
    message(FATAL_ERROR "ESPALIER_CUDA is ON, but nvcc ${CMAKE_CUDA_COMPILER_VERSION} is older than 12.8")
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  # CMake 3.25 does not know that nvcc has C++20; the flag itself is among those of our targets.
  set(CMAKE_CUDA_STANDARD_REQUIRED OFF)
  find_package(CUDAToolkit REQUIRED)
endif()
