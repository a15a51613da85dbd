// SPDX-License-Identifier: Apache-2.0
#include "cpu/group_product.h"

#include <algorithm>

namespace espalier::cpu {
namespace {

// 8 steps of a panel. In native order they are put together first: a package that was loaded for this
// executor is in panel order.
const uint32_t* BlockCodes(const MatrixView& matrix, uint32_t panel, uint32_t block, std::byte* scratch) {
  const uint32_t first_row = block * kBlockSteps;
  if (matrix.order == CodeOrder::kPanels) {
    return reinterpret_cast<const uint32_t*>(
        matrix.codes + PanelStepOffset(matrix.in_channels, matrix.bits, first_row, panel));
  }
  const uint64_t row_tiles = matrix.out_channels / kTileChannels;
  for (uint32_t step = 0; step < kBlockSteps; ++step) {
    const uint64_t tile = (first_row + step) * row_tiles + uint64_t{panel} * 2;
    PanelStepFromTiles(matrix.codes + tile * TileBytes(matrix.bits), matrix.bits,
                       scratch + step * PanelStepBytes(matrix.bits));
  }
  return reinterpret_cast<const uint32_t*>(scratch);
}

PackedInputs From(const GroupInputs& inputs, uint64_t block) {
  return {.first = {.words = inputs.words + block * inputs.BlockStride(),
                    .scales = inputs.scales + block * inputs.rows,
                    .starts = inputs.starts + block * inputs.rows},
          .word_stride = inputs.BlockStride(),
          .row_stride = inputs.rows};
}

constexpr uint64_t kLineBytes = 64;

void Fetch(const void* begin, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes; at += kLineBytes)
    __builtin_prefetch(static_cast<const char*>(begin) + at);
}

void MultiplyFused(KernelTable::Fused fused, const MatrixView& matrix, uint32_t panel, uint32_t num_blocks,
                   const GroupInputs& inputs, ProductScratch& scratch, float* sums) {
  // Blocks of a panel follow one another in panel order.
  const uint32_t step = matrix.order == CodeOrder::kPanels ? num_blocks : 1;
  for (uint32_t block = 0; block < num_blocks; block += step) {
    fused(BlockCodes(matrix, panel, block, scratch.codes), step, From(inputs, block), sums, kBlockChannels);
  }
}

}  // namespace

void PackRow(const KernelTable& table, const GroupInputs& inputs, uint32_t row, uint64_t block,
             const float* values) {
  const uint64_t place = block * inputs.rows + row;
  table.pack(inputs.operand, values, inputs.words + place * BlockWords(inputs.operand), inputs.scales + place,
             inputs.starts + place);
}

float SumOffset(const GroupInputs& inputs, uint32_t row, uint64_t num_blocks) {
  const float factor = OffsetFactor(inputs.operand);
  if (factor == 0) return 0;
  float sum = 0;
  for (uint64_t block = 0; block < num_blocks; ++block) {
    const uint64_t place = block * inputs.rows + row;
    sum += inputs.scales[place] * static_cast<float>(inputs.starts[place]);
  }
  return sum * factor;
}

namespace {

KernelTable::Fused FindFused(const KernelTable& table, const MatrixView& matrix, const GroupInputs& inputs) {
  if (inputs.rows > kMaxFusedRows) return nullptr;
  const int codebook = static_cast<int>(matrix.codebook);
  if (inputs.operand == Operand::kFloat) return table.fused_float[codebook][matrix.bits][inputs.rows];
  return inputs.operand == table.operand(CpuMode::kFast, matrix.codebook, inputs.rows)
             ? table.fused[codebook][matrix.bits][inputs.rows]
             : nullptr;
}

}  // namespace

void FetchFirstBlock(const MatrixView& matrix, uint32_t out_block, const GroupInputs& inputs) {
  if (matrix.order != CodeOrder::kPanels) return;
  // With few rows one panel after the other is read, in one run.
  const uint32_t panels = inputs.rows <= kMaxFusedRows ? 1 : kBlockPanels;
  for (uint32_t p = 0; p < panels; ++p) {
    Fetch(matrix.codes + PanelStepOffset(matrix.in_channels, matrix.bits, 0, out_block * kBlockPanels + p),
          kBlockSteps * PanelStepBytes(matrix.bits));
  }
  Fetch(inputs.words, inputs.BlockStride() * sizeof(uint32_t));
}

void MultiplyGroup(const KernelTable& table, const MatrixView& matrix, uint32_t out_block,
                   uint32_t num_blocks, const GroupInputs& inputs, ProductScratch& scratch, float* sums) {
  const int codebook = static_cast<int>(matrix.codebook), operand = static_cast<int>(inputs.operand);
  std::fill_n(sums, uint64_t{inputs.rows} * kBlockChannels, 0.0f);
  const RowRuns runs(inputs.rows, table.max_rows);
  const KernelTable::Fused fused = FindFused(table, matrix, inputs);
  if (fused != nullptr) {
    for (uint32_t p = 0; p < kBlockPanels; ++p) {
      MultiplyFused(fused, matrix, out_block * kBlockPanels + p, num_blocks, inputs, scratch,
                    sums + p * kPanelChannels);
    }
    return;
  }
  const KernelTable::Decode decode = table.decode[operand][codebook][matrix.bits];
  // Block by block: what its rows hold is fetched from the second-level cache once for all panels.
  // The next block's come from the third level where a group is large, a quarter beside every panel.
  const uint64_t quarter = inputs.BlockStride() / kBlockPanels;
  for (uint32_t block = 0; block < num_blocks; ++block) {
    const PackedRows all = From(inputs, block).first;
    for (uint32_t p = 0; p < kBlockPanels; ++p) {
      if (block + 1 < num_blocks)
        Fetch(all.words + inputs.BlockStride() + p * quarter, quarter * sizeof(uint32_t));
      decode(BlockCodes(matrix, out_block * kBlockPanels + p, block, scratch.codes), scratch.weights);
      for (uint32_t run = 0; run < runs.runs; ++run) {
        const uint32_t first = runs.First(run), rows = runs.Length(run);
        table.multiply[operand][rows](scratch.weights,
                                      {.words = all.words + uint64_t{first} * BlockWords(inputs.operand),
                                       .scales = all.scales + first,
                                       .starts = all.starts + first},
                                      sums + p * kPanelChannels + uint64_t{first} * kBlockChannels,
                                      kBlockChannels);
      }
    }
  }
}

}  // namespace espalier::cpu
