// SPDX-License-Identifier: Apache-2.0
//
// What opening refuses of tensors, rank-sliced blocks, tier tables, r7 blocks and manifests: one line per
// rule of docs/format.md. Index rules are in index_test.cc, config rules in config_test.cc.
#include <gtest/gtest.h>

#include <cstring>

#include "support/refusal_cases.h"

namespace espalier::testing {
namespace {

const std::string kGate = "model.layers.1.mlp.experts.1.gate_proj";
const std::string kDown = "model.layers.2.mlp.experts.2.down_proj";
const std::string kSlice = "model.layers.3.mlp.experts.2.up_proj.rank1";

std::string Int32Bytes(uint32_t value) {
  std::string bytes(4, '\0');
  std::memcpy(bytes.data(), &value, 4);
  return bytes;
}

void SetMarkers(CheckpointFiles& files, const std::string& matrix, const std::vector<NamedTensor>& markers) {
  const std::string file = files.FileOf(matrix + ".trellis");
  for (const char* name : {".mcg", ".mul1"}) {
    try {
      files.Remove(matrix + name);
    } catch (const std::out_of_range&) {
    }
  }
  for (NamedTensor marker : markers) {
    marker.name = matrix + marker.name;
    files.Add(file, std::move(marker));
  }
}

const NamedTensor kMcgMarker{".mcg", "I32", {}, Int32Bytes(0xCBAC1FEDu)};
const NamedTensor kMul1Marker{".mul1", "I32", {}, Int32Bytes(0x83DCD12Du)};

Mutation Markers(std::string matrix, std::vector<NamedTensor> markers) {
  return [=](CheckpointFiles& files) { SetMarkers(files, matrix, markers); };
}

// Gives one matrix of the stock base other sizes; its vectors follow.
Mutation Resize(std::string matrix, uint64_t in, uint64_t out) {
  return [=](CheckpointFiles& files) {
    const uint64_t last = files.Tensor(matrix + ".trellis").shape[2];
    Retype(matrix + ".trellis", "I16", {in / 16, out / 16, last}, 2)(files);
    Retype(matrix + ".suh", "F16", {in}, 2)(files);
    Retype(matrix + ".svh", "F16", {out}, 2)(files);
  };
}

Mutation SetTail(std::string key, Json value) {
  return SetJson("config.json", "/hybrid_tr3_tail/" + key, std::move(value));
}

Mutation SetR7(std::string key, Json value) {
  return SetJson("config.json", "/quantization_config/r7_routed_experts/" + key, std::move(value));
}

Mutation SetManifest(std::string pointer, Json value) {
  return SetJson(kManifestName, std::move(pointer), std::move(value));
}

Mutation SetMetadata(std::string key, std::string value) {
  return [=](CheckpointFiles& files) {
    for (auto& [name, text] : files.shards.at("exl3-layer-00001.safetensors").metadata) {
      if (name == key) text = value;
    }
  };
}

std::vector<RefusalCase> TensorCases() {
  const Base stock = Base::kStock;
  const auto marker = [](std::vector<std::string> words) {
    return Expected{Expected::Kind::kMarker, {StatusCode::kFormat}, std::move(words)};
  };
  return {
      {"two_markers", stock, Markers(kGate, {kMcgMarker, kMul1Marker}), Format({kGate, "mcg", "mul1"})},
      {"two_markers_linear", stock, Markers("lm_head", {kMcgMarker, kMul1Marker}),
       Format({"lm_head", "mcg", "mul1"})},
      {"marker_i64", stock, Markers(kGate, {{".mcg", "I64", {}, std::string(8, '\0')}}),
       Format({kGate + ".mcg", ".safetensors", "I64", "I32"})},
      {"marker_u32", stock, Markers(kGate, {{".mul1", "U32", {}, Int32Bytes(0x83DCD12Du)}}),
       Format({kGate + ".mul1", "U32", "I32"})},
      {"marker_shape_1", stock, Markers(kGate, {{".mcg", "I32", {1}, Int32Bytes(0xCBAC1FEDu)}}),
       Format({kGate + ".mcg", "[1]"})},
      {"marker_unknown_value", stock, Markers(kGate, {{".mcg", "I32", {}, Int32Bytes(7)}}),
       marker({kGate + ".mcg", ".safetensors"})},
      {"marker_of_the_other_codebook", stock, Markers(kGate, {{".mcg", "I32", {}, Int32Bytes(0x83DCD12Du)}}),
       marker({kGate + ".mcg", ".safetensors"})},
      {"marker_mcg", stock, Markers(kGate, {kMcgMarker}), Accepted()},
      {"marker_mul1", stock, Markers(kGate, {kMul1Marker}), Accepted()},
      {"marker_none", stock, Markers(kGate, {}), Accepted()},
      {"bits_0", stock, Retype(kGate + ".trellis", "I16", {8, 16, 0}, 2),
       Format({kGate + ".trellis", "0", "8"})},
      {"bits_9", stock, Retype(kGate + ".trellis", "I16", {8, 16, 144}, 2),
       Format({kGate + ".trellis", "144"})},
      {"bits_1", stock, Retype(kGate + ".trellis", "I16", {8, 16, 16}, 2), Accepted()},
      {"bits_8", stock, Retype(kGate + ".trellis", "I16", {8, 16, 128}, 2), Accepted()},
      {"last_dimension_24", stock, Retype(kGate + ".trellis", "I16", {8, 16, 24}, 2),
       Format({kGate + ".trellis", "24", "16"})},
      {"bits_9_linear", stock, Retype("lm_head.trellis", "I16", {8, 8, 144}, 2),
       Format({"lm_head.trellis", "144"})},
      {"trellis_2d", stock, Retype(kGate + ".trellis", "I16", {128, 48}, 2),
       Format({kGate + ".trellis", "[128, 48]"})},
      {"trellis_4d", stock, Retype(kGate + ".trellis", "I16", {1, 8, 16, 48}, 2),
       Format({kGate + ".trellis"})},
      {"trellis_scalar", stock, Retype(kGate + ".trellis", "I16", {}, 2), Format({kGate + ".trellis"})},
      {"trellis_empty", stock, Retype(kGate + ".trellis", "I16", {0, 16, 48}, 2),
       Format({kGate + ".trellis"})},
      {"trellis_i32", stock, Retype(kGate + ".trellis", "I32", {8, 16, 48}, 4),
       Format({kGate + ".trellis", ".safetensors", "I32", "I16"})},
      {"trellis_u16", stock, Retype(kGate + ".trellis", "U16", {8, 16, 48}, 2),
       Format({kGate + ".trellis", "U16", "I16"})},
      {"trellis_i8", stock, Retype(kGate + ".trellis", "I8", {8, 16, 48}, 1),
       Format({kGate + ".trellis", "I8", "I16"})},
      {"trellis_u16_linear", stock, Retype("lm_head.trellis", "U16", {8, 8, 48}, 2),
       Format({"lm_head.trellis", "U16", "I16"})},
      {"suh_bf16", stock, Retype(kGate + ".suh", "BF16", {128}, 2),
       Format({kGate + ".suh", ".safetensors", "BF16", "F16"})},
      {"suh_f32", stock, Retype(kGate + ".suh", "F32", {128}, 4), Format({kGate + ".suh", "F32", "F16"})},
      {"svh_i16", stock, Retype(kGate + ".svh", "I16", {256}, 2), Format({kGate + ".svh", "I16", "F16"})},
      {"suh_bf16_linear", stock, Retype("lm_head.suh", "BF16", {128}, 2),
       Format({"lm_head.suh", "BF16", "F16"})},
      {"suh_too_long", stock, Retype(kGate + ".suh", "F16", {256}, 2),
       Format({kGate + ".suh", "256", "128"})},
      {"svh_too_short", stock, Retype(kGate + ".svh", "F16", {255}, 2),
       Format({kGate + ".svh", "255", "256"})},
      {"suh_2d", stock, Retype(kGate + ".suh", "F16", {1, 128}, 2), Format({kGate + ".suh", "[1, 128]"})},
      {"suh_missing", stock, Without({kGate + ".suh"}), Format({kGate, "suh"})},
      {"svh_missing", stock, Without({kGate + ".svh"}), Format({kGate, "svh"})},
      {"trellis_missing", stock, Without({kGate + ".trellis"}), Format({kGate})},
      {"expert_missing_in_the_middle", stock, WithoutAll("model.layers.1.mlp.experts.1."),
       Format({"model.layers.1.mlp.experts.1"})},
      {"first_expert_missing", stock, WithoutAll("model.layers.1.mlp.experts.0."),
       Format({"model.layers.1.mlp.experts.0"})},
      // The config still asks for three experts.
      {"last_expert_missing", stock, WithoutAll("model.layers.1.mlp.experts.2."), Format({"3", "2"})},
      {"gate_missing", stock, WithoutAll(kGate), Format({"model.layers.1.mlp.experts.1", "gate"})},
      {"down_missing", stock, WithoutAll(kDown), Format({"model.layers.2.mlp.experts.2", "down"})},
      {"up_missing_everywhere", stock,
       Both(Both(WithoutAll("model.layers.1.mlp.experts.0.up_proj"),
                 WithoutAll("model.layers.1.mlp.experts.1.up_proj")),
            WithoutAll("model.layers.1.mlp.experts.2.up_proj")),
       Format({"up"})},
      {"expert_number_huge", stock, RenameAll("layers.1.mlp.experts.2.", "layers.1.mlp.experts.4000000000."),
       Format({"experts", "3", "2"})},
      {"expert_number_beyond_64_bits", stock,
       RenameAll("layers.1.mlp.experts.2.", "layers.1.mlp.experts.99999999999999999999."),
       Format({"experts"})},
      {"one_expert_wider", stock, Resize(kGate, 128, 384),
       Format({"model.layers.1.mlp.experts.1", "384", "256"})},
      {"one_expert_other_hidden", stock, Resize(kGate, 256, 256),
       Format({"model.layers.1.mlp.experts.1", "256", "128"})},
      {"down_transposed", stock, Resize(kDown, 128, 256), Format({kDown})},
      {"bias_f32", Base::kBias, Retype("model.layers.1.mlp.experts.1.up_proj.bias", "F32", {256}, 4),
       Format({"model.layers.1.mlp.experts.1.up_proj.bias", "F32", "F16"})},
      {"bias_too_short", Base::kBias, Retype(kDown + ".bias", "F16", {64}, 2),
       Format({kDown + ".bias", "64", "128"})},
      {"su_f16", Base::kLegacy, Retype(kGate + ".su", "F16", {8}, 2), Format({kGate + ".su", "F16", "I16"})},
      {"sv_too_long", Base::kLegacy, Retype(kGate + ".sv", "I16", {32}, 2),
       Format({kGate + ".sv", "32", "16"})},
      {"su_missing", Base::kLegacy, Without({kGate + ".su"}), Format({kGate})},
      {"su_beside_suh", Base::kStock,
       AddTensor(kGate + ".trellis", {kGate + ".su", "I16", {8}, std::string(16, '\0')}), Accepted()},
      {"tile_order_tensor", stock,
       AddTensor(kGate + ".trellis", {kGate + ".tile_order", "I32", {}, Int32Bytes(1)}),
       Unsupported({"tile_order", kGate})},
      {"tile_order_in_metadata", stock,
       [](CheckpointFiles& files) {
         files.shards.begin()->second.metadata.push_back({"tile_order", "sm70_colmajor"});
       },
       Unsupported({"tile_order", "model-00001-of-00002.safetensors", "sm70_colmajor"})},
      {"metadata_unknown_key", stock,
       [](CheckpointFiles& files) {
         files.shards.begin()->second.metadata.push_back({"author", "somebody"});
       },
       Accepted()},
      {"no_metadata", stock, [](CheckpointFiles& files) { files.shards.begin()->second.metadata.clear(); },
       Accepted()},
      {"unclaimed_group", stock, RenameAll("layers.1.mlp.experts", "layers.1.mlp.xperts"),
       ErrorProblem({"xperts"})},
      {"unclaimed_projection", stock, RenameAll("experts.1.gate_proj", "experts.1.gatte_proj"),
       Refused({StatusCode::kFormat}, {"model.layers.1.mlp.experts.1"})},
      {"linear_without_suh", stock, Without({"lm_head.suh"}), ErrorProblem({"lm_head"})},
      {"linear_without_svh", stock, Without({"model.layers.0.mlp.up_proj.svh"}),
       ErrorProblem({"model.layers.0.mlp.up_proj"})},
      {"linear_vectors_too_short", stock, Retype("lm_head.suh", "F16", {64}, 2),
       Format({"lm_head.suh", "64", "128"})},
      {"stray_suh", stock,
       AddTensor("lm_head.suh", {"model.layers.9.other.suh", "F16", {128}, std::string(256, '\0')}),
       ErrorProblem({"model.layers.9.other.suh"})},
      {"stray_marker", stock,
       AddTensor("lm_head.suh", {"model.layers.9.other.mcg", "I32", {}, Int32Bytes(0xCBAC1FEDu)}),
       ErrorProblem({"model.layers.9.other.mcg"})},
      {"stray_su", stock,
       AddTensor("lm_head.suh", {"model.layers.9.other.su", "I16", {8}, std::string(16, '\0')}),
       ErrorProblem({"model.layers.9.other.su"})},
      {"plain_tensor_more", stock,
       AddTensor("lm_head.suh", {"model.vision.patch.weight", "F32", {2, 3}, std::string(24, '\0')}),
       Accepted()},
      {"scalar_tensor_more", stock,
       AddTensor("lm_head.suh", {"model.scale", "F32", {}, std::string(4, '\0')}), Accepted()},
      {"empty_tensor_more", stock, AddTensor("lm_head.suh", {"model.nothing", "F32", {0, 4}, ""}),
       Accepted()},
  };
}

std::vector<RefusalCase> TailCases() {
  const Base base = Base::kRankSliced;
  const std::string config = "config.json";
  const std::string table = "tier_bitmap.json";
  std::vector<RefusalCase> cases = {
      {"format_unknown", base, SetTail("format", "exl4-trellis"),
       Unsupported({config, "exl4-trellis", "exl3-trellis"})},
      {"codebook_unknown", base, SetTail("codebook", "mcg2"), Unsupported({config, "mcg2", "mcg"})},
      {"codebook_lut", base, SetTail("codebook", "lut_e4m3"), Unsupported({config, "lut_e4m3"})},
      {"codebook_against_markers", base, SetTail("codebook", "mul1"), Warning({config, "mul1", "mcg"})},
      {"multiplier_negative", base, SetTail("mcg_multiplier", -877912083), Accepted()},
      {"multiplier_beyond_32_bits", base, SetTail("mcg_multiplier", 3417055213ull + (1ull << 32)),
       Accepted()},
      {"multiplier_other", base, SetTail("mcg_multiplier", 5),
       Refused({StatusCode::kFormat, StatusCode::kUnsupported},
               {config, "mcg_multiplier", "5", "3417055213"})},
      {"tp_0", base, SetTail("tp", 0), Format({config, "tp", "0"})},
      {"tp_absent", base, EraseJson(config, "/hybrid_tr3_tail/tp"), Format({config, "tp"})},
      {"tp_text", base, SetTail("tp", "2"), Format({config, "tp"})},
      {"tp_negative", base, SetTail("tp", -2), Format({config, "tp"})},
      {"tp_more_than_stored", base, SetTail("tp", 4), Format({"rank2"})},
      {"tp_less_than_stored", base, SetTail("tp", 1), Format({"rank1"})},
      {"tp_huge", base, SetTail("tp", 4294967296ull), Format({"tp"})},
      {"experts_per_layer_other", base, SetTail("experts_per_layer", 5),
       Format({config, "experts_per_layer", "5", "4"})},
      {"moe_layers_one_number", base, SetTail("moe_layers", {3}), Format({config, "moe_layers"})},
      {"moe_layers_reversed", base, SetTail("moe_layers", {4, 3}), Format({config, "moe_layers"})},
      {"moe_layers_text", base, SetTail("moe_layers", "3-4"), Format({config, "moe_layers"})},
      {"schema_other", base, SetTail("tensor_schema", "model.layers.{L}.experts.{E}.{proj}.r{r}.{trellis}"),
       Unsupported({config, "tensor_schema"})},
      {"bits_9", base, SetTail("bits", 9), Format({config, "bits", "9"})},
      {"bits_word", base, SetTail("bits", "various"), Format({config, "bits", "various", "mixed"})},
      {"mixed_without_a_table", base,
       Both(SetTail("bits", "mixed"), EraseJson(config, "/hybrid_tr3_tail/bits_per_expert")), Accepted()},
      {"k_values_with_9", base, SetTail("k_values", {3, 9}), Format({config, "k_values", "9"})},
      {"rotation_layout_unknown", base, SetTail("rotation_layout", "shared_h_v9"),
       Unsupported({config, "rotation_layout", "shared_h_v9", "per_expert_v1", "shared_h_v1"})},
      {"rotation_layout_per_expert", base, SetTail("rotation_layout", "per_expert_v1"), Accepted()},
      {"rotation_layout_number", base, SetTail("rotation_layout", 1),
       Refused({StatusCode::kFormat, StatusCode::kUnsupported}, {config, "rotation_layout"})},
      {"unknown_harmless_key", base, SetTail("note", "made on a Sunday"), Accepted()},
      {"informative_keys", base, Both(SetTail("exllamav3_version", "0.0.9"), SetTail("bits_avg", 3.25)),
       Accepted()},
      {"tile_order", base, SetTail("tile_order", "rowmajor"),
       Unsupported({config, "tile_order", "rowmajor"})},
      {"block_not_an_object", base, SetJson(config, "/hybrid_tr3_tail", "yes"),
       Format({config, "hybrid_tr3_tail"})},
      {"table_absent", base, [](CheckpointFiles& files) { files.json.erase("tier_bitmap.json"); },
       Refused({StatusCode::kIo, StatusCode::kFormat}, {table})},
      {"table_name_parent", base, SetTail("bits_per_expert", "../tier_bitmap.json:k"),
       Format({config, ".."})},
      {"table_name_absolute", base, SetTail("bits_per_expert", "/etc/tier.json:k"),
       Format({config, "/etc/tier.json"})},
      {"table_name_empty", base, SetTail("bits_per_expert", ":k"), Format({config, "bits_per_expert"})},
      {"table_name_nul", base, SetTail("bits_per_expert", std::string("tier\0.json:k", 12)),
       Format({config})},
      {"table_without_field", base, SetTail("bits_per_expert", "tier_bitmap.json"),
       Format({config, "tier_bitmap.json"})},
      {"table_number", base, SetTail("bits_per_expert", 3), Format({config, "bits_per_expert"})},
      {"table_name_with_colon", base,
       Both(SetTail("bits_per_expert", "tier:b.json:k"),
            [](CheckpointFiles& files) {
              files.json["tier:b.json"] = files.json["tier_bitmap.json"];
              files.json.erase("tier_bitmap.json");
            }),
       Accepted()},
      {"table_synonym", base, SetTail("bits_per_expert", "tier_bitmap.json:bits_per_expert"), Accepted()},
      {"table_short", base, [](CheckpointFiles& files) { files.json["tier_bitmap.json"]["3"]["k"].erase(0); },
       Format({table, "3", "4"})},
      {"table_long", base,
       [](CheckpointFiles& files) { files.json["tier_bitmap.json"]["3"]["k"].push_back(3); },
       Format({table, "5", "4"})},
      {"table_layer_absent", base, EraseJson(table, "/4"), Format({table, "4"})},
      {"table_field_absent", base, EraseJson(table, "/4/k"), Format({table, "k"})},
      {"table_field_text", base, SetJson(table, "/4/k", "3344"), Format({table, "k"})},
      {"table_layer_not_an_object", base, SetJson(table, "/4", {3, 3, 3, 3}), Format({table})},
      {"table_root_not_an_object", base, SetJson(table, "", {3, 3, 3, 3}), Format({table})},
      {"table_with_9", base, SetJson(table, "/3/k/1", 9), Format({table, "9"})},
      {"table_with_a_fraction", base, SetJson(table, "/3/k/1", 3.5), Format({table})},
      {"table_with_other_k", base,
       [](CheckpointFiles& files) {
         Json& k = files.json["tier_bitmap.json"]["3"]["k"][2];
         k = k == 3 ? 4 : 3;
       },
       Format({table, "model.layers.3.mlp.experts.2"})},
      {"slice_missing", base, WithoutAll("model.layers.3.mlp.experts.2.up_proj.rank1."),
       Format({"model.layers.3.mlp.experts.2.up_proj.rank1"})},
      {"rank_of_one_expert_missing", base,
       Both(Both(WithoutAll("model.layers.3.mlp.experts.2.up_proj.rank1."),
                 WithoutAll("model.layers.3.mlp.experts.2.gate_proj.rank1.")),
            WithoutAll("model.layers.3.mlp.experts.2.down_proj.rank1.")),
       Format({"model.layers.3.mlp.experts.2", "rank1"})},
      {"rank_missing_everywhere", base, RenameAll(".rank1.", ".rank7."), Format({"rank7"})},
      {"expert_missing", base, WithoutAll("model.layers.4.mlp.experts.1."),
       Format({"model.layers.4.mlp.experts.1"})},
      {"suh_missing", base, Without({kSlice + ".suh"}), Format({kSlice, "suh"})},
      {"svh_missing", base, Without({kSlice + ".svh"}), Format({kSlice, "svh"})},
      {"trellis_missing", base, Without({kSlice + ".trellis"}), Format({kSlice})},
      {"suh_bf16", base, Retype(kSlice + ".suh", "BF16", {128}, 2), Format({kSlice + ".suh", "BF16", "F16"})},
      {"trellis_u16", base, Retype(kSlice + ".trellis", "U16", {8, 8, 48}, 2),
       Format({kSlice + ".trellis", "U16"})},
      {"slice_other_width", base, Resize(kSlice, 128, 256),
       Format({"model.layers.3.mlp.experts.2", "256", "128"})},
      {"two_markers", base,
       AddTensor(kSlice + ".trellis", {kSlice + ".mul1", "I32", {}, Int32Bytes(0x83DCD12Du)}),
       Format({kSlice, "mcg", "mul1"})},
      {"markers_absent", base, Without({kSlice + ".mcg"}), Accepted()},
      {"bias", base, AddTensor(kSlice + ".trellis", {kSlice + ".bias", "F16", {128}, std::string(256, '\0')}),
       Unsupported({kSlice + ".bias"})},
      {"bias_on_down", base,
       AddTensor(kSlice + ".trellis",
                 {"model.layers.3.mlp.experts.0.down_proj.rank0.bias", "F16", {128}, std::string(256, '\0')}),
       Unsupported({"model.layers.3.mlp.experts.0.down_proj.rank0.bias"})},
      {"layer_beyond_moe_layers", base, SetTail("moe_layers", {3, 3}), Warning({config, "moe_layers", "4"})},
      {"quant_method_of_another", base,
       SetJson(config, "/quantization_config", {{"quant_method", "modelopt"}}),
       Warning({"config.json", "modelopt"})},
      {"legacy_k3_list", base,
       [](CheckpointFiles& files) {
         // Without a k list every expert of tail_tr3 has K 3, which this file has not everywhere.
         for (auto& [layer, entry] : files.json["tier_bitmap.json"].items()) entry.erase("k");
       },
       Format({table})},
  };
  for (RefusalCase& refusal_case : cases) refusal_case.name = "tail_" + refusal_case.name;
  return cases;
}

std::vector<RefusalCase> SharedCases() {
  const std::string shared = "model.layers.3.mlp.experts.shared_h.";
  const std::string r7 = "model.layers.3.mlp.experts.r7_shared.";
  const std::string config = "config.json";
  return {
      {"shared_gate_suh_missing", Base::kSharedH, Without({shared + "gate_proj.rank1.suh"}),
       Format({"model.layers.3.mlp.experts", "suh"})},
      {"shared_down_svh_missing", Base::kSharedH, Without({shared + "down_proj.rank0.svh"}),
       Format({"model.layers.3.mlp.experts", "svh"})},
      {"shared_up_suh_missing", Base::kSharedH,
       Both(Without({shared + "up_proj.rank0.suh"}), Without({shared + "up_proj.rank1.suh"})), Accepted()},
      {"shared_suh_bf16", Base::kSharedH, Retype(shared + "gate_proj.rank0.suh", "BF16", {128}, 2),
       Format({shared + "gate_proj.rank0.suh", "BF16", "F16"})},
      {"shared_suh_too_long", Base::kSharedH, Retype(shared + "gate_proj.rank0.suh", "F16", {256}, 2),
       Format({shared + "gate_proj.rank0.suh", "256", "128"})},
      {"shared_own_vector_wrong", Base::kSharedH,
       AddTensor(shared + "gate_proj.rank0.suh",
                 {"model.layers.3.mlp.experts.2.gate_proj.rank0.suh", "F16", {64}, std::string(128, '\0')}),
       Format({"model.layers.3.mlp.experts.2.gate_proj.rank0.suh", "64", "128"})},
      {"shared_svh_of_expert_missing", Base::kSharedH, Without({kSlice + ".svh"}), Format({kSlice, "svh"})},
      {"shared_layout_said_to_be_per_expert", Base::kSharedH, SetTail("rotation_layout", "per_expert_v1"),
       Warning({config, "rotation_layout"})},
      {"r7_schema_unknown", Base::kR7, SetR7("schema", "r7-complete-v3-checkpoint-v1"),
       Unsupported({config, "schema", "r7-complete-v3-checkpoint-v1", "r7-complete-v2-checkpoint-v1"})},
      {"r7_codebook_unknown", Base::kR7, SetR7("codebook", "nuq"), Unsupported({config, "nuq", "mcg"})},
      {"r7_codebook_lut", Base::kR7, SetR7("codebook", "lut_fp16"), Unsupported({config, "lut_fp16"})},
      {"r7_k_values_inform", Base::kR7, SetR7("k_values", {1}), Warning({config, "k_values"})},
      {"r7_unknown_harmless_key", Base::kR7, SetR7("sidecar", "none"), Accepted()},
      {"r7_tile_order", Base::kR7, SetR7("tile_order", "sm70_colmajor"), Unsupported({config, "tile_order"})},
      {"r7_not_an_object", Base::kR7, SetJson(config, "/quantization_config/r7_routed_experts", {1}),
       Format({config})},
      {"r7_quant_method_of_another", Base::kR7,
       SetJson(config, "/quantization_config/quant_method", "modelopt"), Warning({config, "modelopt"})},
      {"r7_suh_missing", Base::kR7, Without({r7 + "gate_up_suh"}),
       Format({"model.layers.3.mlp.experts", "suh"})},
      {"r7_svh_missing", Base::kR7, Without({r7 + "down_svh"}),
       Format({"model.layers.3.mlp.experts", "svh"})},
      {"r7_suh_f32", Base::kR7, Retype(r7 + "gate_up_suh", "F32", {128}, 4),
       Format({r7 + "gate_up_suh", "F32", "F16"})},
      {"r7_svh_too_short", Base::kR7, Retype(r7 + "down_svh", "F16", {64}, 2),
       Format({r7 + "down_svh", "64", "128"})},
      {"r7_svh_of_expert_missing", Base::kR7, Without({"model.layers.3.mlp.experts.2.up_proj.svh"}),
       Format({"model.layers.3.mlp.experts.2.up_proj", "svh"})},
      {"r7_expert_missing", Base::kR7, WithoutAll("model.layers.4.mlp.experts.1."),
       Format({"model.layers.4.mlp.experts.1"})},
      {"r7_stray", Base::kR7,
       AddTensor(r7 + "down_svh",
                 {"model.layers.3.mlp.experts.r7_shared.up_suh", "F16", {128}, std::string(256, '\0')}),
       ErrorProblem({"r7_shared.up_suh"})},
  };
}

std::vector<RefusalCase> ManifestCases() {
  const Base base = Base::kExl3V1;
  const std::string manifest = kManifestName;
  std::vector<RefusalCase> cases;
  // A required key that is missing, and an unknown key, at every level.
  for (const char* pointer : {"/kind",
                              "/schema",
                              "/codebook",
                              "/codebook_seed",
                              "/geometry",
                              "/rates",
                              "/hadamard",
                              "/layout",
                              "/layers",
                              "/geometry/num_experts",
                              "/geometry/hidden_size",
                              "/geometry/intermediate_size",
                              "/geometry/slot_channels",
                              "/geometry/num_slots",
                              "/geometry/moe_layer_indices",
                              "/rates/structure",
                              "/rates/bits",
                              "/hadamard/intermediate_hadamard",
                              "/hadamard/per_expert_input_rotations",
                              "/layout/row_alignment",
                              "/layout/extent_alignment_slots",
                              "/layers/2",
                              "/layers/1/file",
                              "/layers/1/sha256"}) {
    std::string name = pointer;
    std::replace(name.begin(), name.end(), '/', '_');
    const std::string key = std::string(pointer).substr(std::string(pointer).rfind('/') + 1);
    cases.push_back({"without" + name, base, EraseJson(manifest, pointer), Format({manifest, key})});
  }
  for (const char* pointer :
       {"/extra", "/geometry/extra", "/rates/extra", "/hadamard/extra", "/layout/extra", "/layers/1/extra",
        "/rates/pair_kinds", "/hadamard/pre_block", "/hadamard/post_block"}) {
    std::string name = pointer;
    std::replace(name.begin(), name.end(), '/', '_');
    const std::string key = std::string(pointer).substr(std::string(pointer).rfind('/') + 1);
    cases.push_back({"unknown" + name, base, SetManifest(pointer, 512), Format({manifest, key})});
  }
  const auto add = [&](std::string name, std::string pointer, Json value, Expected expected) {
    cases.push_back(
        {std::move(name), base, SetManifest(std::move(pointer), std::move(value)), std::move(expected)});
  };
  add("kind_other", "/kind", "btx-manifest",
      Refused({StatusCode::kFormat, StatusCode::kUnsupported}, {"btx-manifest"}));
  add("schema_v2", "/schema", "exl3-v2", Unsupported({manifest, "exl3-v2", "exl3-v1"}));
  add("schema_number", "/schema", 1, Format({manifest, "schema"}));
  add("codebook_unknown", "/codebook", "mcg5", Unsupported({manifest, "mcg5", "mcg"}));
  add("codebook_lut_with_seed", "/codebook", "lut_e4m3",
      Refused({StatusCode::kFormat, StatusCode::kUnsupported}, {manifest, "codebook"}));
  add("seed_other", "/codebook_seed", 3417055214u,
      Format({manifest, "codebook_seed", "3417055214", "3417055213"}));
  add("seed_text", "/codebook_seed", "3417055213", Format({manifest, "codebook_seed"}));
  add("experts_0", "/geometry/num_experts", 0, Format({manifest, "num_experts", "0"}));
  add("experts_negative", "/geometry/num_experts", -3, Format({manifest, "num_experts", "negative"}));
  add("experts_text", "/geometry/num_experts", "3", Format({manifest, "num_experts"}));
  add("experts_fraction", "/geometry/num_experts", 2.5, Format({manifest, "num_experts"}));
  add("experts_2_pow_63", "/geometry/num_experts", 1ull << 63, Format({manifest}));
  add("experts_other", "/geometry/num_experts", 2, Format({".safetensors"}));
  add("hidden_0", "/geometry/hidden_size", 0, Format({manifest, "hidden_size", "0"}));
  add("hidden_120", "/geometry/hidden_size", 120, Format({manifest, "hidden_size", "120"}));
  add("hidden_2_pow_62", "/geometry/hidden_size", 1ull << 62, Format({manifest}));
  add("hidden_other", "/geometry/hidden_size", 256, Format({".safetensors"}));
  add("intermediate_0", "/geometry/intermediate_size", 0, Format({manifest, "intermediate_size"}));
  add("intermediate_250", "/geometry/intermediate_size", 250, Format({manifest, "intermediate_size", "250"}));
  add("intermediate_other", "/geometry/intermediate_size", 512, Format({manifest, "num_slots"}));
  add("slot_channels_64", "/geometry/slot_channels", 64, Format({manifest, "slot_channels", "64", "32"}));
  add("num_slots_9", "/geometry/num_slots", 9, Format({manifest, "num_slots", "9", "8"}));
  add("indices_twice", "/geometry/moe_layer_indices", {1, 1}, Format({manifest, "moe_layer_indices"}));
  add("indices_negative", "/geometry/moe_layer_indices", {-1, 2}, Format({manifest, "moe_layer_indices"}));
  add("indices_more", "/geometry/moe_layer_indices", {1, 2, 3}, Format({manifest, "3"}));
  add("indices_fewer", "/geometry/moe_layer_indices", {1}, Format({manifest, "2"}));
  add("indices_text", "/geometry/moe_layer_indices", {"1", "2"}, Format({manifest, "moe_layer_indices"}));
  add("indices_empty", "/geometry/moe_layer_indices", Json::array(), Format({manifest}));
  add("indices_unsorted", "/geometry/moe_layer_indices", {2, 1}, Accepted());
  add("structure_unknown", "/rates/structure", "ternary",
      Refused({StatusCode::kFormat, StatusCode::kUnsupported}, {manifest, "ternary", "uniform"}));
  add("structure_pair", "/rates", {{"structure", "per_expert_pair"}, {"pair_kinds", {"P33"}}},
      Unsupported({"per_expert_pair"}));
  add("structure_pair_unknown_kind", "/rates", {{"structure", "per_expert_pair"}, {"pair_kinds", {"P99"}}},
      Refused({StatusCode::kFormat, StatusCode::kUnsupported}, {manifest}));
  add("bits_1", "/rates/bits", 1, Format({manifest, "bits", "1"}));
  add("bits_7", "/rates/bits", 7, Format({manifest, "bits", "7"}));
  add("bits_text", "/rates/bits", "3", Format({manifest, "bits"}));
  // Rows of 4096 bytes hold neither K 4 nor more of this geometry.
  add("bits_more_than_the_row", "/rates/bits", 6, Format({".safetensors", "codes"}));
  add("hadamard_without_blocks", "/hadamard/intermediate_hadamard", true, Format({manifest, "pre_block"}));
  add("coupled", "/hadamard",
      {{"intermediate_hadamard", true},
       {"per_expert_input_rotations", false},
       {"pre_block", 128},
       {"post_block", 128}},
      Unsupported({"intermediate_hadamard"}));
  add("hadamard_number", "/hadamard/intermediate_hadamard", 0, Format({manifest, "intermediate_hadamard"}));
  add("rotations_said_per_expert", "/hadamard/per_expert_input_rotations", true,
      Format({"exl3-layer-00001.safetensors", "gate_suh", "[128]", "[3, 128]"}));
  add("row_alignment_0", "/layout/row_alignment", 0, Format({manifest, "row_alignment", "0"}));
  add("row_alignment_other", "/layout/row_alignment", 10000,
      Format({"exl3-layer-00001.safetensors", "codes", "10000"}));
  add("alignment_slots_0", "/layout/extent_alignment_slots", 0,
      Format({manifest, "extent_alignment_slots", "0"}));
  add("alignment_slots_3", "/layout/extent_alignment_slots", 3,
      Format({manifest, "extent_alignment_slots", "3"}));
  add("barrier_0", "/layout/extent_barriers", {0}, Format({manifest, "extent_barriers", "0"}));
  add("barrier_at_the_end", "/layout/extent_barriers", {8}, Format({manifest, "extent_barriers", "8"}));
  add("barrier_twice", "/layout/extent_barriers", {4, 4}, Format({manifest, "extent_barriers"}));
  add("barrier_negative", "/layout/extent_barriers", {-4}, Format({manifest, "extent_barriers"}));
  add("barrier_number", "/layout/extent_barriers", 4, Format({manifest, "extent_barriers"}));
  add("layers_empty", "/layers", Json::object(), Format({manifest, "layers"}));
  add("layers_list", "/layers", Json::array(), Format({manifest, "layers"}));
  add("layers_entry_text", "/layers/1", "exl3-layer-00001.safetensors", Format({manifest}));
  add("layers_leading_zero", "/layers/01",
      {{"file", "exl3-layer-00001.safetensors"}, {"sha256", std::string(64, 'a')}}, Format({manifest, "01"}));
  add("layers_word", "/layers/one",
      {{"file", "exl3-layer-00001.safetensors"}, {"sha256", std::string(64, 'a')}},
      Format({manifest, "one"}));
  add("layers_more", "/layers/7",
      {{"file", "exl3-layer-00001.safetensors"}, {"sha256", std::string(64, 'a')}}, Format({manifest, "7"}));
  add("sha256_short", "/layers/1/sha256", std::string(63, 'a'), Format({manifest, "sha256"}));
  add("sha256_not_hex", "/layers/1/sha256", std::string(64, 'g'), Format({manifest, "sha256"}));
  add("sha256_number", "/layers/1/sha256", 17, Format({manifest, "sha256"}));
  // Opening reads no payload: a wrong hash is found on request only.
  add("sha256_wrong", "/layers/1/sha256", std::string(64, 'A'), Accepted());
  add("file_parent", "/layers/1/file", "../exl3-layer-00001.safetensors", Format({manifest, ".."}));
  add("file_absolute", "/layers/1/file", "/tmp/exl3-layer-00001.safetensors", Format({manifest, "/tmp/"}));
  add("file_folder", "/layers/1/file", "a/exl3-layer-00001.safetensors", Format({manifest, "a/"}));
  add("file_empty", "/layers/1/file", "", Format({manifest, "file"}));
  add("file_dots", "/layers/1/file", "..", Format({manifest}));
  add("file_nul", "/layers/1/file", std::string("exl3\0.safetensors", 17), Format({manifest}));
  add("file_absent", "/layers/1/file", "exl3-layer-00009.safetensors",
      Refused({StatusCode::kIo, StatusCode::kFormat}, {"exl3-layer-00009.safetensors"}));
  add("file_of_another_layer", "/layers/1/file", "exl3-layer-00002.safetensors",
      Format({"exl3-layer-00002.safetensors", "layer", "1", "2"}));
  add("root_list", "", Json::array(), Format({manifest}));
  for (RefusalCase& refusal_case : cases) refusal_case.name = "manifest_" + refusal_case.name;
  return cases;
}

std::vector<RefusalCase> ContainerCases() {
  const Base base = Base::kExl3V1;
  const std::string file = "exl3-layer-00001.safetensors";
  // 3 experts * 3 matrices * 8 hidden tiles * 192 bytes = 13824, stored in rows of 16384.
  const auto edit = [=](std::string name, std::function<void(NamedTensor&)> change) {
    return [=](CheckpointFiles& files) {
      for (NamedTensor& tensor : files.shards.at(file).tensors) {
        if (tensor.name == name) change(tensor);
      }
    };
  };
  const auto retype = [=](std::string name, std::string dtype, std::vector<uint64_t> shape, uint64_t bytes) {
    return edit(name, [=](NamedTensor& tensor) {
      tensor.dtype = dtype;
      tensor.shape = shape;
      tensor.data.resize(bytes);
    });
  };
  const auto without = [=](std::string name) {
    return [=](CheckpointFiles& files) {
      std::erase_if(files.shards.at(file).tensors,
                    [&](const NamedTensor& tensor) { return tensor.name == name; });
    };
  };
  const auto with = [=](NamedTensor tensor) {
    return [=](CheckpointFiles& files) { files.shards.at(file).tensors.push_back(tensor); };
  };
  std::vector<RefusalCase> cases = {
      {"codes_i8", base, retype("codes", "I8", {8, 16384}, 8 * 16384), Format({file, "codes", "I8", "U8"})},
      {"codes_slots", base, retype("codes", "U8", {9, 16384}, 9 * 16384), Format({file, "codes", "9", "8"})},
      {"codes_1d", base, retype("codes", "U8", {8 * 16384}, 8 * 16384), Format({file, "codes"})},
      {"codes_stride_not_aligned", base, retype("codes", "U8", {8, 16400}, 8 * 16400),
       Format({file, "codes", "16400", "4096"})},
      {"codes_stride_too_small", base, retype("codes", "U8", {8, 12288}, 8 * 12288),
       Format({file, "codes", "12288", "13824"})},
      {"codes_stride_0", base, retype("codes", "U8", {8, 0}, 0), Format({file, "codes", "0", "13824"})},
      {"codes_stride_larger", base, retype("codes", "U8", {8, 20480}, 8 * 20480), Accepted()},
      {"rotations_bf16", base, retype("rotations", "BF16", {8, 3, 3, 32}, 8 * 3 * 3 * 32 * 2),
       Format({file, "rotations", "BF16", "F16"})},
      {"rotations_shape", base, retype("rotations", "F16", {8, 3, 2, 32}, 8 * 3 * 2 * 32 * 2),
       Format({file, "rotations", "[8, 3, 2, 32]", "[8, 3, 3, 32]"})},
      {"gate_suh_per_expert", base, retype("gate_suh", "F16", {3, 128}, 768),
       Format({file, "gate_suh", "[3, 128]", "[128]"})},
      {"up_suh_f32", base, retype("up_suh", "F32", {128}, 512), Format({file, "up_suh", "F32", "F16"})},
      {"down_svh_short", base, retype("down_svh", "F16", {64}, 128),
       Format({file, "down_svh", "[64]", "[128]"})},
      {"down_svh_not_per_expert", Base::kExl3V1PerExpert, retype("down_svh", "F16", {128}, 256),
       Format({file, "down_svh", "[128]", "[3, 128]"})},
      {"without_codes", base, without("codes"), Format({file, "codes"})},
      {"without_rotations", base, without("rotations"), Format({file, "rotations"})},
      {"without_up_suh", base, without("up_suh"), Format({file, "up_suh"})},
      {"with_rates", base, with({"rates_fc1", "U8", {1, 3}, std::string(3, '\x33')}),
       Format({file, "rates_fc1"})},
      {"with_signs", base, with({"sign_pattern", "U8", {3}, std::string(3, '\0')}),
       Format({file, "sign_pattern"})},
      {"with_another", base, with({"note", "U8", {1}, "x"}), Format({file, "note"})},
      {"padding_not_zero",
       base,
       edit("codes", [](NamedTensor& tensor) { tensor.data[2 * 16384 + 13824] = 1; }),
       {Expected::Kind::kPadding, {}, {file}}},
      {"last_padding_byte_not_zero",
       base,
       edit("codes", [](NamedTensor& tensor) { tensor.data.back() = 1; }),
       {Expected::Kind::kPadding, {}, {file}}},
      {"without_config", base, [](CheckpointFiles& files) { files.json.erase("config.json"); }, Accepted()},
      {"config_experts_more", base, SetJson("config.json", "/num_experts", 4),
       Format({"config.json", "4", "3"})},
      {"config_hidden_more", base, SetJson("config.json", "/hidden_size", 256),
       Format({"config.json", "256", "128"})},
      {"config_intermediate_more", base, SetJson("config.json", "/moe_intermediate_size", 384),
       Format({"config.json", "384", "256"})},
  };
  const std::pair<const char*, const char*> metadata[] = {
      {"schema", "exl3-v2"},  {"codebook", "lut_e4m3"},     {"layer", "2"},         {"num_experts", "4"},
      {"hidden_size", "256"}, {"intermediate_size", "128"}, {"slot_channels", "16"}};
  for (const auto& [key, value] : metadata) {
    cases.push_back(
        {std::string("metadata_other_") + key, base, SetMetadata(key, value), Format({file, key, value})});
    cases.push_back({std::string("metadata_without_") + key, base,
                     [=, name = std::string(key)](CheckpointFiles& files) {
                       std::erase_if(files.shards.at(file).metadata,
                                     [&](const auto& entry) { return entry.first == name; });
                     },
                     Format({file, key})});
  }
  cases.push_back(
      {"metadata_layer_with_zeros", base, SetMetadata("layer", "01"), Format({file, "layer", "01"})});
  for (RefusalCase& refusal_case : cases) refusal_case.name = "container_" + refusal_case.name;
  return cases;
}

class HostileCheckpointTest : public ::testing::TestWithParam<RefusalCase> {};

TEST_P(HostileCheckpointTest, EndsAsExpected) { EXPECT_EQ(RunCase(GetParam()), ""); }

std::string NameOfBase(const ::testing::TestParamInfo<Base>& info) { return BaseName(info.param); }

std::string CaseName(const ::testing::TestParamInfo<RefusalCase>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Tensors, HostileCheckpointTest, ::testing::ValuesIn(TensorCases()), CaseName);
INSTANTIATE_TEST_SUITE_P(RankSliced, HostileCheckpointTest, ::testing::ValuesIn(TailCases()), CaseName);
INSTANTIATE_TEST_SUITE_P(SharedVectors, HostileCheckpointTest, ::testing::ValuesIn(SharedCases()), CaseName);
INSTANTIATE_TEST_SUITE_P(Manifest, HostileCheckpointTest, ::testing::ValuesIn(ManifestCases()), CaseName);
INSTANTIATE_TEST_SUITE_P(Container, HostileCheckpointTest, ::testing::ValuesIn(ContainerCases()), CaseName);

// What every mutation starts from is fine: otherwise a case could pass for another reason than its own.
class UntouchedCheckpointTest : public ::testing::TestWithParam<Base> {};

TEST_P(UntouchedCheckpointTest, IsAcceptedWithoutProblems) {
  EXPECT_EQ(RunCase({"untouched", GetParam(), [](CheckpointFiles&) {}, Accepted()}), "");
}

INSTANTIATE_TEST_SUITE_P(Bases, UntouchedCheckpointTest, ::testing::ValuesIn(AllBases()), NameOfBase);

// Every byte at which a file of a checkpoint can end: refused, never a crash, never accepted.
TEST(TruncatedCheckpointTest, EveryJsonFileAtEveryByte) {
  size_t tried = 0;
  for (const Base base : {Base::kStock, Base::kRankSliced, Base::kR7, Base::kExl3V1}) {
    const FileMap files = MakeBase(base).Serialize();
    for (const auto& [name, bytes] : files) {
      // An index of many names is cut at every 7th byte: the parser is the same, the names are long.
      const size_t step = bytes.size() > 8192 ? 7 : 1;
      if (!name.ends_with(".json")) continue;
      for (size_t size = 0; size < bytes.size(); size += step) {
        FileMap cut = files;
        cut[name].resize(size);
        const MemoryCheckpoint opened = OpenInMemory(cut);
        ASSERT_FALSE(opened.checkpoint.has_value()) << name << " cut at " << size;
        ASSERT_EQ(opened.checkpoint.error().code(), StatusCode::kFormat)
            << opened.checkpoint.error().message();
        ASSERT_NE(opened.checkpoint.error().message().find(name), std::string::npos)
            << opened.checkpoint.error().message();
        ++tried;
      }
    }
  }
  EXPECT_GT(tried, 5000u);
}

TEST(TruncatedCheckpointTest, EveryShardAtManyBytes) {
  size_t tried = 0;
  for (const Base base : AllBases()) {
    const FileMap files = MakeBase(base).Serialize();
    for (const auto& [name, bytes] : files) {
      if (!name.ends_with(".safetensors")) continue;
      for (size_t size = 0; size < bytes.size(); size += 1 + bytes.size() / 200) {
        FileMap cut = files;
        cut[name].resize(size);
        const MemoryCheckpoint opened = OpenInMemory(cut);
        ASSERT_FALSE(opened.checkpoint.has_value()) << name << " cut at " << size;
        ASSERT_EQ(opened.checkpoint.error().code(), StatusCode::kFormat)
            << opened.checkpoint.error().message();
        ASSERT_NE(opened.checkpoint.error().message().find(name), std::string::npos)
            << opened.checkpoint.error().message();
        ++tried;
      }
    }
  }
  EXPECT_GT(tried, 1000u);
}

}  // namespace
}  // namespace espalier::testing
