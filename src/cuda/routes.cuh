// SPDX-License-Identifier: Apache-2.0
//
// Routes as the caller gives them, and the packed rows made of them.
#ifndef ESPALIER_SRC_CUDA_ROUTES_CUH_
#define ESPALIER_SRC_CUDA_ROUTES_CUH_

#include <cstdint>

#include "cuda/device_table.h"

namespace espalier::cuda {

// Tokens [0, num_tokens) of a chunk; pointers are already at its first token.
struct Routes {
  const void* ids = nullptr;
  uint64_t ids_stride = 0;
  bool wide_ids = false;
  const float* weights = nullptr;
  uint64_t weights_stride = 0;
  const int32_t* expert_map = nullptr;
  uint32_t expert_map_size = 0;
  uint32_t num_tokens = 0;
  uint32_t top_k = 0;
};

// A (route, segment) pair; rows beyond those of their segment have route -1.
struct PackedRow {
  int32_t route = -1;
  uint32_t segment = 0;
  uint32_t token = 0;
  uint32_t unused = 0;
};

// Local expert of a route, -1 = none here.
__device__ __forceinline__ int32_t LocalExpert(const Routes& routes, uint32_t experts, uint32_t token,
                                               uint32_t j) {
  const uint64_t at = token * routes.ids_stride + j;
  int64_t id = routes.wide_ids ? static_cast<const int64_t*>(routes.ids)[at]
                               : int64_t{static_cast<const int32_t*>(routes.ids)[at]};
  if (routes.expert_map != nullptr) {
    if (id < 0 || id >= int64_t{routes.expert_map_size}) return -1;
    id = routes.expert_map[id];
  }
  return id < 0 || id >= int64_t{experts} ? -1 : static_cast<int32_t>(id);
}

// A tile of the work list: rows [0, rows) of groups first_group, first_group + 1, ... of one segment.
struct Tile {
  uint32_t segment = 0;
  uint32_t first_group = 0;
  uint32_t rows = 0;
  uint32_t unused = 0;
};

inline constexpr uint32_t kGroupRows = 8;

// kPacked  rows sorted by segment, listed in the workspace
// kDirect  each (route, segment) is a tile of its own, at row 8 * index: where rows are too few for sharing
//          weights to pay for a kernel that packs them
// kSingle  one matrix for all rows in their order
enum class RowKind : uint32_t { kPacked, kDirect, kSingle };

// The rows that kernels work on.
struct RowSource {
  RowKind kind = RowKind::kPacked;
  uint32_t count = 0;  // tiles of kDirect, rows of kSingle
  // kPacked and kDirect.
  Routes routes = {};
  DeviceExperts experts = {};
  uint32_t max_segments = 0;
  // kPacked.
  const uint32_t* num_tiles = nullptr;
  const Tile* tiles = nullptr;
  const PackedRow* rows = nullptr;
  const uint32_t* row_slots = nullptr;
  const float* row_weights = nullptr;
  // kSingle.
  DeviceMatrix matrix = {};
  uint32_t tile_groups = 0;

  // rows == 0 where there is none.
  __device__ __forceinline__ Tile TileAt(uint32_t index) const {
    if (kind == RowKind::kPacked) return index < *num_tiles ? tiles[index] : Tile{};
    if (kind == RowKind::kSingle) {
      const uint32_t first = index * tile_groups * kGroupRows;
      return {0, index * tile_groups, first < count ? min(count - first, tile_groups * kGroupRows) : 0, 0};
    }
    const PackedRow row = DirectRow(index);
    return {row.segment, index, row.route < 0 ? 0u : 1u, 0};
  }
  __device__ __forceinline__ PackedRow RowAt(uint32_t packed) const {
    if (kind == RowKind::kPacked) return rows[packed];
    if (kind == RowKind::kDirect) return DirectRow(packed / kGroupRows);
    return {packed < count ? static_cast<int32_t>(packed) : -1, 0, packed, 0};
  }
  // Of kPacked and kDirect.
  __device__ __forceinline__ uint32_t SlotAt(uint32_t packed) const {
    return kind == RowKind::kDirect ? packed / kGroupRows : row_slots[packed];
  }
  __device__ __forceinline__ float WeightAt(uint32_t packed) const {
    if (kind == RowKind::kPacked) return row_weights[packed];
    const uint32_t route = packed / kGroupRows / max_segments;
    return routes.weights[route / routes.top_k * routes.weights_stride + route % routes.top_k];
  }
  __device__ __forceinline__ const DeviceMatrix& MatrixOf(uint32_t segment, uint32_t projection) const {
    return kind == RowKind::kSingle ? matrix : experts.segments[segment].matrices[projection];
  }

  __device__ __forceinline__ PackedRow DirectRow(uint32_t index) const {
    PackedRow row;
    if (index >= count) return row;
    const uint32_t route = index / max_segments, s = index % max_segments;
    row.token = route / routes.top_k;
    const int32_t expert = LocalExpert(routes, experts.experts, row.token, route % routes.top_k);
    if (expert < 0) return row;
    row.segment = experts.first_segment[expert] + s;
    if (row.segment < experts.first_segment[expert + 1]) row.route = static_cast<int32_t>(route);
    return row;
  }
};

}  // namespace espalier::cuda

#endif  // ESPALIER_SRC_CUDA_ROUTES_CUH_
