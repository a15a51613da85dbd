// SPDX-License-Identifier: Apache-2.0
#include <espalier/prepare.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/parallel.h"
#include "moe/device_memory.h"
#include "moe/slab_hash.h"
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

Result<void> CopyPart(std::string_view place, std::string_view name, const void* from, uint64_t offset,
                      uint64_t bytes, DeviceBuffer& slab) {
  if (offset == kAbsentOffset) return {};
  if (from == nullptr) {
    return Error(StatusCode::kUsage, fmt::format("{}: the pointer to the {} is null", place, name));
  }
  return WriteBuffer(slab, offset, {static_cast<const std::byte*>(from), bytes});
}

Result<void> CopyMatrix(std::string_view place, const MatrixDesc& desc, const MatrixWeights& weights,
                        DeviceBuffer& slab) {
  const struct {
    std::string_view name;
    const void* from;
    uint64_t offset, bytes;
  } parts[] = {
      {"codes", weights.codes, desc.codes_offset_bytes, desc.code_bytes()},
      {"suh vector", weights.suh, desc.suh_offset_bytes, uint64_t{desc.in_channels} * 2},
      {"svh vector", weights.svh, desc.svh_offset_bytes, uint64_t{desc.out_channels} * 2},
      {"bias", weights.bias, desc.bias_offset_bytes, uint64_t{desc.out_channels} * 2},
  };
  for (const auto& part : parts) {
    if (auto copied = CopyPart(place, part.name, part.from, part.offset, part.bytes, slab); !copied)
      return copied;
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

Result<ExpertsTable> PlanExperts(const ExpertsSource& source) {
  SlabPlan plan;
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
  Result<ExpertsTable> table = PlanExperts(source);
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
