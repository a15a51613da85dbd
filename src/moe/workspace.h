// SPDX-License-Identifier: Apache-2.0
#ifndef ESPALIER_SRC_MOE_WORKSPACE_H_
#define ESPALIER_SRC_MOE_WORKSPACE_H_

#include <espalier/moe.h>
#include <espalier/status.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/checked.h"
#include "base/parallel.h"

namespace espalier {

// Lays arrays one after the other, each at kWorkspaceAlignmentBytes. The same code that sizes a
// workspace places the arrays in it.
class WorkspaceLayout {
 public:
  // Offset of an array of `count` elements. Meaningless once the sizes have overflowed.
  uint64_t Add(CheckedBytes count, uint64_t element_bytes) {
    const uint64_t offset = total_.value().value_or(0);
    const CheckedBytes padded = count * element_bytes + (kWorkspaceAlignmentBytes - 1);
    total_ += padded;
    if (const std::optional<uint64_t> end = total_.value()) total_ = *end - *end % kWorkspaceAlignmentBytes;
    return offset;
  }

  // kCapacity when no such workspace can exist.
  Result<uint64_t> TotalBytes() const {
    const std::optional<uint64_t> total = total_.value();
    if (!total || *total > uint64_t{1} << 62) {
      return Error(StatusCode::kCapacity, "the workspace for this capacity exceeds 2^62 bytes");
    }
    return *total;
  }

 private:
  CheckedBytes total_;
};

// Tokens that are taken together: no more than the plan, max_chunk_tokens or max_chunk_routes allow.
inline uint64_t ChunkTokens(const MoePlanOptions& options, uint64_t max_chunk_tokens,
                            uint64_t max_chunk_routes) {
  const uint64_t by_routes = std::max<uint64_t>(max_chunk_routes / std::max(options.top_k, 1u), 1);
  return std::min({options.max_tokens, max_chunk_tokens, by_routes});
}

// Lanes of a call: options.num_threads, or all cores where it is 0 (a plan has resolved it).
inline int NumLanes(int num_threads) { return num_threads > 0 ? num_threads : HardwareThreads(); }

// Runs function(lane, task) for every task in [0, num_tasks) on at most num_lanes threads. Two calls
// at the same time never have the same lane: it numbers scratch memory.
template <typename Function>
void RunOnLanes(int num_lanes, uint64_t num_tasks, const Function& function) {
  std::atomic<uint64_t> next{0};
  ParallelFor(num_lanes, static_cast<uint64_t>(num_lanes), [&](uint64_t lane) {
    for (uint64_t task = next.fetch_add(1); task < num_tasks; task = next.fetch_add(1)) function(lane, task);
  });
}

// Like RunOnLanes; to be replaced.
template <typename Function>
void RunOnRanges(int num_lanes, uint64_t num_tasks, const Function& function) {
  RunOnLanes(num_lanes, num_tasks, function);
}

}  // namespace espalier

#endif  // ESPALIER_SRC_MOE_WORKSPACE_H_
