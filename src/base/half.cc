// SPDX-License-Identifier: Apache-2.0
#include "base/half.h"

#include <bit>

namespace espalier {
namespace {

constexpr int kDoubleMantissaBits = 52;
constexpr int kDoubleBias = 1023;
constexpr uint64_t kDoubleExponentMask = 0x7FF;

// Rounds a double to nearest even into sign, kExponentBits and kMantissaBits, which fill 16 bits. A NaN
// keeps its sign and the upper bits of its payload and becomes quiet.
template <int kExponentBits, int kMantissaBits>
uint16_t RoundToHalf(double value) {
  static_assert(1 + kExponentBits + kMantissaBits == 16);
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  constexpr int kDropped = kDoubleMantissaBits - kMantissaBits;
  constexpr uint64_t kInfinity = ((uint64_t{1} << kExponentBits) - 1) << kMantissaBits;

  const uint64_t bits = std::bit_cast<uint64_t>(value);
  const uint64_t sign = bits >> 63 << 15;
  const uint64_t exponent_field = bits >> kDoubleMantissaBits & kDoubleExponentMask;
  const uint64_t mantissa = bits & ((uint64_t{1} << kDoubleMantissaBits) - 1);
  if (exponent_field == kDoubleExponentMask) {
    constexpr uint64_t kQuiet = uint64_t{1} << (kMantissaBits - 1);
    const uint64_t payload = mantissa == 0 ? 0 : (mantissa >> kDropped | kQuiet);
    return static_cast<uint16_t>(sign | kInfinity | payload);
  }

  const int exponent = static_cast<int>(exponent_field) - kDoubleBias + kBias;
  if (exponent >= (1 << kExponentBits) - 1) return static_cast<uint16_t>(sign | kInfinity);
  // A result below the normal range loses one more bit for every step of the exponent below 1. From a
  // shift of 54 on the 53-bit significand is less than half of the smallest subnormal.
  const int shift = exponent >= 1 ? kDropped : kDropped + 1 - exponent;
  if (shift >= kDoubleMantissaBits + 2) return static_cast<uint16_t>(sign);

  const uint64_t significand = mantissa | uint64_t{1} << kDoubleMantissaBits;
  const uint64_t rest = significand & ((uint64_t{1} << shift) - 1);
  const uint64_t half = uint64_t{1} << (shift - 1);
  uint64_t rounded = significand >> shift;
  if (rest > half || (rest == half && (rounded & 1) != 0)) ++rounded;
  // `rounded` holds the leading one, which is worth one step of the exponent field; so does a carry out
  // of the mantissa, up to infinity and up from the subnormals.
  const uint64_t below = exponent >= 1 ? static_cast<uint64_t>(exponent - 1) << kMantissaBits : 0;
  return static_cast<uint16_t>(sign | (below + rounded));
}

}  // namespace

float Fp16ToFloat(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = bits >> 10 & 0x1F;
  const uint32_t mantissa = bits & 0x3FF;
  if (exponent == 0) {
    // A subnormal is mantissa * 2^-24, exact in fp32.
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  if (exponent == 0x1F) return std::bit_cast<float>(sign | 0x7F800000u | mantissa << 13);
  return std::bit_cast<float>(sign | (exponent + 127 - 15) << 23 | mantissa << 13);
}

float Bf16ToFloat(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Every float is a double, so one rounding of the double is the one rounding of the float.
uint16_t FloatToFp16(float value) { return DoubleToFp16(static_cast<double>(value)); }
uint16_t FloatToBf16(float value) { return DoubleToBf16(static_cast<double>(value)); }

uint16_t DoubleToFp16(double value) { return RoundToHalf<5, 10>(value); }
uint16_t DoubleToBf16(double value) { return RoundToHalf<8, 7>(value); }

}  // namespace espalier
