// SPDX-License-Identifier: Apache-2.0
#include "preflight.h"

#include <espalier/experts.h>

#include <algorithm>
#include <map>
#include <memory>
#include <tuple>
#include <utility>

namespace espalier::cli {
namespace {

// What the sizes of a share depend on inside one layer: which experts, and of each slice how much and whether
// the biases of the down projections are in it.
using ShareKey = std::pair<uint32_t, std::vector<std::tuple<uint32_t, uint64_t, bool>>>;

ShareKey KeyOf(const ExpertRange& experts, const RankExtent& extent) {
  ShareKey key{experts.first_expert, {}};
  for (const SliceExtent& segment : extent.segments)
    key.second.emplace_back(segment.slice, segment.channels, segment.first_channel == 0);
  return key;
}

class Sizer {
 public:
  Sizer(const Checkpoint& checkpoint, const ExtentPlan& plan, const PreflightOptions& options)
      : checkpoint_(checkpoint),
        plan_(plan),
        options_(options),
        ranks_(static_cast<size_t>(plan.world())),
        largest_(ranks_.size()) {}

  Result<std::vector<RankMemory>> Run() {
    for (const LayerExtents& layer : plan_.layers()) {
      if (auto added = AddLayer(layer); !added) return tl::unexpected(added.error());
    }
    for (size_t rank = 0; rank < ranks_.size() && options_.memory_bytes; ++rank) {
      if (largest_[rank] == nullptr) continue;  // a checkpoint without routed experts
      auto tokens = MostTokens(ranks_[rank], *largest_[rank]);
      if (!tokens) return tl::unexpected(tokens.error());
      ranks_[rank].max_tokens = *tokens;
    }
    return std::move(ranks_);
  }

 private:
  Result<void> AddLayer(const LayerExtents& layer) {
    std::map<ShareKey, std::pair<std::shared_ptr<const LoadSizes>, uint64_t>> known;
    for (int rank = 0; rank < plan_.world(); ++rank) {
      const RankExtent& extent = layer.ranks[static_cast<size_t>(rank % plan_.tp())];
      const ExpertRange experts = plan_.Experts(layer.layer, rank / plan_.tp());
      auto& [sizes, workspace] = known[KeyOf(experts, extent)];
      if (sizes == nullptr) {
        Result<LoadSizes> made = SizeExperts(checkpoint_, plan_, layer.layer, rank);
        if (!made) return tl::unexpected(made.error());
        const Result<uint64_t> bytes = Workspace(made->table, options_.max_tokens);
        if (!bytes) return tl::unexpected(bytes.error());
        sizes = std::make_shared<const LoadSizes>(*std::move(made));
        workspace = *bytes;
      }
      RankMemory& memory = ranks_[static_cast<size_t>(rank)];
      memory.read_bytes += sizes->read_bytes;
      memory.slab_bytes += sizes->table.slab_bytes();
      memory.descriptor_bytes += sizes->table.descriptor_bytes();
      // The layer that needs most at one capacity needs most at any: workspaces grow with the same widths.
      if (workspace >= memory.workspace_bytes) {
        memory.workspace_bytes = workspace;
        largest_[static_cast<size_t>(rank)] = sizes;
      }
      memory.staging_peak_bytes = std::max(memory.staging_peak_bytes, sizes->staging_bytes);
    }
    return {};
  }

  Result<uint64_t> Workspace(const ExpertsTable& table, uint64_t max_tokens) const {
    const Result<MoePlan> made =
        MoePlan::Create(table, {.max_tokens = max_tokens, .top_k = options_.top_k, .executor = "cpu"});
    if (!made) return tl::unexpected(made.error());
    return made->workspace_bytes();
  }

  // Workspaces grow with the tokens, so the most can be searched for.
  Result<std::optional<uint64_t>> MostTokens(const RankMemory& memory, const LoadSizes& sizes) const {
    const uint64_t held = memory.weight_memory_bytes();
    if (held > *options_.memory_bytes || memory.staging_peak_bytes > *options_.memory_bytes - held)
      return std::optional<uint64_t>();
    const uint64_t rest = *options_.memory_bytes - held;
    uint64_t low = 0, high = kMaxPlanTokens;
    while (low < high) {
      const uint64_t middle = low + (high - low + 1) / 2;
      const Result<uint64_t> bytes = Workspace(sizes.table, middle);
      if (!bytes) return tl::unexpected(bytes.error());
      (*bytes <= rest ? low : high) = *bytes <= rest ? middle : middle - 1;
    }
    return std::optional<uint64_t>(low);
  }

  const Checkpoint& checkpoint_;
  const ExtentPlan& plan_;
  const PreflightOptions& options_;
  std::vector<RankMemory> ranks_;
  std::vector<std::shared_ptr<const LoadSizes>> largest_;  // by rank: the layer with the largest workspace
};

}  // namespace

Result<std::vector<RankMemory>> Preflight(const Checkpoint& checkpoint, const ExtentPlan& plan,
                                          const PreflightOptions& options) {
  return Sizer(checkpoint, plan, options).Run();
}

}  // namespace espalier::cli
