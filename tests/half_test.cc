// SPDX-License-Identifier: Apache-2.0
#include "base/half.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

namespace espalier {
namespace {

// A 16-bit format as its numbers say it, with none of the bit handling of the code under test.
struct HalfFormat {
  int mantissa_bits;
  int min_exponent;  // of the smallest normal number
  int max_exponent;  // of the largest
};
constexpr HalfFormat kFp16 = {10, -14, 15};
constexpr HalfFormat kBf16 = {7, -126, 127};

// The value of a finite pattern, from the definition.
double ValueOf(const HalfFormat& format, uint16_t bits) {
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int exponent = (bits & 0x7FFF) >> format.mantissa_bits;
  const double fraction = std::ldexp(mantissa, -format.mantissa_bits);
  const double magnitude = exponent == 0 ? std::ldexp(fraction, format.min_exponent)
                                         : std::ldexp(1 + fraction, exponent - 1 + format.min_exponent);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

// Nearest value of the format, ties to even, by the rounding of the machine: nearbyint of the value in
// units of its last place. Infinite when that is beyond the largest finite number.
double NearestValue(const HalfFormat& format, double value) {
  if (value == 0) return value;
  const int exponent = std::max(std::ilogb(value), format.min_exponent);
  const int unit = exponent - format.mantissa_bits;
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -unit)), unit);
  const double too_large = std::ldexp(1.0, format.max_exponent + 1);
  if (std::fabs(rounded) >= too_large) return std::copysign(std::numeric_limits<double>::infinity(), value);
  return rounded;
}

bool SameDouble(double a, double b) { return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b); }

bool IsNan(const HalfFormat& format, uint16_t bits) {
  const int infinity = 0x7FFF >> format.mantissa_bits << format.mantissa_bits;
  return (bits & 0x7FFF) > infinity;
}

bool IsFinite(const HalfFormat& format, uint16_t bits) {
  const int infinity = 0x7FFF >> format.mantissa_bits << format.mantissa_bits;
  return (bits & 0x7FFF) < infinity;
}

TEST(HalfTest, EveryFp16PatternReadsAsItsDefinition) {
  for (uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    const float value = Fp16ToFloat(bits);
    if (IsNan(kFp16, bits)) {
      ASSERT_TRUE(std::isnan(value)) << i;
    } else if (!IsFinite(kFp16, bits)) {
      ASSERT_TRUE(std::isinf(value)) << i;
      ASSERT_EQ(std::signbit(value), bits == 0xFC00) << i;
    } else {
      ASSERT_TRUE(SameDouble(value, ValueOf(kFp16, bits))) << i;
    }
  }
}

TEST(HalfTest, EveryBf16PatternReadsAsItsDefinition) {
  for (uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    const float value = Bf16ToFloat(bits);
    if (IsNan(kBf16, bits)) {
      ASSERT_TRUE(std::isnan(value)) << i;
    } else if (!IsFinite(kBf16, bits)) {
      ASSERT_TRUE(std::isinf(value)) << i;
    } else {
      ASSERT_TRUE(SameDouble(value, ValueOf(kBf16, bits))) << i;
    }
  }
}

TEST(HalfTest, EveryPatternSurvivesTheRoundTrip) {
  for (uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    // A signalling NaN comes back quiet: its payload's upper bit set.
    const auto fp16 = static_cast<uint16_t>(IsNan(kFp16, bits) ? bits | 0x0200 : bits);
    ASSERT_EQ(FloatToFp16(Fp16ToFloat(bits)), fp16) << i;
    const auto bf16 = static_cast<uint16_t>(IsNan(kBf16, bits) ? bits | 0x0040 : bits);
    ASSERT_EQ(FloatToBf16(Bf16ToFloat(bits)), bf16) << i;
  }
}

// For each pair of neighbours: the value halfway between them, and its neighbours among floats and
// doubles on both sides.
template <typename FloatToHalf, typename DoubleToHalf>
void CheckAroundEveryHalfway(const HalfFormat& format, FloatToHalf from_float, DoubleToHalf from_double) {
  const int infinity = 0x7FFF >> format.mantissa_bits << format.mantissa_bits;
  for (int i = 0; i < infinity; ++i) {
    const double low = ValueOf(format, static_cast<uint16_t>(i));
    const double high = i + 1 == infinity ? std::ldexp(1.0, format.max_exponent + 1)
                                          : ValueOf(format, static_cast<uint16_t>(i + 1));
    const double halfway = low + (high - low) / 2;
    const auto even = static_cast<uint16_t>(i % 2 == 0 ? i : i + 1);
    ASSERT_EQ(from_double(halfway), even) << i;
    ASSERT_EQ(from_double(-halfway), even | 0x8000) << i;
    ASSERT_EQ(from_double(std::nextafter(halfway, 0.0)), i);
    ASSERT_EQ(from_double(std::nextafter(halfway, 1e300)), i + 1);
    // fp32 has more than one bit on both, so every halfway value is a float of its own.
    const auto single = static_cast<float>(halfway);
    ASSERT_TRUE(SameDouble(single, halfway)) << i;
    ASSERT_EQ(from_float(single), even) << i;
    ASSERT_EQ(from_float(-single), even | 0x8000) << i;
    ASSERT_EQ(from_float(std::nextafter(single, 0.0f)), i);
    ASSERT_EQ(from_float(std::nextafter(single, std::numeric_limits<float>::infinity())), i + 1);
  }
}

TEST(HalfTest, Fp16TiesGoToEvenAndTheirNeighboursToTheNearest) {
  CheckAroundEveryHalfway(kFp16, FloatToFp16, DoubleToFp16);
}

TEST(HalfTest, Bf16TiesGoToEvenAndTheirNeighboursToTheNearest) {
  CheckAroundEveryHalfway(kBf16, FloatToBf16, DoubleToBf16);
}

template <typename DoubleToHalf>
void CheckAgainstNearbyint(const HalfFormat& format, double value, DoubleToHalf from_double) {
  const double expected = NearestValue(format, value);
  const uint16_t bits = from_double(value);
  if (std::isinf(expected)) {
    ASSERT_FALSE(IsFinite(format, bits) || IsNan(format, bits)) << value;
    ASSERT_EQ((bits & 0x8000) != 0, std::signbit(value));
  } else {
    ASSERT_TRUE(SameDouble(ValueOf(format, bits), expected)) << std::hexfloat << value;
  }
}

TEST(HalfTest, RandomDoublesRoundAsTheMachineRounds) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 300000; ++i) {
    // Random mantissa, exponents from below the smallest subnormal to beyond the largest number.
    const double mantissa = 1 + std::ldexp(static_cast<double>(random() >> 12), -52);
    const double sign = (random() & 1) != 0 ? -1 : 1;
    const int fp16_exponent = static_cast<int>(random() % 46) - 28;
    CheckAgainstNearbyint(kFp16, sign * std::ldexp(mantissa, fp16_exponent), DoubleToFp16);
    const int bf16_exponent = static_cast<int>(random() % 270) - 138;
    CheckAgainstNearbyint(kBf16, sign * std::ldexp(mantissa, bf16_exponent), DoubleToBf16);
  }
}

TEST(HalfTest, RandomFloatsRoundAsTheMachineRounds) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 300000; ++i) {
    const auto value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (!std::isfinite(value)) continue;
    CheckAgainstNearbyint(kFp16, value, [](double v) { return FloatToFp16(static_cast<float>(v)); });
    CheckAgainstNearbyint(kBf16, value, [](double v) { return FloatToBf16(static_cast<float>(v)); });
  }
}

TEST(HalfTest, DoublesAreRoundedOnce) {
  // Just above halfway between 1 and the next fp16: a float drops the excess, and the tie that is left
  // would go to even.
  const double fp16 = 1 + 0x1p-11 + 0x1p-40;
  EXPECT_EQ(DoubleToFp16(fp16), 0x3C01);
  EXPECT_EQ(FloatToFp16(static_cast<float>(fp16)), 0x3C00);
  const double bf16 = 1 + 0x1p-8 + 0x1p-40;
  EXPECT_EQ(DoubleToBf16(bf16), 0x3F81);
  EXPECT_EQ(FloatToBf16(static_cast<float>(bf16)), 0x3F80);
  // Just below halfway, where a float rounds up onto the tie.
  const double below = 1 + 3 * 0x1p-11 - 0x1p-40;
  EXPECT_EQ(DoubleToFp16(below), 0x3C01);
  EXPECT_EQ(FloatToFp16(static_cast<float>(below)), 0x3C02);
}

TEST(HalfTest, EdgesOfTheRange) {
  EXPECT_EQ(FloatToFp16(65504.0f), 0x7BFF);
  EXPECT_EQ(FloatToFp16(65519.996f), 0x7BFF);
  EXPECT_EQ(FloatToFp16(65520.0f), 0x7C00);
  EXPECT_EQ(FloatToFp16(-65520.0f), 0xFC00);
  EXPECT_EQ(FloatToFp16(0x1p-24f), 0x0001);
  EXPECT_EQ(FloatToFp16(0x1p-25f), 0x0000);
  EXPECT_EQ(FloatToFp16(-0x1p-25f), 0x8000);
  EXPECT_EQ(FloatToFp16(0x1.000002p-25f), 0x0001);
  EXPECT_EQ(FloatToFp16(std::numeric_limits<float>::denorm_min()), 0x0000);
  EXPECT_EQ(FloatToFp16(std::numeric_limits<float>::max()), 0x7C00);
  EXPECT_EQ(FloatToBf16(std::numeric_limits<float>::max()), 0x7F80);
  EXPECT_EQ(FloatToBf16(std::numeric_limits<float>::denorm_min()), 0x0000);
  EXPECT_EQ(DoubleToBf16(std::numeric_limits<double>::denorm_min()), 0x0000);
  EXPECT_EQ(DoubleToFp16(-std::numeric_limits<double>::max()), 0xFC00);
  EXPECT_EQ(FloatToFp16(0.0f), 0x0000);
  EXPECT_EQ(FloatToFp16(-0.0f), 0x8000);
  EXPECT_EQ(FloatToBf16(-0.0f), 0x8000);
}

TEST(HalfTest, NanAndInfinityStay) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(FloatToFp16(infinity), 0x7C00);
  EXPECT_EQ(FloatToFp16(-infinity), 0xFC00);
  EXPECT_EQ(FloatToBf16(infinity), 0x7F80);
  EXPECT_EQ(FloatToBf16(-infinity), 0xFF80);
  // A payload that lies wholly in the dropped bits must not turn the NaN into an infinity.
  for (const uint32_t pattern : {0x7F800001u, 0xFF800001u, 0x7FC00000u, 0x7FFFFFFFu, 0xFFC12345u}) {
    const auto nan = std::bit_cast<float>(pattern);
    EXPECT_TRUE(IsNan(kFp16, FloatToFp16(nan))) << pattern;
    EXPECT_TRUE(IsNan(kBf16, FloatToBf16(nan))) << pattern;
    EXPECT_EQ(FloatToFp16(nan) >> 15, pattern >> 31);
    EXPECT_EQ(FloatToBf16(nan) >> 15, pattern >> 31);
  }
  EXPECT_TRUE(IsNan(kFp16, DoubleToFp16(std::bit_cast<double>(uint64_t{0x7FF0000000000001}))));
  EXPECT_TRUE(IsNan(kBf16, DoubleToBf16(std::bit_cast<double>(uint64_t{0xFFF0000000000001}))));
}

}  // namespace
}  // namespace espalier
