// SPDX-License-Identifier: Apache-2.0
//
// Who owns which intermediate channels of which layer (tensor parallelism) and which experts (expert
// parallelism), before any weight is read. Source of the slot rule: docs/format.md, "Extents".
#ifndef ESPALIER_EXTENT_PLAN_H_
#define ESPALIER_EXTENT_PLAN_H_

#include <espalier/checkpoint.h>
#include <espalier/status.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace espalier {

inline constexpr int kMaxTp = 1024;              // plan and run
inline constexpr int kMaxBarrierTp = 24;         // exl3-v1 with a barrier
inline constexpr uint64_t kMaxWorld = 1u << 16;  // tp * ep

// Slots [first_slot, first_slot + slots) of one layer; slots may be 0.
struct SlotExtent {
  uint64_t first_slot = 0;
  uint64_t slots = 0;

  friend bool operator==(const SlotExtent&, const SlotExtent&) = default;
};

// The planner of exl3-v1 containers: two halves around the barrier, owners rotating from layer to layer by
// one rank (by two at tp 10, which keeps the totals of the ranks within four slots of each other).
// `moe_layers` ascends. Pure. Errors: kGeometry for a layer without experts, tp outside 2..24, a rank outside
// 0..tp-1, an odd number of slots, barriers other than exactly [num_slots / 2], an alignment that does not
// divide the half.
Result<SlotExtent> PlanSlotExtent(const SlotGrid& grid, std::span<const uint64_t> moe_layers, uint64_t layer,
                                  int tp, int rank);

// What one tensor-parallel rank owns of every expert of one layer. Channels are global ones: slice r of S
// covers [r * I / S, (r + 1) * I / S).
struct RankExtent {
  uint64_t first_channel = 0;         // 0 where it owns nothing
  uint64_t channels = 0;              // a multiple of 128
  std::vector<SliceExtent> segments;  // inside the slices, ascending; none where it owns nothing
  uint64_t weight_bytes = 0;          // codes and vectors it reads of all experts of the layer
};

struct LayerExtents {
  size_t layer = 0;               // position in Checkpoint::layers()
  std::vector<RankExtent> ranks;  // by tp rank
};

struct ExpertRange {
  uint32_t first_expert = 0;
  uint32_t experts = 0;
};

struct ExtentPlanOptions {
  int tp = 1;
  int ep = 1;
  bool equal = false;  // refuse unless every rank owns the same number of channels
};

// Immutable. Global rank = ep_rank * tp + tp_rank.
class ExtentPlan {
 public:
  // Cost: linear in the number of matrices. Errors: kGeometry when tp or ep is out of range, a barrier is in
  // the wrong place, or `equal` cannot be had; the message lists the legal sizes.
  static Result<ExtentPlan> Create(const Checkpoint& checkpoint, const ExtentPlanOptions& options);

  int tp() const { return options_.tp; }
  int ep() const { return options_.ep; }
  int world() const { return options_.tp * options_.ep; }
  std::span<const LayerExtents> layers() const { return layers_; }
  // Experts of one ep rank: contiguous, the first E mod ep ranks own one more. REQUIRES: in range.
  ExpertRange Experts(size_t layer, int ep_rank) const;
  // Codes and vectors that a global rank reads over all layers.
  uint64_t WeightBytes(int global_rank) const { return weight_bytes_[static_cast<size_t>(global_rank)]; }

 private:
  ExtentPlan() = default;
  ExtentPlanOptions options_;
  std::vector<LayerExtents> layers_;
  std::vector<uint32_t> experts_;       // by layer
  std::vector<uint64_t> weight_bytes_;  // by global rank
};

}  // namespace espalier

#endif  // ESPALIER_EXTENT_PLAN_H_
