// SPDX-License-Identifier: Apache-2.0
#include "moe/route_pack.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/checked.h"

namespace espalier {
namespace {

int64_t RawId(const MoePlanOptions& options, const MoeArgs& args, uint64_t token, uint32_t j) {
  const uint64_t index = token * args.topk_ids_row_stride + j;
  if (options.id_type == IdType::kInt64) return static_cast<const int64_t*>(args.topk_ids)[index];
  return static_cast<const int32_t*>(args.topk_ids)[index];
}

int64_t IdLimit(const MoeGeometry& geometry, const MoeArgs& args) {
  return args.expert_map != nullptr ? args.expert_map_size : geometry.experts;
}

}  // namespace

Result<uint64_t> RoutePackBytes(uint64_t max_tokens, uint32_t top_k, uint32_t experts) {
  const CheckedBytes entries = CheckedBytes(max_tokens) * uint64_t{top_k} + (uint64_t{experts} + 1);
  const std::optional<uint64_t> bytes = (entries * sizeof(uint32_t)).value();
  if (!bytes) {
    return Error(StatusCode::kCapacity,
                 fmt::format("routes of {} tokens with top-{} do not fit in memory", max_tokens, top_k));
  }
  return *bytes;
}

int64_t LocalExpert(const MoePlanOptions& options, const MoeGeometry& geometry, const MoeArgs& args,
                    uint64_t token, uint32_t j) {
  int64_t id = RawId(options, args, token, j);
  if (id < 0 || id >= IdLimit(geometry, args)) return -1;
  if (args.expert_map != nullptr) id = args.expert_map[id];
  return id >= 0 && id < int64_t{geometry.experts} ? id : -1;
}

Result<void> CheckIds(const MoePlanOptions& options, const MoeGeometry& geometry, const MoeArgs& args) {
  const int64_t limit = IdLimit(geometry, args);
  for (uint64_t token = 0; token < args.num_tokens; ++token) {
    for (uint32_t j = 0; j < options.top_k; ++j) {
      const int64_t id = RawId(options, args, token, j);
      if (id == -1) continue;
      if (id < 0 || id >= limit) {
        return Error(StatusCode::kGeometry,
                     fmt::format("topk_ids[{}][{}] is {}; legal: -1 and 0 to {}", token, j, id, limit - 1));
      }
      if (args.expert_map == nullptr) continue;
      const int32_t local = args.expert_map[id];
      if (local < -1 || int64_t{local} >= int64_t{geometry.experts}) {
        return Error(StatusCode::kGeometry,
                     fmt::format("topk_ids[{}][{}] is {} and expert_map[{}] is {}; legal: -1 and 0 to {}",
                                 token, j, id, id, local, int64_t{geometry.experts} - 1));
      }
    }
  }
  return {};
}

RoutePack PackRoutes(const MoePlanOptions& options, const MoeGeometry& geometry, const MoeArgs& args,
                     uint64_t first_token, uint64_t num_tokens, std::byte* storage) {
  uint32_t* words = reinterpret_cast<uint32_t*>(storage);
  RoutePack pack;
  pack.expert_offsets = {words, size_t{geometry.experts} + 1};
  pack.packed_route_indices = {words + geometry.experts + 1, num_tokens * options.top_k};

  // Counts of expert e are collected one place further, so that the running sum leaves in place e
  // where its routes begin.
  std::ranges::fill(pack.expert_offsets, 0u);
  const auto for_each_route = [&](auto&& function) {
    for (uint64_t token = 0; token < num_tokens; ++token) {
      for (uint32_t j = 0; j < options.top_k; ++j) {
        const int64_t expert = LocalExpert(options, geometry, args, first_token + token, j);
        if (expert >= 0) function(static_cast<uint32_t>(expert), token * options.top_k + j);
      }
    }
  };
  for_each_route([&](uint32_t expert, uint64_t) { ++pack.expert_offsets[expert + 1]; });
  for (uint32_t e = 0; e < geometry.experts; ++e) pack.expert_offsets[e + 1] += pack.expert_offsets[e];
  pack.num_packed_routes = pack.expert_offsets[geometry.experts];

  // Writing advances each start to the next expert's start; shifting by one place restores them.
  for_each_route([&](uint32_t expert, uint64_t route) {
    pack.packed_route_indices[pack.expert_offsets[expert]++] = static_cast<uint32_t>(route);
  });
  for (uint32_t e = geometry.experts; e > 0; --e) pack.expert_offsets[e] = pack.expert_offsets[e - 1];
  pack.expert_offsets[0] = 0;
  return pack;
}

}  // namespace espalier
