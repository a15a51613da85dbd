// SPDX-License-Identifier: Apache-2.0
//
// 16 lanes: AVX-512 F, BW, DQ and VL, as every such processor but Knights Landing has them. What VNNI and
// BF16 add is in the files that are compiled for them.
#ifndef ESPALIER_SRC_CPU_VECTOR_AVX512_H_
#define ESPALIER_SRC_CPU_VECTOR_AVX512_H_

#include <immintrin.h>

#include "cpu/vector_kernels.h"

namespace espalier::cpu {
namespace {

// The sum of a loop as an operand that is read and written. As built-in functions g++ 12 gives every sum two
// registers, and with 24 sums keeps them in memory: 95 instead of 200 billion products a second.
#define ESPALIER_INTO(instruction, sum, a, b) asm(instruction " %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b))

struct VectorAvx512 {
  using Int = __m512i;
  using Float = __m512;
  static constexpr uint32_t kLanes = 16;
  static constexpr int kMaxRows = 12;  // 24 sums, two vectors of weights and an input of 32 registers
  // Two sums a row; the words of a step twice, constants, what is being decoded.
  static constexpr int FusedRows(int bits) { return bits <= 4 ? 6 : 4; }

  static ESPALIER_INLINE Int Load(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static ESPALIER_INLINE void Store(uint32_t* p, Int v) { _mm512_storeu_si512(p, v); }
  static ESPALIER_INLINE Float LoadFloat(const float* p) { return _mm512_loadu_ps(p); }
  static ESPALIER_INLINE void StoreFloat(float* p, Float v) { _mm512_storeu_ps(p, v); }
  static ESPALIER_INLINE Float LoadFp16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static ESPALIER_INLINE Int Set(uint32_t v) { return _mm512_set1_epi32(static_cast<int>(v)); }
  static ESPALIER_INLINE Float SetFloat(float v) { return _mm512_set1_ps(v); }
  static ESPALIER_INLINE Int AsInt(Float v) { return _mm512_castps_si512(v); }
  static ESPALIER_INLINE Float AsFloat(Int v) { return _mm512_castsi512_ps(v); }

  static ESPALIER_INLINE Int And(Int a, Int b) { return _mm512_and_si512(a, b); }
  static ESPALIER_INLINE Int Or(Int a, Int b) { return _mm512_or_si512(a, b); }
  static ESPALIER_INLINE Int AndXor(Int a, Int b, Int c) { return _mm512_ternarylogic_epi32(a, b, c, 0x6A); }
  static ESPALIER_INLINE Int Add(Int a, Int b) { return _mm512_add_epi32(a, b); }
  static ESPALIER_INLINE Int Multiply(Int a, Int b) { return _mm512_mullo_epi32(a, b); }
  static ESPALIER_INLINE Int LargerInt(Int a, Int b) { return _mm512_max_epu32(a, b); }
  template <int n>
  static ESPALIER_INLINE Int ShiftRight(Int v) {
    return _mm512_srli_epi32(v, n);
  }
  template <int n>
  static ESPALIER_INLINE Int ShiftLeft(Int v) {
    return _mm512_slli_epi32(v, n);
  }
  template <int n>
  static ESPALIER_INLINE Int ShiftRightSigned(Int v) {
    return _mm512_srai_epi32(v, n);
  }
  template <int n>
  static ESPALIER_INLINE Int ShiftRightSigned16(Int v) {
    return _mm512_srai_epi16(v, n);
  }
  static ESPALIER_INLINE Int PreviousGroup(Int v) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(7, 0, 1, 2, 3, 4, 5, 6, 15, 8, 9, 10, 11, 12, 13, 14),
                                    v);
  }
  // A blend and a rotation: both run beside the multiplications, which a double shift would not.
  static ESPALIER_INLINE Int Straddle(Int before, Int word) {
    return _mm512_mask_blend_epi16(0xAAAAAAAAu, before, word);
  }
  template <int n>
  static ESPALIER_INLINE Int StraddleRight(Int straddle) {
    return _mm512_ror_epi32(straddle, 16 + n);
  }

  static ESPALIER_INLINE Int ByteSums(Int words) {
    return _mm512_madd_epi16(ByteHalves(words), _mm512_set1_epi16(1));
  }
  static ESPALIER_INLINE Int ByteHalves(Int words) {
    return _mm512_maddubs_epi16(words, _mm512_set1_epi8(1));
  }
  static ESPALIER_INLINE Int ByteSumPair(Int first, Int second) {
    const Int zero = _mm512_setzero_si512();
    return _mm512_mask_blend_epi16(0xAAAAAAAAu, _mm512_dbsad_epu8(first, zero, 0),
                                   _mm512_dbsad_epu8(second, zero, 0));
  }
  static ESPALIER_INLINE Int MergeBytes(Int low, Int high) {
    return _mm512_ternarylogic_epi32(Set(0x00FF00FF), low, high, 0xCA);
  }
  static ESPALIER_INLINE Int DotInt16(Int sum, Int weights, Int input) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(weights, input));
  }

  static ESPALIER_INLINE Int DotFloat(Int sum, Int weights, Int input) {
    ESPALIER_INTO("vfmadd231ps", sum, weights, input);
    return sum;
  }
  static ESPALIER_INLINE Float AddFloat(Float a, Float b) { return _mm512_add_ps(a, b); }
  static ESPALIER_INLINE Float SubtractFloat(Float a, Float b) { return _mm512_sub_ps(a, b); }
  static ESPALIER_INLINE Float MultiplyFloat(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static ESPALIER_INLINE Float DivideFloat(Float a, Float b) { return _mm512_div_ps(a, b); }
  static ESPALIER_INLINE Float Fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  // The second operand where one is NaN.
  static ESPALIER_INLINE Float Max(Float a, Float b) { return _mm512_max_ps(a, b); }
  static ESPALIER_INLINE Float Min(Float a, Float b) { return _mm512_min_ps(a, b); }
  static ESPALIER_INLINE Float Abs(Float v) { return _mm512_abs_ps(v); }
  static ESPALIER_INLINE Float Negated(Float v) { return _mm512_xor_ps(v, SetFloat(-0.0f)); }
  static ESPALIER_INLINE Float Round(Float v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT); }
  static ESPALIER_INLINE Float ToFloat(Int v) { return _mm512_cvtepi32_ps(v); }
  static ESPALIER_INLINE Int ToInt(Float v) { return _mm512_cvtps_epi32(v); }
  static ESPALIER_INLINE Float PowerOfTwo(Float n) {
    return AsFloat(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), Set(127)), 23));
  }
  static ESPALIER_INLINE Float SelectNegative(Float of, Float yes, Float no) {
    return _mm512_mask_blend_ps(_mm512_movepi32_mask(AsInt(of)), no, yes);
  }
  static ESPALIER_INLINE Float WithSignOf(Float magnitude, Float sign) {
    return AsFloat(_mm512_ternarylogic_epi32(Set(0x80000000u), AsInt(sign), AsInt(magnitude), 0xCA));
  }
  static ESPALIER_INLINE Float RoundToFp16(Float v) {
    return _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  // Rounded to bf16, in the upper half of every lane; NaN stays NaN.
  static ESPALIER_INLINE Int UpperBf16(Float v) {
    const Int bits = AsInt(v);
    const Int odd = And(ShiftRight<16>(bits), Set(1));
    const Int rounded = And(Add(bits, Add(odd, Set(0x7FFF))), Set(0xFFFF0000u));
    return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), Set(0x7FC00000u));
  }
  // The low 16 bits of every lane, in order; the low 8 bits in the order of Operand::kInt8.
  static ESPALIER_INLINE void StoreLow16(uint32_t* to, Int v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(v));
  }
  static ESPALIER_INLINE void StoreInt8(uint32_t* to, Int v) {
    const __m128i order = _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(v), order));
  }
  static ESPALIER_INLINE float LargestLane(Int v) {
    const uint32_t largest = _mm512_reduce_max_epu32(v);
    float value;
    __builtin_memcpy(&value, &largest, sizeof(value));
    return value;
  }
  static ESPALIER_INLINE int32_t SumOfLanes(Int v) { return _mm512_reduce_add_epi32(v); }

  // Strides 1, 2, 4 and 8: partner + v in the lower lane of a pair, partner - v in the upper one.
  template <int kSigns>
  static ESPALIER_INLINE Float Butterfly(Float v, Float partner) {
    // Times 1 or -1 is exact: one rounding, that of the sum.
    return Fma(v, _mm512_mask_blend_ps(kSigns, SetFloat(1), SetFloat(-1)), partner);
  }
  static ESPALIER_INLINE Float HadamardLanes(Float v) {
    v = Butterfly<0xAAAA>(v, _mm512_permute_ps(v, 0xB1));
    v = Butterfly<0xCCCC>(v, _mm512_permute_ps(v, 0x4E));
    v = Butterfly<0xF0F0>(v, _mm512_shuffle_f32x4(v, v, 0xB1));
    return Butterfly<0xFF00>(v, _mm512_shuffle_f32x4(v, v, 0x4E));
  }
  static ESPALIER_INLINE void LoadLaneOrder(const float* sums, Float (&v)[8]) {
    for (int panel = 0; panel < 4; ++panel) {
      const Float low = LoadFloat(sums + panel * 32), high = LoadFloat(sums + panel * 32 + 16);
      v[panel * 2] = _mm512_shuffle_f32x4(low, high, 0x44);
      v[panel * 2 + 1] = _mm512_shuffle_f32x4(low, high, 0xEE);
    }
  }
};

struct VectorAvx512Vnni : VectorAvx512 {
  static ESPALIER_INLINE Int ByteSums(Int words) {
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(), words, _mm512_set1_epi8(1));
  }
  static ESPALIER_INLINE Int DotInt16(Int sum, Int weights, Int input) {
    ESPALIER_INTO("vpdpwssd", sum, weights, input);
    return sum;
  }
  static ESPALIER_INLINE Int DotInt8(Int sum, Int weights, Int input) {
    ESPALIER_INTO("vpdpbusd", sum, weights, input);
    return sum;
  }
};

// Without VNNI: mul1 by 16-bit products, everything else in fp32.
[[maybe_unused]] Operand OperandWithInt16(CpuMode mode, Codebook codebook, uint32_t) {
  return mode != CpuMode::kExact && codebook == Codebook::kMul1 ? Operand::kInt16 : Operand::kFloat;
}
// Up to here decoding takes longer than the products, and decoding to bytes longer than to 16 bits.
constexpr uint32_t kMostInt16Rows = 4;
[[maybe_unused]] Operand OperandWithInt8(CpuMode mode, Codebook codebook, uint32_t rows) {
  const bool int8 = mode == CpuMode::kInt8 && codebook == Codebook::kMul1 && rows > kMostInt16Rows;
  return int8 ? Operand::kInt8 : OperandWithInt16(mode, codebook, rows);
}

template <class V>
void FillMul1(KernelTable& table) {
  FillExact<V>(table);
  FillDecode<V, Operand::kInt16, Codebook::kMul1>(table);
  FillMultiply<V, Operand::kInt16>(table);
  FillFused<V, Operand::kInt16, Codebook::kMul1, 1, kMaxFusedRows>(
      table.fused[static_cast<int>(Codebook::kMul1)]);
  FillFusedFloat<V>(table);
}

}  // namespace
}  // namespace espalier::cpu

#endif  // ESPALIER_SRC_CPU_VECTOR_AVX512_H_
