// SPDX-License-Identifier: Apache-2.0
//
// Stock packs: every expert matrix under its own module key with its own vectors.
#include "checkpoint/pack_layout.h"

namespace espalier {
namespace {

class StockRules : public PackRules {
 public:
  Codebook assumed_codebook() const override { return Codebook::k3Inst; }
  uint32_t required_slices() const override { return 0; }
  int32_t SharedSuh(const ExpertGroup&, const ExpertName&) const override { return kNoTensor; }
  int32_t SharedSvh(const ExpertGroup&, const ExpertName&) const override { return kNoTensor; }
  bool KnowsShared(std::string_view, uint32_t) const override { return false; }
};

}  // namespace

Result<std::unique_ptr<Layout>> OpenStockLayout(LayoutContext& context, const PackIndex& index) {
  auto layers = BuildPackLayers(context, index, StockRules());
  if (!layers) return tl::unexpected(layers.error());
  return std::make_unique<PackLayout>("stock", context.shards, context.layers, std::move(*layers));
}

}  // namespace espalier
