// SPDX-License-Identifier: Apache-2.0
//
// Every function of every table of kernels (cpu/kernel_table.h) that this machine can run, against
// straightforward code. Whole layers and matrices are in cpu_engine_test.cc.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "base/half.h"
#include "cpu/kernel_table.h"
#include "moe/code_order.h"
#include "reference/activation.h"
#include "reference/codebook.h"
#include "reference/hadamard.h"
#include "reference/trellis.h"
#include "support/random_experts.h"
#include "support/table_call.h"

namespace espalier::cpu {
namespace {

using test::Random;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kEpsilon = 0x1p-24;  // half an ulp of 1

constexpr int kAllBits[] = {
#define ESPALIER_BITS(bits) bits,
#include <espalier/formats.def>
};
constexpr Operand kOperands[] = {Operand::kFloat,      Operand::kCutFloat, Operand::kFixed16,
                                 Operand::kBf16Halves, Operand::kInt16,    Operand::kInt16Apart,
                                 Operand::kInt8};

bool IsFloat(Operand operand) {
  return operand == Operand::kFloat || operand == Operand::kCutFloat || operand == Operand::kBf16Halves;
}

class Kernels : public testing::TestWithParam<const KernelTable*> {
 protected:
  const KernelTable& table() const { return *GetParam(); }
  // What its own `operand` may ask it for.
  bool Uses(Operand operand) const {
    for (const CpuMode mode : {CpuMode::kExact, CpuMode::kFast, CpuMode::kInt8}) {
      for (const CodebookInfo& codebook : AllCodebooks()) {
        for (uint32_t rows = 1; rows <= 64; ++rows) {
          if (table().operand(mode, codebook.codebook, rows) == operand) return true;
        }
      }
    }
    return false;
  }
};
INSTANTIATE_TEST_SUITE_P(Tables, Kernels, testing::ValuesIn(UsableTables().begin(), UsableTables().end()),
                         [](const auto& parameter) { return test::TableIdentifier(*parameter.param); });

// Whatever operand a table names, it has the functions for it.
TEST_P(Kernels, AreThereForEveryOperandThatTheTableNames) {
  EXPECT_GE(table().max_rows, 1u);
  EXPECT_LE(table().max_rows, kMaxTableRows);
  for (const CpuMode mode : {CpuMode::kExact, CpuMode::kFast, CpuMode::kInt8}) {
    for (const CodebookInfo& codebook : AllCodebooks()) {
      for (uint32_t rows = 1; rows <= 64; ++rows) {
        const Operand operand = table().operand(mode, codebook.codebook, rows);
        if (mode == CpuMode::kExact) {
          EXPECT_EQ(operand, Operand::kFloat);
        }
        for (const int bits : kAllBits) {
          SCOPED_TRACE(fmt::format("{} {} K {} {} rows", OperandName(operand), codebook.name, bits, rows));
          const int number = static_cast<int>(codebook.codebook);
          const bool fused = rows <= kMaxFusedRows && operand != Operand::kFloat &&
                             operand == table().operand(CpuMode::kFast, codebook.codebook, rows) &&
                             table().fused[number][bits][rows] != nullptr;
          if (fused) continue;
          EXPECT_NE(table().decode[static_cast<int>(operand)][number][bits], nullptr);
          for (uint32_t run = 1; run <= std::min(rows, table().max_rows); ++run)
            EXPECT_NE(table().multiply[static_cast<int>(operand)][run], nullptr);
        }
      }
    }
  }
}

// ---- Decoding --------------------------------------------------------------------------------------------

// A block of a panel, 128 input x 32 output channels, as both sides see it.
struct PanelBlock {
  std::vector<uint32_t> codes;
  std::vector<uint16_t> states;  // [input channel][32 output channels]
};

// Writes `state` into the stream so that weight `index` has it.
void PutState(std::byte* tile, int bits, int index, uint16_t state) {
  for (int i = 0; i < 16; ++i) {
    const int place = ((index + 1) * bits - 16 + i + 256 * bits) % (256 * bits);
    const uint32_t mask = 1u << (31 - place % 32);
    uint32_t word = TileWord(tile, place / 32) & ~mask;
    if ((state >> (15 - i) & 1) != 0) word |= mask;
    std::memcpy(tile + 4 * (place / 32), &word, sizeof(word));
  }
}

// Blocks that hold all 65,536 states between them, at random places, in streams that are random otherwise.
std::vector<PanelBlock> AllStates(int bits) {
  Random random(static_cast<uint64_t>(bits));
  std::vector<uint16_t> order(kNumStates);
  for (uint32_t i = 0; i < kNumStates; ++i) order[i] = static_cast<uint16_t>(i);
  for (uint32_t i = kNumStates - 1; i > 0; --i) std::swap(order[i], order[random.Below(i + 1)]);
  const int apart = (16 + bits - 1) / bits;  // symbols between states that share no bit
  std::vector<PanelBlock> blocks;
  for (size_t next = 0; next < order.size();) {
    PanelBlock block = {.codes = std::vector<uint32_t>(PanelStepBytes(bits) / 4 * kBlockSteps),
                        .states = std::vector<uint16_t>(kBlockChannels * kPanelChannels)};
    for (uint32_t step = 0; step < kBlockSteps; ++step) {
      std::vector<std::byte> tiles(2 * TileBytes(bits));
      for (std::byte& byte : tiles) byte = static_cast<std::byte>(random.Next());
      for (uint32_t t = 0; t < 2; ++t) {
        std::byte* tile = tiles.data() + t * TileBytes(bits);
        for (int i = 0; i + apart <= 256 && next < order.size(); i += apart)
          PutState(tile, bits, i, order[next++]);
        for (int i = 0; i < static_cast<int>(kTileWeights); ++i) {
          const TilePosition position = PositionOf(i);
          const uint32_t row = step * kTileChannels + static_cast<uint32_t>(position.row);
          const uint32_t column = t * kTileChannels + static_cast<uint32_t>(position.column);
          block.states[row * kPanelChannels + column] = TileState(tile, bits, i);
        }
      }
      PanelStepFromTiles(tiles.data(), bits,
                         reinterpret_cast<std::byte*>(block.codes.data()) + step * PanelStepBytes(bits));
    }
    blocks.push_back(std::move(block));
  }
  return blocks;
}

// The word that a state is scrambled into (docs/format.md, section 2).
uint32_t Scrambled(Codebook codebook, uint16_t state) {
  if (codebook == Codebook::k3Inst) return uint32_t{state} * 89226354u + 64248484u;
  return uint32_t{state} * (codebook == Codebook::kMcg ? 0xCBAC1FEDu : 0x83DCD12Du);
}

uint32_t ByteOf(uint32_t word, int i) { return word >> (8 * i) & 0xFF; }
uint32_t ByteSum(uint32_t word) {
  return ByteOf(word, 0) + ByteOf(word, 1) + ByteOf(word, 2) + ByteOf(word, 3);
}

// One of the two fp16 terms, its mantissa cut to the 7 bits of bf16.
float CutTerm(uint32_t word, int upper) {
  const uint32_t term = (word >> (16 * upper) & 0x8FFF) ^ 0x3B60;
  return Fp16ToFloat(static_cast<uint16_t>(term & ~7u));
}
uint32_t CutTermBits(uint32_t word, int upper) { return std::bit_cast<uint32_t>(CutTerm(word, upper)) >> 16; }

// Word `word` of output channel `channel`, by the words of cpu/kernel_table.h.
uint32_t ExpectedWord(Operand operand, Codebook codebook, const PanelBlock& block, uint32_t word,
                      uint32_t channel) {
  const auto state = [&](uint32_t input) { return block.states[input * kPanelChannels + channel]; };
  const auto scrambled = [&](uint32_t input) { return Scrambled(codebook, state(input)); };
  switch (operand) {
    case Operand::kFloat:
      return std::bit_cast<uint32_t>(Fp16ToFloat(CodebookValueFp16(codebook, state(word))));
    case Operand::kCutFloat:
      return std::bit_cast<uint32_t>(CutTerm(scrambled(word), 0) + CutTerm(scrambled(word), 1));
    case Operand::kFixed16: {
      const auto value = [&](uint32_t input) {
        const float sum = CutTerm(scrambled(input), 0) + CutTerm(scrambled(input), 1);
        return static_cast<uint32_t>(static_cast<int32_t>(sum * 1024)) & 0xFFFF;
      };
      return value(2 * word) | value(2 * word + 1) << 16;
    }
    case Operand::kBf16Halves:
      return CutTermBits(scrambled(word), 0) | CutTermBits(scrambled(word), 1) << 16;
    case Operand::kInt16:
      return ByteSum(scrambled(2 * word)) | ByteSum(scrambled(2 * word + 1)) << 16;
    case Operand::kInt16Apart: {
      const uint32_t first = word / 8 * kTileChannels + word % 8 / 4 * 8 + word % 4;
      return ByteSum(scrambled(first)) | ByteSum(scrambled(first + 4)) << 16;
    }
    case Operand::kInt8: {
      const uint32_t first = word / 4 * kTileChannels + word % 4 * 2;
      uint32_t bytes = 0;
      int place = 0;
      for (const uint32_t input : {first, first + 8, first + 1, first + 9})
        bytes |= ByteSum(scrambled(input)) / 4 << (8 * place++);
      return bytes;
    }
  }
  return 0;
}

TEST_P(Kernels, DecodeEveryStateAtEveryRate) {
  int num_decoders = 0;
  for (const int bits : kAllBits) {
    const std::vector<PanelBlock> blocks = AllStates(bits);
    std::vector<bool> seen(kNumStates);
    for (const PanelBlock& block : blocks) {
      for (const uint16_t state : block.states) seen[state] = true;
    }
    ASSERT_EQ(std::ranges::count(seen, true), kNumStates);
    for (const Operand operand : kOperands) {
      for (const CodebookInfo& codebook : AllCodebooks()) {
        const KernelTable::Decode decode =
            table().decode[static_cast<int>(operand)][static_cast<int>(codebook.codebook)][bits];
        if (decode == nullptr) continue;
        ++num_decoders;
        SCOPED_TRACE(fmt::format("{} {} K {}", OperandName(operand), codebook.name, bits));
        // What lies behind the last word must stay.
        std::vector<uint32_t> weights((BlockWords(operand) + 1) * kPanelChannels);
        for (const PanelBlock& block : blocks) {
          std::ranges::fill(weights, 0xA5A5A5A5u);
          decode(block.codes.data(), weights.data());
          for (uint32_t word = 0; word < BlockWords(operand); ++word) {
            for (uint32_t lane = 0; lane < kPanelChannels; ++lane) {
              ASSERT_EQ(weights[word * kPanelChannels + lane],
                        ExpectedWord(operand, codebook.codebook, block, word, LaneChannel(lane)))
                  << "word " << word << ", lane " << lane;
            }
          }
          for (size_t i = BlockWords(operand) * kPanelChannels; i < weights.size(); ++i)
            ASSERT_EQ(weights[i], 0xA5A5A5A5u);
        }
      }
    }
  }
  EXPECT_GE(num_decoders, 8 * 3);  // fp32 of every codebook
}

// ---- Rows as operands ------------------------------------------------------------------------------------

std::vector<float> RandomValues(Random& random, double scale = 1) {
  std::vector<float> values(kBlockChannels);
  for (float& value : values) value = static_cast<float>(random.Normal() * scale);
  return values;
}

std::vector<uint16_t> RandomHalves(Random& random) {
  std::vector<uint16_t> halves(kBlockChannels);
  for (uint16_t& half : halves) half = DoubleToFp16(random.Normal());
  halves[3] = 0;
  halves[77] = 0x8000;
  halves[90] = 0x8001;  // the smallest subnormal there is, negative
  halves[127] = 0x03FF;
  return halves;
}

bool SameBits(float a, float b) { return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); }

void ExpectSameBits(std::span<const float> expected, std::span<const float> actual) {
  for (size_t i = 0; i < expected.size(); ++i)
    ASSERT_TRUE(SameBits(expected[i], actual[i])) << i << ": " << expected[i] << " and " << actual[i];
}

TEST_P(Kernels, RotateAddsInTheOrderOfTheReference) {
  Random random(1);
  for (const double scale : {1.0, 1e-30, 1e30}) {
    for (const bool with_suh : {true, false}) {
      const std::vector<float> x = RandomValues(random, scale);
      const std::vector<uint16_t> suh = RandomHalves(random);
      std::vector<float> expected = x;
      for (uint32_t i = 0; with_suh && i < kBlockChannels; ++i) expected[i] *= Fp16ToFloat(suh[i]);
      Hadamard128(expected.data());
      std::vector<float> rotated(kBlockChannels, kNan);
      table().rotate(x.data(), with_suh ? suh.data() : nullptr, rotated.data());
      ExpectSameBits(expected, rotated);
      std::vector<float> in_place = x;
      table().rotate(in_place.data(), with_suh ? suh.data() : nullptr, in_place.data());
      ExpectSameBits(expected, in_place);
    }
  }
}

// Every entry of a Hadamard matrix is a sign: what is not finite spreads over its block.
TEST_P(Kernels, RotateSpreadsNan) {
  Random random(2);
  for (const float odd : {kNan, kInfinity}) {
    std::vector<float> x = RandomValues(random);
    x[17] = odd;
    table().rotate(x.data(), nullptr, x.data());
    for (const float value : x) ASSERT_FALSE(std::isfinite(value));
  }
}

struct IntegerOperand {
  int32_t limit;
  int32_t middle;
  double unit;
};

// Scales and middles as cpu/kernel_table.h has them: mul1 is 1774 * 2^-18 * (sum - 510.28), and what a cut
// takes from 3inst and mcg is made up for on average.
IntegerOperand IntegersOf(Operand operand) {
  if (operand == Operand::kFixed16) return {4095, 0, 1.0021 / 1024};
  if (operand == Operand::kInt8) return {127, 127, 4 * 1774.0 / (1 << 18)};
  return {32767, 510, 1774.0 / (1 << 18)};
}

struct Packed {
  std::vector<uint32_t> words;
  float scale = 0;
  int32_t start = 0;
};

Packed PackRow(const KernelTable& table, Operand operand, const std::vector<float>& values) {
  constexpr uint32_t kUntouched = 0xA5A5A5A5u;
  Packed packed = {.words = std::vector<uint32_t>(BlockWords(operand) + 16, kUntouched)};
  table.pack(operand, values.data(), packed.words.data(), &packed.scale, &packed.start);
  for (size_t i = BlockWords(operand); i < packed.words.size(); ++i)
    EXPECT_EQ(packed.words[i], kUntouched) << "behind the words of a row";
  packed.words.resize(BlockWords(operand));
  return packed;
}

int32_t Signed16(uint32_t word, int half) { return static_cast<int16_t>(word >> (16 * half)); }

// The activation that meets input channel c in each part of its word.
std::vector<int32_t> PackedIntegers(Operand operand, const std::vector<uint32_t>& words) {
  std::vector<int32_t> integers(kBlockChannels);
  for (uint32_t c = 0; c < kBlockChannels; ++c) {
    if (operand == Operand::kInt16Apart) {
      integers[c] = Signed16(words[c / 8 * 4 + c % 4], static_cast<int>(c / 4 % 2));
    } else if (operand == Operand::kInt8) {
      const uint32_t in_tile = c % kTileChannels, pair = in_tile % 8;
      const uint32_t word = c / kTileChannels * 4 + pair / 2;
      const uint32_t place = pair % 2 * 2 + in_tile / 8;  // 2i, 2i + 8, 2i + 1, 2i + 9
      integers[c] = static_cast<int8_t>(words[word] >> (8 * place));
    } else {
      integers[c] = Signed16(words[c / 2], static_cast<int>(c % 2));
    }
  }
  return integers;
}

void ExpectPackedIntegers(Operand operand, const std::vector<float>& values, const Packed& packed) {
  const IntegerOperand kind = IntegersOf(operand);
  float largest = 0;
  for (const float value : values) largest = std::max(largest, std::abs(value));
  const double step = double{largest} / kind.limit;
  EXPECT_NEAR(packed.scale, step * kind.unit, step * kind.unit * 4 * kEpsilon);
  const std::vector<int32_t> integers = PackedIntegers(operand, packed.words);
  int64_t sum = 0;
  int32_t most = 0;
  for (uint32_t c = 0; c < kBlockChannels; ++c) {
    most = std::max(most, std::abs(integers[c]));
    // Nearest, but for the rounding of value * factor.
    ASSERT_NEAR(integers[c] * step, values[c], step * (0.5 + kind.limit * 4 * kEpsilon)) << c;
    sum += integers[c];
  }
  EXPECT_EQ(packed.start, -kind.middle * sum);
  EXPECT_EQ(most, kind.limit) << "the largest value is not at the limit";
}

TEST_P(Kernels, PackEveryOperand) {
  Random random(3);
  int num_operands = 0;
  for (const Operand operand : kOperands) {
    if (!Uses(operand)) continue;
    ++num_operands;
    for (int repeat = 0; repeat < 10; ++repeat) {
      for (const double scale : {1.0, 1e-9, 1e9}) {
        SCOPED_TRACE(fmt::format("{}, about {}", OperandName(operand), scale));
        const std::vector<float> values = RandomValues(random, scale);
        const Packed packed = PackRow(table(), operand, values);
        if (operand == Operand::kFloat || operand == Operand::kCutFloat) {
          EXPECT_NEAR(packed.scale, operand == Operand::kFloat ? 1 : 1.0021, 1e-6);
          for (uint32_t c = 0; c < kBlockChannels; ++c)
            ASSERT_EQ(packed.words[c], std::bit_cast<uint32_t>(values[c])) << c;
        } else if (operand == Operand::kBf16Halves) {
          EXPECT_NEAR(packed.scale, 1.0021, 1e-6);
          for (uint32_t c = 0; c < kBlockChannels; ++c)
            ASSERT_EQ(packed.words[c], FloatToBf16(values[c]) * 0x10001u) << c;
        } else {
          ExpectPackedIntegers(operand, values, packed);
          continue;
        }
        EXPECT_EQ(packed.start, 0);
      }
    }
  }
  EXPECT_GE(num_operands, 1);
}

TEST_P(Kernels, PackZerosAndWhatIsNotFinite) {
  Random random(4);
  for (const Operand operand : kOperands) {
    if (!Uses(operand)) continue;
    SCOPED_TRACE(OperandName(operand));
    const Packed zeros = PackRow(table(), operand, std::vector<float>(kBlockChannels));
    EXPECT_EQ(std::ranges::count(zeros.words, 0u), BlockWords(operand));
    EXPECT_TRUE(std::isfinite(zeros.scale));
    EXPECT_EQ(zeros.start, 0);
    for (const float odd : {kNan, kInfinity, -kInfinity}) {
      std::vector<float> values = RandomValues(random);
      values[64] = odd;
      const Packed packed = PackRow(table(), operand, values);
      if (operand == Operand::kFloat || operand == Operand::kCutFloat) {
        EXPECT_EQ(packed.words[64], std::bit_cast<uint32_t>(odd));
      } else if (operand == Operand::kBf16Halves) {
        const float kept = Bf16ToFloat(static_cast<uint16_t>(packed.words[64]));
        EXPECT_TRUE(std::isnan(odd) ? std::isnan(kept) : kept == odd);
      } else {
        // No integer is NaN: the scale says it, and the integers are the same on every machine.
        EXPECT_TRUE(std::isnan(packed.scale));
        EXPECT_EQ(std::ranges::count(packed.words, 0u), BlockWords(operand));
        EXPECT_EQ(packed.start, 0);
      }
    }
  }
}

// ---- Products --------------------------------------------------------------------------------------------

// What words of weights and of a row come to, in double.
double DotWords(Operand operand, const uint32_t* weights, const std::vector<uint32_t>& row, uint32_t lane,
                int32_t start) {
  double sum = IsFloat(operand) ? 0 : start;
  for (uint32_t i = 0; i < row.size(); ++i) {
    const uint32_t w = weights[i * kPanelChannels + lane], a = row[i];
    if (operand == Operand::kFloat || operand == Operand::kCutFloat) {
      sum += double{std::bit_cast<float>(w)} * double{std::bit_cast<float>(a)};
    } else if (operand == Operand::kBf16Halves) {
      for (const int half : {0, 1}) {
        sum += double{Bf16ToFloat(static_cast<uint16_t>(w >> (16 * half)))} *
               double{Bf16ToFloat(static_cast<uint16_t>(a >> (16 * half)))};
      }
    } else if (operand == Operand::kInt8) {
      for (int i8 = 0; i8 < 4; ++i8)
        sum += static_cast<double>(ByteOf(w, i8)) * static_cast<double>(static_cast<int8_t>(a >> (8 * i8)));
    } else {
      for (const int half : {0, 1}) sum += Signed16(w, half) * double(Signed16(a, half));
    }
  }
  return sum;
}

// Rows of one block, packed as a product takes them.
struct RowsOfBlock {
  std::vector<uint32_t> words;  // [rows][words]
  std::vector<float> scales;
  std::vector<int32_t> starts;
  std::vector<std::vector<uint32_t>> rows;  // each alone

  RowsOfBlock(const KernelTable& table, Operand operand, const std::vector<std::vector<float>>& values)
      : words(BlockWords(operand) * values.size()), scales(values.size()), starts(values.size()) {
    for (size_t r = 0; r < values.size(); ++r) {
      uint32_t* row = words.data() + r * BlockWords(operand);
      table.pack(operand, values[r].data(), row, &scales[r], &starts[r]);
      rows.emplace_back(row, row + BlockWords(operand));
    }
  }
  PackedRows Packed() const {
    return {.words = words.data(), .scales = scales.data(), .starts = starts.data()};
  }
};

// The largest sums of products of 128 channels that an operand can meet do not overflow; fp32 sums of 128
// (256 for halves) terms of either sign are right to some of their last bits.
double ProductTolerance(Operand operand) { return IsFloat(operand) ? 64 * kEpsilon : 4 * kEpsilon; }

std::vector<std::vector<float>> RandomRows(Random& random, size_t rows, bool extreme) {
  std::vector<std::vector<float>> values;
  for (size_t r = 0; r < rows; ++r) {
    values.push_back(RandomValues(random));
    if (!extreme) continue;
    // Every integer at its limit, all of one sign or of alternating ones.
    for (uint32_t c = 0; c < kBlockChannels; ++c) values[r][c] = r % 2 == 0 || c % 2 == 0 ? 1.0f : -1.0f;
  }
  return values;
}

TEST_P(Kernels, MultiplyEveryNumberOfRows) {
  Random random(5);
  constexpr uint64_t kStride = kPanelChannels + 3;
  int num_products = 0;
  for (const Operand operand : kOperands) {
    for (const CodebookInfo& codebook : AllCodebooks()) {
      const KernelTable::Decode decode =
          table().decode[static_cast<int>(operand)][static_cast<int>(codebook.codebook)][4];
      if (decode == nullptr) continue;
      for (uint32_t rows = 1; rows <= table().max_rows; ++rows) {
        const KernelTable::Multiply multiply = table().multiply[static_cast<int>(operand)][rows];
        ASSERT_NE(multiply, nullptr) << OperandName(operand) << " " << rows;
        for (const bool extreme : {false, true}) {
          SCOPED_TRACE(fmt::format("{} {}, {} rows, {} values", OperandName(operand), codebook.name, rows,
                                   extreme ? "extreme" : "ordinary"));
          ++num_products;
          std::vector<uint32_t> codes(PanelStepBytes(4) / 4 * kBlockSteps);
          for (uint32_t& word : codes) word = static_cast<uint32_t>(random.Next());
          std::vector<uint32_t> weights(BlockWords(operand) * kPanelChannels);
          decode(codes.data(), weights.data());
          const RowsOfBlock inputs(table(), operand, RandomRows(random, rows, extreme));
          std::vector<float> sums(rows * kStride);
          for (float& sum : sums) sum = static_cast<float>(random.Normal());
          const std::vector<float> before = sums;
          multiply(weights.data(), inputs.Packed(), sums.data(), kStride);
          for (uint32_t r = 0; r < rows; ++r) {
            for (uint32_t lane = 0; lane < kStride; ++lane) {
              const size_t place = r * kStride + lane;
              if (lane >= kPanelChannels) {
                ASSERT_EQ(sums[place], before[place]) << "between the rows";
                continue;
              }
              const double product =
                  DotWords(operand, weights.data(), inputs.rows[r], lane, inputs.starts[r]);
              const double expected = before[place] + product * double{inputs.scales[r]};
              // About the length of a row of weights times that of a row of values.
              ASSERT_NEAR(sums[place], expected, ProductTolerance(operand) * (std::abs(expected) + 128))
                  << "row " << r << ", lane " << lane;
            }
          }
        }
      }
    }
  }
  EXPECT_GE(num_products, 2);
}

// Operand and kernel of every fused product that the table has for `rows` rows.
std::vector<std::pair<Operand, KernelTable::Fused>> FusedOf(const KernelTable& table, Codebook codebook,
                                                            int bits, uint32_t rows) {
  const int number = static_cast<int>(codebook);
  std::vector<std::pair<Operand, KernelTable::Fused>> found;
  if (const KernelTable::Fused fused = table.fused[number][bits][rows]; fused != nullptr)
    found.emplace_back(table.operand(CpuMode::kFast, codebook, rows), fused);
  if (const KernelTable::Fused fused = table.fused_float[number][bits][rows]; fused != nullptr)
    found.emplace_back(Operand::kFloat, fused);
  return found;
}

// Several blocks of codes and of input rows, the strides of the rows' words and scales with gaps between.
struct FusedCase {
  static constexpr uint32_t kBlocks = 3;

  FusedCase(const KernelTable& table, Operand operand, Codebook codebook, int bits, uint32_t num_rows,
            Random& random)
      : block_words(PanelStepBytes(bits) / 4 * kBlockSteps), codes(block_words * kBlocks), rows(num_rows) {
    for (uint32_t& word : codes) word = static_cast<uint32_t>(random.Next());
    expected.assign(rows * kPanelChannels, 0.0);
    for (uint32_t b = 0; b < kBlocks; ++b) {
      const RowsOfBlock inputs(table, operand, RandomRows(random, rows, b == 1));
      words.insert(words.end(), inputs.words.begin(), inputs.words.end());
      words.insert(words.end(), 7, 0xFFFFFFFFu);
      scales.insert(scales.end(), inputs.scales.begin(), inputs.scales.end());
      scales.push_back(kNan);
      starts.insert(starts.end(), inputs.starts.begin(), inputs.starts.end());
      starts.push_back(1 << 30);
      AddExpected(operand, codebook, bits, b, inputs);
    }
    word_stride = uint64_t{rows} * BlockWords(operand) + 7;
  }

  void AddExpected(Operand operand, Codebook codebook, int bits, uint32_t b, const RowsOfBlock& inputs) {
    PanelBlock block = {.codes = {}, .states = {}};
    block.states.resize(kBlockChannels * kPanelChannels);
    for (uint32_t step = 0; step < kBlockSteps; ++step) {
      for (uint32_t t = 0; t < 2; ++t) {
        std::byte tile[TileBytes(kMaxBits)];
        TileFromPanelStep(
            reinterpret_cast<const std::byte*>(codes.data() + b * block_words) + step * PanelStepBytes(bits),
            bits, t, tile);
        for (int i = 0; i < static_cast<int>(kTileWeights); ++i) {
          const TilePosition position = PositionOf(i);
          const uint32_t row = step * kTileChannels + static_cast<uint32_t>(position.row);
          const uint32_t column = t * kTileChannels + static_cast<uint32_t>(position.column);
          block.states[row * kPanelChannels + column] = TileState(tile, bits, i);
        }
      }
    }
    std::vector<uint32_t> weights(BlockWords(operand) * kPanelChannels);
    for (uint32_t i = 0; i < BlockWords(operand); ++i) {
      for (uint32_t lane = 0; lane < kPanelChannels; ++lane)
        weights[i * kPanelChannels + lane] = ExpectedWord(operand, codebook, block, i, LaneChannel(lane));
    }
    for (uint32_t r = 0; r < rows; ++r) {
      for (uint32_t lane = 0; lane < kPanelChannels; ++lane) {
        expected[r * kPanelChannels + lane] +=
            DotWords(operand, weights.data(), inputs.rows[r], lane, inputs.starts[r]) *
            double{inputs.scales[r]};
      }
    }
  }

  PackedInputs Inputs(uint32_t block) const {
    return {.first = {.words = words.data() + block * word_stride,
                      .scales = scales.data() + block * (rows + 1),
                      .starts = starts.data() + block * (rows + 1)},
            .word_stride = word_stride,
            .row_stride = rows + 1};
  }

  size_t block_words;
  std::vector<uint32_t> codes;
  uint32_t rows;
  std::vector<uint32_t> words;
  std::vector<float> scales;
  std::vector<int32_t> starts;
  std::vector<double> expected;  // [rows][32 lanes]
  uint64_t word_stride = 0;
};

// Decoding and multiplying at once gives what one after the other gives: to rounding, and in fp32, where mode
// exact may do either for the same row, bit for bit.
TEST_P(Kernels, FusedProductsOverSeveralBlocks) {
  Random random(6);
  constexpr uint64_t kStride = kPanelChannels + 5;
  int num_products = 0, num_float = 0;
  for (const CodebookInfo& codebook : AllCodebooks()) {
    for (const int bits : kAllBits) {
      for (uint32_t rows = 1; rows <= kMaxFusedRows; ++rows) {
        for (const auto& [operand, fused] : FusedOf(table(), codebook.codebook, bits, rows)) {
          SCOPED_TRACE(fmt::format("{} {} K {}, {} rows", OperandName(operand), codebook.name, bits, rows));
          const FusedCase example(table(), operand, codebook.codebook, bits, rows, random);
          std::vector<float> sums(rows * kStride, 0.5f);
          fused(example.codes.data(), FusedCase::kBlocks, example.Inputs(0), sums.data(), kStride);
          for (uint32_t r = 0; r < rows; ++r) {
            for (uint32_t lane = 0; lane < kStride; ++lane) {
              const float actual = sums[r * kStride + lane];
              if (lane >= kPanelChannels) {
                ASSERT_EQ(actual, 0.5f) << "between the rows";
              } else {
                const double sum = 0.5 + example.expected[r * kPanelChannels + lane];
                ASSERT_NEAR(actual, sum, ProductTolerance(operand) * (std::abs(sum) + 256))
                    << r << " " << lane;
              }
            }
          }
          ++num_products;
          if (operand != Operand::kFloat) continue;
          ++num_float;
          const int number = static_cast<int>(codebook.codebook);
          std::vector<float> apart(rows * kStride, 0.5f);
          std::vector<uint32_t> weights(BlockWords(operand) * kPanelChannels, 0xFFFFFFFFu);
          for (uint32_t b = 0; b < FusedCase::kBlocks; ++b) {
            table().decode[static_cast<int>(operand)][number][bits](
                example.codes.data() + b * example.block_words, weights.data());
            table().multiply[static_cast<int>(operand)][rows](weights.data(), example.Inputs(b).first,
                                                              apart.data(), kStride);
          }
          ASSERT_EQ(std::memcmp(sums.data(), apart.data(), apart.size() * sizeof(float)), 0);
        }
      }
    }
  }
  // The portable table has none: its registers do not hold them.
  EXPECT_EQ(num_products == 0, table().name == "portable");
  EXPECT_EQ(num_float, table().name == "portable" ? 0 : kNumCodebooks * kMaxBits);
}

// ---- Between and behind the products ---------------------------------------------------------------------

TEST_P(Kernels, FinishRotatesBackInTheOrderOfTheReference) {
  Random random(7);
  for (const bool with_bias : {false, true}) {
    for (const float offset : {0.0f, -1.75f}) {
      const std::vector<float> sums = RandomValues(random, 30);
      const std::vector<uint16_t> svh = RandomHalves(random), bias = RandomHalves(random);
      std::vector<float> expected(kBlockChannels);
      for (uint32_t i = 0; i < kBlockChannels; ++i) {
        const uint32_t channel = i / kPanelChannels * kPanelChannels + LaneChannel(i % kPanelChannels);
        expected[channel] = sums[i] + offset;
      }
      Hadamard128(expected.data());
      for (uint32_t i = 0; i < kBlockChannels; ++i) expected[i] *= Fp16ToFloat(svh[i]);
      std::vector<float> values(kBlockChannels, kNan);
      table().finish(sums.data(), offset, svh.data(), with_bias ? bias.data() : nullptr, values.data());
      if (!with_bias) {
        ExpectSameBits(expected, values);
        continue;
      }
      for (uint32_t i = 0; i < kBlockChannels; ++i) {  // a compiler may fuse svh and bias
        const double sum = double{expected[i]} + double{Fp16ToFloat(bias[i])};
        ASSERT_NEAR(values[i], sum, 2 * kEpsilon * (std::abs(sum) + std::abs(expected[i]))) << i;
      }
    }
  }
}

// How far fp32 may be off: a few ulp of the result, and where a tanh or a sum is close to 0 a few ulp of 1.
double ActivationTolerance(const Activation& activation, double gate, double up) {
  const double value = std::abs(Activate(activation, gate, up));
  double smaller = 0;
  if (activation.kind == ActivationKind::kGelu) smaller = std::abs(gate * up);
  if (activation.kind == ActivationKind::kSitu) {
    const double linear = activation.linear_beta > 0 ? activation.linear_beta : std::abs(up);
    const double shown = activation.linear_beta > 0
                             ? activation.linear_beta * std::abs(std::tanh(up / activation.linear_beta))
                             : std::abs(up);
    smaller =
        Sigmoid(gate) * activation.beta * (shown + linear * std::abs(std::tanh(gate / activation.beta)));
  }
  if (activation.kind == ActivationKind::kSwigluOai)
    smaller = std::abs(gate) * Sigmoid(1.702 * gate) * (1 + std::abs(up));
  // A sigmoid ends at e^-87; the argument of an exponential is right to ulps of itself.
  const double exponent = std::min(std::abs(gate) * 1.702, 90.0);
  return (16 + 2 * exponent) * kEpsilon * value + 12 * kEpsilon * smaller +
         2e-38 * std::abs(gate) * (1 + std::abs(up)) + 1e-44;
}

std::vector<Activation> Activations() {
  std::vector<Activation> activations;
#define ESPALIER_ACTIVATION(enumerator, number, name, has_gate, num_parameters) \
  activations.push_back({.kind = ActivationKind::enumerator});
#include <espalier/formats.def>
  for (const double limit : {0.25, 7.0}) {
    for (const ActivationKind kind :
         {ActivationKind::kSilu, ActivationKind::kGelu, ActivationKind::kSwigluOai})
      activations.push_back({.kind = kind, .limit = limit});
  }
  activations.push_back({.kind = ActivationKind::kSitu, .beta = 0.5, .linear_beta = 0});
  activations.push_back({.kind = ActivationKind::kSitu, .beta = 0.5, .linear_beta = 0.75});
  return activations;
}

TEST_P(Kernels, ActivateEveryKind) {
  Random random(8);
  for (const Activation& activation : Activations()) {
    SCOPED_TRACE(ActivationText(activation));
    for (const double scale : {1e-20, 1e-3, 1.0, 8.0, 50.0, 1e4, 1e12}) {
      const std::vector<float> gate = RandomValues(random, scale), up = RandomValues(random, scale);
      std::vector<uint16_t> suh = RandomHalves(random);
      std::vector<float> values(kBlockChannels, kNan);
      const float largest = table().activate(activation, gate.data(), up.data(), suh.data(), values.data());
      float largest_value = 0;
      for (uint32_t i = 0; i < kBlockChannels; ++i) {
        const double factor = double{Fp16ToFloat(suh[i])};
        const double expected = Activate(activation, double{gate[i]}, double{up[i]}) * factor;
        const double tolerance =
            ActivationTolerance(activation, double{gate[i]}, double{up[i]}) * std::abs(factor) + 2e-45;
        ASSERT_NEAR(values[i], expected, tolerance) << "gate " << gate[i] << ", up " << up[i];
        largest_value = std::max(largest_value, std::abs(values[i]));
      }
      EXPECT_EQ(largest, largest_value);
    }
  }
}

TEST_P(Kernels, ActivateKeepsNanAndInfinityInTheirPlace) {
  Random random(9);
  const std::vector<uint16_t> suh(kBlockChannels, DoubleToFp16(-0.5));
  for (const Activation& activation : Activations()) {
    SCOPED_TRACE(ActivationText(activation));
    const std::vector<float> gate = RandomValues(random), up = RandomValues(random);
    std::vector<float> clean(kBlockChannels);
    table().activate(activation, gate.data(), up.data(), suh.data(), clean.data());
    for (const float odd : {kNan, -kNan, kInfinity, -kInfinity}) {
      for (const bool in_gate : {true, false}) {
        for (const uint32_t place : {0u, 7u, 8u, 100u, 127u}) {
          std::vector<float> odd_gate = gate, odd_up = up, values(kBlockChannels);
          (in_gate ? odd_gate : odd_up)[place] = odd;
          const float largest =
              table().activate(activation, odd_gate.data(), odd_up.data(), suh.data(), values.data());
          const double expected = Activate(activation, double{odd_gate[place]}, double{odd_up[place]}) * -0.5;
          for (uint32_t i = 0; i < kBlockChannels; ++i) {
            if (i == place) continue;
            ASSERT_TRUE(SameBits(values[i], clean[i])) << i;
          }
          SCOPED_TRACE(fmt::format("{} in the {}: {}, expected {}", odd, in_gate ? "gate" : "up",
                                   values[place], expected));
          if (std::isnan(odd)) {
            EXPECT_EQ(std::isnan(values[place]), std::isnan(expected));
          } else if (std::isfinite(expected)) {
            EXPECT_NEAR(values[place], expected, 1e-5 * (1 + std::abs(expected)));
          } else {
            // 0 times infinity in double may be e^-87 times infinity here.
            EXPECT_FALSE(std::isfinite(values[place]));
          }
          if (std::isnan(values[place])) {
            EXPECT_TRUE(std::isnan(largest));
          } else {
            EXPECT_GE(largest, std::abs(values[place]));
          }
        }
      }
    }
  }
}

TEST_P(Kernels, AccumulateRoundsOnceOrTwice) {
  Random random(10);
  for (const float weight : {0.0f, -0.375f, 1e-20f, 1e20f}) {
    const std::vector<float> values = RandomValues(random), before = RandomValues(random);
    std::vector<float> y = before;
    table().accumulate(weight, values.data(), y.data());
    for (uint32_t i = 0; i < kBlockChannels; ++i) {
      const double product = double{weight} * double{values[i]};
      const double sum = double{before[i]} + product;
      ASSERT_NEAR(y[i], sum, kEpsilon * (std::abs(sum) + 1.01 * std::abs(product))) << i;
    }
  }
  std::vector<float> values = RandomValues(random), y = RandomValues(random);
  const std::vector<float> before = y;
  values[5] = kNan;
  y[60] = kInfinity;
  table().accumulate(1, values.data(), y.data());
  EXPECT_TRUE(std::isnan(y[5]));
  EXPECT_EQ(y[60], kInfinity);
  for (uint32_t i = 0; i < kBlockChannels; ++i) {
    if (i == 5 || i == 60) continue;
    ASSERT_EQ(y[i], before[i] + values[i]) << i;
  }
}

}  // namespace
}  // namespace espalier::cpu
