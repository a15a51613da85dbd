// SPDX-License-Identifier: Apache-2.0
#include "moe/slab_hash.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string_view>
#include <utility>

#include "base/parallel.h"
#include "base/sha256.h"
#include "moe/device_memory.h"
#include "moe/slab_order.h"

namespace espalier {
namespace {

constexpr uint64_t kPieceBytes = uint64_t{4} << 20;

Result<std::string> HashVector(const DeviceBuffer& slab, uint64_t offset, uint32_t channels) {
  if (offset == kAbsentOffset) return std::string("-");
  std::vector<std::byte> bytes(uint64_t{channels} * sizeof(uint16_t));
  if (auto read = ReadBuffer(slab, offset, bytes); !read) return tl::unexpected(read.error());
  return Sha256Hex(bytes);
}

// Everything about a matrix but its codes.
Result<std::string> MatrixText(const SegmentDesc& segment, int projection, const DeviceBuffer& slab) {
  const MatrixDesc& matrix = segment.matrices[projection];
  const Result<std::string> suh = HashVector(slab, matrix.suh_offset_bytes, matrix.in_channels);
  if (!suh) return suh;
  const Result<std::string> svh = HashVector(slab, matrix.svh_offset_bytes, matrix.out_channels);
  if (!svh) return svh;
  const Result<std::string> bias = HashVector(slab, matrix.bias_offset_bytes, matrix.out_channels);
  if (!bias) return bias;
  return fmt::format("{} {} {} {} x {} K {} codebook {} suh {} svh {} bias {}\n", segment.expert,
                     segment.valid_intermediate_channels, projection, matrix.in_channels, matrix.out_channels,
                     matrix.bits, static_cast<int>(matrix.codebook), *suh, *svh, *bias);
}

void Update(Sha256& hash, std::string_view text) { hash.Update(std::as_bytes(std::span(text))); }

}  // namespace

std::vector<CodePiece> CodePieces(std::span<const MatrixDesc> matrices) {
  std::vector<CodePiece> pieces;
  for (size_t m = 0; m < matrices.size(); ++m) {
    const uint64_t rows = matrices[m].in_channels / kTileChannels;
    const uint64_t row_bytes = TileRowBytes(matrices[m]);
    const uint64_t rows_per_piece = std::max<uint64_t>(kPieceBytes / row_bytes, 1);
    for (uint64_t row = 0; row < rows; row += rows_per_piece) {
      pieces.push_back({.matrix = m,
                        .first_byte = row * row_bytes,
                        .size_bytes = std::min(rows_per_piece, rows - row) * row_bytes});
    }
  }
  return pieces;
}

std::vector<MatrixDesc> PresentMatrices(const ExpertsTable& table) {
  std::vector<MatrixDesc> matrices;
  for (const SegmentDesc& segment : table.segments()) {
    for (const MatrixDesc& matrix : segment.matrices) {
      if (matrix.present()) matrices.push_back(matrix);
    }
  }
  return matrices;
}

Result<std::string> HashTable(const ExpertsTable& table, std::span<const std::string> piece_hashes,
                              const DeviceBuffer& slab) {
  const MoeGeometry& geometry = table.geometry();
  Sha256 hash;
  Update(hash, fmt::format("experts {} hidden {} of {} activation {} scale {}\n", geometry.experts,
                           geometry.hidden_channels, geometry.stored_hidden_channels,
                           ActivationText(geometry.activation), geometry.output_scale));
  size_t next = 0;
  for (const SegmentDesc& segment : table.segments()) {
    for (int p = 0; p < kNumProjections; ++p) {
      if (!segment.matrices[p].present()) continue;
      const Result<std::string> text = MatrixText(segment, p, slab);
      if (!text) return text;
      Update(hash, *text);
      const size_t count = CodePieces({&segment.matrices[p], 1}).size();
      for (size_t i = 0; i < count; ++i) Update(hash, piece_hashes[next++] + "\n");
    }
  }
  return hash.FinishHex();
}

Result<std::string> HashSlab(const ExpertsTable& table, std::span<const std::byte* const> codes,
                             const DeviceBuffer& slab, int num_threads) {
  const std::vector<CodePiece> pieces = CodePieces(PresentMatrices(table));
  std::vector<std::string> hashes(pieces.size());
  ParallelFor(num_threads, pieces.size(), [&](uint64_t i) {
    hashes[i] = Sha256Hex({codes[pieces[i].matrix] + pieces[i].first_byte, pieces[i].size_bytes});
  });
  return HashTable(table, hashes, slab);
}

Result<DeviceBuffer> AllocateSlab(uint64_t size_bytes, const std::string& identity,
                                  const LoadOptions& options) {
  if (options.allocate && !options.device.is_host()) {
    return Error(StatusCode::kUsage,
                 fmt::format("{}: an allocator of host memory for a slab on {}; legal: one "
                             "of the two",
                             identity, DeviceText(options.device)));
  }
  Result<DeviceBuffer> slab =
      options.allocate
          ? options.allocate(size_bytes).map([](HostBuffer host) { return DeviceBuffer(std::move(host)); })
          : DeviceBuffer::Create(options.device, size_bytes);
  if (!slab) return Error(slab.error().code(), fmt::format("{}: {}", identity, slab.error().message()));
  if (slab->size_bytes() < size_bytes ||
      reinterpret_cast<uintptr_t>(slab->data()) % kSlabAlignmentBytes != 0) {
    return Error(StatusCode::kUsage,
                 fmt::format("{}: the allocator gave {} bytes; legal: at least {}, aligned to {}", identity,
                             slab->size_bytes(), size_bytes, kSlabAlignmentBytes));
  }
  return slab;
}

}  // namespace espalier
