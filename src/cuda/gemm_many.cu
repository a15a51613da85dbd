// SPDX-License-Identifier: Apache-2.0
//
// Up to 48 rows a tile: the sums of six groups need 128 registers, so 16 warps share an SM.
#include "cuda/gemm.cuh"
#include "cuda/gemm_launch.cuh"

namespace espalier::cuda {
namespace {

__global__ void __launch_bounds__(kGemmThreads, 2) ManyRows(const __grid_constant__ GemmParams params) {
  RunBlock<false, 1, 6, 1, 2, 3, 4, 6>(params);
}

}  // namespace

cudaError_t LaunchManyRows(const GemmParams& params, dim3 grid, cudaStream_t stream, bool dependent) {
  return Launch(ManyRows, grid, kGemmThreads, 0, stream, dependent, params);
}

}  // namespace espalier::cuda
