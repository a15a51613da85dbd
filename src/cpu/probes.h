// SPDX-License-Identifier: Apache-2.0
//
// What a machine can do at most: measured beside a benchmark, so that its numbers can be told as shares of
// it.
#ifndef ESPALIER_SRC_CPU_PROBES_H_
#define ESPALIER_SRC_CPU_PROBES_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace espalier {

// The sum of the buffer's 64-bit words, read once by num_threads threads (0 = all cores), each in one long
// run.
uint64_t SumWords(std::span<const std::byte> buffer, int num_threads);

// Bytes a second of the fastest of `passes` sums. REQUIRES: passes > 0.
double ReadRate(std::span<const std::byte> buffer, int num_threads, int passes);

// fp32 multiply-adds without memory, by the widest vectors of this processor.
struct FmaKernel {
  std::string_view name;  // "avx512f"
  // `rounds` times as many operations as the second, two per multiply-add. The result depends on all of them.
  float (*run)(uint64_t rounds);
  uint64_t flops_per_round;
};
const FmaKernel& WidestFmaKernel();

// Operations a second of num_threads threads together, the fastest of `passes`. REQUIRES: passes > 0.
double FmaRate(int num_threads, int passes);

}  // namespace espalier

#endif  // ESPALIER_SRC_CPU_PROBES_H_
