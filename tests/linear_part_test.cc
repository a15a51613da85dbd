// SPDX-License-Identifier: Apache-2.0
//
// Parts of a matrix: what a rank of an attention projection or of the head loads is the matrix' own bytes,
// runs to its share of the result, and costs no other byte of the file.
#include <espalier/backend.h>
#include <espalier/experts.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "support/checkpoint_writer.h"
#include "support/memory_file_system.h"
#include "support/random_experts.h"
#include "support/require.h"

namespace espalier {
namespace {

using test::Require;
using testing::CheckpointModel;
using ::testing::HasSubstr;
using testing::MatrixModel;
using testing::MemoryFileSystem;
using testing::ModelShape;
using testing::RandomModel;

constexpr uint64_t kIn = 512, kOut = 384;

// W [512][384] with a bias, K bits.
MatrixModel RandomMatrix(int bits, Codebook codebook, bool unit_signs = false) {
  const ModelShape shape{.layers = {1},
                         .experts = 1,
                         .hidden_channels = kOut,
                         .intermediate_channels = kIn,
                         .bits = bits,
                         .codebook = codebook,
                         .unit_signs = unit_signs,
                         .bias = true,
                         .dense = false};
  return RandomModel(shape, static_cast<uint64_t>(bits)).layers[0].experts[0].slices[0][2];
}

std::string NameOf(int bits, Codebook codebook) {
  return fmt::format("model.layers.0.self_attn.k{}_{}", bits, CodebookName(codebook));
}

MatrixModel Cut(const MatrixModel& matrix, const LinearExtent& extent) {
  const uint64_t in = extent.in_channels != 0 ? extent.in_channels : matrix.in_channels - extent.first_in;
  const uint64_t out =
      extent.out_channels != 0 ? extent.out_channels : matrix.out_channels - extent.first_out;
  return CutOutputs(CutInputs(matrix, extent.first_in, in), extent.first_out, out);
}

const LinearExtent kExtents[] = {
    {},
    {.in_channels = 128},
    {.first_in = 128, .in_channels = 256},
    {.first_in = 384},
    {.out_channels = 256},
    {.first_out = 128, .out_channels = 128},
    {.first_out = 256},
    {.in_channels = 256, .out_channels = 128},
    {.first_in = 256, .in_channels = 128, .first_out = 128, .out_channels = 256},
    {.in_channels = kIn, .out_channels = kOut},
};

std::string TextOf(const LinearExtent& extent) {
  return fmt::format("in [{}, +{}), out [{}, +{})", extent.first_in, extent.in_channels, extent.first_out,
                     extent.out_channels);
}

template <typename T>
std::vector<T> SlabArray(const PreparedLinear& linear, uint64_t offset, uint64_t count) {
  std::vector<T> values(count);
  std::memcpy(values.data(), linear.slab() + offset, count * sizeof(T));
  return values;
}

void ExpectBytes(const PreparedLinear& linear, const MatrixModel& expected) {
  const MatrixDesc& matrix = linear.matrix();
  ASSERT_EQ(matrix.in_channels, expected.in_channels);
  ASSERT_EQ(matrix.out_channels, expected.out_channels);
  ASSERT_EQ(matrix.bits, expected.bits);
  EXPECT_EQ(matrix.codebook, expected.codebook);
  EXPECT_EQ(SlabArray<uint16_t>(linear, matrix.codes_offset_bytes, expected.codes.size()), expected.codes);
  EXPECT_EQ(SlabArray<uint16_t>(linear, matrix.suh_offset_bytes, matrix.in_channels), expected.suh);
  EXPECT_EQ(SlabArray<uint16_t>(linear, matrix.svh_offset_bytes, matrix.out_channels), expected.svh);
  ASSERT_EQ(matrix.bias_offset_bytes == kAbsentOffset, expected.bias.empty());
  if (!expected.bias.empty()) {
    EXPECT_EQ(SlabArray<uint16_t>(linear, matrix.bias_offset_bytes, matrix.out_channels), expected.bias);
  }
}

class LinearPart : public ::testing::Test {
 protected:
  void SetUp() override {
    CheckpointModel model = RandomModel({.layers = {1}, .experts = 1, .dense = false}, 1);
    for (int bits = kMinBits; bits <= kMaxBits; ++bits) {
      for (const CodebookInfo& info : AllCodebooks())
        model.linears.push_back({NameOf(bits, info.codebook), RandomMatrix(bits, info.codebook)});
    }
    Write("/model", WriteStock(model));
  }

  void Write(const std::string& folder, const testing::CheckpointFiles& files) {
    for (const auto& [name, bytes] : files.Serialize()) files_.Write(folder + "/" + name, bytes);
    checkpoint_.emplace(Require(Checkpoint::Open(folder, {.file_system = &files_})));
  }

  PreparedLinear Load(const std::string& name, const LinearExtent& extent, LoadOptions options = {}) {
    return Require(LoadLinear(*checkpoint_, name, extent, options));
  }

  MemoryFileSystem files_;
  std::optional<Checkpoint> checkpoint_;
};

TEST_F(LinearPart, HasTheBytesOfTheMatrix) {
  for (int bits = kMinBits; bits <= kMaxBits; ++bits) {
    for (const CodebookInfo& info : AllCodebooks()) {
      const MatrixModel matrix = RandomMatrix(bits, info.codebook);
      for (const LinearExtent& extent : kExtents) {
        SCOPED_TRACE(fmt::format("{} K {}: {}", info.name, bits, TextOf(extent)));
        ExpectBytes(Load(NameOf(bits, info.codebook), extent, {.order = CodeOrder::kNative}),
                    Cut(matrix, extent));
      }
    }
  }
}

// In panels too: the order is one of the part, not of the whole.
TEST_F(LinearPart, HasTheWeightsOfTheMatrixInEitherOrder) {
  for (const int bits : {1, 3, 8}) {
    const std::string name = NameOf(bits, Codebook::kMul1);
    const std::vector<float> whole = Require(DecodeMatrix(Load(name, {}), true));
    for (const LinearExtent& extent : kExtents) {
      for (const CodeOrder order : {CodeOrder::kNative, CodeOrder::kPanels}) {
        SCOPED_TRACE(fmt::format("K {}: {}", bits, TextOf(extent)));
        const PreparedLinear part = Load(name, extent, {.order = order});
        const std::vector<float> weights = Require(DecodeMatrix(part, true));
        const uint64_t out = part.matrix().out_channels;
        ASSERT_EQ(weights.size(), part.matrix().in_channels * out);
        for (uint64_t i = 0; i < part.matrix().in_channels; ++i) {
          const float* row = whole.data() + (extent.first_in + i) * kOut + extent.first_out;
          ASSERT_EQ(std::memcmp(row, weights.data() + i * out, out * sizeof(float)), 0) << "row " << i;
        }
      }
    }
  }
}

// Bits of parts that stand side by side are those of the whole; parts that add up round once more each.
TEST_F(LinearPart, RunsToItsShareOfTheResult) {
  constexpr uint64_t kTokens = 5;
  test::Random random(3);
  std::vector<float> x(kTokens * kIn);
  for (float& value : x) value = static_cast<float>(random.Normal());
  for (const std::string executor : {"reference", "cpu", "cpu_fast", "cpu_int8"}) {
    // Twice the gate of the mode: the whole is off by as much as the sum.
    const double bound = executor == "reference"  ? 1e-7
                         : executor == "cpu"      ? 4e-6
                         : executor == "cpu_fast" ? 1.2e-2
                                                  : 5e-2;
    for (int bits = kMinBits; bits <= kMaxBits; ++bits) {
      const std::string name = NameOf(bits, AllCodebooks()[static_cast<size_t>(bits % 3)].codebook);
      SCOPED_TRACE(executor + " " + name);
      const std::vector<double> whole = test::RunLinearCall(Load(name, {}), x, executor, Dtype::kF32);
      for (const uint64_t first : {0, 128, 256}) {
        const LinearExtent extent{.first_out = first, .out_channels = 128};
        const std::vector<double> part = test::RunLinearCall(Load(name, extent), x, executor, Dtype::kF32);
        for (uint64_t t = 0; t < kTokens; ++t) {
          for (uint64_t c = 0; c < 128; ++c)
            ASSERT_EQ(part[t * 128 + c], whole[t * kOut + first + c]) << t << ", " << first + c;
        }
      }
      std::vector<double> sum(whole.size());
      for (const auto& [first, channels] : {std::pair<uint64_t, uint64_t>{0, 128}, {128, 256}, {384, 0}}) {
        const PreparedLinear linear = Load(name, {.first_in = first, .in_channels = channels});
        std::vector<float> columns;
        for (uint64_t t = 0; t < kTokens; ++t) {
          const auto row = x.begin() + static_cast<ptrdiff_t>(t * kIn + first);
          columns.insert(columns.end(), row, row + linear.in_channels());
        }
        const std::vector<double> part = test::RunLinearCall(linear, columns, executor, Dtype::kF32);
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
      }
      EXPECT_LE(test::Compare(whole, sum).rel_l2, bound);
      EXPECT_GE(test::Compare(whole, sum).cosine, 1 - bound);
    }
  }
}

TEST_F(LinearPart, ReadsNothingElse) {
  constexpr uint64_t kMarkerBytes = 4;
  const std::string name = NameOf(5, Codebook::kMcg);
  for (const CodeOrder order : {CodeOrder::kNative, CodeOrder::kPanels}) {
    for (const LinearExtent& extent : kExtents) {
      SCOPED_TRACE(TextOf(extent));
      const uint64_t before = files_.bytes_read();
      const MatrixDesc matrix = Load(name, extent, {.order = order}).matrix();
      const uint64_t bias = extent.first_in == 0 ? matrix.out_channels : 0;
      EXPECT_EQ(files_.bytes_read() - before,
                matrix.code_bytes() + 2 * (matrix.in_channels + matrix.out_channels + bias) + kMarkerBytes);
    }
  }
}

TEST_F(LinearPart, WidthsOfTheModelAreThoseOfThePart) {
  const std::string name = NameOf(4, Codebook::kMcg);
  const LinearExtent extent{.first_in = 384, .first_out = 256};
  const PreparedLinear part = Load(name, extent, {.in_channels = 100, .out_channels = 60});
  EXPECT_EQ(part.in_channels(), 100u);
  EXPECT_EQ(part.out_channels(), 60u);
  EXPECT_EQ(part.matrix().in_channels, 128u);
  LoadOptions wide;
  wide.in_channels = 129;
  EXPECT_EQ(LoadLinear(*checkpoint_, name, extent, wide).error().code(), StatusCode::kGeometry);
}

TEST_F(LinearPart, RefusesWhatIsOffTheGridOrTheMatrix) {
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
  constexpr uint64_t kMostOnGrid = kMost - 127;
  const std::string name = NameOf(2, Codebook::kMul1);
  int refused = 0;
  const auto expect = [&](uint64_t first, uint64_t channels) {
    const std::string found = fmt::format("[{}, +{}), legal: multiples of 128 within ", first, channels);
    const LinearExtent in{.first_in = first, .in_channels = channels};
    const LinearExtent out{.first_out = first, .out_channels = channels};
    for (const auto& [extent, side, stored] :
         {std::tuple(in, "input channels ", kIn), {out, "output channels ", kOut}}) {
      const Result<PreparedLinear> part = LoadLinear(*checkpoint_, name, extent);
      ASSERT_FALSE(part) << TextOf(extent);
      EXPECT_EQ(part.error().code(), StatusCode::kGeometry);
      EXPECT_THAT(part.error().message(),
                  HasSubstr(fmt::format("{}: found {}{}{}", name, side, found, stored)));
      ++refused;
    }
  };
  const uint64_t before = files_.bytes_read();
  for (const auto& [first, channels] : std::vector<std::pair<uint64_t, uint64_t>>{{1, 0},
                                                                                  {64, 128},
                                                                                  {0, 64},
                                                                                  {0, 129},
                                                                                  {128, 1},
                                                                                  {0, 640},
                                                                                  {256, 384},
                                                                                  {512, 0},
                                                                                  {512, 128},
                                                                                  {kMostOnGrid, 0},
                                                                                  {kMostOnGrid, 128},
                                                                                  {kMostOnGrid, 256},
                                                                                  {128, kMostOnGrid},
                                                                                  {256, kMost - 255},
                                                                                  {kMost, kMost}})
    expect(first, channels);
  EXPECT_EQ(refused, 30);
  EXPECT_EQ(files_.bytes_read() - before, 4u * 30) << "more than markers was read";
  EXPECT_EQ(LoadLinear(*checkpoint_, "nothing", LinearExtent{}).error().code(), StatusCode::kUsage);
}

TEST_F(LinearPart, CutsSignBits) {
  CheckpointModel model = RandomModel({.layers = {1}, .experts = 1, .unit_signs = true, .dense = false}, 1);
  MatrixModel matrix = RandomMatrix(3, Codebook::kMcg, true);
  model.linears.push_back({"lm_head", matrix});
  Write("/signs", WriteStock(model, {.legacy_signs = true}));
  for (const LinearExtent& extent : kExtents) {
    SCOPED_TRACE(TextOf(extent));
    ExpectBytes(Load("lm_head", extent, {.order = CodeOrder::kNative}), Cut(matrix, extent));
  }
}

// By its name a matrix of an expert is cut like any other, also where a file holds it in pieces.
TEST_F(LinearPart, CutsRoutedMatricesOfEveryLayout) {
  const ModelShape shape{.layers = {1},
                         .experts = 2,
                         .hidden_channels = kOut,
                         .intermediate_channels = kIn,
                         .bits = 3,
                         .codebook = Codebook::kMcg,
                         .bits_by_expert = true,
                         .shared_hidden = true,
                         .dense = false};
  const CheckpointModel model = RandomModel(shape, 4);
  for (const bool container : {false, true}) {
    Write(container ? "/container" : "/stock", container ? WriteExl3V1(model) : WriteStock(model));
    for (const LinearExtent& extent :
         {LinearExtent{}, {.first_in = 128, .in_channels = 128, .first_out = 256, .out_channels = 128}}) {
      for (int p = 0; p < kNumProjections; ++p) {
        SCOPED_TRACE(fmt::format("{} {}: {}", checkpoint_->layout_name(), p, TextOf(extent)));
        const std::string name = checkpoint_->MatrixName(0, 1, static_cast<Projection>(p), 0);
        ExpectBytes(Load(name, extent, {.order = CodeOrder::kNative}),
                    Cut(model.layers[0].experts[1].slices[0][p], extent));
      }
    }
  }
}

}  // namespace
}  // namespace espalier
