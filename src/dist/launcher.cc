// SPDX-License-Identifier: Apache-2.0
#include "dist/launcher.h"

#include <charconv>
#include <cstdlib>
#include <string_view>

namespace espalier {
namespace {

struct Variables {
  const char* rank;
  const char* processes;
};

// Open MPI sets the PMIx variables as well, hence the order.
constexpr Variables kLaunchers[] = {
    {.rank = "OMPI_COMM_WORLD_RANK", .processes = "OMPI_COMM_WORLD_SIZE"},
    {.rank = "MV2_COMM_WORLD_RANK", .processes = "MV2_COMM_WORLD_SIZE"},
    {.rank = "PMI_RANK", .processes = "PMI_SIZE"},
    {.rank = "PMIX_RANK", .processes = "SLURM_STEP_NUM_TASKS"},
};

std::optional<int> Number(const char* text) {
  if (text == nullptr) return std::nullopt;
  const std::string_view view(text);
  int number = 0;
  const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), number);
  if (error != std::errc() || end != view.data() + view.size() || number < 0) return std::nullopt;
  return number;
}

}  // namespace

std::optional<Launcher> FindLauncher(const std::function<const char*(const char*)>& variable) {
  for (const Variables& names : kLaunchers) {
    const std::optional<int> rank = Number(variable(names.rank));
    if (!rank) continue;
    return Launcher{.processes = Number(variable(names.processes)).value_or(0), .rank = *rank};
  }
  return std::nullopt;
}

std::optional<Launcher> FindLauncher() {
  return FindLauncher([](const char* name) -> const char* { return std::getenv(name); });
}

}  // namespace espalier
