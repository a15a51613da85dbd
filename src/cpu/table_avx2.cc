// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernel_list.h"
#include "cpu/vector_avx2.h"

namespace espalier::cpu {

const KernelTable& Avx2Table() {
  static const KernelTable table = [] {
    KernelTable filled;
    FillAvx2<VectorAvx2>(filled);
    filled.name = "avx2";
    return filled;
  }();
  return table;
}

}  // namespace espalier::cpu
