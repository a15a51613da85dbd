// SPDX-License-Identifier: Apache-2.0
//
// espalier inspect: what is in a checkpoint, from its headers alone.
#include <espalier/checkpoint.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "command.h"

namespace espalier::cli {
namespace {

constexpr int kBarCharacters = 16;
constexpr size_t kMaxLayerLines = 24;  // 92 layers with rates of their own still fit one screen
constexpr size_t kMaxFileLines = 6;

struct InspectOptions {
  std::string checkpoint;
  std::string layer;
  bool tensors = false;
};

// Matrices per rate; [0] is unused.
using BitCounts = std::array<uint64_t, kMaxBits + 1>;

struct LayerSummary {
  const MoeLayer* layer = nullptr;
  std::array<BitCounts, kNumProjections> bits{};
  std::map<Codebook, uint64_t> codebooks;
  uint64_t code_bytes = 0;
  uint64_t vector_bytes = 0;
  uint64_t weights = 0;

  double BitsPerWeight() const {
    return weights == 0 ? 0 : 8 * static_cast<double>(code_bytes) / static_cast<double>(weights);
  }
  bool LooksLike(const LayerSummary& other) const {
    return bits == other.bits && code_bytes == other.code_bytes && vector_bytes == other.vector_bytes &&
           weights == other.weights && layer->prefix == other.layer->prefix;
  }
};

struct DenseSummary {
  uint64_t matrices = 0;
  uint64_t code_bytes = 0;
  BitCounts bits{};
  std::map<Codebook, uint64_t> codebooks;
};

struct DtypeSummary {
  uint64_t tensors = 0;
  uint64_t bytes = 0;
};

struct Summary {
  std::vector<LayerSummary> layers;
  std::map<Codebook, uint64_t> codebooks;
  uint64_t code_bytes = 0;
  uint64_t vector_bytes = 0;
  uint64_t weights = 0;
  DenseSummary dense;
  std::map<Dtype, DtypeSummary> dtypes;
};

// Bytes that a vector takes in the file.
uint64_t StoredBytes(const VectorSource& vector) {
  uint64_t bytes = 0;
  for (const CopyRegion& region : vector.regions) bytes += region.rows * region.row_bytes;
  return bytes;
}

// Adds up the vectors of a layer, shared ones once.
class VectorBytes {
 public:
  void Add(const VectorSource& vector) {
    if (vector.kind == VectorSource::Kind::kAbsent || vector.regions.empty()) return;
    const uint64_t bytes = StoredBytes(vector);
    const auto place = std::tuple(vector.share_key, vector.regions.front().source_offset, bytes);
    if (vector.share_key != 0 && !seen_.insert(place).second) return;
    total_ += bytes;
  }
  uint64_t total() const { return total_; }

 private:
  std::set<std::tuple<uint64_t, uint64_t, uint64_t>> seen_;
  uint64_t total_ = 0;
};

Result<LayerSummary> SummarizeLayer(const Checkpoint& checkpoint, size_t index) {
  LayerSummary summary;
  summary.layer = &checkpoint.layers()[index];
  VectorBytes vectors;
  for (uint32_t expert = 0; expert < summary.layer->experts; ++expert) {
    for (int p = summary.layer->has_gate ? 0 : 1; p < kNumProjections; ++p) {
      const auto projection = static_cast<Projection>(p);
      for (uint32_t slice = 0; slice < summary.layer->slices; ++slice) {
        const MatrixInfo matrix = checkpoint.Matrix(index, expert, projection, slice);
        const uint64_t width = projection == Projection::kDown ? matrix.in_channels : matrix.out_channels;
        const Result<MatrixSource> source = checkpoint.Source(
            index, expert, projection, {.slice = slice, .first_channel = 0, .channels = width});
        if (!source) return tl::unexpected(source.error());
        ++summary.bits[p][matrix.bits];
        ++summary.codebooks[matrix.codebook];
        summary.code_bytes += matrix.code_bytes();
        summary.weights += matrix.in_channels * matrix.out_channels;
        vectors.Add(source->suh);
        vectors.Add(source->svh);
        vectors.Add(source->bias);
      }
    }
  }
  summary.vector_bytes = vectors.total();
  return summary;
}

Result<Summary> Summarize(const Checkpoint& checkpoint, std::optional<size_t> only_layer) {
  Summary summary;
  for (size_t i = 0; i < checkpoint.layers().size(); ++i) {
    if (only_layer && *only_layer != i) continue;
    Result<LayerSummary> layer = SummarizeLayer(checkpoint, i);
    if (!layer) return tl::unexpected(layer.error());
    for (const auto& [codebook, count] : layer->codebooks) summary.codebooks[codebook] += count;
    summary.code_bytes += layer->code_bytes;
    summary.vector_bytes += layer->vector_bytes;
    summary.weights += layer->weights;
    summary.layers.push_back(*std::move(layer));
  }
  for (const LinearInfo& linear : checkpoint.linears()) {
    ++summary.dense.matrices;
    ++summary.dense.bits[linear.matrix.bits];
    ++summary.dense.codebooks[linear.matrix.codebook];
    summary.dense.code_bytes += linear.matrix.code_bytes();
  }
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    DtypeSummary& dtype = summary.dtypes[tensor.dtype];
    ++dtype.tensors;
    dtype.bytes += tensor.size_bytes;
  }
  return summary;
}

double BitsPerWeight(const Summary& summary) {
  return summary.weights == 0
             ? 0
             : 8 * static_cast<double>(summary.code_bytes) / static_cast<double>(summary.weights);
}

// A limit on silu and gelu is a number of its own: what --activation takes stays one word.
std::string ActivationName(const Activation& activation) {
  Activation named = activation;
  if (named.kind == ActivationKind::kSilu || named.kind == ActivationKind::kGelu) named.limit = 0;
  return ActivationText(named);
}

Json BitsJson(const BitCounts& counts) {
  Json json = Json::object();
  for (int bits = kMinBits; bits <= kMaxBits; ++bits) {
    if (counts[bits] != 0) json[std::to_string(bits)] = counts[bits];
  }
  return json;
}

Json CodebooksJson(const std::map<Codebook, uint64_t>& counts) {
  Json json = Json::object();
  for (const auto& [codebook, count] : counts) json[std::string(CodebookName(codebook))] = count;
  return json;
}

Json GeometryJson(const ModelConfig& config, const MoeLayer* layer) {
  const std::optional<Activation>& activation = config.activation;
  return {{"experts", layer != nullptr ? Json(layer->experts) : Json()},
          {"hidden_channels", layer != nullptr ? Json(layer->hidden_channels) : Json()},
          {"intermediate_channels", layer != nullptr ? Json(layer->intermediate_channels) : Json()},
          {"config_hidden", NumberOrNull(config.hidden_channels)},
          {"config_intermediate", NumberOrNull(config.intermediate_channels)},
          {"top_k", NumberOrNull(config.top_k)},
          {"slices", layer != nullptr ? Json(layer->slices) : Json()},
          {"activation", activation ? Json(ActivationName(*activation)) : Json()},
          {"activation_limit", activation && activation->limit > 0 ? Json(activation->limit) : Json()}};
}

Json LayerJson(const LayerSummary& summary) {
  Json bits = Json::object();
  for (int p = 0; p < kNumProjections; ++p) {
    bits[std::string(ProjectionName(static_cast<Projection>(p)))] = BitsJson(summary.bits[p]);
  }
  return {{"layer", LayerId(*summary.layer)},
          {"label", summary.layer->label},
          {"bits", bits},
          {"codebooks", CodebooksJson(summary.codebooks)},
          {"code_bytes", summary.code_bytes},
          {"vector_bytes", summary.vector_bytes},
          {"bits_per_weight", summary.BitsPerWeight()}};
}

Json TensorsJson(const Checkpoint& checkpoint) {
  Json tensors = Json::array();
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    tensors.push_back({{"name", tensor.name},
                       {"dtype", DtypeName(tensor.dtype)},
                       {"shape", tensor.shape},
                       {"file", checkpoint.files()[tensor.file].name},
                       {"offset_bytes", tensor.offset_bytes},
                       {"size_bytes", tensor.size_bytes}});
  }
  return tensors;
}

Json ToJson(const Checkpoint& checkpoint, const Summary& summary, const std::vector<int>& legal_tp,
            bool with_tensors) {
  const ModelConfig& config = checkpoint.config();
  Json layers = Json::array();
  for (const LayerSummary& layer : summary.layers) layers.push_back(LayerJson(layer));
  Json files = Json::array();
  for (const FileInfo& file : checkpoint.files()) {
    files.push_back({{"name", file.name}, {"bytes", file.size_bytes}, {"tensors", file.num_tensors}});
  }
  Json problems = Json::array();
  for (const Problem& problem : checkpoint.problems()) problems.push_back(ProblemJson(problem));
  Json dtypes = Json::object();
  for (const auto& [dtype, total] : summary.dtypes) {
    dtypes[std::string(DtypeName(dtype))] = {{"tensors", total.tensors}, {"bytes", total.bytes}};
  }
  Json json = {{"schema", "espalier.inspect/1"},
               {"layout", checkpoint.layout_name()},
               {"architecture", TextOrNull(config.architecture)},
               {"geometry", GeometryJson(config, summary.layers.empty() ? nullptr : summary.layers[0].layer)},
               {"codebooks", CodebooksJson(summary.codebooks)},
               {"code_bytes", summary.code_bytes},
               {"vector_bytes", summary.vector_bytes},
               {"bits_per_weight", summary.weights == 0 ? Json() : Json(BitsPerWeight(summary))},
               {"layers", layers},
               {"dense",
                {{"matrices", summary.dense.matrices},
                 {"code_bytes", summary.dense.code_bytes},
                 {"bits", BitsJson(summary.dense.bits)},
                 {"codebooks", CodebooksJson(summary.dense.codebooks)}}},
               {"dtypes", dtypes},
               {"files", files},
               {"legal_tp", legal_tp},
               {"problems", problems}};
  if (with_tensors) json["tensors"] = TensorsJson(checkpoint);
  return json;
}

// One digit per share of the matrices, the digit being K: "3333333333334444" is a quarter of K4.
std::string RateBar(const BitCounts& counts) {
  uint64_t total = 0;
  for (const uint64_t count : counts) total += count;
  if (total == 0) return "-";
  std::string bar;
  uint64_t before = 0;
  for (int bits = kMinBits; bits <= kMaxBits; ++bits) {
    if (counts[bits] == 0) continue;
    const uint64_t begin = before * kBarCharacters / total;
    before += counts[bits];
    // The rarest rate still shows.
    const uint64_t end = std::max(before * kBarCharacters / total, begin + 1);
    bar.append(end - begin, static_cast<char>('0' + bits));
  }
  return bar;
}

std::string CountsText(const BitCounts& counts) {
  std::string text;
  for (int bits = kMinBits; bits <= kMaxBits; ++bits) {
    if (counts[bits] != 0) text += fmt::format("{}K{} x {}", text.empty() ? "" : ", ", bits, counts[bits]);
  }
  return text;
}

std::string CodebooksText(const std::map<Codebook, uint64_t>& counts) {
  std::string text;
  for (const auto& [codebook, count] : counts) {
    text += fmt::format("{}{} ({} matrices)", text.empty() ? "" : ", ", CodebookName(codebook), count);
  }
  return text.empty() ? "none" : text;
}

void PrintModel(const Checkpoint& checkpoint, const Summary& summary, const std::vector<int>& legal_tp,
                Output& output) {
  const ModelConfig& config = checkpoint.config();
  output.Print("checkpoint     {}\n", checkpoint.path().string());
  output.Print("layout         {}\n", checkpoint.layout_name());
  output.Print("model          {}\n", config.architecture.empty() ? "not stated" : config.architecture);
  if (!summary.layers.empty()) {
    const MoeLayer& layer = *summary.layers[0].layer;
    output.Print("experts        {} in {} layers, top-{}, hidden {}, intermediate {}{}\n", layer.experts,
                 summary.layers.size(), config.top_k == 0 ? "?" : std::to_string(config.top_k),
                 layer.hidden_channels, layer.intermediate_channels,
                 layer.slices > 1 ? fmt::format(" in {} slices", layer.slices) : "");
    if (layer.valid_hidden_channels != layer.hidden_channels ||
        layer.valid_intermediate_channels != layer.intermediate_channels) {
      output.Print("padded from    hidden {}, intermediate {}\n", layer.valid_hidden_channels,
                   layer.valid_intermediate_channels);
    }
  }
  output.Print("activation     {}\n", config.activation ? ActivationText(*config.activation) : "not stated");
  output.Print("codebooks      {}\n", CodebooksText(summary.codebooks));
  output.Print("routed bytes   {} codes, {} vectors, {:.4f} bits per weight\n", BytesText(summary.code_bytes),
               BytesText(summary.vector_bytes), BitsPerWeight(summary));
  output.Print("dense EXL3     {}\n",
               summary.dense.matrices == 0
                   ? "none"
                   : fmt::format("{} matrices, {}, {}", summary.dense.matrices,
                                 BytesText(summary.dense.code_bytes), CountsText(summary.dense.bits)));
  std::string dtypes;
  for (const auto& [dtype, total] : summary.dtypes) {
    dtypes += fmt::format("{}{} {}", dtypes.empty() ? "" : ", ", DtypeName(dtype), BytesText(total.bytes));
  }
  output.Print("tensors        {}: {}\n", checkpoint.tensors().size(), dtypes);
  output.Print("legal tp       {}\n",
               legal_tp.empty() ? "none" : fmt::format("{}", fmt::join(legal_tp, ", ")));
}

void PrintHistogram(const Summary& summary, Output& output) {
  std::array<BitCounts, kNumProjections> totals{};
  uint64_t largest = 1;
  for (int p = 0; p < kNumProjections; ++p) {
    for (int bits = kMinBits; bits <= kMaxBits; ++bits) {
      for (const LayerSummary& layer : summary.layers) totals[p][bits] += layer.bits[p][bits];
      largest = std::max(largest, totals[p][bits]);
    }
  }
  output.Print("\nmatrices    gate                      up                        down\n");
  for (int bits = kMinBits; bits <= kMaxBits; ++bits) {
    std::string line;
    bool any = false;
    for (const BitCounts& counts : totals) {
      any = any || counts[bits] != 0;
      const uint64_t cells = (counts[bits] * kBarCharacters + largest - 1) / largest;
      line += fmt::format("{:<26}", fmt::format("{} {}", std::string(cells, '#'), counts[bits]));
    }
    line.erase(line.find_last_not_of(' ') + 1);
    if (any) output.Print("  K{}        {}\n", bits, line);
  }
}

// Where there are many layers, neighbours that look alike share a line.
void PrintLayers(const Summary& summary, Output& output) {
  output.Print("\n{:<10}  {:<16}  {:<16}  {:<16}  {:>11}  {:>11}  {:>11}\n", "layer", "gate", "up", "down",
               "codes", "vectors", "bits/weight");
  const bool many = summary.layers.size() > kMaxLayerLines;
  size_t lines = 0;
  for (size_t begin = 0; begin < summary.layers.size();) {
    size_t end = begin + 1;
    while (many && end < summary.layers.size() && summary.layers[end].LooksLike(summary.layers[begin])) ++end;
    if (lines == kMaxLayerLines) {
      output.Print("and {} more layers (--layer L or --json shows them)\n", summary.layers.size() - begin);
      return;
    }
    const LayerSummary& layer = summary.layers[begin];
    const std::string label =
        end - begin == 1 ? layer.layer->label
                         : fmt::format("{}-{}", layer.layer->label, summary.layers[end - 1].layer->number);
    output.Print("{:<10}  {:<16}  {:<16}  {:<16}  {:>11}  {:>11}  {:>11.4f}\n", label, RateBar(layer.bits[0]),
                 RateBar(layer.bits[1]), RateBar(layer.bits[2]), BytesText(layer.code_bytes),
                 BytesText(layer.vector_bytes), layer.BitsPerWeight());
    ++lines;
    begin = end;
  }
}

void PrintFiles(const Checkpoint& checkpoint, Output& output) {
  const std::span<const FileInfo> files = checkpoint.files();
  uint64_t bytes = 0;
  for (const FileInfo& file : files) bytes += file.size_bytes;
  output.Print("\nfiles          {}, {}\n", files.size(), BytesText(bytes));
  for (size_t i = 0; i < std::min(files.size(), kMaxFileLines); ++i) {
    output.Print("  {}  {}, {} tensors\n", files[i].name, BytesText(files[i].size_bytes),
                 files[i].num_tensors);
  }
  if (files.size() > kMaxFileLines)
    output.Print("  and {} more (--json lists all)\n", files.size() - kMaxFileLines);
}

void PrintTensors(const Checkpoint& checkpoint, Output& output) {
  output.Print("\n{:<11}  {:<20}  {:>11}  name\n", "dtype", "shape", "bytes");
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    output.Print("{:<11}  {:<20}  {:>11}  {}\n", DtypeName(tensor.dtype),
                 fmt::format("[{}]", fmt::join(tensor.shape, ", ")), tensor.size_bytes, tensor.name);
  }
}

Result<int> Inspect(const InspectOptions& options, Output& output) {
  const Result<Checkpoint> checkpoint = Checkpoint::Open(options.checkpoint);
  if (!checkpoint) return tl::unexpected(checkpoint.error());
  std::optional<size_t> only_layer;
  if (!options.layer.empty()) {
    const Result<size_t> layer = checkpoint->FindLayer(options.layer);
    if (!layer) return tl::unexpected(layer.error());
    only_layer = *layer;
  }
  const Result<Summary> summary = Summarize(*checkpoint, only_layer);
  if (!summary) return tl::unexpected(summary.error());
  const std::vector<int> legal_tp = checkpoint->LegalTpSizes();
  if (output.json()) {
    output.Document(ToJson(*checkpoint, *summary, legal_tp, options.tensors));
    return kExitOk;
  }
  PrintModel(*checkpoint, *summary, legal_tp, output);
  if (!summary->layers.empty()) {
    PrintHistogram(*summary, output);
    PrintLayers(*summary, output);
  }
  PrintFiles(*checkpoint, output);
  if (options.tensors) PrintTensors(*checkpoint, output);
  PrintProblems(output, checkpoint->problems());
  return kExitOk;
}

}  // namespace

void AddInspect(CLI::App& app, Invocation& invocation) {
  auto options = std::make_shared<InspectOptions>();
  CLI::App* command = AddCommand(
      app, invocation, "inspect", "Show what is in a checkpoint; reads headers only",
      "A bar such as 3333333333334444 shows the share of each K among the matrices of a projection.\n"
      "\n"
      "Example:\n"
      "  espalier inspect /models/glm\n"
      "  espalier inspect /models/glm --layer 3 --json\n");
  command->add_option("CKPT", options->checkpoint, "Checkpoint: a directory or one .safetensors file")
      ->required();
  command->add_option("--layer", options->layer, "This layer only");
  command->add_flag("--tensors", options->tensors, "List every tensor");
  command->callback([options, &invocation] {
    invocation.run = [options](Output& output) { return Inspect(*options, output); };
  });
}

}  // namespace espalier::cli
