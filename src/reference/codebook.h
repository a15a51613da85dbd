// SPDX-License-Identifier: Apache-2.0
//
// Codebooks: how a 16-bit trellis state becomes one fp16 value (docs/format.md, section 2). Exact
// integer arithmetic, so the values are the same on every machine and at compile time.
#ifndef ESPALIER_SRC_REFERENCE_CODEBOOK_H_
#define ESPALIER_SRC_REFERENCE_CODEBOOK_H_

#include <espalier/formats.h>

#include <bit>
#include <cstdint>
#include <span>

namespace espalier {

inline constexpr uint32_t kNumStates = 65536;

// The fp16 nearest to n * 2^exponent, ties to even. REQUIRES: |n| < 2^24 and a result below 65520.
constexpr uint16_t ScaledIntegerToFp16(int32_t n, int exponent) {
  if (n == 0) return 0;
  const uint32_t sign = n < 0 ? 0x8000u : 0u;
  const uint32_t magnitude = n < 0 ? static_cast<uint32_t>(-n) : static_cast<uint32_t>(n);
  // The result is a significand of at most 11 bits times 2^unit; subnormals end at 2^-24.
  int unit = exponent + static_cast<int>(std::bit_width(magnitude)) - 11;
  if (unit < -24) unit = -24;
  const int dropped = unit - exponent;
  uint32_t significand = 0;
  if (dropped <= 0) {
    significand = magnitude << -dropped;
  } else {
    const uint32_t half = 1u << (dropped - 1);
    const uint32_t rest = magnitude & (2 * half - 1);
    significand = magnitude >> dropped;
    if (rest > half || (rest == half && (significand & 1) != 0)) ++significand;
  }
  // A normal significand carries the implicit bit 1024, which counts as one step of the exponent
  // field; so does a carry out of the rounding.
  return static_cast<uint16_t>(sign | ((static_cast<uint32_t>(unit + 24) << 10) + significand));
}

// The sum of the two fp16 halves of a folded word, rounded once. Folding keeps the sign, the mantissa
// and two bits of the exponent and sets the others, so each half has a magnitude in [0.125, 2): an
// integer multiple of 2^-13.
constexpr uint16_t SumOfFoldedHalves(uint32_t word) {
  const uint32_t folded = (word & 0x8FFF8FFFu) ^ 0x3B603B60u;
  int32_t sum = 0;
  for (const uint32_t half : {folded & 0xFFFFu, folded >> 16}) {
    const uint32_t exponent_field = (half >> 10) & 31;  // 12..15
    const int32_t magnitude = static_cast<int32_t>((1024 + (half & 1023)) << (exponent_field - 12));
    sum += (half & 0x8000u) != 0 ? -magnitude : magnitude;
  }
  return ScaledIntegerToFp16(sum, -13);
}

// One specialization per codebook.
template <Codebook kCodebook>
constexpr uint16_t DecodeState(uint16_t state);

template <>
constexpr uint16_t DecodeState<Codebook::k3Inst>(uint16_t state) {
  return SumOfFoldedHalves(uint32_t{state} * 89226354u + 64248484u);
}

template <>
constexpr uint16_t DecodeState<Codebook::kMcg>(uint16_t state) {
  return SumOfFoldedHalves(uint32_t{state} * 0xCBAC1FEDu);
}

// fma(1024 + byte sum, 0x1EEE, 0xC931) in fp16: 0x1EEE is 1774 * 2^-18 and 0xC931 is
// -1329 * 2^-7 = -1329 * 2^11 * 2^-18, so the exact result is an integer times 2^-18.
template <>
constexpr uint16_t DecodeState<Codebook::kMul1>(uint16_t state) {
  const uint32_t x = uint32_t{state} * 0x83DCD12Du;
  const uint32_t sum = (x & 255) + ((x >> 8) & 255) + ((x >> 16) & 255) + (x >> 24);
  return ScaledIntegerToFp16(1774 * static_cast<int32_t>(1024 + sum) - 1329 * 2048, -18);
}

// The fp16 value of a state, as bits.
constexpr uint16_t CodebookValueFp16(Codebook codebook, uint16_t state) {
  switch (codebook) {
#define ESPALIER_CODEBOOK(enumerator, number, name, marker_tensor, multiplier) \
  case Codebook::enumerator:                                                   \
    return DecodeState<Codebook::enumerator>(state);
#include <espalier/formats.def>
  }
  return 0;
}

// All values by state. Built on first use, once, from any thread; lives as long as the program.
std::span<const uint16_t, kNumStates> CodebookTableFp16(Codebook codebook);
std::span<const float, kNumStates> CodebookTableFloat(Codebook codebook);

}  // namespace espalier

#endif  // ESPALIER_SRC_REFERENCE_CODEBOOK_H_
