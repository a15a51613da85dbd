// SPDX-License-Identifier: Apache-2.0
#ifndef ESPALIER_SRC_BASE_PARALLEL_H_
#define ESPALIER_SRC_BASE_PARALLEL_H_

#include <cstdint>

namespace espalier {

// Cores this process may use; at least 1.
int HardwareThreads();

// Calls function(context, begin, end) for disjoint ranges that cover [0, count), on at most
// num_threads threads (0 = HardwareThreads()), and returns when all are done. `grain` is the smallest
// range worth a task. Which thread gets which range is not specified: results must not depend on it.
// oneTBB; on std::thread in the thread-sanitizer build, as TBB itself is not instrumented.
void ParallelForRanges(int num_threads, uint64_t count, uint64_t grain,
                       void (*function)(const void* context, uint64_t begin, uint64_t end),
                       const void* context);

// The same with a callable f(index).
template <typename Function>
void ParallelFor(int num_threads, uint64_t count, const Function& function, uint64_t grain = 1) {
  ParallelForRanges(
      num_threads, count, grain,
      [](const void* context, uint64_t begin, uint64_t end) {
        for (uint64_t i = begin; i < end; ++i) (*static_cast<const Function*>(context))(i);
      },
      &function);
}

}  // namespace espalier

#endif  // ESPALIER_SRC_BASE_PARALLEL_H_
