# SPDX-License-Identifier: Apache-2.0
# Looks for what sums over processes and GPUs need. Sets ESPALIER_HAS_MPI and ESPALIER_HAS_NCCL.
set(ESPALIER_MPI AUTO CACHE STRING "Run one rank a process under mpirun: AUTO (if MPI is found), ON, OFF")
set(ESPALIER_NCCL AUTO CACHE STRING "Build the sums between GPUs: AUTO (if NCCL is found), ON, OFF")
set_property(CACHE ESPALIER_MPI ESPALIER_NCCL PROPERTY STRINGS AUTO ON OFF)

set(ESPALIER_HAS_MPI OFF)
if(NOT ESPALIER_MPI STREQUAL OFF)
  # The C bindings: those for C++ have left the standard. FindMPI tries them with a C compiler.
  enable_language(C)
  if(ESPALIER_MPI STREQUAL ON)
    find_package(MPI REQUIRED COMPONENTS C)
  else()
    find_package(MPI QUIET COMPONENTS C)
  endif()
  set(ESPALIER_HAS_MPI ${MPI_C_FOUND})
endif()

set(ESPALIER_HAS_NCCL OFF)
if(NOT ESPALIER_NCCL STREQUAL OFF)
  # Neither comes with a CMake package everywhere, and the CUDA one wants a working nvcc.
  set(ESPALIER_CUDA_ROOTS $ENV{CUDA_PATH} /usr/local/cuda)
  find_path(ESPALIER_NCCL_INCLUDE_DIR nccl.h HINTS ${ESPALIER_CUDA_ROOTS} PATH_SUFFIXES include)
  find_path(ESPALIER_CUDART_INCLUDE_DIR cuda_runtime_api.h HINTS ${ESPALIER_CUDA_ROOTS} PATH_SUFFIXES include)
  find_library(ESPALIER_NCCL_LIBRARY nccl HINTS ${ESPALIER_CUDA_ROOTS} PATH_SUFFIXES lib64 lib)
  find_library(ESPALIER_CUDART_LIBRARY cudart HINTS ${ESPALIER_CUDA_ROOTS} PATH_SUFFIXES lib64 lib)
  mark_as_advanced(ESPALIER_NCCL_INCLUDE_DIR ESPALIER_CUDART_INCLUDE_DIR ESPALIER_NCCL_LIBRARY
                   ESPALIER_CUDART_LIBRARY)
  if(ESPALIER_NCCL_INCLUDE_DIR AND ESPALIER_CUDART_INCLUDE_DIR AND ESPALIER_NCCL_LIBRARY
     AND ESPALIER_CUDART_LIBRARY)
    set(ESPALIER_HAS_NCCL ON)
    file(STRINGS ${ESPALIER_NCCL_INCLUDE_DIR}/nccl.h ESPALIER_NCCL_NUMBERS
         REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) ")
    string(REGEX REPLACE "[^0-9]+" "." ESPALIER_NCCL_VERSION "${ESPALIER_NCCL_NUMBERS}")
    string(REGEX REPLACE "^\\.|\\.$" "" ESPALIER_NCCL_VERSION "${ESPALIER_NCCL_VERSION}")
  elseif(ESPALIER_NCCL STREQUAL ON)
    message(FATAL_ERROR "ESPALIER_NCCL is ON, but nccl.h, libnccl and the CUDA runtime were not all found; "
                        "set CUDA_PATH, ESPALIER_NCCL_INCLUDE_DIR or ESPALIER_NCCL_LIBRARY")
  endif()
endif()
