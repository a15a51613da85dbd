// SPDX-License-Identifier: Apache-2.0
#include "cpu/probes.h"

namespace espalier {
namespace {

// Independent chains, enough for any vector width that the compiler may choose.
constexpr int kChains = 128;

float Run(uint64_t rounds) {
  float sums[kChains];
  // Different from each other: equal chains would be computed once.
  for (int i = 0; i < kChains; ++i) sums[i] = 1.0f + 0.01f * static_cast<float>(i);
  for (uint64_t round = 0; round < rounds; ++round) {
    for (float& sum : sums) sum = sum * 0.999f + 0.001f;
  }
  float total = 0;
  for (const float sum : sums) total += sum;
  return total;
}

}  // namespace

const FmaKernel& WidestFmaKernel() {
  static constexpr FmaKernel kernel = {"compiled", Run, 2 * kChains};
  return kernel;
}

}  // namespace espalier
