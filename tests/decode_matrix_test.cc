// SPDX-License-Identifier: Apache-2.0
#include <espalier/moe.h>
#include <gtest/gtest.h>

#include <bit>
#include <vector>

#include "base/half.h"
#include "reference/trellis.h"
#include "support/random_experts.h"

namespace espalier {
namespace {

using test::MakeLinear;

const uint16_t* VectorAt(const PreparedLinear& linear, uint64_t offset) {
  return reinterpret_cast<const uint16_t*>(linear.slab() + offset);
}

constexpr int kAllBits[] = {
#define ESPALIER_BITS(bits) bits,
#include <espalier/formats.def>
};

TEST(DecodeMatrix, InnerIsTheCodebookOfEveryTile) {
  for (const int bits : kAllBits) {
    for (const CodebookInfo& info : AllCodebooks()) {
      const PreparedLinear linear = MakeLinear(128, 256, 0, 0, {.bits = bits, .codebook = info.codebook}, 1);
      const std::vector<float> inner = DecodeMatrix(linear, true).value();
      ASSERT_EQ(inner.size(), 128u * 256u);
      const std::byte* codes = linear.slab() + linear.matrix().codes_offset_bytes;
      for (uint32_t row = 0; row < 128; ++row) {
        for (uint32_t column = 0; column < 256; ++column) {
          const std::byte* tile = codes + (row / 16 * 16 + column / 16) * TileBytes(bits);
          const int index =
              IndexOf({.row = static_cast<int>(row % 16), .column = static_cast<int>(column % 16)});
          const uint16_t value = CodebookValueFp16(info.codebook, TileState(tile, bits, index));
          ASSERT_EQ(inner[row * 256 + column], Fp16ToFloat(value))
              << info.name << " K " << bits << " at " << row << ", " << column;
        }
      }
    }
  }
}

// One weight of diag(suh) H W H diag(svh) from the definition, with two sums over a block.
TEST(DecodeMatrix, RotatedIsTheDefinitionRoundedOnce) {
  const PreparedLinear linear = MakeLinear(256, 256, 0, 0, {.bits = 5, .codebook = Codebook::kMul1}, 2);
  const std::vector<float> inner = DecodeMatrix(linear, true).value();
  const std::vector<float> rotated = DecodeMatrix(linear, false).value();
  const uint16_t* suh = VectorAt(linear, linear.matrix().suh_offset_bytes);
  const uint16_t* svh = VectorAt(linear, linear.matrix().svh_offset_bytes);
  for (uint32_t at = 0; at < 400; ++at) {
    const uint32_t row = at * 37 % 256, column = at * 101 % 256;
    double sum = 0;
    for (uint32_t r = 0; r < 128; ++r) {
      for (uint32_t c = 0; c < 128; ++c) {
        const bool negative = (std::popcount(r & (row % 128)) + std::popcount(c & (column % 128))) % 2 != 0;
        const double value = inner[(row / 128 * 128 + r) * 256 + column / 128 * 128 + c];
        sum += negative ? -value : value;
      }
    }
    // The sum of fp16 values is exact in double, and so is the product of the vectors.
    const double factor = double{Fp16ToFloat(suh[row])} * double{Fp16ToFloat(svh[column])} / 128;
    EXPECT_EQ(rotated[row * 256 + column], static_cast<float>(sum * factor)) << row << ", " << column;
  }
}

// The stored size, whatever part of it the model sees.
TEST(DecodeMatrix, PaddingIsIncluded) {
  const PreparedLinear linear = MakeLinear(256, 128, 200, 100, {}, 3);
  EXPECT_EQ(DecodeMatrix(linear, false).value().size(), 256u * 128u);
}

}  // namespace
}  // namespace espalier
