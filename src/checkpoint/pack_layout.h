// SPDX-License-Identifier: Apache-2.0
//
// What the packs have in common: every matrix is a trellis tensor with vectors of its own or of its
// layer. The stock, r7 and rank-sliced layouts differ in how they find these, not in what they are.
#ifndef ESPALIER_SRC_CHECKPOINT_PACK_LAYOUT_H_
#define ESPALIER_SRC_CHECKPOINT_PACK_LAYOUT_H_

#include <espalier/checkpoint.h>
#include <espalier/status.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/config.h"
#include "checkpoint/layout.h"
#include "checkpoint/pack_index.h"
#include "checkpoint/shards.h"

namespace espalier {

// One matrix by the tensors it is made of (positions in ShardSet::tensors).
struct PackMatrix {
  MatrixInfo info;
  int32_t suh = kNoTensor;
  int32_t svh = kNoTensor;
  int32_t bias = kNoTensor;
  bool suh_is_bits = false;  // legacy su / sv
  bool svh_is_bits = false;
};

// What every Open function of a layout reads and fills.
struct LayoutContext {
  const ShardSet& shards;
  const ParsedConfig& config;
  std::vector<MoeLayer>& layers;
  std::vector<Problem>& problems;
};

// Checks trellis, vectors, markers and bias of one module. Vectors the module lacks are taken from
// `shared_suh` / `shared_svh` (kNoTensor = there are none). `assumed` is the codebook of a tensor without
// marker. Error: kFormat naming tensor, found and legal.
Result<PackMatrix> BuildMatrix(const ShardSet& shards, std::string_view module, const ModuleParts& parts,
                               int32_t shared_suh, int32_t shared_svh, Codebook assumed);

// Native-order source of a matrix, or of the channels [first, first + channels) of its cut axis.
MatrixSource PackSource(const ShardSet& shards, const PackMatrix& matrix, std::string_view module,
                        bool cut_input, uint64_t first, uint64_t channels);

struct PackLayer {
  std::vector<PackMatrix> matrices;  // [expert][projection][slice]; gate entries unused without gate
  std::vector<std::string_view> modules;
  uint32_t slices = 1;

  size_t At(uint32_t expert, Projection projection, uint32_t slice) const {
    return (size_t{expert} * kNumProjections + static_cast<size_t>(projection)) * slices + slice;
  }
};

class PackLayout : public Layout {
 public:
  PackLayout(std::string_view name, const ShardSet& shards, const std::vector<MoeLayer>& layers,
             std::vector<PackLayer> pack_layers)
      : name_(name), shards_(shards), layers_(layers), pack_layers_(std::move(pack_layers)) {}

  std::string_view name() const override { return name_; }
  MatrixInfo Matrix(size_t layer, uint32_t expert, Projection projection, uint32_t slice) const override;
  std::string MatrixName(size_t layer, uint32_t expert, Projection projection, uint32_t slice) const override;
  Result<MatrixSource> Source(size_t layer, uint32_t expert, Projection projection,
                              const SliceExtent& extent) const override;
  Result<void> CheckPadding(size_t layer, uint64_t first_channel, uint64_t channels) const override;
  std::vector<int> LegalTpSizes() const override;

 private:
  std::string_view name_;
  const ShardSet& shards_;
  const std::vector<MoeLayer>& layers_;
  std::vector<PackLayer> pack_layers_;
};

// How a layout finds what a module of a group does not hold itself.
class PackRules {
 public:
  virtual ~PackRules() = default;
  virtual Codebook assumed_codebook() const = 0;
  // Number of slices a group must have; 0 = whatever its names say, not sliced where they say nothing.
  virtual uint32_t required_slices() const = 0;
  // Tensor of a layer-wide vector, kNoTensor when there is none.
  virtual int32_t SharedSuh(const ExpertGroup& group, const ExpertName& name) const = 0;
  virtual int32_t SharedSvh(const ExpertGroup& group, const ExpertName& name) const = 0;
  // Whether a layer-wide vector of this name (a key of ExpertGroup::shared) has a meaning.
  virtual bool KnowsShared(std::string_view key, uint32_t slices) const = 0;
};

// Builds all groups by the rules; fills context.layers. Errors: kFormat, kUnsupported.
Result<std::vector<PackLayer>> BuildPackLayers(LayoutContext& context, const PackIndex& index,
                                               const PackRules& rules);

// Reports a config's [first, last] of MoE layers that the files do not have (kFormat, unless only a part
// of the pack is open) and layers outside of it (warning).
Result<void> CheckLayerRange(const LayoutContext& context, const std::pair<uint64_t, uint64_t>& range,
                             std::string_view place);

// One warning when a matrix has another codebook than the config text says (empty = it says nothing).
void CompareCodebook(const LayoutContext& context, const std::vector<PackLayer>& packs,
                     std::string_view codebook, std::string_view place);

using LayoutOpener = Result<std::unique_ptr<Layout>> (*)(LayoutContext& context, const PackIndex& index);
Result<std::unique_ptr<Layout>> OpenStockLayout(LayoutContext& context, const PackIndex& index);
Result<std::unique_ptr<Layout>> OpenR7Layout(LayoutContext& context, const PackIndex& index);
Result<std::unique_ptr<Layout>> OpenRankSlicedLayout(LayoutContext& context, const PackIndex& index);

}  // namespace espalier

#endif  // ESPALIER_SRC_CHECKPOINT_PACK_LAYOUT_H_
