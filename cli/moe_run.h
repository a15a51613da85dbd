// SPDX-License-Identifier: Apache-2.0
//
// Inputs of a MoE layer, read or drawn, and one run of an executor over them.
#ifndef ESPALIER_CLI_MOE_RUN_H_
#define ESPALIER_CLI_MOE_RUN_H_

#include <espalier/experts.h>
#include <espalier/moe.h>
#include <espalier/status.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace espalier::cli {

struct MoeInput {
  uint64_t tokens = 0;
  uint32_t top_k = 0;
  Dtype dtype = Dtype::kF32;  // of x: kF32, kF16, kBF16
  IdType id_type = IdType::kInt32;
  HostBuffer x;                // [tokens, hidden]
  HostBuffer topk_ids;         // [tokens, top_k]
  std::vector<float> weights;  // [tokens, top_k]
};

// x, topk_ids and topk_weights of a safetensors file. Errors: kIo, kFormat; kGeometry for missing
// tensors and other dtypes or shapes; kCapacity for more tokens or routes than a plan takes.
Result<MoeInput> ReadMoeInput(const std::string& path, uint64_t hidden_channels);

// Equal for equal inputs.
std::string HashOf(const MoeInput& input);

struct RandomInputSize {
  uint64_t tokens = 0;
  uint64_t hidden_channels = 0;
  uint32_t experts = 0;
  uint32_t top_k = 0;  // <= experts
};

// x ~ N(0, 1), distinct experts, positive weights that sum to 1. The same bits on every machine.
Result<MoeInput> RandomMoeInput(const RandomInputSize& size, uint64_t seed);

struct MoeOutput {
  HostBuffer y;  // [tokens, hidden], the type asked for
  double seconds = 0;
  std::string executor;  // what ran
  std::string kernels;   // CpuKernelsName of the cpu executor, else empty
};

// One run with checked ids, on the device of the package; seconds are those of the run alone. `output` is
// kF32, or kF64 for the reference.
Result<MoeOutput> RunLayer(const PreparedExperts& experts, const MoeInput& input, const std::string& executor,
                           CpuMode mode, Dtype output);

// The same, adding to `sum` (kF32). An `expert_map` that is not empty makes the ids global ones. `place` is
// where the process stands among the ranks: a package for another place is refused.
Result<void> AddLayer(const PreparedExperts& experts, const MoeInput& input, const std::string& executor,
                      CpuMode mode, std::span<const int32_t> expert_map, const RankPlan& place,
                      MoeOutput& sum);

}  // namespace espalier::cli

#endif  // ESPALIER_CLI_MOE_RUN_H_
