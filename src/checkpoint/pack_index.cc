// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/pack_index.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <tuple>

#include "checkpoint/json_fields.h"

namespace espalier {
namespace {

constexpr uint64_t kMaxLayerNumber = 1'000'000;
constexpr uint64_t kMaxExpertId = 65'535;
constexpr uint64_t kMaxSlice = 1'023;
constexpr std::string_view kRank = "rank";

struct ProjectionKey {
  std::string_view name;
  Projection projection;
};
// Names of the projections in use: Hugging Face style, and the w1 / w3 / w2 of Mixtral and others.
constexpr ProjectionKey kProjectionKeys[] = {{"gate_proj", Projection::kGate}, {"up_proj", Projection::kUp},
                                             {"down_proj", Projection::kDown}, {"w1", Projection::kGate},
                                             {"w3", Projection::kUp},          {"w2", Projection::kDown}};

std::optional<Projection> ProjectionFromKey(std::string_view name) {
  for (const ProjectionKey& key : kProjectionKeys) {
    if (key.name == name) return key.projection;
  }
  return std::nullopt;
}

int32_t ModuleParts::* PartOfSuffix(std::string_view suffix) {
  if (suffix == "trellis") return &ModuleParts::trellis;
  if (suffix == "suh") return &ModuleParts::suh;
  if (suffix == "svh") return &ModuleParts::svh;
  if (suffix == "su") return &ModuleParts::su;
  if (suffix == "sv") return &ModuleParts::sv;
  if (suffix == "bias") return &ModuleParts::bias;
  if (suffix == "mcg") return &ModuleParts::mcg;
  if (suffix == "mul1") return &ModuleParts::mul1;
  return nullptr;
}

// The layer's number in what stands in front of "experts": the last one, so that a prefix may hold
// numbers of its own.
std::optional<LayerName> LastLayerName(std::string_view front) {
  for (size_t end = front.size();;) {
    const size_t dot = end == 0 ? std::string_view::npos : front.rfind('.', end - 1);
    if (dot == std::string_view::npos) return std::nullopt;  // a number needs a prefix
    const auto number = ParseDecimal(front.substr(dot + 1, end - dot - 1), kMaxLayerNumber);
    if (number) {
      return LayerName{.prefix = front.substr(0, dot),
                       .number = static_cast<uint32_t>(*number),
                       .rest = end == front.size() ? std::string_view() : front.substr(end + 1)};
    }
    end = dot;
  }
}

// Takes the first dot-separated component off `text`.
std::string_view TakeComponent(std::string_view& text) {
  const size_t dot = text.find('.');
  const std::string_view component = text.substr(0, dot);
  text = dot == std::string_view::npos ? std::string_view() : text.substr(dot + 1);
  return component;
}

// A projection right behind a number, behind the layer's own number, outside shared experts: an expert
// under a name that no rule reads. Left alone it would silently become a dense matrix.
bool LooksLikeExpert(std::string_view module) {
  // Also where the layer in front of it is no number, or none that a layer can have.
  for (std::string_view whole = module; !whole.empty();) {
    const std::string_view component = TakeComponent(whole);
    if (component == "experts" || component.starts_with("experts_")) return true;
  }
  const auto layer = ParseLayerName(module);
  std::string_view rest = layer ? layer->rest : module;
  std::string_view before;
  bool after_number = false;
  bool shared = false;
  while (!rest.empty()) {
    const std::string_view component = TakeComponent(rest);
    if (after_number && !shared && ProjectionFromKey(component)) return true;
    const bool counts_layers = before == "layers" || before == "blocks" || before == "layer" || before == "h";
    after_number = !counts_layers && ParseDecimal(component, kMaxExpertId).has_value();
    shared = shared || component.find("shared") != std::string_view::npos;
    before = component;
  }
  return false;
}

bool IsComplete(const ModuleParts& parts) {
  return parts.trellis != kNoTensor && (parts.suh != kNoTensor || parts.su != kNoTensor) &&
         (parts.svh != kNoTensor || parts.sv != kNoTensor);
}

// Vectors that stand for a whole layer: "...experts.shared_h.gate_proj.rank0" with suffix suh, or the
// tensors "...experts.r7_shared.gate_up_suh". `key` is what follows "experts.".
struct SharedName {
  LayerName layer;  // `rest` is the block
  std::string_view key;
};

std::optional<SharedName> ParseSharedName(std::string_view tensor) {
  constexpr std::string_view kExperts = ".experts.";
  const size_t at = tensor.find(kExperts);
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view key = tensor.substr(at + kExperts.size());
  if (!key.starts_with("shared_h.") && !key.starts_with("r7_shared.")) return std::nullopt;
  const auto layer = LastLayerName(tensor.substr(0, at));
  if (!layer) return std::nullopt;
  return SharedName{.layer = *layer, .key = key};
}

class Builder {
 public:
  explicit Builder(const ShardSet& shards) : shards_(shards) {}

  Result<PackIndex> Build() {
    if (auto r = CollectModules(); !r) return tl::unexpected(r.error());
    for (const std::string_view name : order_) {
      if (auto r = PlaceModule(name, modules_.at(name)); !r) return tl::unexpected(r.error());
    }
    for (auto& [key, group] : groups_) {
      if (auto r = SortGroup(group); !r) return tl::unexpected(r.error());
    }
    OrderGroups();
    std::sort(index_.dense.begin(), index_.dense.end(),
              [](const auto& a, const auto& b) { return a.module < b.module; });
    std::sort(index_.unclaimed.begin(), index_.unclaimed.end());
    return std::move(index_);
  }

 private:
  using GroupKey = std::pair<std::string_view, uint32_t>;

  Result<void> CollectModules() {
    for (const auto& [name, tensor] : shards_.by_name) {
      const size_t dot = name.rfind('.');
      if (dot == std::string_view::npos) continue;
      const std::string_view suffix = name.substr(dot + 1);
      if (suffix == "tile_order") {
        return Error(StatusCode::kUnsupported,
                     fmt::format("{}: a marker of another tile order, legal: none (tensor-core order)",
                                 shards_.Describe(tensor)));
      }
      if (auto shared = ParseSharedName(name)) {
        if (auto r = PlaceShared(*shared, tensor); !r) return r;
        continue;
      }
      const auto part = PartOfSuffix(suffix);
      if (part == nullptr) continue;
      const auto [entry, inserted] = modules_.try_emplace(name.substr(0, dot));
      if (inserted) order_.push_back(entry->first);
      entry->second.*part = tensor;
    }
    // by_name has no order of its own; messages must name the same tensor on every run.
    std::sort(order_.begin(), order_.end());
    return {};
  }

  Result<ExpertGroup*> Group(std::string_view prefix, uint32_t number, std::string_view block,
                             int32_t tensor) {
    const auto [entry, inserted] = groups_.try_emplace(GroupKey{prefix, number});
    ExpertGroup& group = entry->second;
    if (inserted) {
      group.prefix = prefix;
      group.number = number;
      group.block = block;
    } else if (group.block != block) {
      return Error(
          StatusCode::kUnsupported,
          fmt::format(
              "{}: experts under '{}' in a layer that also has experts under '{}', legal: one block of "
              "routed experts in a layer",
              shards_.Describe(tensor), block, group.block));
    }
    return &group;
  }

  Result<void> PlaceShared(const SharedName& shared, int32_t tensor) {
    const auto group = Group(shared.layer.prefix, shared.layer.number, shared.layer.rest, tensor);
    if (!group) return tl::unexpected(group.error());
    (*group)->shared.emplace(shared.key, tensor);
    return {};
  }

  Result<void> PlaceModule(std::string_view module, const ModuleParts& parts) {
    const int32_t any = parts.Any();
    if (any == kNoTensor) return {};  // a plain linear with a bias
    if (const auto name = ParseExpertName(module)) {
      const auto group = Group(name->prefix, name->layer, name->block, any);
      if (!group) return tl::unexpected(group.error());
      (*group)->modules.push_back({.name = *name, .module = module, .parts = parts});
      return {};
    }
    if (IsComplete(parts) && !LooksLikeExpert(module)) {
      index_.dense.push_back({.module = module, .parts = parts});
      return {};
    }
    for (const int32_t tensor :
         {parts.trellis, parts.suh, parts.svh, parts.su, parts.sv, parts.mcg, parts.mul1}) {
      if (tensor != kNoTensor) index_.unclaimed.push_back(tensor);
    }
    return {};
  }

  Result<void> SortGroup(ExpertGroup& group) {
    const auto key = [](const ExpertModule& m) {
      return std::tuple(m.name.expert, m.name.projection, m.name.slice.value_or(0), m.name.slice.has_value());
    };
    std::sort(group.modules.begin(), group.modules.end(),
              [&](const ExpertModule& a, const ExpertModule& b) { return key(a) < key(b); });
    for (size_t i = 1; i < group.modules.size(); ++i) {
      if (key(group.modules[i - 1]) != key(group.modules[i])) continue;
      return Error(StatusCode::kFormat, fmt::format("{}: '{}' and '{}' are the same matrix under two names",
                                                    shards_.FileName(group.modules[i].parts.Any()),
                                                    group.modules[i - 1].module, group.modules[i].module));
    }
    return {};
  }

  // The family of a prefix with the most layers keeps its numbers; then the name decides.
  void OrderGroups() {
    std::map<std::string_view, size_t> family_size;
    for (const auto& [key, group] : groups_) {
      if (group.modules.empty()) {
        // Shared vectors of a layer without experts.
        for (const auto& [name, tensor] : group.shared) index_.unclaimed.push_back(tensor);
      } else {
        ++family_size[key.first];
      }
    }
    for (auto& [key, group] : groups_) {
      if (!group.modules.empty()) index_.groups.push_back(std::move(group));
    }
    // Equally large families stand side by side, by prefix; each ascends in its numbers.
    std::sort(index_.groups.begin(), index_.groups.end(), [&](const ExpertGroup& a, const ExpertGroup& b) {
      const size_t size_a = family_size.at(a.prefix), size_b = family_size.at(b.prefix);
      return size_a != size_b ? size_a > size_b : std::tie(a.prefix, a.number) < std::tie(b.prefix, b.number);
    });
  }

  const ShardSet& shards_;
  PackIndex index_;
  std::unordered_map<std::string_view, ModuleParts> modules_;
  std::vector<std::string_view> order_;
  std::map<GroupKey, ExpertGroup> groups_;
};

}  // namespace

int32_t ModuleParts::Any() const {
  for (const int32_t tensor : {trellis, suh, svh, su, sv, mcg, mul1}) {
    if (tensor != kNoTensor) return tensor;
  }
  return kNoTensor;
}

std::optional<LayerName> ParseLayerName(std::string_view name) {
  // The first number that has a component in front of it and something behind it.
  for (size_t dot = name.find('.'); dot != std::string_view::npos; dot = name.find('.', dot + 1)) {
    const std::string_view tail = name.substr(dot + 1);
    const size_t end = tail.find('.');
    if (end == std::string_view::npos) return std::nullopt;
    const auto number = ParseDecimal(tail.substr(0, end), kMaxLayerNumber);
    if (!number) continue;
    return LayerName{.prefix = name.substr(0, dot),
                     .number = static_cast<uint32_t>(*number),
                     .rest = tail.substr(end + 1)};
  }
  return std::nullopt;
}

std::optional<ExpertName> ParseExpertName(std::string_view module) {
  constexpr std::string_view kExperts = ".experts.";
  const size_t at = module.find(kExperts);
  if (at == std::string_view::npos) return std::nullopt;
  std::string_view rest = module.substr(at + kExperts.size());
  const auto expert = ParseDecimal(TakeComponent(rest), kMaxExpertId);
  const auto projection = ProjectionFromKey(TakeComponent(rest));
  if (!expert || !projection) return std::nullopt;
  ExpertName name;
  if (!rest.empty()) {
    if (!rest.starts_with(kRank)) return std::nullopt;
    const auto slice = ParseDecimal(rest.substr(kRank.size()), kMaxSlice);
    if (!slice) return std::nullopt;
    name.slice = static_cast<uint32_t>(*slice);
  }
  const auto layer = LastLayerName(module.substr(0, at));
  if (!layer) return std::nullopt;
  name.prefix = layer->prefix;
  name.block = layer->rest;
  name.layer = layer->number;
  name.expert = static_cast<uint32_t>(*expert);
  name.projection = *projection;
  return name;
}

Result<PackIndex> BuildPackIndex(const ShardSet& shards) { return Builder(shards).Build(); }

}  // namespace espalier
