// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic behind a launch: needs no GPU, and runs in builds without CUDA too.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "cuda/launch.h"
#include "support/random_experts.h"

namespace espalier::cuda {
namespace {

using test::MakeExperts;
using test::Random;

// A package without bytes: one segment for each expert, or `slices` of them.
ExpertsTable TableOf(uint32_t experts, uint32_t hidden, uint32_t intermediate, uint32_t slices = 1,
                     bool gate = true) {
  std::vector<SegmentDesc> segments;
  for (uint32_t expert = 0; expert < experts; ++expert) {
    for (uint32_t slice = 0; slice < slices; ++slice) {
      SegmentDesc& segment = segments.emplace_back();
      segment.expert = expert;
      segment.valid_intermediate_channels = intermediate;
      for (MatrixDesc& matrix : segment.matrices) {
        matrix = {.codes_offset_bytes = 0,
                  .suh_offset_bytes = 0,
                  .svh_offset_bytes = 0,
                  .in_channels = hidden,
                  .out_channels = intermediate,
                  .bits = 3,
                  .codebook = Codebook::kMcg};
      }
      if (!gate) segment.matrices[0] = {};
      std::swap(segment.matrices[2].in_channels, segment.matrices[2].out_channels);
    }
  }
  return ExpertsTable::Create({.experts = experts,
                               .hidden_channels = hidden,
                               .stored_hidden_channels = hidden,
                               .activation = {.kind = gate ? ActivationKind::kSilu : ActivationKind::kRelu2}},
                              std::move(segments), uint64_t{1} << 40, "a table")
      .value();
}

TEST(CudaConfigTest, GroupsHoldAnyDistributionOfRows) {
  Random random(1);
  for (int round = 0; round < 2000; ++round) {
    const uint64_t segments = 1 + random.Below(40);
    const uint64_t rows = random.Below(300);
    std::vector<uint64_t> counts(segments);
    for (uint64_t row = 0; row < rows; ++row) ++counts[random.Below(segments)];
    uint64_t groups = 0;
    for (const uint64_t count : counts) groups += (count + 7) / 8;
    EXPECT_LE(groups, MaxGroups(rows, segments)) << rows << " rows, " << segments << " segments";
  }
  // And is reached: one row in each segment, or 1 + 8n in all of them.
  EXPECT_EQ(MaxGroups(5, 9), 5u);
  EXPECT_EQ(MaxGroups(9 * 4, 4), 8u);
  EXPECT_EQ(MaxGroups(0, 4), 0u);
}

TEST(CudaConfigTest, ClassesFollowTheRowsOfASegment) {
  EXPECT_EQ(ClassOf(8, 256, 90), RowClass::kFew);
  EXPECT_EQ(ClassOf(4 * 256, 256, 90), RowClass::kFew);
  EXPECT_EQ(ClassOf(4 * 256 + 1, 256, 90), RowClass::kMany);
  EXPECT_EQ(ClassOf(kWideRows * 256, 256, 90), RowClass::kWide);
  // Only that family has the asynchronous matrix unit.
  for (const int capability : {80, 86, 89, 100, 120}) {
    EXPECT_EQ(ClassOf(kWideRows * 256, 256, capability), RowClass::kMany) << capability;
    EXPECT_EQ(LinearClassOf(512, capability), RowClass::kMany) << capability;
  }
  EXPECT_EQ(LinearClassOf(8, 90), RowClass::kFew);
  EXPECT_EQ(LinearClassOf(9, 90), RowClass::kMany);
  EXPECT_EQ(LinearClassOf(kWideTokens, 90), RowClass::kWide);
  EXPECT_EQ(PlanLinearPass(8192, 6144, 12288, 80).row_class, RowClass::kMany);
}

// The bound of DirectRows keeps its operands in the room that every architecture has.
TEST(CudaConfigTest, DirectRowsFitIntoSharedMemory) {
  EXPECT_TRUE(DirectRows(32, 256, 2048));
  EXPECT_FALSE(DirectRows(33, 256, 2048));
  EXPECT_FALSE(DirectRows(8, 256, 2176));
  EXPECT_FALSE(DirectRows(8, 4, 512));
  EXPECT_LE(2048 * (8 * 2 * 2 + 4), 99 * 1024 - 8 * 1024);
}

TEST(CudaConfigTest, SumsAreCutEvenlyAndFillTheMachine) {
  for (const uint64_t tiles : {1, 2, 8, 16, 57, 300}) {
    for (const uint32_t in : {128u, 384u, 2048u, 6144u}) {
      for (const uint32_t out : {128u, 384u, 512u, 12288u}) {
        SCOPED_TRACE(fmt::format("{} tiles, {} x {}", tiles, in, out));
        const SumsPlan plan = PlanSums(RowClass::kFew, tiles, 2, in, out);
        EXPECT_TRUE(plan.block_channels == 32 || plan.block_channels == 64 || plan.block_channels == 128);
        EXPECT_EQ(out % plan.block_channels, 0u);
        EXPECT_EQ(plan.splits & (plan.splits - 1), 0u);
        EXPECT_GE(in / 64, plan.splits);
        const uint64_t units = tiles * 2 * (out / plan.block_channels) * plan.splits;
        // Not cut finer than needed.
        if (plan.block_channels < 128 || plan.splits > 1) {
          EXPECT_LE(units, 2 * 1024u);
        }
      }
    }
  }
  // GLM-5.2, one of four ranks, one token: two units for each of 128 SMs.
  const SumsPlan glm = PlanSums(RowClass::kFew, 8, 2, 6144, 512);
  EXPECT_EQ(glm.block_channels, 32u);
  EXPECT_EQ(glm.splits, 1u);
}

// FC2 of few rows: twice the channels a unit where that leaves enough units and the width allows it.
TEST(CudaConfigTest, UnitsOfFewRowsFitTheirNumber) {
  const MoeConfig glm = ConfigureMoe(TableOf(256, 6144, 512), {.max_tokens = 4096, .top_k = 8}).value();
  EXPECT_EQ(PlanMoePass(glm, 8, 2, 90).finish_channels, 128u);
  EXPECT_EQ(PlanMoePass(glm, 16, 2, 90).finish_channels, 256u);
  EXPECT_EQ(PlanMoePass(glm, 1024, 2, 90).finish_channels, 256u);
  const MoePass many = PlanMoePass(glm, 1025, 2, 80);
  EXPECT_EQ(many.row_class, RowClass::kMany);
  EXPECT_EQ(many.finish_channels, 128u);
  const MoeConfig odd = ConfigureMoe(TableOf(256, 6144 + 128, 512), {.max_tokens = 64, .top_k = 8}).value();
  EXPECT_EQ(PlanMoePass(odd, 512, 2, 90).finish_channels, 128u);
  // Units of FC1 whose last turn would be a good part of the whole are halved.
  EXPECT_EQ(PlanMoePass(glm, 32, 2, 90).sums.block_channels, 128u);
  EXPECT_EQ(PlanMoePass(glm, 64, 2, 90).sums.block_channels, 64u);
  EXPECT_EQ(PlanMoePass(glm, 512, 2, 90).sums.block_channels, 128u);
}

TEST(CudaConfigTest, ArraysLieApartInsideTheWorkspace) {
  for (const uint64_t tokens : {0, 1, 2, 33, 512, 65536}) {
    SCOPED_TRACE(tokens);
    const ExpertsTable table = TableOf(256, 6144, 512);
    const MoeConfig config = ConfigureMoe(table, {.max_tokens = tokens, .top_k = 8}).value();
    const std::vector<uint64_t> offsets = {
        config.counters,      config.expert_counts, config.tiles,           config.rows,
        config.row_slots,     config.row_weights,   config.input_exponents, config.input_sums,
        config.mid_exponents, config.mid_sums,      config.inputs,          config.fc1,
        config.mids,          config.slots,         config.total_bytes};
    EXPECT_TRUE(std::is_sorted(offsets.begin(), offsets.end()));
    for (const uint64_t offset : offsets) EXPECT_EQ(offset % kWorkspaceAlignmentBytes, 0u);
    const uint64_t rows = config.chunk_tokens * 8;
    const uint64_t groups = MaxGroups(rows, 256);
    EXPECT_GE(config.total_bytes - config.slots, rows * 6144 * 4);
    EXPECT_GE(config.fc1 - config.inputs, groups * 8 * 2 * 6144 * 2);
    EXPECT_GE(config.mids - config.fc1, groups * 8 * 2 * 512 * 4);
  }
}

struct PassShape {
  uint32_t experts, hidden, intermediate, slices, top_k;
};

// Every array of every call that a capacity allows, on every class of kernels: operands of few rows are twice
// as wide, and sums of few units are split by input channels.
TEST(CudaConfigTest, EveryCallFitsIntoTheWorkspaceOfItsPlan) {
  const PassShape shapes[] = {{24, 512, 256, 1, 4}, {24, 512, 256, 3, 4},   {1, 4096, 128, 1, 1},
                              {1, 8192, 128, 1, 1}, {2, 8192, 256, 1, 2},   {3, 24576, 128, 2, 2},
                              {8, 6144, 512, 1, 8}, {256, 6144, 512, 1, 8}, {64, 4096, 128, 1, 16}};
  bool split = false;
  for (const PassShape& shape : shapes) {
    for (const bool gate : {true, false}) {
      const uint32_t projections = gate ? 2 : 1;
      const ExpertsTable table = TableOf(shape.experts, shape.hidden, shape.intermediate, shape.slices, gate);
      for (const uint64_t capacity : {1, 5, 13, 100, 1200, 2100}) {
        const MoeConfig config = ConfigureMoe(table, {.max_tokens = capacity, .top_k = shape.top_k}).value();
        const uint64_t last = std::min<uint64_t>(capacity, config.chunk_tokens);
        for (uint64_t tokens = 1; tokens <= last; ++tokens) {
          const uint64_t rows = tokens * shape.top_k * shape.slices;
          for (const int capability : {80, 90}) {
            const MoePass pass = PlanMoePass(config, rows, projections, capability);
            const uint64_t packed = pass.groups * 8;
            const uint64_t wide = pass.row_class == RowClass::kFew ? 4 : 2;
            split = split || pass.sums.splits > 1;
            ASSERT_LE(pass.tiles, pass.groups);
            ASSERT_LE(packed * 2 * shape.hidden * wide, config.fc1 - config.inputs) << fmt::format(
                "{} x {}, {} of {} tokens", shape.hidden, shape.intermediate, tokens, capacity);
            ASSERT_LE(packed * shape.intermediate * wide, config.slots - config.mids);
            ASSERT_LE(pass.groups * 16, config.rows - config.tiles);
            ASSERT_LE(packed * 16, config.row_slots - config.rows);
            ASSERT_LE(pass.sums.splits * packed * 2 * shape.intermediate * 4, config.mids - config.fc1)
                << fmt::format("{} x {}, {} of {} tokens, {} splits, {} groups", shape.hidden,
                               shape.intermediate, tokens, capacity, pass.sums.splits, pass.groups);
            ASSERT_LE(rows * shape.hidden * 4, config.total_bytes - config.slots);
          }
        }
      }
    }
  }
  EXPECT_TRUE(split);
}

// The tiles that the pack kernel makes of any distribution of rows.
TEST(CudaConfigTest, TilesHoldAnyDistributionOfRows) {
  Random random(2);
  for (int round = 0; round < 2000; ++round) {
    const uint32_t experts = static_cast<uint32_t>(1 + random.Below(30));
    const uint64_t rows = 1 + random.Below(2000);
    const MoeConfig config =
        ConfigureMoe(TableOf(experts, 128, 128), {.max_tokens = rows, .top_k = 1}).value();
    for (const int capability : {80, 90}) {
      const MoePass pass = PlanMoePass(config, rows, 2, capability);
      const uint64_t tile_groups = TileRows(pass.row_class) / 8;
      std::vector<uint64_t> counts(experts);
      for (uint64_t row = 0; row < rows; ++row) ++counts[random.Below(experts)];
      uint64_t groups = 0, tiles = 0;
      for (const uint64_t count : counts) {
        groups += (count + 7) / 8;
        tiles += ((count + 7) / 8 + tile_groups - 1) / tile_groups;
      }
      if (pass.direct) groups = tiles = rows;
      ASSERT_LE(groups, pass.groups) << rows << " rows, " << experts << " experts";
      ASSERT_LE(tiles, pass.tiles) << rows << " rows, " << experts << " experts";
    }
  }
}

TEST(CudaConfigTest, MoreRowsATokenThanAGridHoldsAreRefused) {
  const Result<MoeConfig> config =
      ConfigureMoe(TableOf(1, 128, 128, 65), {.max_tokens = 1, .top_k = kMaxTopK});
  ASSERT_FALSE(config.has_value());
  EXPECT_EQ(config.error().code(), StatusCode::kUnsupported);
  EXPECT_NE(config.error().message().find("65535"), std::string::npos) << config.error().message();
}

TEST(CudaConfigTest, LargeCapacitiesAreTakenInChunks) {
  const ExpertsTable table = TableOf(256, 6144, 512);
  const MoeConfig config = ConfigureMoe(table, {.max_tokens = 65536, .top_k = 8}).value();
  EXPECT_GE(config.chunk_tokens, 3072u);
  EXPECT_LT(config.chunk_tokens, 8192u);
  EXPECT_LT(config.total_bytes, uint64_t{2} << 30);
  // Tiles are the third dimension of a grid.
  const MoeConfig narrow = ConfigureMoe(TableOf(4, 128, 128), {.max_tokens = 65536, .top_k = 8}).value();
  EXPECT_LE(MaxGroups(narrow.chunk_tokens * 8, 4), 65535u);
}

TEST(CudaConfigTest, RowsTooWideForSharedMemoryAreRefused) {
  const Result<MoeConfig> config = ConfigureMoe(TableOf(1, 24576 + 128, 128), {.max_tokens = 1, .top_k = 1});
  ASSERT_FALSE(config.has_value());
  EXPECT_EQ(config.error().code(), StatusCode::kUnsupported);
  EXPECT_NE(config.error().message().find("24704 hidden channels"), std::string::npos)
      << config.error().message();
  EXPECT_TRUE(ConfigureMoe(TableOf(1, 24576, 128), {.max_tokens = 1, .top_k = 1}).has_value());
}

TEST(CudaConfigTest, LinearsOfAnyHeightFit) {
  for (const uint64_t capacity : {0, 1, 8, 9, 48, 49, 300, 65536, 1 << 20}) {
    SCOPED_TRACE(capacity);
    constexpr uint32_t in = 8192, out = 384;
    const PreparedLinear linear = test::MakeLinear(in, out, in, out, {.bits = 1}, 1);
    const LinearConfig config = ConfigureLinear(linear, {.max_tokens = capacity}).value();
    EXPECT_LE(config.chunk_tokens, 65535u);
    for (uint64_t tokens = 1; tokens <= std::min<uint64_t>(capacity, config.chunk_tokens); ++tokens) {
      std::vector<LinearPass> passes = {PlanLinearPass(tokens, in, out, 80),
                                        PlanLinearPass(tokens, in, out, 90)};
      // Whichever of the two a device takes.
      if (tokens >= kDenseTokens) {
        passes.push_back(PlanLinearPass(tokens, in, out, 90, RowClass::kWide));
        passes.push_back(PlanLinearPass(tokens, in, out, 90, RowClass::kDense));
      }
      for (const LinearPass& pass : passes) {
        const uint64_t rows = uint64_t{pass.groups} * 8;
        ASSERT_GE(rows, tokens);
        ASSERT_GE(pass.tiles * TileRows(pass.row_class), tokens);
        ASSERT_LE(rows * in * (pass.row_class == RowClass::kFew ? 4 : 2), config.sums - config.inputs)
            << tokens;
        ASSERT_LE(pass.sums.splits * rows * out * 4, config.total_bytes - config.sums) << tokens;
        if (pass.row_class == RowClass::kDense) {
          ASSERT_LE(uint64_t{in} * out * 2, config.input_exponents - config.weights) << tokens;
        }
      }
    }
  }
}

TEST(CudaConfigTest, DecodedMatricesTakeRoomOnlyWhereCallsReachThem) {
  constexpr uint32_t in = 512, out = 384;
  const PreparedLinear linear = test::MakeLinear(in, out, in, out, {.bits = 1}, 1);
  const LinearConfig below = ConfigureLinear(linear, {.max_tokens = kDenseTokens - 1}).value();
  const LinearConfig above = ConfigureLinear(linear, {.max_tokens = kDenseTokens}).value();
  EXPECT_EQ(below.input_exponents, below.weights);
  EXPECT_EQ(above.input_exponents - above.weights, uint64_t{in} * out * 2);
}

// Items of the dense class are halved or shared out, never both, and only where that is less work in turns.
TEST(CudaConfigTest, ItemsOfManyRowsFillTheMachine) {
  bool split = false, halves = false;
  for (const uint32_t in : {128u, 2048u, 6144u, 24576u}) {
    for (const uint32_t out : {128u, 384u, 2048u, 12288u, 17024u}) {
      for (uint64_t tokens = kDenseTokens; tokens <= 4100; tokens += tokens < 1100 ? 1 : 250) {
        const LinearPass pass = PlanLinearPass(tokens, in, out, 90, RowClass::kDense);
        ASSERT_EQ(pass.row_class, RowClass::kDense);
        const uint64_t items = pass.tiles * ((uint64_t{out} + kDenseItemChannels - 1) / kDenseItemChannels);
        ASSERT_LE(pass.whole_items, items);
        if (pass.sums.splits > 1) {
          ASSERT_EQ(pass.whole_items, items);
          ASSERT_GE(in / 64, pass.sums.splits);
        }
        split = split || pass.sums.splits > 1;
        halves = halves || pass.whole_items < items;
      }
    }
  }
  EXPECT_TRUE(split);
  EXPECT_TRUE(halves);
  // A small matrix is shared out over the machine; a large one has a last turn of halves.
  const auto dense = [](uint64_t tokens, uint32_t out) {
    return PlanLinearPass(tokens, 6144, out, 90, RowClass::kDense);
  };
  EXPECT_EQ(dense(256, 2048).sums.splits, 8u);
  EXPECT_EQ(dense(512, 12288).sums.splits, 1u);
  EXPECT_EQ(dense(512, 12288).whole_items, 66u);
  EXPECT_EQ(dense(4096, 12288).sums.splits, 1u);
}

// What measured faster on an H200: cuda_linear_bench times both.
TEST(CudaConfigTest, MatricesAreDecodedFirstWhereThatIsFaster) {
  const auto class_of = [](uint64_t tokens, uint32_t out) {
    return PlanLinearPass(tokens, 6144, out, 90).row_class;
  };
  EXPECT_EQ(class_of(kDenseTokens - 1, 2048), RowClass::kWide);
  EXPECT_EQ(class_of(512, 2048), RowClass::kDense);
  EXPECT_EQ(class_of(256, 12288), RowClass::kWide);
  EXPECT_EQ(class_of(512, 12288), RowClass::kWide);
  for (const uint64_t tokens : {1024, 4096}) {
    EXPECT_EQ(class_of(tokens, 2048), RowClass::kDense) << tokens;
    EXPECT_EQ(class_of(tokens, 12288), RowClass::kDense) << tokens;
  }
  // The plans that were timed, whatever the choice is.
  EXPECT_EQ(PlanLinearPass(144, 6144, 2048, 90).sums.splits, 4u);
  EXPECT_EQ(PlanLinearPass(512, 6144, 12288, 90).sums.splits, 1u);
}

}  // namespace
}  // namespace espalier::cuda
