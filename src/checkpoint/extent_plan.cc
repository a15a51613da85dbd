// SPDX-License-Identifier: Apache-2.0
#include <espalier/extent_plan.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

#include "checkpoint/layout.h"

namespace espalier {
namespace {

constexpr uint64_t kCutSlots = kHadamardChannels / kSlotChannels;

// The share of owner `o` of `owners` in `blocks`: the first blocks mod owners own one more.
struct Share {
  uint64_t first = 0;
  uint64_t count = 0;
};
Share ShareOf(uint64_t blocks, uint64_t owners, uint64_t o) {
  const uint64_t q = blocks / owners, r = blocks % owners;
  return {.first = o * q + std::min(o, r), .count = q + (o < r ? 1 : 0)};
}

tl::unexpected<Status> Refuse(std::string message) {
  return Error(StatusCode::kGeometry, std::move(message));
}

Result<void> CheckGrid(const SlotGrid& grid) {
  if (grid.num_slots % 2 != 0)
    return Refuse(fmt::format("found {} slots, legal: an even number", grid.num_slots));
  const uint64_t half = grid.num_slots / 2;
  if (grid.extent_barriers != std::vector<uint64_t>{half}) {
    return Refuse(fmt::format("found extent barriers [{}], legal: exactly [{}]",
                              fmt::join(grid.extent_barriers, ", "), half));
  }
  if (grid.extent_alignment_slots == 0 || half % grid.extent_alignment_slots != 0) {
    return Refuse(fmt::format("found an extent alignment of {} slots, legal: a divisor of {}",
                              grid.extent_alignment_slots, half));
  }
  return {};
}

bool HasMiddleBarrier(const SlotGrid& grid) {
  return grid.extent_barriers.size() == 1 && grid.extent_barriers[0] * 2 == grid.num_slots;
}

}  // namespace

Result<SlotExtent> PlanSlotExtent(const SlotGrid& grid, std::span<const uint64_t> moe_layers, uint64_t layer,
                                  int tp, int rank) {
  const auto found = std::lower_bound(moe_layers.begin(), moe_layers.end(), layer);
  if (found == moe_layers.end() || *found != layer) {
    return Refuse(fmt::format("layer {} has no routed experts", layer));
  }
  if (tp < 2 || tp > kMaxBarrierTp)
    return Refuse(fmt::format("found tp {}, legal: 2..{}", tp, kMaxBarrierTp));
  if (rank < 0 || rank >= tp) return Refuse(fmt::format("found rank {}, legal: 0..{}", rank, tp - 1));
  if (auto r = CheckGrid(grid); !r) return tl::unexpected(r.error());
  const uint64_t half = grid.num_slots / 2;
  const int64_t step = tp == 10 ? 2 : 1;
  const int64_t position = found - moe_layers.begin();
  const int64_t turned = (rank - position * step) % tp;
  const auto owner = static_cast<uint64_t>(turned < 0 ? turned + tp : turned);
  const auto ranks = static_cast<uint64_t>(tp);
  const uint64_t front = (ranks + 1) / 2;
  const bool upper = owner >= front;
  const Share share = ShareOf(half / grid.extent_alignment_slots, upper ? ranks - front : front,
                              upper ? owner - front : owner);
  return SlotExtent{.first_slot = (upper ? half : 0) + grid.extent_alignment_slots * share.first,
                    .slots = grid.extent_alignment_slots * share.count};
}

namespace {

// Contiguous channels of one rank in one layer, before they are cut into slices.
struct ChannelRange {
  uint64_t first = 0;
  uint64_t count = 0;
};

class Planner {
 public:
  Planner(const Checkpoint& checkpoint, const ExtentPlanOptions& options)
      : checkpoint_(checkpoint), options_(options), legal_(checkpoint.LegalTpSizes()) {
    for (const MoeLayer& layer : checkpoint.layers())
      moe_layers_.push_back(static_cast<uint64_t>(layer.number));
  }

  Result<std::vector<LayerExtents>> Plan() {
    if (auto r = CheckOptions(); !r) return tl::unexpected(r.error());
    std::vector<LayerExtents> plan;
    for (size_t i = 0; i < checkpoint_.layers().size(); ++i) {
      auto ranges = Ranges(i);
      if (!ranges) return tl::unexpected(ranges.error());
      LayerExtents extents{.layer = i, .ranks = {}};
      for (const ChannelRange& range : *ranges) extents.ranks.push_back(Cut(checkpoint_.layers()[i], range));
      if (auto r = CheckEqual(checkpoint_.layers()[i], extents); !r) return tl::unexpected(r.error());
      plan.push_back(std::move(extents));
    }
    return plan;
  }

 private:
  std::string Legal() const { return fmt::format("legal tp: {}", fmt::join(legal_, ", ")); }

  Result<void> CheckOptions() const {
    if (options_.tp < 1 || options_.tp > kMaxTp)
      return Refuse(fmt::format("found tp {}, legal: 1..{}", options_.tp, kMaxTp));
    if (options_.ep < 1 || options_.ep > kMaxTp)
      return Refuse(fmt::format("found ep {}, legal: 1..{}", options_.ep, kMaxTp));
    if (static_cast<uint64_t>(options_.tp) * static_cast<uint64_t>(options_.ep) > kMaxWorld) {
      return Refuse(fmt::format("found {} ranks, legal: at most {}", options_.tp * options_.ep, kMaxWorld));
    }
    return {};
  }

  Result<std::vector<ChannelRange>> Ranges(size_t layer) {
    const std::optional<SlotGrid>& grid = checkpoint_.slot_grid();
    if (grid && !grid->extent_barriers.empty() && options_.tp > 1) return BarrierRanges(*grid, layer);
    const uint64_t unit = grid && options_.tp > 1
                              ? std::lcm(grid->extent_alignment_slots, kCutSlots) * kSlotChannels
                              : kHadamardChannels;
    return GeneralRanges(checkpoint_.layers()[layer], unit);
  }

  Result<std::vector<ChannelRange>> BarrierRanges(const SlotGrid& grid, size_t layer) const {
    if (!HasMiddleBarrier(grid) || options_.tp > kMaxBarrierTp) {
      return Refuse(fmt::format("tp {}: extent barriers [{}] of {} slots, {}", options_.tp,
                                fmt::join(grid.extent_barriers, ", "), grid.num_slots, Legal()));
    }
    std::vector<ChannelRange> ranges;
    for (int rank = 0; rank < options_.tp; ++rank) {
      const auto extent = PlanSlotExtent(grid, moe_layers_, moe_layers_[layer], options_.tp, rank);
      if (!extent)
        return Refuse(fmt::format("tp {}: {}; {}", options_.tp, extent.error().message(), Legal()));
      if (extent->first_slot % kCutSlots != 0 || extent->slots % kCutSlots != 0) {
        const uint64_t cut =
            extent->first_slot % kCutSlots != 0 ? extent->first_slot : extent->first_slot + extent->slots;
        return Refuse(fmt::format("tp {}: a cut at slot {} is off the grid of {} channels; {}", options_.tp,
                                  cut, kHadamardChannels, Legal()));
      }
      ranges.push_back({.first = extent->first_slot * kSlotChannels, .count = extent->slots * kSlotChannels});
    }
    return ranges;
  }

  // Even shares of whole units; the ranks that own one unit more take turns from layer to layer, so that the
  // totals over any run of layers differ by one unit at most.
  std::vector<ChannelRange> GeneralRanges(const MoeLayer& layer, uint64_t unit) {
    const auto ranks = static_cast<uint64_t>(options_.tp);
    const uint64_t blocks = layer.intermediate_channels / unit;
    std::vector<ChannelRange> ranges(ranks);
    for (uint64_t rank = 0; rank < ranks; ++rank) {
      const Share share = ShareOf(blocks, ranks, (rank + ranks - turn_) % ranks);
      ranges[rank] = {.first = share.first * unit, .count = share.count * unit};
    }
    turn_ = (turn_ + blocks % ranks) % ranks;
    return ranges;
  }

  static RankExtent Cut(const MoeLayer& layer, const ChannelRange& range) {
    RankExtent extent;
    if (range.count == 0) return extent;
    extent.first_channel = range.first;
    extent.channels = range.count;
    const uint64_t width = layer.intermediate_channels / layer.slices;
    for (uint64_t at = range.first; at < range.first + range.count;) {
      const uint64_t slice = at / width;
      const uint64_t end = std::min(range.first + range.count, (slice + 1) * width);
      extent.segments.push_back(
          {.slice = static_cast<uint32_t>(slice), .first_channel = at - slice * width, .channels = end - at});
      at = end;
    }
    return extent;
  }

  Result<void> CheckEqual(const MoeLayer& layer, const LayerExtents& extents) const {
    const auto [low, high] =
        std::minmax_element(extents.ranks.begin(), extents.ranks.end(),
                            [](const RankExtent& a, const RankExtent& b) { return a.channels < b.channels; });
    if (!options_.equal || low->channels == high->channels) return {};
    std::vector<int> legal;
    for (const int n : legal_) {
      if (EqualAt(n)) legal.push_back(n);
    }
    return Refuse(fmt::format(
        "tp {} with --equal: layer {} has {} channels, that is {:.6g} a rank, and cuts must fall on "
        "multiples of {}; legal tp: {}",
        options_.tp, layer.label, layer.intermediate_channels,
        static_cast<double>(layer.intermediate_channels) / options_.tp, kHadamardChannels,
        fmt::join(legal, ", ")));
  }

  bool EqualAt(int n) const {
    return std::all_of(checkpoint_.layers().begin(), checkpoint_.layers().end(), [&](const MoeLayer& layer) {
      return layer.intermediate_channels / kHadamardChannels % static_cast<uint64_t>(n) == 0;
    });
  }

  const Checkpoint& checkpoint_;
  const ExtentPlanOptions& options_;
  std::vector<int> legal_;
  std::vector<uint64_t> moe_layers_;
  uint64_t turn_ = 0;
};

// What one channel of a slice, and the slice itself, cost in bytes over a range of experts. In eighths of a
// byte where bits are counted, so that every sum stays an integer.
struct SliceCost {
  uint64_t channel_bits = 0;  // codes and intermediate-side vectors, per channel
  uint64_t hidden_bytes = 0;  // hidden-side vectors, shared ones once
  uint64_t bias_bytes = 0;    // of the down projections: read by the extent that starts at channel 0
};

class CostSum {
 public:
  CostSum(const Checkpoint& checkpoint, size_t layer) : checkpoint_(checkpoint), layer_(layer) {}

  Result<std::vector<SliceCost>> Sum(const ExpertRange& range) {
    const MoeLayer& info = checkpoint_.layers()[layer_];
    std::vector<SliceCost> costs(info.slices);
    seen_.clear();
    for (uint32_t expert = range.first_expert; expert < range.first_expert + range.experts; ++expert) {
      for (int p = info.has_gate ? 0 : 1; p < kNumProjections; ++p) {
        for (uint32_t slice = 0; slice < info.slices; ++slice) {
          if (auto r = Add(expert, static_cast<Projection>(p), slice, costs[slice]); !r)
            return tl::unexpected(r.error());
        }
      }
    }
    return costs;
  }

 private:
  static uint64_t ChannelBits(const VectorSource& vector) {
    if (vector.kind == VectorSource::Kind::kAbsent) return 0;
    return vector.kind == VectorSource::Kind::kFp16 ? 16 : 1;
  }
  static uint64_t Bytes(const VectorSource& vector) {
    uint64_t bytes = 0;
    for (const CopyRegion& region : vector.regions) bytes += region.rows * region.row_bytes;
    return bytes;
  }
  uint64_t BytesOnce(const VectorSource& vector) {
    if (vector.regions.empty()) return 0;
    const auto place = std::pair(vector.share_key, vector.regions.front().source_offset);
    if (vector.share_key != 0 && !seen_.insert(place).second) return 0;
    return Bytes(vector);
  }

  Result<void> Add(uint32_t expert, Projection projection, uint32_t slice, SliceCost& cost) {
    const MoeLayer& info = checkpoint_.layers()[layer_];
    const auto source = checkpoint_.Source(
        layer_, expert, projection,
        {.slice = slice, .first_channel = 0, .channels = info.intermediate_channels / info.slices});
    if (!source) return tl::unexpected(source.error());
    const bool down = projection == Projection::kDown;
    cost.channel_bits += info.hidden_channels * static_cast<uint64_t>(source->info.bits);
    cost.channel_bits += ChannelBits(down ? source->suh : source->svh);
    cost.hidden_bytes += BytesOnce(down ? source->svh : source->suh);
    if (down) {
      cost.bias_bytes += Bytes(source->bias);
    } else {
      cost.channel_bits += ChannelBits(source->bias);
    }
    return {};
  }

  const Checkpoint& checkpoint_;
  size_t layer_;
  std::set<std::pair<uint64_t, uint64_t>> seen_;
};

uint64_t WeightBytesOf(const RankExtent& extent, const std::vector<SliceCost>& costs) {
  uint64_t bytes = 0;
  for (const SliceExtent& segment : extent.segments) {
    const SliceCost& cost = costs[segment.slice];
    bytes += segment.channels * cost.channel_bits / 8 + cost.hidden_bytes;
    if (segment.first_channel == 0) bytes += cost.bias_bytes;
  }
  return bytes;
}

}  // namespace

ExpertRange ExtentPlan::Experts(size_t layer, int ep_rank) const {
  const Share share =
      ShareOf(experts_[layer], static_cast<uint64_t>(options_.ep), static_cast<uint64_t>(ep_rank));
  return {.first_expert = static_cast<uint32_t>(share.first), .experts = static_cast<uint32_t>(share.count)};
}

Result<ExtentPlan> ExtentPlan::Create(const Checkpoint& checkpoint, const ExtentPlanOptions& options) {
  auto layers = Planner(checkpoint, options).Plan();
  if (!layers) return tl::unexpected(layers.error());
  ExtentPlan plan;
  plan.options_ = options;
  plan.layers_ = *std::move(layers);
  plan.weight_bytes_.assign(static_cast<size_t>(plan.world()), 0);
  for (const MoeLayer& layer : checkpoint.layers()) plan.experts_.push_back(layer.experts);
  for (LayerExtents& layer : plan.layers_) {
    CostSum sum(checkpoint, layer.layer);
    const auto all = sum.Sum({.first_expert = 0, .experts = plan.experts_[layer.layer]});
    if (!all) return tl::unexpected(all.error());
    for (RankExtent& extent : layer.ranks) extent.weight_bytes = WeightBytesOf(extent, *all);
    for (int ep = 0; ep < options.ep; ++ep) {
      const auto costs = options.ep == 1 ? all : sum.Sum(plan.Experts(layer.layer, ep));
      if (!costs) return tl::unexpected(costs.error());
      for (int tp = 0; tp < options.tp; ++tp) {
        plan.weight_bytes_[static_cast<size_t>(ep * options.tp + tp)] +=
            WeightBytesOf(layer.ranks[static_cast<size_t>(tp)], *costs);
      }
    }
  }
  return plan;
}

}  // namespace espalier
