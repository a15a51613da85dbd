// SPDX-License-Identifier: Apache-2.0
//
// Up to kGroupRows rows times 128 output channels of one matrix: the unit of work of FC1, FC2 and linears.
// The weights of a group are decoded once.
#ifndef ESPALIER_SRC_CPU_GROUP_PRODUCT_H_
#define ESPALIER_SRC_CPU_GROUP_PRODUCT_H_

#include <cstdint>

#include "cpu/kernel_table.h"
#include "moe/code_order.h"
#include "moe/matrix_view.h"

namespace espalier::cpu {

// Rows that share one decoding. Their inputs stay in the second-level cache up to 6144 channels.
inline constexpr uint32_t kGroupRows = 64;

// A group is multiplied in runs of rows whose sums fit into registers. They are as equal as can be; the first
// ones are the longer ones.
struct RowRuns {
  uint32_t rows = 0;
  uint32_t runs = 0;

  RowRuns(uint32_t num_rows, uint32_t max_rows)
      : rows(num_rows), runs((num_rows + max_rows - 1) / max_rows) {}
  uint32_t First(uint32_t run) const {
    const uint32_t longer = rows % runs;
    return run * (rows / runs) + (run < longer ? run : longer);
  }
  uint32_t Length(uint32_t run) const { return First(run + 1) - First(run); }
};

// Packed rows of a group: words [block][rows][BlockWords], the others [block][rows].
struct GroupInputs {
  Operand operand = Operand::kFloat;
  uint32_t rows = 0;
  uint32_t* words = nullptr;
  float* scales = nullptr;
  int32_t* starts = nullptr;

  uint64_t BlockStride() const { return uint64_t{rows} * BlockWords(operand); }
};

// Packs `values` (128 rotated channels) as block `block` of row `row`.
void PackRow(const KernelTable& table, const GroupInputs& inputs, uint32_t row, uint64_t block,
             const float* values);

// What the sums of a row lack (KernelTable::finish).
float SumOffset(const GroupInputs& inputs, uint32_t row, uint64_t num_blocks);

// Scratch of one thread.
struct ProductScratch {
  alignas(64) uint32_t weights[kBlockChannels * kPanelChannels];
  // Steps of a matrix in native order.
  alignas(64) std::byte codes[kBlockSteps * 2 * 32 * kMaxBits];
};

// Fetches what MultiplyGroup begins with. The decoders and products fetch ahead only inside a matrix; a first
// block that was not fetched costs more than a microsecond.
void FetchFirstBlock(const MatrixView& matrix, uint32_t out_block, const GroupInputs& inputs);

// sums[row][128] = inputs * W[input blocks first_block .., 128 * out_block ..], lanes in panel order.
void MultiplyGroup(const KernelTable& table, const MatrixView& matrix, uint32_t out_block,
                   uint32_t num_blocks, const GroupInputs& inputs, ProductScratch& scratch, float* sums);

}  // namespace espalier::cpu

#endif  // ESPALIER_SRC_CPU_GROUP_PRODUCT_H_
