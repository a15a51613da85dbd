// SPDX-License-Identifier: Apache-2.0
//
// The cuda executor beyond backend_conformance_test: every regime of token counts, serial tiers, large slabs.
#include <espalier/backend.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "gpu_test.h"
#include "moe/device_memory.h"

namespace espalier {
namespace {

using test::Compare;
using test::kFirstGpu;
using test::MakeExperts;
using test::MatrixFormat;
using test::MoeCall;
using test::MoeOutput;
using test::RandomCall;
using test::RunCall;

constexpr double kGate = 1e-3;
constexpr double kCosine = 0.999999;
constexpr double kSerialGate = 1e-4;
// From here on the cpu executor, 2e-6 from the reference, stands in for it.
constexpr uint64_t kLargeCall = 100;

class CudaMoe : public GpuTest {
 protected:
  static PreparedExperts Experts(uint32_t experts = 12, Activation activation = {}) {
    return MakeExperts({.experts = experts,
                        .hidden_channels = 512,
                        .activation = activation,
                        .segments = {{.channels = 256}},
                        .format = MixedFormat,
                        .seed = 21});
  }

  static std::vector<double> Expected(const PreparedExperts& experts, MoeCall call) {
    call.num_threads = 0;
    const bool large = call.num_tokens >= kLargeCall;
    call.output = large ? Dtype::kF32 : Dtype::kF64;
    return RunCall(experts, call, large ? "cpu" : "reference").values;
  }

  static void ExpectWithinGate(const PreparedExperts& experts, MoeCall call, double gate = kGate,
                               double cosine = kCosine) {
    call.output = Dtype::kF32;
    const test::Difference difference =
        Compare(Expected(experts, call), RunCall(experts, call, "cuda").values);
    EXPECT_LE(difference.rel_l2, gate);
    EXPECT_GE(difference.cosine, cosine);
  }
};

TEST_F(CudaMoe, EveryTokenCount) {
  const PreparedExperts experts = Experts();
  for (const uint64_t tokens : {1, 2, 7, 8, 9, 31, 32, 33, 64, 512, 3072}) {
    for (const Dtype input : {Dtype::kBF16, Dtype::kF32}) {
      SCOPED_TRACE(fmt::format("{} tokens, {}", tokens, DtypeName(input)));
      MoeCall call = RandomCall(experts, tokens, 4, tokens);
      call.input = input;
      ExpectWithinGate(experts, call);
    }
  }
}

TEST_F(CudaMoe, EightRatesInOneLayerWithEveryCodebook) {
  for (const CodebookInfo& codebook : AllCodebooks()) {
    const PreparedExperts experts =
        MakeExperts({.experts = 16,
                     .hidden_channels = 256,
                     .activation = {},
                     .segments = {{.channels = 384}},
                     .format =
                         [&](uint32_t expert, Projection) {
                           return MatrixFormat{.bits = kAllBits[expert % std::size(kAllBits)],
                                               .codebook = codebook.codebook};
                         },
                     .seed = 5});
    for (const uint64_t tokens : {1, 8, 65, 300}) {
      SCOPED_TRACE(fmt::format("{}, {} tokens", codebook.name, tokens));
      ExpectWithinGate(experts, RandomCall(experts, tokens, 8, 6));
    }
  }
}

TEST_F(CudaMoe, SegmentsOfDifferentWidthsAtEveryRegime) {
  const PreparedExperts experts = MakeExperts(
      {.experts = 5,
       .hidden_channels = 384,
       .activation = {},
       .segments = {{.channels = 128}, {.channels = 384, .valid_channels = 200}, {.channels = 256}},
       .format = MixedFormat,
       .seed = 4});
  for (const uint64_t tokens : {1, 9, 129, 513}) {
    SCOPED_TRACE(tokens);
    ExpectWithinGate(experts, RandomCall(experts, tokens, 3, 5));
  }
}

TEST_F(CudaMoe, HardLimitsAtEveryRegime) {
  const PreparedExperts experts = Experts(6, {.kind = ActivationKind::kSwigluOai, .limit = 7});
  for (const uint64_t tokens : {1, 33, 300})
    ExpectWithinGate(experts, RandomCall(experts, tokens, 2, 5), 2e-3, 0.999995);
}

TEST_F(CudaMoe, MoreThan256Experts) {
  const PreparedExperts experts =
      MakeExperts({.experts = 600, .hidden_channels = 128, .format = MixedFormat, .seed = 8});
  for (const uint64_t tokens : {1, 40, 200}) {
    SCOPED_TRACE(tokens);
    ExpectWithinGate(experts, RandomCall(experts, tokens, 16, 9));
  }
}

TEST_F(CudaMoe, OneExpertTakesEveryRow) {
  const PreparedExperts experts = Experts();
  for (const uint64_t tokens : {64, 129, 1025}) {
    SCOPED_TRACE(tokens);
    MoeCall call = RandomCall(experts, tokens, 2, 5);
    call.ids.assign(call.ids.size(), 7);
    ExpectWithinGate(experts, call);
  }
}

// More tokens than any one pass over the experts takes.
TEST_F(CudaMoe, ALargeCapacityIsTakenInChunks) {
  const PreparedExperts experts = MakeExperts({.experts = 4, .hidden_channels = 128, .seed = 8});
  const uint64_t capacity = 65536;
  const auto workspace = [&](uint64_t tokens) {
    return MoePlan::Create(experts.table(), {.max_tokens = tokens, .top_k = 2, .device = kFirstGpu})
        .value()
        .workspace_bytes();
  };
  EXPECT_GE(workspace(capacity), workspace(1));
  MoeCall call = RandomCall(experts, capacity, 2, 9);
  ExpectWithinGate(experts, call);
}

TEST_F(CudaMoe, TenRunsGiveTheSameBits) {
  const PreparedExperts experts = Experts();
  const PreparedExperts placed = OnGpu(experts);
  for (const uint64_t tokens : {1, 9, 33, 512}) {
    const MoeCall call = RandomCall(experts, tokens, 4, 5);
    const MoeOutput first = RunCall(placed, call, "cuda");
    for (int repeat = 1; repeat < 10; ++repeat)
      ASSERT_EQ(RunCall(placed, call, "cuda").bytes, first.bytes) << tokens << " tokens, run " << repeat;
  }
}

// What the other rows hold, and where their routes lead, does not change a bit of a row.
TEST_F(CudaMoe, ARowKeepsItsBitsAmongOtherRows) {
  const PreparedExperts placed = OnGpu(Experts());
  const uint64_t hidden = placed.geometry().hidden_channels;
  for (const uint64_t tokens : {2, 8, 33, 300}) {
    const MoeCall first = RandomCall(placed, tokens, 4, 5);
    MoeCall second = RandomCall(placed, tokens, 4, 6);
    const uint64_t kept = tokens / 2;
    const auto keep = [&](const auto& from, auto& to, uint64_t width) {
      const auto begin = from.begin() + static_cast<ptrdiff_t>(kept * width);
      std::copy(begin, begin + static_cast<ptrdiff_t>(width),
                to.begin() + static_cast<ptrdiff_t>(kept * width));
    };
    keep(first.x, second.x, hidden);
    keep(first.ids, second.ids, 4);
    keep(first.weights, second.weights, 4);
    const MoeOutput among_first = RunCall(placed, first, "cuda");
    const MoeOutput among_second = RunCall(placed, second, "cuda");
    EXPECT_NE(among_first.bytes, among_second.bytes);
    const auto row = [&](const MoeOutput& output) {
      const auto begin = output.bytes.begin() + static_cast<ptrdiff_t>(kept * hidden * sizeof(float));
      return std::vector<std::byte>(begin, begin + static_cast<ptrdiff_t>(hidden * sizeof(float)));
    };
    EXPECT_EQ(row(among_first), row(among_second)) << tokens << " tokens";
  }
}

TEST_F(CudaMoe, NanStaysInItsRowAtEveryRegime) {
  const PreparedExperts experts = Experts();
  const uint64_t hidden = experts.geometry().hidden_channels;
  for (const uint64_t tokens : {9, 33, 300}) {
    MoeCall call = RandomCall(experts, tokens, 4, 5);
    for (uint64_t i = 0; i < call.ids.size(); ++i) call.ids[i] = static_cast<int64_t>(i % 3);
    const MoeOutput clean = RunCall(experts, call, "cuda");
    const uint64_t spoilt = tokens / 2;
    call.x[spoilt * hidden + 77] = std::numeric_limits<double>::quiet_NaN();
    const MoeOutput dirty = RunCall(experts, call, "cuda");
    for (uint64_t i = 0; i < dirty.values.size(); ++i) {
      if (i / hidden == spoilt) {
        ASSERT_TRUE(std::isnan(dirty.values[i])) << i;
      } else {
        ASSERT_EQ(dirty.values[i], clean.values[i]) << i;
      }
    }
  }
}

TEST_F(CudaMoe, AnOutputBeyondFp16WithASmallWeightIsRight) {
  const PreparedExperts experts = Experts();
  for (const uint64_t tokens : {1, 33, 300}) {
    SCOPED_TRACE(tokens);
    MoeCall call = RandomCall(experts, tokens, 1, 5);
    call.ids.assign(tokens, 2);
    for (double& value : call.x) value *= 1000;
    call.weights.assign(tokens, 1);
    double largest = 0;
    for (const double value : RunCall(experts, call, "cuda").values)
      largest = std::max(largest, std::abs(value));
    EXPECT_GT(largest, 1e5);
    call.weights.assign(tokens, 1e-3f);
    ExpectWithinGate(experts, call);
    call.output = Dtype::kF16;
    for (const double value : RunCall(experts, call, "cuda").values) ASSERT_TRUE(std::isfinite(value));
  }
}

TEST_F(CudaMoe, InputsBeyondFp16AtEveryRegime) {
  const PreparedExperts experts = Experts();
  for (const uint64_t tokens : {1, 33, 300}) {
    for (const double magnitude : {1e-8, 1e6, 1e12}) {
      SCOPED_TRACE(fmt::format("{} tokens, x about {}", tokens, magnitude));
      MoeCall call = RandomCall(experts, tokens, 2, 5);
      call.input = Dtype::kBF16;
      for (double& value : call.x) value *= magnitude;
      for (float& weight : call.weights) weight *= static_cast<float>(1 / magnitude);
      ExpectWithinGate(experts, call);
    }
  }
}

// The same routes, one tier of rates after the other: masked by an expert map, then added.
TEST_F(CudaMoe, MixedRatesEqualSerialTiers) {
  const auto tier_of = [](uint32_t expert) { return expert % 4 == 0 ? 4 : 3; };
  const PreparedExperts experts = MakeExperts(
      {.experts = 16,
       .hidden_channels = 512,
       .activation = {},
       .segments = {{.channels = 256}},
       .format = [&](uint32_t expert, Projection) { return MatrixFormat{.bits = tier_of(expert)}; },
       .seed = 31});
  const PreparedExperts placed = OnGpu(experts);
  for (const uint64_t tokens : {1, 8, 33, 512}) {
    SCOPED_TRACE(tokens);
    MoeCall call = RandomCall(experts, tokens, 4, tokens);
    const std::vector<double> mixed = RunCall(placed, call, "cuda").values;
    std::vector<double> serial;
    for (const int tier : {3, 4}) {
      MoeCall part = call;
      for (uint32_t expert = 0; expert < 16; ++expert)
        part.expert_map.push_back(tier_of(expert) == tier ? static_cast<int32_t>(expert) : -1);
      part.accumulate = !serial.empty();
      part.y = serial;
      serial = RunCall(placed, part, "cuda").values;
    }
    EXPECT_LE(Compare(serial, mixed).rel_l2, kSerialGate);
  }
}

// Matrices behind the 4 GiB that 32 bits reach, and behind 2^31 elements.
TEST_F(CudaMoe, ASlabBeyond4GiB) {
  const PreparedExperts small = Experts(6);
  const uint64_t shift = (uint64_t{9} << 29) + 64;  // 4.5 GiB
  std::vector<SegmentDesc> segments(small.segments().begin(), small.segments().end());
  for (SegmentDesc& segment : segments) {
    if (segment.expert % 2 == 0) continue;
    for (MatrixDesc& matrix : segment.matrices) {
      matrix.codes_offset_bytes += shift;
      matrix.suh_offset_bytes += shift;
      matrix.svh_offset_bytes += shift;
    }
  }
  const uint64_t slab_bytes = shift + small.slab_bytes();
  Result<DeviceBuffer> slab = DeviceBuffer::Create(kFirstGpu, slab_bytes);
  if (!slab && slab.error().code() == StatusCode::kCapacity) GTEST_SKIP() << slab.error().message();
  ASSERT_TRUE(slab) << slab.error().message();
  for (const uint64_t offset : {uint64_t{0}, shift})
    ASSERT_TRUE(WriteBuffer(*slab, offset, {small.slab(), small.slab_bytes()}));
  const PreparedExperts large =
      PreparedExperts::Create(
          ExpertsTable::Create(small.geometry(), segments, slab_bytes, "a large slab").value(),
          *std::move(slab))
          .value();
  for (const uint64_t tokens : {1, 33, 300}) {
    const MoeCall call = RandomCall(small, tokens, 4, 5);
    EXPECT_EQ(RunCall(large, call, "cuda").bytes, RunCall(small, call, "cuda").bytes) << tokens;
  }
}

TEST_F(CudaMoe, TheForcedExecutorRuns) {
  const PreparedExperts placed = OnGpu(Experts());
  const auto who_runs = [&](const std::string& executor) {
    std::map<std::string, uint64_t> before;
    for (const Backend* backend : Backends()) before[std::string(backend->name())] = backend->num_runs();
    const MoePlan plan = MoePlan::Create(placed, {.device = kFirstGpu, .executor = executor}).value();
    EXPECT_EQ(plan.backend().name(), "cuda");
    RunCall(placed, RandomCall(placed, 2, 1, 1), "cuda");
    std::string ran;
    for (const Backend* backend : Backends()) {
      if (backend->num_runs() != before[std::string(backend->name())]) ran += backend->name();
    }
    return ran;
  };
  EXPECT_EQ(who_runs("cuda"), "cuda");
  EXPECT_EQ(who_runs(""), "cuda");  // the best one of the device
}

TEST_F(CudaMoe, RefusesWhatItCannotDo) {
  const PreparedExperts experts = Experts();
  const PreparedExperts placed = OnGpu(experts);
  const auto code_of = [](const auto& result) { return result ? StatusCode{} : result.error().code(); };
  EXPECT_EQ(code_of(MoePlan::Create(experts, {.executor = "cuda"})), StatusCode::kDevice);
  EXPECT_EQ(code_of(MoePlan::Create(placed, {.executor = "cuda"})), StatusCode::kDevice);
  EXPECT_EQ(code_of(MoePlan::Create(placed, {.device = kFirstGpu, .executor = "cpu"})), StatusCode::kDevice);
  EXPECT_EQ(code_of(MoePlan::Create(placed, {.output = Dtype::kF64, .device = kFirstGpu})),
            StatusCode::kUnsupported);
  EXPECT_EQ(code_of(MoePlan::Create(placed, {.input = Dtype::kI32, .device = kFirstGpu})),
            StatusCode::kUnsupported);
  MoeGeometry exact = experts.geometry();
  exact.rotation = Dtype::kF32;
  const std::vector<SegmentDesc> segments(experts.segments().begin(), experts.segments().end());
  const ExpertsTable table = ExpertsTable::Create(exact, segments, experts.slab_bytes(), "exact").value();
  EXPECT_EQ(code_of(MoePlan::Create(table, {.device = kFirstGpu})), StatusCode::kUnsupported);

  // A package of the host under a plan of the GPU: refused before anything is read.
  const MoePlan plan = MoePlan::Create(placed, {.max_tokens = 1, .device = kFirstGpu}).value();
  EXPECT_EQ(code_of(RunMoe(plan, experts, {.num_tokens = 1})), StatusCode::kDevice);
}

}  // namespace
}  // namespace espalier
