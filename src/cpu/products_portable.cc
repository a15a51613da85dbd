// SPDX-License-Identifier: Apache-2.0
#include "cpu/probes.h"

namespace espalier {
namespace {

// Independent chains, enough for any vector width that the compiler may choose.
constexpr int kChains = 128;

double Run(uint64_t rounds) {
  float sums[kChains] = {};
  for (uint64_t round = 0; round < rounds; ++round) {
    // The compiler must not know the factor, nor that all sums are equal.
    float factor = 1;
    asm volatile("" : "+m"(factor), "+m"(sums));
    for (float& sum : sums) sum += factor * factor;
  }
  double total = 0;
  for (const float sum : sums) total += double{sum};
  return total;
}

}  // namespace

// Where the kernels are plain C++, all of them multiply in fp32.
ProductKernel FastestProducts(ProductUnit) { return {"fp32 as compiled", Run, 2 * kChains}; }

}  // namespace espalier
