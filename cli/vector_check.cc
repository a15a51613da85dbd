// SPDX-License-Identifier: Apache-2.0
#include "vector_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string>

namespace espalier::cli {
namespace {

bool IsFinite(uint16_t fp16) { return (fp16 & 0x7C00) != 0x7C00; }
bool IsZero(uint16_t fp16) { return (fp16 & 0x7FFF) == 0; }
bool IsNan(uint16_t fp16) { return !IsFinite(fp16) && (fp16 & 0x03FF) != 0; }

}  // namespace

VectorCheck::Place VectorCheck::Locate(const VectorSource& vector, uint64_t channel) const {
  const uint64_t target = channel * sizeof(uint16_t);
  for (const CopyRegion& region : vector.regions) {
    for (uint64_t row = 0; row < region.rows; ++row) {
      const uint64_t begin = region.target_offset + row * region.target_stride;
      if (target < begin || target >= begin + region.row_bytes) continue;
      const uint64_t offset = region.source_offset + row * region.source_stride + (target - begin);
      for (const TensorInfo& tensor : checkpoint_.tensors()) {
        if (tensor.file == region.file && offset >= tensor.offset_bytes &&
            offset < tensor.offset_bytes + tensor.size_bytes) {
          return {region.file, tensor.name, (offset - tensor.offset_bytes) / sizeof(uint16_t)};
        }
      }
      return {region.file, "", offset / sizeof(uint16_t)};
    }
  }
  return {};
}

Result<bool> VectorCheck::ReadVector(const VectorSource& vector, uint64_t channels) {
  // Sign bits are finite whatever they are.
  if (vector.kind != VectorSource::Kind::kFp16 || vector.regions.empty()) return false;
  const CopyRegion& first = vector.regions.front();
  if (vector.share_key != 0 &&
      !seen_.insert(std::tuple(vector.share_key, first.file, first.source_offset, channels)).second) {
    return false;
  }
  values_.resize(channels);
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(values_));
  if (Result<void> read = checkpoint_.ReadRegions(vector.regions, bytes); !read) {
    return tl::unexpected(read.error());
  }
  return true;
}

Result<void> VectorCheck::CheckVector(const VectorSource& vector, uint64_t channels, std::string_view layer) {
  const Result<bool> read = ReadVector(vector, channels);
  if (!read) return tl::unexpected(read.error());
  if (!*read) {
    values_.clear();
    return {};
  }
  const auto bad = std::find_if_not(values_.begin(), values_.end(), IsFinite);
  if (bad == values_.end()) return {};
  const auto count = std::count_if(bad, values_.end(), [](uint16_t value) { return !IsFinite(value); });
  const Place place = Locate(vector, static_cast<uint64_t>(bad - values_.begin()));
  found_error_ = true;
  problems_.push_back(
      {.severity = Problem::Severity::kError,
       .file = checkpoint_.files()[place.file].name,
       .tensor = std::string(place.tensor),
       .message = fmt::format("element {} is {}{}; legal: finite numbers", place.element,
                              IsNan(*bad) ? "NaN" : "infinite",
                              count > 1 ? fmt::format(" (and {} more are not finite)", count - 1) : ""),
       .layer = std::string(layer)});
  return {};
}

void VectorCheck::CountPadding(const VectorSource& vector, uint64_t first) {
  for (uint64_t channel = first; channel < values_.size(); ++channel) {
    if (IsZero(values_[channel])) continue;
    if (num_padded_vectors_++ == 0) first_padded_ = Locate(vector, channel);
    return;
  }
}

Result<void> VectorCheck::CheckMatrix(size_t layer, uint32_t expert, Projection projection, uint32_t slice) {
  const MoeLayer& moe = checkpoint_.layers()[layer];
  const MatrixInfo matrix = checkpoint_.Matrix(layer, expert, projection, slice);
  const bool down = projection == Projection::kDown;
  const uint64_t width = down ? matrix.in_channels : matrix.out_channels;
  const Result<MatrixSource> source =
      checkpoint_.Source(layer, expert, projection, {.slice = slice, .first_channel = 0, .channels = width});
  if (!source) return tl::unexpected(source.error());
  if (auto ok = CheckVector(source->suh, matrix.in_channels, moe.label); !ok) return ok;
  if (auto ok = CheckVector(source->bias, matrix.out_channels, moe.label); !ok) return ok;
  if (auto ok = CheckVector(source->svh, matrix.out_channels, moe.label); !ok) return ok;
  const uint64_t first_channel = down ? 0 : slice * width;
  const uint64_t valid = down ? moe.valid_hidden_channels : moe.valid_intermediate_channels;
  CountPadding(source->svh, valid > first_channel ? valid - first_channel : 0);
  return {};
}

void VectorCheck::ReportPadding(size_t layer) {
  if (num_padded_vectors_ == 0) return;
  const MoeLayer& moe = checkpoint_.layers()[layer];
  problems_.push_back(
      {.severity = Problem::Severity::kWarning,
       .file = checkpoint_.files()[first_padded_.file].name,
       .tensor = std::string(first_padded_.tensor),
       .message =
           fmt::format("element {} is not 0 although it is padding (config sizes: hidden {}, intermediate "
                       "{}); {} vectors of layer {} are like this",
                       first_padded_.element, moe.valid_hidden_channels, moe.valid_intermediate_channels,
                       num_padded_vectors_, moe.label),
       .layer = moe.label});
}

Result<void> VectorCheck::CheckLayer(size_t layer) {
  const MoeLayer& moe = checkpoint_.layers()[layer];
  for (uint32_t expert = 0; expert < moe.experts; ++expert) {
    for (int p = moe.has_gate ? 0 : 1; p < kNumProjections; ++p) {
      for (uint32_t slice = 0; slice < moe.slices; ++slice) {
        if (auto ok = CheckMatrix(layer, expert, static_cast<Projection>(p), slice); !ok) return ok;
      }
    }
  }
  ReportPadding(layer);
  return {};
}

Result<void> VectorCheck::CheckLinears() {
  for (size_t i = 0; i < checkpoint_.linears().size(); ++i) {
    const MatrixInfo& matrix = checkpoint_.linears()[i].matrix;
    if (Result<void> marker = checkpoint_.CheckMarker(matrix); !marker) return marker;
    const Result<MatrixSource> source = checkpoint_.LinearSource(i);
    if (!source) return tl::unexpected(source.error());
    if (auto ok = CheckVector(source->suh, matrix.in_channels, ""); !ok) return ok;
    if (auto ok = CheckVector(source->svh, matrix.out_channels, ""); !ok) return ok;
    if (auto ok = CheckVector(source->bias, matrix.out_channels, ""); !ok) return ok;
  }
  return {};
}

}  // namespace espalier::cli
