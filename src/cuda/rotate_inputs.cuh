// SPDX-License-Identifier: Apache-2.0
//
// The first kernel over rows: H128(x * suh) as operands. Also what else layers and single linears share.
#ifndef ESPALIER_SRC_CUDA_ROTATE_INPUTS_CUH_
#define ESPALIER_SRC_CUDA_ROTATE_INPUTS_CUH_

#include <cuda_runtime_api.h>
#include <espalier/status.h>

#include <cstdint>
#include <string>

#include "cuda/boundary.cuh"
#include "cuda/ptx.cuh"
#include "cuda/routes.cuh"

namespace espalier::cuda {

struct RotateParams {
  RowSource rows = {};
  Value type = Value::kF32;
  const void* x = nullptr;
  uint64_t x_stride = 0;
  uint32_t channels = 0;         // of x
  uint32_t stored_channels = 0;  // of the matrices
  uint32_t first_projection = 0;
  uint32_t num_projections = 0;
  RowClass row_class = RowClass::kFew;
  uint4* inputs = nullptr;
  uint64_t group_room = 0;
  uint64_t projection_room = 0;
  int32_t* exponents = nullptr;  // [2][num_rows]
  float* sums = nullptr;
  uint32_t num_rows = 0;
};

// A block for one row: many threads make one row fast, few make many rows cheap.
constexpr uint32_t kMaxRowThreads = 512;
constexpr uint32_t kRowThreads = 128;

// Four values of a row; `whole`: they may be read in one go.
__device__ __forceinline__ float4 LoadInput(const RotateParams& params, uint64_t at, bool whole,
                                            uint32_t left) {
  if (whole && params.type == Value::kBF16) {
    const uint2 bits = *reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(params.x) + at);
    return {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xFFFF0000u),
            __uint_as_float(bits.y << 16), __uint_as_float(bits.y & 0xFFFF0000u)};
  }
  float4 v = {};
  if (left > 0) v.x = LoadValue(params.type, params.x, at);
  if (left > 1) v.y = LoadValue(params.type, params.x, at + 1);
  if (left > 2) v.z = LoadValue(params.type, params.x, at + 2);
  if (left > 3) v.w = LoadValue(params.type, params.x, at + 3);
  return v;
}

// A block takes one row and one projection.
static __global__ void __launch_bounds__(kMaxRowThreads)
    RotateInputs(const __grid_constant__ RotateParams params) {
  extern __shared__ __align__(16) float row_memory[];
  __shared__ float shared[kMaxRowThreads / 32];
  WaitForPreviousKernel();
  AllowNextKernel();
  const uint32_t index = blockIdx.x / params.num_projections;
  const uint32_t packed = params.rows.kind == RowKind::kDirect ? index * kGroupRows : index;
  const uint32_t projection = blockIdx.x % params.num_projections;
  const PackedRow row = params.rows.RowAt(packed);
  if (row.route < 0) return;
  const DeviceMatrix& matrix = params.rows.MatrixOf(row.segment, params.first_projection + projection);
  const bool aligned = ((reinterpret_cast<uintptr_t>(params.x) | params.x_stride * 2) & 7) == 0;
  const RowBuffer buffer(row_memory, params.stored_channels);
  float max_exponent = kNoExponent;
#pragma unroll 4
  for (uint32_t channel = 4 * threadIdx.x; channel < params.stored_channels; channel += 4 * blockDim.x) {
    const uint32_t left = channel < params.channels ? params.channels - channel : 0;
    const float4 v = LoadInput(params, row.token * params.x_stride + channel, aligned && left >= 4, left);
    const float4 suh = LoadVector(matrix.suh + channel);
    const ScaledBlock block = ScaleBlock(v.x * suh.x, v.y * suh.y, v.z * suh.z, v.w * suh.w);
    max_exponent = fmaxf(max_exponent, buffer.PutRotated(channel, block));
  }
  const uint64_t factor = uint64_t{projection} * params.num_rows + packed;
  StoreOperands(buffer, params.stored_channels, max_exponent, OperandOf(matrix, params.row_class),
                params.inputs + projection * params.projection_room + packed / kGroupRows * params.group_room,
                packed % kGroupRows, params.exponents + factor, params.sums + factor, shared);
}

// The first failed launch; later ones are skipped.
class Chain {
 public:
  template <typename Function>
  void Add(const char* name, Function&& launch) {
    if (error_ != cudaSuccess) return;
    error_ = launch();
    name_ = name;
  }
  Result<void> result() const {
    if (error_ == cudaSuccess) return {};
    return Error(StatusCode::kDevice,
                 std::string("cuda: launching '") + name_ + "': " + cudaGetErrorString(error_));
  }

 private:
  cudaError_t error_ = cudaSuccess;
  const char* name_ = "";
};

}  // namespace espalier::cuda

#endif  // ESPALIER_SRC_CUDA_ROTATE_INPUTS_CUH_
