// SPDX-License-Identifier: Apache-2.0
//
// The loops are text: of built-in functions g++ makes a product and a copy.
#include "cpu/probes.h"

namespace espalier {
namespace {

// Two units with a latency of up to five cycles need ten chains.
constexpr uint64_t kChains = 10;
#define ESPALIER_CHAINS(F, r) \
  F(r, "0") F(r, "1") F(r, "2") F(r, "3") F(r, "4") F(r, "5") F(r, "6") F(r, "7") F(r, "8") F(r, "9")

// One instruction or two on the sum in register i; register 10 holds the factors.
#define ESPALIER_THREE(instruction, r, i) instruction " %%" r "10, %%" r "10, %%" r i "\n\t"
#define ESPALIER_FMA(r, i) ESPALIER_THREE("vfmadd231ps", r, i)
#define ESPALIER_DPWSSD(r, i) ESPALIER_THREE("vpdpwssd", r, i)
#define ESPALIER_DPWSSD_VEX(r, i) ESPALIER_THREE("%{vex%} vpdpwssd", r, i)
#define ESPALIER_DPBUSD(r, i) ESPALIER_THREE("vpdpbusd", r, i)
#define ESPALIER_MADDWD(r, i) \
  "vpmaddwd %%" r "10, %%" r "10, %%" r "11\n\tvpaddd %%" r "11, %%" r i ", %%" r i "\n\t"
#define ESPALIER_MULADD(r, i) "mulps %%" r "10, %%" r i "\n\taddps %%" r "10, %%" r i "\n\t"

// A function of `rounds` rounds of `STEP` in every chain. All factors are 1, so that the sums count the
// products; they go to and from memory before and after the loop.
#define ESPALIER_PROBE(name, features, Element, vector_bytes, one, r, move, STEP, end)                       \
  __attribute__((target(features))) double name(uint64_t rounds) {                                           \
    constexpr int kElements = vector_bytes / sizeof(Element);                                                \
    alignas(64) Element sums[kChains][kElements] = {};                                                       \
    alignas(64) Element factors[kElements];                                                                  \
    for (Element & factor : factors) factor = one;                                                           \
    if (rounds > 0) {                                                                                        \
      asm volatile(ESPALIER_MOVES(LOAD, move, r, #vector_bytes) move                                         \
                   " (%2), %%" r                                                                             \
                   "10\n\t"                                                                                  \
                   "1:\n\t" ESPALIER_CHAINS(STEP, r) "sub $1, %0\n\tjnz 1b\n\t" ESPALIER_MOVES(              \
                       STORE, move, r, #vector_bytes) end                                                    \
                   : "+r"(rounds)                                                                            \
                   : "r"(&sums[0][0]), "r"(&factors[0])                                                      \
                   : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", \
                     "xmm9", "xmm10", "xmm11");                                                              \
    }                                                                                                        \
    double total = 0;                                                                                        \
    for (const auto& chain : sums) {                                                                         \
      for (const Element sum : chain) total += sum;                                                          \
    }                                                                                                        \
    return total;                                                                                            \
  }
#define ESPALIER_LOAD(move, r, bytes, i) move " " i "*" bytes "(%1), %%" r i "\n\t"
#define ESPALIER_STORE(move, r, bytes, i) move " %%" r i ", " i "*" bytes "(%1)\n\t"
#define ESPALIER_MOVES(WAY, move, r, bytes)                                           \
  ESPALIER_##WAY(move, r, bytes, "0") ESPALIER_##WAY(move, r, bytes, "1")             \
      ESPALIER_##WAY(move, r, bytes, "2") ESPALIER_##WAY(move, r, bytes, "3")         \
          ESPALIER_##WAY(move, r, bytes, "4") ESPALIER_##WAY(move, r, bytes, "5")     \
              ESPALIER_##WAY(move, r, bytes, "6") ESPALIER_##WAY(move, r, bytes, "7") \
                  ESPALIER_##WAY(move, r, bytes, "8") ESPALIER_##WAY(move, r, bytes, "9")

ESPALIER_PROBE(RunFma512, "avx512f", float, 64, 1, "zmm", "vmovups", ESPALIER_FMA, "vzeroupper")
ESPALIER_PROBE(RunFma256, "avx2,fma", float, 32, 1, "ymm", "vmovups", ESPALIER_FMA, "vzeroupper")
ESPALIER_PROBE(RunSse, "sse2", float, 16, 1, "xmm", "movups", ESPALIER_MULADD, "")
ESPALIER_PROBE(RunInt16Of512, "avx512f,avx512vnni", int32_t, 64, 0x10001, "zmm", "vmovups", ESPALIER_DPWSSD,
               "vzeroupper")
ESPALIER_PROBE(RunInt8Of512, "avx512f,avx512vnni", int32_t, 64, 0x1010101, "zmm", "vmovups", ESPALIER_DPBUSD,
               "vzeroupper")
ESPALIER_PROBE(RunMadd512, "avx512f,avx512bw", int32_t, 64, 0x10001, "zmm", "vmovups", ESPALIER_MADDWD,
               "vzeroupper")
ESPALIER_PROBE(RunInt16Of256, "avx2", int32_t, 32, 0x10001, "ymm", "vmovups", ESPALIER_DPWSSD_VEX,
               "vzeroupper")
ESPALIER_PROBE(RunMadd256, "avx2", int32_t, 32, 0x10001, "ymm", "vmovups", ESPALIER_MADDWD, "vzeroupper")

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
