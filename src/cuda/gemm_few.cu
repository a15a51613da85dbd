// SPDX-License-Identifier: Apache-2.0
//
// Up to 8 rows a tile, two output tiles a warp over one set of inputs. 80 registers let 24 warps share an SM,
// which hides the latency of the codes and the starts of units.
#include "cuda/gemm.cuh"
#include "cuda/gemm_launch.cuh"

namespace espalier::cuda {
namespace {

__global__ void __launch_bounds__(kGemmThreads, 3) FewRows(const __grid_constant__ GemmParams params) {
  RunBlock<true, 2, 1, 1>(params);
}

}  // namespace

cudaError_t LaunchFewRows(const GemmParams& params, dim3 grid, cudaStream_t stream, bool dependent) {
  // Operands of one row as fp16 twice, and the row as fp32.
  const size_t shared_bytes = params.fused
                                  ? params.boundary.intermediate * kGroupRows * 2 * sizeof(uint16_t) +
                                        RowBuffer::Bytes(params.boundary.intermediate)
                                  : 0;
  return Launch(FewRows, grid, kGemmThreads, shared_bytes, stream, dependent, params);
}

}  // namespace espalier::cuda
