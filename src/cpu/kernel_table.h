// SPDX-License-Identifier: Apache-2.0
//
// The inner loops of the cpu executor, one table per instruction set. All work on blocks of 128 channels, the
// unit of the rotations, and on panels of 32 output channels (CodeOrder::kPanels).
//
// Operands. Weights are decoded into vectors whose 32-bit lanes are output channels; a lane holds what one
// multiply instruction takes of that channel: one fp32 value, two 16-bit or four 8-bit ones. The activations
// that meet them are packed so that one 32-bit word, broadcast, is the other factor:
//   kFloat       value                                                         fp32 throughout
//   kCutFloat    the two fp16 terms of one value (3inst, mcg), each cut to bf16, added in fp32          fp32
//   kFixed16     values of input channels 2i, 2i+1 (3inst, mcg) in units of 2^-10, their two fp16 terms cut
//   to
//                bf16; activations of 13 bits
//   kBf16Halves  the two fp16 terms of one value (3inst, mcg), each cut to bf16; the activation twice
//   kInt16       byte sums (mul1) of input channels 2i, 2i+1, exact; activations of 16 bits
//   kInt16Apart  the same of input channels c and c + 4, c being 0 to 3 and 8 to 11 of 16
//   kInt8        byte sums / 4 of four channels in the order 2i, 2i+8, 2i+1, 2i+9 of 16; activations of 8
//   bits
// Integer activations of one row and block share a scale.
#ifndef ESPALIER_SRC_CPU_KERNEL_TABLE_H_
#define ESPALIER_SRC_CPU_KERNEL_TABLE_H_

#include <espalier/formats.h>
#include <espalier/moe.h>

#include <cstdint>
#include <span>
#include <string_view>

#include "moe/code_order.h"

namespace espalier::cpu {

inline constexpr uint32_t kBlockChannels = kHadamardChannels;
inline constexpr uint32_t kBlockSteps = kBlockChannels / kTileChannels;
inline constexpr uint32_t kBlockPanels = kBlockChannels / kPanelChannels;

enum class Operand : uint8_t { kFloat, kCutFloat, kFixed16, kBf16Halves, kInt16, kInt16Apart, kInt8 };
inline constexpr int kNumOperands = 7;
std::string_view OperandName(
    Operand operand);  // "fp32", "fp32-cut", "fixed16", "bf16-halves", "int16", "int16-apart", "int8"

inline constexpr int kNumCodebooks = 3;
inline constexpr uint32_t kMaxTableRows = 12;
inline constexpr uint32_t kMaxFusedRows = 6;

// 32-bit words of one row and block. Inlined whatever the compiler thinks: the tables use it (kernel_list.h).
__attribute__((always_inline)) constexpr uint32_t BlockWords(Operand operand) {
  switch (operand) {
    case Operand::kFixed16:
    case Operand::kInt16:
    case Operand::kInt16Apart:
      return kBlockChannels / 2;
    case Operand::kInt8:
      return kBlockChannels / 4;
    case Operand::kFloat:
    case Operand::kCutFloat:
    case Operand::kBf16Halves:
      return kBlockChannels;
  }
  return 0;
}

// Rows [rows] of one block as a multiplication takes them.
struct PackedRows {
  const uint32_t* words = nullptr;  // [rows][BlockWords]
  const float* scales = nullptr;    // [rows]: what a sum is multiplied by
  const int32_t* starts = nullptr;  // [rows]: where integer sums start: minus the middle of the weights
};

// Block b of `rows` rows lies word_stride words and row_stride scales behind block b - 1.
struct PackedInputs {
  PackedRows first = {};
  uint64_t word_stride = 0;
  uint64_t row_stride = 0;
};

struct KernelTable {
  std::string_view name;
  // How the weights of a matrix meet `rows` rows.
  Operand (*operand)(CpuMode mode, Codebook codebook, uint32_t rows) = nullptr;
  uint32_t max_rows = 0;  // of multiply

  // 8 steps of a panel (128 input x 32 output channels) to vectors [BlockWords][32 lanes].
  using Decode = void (*)(const uint32_t* codes, uint32_t* weights);
  Decode decode[kNumOperands][kNumCodebooks][kMaxBits + 1] = {};
  // sums[row][0..31] += scale * (row * weights): lanes in the order of LaneChannel. Rows of sums are
  // `sums_stride` floats apart.
  using Multiply = void (*)(const uint32_t* weights, const PackedRows& rows, float* sums,
                            uint64_t sums_stride);
  Multiply multiply[kNumOperands][kMaxTableRows + 1] = {};
  // Both in registers, over `num_blocks` blocks of one panel, for the operand that mode fast has for so many
  // rows, and for kFloat; null where that is not faster. In kFloat the sums are those of decode and multiply,
  // bit for bit: a row of mode exact does not depend on how many others there are.
  using Fused = void (*)(const uint32_t* codes, uint32_t num_blocks, const PackedInputs& inputs, float* sums,
                         uint64_t sums_stride);
  Fused fused[kNumCodebooks][kMaxBits + 1][kMaxFusedRows + 1] = {};
  Fused fused_float[kNumCodebooks][kMaxBits + 1][kMaxFusedRows + 1] = {};

  // H128 of x * suh, suh may be null (all 1). In place is allowed. The same additions in the same order as
  // the reference (docs/format.md, section 3.2).
  void (*rotate)(const float* x, const uint16_t* suh, float* rotated) = nullptr;
  // One row and block as an operand, BlockWords long.
  void (*pack)(Operand operand, const float* values, uint32_t* words, float* scale, int32_t* start) = nullptr;
  // values = H128(sums + offset) * svh + bias. Sums in lane order, values in channel order. bias may be null.
  void (*finish)(const float* sums, float offset, const uint16_t* svh, const uint16_t* bias,
                 float* values) = nullptr;
  // values = act(gate, up) * suh; returns the largest magnitude, NaN if there is one.
  float (*activate)(const Activation& activation, const float* gate, const float* up, const uint16_t* suh,
                    float* values) = nullptr;
  // y += weight * values
  void (*accumulate)(float weight, const float* values, float* y) = nullptr;
};

// What integer sums leave out: an operand's sums have to be raised by this times sum(scale * start).
constexpr float OffsetFactor(Operand operand) {
  // mul1 is 1774 * 2^-18 * (sum - 905216 / 1774); int8 keeps sum / 4, cut, which lacks 1.5 / 4 on average.
  if (operand == Operand::kInt8) return static_cast<float>(((905216.0 / 1774 - 1.5) / 4 - 127) / 127);
  if (operand == Operand::kInt16 || operand == Operand::kInt16Apart)
    return static_cast<float>((905216.0 / 1774 - 510) / 510);
  return 0;
}

// Output channel of a panel that a lane of the sums stands for: lanes are [half][tile][8].
constexpr uint32_t LaneChannel(uint32_t lane) {
  return (lane >> 3 & 1) * kTileChannels + (lane >> 4) * (kTileChannels / 2) + (lane & 7);
}

// The tables this machine can run, best first; the last one runs everywhere.
std::span<const KernelTable* const> UsableTables();
// The first of them, or the one that ESPALIER_CPU_ISA names. Error: kUsage with the names there are.
Result<const KernelTable*> ChooseTable();

}  // namespace espalier::cpu

#endif  // ESPALIER_SRC_CPU_KERNEL_TABLE_H_
