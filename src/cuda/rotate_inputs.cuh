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

// A row stays in registers, four lanes a block of 128 channels, 32 channels a lane.
inline uint32_t RowThreads(uint32_t stored_channels) { return (stored_channels / 32 + 31) / 32 * 32; }

// Which channels lane q of the four holds: eight of every 32 for kWide, whose pieces are eight channels that
// follow each other; 16 of every 64 otherwise, which are the lane's part of an operand.
template <bool kWide>
__device__ __forceinline__ constexpr uint32_t FirstChannel(uint32_t q) {
  return q * (kWide ? 8 : 16);
}
template <bool kWide>
__device__ __forceinline__ constexpr uint32_t EighthChannel(
    uint32_t c) {  // of the lane's c-th eight channels
  return kWide ? 32 * c : c / 2 * 64 + c % 2 * 8;
}

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

// Writes what a lane holds of a row, times `scale`. Returns the sum of it as rounded, where there is one.
__device__ __forceinline__ float StoreWide(const float (&v)[32], float scale, bool mul1, bool there,
                                           uint4* to, uint64_t quad_room, uint32_t q, uint32_t row_in_group) {
  float sum = 0;
#pragma unroll
  for (uint32_t c = 0; c < 4; ++c) {
    const float* from = v + 8 * c;
    const uint4 piece = {
        PackHalves(from[0] * scale, from[1] * scale), PackHalves(from[2] * scale, from[3] * scale),
        PackHalves(from[4] * scale, from[5] * scale), PackHalves(from[6] * scale, from[7] * scale)};
    if (mul1) sum += SumOfHalves(piece);
    if (there) to[c / 2 * quad_room + ((c % 2 * 4 + q) ^ row_in_group)] = piece;
  }
  return sum;
}
__device__ __forceinline__ void StoreSplit(const float (&v)[32], float scale, bool there, uint4* to) {
  const auto twice = [&](float value) { return PackHalves(value * scale, value * scale); };
#pragma unroll
  for (uint32_t quad = 0; quad < 2; ++quad) {
#pragma unroll
    for (uint32_t s = 0; s < 4; ++s) {
      const float* from = v + 16 * quad + 2 * s;
      if (there) to[(quad * 4 + s) * 32] = {twice(from[0]), twice(from[1]), twice(from[8]), twice(from[9])};
    }
  }
}
__device__ __forceinline__ float StorePair(const float (&v)[32], float scale, bool there, uint4* to) {
  float sum = 0;
#pragma unroll
  for (uint32_t quad = 0; quad < 2; ++quad) {
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      const float* from = v + 16 * quad + 4 * h;
      const auto pack = [&](uint32_t i) { return PackHalves(from[i] * scale, from[i + 1] * scale); };
      const uint4 piece = {pack(0), pack(8), pack(2), pack(10)};
      sum += SumOfHalves(piece);
      if (there) to[(quad * 2 + h) * 32] = piece;
    }
  }
  return sum;
}

// A block takes one row and one out of gridDim.y projections: all of them where there are rows enough.
template <bool kWide, uint32_t kThreads, uint32_t kBlocks>
static __global__ void __launch_bounds__(kThreads, kBlocks)
    RotateRows(const __grid_constant__ RotateParams params) {
  __shared__ float shared[2][kThreads / 32];
  WaitForPreviousKernel();
  AllowNextKernel();
  const uint32_t packed = params.rows.kind == RowKind::kDirect ? blockIdx.x * kGroupRows : blockIdx.x;
  const PackedRow row = params.rows.RowAt(packed);
  if (row.route < 0) return;
  const uint32_t row_in_group = packed % kGroupRows;
  const uint32_t block = threadIdx.x / 4, q = threadIdx.x & 3;
  const uint32_t first = block * kHadamardChannels + FirstChannel<kWide>(q);
  const bool there = first < params.stored_channels;
  const bool whole = params.type == Value::kBF16 && first + EighthChannel<kWide>(3) + 8 <= params.channels &&
                     ((reinterpret_cast<uintptr_t>(params.x) | params.x_stride * 2) & 15) == 0;
  for (uint32_t projection = blockIdx.y; projection < params.num_projections; projection += gridDim.y) {
    const DeviceMatrix& matrix = params.rows.MatrixOf(row.segment, params.first_projection + projection);
    float v[32] = {};
    if (there) {
      uint4 signs[4];
#pragma unroll
      for (uint32_t c = 0; c < 4; ++c) {
        signs[c] = __ldg(reinterpret_cast<const uint4*>(matrix.suh + first + EighthChannel<kWide>(c)));
      }
      if (whole) {
        const __nv_bfloat16* x =
            static_cast<const __nv_bfloat16*>(params.x) + row.token * params.x_stride + first;
#pragma unroll
        for (uint32_t c = 0; c < 4; ++c) {
          const uint4 bits = *reinterpret_cast<const uint4*>(x + EighthChannel<kWide>(c));
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
          const uint32_t channel = first + EighthChannel<kWide>(i / 8) + i % 8;
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
    const Operand operand = OperandOf(matrix, params.row_class);
    uint4* to = params.inputs + projection * params.projection_room;
    float sum = 0;
    bool summed = operand == Operand::kPair;
    if constexpr (kWide) {
      summed = matrix.codebook == static_cast<uint32_t>(Codebook::kMul1);
      sum =
          StoreWide(v, scale, summed, there,
                    to + packed / kGroupRows * kWidePieces + row_in_group * 8 + block * 2 * params.group_room,
                    params.group_room, q, row_in_group);
    } else {
      to += packed / kGroupRows * params.group_room + row_in_group * 4 + q;
      if (operand == Operand::kSplit) {
        StoreSplit(v, scale, there, to + block * 2 * 4 * 32);
      } else {
        sum = StorePair(v, scale, there, to + block * 2 * 2 * 32);
      }
    }
    const uint64_t factor = uint64_t{projection} * params.num_rows + packed;
    if (summed) {
      const float all = BlockSum(sum, shared[1]);
      if (threadIdx.x == 0) params.sums[factor] = all;
    }
    if (threadIdx.x == 0) params.exponents[factor] = row_exponent;
  }
}

// `rows` of them, one block each, or one for each projection.
inline cudaError_t LaunchRotate(const RotateParams& params, uint32_t rows, cudaStream_t stream,
                                bool dependent) {
  const uint32_t threads = RowThreads(params.stored_channels);
  const bool wide = params.row_class == RowClass::kWide;
  const dim3 grid(rows, params.row_class == RowClass::kFew ? params.num_projections : 1);
  const auto launch = [&](auto kernel) {
    return Launch(kernel, grid, threads, 0, stream, dependent, params);
  };
  if (threads <= 256) return launch(wide ? RotateRows<true, 256, 4> : RotateRows<false, 256, 4>);
  return launch(wide ? RotateRows<true, 768, 1> : RotateRows<false, 768, 1>);
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
