// SPDX-License-Identifier: Apache-2.0
//
// config.json and quantization_config.json: what is refused, what is a warning, what is taken from where.
#include <gtest/gtest.h>

#include "support/refusal_cases.h"

namespace espalier::testing {
namespace {

const std::string kConfig = "config.json";
const std::string kQuantFile = "quantization_config.json";

Mutation Set(std::string pointer, Json value) {
  return SetJson(kConfig, std::move(pointer), std::move(value));
}

// quantization_config.json as a copy of the block in config.json, changed.
Mutation SecondBlock(std::function<void(Json&)> change) {
  return [=](CheckpointFiles& files) {
    Json block = files.config().at("quantization_config");
    change(block);
    files.json[kQuantFile] = block;
  };
}

Mutation RawConfig(std::function<std::string(std::string)> change) {
  return [=](CheckpointFiles& files) {
    files.edits.push_back([=](FileMap& bytes) { bytes.at(kConfig) = change(bytes.at(kConfig)); });
  };
}

Json Storage(int bits, const char* multiplier_key, uint64_t multiplier) {
  Json entry = {{"stored_tensors",
                 {{"lm_head.trellis", {{"shape", {8, 8, 48}}, {"n_bytes", 6144}, {"dtype", "torch.int16"}}}}},
                {"quant_format", "exl3"},
                {"bits_per_weight", bits}};
  entry[multiplier_key] = multiplier;
  return entry;
}

std::vector<RefusalCase> ConfigCases() {
  const Base base = Base::kStock;
  const auto deep = [](int depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  return {
      // Sizes.
      {"experts_more_than_stored", base, Set("/num_experts", 4), Format({kConfig, "4", "3"})},
      {"hidden_more_than_stored", base, Set("/hidden_size", 129), Format({kConfig, "129", "128"})},
      {"intermediate_more_than_stored", base, Set("/moe_intermediate_size", 257),
       Format({kConfig, "257", "256"})},
      {"sizes_of_2_pow_64", base, Set("/hidden_size", 18446744073709551615ull),
       Format({kConfig, "hidden", "18446744073709551615"})},
      {"hidden_less_than_stored", base, Set("/hidden_size", 100), Accepted()},
      {"intermediate_less_than_stored", base, Set("/moe_intermediate_size", 200), Accepted()},
      {"hidden_text", base, Set("/hidden_size", "128"), Format({kConfig, "hidden_size"})},
      {"hidden_negative", base, Set("/hidden_size", -128), Format({kConfig, "hidden_size"})},
      {"hidden_fraction", base, Set("/hidden_size", 128.5), Format({kConfig, "hidden_size"})},
      {"hidden_list", base, Set("/hidden_size", {128}), Format({kConfig, "hidden_size"})},
      {"hidden_null", base, Set("/hidden_size", nullptr), Accepted()},
      {"experts_null", base, Set("/num_experts", nullptr), Accepted()},
      {"experts_text", base, Set("/num_experts", "3"), Format({kConfig, "num_experts"})},
      {"top_k_text", base, Set("/num_experts_per_tok", "2"), Format({kConfig, "num_experts_per_tok"})},
      // Sizes outside the routed experts: their tensors are not looked at here.
      {"heads_text", base, Set("/num_attention_heads", "96"), Format({kConfig, "num_attention_heads"})},
      {"heads_negative", base, Set("/num_attention_heads", -1), Format({kConfig, "num_attention_heads"})},
      {"heads_fraction", base, Set("/num_attention_heads", 1.5), Format({kConfig, "num_attention_heads"})},
      {"heads_of_2_pow_64", base, Set("/num_attention_heads", 18446744073709551615ull), Accepted()},
      {"heads_by_layer", base, Set("/num_attention_heads", {96, 48}), Accepted()},
      {"heads_null", base, Set("/num_attention_heads", nullptr), Accepted()},
      {"kv_heads_text", base, Set("/num_key_value_heads", "8"), Format({kConfig, "num_key_value_heads"})},
      {"head_dim_object", base, Set("/head_dim", Json::object()), Format({kConfig, "head_dim"})},
      {"dense_width_bool", base, Set("/intermediate_size", true), Format({kConfig, "intermediate_size"})},
      {"dense_width_by_layer", base, Set("/intermediate_size", {1, 2}), Accepted()},
      {"shared_width_text", base, Set("/shared_expert_intermediate_size", "1"),
       Format({kConfig, "shared_expert_intermediate_size"})},
      {"shared_experts_negative", base, Set("/n_shared_experts", -1), Format({kConfig, "n_shared_experts"})},
      {"shared_experts_product_overflows", base, Set("/n_shared_experts", uint64_t{1} << 60),
       Format({kConfig, "1152921504606846976", "256", "2^64"})},
      {"linear_attention_text", base, Set("/linear_attn_config", "none"),
       Format({kConfig, "linear_attn_config"})},
      {"linear_attention_null", base, Set("/linear_attn_config", nullptr), Accepted()},
      {"linear_heads_text", base, Set("/linear_attn_config", {{"num_heads", "96"}}),
       Format({kConfig, "linear_attn_config.num_heads"})},
      {"nested_hidden_more_than_stored", base,
       [](CheckpointFiles& files) {
         Json inner = files.config();
         inner["hidden_size"] = 256;
         files.config() = {{"architectures", inner["architectures"]},
                           {"text_config", inner},
                           {"quantization_config", inner["quantization_config"]}};
       },
       Format({kConfig, "256", "128"})},
      {"text_config_text", base, Both(EraseJson(kConfig, "/hidden_size"), Set("/text_config", "none")),
       Format({kConfig, "text_config"})},
      // Text.
      {"root_list", base, Set("", Json::array()), Format({kConfig})},
      {"root_number", base, Set("", 7), Format({kConfig})},
      {"empty", base, RawConfig([](std::string) { return std::string(); }), Format({kConfig})},
      {"nul_bytes", base, RawConfig([](std::string text) { return std::string(text.size(), '\0'); }),
       Format({kConfig})},
      {"not_utf8", base,
       RawConfig([](std::string text) { return text.replace(text.find("generated"), 2, "\xC3\x28"); }),
       Format({kConfig})},
      {"key_twice", base, RawConfig([](std::string text) { return text.insert(1, "\"hidden_size\": 128,"); }),
       Format({kConfig, "hidden_size"})},
      {"deep", base,
       RawConfig([=](std::string text) { return text.insert(1, "\"x\":" + deep(100000) + ","); }),
       Format({kConfig})},
      {"deep_but_legal", base,
       RawConfig([=](std::string text) { return text.insert(1, "\"x\":" + deep(40) + ","); }), Accepted()},
      {"trailing_text", base, RawConfig([](std::string text) { return text + "{}"; }), Format({kConfig})},
      {"byte_order_mark", base, RawConfig([](std::string text) { return "\xEF\xBB\xBF" + text; }),
       Format({kConfig, "byte order mark"})},
      {"single_quotes", base, RawConfig([](std::string text) {
         std::replace(text.begin(), text.end(), '"', '\'');
         return text;
       }),
       Format({kConfig})},
      {"nan", base, RawConfig([](std::string text) { return text.insert(1, "\"x\": [NaN, -Infinity],"); }),
       Accepted()},
      {"nan_in_a_word", base, RawConfig([](std::string text) { return text.insert(1, "\"x\": NaNa,"); }),
       Format({kConfig})},
      {"no_config", base, [](CheckpointFiles& files) { files.json.erase(kConfig); }, Accepted()},
      {"unknown_keys", base,
       Both(Set("/favourite_colour", "blue"), Set("/quantization_config/weather", {1, 2})), Accepted()},
      {"no_quantization_config", base, EraseJson(kConfig, "/quantization_config"), Accepted()},
      {"quantization_config_list", base, Set("/quantization_config", Json::array()),
       Format({kConfig, "quantization_config"})},
      // Keys that change decoding.
      {"tile_order_at_the_root", base, Set("/tile_order", "sm70_colmajor"),
       Unsupported({kConfig, "tile_order", "sm70_colmajor"})},
      {"tile_order_word", base, Set("/quantization_config/tile_order", "zigzag"),
       Unsupported({kConfig, "tile_order", "zigzag"})},
      {"tile_order_number", base, Set("/quantization_config/tile_order", 3),
       Unsupported({kConfig, "tile_order"})},
      {"tile_order_in_text_config", base, Set("/text_config", {{"tile_order", "x"}}),
       Unsupported({kConfig, "tile_order"})},
      {"tile_order_in_the_second_block", base, SecondBlock([](Json& block) { block["tile_order"] = "x"; }),
       Unsupported({kQuantFile, "tile_order"})},
      {"tile_order_of_one_tensor", base, SecondBlock([](Json& block) {
         block["tensor_storage"]["lm_head"] = {{"stored_tensors", Json::object()}, {"tile_order", "x"}};
       }),
       Unsupported({kQuantFile, "tile_order"})},
      {"tile_order_in_a_list", base, Set("/quantization_config/layers", {{{"tile_order", "x"}}}),
       Unsupported({kConfig, "tile_order"})},
      {"codebook_unknown", base, Set("/quantization_config/codebook", "qtip"),
       Unsupported({kConfig, "codebook", "qtip"})},
      {"codebook_lut", base, Set("/quantization_config/codebook", "lut_fp16"),
       Unsupported({kConfig, "lut_fp16"})},
      {"codebook_number", base, Set("/quantization_config/codebook", 1), Format({kConfig, "codebook"})},
      {"codebook_unknown_in_the_second_block", base,
       SecondBlock([](Json& block) { block["codebook"] = "qtip"; }), Unsupported({kQuantFile, "qtip"})},
      // Activation.
      {"act_silu", base, Set("/hidden_act", "silu"), Accepted()},
      {"act_gelu_tanh", base, Set("/hidden_act", "gelu_pytorch_tanh"), Accepted()},
      {"act_gelu_new", base, Set("/hidden_act", "gelu_new"), Accepted()},
      {"act_gelu", base, Set("/hidden_act", "gelu"), Unsupported({kConfig, "hidden_act", "gelu"})},
      {"act_unknown", base, Set("/hidden_act", "mish"), Unsupported({kConfig, "hidden_act", "mish", "silu"})},
      {"act_number", base, Set("/hidden_act", 1), Format({kConfig, "hidden_act"})},
      {"act_situ", base, Set("/hidden_act", "situ"), Accepted()},
      {"act_situ_with_limit", base, Both(Set("/hidden_act", "situ"), Set("/swiglu_limit", 7.0)),
       Unsupported({kConfig, "situ", "swiglu_limit"})},
      {"act_silu_with_limit", base, Set("/swiglu_limit", 7.0), Accepted()},
      {"limit_text", base, Set("/swiglu_limit", "7"), Format({kConfig, "swiglu_limit"})},
      {"limit_negative", base, Set("/swiglu_limit", -1), Format({kConfig, "swiglu_limit"})},
      {"situ_beta_zero", base, Both(Set("/hidden_act", "situ"), Set("/activation_situ_beta", 0)),
       Format({kConfig, "activation_situ_beta"})},
      {"situ_beta_text", base, Both(Set("/hidden_act", "situ"), Set("/activation_situ_beta", "4")),
       Format({kConfig, "activation_situ_beta"})},
      {"swiglu_oai_never_from_a_config", base, Set("/hidden_act", "swiglu-oai"),
       Unsupported({kConfig, "swiglu-oai"})},
      // Contradictions.
      {"quant_method_other", base, Set("/quantization_config/quant_method", "modelopt"),
       Warning({kConfig, "quant_method", "modelopt"})},
      {"bits_other", base, Set("/quantization_config/bits", 7.9), Warning({kConfig, "bits", "7.9"})},
      {"codebook_other", base, Set("/quantization_config/codebook", "mcg"),  // The base mixes all three.
       Warning({kConfig, "codebook", "mcg"})},
      {"second_block_equal", base, SecondBlock([](Json&) {}), Accepted()},
      {"second_block_with_storage", base,
       SecondBlock([](Json& block) { block["tensor_storage"] = Json::object(); }), Accepted()},
      {"second_block_with_other_bits", base, SecondBlock([](Json& block) { block["bits"] = 8.0; }),
       Warning({kQuantFile, "bits"})},
      {"second_block_with_other_method", base,
       SecondBlock([](Json& block) { block["quant_method"] = "gptq"; }),
       Warning({kQuantFile, "quant_method"})},
      {"second_block_with_other_head_bits", base, SecondBlock([](Json& block) { block["head_bits"] = 8; }),
       Warning({kQuantFile, "head_bits"})},
      {"second_block_list", base, SecondBlock([](Json& block) { block = Json::array(); }),
       Format({kQuantFile})},
      {"storage_with_other_bits", base, SecondBlock([](Json& block) {
         // K is 1..8: 9 contradicts whatever the file has.
         block["tensor_storage"]["lm_head"] = Storage(9, "mcg_multiplier", 3417055213u);
       }),
       Warning({kQuantFile, "lm_head"})},
  };
}

class ConfigTest : public ::testing::TestWithParam<RefusalCase> {};

TEST_P(ConfigTest, EndsAsExpected) { EXPECT_EQ(RunCase(GetParam()), ""); }

std::string CaseName(const ::testing::TestParamInfo<RefusalCase>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Cases, ConfigTest, ::testing::ValuesIn(ConfigCases()), CaseName);

// A key of a megabyte over a hundred thousand values, and two blocks of as many keys: walked naively, both
// would not end within the test's time limit.
TEST(ConfigCostTest, LongKeysAndManyKeysCostNoMoreThanTheirLength) {
  std::string values;
  for (int i = 0; i < 300'000; ++i) values += (i == 0 ? "\"k" : ",\"k") + std::to_string(i) + "\":0";
  const std::string long_key(1 << 20, 'a');
  CheckpointFiles files = MakeBase(Base::kStock);
  files.json.erase(kConfig);
  files.raw[kConfig] = "{\"" + long_key + "\":{" + values + "},\"quantization_config\":{" + values + "}}";
  files.raw[kQuantFile] = "{" + values + "}";
  const MemoryCheckpoint opened = OpenInMemory(files.Serialize());
  ASSERT_TRUE(opened.checkpoint.has_value()) << opened.checkpoint.error().message();
  EXPECT_EQ(opened.checkpoint->problems().size(), 0u);
}

ModelConfig ConfigOf(const Mutation& mutate) {
  CheckpointFiles files = MakeBase(Base::kStock);
  mutate(files);
  MemoryCheckpoint opened = OpenInMemory(files.Serialize());
  EXPECT_TRUE(opened.checkpoint.has_value()) << opened.checkpoint.error().message();
  return opened.checkpoint ? opened.checkpoint->config() : ModelConfig{};
}

Mutation Replace(Json config) {
  return [=](CheckpointFiles& files) { files.config() = config; };
}

TEST(ConfigFieldsTest, EverySpellingOfASize) {
  const ModelConfig qwen = ConfigOf(Replace({{"architectures", {"Qwen3MoeForCausalLM"}},
                                             {"num_experts", 3},
                                             {"hidden_size", 127},
                                             {"moe_intermediate_size", 201},
                                             {"intermediate_size", 9999},
                                             {"num_experts_per_tok", 2}}));
  EXPECT_EQ(qwen.architecture, "Qwen3MoeForCausalLM");
  EXPECT_EQ(qwen.experts, 3u);
  EXPECT_EQ(qwen.hidden_channels, 127u);
  EXPECT_EQ(qwen.intermediate_channels, 201u);
  EXPECT_EQ(qwen.top_k, 2u);
  EXPECT_FALSE(qwen.activation.has_value());
  EXPECT_EQ(ConfigOf(Replace({{"n_routed_experts", 3}})).experts, 3u);
  EXPECT_EQ(ConfigOf(Replace({{"num_local_experts", 3}})).experts, 3u);
  EXPECT_EQ(ConfigOf(Replace({{"intermediate_size", 256}})).intermediate_channels, 256u);
  EXPECT_EQ(ConfigOf(Replace(Json::object())).experts, 0u);
}

TEST(ConfigFieldsTest, TextConfigIsLookedAtAfterTheTopLevel) {
  const ModelConfig config = ConfigOf(Replace({{"hidden_size", 128},
                                               {"text_config",
                                                {{"hidden_size", 64},
                                                 {"num_experts", 3},
                                                 {"moe_intermediate_size", 256},
                                                 {"num_experts_per_tok", 3},
                                                 {"hidden_act", "gelu_pytorch_tanh"}}}}));
  EXPECT_EQ(config.hidden_channels, 128u);
  EXPECT_EQ(config.experts, 3u);
  EXPECT_EQ(config.intermediate_channels, 256u);
  EXPECT_EQ(config.top_k, 3u);
  ASSERT_TRUE(config.activation.has_value());
  EXPECT_EQ(config.activation->kind, ActivationKind::kGelu);
}

TEST(ConfigFieldsTest, HeadsAndDenseWidths) {
  const ModelConfig kimi = ConfigOf(
      Replace({{"text_config",
                {{"num_attention_heads", 96},
                 {"num_key_value_heads", 96},
                 {"head_dim", 128},
                 {"intermediate_size", 6144},
                 {"moe_intermediate_size", 256},
                 {"num_shared_experts", 2},
                 {"linear_attn_config", {{"num_heads", 64}, {"head_dim", 32}, {"kda_layers", {1, 2}}}}}}}));
  EXPECT_EQ(kimi.attention_heads, 96u);
  EXPECT_EQ(kimi.kv_heads, 96u);
  EXPECT_EQ(kimi.head_dim, 128u);
  EXPECT_EQ(kimi.linear_heads, 64u);
  EXPECT_EQ(kimi.linear_head_dim, 32u);
  EXPECT_EQ(kimi.dense_intermediate_channels, 6144u);
  EXPECT_EQ(kimi.shared_intermediate_channels, 512u);
  EXPECT_EQ(kimi.intermediate_channels, 256u);
  // A config that a padded run has left behind.
  const ModelConfig padded =
      ConfigOf(Replace({{"num_attention_heads", 99},
                        {"original_num_attention_heads", 96},
                        {"linear_attn_config", {{"num_heads", 99}, {"original_num_heads", 96}}}}));
  EXPECT_EQ(padded.attention_heads, 96u);
  EXPECT_EQ(padded.linear_heads, 96u);
  EXPECT_EQ(ConfigOf(Replace({{"moe_intermediate_size", 256}, {"n_shared_experts", 3}}))
                .shared_intermediate_channels,
            768u);
  EXPECT_EQ(ConfigOf(Replace({{"moe_intermediate_size", 256},
                              {"n_shared_experts", 3},
                              {"shared_expert_intermediate_size", 100}}))
                .shared_intermediate_channels,
            100u);
  const ModelConfig none = ConfigOf(Replace({{"num_attention_heads", {1, 2}}}));
  EXPECT_EQ(none.attention_heads + none.kv_heads + none.head_dim + none.linear_heads + none.linear_head_dim +
                none.dense_intermediate_channels + none.shared_intermediate_channels,
            0u);
}

TEST(ConfigFieldsTest, Activations) {
  const Activation situ = ConfigOf(Replace({{"hidden_act", "situ"}})).activation.value();
  EXPECT_EQ(situ, (Activation{.kind = ActivationKind::kSitu, .limit = 0, .beta = 4, .linear_beta = 25}));
  const Activation other = ConfigOf(Replace({{"hidden_act", "situ"},
                                             {"activation_situ_beta", 2.5},
                                             {"activation_situ_linear_beta", 10}}))
                               .activation.value();
  EXPECT_EQ(other, (Activation{.kind = ActivationKind::kSitu, .limit = 0, .beta = 2.5, .linear_beta = 10}));
  const Activation limited =
      ConfigOf(Replace({{"hidden_act", "silu"}, {"swiglu_limit", 7}})).activation.value();
  EXPECT_EQ(limited.kind, ActivationKind::kSilu);
  EXPECT_EQ(limited.limit, 7);
}

// relu2 goes with experts that have no gate.
TEST(ConfigFieldsTest, Relu2NeedsNoGate) {
  const CheckpointModel model = RandomModel({.experts = 2, .has_gate = false}, 11);
  const MemoryCheckpoint opened = OpenInMemory(WriteStock(model).Serialize());
  ASSERT_TRUE(opened.checkpoint.has_value()) << opened.checkpoint.error().message();
  EXPECT_EQ(opened.checkpoint->config().activation->kind, ActivationKind::kRelu2);
  ASSERT_EQ(opened.checkpoint->layers().size(), 2u);
  EXPECT_FALSE(opened.checkpoint->layers()[0].has_gate);
}

}  // namespace
}  // namespace espalier::testing
