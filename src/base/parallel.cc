// SPDX-License-Identifier: Apache-2.0
#include "base/parallel.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <thread>

namespace espalier {

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

void ParallelForRanges(ThreadPool* pool, int num_threads, uint64_t count, uint64_t grain,
                       void (*function)(const void* context, uint64_t begin, uint64_t end),
                       const void* context) {
  if (count == 0) return;
  grain = std::max<uint64_t>(grain, 1);
  if (num_threads <= 0) num_threads = pool != nullptr ? pool->num_threads() : HardwareThreads();
  if (num_threads == 1 || count <= grain) {
    function(context, 0, count);
    return;
  }
  // Four chunks a thread even out chunks of different cost.
  const uint64_t wanted_chunks = static_cast<uint64_t>(num_threads) * 4;
  const uint64_t chunk = std::max(grain, count / wanted_chunks + (count % wanted_chunks != 0 ? 1 : 0));
  const uint64_t num_chunks = count / chunk + (count % chunk != 0 ? 1 : 0);
  const int num_lanes = static_cast<int>(
      std::min({static_cast<uint64_t>(num_threads), num_chunks, uint64_t{ThreadPool::kMaxThreads}}));
  std::atomic<uint64_t> next{0};
  PoolOr(pool, num_lanes).Run(num_lanes, [&](int) {
    for (uint64_t i = next.fetch_add(1); i < num_chunks; i = next.fetch_add(1)) {
      function(context, i * chunk, i + 1 == num_chunks ? count : (i + 1) * chunk);
    }
  });
}

}  // namespace espalier
