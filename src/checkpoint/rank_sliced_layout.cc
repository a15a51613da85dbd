// SPDX-License-Identifier: Apache-2.0
//
// Rank-sliced packs: each expert was cut for a fixed number of ranks before quantization, so a slice is
// a matrix of its own and an expert is the sum over its slices. The hidden-side vectors are per slice,
// or (shared_h_v1) once per layer and slice.
#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/json_fields.h"
#include "checkpoint/pack_layout.h"

namespace espalier {
namespace {

constexpr uint64_t kImpliedTailBits = 3;  // older packs without a rate list: every expert of the tail is K3

class RankSlicedRules : public PackRules {
 public:
  RankSlicedRules(Codebook assumed, uint32_t slices) : assumed_(assumed), slices_(slices) {}
  Codebook assumed_codebook() const override { return assumed_; }
  uint32_t required_slices() const override { return slices_; }

  int32_t SharedSuh(const ExpertGroup& group, const ExpertName& name) const override {
    switch (name.projection) {
      case Projection::kGate:
        return Find(group, "gate_proj", name, "suh");
      case Projection::kUp: {
        const int32_t own = Find(group, "up_proj", name, "suh");
        return own != kNoTensor ? own : Find(group, "gate_proj", name, "suh");
      }
      case Projection::kDown:
        break;
    }
    return kNoTensor;
  }
  int32_t SharedSvh(const ExpertGroup& group, const ExpertName& name) const override {
    return name.projection == Projection::kDown ? Find(group, "down_proj", name, "svh") : kNoTensor;
  }
  bool KnowsShared(std::string_view key, uint32_t slices) const override {
    for (const auto& [front, suffix] : {std::pair{"shared_h.gate_proj.rank", ".suh"},
                                        {"shared_h.up_proj.rank", ".suh"},
                                        {"shared_h.down_proj.rank", ".svh"}}) {
      std::string_view rest = key;
      if (!rest.starts_with(front) || !rest.ends_with(suffix)) continue;
      rest.remove_prefix(std::string_view(front).size());
      rest.remove_suffix(std::string_view(suffix).size());
      return ParseDecimal(rest, slices - 1).has_value();
    }
    return false;
  }

 private:
  static int32_t Find(const ExpertGroup& group, std::string_view projection, const ExpertName& name,
                      std::string_view suffix) {
    if (group.shared.empty()) return kNoTensor;
    const auto found =
        group.shared.find(fmt::format("shared_h.{}.rank{}.{}", projection, name.slice.value_or(0), suffix));
    return found == group.shared.end() ? kNoTensor : found->second;
  }
  Codebook assumed_;
  uint32_t slices_;
};

// The rates that the tier table gives the experts of one layer, empty when it has no list for them.
Result<std::vector<uint64_t>> TierRates(const JsonObject& entry, const std::string& field, uint32_t experts) {
  const auto kept = entry.UnsignedList("keep_nvfp4");
  if (!kept) return tl::unexpected(kept.error());
  if (*kept && !(*kept)->empty()) {
    return Error(StatusCode::kUnsupported, fmt::format("{}: {} experts kept in NVFP4, legal: none",
                                                       entry.Place("keep_nvfp4"), (*kept)->size()));
  }
  for (const std::string_view key :
       {std::string_view(field), std::string_view("k"), std::string_view("bits_per_expert")}) {
    const auto rates = entry.UnsignedList(key);
    if (!rates) return tl::unexpected(rates.error());
    if (!*rates) continue;
    if ((*rates)->size() != experts) {
      return Error(StatusCode::kFormat, fmt::format("{}: found {} rates, legal: one for each of {} experts",
                                                    entry.Place(key), (*rates)->size(), experts));
    }
    return **rates;
  }
  const auto tail = entry.UnsignedList("tail_tr3");
  if (!tail) return tl::unexpected(tail.error());
  if (*tail && (*tail)->size() == experts) return std::vector<uint64_t>(experts, kImpliedTailBits);
  return Error(StatusCode::kFormat, fmt::format("{}: the list of rates is missing", entry.Place(field)));
}

Result<void> CompareTiers(const LayoutContext& context, const MoeLayer& layer, const PackLayer& pack,
                          const std::vector<uint64_t>& rates, const JsonObject& entry) {
  for (uint32_t expert = 0; expert < layer.experts; ++expert) {
    for (const Projection projection : {Projection::kGate, Projection::kUp, Projection::kDown}) {
      for (uint32_t slice = 0; slice < layer.slices; ++slice) {
        const MatrixInfo& info = pack.matrices[pack.At(expert, projection, slice)].info;
        if (info.trellis == kNoTensor || static_cast<uint64_t>(info.bits) == rates[expert]) continue;
        return Error(StatusCode::kFormat,
                     fmt::format("{}: found K {}, legal: K {} as {}: layer {} says for expert {}",
                                 context.shards.Describe(info.trellis), info.bits, rates[expert],
                                 entry.source, layer.label, expert));
      }
    }
  }
  return {};
}

Result<void> CheckTierTable(const LayoutContext& context, const std::vector<PackLayer>& packs,
                            const RankSlicedConfig& config) {
  const auto file = ReadRequiredJson(context.shards, config.tier_file);
  if (!file) return tl::unexpected(file.error());
  const auto root = RootObject((*file)->document.root(), (*file)->name);
  if (!root) return tl::unexpected(root.error());
  for (size_t i = 0; i < context.layers.size(); ++i) {
    const MoeLayer& layer = context.layers[i];
    const auto entry = root->RequireObject(fmt::format("{}", layer.number));
    if (!entry) return tl::unexpected(entry.error());
    const auto rates = TierRates(*entry, config.tier_field, layer.experts);
    if (!rates) return tl::unexpected(rates.error());
    if (auto r = CompareTiers(context, layer, packs[i], *rates, *entry); !r) return r;
  }
  return {};
}

void CompareUniformRate(const LayoutContext& context, const std::vector<PackLayer>& packs, uint64_t bits) {
  for (const PackLayer& pack : packs) {
    for (const PackMatrix& matrix : pack.matrices) {
      if (matrix.info.trellis == kNoTensor || static_cast<uint64_t>(matrix.info.bits) == bits) continue;
      context.problems.push_back(
          {.severity = Problem::Severity::kWarning,
           .file = "config.json",
           .tensor = context.shards.tensors[matrix.info.trellis].name,
           .message = fmt::format("hybrid_tr3_tail.bits: says {}, the tensor holds {}; the tensor is used",
                                  bits, matrix.info.bits),
           .layer = {}});
      return;  // one is enough to see that the text is wrong
    }
  }
}

Result<void> CompareWithConfig(const LayoutContext& context, const PackIndex& index,
                               const std::vector<PackLayer>& packs, const RankSlicedConfig& config) {
  if (config.moe_layers) {
    if (auto r = CheckLayerRange(context, *config.moe_layers, "hybrid_tr3_tail.moe_layers"); !r) return r;
  }
  for (const MoeLayer& layer : context.layers) {
    if (!config.experts || *config.experts == layer.experts) continue;
    return Error(
        StatusCode::kFormat,
        fmt::format("config.json: hybrid_tr3_tail.experts_per_layer: found {}, legal: {} as in layer {}",
                    *config.experts, layer.experts, layer.label));
  }
  const bool has_shared = std::any_of(index.groups.begin(), index.groups.end(),
                                      [](const ExpertGroup& group) { return !group.shared.empty(); });
  if (config.shared_h && has_shared && !*config.shared_h) {
    context.problems.push_back(
        {.severity = Problem::Severity::kWarning,
         .file = "config.json",
         .tensor = {},
         .message = "hybrid_tr3_tail.rotation_layout: says per_expert_v1, the files hold shared "
                    "vectors; the tensors are used",
         .layer = {}});
  }
  CompareCodebook(context, packs, config.codebook, "hybrid_tr3_tail.codebook");
  if (!config.tier_file.empty()) return CheckTierTable(context, packs, config);
  // 'mixed' without a table says nothing that could be wrong: the shapes decide, as everywhere.
  if (config.bits) CompareUniformRate(context, packs, *config.bits);
  return {};
}

}  // namespace

Result<std::unique_ptr<Layout>> OpenRankSlicedLayout(LayoutContext& context, const PackIndex& index) {
  const std::optional<RankSlicedConfig>& config = context.config.rank_sliced;
  const Codebook assumed =
      config ? CodebookFromName(config->codebook).value_or(Codebook::k3Inst) : Codebook::k3Inst;
  const RankSlicedRules rules(assumed, config ? static_cast<uint32_t>(config->slices) : 0);
  auto packs = BuildPackLayers(context, index, rules);
  if (!packs) return tl::unexpected(packs.error());
  if (config) {
    if (auto r = CompareWithConfig(context, index, *packs, *config); !r) return tl::unexpected(r.error());
  }
  return std::make_unique<PackLayout>("rank-sliced", context.shards, context.layers, std::move(*packs));
}

}  // namespace espalier
