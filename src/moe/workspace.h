// SPDX-License-Identifier: Apache-2.0
#ifndef ESPALIER_SRC_MOE_WORKSPACE_H_
#define ESPALIER_SRC_MOE_WORKSPACE_H_

#include <espalier/moe.h>
#include <espalier/status.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

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

// Runs function(lane, task) for every task in [0, num_tasks) on at most num_lanes threads of the pool (null =
// the default pool). Two calls at the same time never have the same lane: it numbers scratch memory. Lanes
// take the next task of all.
template <typename Function>
void RunOnLanes(ThreadPool* pool, int num_lanes, uint64_t num_tasks, const Function& function) {
  std::atomic<uint64_t> next{0};
  PoolOr(pool, num_lanes).Run(num_lanes, [&](int lane) {
    for (uint64_t task = next.fetch_add(1); task < num_tasks; task = next.fetch_add(1)) {
      function(static_cast<uint64_t>(lane), task);
    }
  });
}

template <typename Function>
void RunOnLanes(int num_lanes, uint64_t num_tasks, const Function& function) {
  RunOnLanes(nullptr, num_lanes, num_tasks, function);
}

// Tasks [begin, end) that a lane has before it. The owner takes from the front, others from the back.
class alignas(64) TaskRange {  // a line each, so that owners do not wait for each other's
 public:
  static constexpr uint64_t kMaxTasks = UINT32_MAX;

  void Set(uint64_t begin, uint64_t end) { range_.store(begin << 32 | end, std::memory_order_relaxed); }
  uint64_t size() const { return SizeOf(range_.load(std::memory_order_relaxed)); }

  std::optional<uint64_t> TakeFirst() {
    uint64_t range = range_.load(std::memory_order_relaxed);
    while (SizeOf(range) != 0) {
      if (range_.compare_exchange_weak(range, range + (uint64_t{1} << 32), std::memory_order_relaxed)) {
        return range >> 32;
      }
    }
    return std::nullopt;
  }

  // The last half, at least one task. False when there is none.
  bool TakeLastHalf(uint64_t& begin, uint64_t& end) {
    uint64_t range = range_.load(std::memory_order_relaxed);
    while (SizeOf(range) != 0) {
      const uint64_t taken = (SizeOf(range) + 1) / 2;
      if (range_.compare_exchange_weak(range, range - taken, std::memory_order_relaxed)) {
        end = static_cast<uint32_t>(range);
        begin = end - taken;
        return true;
      }
    }
    return false;
  }

 private:
  static uint64_t SizeOf(uint64_t range) { return static_cast<uint32_t>(range) - (range >> 32); }

  std::atomic<uint64_t> range_{0};  // begin << 32 | end; begin <= end
};

// Like RunOnLanes, for tasks that stream through memory: lane i walks the tasks [i * n / lanes,
// (i + 1) * n / lanes) in ascending order. A lane that has none left takes the last half of the range that
// has most, and walks that. The order is no promise, and there may be fewer threads than lanes.
template <typename Function>
void RunOnRanges(ThreadPool* pool, int num_lanes, uint64_t num_tasks, const Function& function) {
  // On the caller's stack, 32 KiB. Lanes beyond have nothing of their own, and take from others at once.
  constexpr int kMaxRanges = 512;
  if (num_tasks > TaskRange::kMaxTasks) return RunOnLanes(pool, num_lanes, num_tasks, function);
  const int num_ranges = std::clamp(num_lanes, 1, kMaxRanges);
  alignas(TaskRange) std::byte memory[kMaxRanges * sizeof(TaskRange)];  // only what is used is written
  const std::span<TaskRange> ranges(reinterpret_cast<TaskRange*>(memory), static_cast<size_t>(num_ranges));
  for (size_t i = 0; i < ranges.size(); ++i) {
    std::construct_at(&ranges[i])->Set(i * num_tasks / ranges.size(), (i + 1) * num_tasks / ranges.size());
  }
  PoolOr(pool, num_lanes).Run(num_lanes, [&](int lane) {
    TaskRange beyond;
    TaskRange& own = lane < num_ranges ? ranges[static_cast<size_t>(lane)] : beyond;
    for (;;) {
      while (const std::optional<uint64_t> task = own.TakeFirst()) {
        function(static_cast<uint64_t>(lane), *task);
      }
      TaskRange& longest = *std::ranges::max_element(ranges, {}, &TaskRange::size);
      uint64_t begin = 0, end = 0;
      if (longest.TakeLastHalf(begin, end)) {
        own.Set(begin, end);
      } else if (std::ranges::all_of(ranges, [](const TaskRange& range) { return range.size() == 0; })) {
        return;  // what others have taken and not put in their range yet, they run themselves
      }
    }
  });
}

}  // namespace espalier

#endif  // ESPALIER_SRC_MOE_WORKSPACE_H_
