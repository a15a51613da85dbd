// SPDX-License-Identifier: Apache-2.0
//
// Who owns which channels: the slot planner against its published tables, the general planner by its
// properties, and the sum over the ranks against the whole layer.
#include <espalier/extent_plan.h>
#include <espalier/moe.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "support/checkpoint_writer.h"
#include "support/memory_file_system.h"
#include "support/random_experts.h"

namespace espalier {
namespace {

using testing::CheckpointFiles;
using testing::CheckpointModel;
using ::testing::HasSubstr;
using testing::MemoryFileSystem;
using testing::ModelShape;

#ifdef ESPALIER_SANITIZED
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// The Kimi-class container of docs/format.md: 96 slots, layers 1 to 92.
const SlotGrid kGrid{.num_slots = 96, .extent_alignment_slots = 4, .extent_barriers = {48}};

std::vector<uint64_t> KimiLayers() {
  std::vector<uint64_t> layers(92);
  std::iota(layers.begin(), layers.end(), uint64_t{1});
  return layers;
}

std::vector<SlotExtent> PlanLayer(uint64_t layer, int tp) {
  std::vector<SlotExtent> extents;
  for (int rank = 0; rank < tp; ++rank) {
    const Result<SlotExtent> extent = PlanSlotExtent(kGrid, KimiLayers(), layer, tp, rank);
    EXPECT_TRUE(extent.has_value()) << extent.error().message();
    if (extent) extents.push_back(*extent);
  }
  return extents;
}

TEST(SlotPlanner, GivesThePublishedExtents) {
  EXPECT_EQ(PlanLayer(1, 3), (std::vector<SlotExtent>{{0, 24}, {24, 24}, {48, 48}}));
  EXPECT_EQ(PlanLayer(1, 9),
            (std::vector<SlotExtent>{
                {0, 12}, {12, 12}, {24, 8}, {32, 8}, {40, 8}, {48, 12}, {60, 12}, {72, 12}, {84, 12}}));
  EXPECT_EQ(PlanLayer(2, 9),
            (std::vector<SlotExtent>{
                {84, 12}, {0, 12}, {12, 12}, {24, 8}, {32, 8}, {40, 8}, {48, 12}, {60, 12}, {72, 12}}));
  EXPECT_EQ(
      PlanLayer(1, 10),
      (std::vector<SlotExtent>{
          {0, 12}, {12, 12}, {24, 8}, {32, 8}, {40, 8}, {48, 12}, {60, 12}, {72, 8}, {80, 8}, {88, 8}}));
  EXPECT_EQ(
      PlanLayer(2, 10),
      (std::vector<SlotExtent>{
          {80, 8}, {88, 8}, {0, 12}, {12, 12}, {24, 8}, {32, 8}, {40, 8}, {48, 12}, {60, 12}, {72, 8}}));
}

struct Total {
  int tp;
  uint64_t low;
  uint64_t high;
};
constexpr Total kTotals[] = {
    {2, 4416, 4416}, {3, 2928, 2952}, {4, 2208, 2208}, {5, 1760, 1776}, {6, 1472, 1472}, {7, 1260, 1264},
    {8, 1104, 1104}, {9, 976, 984},   {10, 880, 884},  {11, 800, 808},  {12, 736, 736},  {13, 676, 680},
    {14, 628, 632},  {15, 584, 592},  {16, 544, 560},  {17, 512, 524},  {18, 488, 496},  {19, 456, 468},
    {20, 440, 448},  {21, 416, 424},  {22, 400, 404},  {23, 384, 384},  {24, 368, 368}};

TEST(SlotPlanner, CoversEveryLayerWithThePublishedTotals) {
  const std::vector<uint64_t> layers = KimiLayers();
  for (const Total& expected : kTotals) {
    std::vector<uint64_t> totals(static_cast<size_t>(expected.tp));
    for (const uint64_t layer : layers) {
      std::vector<int> owners(kGrid.num_slots);
      const std::vector<SlotExtent> extents = PlanLayer(layer, expected.tp);
      ASSERT_EQ(extents.size(), static_cast<size_t>(expected.tp));
      for (size_t rank = 0; rank < extents.size(); ++rank) {
        totals[rank] += extents[rank].slots;
        for (uint64_t s = 0; s < extents[rank].slots; ++s) ++owners.at(extents[rank].first_slot + s);
        EXPECT_EQ(extents[rank].first_slot % 4 + extents[rank].slots % 4, 0u);
        EXPECT_FALSE(extents[rank].first_slot < 48 && extents[rank].first_slot + extents[rank].slots > 48);
      }
      ASSERT_THAT(owners, ::testing::Each(1)) << "tp " << expected.tp << ", layer " << layer;
    }
    EXPECT_EQ(*std::min_element(totals.begin(), totals.end()), expected.low) << "tp " << expected.tp;
    EXPECT_EQ(*std::max_element(totals.begin(), totals.end()), expected.high) << "tp " << expected.tp;
  }
}

TEST(SlotPlanner, RefusesWhatItsRuleDoesNotCover) {
  const std::vector<uint64_t> layers = KimiLayers();
  struct Case {
    SlotGrid grid;
    uint64_t layer;
    int tp;
    int rank;
    const char* message;
  };
  const SlotGrid no_barrier{96, 4, {}}, off_centre{96, 4, {44}}, two{96, 4, {24, 48}}, five{96, 5, {48}},
      odd{97, 4, {48}};
  const Case cases[] = {{kGrid, 0, 4, 0, "layer 0"},           {kGrid, 93, 4, 0, "layer 93"},
                        {kGrid, 1, 1, 0, "legal: 2..24"},      {kGrid, 1, 25, 0, "legal: 2..24"},
                        {kGrid, 1, 4, 4, "legal: 0..3"},       {kGrid, 1, 4, -1, "legal: 0..3"},
                        {no_barrier, 1, 4, 0, "exactly [48]"}, {off_centre, 1, 4, 0, "exactly [48]"},
                        {two, 1, 4, 0, "exactly [48]"},        {five, 1, 4, 0, "a divisor of 48"},
                        {odd, 1, 4, 0, "an even number"}};
  for (const Case& c : cases) {
    const Result<SlotExtent> extent = PlanSlotExtent(c.grid, layers, c.layer, c.tp, c.rank);
    ASSERT_FALSE(extent.has_value()) << c.message;
    EXPECT_EQ(extent.error().code(), StatusCode::kGeometry);
    EXPECT_THAT(extent.error().message(), HasSubstr(c.message));
  }
  EXPECT_TRUE(PlanSlotExtent(kGrid, layers, 92, 24, 23).has_value());
}

// A checkpoint in memory, with the file system that it reads from.
struct OpenModel {
  std::unique_ptr<MemoryFileSystem> files;
  std::optional<Checkpoint> checkpoint;
};

OpenModel Open(const CheckpointFiles& files) {
  OpenModel model{.files = std::make_unique<MemoryFileSystem>(), .checkpoint = std::nullopt};
  for (const auto& [name, bytes] : files.Serialize()) model.files->Write("/model/" + name, bytes);
  Result<Checkpoint> checkpoint = Checkpoint::Open("/model", {.file_system = model.files.get()});
  EXPECT_TRUE(checkpoint.has_value()) << checkpoint.error().message();
  if (checkpoint) model.checkpoint.emplace(*std::move(checkpoint));
  return model;
}

// Ranks are disjoint, contiguous, on the grid, and cover the layer; segments cover the extent exactly.
void ExpectCover(const Checkpoint& checkpoint, const ExtentPlan& plan) {
  for (const LayerExtents& layer : plan.layers()) {
    const MoeLayer& info = checkpoint.layers()[layer.layer];
    std::vector<int> owners(info.intermediate_channels / kHadamardChannels);
    for (const RankExtent& extent : layer.ranks) {
      if (extent.channels == 0) {
        EXPECT_EQ(extent.first_channel, 0u);
        EXPECT_TRUE(extent.segments.empty());
        EXPECT_EQ(extent.weight_bytes, 0u);
        continue;
      }
      ASSERT_EQ(extent.first_channel % kHadamardChannels + extent.channels % kHadamardChannels, 0u);
      uint64_t at = extent.first_channel;
      for (const SliceExtent& segment : extent.segments) {
        const uint64_t width = info.intermediate_channels / info.slices;
        EXPECT_EQ(segment.slice * width + segment.first_channel, at);
        EXPECT_LE(segment.first_channel + segment.channels, width);
        at += segment.channels;
      }
      EXPECT_EQ(at, extent.first_channel + extent.channels);
      for (uint64_t b = 0; b < extent.channels / kHadamardChannels; ++b)
        ++owners.at(extent.first_channel / kHadamardChannels + b);
    }
    EXPECT_THAT(owners, ::testing::Each(1)) << "layer " << info.label << " at tp " << plan.tp();
  }
}

std::vector<uint64_t> ChannelsOf(const LayerExtents& layer) {
  std::vector<uint64_t> channels;
  for (const RankExtent& extent : layer.ranks) channels.push_back(extent.channels);
  return channels;
}

TEST(ExtentPlan, SharesUnevenlyAndTakesTurns) {
  ModelShape shape;
  shape.layers = {1, 2, 3, 4, 5};
  shape.experts = 1;
  shape.intermediate_channels = 2304;
  shape.bits = 1;
  shape.dense = false;
  const OpenModel model = Open(testing::WriteStock(testing::RandomModel(shape, 1)));
  const Result<ExtentPlan> plan = ExtentPlan::Create(*model.checkpoint, {.tp = 4, .ep = 1, .equal = false});
  ASSERT_TRUE(plan.has_value()) << plan.error().message();
  EXPECT_THAT(ChannelsOf(plan->layers()[0]), ::testing::ElementsAre(640, 640, 512, 512));
  EXPECT_THAT(ChannelsOf(plan->layers()[1]), ::testing::ElementsAre(512, 512, 640, 640));
  const Result<ExtentPlan> equal = ExtentPlan::Create(*model.checkpoint, {.tp = 4, .ep = 1, .equal = true});
  ASSERT_FALSE(equal.has_value());
  EXPECT_EQ(equal.error().code(), StatusCode::kGeometry);
  EXPECT_THAT(equal.error().message(), HasSubstr("576"));
  EXPECT_THAT(equal.error().message(), HasSubstr("legal tp: 1, 2, 3, 6, 9, 18"));
  EXPECT_TRUE(ExtentPlan::Create(*model.checkpoint, {.tp = 6, .ep = 1, .equal = true}).has_value());
}

TEST(ExtentPlan, KeepsTotalsWithinOneBlockOverAnyRunOfLayers) {
  ModelShape shape;
  shape.layers = {3, 4, 5, 6, 7, 8, 9};
  shape.experts = 1;
  shape.intermediate_channels = 128 * 7;
  shape.bits = 1;
  shape.dense = false;
  const OpenModel model = Open(testing::WriteStock(testing::RandomModel(shape, 2)));
  for (int tp = 1; tp <= 24; ++tp) {
    const Result<ExtentPlan> plan =
        ExtentPlan::Create(*model.checkpoint, {.tp = tp, .ep = 1, .equal = false});
    ASSERT_TRUE(plan.has_value()) << plan.error().message();
    ExpectCover(*model.checkpoint, *plan);
    for (size_t first = 0; first < plan->layers().size(); ++first) {
      std::vector<uint64_t> totals(static_cast<size_t>(tp));
      for (size_t layer = first; layer < plan->layers().size(); ++layer) {
        for (size_t rank = 0; rank < totals.size(); ++rank)
          totals[rank] += plan->layers()[layer].ranks[rank].channels;
        const auto [low, high] = std::minmax_element(totals.begin(), totals.end());
        EXPECT_LE(*high - *low, kHadamardChannels) << "tp " << tp << ", layers " << first << ".." << layer;
      }
    }
  }
}

TEST(ExtentPlan, RefusesSizesOutOfRange) {
  ModelShape shape;
  shape.dense = false;
  const OpenModel model = Open(testing::WriteStock(testing::RandomModel(shape, 3)));
  for (const auto& [tp, ep] : {std::pair{0, 1}, {-1, 1}, {1025, 1}, {1, 0}, {1, 1025}, {1024, 1024}}) {
    const Result<ExtentPlan> plan =
        ExtentPlan::Create(*model.checkpoint, {.tp = tp, .ep = ep, .equal = false});
    ASSERT_FALSE(plan.has_value()) << tp << " " << ep;
    EXPECT_EQ(plan.error().code(), StatusCode::kGeometry);
  }
}

std::vector<double> RunOnCpu(const PreparedExperts& experts, test::MoeCall call, std::vector<int32_t> map) {
  call.expert_map = std::move(map);
  call.checked_ids = true;
  call.num_threads = 1;  // the work is smaller than handing it out
  return test::RunCall(experts, call, "cpu").values;
}

void ExpectSumIsWhole(const Checkpoint& checkpoint, int tp, int ep, std::mt19937_64& random) {
  const Result<ExtentPlan> plan = ExtentPlan::Create(checkpoint, {.tp = tp, .ep = ep, .equal = false});
  ASSERT_TRUE(plan.has_value()) << plan.error().message();
  ExpectCover(checkpoint, *plan);
  for (size_t l = 0; l < checkpoint.layers().size(); ++l) {
    const Result<PreparedExperts> all = LoadExperts(checkpoint, l);
    ASSERT_TRUE(all.has_value()) << all.error().message();
    const test::MoeCall call = test::RandomCall(*all, /*num_tokens=*/5, /*top_k=*/3, random());
    const std::vector<double> whole = RunOnCpu(*all, call, {});
    std::vector<double> sum(whole.size());
    uint64_t code_bytes = 0;
    for (int rank = 0; rank < plan->world(); ++rank) {
      const Result<PreparedExperts> part = LoadExperts(checkpoint, *plan, l, rank, {.num_threads = 1});
      ASSERT_TRUE(part.has_value()) << part.error().message();
      code_bytes += part->code_bytes();
      const std::vector<double> y = RunOnCpu(*part, call, ExpertMap(*plan, l, rank / tp));
      std::transform(sum.begin(), sum.end(), y.begin(), sum.begin(), std::plus<>());
    }
    EXPECT_EQ(code_bytes, all->code_bytes()) << "each code is owned once";
    EXPECT_LE(test::Compare(whole, sum).rel_l2, 2e-6)
        << checkpoint.layout_name() << " tp " << tp << " ep " << ep;
  }
}

TEST(ExtentPlan, SumOverRanksIsTheWholeInEveryLayout) {
  std::mt19937_64 random(7);
  ModelShape whole;
  whole.intermediate_channels = 640;
  whole.experts = 5;
  whole.layers = {2, 3};
  whole.bias = true;
  ModelShape shared = whole;
  shared.bias = false;
  shared.shared_hidden = true;
  ModelShape container = shared;
  container.intermediate_channels = 1024;
  container.bits = 3;
  container.codebook = Codebook::kMcg;
  ModelShape sliced = shared;
  sliced.intermediate_channels = 4 * 256;
  sliced.slices = 4;
  sliced.bits_by_expert = true;
  sliced.codebook = Codebook::kMcg;
  sliced.min_bits = 3;
  sliced.max_bits = 6;
  const OpenModel models[] = {
      Open(testing::WriteStock(testing::RandomModel(whole, 11))),
      Open(testing::WriteR7(testing::RandomModel(shared, 12))),
      Open(testing::WriteExl3V1(testing::RandomModel(container, 13))),
      Open(testing::WriteRankSliced(testing::RandomModel(sliced, 14))),
      Open(testing::WriteRankSliced(testing::RandomModel(sliced, 15), {.shared_h = true}))};
  for (const OpenModel& model : models) {
    ASSERT_TRUE(model.checkpoint.has_value());
    for (int tp = 1; tp <= 24; ++tp) {
      for (const int ep : {1, 2, 3, 5}) {
        if (kSanitized && ep > 1 && tp > 3) continue;  // up to 120 ranks, ten times as slow there
        ExpectSumIsWhole(*model.checkpoint, tp, ep, random);
      }
    }
  }
}

TEST(ExtentPlan, EveryExpertHasOneOwner) {
  ModelShape shape;
  shape.experts = 7;
  shape.dense = false;
  const OpenModel model = Open(testing::WriteStock(testing::RandomModel(shape, 31)));
  for (int tp = 1; tp <= 24; ++tp) {
    for (const int ep : {1, 2, 3, 5, 7, 9}) {
      const Result<ExtentPlan> plan =
          ExtentPlan::Create(*model.checkpoint, {.tp = tp, .ep = ep, .equal = false});
      ASSERT_TRUE(plan.has_value()) << plan.error().message();
      ExpectCover(*model.checkpoint, *plan);
      uint32_t next = 0;
      for (int rank = 0; rank < ep; ++rank) {
        const ExpertRange range = plan->Experts(0, rank);
        if (range.experts > 0) {
          EXPECT_EQ(range.first_expert, next);
        }
        next += range.experts;
        const std::vector<int32_t> map = ExpertMap(*plan, 0, rank);
        for (uint32_t e = 0; e < 7; ++e) {
          const bool own = e >= range.first_expert && e < range.first_expert + range.experts;
          EXPECT_EQ(map[e], own ? static_cast<int32_t>(e - range.first_expert) : -1);
        }
      }
      EXPECT_EQ(next, 7u);
    }
  }
}

TEST(ExtentPlan, OfAnotherCheckpointIsRefused) {
  ModelShape shape;
  shape.intermediate_channels = 256;
  shape.dense = false;
  const OpenModel own = Open(testing::WriteStock(testing::RandomModel(shape, 41)));
  ModelShape more_experts = shape, wider = shape, sliced = shape, deeper = shape;
  more_experts.experts = shape.experts + 4;
  wider.intermediate_channels = 1024;
  sliced.slices = 2;
  sliced.shared_hidden = sliced.bits_by_expert = true;
  sliced.codebook = Codebook::kMcg;
  deeper.layers = {1, 2, 3};
  const OpenModel others[] = {Open(testing::WriteStock(testing::RandomModel(more_experts, 42))),
                              Open(testing::WriteStock(testing::RandomModel(wider, 43))),
                              Open(testing::WriteRankSliced(testing::RandomModel(sliced, 44))),
                              Open(testing::WriteStock(testing::RandomModel(deeper, 45)))};
  for (const OpenModel& other : others) {
    const ExtentPlan plan = ExtentPlan::Create(*other.checkpoint, {.tp = 2, .ep = 1, .equal = false}).value();
    const Result<PreparedExperts> last = LoadExperts(*own.checkpoint, plan, 1, 1);
    ASSERT_FALSE(last.has_value());
    EXPECT_EQ(last.error().code(), StatusCode::kGeometry);
    EXPECT_THAT(last.error().message(), HasSubstr("the plan"));
  }
}

// Any shape, any layout, any number of ranks.
enum class Kind { kStock, kR7, kContainer, kOpenContainer, kSliced, kSharedSliced };

CheckpointFiles DrawCheckpoint(Kind kind) {
  ModelShape shape;
  shape.layers.clear();
  const int64_t first = *rc::gen::inRange<int64_t>(0, 4);
  const auto layers = *rc::gen::inRange<int64_t>(1, 4);
  for (int64_t l = 0; l < layers; ++l) shape.layers.push_back(first + l);
  shape.experts = *rc::gen::inRange<uint32_t>(1, 7);
  shape.hidden_channels = 128 * *rc::gen::inRange<uint64_t>(1, 4);
  shape.dense = false;
  const auto blocks = *rc::gen::inRange<uint64_t>(1, 12);
  shape.intermediate_channels = 128 * blocks;
  const auto seed = *rc::gen::arbitrary<uint64_t>();
  switch (kind) {
    case Kind::kStock:
      shape.bias = *rc::gen::arbitrary<bool>();
      return testing::WriteStock(testing::RandomModel(shape, seed));
    case Kind::kR7:
      shape.shared_hidden = true;
      return testing::WriteR7(testing::RandomModel(shape, seed));
    case Kind::kContainer:
    case Kind::kOpenContainer:
      shape.intermediate_channels = 256 * blocks;
      shape.shared_hidden = true;
      shape.bits = *rc::gen::inRange(2, 7);  // what the container allows
      shape.codebook = Codebook::kMcg;
      return testing::WriteExl3V1(
          testing::RandomModel(shape, seed),
          {.barriers = kind == Kind::kOpenContainer ? std::optional<std::vector<uint64_t>>(std::in_place)
                                                    : std::nullopt});
    case Kind::kSliced:
    case Kind::kSharedSliced:
      break;
  }
  shape.slices = *rc::gen::inRange<uint32_t>(1, 6);
  shape.intermediate_channels = 128 * shape.slices * *rc::gen::inRange<uint64_t>(1, 4);
  shape.shared_hidden = true;
  shape.bits_by_expert = true;
  shape.codebook = Codebook::kMcg;
  return testing::WriteRankSliced(testing::RandomModel(shape, seed),
                                  {.shared_h = kind == Kind::kSharedSliced});
}

class RankSum : public ::testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Layouts, RankSum,
                         ::testing::Values(Kind::kStock, Kind::kR7, Kind::kContainer, Kind::kOpenContainer,
                                           Kind::kSliced, Kind::kSharedSliced));

TEST_P(RankSum, IsTheWholeForAnyShape) {
  // The same cases on every run, and enough of them; read once, at the first check.
  setenv("RC_PARAMS", "seed=20 max_success=25 noshrink=1", /*overwrite=*/0);
  EXPECT_TRUE(rc::check("the parts of the ranks add up to the whole", [] {
    const OpenModel model = Open(DrawCheckpoint(GetParam()));
    RC_ASSERT(model.checkpoint.has_value());
    std::mt19937_64 random(*rc::gen::arbitrary<uint64_t>());
    const int tp = *rc::gen::inRange(1, 25), ep = *rc::gen::element(1, 2, 3, 5);
    ExpectSumIsWhole(*model.checkpoint, tp, ep, random);
    RC_ASSERT(!::testing::Test::HasFailure());
  }));
}

TEST(ExtentPlan, CountsTheBytesThatARankReads) {
  ModelShape shape;
  shape.intermediate_channels = 384;
  shape.experts = 4;
  shape.shared_hidden = true;
  shape.dense = false;
  for (const OpenModel& model : {Open(testing::WriteStock(testing::RandomModel(shape, 21))),
                                 Open(testing::WriteR7(testing::RandomModel(shape, 22)))}) {
    for (const int ep : {1, 3}) {
      const Result<ExtentPlan> plan =
          ExtentPlan::Create(*model.checkpoint, {.tp = 2, .ep = ep, .equal = false});
      ASSERT_TRUE(plan.has_value()) << plan.error().message();
      for (int rank = 0; rank < plan->world(); ++rank) {
        uint64_t markers = 0;
        for (size_t l = 0; l < model.checkpoint->layers().size(); ++l) {
          const ExpertRange range = plan->Experts(l, rank / 2);
          for (uint32_t e = 0; e < range.experts; ++e) {
            for (int p = 0; p < kNumProjections; ++p) {
              const MatrixInfo info =
                  model.checkpoint->Matrix(l, range.first_expert + e, static_cast<Projection>(p), 0);
              markers += info.marker == kNoTensor ? 0 : sizeof(uint32_t);
            }
          }
        }
        const uint64_t before = model.files->bytes_read();
        for (size_t l = 0; l < model.checkpoint->layers().size(); ++l) {
          ASSERT_TRUE(LoadExperts(*model.checkpoint, *plan, l, rank).has_value());
        }
        EXPECT_EQ(model.files->bytes_read() - before, plan->WeightBytes(rank) + markers) << "rank " << rank;
      }
    }
  }
}

}  // namespace
}  // namespace espalier
