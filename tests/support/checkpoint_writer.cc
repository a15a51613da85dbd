// SPDX-License-Identifier: Apache-2.0
#include "support/checkpoint_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <stdexcept>

#include "base/sha256.h"

namespace espalier::testing {
namespace {

constexpr std::array<const char*, kNumProjections> kProjNames = {"gate_proj", "up_proj", "down_proj"};
constexpr std::array<const char*, kNumProjections> kWNames = {"w1", "w3", "w2"};

uint32_t MarkerValue(Codebook codebook) {
  if (codebook == Codebook::kMcg) return 0xCBAC1FEDu;
  if (codebook == Codebook::kMul1) return 0x83DCD12Du;
  return 0;
}

const char* MarkerName(Codebook codebook) { return codebook == Codebook::kMcg ? "mcg" : "mul1"; }

const char* CodebookText(Codebook codebook) {
  if (codebook == Codebook::kMcg) return "mcg";
  return codebook == Codebook::kMul1 ? "mul1" : "3inst";
}

template <typename T>
std::string AsBytes(const std::vector<T>& values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

std::vector<uint16_t> RandomWords(std::mt19937_64& random, uint64_t count) {
  std::vector<uint16_t> words(count);
  for (uint16_t& word : words) word = static_cast<uint16_t>(random());
  return words;
}

// fp16 of either sign with |v| in [2^(exponent-15), 2^(exponent-13)).
std::vector<uint16_t> RandomScales(std::mt19937_64& random, uint64_t count, int exponent, bool unit) {
  std::vector<uint16_t> scales = RandomWords(random, count);
  for (uint16_t& scale : scales) {
    const int magnitude = unit ? 0x3C00 : (scale & 0x03FF) | ((exponent + ((scale >> 10) & 1)) << 10);
    scale = static_cast<uint16_t>((scale & 0x8000) | magnitude);
  }
  return scales;
}

MatrixModel RandomMatrix(std::mt19937_64& random, const ModelShape& shape, uint64_t in, uint64_t out,
                         int bits) {
  constexpr Codebook kCodebooks[] = {Codebook::kMcg, Codebook::kMul1, Codebook::k3Inst};
  MatrixModel matrix;
  matrix.bits = bits;
  matrix.codebook = shape.codebook.value_or(kCodebooks[random() % 3]);
  matrix.in_channels = in;
  matrix.out_channels = out;
  matrix.codes = RandomWords(random, in / 16 * (out / 16) * 16 * static_cast<uint64_t>(bits));
  matrix.suh = RandomScales(random, in, 14, shape.unit_signs);
  // Codes have an rms near 1 and sums run over `in` of them: 2^-5 .. 2^-3 keeps outputs near 1.
  matrix.svh = RandomScales(random, out, 10, shape.unit_signs);
  return matrix;
}

int RandomBits(std::mt19937_64& random, const ModelShape& shape) {
  if (shape.bits) return *shape.bits;
  return shape.min_bits +
         static_cast<int>(random() % static_cast<uint64_t>(shape.max_bits - shape.min_bits + 1));
}

LayerModel RandomLayer(std::mt19937_64& random, const ModelShape& shape, int64_t number) {
  LayerModel layer;
  layer.number = number;
  layer.experts.resize(shape.experts);
  const uint64_t width = shape.intermediate_channels / shape.slices;
  const uint64_t hidden = shape.hidden_channels;
  for (ExpertModel& expert : layer.experts) {
    const int expert_bits = RandomBits(random, shape);
    expert.slices.resize(shape.slices);
    for (uint32_t s = 0; s < shape.slices; ++s) {
      auto& slice = expert.slices[s];
      const auto& first = layer.experts[0].slices[s];
      for (int p = shape.has_gate ? 0 : 1; p < kNumProjections; ++p) {
        const int bits = shape.bits_by_expert ? expert_bits : RandomBits(random, shape);
        slice[p] = RandomMatrix(random, shape, p == 2 ? width : hidden, p == 2 ? hidden : width, bits);
        if (shape.bias && p != 0) slice[p].bias = RandomScales(random, slice[p].out_channels, 10, false);
        if (p == 2 && shape.shared_hidden) slice[p].svh = first[p].svh;
        if (p != 2 && shape.shared_hidden) slice[p].suh = first[p].suh;
        if (p == 1 && shape.same_gate_up_suh) slice[p].suh = slice[0].suh;
      }
    }
  }
  return layer;
}

std::string Bf16Noise(std::mt19937_64& random, uint64_t count) {
  std::vector<uint16_t> words = RandomWords(random, count);
  for (uint16_t& word : words) word = static_cast<uint16_t>((word & 0x80FF) | 0x3C00);
  return AsBytes(words);
}

NamedTensor VectorTensor(std::string name, const std::vector<uint16_t>& values) {
  return {std::move(name), "F16", {values.size()}, AsBytes(values)};
}

// su / sv: bit c of word c / 16, set = -1.
NamedTensor SignTensor(std::string name, const std::vector<uint16_t>& values) {
  std::vector<uint16_t> words(values.size() / 16);
  for (size_t c = 0; c < values.size(); ++c) {
    words[c / 16] = static_cast<uint16_t>(words[c / 16] | ((values[c] >> 15) << (c % 16)));
  }
  return {std::move(name), "I16", {words.size()}, AsBytes(words)};
}

struct MatrixParts {
  bool suh = true;
  bool svh = true;
  bool marker = true;
  bool legacy_signs = false;
};

std::vector<NamedTensor> MatrixTensors(const std::string& name, const MatrixModel& matrix,
                                       const MatrixParts& parts) {
  std::vector<NamedTensor> tensors;
  tensors.push_back(
      {name + ".trellis",
       "I16",
       {matrix.in_channels / 16, matrix.out_channels / 16, static_cast<uint64_t>(16 * matrix.bits)},
       AsBytes(matrix.codes)});
  if (parts.legacy_signs) {
    tensors.push_back(SignTensor(name + ".su", matrix.suh));
    tensors.push_back(SignTensor(name + ".sv", matrix.svh));
  } else {
    if (parts.suh) tensors.push_back(VectorTensor(name + ".suh", matrix.suh));
    if (parts.svh) tensors.push_back(VectorTensor(name + ".svh", matrix.svh));
  }
  if (!matrix.bias.empty()) tensors.push_back(VectorTensor(name + ".bias", matrix.bias));
  if (parts.marker && matrix.codebook != Codebook::k3Inst) {
    const std::vector<uint32_t> value = {MarkerValue(matrix.codebook)};
    tensors.push_back({fmt::format("{}.{}", name, MarkerName(matrix.codebook)), "I32", {}, AsBytes(value)});
  }
  return tensors;
}

// Every matrix of the model but the head, to state averages in a config.
std::vector<const MatrixModel*> AllMatrices(const CheckpointModel& model) {
  std::vector<const MatrixModel*> all;
  for (const LinearModel& linear : model.linears) {
    if (linear.name != "lm_head") all.push_back(&linear.matrix);
  }
  for (const LayerModel& layer : model.layers) {
    for (const ExpertModel& expert : layer.experts) {
      for (const auto& slice : expert.slices) {
        for (int p = model.has_gate ? 0 : 1; p < kNumProjections; ++p) all.push_back(&slice[p]);
      }
    }
  }
  return all;
}

Json BaseConfig(const CheckpointModel& model, const char* architecture, const char* experts_key) {
  Json config;
  config["architectures"] = {architecture};
  config["model_type"] = "generated";
  config["hidden_size"] = model.hidden_channels;
  config["moe_intermediate_size"] = model.intermediate_channels;
  config[experts_key] = model.layers.empty() ? 0 : model.layers[0].experts.size();
  config["num_experts_per_tok"] = 2;
  config["num_hidden_layers"] = model.layers.empty() ? 1 : model.layers.back().number + 1;
  config["hidden_act"] = model.has_gate ? "silu" : "relu2";
  return config;
}

Json StockQuantization(const CheckpointModel& model) {
  double bits = 0;
  double weights = 0;
  bool uniform = true;
  const std::vector<const MatrixModel*> all = AllMatrices(model);
  const MatrixModel* head = nullptr;
  for (const LinearModel& linear : model.linears) {
    if (linear.name == "lm_head") head = &linear.matrix;
  }
  for (const MatrixModel* matrix : all) {
    const double size = static_cast<double>(matrix->in_channels * matrix->out_channels);
    bits += size * matrix->bits;
    weights += size;
    uniform = uniform && matrix->codebook == all[0]->codebook;
  }
  Json block;
  block["quant_method"] = "exl3";
  block["version"] = "1.4.1";
  block["bits"] = weights > 0 ? std::round(bits / weights * 100) / 100 : 0;
  block["head_bits"] = head == nullptr ? 6 : head->bits;
  block["calibration"] = {{"rows", 250}, {"cols", 2048}};
  block["out_scales"] = "always";
  if (uniform && !all.empty()) block["codebook"] = CodebookText(all[0]->codebook);
  return block;
}

std::string ShardName(size_t shard, size_t count) {
  if (count == 1) return "model.safetensors";
  return fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, count);
}

// Deals groups of tensors (one matrix, one plain tensor) over the shards: whole groups in consecutive runs,
// or with `spread` every tensor on its own, round robin.
void Deal(CheckpointFiles& files, const std::vector<std::vector<NamedTensor>>& groups, size_t shards,
          bool spread) {
  size_t turn = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const NamedTensor& tensor : groups[g]) {
      const size_t shard = spread ? turn++ % shards : g * shards / groups.size();
      files.shards[ShardName(shard, shards)].tensors.push_back(tensor);
    }
  }
}

std::vector<std::vector<NamedTensor>> DenseGroups(const CheckpointModel& model) {
  std::vector<std::vector<NamedTensor>> groups;
  for (const NamedTensor& tensor : model.plain) groups.push_back({tensor});
  for (const LinearModel& linear : model.linears) {
    groups.push_back(MatrixTensors(linear.name, linear.matrix, {}));
  }
  return groups;
}

Json TierTable(const CheckpointModel& model, const char* field) {
  Json table;
  for (const LayerModel& layer : model.layers) {
    Json bits = Json::array();
    Json ids = Json::array();
    for (size_t e = 0; e < layer.experts.size(); ++e) {
      bits.push_back(layer.experts[e].slices[0][2].bits);
      ids.push_back(e);
    }
    table[std::to_string(layer.number)] = {{field, bits}, {"keep_nvfp4", Json::array()}, {"tail_tr3", ids}};
  }
  return table;
}

// Distinct K of the routed experts, ascending.
Json KValues(const CheckpointModel& model) {
  std::map<int, bool> seen;
  for (const LayerModel& layer : model.layers) {
    for (const ExpertModel& expert : layer.experts) {
      for (const auto& slice : expert.slices) {
        for (int p = model.has_gate ? 0 : 1; p < kNumProjections; ++p) seen[slice[p].bits] = true;
      }
    }
  }
  Json values = Json::array();
  for (const auto& [bits, unused] : seen) values.push_back(bits);
  return values;
}

Json TailBlock(const CheckpointModel& model, const RankSlicedOptions& options, const char* field) {
  const Json k_values = KValues(model);
  Json tail;
  tail["format"] = "exl3-trellis";
  tail["codebook"] = "mcg";
  tail["mcg_multiplier"] = 3417055213u;
  tail["tp"] = model.slices;
  tail["moe_layers"] = {model.layers.front().number, model.layers.back().number};
  tail["experts_per_layer"] = model.layers[0].experts.size();
  tail["tensor_schema"] =
      "model.layers.{L}.mlp.experts.{E}.{gate_proj|up_proj|down_proj}.rank{r}.{trellis|suh|svh|mcg}";
  if (k_values.size() == 1) {
    tail["bits"] = k_values[0];
  } else {
    tail["bits"] = "mixed";
    tail["k_values"] = k_values;
  }
  if (options.tier_table) tail["bits_per_expert"] = fmt::format("tier_bitmap.json:{}", field);
  if (options.shared_h) {
    tail["rotation_layout"] = "shared_h_v1";
    tail["shared_h_tensor_schema"] = "model.layers.{L}.mlp.experts.shared_h.{proj}.rank{r}.{suh|svh}";
  }
  return tail;
}

void AppendSharedH(ShardFile& file, const std::string& experts, const LayerModel& layer, uint32_t slice,
                   bool up_vectors) {
  const auto& first = layer.experts[0].slices[slice];
  const auto name = [&](const char* projection, const char* part) {
    return fmt::format("{}.shared_h.{}.rank{}.{}", experts, projection, slice, part);
  };
  file.tensors.push_back(VectorTensor(name("gate_proj", "suh"), first[0].suh));
  if (up_vectors) file.tensors.push_back(VectorTensor(name("up_proj", "suh"), first[1].suh));
  file.tensors.push_back(VectorTensor(name("down_proj", "svh"), first[2].svh));
}

void Append(std::vector<NamedTensor>& to, std::vector<NamedTensor> from) {
  for (NamedTensor& tensor : from) to.push_back(std::move(tensor));
}

// The bytes of one slot row, docs/format.md "Row (slot) content".
std::string SlotRow(const LayerModel& layer, uint64_t slot, uint64_t hidden_tiles, uint64_t row_stride) {
  std::string row;
  row.reserve(row_stride);
  for (const ExpertModel& expert : layer.experts) {
    for (int p = 0; p < kNumProjections; ++p) {
      const MatrixModel& matrix = expert.slices[0][p];
      const size_t words = static_cast<size_t>(16 * matrix.bits);
      const uint64_t columns = matrix.out_channels / 16;
      for (uint64_t half = 0; half < 2; ++half) {
        for (uint64_t h = 0; h < hidden_tiles; ++h) {
          const uint64_t tile = p == 2 ? (2 * slot + half) * columns + h : h * columns + 2 * slot + half;
          const char* tile_bytes = reinterpret_cast<const char*>(matrix.codes.data() + tile * words);
          row.append(tile_bytes, words * 2);
        }
      }
    }
  }
  row.resize(row_stride, '\0');
  return row;
}

ShardFile Exl3V1Layer(const CheckpointModel& model, const LayerModel& layer, const Exl3V1Options& options) {
  const uint64_t experts = layer.experts.size();
  const uint64_t slots = model.intermediate_channels / 32;
  const uint64_t bits = static_cast<uint64_t>(layer.experts[0].slices[0][2].bits);
  const uint64_t payload = experts * 3 * (model.hidden_channels / 16) * 64 * bits;
  const uint64_t stride =
      (payload + options.row_alignment - 1) / options.row_alignment * options.row_alignment;
  NamedTensor codes{"codes", "U8", {slots, stride}, {}};
  std::vector<uint16_t> rotations;
  for (uint64_t slot = 0; slot < slots; ++slot) {
    codes.data += SlotRow(layer, slot, model.hidden_channels / 16, stride);
    for (const ExpertModel& expert : layer.experts) {
      const auto& matrices = expert.slices[0];
      for (const auto* vector : {&matrices[0].svh, &matrices[1].svh, &matrices[2].suh}) {
        rotations.insert(rotations.end(), vector->begin() + static_cast<ptrdiff_t>(32 * slot),
                         vector->begin() + static_cast<ptrdiff_t>(32 * slot + 32));
      }
    }
  }
  ShardFile file;
  file.tensors.push_back(std::move(codes));
  file.tensors.push_back({"rotations", "F16", {slots, experts, 3, 32}, AsBytes(rotations)});
  const auto hidden = [&](const char* name, int projection) {
    std::vector<uint16_t> all;
    for (const ExpertModel& expert : layer.experts) {
      const MatrixModel& matrix = expert.slices[0][projection];
      const std::vector<uint16_t>& vector = projection == 2 ? matrix.svh : matrix.suh;
      all.insert(all.end(), vector.begin(), vector.end());
      if (!options.per_expert_vectors) break;
    }
    std::vector<uint64_t> shape = {model.hidden_channels};
    if (options.per_expert_vectors) shape.insert(shape.begin(), experts);
    file.tensors.push_back({name, "F16", shape, AsBytes(all)});
  };
  hidden("gate_suh", 0);
  hidden("up_suh", 1);
  hidden("down_svh", 2);
  file.metadata = {{"schema", "exl3-v1"},
                   {"codebook", "mcg"},
                   {"layer", std::to_string(layer.number)},
                   {"num_experts", std::to_string(experts)},
                   {"hidden_size", std::to_string(model.hidden_channels)},
                   {"intermediate_size", std::to_string(model.intermediate_channels)},
                   {"slot_channels", "32"}};
  return file;
}

Json Exl3V1Manifest(const CheckpointModel& model, const Exl3V1Options& options) {
  const uint64_t slots = model.intermediate_channels / 32;
  Json layers;
  Json indices = Json::array();
  for (const LayerModel& layer : model.layers) {
    indices.push_back(layer.number);
    layers[std::to_string(layer.number)] = {
        {"file", fmt::format("exl3-layer-{:05}.safetensors", layer.number)}, {"sha256", kHashOfFile}};
  }
  Json manifest;
  manifest["kind"] = "exl3-manifest";
  manifest["schema"] = "exl3-v1";
  manifest["codebook"] = "mcg";
  manifest["codebook_seed"] = 3417055213u;
  manifest["geometry"] = {{"num_experts", model.layers[0].experts.size()},
                          {"hidden_size", model.hidden_channels},
                          {"intermediate_size", model.intermediate_channels},
                          {"slot_channels", 32},
                          {"num_slots", slots},
                          {"moe_layer_indices", indices}};
  manifest["rates"] = {{"structure", "uniform"}, {"bits", model.layers[0].experts[0].slices[0][2].bits}};
  manifest["hadamard"] = {{"intermediate_hadamard", false},
                          {"per_expert_input_rotations", options.per_expert_vectors}};
  manifest["layout"] = {{"row_alignment", options.row_alignment},
                        {"extent_alignment_slots", options.extent_alignment_slots}};
  std::vector<uint64_t> barriers = options.barriers.value_or(std::vector<uint64_t>{slots / 2});
  if (!barriers.empty()) manifest["layout"]["extent_barriers"] = barriers;
  manifest["layers"] = layers;
  return manifest;
}

}  // namespace

MatrixModel CutOutputs(const MatrixModel& matrix, uint64_t first, uint64_t channels) {
  MatrixModel part;
  part.bits = matrix.bits;
  part.codebook = matrix.codebook;
  part.in_channels = matrix.in_channels;
  part.out_channels = channels;
  const uint64_t words = 16 * static_cast<uint64_t>(matrix.bits);
  for (uint64_t row = 0; row < matrix.in_channels / 16; ++row) {
    const auto begin = matrix.codes.begin() +
                       static_cast<ptrdiff_t>((row * (matrix.out_channels / 16) + first / 16) * words);
    part.codes.insert(part.codes.end(), begin, begin + static_cast<ptrdiff_t>(channels / 16 * words));
  }
  const auto cut = [&](const std::vector<uint16_t>& vector) {
    if (vector.empty()) return vector;
    const auto begin = vector.begin() + static_cast<ptrdiff_t>(first);
    return std::vector<uint16_t>(begin, begin + static_cast<ptrdiff_t>(channels));
  };
  part.suh = matrix.suh;
  part.svh = cut(matrix.svh);
  part.bias = cut(matrix.bias);
  return part;
}

MatrixModel CutInputs(const MatrixModel& matrix, uint64_t first, uint64_t channels) {
  MatrixModel part;
  part.bits = matrix.bits;
  part.codebook = matrix.codebook;
  part.in_channels = channels;
  part.out_channels = matrix.out_channels;
  const uint64_t row_words = matrix.out_channels / 16 * 16 * static_cast<uint64_t>(matrix.bits);
  const auto begin = matrix.codes.begin() + static_cast<ptrdiff_t>(first / 16 * row_words);
  part.codes.assign(begin, begin + static_cast<ptrdiff_t>(channels / 16 * row_words));
  const auto suh = matrix.suh.begin() + static_cast<ptrdiff_t>(first);
  part.suh.assign(suh, suh + static_cast<ptrdiff_t>(channels));
  part.svh = matrix.svh;
  if (first == 0) part.bias = matrix.bias;
  return part;
}

MatrixModel CutIntermediate(const MatrixModel& matrix, Projection projection, uint64_t first,
                            uint64_t channels) {
  return projection == Projection::kDown ? CutInputs(matrix, first, channels)
                                         : CutOutputs(matrix, first, channels);
}

CheckpointModel RandomModel(const ModelShape& shape, uint64_t seed) {
  std::mt19937_64 random(seed);
  CheckpointModel model;
  model.hidden_channels = shape.hidden_channels;
  model.intermediate_channels = shape.intermediate_channels;
  model.slices = shape.slices;
  model.has_gate = shape.has_gate;
  for (int64_t number : shape.layers) model.layers.push_back(RandomLayer(random, shape, number));
  if (!shape.dense) return model;
  const uint64_t hidden = shape.hidden_channels;
  const auto linear = [&](std::string name, uint64_t in, uint64_t out) {
    model.linears.push_back(
        {std::move(name), RandomMatrix(random, shape, in, out, RandomBits(random, shape))});
  };
  linear("model.layers.0.self_attn.q_proj", hidden, 256);
  linear("model.layers.0.mlp.gate_proj", hidden, 128);
  linear("model.layers.0.mlp.up_proj", hidden, 128);
  linear("model.layers.0.mlp.down_proj", 128, hidden);
  linear("lm_head", hidden, 128);
  model.plain.push_back({"model.embed_tokens.weight", "BF16", {24, hidden}, Bf16Noise(random, 24 * hidden)});
  model.plain.push_back({"model.norm.weight", "BF16", {hidden}, Bf16Noise(random, hidden)});
  for (int64_t number : shape.layers) {
    model.plain.push_back({fmt::format("model.layers.{}.mlp.gate.weight", number),
                           "BF16",
                           {shape.experts, hidden},
                           Bf16Noise(random, shape.experts * hidden)});
  }
  return model;
}

CheckpointModel CutIntoSlices(const CheckpointModel& model, uint32_t slices) {
  CheckpointModel cut = model;
  cut.slices = slices;
  const uint64_t width = model.intermediate_channels / slices;
  for (LayerModel& layer : cut.layers) {
    for (ExpertModel& expert : layer.experts) {
      const auto whole = expert.slices.at(0);
      expert.slices.assign(slices, {});
      for (uint32_t s = 0; s < slices; ++s) {
        for (int p = model.has_gate ? 0 : 1; p < kNumProjections; ++p) {
          expert.slices[s][p] = CutIntermediate(whole[p], static_cast<Projection>(p), s * width, width);
        }
      }
    }
  }
  return cut;
}

std::string SafetensorsBytes(std::string_view header, std::string_view data) {
  const uint64_t length = header.size();
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  bytes += header;
  bytes += data;
  return bytes;
}

std::string SafetensorsBytes(const ShardFile& file) {
  Json header = Json::object();
  if (!file.metadata.empty()) {
    for (const auto& [key, value] : file.metadata) header["__metadata__"][key] = value;
  }
  std::string data;
  for (const NamedTensor& tensor : file.tensors) {
    const uint64_t begin = data.size();
    data += tensor.data;
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return SafetensorsBytes(text, data);
}

NamedTensor& CheckpointFiles::Tensor(const std::string& name) {
  for (NamedTensor& tensor : shards.at(FileOf(name)).tensors) {
    if (tensor.name == name) return tensor;
  }
  throw std::out_of_range(name);
}

std::string CheckpointFiles::FileOf(const std::string& name) const {
  for (const auto& [file, shard] : shards) {
    for (const NamedTensor& tensor : shard.tensors) {
      if (tensor.name == name) return file;
    }
  }
  throw std::out_of_range("no tensor " + name);
}

NamedTensor CheckpointFiles::Remove(const std::string& name) {
  std::vector<NamedTensor>& tensors = shards.at(FileOf(name)).tensors;
  const auto at = std::find_if(tensors.begin(), tensors.end(), [&](const auto& t) { return t.name == name; });
  NamedTensor removed = std::move(*at);
  tensors.erase(at);
  if (json.contains(kIndexName)) index().erase(name);
  return removed;
}

void CheckpointFiles::Rename(const std::string& from, const std::string& to) {
  const std::string file = FileOf(from);
  Tensor(from).name = to;
  if (!json.contains(kIndexName)) return;
  index().erase(from);
  index()[to] = file;
}

void CheckpointFiles::Add(const std::string& file, NamedTensor tensor) {
  if (json.contains(kIndexName)) index()[tensor.name] = file;
  shards.at(file).tensors.push_back(std::move(tensor));
}

void CheckpointFiles::MakeIndex() {
  uint64_t total = 0;
  Json map = Json::object();
  for (const auto& [file, shard] : shards) {
    for (const NamedTensor& tensor : shard.tensors) {
      map[tensor.name] = file;
      total += tensor.data.size();
    }
  }
  json[kIndexName] = {{"metadata", {{"total_size", total}}}, {"weight_map", map}};
}

FileMap CheckpointFiles::Serialize() const {
  FileMap files;
  for (const auto& [name, shard] : shards) files[name] = SafetensorsBytes(shard);
  for (const auto& [name, value] : json) {
    Json copy = value;
    if (name == kManifestName && copy.is_object() && copy.contains("layers") && copy["layers"].is_object()) {
      for (auto& [layer, entry] : copy["layers"].items()) {
        if (!entry.is_object() || entry.value("sha256", Json()) != kHashOfFile) continue;
        const auto file = files.find(entry.value("file", std::string()));
        const std::string_view bytes = file == files.end() ? std::string_view() : file->second;
        entry["sha256"] = Sha256Hex(std::as_bytes(std::span(bytes.data(), bytes.size())));
      }
    }
    files[name] = copy.dump(1);
  }
  for (const auto& [name, bytes] : raw) files[name] = bytes;
  for (const auto& edit : edits) edit(files);
  return files;
}

CheckpointFiles WriteStock(const CheckpointModel& model, const StockOptions& options) {
  std::vector<std::vector<NamedTensor>> groups = DenseGroups(model);
  for (const LayerModel& layer : model.layers) {
    for (size_t e = 0; e < layer.experts.size(); ++e) {
      for (int p = model.has_gate ? 0 : 1; p < kNumProjections; ++p) {
        const std::string name =
            fmt::format("{}.{}.{}.{}.{}", options.prefix, layer.number, options.experts_path, e,
                        options.w_names ? kWNames[p] : kProjNames[p]);
        MatrixParts parts;
        parts.legacy_signs = options.legacy_signs;
        groups.push_back(MatrixTensors(name, layer.experts[e].slices.at(0)[p], parts));
      }
    }
  }
  CheckpointFiles files;
  Deal(files, groups, options.shards, options.spread);
  Json config = BaseConfig(model, "Qwen3MoeForCausalLM", "num_experts");
  config["quantization_config"] = StockQuantization(model);
  files.json["config.json"] = config;
  if (options.index) files.MakeIndex();
  return files;
}

CheckpointFiles WriteRankSliced(const CheckpointModel& model, const RankSlicedOptions& options) {
  CheckpointFiles files;
  for (const LayerModel& layer : model.layers) {
    ShardFile& file = files.shards[fmt::format("model-layer-{:03}.safetensors", layer.number)];
    const std::string experts = fmt::format("model.layers.{}.mlp.experts", layer.number);
    for (uint32_t s = 0; s < model.slices; ++s) {
      if (options.shared_h) AppendSharedH(file, experts, layer, s, options.up_vectors);
      for (size_t e = 0; e < layer.experts.size(); ++e) {
        for (int p = 0; p < kNumProjections; ++p) {
          MatrixParts parts;
          parts.marker = options.markers;
          parts.suh = !options.shared_h || p == 2;
          parts.svh = !options.shared_h || p != 2;
          Append(file.tensors, MatrixTensors(fmt::format("{}.{}.{}.rank{}", experts, e, kProjNames[p], s),
                                             layer.experts[e].slices.at(s)[p], parts));
        }
      }
    }
  }
  for (const std::vector<NamedTensor>& group : DenseGroups(model)) {
    Append(files.shards["model-dense.safetensors"].tensors, group);
  }
  const char* field = options.bits_per_expert_name ? "bits_per_expert" : "k";
  Json config = BaseConfig(model, "GlmMoeDsaForCausalLM", "n_routed_experts");
  config["quantization_config"] = {{"quant_method", "exl3"}};
  config["hybrid_tr3_tail"] = TailBlock(model, options, field);
  files.json["config.json"] = config;
  if (options.tier_table) files.json["tier_bitmap.json"] = TierTable(model, field);
  if (options.index) files.MakeIndex();
  return files;
}

CheckpointFiles WriteR7(const CheckpointModel& model, const R7Options& options) {
  std::vector<std::vector<NamedTensor>> groups = DenseGroups(model);
  for (const LayerModel& layer : model.layers) {
    const std::string experts = fmt::format("model.layers.{}.mlp.experts", layer.number);
    const auto& first = layer.experts[0].slices[0];
    groups.push_back({VectorTensor(experts + ".r7_shared.gate_up_suh", first[0].suh),
                      VectorTensor(experts + ".r7_shared.down_svh", first[2].svh)});
    for (size_t e = 0; e < layer.experts.size(); ++e) {
      for (int p = 0; p < kNumProjections; ++p) {
        MatrixParts parts;
        parts.suh = p == 2;
        parts.svh = p != 2;
        groups.push_back(MatrixTensors(fmt::format("{}.{}.{}", experts, e, kProjNames[p]),
                                       layer.experts[e].slices.at(0)[p], parts));
      }
    }
  }
  CheckpointFiles files;
  Deal(files, groups, options.shards, false);
  Json config = BaseConfig(model, "GlmMoeDsaForCausalLM", "n_routed_experts");
  config["quantization_config"] = {
      {"quant_method", "exl3"},
      {"r7_routed_experts",
       {{"schema", "r7-complete-v2-checkpoint-v1"},
        {"codebook", "mcg"},
        {"bits", "mixed_tensor"},
        {"moe_layers", {model.layers.front().number, model.layers.back().number}},
        {"k_values", KValues(model)},
        {"tp_slice_quantum", 128}}}};
  files.json["config.json"] = config;
  if (options.index) files.MakeIndex();
  return files;
}

CheckpointFiles WriteExl3V1(const CheckpointModel& model, const Exl3V1Options& options) {
  CheckpointFiles files;
  for (const LayerModel& layer : model.layers) {
    files.shards[fmt::format("exl3-layer-{:05}.safetensors", layer.number)] =
        Exl3V1Layer(model, layer, options);
  }
  files.json[kManifestName] = Exl3V1Manifest(model, options);
  if (options.config) {
    Json config = BaseConfig(model, "KimiK3ForCausalLM", "num_experts");
    config["quantization_config"] = {{"quant_method", "exl3"},
                                     {"dense_format", "bf16"},
                                     {"exl3", {{"manifest", kManifestName}}},
                                     {"ignored_layers", Json::array()}};
    files.json["config.json"] = config;
  }
  return files;
}

void WriteFiles(const FileMap& files, const std::filesystem::path& directory) {
  for (const auto& [name, bytes] : files) {
    std::ofstream out(directory / name, std::ios::binary);
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (!out.flush()) throw std::runtime_error("cannot write " + (directory / name).string());
  }
}

namespace {

Result<std::vector<uint16_t>> ReadVector(const Checkpoint& checkpoint, const VectorSource& source,
                                         uint64_t channels) {
  if (source.kind == VectorSource::Kind::kAbsent) return std::vector<uint16_t>();
  std::vector<uint16_t> vector(channels);
  if (source.kind == VectorSource::Kind::kFp16) {
    Result<void> read = checkpoint.ReadRegions(source.regions, std::as_writable_bytes(std::span(vector)));
    if (!read) return tl::unexpected(read.error());
    return vector;
  }
  std::vector<uint8_t> bits(channels / 8);
  Result<void> read = checkpoint.ReadRegions(source.regions, std::as_writable_bytes(std::span(bits)));
  if (!read) return tl::unexpected(read.error());
  for (uint64_t c = 0; c < channels; ++c) {
    vector[c] = (bits[c / 8] >> (c % 8)) & 1 ? 0xBC00 : 0x3C00;
  }
  return vector;
}

}  // namespace

Result<MatrixModel> ReadSource(const Checkpoint& checkpoint, const MatrixSource& source) {
  MatrixModel matrix;
  matrix.bits = source.info.bits;
  matrix.codebook = source.info.codebook;
  matrix.in_channels = source.info.in_channels;
  matrix.out_channels = source.info.out_channels;
  // 0xA5A5 where no region writes.
  matrix.codes.assign(source.info.code_bytes() / 2, 0xA5A5);
  Result<void> read = checkpoint.ReadRegions(source.codes, std::as_writable_bytes(std::span(matrix.codes)));
  if (!read) return tl::unexpected(read.error());
  const std::pair<const VectorSource*, std::vector<uint16_t>*> vectors[] = {
      {&source.suh, &matrix.suh}, {&source.svh, &matrix.svh}, {&source.bias, &matrix.bias}};
  for (const auto& [from, to] : vectors) {
    Result<std::vector<uint16_t>> vector =
        ReadVector(checkpoint, *from, to == &matrix.suh ? matrix.in_channels : matrix.out_channels);
    if (!vector) return tl::unexpected(vector.error());
    *to = std::move(*vector);
  }
  return matrix;
}

}  // namespace espalier::testing
