// SPDX-License-Identifier: Apache-2.0
//
// The products' entry points: one translation unit per kernel class, so that they compile side by side.
#ifndef ESPALIER_SRC_CUDA_GEMM_LAUNCH_CUH_
#define ESPALIER_SRC_CUDA_GEMM_LAUNCH_CUH_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/gemm.cuh"
#include "cuda/launch.h"

namespace espalier::cuda {

// Groups of 8 rows that a tile holds at most.
inline constexpr uint32_t TileGroups(RowClass row_class) {
  return static_cast<uint32_t>(TileRows(row_class)) / kGroupRows;
}

// Grid: (blocks of output channels of the widest matrix, projections * splits, tiles).
cudaError_t LaunchFewRows(const GemmParams& params, dim3 grid, cudaStream_t stream, bool dependent);
cudaError_t LaunchManyRows(const GemmParams& params, dim3 grid, cudaStream_t stream, bool dependent);
// Sums in blocks of 128 channels, without splits.
cudaError_t LaunchWideRows(const GemmParams& params, dim3 grid, cudaStream_t stream, bool dependent);
inline cudaError_t LaunchRows(RowClass row_class, const GemmParams& params, dim3 grid, cudaStream_t stream,
                              bool dependent) {
  switch (row_class) {
    case RowClass::kFew:
      return LaunchFewRows(params, grid, stream, dependent);
    case RowClass::kMany:
      return LaunchManyRows(params, grid, stream, dependent);
    case RowClass::kWide:
      return LaunchWideRows(params, grid, stream, dependent);
    case RowClass::kDense:
      break;
  }
  return cudaErrorInvalidValue;  // gemm_dense.cuh: takes a matrix in another form
}

// Launches a kernel; `dependent`: its prologue may overlap the end of the kernel before (sm_90 and newer).
template <typename... Params, typename... Args>
cudaError_t Launch(void (*kernel)(Params...), dim3 grid, uint32_t threads, size_t shared_bytes,
                   cudaStream_t stream, bool dependent, const Args&... args) {
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, Params(args)...);
}

}  // namespace espalier::cuda

#endif  // ESPALIER_SRC_CUDA_GEMM_LAUNCH_CUH_
