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

// Four channels of an fp16 vector. REQUIRES: 8-byte alignment.
__device__ __forceinline__ float4 LoadVector(const uint16_t* vector) {
  const uint2 bits = __ldg(reinterpret_cast<const uint2*>(vector));
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&bits.x));
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&bits.y));
  return {low.x, low.y, high.x, high.y};
}

__device__ __forceinline__ float MaxMagnitude(float4 v) {
  // fmaxf drops NaN, so a NaN row gets the scale of its other values and stays NaN.
  return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

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

// The exponent e for which a row of this largest magnitude times 2^-e peaks in [2^13, 2^14): inside fp16
// whatever the row was, with 2^27 of range below the peak before values turn subnormal. 0 for rows of zeros
// and of infinities.
__device__ __forceinline__ int RowExponent(float max_magnitude) {
  if (!(max_magnitude > 0) || isinf(max_magnitude)) return 0;
  return ilogbf(max_magnitude) - 13;
}

// 2^e for any e that RowExponent gives, also where that is subnormal or its inverse is.
__device__ __forceinline__ float PowerOfTwo(int e) { return ldexpf(1.0f, e); }

}  // namespace espalier::cuda

#endif  // ESPALIER_SRC_CUDA_ROTATE_CUH_
