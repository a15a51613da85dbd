// SPDX-License-Identifier: Apache-2.0
#include "base/parallel.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#ifdef ESPALIER_STD_THREADS
#include <atomic>
#include <system_error>
#include <vector>
#else
#include <tbb/blocked_range.h>
#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>
#endif

namespace espalier {
namespace {

using RangeFunction = void (*)(const void* context, uint64_t begin, uint64_t end);

#ifdef ESPALIER_STD_THREADS

// Threads take chunks from a shared counter; the caller works too, so a thread that the system refuses
// to start costs speed and nothing else.
void RunOnThreads(int num_threads, uint64_t count, uint64_t grain, RangeFunction function,
                  const void* context) {
  // Four chunks a thread even out chunks of different cost.
  const uint64_t wanted_chunks = static_cast<uint64_t>(num_threads) * 4;
  const uint64_t chunk = std::max(grain, count / wanted_chunks + (count % wanted_chunks != 0 ? 1 : 0));
  const uint64_t num_chunks = count / chunk + (count % chunk != 0 ? 1 : 0);
  std::atomic<uint64_t> next{0};
  const auto work = [&] {
    for (uint64_t i = next.fetch_add(1); i < num_chunks; i = next.fetch_add(1)) {
      function(context, i * chunk, i + 1 == num_chunks ? count : (i + 1) * chunk);
    }
  };
  std::vector<std::thread> threads;
  const uint64_t helpers = std::min<uint64_t>(static_cast<uint64_t>(num_threads), num_chunks) - 1;
  try {
    for (uint64_t i = 0; i < helpers; ++i) threads.emplace_back(work);
  } catch (const std::system_error&) {  // the system is out of threads
  }
  work();
  for (std::thread& thread : threads) thread.join();
}

#else

void RunOnThreads(int num_threads, uint64_t count, uint64_t grain, RangeFunction function,
                  const void* context) {
  // Asked for more than it allows, TBB writes a warning to stderr, and runs no more than that anyway.
  const size_t allowed = tbb::global_control::active_value(tbb::global_control::max_allowed_parallelism);
  tbb::task_arena arena(static_cast<int>(std::min<size_t>(static_cast<size_t>(num_threads), allowed)));
  arena.execute([&] {
    tbb::parallel_for(
        tbb::blocked_range<uint64_t>(0, count, grain),
        [&](const tbb::blocked_range<uint64_t>& range) { function(context, range.begin(), range.end()); });
  });
}

#endif

}  // namespace

int HardwareThreads() {
  // The kernel refuses a mask smaller than its own, which can exceed the 1024 bits of cpu_set_t.
  for (int cpus = 1024; cpus <= 1 << 20; cpus *= 4) {
    cpu_set_t* set = CPU_ALLOC(cpus);
    if (set == nullptr) break;
    const size_t size = CPU_ALLOC_SIZE(cpus);
    const bool ok = sched_getaffinity(0, size, set) == 0;
    const int error = errno;
    const int count = ok ? CPU_COUNT_S(size, set) : 0;
    CPU_FREE(set);
    if (ok) return std::max(1, count);
    if (error != EINVAL) break;
  }
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void ParallelForRanges(int num_threads, uint64_t count, uint64_t grain,
                       void (*function)(const void* context, uint64_t begin, uint64_t end),
                       const void* context) {
  if (count == 0) return;
  grain = std::max<uint64_t>(grain, 1);
  if (num_threads <= 0) num_threads = HardwareThreads();
  if (num_threads == 1 || count <= grain) {
    function(context, 0, count);
    return;
  }
  RunOnThreads(num_threads, count, grain, function, context);
}

}  // namespace espalier
