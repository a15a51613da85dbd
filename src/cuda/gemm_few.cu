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

// Shared memory that keeps a third block off an SM. Where all units can run at once, two an SM, they are
// otherwise placed by three while the kernel before still holds some SMs, and others stay nearly empty.
cudaError_t RoomOfTwo(uint64_t units, size_t& shared_bytes) {
  int device = 0, sms = 0, sm_bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&sm_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  }
  shared_bytes = units <= 2 * static_cast<uint64_t>(sms) ? static_cast<size_t>(sm_bytes) * 3 / 8 : 0;
  return error;
}

}  // namespace

cudaError_t LaunchFewRows(const GemmParams& params, dim3 grid, cudaStream_t stream, bool dependent) {
  size_t shared_bytes = 0;
  if (params.fused) {
    // Operands of one row as fp16 twice, and the row as fp32.
    shared_bytes = params.boundary.intermediate * kGroupRows * 2 * sizeof(uint16_t) +
                   RowBuffer::Bytes(params.boundary.intermediate);
  } else if (const cudaError_t error = RoomOfTwo(uint64_t{grid.x} * grid.y * grid.z, shared_bytes);
             error != cudaSuccess) {
    return error;
  }
  return Launch(FewRows, grid, kGemmThreads, shared_bytes, stream, dependent, params);
}

}  // namespace espalier::cuda
