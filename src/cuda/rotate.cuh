// SPDX-License-Identifier: Apache-2.0
//
// H128 and fp16 vectors for a warp that holds a block of 128 channels, four to a lane.
#ifndef ESPALIER_SRC_CUDA_ROTATE_CUH_
#define ESPALIER_SRC_CUDA_ROTATE_CUH_

#include <cuda_fp16.h>

#include <cstdint>

namespace espalier::cuda {

// Lane l holds channels 4l .. 4l + 3.
__device__ __forceinline__ float4 Hadamard128(float4 v) {
  v = {v.x + v.y, v.x - v.y, v.z + v.w, v.z - v.w};
  v = {v.x + v.z, v.y + v.w, v.x - v.z, v.y - v.w};
#pragma unroll
  for (uint32_t stride = 1; stride < 32; stride *= 2) {
    // The lower lane of a pair keeps the sum, the upper one the difference.
    const float sign = (threadIdx.x & stride) != 0 ? -1.0f : 1.0f;
    v.x = __shfl_xor_sync(0xFFFFFFFFu, v.x, stride) + sign * v.x;
    v.y = __shfl_xor_sync(0xFFFFFFFFu, v.y, stride) + sign * v.y;
    v.z = __shfl_xor_sync(0xFFFFFFFFu, v.z, stride) + sign * v.z;
    v.w = __shfl_xor_sync(0xFFFFFFFFu, v.w, stride) + sign * v.w;
  }
  const float scale = 0.08838834764831844f;  // 1 / sqrt(128)
  return {v.x * scale, v.y * scale, v.z * scale, v.w * scale};
}

// H128 without its factor for 128 / kValues neighbouring lanes that share a block: kValues (16 or 32)
// channels in the registers of each; which bits of the channel the lane stands for does not matter. A shuffle
// is what an SM can do least of: 12 or 8 for 128 channels here, 20 in Hadamard128.
inline constexpr float kHadamardScale = 0.08838834764831844f;  // 1 / sqrt(128)
template <int kValues>
__device__ __forceinline__ void HadamardOfLanes(float (&v)[kValues]) {
#pragma unroll
  for (int stride = 1; stride < kValues; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if ((i & stride) != 0) continue;
      const float low = v[i], high = v[i + stride];
      v[i] = low + high;
      v[i + stride] = low - high;
    }
  }
#pragma unroll
  for (uint32_t stride = 1; stride < 128 / kValues; stride *= 2) {
    const float sign = (threadIdx.x & stride) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = __shfl_xor_sync(0xFFFFFFFFu, v[i], stride) + sign * v[i];
  }
}

__device__ __forceinline__ float4 FourHalves(uint2 bits) {
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&bits.x));
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&bits.y));
  return {low.x, low.y, high.x, high.y};
}
// Four channels of an fp16 vector. REQUIRES: 8-byte alignment.
__device__ __forceinline__ float4 LoadVector(const uint16_t* vector) {
  return FourHalves(__ldg(reinterpret_cast<const uint2*>(vector)));
}

__device__ __forceinline__ float MaxMagnitude(float4 v) {
  // fmaxf drops NaN, so a NaN row gets the scale of its other values and stays NaN.
  return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

// Binary exponent of a positive finite value (-127 for subnormal ones); far below all of them for 0, infinity
// and NaN.
inline constexpr float kNoExponent = -1e6f;
__device__ __forceinline__ float ExponentOf(float magnitude) {
  return magnitude > 0 && magnitude < INFINITY ? static_cast<float>(__float_as_int(magnitude) >> 23) - 127.0f
                                               : kNoExponent;
}

// REQUIRES: a normal result.
__device__ __forceinline__ float SmallPowerOfTwo(int e) { return __int_as_float((e + 127) << 23); }

__device__ __forceinline__ double PowerOfTwo(int e) { return ldexp(1.0, e); }

// Scaled values of a block of 128 channels: v * 2^-exponent.
struct ScaledBlock {
  float4 v;
  int exponent;
};

// A warp's block as fp32 that stands 128 additions: scaled by a power of two where a value is beyond 2^+-60.
template <typename Real>
__device__ __forceinline__ ScaledBlock ScaleBlock(Real x, Real y, Real z, Real w) {
  const float4 v = {static_cast<float>(x), static_cast<float>(y), static_cast<float>(z),
                    static_cast<float>(w)};
  const float magnitude = MaxMagnitude(v);
  const bool beyond = magnitude > 0x1p60f || (magnitude < 0x1p-60f && (x != 0 || y != 0 || z != 0 || w != 0));
  if (!__any_sync(0xFFFFFFFFu, beyond)) return {v, 0};
  double largest = 0;
  const double values[] = {x, y, z, w};
#pragma unroll
  for (const double value : values) {
    if (isfinite(value)) largest = fmax(largest, fabs(value));
  }
#pragma unroll
  for (uint32_t stride = 16; stride > 0; stride /= 2) {
    largest = fmax(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, stride));
  }
  const int exponent = largest > 0 ? ilogb(largest) : 0;
  const double factor = PowerOfTwo(-exponent);
  return {{static_cast<float>(x * factor), static_cast<float>(y * factor), static_cast<float>(z * factor),
           static_cast<float>(w * factor)},
          exponent};
}

// A row on its way to operands, in shared memory: values times 2^-exponent of their block.
struct RowBuffer {
  float* values;       // [channels]
  int32_t* exponents;  // [channels / 128]

  static __host__ __device__ size_t Bytes(uint32_t channels) {
    return channels * sizeof(float) + channels / 128 * sizeof(int32_t);
  }
  __device__ __forceinline__ RowBuffer(void* memory, uint32_t channels)
      : values(static_cast<float*>(memory)), exponents(reinterpret_cast<int32_t*>(values + channels)) {}

  // Rotates a warp's block into its place. Returns this thread's largest exponent.
  __device__ __forceinline__ float PutRotated(uint32_t channel, ScaledBlock block) const {
    block.v = Hadamard128(block.v);
    *reinterpret_cast<float4*>(values + channel) = block.v;
    if ((threadIdx.x & 31) == 0) exponents[channel / 128] = block.exponent;
    return ExponentOf(MaxMagnitude(block.v)) + static_cast<float>(block.exponent);
  }
};

// The largest value over the block; `shared` has a float for each warp. Contains a barrier before and after
// the exchange.
__device__ __forceinline__ float BlockMax(float value, float* shared) {
#pragma unroll
  for (uint32_t stride = 16; stride > 0; stride /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, stride));
  }
  __syncthreads();
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[0];
  for (uint32_t warp = 1; warp < blockDim.x / 32; ++warp) value = fmaxf(value, shared[warp]);
  return value;
}

__device__ __forceinline__ float BlockSum(float value, float* shared) {
#pragma unroll
  for (uint32_t stride = 16; stride > 0; stride /= 2) {
    value += __shfl_xor_sync(0xFFFFFFFFu, value, stride);
  }
  __syncthreads();
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[0];
  for (uint32_t warp = 1; warp < blockDim.x / 32; ++warp) value += shared[warp];
  return value;
}

// The exponent e for which a row times 2^-e peaks in [2^13, 2^14): inside fp16 whatever the row was, with
// 2^27 of range below the peak before values turn subnormal. 0 for rows of zeros and of infinities.
__device__ __forceinline__ int RowExponent(float max_exponent) {
  return max_exponent < -10000.0f ? 0 : static_cast<int>(max_exponent) - 13;
}

// Whether factors of 2^e are safe in fp32 beside values of ordinary size.
__device__ __forceinline__ bool Ordinary(int exponent) { return exponent > -60 && exponent < 60; }

}  // namespace espalier::cuda

#endif  // ESPALIER_SRC_CUDA_ROTATE_CUH_
