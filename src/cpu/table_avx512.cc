// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernel_list.h"
#include "cpu/vector_avx512.h"

namespace espalier::cpu {

void FillAvx512Table(KernelTable& table) {
  FillMul1<VectorAvx512>(table);
  table.operand = OperandWithInt16;
}

}  // namespace espalier::cpu
