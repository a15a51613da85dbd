// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernel_list.h"
#include "cpu/vector_avx512.h"

namespace espalier::cpu {

const KernelTable& Avx512Table() {
  static const KernelTable table = [] {
    KernelTable filled;
    FillMul1<VectorAvx512>(filled);
    filled.name = "avx512";
    filled.operand = OperandWithInt16;
    return filled;
  }();
  return table;
}

}  // namespace espalier::cpu
