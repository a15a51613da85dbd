// SPDX-License-Identifier: Apache-2.0
#ifndef ESPALIER_SRC_REFERENCE_HADAMARD_H_
#define ESPALIER_SRC_REFERENCE_HADAMARD_H_

#include <espalier/formats.h>

#include <cstdint>

namespace espalier {

// 1 / sqrt(128). As a float it is 0x3DB504F3, the factor of the format.
inline constexpr double kHadamardScale = 0.08838834764831844055;

// The transform without its factor: sums and differences only.
template <typename Real>
void HadamardSums128(Real* v) {
  for (uint32_t stride = 1; stride < kHadamardChannels; stride *= 2) {
    for (uint32_t first = 0; first < kHadamardChannels; first += 2 * stride) {
      for (uint32_t i = first; i < first + stride; ++i) {
        const Real a = v[i];
        const Real b = v[i + stride];
        v[i] = a + b;
        v[i + stride] = a - b;
      }
    }
  }
}

// The normalized 128-point Hadamard transform in Sylvester order, in place; its own inverse:
// H[i][j] = (-1)^popcount(i & j) / sqrt(128). Strides ascend from 1 to 64, which in float gives the
// bits that docs/format.md (section 3.2) states.
template <typename Real>
void Hadamard128(Real* v) {
  HadamardSums128(v);
  for (uint32_t i = 0; i < kHadamardChannels; ++i) v[i] *= static_cast<Real>(kHadamardScale);
}

// Every aligned block of 128. REQUIRES: channels is a multiple of 128.
template <typename Real>
void Hadamard128Blocks(Real* v, uint32_t channels) {
  for (uint32_t first = 0; first < channels; first += kHadamardChannels) Hadamard128(v + first);
}

}  // namespace espalier

#endif  // ESPALIER_SRC_REFERENCE_HADAMARD_H_
