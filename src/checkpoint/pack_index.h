// SPDX-License-Identifier: Apache-2.0
//
// Sorts the tensors of a pack by module and by what the module's name means: a matrix of a routed
// expert, a vector shared by all experts of a layer, a dense matrix, or something unknown.
#ifndef ESPALIER_SRC_CHECKPOINT_PACK_INDEX_H_
#define ESPALIER_SRC_CHECKPOINT_PACK_INDEX_H_

#include <espalier/checkpoint.h>
#include <espalier/status.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/shards.h"

namespace espalier {

// The tensors of one module by suffix; positions in ShardSet::tensors or kNoTensor.
struct ModuleParts {
  int32_t trellis = kNoTensor;
  int32_t suh = kNoTensor;
  int32_t svh = kNoTensor;
  int32_t su = kNoTensor;
  int32_t sv = kNoTensor;
  int32_t bias = kNoTensor;
  int32_t mcg = kNoTensor;
  int32_t mul1 = kNoTensor;

  // Any tensor that says "EXL3"; kNoTensor for a plain module that only has a bias.
  int32_t Any() const;
};

// "model.layers.3.mlp.experts.7.gate_proj.rank1" in its parts. Views point into the name.
struct ExpertName {
  std::string_view prefix;  // "model.layers"
  std::string_view block;   // "mlp"
  uint32_t layer = 0;
  uint32_t expert = 0;
  Projection projection = Projection::kGate;
  std::optional<uint32_t> slice;
};

// Empty when the name is not of that form.
std::optional<ExpertName> ParseExpertName(std::string_view module);

// The (prefix, number) in front of a name: "model.layers.3.self_attn.q_proj" -> ("model.layers", 3).
struct LayerName {
  std::string_view prefix;
  uint32_t number = 0;
  std::string_view rest;  // what follows the number, without the dot
};
std::optional<LayerName> ParseLayerName(std::string_view name);

struct ExpertModule {
  ExpertName name;
  std::string_view module;
  ModuleParts parts;
};

// All modules of one (prefix, layer number) that belong to routed experts.
struct ExpertGroup {
  std::string_view prefix;
  std::string_view block;
  uint32_t number = 0;
  std::vector<ExpertModule> modules;  // ordered by (expert, projection, slice)
  // Shared vectors of the layer: "shared_h.gate_proj.rank0.suh", "r7_shared.down_svh" -> tensor.
  std::unordered_map<std::string_view, int32_t> shared;
};

struct PackIndex {
  std::vector<ExpertGroup> groups;  // larger families of a prefix first, ascending numbers inside
  struct Dense {
    std::string_view module;
    ModuleParts parts;
  };
  std::vector<Dense> dense;        // complete, ordered by name
  std::vector<int32_t> unclaimed;  // EXL3 tensors that belong to nothing
};

// Errors: kUnsupported (a tile_order marker, two expert blocks in one layer), kFormat (a matrix twice).
// Cost: linear in the number of tensors, apart from sorting the modules of a layer.
Result<PackIndex> BuildPackIndex(const ShardSet& shards);

}  // namespace espalier

#endif  // ESPALIER_SRC_CHECKPOINT_PACK_INDEX_H_
