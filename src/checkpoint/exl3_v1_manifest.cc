// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>

#include "checkpoint/exl3_v1_layout.h"
#include "checkpoint/json_fields.h"

namespace espalier {
namespace {

constexpr std::string_view kSchema = "exl3-v1";
constexpr uint64_t kMcgSeed = 0xCBAC1FEDu;
constexpr uint64_t kMaxManifestExperts = uint64_t{1} << 16;
constexpr uint64_t kMaxManifestChannels = uint64_t{1} << 24;

struct ContainerCodebook {
  std::string_view name;
  int min_bits;
  int max_bits;
};
// Codebooks of the container, with the names that earlier builds used for them.
constexpr ContainerCodebook kContainerCodebooks[] = {{"mcg", 2, 6},      {"lut_e4m3", 2, 4},
                                                     {"lut_fp16", 5, 6}, {"sqg_e4m3", 2, 4},
                                                     {"sqg_fp16", 5, 6}, {"sqg_fp16_d3l", 5, 6}};

struct PairKind {
  std::string_view name;
  int low;
  int high;
};
constexpr PairKind kPairKinds[] = {{"P22", 2, 2}, {"P33", 3, 3}, {"P24", 2, 4}, {"P43", 4, 3}, {"P44", 4, 4}};

template <typename Found>
tl::unexpected<Status> Illegal(const JsonObject& object, std::string_view key, const Found& found,
                               std::string_view legal) {
  return Error(StatusCode::kFormat, fmt::format("{}: found {}, legal: {}", object.Place(key), found, legal));
}

// Parses one section after another; what is well-formed but not executed is remembered and refused at
// the end, so that a broken manifest is called broken whatever it asks for.
class ManifestParser {
 public:
  explicit ManifestParser(const JsonFile& file) : file_(file) { manifest_.name = file.name; }

  Result<Exl3V1Manifest> Parse() {
    const auto root = RootObject(file_.document.root(), file_.name);
    if (!root) return tl::unexpected(root.error());
    using Step = Result<void> (ManifestParser::*)(const JsonObject&);
    constexpr Step kSteps[] = {&ManifestParser::Identity,  &ManifestParser::Geometry,
                               &ManifestParser::Rates,     &ManifestParser::Hadamard,
                               &ManifestParser::Placement, &ManifestParser::Layers};
    for (const Step step : kSteps) {
      if (auto r = (this->*step)(*root); !r) return tl::unexpected(r.error());
    }
    if (unsupported_) return tl::unexpected(*unsupported_);
    return std::move(manifest_);
  }

 private:
  void NotYet(const JsonObject& object, std::string_view key, std::string_view what) {
    if (!unsupported_) {
      unsupported_ = Status(StatusCode::kUnsupported,
                            fmt::format("{}: {} is not executed yet; legal: codebook mcg, uniform "
                                        "rates, no intermediate_hadamard",
                                        object.Place(key), what));
    }
  }

  Result<void> Identity(const JsonObject& root) {
    const auto kind = root.RequireString("kind");
    if (!kind) return tl::unexpected(kind.error());
    if (*kind != "exl3-manifest") return Illegal(root, "kind", *kind, "exl3-manifest");
    const auto schema = root.RequireString("schema");
    if (!schema) return tl::unexpected(schema.error());
    if (*schema != kSchema) {
      return Error(StatusCode::kUnsupported,
                   fmt::format("{}: found '{}', legal: '{}'", root.Place("schema"), *schema, kSchema));
    }
    if (auto r = root.OnlyKeys({"kind", "schema", "codebook", "codebook_seed", "geometry", "rates",
                                "hadamard", "layout", "layers"});
        !r) {
      return r;
    }
    const auto codebook = root.RequireString("codebook");
    if (!codebook) return tl::unexpected(codebook.error());
    manifest_.codebook = *codebook;
    for (const ContainerCodebook& known : kContainerCodebooks) {
      if (known.name == *codebook) codebook_ = &known;
    }
    if (codebook_ == nullptr) {
      return Error(StatusCode::kUnsupported, fmt::format("{}: found '{}', legal: mcg, lut_e4m3, lut_fp16",
                                                         root.Place("codebook"), *codebook));
    }
    const auto seed = root.Unsigned("codebook_seed");
    if (!seed) return tl::unexpected(seed.error());
    const bool mcg = *codebook == "mcg";
    if (mcg && (!*seed || **seed != kMcgSeed)) {
      return Illegal(root, "codebook_seed", *seed ? fmt::format("{}", **seed) : "nothing",
                     fmt::format("{}", kMcgSeed));
    }
    if (!mcg && *seed) return Illegal(root, "codebook_seed", **seed, "no such key beside this codebook");
    if (!mcg) NotYet(root, "codebook", fmt::format("'{}'", *codebook));
    return {};
  }

  Result<void> Geometry(const JsonObject& root) {
    const auto geometry = root.RequireObject("geometry");
    if (!geometry) return tl::unexpected(geometry.error());
    if (auto r = geometry->OnlyKeys({"num_experts", "hidden_size", "intermediate_size", "slot_channels",
                                     "num_slots", "moe_layer_indices"});
        !r) {
      return r;
    }
    struct Number {
      std::string_view key;
      uint64_t* target;
      uint64_t multiple;
      uint64_t max;
    };
    uint64_t slot_channels = 0;
    const Number numbers[] = {
        {"num_experts", &manifest_.experts, 1, kMaxManifestExperts},
        {"hidden_size", &manifest_.hidden_channels, 16, kMaxManifestChannels},
        {"intermediate_size", &manifest_.intermediate_channels, kSlotChannels, kMaxManifestChannels},
        {"slot_channels", &slot_channels, kSlotChannels, kSlotChannels},
        {"num_slots", &manifest_.num_slots, 1, kMaxManifestChannels}};
    for (const Number& number : numbers) {
      const auto value = geometry->RequireUnsigned(number.key);
      if (!value) return tl::unexpected(value.error());
      if (*value == 0 || *value % number.multiple != 0 || *value > number.max) {
        return Illegal(*geometry, number.key, *value,
                       fmt::format("a multiple of {} in 1..{}", number.multiple, number.max));
      }
      *number.target = *value;
    }
    if (manifest_.num_slots != manifest_.intermediate_channels / kSlotChannels) {
      return Illegal(*geometry, "num_slots", manifest_.num_slots,
                     fmt::format("{} (intermediate_size / {})",
                                 manifest_.intermediate_channels / kSlotChannels, kSlotChannels));
    }
    const auto indices = geometry->UnsignedList("moe_layer_indices");
    if (!indices) return tl::unexpected(indices.error());
    if (!*indices) return Illegal(*geometry, "moe_layer_indices", "nothing", "a list of layer numbers");
    moe_layers_ = std::set<uint64_t>((*indices)->begin(), (*indices)->end());
    if (moe_layers_.size() != (*indices)->size() || moe_layers_.empty()) {
      return Illegal(*geometry, "moe_layer_indices", fmt::format("[{}]", fmt::join(**indices, ", ")),
                     "a non-empty list of distinct layer numbers");
    }
    return {};
  }

  Result<void> Rates(const JsonObject& root) {
    const auto rates = root.RequireObject("rates");
    if (!rates) return tl::unexpected(rates.error());
    const auto structure = rates->RequireString("structure");
    if (!structure) return tl::unexpected(structure.error());
    if (*structure == "per_expert_pair") return PairRates(*rates);
    if (*structure != "uniform") return Illegal(*rates, "structure", *structure, "uniform, per_expert_pair");
    if (auto r = rates->OnlyKeys({"structure", "bits"}); !r) return r;
    const auto bits = rates->RequireUnsigned("bits");
    if (!bits) return tl::unexpected(bits.error());
    if (*bits < static_cast<uint64_t>(codebook_->min_bits) ||
        *bits > static_cast<uint64_t>(codebook_->max_bits)) {
      return Illegal(*rates, "bits", *bits,
                     fmt::format("{}..{} for {}", codebook_->min_bits, codebook_->max_bits, codebook_->name));
    }
    manifest_.bits = static_cast<int>(*bits);
    return {};
  }

  Result<void> PairRates(const JsonObject& rates) {
    if (auto r = rates.OnlyKeys({"structure", "pair_kinds"}); !r) return r;
    constexpr std::string_view kLegal =
        "a non-empty list of distinct kinds of P22, P33, P24, P43, P44 that suit the codebook";
    const auto list = rates.Find("pair_kinds");
    simdjson::dom::array array;
    if (!list || list->get_array().get(array)) return Illegal(rates, "pair_kinds", "no list", kLegal);
    std::set<std::string_view> seen;
    for (const simdjson::dom::element item : array) {
      std::string_view name;
      if (item.get_string().get(name)) return Illegal(rates, "pair_kinds", simdjson::minify(item), kLegal);
      const auto* kind = std::find_if(std::begin(kPairKinds), std::end(kPairKinds),
                                      [&](const PairKind& known) { return known.name == name; });
      const bool fits = kind != std::end(kPairKinds) &&
                        std::min(kind->low, kind->high) >= codebook_->min_bits &&
                        std::max(kind->low, kind->high) <= codebook_->max_bits;
      if (!fits || !seen.insert(name).second) return Illegal(rates, "pair_kinds", name, kLegal);
    }
    if (seen.empty()) return Illegal(rates, "pair_kinds", "[]", kLegal);
    NotYet(rates, "structure", "'per_expert_pair'");
    return {};
  }

  Result<void> Hadamard(const JsonObject& root) {
    const auto hadamard = root.RequireObject("hadamard");
    if (!hadamard) return tl::unexpected(hadamard.error());
    if (auto r = hadamard->OnlyKeys(
            {"intermediate_hadamard", "per_expert_input_rotations", "pre_block", "post_block"});
        !r) {
      return r;
    }
    const auto coupled = hadamard->RequireBool("intermediate_hadamard");
    if (!coupled) return tl::unexpected(coupled.error());
    const auto per_expert = hadamard->RequireBool("per_expert_input_rotations");
    if (!per_expert) return tl::unexpected(per_expert.error());
    manifest_.per_expert_input_rotations = *per_expert;
    for (const auto& [key, axis] : {std::pair{std::string_view("pre_block"), manifest_.hidden_channels},
                                    {std::string_view("post_block"), manifest_.intermediate_channels}}) {
      const auto block = hadamard->Unsigned(key);
      if (!block) return tl::unexpected(block.error());
      if (!*coupled) {
        if (*block) return Illegal(*hadamard, key, **block, "no such key without intermediate_hadamard");
        continue;
      }
      if (!*block || **block == 0 || **block % 32 != 0 || axis % **block != 0) {
        return Illegal(*hadamard, key, *block ? fmt::format("{}", **block) : "nothing",
                       fmt::format("a multiple of 32 that divides {}", axis));
      }
    }
    if (*coupled) NotYet(*hadamard, "intermediate_hadamard", "the coupled mode");
    return {};
  }

  Result<void> Placement(const JsonObject& root) {
    const auto layout = root.RequireObject("layout");
    if (!layout) return tl::unexpected(layout.error());
    if (auto r = layout->OnlyKeys({"row_alignment", "extent_alignment_slots", "extent_barriers"}); !r)
      return r;
    const auto row_alignment = layout->RequireUnsigned("row_alignment");
    if (!row_alignment) return tl::unexpected(row_alignment.error());
    if (*row_alignment == 0) return Illegal(*layout, "row_alignment", 0, "a number of bytes above 0");
    manifest_.row_alignment_bytes = *row_alignment;
    const auto alignment = layout->RequireUnsigned("extent_alignment_slots");
    if (!alignment) return tl::unexpected(alignment.error());
    if (*alignment == 0 || manifest_.num_slots % *alignment != 0) {
      return Illegal(*layout, "extent_alignment_slots", *alignment,
                     fmt::format("a divisor of {} slots", manifest_.num_slots));
    }
    manifest_.extent_alignment_slots = *alignment;
    const auto barriers = layout->UnsignedList("extent_barriers");
    if (!barriers) return tl::unexpected(barriers.error());
    if (!*barriers) return {};
    manifest_.extent_barriers = **barriers;
    const std::set<uint64_t> distinct((*barriers)->begin(), (*barriers)->end());
    const bool inside = std::all_of(distinct.begin(), distinct.end(),
                                    [&](uint64_t slot) { return slot > 0 && slot < manifest_.num_slots; });
    if (!inside || distinct.size() != (*barriers)->size()) {
      return Illegal(*layout, "extent_barriers", fmt::format("[{}]", fmt::join(**barriers, ", ")),
                     fmt::format("distinct slots in 1..{}", manifest_.num_slots - 1));
    }
    return {};
  }

  Result<void> Layers(const JsonObject& root) {
    const auto layers = root.RequireObject("layers");
    if (!layers) return tl::unexpected(layers.error());
    for (const auto field : layers->object) {
      const auto number = ParseDecimal(field.key, UINT32_MAX);
      if (!number || !moe_layers_.contains(*number)) {
        return Illegal(*layers, field.key, "this key", "the numbers of geometry.moe_layer_indices");
      }
      const auto entry = layers->RequireObject(field.key);
      if (!entry) return tl::unexpected(entry.error());
      if (auto r = LayerEntry(*number, *entry); !r) return r;
    }
    for (const uint64_t number : moe_layers_) {
      if (!manifest_.layers.contains(number)) {
        return Illegal(*layers, fmt::format("{}", number), "nothing",
                       "an entry for each of geometry.moe_layer_indices");
      }
    }
    return {};
  }

  Result<void> LayerEntry(uint64_t number, const JsonObject& entry) {
    if (auto r = entry.OnlyKeys({"file", "sha256"}); !r) return r;
    const auto file = entry.RequireString("file");
    if (!file) return tl::unexpected(file.error());
    if (auto plain = CheckPlainName(*file, entry.Place("file")); !plain) return plain;
    auto hash = entry.RequireString("sha256");
    if (!hash) return tl::unexpected(hash.error());
    for (char& c : *hash) {
      if (c >= 'A' && c <= 'F') c = static_cast<char>(c - 'A' + 'a');
    }
    if (hash->size() != 64 || hash->find_first_not_of("0123456789abcdef") != std::string::npos) {
      return Illegal(entry, "sha256", *hash, "64 hexadecimal digits");
    }
    for (const auto& [other, layer] : manifest_.layers) {
      if (layer.file == *file)
        return Illegal(entry, "file", *file, fmt::format("a file of its own (layer {} has it)", other));
    }
    manifest_.layers.emplace(number, Exl3V1Manifest::LayerFile{.file = *file, .sha256 = *std::move(hash)});
    return {};
  }

  const JsonFile& file_;
  Exl3V1Manifest manifest_;
  const ContainerCodebook* codebook_ = nullptr;
  std::set<uint64_t> moe_layers_;
  std::optional<Status> unsupported_;
};

}  // namespace

Result<Exl3V1Manifest> ParseExl3V1Manifest(const JsonFile& file) { return ManifestParser(file).Parse(); }

}  // namespace espalier
