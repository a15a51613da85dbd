// SPDX-License-Identifier: Apache-2.0
//
// Tiles at every bit rate and codebook, also where no vectors of the reference implementation exist.
#include "reference/trellis.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "base/half.h"
#include "support/random_experts.h"

namespace espalier {
namespace {

using test::Random;

constexpr int kAllBits[] = {
#define ESPALIER_BITS(bits) bits,
#include <espalier/formats.def>
};

std::vector<std::byte> RandomTiles(Random& random, int bits, size_t count) {
  std::vector<std::byte> tiles(TileBytes(bits) * count);
  for (std::byte& byte : tiles) byte = static_cast<std::byte>(random.Below(256));
  return tiles;
}

// The stream written out bit by bit, with the rule of pairs of 16-bit words: an independent reading.
std::vector<int> StreamBits(const std::vector<std::byte>& tile) {
  std::vector<int> stream;
  for (size_t pair = 0; pair < tile.size() / 4; ++pair) {
    for (const size_t half : {size_t{1}, size_t{0}}) {
      const unsigned low = static_cast<unsigned>(tile[4 * pair + 2 * half]);
      const unsigned high = static_cast<unsigned>(tile[4 * pair + 2 * half + 1]);
      const unsigned word = low | high << 8;
      for (int bit = 15; bit >= 0; --bit) stream.push_back(static_cast<int>(word >> bit & 1));
    }
  }
  return stream;
}

TEST(Trellis, StatesAreWindowsOfTheStream) {
  Random random(1);
  for (const int bits : kAllBits) {
    const std::vector<std::byte> tile = RandomTiles(random, bits, 1);
    const std::vector<int> stream = StreamBits(tile);
    uint16_t states[kTileWeights];
    UnpackStates(tile.data(), bits, states);
    for (int i = 0; i < 256; ++i) {
      unsigned expected = 0;
      for (int bit = (i + 1) * bits - 16; bit < (i + 1) * bits; ++bit) {
        expected = expected << 1 |
                   static_cast<unsigned>(stream[static_cast<size_t>((bit + 256 * bits) % (256 * bits))]);
      }
      ASSERT_EQ(states[i], expected) << "K " << bits << " weight " << i;
    }
  }
}

TEST(Trellis, StatesFollowOneAnother) {
  Random random(2);
  for (const int bits : kAllBits) {
    const std::vector<std::byte> tile = RandomTiles(random, bits, 1);
    uint16_t states[kTileWeights];
    UnpackStates(tile.data(), bits, states);
    for (int i = 0; i < 256; ++i) {
      const unsigned before = states[(i + 255) % 256] & ((1u << (16 - bits)) - 1);
      ASSERT_EQ(states[i] >> bits, before) << "K " << bits << " weight " << i;
    }
  }
}

TEST(Trellis, PackingUndoesUnpacking) {
  Random random(3);
  for (const int bits : kAllBits) {
    for (int round = 0; round < 20; ++round) {
      const std::vector<std::byte> tile = RandomTiles(random, bits, 1);
      uint16_t states[kTileWeights];
      UnpackStates(tile.data(), bits, states);
      std::vector<std::byte> packed(TileBytes(bits), std::byte{0xFF});
      PackStates(states, bits, packed.data());
      ASSERT_EQ(packed, tile) << "K " << bits;
    }
  }
}

// Symbols first: what an encoder does.
TEST(Trellis, UnpackingUndoesPacking) {
  Random random(4);
  for (const int bits : kAllBits) {
    uint16_t symbols[kTileWeights];
    for (uint16_t& symbol : symbols) symbol = static_cast<uint16_t>(random.Below(uint64_t{1} << bits));
    std::vector<uint16_t> states(kTileWeights);
    uint32_t state = 0;
    for (int i = 0; i < 512; ++i) {  // the first round fills the history of the second
      state = (state << bits | symbols[i % 256]) & 0xFFFF;
      states[static_cast<size_t>(i % 256)] = static_cast<uint16_t>(state);
    }
    std::vector<std::byte> packed(TileBytes(bits));
    PackStates(std::span<const uint16_t, kTileWeights>(states.data(), kTileWeights), bits, packed.data());
    std::vector<uint16_t> unpacked(kTileWeights);
    UnpackStates(packed.data(), bits, std::span<uint16_t, kTileWeights>(unpacked.data(), kTileWeights));
    ASSERT_EQ(unpacked, states) << "K " << bits;
  }
}

TEST(Trellis, OrderIsAPermutation) {
  std::set<std::pair<int, int>> seen;
  for (int i = 0; i < 256; ++i) {
    const TilePosition position = PositionOf(i);
    ASSERT_TRUE(position.row >= 0 && position.row < 16 && position.column >= 0 && position.column < 16);
    EXPECT_EQ(IndexOf(position), i);
    seen.insert({position.row, position.column});
  }
  EXPECT_EQ(seen.size(), kTileWeights);
}

}  // namespace
}  // namespace espalier
