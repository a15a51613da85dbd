// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernel_list.h"
#include "cpu/vector_avx512.h"

namespace espalier::cpu {

void FillAvx512VnniTable(KernelTable& table) {
  FillMul1<VectorAvx512Vnni>(table);
  FillDecode<VectorAvx512Vnni, Operand::kInt8, Codebook::kMul1>(table);
  FillMultiply<VectorAvx512Vnni, Operand::kInt8>(table);
  table.operand = OperandWithInt8;
}

}  // namespace espalier::cpu
