// SPDX-License-Identifier: Apache-2.0
//
// The order of codes in a slab changes nothing but where they lie: same weights, same outputs, same hash.
#include "moe/code_order.h"

#include <espalier/moe.h>
#include <espalier/prepare.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "moe/device_memory.h"
#include "moe/matrix_view.h"
#include "moe/slab_order.h"
#include "support/checkpoint_writer.h"
#include "support/memory_file_system.h"
#include "support/random_experts.h"

namespace espalier {
namespace {

using test::MakeExperts;
using test::MakeLinear;
using ::testing::AllOf;
using testing::CheckpointFiles;
using ::testing::HasSubstr;
using testing::MemoryFileSystem;
using testing::ModelShape;

constexpr Device kGpu = {.type = DeviceType::kCuda, .index = 0};
constexpr CodeOrder kNative = CodeOrder::kNative;
constexpr CodeOrder kPanels = CodeOrder::kPanels;

constexpr int kAllBits[] = {
#define ESPALIER_BITS(bits) bits,
#include <espalier/formats.def>
};

// Every rate and codebook in one package.
test::MatrixFormat MixedFormat(uint32_t expert, Projection projection) {
  const uint32_t n = expert * 3 + static_cast<uint32_t>(projection);
  return {.bits = kAllBits[n % std::size(kAllBits)],
          .codebook = AllCodebooks()[n % AllCodebooks().size()].codebook};
}

uint32_t WordAt(const std::byte* codes, uint64_t index) {
  uint32_t word = 0;
  std::memcpy(&word, codes + 4 * index, sizeof(word));
  return word;
}

// Word by word from the shapes in formats.h: native [in/16][out/16][8 groups][bits] against panels
// [out/32][in/16][bits][2 tiles][8 groups].
void ExpectPermuted(const MatrixDesc& matrix, const std::byte* native, const std::byte* panels) {
  const uint64_t rows = matrix.in_channels / 16, columns = matrix.out_channels / 16, bits = matrix.bits;
  uint64_t seen = 0;
  for (uint64_t row = 0; row < rows; ++row) {
    for (uint64_t column = 0; column < columns; ++column) {
      for (uint64_t group = 0; group < 8; ++group) {
        for (uint64_t word = 0; word < bits; ++word) {
          const uint64_t from = ((row * columns + column) * 8 + group) * bits + word;
          const uint64_t to = (((column / 2 * rows + row) * bits + word) * 2 + column % 2) * 8 + group;
          ASSERT_EQ(WordAt(panels, to), WordAt(native, from)) << row << ", " << column << ", " << group;
          ++seen;
        }
      }
    }
  }
  ASSERT_EQ(seen * 4, matrix.code_bytes());
}

void ExpectVectors(const PreparedExperts& a, const PreparedExperts& b, uint64_t offset, uint32_t channels) {
  if (offset == kAbsentOffset) return;
  EXPECT_EQ(std::memcmp(a.slab() + offset, b.slab() + offset, channels * 2), 0) << offset;
}

void ExpectSameButForOrder(const PreparedExperts& native, const PreparedExperts& panels) {
  ASSERT_EQ(native.slab_bytes(), panels.slab_bytes());
  ASSERT_EQ(native.segments().size(), panels.segments().size());
  ASSERT_FALSE(native.segments().empty());
  for (size_t s = 0; s < native.segments().size(); ++s) {
    for (int p = 0; p < kNumProjections; ++p) {
      const MatrixDesc& a = native.segments()[s].matrices[p];
      const MatrixDesc& b = panels.segments()[s].matrices[p];
      if (!a.present()) continue;
      ASSERT_EQ(a.order, kNative);
      ASSERT_EQ(b.order, kPanels);
      ASSERT_EQ(a.codes_offset_bytes, b.codes_offset_bytes);
      ExpectPermuted(a, native.slab() + a.codes_offset_bytes, panels.slab() + b.codes_offset_bytes);
      ExpectVectors(native, panels, a.suh_offset_bytes, a.in_channels);
      ExpectVectors(native, panels, a.svh_offset_bytes, a.out_channels);
      ExpectVectors(native, panels, a.bias_offset_bytes, a.out_channels);
    }
  }
}

void ExpectSameOutputs(const PreparedExperts& a, const PreparedExperts& b) {
  test::MoeCall call = test::RandomCall(a, 5, 2, 3);
  EXPECT_EQ(test::RunCall(a, call, "cpu").bytes, test::RunCall(b, call, "cpu").bytes);
  call.output = Dtype::kF64;
  EXPECT_EQ(test::RunCall(a, call, "reference").bytes, test::RunCall(b, call, "reference").bytes);
}

// The helpers that executors use, each against the shapes and not against each other.
TEST(CodeOrder, StepsAndTilesFollowTheShapes) {
  test::Random random(1);
  for (const int bits : kAllBits) {
    const MatrixDesc matrix = {
        .codes_offset_bytes = 0, .in_channels = 384, .out_channels = 256, .bits = static_cast<uint8_t>(bits)};
    std::vector<std::byte> native(matrix.code_bytes()), panels(native.size()), back(native.size());
    for (std::byte& byte : native) byte = static_cast<std::byte>(random.Below(256));
    for (const uint64_t rows : {uint64_t{24}, uint64_t{1}, uint64_t{7}}) {  // in all, and in parts
      std::fill(panels.begin(), panels.end(), std::byte{0});
      std::fill(back.begin(), back.end(), std::byte{0});
      for (uint64_t row = 0; row < 24; row += rows) {
        const uint64_t count = std::min(rows, 24 - row), first_byte = row * TileRowBytes(matrix);
        PanelsFromRows(matrix, row, count, native.data() + first_byte, panels.data());
      }
      ExpectPermuted(matrix, native.data(), panels.data());
      for (uint64_t row = 0; row < 24; row += rows) {
        const uint64_t count = std::min(rows, 24 - row), first_byte = row * TileRowBytes(matrix);
        RowsFromPanels(matrix, row, count, panels.data(), back.data() + first_byte);
      }
      EXPECT_EQ(back, native) << "K " << bits << ", " << rows << " rows";
    }
    MatrixView view = {.codes = panels.data(), .in_channels = 384, .out_channels = 256, .bits = bits};
    view.order = kPanels;
    TileWords words;
    for (uint32_t tile = 0; tile < 24 * 16; ++tile) {
      const std::byte* found = view.Tile(tile / 16, tile % 16, words);
      ASSERT_EQ(std::memcmp(found, native.data() + tile * TileBytes(bits), TileBytes(bits)), 0) << tile;
    }
  }
}

TEST(CodeOrder, MadeExpertsAreTheSameInBoth) {
  test::ExpertsSpec spec = {.experts = 3,
                            .hidden_channels = 256,
                            .segments = {{.channels = 384}, {.channels = 128}},
                            .format = MixedFormat};
  const PreparedExperts native = MakeExperts(spec);
  spec.order = kPanels;
  const PreparedExperts panels = MakeExperts(spec);
  ExpectSameButForOrder(native, panels);
  ExpectSameOutputs(native, panels);
}

TEST(CodeOrder, MatricesDecodeAndRunTheSame) {
  test::Random random(2);
  std::vector<float> x(3 * 384);
  for (float& value : x) value = static_cast<float>(random.Normal());
  for (const int bits : kAllBits) {
    for (const CodebookInfo& info : AllCodebooks()) {
      const test::MatrixFormat format = {.bits = bits, .codebook = info.codebook};
      const PreparedLinear native = MakeLinear(384, 256, 0, 0, format, 5);
      const PreparedLinear panels = MakeLinear(384, 256, 0, 0, format, 5, kPanels);
      ASSERT_NE(std::memcmp(native.slab(), panels.slab(), native.slab_bytes()), 0);
      EXPECT_EQ(DecodeMatrix(native, true).value(), DecodeMatrix(panels, true).value());
      EXPECT_EQ(DecodeMatrix(native, false).value(), DecodeMatrix(panels, false).value());
      for (const char* executor : {"cpu", "reference"})
        EXPECT_EQ(test::RunLinearCall(native, x, executor, Dtype::kF32),
                  test::RunLinearCall(panels, x, executor, Dtype::kF32))
            << info.name << " K " << bits;
    }
  }
}

struct Layout {
  std::string name;
  std::function<CheckpointFiles()> write;
};

ModelShape Shape() {
  ModelShape shape;
  shape.layers = {1};
  shape.experts = 3;
  shape.intermediate_channels = 512;
  shape.shared_hidden = true;
  shape.dense = false;
  return shape;
}

std::vector<Layout> Layouts() {
  ModelShape container = Shape();
  container.bits = 3;
  container.codebook = Codebook::kMcg;
  ModelShape legacy = Shape();
  legacy.shared_hidden = false;
  legacy.unit_signs = true;
  ModelShape biased = Shape();
  biased.shared_hidden = false;
  biased.bias = true;
  ModelShape sliced = Shape();
  sliced.slices = 2;
  sliced.bits_by_expert = true;
  return {{"stock", [biased] { return WriteStock(testing::RandomModel(biased, 1)); }},
          {"legacy_signs",
           [legacy] { return WriteStock(testing::RandomModel(legacy, 2), {.legacy_signs = true}); }},
          {"rank_sliced",
           [sliced] { return WriteRankSliced(testing::RandomModel(sliced, 3), {.shared_h = true}); }},
          {"r7", [] { return WriteR7(testing::RandomModel(Shape(), 4)); }},
          {"exl3_v1", [container] { return WriteExl3V1(testing::RandomModel(container, 5)); }}};
}

class LoadOrders : public ::testing::TestWithParam<Layout> {
 protected:
  void SetUp() override {
    for (const auto& [name, bytes] : GetParam().write().Serialize()) files_.Write("/model/" + name, bytes);
    checkpoint_.emplace(Checkpoint::Open("/model", {.file_system = &files_}).value());
  }

  MemoryFileSystem files_;
  std::optional<Checkpoint> checkpoint_;
};
INSTANTIATE_TEST_SUITE_P(Layouts, LoadOrders, ::testing::ValuesIn(Layouts()),
                         [](const auto& parameter) { return parameter.param.name; });

TEST_P(LoadOrders, DifferInNothingElse) {
  const PreparedExperts native = LoadExperts(*checkpoint_, 0, {.hash = true, .order = kNative}).value();
  const PreparedExperts panels = LoadExperts(*checkpoint_, 0, {.hash = true, .order = kPanels}).value();
  ExpectSameButForOrder(native, panels);
  ExpectSameOutputs(native, panels);
  EXPECT_EQ(native.content_sha256().size(), 64u);
  EXPECT_EQ(native.content_sha256(), panels.content_sha256());
  const MatrixDesc& down = native.ExpertSegments(1)[0].down();
  EXPECT_EQ(DecodeMatrix(test::LinearOf(native, down), false).value(),
            DecodeMatrix(test::LinearOf(panels, panels.ExpertSegments(1)[0].down()), false).value());
}

TEST_P(LoadOrders, SharesAtAnyStagingDoNot) {
  const ExtentPlan plan = ExtentPlan::Create(*checkpoint_, {.tp = 2}).value();
  for (int rank = 0; rank < 2; ++rank) {
    const PreparedExperts native = LoadExperts(*checkpoint_, plan, 0, rank, {.order = kNative}).value();
    for (const uint64_t staging : {uint64_t{1}, uint64_t{64} << 10, kDefaultStagingBytes}) {
      const LoadOptions options = {.order = kPanels, .staging_bytes = staging, .num_threads = 3};
      ExpectSameButForOrder(native, LoadExperts(*checkpoint_, plan, 0, rank, options).value());
    }
  }
}

TEST_P(LoadOrders, TheDeviceChoosesWhereNobodyDoes) {
  const ExtentPlan plan = ExtentPlan::Create(*checkpoint_, {.tp = 2}).value();
  const auto order_of = [](const ExpertsTable& table) { return table.segments()[0].up().order; };
  EXPECT_EQ(order_of(LoadExperts(*checkpoint_, 0)->table()), kPanels);
  EXPECT_EQ(order_of(SizeExperts(*checkpoint_, plan, 0, 0)->table), kPanels);
  EXPECT_EQ(order_of(SizeExperts(*checkpoint_, plan, 0, 0, {.order = kNative})->table), kNative);
  EXPECT_EQ(order_of(SizeExperts(*checkpoint_, plan, 0, 0, {.device = kGpu})->table), kNative);
}

template <typename T>
void ExpectRefused(const Result<T>& result, const std::string& found) {
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code(), StatusCode::kUnsupported);
  EXPECT_THAT(result.error().message(), AllOf(HasSubstr(found), HasSubstr("legal: ")));
}

TEST_P(LoadOrders, PanelsOnAGpuAndUnknownOrdersAreRefused) {
  const ExtentPlan plan = ExtentPlan::Create(*checkpoint_, {.tp = 2}).value();
  const std::pair<LoadOptions, std::string> cases[] = {
      {{.device = kGpu, .order = kPanels}, "codes in panels on cuda:0"},
      {{.device = kGpu, .order = static_cast<CodeOrder>(7)}, "codes in order number 7"},
      {{.order = static_cast<CodeOrder>(2)}, "codes in order number 2"}};
  const std::string matrix = checkpoint_->MatrixName(0, 1, Projection::kUp, 0);
  for (const auto& [options, found] : cases) {
    ExpectRefused(LoadExperts(*checkpoint_, 0, options), found);
    ExpectRefused(SizeExperts(*checkpoint_, plan, 0, 1, options), found);
    ExpectRefused(LoadLinear(*checkpoint_, matrix, options), found);
  }
}

TEST(CodeOrder, LinearsLoadInBoth) {
  ModelShape shape = Shape();
  shape.dense = true;
  MemoryFileSystem files;
  for (const auto& [name, bytes] : WriteStock(testing::RandomModel(shape, 7)).Serialize())
    files.Write("/model/" + name, bytes);
  const Checkpoint checkpoint = Checkpoint::Open("/model", {.file_system = &files}).value();
  ASSERT_FALSE(checkpoint.linears().empty());
  for (const LinearInfo& info : checkpoint.linears()) {
    const PreparedLinear native = LoadLinear(checkpoint, info.name, {.order = kNative}).value();
    const PreparedLinear panels = LoadLinear(checkpoint, info.name).value();
    EXPECT_EQ(native.matrix().order, kNative);
    EXPECT_EQ(panels.matrix().order, kPanels);
    ExpectPermuted(native.matrix(), native.slab() + native.matrix().codes_offset_bytes,
                   panels.slab() + panels.matrix().codes_offset_bytes);
    EXPECT_EQ(DecodeMatrix(native, false).value(), DecodeMatrix(panels, false).value());
  }
}

// As a framework holds it, codes at an odd address.
struct InMemory {
  testing::CheckpointModel model = testing::RandomModel(Shape(), 8);
  std::vector<std::vector<std::byte>> codes;
  ExpertsSource source;
  std::vector<SegmentWeights> weights;

  InMemory() {
    source.identity = "layer 1 of a framework";
    source.experts = 3;
    source.hidden_channels = static_cast<uint32_t>(model.hidden_channels);
    for (uint32_t expert = 0; expert < 3; ++expert) {
      SegmentSpec segment{.expert = expert, .valid_intermediate_channels = 512};
      SegmentWeights bytes;
      for (int p = 0; p < kNumProjections; ++p) {
        const testing::MatrixModel& matrix =
            model.layers[0].experts[expert].slices[0][static_cast<size_t>(p)];
        const auto words = std::as_bytes(std::span(matrix.codes));
        std::vector<std::byte>& odd = codes.emplace_back(words.size() + 1);
        std::memcpy(odd.data() + 1, words.data(), words.size());
        segment.matrices[p] = {.in_channels = static_cast<uint32_t>(matrix.in_channels),
                               .out_channels = static_cast<uint32_t>(matrix.out_channels),
                               .bits = matrix.bits,
                               .codebook = matrix.codebook};
        bytes.matrices[p] = {
            .codes = odd.data() + 1, .suh = matrix.suh.data(), .svh = matrix.svh.data(), .bias = nullptr};
      }
      source.segments.push_back(segment);
      weights.push_back(bytes);
    }
  }
};

TEST(CodeOrder, PreparedFromMemoryInBoth) {
  const InMemory memory;
  const auto prepare = [&](const LoadOptions& options) {
    return PrepareExperts(memory.source, memory.weights, options);
  };
  const PreparedExperts native = prepare({.hash = true, .order = kNative}).value();
  const PreparedExperts panels = prepare({.hash = true}).value();
  ExpectSameButForOrder(native, panels);
  ExpectSameOutputs(native, panels);
  EXPECT_EQ(native.content_sha256(), panels.content_sha256());
  EXPECT_EQ(std::memcmp(native.slab() + native.segments()[2].down().codes_offset_bytes,
                        memory.weights[2].matrices[2].codes, native.segments()[2].down().code_bytes()),
            0);
  EXPECT_EQ(PlanExperts(memory.source)->segments()[1].up().order, kPanels);
  EXPECT_EQ(PlanExperts(memory.source, {.device = kGpu})->segments()[1].up().order, kNative);
  ExpectRefused(prepare({.device = kGpu, .order = kPanels}), "codes in panels on cuda:0");
  ExpectRefused(prepare({.order = static_cast<CodeOrder>(2)}), "codes in order number 2");
}

TEST(CodeOrder, ACopyOnTheHostKeepsIt) {
  for (const CodeOrder order : {kNative, kPanels}) {
    const PreparedExperts experts =
        MakeExperts({.experts = 2, .hidden_channels = 128, .format = MixedFormat, .order = order});
    const PreparedExperts copy = ToDevice(experts, {}).value();
    EXPECT_EQ(copy.segments()[1].down().order, order);
    EXPECT_EQ(std::memcmp(copy.slab(), experts.slab(), experts.slab_bytes()), 0);
    ExpectSameOutputs(copy, experts);
    const PreparedLinear linear = MakeLinear(128, 256, 0, 0, {}, 1, order);
    EXPECT_EQ(ToDevice(linear, {})->matrix().order, order);
  }
}

// Slabs that are said to be on a GPU.
TEST(CodeOrder, PackagesOnAGpuAreNative) {
  const auto claimed = [](uint64_t size_bytes) {
    return DeviceBuffer::Adopt(kGpu, nullptr, size_bytes, [](std::byte*) {});
  };
  const PreparedExperts experts = MakeExperts({.experts = 2, .hidden_channels = 128, .order = kPanels});
  const Result<PreparedExperts> placed =
      PreparedExperts::Create(experts.table(), claimed(experts.slab_bytes()));
  ExpectRefused(placed, "expert 0, gate: codes in panels on cuda:0");
  const PreparedLinear linear = MakeLinear(128, 128, 0, 0, {}, 1, kPanels);
  ExpectRefused(PreparedLinear::Create(linear.matrix(), 0, 0, claimed(linear.slab_bytes()), "a linear"),
                "a linear: codes in panels on cuda:0");
  MatrixDesc unknown = linear.matrix();
  unknown.order = static_cast<CodeOrder>(9);
  ExpectRefused(
      PreparedLinear::Create(unknown, 0, 0, HostBuffer::Create(linear.slab_bytes()).value(), "a linear"),
      "a linear: codes in order number 9");
}

std::vector<std::byte> Native(const PreparedExperts& experts, uint64_t window_bytes) {
  std::vector<MatrixDesc> matrices;
  for (const SegmentDesc& segment : experts.segments())
    matrices.insert(matrices.end(), std::begin(segment.matrices), std::end(segment.matrices));
  DeviceBuffer target = DeviceBuffer::Create({}, experts.slab_bytes()).value();
  std::memset(target.data(), 0x5A, target.size_bytes());
  const Result<void> copied =
      CopyToNative(matrices, {experts.slab(), experts.slab_bytes()}, window_bytes, target);
  EXPECT_TRUE(copied) << copied.error().message();
  return {target.data(), target.data() + target.size_bytes()};
}

// What a GPU gets, with a host in its place.
TEST(CopyToNative, GivesTheNativeSlabThroughAnyWindow) {
  test::ExpertsSpec spec = {.experts = 3,
                            .hidden_channels = 256,
                            .activation = {.kind = ActivationKind::kRelu2},  // with absent gates
                            .segments = {{.channels = 384}},
                            .format = MixedFormat};
  const PreparedExperts native = MakeExperts(spec);
  spec.order = kPanels;
  const PreparedExperts panels = MakeExperts(spec);
  const std::vector<std::byte> expected(native.slab(), native.slab() + native.slab_bytes());
  for (const uint64_t window : {uint64_t{1}, uint64_t{5000}, uint64_t{4} << 20}) {
    EXPECT_EQ(Native(panels, window), expected) << window;
    EXPECT_EQ(Native(native, window), expected) << window;
  }
}

TEST(CopyToNative, TakesSharedCodesAndRefusesOverlapsInPanels) {
  const PreparedLinear native = MakeLinear(128, 256, 0, 0, {}, 1);
  const PreparedLinear linear = MakeLinear(128, 256, 0, 0, {}, 1, kPanels);
  const std::span<const std::byte> slab(linear.slab(), linear.slab_bytes());
  DeviceBuffer target = DeviceBuffer::Create({}, linear.slab_bytes()).value();
  MatrixDesc matrices[] = {linear.matrix(), linear.matrix()};
  ASSERT_TRUE(CopyToNative(matrices, slab, 4096, target));
  EXPECT_EQ(std::memcmp(target.data(), native.slab(), native.slab_bytes()), 0);
  matrices[1].out_channels = 128;
  const Result<void> refused = CopyToNative(matrices, slab, 4096, target);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), StatusCode::kGeometry);
  EXPECT_THAT(refused.error().message(), HasSubstr("overlap"));
  for (MatrixDesc& matrix : matrices) matrix.order = kNative;
  EXPECT_TRUE(CopyToNative(matrices, slab, 4096, target));
  EXPECT_EQ(std::memcmp(target.data(), linear.slab(), linear.slab_bytes()), 0);
}

}  // namespace
}  // namespace espalier
