// SPDX-License-Identifier: Apache-2.0
//
// One tile: 16 input x 16 output channels, 256 weights, 256 * bits bits (docs/format.md, section 1).
// The bits form a cyclic stream: every bit pattern is a valid tile.
#ifndef ESPALIER_SRC_REFERENCE_TRELLIS_H_
#define ESPALIER_SRC_REFERENCE_TRELLIS_H_

#include <espalier/formats.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "reference/codebook.h"

namespace espalier {

static_assert(std::endian::native == std::endian::little, "codes are read in place as little-endian words");

struct TilePosition {
  int row = 0;     // input channel of the tile
  int column = 0;  // output channel of the tile

  friend bool operator==(const TilePosition&, const TilePosition&) = default;
};

// Where weight `index` of the stream sits: the register order of a tensor-core operand. Eight
// successive weights cover four rows of one column and the same rows of the column 8 further.
constexpr TilePosition PositionOf(int index) {
  const int t = index >> 3;
  const int j = index & 7;
  return {.row = 2 * (t & 3) + (j & 1) + 8 * ((j >> 1) & 1), .column = (t >> 2) + 8 * (j >> 2)};
}

constexpr int IndexOf(TilePosition position) {
  const int t = (position.column & 7) * 4 + ((position.row & 7) >> 1);
  const int j = (position.row & 1) | ((position.row >> 3) << 1) | ((position.column >> 3) << 2);
  return t * 8 + j;
}

// 32 stream bits, most significant first; the stream has 8 * bits such words.
inline uint32_t TileWord(const std::byte* tile, int word) {
  uint32_t value = 0;
  std::memcpy(&value, tile + 4 * word, sizeof(value));
  return value;
}

// State of weight `index`: the 16 stream bits that end with the last bit of its symbol.
inline uint16_t TileState(const std::byte* tile, int bits, int index) {
  const int words = 8 * bits;
  const int first_bit = (index + 1) * bits - 16 + 256 * bits;  // one turn ahead, so never negative
  const int high = first_bit / 32;
  const int low = (first_bit + 15) / 32;  // the same word or the next
  const int shift = (low + 1) * 32 - (first_bit + 16);
  const uint64_t window =
      uint64_t{TileWord(tile, high % words)} << 32 | uint64_t{TileWord(tile, low % words)};
  return static_cast<uint16_t>(window >> shift);
}

inline void UnpackStates(const std::byte* tile, int bits, std::span<uint16_t, kTileWeights> states) {
  for (int i = 0; i < static_cast<int>(kTileWeights); ++i) states[i] = TileState(tile, bits, i);
}

// Writes the low `bits` bits of every state. The inverse of UnpackStates for states that follow one
// another: state[i] >> bits equals the low 16 - bits bits of state[i - 1], cyclically.
inline void PackStates(std::span<const uint16_t, kTileWeights> states, int bits, std::byte* tile) {
  std::memset(tile, 0, TileBytes(bits));
  for (int i = 0; i < static_cast<int>(kTileWeights); ++i) {
    for (int j = 0; j < bits; ++j) {
      const uint32_t bit = (states[i] >> (bits - 1 - j)) & 1u;
      const int place = i * bits + j;
      const uint32_t word = TileWord(tile, place / 32) | bit << (31 - place % 32);
      std::memcpy(tile + 4 * (place / 32), &word, sizeof(word));
    }
  }
}

// The fp16 values of a tile, row-major: values[16 * row + column].
inline void DecodeTile(const std::byte* tile, int bits, Codebook codebook,
                       std::span<uint16_t, kTileWeights> values) {
  for (int i = 0; i < static_cast<int>(kTileWeights); ++i) {
    const TilePosition position = PositionOf(i);
    values[16 * position.row + position.column] = CodebookValueFp16(codebook, TileState(tile, bits, i));
  }
}

}  // namespace espalier

#endif  // ESPALIER_SRC_REFERENCE_TRELLIS_H_
