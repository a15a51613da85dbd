// SPDX-License-Identifier: Apache-2.0
//
// Prepared packages: what they refuse, and that loading reads every byte to its place.
#include <espalier/moe.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/half.h"
#include "support/random_experts.h"

namespace espalier {
namespace {

using test::MakeExperts;
using test::SlabWriter;
using testing::HasSubstr;

const std::string kFixtures = std::string(ESPALIER_TEST_DATA) + "/fixtures/";

TEST(HostBuffer, IsAlignedMovableAndRefusesTheImpossible) {
  HostBuffer buffer = HostBuffer::Create(100).value();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 4096, 0u);
  EXPECT_EQ(buffer.size_bytes(), 100u);
  std::memset(buffer.data(), 1, 100);
  HostBuffer moved = std::move(buffer);
  EXPECT_EQ(moved.span()[99], std::byte{1});
  HostBuffer other = HostBuffer::Create(7).value();
  other = std::move(moved);
  EXPECT_EQ(other.size_bytes(), 100u);
  EXPECT_EQ(HostBuffer::Create(0).value().size_bytes(), 0u);
  for (const uint64_t size : {~uint64_t{0}, uint64_t{1} << 63, uint64_t{1} << 61}) {
    const Result<HostBuffer> huge = HostBuffer::Create(size);
    ASSERT_FALSE(huge) << size;
    EXPECT_EQ(huge.error().code(), StatusCode::kCapacity);
  }
}

// A legal package of two experts, to be spoilt in one place at a time.
struct Draft {
  MoeGeometry geometry = {};
  std::vector<SegmentDesc> segments = {};
  uint64_t slab_bytes = 0;

  Draft() {
    const PreparedExperts experts = MakeExperts({.experts = 2, .hidden_channels = 128});
    geometry = experts.geometry();
    segments.assign(experts.segments().begin(), experts.segments().end());
    slab_bytes = experts.slab_bytes();
  }
  Result<PreparedExperts> Create() const {
    return PreparedExperts::Create(geometry, segments, HostBuffer::Create(slab_bytes).value(), "the draft");
  }
};

struct Spoiler {
  const char* name;
  StatusCode code;
  std::function<void(Draft&)> spoil;
};

TEST(PreparedExperts, RefusesEveryInconsistency) {
  ASSERT_TRUE(Draft().Create());
  constexpr StatusCode kGeometry = StatusCode::kGeometry;
  constexpr StatusCode kUnsupported = StatusCode::kUnsupported;
  const Spoiler spoilers[] = {
      {"hidden 0", kGeometry, [](Draft& d) { d.geometry.hidden_channels = 0; }},
      {"hidden above stored", kGeometry, [](Draft& d) { d.geometry.hidden_channels = 129; }},
      {"stored off the grid", kGeometry, [](Draft& d) { d.geometry.stored_hidden_channels = 192; }},
      {"stored 0", kGeometry, [](Draft& d) { d.geometry.stored_hidden_channels = 0; }},
      {"too many experts", kGeometry, [](Draft& d) { d.geometry.experts = ~0u; }},
      {"scale", kGeometry,
       [](Draft& d) { d.geometry.output_scale = std::numeric_limits<double>::infinity(); }},
      {"expert out of range", kGeometry, [](Draft& d) { d.segments[1].expert = 2; }},
      {"experts out of order", kGeometry, [](Draft& d) { std::swap(d.segments[0], d.segments[1]); }},
      {"no gate", kGeometry, [](Draft& d) { d.segments[0].matrices[0] = {}; }},
      {"no up", kGeometry, [](Draft& d) { d.segments[0].matrices[1] = {}; }},
      {"no down", kGeometry, [](Draft& d) { d.segments[0].matrices[2] = {}; }},
      {"gate with relu2", kGeometry, [](Draft& d) { d.geometry.activation.kind = ActivationKind::kRelu2; }},
      {"limit with situ", kUnsupported,
       [](Draft& d) { d.geometry.activation = {.kind = ActivationKind::kSitu, .limit = 1}; }},
      {"beta 0", kGeometry,
       [](Draft& d) { d.geometry.activation = {.kind = ActivationKind::kSitu, .beta = 0}; }},
      {"limit NaN", kGeometry,
       [](Draft& d) { d.geometry.activation.limit = std::numeric_limits<double>::quiet_NaN(); }},
      {"unknown activation", kUnsupported,
       [](Draft& d) { d.geometry.activation.kind = static_cast<ActivationKind>(99); }},
      {"bits 0", kUnsupported, [](Draft& d) { d.segments[0].matrices[1].bits = 0; }},
      {"bits 9", kUnsupported, [](Draft& d) { d.segments[0].matrices[1].bits = 9; }},
      {"unknown codebook", kUnsupported,
       [](Draft& d) { d.segments[0].matrices[1].codebook = static_cast<Codebook>(77); }},
      {"unknown order", kUnsupported,
       [](Draft& d) { d.segments[0].matrices[1].order = static_cast<CodeOrder>(2); }},
      {"width 0", kGeometry, [](Draft& d) { d.segments[0].matrices[2].in_channels = 0; }},
      {"width off the grid", kGeometry, [](Draft& d) { d.segments[0].matrices[1].out_channels = 64; }},
      {"up wider than down", kGeometry, [](Draft& d) { d.segments[0].matrices[1].out_channels = 256; }},
      {"down to another hidden size", kGeometry,
       [](Draft& d) { d.segments[0].matrices[2].out_channels = 256; }},
      {"no suh", kGeometry, [](Draft& d) { d.segments[0].matrices[0].suh_offset_bytes = kAbsentOffset; }},
      {"no svh", kGeometry, [](Draft& d) { d.segments[0].matrices[2].svh_offset_bytes = kAbsentOffset; }},
      {"codes unaligned", kGeometry, [](Draft& d) { d.segments[0].matrices[0].codes_offset_bytes += 2; }},
      {"codes outside", kGeometry,
       [](Draft& d) { d.segments[1].matrices[2].codes_offset_bytes = d.slab_bytes / 64 * 64; }},
      {"offset near overflow", kGeometry,
       [](Draft& d) { d.segments[1].matrices[2].svh_offset_bytes = ~uint64_t{0} - 127; }},
      {"bias outside", kGeometry,
       [](Draft& d) { d.segments[1].matrices[2].bias_offset_bytes = d.slab_bytes / 64 * 64; }},
      {"valid channels", kGeometry, [](Draft& d) { d.segments[0].valid_intermediate_channels = 129; }},
  };
  for (const Spoiler& spoiler : spoilers) {
    Draft draft;
    spoiler.spoil(draft);
    const Result<PreparedExperts> experts = draft.Create();
    ASSERT_FALSE(experts) << spoiler.name;
    EXPECT_EQ(experts.error().code(), spoiler.code) << spoiler.name << ": " << experts.error().message();
    EXPECT_THAT(experts.error().message(), HasSubstr("the draft")) << spoiler.name;
  }
}

TEST(PreparedExperts, EmptyRanksAreLegal) {
  const MoeGeometry geometry = {
      .experts = 3, .hidden_channels = 100, .stored_hidden_channels = 128, .activation = {}};
  const PreparedExperts experts = PreparedExperts::Create(geometry, {}, HostBuffer(), "empty").value();
  EXPECT_TRUE(experts.ExpertSegments(2).empty());
  EXPECT_EQ(experts.max_intermediate_channels(), 0u);
  EXPECT_EQ(experts.code_bytes(), 0u);
  test::MoeCall call = test::RandomCall(experts, 3, 2, 1);
  for (const std::string executor : {"cpu", "reference"}) {
    EXPECT_THAT(test::RunCall(experts, call, executor).values, testing::Each(0.0));
  }
}

TEST(PreparedExperts, KnowsItsSegments) {
  const PreparedExperts experts =
      MakeExperts({.experts = 3, .hidden_channels = 128, .segments = {{.channels = 256}, {.channels = 128}}});
  EXPECT_EQ(experts.segments().size(), 6u);
  EXPECT_EQ(experts.max_segments_per_expert(), 2u);
  EXPECT_EQ(experts.max_intermediate_channels(), 256u);
  EXPECT_EQ(experts.code_bytes(), 3u * 3 * 128 * (256 + 128) * 3 / 8);
  ASSERT_EQ(experts.ExpertSegments(1).size(), 2u);
  EXPECT_EQ(experts.ExpertSegments(1)[0].expert, 1u);
  EXPECT_EQ(experts.ExpertSegments(1)[1].intermediate_channels(), 128u);
}

TEST(PreparedLinear, RefusesWiderThanStored) {
  const PreparedLinear linear = test::MakeLinear(256, 128, 200, 0, {}, 1);
  EXPECT_EQ(linear.in_channels(), 200u);
  EXPECT_EQ(linear.out_channels(), 128u);
  const auto create = [&](uint32_t in, uint32_t out) {
    HostBuffer slab = HostBuffer::Create(uint64_t{1} << 20).value();
    return PreparedLinear::Create(linear.matrix(), in, out, std::move(slab), "linear");
  };
  EXPECT_TRUE(create(256, 128));
  EXPECT_EQ(create(257, 0).error().code(), StatusCode::kGeometry);
  EXPECT_EQ(create(0, 129).error().code(), StatusCode::kGeometry);
}

Checkpoint OpenFixture(const std::string& name) { return Checkpoint::Open(kFixtures + name).value(); }

PreparedExperts LoadFixture(const std::string& name, const std::string& label,
                            const LoadOptions& options = {}) {
  const Checkpoint checkpoint = OpenFixture(name);
  Result<PreparedExperts> experts = LoadExperts(checkpoint, checkpoint.FindLayer(label).value(), options);
  if (!experts) throw std::runtime_error(experts.error().message());
  return *std::move(experts);
}

std::vector<std::byte> ReadWhole(const Checkpoint& checkpoint, const std::string& name) {
  const TensorInfo* tensor = checkpoint.FindTensor(name);
  if (tensor == nullptr) throw std::runtime_error(name + " is not there");
  std::vector<std::byte> bytes(tensor->size_bytes);
  if (!checkpoint.Read(*tensor, bytes)) throw std::runtime_error(name + " cannot be read");
  return bytes;
}

void ExpectBytes(const PreparedExperts& experts, uint64_t offset, const std::vector<std::byte>& expected,
                 const std::string& what) {
  ASSERT_NE(offset, kAbsentOffset) << what;
  ASSERT_LE(offset + expected.size(), experts.slab_bytes()) << what;
  EXPECT_EQ(std::memcmp(experts.slab() + offset, expected.data(), expected.size()), 0) << what;
}

TEST(LoadExperts, BytesAreThoseOfTheTensors) {
  const Checkpoint checkpoint = OpenFixture("stock-bias");
  const PreparedExperts experts = LoadFixture("stock-bias", "0", {.order = CodeOrder::kNative});
  size_t biases = 0;
  for (const SegmentDesc& segment : experts.segments()) {
    for (const Projection projection : {Projection::kGate, Projection::kUp, Projection::kDown}) {
      const MatrixDesc& matrix = segment.matrices[static_cast<int>(projection)];
      const std::string name = checkpoint.MatrixName(0, segment.expert, projection, 0);
      ExpectBytes(experts, matrix.codes_offset_bytes, ReadWhole(checkpoint, name + ".trellis"), name);
      ExpectBytes(experts, matrix.suh_offset_bytes, ReadWhole(checkpoint, name + ".suh"), name);
      ExpectBytes(experts, matrix.svh_offset_bytes, ReadWhole(checkpoint, name + ".svh"), name);
      if (checkpoint.FindTensor(name + ".bias") == nullptr) {
        EXPECT_EQ(matrix.bias_offset_bytes, kAbsentOffset) << name;
      } else {
        ExpectBytes(experts, matrix.bias_offset_bytes, ReadWhole(checkpoint, name + ".bias"), name);
        ++biases;
      }
    }
  }
  EXPECT_EQ(biases, 2u * experts.geometry().experts);
  EXPECT_THAT(experts.identity(), HasSubstr("layer 0 of "));
}

TEST(LoadExperts, LegacySignsBecomePlusMinusOne) {
  const Checkpoint checkpoint = OpenFixture("stock-legacy-signs");
  const PreparedExperts experts = LoadFixture("stock-legacy-signs", "0");
  const MatrixDesc& gate = experts.segments()[0].gate();
  const std::vector<std::byte> bits =
      ReadWhole(checkpoint, checkpoint.MatrixName(0, 0, Projection::kGate, 0) + ".su");
  const uint16_t* suh = reinterpret_cast<const uint16_t*>(experts.slab() + gate.suh_offset_bytes);
  ASSERT_EQ(bits.size() * 8, gate.in_channels);
  int negative = 0;
  for (uint32_t i = 0; i < gate.in_channels; ++i) {
    const bool set = (static_cast<unsigned>(bits[i / 8]) >> (i % 8) & 1) != 0;
    ASSERT_EQ(Fp16ToFloat(suh[i]), set ? -1.0f : 1.0f) << i;
    negative += set ? 1 : 0;
  }
  EXPECT_GT(negative, 0);
}

TEST(LoadExperts, SharedVectorsAreStoredOnce) {
  const PreparedExperts experts = LoadFixture("rs-shared-h", "3");
  std::set<uint64_t> input, output, own;
  for (const SegmentDesc& segment : experts.segments()) {
    input.insert(segment.gate().suh_offset_bytes);
    output.insert(segment.down().svh_offset_bytes);
    own.insert(segment.down().suh_offset_bytes);
  }
  EXPECT_LT(input.size(), experts.segments().size());
  EXPECT_LT(output.size(), experts.segments().size());
  EXPECT_EQ(own.size(), experts.segments().size());
}

TEST(LoadExperts, SlicesAreSegments) {
  const PreparedExperts experts = LoadFixture("rs-per-expert", "3");
  EXPECT_EQ(experts.max_segments_per_expert(), 4u);
  EXPECT_EQ(experts.segments().size(), 4u * experts.geometry().experts);
}

TEST(LoadExperts, PaddingComesFromTheConfig) {
  const PreparedExperts experts = LoadFixture("stock-deepseek-padded", "1");
  EXPECT_EQ(experts.geometry().hidden_channels, 320u);
  EXPECT_EQ(experts.geometry().stored_hidden_channels, 384u);
  for (const SegmentDesc& segment : experts.segments()) {
    EXPECT_EQ(segment.intermediate_channels(), 256u);
    EXPECT_EQ(segment.valid_intermediate_channels, 200u);
  }
}

TEST(LoadExperts, ActivationFromOptionsThenConfig) {
  EXPECT_EQ(LoadFixture("stock-situ", "0").geometry().activation,
            (Activation{.kind = ActivationKind::kSitu, .beta = 4, .linear_beta = 25}));
  LoadOptions options;
  options.activation = Activation{.kind = ActivationKind::kGelu};
  options.output_scale = 3;
  const PreparedExperts experts = LoadFixture("stock-situ", "0", options);
  EXPECT_EQ(experts.geometry().activation, *options.activation);
  EXPECT_EQ(experts.geometry().output_scale, 3);
}

// An activation without a gate leaves the gate's codes unread.
TEST(LoadExperts, Relu2LeavesTheGateOut) {
  LoadOptions options;
  options.activation = Activation{.kind = ActivationKind::kRelu2};
  const PreparedExperts with = LoadFixture("stock-qwen3", "1");
  const PreparedExperts without = LoadFixture("stock-qwen3", "1", options);
  for (const SegmentDesc& segment : without.segments()) EXPECT_FALSE(segment.gate().present());
  EXPECT_LT(without.slab_bytes(), with.slab_bytes());
  EXPECT_LT(without.code_bytes(), with.code_bytes());
}

TEST(LoadExperts, ReportsProgressToTheEnd) {
  std::vector<std::pair<uint64_t, uint64_t>> seen;
  LoadOptions options;
  options.progress = [&](uint64_t done, uint64_t total) {
    seen.emplace_back(done, total);
    return true;
  };
  const PreparedExperts experts = LoadFixture("stock-qwen3", "1", options);
  ASSERT_GE(seen.size(), 2u);
  EXPECT_EQ(seen.front().first, 0u);
  EXPECT_EQ(seen.back().first, seen.back().second);
  EXPECT_GE(seen.back().second, experts.code_bytes());
  for (size_t i = 1; i < seen.size(); ++i) {
    EXPECT_GE(seen[i].first, seen[i - 1].first);
    EXPECT_EQ(seen[i].second, seen[0].second);
  }
}

TEST(LoadExperts, UnknownLayer) {
  const Checkpoint checkpoint = OpenFixture("stock-situ");
  const Result<PreparedExperts> experts = LoadExperts(checkpoint, checkpoint.layers().size());
  ASSERT_FALSE(experts);
  EXPECT_EQ(experts.error().code(), StatusCode::kUsage);
}

TEST(LoadLinear, TakesLinearsAndRoutedMatrices) {
  const Checkpoint checkpoint = OpenFixture("stock-qwen3");
  const PreparedExperts experts = LoadFixture("stock-qwen3", "1");
  const std::string name = checkpoint.MatrixName(checkpoint.FindLayer("1").value(), 2, Projection::kDown, 0);
  const PreparedLinear linear = LoadLinear(checkpoint, name).value();
  const PreparedLinear same = test::LinearOf(experts, experts.ExpertSegments(2)[0].down());
  EXPECT_EQ(DecodeMatrix(linear, false).value(), DecodeMatrix(same, false).value());
  EXPECT_THAT(linear.identity(), HasSubstr(name));
  for (const LinearInfo& info : checkpoint.linears()) {
    const Result<PreparedLinear> dense = LoadLinear(checkpoint, info.name);
    ASSERT_TRUE(dense) << dense.error().message();
    EXPECT_EQ(dense->matrix().in_channels, info.matrix.in_channels);
  }
}

TEST(LoadLinear, RefusesUnknownNamesAndWholeSlicedExperts) {
  const Checkpoint checkpoint = OpenFixture("rs-per-expert");
  EXPECT_EQ(LoadLinear(checkpoint, "model.layers.3.mlp.experts.1.nothing").error().code(),
            StatusCode::kUsage);
  const std::string whole = "model.layers.3.mlp.experts.1.gate_proj";
  const Result<PreparedLinear> sliced = LoadLinear(checkpoint, whole);
  ASSERT_FALSE(sliced);
  EXPECT_EQ(sliced.error().code(), StatusCode::kUsage);
  EXPECT_THAT(sliced.error().message(), HasSubstr(".rank0"));
  EXPECT_TRUE(LoadLinear(checkpoint, whole + ".rank3"));
  LoadOptions options;
  options.in_channels = 1 << 20;
  EXPECT_EQ(LoadLinear(checkpoint, whole + ".rank3", options).error().code(), StatusCode::kGeometry);
}

}  // namespace
}  // namespace espalier
