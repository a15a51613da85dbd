// SPDX-License-Identifier: Apache-2.0
//
// From a checkpoint to a slab in two passes: place every matrix and vector, then allocate once and
// read each byte straight to its place.
#include <espalier/experts.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "base/checked.h"

namespace espalier {
namespace {

constexpr uint64_t kReadBatchBytes = uint64_t{16} << 20;  // between two reports of progress
constexpr uint16_t kFp16One = 0x3C00;
constexpr uint16_t kFp16MinusOne = 0xBC00;

tl::unexpected<Status> SizeError(const std::string& name, const MatrixInfo& info) {
  return Error(StatusCode::kGeometry, fmt::format("{}: {} x {} channels; legal: multiples of {}", name,
                                                  info.in_channels, info.out_channels, kHadamardChannels));
}

// Places matrices in a slab and remembers what has to be read where.
class SlabBuilder {
 public:
  explicit SlabBuilder(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  Result<MatrixDesc> Add(const MatrixSource& source) {
    const MatrixInfo& info = source.info;
    for (const uint64_t channels : {info.in_channels, info.out_channels}) {
      if (channels == 0 || channels % kHadamardChannels != 0 || channels > ~uint32_t{0}) {
        return SizeError(source.name, info);
      }
    }
    if (source.suh.kind == VectorSource::Kind::kAbsent || source.svh.kind == VectorSource::Kind::kAbsent) {
      return Error(StatusCode::kFormat,
                   fmt::format("{}: no scale vector on the {} side", source.name,
                               source.suh.kind == VectorSource::Kind::kAbsent ? "input" : "output"));
    }
    MatrixDesc desc;
    desc.in_channels = static_cast<uint32_t>(info.in_channels);
    desc.out_channels = static_cast<uint32_t>(info.out_channels);
    desc.bits = static_cast<uint8_t>(info.bits);
    desc.codebook = info.codebook;
    desc.codes_offset_bytes = Place(desc.code_bytes());
    AddRegions(source.codes, desc.codes_offset_bytes);
    desc.suh_offset_bytes = AddVector(source.suh, info.in_channels);
    desc.svh_offset_bytes = AddVector(source.svh, info.out_channels);
    desc.bias_offset_bytes = AddVector(source.bias, info.out_channels);
    return desc;
  }

  // Allocates the slab and fills it.
  Result<HostBuffer> Read(const LoadOptions& options) const {
    const std::optional<uint64_t> size = size_bytes_.value();
    if (!size) return Error(StatusCode::kCapacity, "the weights exceed 2^64 bytes");
    Result<HostBuffer> slab = HostBuffer::Create(*size);
    if (!slab) return slab;
    uint64_t total = 0;
    for (const CopyRegion& region : regions_) total += RegionBytes(region);
    uint64_t done = 0;
    if (options.progress) options.progress(done, total);
    for (size_t first = 0; first < regions_.size();) {
      size_t count = 0;
      uint64_t batch_bytes = 0;
      while (first + count < regions_.size() && batch_bytes < kReadBatchBytes) {
        batch_bytes += RegionBytes(regions_[first + count]);
        ++count;
      }
      const Result<void> read =
          checkpoint_.ReadRegions(std::span(regions_).subspan(first, count), slab->span());
      if (!read) return tl::unexpected(read.error());
      first += count;
      done += batch_bytes;
      if (options.progress) options.progress(done, total);
    }
    for (const SignVector& vector : sign_vectors_) {
      if (Result<void> expanded = ExpandSigns(vector, slab->span()); !expanded) {
        return tl::unexpected(expanded.error());
      }
    }
    return slab;
  }

 private:
  // Identity of stored bytes: key, first place in the file, size in the slab.
  using VectorKey = std::tuple<uint64_t, uint32_t, uint64_t, uint64_t>;

  struct SignVector {
    std::vector<CopyRegion> regions;
    uint64_t offset = 0;
    uint64_t channels = 0;
  };

  static uint64_t RegionBytes(const CopyRegion& region) { return region.rows * region.row_bytes; }

  uint64_t Place(uint64_t size) {
    const uint64_t offset = size_bytes_.value().value_or(0);
    size_bytes_ += CheckedBytes(size) + (kSlabAlignmentBytes - 1);
    if (const std::optional<uint64_t> end = size_bytes_.value()) {
      size_bytes_ = *end - *end % kSlabAlignmentBytes;
    }
    return offset;
  }

  void AddRegions(const std::vector<CopyRegion>& regions, uint64_t offset) {
    for (CopyRegion region : regions) {
      region.target_offset += offset;
      regions_.push_back(region);
    }
  }

  uint64_t AddVector(const VectorSource& source, uint64_t channels) {
    if (source.kind == VectorSource::Kind::kAbsent) return kAbsentOffset;
    const bool shared = source.share_key != 0 && !source.regions.empty();
    VectorKey key;
    if (shared) {
      key = {source.share_key, source.regions[0].file, source.regions[0].source_offset, channels};
      if (const auto known = shared_vectors_.find(key); known != shared_vectors_.end()) return known->second;
    }
    const uint64_t offset = Place(channels * sizeof(uint16_t));
    if (source.kind == VectorSource::Kind::kSignBits) {
      sign_vectors_.push_back({source.regions, offset, channels});
    } else {
      AddRegions(source.regions, offset);
    }
    if (shared) shared_vectors_.emplace(key, offset);
    return offset;
  }

  Result<void> ExpandSigns(const SignVector& vector, std::span<std::byte> slab) const {
    std::vector<std::byte> bits(vector.channels / 8);
    if (Result<void> read = checkpoint_.ReadRegions(vector.regions, bits); !read) return read;
    for (uint64_t i = 0; i < vector.channels; ++i) {
      // 16-bit little-endian words, least significant bit first: the same as bytes, bit by bit.
      const bool negative = (static_cast<unsigned>(bits[i / 8]) >> (i % 8) & 1u) != 0;
      const uint16_t value = negative ? kFp16MinusOne : kFp16One;
      std::memcpy(slab.data() + vector.offset + i * sizeof(value), &value, sizeof(value));
    }
    return {};
  }

  const Checkpoint& checkpoint_;
  CheckedBytes size_bytes_;
  std::vector<CopyRegion> regions_;
  std::vector<SignVector> sign_vectors_;
  std::map<VectorKey, uint64_t> shared_vectors_;
};

std::string Identity(const Checkpoint& checkpoint, std::string_view what) {
  return fmt::format("{} of {}", what, checkpoint.path().string());
}

// What `extent` owns of an expert's valid channels.
uint32_t ValidChannels(const MoeLayer& layer, const SliceExtent& extent) {
  const uint64_t first = layer.intermediate_channels / layer.slices * extent.slice + extent.first_channel;
  const uint64_t valid = layer.valid_intermediate_channels;
  return static_cast<uint32_t>(valid <= first ? 0 : std::min(valid - first, extent.channels));
}

Result<Activation> ChooseActivation(const Checkpoint& checkpoint, const MoeLayer& layer,
                                    const LoadOptions& options) {
  const Activation activation =
      options.activation ? *options.activation : checkpoint.config().activation.value_or(Activation{});
  if (ActivationHasGate(activation.kind) && !layer.has_gate) {
    return Error(StatusCode::kFormat,
                 fmt::format("{}: activation {} needs a gate matrix and the experts have none",
                             Identity(checkpoint, "layer " + layer.label), ActivationText(activation)));
  }
  return activation;
}

Result<SegmentDesc> AddSegment(const Checkpoint& checkpoint, size_t layer_index, uint32_t expert,
                               const SliceExtent& extent, bool with_gate, SlabBuilder& builder) {
  const MoeLayer& layer = checkpoint.layers()[layer_index];
  const uint32_t slice = extent.slice;
  const MatrixInfo down = checkpoint.Matrix(layer_index, expert, Projection::kDown, slice);
  if (down.in_channels == 0 || down.in_channels % kHadamardChannels != 0) {
    return SizeError(checkpoint.MatrixName(layer_index, expert, Projection::kDown, slice), down);
  }
  SegmentDesc segment;
  segment.valid_intermediate_channels = ValidChannels(layer, extent);
  for (int p = 0; p < kNumProjections; ++p) {
    const Projection projection = static_cast<Projection>(p);
    if (projection == Projection::kGate && !with_gate) continue;
    const Result<void> marker =
        checkpoint.CheckMarker(checkpoint.Matrix(layer_index, expert, projection, slice));
    if (!marker) return tl::unexpected(marker.error());
    const Result<MatrixSource> source = checkpoint.Source(layer_index, expert, projection, extent);
    if (!source) return tl::unexpected(source.error());
    const Result<MatrixDesc> desc = builder.Add(*source);
    if (!desc) return tl::unexpected(desc.error());
    segment.matrices[p] = *desc;
  }
  return segment;
}

// A linear belongs to no layer: it is stopped by errors of the whole checkpoint and by its own.
Result<void> CheckLinearUsable(const Checkpoint& checkpoint, const std::string& name) {
  for (const Problem& problem : checkpoint.problems()) {
    if (problem.severity != Problem::Severity::kError) continue;
    if (!problem.layer.empty() && !problem.tensor.starts_with(name + ".")) continue;
    return Error(StatusCode::kFormat,
                 fmt::format("{}: {}: {}", problem.file, problem.tensor, problem.message));
  }
  return {};
}

Result<MatrixSource> FindLinearSource(const Checkpoint& checkpoint, std::string_view name) {
  const Result<Checkpoint::MatrixRef> ref = checkpoint.FindMatrix(name);
  if (!ref) return tl::unexpected(ref.error());
  if (!ref->routed) {
    Result<MatrixSource> source = checkpoint.LinearSource(ref->linear);
    if (!source) return source;
    if (Result<void> usable = CheckLinearUsable(checkpoint, source->name); !usable) {
      return tl::unexpected(usable.error());
    }
    return source;
  }
  const MoeLayer& layer = checkpoint.layers()[ref->layer];
  if (!ref->slice && layer.slices > 1) {
    return Error(StatusCode::kUsage, fmt::format("{} has {} slices; name one: {}.rank0 to {}.rank{}", name,
                                                 layer.slices, name, name, layer.slices - 1));
  }
  if (Result<void> usable = checkpoint.CheckUsable(layer.label); !usable)
    return tl::unexpected(usable.error());
  const uint32_t slice = ref->slice.value_or(0);
  const MatrixInfo info = checkpoint.Matrix(ref->layer, ref->expert, ref->projection, slice);
  const uint64_t width = ref->projection == Projection::kDown ? info.in_channels : info.out_channels;
  if (width == 0 || width % kHadamardChannels != 0) {
    return SizeError(checkpoint.MatrixName(ref->layer, ref->expert, ref->projection, slice), info);
  }
  return checkpoint.Source(ref->layer, ref->expert, ref->projection,
                           {.slice = slice, .first_channel = 0, .channels = width});
}

// What a package is made of: these experts, of each these channels.
struct Share {
  ExpertRange experts;
  std::vector<SliceExtent> extents;
  std::string owner;  // for messages; empty = the whole layer
};

Result<PreparedExperts> LoadShare(const Checkpoint& checkpoint, size_t layer, const Share& share,
                                  const LoadOptions& options) {
  const MoeLayer& info = checkpoint.layers()[layer];
  const std::string identity = Identity(checkpoint, share.owner + "layer " + info.label);
  if (Result<void> usable = checkpoint.CheckUsable(info.label); !usable)
    return tl::unexpected(usable.error());
  const Result<Activation> activation = ChooseActivation(checkpoint, info, options);
  if (!activation) return tl::unexpected(activation.error());
  if (info.hidden_channels == 0 || info.hidden_channels % kHadamardChannels != 0 ||
      info.hidden_channels > ~uint32_t{0}) {
    return Error(StatusCode::kGeometry, fmt::format("{}: {} hidden channels; legal: multiples of {}",
                                                    identity, info.hidden_channels, kHadamardChannels));
  }

  SlabBuilder builder(checkpoint);
  std::vector<SegmentDesc> segments;
  for (uint32_t local = 0; local < share.experts.experts; ++local) {
    for (const SliceExtent& extent : share.extents) {
      Result<SegmentDesc> segment = AddSegment(checkpoint, layer, share.experts.first_expert + local, extent,
                                               ActivationHasGate(activation->kind), builder);
      if (!segment) return tl::unexpected(segment.error());
      segment->expert = local;
      segments.push_back(*segment);
    }
  }
  Result<HostBuffer> slab = builder.Read(options);
  if (!slab) return tl::unexpected(slab.error());
  const MoeGeometry geometry = {.experts = share.experts.experts,
                                .hidden_channels = static_cast<uint32_t>(info.valid_hidden_channels),
                                .stored_hidden_channels = static_cast<uint32_t>(info.hidden_channels),
                                .activation = *activation,
                                .output_scale = options.output_scale};
  return PreparedExperts::Create(geometry, std::move(segments), *std::move(slab), identity);
}

Result<void> CheckLayer(const Checkpoint& checkpoint, size_t layer) {
  if (layer < checkpoint.layers().size()) return {};
  return Error(StatusCode::kUsage, fmt::format("layer position {}; the checkpoint has {} layers", layer,
                                               checkpoint.layers().size()));
}

}  // namespace

Result<PreparedExperts> LoadExperts(const Checkpoint& checkpoint, size_t layer, const LoadOptions& options) {
  if (Result<void> checked = CheckLayer(checkpoint, layer); !checked) return tl::unexpected(checked.error());
  const MoeLayer& info = checkpoint.layers()[layer];
  Share share{.experts = {.first_expert = 0, .experts = info.experts}, .extents = {}, .owner = {}};
  for (uint32_t slice = 0; slice < info.slices; ++slice) {
    share.extents.push_back(
        {.slice = slice, .first_channel = 0, .channels = info.intermediate_channels / info.slices});
  }
  return LoadShare(checkpoint, layer, share, options);
}

Result<PreparedExperts> LoadExperts(const Checkpoint& checkpoint, const ExtentPlan& plan, size_t layer,
                                    int global_rank, const LoadOptions& options) {
  if (Result<void> checked = CheckLayer(checkpoint, layer); !checked) return tl::unexpected(checked.error());
  if (global_rank < 0 || global_rank >= plan.world()) {
    return Error(StatusCode::kUsage, fmt::format("rank {}; legal: 0 to {}", global_rank, plan.world() - 1));
  }
  if (plan.layers().size() != checkpoint.layers().size()) {
    return Error(StatusCode::kGeometry, fmt::format("the plan has {} layers, {} has {}", plan.layers().size(),
                                                    checkpoint.path().string(), checkpoint.layers().size()));
  }
  const RankExtent& extent = plan.layers()[layer].ranks[static_cast<size_t>(global_rank % plan.tp())];
  const Share share{.experts = plan.Experts(layer, global_rank / plan.tp()),
                    .extents = extent.segments,
                    .owner = fmt::format("rank {} of {} (tp {}, ep {}), ", global_rank, plan.world(),
                                         plan.tp(), plan.ep())};
  return LoadShare(checkpoint, layer, share, options);
}

std::vector<int32_t> ExpertMap(const ExtentPlan& plan, size_t layer, int ep_rank) {
  const ExpertRange last = plan.Experts(layer, plan.ep() - 1);
  const ExpertRange own = plan.Experts(layer, ep_rank);
  std::vector<int32_t> map(last.first_expert + last.experts, -1);
  for (uint32_t local = 0; local < own.experts; ++local)
    map[own.first_expert + local] = static_cast<int32_t>(local);
  return map;
}

Result<PreparedLinear> LoadLinear(const Checkpoint& checkpoint, std::string_view name,
                                  const LoadOptions& options) {
  const Result<MatrixSource> source = FindLinearSource(checkpoint, name);
  if (!source) return tl::unexpected(source.error());
  if (Result<void> marker = checkpoint.CheckMarker(source->info); !marker)
    return tl::unexpected(marker.error());
  SlabBuilder builder(checkpoint);
  const Result<MatrixDesc> desc = builder.Add(*source);
  if (!desc) return tl::unexpected(desc.error());
  Result<HostBuffer> slab = builder.Read(options);
  if (!slab) return tl::unexpected(slab.error());
  return PreparedLinear::Create(*desc, options.in_channels, options.out_channels, *std::move(slab),
                                Identity(checkpoint, source->name));
}

}  // namespace espalier
