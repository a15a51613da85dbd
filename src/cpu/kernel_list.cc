// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernel_list.h"

#include <fmt/format.h>

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

namespace espalier::cpu {
namespace {

using Fill = void (*)(KernelTable& table);
using Tables = std::vector<const KernelTable*>;

// A table that is filled when it is first wanted: its code runs on no other machine.
template <Fill kFill>
void AddTable(std::string_view name, Tables& tables) {
  static const KernelTable table = [name] {
    KernelTable filled;
    filled.name = name;
    kFill(filled);
    return filled;
  }();
  tables.push_back(&table);
}

#if defined(__x86_64__)

bool HasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool HasAvx512Vnni() { return HasAvx512() && __builtin_cpu_supports("avx512vnni"); }

Tables FindTables() {
  __builtin_cpu_init();
  Tables tables;
  if (HasAvx512Vnni() && __builtin_cpu_supports("avx512bf16"))
    AddTable<FillAvx512Bf16Table>("avx512-bf16", tables);
  if (HasAvx512Vnni()) AddTable<FillAvx512VnniTable>("avx512-vnni", tables);
  if (HasAvx512()) AddTable<FillAvx512Table>("avx512", tables);
  if (HasAvx2() && __builtin_cpu_supports("avxvnni")) AddTable<FillAvx2VnniTable>("avx2-vnni", tables);
  if (HasAvx2()) AddTable<FillAvx2Table>("avx2", tables);
  AddTable<FillPortableTable>("portable", tables);
  return tables;
}

#else

Tables FindTables() {
  Tables tables;
  AddTable<FillPortableTable>("portable", tables);
  return tables;
}

#endif

}  // namespace

std::string_view OperandName(Operand operand) {
  static constexpr std::string_view names[kNumOperands] = {"fp32",  "fp32-cut",    "fixed16", "bf16-halves",
                                                           "int16", "int16-apart", "int8"};
  return names[static_cast<int>(operand)];
}

std::span<const KernelTable* const> UsableTables() {
  static const Tables tables = FindTables();
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
