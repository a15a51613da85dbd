// SPDX-License-Identifier: Apache-2.0
//
// Instructions as text: what a compiler makes of built-in ones may be fewer than were asked for.
#include <immintrin.h>

#include "cpu/probes.h"

namespace espalier {
namespace {

// Two units with a latency of up to five cycles need ten chains.
constexpr int kChains = 10;
#define ESPALIER_CHAINS(F) F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9)

// A function of `rounds` rounds of one instruction in every chain. All factors are 1, so that the total
// counts the products.
#define ESPALIER_PROBE(name, features, Vector, one, text)                \
  __attribute__((target(features))) double name(uint64_t rounds) {       \
    Vector sums[kChains];                                                \
    for (auto& sum : sums) sum = Vector{};                               \
    const Vector factor = Vector{} + (one);                              \
    for (uint64_t round = 0; round < rounds; ++round) {                  \
      ESPALIER_CHAINS(ESPALIER_STEP_##text)                              \
    }                                                                    \
    double total = 0;                                                    \
    for (const auto& sum : sums) {                                       \
      for (uint64_t i = 0; i < sizeof(Vector) / 4; ++i) total += sum[i]; \
    }                                                                    \
    return total;                                                        \
  }
#define ESPALIER_INTO(i, instruction) \
  asm volatile(instruction " %2, %1, %0" : "+v"(sums[i]) : "v"(factor), "v"(factor));
#define ESPALIER_STEP_FMA(i) ESPALIER_INTO(i, "vfmadd231ps")
#define ESPALIER_STEP_DPWSSD(i) ESPALIER_INTO(i, "vpdpwssd")
#define ESPALIER_STEP_DPBUSD(i) ESPALIER_INTO(i, "vpdpbusd")
// Without a dot product that adds up: two instructions.
#define ESPALIER_STEP_MADDWD(i)                                                     \
  {                                                                                 \
    auto product = factor;                                                          \
    asm volatile("vpmaddwd %2, %1, %0" : "=x"(product) : "x"(factor), "x"(factor)); \
    asm volatile("vpaddd %1, %0, %0" : "+x"(sums[i]) : "x"(product));               \
  }
#define ESPALIER_STEP_DPWSSD_VEX(i) \
  asm volatile("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sums[i]) : "x"(factor), "x"(factor));
#define ESPALIER_STEP_MULADD(i) \
  asm volatile("mulps %1, %0\n\taddps %2, %0" : "+x"(sums[i]) : "x"(factor), "x"(factor));

typedef float Float16 __attribute__((vector_size(64)));
typedef float Float8 __attribute__((vector_size(32)));
typedef float Float4 __attribute__((vector_size(16)));
typedef int Int16 __attribute__((vector_size(64)));
typedef int Int8 __attribute__((vector_size(32)));

ESPALIER_PROBE(RunFma512, "avx512f", Float16, 1.0f, FMA)
ESPALIER_PROBE(RunFma256, "avx2,fma", Float8, 1.0f, FMA)
ESPALIER_PROBE(RunSse, "sse2", Float4, 1.0f, MULADD)
ESPALIER_PROBE(RunInt16Of512, "avx512f,avx512vnni", Int16, 0x10001, DPWSSD)
ESPALIER_PROBE(RunInt8Of512, "avx512f,avx512vnni", Int16, 0x1010101, DPBUSD)
ESPALIER_PROBE(RunMadd512, "avx512f,avx512bw", Int16, 0x10001, MADDWD)
ESPALIER_PROBE(RunInt16Of256, "avx2,avxvnni", Int8, 0x10001, DPWSSD_VEX)
ESPALIER_PROBE(RunMadd256, "avx2", Int8, 0x10001, MADDWD)

constexpr uint64_t Ops(uint64_t products_per_instruction) { return 2 * kChains * products_per_instruction; }

ProductKernel ChooseFp32() {
  if (__builtin_cpu_supports("avx512f")) return {"vfmadd231ps, 512 bits", RunFma512, Ops(16)};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return {"vfmadd231ps, 256 bits", RunFma256, Ops(8)};
  return {"mulps and addps, 128 bits", RunSse, Ops(4)};
}

ProductKernel ChooseInt16() {
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
  if (avx512 && __builtin_cpu_supports("avx512vnni")) return {"vpdpwssd, 512 bits", RunInt16Of512, Ops(32)};
  if (avx512) return {"vpmaddwd and vpaddd, 512 bits", RunMadd512, Ops(32)};
  if (__builtin_cpu_supports("avxvnni")) return {"vpdpwssd, 256 bits", RunInt16Of256, Ops(16)};
  if (__builtin_cpu_supports("avx2")) return {"vpmaddwd and vpaddd, 256 bits", RunMadd256, Ops(16)};
  return ChooseFp32();
}

ProductKernel ChooseInt8() {
  if (__builtin_cpu_supports("avx512vnni")) return {"vpdpbusd, 512 bits", RunInt8Of512, Ops(64)};
  return ChooseInt16();
}

}  // namespace

ProductKernel FastestProducts(ProductUnit unit) {
  __builtin_cpu_init();
  switch (unit) {
    case ProductUnit::kInt16:
      return ChooseInt16();
    case ProductUnit::kInt8:
      return ChooseInt8();
    case ProductUnit::kFp32:
      break;
  }
  return ChooseFp32();
}

}  // namespace espalier
