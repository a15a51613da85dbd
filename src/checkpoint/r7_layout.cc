// SPDX-License-Identifier: Apache-2.0
//
// r7 packs: whole experts, bits per (expert, projection), the hidden-side vectors once per layer.
#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/pack_layout.h"

namespace espalier {
namespace {

constexpr std::string_view kGateUpSuh = "r7_shared.gate_up_suh";
constexpr std::string_view kDownSvh = "r7_shared.down_svh";

class R7Rules : public PackRules {
 public:
  explicit R7Rules(Codebook assumed) : assumed_(assumed) {}
  Codebook assumed_codebook() const override { return assumed_; }
  uint32_t required_slices() const override { return 0; }
  int32_t SharedSuh(const ExpertGroup& group, const ExpertName& name) const override {
    return name.projection == Projection::kDown ? kNoTensor : Find(group, kGateUpSuh);
  }
  int32_t SharedSvh(const ExpertGroup& group, const ExpertName& name) const override {
    return name.projection == Projection::kDown ? Find(group, kDownSvh) : kNoTensor;
  }
  bool KnowsShared(std::string_view key, uint32_t) const override {
    return key == kGateUpSuh || key == kDownSvh;
  }

 private:
  static int32_t Find(const ExpertGroup& group, std::string_view key) {
    const auto found = group.shared.find(key);
    return found == group.shared.end() ? kNoTensor : found->second;
  }
  Codebook assumed_;
};

// k_values informs, the shapes decide.
void CompareRates(const LayoutContext& context, const std::vector<PackLayer>& layers,
                  const std::vector<uint64_t>& values) {
  if (values.empty()) return;
  for (const PackLayer& layer : layers) {
    for (const PackMatrix& matrix : layer.matrices) {
      if (matrix.info.trellis == kNoTensor) continue;
      if (std::find(values.begin(), values.end(), static_cast<uint64_t>(matrix.info.bits)) != values.end())
        continue;
      context.problems.push_back(
          {.severity = Problem::Severity::kWarning,
           .file = "config.json",
           .tensor = context.shards.tensors[matrix.info.trellis].name,
           .message =
               fmt::format("r7_routed_experts.k_values: says {}, the tensor holds {}; the tensor is used",
                           fmt::join(values, ", "), matrix.info.bits),
           .layer = {}});
      return;  // one is enough to see that the list is wrong
    }
  }
}

}  // namespace

Result<std::unique_ptr<Layout>> OpenR7Layout(LayoutContext& context, const PackIndex& index) {
  const std::optional<R7Config>& config = context.config.r7;
  const Codebook assumed =
      config ? CodebookFromName(config->codebook).value_or(Codebook::k3Inst) : Codebook::k3Inst;
  auto layers = BuildPackLayers(context, index, R7Rules(assumed));
  if (!layers) return tl::unexpected(layers.error());
  if (config && config->moe_layers) {
    if (auto r = CheckLayerRange(context, *config->moe_layers, "r7_routed_experts.moe_layers"); !r) {
      return tl::unexpected(r.error());
    }
  }
  if (config) CompareCodebook(context, *layers, config->codebook, "r7_routed_experts.codebook");
  if (config) CompareRates(context, *layers, config->k_values);
  return std::make_unique<PackLayout>("r7", context.shards, context.layers, std::move(*layers));
}

}  // namespace espalier
