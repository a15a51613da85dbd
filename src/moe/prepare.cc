// SPDX-License-Identifier: Apache-2.0
#include <espalier/prepare.h>
#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "base/parallel.h"
#include "moe/device_memory.h"
#include "moe/slab_hash.h"
#include "moe/slab_order.h"
#include "moe/slab_plan.h"

namespace espalier {

Result<MatrixDesc> SlabPlan::Add(const MatrixSpec& spec, std::string_view name) {
  for (const uint32_t channels : {spec.in_channels, spec.out_channels}) {
    if (channels == 0 || channels % kHadamardChannels != 0) {
      return Error(StatusCode::kGeometry,
                   fmt::format("{}: {} x {} channels; legal: multiples of {}", name, spec.in_channels,
                               spec.out_channels, kHadamardChannels));
    }
  }
  if (spec.bits < kMinBits || spec.bits > kMaxBits) {
    return Error(StatusCode::kUnsupported,
                 fmt::format("{}: {} bits; legal: {} to {}", name, spec.bits, kMinBits, kMaxBits));
  }
  MatrixDesc desc;
  desc.in_channels = spec.in_channels;
  desc.out_channels = spec.out_channels;
  desc.bits = static_cast<uint8_t>(spec.bits);
  desc.codebook = spec.codebook;
  desc.order = order_;
  desc.codes_offset_bytes = Place(desc.code_bytes());
  desc.suh_offset_bytes = PlaceVector(spec.suh_key, spec.in_channels);
  desc.svh_offset_bytes = PlaceVector(spec.svh_key, spec.out_channels);
  if (spec.has_bias) desc.bias_offset_bytes = PlaceVector(0, spec.out_channels);
  return desc;
}

Result<uint64_t> SlabPlan::SizeBytes() const {
  const std::optional<uint64_t> size = size_bytes_.value();
  if (!size) return Error(StatusCode::kCapacity, "the weights exceed 2^64 bytes");
  return *size;
}

uint64_t SlabPlan::Place(uint64_t size) {
  const uint64_t offset = size_bytes_.value().value_or(0);
  size_bytes_ += CheckedBytes(size) + (kSlabAlignmentBytes - 1);
  if (const std::optional<uint64_t> end = size_bytes_.value())
    size_bytes_ = *end - *end % kSlabAlignmentBytes;
  return offset;
}

uint64_t SlabPlan::PlaceVector(uint64_t key, uint64_t channels) {
  if (key == 0) return Place(channels * sizeof(uint16_t));
  const auto [known, is_new] = shared_.try_emplace({key, channels}, 0);
  if (is_new) known->second = Place(channels * sizeof(uint16_t));
  return known->second;
}

namespace {

std::string MatrixPlace(const ExpertsSource& source, const SegmentSpec& segment, int projection) {
  return fmt::format("{}: expert {}, {}", source.identity, segment.expert,
                     ProjectionName(static_cast<Projection>(projection)));
}

tl::unexpected<Status> NullError(std::string_view place, std::string_view name) {
  return Error(StatusCode::kUsage, fmt::format("{}: the pointer to the {} is null", place, name));
}

Result<void> CopyCodes(std::string_view place, const MatrixDesc& desc, const void* from, DeviceBuffer& slab) {
  if (from == nullptr) return NullError(place, "codes");
  const auto* codes = static_cast<const std::byte*>(from);
  if (desc.order == CodeOrder::kNative)
    return WriteBuffer(slab, desc.codes_offset_bytes, {codes, desc.code_bytes()});
  PanelsFromRows(desc, 0, desc.in_channels / kTileChannels, codes, slab.data() + desc.codes_offset_bytes);
  return {};
}

Result<void> CopyMatrix(std::string_view place, const MatrixDesc& desc, const MatrixWeights& weights,
                        DeviceBuffer& slab) {
  if (auto copied = CopyCodes(place, desc, weights.codes, slab); !copied) return copied;
  const struct {
    std::string_view name;
    const uint16_t* from;
    uint64_t offset;
    uint32_t channels;
  } vectors[] = {
      {"suh vector", weights.suh, desc.suh_offset_bytes, desc.in_channels},
      {"svh vector", weights.svh, desc.svh_offset_bytes, desc.out_channels},
      {"bias", weights.bias, desc.bias_offset_bytes, desc.out_channels},
  };
  for (const auto& vector : vectors) {
    if (vector.offset == kAbsentOffset) continue;
    if (vector.from == nullptr) return NullError(place, vector.name);
    auto copied = WriteBuffer(slab, vector.offset, std::as_bytes(std::span(vector.from, vector.channels)));
    if (!copied) return copied;
  }
  return {};
}

// Where the codes of PresentMatrices(table) are now.
std::vector<const std::byte*> CodesOf(const ExpertsTable& table, std::span<const SegmentWeights> weights) {
  std::vector<const std::byte*> codes;
  for (size_t s = 0; s < weights.size(); ++s) {
    for (int p = 0; p < kNumProjections; ++p) {
      if (table.segments()[s].matrices[p].present())
        codes.push_back(static_cast<const std::byte*>(weights[s].matrices[p].codes));
    }
  }
  return codes;
}

}  // namespace

Result<ExpertsTable> PlanExperts(const ExpertsSource& source, const LoadOptions& options) {
  const Result<CodeOrder> order = ChooseOrder(options, source.identity);
  if (!order) return tl::unexpected(order.error());
  SlabPlan plan(*order);
  std::vector<SegmentDesc> segments;
  segments.reserve(source.segments.size());
  for (const SegmentSpec& spec : source.segments) {
    SegmentDesc segment;
    segment.expert = spec.expert;
    segment.valid_intermediate_channels = spec.valid_intermediate_channels;
    for (int p = 0; p < kNumProjections; ++p) {
      if (!spec.matrices[p].present()) continue;
      const Result<MatrixDesc> desc = plan.Add(spec.matrices[p], MatrixPlace(source, spec, p));
      if (!desc) return tl::unexpected(desc.error());
      segment.matrices[p] = *desc;
    }
    segments.push_back(segment);
  }
  const Result<uint64_t> size = plan.SizeBytes();
  if (!size) return tl::unexpected(size.error());
  const MoeGeometry geometry = {.experts = source.experts,
                                .hidden_channels = source.hidden_channels,
                                .stored_hidden_channels = source.stored_hidden_channels != 0
                                                              ? source.stored_hidden_channels
                                                              : source.hidden_channels,
                                .activation = source.activation.activation,
                                .output_scale = source.output_scale,
                                .io = source.activation.io,
                                .rotation = source.activation.rotation};
  return ExpertsTable::Create(geometry, std::move(segments), *size, source.identity, source.rank_plan);
}

Result<PreparedExperts> PrepareExperts(const ExpertsSource& source, std::span<const SegmentWeights> weights,
                                       const LoadOptions& options) {
  Result<ExpertsTable> table = PlanExperts(source, options);
  if (!table) return tl::unexpected(table.error());
  if (weights.size() != source.segments.size()) {
    return Error(StatusCode::kUsage, fmt::format("{}: weights of {} segments; legal: {}", source.identity,
                                                 weights.size(), source.segments.size()));
  }
  Result<DeviceBuffer> slab = AllocateSlab(table->slab_bytes(), source.identity, options);
  if (!slab) return tl::unexpected(slab.error());
  std::vector<Result<void>> copied(weights.size());
  ParallelFor(options.num_threads, weights.size(), [&](uint64_t s) {
    for (int p = 0; p < kNumProjections && copied[s]; ++p) {
      if (!table->segments()[s].matrices[p].present()) continue;
      copied[s] = CopyMatrix(MatrixPlace(source, source.segments[s], p), table->segments()[s].matrices[p],
                             weights[s].matrices[p], *slab);
    }
  });
  for (const Result<void>& result : copied) {
    if (!result) return tl::unexpected(result.error());
  }
  Result<std::string> hash =
      options.hash ? HashSlab(*table, CodesOf(*table, weights), *slab, options.num_threads) : std::string();
  if (!hash) return tl::unexpected(hash.error());
  return PreparedExperts::Create(*std::move(table), *std::move(slab), *std::move(hash));
}

}  // namespace espalier
