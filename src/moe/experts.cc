// SPDX-License-Identifier: Apache-2.0
#include <espalier/experts.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "moe/device_memory.h"
#include "moe/slab_hash.h"
#include "moe/slab_order.h"

namespace espalier {
namespace {

constexpr uint32_t kMaxExperts = 1u << 20;

// Where a matrix or vector lies, for messages.
struct Place {
  std::string_view identity;
  std::string matrix;  // "expert 3, gate", or empty for a linear

  std::string Name() const {
    return matrix.empty() ? std::string(identity) : fmt::format("{}: {}", identity, matrix);
  }
  std::string Text(std::string_view what) const { return fmt::format("{}: {}", Name(), what); }
};

Place PlaceOf(std::string_view identity, const SegmentDesc& segment, Projection projection) {
  return {identity, fmt::format("expert {}, {}", segment.expert, ProjectionName(projection))};
}

// The same error, with the package it befell.
tl::unexpected<Status> InPlace(std::string_view identity, const Status& status) {
  return Error(status.code(), fmt::format("{}: {}", identity, status.message()));
}

constexpr uint64_t kCopyWindowBytes = uint64_t{4} << 20;

// Codes in panels become native on the way to a GPU.
template <typename Package>
Result<DeviceBuffer> CopySlab(const Package& package, std::span<const MatrixDesc> matrices,
                              const Device& device) {
  const uint64_t size_bytes = package.slab_bytes();
  Result<DeviceBuffer> slab = DeviceBuffer::Create(device, size_bytes);
  if (!slab) return InPlace(package.identity(), slab.error());
  if (size_bytes == 0) return slab;
  const std::span<const std::byte> bytes(package.slab(), size_bytes);
  Result<void> copied;
  if (!package.device().is_host()) {
    copied = CopyBytes(package.device(), slab->data(), package.slab(), size_bytes);
  } else if (device.is_host()) {
    copied = WriteBuffer(*slab, 0, bytes);
  } else {
    copied = CopyToNative(matrices, bytes, kCopyWindowBytes, *slab);
  }
  if (!copied) return InPlace(package.identity(), copied.error());
  return slab;
}

// The table of a copy on `device`.
Result<ExpertsTable> TableOn(const ExpertsTable& table, const Device& device) {
  if (device.is_host()) return table;
  std::vector<SegmentDesc> segments(table.segments().begin(), table.segments().end());
  for (SegmentDesc& segment : segments) {
    for (MatrixDesc& matrix : segment.matrices) matrix.order = CodeOrder::kNative;
  }
  return ExpertsTable::Create(table.geometry(), std::move(segments), table.slab_bytes(), table.identity(),
                              table.rank_plan());
}

tl::unexpected<Status> GeometryError(const Place& place, std::string_view what) {
  return Error(StatusCode::kGeometry, place.Text(what));
}

Result<void> CheckRange(const Place& place, std::string_view name, uint64_t offset, uint64_t size,
                        uint64_t slab_bytes) {
  if (offset == kAbsentOffset) return GeometryError(place, fmt::format("no {}", name));
  if (offset % kSlabAlignmentBytes != 0) {
    return GeometryError(place, fmt::format("{} at byte {} of the slab; legal: multiples of {}", name, offset,
                                            kSlabAlignmentBytes));
  }
  if (size > slab_bytes || offset > slab_bytes - size) {
    return GeometryError(place, fmt::format("{}: {} bytes at {} lie outside the slab of {} bytes", name, size,
                                            offset, slab_bytes));
  }
  return {};
}

bool KnownCodebook(Codebook codebook) {
  return std::ranges::any_of(AllCodebooks(),
                             [&](const CodebookInfo& info) { return info.codebook == codebook; });
}

Result<void> CheckMatrix(const Place& place, const MatrixDesc& matrix, uint64_t slab_bytes) {
  for (const uint32_t channels : {matrix.in_channels, matrix.out_channels}) {
    if (channels == 0 || channels % kHadamardChannels != 0) {
      return GeometryError(place, fmt::format("{} x {} channels; legal: multiples of {}", matrix.in_channels,
                                              matrix.out_channels, kHadamardChannels));
    }
  }
  if (matrix.bits < kMinBits || matrix.bits > kMaxBits) {
    return Error(StatusCode::kUnsupported,
                 place.Text(fmt::format("{} bits; legal: {} to {}", matrix.bits, kMinBits, kMaxBits)));
  }
  if (!KnownCodebook(matrix.codebook)) {
    return Error(StatusCode::kUnsupported,
                 place.Text(fmt::format("unknown codebook number {}", static_cast<int>(matrix.codebook))));
  }
  if (auto legal = CheckOrder(matrix.order, {}, place.Name()); !legal) return legal;
  // in * out / 8 * bits with both below 2^32 and bits <= 8 stays below 2^64.
  const std::tuple<std::string_view, uint64_t, uint64_t> ranges[] = {
      {"codes", matrix.codes_offset_bytes, matrix.code_bytes()},
      {"suh", matrix.suh_offset_bytes, uint64_t{matrix.in_channels} * 2},
      {"svh", matrix.svh_offset_bytes, uint64_t{matrix.out_channels} * 2},
      {"bias", matrix.bias_offset_bytes, uint64_t{matrix.out_channels} * 2},
  };
  for (const auto& [name, offset, size] : ranges) {
    if (name == "bias" && offset == kAbsentOffset) continue;
    if (Result<void> checked = CheckRange(place, name, offset, size, slab_bytes); !checked) return checked;
  }
  return {};
}

// The orders of a table whose slab turns out to lie on `device`.
Result<void> CheckOrders(const ExpertsTable& table, const Device& device) {
  for (const SegmentDesc& segment : table.segments()) {
    for (const Projection projection : {Projection::kGate, Projection::kUp, Projection::kDown}) {
      const Place place = PlaceOf(table.identity(), segment, projection);
      auto legal = CheckOrder(segment.matrices[static_cast<int>(projection)].order, device, place.Name());
      if (!legal) return legal;
    }
  }
  return {};
}

Result<void> CheckActivation(const Place& place, const Activation& activation) {
  const bool known = std::ranges::any_of(
      std::initializer_list<ActivationKind>{
#define ESPALIER_ACTIVATION(enumerator, number, name, has_gate, num_parameters) ActivationKind::enumerator,
#include <espalier/formats.def>
      },
      [&](ActivationKind kind) { return kind == activation.kind; });
  if (!known) return Error(StatusCode::kUnsupported, place.Text("unknown activation"));
  const auto legal = [](double parameter) { return std::isfinite(parameter) && parameter >= 0; };
  if (!legal(activation.limit) || !legal(activation.beta) || !legal(activation.linear_beta) ||
      (activation.kind == ActivationKind::kSitu && activation.beta == 0)) {
    return GeometryError(
        place,
        fmt::format("activation {}: limit {}, beta {}, linear beta {}; legal: finite, not "
                    "negative, and a beta greater than 0",
                    ActivationText(activation), activation.limit, activation.beta, activation.linear_beta));
  }
  const bool limitless =
      activation.kind == ActivationKind::kSitu || activation.kind == ActivationKind::kRelu2;
  if (limitless && activation.limit > 0) {
    return Error(StatusCode::kUnsupported,
                 place.Text(fmt::format("activation {} with a limit of {}", ActivationText(activation),
                                        activation.limit)));
  }
  return {};
}

Result<void> CheckMoeGeometry(const Place& place, const MoeGeometry& geometry) {
  if (geometry.experts > kMaxExperts) {
    return GeometryError(place, fmt::format("{} experts; legal: at most {}", geometry.experts, kMaxExperts));
  }
  if (geometry.stored_hidden_channels == 0 || geometry.stored_hidden_channels % kHadamardChannels != 0) {
    return GeometryError(place, fmt::format("{} stored hidden channels; legal: multiples of {}",
                                            geometry.stored_hidden_channels, kHadamardChannels));
  }
  if (geometry.hidden_channels == 0 || geometry.hidden_channels > geometry.stored_hidden_channels) {
    return GeometryError(place, fmt::format("{} hidden channels; legal: 1 to the {} stored ones",
                                            geometry.hidden_channels, geometry.stored_hidden_channels));
  }
  if (!std::isfinite(geometry.output_scale)) return GeometryError(place, "the output scale is not finite");
  const auto is_input = [](Dtype type) {
    return type == Dtype::kF32 || type == Dtype::kF16 || type == Dtype::kBF16;
  };
  if (geometry.io && !is_input(*geometry.io)) {
    return Error(StatusCode::kUnsupported, place.Text(fmt::format("inputs of type {}; legal: F32, F16, BF16",
                                                                  DtypeName(*geometry.io))));
  }
  if (geometry.rotation != Dtype::kF32 && geometry.rotation != Dtype::kF16) {
    return Error(
        StatusCode::kUnsupported,
        place.Text(fmt::format("rotated values of type {}; legal: F32, F16", DtypeName(geometry.rotation))));
  }
  return CheckActivation(place, geometry.activation);
}

Result<void> CheckShape(const Place& place, const MatrixDesc& matrix, uint32_t in, uint32_t out) {
  if (matrix.in_channels == in && matrix.out_channels == out) return {};
  return GeometryError(place, fmt::format("{} x {} channels; the segment needs {} x {}", matrix.in_channels,
                                          matrix.out_channels, in, out));
}

Result<void> CheckSegment(std::string_view identity, const MoeGeometry& geometry, const SegmentDesc& segment,
                          uint64_t slab_bytes) {
  const auto place_of = [&](Projection projection) { return PlaceOf(identity, segment, projection); };
  const bool needs_gate = ActivationHasGate(geometry.activation.kind);
  if (needs_gate != segment.gate().present()) {
    return GeometryError(
        place_of(Projection::kGate),
        fmt::format("{}; activation {} {}", needs_gate ? "absent" : "present",
                    ActivationText(geometry.activation), needs_gate ? "needs it" : "has none"));
  }
  const uint32_t width = segment.intermediate_channels();
  for (const Projection projection : {Projection::kGate, Projection::kUp, Projection::kDown}) {
    if (projection == Projection::kGate && !needs_gate) continue;
    const MatrixDesc& matrix = segment.matrices[static_cast<int>(projection)];
    const Place place = place_of(projection);
    const bool down = projection == Projection::kDown;
    const uint32_t hidden = geometry.stored_hidden_channels;
    if (Result<void> checked = CheckMatrix(place, matrix, slab_bytes); !checked) return checked;
    Result<void> shape = CheckShape(place, matrix, down ? width : hidden, down ? hidden : width);
    if (!shape) return shape;
  }
  if (segment.valid_intermediate_channels > width) {
    return GeometryError(
        place_of(Projection::kDown),
        fmt::format("{} valid intermediate channels of {}", segment.valid_intermediate_channels, width));
  }
  return {};
}

}  // namespace

Result<ExpertsTable> ExpertsTable::Create(const MoeGeometry& geometry, std::vector<SegmentDesc> segments,
                                          uint64_t slab_bytes, std::string identity, RankPlan rank_plan) {
  const Place place{identity, ""};
  if (Result<void> checked = CheckMoeGeometry(place, geometry); !checked)
    return tl::unexpected(checked.error());
  ExpertsTable table;
  table.geometry_ = geometry;
  table.first_segment_.assign(size_t{geometry.experts} + 1, 0);
  uint32_t previous = 0;
  for (const SegmentDesc& segment : segments) {
    if (segment.expert >= geometry.experts || segment.expert < previous) {
      return GeometryError(place,
                           fmt::format("segment of expert {} after one of expert {}; legal: ascending, below "
                                       "{}",
                                       segment.expert, previous, geometry.experts));
    }
    previous = segment.expert;
    Result<void> checked = CheckSegment(identity, geometry, segment, slab_bytes);
    if (!checked) return tl::unexpected(checked.error());
    for (const MatrixDesc& matrix : segment.matrices) {
      if (matrix.present()) table.code_bytes_ += matrix.code_bytes();
    }
    ++table.first_segment_[segment.expert + 1];
    table.max_intermediate_channels_ =
        std::max(table.max_intermediate_channels_, segment.intermediate_channels());
  }
  for (uint32_t expert = 0; expert < geometry.experts; ++expert) {
    const uint32_t count = table.first_segment_[expert + 1];
    table.max_segments_per_expert_ = std::max(table.max_segments_per_expert_, count);
    table.first_segment_[expert + 1] += table.first_segment_[expert];
  }
  table.segments_ = std::move(segments);
  table.slab_bytes_ = slab_bytes;
  table.identity_ = std::move(identity);
  table.rank_plan_ = std::move(rank_plan);
  return table;
}

std::span<const SegmentDesc> ExpertsTable::ExpertSegments(uint32_t expert) const {
  const uint32_t begin = first_segment_[expert];
  return std::span(segments_).subspan(begin, first_segment_[expert + 1] - begin);
}

Result<PreparedExperts> PreparedExperts::Create(ExpertsTable table, HostBuffer slab,
                                                std::string content_sha256) {
  return Create(std::move(table), DeviceBuffer(std::move(slab)), std::move(content_sha256));
}

Result<PreparedExperts> PreparedExperts::Create(ExpertsTable table, DeviceBuffer slab,
                                                std::string content_sha256) {
  if (slab.size_bytes() < table.slab_bytes()) {
    return GeometryError({table.identity(), ""}, fmt::format("a slab of {} bytes; the table needs {}",
                                                             slab.size_bytes(), table.slab_bytes()));
  }
  if (reinterpret_cast<uintptr_t>(slab.data()) % kSlabAlignmentBytes != 0) {
    return GeometryError({table.identity(), ""},
                         fmt::format("the slab is not aligned to {} bytes", kSlabAlignmentBytes));
  }
  DeviceBuffer device_table;
  if (!slab.device().is_host()) {
    if (auto legal = CheckOrders(table, slab.device()); !legal) return tl::unexpected(legal.error());
    Result<DeviceBuffer> made = MakeDeviceTable(table, slab);
    if (!made) return InPlace(table.identity(), made.error());
    device_table = *std::move(made);
  }
  return PreparedExperts(std::move(table), std::move(slab), std::move(device_table),
                         std::move(content_sha256));
}

Result<PreparedExperts> PreparedExperts::Create(const MoeGeometry& geometry,
                                                std::vector<SegmentDesc> segments, HostBuffer slab,
                                                std::string identity) {
  Result<ExpertsTable> table =
      ExpertsTable::Create(geometry, std::move(segments), slab.size_bytes(), std::move(identity));
  if (!table) return tl::unexpected(table.error());
  return Create(*std::move(table), std::move(slab));
}

Result<PreparedLinear> PreparedLinear::Create(const MatrixDesc& matrix, uint32_t in_channels,
                                              uint32_t out_channels, HostBuffer slab, std::string identity) {
  return Create(matrix, in_channels, out_channels, DeviceBuffer(std::move(slab)), std::move(identity));
}

Result<PreparedLinear> PreparedLinear::Create(const MatrixDesc& matrix, uint32_t in_channels,
                                              uint32_t out_channels, DeviceBuffer slab,
                                              std::string identity) {
  const Place place{identity, ""};
  if (Result<void> checked = CheckMatrix(place, matrix, slab.size_bytes()); !checked) {
    return tl::unexpected(checked.error());
  }
  if (auto legal = CheckOrder(matrix.order, slab.device(), place.Name()); !legal)
    return tl::unexpected(legal.error());
  if (in_channels > matrix.in_channels || out_channels > matrix.out_channels) {
    return GeometryError(place, fmt::format("{} x {} channels asked for; stored are {} x {}", in_channels,
                                            out_channels, matrix.in_channels, matrix.out_channels));
  }
  PreparedLinear linear;
  linear.matrix_ = matrix;
  linear.in_channels_ = in_channels == 0 ? matrix.in_channels : in_channels;
  linear.out_channels_ = out_channels == 0 ? matrix.out_channels : out_channels;
  linear.slab_ = std::move(slab);
  linear.identity_ = std::move(identity);
  return linear;
}

Result<PreparedExperts> ToDevice(const PreparedExperts& experts, const Device& device) {
  Result<ExpertsTable> table = TableOn(experts.table(), device);
  if (!table) return tl::unexpected(table.error());
  Result<DeviceBuffer> slab = CopySlab(experts, PresentMatrices(experts.table()), device);
  if (!slab) return tl::unexpected(slab.error());
  return PreparedExperts::Create(*std::move(table), *std::move(slab), experts.content_sha256());
}

Result<PreparedLinear> ToDevice(const PreparedLinear& linear, const Device& device) {
  Result<DeviceBuffer> slab = CopySlab(linear, {&linear.matrix(), 1}, device);
  if (!slab) return tl::unexpected(slab.error());
  MatrixDesc matrix = linear.matrix();
  if (!device.is_host()) matrix.order = CodeOrder::kNative;
  return PreparedLinear::Create(matrix, linear.in_channels(), linear.out_channels(), *std::move(slab),
                                linear.identity());
}

}  // namespace espalier
