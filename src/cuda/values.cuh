// SPDX-License-Identifier: Apache-2.0
//
// Reading inputs and writing outputs of any type, and the function between FC1 and FC2.
#ifndef ESPALIER_SRC_CUDA_VALUES_CUH_
#define ESPALIER_SRC_CUDA_VALUES_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <espalier/formats.h>

#include <cstdint>

namespace espalier::cuda {

enum class Value : uint32_t { kF32, kF16, kBF16 };

inline Value ValueOf(Dtype dtype) {
  return dtype == Dtype::kF16 ? Value::kF16 : dtype == Dtype::kBF16 ? Value::kBF16 : Value::kF32;
}

__device__ __forceinline__ float LoadValue(Value type, const void* data, uint64_t at) {
  switch (type) {
    case Value::kF16:
      return __half2float(static_cast<const __half*>(data)[at]);
    case Value::kBF16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]);
    case Value::kF32:
      break;
  }
  return static_cast<const float*>(data)[at];
}

// a + b for a value that is rounded again: to odd, so that two roundings give what one would have.
__device__ __forceinline__ float AddToOdd(float a, float b) {
  const float sum = __fadd_rz(a, b);
  if (!isfinite(sum)) return __fadd_rn(a, b);
  // The error of a sum cut towards zero is a float: two subtractions find whether it is 0.
  const float larger = fabsf(a) >= fabsf(b) ? a : b;
  const float smaller = fabsf(a) >= fabsf(b) ? b : a;
  const bool exact = __fadd_rn(sum, -larger) == smaller;
  return exact ? sum : __uint_as_float(__float_as_uint(sum) | 1u);
}

// y = v, or y += v: one rounding.
__device__ __forceinline__ void StoreValue(Value type, void* data, uint64_t at, float v, bool accumulate) {
  switch (type) {
    case Value::kF16: {
      __half* y = static_cast<__half*>(data) + at;
      *y = __float2half_rn(accumulate ? AddToOdd(__half2float(*y), v) : v);
      return;
    }
    case Value::kBF16: {
      __nv_bfloat16* y = static_cast<__nv_bfloat16*>(data) + at;
      *y = __float2bfloat16_rn(accumulate ? AddToOdd(__bfloat162float(*y), v) : v);
      return;
    }
    case Value::kF32:
      break;
  }
  float* y = static_cast<float*>(data) + at;
  *y = accumulate ? *y + v : v;
}

struct ActivationParams {
  ActivationKind kind = ActivationKind::kSilu;
  float limit = 0;
  float beta = 0;
  float linear_beta = 0;
};

__device__ __forceinline__ float Exp(float z) { return __expf(z); }
__device__ __forceinline__ double Exp(double z) { return exp(z); }
__device__ __forceinline__ float Tanh(float z) { return tanhf(z); }
__device__ __forceinline__ double Tanh(double z) { return tanh(z); }

template <typename Real>
__device__ __forceinline__ Real Sigmoid(Real z) {
  // Of -|z| only, so that nothing overflows.
  const Real e = Exp(z < 0 ? z : -z);
  return (z >= 0 ? Real{1} : e) / (1 + e);
}

// Comparisons that are false for NaN leave it as it is. Formulas: docs/format.md, section 5.3.
template <typename Real>
__device__ __forceinline__ Real Activate(const ActivationParams& params, Real gate, Real up) {
  if (params.limit > 0) {
    const Real limit = params.limit;
    gate = gate > limit ? limit : gate;
    up = up < -limit ? -limit : up > limit ? limit : up;
  }
  switch (params.kind) {
    case ActivationKind::kSilu:
      return gate * Sigmoid(gate) * up;
    case ActivationKind::kGelu: {
      const Real inner = Real{0.797884560803f} * (gate + Real{0.044715f} * gate * gate * gate);
      return Real{0.5} * gate * (1 + Tanh(inner)) * up;
    }
    case ActivationKind::kRelu2: {
      const Real positive = up < 0 ? Real{0} : up;
      return positive * positive;
    }
    case ActivationKind::kSitu: {
      const Real beta = params.beta, linear_beta = params.linear_beta;
      const Real value = linear_beta > 0 ? linear_beta * Tanh(up / linear_beta) : up;
      return beta * Tanh(gate / beta) * Sigmoid(gate) * value;
    }
    case ActivationKind::kSwigluOai:
      return gate * Sigmoid(Real{1.702f} * gate) * (up + 1);
  }
  return up;
}

}  // namespace espalier::cuda

#endif  // ESPALIER_SRC_CUDA_VALUES_CUH_
