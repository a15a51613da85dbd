// SPDX-License-Identifier: Apache-2.0
//
// One way of storing routed experts. A layout turns names, shapes and config into the neutral
// description of Checkpoint; nothing above this interface knows which layout is on disk. A new layout is
// one new file with one Open function, listed in checkpoint.cc.
#ifndef ESPALIER_SRC_CHECKPOINT_LAYOUT_H_
#define ESPALIER_SRC_CHECKPOINT_LAYOUT_H_

#include <espalier/checkpoint.h>
#include <espalier/status.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace espalier {

// Immutable once made. REQUIRES for all: layer, expert, slice in range, gate only where has_gate.
class Layout {
 public:
  virtual ~Layout() = default;

  virtual std::string_view name() const = 0;
  virtual MatrixInfo Matrix(size_t layer, uint32_t expert, Projection projection, uint32_t slice) const = 0;
  virtual std::string MatrixName(size_t layer, uint32_t expert, Projection projection,
                                 uint32_t slice) const = 0;
  // `extent` lies on the 128 grid inside its slice.
  virtual Result<MatrixSource> Source(size_t layer, uint32_t expert, Projection projection,
                                      const SliceExtent& extent) const = 0;
  virtual Result<void> CheckPadding(size_t layer, uint64_t first_channel, uint64_t channels) const = 0;
  virtual std::vector<int> LegalTpSizes() const = 0;
  virtual std::optional<SlotGrid> slot_grid() const { return std::nullopt; }
};

inline constexpr int kMaxLegalTp = 24;

// N <= 24 such that `blocks` cuttable units of every layer leave no rank empty.
std::vector<int> GeneralLegalTpSizes(uint64_t min_blocks);

// The planner of exl3-v1 containers with a barrier in the middle: accepted N with no empty rank.
std::vector<int> BarrierLegalTpSizes(uint64_t num_slots, uint64_t alignment_slots);

}  // namespace espalier

#endif  // ESPALIER_SRC_CHECKPOINT_LAYOUT_H_
