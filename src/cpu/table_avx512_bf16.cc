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
  // Added to 1.5 * 2^13, whose last bit is worth 2^-10, the two terms leave their sum in the low bits: one
  // instruction adds and converts.
  static ESPALIER_INLINE Int FixedSum(Int halves) {
    return DotBf16(Set(__builtin_bit_cast(uint32_t, 12288.0f)), halves, Set(0x3F803F80u));
  }
  static ESPALIER_INLINE Int LowPair(Int first, Int second) {
    return _mm512_mask_blend_epi16(0xAAAAAAAAu, first, ShiftLeft<16>(second));
  }
};

// Rows at which decoding to whole values, which takes longer and halves the products, starts to pay.
constexpr uint32_t kPairRows = 3;

Operand ChooseOperand(CpuMode mode, Codebook codebook, uint32_t rows) {
  if (mode == CpuMode::kExact || codebook == Codebook::kMul1) return OperandWithInt8(mode, codebook, rows);
  return rows < kPairRows ? Operand::kBf16Halves : Operand::kFixed16;
}

template <Codebook kCodebook>
void FillBf16(KernelTable& table) {
  FillDecode<VectorAvx512Bf16, Operand::kFixed16, kCodebook>(table);
  FillDecode<VectorAvx512Bf16, Operand::kBf16Halves, kCodebook>(table);
  auto& fused = table.fused[static_cast<int>(kCodebook)];
  FillFused<VectorAvx512Bf16, Operand::kBf16Halves, kCodebook, 1, kPairRows - 1>(fused);
  FillFused<VectorAvx512Bf16, Operand::kFixed16, kCodebook, kPairRows, kMaxFusedRows>(fused);
}

}  // namespace

void FillAvx512Bf16Table(KernelTable& table) {
  FillMul1<VectorAvx512Bf16>(table);
  FillDecode<VectorAvx512Bf16, Operand::kInt8, Codebook::kMul1>(table);
  FillMultiply<VectorAvx512Bf16, Operand::kInt8>(table);
  FillBf16<Codebook::k3Inst>(table);
  FillBf16<Codebook::kMcg>(table);
  FillMultiply<VectorAvx512Bf16, Operand::kFixed16>(table);
  FillMultiply<VectorAvx512Bf16, Operand::kBf16Halves>(table);
  table.operand = ChooseOperand;
}

}  // namespace espalier::cpu
