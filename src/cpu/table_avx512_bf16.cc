// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernel_list.h"
#include "cpu/vector_avx512.h"

namespace espalier::cpu {
namespace {

struct VectorAvx512Bf16 : VectorAvx512Vnni {
  static ESPALIER_INLINE Int DotBf16(Int sum, Int weights, Int input) {
    ESPALIER_INTO("vdpbf16ps", sum, weights, input);
    return sum;
  }
  // The dot product with ones is an exact sum and one instruction.
  static ESPALIER_INLINE Int SumOfHalves(Int halves) { return DotBf16(Set(0), halves, Set(0x3F803F80u)); }
  static ESPALIER_INLINE Int Bf16Pair(Int first, Int second) {
    return _mm512_ternarylogic_epi32(ShiftRight<16>(first), second, Set(0xFFFF0000u), 0xF8);
  }
};

// Rows at which decoding to whole values, which takes longer and halves the products, starts to pay.
constexpr uint32_t kPairRows = kMaxFusedRows + 1;

Operand ChooseOperand(CpuMode mode, Codebook codebook, uint32_t rows) {
  if (mode == CpuMode::kExact || codebook == Codebook::kMul1) return OperandWithInt8(mode, codebook, rows);
  return rows < kPairRows ? Operand::kBf16Halves : Operand::kBf16;
}

template <Codebook kCodebook>
void FillBf16(KernelTable& table) {
  FillDecode<VectorAvx512Bf16, Operand::kBf16, kCodebook>(table);
  FillDecode<VectorAvx512Bf16, Operand::kBf16Halves, kCodebook>(table);
  FillFused<VectorAvx512Bf16, Operand::kBf16Halves, kCodebook>(table);
}

}  // namespace

const KernelTable& Avx512Bf16Table() {
  static const KernelTable table = [] {
    KernelTable filled;
    FillMul1<VectorAvx512Bf16>(filled);
    FillDecode<VectorAvx512Bf16, Operand::kInt8, Codebook::kMul1>(filled);
    FillMultiply<VectorAvx512Bf16, Operand::kInt8>(filled);
    FillBf16<Codebook::k3Inst>(filled);
    FillBf16<Codebook::kMcg>(filled);
    FillMultiply<VectorAvx512Bf16, Operand::kBf16>(filled);
    FillMultiply<VectorAvx512Bf16, Operand::kBf16Halves>(filled);
    filled.name = "avx512-bf16";
    filled.operand = ChooseOperand;
    return filled;
  }();
  return table;
}

}  // namespace espalier::cpu
