// SPDX-License-Identifier: Apache-2.0
//
// Routes sorted by expert. A route is one (token, chosen expert) pair, numbered token * top_k + j.
#ifndef ESPALIER_SRC_MOE_ROUTE_PACK_H_
#define ESPALIER_SRC_MOE_ROUTE_PACK_H_

#include <espalier/moe.h>
#include <espalier/status.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace espalier {

struct RoutePack {
  // Routes of local expert e: packed_route_indices[expert_offsets[e] .. expert_offsets[e + 1]),
  // ascending, so that a row's place never depends on anything but the routes themselves.
  std::span<uint32_t> expert_offsets;        // [experts + 1]
  std::span<uint32_t> packed_route_indices;  // [max_tokens * top_k]
  uint32_t num_packed_routes = 0;            // routes that name an expert of this package
};

// Bytes PackRoutes needs for its two arrays.
Result<uint64_t> RoutePackBytes(uint64_t max_tokens, uint32_t top_k, uint32_t experts);

// Local expert of route (token, j), or -1 when it contributes nothing here.
int64_t LocalExpert(const MoePlanOptions& options, const MoeGeometry& geometry, const MoeArgs& args,
                    uint64_t token, uint32_t j);

// kGeometry naming the first id outside [0, limit) other than -1; limit = map size or experts.
Result<void> CheckIds(const MoePlanOptions& options, const MoeGeometry& geometry, const MoeArgs& args);

// Counting sort of the routes of tokens [first_token, first_token + num_tokens); route numbers are
// relative to first_token. `storage` holds RoutePackBytes(num_tokens, ...). Two passes over the ids.
RoutePack PackRoutes(const MoePlanOptions& options, const MoeGeometry& geometry, const MoeArgs& args,
                     uint64_t first_token, uint64_t num_tokens, std::byte* storage);

}  // namespace espalier

#endif  // ESPALIER_SRC_MOE_ROUTE_PACK_H_
