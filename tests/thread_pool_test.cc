// SPDX-License-Identifier: Apache-2.0
//
// The threads themselves. Lanes here wait for each other only where the text says why they may.
#include <espalier/thread_pool.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "base/parallel.h"
#include "moe/workspace.h"

// The thread sanitizer otherwise ends a forked child that starts threads; this test wants to see it do that.
extern "C" const char* __tsan_default_options();
extern "C" const char* __tsan_default_options() { return "die_after_fork=0"; }

namespace espalier {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<ThreadPool> MakePool(int num_threads) {
  Result<std::shared_ptr<ThreadPool>> pool = ThreadPool::Create(num_threads);
  EXPECT_TRUE(pool) << pool.error().message();
  return *pool;
}

// How often each lane of a region ran, and on how many threads at once.
struct Observed {
  explicit Observed(int num_lanes) : runs(static_cast<size_t>(num_lanes)) {}

  void operator()(int lane) {
    const int now = ++inside;
    int seen = most;
    while (now > seen && !most.compare_exchange_weak(seen, now)) {
    }
    ++runs[static_cast<size_t>(lane)];
    std::this_thread::yield();
    --inside;
  }
  bool EachOnce() const {
    return std::ranges::all_of(runs, [](const std::atomic<int>& count) { return count == 1; });
  }

  std::vector<std::atomic<int>> runs;
  std::atomic<int> inside{0};
  std::atomic<int> most{0};
};

double ProcessCpuSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// The exit code of a child that runs function(), -1 when it was killed: after 60 s by its own alarm.
template <typename Function>
int RunInChild(const Function& function) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(function() ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(ThreadPoolTest, EveryLaneRunsExactlyOnceOnNoMoreThreadsThanThereAre) {
  for (const int num_threads : {1, 2, 3, 7, 33}) {
    const std::shared_ptr<ThreadPool> pool = MakePool(num_threads);
    EXPECT_EQ(pool->num_threads(), num_threads);
    for (const int num_lanes : {-1, 0, 1, 2, 3, 8, 100, 5000}) {
      Observed observed(std::max(num_lanes, 0));
      pool->Run(num_lanes, observed);
      EXPECT_TRUE(observed.EachOnce()) << num_threads << " threads, " << num_lanes << " lanes";
      EXPECT_LE(observed.most, std::min(std::max(num_lanes, 0), num_threads));
    }
  }
}

// Every thread of the pool comes, if it is given the time: a lane keeps its thread until all are there.
TEST(ThreadPoolTest, AllThreadsTakePart) {
  for (const int num_threads : {2, 3, 7, 40}) {
    const std::shared_ptr<ThreadPool> pool = MakePool(num_threads);
    for (int repetition = 0; repetition < 3; ++repetition) {
      std::atomic<int> arrived{0};
      pool->Run(num_threads, [&](int) {
        ++arrived;
        while (arrived < num_threads) std::this_thread::yield();
      });
      EXPECT_EQ(arrived, num_threads);
      // Long enough for them to fall asleep, so that all have to be woken.
      std::this_thread::sleep_for(std::chrono::milliseconds(repetition * 20));
    }
  }
}

TEST(ThreadPoolTest, CallerRunsLaneZero) {
  const std::shared_ptr<ThreadPool> pool = MakePool(3);
  const std::thread::id caller = std::this_thread::get_id();
  for (int i = 0; i < 100; ++i) {
    std::thread::id first;
    pool->Run(3, [&](int lane) {
      if (lane == 0) first = std::this_thread::get_id();
    });
    EXPECT_EQ(first, caller);
  }
}

// Plain memory, so that the thread sanitizer checks the order as well.
TEST(ThreadPoolTest, MemoryIsOrderedByARegion) {
  const std::shared_ptr<ThreadPool> pool = MakePool(4);
  std::vector<uint64_t> values(64);
  uint64_t step = 0;
  for (int i = 0; i < 2000; ++i) {
    ++step;
    pool->Run(64, [&](int lane) { values[static_cast<size_t>(lane)] += step; });
    ASSERT_TRUE(std::ranges::all_of(values, [&](uint64_t value) { return value == step * (step + 1) / 2; }));
  }
}

TEST(ThreadPoolTest, RegionsNest) {
  const std::shared_ptr<ThreadPool> pool = MakePool(3);
  const std::shared_ptr<ThreadPool> other = MakePool(2);
  std::array<std::atomic<int>, 8 * 8 * 8> runs = {};
  pool->Run(8, [&](int i) {
    other->Run(
        8, [&](int j) { pool->Run(8, [&](int k) { ++runs[static_cast<size_t>((i * 8 + j) * 8 + k)]; }); });
  });
  for (const std::atomic<int>& count : runs) EXPECT_EQ(count, 1);
}

// Deeper than there are slots for regions in progress.
TEST(ThreadPoolTest, RegionsNestToAnyDepth) {
  const std::shared_ptr<ThreadPool> pool = MakePool(2);
  std::atomic<int> runs{0};
  struct Level {
    ThreadPool& pool;
    std::atomic<int>& runs;
    int depth;
    void operator()(int lane) const {
      ++runs;
      if (lane == 0 && depth > 1) pool.Run(2, Level{pool, runs, depth - 1});
    }
  };
  pool->Run(2, Level{*pool, runs, 150});
  EXPECT_EQ(runs, 300);
}

// 16 callers of 8 lanes on the threads of 2: each region comes to an end by its caller alone if need be.
TEST(ThreadPoolTest, ManyCallersShareThePool) {
  for (const int num_threads : {2, 8}) {
    const std::shared_ptr<ThreadPool> pool = MakePool(num_threads);
    std::atomic<int> wrong{0};
    std::vector<std::thread> callers;
    for (int i = 0; i < 16; ++i) {
      callers.emplace_back([&] {
        for (int k = 0; k < 100; ++k) {
          Observed observed(8);
          pool->Run(8, observed);
          wrong += observed.EachOnce() && observed.most <= num_threads ? 0 : 1;
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
    EXPECT_EQ(wrong, 0);
  }
}

// More callers at once than regions have slots, all inside at the same time.
TEST(ThreadPoolTest, MoreCallersThanSlots) {
  constexpr int kCallers = 80;
  const std::shared_ptr<ThreadPool> pool = MakePool(2);
  std::atomic<int> inside{0};
  std::atomic<int> runs{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < kCallers; ++i) {
    callers.emplace_back([&] {
      pool->Run(3, [&](int lane) {
        ++runs;
        // Lane 0 is its caller's, so all of them come here.
        if (lane != 0) return;
        ++inside;
        while (inside < kCallers) std::this_thread::yield();
      });
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(runs, 3 * kCallers);
}

TEST(ThreadPoolTest, PoolsHaveTheirOwnThreads) {
  const std::shared_ptr<ThreadPool> first = MakePool(3);
  const std::shared_ptr<ThreadPool> second = MakePool(3);
  const auto threads_of = [](ThreadPool& pool) {
    std::array<std::thread::id, 3> ids = {};
    std::atomic<int> arrived{0};
    pool.Run(3, [&](int lane) {  // as in AllThreadsTakePart
      ids[static_cast<size_t>(lane)] = std::this_thread::get_id();
      ++arrived;
      while (arrived < 3) std::this_thread::yield();
    });
    return std::set<std::thread::id>(ids.begin(), ids.end());
  };
  std::set<std::thread::id> all = threads_of(*first);
  EXPECT_EQ(all.size(), 3u);
  all.merge(threads_of(*second));
  EXPECT_EQ(all.size(), 5u);  // the caller is one of both
}

TEST(ThreadPoolTest, TwoPoolsAtOnce) {
  const std::shared_ptr<ThreadPool> first = MakePool(2);
  const std::shared_ptr<ThreadPool> second = MakePool(2);
  std::atomic<int> wrong{0};
  const auto work = [&](ThreadPool& pool) {
    for (int i = 0; i < 500; ++i) {
      Observed observed(4);
      pool.Run(4, observed);
      wrong += observed.EachOnce() ? 0 : 1;
    }
  };
  std::thread engine([&] { work(*second); });
  work(*first);
  engine.join();
  EXPECT_EQ(wrong, 0);
}

TEST(ThreadPoolTest, ThousandsOfTinyRegions) {
  const std::shared_ptr<ThreadPool> pool = MakePool(2);
  uint64_t sums[2] = {};
  for (uint64_t i = 0; i < 50000; ++i) pool->Run(2, [&](int lane) { sums[lane] += i; });
  EXPECT_EQ(sums[0], 50000u * 49999u / 2);
  EXPECT_EQ(sums[1], sums[0]);
}

// Pauses of every length around the time that an idle worker waits before it sleeps.
TEST(ThreadPoolTest, RegionsAtTheMomentOfFallingAsleep) {
  const std::shared_ptr<ThreadPool> pool = MakePool(2);
  for (int i = 0; i < 2000; ++i) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(i * 100);
    while (std::chrono::steady_clock::now() < end) {
    }
    std::atomic<int> arrived{0};
    // Hangs if a worker that is needed were never woken.
    pool->Run(2, [&](int) {
      ++arrived;
      while (arrived < 2) std::this_thread::yield();
    });
  }
}

TEST(ThreadPoolTest, IdleWorkersSleep) {
  const std::shared_ptr<ThreadPool> pool = MakePool(8);
  pool->Run(8, [](int) {});
  const double before = ProcessCpuSeconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  // Seven that looked for work all the time would take 0.3 s for every core.
  EXPECT_LT(ProcessCpuSeconds() - before, 0.1);
}

TEST(ThreadPoolTest, EndsWhileItsThreadsAreIdleOrJustStarted) {
  for (int i = 0; i < 50; ++i) {
    const std::shared_ptr<ThreadPool> pool = MakePool(1 + i % 5);
    if (i % 3 != 0) pool->Run(5, [](int) {});
    if (i % 10 == 9) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST(ThreadPoolTest, RefusesCountsThatAreNone) {
  for (const int num_threads : {-1, ThreadPool::kMaxThreads + 1}) {
    const Result<std::shared_ptr<ThreadPool>> pool = ThreadPool::Create(num_threads);
    ASSERT_FALSE(pool);
    EXPECT_EQ(pool.error().code(), StatusCode::kUsage);
    EXPECT_THAT(pool.error().message(), HasSubstr("legal: 0 (all cores) to 4096"));
  }
  EXPECT_EQ(MakePool(0)->num_threads(), HardwareThreads());
}

TEST(ThreadPoolTest, DefaultPoolGrowsAndStays) {
  ThreadPool& pool = ThreadPool::Default();
  EXPECT_GE(pool.num_threads(), HardwareThreads());
  const int more = pool.num_threads() + 5;
  EXPECT_EQ(&ThreadPool::Default(more), &pool);
  EXPECT_EQ(pool.num_threads(), more);
  ThreadPool::Default(2);
  EXPECT_EQ(pool.num_threads(), more);
  // They are there, and a loop of fewer threads stays with fewer.
  std::atomic<int> arrived{0};
  pool.Run(more, [&](int) {
    ++arrived;
    while (arrived < more) std::this_thread::yield();
  });
  Observed observed(1000);
  ParallelFor(2, 1000, [&](uint64_t i) { observed(static_cast<int>(i)); });
  EXPECT_TRUE(observed.EachOnce());
  EXPECT_LE(observed.most, 2);
}

TEST(ThreadPoolTest, DefaultPoolIsMadeOnceByManyThreads) {
  // In a child, as this process may have one already.
  EXPECT_EQ(RunInChild([] {
              std::array<ThreadPool*, 8> pools = {};
              std::vector<std::thread> threads;
              for (ThreadPool*& pool : pools) threads.emplace_back([&] { pool = &ThreadPool::Default(3); });
              for (std::thread& thread : threads) thread.join();
              return std::ranges::count(pools, pools[0]) == 8 && pools[0]->num_threads() >= 3;
            }),
            0);
}

TEST(ThreadPoolTest, ChildOfAForkRunsEverything) {
  std::shared_ptr<ThreadPool> pool = MakePool(4);
  ThreadPool* const parent_default = &ThreadPool::Default(4);
  pool->Run(4, [](int) {});
  EXPECT_EQ(RunInChild([&] {
              Observed inherited(100);
              pool->Run(100, inherited);
              if (!inherited.EachOnce() || inherited.most != 1 || pool->num_threads() != 1) return false;
              pool.reset();  // has nobody to wait for
              Observed through_parent(10);
              parent_default->Run(10, through_parent);
              if (!through_parent.EachOnce() || through_parent.most != 1) return false;
              // A new one, which has threads again.
              ThreadPool& own = ThreadPool::Default(3);
              if (&own == parent_default || own.num_threads() != 3) return false;
              std::atomic<int> arrived{0};
              own.Run(3, [&](int) {
                ++arrived;
                while (arrived < 3) std::this_thread::yield();
              });
              return RunInChild([] {
                       Observed again(50);
                       ParallelFor(2, 50, [&](uint64_t i) { again(static_cast<int>(i)); });
                       return again.EachOnce();
                     }) == 0;
            }),
            0);
  // And the parent's are as they were.
  std::atomic<int> arrived{0};
  pool->Run(4, [&](int) {
    ++arrived;
    while (arrived < 4) std::this_thread::yield();
  });
  EXPECT_EQ(&ThreadPool::Default(4), parent_default);
}

// While others are in the middle of regions, and of making pools.
TEST(ThreadPoolTest, ForkUnderLoad) {
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    for (int i = 0; !stop; ++i) ThreadPool::Default(2 + i % 20).Run(4, [](int) {});
  });
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(RunInChild([] {
                Observed observed(50);
                ThreadPool::Default(2).Run(50, observed);
                return observed.EachOnce();
              }),
              0);
  }
  stop = true;
  busy.join();
}

TEST(RunOnRangesTest, EveryTaskRunsOnceAndLanesAreNotShared) {
  for (const int num_threads : {1, 2, 5}) {
    const std::shared_ptr<ThreadPool> pool = MakePool(num_threads);
    for (const int num_lanes : {1, 2, 3, 7, 64, 511, 512, 513, 700}) {
      for (const uint64_t num_tasks : {0, 1, 2, 3, 63, 64, 65, 513, 4099}) {
        std::vector<std::atomic<int>> runs(num_tasks);
        std::vector<std::atomic<int>> inside(static_cast<size_t>(num_lanes));
        std::atomic<int> shared{0};
        RunOnRanges(pool.get(), num_lanes, num_tasks, [&](uint64_t lane, uint64_t task) {
          shared += inside.at(lane)++ == 0 ? 0 : 1;
          ++runs.at(task);
          --inside[lane];
        });
        ASSERT_EQ(shared, 0);
        for (const std::atomic<int>& count : runs) {
          ASSERT_EQ(count, 1) << num_threads << " threads, " << num_lanes << " lanes, " << num_tasks;
        }
      }
    }
  }
}

TEST(RunOnRangesTest, AloneALaneWalksUpwardsThroughItsOwnAndThenThroughHalves) {
  const std::shared_ptr<ThreadPool> pool = MakePool(1);
  std::vector<uint64_t> order;
  RunOnRanges(pool.get(), 2, 12, [&](uint64_t, uint64_t task) { order.push_back(task); });
  EXPECT_THAT(order, testing::ElementsAre(0, 1, 2, 3, 4, 5, 9, 10, 11, 7, 8, 6));
}

// A lane that is held up loses everything behind the task it is at; here it waits until that has happened.
TEST(RunOnRangesTest, WorkOfASlowLaneIsTaken) {
  const std::shared_ptr<ThreadPool> pool = MakePool(2);
  constexpr uint64_t kTasks = 100;
  std::atomic<uint64_t> done{0};
  std::atomic<uint64_t> of_slow{0};
  RunOnRanges(pool.get(), 2, kTasks, [&](uint64_t lane, uint64_t) {
    ++done;
    if (lane != 0) return;
    ++of_slow;
    while (done < kTasks) std::this_thread::yield();
  });
  EXPECT_EQ(done, kTasks);
  EXPECT_LE(of_slow, 1u);  // none if the other lane was done before it came
}

TEST(RunOnRangesTest, RangesAreTakenFromBothEnds) {
  TaskRange range;
  uint64_t begin = 0, end = 0;
  EXPECT_FALSE(range.TakeLastHalf(begin, end));
  EXPECT_FALSE(range.TakeFirst());
  range.Set(TaskRange::kMaxTasks - 3, TaskRange::kMaxTasks);
  EXPECT_EQ(range.TakeFirst(), TaskRange::kMaxTasks - 3);
  EXPECT_TRUE(range.TakeLastHalf(begin, end));
  EXPECT_EQ(begin, TaskRange::kMaxTasks - 1);
  EXPECT_EQ(end, TaskRange::kMaxTasks);
  EXPECT_EQ(range.size(), 1u);
  EXPECT_TRUE(range.TakeLastHalf(begin, end));
  EXPECT_EQ(begin, TaskRange::kMaxTasks - 2);
  EXPECT_EQ(range.size(), 0u);
  EXPECT_FALSE(range.TakeFirst());
}

}  // namespace
}  // namespace espalier
