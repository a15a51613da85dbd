// SPDX-License-Identifier: Apache-2.0
//
// The tables by declaration only: each is compiled for its instruction set, in a file that exports nothing
// but its one function. What that file would instantiate beyond it (a constructor, a member of a string), the
// linker could hand to code that runs on every machine; tests/table_symbols_test.cmake watches over it.
#ifndef ESPALIER_SRC_CPU_KERNEL_LIST_H_
#define ESPALIER_SRC_CPU_KERNEL_LIST_H_

#include "cpu/kernel_table.h"

namespace espalier::cpu {

void FillAvx512Bf16Table(KernelTable& table);
void FillAvx512VnniTable(KernelTable& table);
void FillAvx512Table(KernelTable& table);
void FillAvx2VnniTable(KernelTable& table);
void FillAvx2Table(KernelTable& table);
void FillPortableTable(KernelTable& table);

}  // namespace espalier::cpu

#endif  // ESPALIER_SRC_CPU_KERNEL_LIST_H_
