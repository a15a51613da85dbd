// SPDX-License-Identifier: Apache-2.0
//
// Packages from weights in memory, and what a package knows: its place among the ranks, its types, its
// content.
#include <espalier/moe.h>
#include <espalier/prepare.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "support/checkpoint_writer.h"
#include "support/memory_file_system.h"
#include "support/random_experts.h"

namespace espalier {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::MatrixModel;
using testing::MemoryFileSystem;
using testing::ModelShape;

MatrixSpec SpecOf(const MatrixModel& matrix) {
  return {.in_channels = static_cast<uint32_t>(matrix.in_channels),
          .out_channels = static_cast<uint32_t>(matrix.out_channels),
          .bits = matrix.bits,
          .codebook = matrix.codebook,
          .has_bias = !matrix.bias.empty()};
}

// A whole layer as a framework holds it: plain arrays.
struct InMemory {
  testing::CheckpointModel model;
  ExpertsSource source;
  std::vector<SegmentWeights> weights;

  explicit InMemory(const ModelShape& shape, uint64_t seed = 1) : model(testing::RandomModel(shape, seed)) {
    source.identity = "layer 1 of a framework";
    source.experts = shape.experts;
    source.hidden_channels = static_cast<uint32_t>(shape.hidden_channels);
    source.rank_plan.experts.experts = shape.experts;
    for (uint32_t expert = 0; expert < shape.experts; ++expert) {
      SegmentSpec segment{.expert = expert,
                          .valid_intermediate_channels = static_cast<uint32_t>(shape.intermediate_channels)};
      SegmentWeights bytes;
      for (int p = 0; p < kNumProjections; ++p) {
        const MatrixModel& matrix = model.layers[0].experts[expert].slices[0][static_cast<size_t>(p)];
        segment.matrices[p] = SpecOf(matrix);
        bytes.matrices[p] = {.codes = matrix.codes.data(),
                             .suh = matrix.suh.data(),
                             .svh = matrix.svh.data(),
                             .bias = matrix.bias.empty() ? nullptr : matrix.bias.data()};
      }
      source.segments.push_back(segment);
      weights.push_back(bytes);
    }
  }
};

ModelShape Shape() {
  ModelShape shape;
  shape.layers = {1};
  shape.experts = 4;
  shape.intermediate_channels = 256;
  shape.bias = true;
  shape.dense = false;
  return shape;
}

Checkpoint OpenStock(MemoryFileSystem& files, const testing::CheckpointModel& model) {
  for (const auto& [name, bytes] : testing::WriteStock(model).Serialize())
    files.Write("/model/" + name, bytes);
  return Checkpoint::Open("/model", {.file_system = &files}).value();
}

TEST(PrepareExperts, GivesThePackageThatTheFileGives) {
  const InMemory memory(Shape());
  MemoryFileSystem files;
  const Checkpoint checkpoint = OpenStock(files, memory.model);
  const LoadOptions hash{.hash = true};
  const PreparedExperts loaded = LoadExperts(checkpoint, 0, hash).value();
  const Result<PreparedExperts> prepared = PrepareExperts(memory.source, memory.weights, hash);
  ASSERT_TRUE(prepared) << prepared.error().message();
  EXPECT_EQ(prepared->content_sha256(), loaded.content_sha256());
  EXPECT_EQ(prepared->content_sha256().size(), 64u);
  const test::MoeCall call = test::RandomCall(loaded, 5, 2, 3);
  EXPECT_EQ(test::RunCall(*prepared, call, "cpu").bytes, test::RunCall(loaded, call, "cpu").bytes);

  InMemory changed(Shape());
  changed.model.layers[0].experts[2].slices[0][1].codes[77] ^= 1;
  EXPECT_NE(PrepareExperts(changed.source, changed.weights, hash)->content_sha256(), loaded.content_sha256());
  InMemory other_vector(Shape());
  other_vector.model.layers[0].experts[3].slices[0][2].svh[1] ^= 0x8000;
  EXPECT_NE(PrepareExperts(other_vector.source, other_vector.weights, hash)->content_sha256(),
            loaded.content_sha256());
  EXPECT_EQ(PrepareExperts(memory.source, memory.weights)->content_sha256(), "");
}

// A framework's loader may reuse its buffers as soon as the call is back.
TEST(PrepareExperts, KeepsNoViewOfTheSource) {
  InMemory memory(Shape());
  const PreparedExperts prepared = PrepareExperts(memory.source, memory.weights, {.hash = true}).value();
  const test::MoeCall call = test::RandomCall(prepared, 3, 2, 3);
  const std::vector<std::byte> before = test::RunCall(prepared, call, "cpu").bytes;
  for (testing::ExpertModel& expert : memory.model.layers[0].experts) {
    for (MatrixModel& matrix : expert.slices[0]) {
      for (std::vector<uint16_t>* part : {&matrix.codes, &matrix.suh, &matrix.svh, &matrix.bias})
        std::fill(part->begin(), part->end(), uint16_t{0x7C00});
    }
  }
  EXPECT_EQ(test::RunCall(prepared, call, "cpu").bytes, before);
  const InMemory again(Shape());
  EXPECT_EQ(PrepareExperts(again.source, again.weights, {.hash = true})->content_sha256(),
            prepared.content_sha256());
}

TEST(PrepareExperts, KnowsEverySizeBeforehand) {
  InMemory memory(Shape());
  const Result<ExpertsTable> table = PlanExperts(memory.source);
  ASSERT_TRUE(table) << table.error().message();
  const Result<PreparedExperts> prepared = PrepareExperts(memory.source, memory.weights);
  EXPECT_EQ(table->slab_bytes(), prepared->slab_bytes());
  EXPECT_EQ(table->code_bytes(), prepared->code_bytes());
  EXPECT_EQ(MoePlan::Create(*table, {.max_tokens = 9}).value().workspace_bytes(),
            MoePlan::Create(*prepared, {.max_tokens = 9}).value().workspace_bytes());
  // Vectors with one key are stored once.
  for (SegmentSpec& segment : memory.source.segments) {
    segment.matrices[0].suh_key = segment.matrices[1].suh_key = 7;
  }
  EXPECT_EQ(PlanExperts(memory.source)->slab_bytes(), table->slab_bytes() - 7 * 128 * sizeof(uint16_t));
}

TEST(PrepareExperts, RefusesWhatIsMissingOrOffTheGrid) {
  struct Case {
    void (*spoil)(InMemory&);
    StatusCode code;
    const char* message;
  };
  const Case cases[] = {
      {[](InMemory& m) { m.weights.pop_back(); }, StatusCode::kUsage, "weights of 3 segments; legal: 4"},
      {[](InMemory& m) { m.weights[2].matrices[1].codes = nullptr; }, StatusCode::kUsage, "expert 2, up"},
      {[](InMemory& m) { m.weights[0].matrices[2].suh = nullptr; }, StatusCode::kUsage, "suh vector is null"},
      {[](InMemory& m) { m.weights[0].matrices[2].bias = nullptr; }, StatusCode::kUsage, "bias is null"},
      {[](InMemory& m) { m.source.segments[1].matrices[0].bits = 9; }, StatusCode::kUnsupported, "9 bits"},
      {[](InMemory& m) { m.source.segments[1].matrices[0].out_channels = 192; }, StatusCode::kGeometry,
       "multiples of 128"},
      {[](InMemory& m) { m.source.segments[1].matrices[0].out_channels = 384; }, StatusCode::kGeometry,
       "expert 1, gate"},
      {[](InMemory& m) { m.source.segments[3].expert = 4; }, StatusCode::kGeometry, "below 4"},
      {[](InMemory& m) { m.source.segments[3].matrices[0] = {}; }, StatusCode::kGeometry, "gate: absent"},
      {[](InMemory& m) { m.source.activation.io = Dtype::kI32; }, StatusCode::kUnsupported, "I32"},
      {[](InMemory& m) { m.source.activation.rotation = Dtype::kBF16; }, StatusCode::kUnsupported, "BF16"},
  };
  for (const Case& c : cases) {
    InMemory memory(Shape());
    c.spoil(memory);
    const Result<PreparedExperts> prepared = PrepareExperts(memory.source, memory.weights);
    ASSERT_FALSE(prepared) << c.message;
    EXPECT_EQ(prepared.error().code(), c.code) << prepared.error().message();
    EXPECT_THAT(prepared.error().message(), HasSubstr(c.message));
  }
}

TEST(PreparedExperts, KnowItsPlaceAndRefuseAnother) {
  const InMemory memory(Shape());
  MemoryFileSystem files;
  const Checkpoint checkpoint = OpenStock(files, memory.model);
  const ExtentPlan plan = ExtentPlan::Create(checkpoint, {.tp = 2, .ep = 2}).value();
  const PreparedExperts rank3 = LoadExperts(checkpoint, plan, 0, 3).value();
  EXPECT_EQ(rank3.rank_plan().tp, 2);
  EXPECT_EQ(rank3.rank_plan().ep, 2);
  EXPECT_EQ(rank3.rank_plan().rank, 3);
  EXPECT_EQ(rank3.rank_plan().experts.first_expert, 2u);
  EXPECT_EQ(rank3.rank_plan().experts.experts, 2u);
  ASSERT_EQ(rank3.rank_plan().extents.size(), 1u);
  EXPECT_EQ(rank3.rank_plan().extents[0].first_channel, 128u);

  EXPECT_TRUE(MoePlan::Create(rank3, {.place = RankPlan{.tp = 2, .ep = 2, .rank = 3}}));
  for (const RankPlan& place :
       {RankPlan{}, RankPlan{.tp = 4, .ep = 1, .rank = 3}, RankPlan{.tp = 2, .ep = 2, .rank = 1},
        RankPlan{.tp = 1, .ep = 4, .rank = 3}}) {
    const Result<MoePlan> refused = MoePlan::Create(rank3, {.place = place});
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code(), StatusCode::kGeometry);
    EXPECT_THAT(refused.error().message(),
                AllOf(HasSubstr("rank 3 of tp 2, ep 2"), HasSubstr("the caller is")));
  }
  // A plan of one world does not run a package of another, whatever their shapes.
  const PreparedExperts rank1 = LoadExperts(checkpoint, plan, 0, 1).value();
  const MoePlan made = MoePlan::Create(rank3, {.max_tokens = 4}).value();
  float x[128] = {}, y[128], weight = 1;
  int32_t id = 0;
  HostBuffer workspace = HostBuffer::Create(made.workspace_bytes()).value();
  MoeArgs args{.num_tokens = 1,
               .x = x,
               .x_row_stride = 128,
               .topk_ids = &id,
               .topk_ids_row_stride = 1,
               .topk_weights = &weight,
               .topk_weights_row_stride = 1};
  args.y = y;
  args.y_row_stride = 128;
  args.workspace = workspace.data();
  args.workspace_bytes = workspace.size_bytes();
  EXPECT_TRUE(RunMoe(made, rank3, args));
  const Result<void> refused = RunMoe(made, rank1, args);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), StatusCode::kGeometry);
  EXPECT_THAT(refused.error().message(), HasSubstr("the plan was made for rank 3"));
}

TEST(PreparedExperts, KnowTheTypeOfTheirInput) {
  InMemory memory(Shape());
  memory.source.activation.io = Dtype::kBF16;
  const PreparedExperts prepared = PrepareExperts(memory.source, memory.weights).value();
  EXPECT_TRUE(MoePlan::Create(prepared, {.input = Dtype::kBF16}));
  const Result<MoePlan> refused = MoePlan::Create(prepared, {.input = Dtype::kF16});
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), AllOf(HasSubstr("BF16"), HasSubstr("F16")));
}

// Two packages of one shape and other tiers, loaded beside each other and run in turns on one plan.
TEST(PreparedExperts, TwoTierPartitionsTakeTurns) {
  const auto tiers = [](uint32_t at, int low, int high) {
    return [=](uint32_t expert, Projection) {
      return test::MatrixFormat{.bits = expert < at ? low : high, .codebook = Codebook::kMcg};
    };
  };
  const PreparedExperts first = test::MakeExperts(
      {.experts = 6, .hidden_channels = 256, .activation = {}, .format = tiers(4, 3, 4), .seed = 1});
  const PreparedExperts second = test::MakeExperts(
      {.experts = 6, .hidden_channels = 256, .activation = {}, .format = tiers(1, 2, 6), .seed = 2});
  for (const char* executor : {"cpu", "reference"}) {
    const test::MoeCall call = test::RandomCall(first, 7, 3, 5);
    const std::vector<std::byte> alone_first = test::RunCall(first, call, executor).bytes;
    const std::vector<std::byte> alone_second = test::RunCall(second, call, executor).bytes;
    EXPECT_NE(alone_first, alone_second);
    const MoePlan plan = MoePlan::Create(first, {.max_tokens = 7,
                                                    .top_k = 3,
                                                    .executor = executor,
                                                    .mode = test::ChoiceOf(executor).mode}).value();
    HostBuffer workspace = HostBuffer::Create(plan.workspace_bytes()).value();
    const std::vector<float> x(call.x.begin(), call.x.end());
    const std::vector<int32_t> ids(call.ids.begin(), call.ids.end());
    std::vector<float> y(x.size());
    MoeArgs args{.num_tokens = 7,
                 .x = x.data(),
                 .x_row_stride = 256,
                 .topk_ids = ids.data(),
                 .topk_ids_row_stride = 3,
                 .topk_weights = call.weights.data(),
                 .topk_weights_row_stride = 3};
    args.y = y.data();
    args.y_row_stride = 256;
    args.workspace = workspace.data();
    args.workspace_bytes = workspace.size_bytes();
    for (int turn = 0; turn < 6; ++turn) {
      const bool even = turn % 2 == 0;
      const Result<void> run = RunMoe(plan, even ? first : second, args);
      ASSERT_TRUE(run) << run.error().message();
      const std::vector<std::byte>& alone = even ? alone_first : alone_second;
      ASSERT_EQ(std::memcmp(y.data(), alone.data(), alone.size()), 0) << executor << ", turn " << turn;
    }
  }
}

}  // namespace
}  // namespace espalier
