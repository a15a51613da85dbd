// SPDX-License-Identifier: Apache-2.0
#include "cpu/exact_rows.h"

#include <algorithm>
#include <cmath>

#include "base/half.h"
#include "reference/activation.h"
#include "reference/hadamard.h"

namespace espalier::cpu {
namespace {

constexpr int kMinExponent = -1000;

}  // namespace

template <typename Real>
int32_t RowExponent(const Real* values, uint64_t count) {
  Real largest = 0;
  for (uint64_t i = 0; i < count; ++i) largest = std::max(largest, std::abs(values[i]));
  if (largest == 0) return kZeroExponent;
  if (!std::isfinite(largest)) return 0;
  // A double as small as 2^-1074 would ask for a factor beyond the range of a double.
  const int exponent = std::max(std::ilogb(largest), kMinExponent);
  return exponent >= std::ilogb(kLeastSafe) && exponent < std::ilogb(kMostSafe) ? 0 : exponent;
}
template int32_t RowExponent(const float* values, uint64_t count);
template int32_t RowExponent(const double* values, uint64_t count);

double PowerOfTwo(int32_t exponent) { return std::ldexp(1.0, exponent); }

void FinishExact(const MatrixView& matrix, uint32_t out_block, int32_t exponent, const float* sums,
                 float offset, double* values) {
  float rotated[kBlockChannels];
  for (uint32_t i = 0; i < kBlockChannels; ++i) {
    rotated[i / kPanelChannels * kPanelChannels + LaneChannel(i % kPanelChannels)] = sums[i] + offset;
  }
  Hadamard128(rotated);
  const uint64_t first = uint64_t{out_block} * kBlockChannels;
  const double factor = exponent == 0 ? 1.0 : PowerOfTwo(exponent);
  for (uint32_t i = 0; i < kBlockChannels; ++i) {
    values[i] = double{rotated[i]} * double{Fp16ToFloat(matrix.svh[first + i])} * factor;
    if (matrix.bias != nullptr) values[i] += double{Fp16ToFloat(matrix.bias[first + i])};
  }
}

int32_t BoundaryExact(const Activation& activation, const double* gate, const double* up,
                      const uint16_t* suh, uint64_t valid, float* rotated) {
  double values[kBlockChannels] = {};
  for (uint64_t i = 0; i < valid; ++i) {
    values[i] = Activate(activation, gate[i], up[i]) * double{Fp16ToFloat(suh[i])};
  }
  const int32_t exponent = RowExponent(values, kBlockChannels);
  const double factor = exponent != 0 && exponent != kZeroExponent ? PowerOfTwo(-exponent) : 1.0;
  for (uint32_t i = 0; i < kBlockChannels; ++i) rotated[i] = static_cast<float>(values[i] * factor);
  Hadamard128(rotated);
  return exponent;
}

}  // namespace espalier::cpu
