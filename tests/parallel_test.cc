// SPDX-License-Identifier: Apache-2.0
#include "base/parallel.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace espalier {
namespace {

TEST(ParallelTest, EveryIndexRunsExactlyOnce) {
  for (const int num_threads : {0, 1, 2, 3, 8, 64}) {
    for (const uint64_t count : {0, 1, 2, 7, 64, 1000, 4099}) {
      for (const uint64_t grain : {0, 1, 3, 100, 5000}) {
        std::vector<std::atomic<int>> runs(count);
        ParallelFor(num_threads, count, [&](uint64_t i) { ++runs[i]; }, grain);
        for (uint64_t i = 0; i < count; ++i) {
          ASSERT_EQ(runs[i], 1) << num_threads << " threads, index " << i << " of " << count;
        }
      }
    }
  }
}

TEST(ParallelTest, LoopsRunOnThePoolThatTheyAreGiven) {
  const Result<std::shared_ptr<ThreadPool>> pool = ThreadPool::Create(3);
  ASSERT_TRUE(pool);
  for (const int num_threads : {0, 1, 2, 3, 8}) {
    std::mutex mutex;
    std::set<std::thread::id> threads;
    std::vector<std::atomic<int>> runs(500);
    ParallelFor(pool->get(), num_threads, runs.size(), [&](uint64_t i) {
      ++runs[i];
      const std::lock_guard lock(mutex);
      threads.insert(std::this_thread::get_id());
    });
    for (const std::atomic<int>& count : runs) ASSERT_EQ(count, 1);
    EXPECT_LE(threads.size(), num_threads == 0 ? 3u : std::min(3u, static_cast<unsigned>(num_threads)));
  }
}

// 7 on a machine of 2 cores as well: a lane keeps its thread until all have come.
TEST(ParallelTest, AsManyThreadsAsAskedForOnAnyMachine) {
  for (const int num_threads : {2, 3, 7}) {
    std::atomic<int> arrived{0};
    ParallelFor(num_threads, static_cast<uint64_t>(num_threads), [&](uint64_t) {
      ++arrived;
      while (arrived < num_threads) std::this_thread::yield();
    });
    EXPECT_EQ(arrived, num_threads);
  }
}

TEST(ParallelTest, RangesAreDisjointAndCoverTheCount) {
  struct Context {
    std::mutex mutex;
    std::set<std::pair<uint64_t, uint64_t>> ranges;
  } context;
  constexpr uint64_t kCount = 10007;
  ParallelForRanges(
      nullptr, 4, kCount, 10,
      [](const void* raw, uint64_t begin, uint64_t end) {
        auto& seen = *static_cast<Context*>(const_cast<void*>(raw));
        const std::lock_guard lock(seen.mutex);
        seen.ranges.emplace(begin, end);
      },
      &context);
  uint64_t next = 0;
  for (const auto& [begin, end] : context.ranges) {
    EXPECT_EQ(begin, next);
    EXPECT_LT(begin, end);
    next = end;
  }
  EXPECT_EQ(next, kCount);
}

TEST(ParallelTest, OneThreadAndOneGrainRunOnTheCaller) {
  const std::thread::id caller = std::this_thread::get_id();
  int calls = 0;
  ParallelFor(1, 1000, [&](uint64_t) { calls += std::this_thread::get_id() == caller ? 1 : 0; });
  EXPECT_EQ(calls, 1000);
  calls = 0;
  ParallelFor(8, 1000, [&](uint64_t) { calls += std::this_thread::get_id() == caller ? 1 : 0; }, 1000);
  EXPECT_EQ(calls, 1000);
}

TEST(ParallelTest, NeverMoreThreadsAtOnceThanAskedFor) {
  std::atomic<int> inside{0};
  std::atomic<int> most{0};
  ParallelFor(2, 2000, [&](uint64_t) {
    const int now = ++inside;
    int seen = most;
    while (now > seen && !most.compare_exchange_weak(seen, now)) {
    }
    std::this_thread::yield();
    --inside;
  });
  EXPECT_LE(most, 2);
  EXPECT_GE(most, 1);
}

TEST(ParallelTest, LoopsNest) {
  std::vector<std::atomic<int>> runs(20 * 30);
  ParallelFor(2, 20, [&](uint64_t i) { ParallelFor(2, 30, [&](uint64_t j) { ++runs[i * 30 + j]; }); });
  for (const std::atomic<int>& count : runs) EXPECT_EQ(count, 1);
}

TEST(ParallelTest, LoopsOfSeveralThreadsRunSideBySide) {
  std::atomic<uint64_t> sum{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < 20; ++k) ParallelFor(2, 100, [&](uint64_t index) { sum += index; });
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(sum, 4u * 20u * 4950u);
}

TEST(ParallelTest, HardwareThreadsFollowTheAffinityMask) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  EXPECT_EQ(HardwareThreads(), CPU_COUNT(&before));
  int first = 0;
  while (!CPU_ISSET(first, &before)) ++first;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  const int threads = HardwareThreads();
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
  EXPECT_EQ(threads, 1);
}

}  // namespace
}  // namespace espalier
