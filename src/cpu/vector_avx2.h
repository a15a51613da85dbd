// SPDX-License-Identifier: Apache-2.0
//
// 8 lanes: AVX2, FMA and F16C.
#ifndef ESPALIER_SRC_CPU_VECTOR_AVX2_H_
#define ESPALIER_SRC_CPU_VECTOR_AVX2_H_

#include <immintrin.h>

#include "cpu/vector_kernels.h"

namespace espalier::cpu {
namespace {

struct VectorAvx2 {
  using Int = __m256i;
  using Float = __m256;
  static constexpr uint32_t kLanes = 8;
  static constexpr int FusedRows(int) { return 3; }  // decoding first is as fast beyond
  static constexpr int kMaxRows = 6;  // 12 sums, two vectors of weights and an input of 16 registers

  static ESPALIER_INLINE Int Load(const uint32_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static ESPALIER_INLINE void Store(uint32_t* p, Int v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
  }
  static ESPALIER_INLINE Float LoadFloat(const float* p) { return _mm256_loadu_ps(p); }
  static ESPALIER_INLINE void StoreFloat(float* p, Float v) { _mm256_storeu_ps(p, v); }
  static ESPALIER_INLINE Float LoadFp16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static ESPALIER_INLINE Int Set(uint32_t v) { return _mm256_set1_epi32(static_cast<int>(v)); }
  static ESPALIER_INLINE Float SetFloat(float v) { return _mm256_set1_ps(v); }
  static ESPALIER_INLINE Int AsInt(Float v) { return _mm256_castps_si256(v); }
  static ESPALIER_INLINE Float AsFloat(Int v) { return _mm256_castsi256_ps(v); }

  static ESPALIER_INLINE Int And(Int a, Int b) { return _mm256_and_si256(a, b); }
  static ESPALIER_INLINE Int Or(Int a, Int b) { return _mm256_or_si256(a, b); }
  static ESPALIER_INLINE Int AndXor(Int a, Int b, Int c) { return _mm256_xor_si256(And(a, b), c); }
  static ESPALIER_INLINE Int Add(Int a, Int b) { return _mm256_add_epi32(a, b); }
  static ESPALIER_INLINE Int Multiply(Int a, Int b) { return _mm256_mullo_epi32(a, b); }
  static ESPALIER_INLINE Int LargerInt(Int a, Int b) { return _mm256_max_epu32(a, b); }
  template <int n>
  static ESPALIER_INLINE Int ShiftRight(Int v) {
    return _mm256_srli_epi32(v, n);
  }
  template <int n>
  static ESPALIER_INLINE Int ShiftLeft(Int v) {
    return _mm256_slli_epi32(v, n);
  }
  template <int n>
  static ESPALIER_INLINE Int ShiftRightSigned(Int v) {
    return _mm256_srai_epi32(v, n);
  }
  template <int n>
  static ESPALIER_INLINE Int ShiftRightSigned16(Int v) {
    return _mm256_srai_epi16(v, n);
  }
  static ESPALIER_INLINE Int PreviousGroup(Int v) {
    return _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(7, 0, 1, 2, 3, 4, 5, 6));
  }
  static ESPALIER_INLINE Int Straddle(Int before, Int word) { return SwapHalves(LowThenHigh(before, word)); }
  template <int n>
  static ESPALIER_INLINE Int StraddleRight(Int straddle) {
    return ShiftRight<n>(straddle);
  }

  // By 16-bit lanes.
  template <int n>
  static ESPALIER_INLINE Int ShiftRight16(Int v) {
    return _mm256_srli_epi16(v, n);
  }
  template <int n>
  static ESPALIER_INLINE Int ShiftLeft16(Int v) {
    return _mm256_slli_epi16(v, n);
  }
  // Both are there before anything behind it: compilers sort independent chains one behind the other.
  static ESPALIER_INLINE void Alternate(Int (&v)[2]) { asm volatile("" : "+x"(v[0]), "+x"(v[1])); }
  static ESPALIER_INLINE Int Add16(Int a, Int b) { return _mm256_add_epi16(a, b); }
  static ESPALIER_INLINE Int Multiply16(Int a, Int b) { return _mm256_mullo_epi16(a, b); }
  static ESPALIER_INLINE Int MultiplyHigh16(Int a, Int b) { return _mm256_mulhi_epu16(a, b); }
  // -1 where sum = a + addend did not go beyond 16 bits.
  static ESPALIER_INLINE Int NoCarry16(Int sum, Int addend) {
    return _mm256_cmpeq_epi16(_mm256_max_epu16(sum, addend), sum);
  }
  static ESPALIER_INLINE Int LowThenHigh(Int low, Int high) { return _mm256_blend_epi16(low, high, 0xAA); }
  static ESPALIER_INLINE Int SwapHalves(Int v) {
    return _mm256_shuffle_epi8(v, _mm256_setr_epi8(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13, 2, 3,
                                                   0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  }

  static ESPALIER_INLINE Int ByteSums(Int words) {
    return _mm256_madd_epi16(ByteHalves(words), _mm256_set1_epi16(1));
  }
  static ESPALIER_INLINE Int ByteHalves(Int words) {
    return _mm256_maddubs_epi16(words, _mm256_set1_epi8(1));
  }
  // As text: of built-in functions g++ makes a sum and a copy, and keeps 12 sums of 16 registers in memory.
  static ESPALIER_INLINE Int DotInt16(Int sum, Int weights, Int input) {
    const Int products = _mm256_madd_epi16(weights, input);
    asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products));
    return sum;
  }
  static ESPALIER_INLINE Int DotFloat(Int sum, Int weights, Int input) {
    asm("vfmadd231ps %1, %2, %0" : "+x"(sum) : "x"(weights), "x"(input));
    return sum;
  }

  static ESPALIER_INLINE Float AddFloat(Float a, Float b) { return _mm256_add_ps(a, b); }
  static ESPALIER_INLINE Float SubtractFloat(Float a, Float b) { return _mm256_sub_ps(a, b); }
  static ESPALIER_INLINE Float MultiplyFloat(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static ESPALIER_INLINE Float DivideFloat(Float a, Float b) { return _mm256_div_ps(a, b); }
  static ESPALIER_INLINE Float Fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  // The second operand where one is NaN.
  static ESPALIER_INLINE Float Max(Float a, Float b) { return _mm256_max_ps(a, b); }
  static ESPALIER_INLINE Float Min(Float a, Float b) { return _mm256_min_ps(a, b); }
  static ESPALIER_INLINE Float Abs(Float v) { return _mm256_andnot_ps(SetFloat(-0.0f), v); }
  static ESPALIER_INLINE Float Negated(Float v) { return _mm256_xor_ps(v, SetFloat(-0.0f)); }
  static ESPALIER_INLINE Float Round(Float v) {
    return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static ESPALIER_INLINE Float ToFloat(Int v) { return _mm256_cvtepi32_ps(v); }
  static ESPALIER_INLINE Int ToInt(Float v) { return _mm256_cvtps_epi32(v); }
  static ESPALIER_INLINE Float PowerOfTwo(Float n) {
    return AsFloat(ShiftLeft<23>(Add(_mm256_cvtps_epi32(n), Set(127))));
  }
  static ESPALIER_INLINE Float SelectNegative(Float of, Float yes, Float no) {
    return _mm256_blendv_ps(no, yes, of);
  }
  static ESPALIER_INLINE Float WithSignOf(Float magnitude, Float sign) {
    return _mm256_or_ps(Abs(magnitude), _mm256_and_ps(SetFloat(-0.0f), sign));
  }
  static ESPALIER_INLINE Float RoundToFp16(Float v) {
    return _mm256_cvtph_ps(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static ESPALIER_INLINE void StoreLow16(uint32_t* to, Int v) {
    const Int order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1, 0, 1, 4, 5,
                                       8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1);
    const Int packed = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(v, order), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
  }
  // Of lanes i and i + 4 as word i.
  static ESPALIER_INLINE void StoreLow16Apart(uint32_t* to, Int v) {
    const __m128i later = _mm_slli_epi32(_mm256_extracti128_si256(v, 1), 16);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_blend_epi16(_mm256_castsi256_si128(v), later, 0xAA));
  }
  static ESPALIER_INLINE float LargestLane(Int v) {
    uint32_t lanes[8], largest = 0;
    Store(lanes, v);
    for (const uint32_t lane : lanes) largest = lane > largest ? lane : largest;
    float value;
    __builtin_memcpy(&value, &largest, sizeof(value));
    return value;
  }
  static ESPALIER_INLINE int32_t SumOfLanes(Int v) {
    uint32_t lanes[8], sum = 0;
    Store(lanes, v);
    for (const uint32_t lane : lanes) sum += lane;
    return static_cast<int32_t>(sum);
  }

  // Strides 1, 2 and 4: partner + v in the lower lane of a pair, partner - v in the upper one.
  static ESPALIER_INLINE Float Butterfly(Float v, Float partner, Float signs) {
    return Fma(v, signs, partner);  // times 1 or -1 is exact: one rounding, that of the sum
  }
  static ESPALIER_INLINE Float HadamardLanes(Float v) {
    v = Butterfly(v, _mm256_permute_ps(v, 0xB1), _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1));
    v = Butterfly(v, _mm256_permute_ps(v, 0x4E), _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1));
    return Butterfly(v, _mm256_permute2f128_ps(v, v, 1), _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1));
  }
  static ESPALIER_INLINE void LoadLaneOrder(const float* sums, Float (&v)[16]) {
    for (int panel = 0; panel < 4; ++panel) {
      const float* lanes = sums + panel * 32;
      v[panel * 4] = LoadFloat(lanes);
      v[panel * 4 + 1] = LoadFloat(lanes + 16);
      v[panel * 4 + 2] = LoadFloat(lanes + 8);
      v[panel * 4 + 3] = LoadFloat(lanes + 24);
    }
  }
};

Operand ChooseOperand(CpuMode mode, Codebook codebook, uint32_t) {
  if (mode == CpuMode::kExact) return Operand::kFloat;
  return codebook == Codebook::kMul1 ? Operand::kInt16Apart : Operand::kCutFloat;
}

template <class V, Codebook kCodebook>
void FillCut(KernelTable& table) {
  FillDecode<V, Operand::kCutFloat, kCodebook>(table);
  FillFused<V, Operand::kCutFloat, kCodebook, 1, 3>(table.fused[static_cast<int>(kCodebook)]);
}

template <class V>
void FillAvx2(KernelTable& table) {
  FillExact<V>(table);
  FillCut<V, Codebook::k3Inst>(table);
  FillCut<V, Codebook::kMcg>(table);
  FillMultiply<V, Operand::kCutFloat>(table);
  FillDecode<V, Operand::kInt16Apart, Codebook::kMul1>(table);
  FillMultiply<V, Operand::kInt16Apart>(table);
  FillFused<V, Operand::kInt16Apart, Codebook::kMul1, 1, 2>(table.fused[static_cast<int>(Codebook::kMul1)]);
  FillFusedFloat<V>(table);
  table.operand = ChooseOperand;
}

}  // namespace
}  // namespace espalier::cpu

#endif  // ESPALIER_SRC_CPU_VECTOR_AVX2_H_
