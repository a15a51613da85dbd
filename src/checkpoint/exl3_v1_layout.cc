// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/exl3_v1_layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "base/checked.h"

namespace espalier {
namespace {

constexpr uint64_t kSlotTiles = kSlotChannels / kTileChannels;  // the LOW and the HIGH plane
constexpr uint64_t kVectorBytes = kSlotChannels * 2;            // fp16 values of one slot
constexpr size_t kPaddingReadBytes = size_t{1} << 20;

uint64_t PlaneBytes(const Exl3V1Manifest& m) { return m.hidden_channels / kTileChannels * TileBytes(m.bits); }
uint64_t SectionBytes(const Exl3V1Manifest& m) { return kSlotTiles * PlaneBytes(m); }
// Cannot overflow: experts <= 2^16, hidden <= 2^24, bits <= 8.
uint64_t PayloadBytes(const Exl3V1Manifest& m) { return m.experts * kNumProjections * SectionBytes(m); }

struct LayerTensors {
  int32_t codes = kNoTensor;
  int32_t rotations = kNoTensor;
  int32_t gate_suh = kNoTensor;
  int32_t up_suh = kNoTensor;
  int32_t down_svh = kNoTensor;
};

// The tensors of container file `file`.
LayerTensors FindLayerTensors(const ShardSet& shards, uint32_t file) {
  LayerTensors found;
  for (size_t i = 0; i < shards.tensors.size(); ++i) {
    const TensorInfo& tensor = shards.tensors[i];
    if (tensor.file != file) continue;
    const auto index = static_cast<int32_t>(i);
    if (tensor.name == "codes") found.codes = index;
    if (tensor.name == "rotations") found.rotations = index;
    if (tensor.name == "gate_suh") found.gate_suh = index;
    if (tensor.name == "up_suh") found.up_suh = index;
    if (tensor.name == "down_svh") found.down_svh = index;
  }
  return found;
}

Result<void> CheckMetadata(const ShardSet& shards, uint32_t file, const Exl3V1Manifest& m, uint64_t layer) {
  const std::pair<std::string_view, std::string> expected[] = {
      {"schema", "exl3-v1"},
      {"codebook", m.codebook},
      {"layer", fmt::format("{}", layer)},
      {"num_experts", fmt::format("{}", m.experts)},
      {"hidden_size", fmt::format("{}", m.hidden_channels)},
      {"intermediate_size", fmt::format("{}", m.intermediate_channels)},
      {"slot_channels", fmt::format("{}", kSlotChannels)}};
  for (const auto& [key, value] : expected) {
    const auto& metadata = shards.metadata[file];
    const auto found =
        std::find_if(metadata.begin(), metadata.end(), [&](const auto& pair) { return pair.first == key; });
    const std::string text = found == metadata.end() ? "nothing" : "'" + found->second + "'";
    if (found != metadata.end() && found->second == value) continue;
    return Error(StatusCode::kFormat, fmt::format("{}: __metadata__.{}: found {}, legal: '{}' as in {}",
                                                  shards.files[file].name, key, text, value, m.name));
  }
  return {};
}

Result<void> CheckTensorSet(const ShardSet& shards, uint32_t file, const Exl3V1Manifest& m) {
  constexpr std::string_view kNames[] = {"codes", "down_svh", "gate_suh", "rotations", "up_suh"};
  const std::string& name = shards.files[file].name;
  std::set<std::string_view> found;
  for (const TensorInfo& tensor : shards.tensors) {
    if (tensor.file == file) found.insert(tensor.name);
  }
  if (!std::equal(found.begin(), found.end(), std::begin(kNames), std::end(kNames))) {
    return Error(StatusCode::kFormat, fmt::format("{}: found tensors {}, legal: exactly {}", name,
                                                  fmt::join(found, ", "), fmt::join(kNames, ", ")));
  }
  const LayerTensors tensors = FindLayerTensors(shards, file);
  const std::vector<uint64_t> hidden = m.per_expert_input_rotations
                                           ? std::vector{m.experts, m.hidden_channels}
                                           : std::vector{m.hidden_channels};
  struct Expected {
    int32_t tensor;
    Dtype dtype;
    std::vector<uint64_t> shape;
  };
  const TensorInfo& codes = shards.tensors[tensors.codes];
  const uint64_t stride = codes.shape.size() == 2 ? codes.shape[1] : 0;
  const Expected expected[] = {
      {tensors.codes, Dtype::kU8, {m.num_slots, stride}},
      {tensors.rotations, Dtype::kF16, {m.num_slots, m.experts, kNumProjections, kSlotChannels}},
      {tensors.gate_suh, Dtype::kF16, hidden},
      {tensors.up_suh, Dtype::kF16, hidden},
      {tensors.down_svh, Dtype::kF16, hidden}};
  for (const Expected& e : expected) {
    const TensorInfo& tensor = shards.tensors[e.tensor];
    if (tensor.dtype == e.dtype && tensor.shape == e.shape) continue;
    return Error(
        StatusCode::kFormat,
        fmt::format("{}: found {} [{}], legal: {} [{}]", shards.Describe(e.tensor), DtypeName(tensor.dtype),
                    fmt::join(tensor.shape, ", "), DtypeName(e.dtype), fmt::join(e.shape, ", ")));
  }
  if (stride < PayloadBytes(m) || stride % m.row_alignment_bytes != 0) {
    return Error(StatusCode::kFormat,
                 fmt::format("{}: found a row stride of {} bytes, legal: a multiple of {} of at least {}",
                             shards.Describe(tensors.codes), stride, m.row_alignment_bytes, PayloadBytes(m)));
  }
  return {};
}

class Exl3V1Layout : public Layout {
 public:
  Exl3V1Layout(const ShardSet& shards, Exl3V1Manifest manifest)
      : shards_(shards), manifest_(std::move(manifest)) {
    for (const auto& [number, layer] : manifest_.layers) {
      for (uint32_t file = 0; file < shards_.files.size(); ++file) {
        if (shards_.files[file].name == layer.file) layers_.push_back(FindLayerTensors(shards_, file));
      }
    }
  }

  std::string_view name() const override { return "exl3-v1"; }

  MatrixInfo Matrix(size_t, uint32_t, Projection projection, uint32_t) const override {
    const bool down = projection == Projection::kDown;
    MatrixInfo info;
    info.bits = manifest_.bits;
    info.codebook = CodebookFromName(manifest_.codebook).value_or(Codebook::kMcg);
    info.in_channels = down ? manifest_.intermediate_channels : manifest_.hidden_channels;
    info.out_channels = down ? manifest_.hidden_channels : manifest_.intermediate_channels;
    return info;
  }

  // A container does not name its matrices: the canonical name stands for them.
  std::string MatrixName(size_t layer, uint32_t expert, Projection projection, uint32_t) const override {
    auto number = manifest_.layers.begin();
    std::advance(number, static_cast<ptrdiff_t>(layer));
    return fmt::format("model.layers.{}.mlp.experts.{}.{}_proj", number->first, expert,
                       ProjectionName(projection));
  }

  Result<MatrixSource> Source(size_t layer, uint32_t expert, Projection projection,
                              const SliceExtent& extent) const override {
    const LayerTensors& tensors = layers_[layer];
    const bool down = projection == Projection::kDown;
    MatrixSource source{.info = Matrix(layer, expert, projection, 0),
                        .name = MatrixName(layer, expert, projection, 0),
                        .codes = {},
                        .suh = {},
                        .svh = {},
                        .bias = {}};
    (down ? source.info.in_channels : source.info.out_channels) = extent.channels;
    AppendCodes(tensors, expert, projection, extent, source.codes);
    if (down) {
      source.suh = IntermediateVector(tensors, expert, projection, extent);
      source.svh = HiddenVector(tensors.down_svh, expert);
    } else {
      source.suh = HiddenVector(projection == Projection::kGate ? tensors.gate_suh : tensors.up_suh, expert);
      source.svh = IntermediateVector(tensors, expert, projection, extent);
    }
    return source;
  }

  Result<void> CheckPadding(size_t layer, uint64_t first_channel, uint64_t channels) const override {
    const TensorInfo& codes = shards_.tensors[layers_[layer].codes];
    const uint64_t payload = PayloadBytes(manifest_);
    const uint64_t stride = codes.shape[1];
    std::vector<std::byte> bytes(
        static_cast<size_t>(std::min<uint64_t>(kPaddingReadBytes, stride - payload)));
    for (uint64_t slot = first_channel / kSlotChannels; slot < (first_channel + channels) / kSlotChannels;
         ++slot) {
      for (uint64_t at = payload; at < stride; at += bytes.size()) {
        const size_t count = static_cast<size_t>(std::min<uint64_t>(bytes.size(), stride - at));
        auto read = shards_.handles[codes.file]->ReadAt(codes.offset_bytes + slot * stride + at,
                                                        {bytes.data(), count});
        if (!read) return read;
        const auto bad = std::find_if(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(count),
                                      [](std::byte b) { return b != std::byte{0}; });
        if (bad == bytes.begin() + static_cast<ptrdiff_t>(count)) continue;
        return Error(
            StatusCode::kFormat,
            fmt::format(
                "{}: slot {}, byte {} of the row: found {:#04x}, legal: 0 in the padding behind byte {}",
                shards_.Describe(layers_[layer].codes), slot, at + static_cast<uint64_t>(bad - bytes.begin()),
                static_cast<int>(*bad), payload));
      }
    }
    return {};
  }

  std::optional<SlotGrid> slot_grid() const override {
    return SlotGrid{.num_slots = manifest_.num_slots,
                    .extent_alignment_slots = manifest_.extent_alignment_slots,
                    .extent_barriers = manifest_.extent_barriers};
  }

  std::vector<int> LegalTpSizes() const override {
    if (manifest_.hidden_channels % kHadamardChannels != 0 ||
        manifest_.intermediate_channels % kHadamardChannels != 0) {
      return {};
    }
    if (manifest_.extent_barriers.empty()) {
      const uint64_t unit = std::lcm(manifest_.extent_alignment_slots, kHadamardChannels / kSlotChannels);
      return GeneralLegalTpSizes(std::max<uint64_t>(1, manifest_.num_slots / unit));
    }
    const bool middle =
        manifest_.extent_barriers.size() == 1 && manifest_.extent_barriers[0] * 2 == manifest_.num_slots;
    return middle ? BarrierLegalTpSizes(manifest_.num_slots, manifest_.extent_alignment_slots)
                  : std::vector<int>{1};
  }

 private:
  // A slot holds two tile columns of gate and up and two tile rows of down, each as one plane in the
  // order of the hidden tiles.
  void AppendCodes(const LayerTensors& tensors, uint32_t expert, Projection projection,
                   const SliceExtent& extent, std::vector<CopyRegion>& regions) const {
    const TensorInfo& codes = shards_.tensors[tensors.codes];
    const uint64_t stride = codes.shape[1];
    const uint64_t tile = TileBytes(manifest_.bits);
    const uint64_t plane = PlaneBytes(manifest_);
    const uint64_t hidden_tiles = manifest_.hidden_channels / kTileChannels;
    const uint64_t local_tiles = extent.channels / kTileChannels;
    const uint64_t section =
        (uint64_t{expert} * kNumProjections + static_cast<uint64_t>(projection)) * SectionBytes(manifest_);
    const uint64_t first_tile = extent.first_channel / kTileChannels;
    for (uint64_t t = 0; t < local_tiles; ++t) {
      const uint64_t slot = (first_tile + t) / kSlotTiles;
      const uint64_t offset =
          codes.offset_bytes + slot * stride + section + (first_tile + t) % kSlotTiles * plane;
      if (projection == Projection::kDown) {
        regions.push_back({.file = codes.file,
                           .rows = 1,
                           .row_bytes = plane,
                           .source_offset = offset,
                           .source_stride = plane,
                           .target_offset = t * plane,
                           .target_stride = plane});
      } else {
        regions.push_back({.file = codes.file,
                           .rows = hidden_tiles,
                           .row_bytes = tile,
                           .source_offset = offset,
                           .source_stride = tile,
                           .target_offset = t * tile,
                           .target_stride = local_tiles * tile});
      }
    }
  }

  // Gate svh, up svh or down suh of the extent: one run of 32 values per slot.
  VectorSource IntermediateVector(const LayerTensors& tensors, uint32_t expert, Projection projection,
                                  const SliceExtent& extent) const {
    const TensorInfo& rotations = shards_.tensors[tensors.rotations];
    const uint64_t row = uint64_t{expert} * kNumProjections + static_cast<uint64_t>(projection);
    const uint64_t slot_bytes = manifest_.experts * kNumProjections * kVectorBytes;
    VectorSource source{.kind = VectorSource::Kind::kFp16, .regions = {}, .share_key = 0};
    source.regions.push_back(
        {.file = rotations.file,
         .rows = extent.channels / kSlotChannels,
         .row_bytes = kVectorBytes,
         .source_offset =
             rotations.offset_bytes + extent.first_channel / kSlotChannels * slot_bytes + row * kVectorBytes,
         .source_stride = slot_bytes,
         .target_offset = 0,
         .target_stride = kVectorBytes});
    source.share_key = ShareKey(tensors.rotations, row);
    return source;
  }

  VectorSource HiddenVector(int32_t tensor, uint32_t expert) const {
    const TensorInfo& info = shards_.tensors[tensor];
    const uint64_t row = manifest_.per_expert_input_rotations ? expert : 0;
    const uint64_t bytes = manifest_.hidden_channels * 2;
    VectorSource source{.kind = VectorSource::Kind::kFp16, .regions = {}, .share_key = ShareKey(tensor, row)};
    source.regions.push_back({.file = info.file,
                              .rows = 1,
                              .row_bytes = bytes,
                              .source_offset = info.offset_bytes + row * bytes,
                              .source_stride = bytes,
                              .target_offset = 0,
                              .target_stride = bytes});
    return source;
  }

  static uint64_t ShareKey(int32_t tensor, uint64_t row) {
    return (static_cast<uint64_t>(tensor) + 1) << 32 | row;
  }

  const ShardSet& shards_;
  Exl3V1Manifest manifest_;
  std::vector<LayerTensors> layers_;
};

}  // namespace

Result<void> OpenExl3V1Files(ShardSet& shards, const Exl3V1Manifest& manifest) {
  for (const auto& [number, layer] : manifest.layers) {
    if (auto r = AppendShard(shards, layer.file); !r) return r;
    const auto file = static_cast<uint32_t>(shards.files.size() - 1);
    shards.files[file].expected_sha256 = layer.sha256;
    if (auto r = CheckMetadata(shards, file, manifest, number); !r) return r;
    if (auto r = CheckTensorSet(shards, file, manifest); !r) return r;
  }
  return {};
}

std::unique_ptr<Layout> MakeExl3V1Layout(LayoutContext& context, Exl3V1Manifest manifest) {
  for (const auto& [number, file] : manifest.layers) {
    MoeLayer layer;
    layer.label = fmt::format("{}", number);
    layer.prefix = "model.layers";
    layer.number = static_cast<int64_t>(number);
    layer.experts = static_cast<uint32_t>(manifest.experts);
    layer.hidden_channels = manifest.hidden_channels;
    layer.intermediate_channels = manifest.intermediate_channels;
    context.layers.push_back(std::move(layer));
  }
  return std::make_unique<Exl3V1Layout>(context.shards, std::move(manifest));
}

}  // namespace espalier
