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
        shapes_(ranks_.size()) {}

  Result<std::vector<RankMemory>> Run() {
    for (const LayerExtents& layer : plan_.layers()) {
      if (auto added = AddLayer(layer); !added) return tl::unexpected(added.error());
    }
    for (size_t rank = 0; rank < ranks_.size() && options_.memory_bytes; ++rank) {
      auto tokens = MostTokens(ranks_[rank], shapes_[rank]);
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
      memory.workspace_bytes = std::max(memory.workspace_bytes, workspace);
      if (options_.memory_bytes) AddShape(shapes_[static_cast<size_t>(rank)], sizes);
      memory.staging_peak_bytes = std::max(memory.staging_peak_bytes, sizes->staging_bytes);
    }
    return {};
  }

  // One table for each shape that a workspace can depend on, whatever the rates are.
  using ShapeKey = std::tuple<uint32_t, uint32_t, uint32_t, uint32_t, uint64_t>;
  using Shapes = std::map<ShapeKey, std::shared_ptr<const LoadSizes>>;

  static void AddShape(Shapes& shapes, const std::shared_ptr<const LoadSizes>& sizes) {
    const ExpertsTable& table = sizes->table;
    uint64_t widest = 0;
    for (uint32_t expert = 0; expert < table.geometry().experts; ++expert) {
      uint64_t channels = 0;
      for (const SegmentDesc& segment : table.ExpertSegments(expert))
        channels += segment.intermediate_channels();
      widest = std::max(widest, channels);
    }
    shapes.try_emplace({table.geometry().experts, table.geometry().stored_hidden_channels,
                        table.max_segments_per_expert(), table.max_intermediate_channels(), widest},
                       sizes);
  }

  Result<uint64_t> Workspace(const ExpertsTable& table, uint64_t max_tokens) const {
    const Result<MoePlan> made =
        MoePlan::Create(table, {.max_tokens = max_tokens, .top_k = options_.top_k, .executor = "cpu"});
    if (!made) return tl::unexpected(made.error());
    return made->workspace_bytes();
  }

  Result<std::optional<uint64_t>> MostTokens(const RankMemory& memory, const Shapes& shapes) const {
    const uint64_t held = memory.weight_memory_bytes();
    if (held > *options_.memory_bytes || memory.staging_peak_bytes > *options_.memory_bytes - held)
      return std::optional<uint64_t>();
    const uint64_t rest = *options_.memory_bytes - held;
    uint64_t most = kMaxPlanTokens;
    for (const auto& [key, sizes] : shapes) {
      const Result<uint64_t> least = Workspace(sizes->table, 0);  // scratch memory of the threads
      if (!least) return tl::unexpected(least.error());
      if (*least > rest) return std::optional<uint64_t>();
      const Result<uint64_t> tokens = MostTokensOf(sizes->table, rest, most);
      if (!tokens) return tl::unexpected(tokens.error());
      most = *tokens;
    }
    return std::optional<uint64_t>(most);
  }

  // At most `high`. REQUIRES: 0 tokens fit. Workspaces grow with the tokens, so the most can be searched for.
  Result<uint64_t> MostTokensOf(const ExpertsTable& table, uint64_t bytes_left, uint64_t high) const {
    uint64_t low = 0;
    while (low < high) {
      const uint64_t middle = low + (high - low + 1) / 2;
      const Result<uint64_t> bytes = Workspace(table, middle);
      if (!bytes) return tl::unexpected(bytes.error());
      (*bytes <= bytes_left ? low : high) = *bytes <= bytes_left ? middle : middle - 1;
    }
    return low;
  }

  const Checkpoint& checkpoint_;
  const ExtentPlan& plan_;
  const PreflightOptions& options_;
  std::vector<RankMemory> ranks_;
  std::vector<Shapes> shapes_;  // by rank; only with a memory limit
};

}  // namespace

Result<std::vector<RankMemory>> Preflight(const Checkpoint& checkpoint, const ExtentPlan& plan,
                                          const PreflightOptions& options) {
  return Sizer(checkpoint, plan, options).Run();
}

}  // namespace espalier::cli
