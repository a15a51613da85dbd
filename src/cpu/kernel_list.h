// SPDX-License-Identifier: Apache-2.0
//
// The tables by declaration only: each is compiled for its instruction set.
#ifndef ESPALIER_SRC_CPU_KERNEL_LIST_H_
#define ESPALIER_SRC_CPU_KERNEL_LIST_H_

#include "cpu/kernel_table.h"

namespace espalier::cpu {

const KernelTable& Avx512Bf16Table();
const KernelTable& Avx512VnniTable();
const KernelTable& Avx512Table();
const KernelTable& Avx2VnniTable();
const KernelTable& Avx2Table();
const KernelTable& PortableTable();

}  // namespace espalier::cpu

#endif  // ESPALIER_SRC_CPU_KERNEL_LIST_H_
