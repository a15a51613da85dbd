// SPDX-License-Identifier: Apache-2.0
#include "reference/hadamard.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "support/random_experts.h"

namespace espalier {
namespace {

using test::Random;

TEST(Hadamard, FloatScaleIsTheFactorOfTheFormat) {
  EXPECT_EQ(std::bit_cast<uint32_t>(static_cast<float>(kHadamardScale)), 0x3DB504F3u);
  EXPECT_EQ(kHadamardScale, std::sqrt(1.0 / 128));  // one rounding
}

TEST(Hadamard, ImpulsesGiveTheRowsOfTheMatrix) {
  for (uint32_t row = 0; row < kHadamardChannels; ++row) {
    std::vector<double> v(kHadamardChannels);
    v[row] = 1;
    Hadamard128(v.data());
    for (uint32_t i = 0; i < kHadamardChannels; ++i) {
      ASSERT_EQ(v[i], std::popcount(i & row) % 2 == 0 ? kHadamardScale : -kHadamardScale) << row << ", " << i;
    }
  }
}

template <typename Real>
std::vector<Real> RandomValues(size_t count) {
  Random random(1);
  std::vector<Real> values(count);
  for (Real& value : values) value = static_cast<Real>(random.Normal());
  return values;
}

TEST(Hadamard, IsItsOwnInverse) {
  const std::vector<double> original = RandomValues<double>(384);
  std::vector<double> v = original;
  Hadamard128Blocks(v.data(), 384);
  Hadamard128Blocks(v.data(), 384);
  for (size_t i = 0; i < v.size(); ++i) EXPECT_NEAR(v[i], original[i], 1e-14);
}

TEST(Hadamard, BlocksAreIndependent) {
  const std::vector<float> original = RandomValues<float>(384);
  std::vector<float> v = original;
  Hadamard128Blocks(v.data(), 384);
  for (size_t block = 0; block < 3; ++block) {
    std::vector<float> alone(original.begin() + static_cast<ptrdiff_t>(block * 128),
                             original.begin() + static_cast<ptrdiff_t>(block * 128 + 128));
    Hadamard128(alone.data());
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), v.begin() + static_cast<ptrdiff_t>(block * 128)));
  }
}

// The order of additions that the format states: pairs and quads inside a thread of 4 values, then
// partner threads at distance 1, 2, 4, 8, 16.
TEST(Hadamard, FloatBitsFollowTheStatedOrder) {
  std::vector<float> v = RandomValues<float>(128);
  std::vector<float> expected = v;
  for (size_t t = 0; t < 32; ++t) {
    float* q = expected.data() + 4 * t;
    const float s0 = q[0] + q[1], d0 = q[0] - q[1], s1 = q[2] + q[3], d1 = q[2] - q[3];
    q[0] = s0 + s1;
    q[1] = d0 + d1;
    q[2] = s0 - s1;
    q[3] = d0 - d1;
  }
  for (size_t distance = 1; distance <= 16; distance *= 2) {
    const std::vector<float> before = expected;
    for (size_t t = 0; t < 32; ++t) {
      for (size_t i = 0; i < 4; ++i) {
        const float h = before[4 * t + i];
        const float p = before[4 * (t ^ distance) + i];
        expected[4 * t + i] = (t & distance) != 0 ? p - h : h + p;
      }
    }
  }
  for (float& value : expected) value *= std::bit_cast<float>(0x3DB504F3u);
  Hadamard128(v.data());
  EXPECT_EQ(v, expected);
}

}  // namespace
}  // namespace espalier
