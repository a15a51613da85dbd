// SPDX-License-Identifier: Apache-2.0
//
// What a machine can do at most: measured beside a benchmark, so that its numbers can be told as shares of
// it.
#ifndef ESPALIER_SRC_CPU_PROBES_H_
#define ESPALIER_SRC_CPU_PROBES_H_

#include <espalier/formats.h>
#include <espalier/moe.h>

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

// What products are taken in.
enum class ProductUnit { kFp32, kInt16, kInt8 };

// Products that are added up, in registers alone, by the fastest instruction of this processor.
struct ProductKernel {
  std::string_view name;           // "vpdpwssd, 512 bits"
  double (*run)(uint64_t rounds);  // how many products it took, as long as they fit into an fp32 value
  uint64_t ops_per_round;          // two a product
};
ProductKernel FastestProducts(ProductUnit unit);

// The unit in which the cpu executor multiplies many rows with weights of `codebook`.
ProductUnit UnitOf(CpuMode mode, Codebook codebook);

// Operations a second of num_threads threads together, the fastest of `passes`. REQUIRES: passes > 0.
double ProductRate(const ProductKernel& kernel, int num_threads, int passes);

}  // namespace espalier

#endif  // ESPALIER_SRC_CPU_PROBES_H_
