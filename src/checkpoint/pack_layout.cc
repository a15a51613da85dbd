// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/pack_layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

namespace espalier {
namespace {

constexpr uint64_t kMaxChannels = uint64_t{1} << 31;

tl::unexpected<Status> BadTensor(const ShardSet& shards, int32_t tensor, std::string_view legal) {
  const TensorInfo& info = shards.tensors[tensor];
  return Error(StatusCode::kFormat, fmt::format("{}: found {} [{}], legal: {}", shards.Describe(tensor),
                                                DtypeName(info.dtype), fmt::join(info.shape, ", "), legal));
}

Result<void> CheckTensor(const ShardSet& shards, int32_t tensor, Dtype dtype,
                         const std::vector<uint64_t>& shape) {
  const TensorInfo& info = shards.tensors[tensor];
  if (info.dtype == dtype && info.shape == shape) return {};
  return BadTensor(shards, tensor, fmt::format("{} [{}]", DtypeName(dtype), fmt::join(shape, ", ")));
}

// Sizes and bits from the shape of the codes, the only place that holds them.
Result<MatrixInfo> ReadTrellisShape(const ShardSet& shards, int32_t trellis) {
  const TensorInfo& info = shards.tensors[trellis];
  if (info.dtype != Dtype::kI16 || info.shape.size() != 3) {
    return BadTensor(shards, trellis, "I16 [in/16, out/16, 16*K]");
  }
  const uint64_t rows = info.shape[0], columns = info.shape[1], words = info.shape[2];
  if (rows == 0 || columns == 0 || rows > kMaxChannels / kTileChannels ||
      columns > kMaxChannels / kTileChannels) {
    return BadTensor(shards, trellis, fmt::format("1 to {} tiles an axis", kMaxChannels / kTileChannels));
  }
  if (words % kTileChannels != 0 || words < kMinBits * kTileChannels || words > kMaxBits * kTileChannels) {
    return BadTensor(shards, trellis,
                     fmt::format("a last dimension of 16*K with K = {}..{}", kMinBits, kMaxBits));
  }
  MatrixInfo matrix;
  matrix.in_channels = rows * kTileChannels;
  matrix.out_channels = columns * kTileChannels;
  matrix.bits = static_cast<int>(words / kTileChannels);
  matrix.trellis = trellis;
  return matrix;
}

Result<void> ReadMarker(const ShardSet& shards, std::string_view module, const ModuleParts& parts,
                        Codebook assumed, MatrixInfo& matrix) {
  matrix.codebook = assumed;
  if (parts.mcg != kNoTensor && parts.mul1 != kNoTensor) {
    return Error(StatusCode::kFormat,
                 fmt::format("matrix '{}' in {}: found both markers .mcg and .mul1, legal: at most one",
                             module, shards.FileName(parts.mcg)));
  }
  for (const auto& [tensor, codebook] :
       {std::pair{parts.mcg, Codebook::kMcg}, {parts.mul1, Codebook::kMul1}}) {
    if (tensor == kNoTensor) continue;
    if (auto checked = CheckTensor(shards, tensor, Dtype::kI32, {}); !checked) return checked;
    matrix.codebook = codebook;
    matrix.marker = tensor;
  }
  return {};
}

struct VectorChoice {
  int32_t tensor = kNoTensor;
  bool is_bits = false;
};

// suh or svh of a matrix: its own fp16 vector, its own sign words, or the layer's.
Result<VectorChoice> ChooseVector(const ShardSet& shards, std::string_view module, std::string_view suffix,
                                  int32_t own, int32_t own_bits, int32_t shared, uint64_t channels,
                                  int32_t trellis) {
  if (own == kNoTensor && own_bits != kNoTensor) {
    if (auto checked = CheckTensor(shards, own_bits, Dtype::kI16, {channels / 16}); !checked) {
      return tl::unexpected(checked.error());
    }
    return VectorChoice{.tensor = own_bits, .is_bits = true};
  }
  const int32_t tensor = own != kNoTensor ? own : shared;
  if (tensor == kNoTensor) {
    return Error(StatusCode::kFormat, fmt::format("matrix '{}' in {}: incomplete, '{}.{}' is missing", module,
                                                  shards.FileName(trellis), module, suffix));
  }
  if (auto checked = CheckTensor(shards, tensor, Dtype::kF16, {channels}); !checked) {
    return tl::unexpected(checked.error());
  }
  return VectorChoice{.tensor = tensor, .is_bits = false};
}

// Channels [first, first + channels) of a vector; share keys tell a loader which are the same bytes.
VectorSource VectorPart(const ShardSet& shards, int32_t tensor, bool is_bits, uint64_t first,
                        uint64_t channels) {
  VectorSource source;
  if (tensor == kNoTensor) return source;
  const TensorInfo& info = shards.tensors[tensor];
  source.kind = is_bits ? VectorSource::Kind::kSignBits : VectorSource::Kind::kFp16;
  source.share_key = static_cast<uint64_t>(tensor) + 1;
  const uint64_t offset = is_bits ? first / 8 : first * 2;
  const uint64_t bytes = is_bits ? channels / 8 : channels * 2;
  source.regions.push_back({.file = info.file,
                            .rows = 1,
                            .row_bytes = bytes,
                            .source_offset = info.offset_bytes + offset,
                            .source_stride = bytes,
                            .target_offset = 0,
                            .target_stride = bytes});
  return source;
}

CopyRegion CodeRegion(const TensorInfo& trellis, const MatrixInfo& matrix, bool cut_input, uint64_t first,
                      uint64_t channels) {
  const uint64_t row_bytes = matrix.out_channels / kTileChannels * TileBytes(matrix.bits);
  const uint64_t first_tile = first / kTileChannels;
  const uint64_t tiles = channels / kTileChannels;
  if (cut_input) {  // whole tile rows: one run
    const uint64_t bytes = tiles * row_bytes;
    return {.file = trellis.file,
            .rows = 1,
            .row_bytes = bytes,
            .source_offset = trellis.offset_bytes + first_tile * row_bytes,
            .source_stride = bytes,
            .target_offset = 0,
            .target_stride = bytes};
  }
  const uint64_t part_bytes = tiles * TileBytes(matrix.bits);
  const uint64_t rows = matrix.in_channels / kTileChannels;
  if (part_bytes == row_bytes) {
    const uint64_t bytes = rows * row_bytes;
    return {.file = trellis.file,
            .rows = 1,
            .row_bytes = bytes,
            .source_offset = trellis.offset_bytes,
            .source_stride = bytes,
            .target_offset = 0,
            .target_stride = bytes};
  }
  return {.file = trellis.file,
          .rows = rows,
          .row_bytes = part_bytes,
          .source_offset = trellis.offset_bytes + first_tile * TileBytes(matrix.bits),
          .source_stride = row_bytes,
          .target_offset = 0,
          .target_stride = part_bytes};
}

}  // namespace

Result<PackMatrix> BuildMatrix(const ShardSet& shards, std::string_view module, const ModuleParts& parts,
                               int32_t shared_suh, int32_t shared_svh, Codebook assumed) {
  if (parts.trellis == kNoTensor) {
    return Error(StatusCode::kFormat, fmt::format("matrix '{}' in {}: incomplete, '{}.trellis' is missing",
                                                  module, shards.FileName(parts.Any()), module));
  }
  auto info = ReadTrellisShape(shards, parts.trellis);
  if (!info) return tl::unexpected(info.error());
  PackMatrix matrix{.info = *info};
  if (auto read = ReadMarker(shards, module, parts, assumed, matrix.info); !read)
    return tl::unexpected(read.error());
  const auto suh =
      ChooseVector(shards, module, "suh", parts.suh, parts.su, shared_suh, info->in_channels, parts.trellis);
  if (!suh) return tl::unexpected(suh.error());
  const auto svh =
      ChooseVector(shards, module, "svh", parts.svh, parts.sv, shared_svh, info->out_channels, parts.trellis);
  if (!svh) return tl::unexpected(svh.error());
  matrix.suh = suh->tensor;
  matrix.suh_is_bits = suh->is_bits;
  matrix.svh = svh->tensor;
  matrix.svh_is_bits = svh->is_bits;
  if (parts.bias != kNoTensor) {
    if (auto checked = CheckTensor(shards, parts.bias, Dtype::kF16, {info->out_channels}); !checked) {
      return tl::unexpected(checked.error());
    }
    matrix.bias = parts.bias;
    matrix.info.has_bias = true;
  }
  return matrix;
}

MatrixSource PackSource(const ShardSet& shards, const PackMatrix& matrix, std::string_view module,
                        bool cut_input, uint64_t first, uint64_t channels) {
  const TensorInfo& trellis = shards.tensors[matrix.info.trellis];
  MatrixSource source{
      .info = matrix.info, .name = std::string(module), .codes = {}, .suh = {}, .svh = {}, .bias = {}};
  source.codes.push_back(CodeRegion(trellis, matrix.info, cut_input, first, channels));
  const uint64_t in = cut_input ? channels : matrix.info.in_channels;
  const uint64_t out = cut_input ? matrix.info.out_channels : channels;
  source.info.in_channels = in;
  source.info.out_channels = out;
  source.suh = VectorPart(shards, matrix.suh, matrix.suh_is_bits, cut_input ? first : 0, in);
  source.svh = VectorPart(shards, matrix.svh, matrix.svh_is_bits, cut_input ? 0 : first, out);
  // A bias on the output of an input cut is added once: by the part that starts at channel 0.
  if (matrix.bias != kNoTensor && !(cut_input && first > 0)) {
    source.bias = VectorPart(shards, matrix.bias, false, cut_input ? 0 : first, out);
  }
  source.info.has_bias = source.bias.kind != VectorSource::Kind::kAbsent;
  return source;
}

MatrixInfo PackLayout::Matrix(size_t layer, uint32_t expert, Projection projection, uint32_t slice) const {
  const PackLayer& pack = pack_layers_[layer];
  return pack.matrices[pack.At(expert, projection, slice)].info;
}

std::string PackLayout::MatrixName(size_t layer, uint32_t expert, Projection projection,
                                   uint32_t slice) const {
  const PackLayer& pack = pack_layers_[layer];
  return std::string(pack.modules[pack.At(expert, projection, slice)]);
}

Result<MatrixSource> PackLayout::Source(size_t layer, uint32_t expert, Projection projection,
                                        const SliceExtent& extent) const {
  const PackLayer& pack = pack_layers_[layer];
  const size_t at = pack.At(expert, projection, extent.slice);
  return PackSource(shards_, pack.matrices[at], pack.modules[at], projection == Projection::kDown,
                    extent.first_channel, extent.channels);
}

Result<void> PackLayout::CheckPadding(size_t, uint64_t, uint64_t) const { return {}; }  // packs have none

std::vector<int> PackLayout::LegalTpSizes() const {
  if (layers_.empty()) return {};
  uint64_t min_blocks = std::numeric_limits<uint64_t>::max();
  for (const MoeLayer& layer : layers_) {
    min_blocks = std::min(min_blocks, layer.intermediate_channels / kHadamardChannels);
  }
  return GeneralLegalTpSizes(min_blocks);
}

}  // namespace espalier
