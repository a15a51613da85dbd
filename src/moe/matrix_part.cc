// SPDX-License-Identifier: Apache-2.0
#include "moe/matrix_part.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

namespace espalier {
namespace {

struct Range {
  uint64_t first = 0;
  uint64_t count = 0;

  Range Times(uint64_t factor) const { return {.first = first * factor, .count = count * factor}; }
  Range Over(uint64_t divisor) const { return {.first = first / divisor, .count = count / divisor}; }
};

// Subtractions only: the numbers are the caller's, and a sum of them may wrap.
Result<Range> CutAxis(const MatrixSource& matrix, std::string_view side, uint64_t stored, uint64_t first,
                      uint64_t channels) {
  const bool begins = first % kHadamardChannels == 0 && first < stored;
  const uint64_t rest = begins ? stored - first : 0;
  const uint64_t count = channels == 0 ? rest : channels;
  if (begins && count <= rest && count % kHadamardChannels == 0) return Range{.first = first, .count = count};
  return Error(StatusCode::kGeometry,
               fmt::format("{}: found {} channels [{}, +{}), legal: multiples of {} within {}", matrix.name,
                           side, first, channels, kHadamardChannels, stored));
}

struct Span {
  uint64_t skipped = 0;  // of what is cut
  uint64_t begin = 0;    // in the part
  uint64_t count = 0;
};

Span Intersect(uint64_t first, uint64_t count, const Range& part) {
  const uint64_t begin = std::max(first, part.first);
  const uint64_t end = std::min(first + count, part.first + part.count);
  if (begin >= end) return {};
  return {.skipped = begin - first, .begin = begin - part.first, .count = end - begin};
}

// Rows and bytes of rows of a target whose rows have `row_bytes`. A region is whole rows, or lies inside one
// row, or has such a piece of every row.
std::vector<CopyRegion> CutRegions(std::vector<CopyRegion> regions, uint64_t row_bytes, const Range& rows,
                                   const Range& bytes) {
  std::vector<CopyRegion> parts;
  for (CopyRegion& region : regions) {
    if (region.rows == 1 && region.row_bytes % row_bytes == 0) {
      region.rows = region.row_bytes / row_bytes;
      region.row_bytes = region.source_stride = row_bytes;
    }
    const Span row = Intersect(region.target_offset / row_bytes, region.rows, rows);
    const Span byte = Intersect(region.target_offset % row_bytes, region.row_bytes, bytes);
    if (row.count == 0 || byte.count == 0) continue;
    parts.push_back(
        {.file = region.file,
         .rows = row.count,
         .row_bytes = byte.count,
         .source_offset = region.source_offset + row.skipped * region.source_stride + byte.skipped,
         .source_stride = region.source_stride,
         .target_offset = row.begin * bytes.count + byte.begin,
         .target_stride = bytes.count});
  }
  return parts;
}

// Blocks of 128 channels are whole bytes of signs too, and whole rows of sources that come in pieces.
void CutVector(VectorSource& vector, const Range& channels) {
  const bool bits = vector.kind == VectorSource::Kind::kSignBits;
  const uint64_t block_bytes = bits ? kHadamardChannels / 8 : kHadamardChannels * sizeof(uint16_t);
  std::vector<CopyRegion> parts;
  for (const CopyRegion& region : vector.regions) {
    const uint64_t row_bytes = std::min(region.row_bytes, block_bytes);
    const Range rows = channels.Over(kHadamardChannels).Times(block_bytes / row_bytes);
    for (CopyRegion& part : CutRegions({region}, row_bytes, rows, {.first = 0, .count = row_bytes})) {
      if (part.source_stride == row_bytes) {  // one run again
        part.row_bytes *= part.rows;
        part.rows = 1;
      }
      parts.push_back(part);
    }
  }
  vector.regions = std::move(parts);
}

}  // namespace

Result<MatrixSource> CutMatrix(MatrixSource whole, const LinearExtent& extent) {
  MatrixInfo& info = whole.info;
  const Result<Range> in = CutAxis(whole, "input", info.in_channels, extent.first_in, extent.in_channels);
  if (!in) return tl::unexpected(in.error());
  const Result<Range> out =
      CutAxis(whole, "output", info.out_channels, extent.first_out, extent.out_channels);
  if (!out) return tl::unexpected(out.error());
  const uint64_t tile_bytes = TileBytes(info.bits);
  whole.codes = CutRegions(std::move(whole.codes), info.out_channels / kTileChannels * tile_bytes,
                           in->Over(kTileChannels), out->Over(kTileChannels).Times(tile_bytes));
  CutVector(whole.suh, *in);
  CutVector(whole.svh, *out);
  // Added once, by the part that starts at input channel 0.
  if (in->first != 0) whole.bias = {};
  CutVector(whole.bias, *out);
  info.in_channels = in->count;
  info.out_channels = out->count;
  info.has_bias = whole.bias.kind != VectorSource::Kind::kAbsent;
  return whole;
}

}  // namespace espalier
