// SPDX-License-Identifier: Apache-2.0
//
// From named modules to layers of complete experts.
#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>

#include "checkpoint/pack_layout.h"

namespace espalier {
namespace {

// Builds one group. Its modules are sorted, so a gap shows as the first entry out of step.
class GroupBuilder {
 public:
  GroupBuilder(LayoutContext& context, const ExpertGroup& group, const PackRules& rules, std::string label)
      : context_(context), group_(group), rules_(rules), label_(std::move(label)) {}

  Result<PackLayer> Build(MoeLayer& layer) {
    if (auto r = CountAxes(); !r) return tl::unexpected(r.error());
    if (auto r = CheckComplete(); !r) return tl::unexpected(r.error());
    PackLayer pack;
    pack.slices = slices_;
    const size_t count = size_t{experts_} * kNumProjections * slices_;
    pack.matrices.resize(count);
    pack.modules.resize(count);
    for (const ExpertModule& module : group_.modules) {
      auto matrix =
          BuildMatrix(context_.shards, module.module, module.parts, rules_.SharedSuh(group_, module.name),
                      rules_.SharedSvh(group_, module.name), rules_.assumed_codebook());
      if (!matrix) return tl::unexpected(matrix.error());
      const size_t at = pack.At(module.name.expert, module.name.projection, module.name.slice.value_or(0));
      pack.matrices[at] = *matrix;
      pack.modules[at] = module.module;
    }
    if (auto r = CheckSizes(pack); !r) return tl::unexpected(r.error());
    ReportUnknownShared();
    return Describe(layer, pack);
  }

 private:
  std::string Where() const {
    return fmt::format("layer {} in {}", label_, context_.shards.FileName(group_.modules[0].parts.Any()));
  }

  Result<void> CountAxes() {
    bool sliced = false;
    bool whole = false;
    for (const ExpertModule& module : group_.modules) {
      experts_ = std::max(experts_, module.name.expert + 1);
      slices_ = std::max(slices_, module.name.slice.value_or(0) + 1);
      (module.name.slice ? sliced : whole) = true;
      has_gate_ = has_gate_ || module.name.projection == Projection::kGate;
      if (module.name.slice && module.parts.bias != kNoTensor) {
        return Error(StatusCode::kUnsupported, fmt::format("{}: a bias in a rank-sliced layer, legal: none",
                                                           context_.shards.Describe(module.parts.bias)));
      }
    }
    const uint32_t required = rules_.required_slices();
    if ((sliced && whole) || (required > 0 && whole)) {
      return Error(StatusCode::kFormat,
                   fmt::format("{}: found whole experts, legal: rank slices throughout", Where()));
    }
    if (required > 0 && slices_ > required) {
      return Error(StatusCode::kFormat,
                   fmt::format("{}: found slice rank{}, legal: rank0..rank{} (tp {} in the config)", Where(),
                               slices_ - 1, required - 1, required));
    }
    slices_ = std::max(slices_, required);
    const std::optional<Activation>& activation = context_.config.model.activation;
    if (!has_gate_ && activation && ActivationHasGate(activation->kind)) {
      return Error(StatusCode::kFormat,
                   fmt::format("{}: incomplete, no expert has a gate matrix, but hidden_act is {}", Where(),
                               ActivationText(*activation)));
    }
    return {};
  }

  // Walks the sorted modules against the full grid; stops at the first hole, so the cost is bounded by
  // the number of modules whatever ids a hostile file uses.
  Result<void> CheckComplete() const {
    auto module = group_.modules.begin();
    for (uint32_t expert = 0; expert < experts_; ++expert) {
      for (int p = has_gate_ ? 0 : 1; p < kNumProjections; ++p) {
        for (uint32_t slice = 0; slice < slices_; ++slice) {
          const bool found = module != group_.modules.end() && module->name.expert == expert &&
                             module->name.projection == static_cast<Projection>(p) &&
                             module->name.slice.value_or(0) == slice;
          if (found) {
            ++module;
            continue;
          }
          return Incomplete(expert, static_cast<Projection>(p), slice);
        }
      }
    }
    return {};
  }

  // Names the matrix as its siblings are named, under the canonical projection.
  tl::unexpected<Status> Incomplete(uint32_t expert, Projection projection, uint32_t slice) const {
    std::string name = fmt::format("{}.{}", group_.prefix, group_.number);
    if (!group_.block.empty()) name += fmt::format(".{}", group_.block);
    name += fmt::format(".experts.{}.{}_proj", expert, ProjectionName(projection));
    if (group_.modules[0].name.slice) name += fmt::format(".rank{}", slice);
    return Error(StatusCode::kFormat,
                 fmt::format("{}: incomplete, the {} matrix '{}' is missing; legal: all of experts 0..{}",
                             Where(), ProjectionName(projection), name, experts_ - 1));
  }

  tl::unexpected<Status> BadSize(const PackLayer& pack, size_t at, uint64_t in, uint64_t out) const {
    const MatrixInfo& info = pack.matrices[at].info;
    return Error(StatusCode::kFormat,
                 fmt::format("{}: found a {} x {} matrix, legal: {} x {} as in the rest of layer {}",
                             context_.shards.Describe(info.trellis), info.in_channels, info.out_channels, in,
                             out, label_));
  }

  Result<void> CheckSizes(const PackLayer& pack) const {
    const size_t first_down = pack.At(0, Projection::kDown, 0);
    const MatrixInfo& reference = pack.matrices[first_down].info;
    const uint64_t hidden = reference.out_channels;
    const uint64_t width = reference.in_channels;
    if (hidden % kHadamardChannels != 0 || width % kHadamardChannels != 0) {
      return Error(
          StatusCode::kFormat,
          fmt::format("{}: found a {} x {} matrix, legal: multiples of {} (rotated blocks)",
                      context_.shards.Describe(reference.trellis), width, hidden, kHadamardChannels));
    }
    for (uint32_t expert = 0; expert < experts_; ++expert) {
      for (int p = has_gate_ ? 0 : 1; p < kNumProjections; ++p) {
        const bool down = static_cast<Projection>(p) == Projection::kDown;
        for (uint32_t slice = 0; slice < slices_; ++slice) {
          const size_t at = pack.At(expert, static_cast<Projection>(p), slice);
          const MatrixInfo& info = pack.matrices[at].info;
          const uint64_t in = down ? width : hidden, out = down ? hidden : width;
          if (info.in_channels != in || info.out_channels != out) return BadSize(pack, at, in, out);
        }
      }
    }
    return {};
  }

  // Layer-wide vectors that the layout has no use for: a name gone wrong, as with any other tensor.
  void ReportUnknownShared() const {
    std::vector<int32_t> unknown;
    for (const auto& [key, tensor] : group_.shared) {
      if (!rules_.KnowsShared(key, slices_)) unknown.push_back(tensor);
    }
    std::sort(unknown.begin(), unknown.end());
    for (const int32_t tensor : unknown) {
      context_.problems.push_back({.severity = Problem::Severity::kError,
                                   .file = context_.shards.FileName(tensor),
                                   .tensor = context_.shards.tensors[tensor].name,
                                   .message = "a layer-wide vector that no expert of this layout uses",
                                   .layer = label_});
    }
  }

  PackLayer Describe(MoeLayer& layer, PackLayer& pack) const {
    const MatrixInfo& down = pack.matrices[pack.At(0, Projection::kDown, 0)].info;
    layer.label = label_;
    layer.prefix = std::string(group_.prefix);
    layer.number = group_.number;
    layer.experts = experts_;
    layer.slices = slices_;
    layer.hidden_channels = down.out_channels;
    layer.intermediate_channels = down.in_channels * slices_;
    layer.has_gate = has_gate_;
    return std::move(pack);
  }

  LayoutContext& context_;
  const ExpertGroup& group_;
  const PackRules& rules_;
  std::string label_;
  uint32_t experts_ = 0;
  uint32_t slices_ = 1;
  bool has_gate_ = false;
};

}  // namespace

Result<std::vector<PackLayer>> BuildPackLayers(LayoutContext& context, const PackIndex& index,
                                               const PackRules& rules) {
  std::vector<PackLayer> packs;
  std::unordered_set<uint32_t> taken;
  for (const ExpertGroup& group : index.groups) {
    const bool first = taken.insert(group.number).second;
    GroupBuilder builder(
        context, group, rules,
        first ? fmt::format("{}", group.number) : fmt::format("{}.{}", group.prefix, group.number));
    MoeLayer layer;
    auto pack = builder.Build(layer);
    if (!pack) return tl::unexpected(pack.error());
    packs.push_back(std::move(*pack));
    context.layers.push_back(std::move(layer));
  }
  return packs;
}

void CompareCodebook(const LayoutContext& context, const std::vector<PackLayer>& packs,
                     std::string_view codebook, std::string_view place) {
  if (codebook.empty()) return;
  for (const PackLayer& pack : packs) {
    for (const PackMatrix& matrix : pack.matrices) {
      if (matrix.info.trellis == kNoTensor || CodebookName(matrix.info.codebook) == codebook) continue;
      context.problems.push_back(
          {.severity = Problem::Severity::kWarning,
           .file = "config.json",
           .tensor = context.shards.tensors[matrix.info.trellis].name,
           .message = fmt::format("{}: says '{}', the tensor holds {}; the tensor is used", place, codebook,
                                  CodebookName(matrix.info.codebook)),
           .layer = {}});
      return;  // one is enough to see that the text is wrong
    }
  }
}

Result<void> CheckLayerRange(const LayoutContext& context, const std::pair<uint64_t, uint64_t>& range,
                             std::string_view place) {
  std::unordered_set<uint64_t> found;
  for (const MoeLayer& layer : context.layers) {
    found.insert(static_cast<uint64_t>(layer.number));
    if (static_cast<uint64_t>(layer.number) >= range.first &&
        static_cast<uint64_t>(layer.number) <= range.second)
      continue;
    context.problems.push_back({.severity = Problem::Severity::kWarning,
                                .file = "config.json",
                                .tensor = {},
                                .message = fmt::format("{}: says {}..{}, the files also hold layer {}", place,
                                                       range.first, range.second, layer.label),
                                .layer = layer.label});
  }
  if (context.shards.single_file) return {};
  for (uint64_t number = range.first; number <= range.second; ++number) {
    if (found.contains(number)) continue;
    return Error(StatusCode::kFormat,
                 fmt::format("config.json: {}: says {}..{}, but layer {} has no experts in any file", place,
                             range.first, range.second, number));
  }
  return {};
}

}  // namespace espalier
