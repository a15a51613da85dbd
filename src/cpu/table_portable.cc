// SPDX-License-Identifier: Apache-2.0
//
// Plain C++ with the vectors that g++ and clang have on every machine; all modes in fp32.
#include "cpu/kernel_list.h"
#include "cpu/vector_kernels.h"

namespace espalier::cpu {
namespace {

struct VectorPortable {
  typedef uint32_t Int __attribute__((vector_size(32)));
  typedef float Float __attribute__((vector_size(32)));
  typedef int32_t SignedInt __attribute__((vector_size(32)));
  typedef uint16_t Int16 __attribute__((vector_size(16)));
  static constexpr uint32_t kLanes = 8;
  static constexpr int kMaxRows = 2;  // 8 sums and 4 vectors of weights of 16 registers of 4 lanes
  static constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: the unit of its mantissa is 1

  template <class T, class From>
  static ESPALIER_INLINE T Read(const From* p) {
    T v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
  }
  static ESPALIER_INLINE Int Load(const uint32_t* p) { return Read<Int>(p); }
  static ESPALIER_INLINE void Store(uint32_t* p, Int v) { __builtin_memcpy(p, &v, sizeof(v)); }
  static ESPALIER_INLINE Float LoadFloat(const float* p) { return Read<Float>(p); }
  static ESPALIER_INLINE void StoreFloat(float* p, Float v) { __builtin_memcpy(p, &v, sizeof(v)); }
  static ESPALIER_INLINE Float LoadFp16(const uint16_t* p) {
    const Int half = __builtin_convertvector(Read<Int16>(p), Int);
    const Float magnitude = AsFloat((half & 0x7FFFu) << 13) * 0x1p112f;
    const Int special = (half & 0x7C00u) == 0x7C00u ? Set(0x7F800000u) : Set(0);
    return AsFloat(AsInt(magnitude) | special | (half & 0x8000u) << 16);
  }
  static ESPALIER_INLINE Int Set(uint32_t v) { return Int{} + v; }
  static ESPALIER_INLINE Float SetFloat(float v) { return Float{} + v; }
  static ESPALIER_INLINE Int AsInt(Float v) { return reinterpret_cast<Int>(v); }
  static ESPALIER_INLINE Float AsFloat(Int v) { return reinterpret_cast<Float>(v); }

  static ESPALIER_INLINE Int And(Int a, Int b) { return a & b; }
  static ESPALIER_INLINE Int Or(Int a, Int b) { return a | b; }
  static ESPALIER_INLINE Int AndXor(Int a, Int b, Int c) { return (a & b) ^ c; }
  static ESPALIER_INLINE Int Add(Int a, Int b) { return a + b; }
  static ESPALIER_INLINE Int Multiply(Int a, Int b) { return a * b; }
  static ESPALIER_INLINE Int LargerInt(Int a, Int b) { return a > b ? a : b; }
  template <int n>
  static ESPALIER_INLINE Int ShiftRight(Int v) {
    return v >> n;
  }
  template <int n>
  static ESPALIER_INLINE Int ShiftLeft(Int v) {
    return v << n;
  }
  template <int n>
  static ESPALIER_INLINE Int ShiftRightSigned(Int v) {
    return reinterpret_cast<Int>(reinterpret_cast<SignedInt>(v) >> n);
  }
  static ESPALIER_INLINE Int PreviousGroup(Int v) {
    return __builtin_shufflevector(v, v, 7, 0, 1, 2, 3, 4, 5, 6);
  }
  static ESPALIER_INLINE Int Straddle(Int before, Int word) { return before << 16 | word >> 16; }
  template <int n>
  static ESPALIER_INLINE Int StraddleRight(Int straddle) {
    return straddle >> n;
  }
  static ESPALIER_INLINE Int ByteSums(Int words) {
    const Int pairs = (words & 0x00FF00FFu) + (words >> 8 & 0x00FF00FFu);
    return (pairs & 0xFFFFu) + (pairs >> 16);
  }
  static ESPALIER_INLINE Int DotFloat(Int sum, Int weights, Int input) {
    return AsInt(AsFloat(sum) + AsFloat(weights) * AsFloat(input));
  }

  static ESPALIER_INLINE Float AddFloat(Float a, Float b) { return a + b; }
  static ESPALIER_INLINE Float SubtractFloat(Float a, Float b) { return a - b; }
  static ESPALIER_INLINE Float MultiplyFloat(Float a, Float b) { return a * b; }
  static ESPALIER_INLINE Float DivideFloat(Float a, Float b) { return a / b; }
  static ESPALIER_INLINE Float Fma(Float a, Float b, Float c) { return a * b + c; }
  static ESPALIER_INLINE Float Max(Float a, Float b) { return a > b ? a : b; }
  static ESPALIER_INLINE Float Min(Float a, Float b) { return a < b ? a : b; }
  static ESPALIER_INLINE Float Abs(Float v) { return AsFloat(AsInt(v) & 0x7FFFFFFFu); }
  static ESPALIER_INLINE Float Negated(Float v) { return AsFloat(AsInt(v) ^ 0x80000000u); }
  static ESPALIER_INLINE Float Round(Float v) { return v + kRounder - kRounder; }
  static ESPALIER_INLINE Float ToFloat(Int v) {
    return __builtin_convertvector(reinterpret_cast<SignedInt>(v), Float);
  }
  static ESPALIER_INLINE Int ToInt(Float v) { return AsInt(v + kRounder) - AsInt(SetFloat(kRounder)); }
  static ESPALIER_INLINE Float PowerOfTwo(Float n) { return AsFloat((ToInt(n) + 127) << 23); }
  static ESPALIER_INLINE Float SelectNegative(Float of, Float yes, Float no) { return of < 0 ? yes : no; }
  static ESPALIER_INLINE Float WithSignOf(Float magnitude, Float sign) {
    return AsFloat((AsInt(magnitude) & 0x7FFFFFFFu) | (AsInt(sign) & 0x80000000u));
  }
  // Codebook values below the normal range of fp16 are multiples of 2^-18: nothing is cut from them.
  static ESPALIER_INLINE Float RoundToFp16(Float v) {
    const Int bits = AsInt(v);
    return AsFloat((bits + 0xFFFu + (bits >> 13 & 1u)) & 0xFFFFE000u);
  }
  static ESPALIER_INLINE void StoreLow16(uint32_t* to, Int v) {
    const Int16 low = __builtin_convertvector(v, Int16);
    __builtin_memcpy(to, &low, sizeof(low));
  }
  static ESPALIER_INLINE float LargestLane(Int v) {
    uint32_t largest = 0;
    for (uint32_t i = 0; i < kLanes; ++i) largest = v[i] > largest ? v[i] : largest;
    float value;
    __builtin_memcpy(&value, &largest, sizeof(value));
    return value;
  }
  static ESPALIER_INLINE int32_t SumOfLanes(Int v) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < kLanes; ++i) sum += v[i];
    return static_cast<int32_t>(sum);
  }
  static ESPALIER_INLINE Float HadamardLanes(Float v) {
    const Int odd = {0, kSign, 0, kSign, 0, kSign, 0, kSign};
    const Int second = {0, 0, kSign, kSign, 0, 0, kSign, kSign};
    const Int upper = {0, 0, 0, 0, kSign, kSign, kSign, kSign};
    v = __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6) + AsFloat(AsInt(v) ^ odd);
    v = __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5) + AsFloat(AsInt(v) ^ second);
    return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3) + AsFloat(AsInt(v) ^ upper);
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

 private:
  static constexpr uint32_t kSign = 0x80000000u;
};

Operand OperandOf(CpuMode, Codebook, uint32_t) { return Operand::kFloat; }

}  // namespace

void FillPortableTable(KernelTable& table) {
  FillExact<VectorPortable>(table);
  table.operand = OperandOf;
}

}  // namespace espalier::cpu
