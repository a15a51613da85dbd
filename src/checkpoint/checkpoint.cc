// SPDX-License-Identifier: Apache-2.0
#include <espalier/checkpoint.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "base/file.h"
#include "base/half.h"
#include "base/sha256.h"
#include "base/text.h"
#include "checkpoint/config.h"
#include "checkpoint/exl3_v1_layout.h"
#include "checkpoint/layout.h"
#include "checkpoint/pack_index.h"
#include "checkpoint/pack_layout.h"
#include "checkpoint/shards.h"

namespace espalier {
namespace {

constexpr std::string_view kOutsideLayers = "-";  // label of problems that belong to no layer
constexpr size_t kHashBytes = size_t{1} << 20;

// Layouts known by name only: a folder with one of these files is refused before anything is guessed.
constexpr std::string_view kUnsupportedManifests[] = {"btx-manifest.json", "qsrt-manifest.json",
                                                      "trellis-manifest.json", "b12x-trellis.safetensors"};

}  // namespace

struct Checkpoint::State {
  std::filesystem::path path;
  ShardSet shards;
  ParsedConfig config;
  std::vector<MoeLayer> layers;
  std::vector<LinearInfo> linears;
  std::vector<PackMatrix> linear_matrices;  // beside `linears`
  std::vector<Problem> problems;
  std::unique_ptr<Layout> layout;
  std::optional<SlotGrid> slot_grid;
  bool is_container = false;
};

namespace {

// Fills a State step by step; each step may refuse.
class Opener {
 public:
  Opener(ShardSet& shards, ParsedConfig& config, std::vector<MoeLayer>& layers,
         std::vector<LinearInfo>& linears, std::vector<PackMatrix>& linear_matrices,
         std::vector<Problem>& problems, std::unique_ptr<Layout>& layout, bool& is_container)
      : shards_(shards),
        config_(config),
        layers_(layers),
        linears_(linears),
        linear_matrices_(linear_matrices),
        problems_(problems),
        layout_(layout),
        is_container_(is_container) {}

  Result<void> Open() {
    auto config = ReadConfig(shards_);
    if (!config) return tl::unexpected(config.error());
    config_ = std::move(*config);
    if (auto r = OpenFiles(); !r) return r;
    if (auto r = CheckMetadata(); !r) return r;
    const auto index = BuildPackIndex(shards_);
    if (!index) return tl::unexpected(index.error());
    if (auto r = OpenLayout(*index); !r) return r;
    if (!layers_.empty() && config_.activation_error) return tl::unexpected(*config_.activation_error);
    if (auto r = BuildLinears(*index); !r) return r;
    for (MoeLayer& layer : layers_) {
      if (auto r = ApplyConfigSizes(layer); !r) return r;
    }
    ReportTensors(*index);
    CompareConfig();
    return {};
  }

 private:
  Result<void> OpenFiles() {
    std::vector<std::string> skip;
    if (!shards_.single_file) {
      const std::string name = config_.manifest.empty() ? std::string(kExl3V1ManifestName) : config_.manifest;
      auto manifest_file =
          config_.manifest.empty() ? ReadOptionalJson(shards_, name) : ReadRequiredJson(shards_, name);
      if (!manifest_file) return tl::unexpected(manifest_file.error());
      if (*manifest_file != nullptr) {
        auto manifest = ParseExl3V1Manifest(**manifest_file);
        if (!manifest) return tl::unexpected(manifest.error());
        if (auto r = OpenExl3V1Files(shards_, *manifest); !r) return r;
        for (const FileInfo& file : shards_.files) skip.push_back(file.name);
        manifest_ = std::move(*manifest);
        is_container_ = true;
      } else if (auto r = RefuseUnsupportedManifests(); !r) {
        return r;
      }
    }
    return OpenShards(shards_, skip);
  }

  Result<void> RefuseUnsupportedManifests() const {
    for (const std::string_view name : kUnsupportedManifests) {
      if (shards_.file_system->Kind(shards_.directory / name) == FileSystem::EntryKind::kAbsent) continue;
      return Error(
          StatusCode::kUnsupported,
          fmt::format(
              "{}: this layout is not read yet; legal: stock, rank-sliced, r7 and exl3-v1 checkpoints",
              (shards_.directory / name).string()));
    }
    return {};
  }

  Result<void> CheckMetadata() const {
    for (size_t file = 0; file < shards_.files.size(); ++file) {
      for (const auto& [key, value] : shards_.metadata[file]) {
        if (key == "tile_order") {
          return Error(StatusCode::kUnsupported,
                       fmt::format("{}: __metadata__.tile_order: found '{}', legal: none "
                                   "(tensor-core order)",
                                   shards_.files[file].name, value));
        }
        if (key == "schema" && value == "exl3-v1" && !is_container_) {
          return Error(StatusCode::kFormat,
                       fmt::format("{}: a layer file of an exl3-v1 container without its {}; open the "
                                   "folder that holds both",
                                   shards_.files[file].name, kExl3V1ManifestName));
        }
      }
    }
    return {};
  }

  Result<void> OpenLayout(const PackIndex& index) {
    LayoutContext context{.shards = shards_, .config = config_, .layers = layers_, .problems = problems_};
    if (is_container_) {
      layout_ = MakeExl3V1Layout(context, std::move(manifest_));
      return {};
    }
    bool sliced = config_.rank_sliced.has_value();
    bool r7 = config_.r7.has_value();
    for (const ExpertGroup& group : index.groups) {
      sliced = sliced || group.modules[0].name.slice.has_value();
      for (const auto& [key, tensor] : group.shared) r7 = r7 || key.starts_with("r7_shared.");
    }
    const LayoutOpener open = sliced ? OpenRankSlicedLayout : r7 ? OpenR7Layout : OpenStockLayout;
    auto layout = open(context, index);
    if (!layout) return tl::unexpected(layout.error());
    layout_ = std::move(*layout);
    return {};
  }

  Result<void> BuildLinears(const PackIndex& index) {
    for (const PackIndex::Dense& dense : index.dense) {
      const auto matrix =
          BuildMatrix(shards_, dense.module, dense.parts, kNoTensor, kNoTensor, Codebook::k3Inst);
      if (!matrix) return tl::unexpected(matrix.error());
      const MatrixInfo& info = matrix->info;
      if (info.in_channels % kHadamardChannels != 0 || info.out_channels % kHadamardChannels != 0) {
        problems_.push_back(
            {.severity = Problem::Severity::kWarning,
             .file = shards_.FileName(info.trellis),
             .tensor = std::string(dense.module),
             .message = fmt::format("found a {} x {} matrix, legal: multiples of {}; it is left as stored "
                                    "and can only be decoded with --inner",
                                    info.in_channels, info.out_channels, kHadamardChannels),
             .layer = LabelOf(dense.module, kOutsideLayers)});
      }
      linears_.push_back({.name = std::string(dense.module), .matrix = info});
      linear_matrices_.push_back(*matrix);
    }
    return {};
  }

  Result<void> CheckConfigSize(const MoeLayer& layer, std::string_view what, uint64_t config,
                               uint64_t stored) const {
    if (config <= stored) return {};
    return Error(StatusCode::kFormat,
                 fmt::format("{}: config.json says {} {}, layer {} stores {}; legal: at most what is stored",
                             shards_.directory.string(), config, what, layer.label, stored));
  }

  Result<void> ApplyConfigSizes(MoeLayer& layer) {
    const ModelConfig& model = config_.model;
    layer.valid_hidden_channels = model.hidden_channels != 0 ? model.hidden_channels : layer.hidden_channels;
    layer.valid_intermediate_channels =
        model.intermediate_channels != 0 ? model.intermediate_channels : layer.intermediate_channels;
    if (auto r = CheckConfigSize(layer, "hidden channels", model.hidden_channels, layer.hidden_channels); !r)
      return r;
    if (auto r = CheckConfigSize(layer, "intermediate channels", model.intermediate_channels,
                                 layer.intermediate_channels);
        !r) {
      return r;
    }
    if (auto r = CheckConfigSize(layer, "experts", model.experts, layer.experts); !r) return r;
    if (model.experts != 0 && model.experts < layer.experts) {
      Warn(layer, fmt::format("the config says {} experts, layer {} stores {}; the tensors are used",
                              model.experts, layer.label, layer.experts));
    }
    if (layer.has_gate && model.activation && !ActivationHasGate(model.activation->kind)) {
      Warn(layer,
           fmt::format("hidden_act {} uses no gate, layer {} stores gate matrices; they are left unread",
                       ActivationText(*model.activation), layer.label));
    }
    return {};
  }

  void Warn(const MoeLayer& layer, std::string message) {
    problems_.push_back({.severity = Problem::Severity::kWarning,
                         .file = "config.json",
                         .tensor = {},
                         .message = std::move(message),
                         .layer = layer.label});
  }

  // Label of the layer that a name belongs to, `otherwise` when it has no layer number. A prefix that
  // holds no routed experts shares the numbers of the main group.
  std::string LabelOf(std::string_view name, std::string_view otherwise) const {
    const auto parsed = ParseLayerName(name);
    if (!parsed) return std::string(otherwise);
    for (const MoeLayer& layer : layers_) {
      if (layer.prefix == parsed->prefix && layer.number == parsed->number) return layer.label;
    }
    const bool other_group = std::any_of(layers_.begin(), layers_.end(), [&](const MoeLayer& layer) {
      return layer.prefix == parsed->prefix && layer.label.size() > layer.prefix.size();
    });
    return other_group ? fmt::format("{}.{}", parsed->prefix, parsed->number)
                       : fmt::format("{}", parsed->number);
  }

  void ReportError(int32_t tensor, std::string message, std::string_view otherwise) {
    const TensorInfo& info = shards_.tensors[tensor];
    problems_.push_back({.severity = Problem::Severity::kError,
                         .file = shards_.FileName(tensor),
                         .tensor = info.name,
                         .message = std::move(message),
                         .layer = LabelOf(info.name, otherwise)});
  }

  void ReportTensors(const PackIndex& index) {
    for (const int32_t tensor : index.unclaimed) {
      ReportError(
          tensor,
          "a quantized tensor that belongs to no layer: its name or its companions are not understood", "");
    }
    for (const int32_t tensor : shards_.not_in_index) {
      ReportError(tensor, "the tensor is in the file, but the index does not name it", kOutsideLayers);
    }
    if (!is_container_) return;
    for (const ExpertGroup& group : index.groups) {
      for (const ExpertModule& module : group.modules) {
        ReportError(module.parts.Any(),
                    "a routed expert beside an exl3-v1 container, which holds all of them", "");
      }
    }
  }

  void CompareConfig() {
    std::vector<MatrixInfo> routed;
    for (size_t l = 0; l < layers_.size(); ++l) {
      const MoeLayer& layer = layers_[l];
      for (uint32_t expert = 0; expert < layer.experts; ++expert) {
        for (int p = layer.has_gate ? 0 : 1; p < kNumProjections; ++p) {
          for (uint32_t slice = 0; slice < layer.slices; ++slice) {
            routed.push_back(layout_->Matrix(l, expert, static_cast<Projection>(p), slice));
          }
        }
      }
    }
    CompareConfigWithTensors(config_, shards_, routed, linears_, problems_);
  }

  ShardSet& shards_;
  ParsedConfig& config_;
  std::vector<MoeLayer>& layers_;
  std::vector<LinearInfo>& linears_;
  std::vector<PackMatrix>& linear_matrices_;
  std::vector<Problem>& problems_;
  std::unique_ptr<Layout>& layout_;
  bool& is_container_;
  Exl3V1Manifest manifest_;
};

Result<void> ReadRegion(const File& file, const CopyRegion& region, std::span<std::byte> target,
                        std::span<std::byte> staging) {
  if (region.rows == 0 || region.row_bytes == 0) return {};
  if (region.rows == 1 ||
      (region.source_stride == region.row_bytes && region.target_stride == region.row_bytes)) {
    return file.ReadAt(region.source_offset,
                       target.subspan(region.target_offset, region.rows * region.row_bytes));
  }
  if (region.source_stride != region.row_bytes || region.row_bytes * 2 > staging.size()) {
    for (uint64_t row = 0; row < region.rows; ++row) {
      auto read =
          file.ReadAt(region.source_offset + row * region.source_stride,
                      target.subspan(region.target_offset + row * region.target_stride, region.row_bytes));
      if (!read) return read;
    }
    return {};
  }
  // One run in the file, scattered rows in the target: a few large reads instead of many small ones.
  const uint64_t rows_per_read = staging.size() / region.row_bytes;
  for (uint64_t row = 0; row < region.rows; row += rows_per_read) {
    const uint64_t rows = std::min(rows_per_read, region.rows - row);
    auto read =
        file.ReadAt(region.source_offset + row * region.row_bytes, {staging.data(), rows * region.row_bytes});
    if (!read) return read;
    for (uint64_t i = 0; i < rows; ++i) {
      std::memcpy(target.data() + region.target_offset + (row + i) * region.target_stride,
                  staging.data() + i * region.row_bytes, region.row_bytes);
    }
  }
  return {};
}

}  // namespace

Checkpoint::Checkpoint(std::unique_ptr<State> state) : state_(std::move(state)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

Result<Checkpoint> Checkpoint::Open(const std::filesystem::path& path, const OpenOptions& options) {
  FileSystem& file_system = options.file_system != nullptr ? *options.file_system : PosixFileSystem();
  auto shards = LocateCheckpoint(path, file_system);
  if (!shards) return tl::unexpected(shards.error());
  auto state = std::make_unique<State>();
  state->path = path;
  state->shards = std::move(*shards);
  Opener opener(state->shards, state->config, state->layers, state->linears, state->linear_matrices,
                state->problems, state->layout, state->is_container);
  // Names out of files stand in every message; nothing they hold may reach a terminal as it is.
  if (auto opened = opener.Open(); !opened) {
    return Error(opened.error().code(), Printable(opened.error().message()));
  }
  for (Problem& problem : state->problems) problem.message = Printable(problem.message);
  state->slot_grid = state->layout->slot_grid();
  return Checkpoint(std::move(state));
}

const std::filesystem::path& Checkpoint::path() const { return state_->path; }
std::string_view Checkpoint::layout_name() const { return state_->layout->name(); }
const ModelConfig& Checkpoint::config() const { return state_->config.model; }
std::span<const FileInfo> Checkpoint::files() const { return state_->shards.files; }
std::span<const TensorInfo> Checkpoint::tensors() const { return state_->shards.tensors; }
std::span<const MoeLayer> Checkpoint::layers() const { return state_->layers; }
std::span<const LinearInfo> Checkpoint::linears() const { return state_->linears; }
std::span<const Problem> Checkpoint::problems() const { return state_->problems; }
const std::optional<SlotGrid>& Checkpoint::slot_grid() const { return state_->slot_grid; }
std::vector<int> Checkpoint::LegalTpSizes() const { return state_->layout->LegalTpSizes(); }

const TensorInfo* Checkpoint::FindTensor(std::string_view name) const {
  const auto found = state_->shards.by_name.find(name);
  return found == state_->shards.by_name.end() ? nullptr : &state_->shards.tensors[found->second];
}

Result<void> Checkpoint::Read(const TensorInfo& tensor, std::span<std::byte> target) const {
  if (tensor.file >= state_->shards.handles.size() || target.size() != tensor.size_bytes) {
    return Error(StatusCode::kUsage, fmt::format("tensor '{}': the target has {} bytes, legal: {}",
                                                 tensor.name, target.size(), tensor.size_bytes));
  }
  return state_->shards.handles[tensor.file]->ReadAt(tensor.offset_bytes, target);
}

Result<std::vector<float>> Checkpoint::ReadFloats(std::string_view name) const {
  const TensorInfo* tensor = FindTensor(name);
  if (tensor == nullptr) {
    return Error(StatusCode::kUsage, fmt::format("{}: there is no tensor '{}'", state_->path.string(), name));
  }
  const bool is_float = tensor->dtype == Dtype::kF16 || tensor->dtype == Dtype::kBF16 ||
                        tensor->dtype == Dtype::kF32 || tensor->dtype == Dtype::kF64;
  if (!is_float) {
    return Error(StatusCode::kUnsupported,
                 fmt::format("tensor '{}' in {}: found {}, legal: F16, BF16, F32, F64", name,
                             state_->shards.files[tensor->file].name, DtypeName(tensor->dtype)));
  }
  std::vector<std::byte> bytes(tensor->size_bytes);
  if (auto read = Read(*tensor, bytes); !read) return tl::unexpected(read.error());
  const size_t element_bytes = static_cast<size_t>(DtypeBits(tensor->dtype)) / 8;
  std::vector<float> values(bytes.size() / element_bytes);
  for (size_t i = 0; i < values.size(); ++i) {
    const std::byte* element = bytes.data() + i * element_bytes;
    uint16_t half = 0;
    double wide = 0;
    if (element_bytes == 2) {
      std::memcpy(&half, element, 2);
      values[i] = tensor->dtype == Dtype::kF16 ? Fp16ToFloat(half) : Bf16ToFloat(half);
    } else if (tensor->dtype == Dtype::kF32) {
      std::memcpy(&values[i], element, 4);
    } else {
      std::memcpy(&wide, element, 8);
      values[i] = static_cast<float>(wide);
    }
  }
  return values;
}

Result<size_t> Checkpoint::FindLayer(std::string_view label) const {
  std::vector<std::string_view> labels;
  for (size_t i = 0; i < state_->layers.size(); ++i) {
    const MoeLayer& layer = state_->layers[i];
    if (layer.label == label || fmt::format("{}.{}", layer.prefix, layer.number) == label) return i;
    labels.push_back(layer.label);
  }
  return Error(StatusCode::kUsage,
               fmt::format("{}: layer '{}' has no routed experts, legal: {}", state_->path.string(), label,
                           labels.empty() ? "none" : fmt::format("{}", fmt::join(labels, ", "))));
}

Result<void> Checkpoint::CheckUsable(std::string_view layer_label) const {
  for (const Problem& problem : state_->problems) {
    if (problem.severity != Problem::Severity::kError) continue;
    if (!layer_label.empty() && !problem.layer.empty() && problem.layer != layer_label) continue;
    return Error(StatusCode::kFormat,
                 fmt::format("tensor '{}' in {}: {}", problem.tensor, problem.file, problem.message));
  }
  return {};
}

MatrixInfo Checkpoint::Matrix(size_t layer, uint32_t expert, Projection projection, uint32_t slice) const {
  return state_->layout->Matrix(layer, expert, projection, slice);
}

std::string Checkpoint::MatrixName(size_t layer, uint32_t expert, Projection projection,
                                   uint32_t slice) const {
  return state_->layout->MatrixName(layer, expert, projection, slice);
}

Result<MatrixSource> Checkpoint::Source(size_t layer, uint32_t expert, Projection projection,
                                        const SliceExtent& extent) const {
  const MoeLayer& info = state_->layers[layer];
  const uint64_t width = info.intermediate_channels / info.slices;
  const bool inside = extent.slice < info.slices && extent.channels > 0 && extent.first_channel < width &&
                      extent.channels <= width - extent.first_channel;
  // A whole slice may be off the grid: such a matrix can be described and copied, not cut or executed.
  const bool whole = extent.channels == width;
  const bool on_grid =
      extent.first_channel % kHadamardChannels == 0 && extent.channels % kHadamardChannels == 0;
  if (!inside || !(whole || on_grid)) {
    return Error(
        StatusCode::kGeometry,
        fmt::format("layer {}: found channels [{}, +{}) of slice {}, legal: multiples of {} within {} "
                    "channels of {} slices",
                    info.label, extent.first_channel, extent.channels, extent.slice, kHadamardChannels, width,
                    info.slices));
  }
  return state_->layout->Source(layer, expert, projection, extent);
}

Result<MatrixSource> Checkpoint::LinearSource(size_t linear) const {
  const PackMatrix& matrix = state_->linear_matrices[linear];
  return PackSource(state_->shards, matrix, state_->linears[linear].name, false, 0, matrix.info.out_channels);
}

Result<Checkpoint::MatrixRef> Checkpoint::FindMatrix(std::string_view name) const {
  const auto linear =
      std::lower_bound(state_->linears.begin(), state_->linears.end(), name,
                       [](const LinearInfo& info, std::string_view key) { return info.name < key; });
  if (linear != state_->linears.end() && linear->name == name) {
    MatrixRef ref;
    ref.linear = static_cast<size_t>(linear - state_->linears.begin());
    return ref;
  }
  const auto parsed = ParseExpertName(name);
  const auto resolve = [&](size_t layer) -> std::optional<MatrixRef> {
    const MoeLayer& info = state_->layers[layer];
    const bool has_projection = parsed->projection != Projection::kGate || info.has_gate;
    if (parsed->expert >= info.experts || !has_projection) return std::nullopt;
    if (parsed->slice && (*parsed->slice >= info.slices || info.slices == 1)) return std::nullopt;
    MatrixRef ref;
    ref.routed = true;
    ref.layer = layer;
    ref.expert = parsed->expert;
    ref.projection = parsed->projection;
    ref.slice = parsed->slice;
    if (info.slices == 1) ref.slice = 0;
    return ref;
  };
  if (parsed) {
    // The file's own name first: a canonical name may mean another group.
    for (size_t i = 0; i < state_->layers.size(); ++i) {
      const MoeLayer& info = state_->layers[i];
      if (info.prefix != parsed->prefix || info.number != parsed->layer) continue;
      const auto ref = resolve(i);
      if (!ref) continue;
      const std::string own = MatrixName(i, ref->expert, ref->projection, ref->slice.value_or(0));
      if (own == name || (!ref->slice && own.starts_with(name) && own.substr(name.size()) == ".rank0"))
        return *ref;
    }
    const bool canonical =
        parsed->prefix == "model.layers" && parsed->block == "mlp" &&
        name.find(fmt::format(".{}_proj", ProjectionName(parsed->projection))) != std::string_view::npos;
    for (size_t i = 0; canonical && i < state_->layers.size(); ++i) {
      if (state_->layers[i].label != fmt::format("{}", parsed->layer)) continue;
      if (const auto ref = resolve(i)) return *ref;
    }
  }
  return Error(
      StatusCode::kUsage,
      fmt::format(
          "{}: there is no EXL3 matrix '{}'; legal: the names that `inspect --tensors` shows, without "
          "'.trellis'",
          state_->path.string(), name));
}

Result<void> Checkpoint::CheckMarker(const MatrixInfo& matrix) const {
  if (matrix.marker == kNoTensor) return {};
  uint32_t value = 0;
  const TensorInfo& tensor = state_->shards.tensors[matrix.marker];
  if (auto read = Read(tensor, std::as_writable_bytes(std::span(&value, 1))); !read) return read;
  for (const CodebookInfo& info : AllCodebooks()) {
    if (info.codebook != matrix.codebook || info.multiplier == value) continue;
    return Error(StatusCode::kFormat,
                 fmt::format("{}: found 0x{:08X}, legal: 0x{:08X}", state_->shards.Describe(matrix.marker),
                             value, info.multiplier));
  }
  return {};
}

Result<void> Checkpoint::CheckPadding(size_t layer, const SliceExtent& extent) const {
  return state_->layout->CheckPadding(layer, extent.first_channel, extent.channels);
}

Result<void> Checkpoint::ReadRegions(std::span<const CopyRegion> regions, std::span<std::byte> target,
                                     std::span<std::byte> staging) const {
  for (const CopyRegion& region : regions) {
    if (region.rows == 0) continue;
    const uint64_t end = region.target_offset + (region.rows - 1) * region.target_stride + region.row_bytes;
    if (region.file >= state_->shards.handles.size() || end > target.size()) {
      return Error(StatusCode::kUsage, fmt::format("{}: a region ends at byte {} of a target of {} bytes",
                                                   state_->path.string(), end, target.size()));
    }
    if (auto read = ReadRegion(*state_->shards.handles[region.file], region, target, staging); !read)
      return read;
  }
  return {};
}

Result<void> Checkpoint::CheckUnchanged(uint32_t file) const {
  return state_->shards.handles[file]->CheckUnchanged();
}

Result<std::string> Checkpoint::FileSha256(size_t file, void (*progress)(void* context, uint64_t bytes),
                                           void* context) const {
  const File& handle = *state_->shards.handles[file];
  Sha256 hash;
  std::vector<std::byte> bytes(kHashBytes);
  for (uint64_t at = 0; at < handle.size_bytes();) {
    const size_t count = static_cast<size_t>(std::min<uint64_t>(bytes.size(), handle.size_bytes() - at));
    if (auto read = handle.ReadAt(at, {bytes.data(), count}); !read) return tl::unexpected(read.error());
    hash.Update({bytes.data(), count});
    at += count;
    if (progress != nullptr) progress(context, count);
  }
  return hash.FinishHex();
}

}  // namespace espalier
