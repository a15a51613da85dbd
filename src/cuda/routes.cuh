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
__device__ __forceinline__ int32_t LocalExpert(const Routes& routes, uint32_t experts, uint32_t token, uint32_t j) {
  const uint64_t at = token * routes.ids_stride + j;
  int64_t id = routes.wide_ids ? static_cast<const int64_t*>(routes.ids)[at]
                               : int64_t{static_cast<const int32_t*>(routes.ids)[at]};
  if (routes.expert_map != nullptr) {
    if (id < 0 || id >= int64_t{routes.expert_map_size}) return -1;
    id = routes.expert_map[id];
  }
  return id < 0 || id >= int64_t{experts} ? -1 : static_cast<int32_t>(id);
}

}  // namespace espalier::cuda

#endif  // ESPALIER_SRC_CUDA_ROUTES_CUH_
