// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "base/half.h"
#include "reference/codebook.h"
#include "reference/trellis.h"

namespace espalier {
namespace {

// A tile into `weights`, whose rows are 128 apart. 32 successive weights take exactly kBits words and
// fill columns g and g + 8: with the bits known at compile time every shift and place is a constant.
template <int kBits>
void DecodeTileInto(const std::byte* tile, const float* codebook, float* weights) {
  constexpr int kWords = 8 * kBits;
  uint32_t stream[kWords + 1];  // stream[0] is the word before the first one: the last
  std::memcpy(stream + 1, tile, sizeof(uint32_t) * kWords);
  stream[0] = stream[kWords];
  for (int g = 0; g < 8; ++g) {
    const uint32_t* words = stream + 1 + g * kBits;
    float* corner = weights + g;
#pragma GCC unroll 32
    for (int i = 0; i < 32; ++i) {
      const int end = (i + 1) * kBits;      // one past the last bit of the state
      const int low = (end + 31) / 32 - 1;  // word of that last bit
      const int shift = 32 * (low + 1) - end;
      const uint64_t window = uint64_t{words[low - 1]} << 32 | words[low];
      const TilePosition position = PositionOf(i);
      corner[position.row * static_cast<int>(kBlockChannels) + position.column] =
          codebook[static_cast<uint16_t>(window >> shift)];
    }
  }
}

template <int kBits>
void DecodeBlockOf(const MatrixView& matrix, uint32_t in_block, uint32_t out_block, float* weights) {
  constexpr uint32_t kTiles = kBlockChannels / kTileChannels;
  const float* codebook = CodebookTableFloat(matrix.codebook).data();
  TileWords words;
  for (uint32_t row = 0; row < kTiles; ++row) {
    for (uint32_t column = 0; column < kTiles; ++column) {
      DecodeTileInto<kBits>(matrix.Tile(in_block * kTiles + row, out_block * kTiles + column, words),
                            codebook, weights + (row * kBlockChannels + column) * kTileChannels);
    }
  }
}

constexpr int kMinExponent = -1000;

// Four floats: a register on every x86-64 and arm64. g++ 12 leaves plain loops over small arrays scalar,
// with the sums in memory: 3.6 against 14 billion products a second.
using Vector = float __attribute__((vector_size(16)));
constexpr uint32_t kLanes = 4;

Vector LoadVector(const float* source) {
  Vector value;
  std::memcpy(&value, source, sizeof(value));
  return value;
}

// kRows rows times 8 columns of weights stay in registers: with four rows that is 8 of the 16 vector
// registers of plain x86-64, and every weight loaded serves four products.
template <int kRows>
void MultiplyRows(const float* inputs, uint64_t input_stride, const float* weights, const float* scales,
                  float* sums) {
  constexpr uint32_t kVectors = 2;
  for (uint32_t column = 0; column < kBlockChannels; column += kVectors * kLanes) {
    Vector block_sums[kRows][kVectors] = {};
    for (uint32_t k = 0; k < kBlockChannels; ++k) {
      const float* row_of_weights = weights + k * kBlockChannels + column;
      const Vector low = LoadVector(row_of_weights);
      const Vector high = LoadVector(row_of_weights + kLanes);
      for (int row = 0; row < kRows; ++row) {
        const float input = inputs[static_cast<uint64_t>(row) * input_stride + k];
        block_sums[row][0] += input * low;
        block_sums[row][1] += input * high;
      }
    }
    for (int row = 0; row < kRows; ++row) {
      const float scale = scales != nullptr ? scales[row] : 1.0f;
      for (uint32_t v = 0; v < kVectors; ++v) {
        float* target = sums + static_cast<uint64_t>(row) * kBlockChannels + column + v * kLanes;
        const Vector sum = LoadVector(target) + scale * block_sums[row][v];
        std::memcpy(target, &sum, sizeof(sum));
      }
    }
  }
}

}  // namespace

void DecodeBlock(const MatrixView& matrix, uint32_t in_block, uint32_t out_block, float* weights) {
  switch (matrix.bits) {
#define ESPALIER_BITS(bits)                                    \
  case bits:                                                   \
    DecodeBlockOf<bits>(matrix, in_block, out_block, weights); \
    return;
#include <espalier/formats.def>
    default:
      return;
  }
}

void MultiplyBlock(const float* inputs, uint64_t input_stride, uint32_t num_rows, const float* weights,
                   const float* scales, float* sums) {
  uint32_t row = 0;
  const auto next_scales = [&] { return scales != nullptr ? scales + row : nullptr; };
  for (; row + 4 <= num_rows; row += 4) {
    MultiplyRows<4>(inputs + row * input_stride, input_stride, weights, next_scales(),
                    sums + row * kBlockChannels);
  }
  for (; row < num_rows; ++row) {
    MultiplyRows<1>(inputs + row * input_stride, input_stride, weights, next_scales(),
                    sums + row * kBlockChannels);
  }
}

template <typename Real>
int32_t RowExponent(const Real* values, uint64_t count) {
  Real largest = 0;
  for (uint64_t i = 0; i < count; ++i) largest = std::max(largest, std::abs(values[i]));
  if (largest == 0) return kZeroExponent;
  if (!std::isfinite(largest)) return 0;
  // A double as small as 2^-1074 would ask for a factor beyond the range of a double.
  const int exponent = std::max(std::ilogb(largest), kMinExponent);
  return exponent >= -30 && exponent < 30 ? 0 : exponent;
}
template int32_t RowExponent(const float* values, uint64_t count);
template int32_t RowExponent(const double* values, uint64_t count);

double PowerOfTwo(int32_t exponent) { return std::ldexp(1.0, exponent); }

void LoadBlockVector(const uint16_t* vector, uint64_t first, float* values) {
  for (uint32_t i = 0; i < kBlockChannels; ++i) values[i] = Fp16ToFloat(vector[first + i]);
}

}  // namespace espalier
