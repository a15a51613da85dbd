// SPDX-License-Identifier: Apache-2.0
#include <espalier/dense_slices.h>
#include <espalier/extent_plan.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/checked.h"
#include "base/text.h"
#include "checkpoint/layout.h"

namespace espalier {
namespace {

tl::unexpected<Status> Refuse(std::string message) {
  return Error(StatusCode::kGeometry, std::move(message));
}

Result<void> CheckTp(int tp) {
  if (tp >= 1 && tp <= kMaxTp) return {};
  return Refuse(fmt::format("found tp {}, legal: 1..{}", tp, kMaxTp));
}

Result<void> CheckCount(std::string_view what, uint64_t count) {
  if (count >= 1 && count <= kMaxSplit) return {};
  return Refuse(fmt::format("found {} {}, legal: 1..{}", count, what, kMaxSplit));
}

uint64_t CeilDiv(uint64_t value, uint64_t divisor) {
  return value / divisor + (value % divisor != 0 ? 1 : 0);
}

// Empty where no rank layout keeps heads beside their k/v heads. REQUIRES: counts and tp in range.
std::optional<KvSplit> TrySplitKvHeads(uint64_t heads, uint64_t kv_heads, int tp) {
  if (heads % kv_heads != 0) return std::nullopt;
  const auto ranks = static_cast<uint64_t>(tp);
  // A group of heads must not be cut unevenly: with 12 heads, 4 k/v heads and 8 ranks of 2 heads, rank 1
  // would hold heads of two groups. All heads of a single k/v head may go anywhere.
  if (ranks > kv_heads && ranks % kv_heads == 0 && (heads % ranks == 0 || kv_heads == 1)) {
    return KvSplit{.kv_heads = kv_heads, .local_heads = 1, .replicas = ranks / kv_heads, .tp = tp};
  }
  const uint64_t local = CeilDiv(kv_heads, ranks);
  if (CeilDiv(heads, ranks) != local * (heads / kv_heads)) return std::nullopt;
  return KvSplit{.kv_heads = kv_heads, .local_heads = local, .replicas = 1, .tp = tp};
}

}  // namespace

Result<HeadSplit> SplitHeads(uint64_t heads, int tp) {
  if (auto r = CheckTp(tp); !r) return tl::unexpected(r.error());
  if (auto r = CheckCount("heads", heads); !r) return tl::unexpected(r.error());
  const uint64_t local = CeilDiv(heads, static_cast<uint64_t>(tp));
  return HeadSplit{
      .heads = heads, .padded_heads = local * static_cast<uint64_t>(tp), .local_heads = local, .tp = tp};
}

std::vector<int> LegalKvTpSizes(uint64_t heads, uint64_t kv_heads) {
  std::vector<int> legal;
  if (!CheckCount("heads", heads) || !CheckCount("k/v heads", kv_heads)) return legal;
  for (int tp = 1; tp <= kMaxLegalTp; ++tp) {
    if (TrySplitKvHeads(heads, kv_heads, tp)) legal.push_back(tp);
  }
  return legal;
}

Result<KvSplit> SplitKvHeads(uint64_t heads, uint64_t kv_heads, int tp) {
  if (auto r = CheckTp(tp); !r) return tl::unexpected(r.error());
  if (auto r = CheckCount("heads", heads); !r) return tl::unexpected(r.error());
  if (auto r = CheckCount("k/v heads", kv_heads); !r) return tl::unexpected(r.error());
  if (heads % kv_heads != 0) {
    return Refuse(
        fmt::format("found {} k/v heads for {} heads, legal: a divisor of {}", kv_heads, heads, heads));
  }
  if (const std::optional<KvSplit> split = TrySplitKvHeads(heads, kv_heads, tp)) return *split;
  return Refuse(fmt::format(
      "tp {}: {} heads with {} k/v heads cannot be split so that every head lies beside its own k/v head; "
      "legal tp: {}",
      tp, heads, kv_heads, fmt::join(LegalKvTpSizes(heads, kv_heads), ", ")));
}

Result<WidthSplit> SplitWidth(uint64_t width, int tp, uint64_t alignment) {
  if (auto r = CheckTp(tp); !r) return tl::unexpected(r.error());
  if (auto r = CheckCount("channels", width); !r) return tl::unexpected(r.error());
  if (alignment < 1 || alignment > kMaxWidthAlignment) {
    return Refuse(
        fmt::format("found an alignment of {} channels, legal: 1..{}", alignment, kMaxWidthAlignment));
  }
  const uint64_t local = RoundUp(CeilDiv(width, static_cast<uint64_t>(tp)), alignment);
  return WidthSplit{.width = width, .local = local, .alignment = alignment, .tp = tp};
}

namespace {

// Leaves `target` empty where the config does not name the size.
template <typename Split, typename Make>
Result<void> PlanPart(std::string_view key, uint64_t size, const Make& make, std::optional<Split>& target) {
  if (size == 0) return {};
  const Result<Split> split = make(size);
  if (!split) return Refuse(fmt::format("config.json: {}: {}", key, split.error().message()));
  target = *split;
  return {};
}

}  // namespace

Result<DensePlan> PlanDense(const ModelConfig& config, int tp, uint64_t alignment) {
  // Also where the config names nothing that would be split.
  if (const auto r = SplitWidth(1, tp, alignment); !r) return tl::unexpected(r.error());
  const auto heads = [=](uint64_t count) { return SplitHeads(count, tp); };
  const auto width = [=](uint64_t channels) { return SplitWidth(channels, tp, alignment); };
  DensePlan plan;
  plan.tp = tp;
  for (const Result<void>& planned :
       {PlanPart("num_attention_heads", config.attention_heads, heads, plan.heads),
        PlanPart("linear_attn_config.num_heads", config.linear_heads, heads, plan.linear_heads),
        PlanPart("intermediate_size", config.dense_intermediate_channels, width, plan.dense),
        PlanPart("width of the shared experts", config.shared_intermediate_channels, width, plan.shared)}) {
    if (!planned) return tl::unexpected(planned.error());
  }
  if (config.attention_heads == 0 || config.kv_heads == 0) return plan;
  const Result<KvSplit> kv = SplitKvHeads(config.attention_heads, config.kv_heads, tp);
  if (kv) {
    plan.kv_heads = *kv;
  } else {
    plan.kv_refusal = kv.error();
    plan.kv_legal_tp = LegalKvTpSizes(config.attention_heads, config.kv_heads);
  }
  return plan;
}

namespace {

Result<void> CheckRank(int rank, int tp) {
  if (rank >= 0 && rank < tp) return {};
  return Error(StatusCode::kUsage, fmt::format("found rank {}, legal: 0..{}", rank, tp - 1));
}

// Units (heads, channels) as entries of an axis.
Result<AxisSlice> Scaled(const AxisSlice& units, uint64_t entries) {
  AxisSlice slice;
  for (uint64_t AxisSlice::* field :
       {&AxisSlice::size, &AxisSlice::first, &AxisSlice::valid, &AxisSlice::local}) {
    const std::optional<uint64_t> product = CheckedMul(units.*field, entries);
    if (!product) {
      return Refuse(fmt::format("an axis of {} times {} entries, legal: fewer than 2^64 entries",
                                units.*field, entries));
    }
    slice.*field = *product;
  }
  return slice;
}

}  // namespace

Result<AxisSlice> HeadSlice(const HeadSplit& split, uint64_t entries_per_head, int rank) {
  if (auto r = CheckRank(rank, split.tp); !r) return tl::unexpected(r.error());
  return Scaled({.size = split.heads,
                 .first = split.FirstHead(rank),
                 .valid = split.ValidHeads(rank),
                 .local = split.local_heads},
                entries_per_head);
}

Result<AxisSlice> KvHeadSlice(const KvSplit& split, uint64_t entries_per_head, int rank) {
  if (auto r = CheckRank(rank, split.tp); !r) return tl::unexpected(r.error());
  return Scaled({.size = split.kv_heads,
                 .first = split.FirstHead(rank),
                 .valid = split.ValidHeads(rank),
                 .local = split.local_heads},
                entries_per_head);
}

Result<AxisSlice> WidthSlice(const WidthSplit& split, int rank) {
  if (auto r = CheckRank(rank, split.tp); !r) return tl::unexpected(r.error());
  return AxisSlice{.size = split.width,
                   .first = split.FirstChannel(rank),
                   .valid = split.ValidChannels(rank),
                   .local = split.local};
}

namespace {

// One load: finds the tensor, lays out its part, reads it.
class SliceLoader {
 public:
  SliceLoader(const Checkpoint& checkpoint, const TensorInfo& tensor)
      : checkpoint_(checkpoint), tensor_(tensor) {}

  static Result<SliceLoader> Find(const Checkpoint& checkpoint, std::string_view name) {
    const TensorInfo* tensor = checkpoint.FindTensor(name);
    if (tensor != nullptr) return SliceLoader(checkpoint, *tensor);
    return Error(StatusCode::kUsage,
                 fmt::format("{}: there is no tensor {}", checkpoint.path().string(), Quoted(name)));
  }

  const TensorInfo& tensor() const { return tensor_; }

  tl::unexpected<Status> Fail(StatusCode code, std::string_view what) const {
    return Error(code, Printable(fmt::format("tensor {} in {}: {}", Quoted(tensor_.name),
                                             checkpoint_.files()[tensor_.file].name, what)));
  }

  // The slices are some, and their sections make up the axis.
  Result<void> CheckSections(size_t axis, std::span<const AxisSlice> sections) const {
    if (DtypeBits(tensor_.dtype) % 8 != 0) {
      return Fail(StatusCode::kUnsupported,
                  fmt::format("found {}, legal: a dtype of whole bytes", DtypeName(tensor_.dtype)));
    }
    if (axis >= tensor_.shape.size()) {
      return Fail(StatusCode::kGeometry, fmt::format("found shape [{}], legal: one with an axis {}",
                                                     fmt::join(tensor_.shape, ", "), axis));
    }
    CheckedBytes size = 0;
    for (const AxisSlice& s : sections) {
      if (s.first > s.size || s.valid > s.size - s.first || s.valid > s.local) {
        return Fail(
            StatusCode::kUsage,
            fmt::format("a slice of entries [{}, +{}) into {}, legal: inside {} entries, and no more of "
                        "them than there is room for",
                        s.first, s.valid, s.local, s.size));
      }
      size += s.size;
    }
    if (size.value() == tensor_.shape[axis]) return {};
    std::vector<uint64_t> legal;
    for (const AxisSlice& s : sections) legal.push_back(s.size);
    return Fail(StatusCode::kFormat, fmt::format("axis {}: found {} entries, legal: {}", axis,
                                                 tensor_.shape[axis], fmt::join(legal, " + ")));
  }

  Result<DenseTensor> LoadWhole() const {
    DenseTensor part{.name = tensor_.name, .dtype = tensor_.dtype, .shape = tensor_.shape, .data = {}};
    Result<HostBuffer> buffer = HostBuffer::Create(tensor_.size_bytes);
    if (!buffer) return Fail(buffer.error().code(), buffer.error().message());
    part.data = *std::move(buffer);
    part.read_bytes = tensor_.size_bytes;
    if (auto r = checkpoint_.Read(tensor_, part.data.span()); !r) return tl::unexpected(r.error());
    if (auto r = checkpoint_.CheckUnchanged(tensor_.file); !r) return tl::unexpected(r.error());
    return part;
  }

  Result<DenseTensor> Load(size_t axis, std::span<const AxisSlice> sections) const {
    if (auto r = CheckSections(axis, sections); !r) return tl::unexpected(r.error());
    const Result<Rows> rows = Measure(axis, sections);
    if (!rows) return tl::unexpected(rows.error());
    DenseTensor part{.name = tensor_.name, .dtype = tensor_.dtype, .shape = tensor_.shape, .data = {}};
    part.shape[axis] = rows->local_entries;
    Result<HostBuffer> buffer = HostBuffer::Create(rows->part_bytes);
    if (!buffer) return Fail(buffer.error().code(), buffer.error().message());
    part.data = *std::move(buffer);
    const bool padded = std::ranges::any_of(sections, [](const AxisSlice& s) { return s.valid < s.local; });
    if (padded && part.data.size_bytes() != 0) std::memset(part.data.data(), 0, part.data.size_bytes());
    const std::vector<CopyRegion> regions = Regions(axis, sections, *rows);
    for (const CopyRegion& region : regions) part.read_bytes += region.rows * region.row_bytes;
    if (auto r = checkpoint_.ReadRegions(regions, part.data.span()); !r) return tl::unexpected(r.error());
    if (auto r = checkpoint_.CheckUnchanged(tensor_.file); !r) return tl::unexpected(r.error());
    return part;
  }

 private:
  // The tensor as [count][axis][entry_bytes].
  struct Rows {
    uint64_t count = 0;
    uint64_t entry_bytes = 0;
    uint64_t local_entries = 0;
    uint64_t part_bytes = 0;
  };

  Result<Rows> Measure(size_t axis, std::span<const AxisSlice> sections) const {
    CheckedBytes count = 1, entry = static_cast<uint64_t>(DtypeBits(tensor_.dtype)) / 8, local = 0;
    for (size_t i = 0; i < axis; ++i) count *= tensor_.shape[i];
    for (size_t i = axis + 1; i < tensor_.shape.size(); ++i) entry *= tensor_.shape[i];
    for (const AxisSlice& s : sections) local += s.local;
    const std::optional<uint64_t> bytes = (count * local * entry).value();
    if (!bytes)
      return Fail(StatusCode::kGeometry, "a slice beyond 2^64 bytes, legal: one that memory can hold");
    return Rows{.count = *count.value(),  // all there: an overflow would have stayed with the product
                .entry_bytes = *entry.value(),
                .local_entries = *local.value(),
                .part_bytes = *bytes};
  }

  // REQUIRES: CheckSections. Everything below lies inside the tensor or inside the part, so nothing
  // overflows.
  std::vector<CopyRegion> Regions(size_t axis, std::span<const AxisSlice> sections, const Rows& rows) const {
    std::vector<CopyRegion> regions;
    uint64_t source = 0, target = 0;
    for (const AxisSlice& s : sections) {
      if (rows.count > 0 && s.valid * rows.entry_bytes > 0) {
        regions.push_back({.file = tensor_.file,
                           .rows = rows.count,
                           .row_bytes = s.valid * rows.entry_bytes,
                           .source_offset = tensor_.offset_bytes + (source + s.first) * rows.entry_bytes,
                           .source_stride = tensor_.shape[axis] * rows.entry_bytes,
                           .target_offset = target * rows.entry_bytes,
                           .target_stride = rows.local_entries * rows.entry_bytes});
      }
      source += s.size;
      target += s.local;
    }
    return regions;
  }

  const Checkpoint& checkpoint_;
  const TensorInfo& tensor_;
};

}  // namespace

Result<DenseTensor> LoadDense(const Checkpoint& checkpoint, std::string_view tensor) {
  const Result<SliceLoader> loader = SliceLoader::Find(checkpoint, tensor);
  if (!loader) return tl::unexpected(loader.error());
  return loader->LoadWhole();
}

Result<DenseTensor> LoadDenseSlice(const Checkpoint& checkpoint, std::string_view tensor, size_t axis,
                                   std::span<const AxisSlice> sections) {
  const Result<SliceLoader> loader = SliceLoader::Find(checkpoint, tensor);
  if (!loader) return tl::unexpected(loader.error());
  return loader->Load(axis, sections);
}

Result<DenseTensor> LoadDenseSlice(const Checkpoint& checkpoint, std::string_view tensor, size_t axis,
                                   const AxisSlice& slice) {
  return LoadDenseSlice(checkpoint, tensor, axis, std::span(&slice, 1));
}

namespace {

// The entries of a stored A_log behind its heads are zero bits.
Result<void> CheckHeadTail(const SliceLoader& loader, uint64_t heads) {
  const uint64_t tail = kPaddedHeadVectorEntries - heads;
  const AxisSlice slice{.size = kPaddedHeadVectorEntries, .first = heads, .valid = tail, .local = tail};
  const Result<DenseTensor> entries = loader.Load(0, std::span(&slice, 1));
  if (!entries) return tl::unexpected(entries.error());
  const auto bytes = entries->data.span();
  const auto found = std::ranges::find_if(bytes, [](std::byte b) { return b != std::byte{0}; });
  if (found == bytes.end()) return {};
  const uint64_t entry = heads + static_cast<uint64_t>(found - bytes.begin()) / (bytes.size() / tail);
  return loader.Fail(StatusCode::kFormat,
                     fmt::format("entry {} of {} is not 0, legal: zeros behind the {} heads", entry,
                                 kPaddedHeadVectorEntries, heads));
}

}  // namespace

Result<DenseTensor> LoadALog(const Checkpoint& checkpoint, std::string_view tensor, const HeadSplit& split,
                             int rank) {
  const Result<SliceLoader> loader = SliceLoader::Find(checkpoint, tensor);
  if (!loader) return tl::unexpected(loader.error());
  Result<AxisSlice> slice = HeadSlice(split, 1, rank);
  if (!slice) return tl::unexpected(slice.error());
  const std::vector<uint64_t>& shape = loader->tensor().shape;
  const bool may_be_padded = split.heads < kPaddedHeadVectorEntries;
  const bool padded = may_be_padded && shape == std::vector<uint64_t>{kPaddedHeadVectorEntries};
  if (!padded && shape != std::vector<uint64_t>{split.heads}) {
    return loader->Fail(
        StatusCode::kFormat,
        fmt::format("found shape [{}], legal: [{}]{}", fmt::join(shape, ", "), split.heads,
                    may_be_padded ? fmt::format(" or [{}] with a zero tail", kPaddedHeadVectorEntries) : ""));
  }
  if (padded) {
    if (auto r = CheckHeadTail(*loader, split.heads); !r) return tl::unexpected(r.error());
    slice->size = kPaddedHeadVectorEntries;
  }
  return loader->Load(0, std::span(&*slice, 1));
}

namespace {

struct Mxfp8Loaders {
  SliceLoader weight;
  SliceLoader scale;
};

Result<Mxfp8Loaders> FindMxfp8(const Checkpoint& checkpoint, std::string_view name) {
  const Result<SliceLoader> weight = SliceLoader::Find(checkpoint, name);
  if (!weight) return tl::unexpected(weight.error());
  const TensorInfo& info = weight->tensor();
  if (info.dtype != Dtype::kF8E4M3 || info.shape.size() != 2) {
    return weight->Fail(StatusCode::kFormat, fmt::format("found {} [{}], legal: F8_E4M3 [out, in]",
                                                         DtypeName(info.dtype), fmt::join(info.shape, ", ")));
  }
  const std::string scale_name = std::string(name) + std::string(kMxfp8ScaleSuffix);
  const Result<SliceLoader> scale = SliceLoader::Find(checkpoint, scale_name);
  if (!scale) {
    return weight->Fail(StatusCode::kFormat,
                        fmt::format("no scale beside it, legal: {}", Quoted(scale_name)));
  }
  const TensorInfo& found = scale->tensor();
  const std::vector<uint64_t> legal{info.shape[0], CeilDiv(info.shape[1], kMxfp8BlockChannels)};
  if ((found.dtype != Dtype::kU8 && found.dtype != Dtype::kF8E8M0) || found.shape != legal) {
    return scale->Fail(StatusCode::kFormat,
                       fmt::format("found {} [{}], legal: U8 or F8_E8M0 [{}]", DtypeName(found.dtype),
                                   fmt::join(found.shape, ", "), fmt::join(legal, ", ")));
  }
  return Mxfp8Loaders{.weight = *weight, .scale = *scale};
}

// A cut through a block would give two ranks a part of what one scale covers. `local` counts on ranks without
// a valid entry too, so that all ranks of a split agree. The last block may be a short one.
bool OnBlockGrid(const AxisSlice& s) {
  if (s.first == 0 && s.valid == s.size && s.local == s.size) return true;
  const bool first = s.first % kMxfp8BlockChannels == 0 || s.first == s.size;
  const bool end = (s.first + s.valid) % kMxfp8BlockChannels == 0 || s.first + s.valid == s.size;
  return first && end && s.local % kMxfp8BlockChannels == 0;
}

// Slices of the input axis in blocks of 32.
Result<std::vector<AxisSlice>> InBlocks(const SliceLoader& weight, std::span<const AxisSlice> sections) {
  std::vector<AxisSlice> blocks;
  for (size_t i = 0; i < sections.size(); ++i) {
    const AxisSlice& s = sections[i];
    const bool last = i + 1 == sections.size();
    const bool whole_blocks = s.size % kMxfp8BlockChannels == 0 && s.local % kMxfp8BlockChannels == 0;
    if (!OnBlockGrid(s) || (!last && !whole_blocks)) {
      return weight.Fail(StatusCode::kGeometry,
                         fmt::format("input channels [{}, +{}) of {} as {}, legal: multiples of {}", s.first,
                                     s.valid, s.size, s.local, kMxfp8BlockChannels));
    }
    const uint64_t first = CeilDiv(s.first, kMxfp8BlockChannels);
    blocks.push_back({.size = CeilDiv(s.size, kMxfp8BlockChannels),
                      .first = first,
                      .valid = CeilDiv(s.first + s.valid, kMxfp8BlockChannels) - first,
                      .local = CeilDiv(s.local, kMxfp8BlockChannels)});
  }
  return blocks;
}

Result<Mxfp8Tensor> Join(Result<DenseTensor> weight, Result<DenseTensor> scale) {
  if (!weight) return tl::unexpected(weight.error());
  if (!scale) return tl::unexpected(scale.error());
  return Mxfp8Tensor{.weight = *std::move(weight), .scale = *std::move(scale)};
}

}  // namespace

Result<Mxfp8Tensor> LoadMxfp8(const Checkpoint& checkpoint, std::string_view weight) {
  const Result<Mxfp8Loaders> loaders = FindMxfp8(checkpoint, weight);
  if (!loaders) return tl::unexpected(loaders.error());
  return Join(loaders->weight.LoadWhole(), loaders->scale.LoadWhole());
}

Result<Mxfp8Tensor> LoadMxfp8Slice(const Checkpoint& checkpoint, std::string_view weight, size_t axis,
                                   std::span<const AxisSlice> sections) {
  const Result<Mxfp8Loaders> loaders = FindMxfp8(checkpoint, weight);
  if (!loaders) return tl::unexpected(loaders.error());
  // Before anything is read.
  if (auto r = loaders->weight.CheckSections(axis, sections); !r) return tl::unexpected(r.error());
  std::vector<AxisSlice> scales(sections.begin(), sections.end());
  if (axis == 1) {
    Result<std::vector<AxisSlice>> blocks = InBlocks(loaders->weight, sections);
    if (!blocks) return tl::unexpected(blocks.error());
    scales = *std::move(blocks);
  }
  return Join(loaders->weight.Load(axis, sections), loaders->scale.Load(axis, scales));
}

Result<Mxfp8Tensor> LoadMxfp8Slice(const Checkpoint& checkpoint, std::string_view weight, size_t axis,
                                   const AxisSlice& slice) {
  return LoadMxfp8Slice(checkpoint, weight, axis, std::span(&slice, 1));
}

}  // namespace espalier
