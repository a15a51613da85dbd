// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernel_list.h"
#include "cpu/vector_avx2.h"

namespace espalier::cpu {

void FillAvx2Table(KernelTable& table) { FillAvx2<VectorAvx2>(table); }

}  // namespace espalier::cpu
