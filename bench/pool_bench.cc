// SPDX-License-Identifier: Apache-2.0
//
// What a region of a thread pool costs, while the threads are warm and after they have slept:
//   empty     a lane for each thread, nothing in it. Lanes that nobody came for are the caller's, so this is
//   what
//             a caller pays
//   together  every lane keeps its thread until all have come: until the last thread is at work and back.
//   Lanes
//             may not do that in a program; here the pool has one caller and a thread for every lane
// Every lane must have run once in each region, or nothing is timed.
#include <benchmark/benchmark.h>
#include <espalier/thread_pool.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/provenance.h"

namespace espalier {
namespace {

using Clock = std::chrono::steady_clock;

void Empty(ThreadPool& pool, int num_threads) {
  pool.Run(num_threads, [](int lane) { benchmark::DoNotOptimize(lane); });
}

void Together(ThreadPool& pool, int num_threads) {
  std::atomic<int> arrived{0};
  pool.Run(num_threads, [&](int) {
    arrived.fetch_add(1, std::memory_order_relaxed);
    while (arrived.load(std::memory_order_relaxed) < num_threads) {
    }
  });
}

using Region = void (*)(ThreadPool& pool, int num_threads);

bool LanesRunOnce(ThreadPool& pool) {
  constexpr int kLanes = 64;
  std::array<std::atomic<int>, kLanes> runs = {};
  for (int i = 0; i < 1000; ++i) pool.Run(kLanes, [&](int lane) { ++runs[static_cast<size_t>(lane)]; });
  return std::ranges::all_of(runs, [](const std::atomic<int>& count) { return count == 1000; });
}

void Warm(benchmark::State& state, ThreadPool& pool, Region region) {
  for (auto _ : state) region(pool, pool.num_threads());
}

void AfterIdle(benchmark::State& state, ThreadPool& pool, Region region) {
  std::vector<double> samples_us;
  for (auto _ : state) {
    std::this_thread::sleep_for(std::chrono::microseconds(state.range(0)));
    const Clock::time_point begin = Clock::now();
    region(pool, pool.num_threads());
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    state.SetIterationTime(seconds);
    samples_us.push_back(seconds * 1e6);
  }
  std::ranges::sort(samples_us);
  state.counters["median_us"] = samples_us[samples_us.size() / 2];
  state.counters["p90_us"] = samples_us[samples_us.size() * 9 / 10];
}

int RunAll() {
  std::vector<std::shared_ptr<ThreadPool>> pools;
  std::vector<int> counts = {HardwareThreads()};  // halved down to 1
  while (counts.back() > 1) counts.push_back(counts.back() / 2);
  for (const int num_threads : counts) {
    Result<std::shared_ptr<ThreadPool>> made = ThreadPool::Create(num_threads);
    if (!made) {
      std::fprintf(stderr, "%s\n", made.error().message().c_str());
      return 1;
    }
    ThreadPool& pool = **made;
    pools.push_back(*std::move(made));
    if (!LanesRunOnce(pool)) {
      std::fprintf(stderr, "%d threads: a lane ran twice or never\n", num_threads);
      return 1;
    }
    for (const auto& [name, region] :
         {std::pair<const char*, Region>{"empty", Empty}, {"together", Together}}) {
      const std::string prefix = fmt::format("pool/{}/{} threads", name, num_threads);
      benchmark::RegisterBenchmark(
          (prefix + "/warm").c_str(),
          [&pool, region = region](benchmark::State& state) { Warm(state, pool, region); })
          ->Repetitions(5)
          ->UseRealTime();
      benchmark::RegisterBenchmark(
          (prefix + "/idle_us").c_str(),
          [&pool, region = region](benchmark::State& state) { AfterIdle(state, pool, region); })
          ->Arg(1000)
          ->Arg(10000)
          ->Iterations(200)
          ->UseManualTime();
    }
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace
}  // namespace espalier

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  espalier::bench::AddProvenance();
  return espalier::RunAll();
}
