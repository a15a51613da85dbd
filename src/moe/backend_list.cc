// SPDX-License-Identifier: Apache-2.0
#include "moe/backend_list.h"

#include <fmt/format.h>

#include <cstdlib>
#include <string>

namespace espalier {

std::span<const Backend* const> Backends() {
  static const Backend* const backends[] = {
#ifdef ESPALIER_HAS_CUDA
      &CudaBackend(),
#endif
      &CpuBackend(), &ReferenceBackend()};
  return backends;
}

Result<const Backend*> BackendByName(std::string_view name) {
  std::string names;
  for (const Backend* backend : Backends()) {
    if (backend->name() == name) {
      if (Result<void> usable = backend->Usable(); !usable) return tl::unexpected(usable.error());
      return backend;
    }
    names += names.empty() ? "" : ", ";
    names += backend->name();
  }
  if (name == "cuda") return Error(StatusCode::kDevice, "executor 'cuda': this build has no CUDA");
  return Error(StatusCode::kUsage, fmt::format("unknown executor '{}'; legal: {}", name, names));
}

std::string_view ForcedBackendName(std::string_view executor) {
  if (!executor.empty()) return executor;
  const char* forced = std::getenv("ESPALIER_FORCE_BACKEND");
  return forced != nullptr ? std::string_view(forced) : std::string_view();
}

}  // namespace espalier
