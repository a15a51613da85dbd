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
#include "cuda/gemm_launch.cuh"
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
  uint64_t group_room = 0;  // pieces from group to group; wide: from quad to quad
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

// Of kWide: a block takes one row and all of its projections, four lanes a block of 128 channels, and a row
// stays in registers. Lane q of the four holds channels 32 c + 8 q .. + 7.
inline uint32_t WideRowThreads(uint32_t stored_channels) { return (stored_channels / 32 + 31) / 32 * 32; }

// What a block of 128 channels is multiplied with before fp32 sums are safe: ScaleBlock for four lanes.
__device__ __forceinline__ int ScaleOfFour(float (&v)[32]) {
  float magnitude = 0, any = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) magnitude = fmaxf(magnitude, fabsf(v[i]));
  if (magnitude < 0x1p-60f) {
#pragma unroll
    for (int i = 0; i < 32; ++i) any = v[i] != 0 ? 1.0f : any;
  }
  if (!__any_sync(0xFFFFFFFFu, magnitude > 0x1p60f || any != 0)) return 0;
  float largest = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    if (isfinite(v[i])) largest = fmaxf(largest, fabsf(v[i]));
  }
  largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
  const int exponent = largest > 0 ? ilogbf(largest) : 0;
  const double factor = PowerOfTwo(-exponent);
#pragma unroll
  for (int i = 0; i < 32; ++i) v[i] = static_cast<float>(v[i] * factor);
  return exponent;
}

template <uint32_t kThreads, uint32_t kBlocks>
static __global__ void __launch_bounds__(kThreads, kBlocks)
    RotateWide(const __grid_constant__ RotateParams params) {
  __shared__ float shared[2][kThreads / 32];
  WaitForPreviousKernel();
  AllowNextKernel();
  const uint32_t packed = blockIdx.x;
  const PackedRow row = params.rows.RowAt(packed);
  if (row.route < 0) return;
  const uint32_t row_in_group = packed % kGroupRows;
  const uint32_t block = threadIdx.x / 4, q = threadIdx.x & 3;
  const uint32_t first = block * kHadamardChannels + q * 8;
  const bool there = first < params.stored_channels;
  const bool whole = params.type == Value::kBF16 && first + 96 + 8 <= params.channels &&
                     ((reinterpret_cast<uintptr_t>(params.x) | params.x_stride * 2) & 15) == 0;
  for (uint32_t projection = 0; projection < params.num_projections; ++projection) {
    const DeviceMatrix& matrix = params.rows.MatrixOf(row.segment, params.first_projection + projection);
    float v[32] = {};
    if (there) {
      uint4 signs[4];
#pragma unroll
      for (uint32_t c = 0; c < 4; ++c)
        signs[c] = __ldg(reinterpret_cast<const uint4*>(matrix.suh + first + 32 * c));
      if (whole) {
        const uint4* x = reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(params.x) +
                                                        row.token * params.x_stride + first);
#pragma unroll
        for (uint32_t c = 0; c < 4; ++c) {
          const uint4 bits = x[4 * c];
          const uint32_t words[] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
          for (uint32_t i = 0; i < 4; ++i) {
            v[8 * c + 2 * i] = __uint_as_float(words[i] << 16);
            v[8 * c + 2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
          }
        }
      } else {
#pragma unroll
        for (uint32_t i = 0; i < 32; ++i) {
          const uint32_t channel = first + i / 8 * 32 + i % 8;
          if (channel < params.channels) {
            v[i] = LoadValue(params.type, params.x, row.token * params.x_stride + channel);
          }
        }
      }
#pragma unroll
      for (uint32_t c = 0; c < 4; ++c) {
        const uint32_t words[] = {signs[c].x, signs[c].y, signs[c].z, signs[c].w};
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          const float2 sign = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
          v[8 * c + 2 * i] *= sign.x;
          v[8 * c + 2 * i + 1] *= sign.y;
        }
      }
    }
    const int exponent = ScaleOfFour(v);
    HadamardOfLanes(v);
    float magnitude = 0;  // fmaxf drops NaN, so a NaN row gets the scale of its other values and stays NaN
#pragma unroll
    for (int i = 0; i < 32; ++i) magnitude = fmaxf(magnitude, fabsf(v[i]));
    const float max_exponent = ExponentOf(magnitude * kHadamardScale) + static_cast<float>(exponent);
    const int row_exponent = RowExponent(BlockMax(max_exponent, shared[0]));
    const float scale = kHadamardScale * SmallPowerOfTwo(min(max(exponent - row_exponent, -126), 127));
    float sum = 0;
    const bool mul1 = matrix.codebook == static_cast<uint32_t>(Codebook::kMul1);
    uint4* to = params.inputs + projection * params.projection_room + packed / kGroupRows * kWidePieces +
                row_in_group * 8;
#pragma unroll
    for (uint32_t c = 0; c < 4; ++c) {
      const float* from = v + 8 * c;
      const uint4 piece = {
          PackHalves(from[0] * scale, from[1] * scale), PackHalves(from[2] * scale, from[3] * scale),
          PackHalves(from[4] * scale, from[5] * scale), PackHalves(from[6] * scale, from[7] * scale)};
      if (mul1) sum += SumOfHalves(piece);
      if (there) to[(block * 2 + c / 2) * params.group_room + ((c % 2 * 4 + q) ^ row_in_group)] = piece;
    }
    const uint64_t factor = uint64_t{projection} * params.num_rows + packed;
    if (mul1) {
      const float all = BlockSum(sum, shared[1]);
      if (threadIdx.x == 0) params.sums[factor] = all;
    }
    if (threadIdx.x == 0) params.exponents[factor] = row_exponent;
  }
}

// Rows of kWide: num_rows of them, one block each.
inline cudaError_t LaunchRotateWide(const RotateParams& params, uint32_t rows, cudaStream_t stream,
                                    bool dependent) {
  const uint32_t threads = WideRowThreads(params.stored_channels);
  if (threads <= 256) return Launch(RotateWide<256, 4>, dim3(rows), threads, 0, stream, dependent, params);
  return Launch(RotateWide<768, 1>, dim3(rows), threads, 0, stream, dependent, params);
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
