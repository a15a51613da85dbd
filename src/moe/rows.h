// SPDX-License-Identifier: Apache-2.0
//
// Rows of x and y in the types that callers hand over.
#ifndef ESPALIER_SRC_MOE_ROWS_H_
#define ESPALIER_SRC_MOE_ROWS_H_

#include <espalier/formats.h>

#include <cstdint>

#include "base/half.h"

namespace espalier {

// Elements [first, first + count) of `data` (F16, BF16, F32), exact.
template <typename Real>
void LoadRow(Dtype dtype, const void* data, uint64_t first, uint64_t count, Real* values) {
  if (dtype == Dtype::kF32) {
    const float* source = static_cast<const float*>(data) + first;
    for (uint64_t i = 0; i < count; ++i) values[i] = source[i];
    return;
  }
  const uint16_t* source = static_cast<const uint16_t*>(data) + first;
  if (dtype == Dtype::kF16) {
    for (uint64_t i = 0; i < count; ++i) values[i] = Fp16ToFloat(source[i]);
  } else {
    for (uint64_t i = 0; i < count; ++i) values[i] = Bf16ToFloat(source[i]);
  }
}

// Writes or adds to elements [first, first + count) of `data` (F64, F32, F16, BF16). Sums are taken in
// double, so that every element is rounded once.
template <typename Real>
void StoreRow(Dtype dtype, void* data, uint64_t first, uint64_t count, const Real* values, bool accumulate) {
  if (dtype == Dtype::kF64) {
    double* target = static_cast<double*>(data) + first;
    for (uint64_t i = 0; i < count; ++i) target[i] = (accumulate ? target[i] : 0.0) + double{values[i]};
    return;
  }
  if (dtype == Dtype::kF32) {
    float* target = static_cast<float*>(data) + first;
    for (uint64_t i = 0; i < count; ++i) {
      target[i] = static_cast<float>((accumulate ? double{target[i]} : 0.0) + double{values[i]});
    }
    return;
  }
  uint16_t* target = static_cast<uint16_t*>(data) + first;
  const bool half = dtype == Dtype::kF16;
  for (uint64_t i = 0; i < count; ++i) {
    const float old = !accumulate ? 0.0f : half ? Fp16ToFloat(target[i]) : Bf16ToFloat(target[i]);
    const double sum = double{old} + double{values[i]};
    target[i] = half ? DoubleToFp16(sum) : DoubleToBf16(sum);
  }
}

}  // namespace espalier

#endif  // ESPALIER_SRC_MOE_ROWS_H_
