// SPDX-License-Identifier: Apache-2.0
#include "moe/slab_order.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "moe/code_order.h"
#include "moe/device_memory.h"

namespace espalier {
namespace {

// A panel after the other: what is written (or, the other way, read) lies in a run, and the rows of tiles
// that are gone through for every panel stay in the cache.
template <int kBits>
void PanelsFromRowsOf(const MatrixDesc& matrix, uint64_t first_row, uint64_t num_rows, const std::byte* rows,
                      std::byte* codes) {
  const uint64_t row_bytes = TileRowBytes(matrix);
  for (uint64_t panel = 0; panel < matrix.out_channels / kPanelChannels; ++panel) {
    const std::byte* tiles = rows + panel * PanelStepBytes(kBits);
    std::byte* step = codes + PanelStepOffset(matrix.in_channels, kBits, first_row, panel);
    for (uint64_t row = 0; row < num_rows; ++row) {
      PanelStepFromTiles(tiles + row * row_bytes, kBits, step + row * PanelStepBytes(kBits));
    }
  }
}

template <int kBits>
void RowsFromPanelsOf(const MatrixDesc& matrix, uint64_t first_row, uint64_t num_rows, const std::byte* codes,
                      std::byte* rows) {
  const uint64_t row_bytes = TileRowBytes(matrix);
  for (uint64_t panel = 0; panel < matrix.out_channels / kPanelChannels; ++panel) {
    std::byte* tiles = rows + panel * PanelStepBytes(kBits);
    const std::byte* step = codes + PanelStepOffset(matrix.in_channels, kBits, first_row, panel);
    for (uint64_t row = 0; row < num_rows; ++row) {
      for (uint32_t tile = 0; tile < 2; ++tile) {
        TileFromPanelStep(step + row * PanelStepBytes(kBits), kBits, tile,
                          tiles + row * row_bytes + tile * TileBytes(kBits));
      }
    }
  }
}

uint64_t EndOf(const MatrixDesc& matrix) { return matrix.codes_offset_bytes + matrix.code_bytes(); }

// Codes in panels that lie where others do have to be the same.
Result<void> CheckOverlap(const MatrixDesc& before, const MatrixDesc& matrix) {
  if (before.order == CodeOrder::kNative && matrix.order == CodeOrder::kNative) return {};
  const bool same = before.codes_offset_bytes == matrix.codes_offset_bytes &&
                    before.in_channels == matrix.in_channels && before.out_channels == matrix.out_channels &&
                    before.bits == matrix.bits && before.order == matrix.order;
  if (same || EndOf(before) <= matrix.codes_offset_bytes) return {};
  return Error(StatusCode::kGeometry,
               fmt::format("codes at byte {} of the slab overlap those at {}; legal: in "
                           "native order only",
                           matrix.codes_offset_bytes, before.codes_offset_bytes));
}

// Those in panels, by place.
Result<std::vector<MatrixDesc>> InPanels(std::span<const MatrixDesc> matrices) {
  std::vector<MatrixDesc> sorted;
  std::ranges::copy_if(matrices, std::back_inserter(sorted), &MatrixDesc::present);
  std::ranges::sort(sorted, {}, &MatrixDesc::codes_offset_bytes);
  std::vector<MatrixDesc> in_panels;
  const MatrixDesc* furthest = nullptr;  // of those before, the one that ends last
  for (const MatrixDesc& matrix : sorted) {
    if (furthest != nullptr) {
      if (auto legal = CheckOverlap(*furthest, matrix); !legal) return tl::unexpected(legal.error());
    }
    if (furthest == nullptr || EndOf(matrix) > EndOf(*furthest)) furthest = &matrix;
    if (matrix.order == CodeOrder::kPanels) in_panels.push_back(matrix);
  }
  return in_panels;
}

Result<void> CopyMatrix(const MatrixDesc& matrix, const std::byte* codes, std::span<std::byte> window,
                        DeviceBuffer& target) {
  const uint64_t row_bytes = TileRowBytes(matrix);
  const uint64_t rows = matrix.in_channels / kTileChannels;
  const uint64_t rows_per_window = window.size() / row_bytes;
  for (uint64_t row = 0; row < rows; row += rows_per_window) {
    const uint64_t count = std::min(rows_per_window, rows - row);
    RowsFromPanels(matrix, row, count, codes, window.data());
    auto written =
        WriteBuffer(target, matrix.codes_offset_bytes + row * row_bytes, window.first(count * row_bytes));
    if (!written) return written;
  }
  return {};
}

}  // namespace

uint64_t TileRowBytes(const MatrixDesc& matrix) {
  return matrix.out_channels / kTileChannels * TileBytes(matrix.bits);
}

void PanelsFromRows(const MatrixDesc& matrix, uint64_t first_row, uint64_t num_rows, const std::byte* rows,
                    std::byte* codes) {
  switch (matrix.bits) {
#define ESPALIER_BITS(bits)                                           \
  case bits:                                                          \
    PanelsFromRowsOf<bits>(matrix, first_row, num_rows, rows, codes); \
    return;
#include <espalier/formats.def>
    default:
      return;
  }
}

void RowsFromPanels(const MatrixDesc& matrix, uint64_t first_row, uint64_t num_rows, const std::byte* codes,
                    std::byte* rows) {
  switch (matrix.bits) {
#define ESPALIER_BITS(bits)                                           \
  case bits:                                                          \
    RowsFromPanelsOf<bits>(matrix, first_row, num_rows, codes, rows); \
    return;
#include <espalier/formats.def>
    default:
      return;
  }
}

Result<CodeOrder> ChooseOrder(const LoadOptions& options, std::string_view identity) {
  const CodeOrder own = options.device.is_host() ? CodeOrder::kPanels : CodeOrder::kNative;
  const CodeOrder order = options.order.value_or(own);
  if (auto legal = CheckOrder(order, options.device, identity); !legal) return tl::unexpected(legal.error());
  return order;
}

Result<void> CheckOrder(CodeOrder order, const Device& device, std::string_view identity) {
  if (order != CodeOrder::kNative && order != CodeOrder::kPanels) {
    return Error(StatusCode::kUnsupported, fmt::format("{}: codes in order number {}; legal: 0 (native), 1 "
                                                       "(panels)",
                                                       identity, static_cast<int>(order)));
  }
  if (order == CodeOrder::kNative || device.is_host()) return {};
  return Error(StatusCode::kUnsupported,
               fmt::format("{}: codes in panels on {}; legal: in native order there, "
                           "in either on the host",
                           identity, DeviceText(device)));
}

Result<void> CopyToNative(std::span<const MatrixDesc> matrices, std::span<const std::byte> slab,
                          uint64_t window_bytes, DeviceBuffer& target) {
  const Result<std::vector<MatrixDesc>> in_panels = InPanels(matrices);
  if (!in_panels) return tl::unexpected(in_panels.error());
  if (in_panels->empty()) return WriteBuffer(target, 0, slab);
  for (const MatrixDesc& matrix : *in_panels) window_bytes = std::max(window_bytes, TileRowBytes(matrix));
  Result<HostBuffer> window = target.device().is_host() ? HostBuffer::Create(window_bytes)
                                                        : AllocatePinned(target.device(), window_bytes);
  if (!window) return tl::unexpected(window.error());
  uint64_t done = 0;  // bytes of the slab
  for (const MatrixDesc& matrix : *in_panels) {
    if (matrix.codes_offset_bytes < done) continue;  // the same as the one before
    if (auto gap = WriteBuffer(target, done, slab.subspan(done, matrix.codes_offset_bytes - done)); !gap)
      return gap;
    auto copied = CopyMatrix(matrix, slab.data() + matrix.codes_offset_bytes, window->span(), target);
    if (!copied) return copied;
    done = EndOf(matrix);
  }
  return WriteBuffer(target, done, slab.subspan(done));
}

}  // namespace espalier
