// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include <numeric>
#include <span>

#include "cpu/probes.h"

namespace espalier {
namespace {

// Two units with a latency of four cycles need eight chains; two more cover the loop. They differ from each
// other, as equal ones would be computed once, and are written out: a loop over them would keep them in
// memory.
constexpr int kChains = 10;
constexpr float kStart = 1.0f;
constexpr float kStep = 0.01f;
constexpr float kFactor = 0.999f;
constexpr float kTerm = 0.001f;

float Sum(std::span<const float> lanes) { return std::accumulate(lanes.begin(), lanes.end(), 0.0f); }

__attribute__((target("avx512f"))) float RunAvx512(uint64_t rounds) {
  __m512 sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = _mm512_set1_ps(kStart + kStep * static_cast<float>(i));
  const __m512 factor = _mm512_set1_ps(kFactor);
  const __m512 term = _mm512_set1_ps(kTerm);
  for (uint64_t round = 0; round < rounds; ++round) {
    sums[0] = _mm512_fmadd_ps(sums[0], factor, term);
    sums[1] = _mm512_fmadd_ps(sums[1], factor, term);
    sums[2] = _mm512_fmadd_ps(sums[2], factor, term);
    sums[3] = _mm512_fmadd_ps(sums[3], factor, term);
    sums[4] = _mm512_fmadd_ps(sums[4], factor, term);
    sums[5] = _mm512_fmadd_ps(sums[5], factor, term);
    sums[6] = _mm512_fmadd_ps(sums[6], factor, term);
    sums[7] = _mm512_fmadd_ps(sums[7], factor, term);
    sums[8] = _mm512_fmadd_ps(sums[8], factor, term);
    sums[9] = _mm512_fmadd_ps(sums[9], factor, term);
  }
  float lanes[kChains * 16];
  for (int i = 0; i < kChains; ++i) _mm512_storeu_ps(lanes + i * 16, sums[i]);
  return Sum(lanes);
}

__attribute__((target("avx2,fma"))) float RunAvx2(uint64_t rounds) {
  __m256 sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = _mm256_set1_ps(kStart + kStep * static_cast<float>(i));
  const __m256 factor = _mm256_set1_ps(kFactor);
  const __m256 term = _mm256_set1_ps(kTerm);
  for (uint64_t round = 0; round < rounds; ++round) {
    sums[0] = _mm256_fmadd_ps(sums[0], factor, term);
    sums[1] = _mm256_fmadd_ps(sums[1], factor, term);
    sums[2] = _mm256_fmadd_ps(sums[2], factor, term);
    sums[3] = _mm256_fmadd_ps(sums[3], factor, term);
    sums[4] = _mm256_fmadd_ps(sums[4], factor, term);
    sums[5] = _mm256_fmadd_ps(sums[5], factor, term);
    sums[6] = _mm256_fmadd_ps(sums[6], factor, term);
    sums[7] = _mm256_fmadd_ps(sums[7], factor, term);
    sums[8] = _mm256_fmadd_ps(sums[8], factor, term);
    sums[9] = _mm256_fmadd_ps(sums[9], factor, term);
  }
  float lanes[kChains * 8];
  for (int i = 0; i < kChains; ++i) _mm256_storeu_ps(lanes + i * 8, sums[i]);
  return Sum(lanes);
}

float RunSse(uint64_t rounds) {
  __m128 sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = _mm_set1_ps(kStart + kStep * static_cast<float>(i));
  const __m128 factor = _mm_set1_ps(kFactor);
  const __m128 term = _mm_set1_ps(kTerm);
  for (uint64_t round = 0; round < rounds; ++round) {
    sums[0] = _mm_add_ps(_mm_mul_ps(sums[0], factor), term);
    sums[1] = _mm_add_ps(_mm_mul_ps(sums[1], factor), term);
    sums[2] = _mm_add_ps(_mm_mul_ps(sums[2], factor), term);
    sums[3] = _mm_add_ps(_mm_mul_ps(sums[3], factor), term);
    sums[4] = _mm_add_ps(_mm_mul_ps(sums[4], factor), term);
    sums[5] = _mm_add_ps(_mm_mul_ps(sums[5], factor), term);
    sums[6] = _mm_add_ps(_mm_mul_ps(sums[6], factor), term);
    sums[7] = _mm_add_ps(_mm_mul_ps(sums[7], factor), term);
    sums[8] = _mm_add_ps(_mm_mul_ps(sums[8], factor), term);
    sums[9] = _mm_add_ps(_mm_mul_ps(sums[9], factor), term);
  }
  float lanes[kChains * 4];
  for (int i = 0; i < kChains; ++i) _mm_storeu_ps(lanes + i * 4, sums[i]);
  return Sum(lanes);
}

}  // namespace

const FmaKernel& WidestFmaKernel() {
  static const FmaKernel kernel = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return FmaKernel{"avx512f", RunAvx512, 2 * 16 * kChains};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      return FmaKernel{"avx2", RunAvx2, 2 * 8 * kChains};
    }
    return FmaKernel{"sse", RunSse, 2 * 4 * kChains};
  }();
  return kernel;
}

}  // namespace espalier
