// SPDX-License-Identifier: Apache-2.0
//
// The two orders that code words have in a slab (CodeOrder): files and GPUs keep whole tiles, the cpu
// executor streams panels of 32 output channels. One is a permutation of the 32-bit words of the other.
#ifndef ESPALIER_SRC_MOE_CODE_ORDER_H_
#define ESPALIER_SRC_MOE_CODE_ORDER_H_

#include <espalier/formats.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace espalier {

inline constexpr uint32_t kPanelChannels = 2 * kTileChannels;
// A tile is 8 groups of `bits` words; a group holds 32 successive weights.
inline constexpr uint32_t kTileGroups = 8;

// Bytes of a panel step: 16 input x 32 output channels, a multiple of 64.
constexpr uint64_t PanelStepBytes(int bits) { return 2 * TileBytes(bits); }

// Offset of the step at (tile_row, panel) inside the codes of a matrix of in_channels.
constexpr uint64_t PanelStepOffset(uint64_t in_channels, int bits, uint64_t tile_row, uint64_t panel) {
  return (panel * (in_channels / kTileChannels) + tile_row) * PanelStepBytes(bits);
}

// Where word `word` of group `group` of tile 0 or 1 lies in a step, in words.
constexpr uint32_t PanelWordIndex(uint32_t word, uint32_t tile, uint32_t group) {
  return (word * 2 + tile) * kTileGroups + group;
}

// Two tiles of one row, side by side as they are in native order, to a step of a panel. A row of 16 words at
// a time: with constant bits 10 to 23 GB/s on one core, from the cache to memory.
inline void PanelStepFromTiles(const std::byte* tiles, int bits, std::byte* step) {
  const uint32_t words = static_cast<uint32_t>(bits);
  for (uint32_t word = 0; word < words; ++word) {
#pragma GCC unroll 16
    for (uint32_t group = 0; group < 2 * kTileGroups; ++group) {  // of both tiles
      std::memcpy(step + 4 * PanelWordIndex(word, 0, group), tiles + 4 * (group * words + word), 4);
    }
  }
}

// The inverse for one of the two tiles.
inline void TileFromPanelStep(const std::byte* step, int bits, uint32_t tile, std::byte* words) {
  for (uint32_t group = 0; group < kTileGroups; ++group) {
    for (uint32_t word = 0; word < static_cast<uint32_t>(bits); ++word) {
      std::memcpy(words, step + 4 * PanelWordIndex(word, tile, group), 4);
      words += 4;
    }
  }
}

}  // namespace espalier

#endif  // ESPALIER_SRC_MOE_CODE_ORDER_H_
