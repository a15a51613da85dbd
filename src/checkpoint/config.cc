// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <unordered_map>

#include "base/checked.h"

namespace espalier {
namespace {

constexpr std::string_view kTensorSchema =
    "model.layers.{L}.mlp.experts.{E}.{gate_proj|up_proj|down_proj}.rank{r}.{trellis|suh|svh|mcg}";
constexpr std::string_view kSharedSchema = "model.layers.{L}.mlp.experts.shared_h.{proj}.rank{r}.{suh|svh}";
constexpr std::string_view kR7Schema = "r7-complete-v2-checkpoint-v1";
// Average bits of a config are rounded and leave the head out; further off is a contradiction.
constexpr double kBitsTolerance = 0.25;

// Where a value stands: a chain up the recursion, turned into text only for a message. Building the text on
// the way down would cost (length of the keys above) for each value, which a hostile file can make quadratic.
struct Place {
  const Place* parent = nullptr;
  std::string_view key;  // empty for an item of a list
  size_t position = 0;

  std::string Text() const {
    const std::string above = parent == nullptr ? std::string() : parent->Text();
    if (key.empty()) return fmt::format("{}[{}]", above, position);
    return above.empty() ? std::string(key) : fmt::format("{}.{}", above, key);
  }
};

// One key that changes what the stored bits mean, with a value that is not known to leave them alone.
Result<void> CheckDecodingKey(const Place& place, simdjson::dom::element value, const std::string& source) {
  if (value.is_null()) return {};
  std::string_view text;
  const bool is_text = !value.get_string().get(text);
  if (place.key == "tile_order") {
    return Error(StatusCode::kUnsupported,
                 fmt::format("{}: {}: found tile order '{}', legal: none (tensor-core order)", source,
                             place.Text(), is_text ? text : JsonTypeName(value)));
  }
  if (place.key == "rotation_layout" && !(is_text && (text == "per_expert_v1" || text == "shared_h_v1"))) {
    return Error(StatusCode::kUnsupported,
                 fmt::format("{}: {}: found rotation layout '{}', legal: per_expert_v1, shared_h_v1", source,
                             place.Text(), is_text ? text : JsonTypeName(value)));
  }
  return {};
}

// Looks for such keys wherever they stand. The depth is limited by the parser.
Result<void> RefuseDecodingKeys(simdjson::dom::element element, const std::string& source,
                                const Place* parent = nullptr) {
  simdjson::dom::object object;
  if (!element.get_object().get(object)) {
    for (const auto field : object) {
      const Place place{.parent = parent, .key = field.key};
      if (auto checked = RefuseDecodingKeys(field.value, source, &place); !checked) return checked;
      if (auto checked = CheckDecodingKey(place, field.value, source); !checked) return checked;
    }
    return {};
  }
  simdjson::dom::array array;
  if (element.get_array().get(array)) return {};
  Place place{.parent = parent, .key = {}, .position = 0};
  for (const simdjson::dom::element item : array) {
    if (auto checked = RefuseDecodingKeys(item, source, &place); !checked) return checked;
    ++place.position;
  }
  return {};
}

// The object itself and its text_config, in the order in which fields are looked up.
struct ConfigLevels {
  std::vector<JsonObject> levels;

  Result<uint64_t> FirstUnsigned(std::initializer_list<std::string_view> keys) const {
    for (const JsonObject& level : levels) {
      for (const std::string_view key : keys) {
        const auto value = level.Unsigned(key);
        if (!value) return tl::unexpected(value.error());
        if (*value) return **value;
      }
    }
    return 0;
  }
  // The same, but a list counts as absent: some models give these sizes layer by layer.
  Result<uint64_t> FirstSize(std::initializer_list<std::string_view> keys) const {
    for (const JsonObject& level : levels) {
      for (const std::string_view key : keys) {
        const auto element = level.Find(key);
        if (element && element->is_array()) return 0;
        const auto value = level.Unsigned(key);
        if (!value) return tl::unexpected(value.error());
        if (*value) return **value;
      }
    }
    return 0;
  }
  const JsonObject* With(std::string_view key) const {
    for (const JsonObject& level : levels) {
      if (level.Find(key)) return &level;
    }
    return nullptr;
  }
};

Result<ConfigLevels> Levels(const JsonObject& root) {
  ConfigLevels levels{.levels = {root}};
  const auto text = root.Object("text_config");
  if (!text) return tl::unexpected(text.error());
  if (*text) levels.levels.push_back(**text);
  return levels;
}

// A positive parameter; absent = fallback.
Result<double> PositiveNumber(const ConfigLevels& levels, std::string_view key, double fallback) {
  const JsonObject* level = levels.With(key);
  if (level == nullptr) return fallback;
  const auto value = level->Number(key);
  if (!value) return tl::unexpected(value.error());
  if (!std::isfinite(**value) || **value < 0) {
    return Error(StatusCode::kFormat,
                 fmt::format("{}: found {}, legal: a number of 0 or more", level->Place(key), **value));
  }
  return **value;
}

Result<double> LinearBeta(const ConfigLevels& levels) {
  constexpr std::string_view kKey = "activation_situ_linear_beta";
  for (const JsonObject& level : levels.levels) {
    simdjson::dom::element value;
    if (!level.object.at_key(kKey).get(value) && value.is_null()) return 0;  // null: no linear limit
    if (level.Find(kKey)) break;
  }
  return PositiveNumber(levels, kKey, 25);
}

Result<std::optional<Activation>> ReadActivation(const ConfigLevels& levels) {
  const JsonObject* level = levels.With("hidden_act");
  if (level == nullptr) return std::nullopt;
  const auto name = level->RequireString("hidden_act");
  if (!name) return tl::unexpected(name.error());
  Activation activation;
  if (*name == "silu") {
    activation.kind = ActivationKind::kSilu;
  } else if (*name == "gelu_pytorch_tanh" || *name == "gelu_new") {
    activation.kind = ActivationKind::kGelu;
  } else if (*name == "relu2") {
    activation.kind = ActivationKind::kRelu2;
  } else if (*name == "situ") {
    activation.kind = ActivationKind::kSitu;
    const auto beta = PositiveNumber(levels, "activation_situ_beta", 4);
    if (!beta) return tl::unexpected(beta.error());
    const auto linear_beta = LinearBeta(levels);
    if (!linear_beta) return tl::unexpected(linear_beta.error());
    if (*beta == 0) {
      return Error(StatusCode::kFormat,
                   fmt::format("{}: activation_situ_beta: found 0, legal: a number above 0", level->source));
    }
    activation.beta = *beta;
    activation.linear_beta = *linear_beta;
  } else {
    return Error(StatusCode::kUnsupported,
                 fmt::format("{}: found '{}', legal: silu, gelu_pytorch_tanh, gelu_new, relu2, situ",
                             level->Place("hidden_act"), *name));
  }
  const auto limit = PositiveNumber(levels, "swiglu_limit", 0);
  if (!limit) return tl::unexpected(limit.error());
  if (*limit > 0 && activation.kind != ActivationKind::kSilu && activation.kind != ActivationKind::kGelu) {
    return Error(StatusCode::kUnsupported,
                 fmt::format("{}: swiglu_limit {} together with hidden_act '{}', legal: none", level->source,
                             *limit, *name));
  }
  activation.limit = *limit;
  return activation;
}

struct SizeField {
  uint64_t* target;
  std::initializer_list<std::string_view> keys;
};

Result<void> ReadSizes(const ConfigLevels& levels, std::initializer_list<SizeField> fields) {
  for (const SizeField& field : fields) {
    const auto value = levels.FirstSize(field.keys);
    if (!value) return tl::unexpected(value.error());
    *field.target = *value;
  }
  return {};
}

// Heads and widths outside the routed experts. REQUIRES: the routed width has been read.
Result<void> ReadDenseSizes(const ConfigLevels& levels, ModelConfig& model) {
  uint64_t shared_experts = 0;
  if (auto r = ReadSizes(levels,
                         {{&model.attention_heads, {"original_num_attention_heads", "num_attention_heads"}},
                          {&model.kv_heads, {"num_key_value_heads"}},
                          {&model.head_dim, {"head_dim"}},
                          {&model.dense_intermediate_channels, {"intermediate_size"}},
                          {&model.shared_intermediate_channels, {"shared_expert_intermediate_size"}},
                          {&shared_experts, {"n_shared_experts", "num_shared_experts"}}});
      !r) {
    return r;
  }
  if (model.shared_intermediate_channels == 0) {
    const auto width = CheckedMul(shared_experts, model.intermediate_channels);
    if (!width) {
      return Error(
          StatusCode::kFormat,
          fmt::format("{}: found {} shared experts of {} channels, legal: fewer than 2^64 channels together",
                      levels.levels.front().source, shared_experts, model.intermediate_channels));
    }
    model.shared_intermediate_channels = *width;
  }
  constexpr std::string_view kLinearKey = "linear_attn_config";
  const JsonObject* level = levels.With(kLinearKey);
  if (level == nullptr) return {};
  const auto linear = level->Object(kLinearKey);
  if (!linear) return tl::unexpected(linear.error());
  return ReadSizes({.levels = {**linear}}, {{&model.linear_heads, {"original_num_heads", "num_heads"}},
                                            {&model.linear_head_dim, {"head_dim"}}});
}

Result<void> ReadModel(const JsonObject& root, const ConfigLevels& levels, ParsedConfig& parsed) {
  ModelConfig& model = parsed.model;
  if (const auto list = root.Find("architectures")) {
    simdjson::dom::array names;
    std::string_view name;
    if (!list->get_array().get(names) && names.begin() != names.end() &&
        !(*names.begin()).get_string().get(name)) {
      model.architecture = name;
    }
  }
  const SizeField fields[] = {{&model.experts, {"num_experts", "n_routed_experts", "num_local_experts"}},
                              {&model.hidden_channels, {"hidden_size"}},
                              {&model.intermediate_channels, {"moe_intermediate_size"}},
                              {&model.top_k, {"num_experts_per_tok"}}};
  for (const SizeField& field : fields) {
    const auto value = levels.FirstUnsigned(field.keys);
    if (!value) return tl::unexpected(value.error());
    *field.target = *value;
  }
  if (model.intermediate_channels == 0) {
    const auto value = levels.FirstUnsigned({"intermediate_size"});
    if (!value) return tl::unexpected(value.error());
    model.intermediate_channels = *value;
  }
  if (auto r = ReadDenseSizes(levels, model); !r) return r;
  const auto activation = ReadActivation(levels);
  if (activation) {
    model.activation = *activation;
  } else if (activation.error().code() == StatusCode::kUnsupported) {
    parsed.activation_error = activation.error();
  } else {
    return tl::unexpected(activation.error());
  }
  return {};
}

Result<void> CheckBitsList(const JsonObject& object, std::string_view key,
                           const std::vector<uint64_t>& values) {
  for (const uint64_t bits : values) {
    if (bits >= kMinBits && bits <= kMaxBits) continue;
    return Error(StatusCode::kFormat,
                 fmt::format("{}: found {}, legal: {}..{}", object.Place(key), bits, kMinBits, kMaxBits));
  }
  return {};
}

Result<std::optional<std::pair<uint64_t, uint64_t>>> LayerRange(const JsonObject& object) {
  const auto list = object.UnsignedList("moe_layers");
  if (!list) return tl::unexpected(list.error());
  if (!*list) return std::nullopt;
  const std::vector<uint64_t>& range = **list;
  if (range.size() != 2 || range[0] > range[1]) {
    return Error(StatusCode::kFormat, fmt::format("{}: found [{}], legal: [first, last]",
                                                  object.Place("moe_layers"), fmt::join(range, ", ")));
  }
  return std::make_pair(range[0], range[1]);
}

// A codebook name with its multiplier beside it. Empty when no name is given.
Result<std::string> CodebookField(const JsonObject& object) {
  const auto name = object.String("codebook");
  if (!name) return tl::unexpected(name.error());
  if (!*name) return std::string();
  const std::optional<Codebook> codebook = CodebookFromName(**name);
  if (!codebook) {
    std::vector<std::string_view> legal;
    for (const CodebookInfo& info : AllCodebooks()) legal.push_back(info.name);
    return Error(StatusCode::kUnsupported, fmt::format("{}: found '{}', legal: {}", object.Place("codebook"),
                                                       **name, fmt::join(legal, ", ")));
  }
  for (const CodebookInfo& info : AllCodebooks()) {
    if (info.marker_tensor.empty()) continue;
    const std::string key = fmt::format("{}_multiplier", info.marker_tensor);
    const auto value = object.Find(key);
    if (!value) continue;
    // Compared as 32-bit patterns: some writers store the value signed.
    int64_t number = 0;
    if (value->get_int64().get(number) || static_cast<uint32_t>(number) != info.multiplier) {
      return Error(StatusCode::kFormat,
                   fmt::format("{}: found {}, legal: {} (0x{:08X})", object.Place(key),
                               simdjson::minify(*value), info.multiplier, info.multiplier));
    }
  }
  return **name;
}

Result<void> ReadTierReference(const JsonObject& tail, RankSlicedConfig& config) {
  const auto reference = tail.String("bits_per_expert");
  if (!reference) return tl::unexpected(reference.error());
  if (!*reference) return {};
  // Split at the last colon: a file name may hold one.
  const size_t colon = (*reference)->rfind(':');
  if (colon == std::string::npos || colon + 1 == (*reference)->size()) {
    return Error(StatusCode::kFormat, fmt::format("{}: found '{}', legal: FILE.json:FIELD",
                                                  tail.Place("bits_per_expert"), **reference));
  }
  config.tier_file = (*reference)->substr(0, colon);
  config.tier_field = (*reference)->substr(colon + 1);
  return CheckPlainName(config.tier_file, tail.Place("bits_per_expert"));
}

Result<void> ReadTailBits(const JsonObject& tail, RankSlicedConfig& config) {
  if (const auto bits = tail.Find("bits")) {
    std::string_view text;
    if (!bits->get_string().get(text)) {
      if (text != "mixed") {
        return Error(StatusCode::kFormat, fmt::format("{}: found '{}', legal: 'mixed' or an integer 1..8",
                                                      tail.Place("bits"), text));
      }
    } else {
      const auto number = tail.Unsigned("bits");
      if (!number) return tl::unexpected(number.error());
      if (auto checked = CheckBitsList(tail, "bits", {**number}); !checked) return checked;
      config.bits = **number;
    }
  }
  const auto values = tail.UnsignedList("k_values");
  if (!values) return tl::unexpected(values.error());
  if (*values) return CheckBitsList(tail, "k_values", **values);
  return {};
}

Result<void> ExpectText(const JsonObject& object, std::string_view key, std::string_view expected) {
  const auto value = object.String(key);
  if (!value) return tl::unexpected(value.error());
  if (!*value || **value == expected) return {};
  return Error(StatusCode::kUnsupported,
               fmt::format("{}: found '{}', legal: '{}'", object.Place(key), **value, expected));
}

Result<RankSlicedConfig> ReadRankSliced(const JsonObject& tail) {
  RankSlicedConfig config;
  for (const auto& [key, expected] : {std::pair{"format", std::string_view("exl3-trellis")},
                                      {"tensor_schema", kTensorSchema},
                                      {"shared_h_tensor_schema", kSharedSchema}}) {
    if (auto checked = ExpectText(tail, key, expected); !checked) return tl::unexpected(checked.error());
  }
  auto codebook = CodebookField(tail);
  if (!codebook) return tl::unexpected(codebook.error());
  config.codebook = *codebook;
  const auto slices = tail.RequireUnsigned("tp");
  if (!slices) return tl::unexpected(slices.error());
  if (*slices == 0 || *slices > 1024) {
    return Error(StatusCode::kFormat, fmt::format("{}: found {}, legal: 1..1024", tail.Place("tp"), *slices));
  }
  config.slices = *slices;
  auto layers = LayerRange(tail);
  if (!layers) return tl::unexpected(layers.error());
  config.moe_layers = *layers;
  const auto experts = tail.Unsigned("experts_per_layer");
  if (!experts) return tl::unexpected(experts.error());
  config.experts = *experts;
  if (auto read = ReadTailBits(tail, config); !read) return tl::unexpected(read.error());
  if (auto read = ReadTierReference(tail, config); !read) return tl::unexpected(read.error());
  const auto rotation = tail.String("rotation_layout");  // its legal values are checked everywhere
  if (!rotation) return tl::unexpected(rotation.error());
  if (*rotation) config.shared_h = **rotation == "shared_h_v1";
  return config;
}

Result<R7Config> ReadR7(const JsonObject& block) {
  R7Config config;
  if (auto checked = ExpectText(block, "schema", kR7Schema); !checked) return tl::unexpected(checked.error());
  auto codebook = CodebookField(block);
  if (!codebook) return tl::unexpected(codebook.error());
  config.codebook = *codebook;
  auto layers = LayerRange(block);
  if (!layers) return tl::unexpected(layers.error());
  config.moe_layers = *layers;
  const auto values = block.UnsignedList("k_values");
  if (!values) return tl::unexpected(values.error());
  if (*values) {
    if (auto checked = CheckBitsList(block, "k_values", **values); !checked)
      return tl::unexpected(checked.error());
    config.k_values = **values;
  }
  return config;
}

Result<void> ReadQuantizationBlock(const JsonObject& block, ParsedConfig& parsed) {
  parsed.quantization_blocks.push_back(block);
  const auto method = block.String("quant_method");
  if (!method) return tl::unexpected(method.error());
  if (*method && **method == "b12x_trellis") {
    return Error(StatusCode::kUnsupported,
                 fmt::format("{}: the b12x_trellis layout is not read yet; legal: stock, "
                             "rank-sliced, r7 and exl3-v1 checkpoints",
                             block.Place("quant_method")));
  }
  if (!*method || **method == "exl3") {
    if (auto codebook = CodebookField(block); !codebook) return tl::unexpected(codebook.error());
  }
  const auto container = block.Object("exl3");
  if (!container) return tl::unexpected(container.error());
  if (*container) {
    const auto manifest = (*container)->String("manifest");
    if (!manifest) return tl::unexpected(manifest.error());
    if (*manifest) {
      if (auto plain = CheckPlainName(**manifest, (*container)->Place("manifest")); !plain) return plain;
      parsed.manifest = **manifest;
    }
  }
  const auto r7 = block.Object("r7_routed_experts");
  if (!r7) return tl::unexpected(r7.error());
  if (*r7) {
    auto config = ReadR7(**r7);
    if (!config) return tl::unexpected(config.error());
    parsed.r7 = std::move(*config);
  }
  return {};
}

Result<void> ReadConfigJson(ParsedConfig& parsed) {
  const JsonFile& file = *parsed.config;
  const auto root = RootObject(file.document.root(), file.name);
  if (!root) return tl::unexpected(root.error());
  if (auto checked = RefuseDecodingKeys(file.document.root(), file.name); !checked) return checked;
  const auto levels = Levels(*root);
  if (!levels) return tl::unexpected(levels.error());
  if (auto read = ReadModel(*root, *levels, parsed); !read) return read;
  for (const JsonObject& level : levels->levels) {
    const auto block = level.Object("quantization_config");
    if (!block) return tl::unexpected(block.error());
    if (*block) {
      if (auto read = ReadQuantizationBlock(**block, parsed); !read) return read;
    }
    const auto tail = level.Object("hybrid_tr3_tail");
    if (!tail) return tl::unexpected(tail.error());
    if (*tail && !parsed.rank_sliced) {
      auto config = ReadRankSliced(**tail);
      if (!config) return tl::unexpected(config.error());
      parsed.rank_sliced = std::move(*config);
    }
  }
  return {};
}

// --- comparison with the tensors -----------------------------------------------------------------

class ConfigComparison {
 public:
  ConfigComparison(const ShardSet& shards, const std::vector<MatrixInfo>& routed,
                   const std::vector<LinearInfo>& linears, std::vector<Problem>& problems)
      : shards_(shards), problems_(problems) {
    for (const MatrixInfo& matrix : routed) Count(matrix);
    for (const LinearInfo& linear : linears) {
      if (linear.name.ends_with("lm_head")) {
        head_ = &linear;
      } else {
        Count(linear.matrix);
      }
    }
  }

  void Compare(const JsonObject& block) {
    if (num_matrices_ == 0) return;
    CompareMethod(block);
    CompareCodebook(block);
    CompareBits(block);
    CompareStorage(block);
  }

  // A problem names its file beside the message: the place inside it is enough.
  void Warn(const std::string& file, const std::string& tensor, std::string message) {
    if (message.starts_with(file + ": ")) message.erase(0, file.size() + 2);
    problems_.push_back({.severity = Problem::Severity::kWarning,
                         .file = file,
                         .tensor = tensor,
                         .message = std::move(message),
                         .layer = {}});
  }

 private:
  void Count(const MatrixInfo& matrix) {
    const double weights = static_cast<double>(matrix.in_channels) * static_cast<double>(matrix.out_channels);
    weights_ += weights;
    bits_ += weights * matrix.bits;
    ++by_codebook_[matrix.codebook];
    ++num_matrices_;
  }

  void CompareMethod(const JsonObject& block) {
    const auto method = block.String("quant_method");
    if (!method || !*method || **method == "exl3") return;
    Warn(
        block.source, {},
        fmt::format("{}: says '{}', but the file holds EXL3 tensors", block.Place("quant_method"), **method));
  }

  void CompareCodebook(const JsonObject& block) {
    const auto name = block.String("codebook");
    if (!name || !*name) return;
    std::vector<std::string> found;
    bool differs = false;
    for (const CodebookInfo& info : AllCodebooks()) {
      const auto count = by_codebook_.find(info.codebook);
      if (count == by_codebook_.end()) continue;
      found.push_back(fmt::format("{} of {}", count->second, info.name));
      differs = differs || info.name != **name;
    }
    if (!differs) return;
    Warn(block.source, {},
         fmt::format("{}: says '{}', the tensors hold {} matrices; the tensors are used",
                     block.Place("codebook"), **name, fmt::join(found, ", ")));
  }

  void CompareBits(const JsonObject& block) {
    const auto bits = block.Number("bits");
    const double average = bits_ / weights_;
    if (bits && *bits && std::abs(**bits - average) > kBitsTolerance) {
      Warn(
          block.source, {},
          fmt::format("{}: says {}, the tensors hold {:.2f} bits per weight on average; the tensors are used",
                      block.Place("bits"), **bits, average));
    }
    const auto head_bits = block.Number("head_bits");
    if (head_ != nullptr && head_bits && *head_bits && **head_bits != head_->matrix.bits) {
      Warn(block.source, head_->name,
           fmt::format("{}: says {}, the tensor holds {}; the tensor is used", block.Place("head_bits"),
                       **head_bits, head_->matrix.bits));
    }
  }

  void CompareStorage(const JsonObject& block) {
    const auto storage = block.Object("tensor_storage");
    if (!storage || !*storage) return;
    for (const auto field : (*storage)->object) {
      uint64_t bits = 0;
      if (field.value["bits_per_weight"].get_uint64().get(bits)) continue;
      const auto found = shards_.by_name.find(std::string(field.key) + ".trellis");
      if (found == shards_.by_name.end()) continue;
      const std::vector<uint64_t>& shape = shards_.tensors[found->second].shape;
      if (shape.size() != 3 || bits * kTileChannels == shape[2]) continue;
      Warn(block.source, std::string(field.key),
           fmt::format("{}.bits_per_weight: says {}, the tensor holds {}; the tensor is used",
                       (*storage)->Place(field.key), bits, shape[2] / kTileChannels));
    }
  }

  const ShardSet& shards_;
  std::vector<Problem>& problems_;
  const LinearInfo* head_ = nullptr;
  double weights_ = 0;
  double bits_ = 0;
  size_t num_matrices_ = 0;
  std::map<Codebook, size_t> by_codebook_;
};

// Keys of one block that the other lacks or holds differently; tensor_storage is in one of them only.
std::vector<std::string> DifferingKeys(const JsonObject& a, const JsonObject& b) {
  std::unordered_map<std::string_view, simdjson::dom::element> left;
  for (const auto field : a.object) left.emplace(field.key, field.value);
  std::vector<std::string> keys;
  for (const auto field : b.object) {
    const auto other = left.find(field.key);
    const bool same = other != left.end() && JsonEqual(other->second, field.value);
    if (other != left.end()) left.erase(other);
    if (!same && field.key != "tensor_storage") keys.emplace_back(field.key);
  }
  for (const auto& [key, value] : left) {
    if (key != "tensor_storage") keys.emplace_back(key);
  }
  std::sort(keys.begin(), keys.end());
  return keys;
}

}  // namespace

Result<ParsedConfig> ReadConfig(const ShardSet& shards) {
  ParsedConfig parsed;
  auto config = ReadOptionalJson(shards, "config.json");
  if (!config) return tl::unexpected(config.error());
  parsed.config = std::move(*config);
  if (parsed.config != nullptr) {
    if (auto read = ReadConfigJson(parsed); !read) return tl::unexpected(read.error());
  }
  auto quantization = ReadOptionalJson(shards, "quantization_config.json");
  if (!quantization) return tl::unexpected(quantization.error());
  parsed.quantization_config = std::move(*quantization);
  if (parsed.quantization_config != nullptr) {
    const JsonFile& file = *parsed.quantization_config;
    const auto root = RootObject(file.document.root(), file.name);
    if (!root) return tl::unexpected(root.error());
    if (auto checked = RefuseDecodingKeys(file.document.root(), file.name); !checked) {
      return tl::unexpected(checked.error());
    }
    if (auto read = ReadQuantizationBlock(*root, parsed); !read) return tl::unexpected(read.error());
  }
  return parsed;
}

void CompareConfigWithTensors(const ParsedConfig& config, const ShardSet& shards,
                              const std::vector<MatrixInfo>& routed, const std::vector<LinearInfo>& linears,
                              std::vector<Problem>& problems) {
  ConfigComparison comparison(shards, routed, linears, problems);
  for (const JsonObject& block : config.quantization_blocks) comparison.Compare(block);
  if (config.quantization_blocks.size() < 2) return;
  const JsonObject& a = config.quantization_blocks.front();
  const JsonObject& b = config.quantization_blocks.back();
  const std::vector<std::string> keys = DifferingKeys(a, b);
  if (keys.empty()) return;
  comparison.Warn(b.source, {},
                  fmt::format("the quantization blocks of {} and {} differ in: {}; the tensors are used",
                              a.source, b.source, fmt::join(keys, ", ")));
}

}  // namespace espalier
