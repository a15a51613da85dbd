// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernel_list.h"

#include <fmt/format.h>

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

namespace espalier::cpu {
namespace {

#if defined(__x86_64__)

bool HasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool HasAvx512Vnni() { return HasAvx512() && __builtin_cpu_supports("avx512vnni"); }

std::vector<const KernelTable*> FindTables() {
  __builtin_cpu_init();
  std::vector<const KernelTable*> tables;
  if (HasAvx512Vnni() && __builtin_cpu_supports("avx512bf16")) tables.push_back(&Avx512Bf16Table());
  if (HasAvx512Vnni()) tables.push_back(&Avx512VnniTable());
  if (HasAvx512()) tables.push_back(&Avx512Table());
  if (HasAvx2() && __builtin_cpu_supports("avxvnni")) tables.push_back(&Avx2VnniTable());
  if (HasAvx2()) tables.push_back(&Avx2Table());
  tables.push_back(&PortableTable());
  return tables;
}

#else

std::vector<const KernelTable*> FindTables() { return {&PortableTable()}; }

#endif

}  // namespace

std::string_view OperandName(Operand operand) {
  static constexpr std::string_view names[kNumOperands] = {"fp32",  "bf16",         "bf16-halves",
                                                           "int16", "int16-halves", "int8"};
  return names[static_cast<int>(operand)];
}

std::span<const KernelTable* const> UsableTables() {
  static const std::vector<const KernelTable*> tables = FindTables();
  return tables;
}

Result<const KernelTable*> ChooseTable() {
  const char* forced = std::getenv("ESPALIER_CPU_ISA");
  if (forced == nullptr || *forced == '\0') return UsableTables().front();
  std::string names;
  for (const KernelTable* table : UsableTables()) {
    if (table->name == std::string_view(forced)) return table;
    names += names.empty() ? "" : ", ";
    names += table->name;
  }
  return Error(StatusCode::kUsage,
               fmt::format("ESPALIER_CPU_ISA is '{}'; legal on this machine: {}", forced, names));
}

}  // namespace espalier::cpu
