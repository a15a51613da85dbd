// SPDX-License-Identifier: Apache-2.0
#ifndef ESPALIER_SRC_MOE_MATRIX_VIEW_H_
#define ESPALIER_SRC_MOE_MATRIX_VIEW_H_

#include <espalier/experts.h>

#include <cstddef>
#include <cstdint>

#include "moe/code_order.h"

namespace espalier {

// Room for the codes of one tile at any rate.
struct TileWords {
  std::byte bytes[TileBytes(kMaxBits)];
};

// A MatrixDesc resolved against its slab: what an executor works on.
struct MatrixView {
  const std::byte* codes = nullptr;
  const uint16_t* suh = nullptr;
  const uint16_t* svh = nullptr;
  const uint16_t* bias = nullptr;  // null when there is none
  uint32_t in_channels = 0;
  uint32_t out_channels = 0;
  int bits = 0;
  Codebook codebook = Codebook::k3Inst;
  CodeOrder order = CodeOrder::kNative;

  // The codes of one tile as docs/format.md has them: in the slab where its order is native, otherwise
  // gathered into `scratch`.
  const std::byte* Tile(uint32_t tile_row, uint32_t tile_column, TileWords& scratch) const {
    if (order == CodeOrder::kNative) {
      const uint64_t index = uint64_t{tile_row} * (out_channels / kTileChannels) + tile_column;
      return codes + index * TileBytes(bits);
    }
    const uint64_t step = PanelStepOffset(in_channels, bits, tile_row, tile_column / 2);
    TileFromPanelStep(codes + step, bits, tile_column % 2, scratch.bytes);
    return scratch.bytes;
  }
};

// REQUIRES: `desc` was checked against this slab (PreparedExperts::Create, PreparedLinear::Create).
inline MatrixView ViewOf(const MatrixDesc& desc, const std::byte* slab) {
  const auto vector_at = [slab](uint64_t offset) {
    return offset == kAbsentOffset ? nullptr : reinterpret_cast<const uint16_t*>(slab + offset);
  };
  return {.codes = desc.present() ? slab + desc.codes_offset_bytes : nullptr,
          .suh = vector_at(desc.suh_offset_bytes),
          .svh = vector_at(desc.svh_offset_bytes),
          .bias = vector_at(desc.bias_offset_bytes),
          .in_channels = desc.in_channels,
          .out_channels = desc.out_channels,
          .bits = desc.bits,
          .codebook = desc.codebook,
          .order = desc.order};
}

}  // namespace espalier

#endif  // ESPALIER_SRC_MOE_MATRIX_VIEW_H_
