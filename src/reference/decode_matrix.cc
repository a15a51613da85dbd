// SPDX-License-Identifier: Apache-2.0
#include <espalier/experts.h>
#include <fmt/format.h>

#include <algorithm>
#include <new>

#include "base/half.h"
#include "base/parallel.h"
#include "moe/matrix_view.h"
#include "reference/hadamard.h"
#include "reference/trellis.h"

namespace espalier {
namespace {

constexpr uint32_t kBlock = kHadamardChannels;

// block[row][column] = codebook values of 128 x 128 weights.
void DecodeInnerBlock(const MatrixView& matrix, uint32_t in_block, uint32_t out_block, double* block) {
  constexpr uint32_t kTiles = kBlock / kTileChannels;
  uint16_t values[kTileWeights];
  TileWords words;
  for (uint32_t tile = 0; tile < kTiles * kTiles; ++tile) {
    const uint32_t tile_row = tile / kTiles;
    const uint32_t tile_column = tile % kTiles;
    DecodeTile(matrix.Tile(in_block * kTiles + tile_row, out_block * kTiles + tile_column, words),
               matrix.bits, matrix.codebook, values);
    for (uint32_t i = 0; i < kTileWeights; ++i) {
      const uint32_t row = tile_row * kTileChannels + i / kTileChannels;
      block[row * kBlock + tile_column * kTileChannels + i % kTileChannels] = Fp16ToFloat(values[i]);
    }
  }
}

// block = diag(suh) H block H diag(svh): the rotations of both sides stay inside a block. Their two factors
// make 1/128, a power of two: taken once, it costs no rounding, and an exact tie between two floats stays
// one.
void RotateBlock(const uint16_t* suh, const uint16_t* svh, double* block) {
  double column[kBlock];
  for (uint32_t c = 0; c < kBlock; ++c) {
    for (uint32_t r = 0; r < kBlock; ++r) column[r] = block[r * kBlock + c];
    HadamardSums128(column);
    for (uint32_t r = 0; r < kBlock; ++r) block[r * kBlock + c] = column[r];
  }
  for (uint32_t r = 0; r < kBlock; ++r) {
    double* row = block + r * kBlock;
    HadamardSums128(row);
    for (uint32_t c = 0; c < kBlock; ++c) {
      row[c] *= double{Fp16ToFloat(suh[r])} * double{Fp16ToFloat(svh[c])} / kBlock;
    }
  }
}

}  // namespace

Result<std::vector<float>> DecodeMatrix(const PreparedLinear& linear, bool inner) {
  if (!linear.device().is_host()) {
    return Error(StatusCode::kDevice,
                 fmt::format("{}: the matrix is on {}; legal: one on the host (ToDevice)", linear.identity(),
                             DeviceText(linear.device())));
  }
  const MatrixView matrix = ViewOf(linear.matrix(), linear.slab());
  const uint64_t out = matrix.out_channels;
  const uint64_t out_blocks = out / kBlock;
  std::vector<float> weights;
  try {
    weights.resize(uint64_t{matrix.in_channels} * out);
  } catch (const std::bad_alloc&) {
    return Error(StatusCode::kCapacity, fmt::format("{}: no memory for {} x {} weights", linear.identity(),
                                                    matrix.in_channels, out));
  }
  ParallelFor(0, matrix.in_channels / kBlock * out_blocks, [&](uint64_t index) {
    const uint64_t in_block = index / out_blocks;
    const uint64_t out_block = index % out_blocks;
    double block[kBlock * kBlock];  // 128 KiB of stack
    DecodeInnerBlock(matrix, static_cast<uint32_t>(in_block), static_cast<uint32_t>(out_block), block);
    if (!inner) RotateBlock(matrix.suh + in_block * kBlock, matrix.svh + out_block * kBlock, block);
    for (uint64_t r = 0; r < kBlock; ++r) {
      float* row = weights.data() + (in_block * kBlock + r) * out + out_block * kBlock;
      std::transform(block + r * kBlock, block + (r + 1) * kBlock, row,
                     [](double value) { return static_cast<float>(value); });
    }
  });
  return weights;
}

}  // namespace espalier
