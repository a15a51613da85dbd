// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "cuda/launch.h"
#include "moe/workspace.h"

namespace espalier::cuda {
namespace {

constexpr uint64_t kGroupRows = 8;
// Units that fill the machine: two for each of 128 SMs. Below that units are made smaller.
constexpr uint64_t kEnoughUnits = 256;
constexpr uint64_t kFewTurns = 4;       // times kEnoughUnits: up to there the last turn counts
constexpr uint64_t kFinishUnits = 300;  // of 256 channels, from which FC2 takes such
constexpr uint32_t kMaxSplits = 8;
constexpr uint64_t kSplitTileGroups = TileRows(RowClass::kMany) / kGroupRows;
constexpr uint64_t kWideTileGroups = TileRows(RowClass::kWide) / kGroupRows;
constexpr uint64_t kMaxGridTiles = 65535;
// Rows of activations that one pass keeps: bounds the workspace. GLM-5.2, top-8, tp 4: 3,381 tokens.
constexpr uint64_t kChunkBytes = uint64_t{1400} << 20;
// A row is rotated in shared memory as fp32; 96 KiB is what every architecture has.
constexpr uint32_t kMaxRowChannels = 24576;

Result<void> CheckChannels(std::string_view identity, std::string_view what, uint32_t channels) {
  if (channels <= kMaxRowChannels) return {};
  return Error(StatusCode::kUnsupported, fmt::format("{}: {} {} channels; the cuda executor takes up to {}",
                                                     identity, channels, what, kMaxRowChannels));
}

// fp16 operands, fp32 sums and one fp32 output row.
uint64_t RowBytes(const MoeGeometry& geometry, uint32_t intermediate) {
  return uint64_t{geometry.stored_hidden_channels} * (2 * 2 + 4) + uint64_t{intermediate} * (2 * 4 + 2);
}

// Products of the wide class, of a linear: a block fills an SM of a machine of 132, and to begin and end a
// share of the inputs costs it as much as kWideShareCost channels.
constexpr uint64_t kWideBlocks = 132;
constexpr uint64_t kMaxWideUnits = 3 * kWideBlocks;  // where inputs are shared
constexpr uint64_t kWideShareCost = 6 * 64;

// The dense class: clusters of two SMs. To begin and end an item costs kDenseItemCost channels; a half of it
// is kDenseHalf / 16 of the work, as it brings more operands into shared memory for that. Sums in memory, for
// shares of the inputs, cost kDenseSumsCost channels of the same rows and outputs each, and kDensePassCost
// for the kernel that adds them.
constexpr uint64_t kDenseClusters = 66;
constexpr uint64_t kMaxDenseUnits = 3 * kDenseClusters;  // where inputs are shared
constexpr uint64_t kDenseItemCost = 6 * 64;
constexpr uint64_t kDenseHalf = 9;
constexpr uint64_t kDenseSumsCost = 650;
constexpr uint64_t kDensePassCost = 320;
constexpr uint64_t kDenseTileGroups = TileRows(RowClass::kDense) / kGroupRows;
constexpr uint64_t kDenseSlotGroups = kDenseTileGroups / 4;  // of one warpgroup

// Which of the two classes a linear takes is a matter of time, predicted from what cuda_linear_bench measured
// on one H200 (mcg, cold): 6144 x 2048 at 3 bits and 6144 x 12288 at 4, wide at 144 (31.1, 90.7 us) and 512
// rows (48.9, 190.8), dense at 256 (35.5, 146.8), 512 (44.8, 197.3), 1024 (62.0, 306) and 4096 (208.6, 1007),
// the decoding alone 10.05 and 50.4 us. With 6 ns a row for the rotation, which both have, the prediction is
// within 2.5 % of each of them.
// Wide: launches, then for each channel of a turn the decoding and the product of a tile's rows.
constexpr uint64_t kWideStartNs = 16'000;
constexpr uint64_t kWideChannelPs = 4800;
constexpr uint64_t kWideRowPs = 31;
// Dense: launches; 3.1 TB/s of decoded weights; for each channel of a turn 256 x 256 products of each
// cluster, 720 TFLOP/s, and 930 where all that the product reads is still in the second-level cache.
constexpr uint64_t kDecodeStartNs = 2'000;
constexpr uint64_t kDecodeWeightFs = 641;
constexpr uint64_t kDenseStartNs = 21'500, kDenseChannelPs = 11'600;
constexpr uint64_t kCachedStartNs = 13'500, kCachedChannelPs = 9'000;
constexpr uint64_t kCacheBytes = uint64_t{50} << 20;

// Groups times splits that sums take at most, where all rows make up to `groups` groups. Splits are there
// only while their units stay below twice kEnoughUnits blocks of 32 channels, and a tile has up to 6 groups
// where products are split.
uint64_t SplitGroups(uint64_t groups, uint32_t projections, uint32_t out_channels) {
  const uint64_t split_tiles = 2 * kEnoughUnits / (uint64_t{projections} * (out_channels / 32));
  return std::max(groups, std::min(kMaxSplits * groups, kSplitTileGroups * split_tiles));
}
// The same for a linear of the wide class, whose splits stay within kMaxWideUnits blocks of 128 channels.
uint64_t WideSplitGroups(uint64_t groups, uint32_t out_channels) {
  const uint64_t split_tiles = kMaxWideUnits / (out_channels / kHadamardChannels);
  return std::max(groups, std::min(kMaxSplits * groups, kWideTileGroups * split_tiles));
}
uint64_t DenseItemsAcross(uint32_t out_channels) {
  return (uint64_t{out_channels} + kDenseItemChannels - 1) / kDenseItemChannels;
}
// The same for the dense class.
uint64_t DenseSplitGroups(uint64_t groups, uint32_t out_channels) {
  const uint64_t split_tiles = kMaxDenseUnits / DenseItemsAcross(out_channels);
  return std::max(groups, std::min(kMaxSplits * groups, kDenseTileGroups * split_tiles));
}

// Items of a pass of the dense class: those of full tiles of rows, then those of a last tile.
struct DenseItems {
  uint64_t full = 0;
  uint64_t last = 0;
  bool last_small = false;  // no more rows than half of the warpgroups have

  DenseItems(uint64_t groups, uint32_t out_channels) {
    const uint64_t rest = groups % kDenseTileGroups;
    full = groups / kDenseTileGroups * DenseItemsAcross(out_channels);
    last = rest > 0 ? DenseItemsAcross(out_channels) : 0;
    last_small = rest <= 2 * kDenseSlotGroups;
  }
  uint64_t count() const { return full + last; }

  // In sixteenths of a channel of a full tile. Clusters take items by turns, and the longest come first: a
  // turn takes as long as its first item.
  uint64_t Cost(uint64_t whole, uint64_t channels) const {
    const uint64_t full_cost = 16 * (channels + kDenseItemCost);
    const uint64_t last_cost = last_small ? full_cost / 2 : full_cost;
    const uint64_t whole_full = std::min(whole, full), whole_last = whole - whole_full;
    uint64_t items = 0, turns = 0, cost = 0;
    const auto add = [&](uint64_t more, uint64_t item_cost) {
      items += more;
      const uint64_t begun = (items + kDenseClusters - 1) / kDenseClusters;
      cost += (begun - turns) * item_cost;
      turns = begun;
    };
    add(whole_full, full_cost);
    add(2 * (full - whole_full), full_cost * kDenseHalf / 16);
    add(whole_last, last_cost);
    add(2 * (last - whole_last), last_cost * kDenseHalf / 16);
    return cost;
  }
  // With the inputs of each item in shares: channels of all turns.
  uint64_t SplitChannels(uint64_t splits, uint64_t channels) const {
    const uint64_t turns = (count() * splits + kDenseClusters - 1) / kDenseClusters;
    return turns * (channels / splits + kDenseItemCost);
  }
  uint64_t SplitCost(uint64_t splits, uint64_t channels) const {
    const uint64_t sums = 16 * count() * splits * kDenseSumsCost / kDenseClusters;
    return 16 * (SplitChannels(splits, channels) + kDensePassCost) + sums;
  }
};

// Completes a pass of the wide class. Gives what it takes, in ns.
uint64_t PlanWide(LinearPass& pass, uint32_t in_channels, uint32_t out_channels) {
  const uint64_t units = uint64_t{pass.tiles} * (out_channels / kHadamardChannels);
  uint64_t least = ~uint64_t{0};
  for (uint32_t splits = 1; splits <= kMaxSplits; splits *= 2) {
    if (splits > 1 && (units * splits > kMaxWideUnits || in_channels < 2 * kWideShareCost * splits)) break;
    const uint64_t turns = (units * splits + kWideBlocks - 1) / kWideBlocks;
    const uint64_t cost = turns * (in_channels / splits + kWideShareCost);
    if (cost < least) {
      least = cost;
      pass.sums.splits = splits;
    }
  }
  const uint64_t tile_rows = kGroupRows * ((pass.groups + pass.tiles - 1) / pass.tiles);
  return kWideStartNs + least * (kWideChannelPs + kWideRowPs * tile_rows) / 1000;
}

// The same for the dense class.
uint64_t PlanDense(LinearPass& pass, uint32_t in_channels, uint32_t out_channels) {
  const DenseItems items(pass.groups, out_channels);
  const uint64_t count = items.count(), turned = count - count % kDenseClusters;
  uint64_t least = items.Cost(count, in_channels), whole = count;
  if (items.Cost(turned, in_channels) < least) {
    whole = turned;
    least = items.Cost(turned, in_channels);
  }
  uint64_t channels = least / 16;  // of all turns
  for (uint32_t splits = 2; splits <= kMaxSplits; splits *= 2) {
    if (count * splits > kMaxDenseUnits || in_channels < 2 * kDenseItemCost * splits) break;
    const uint64_t cost = items.SplitCost(splits, in_channels);
    if (cost >= least) continue;
    least = cost;
    channels = items.SplitChannels(splits, in_channels);
    pass.sums.splits = splits;
    whole = count;
  }
  pass.whole_items = static_cast<uint32_t>(whole);
  const uint64_t weights = uint64_t{in_channels} * out_channels, rows = kGroupRows * pass.groups;
  const uint64_t sums = pass.sums.splits > 1 ? pass.sums.splits * rows * out_channels : 0;
  const bool cached = 2 * (weights + rows * in_channels) + 4 * sums <= kCacheBytes;
  const uint64_t product_ns = cached ? kCachedStartNs + channels * kCachedChannelPs / 1000
                                     : kDenseStartNs + least * kDenseChannelPs / 16'000;
  return kDecodeStartNs + weights * kDecodeWeightFs / 1'000'000 + product_ns;
}

LinearPass PassOf(RowClass row_class, uint64_t tokens) {
  LinearPass pass;
  pass.row_class = row_class;
  pass.groups = static_cast<uint32_t>((tokens + kGroupRows - 1) / kGroupRows);
  pass.tiles = static_cast<uint32_t>((tokens + TileRows(row_class) - 1) / TileRows(row_class));
  return pass;
}

}  // namespace

SumsPlan PlanSums(RowClass row_class, uint64_t tiles, uint32_t projections, uint32_t in_channels,
                  uint32_t out_channels) {
  SumsPlan plan;
  const auto units = [&] { return tiles * projections * (out_channels / plan.block_channels) * plan.splits; };
  while (plan.block_channels > 32 && units() < kEnoughUnits) plan.block_channels /= 2;
  // Few turns: units of half the size fill the last one better.
  if (row_class == RowClass::kFew && plan.block_channels == 128 && units() > kEnoughUnits &&
      units() <= kFewTurns * kEnoughUnits) {
    plan.block_channels = 64;
  }
  // A warp keeps at least four quads: eight warps share a unit of 32 output channels, and two output tiles a
  // warp (few) mean half the input channels each.
  const uint32_t max_splits = std::min(kMaxSplits, in_channels / (4 * 4 * 64));
  while (units() < kEnoughUnits && plan.splits * 2 <= max_splits) plan.splits *= 2;
  return plan;
}

MoePass PlanMoePass(const MoeConfig& config, uint64_t rows, uint32_t projections, int compute_capability) {
  MoePass pass;
  pass.row_class = ClassOf(rows, config.segment_slots, compute_capability);
  pass.direct = DirectRows(rows, config.segment_slots, config.intermediate);
  pass.groups = pass.direct ? rows : MaxGroups(rows, config.segment_slots);
  const uint64_t touched = std::min<uint64_t>(rows, config.segment_slots);
  // Each segment's last tile may be small.
  const bool few = pass.row_class == RowClass::kFew;
  const uint64_t tile_groups = TileRows(pass.row_class) / kGroupRows;
  pass.tiles = few ? pass.groups : std::min(pass.groups, pass.groups / tile_groups + touched);
  if (pass.row_class != RowClass::kWide) {
    pass.sums =
        PlanSums(pass.row_class, few ? touched : pass.tiles, projections, config.hidden, config.intermediate);
  }
  // A warp with twice the inputs to go through has half the starts; a unit of few is large enough then.
  if (few && config.hidden % 256 == 0 && touched * (config.hidden / 256) >= kFinishUnits) {
    pass.finish_channels = 256;
  }
  return pass;
}

LinearPass PlanLinearPass(uint64_t tokens, uint32_t in_channels, uint32_t out_channels,
                          int compute_capability, std::optional<RowClass> forced) {
  const RowClass row_class = forced.value_or(LinearClassOf(tokens, compute_capability));
  LinearPass pass = PassOf(row_class, tokens);
  if (row_class == RowClass::kDense) {
    PlanDense(pass, in_channels, out_channels);
    return pass;
  }
  if (row_class != RowClass::kWide) {
    pass.sums = PlanSums(row_class, pass.tiles, 1, in_channels, out_channels);
    return pass;
  }
  const uint64_t wide_ns = PlanWide(pass, in_channels, out_channels);
  if (forced || tokens < kDenseTokens) return pass;
  LinearPass dense = PassOf(RowClass::kDense, tokens);
  return PlanDense(dense, in_channels, out_channels) < wide_ns ? dense : pass;
}

Result<MoeConfig> ConfigureMoe(const ExpertsTable& experts, const MoePlanOptions& options) {
  const MoeGeometry& geometry = experts.geometry();
  MoeConfig config;
  config.max_segments = std::max(experts.max_segments_per_expert(), 1u);
  config.hidden = geometry.stored_hidden_channels;
  config.intermediate = std::max(experts.max_intermediate_channels(), kHadamardChannels);
  for (const auto& [what, channels] :
       {std::pair("hidden", config.hidden), std::pair("intermediate", config.intermediate)}) {
    if (Result<void> checked = CheckChannels(experts.identity(), what, channels); !checked) {
      return tl::unexpected(checked.error());
    }
  }
  const uint64_t token_rows = uint64_t{options.top_k} * config.max_segments;
  if (token_rows > kMaxGridTiles) {
    return Error(
        StatusCode::kUnsupported,
        fmt::format("{}: top_k {} with {} segments an expert; the cuda executor takes a product of up to {}",
                    experts.identity(), options.top_k, config.max_segments, kMaxGridTiles));
  }
  const uint64_t max_rows = std::max<uint64_t>(kChunkBytes / RowBytes(geometry, config.intermediate), 1);
  // Tiles are the third dimension of a grid.
  config.chunk_tokens = ChunkTokens(options, options.max_tokens,
                                    std::min<uint64_t>(max_rows, kMaxGridTiles) / config.max_segments);
  const uint64_t segments = uint64_t{geometry.experts} * config.max_segments;
  config.segment_slots = static_cast<uint32_t>(std::min<uint64_t>(segments, ~uint32_t{0}));
  const uint64_t chunk_rows = config.chunk_tokens * options.top_k * config.max_segments;
  const uint64_t groups = MaxGroups(chunk_rows, segments);
  // Operands that stand twice take 4 bytes a channel; a call with few rows uses them whatever the capacity
  // is.
  const uint64_t few_groups = MaxGroups(std::min(chunk_rows, 4 * segments), segments);
  const uint64_t operand_bytes = kGroupRows * std::max(groups * 2, few_groups * 4);
  const uint64_t rows = groups * kGroupRows;

  WorkspaceLayout arrays;
  config.counters = arrays.Add(16, sizeof(uint32_t));
  config.expert_counts = arrays.Add(2 * (uint64_t{geometry.experts} + 1), sizeof(uint32_t));
  config.tiles = arrays.Add(groups, 16);
  config.rows = arrays.Add(rows, 16);
  config.row_slots = arrays.Add(rows, sizeof(uint32_t));
  config.row_weights = arrays.Add(rows, sizeof(float));
  config.input_exponents = arrays.Add(rows * 2, sizeof(float));
  config.input_sums = arrays.Add(rows * 2, sizeof(float));
  config.mid_exponents = arrays.Add(rows, sizeof(float));
  config.mid_sums = arrays.Add(rows, sizeof(float));
  config.inputs = arrays.Add(CheckedBytes(operand_bytes) * 2, config.hidden);
  const uint32_t projections = ActivationHasGate(geometry.activation.kind) ? 2 : 1;
  const uint64_t sum_rows = kGroupRows * SplitGroups(groups, projections, config.intermediate);
  config.fc1 = arrays.Add(CheckedBytes(sum_rows) * 2 * config.intermediate, sizeof(float));
  config.mids = arrays.Add(operand_bytes, config.intermediate);
  config.slots = arrays.Add(CheckedBytes(chunk_rows) * config.hidden, sizeof(float));
  const Result<uint64_t> total = arrays.TotalBytes();
  if (!total) return tl::unexpected(total.error());
  config.total_bytes = *total;
  return config;
}

Result<LinearConfig> ConfigureLinear(const PreparedLinear& linear, const LinearPlanOptions& options) {
  const MatrixDesc& matrix = linear.matrix();
  if (Result<void> checked = CheckChannels(linear.identity(), "input", matrix.in_channels); !checked) {
    return tl::unexpected(checked.error());
  }
  LinearConfig config;
  const uint64_t row_bytes = uint64_t{matrix.in_channels} * 2 + uint64_t{matrix.out_channels} * 4;
  // Rows are the second dimension of a grid.
  config.chunk_tokens =
      std::min({options.max_tokens, kMaxGridTiles, std::max<uint64_t>(kChunkBytes / row_bytes, kGroupRows)});
  const uint64_t groups = MaxGroups(config.chunk_tokens, 1);
  const uint64_t rows = groups * kGroupRows;
  const bool dense = config.chunk_tokens >= kDenseTokens;
  WorkspaceLayout arrays;
  config.weights =
      arrays.Add(dense ? CheckedBytes(matrix.in_channels) * matrix.out_channels : 0, sizeof(uint16_t));
  config.input_exponents = arrays.Add(rows, sizeof(float));
  config.input_sums = arrays.Add(rows, sizeof(float));
  config.inputs =
      arrays.Add(CheckedBytes(rows) * matrix.in_channels, options.max_tokens <= kGroupRows ? 4 : 2);
  const uint64_t sum_rows =
      kGroupRows *
      std::max({SplitGroups(groups, 1, matrix.out_channels), WideSplitGroups(groups, matrix.out_channels),
                dense ? DenseSplitGroups(groups, matrix.out_channels) : 0});
  config.sums = arrays.Add(CheckedBytes(sum_rows) * matrix.out_channels, sizeof(float));
  const Result<uint64_t> total = arrays.TotalBytes();
  if (!total) return tl::unexpected(total.error());
  config.total_bytes = *total;
  return config;
}

}  // namespace espalier::cuda
