// SPDX-License-Identifier: Apache-2.0
//
// What config.json and quantization_config.json say. The tensors decide; text is used for what they do
// not hold (activation, unpadded sizes) and is otherwise compared with them.
#ifndef ESPALIER_SRC_CHECKPOINT_CONFIG_H_
#define ESPALIER_SRC_CHECKPOINT_CONFIG_H_

#include <espalier/checkpoint.h>
#include <espalier/status.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/json_fields.h"
#include "checkpoint/shards.h"

namespace espalier {

// hybrid_tr3_tail: the description of a rank-sliced pack.
struct RankSlicedConfig {
  std::string codebook;
  uint64_t slices = 0;
  std::optional<std::pair<uint64_t, uint64_t>> moe_layers;  // first and last, inclusive
  std::optional<uint64_t> experts;
  std::optional<uint64_t> bits;
  std::string tier_file;  // empty when no table is named
  std::string tier_field;
  std::optional<bool> shared_h;  // rotation_layout, where it is given
};

// quantization_config.r7_routed_experts.
struct R7Config {
  std::string codebook;
  std::optional<std::pair<uint64_t, uint64_t>> moe_layers;
  std::vector<uint64_t> k_values;
};

struct ParsedConfig {
  std::unique_ptr<JsonFile> config;               // null when there is no config.json
  std::unique_ptr<JsonFile> quantization_config;  // null when there is no such file
  ModelConfig model;
  std::vector<JsonObject> quantization_blocks;  // of config.json, of quantization_config.json
  std::string manifest;                         // quantization_config.exl3.manifest, empty when not given
  std::optional<RankSlicedConfig> rank_sliced;
  std::optional<R7Config> r7;
  // Why the activation cannot be used; reported once it is known that there are routed experts.
  std::optional<Status> activation_error;
};

// Reads and checks the config files of the folder. Errors: kIo, kFormat (wrong types, hostile names),
// kUnsupported (tile_order, unknown rotation layout, codebook or schema).
Result<ParsedConfig> ReadConfig(const ShardSet& shards);

// Warnings for text that contradicts the tensors: bits, codebook, quant_method, two quantization
// blocks that differ, tensor_storage entries.
void CompareConfigWithTensors(const ParsedConfig& config, const ShardSet& shards,
                              const std::vector<MatrixInfo>& routed, const std::vector<LinearInfo>& linears,
                              std::vector<Problem>& problems);

}  // namespace espalier

#endif  // ESPALIER_SRC_CHECKPOINT_CONFIG_H_
