# SPDX-License-Identifier: Apache-2.0
# Looks for a CUDA compiler. Sets ESPALIER_HAS_CUDA.
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
  endif()
  if(ESPALIER_CUDA STREQUAL ON OR CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    set(ESPALIER_HAS_CUDA ON)
  endif()
endif()

if(ESPALIER_HAS_CUDA)
  if(CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)90(-|;|$)")
    message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES has 90; the kernels of that family need 90a")
  endif()
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
    message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} does not know sm_120; the cuda executor needs CUDA "
                        "12.8 or newer (or -DESPALIER_CUDA=OFF)")
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  # CMake 3.25 does not know that nvcc has C++20; the flag itself is among those of our targets.
  set(CMAKE_CUDA_STANDARD_REQUIRED OFF)
  find_package(CUDAToolkit REQUIRED)
endif()
