// SPDX-License-Identifier: Apache-2.0
//
// The cpu executor on every table of kernels that this machine can run, against the reference. What holds
// for any executor is in backend_conformance_test.cc, which runs the table that the process chose.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/half.h"
#include "cpu/kernel_table.h"
#include "support/random_experts.h"
#include "support/table_call.h"

namespace espalier {
namespace {

using cpu::KernelTable;
using test::Compare;
using test::ExpertsSpec;
using test::MakeExperts;
using test::MakeLinear;
using test::MatrixFormat;
using test::MoeCall;
using test::Random;
using test::RandomCall;
using test::RunOnTable;
using test::TableOptions;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

constexpr int kAllBits[] = {
#define ESPALIER_BITS(bits) bits,
#include <espalier/formats.def>
};
constexpr CpuMode kModes[] = {CpuMode::kExact, CpuMode::kFast, CpuMode::kInt8};
constexpr CodeOrder kOrders[] = {CodeOrder::kNative, CodeOrder::kPanels};
// Every number of rows that fused products take (up to 6) and one above; runs of 2, 6 and 12 rows end evenly
// or not; modes fast and int8 take other operands from the third row on.
constexpr uint64_t kRows[] = {1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 33};
constexpr uint64_t kMostRows = 33;

struct Gate {
  double max_rel_l2;
  double min_cosine;
};

Gate GateOf(CpuMode mode, bool only_mul1) {
  if (mode == CpuMode::kExact) return {2e-6, 1 - 1e-10};
  if (mode == CpuMode::kInt8) return {2.5e-2, 0.9997};
  return only_mul1 ? Gate{2e-3, 0.999998} : Gate{6e-3, 0.99998};
}

std::vector<double> Doubles(std::span<const float> values) { return {values.begin(), values.end()}; }

// The first rows of a call: what a row gives does not depend on the others.
MoeCall FirstRows(const MoeCall& call, uint64_t rows) {
  MoeCall first = call;
  first.num_tokens = rows;
  first.x.resize(call.x.size() / call.num_tokens * rows);
  first.ids.resize(call.top_k * rows);
  first.weights.resize(call.top_k * rows);
  return first;
}

std::vector<double> Reference(const PreparedExperts& experts, MoeCall call) {
  call.output = Dtype::kF64;
  call.num_threads = 2;
  return test::RunCall(experts, call, "reference").values;
}

void ExpectWithin(const Gate& gate, std::span<const double> expected, const std::vector<float>& actual) {
  const test::Difference difference = Compare(expected.first(actual.size()), Doubles(actual));
  EXPECT_LE(difference.rel_l2, gate.max_rel_l2);
  EXPECT_GE(difference.cosine, gate.min_cosine);
}

std::vector<float> RandomRows(uint64_t tokens, uint32_t channels, uint64_t seed) {
  Random random(seed);
  std::vector<float> x(tokens * channels);
  for (float& value : x) value = static_cast<float>(random.Normal());
  return x;
}

class OnEveryTable : public testing::TestWithParam<const KernelTable*> {
 protected:
  const KernelTable& table() const { return *GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Tables, OnEveryTable,
                         testing::ValuesIn(cpu::UsableTables().begin(), cpu::UsableTables().end()),
                         [](const auto& parameter) { return test::TableIdentifier(*parameter.param); });

TEST(UsableTables, EndWithThePortableOneAndHaveNamesOfTheirOwn) {
  std::vector<std::string_view> names;
  for (const KernelTable* table : cpu::UsableTables()) names.push_back(table->name);
  ASSERT_FALSE(names.empty());
  EXPECT_EQ(names.back(), "portable");
  std::ranges::sort(names);
  EXPECT_EQ(std::ranges::adjacent_find(names), names.end());
}

// ---- Formats ---------------------------------------------------------------------------------------------

MatrixFormat FormatOf(const CodebookInfo& codebook, int bits) {
  return {.bits = bits, .codebook = codebook.codebook};
}

TEST_P(OnEveryTable, EveryFormatModeAndNumberOfRowsOfAnExpert) {
  for (const CodebookInfo& codebook : AllCodebooks()) {
    for (const int bits : kAllBits) {
      const MatrixFormat format = FormatOf(codebook, bits);
      ExpertsSpec spec = {.hidden_channels = 256,
                          .activation = {},
                          .format = [format](uint32_t, Projection) { return format; },
                          .order = CodeOrder::kPanels,
                          .seed = static_cast<uint64_t>(bits)};
      const PreparedExperts panels = MakeExperts(spec);
      spec.order = CodeOrder::kNative;
      const PreparedExperts native = MakeExperts(spec);
      MoeCall call = RandomCall(panels, kMostRows, 1, 7);
      call.ids.assign(call.ids.size(), 0);
      const std::vector<double> expected = Reference(panels, call);
      for (const CpuMode mode : kModes) {
        const Gate gate = GateOf(mode, codebook.codebook == Codebook::kMul1);
        for (const uint64_t rows : kRows) {
          SCOPED_TRACE(fmt::format("{} K {}, {}, {} rows", codebook.name, bits, CpuModeName(mode), rows));
          const MoeCall first = FirstRows(call, rows);
          const std::vector<float> y = RunOnTable(table(), panels, first, {.mode = mode});
          ExpectWithin(gate, expected, y);
          EXPECT_EQ(RunOnTable(table(), native, first, {.mode = mode}), y)
              << "the order of the codes changed a bit";
        }
      }
    }
  }
}

TEST_P(OnEveryTable, EveryFormatModeAndNumberOfRowsOfALinear) {
  for (const CodebookInfo& codebook : AllCodebooks()) {
    for (const int bits : kAllBits) {
      const CodeOrder order = bits % 2 == 0 ? CodeOrder::kNative : CodeOrder::kPanels;
      const PreparedLinear linear = MakeLinear(384, 256, 0, 0, FormatOf(codebook, bits), 5, order);
      const std::vector<float> x = RandomRows(kMostRows, 384, 6);
      const std::vector<double> expected = test::RunLinearCall(linear, x, "reference", Dtype::kF64);
      for (const CpuMode mode : kModes) {
        for (const uint64_t rows : kRows) {
          SCOPED_TRACE(fmt::format("{} K {}, {}, {} rows", codebook.name, bits, CpuModeName(mode), rows));
          const std::vector<float> first(x.begin(), x.begin() + static_cast<ptrdiff_t>(rows * 384));
          ExpectWithin(GateOf(mode, codebook.codebook == Codebook::kMul1), expected,
                       RunOnTable(table(), linear, first, {.mode = mode}));
        }
      }
    }
  }
}

// ---- Shapes ----------------------------------------------------------------------------------------------

// Every rate and codebook in one package, another pair for each expert and projection.
MatrixFormat MixedFormat(uint32_t expert, Projection projection) {
  const uint32_t n = expert * 3 + static_cast<uint32_t>(projection);
  return {.bits = kAllBits[(n * 5 + expert) % std::size(kAllBits)],
          .codebook = AllCodebooks()[n % AllCodebooks().size()].codebook};
}

struct Shape {
  uint32_t hidden, intermediate, experts, top_k;
  std::vector<uint64_t> rows;  // ascending
};

ExpertsSpec SpecOf(const Shape& shape, CodeOrder order) {
  return {.experts = shape.experts,
          .hidden_channels = shape.hidden,
          .activation = {},
          .segments = {{.channels = shape.intermediate}},
          .format = MixedFormat,
          .order = order,
          .seed = 11};
}

void CheckShape(const KernelTable& table, const Shape& shape) {
  const CodeOrder order = shape.hidden > shape.intermediate ? CodeOrder::kNative : CodeOrder::kPanels;
  const PreparedExperts experts = MakeExperts(SpecOf(shape, order));
  const MoeCall call = RandomCall(experts, shape.rows.back(), shape.top_k, 12);
  const std::vector<double> expected = Reference(experts, call);
  for (const uint64_t rows : shape.rows) {
    const MoeCall first = FirstRows(call, rows);
    for (const CpuMode mode : kModes) {
      SCOPED_TRACE(fmt::format("hidden {}, intermediate {}, {} experts, top-{}, {} rows, {}", shape.hidden,
                               shape.intermediate, shape.experts, shape.top_k, rows, CpuModeName(mode)));
      ExpectWithin(GateOf(mode, false), expected, RunOnTable(table, experts, first, {.mode = mode}));
    }
  }
}

TEST_P(OnEveryTable, EveryWidth) {
  for (const uint32_t hidden : {128, 384, 640}) {
    for (const uint32_t intermediate : {128, 384, 640})
      CheckShape(table(), {hidden, intermediate, 5, 2, {1, 2, 7, 33}});
  }
}

TEST_P(OnEveryTable, EveryNumberOfRowsUpTo33) {
  Shape shape = {128, 128, 5, 2, {}};
  for (uint64_t rows = 1; rows <= 33; ++rows) shape.rows.push_back(rows);
  CheckShape(table(), shape);
}

// All rows at one expert: groups of 64 rows, chunks of 512.
TEST_P(OnEveryTable, ManyRows) {
  CheckShape(table(), {128, 128, 1, 1, {63, 64, 65, 257, 1025}});
  CheckShape(table(), {128, 128, 5, 2, {257, 1025}});
  CheckShape(table(), {384, 128, 5, 2, {257}});
}

TEST_P(OnEveryTable, ManyExperts) {
  CheckShape(table(), {128, 128, 897, 8, {1, 33, 257}});
  CheckShape(table(), {128, 384, 60, 8, {1, 7, 33}});
  CheckShape(table(), {640, 128, 60, 4, {1, 13}});
  CheckShape(table(), {640, 640, 1, 1, {1, 3, 33}});
}

// The inputs of FC1 come as one of three types; every activation has its place between two products.
TEST_P(OnEveryTable, InputTypesAndActivations) {
  std::vector<Activation> activations;
#define ESPALIER_ACTIVATION(enumerator, number, name, has_gate, num_parameters) \
  activations.push_back({.kind = ActivationKind::enumerator});
#include <espalier/formats.def>
  activations.push_back({.kind = ActivationKind::kSwigluOai, .limit = 7});
  activations.push_back({.kind = ActivationKind::kSilu, .limit = 0.5});
  for (const Activation& activation : activations) {
    ExpertsSpec spec = SpecOf({128, 256, 3, 2, {}}, CodeOrder::kPanels);
    spec.activation = activation;
    const PreparedExperts experts = MakeExperts(spec);
    for (const Dtype input : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
      MoeCall call = RandomCall(experts, 9, 2, 5);
      call.input = input;
      const std::vector<double> expected = Reference(experts, call);
      for (const CpuMode mode : kModes) {
        SCOPED_TRACE(
            fmt::format("{}, {}, {}", ActivationText(activation), DtypeName(input), CpuModeName(mode)));
        ExpectWithin(GateOf(mode, false), expected, RunOnTable(table(), experts, call, {.mode = mode}));
      }
    }
  }
}

// ---- The same bits ---------------------------------------------------------------------------------------

template <typename Package, typename Input>
void ExpectSameBits(const KernelTable& table, const Package& package, const Input& input) {
  for (const CpuMode mode : kModes) {
    const std::vector<float> expected = RunOnTable(table, package, input, {.mode = mode});
    for (const int threads : {1, 2, 3, 7}) {
      for (const std::byte poison : {std::byte{0}, std::byte{0x7B}}) {
        const TableOptions options = {
            .mode = mode, .num_threads = threads, .max_tokens = 700, .poison = poison};
        EXPECT_EQ(RunOnTable(table, package, input, options), expected) << fmt::format(
            "{}, {} threads, memory of {:#x}", CpuModeName(mode), threads, std::to_integer<int>(poison));
      }
    }
  }
}

TEST_P(OnEveryTable, ThreadsRepeatsCapacityAndOldMemoryChangeNoBit) {
  for (const CodeOrder order : kOrders) {
    const PreparedExperts experts = MakeExperts(SpecOf({384, 256, 5, 3, {}}, order));
    for (const uint64_t rows : {1, 70}) {
      SCOPED_TRACE(fmt::format("{} rows", rows));
      ExpectSameBits(table(), experts, RandomCall(experts, rows, 3, 5));
    }
    const PreparedLinear linear = MakeLinear(256, 384, 0, 0, {.codebook = Codebook::kMul1}, 3, order);
    for (const uint64_t rows : {1, 70}) ExpectSameBits(table(), linear, RandomRows(rows, 256, 4));
  }
}

// ---- Odd values ------------------------------------------------------------------------------------------

// The package with its bytes changed.
PreparedExperts Changed(const PreparedExperts& experts,
                        const std::function<void(std::byte* slab, const SegmentDesc& segment)>& change) {
  HostBuffer slab = HostBuffer::Create(experts.slab_bytes()).value();
  std::memcpy(slab.data(), experts.slab(), experts.slab_bytes());
  std::vector<SegmentDesc> segments(experts.segments().begin(), experts.segments().end());
  for (const SegmentDesc& segment : segments) change(slab.data(), segment);
  return PreparedExperts::Create(experts.geometry(), std::move(segments), std::move(slab), "changed").value();
}

double NormOf(std::span<const double> values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

// All codes the same: matrices whose entries are equal, most of whose products cancel. Errors are measured
// against an ordinary matrix of the size.
TEST_P(OnEveryTable, CodesOfOneBit) {
  for (const CodebookInfo& codebook : AllCodebooks()) {
    for (const int bits : kAllBits) {
      const MatrixFormat format = FormatOf(codebook, bits);
      const PreparedExperts ordinary =
          MakeExperts({.hidden_channels = 256,
                       .activation = {.kind = ActivationKind::kSwigluOai, .limit = 7},
                       .format = [format](uint32_t, Projection) { return format; },
                       .order = CodeOrder::kPanels});
      MoeCall call = RandomCall(ordinary, 5, 1, 7);
      call.ids.assign(call.ids.size(), 0);
      const double ordinary_norm = NormOf(Reference(ordinary, call));
      for (const int byte : {0x00, 0xFF}) {
        const PreparedExperts experts =
            Changed(ordinary, [byte](std::byte* slab, const SegmentDesc& segment) {
              for (const MatrixDesc& matrix : segment.matrices)
                std::memset(slab + matrix.codes_offset_bytes, byte, matrix.code_bytes());
            });
        const std::vector<double> expected = Reference(experts, call);
        for (const CpuMode mode : kModes) {
          for (const uint64_t rows : {1, 5}) {
            SCOPED_TRACE(fmt::format("{} K {}, bytes of {:#x}, {}, {} rows", codebook.name, bits, byte,
                                     CpuModeName(mode), rows));
            const std::vector<float> y = RunOnTable(table(), experts, FirstRows(call, rows), {.mode = mode});
            std::vector<double> error = Doubles(y);
            for (size_t i = 0; i < error.size(); ++i) error[i] -= expected[i];
            // A cut that is wrong by as much on every weight does not average out: twice the gate, and more.
            const double gate = mode == CpuMode::kExact ? 2e-6 : mode == CpuMode::kFast ? 1.5e-2 : 5e-2;
            EXPECT_LE(NormOf(error), gate * std::max(ordinary_norm, NormOf(expected)));
          }
        }
      }
    }
  }
}

// Zeros of both signs and very different magnitudes among the vectors of a matrix; a whole block of zeros.
TEST_P(OnEveryTable, VectorsWithZerosAndLargeValues) {
  const PreparedExperts experts =
      Changed(MakeExperts(SpecOf({256, 256, 3, 1, {}}, CodeOrder::kPanels)),
              [](std::byte* slab, const SegmentDesc& segment) {
                for (const MatrixDesc& matrix : segment.matrices) {
                  uint16_t* suh = reinterpret_cast<uint16_t*>(slab + matrix.suh_offset_bytes);
                  uint16_t* svh = reinterpret_cast<uint16_t*>(slab + matrix.svh_offset_bytes);
                  for (uint32_t i = 0; i < 256; ++i) {
                    if (i >= 128 || i % 5 == 0) suh[i] = i % 2 == 0 ? 0 : 0x8000;
                    if (i % 7 == 0) svh[i] = 0x8000;
                    if (i % 11 == 0) svh[i] = DoubleToFp16(-30);
                  }
                }
              });
  for (const uint64_t rows : {1, 9}) {
    MoeCall call = RandomCall(experts, rows, 1, 3);
    for (int64_t& id : call.ids) id = 1;
    const std::vector<double> expected = Reference(experts, call);
    for (const CpuMode mode : kModes) {
      SCOPED_TRACE(fmt::format("{}, {} rows", CpuModeName(mode), rows));
      ExpectWithin(GateOf(mode, false), expected, RunOnTable(table(), experts, call, {.mode = mode}));
    }
  }
}

// act(g, u) beyond the range of fp32, of g and u within it: route weight and svh bring it back.
TEST_P(OnEveryTable, ActivationsBeyondFp32ComeBack) {
  const auto fill = [](std::byte* slab, uint64_t offset, double magnitude) {
    uint16_t* vector = reinterpret_cast<uint16_t*>(slab + offset);
    for (uint32_t i = 0; i < 128; ++i) vector[i] = DoubleToFp16(i % 3 == 0 ? -magnitude : magnitude);
  };
  const PreparedExperts experts = Changed(MakeExperts(SpecOf({128, 128, 1, 1, {}}, CodeOrder::kPanels)),
                                          [&](std::byte* slab, const SegmentDesc& segment) {
                                            for (const MatrixDesc& matrix : {segment.gate(), segment.up()}) {
                                              fill(slab, matrix.suh_offset_bytes, 60000);
                                              fill(slab, matrix.svh_offset_bytes, 60000);
                                            }
                                            fill(slab, segment.down().svh_offset_bytes, 1e-4);
                                          });
  MoeCall call = RandomCall(experts, 3, 1, 3);
  call.ids.assign(3, 0);
  for (double& value : call.x) value = std::remainder(value, 1.9) * 0x1p29;
  call.weights.assign(3, 1e-20f);
  const std::vector<double> expected = Reference(experts, call);
  for (const CpuMode mode : kModes) {
    SCOPED_TRACE(CpuModeName(mode));
    ExpectWithin(GateOf(mode, false), expected, RunOnTable(table(), experts, call, {.mode = mode}));
  }
}

TEST_P(OnEveryTable, NanInARowLeavesTheOthersBits) {
  const PreparedExperts experts = MakeExperts(SpecOf({256, 128, 3, 1, {}}, CodeOrder::kPanels));
  const PreparedLinear linears[] = {MakeLinear(256, 128, 0, 0, {.codebook = Codebook::kMul1}, 3),
                                    MakeLinear(256, 128, 0, 0, {.codebook = Codebook::kMcg}, 3)};
  const auto expect_others = [](const std::vector<float>& clean, const std::vector<float>& dirty,
                                uint64_t width, uint64_t row) {
    for (uint64_t i = 0; i < clean.size(); ++i) {
      if (i / width == row) {
        ASSERT_FALSE(std::isfinite(dirty[i])) << i;
      } else {
        ASSERT_EQ(dirty[i], clean[i]) << "row " << i / width;
      }
    }
  };
  for (const CpuMode mode : kModes) {
    for (const uint64_t rows : {2, 3, 15}) {
      for (const float odd : {kNan, -std::numeric_limits<float>::infinity()}) {
        SCOPED_TRACE(fmt::format("{}, {} rows, {}", CpuModeName(mode), rows, odd));
        for (const int64_t expert : {0, 1, 2}) {
          MoeCall call = RandomCall(experts, rows, 1, 5);
          call.ids.assign(rows, expert);
          const std::vector<float> clean = RunOnTable(table(), experts, call, {.mode = mode});
          call.x[(rows - 1) * 256 + 200] = odd;
          expect_others(clean, RunOnTable(table(), experts, call, {.mode = mode}), 256, rows - 1);
        }
        for (const PreparedLinear& linear : linears) {
          std::vector<float> x = RandomRows(rows, 256, 6);
          const std::vector<float> clean = RunOnTable(table(), linear, x, {.mode = mode});
          x[130] = odd;
          expect_others(clean, RunOnTable(table(), linear, x, {.mode = mode}), 128, 0);
        }
      }
    }
  }
}

}  // namespace
}  // namespace espalier
