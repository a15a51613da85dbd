// SPDX-License-Identifier: Apache-2.0
#ifndef ESPALIER_SRC_BASE_PARALLEL_H_
#define ESPALIER_SRC_BASE_PARALLEL_H_

#include <espalier/thread_pool.h>

#include <cstdint>

namespace espalier {

// Cores this process may use; at least 1.
int HardwareThreads();

// The pool itself, or the default pool with num_threads threads at least.
inline ThreadPool& PoolOr(ThreadPool* pool, int num_threads) {
  return pool != nullptr ? *pool : ThreadPool::Default(num_threads);
}

// Calls function(context, begin, end) for disjoint ranges that cover [0, count), on at most num_threads
// threads of the pool, and returns when all are done. `pool` null = the default pool, which grows to
// num_threads; num_threads 0 = all of the pool, and without one HardwareThreads(). `grain` is the smallest
// range worth a task. Which thread gets which range is not specified: results must not depend on it. Loops
// may nest. The function must not throw.
void ParallelForRanges(ThreadPool* pool, int num_threads, uint64_t count, uint64_t grain,
                       void (*function)(const void* context, uint64_t begin, uint64_t end),
                       const void* context);

// The same with a callable f(index).
template <typename Function>
void ParallelFor(ThreadPool* pool, int num_threads, uint64_t count, const Function& function,
                 uint64_t grain = 1) {
  ParallelForRanges(
      pool, num_threads, count, grain,
      [](const void* context, uint64_t begin, uint64_t end) {
        for (uint64_t i = begin; i < end; ++i) (*static_cast<const Function*>(context))(i);
      },
      &function);
}

// On the default pool.
template <typename Function>
void ParallelFor(int num_threads, uint64_t count, const Function& function, uint64_t grain = 1) {
  ParallelFor(nullptr, num_threads, count, function, grain);
}

}  // namespace espalier

#endif  // ESPALIER_SRC_BASE_PARALLEL_H_
