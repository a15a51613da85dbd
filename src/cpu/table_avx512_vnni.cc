// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernel_list.h"
#include "cpu/vector_avx512.h"

namespace espalier::cpu {

const KernelTable& Avx512VnniTable() {
  static const KernelTable table = [] {
    KernelTable filled;
    FillMul1<VectorAvx512Vnni>(filled);
    FillDecode<VectorAvx512Vnni, Operand::kInt8, Codebook::kMul1>(filled);
    FillMultiply<VectorAvx512Vnni, Operand::kInt8>(filled);
    filled.name = "avx512-vnni";
    filled.operand = OperandWithInt8;
    return filled;
  }();
  return table;
}

}  // namespace espalier::cpu
