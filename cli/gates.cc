// SPDX-License-Identifier: Apache-2.0
#include "gates.h"

#include <algorithm>

namespace espalier::cli {

Gate GateOf(std::string_view executor, CpuMode mode, const PreparedExperts& experts) {
  if (executor == "cuda") {
    return experts.geometry().activation.limit > 0 ? Gate{2e-3, 0.999995} : Gate{1e-3, 0.999999};
  }
  if (mode == CpuMode::kExact) return {2e-6, 0};
  if (mode == CpuMode::kInt8) return {2.5e-2, 0.9997};
  const bool integers =
      std::all_of(experts.segments().begin(), experts.segments().end(), [](const auto& segment) {
        return segment.down().codebook == Codebook::kMul1 && segment.up().codebook == Codebook::kMul1 &&
               (!segment.gate().present() || segment.gate().codebook == Codebook::kMul1);
      });
  return integers ? Gate{2e-3, 0.999998} : Gate{6e-3, 0.99998};
}

}  // namespace espalier::cli
