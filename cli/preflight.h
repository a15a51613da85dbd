// SPDX-License-Identifier: Apache-2.0
//
// What every rank of a plan takes in memory, before any weight is read.
#ifndef ESPALIER_CLI_PREFLIGHT_H_
#define ESPALIER_CLI_PREFLIGHT_H_

#include <espalier/extent_plan.h>
#include <espalier/moe.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace espalier::cli {

struct RankMemory {
  uint64_t read_bytes = 0;          // of the files: codes and vectors
  uint64_t slab_bytes = 0;          // of all layers: codes, vectors and the gaps of their alignment
  uint64_t descriptor_bytes = 0;    // of all layers
  uint64_t workspace_bytes = 0;     // one, for the layer that needs most
  uint64_t staging_peak_bytes = 0;  // while loading the layer that needs most
  // Most tokens of a plan that keeps everything within the memory given; empty when nothing was given or not
  // even 0 tokens fit.
  std::optional<uint64_t> max_tokens;

  uint64_t weight_memory_bytes() const { return slab_bytes + descriptor_bytes; }
  // Staging is given back before the first run.
  uint64_t peak_bytes() const {
    return weight_memory_bytes() + std::max(workspace_bytes, staging_peak_bytes);
  }
};

struct PreflightOptions {
  uint64_t max_tokens = 4096;
  uint32_t top_k = 1;
  std::optional<uint64_t> memory_bytes;
};

// By global rank. Cost: linear in the matrices of every different share: ranks of equal width count once.
Result<std::vector<RankMemory>> Preflight(const Checkpoint& checkpoint, const ExtentPlan& plan,
                                          const PreflightOptions& options);

}  // namespace espalier::cli

#endif  // ESPALIER_CLI_PREFLIGHT_H_
