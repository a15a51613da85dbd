// SPDX-License-Identifier: Apache-2.0
#include "moe/route_pack.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "support/random_experts.h"

namespace espalier {
namespace {

using test::Random;

struct Routes {
  MoePlanOptions options;
  MoeGeometry geometry;
  MoeArgs args;
  std::vector<int64_t> wide;
  std::vector<int32_t> narrow;

  Routes(uint32_t experts, uint32_t top_k, std::vector<int64_t> ids, IdType type = IdType::kInt64)
      : wide(std::move(ids)), narrow(wide.begin(), wide.end()) {
    options.top_k = top_k;
    options.id_type = type;
    geometry.experts = experts;
    args.num_tokens = wide.size() / top_k;
    args.topk_ids = type == IdType::kInt64 ? static_cast<const void*>(wide.data()) : narrow.data();
    args.topk_ids_row_stride = top_k;
  }
  Routes(const Routes&) = delete;

  // Packed routes by expert.
  std::vector<std::vector<uint32_t>> Pack(uint64_t first, uint64_t count) {
    std::vector<std::byte> storage(RoutePackBytes(count, options.top_k, geometry.experts).value(),
                                   std::byte{0xFF});
    const RoutePack pack = PackRoutes(options, geometry, args, first, count, storage.data());
    EXPECT_EQ(pack.expert_offsets.front(), 0u);
    EXPECT_EQ(pack.expert_offsets.back(), pack.num_packed_routes);
    std::vector<std::vector<uint32_t>> routes(geometry.experts);
    for (uint32_t e = 0; e < geometry.experts; ++e) {
      for (uint32_t i = pack.expert_offsets[e]; i < pack.expert_offsets[e + 1]; ++i) {
        routes[e].push_back(pack.packed_route_indices[i]);
      }
    }
    return routes;
  }
};

TEST(PackRoutes, SortsByExpertAndThenByRoute) {
  for (const IdType type : {IdType::kInt32, IdType::kInt64}) {
    Routes routes(4, 3, {2, 0, -1, 2, 2, 3, -1, -1, -1}, type);
    const std::vector<std::vector<uint32_t>> expected = {{1}, {}, {0, 3, 4}, {5}};
    EXPECT_EQ(routes.Pack(0, 3), expected);
  }
}

TEST(PackRoutes, NumbersRoutesFromTheFirstToken) {
  Routes routes(4, 2, {0, 1, 2, 3, 3, 0});
  const std::vector<std::vector<uint32_t>> expected = {{3}, {}, {0}, {1, 2}};
  EXPECT_EQ(routes.Pack(1, 2), expected);
}

TEST(PackRoutes, OneExpertTakesEverything) {
  Routes routes(300, 1, std::vector<int64_t>(1025, 299));
  const auto packed = routes.Pack(0, 1025);
  ASSERT_EQ(packed[299].size(), 1025u);
  for (uint32_t i = 0; i < 1025; ++i) ASSERT_EQ(packed[299][i], i);
}

TEST(PackRoutes, NothingToPack) {
  Routes absent(3, 2, {-1, -1, -1, -1});
  EXPECT_EQ(absent.Pack(0, 2), std::vector<std::vector<uint32_t>>(3));
  Routes no_experts(0, 2, {0, 1});
  EXPECT_TRUE(no_experts.Pack(0, 1).empty());
}

TEST(PackRoutes, EveryRouteOnceOnRandomIds) {
  Random random(1);
  for (int round = 0; round < 50; ++round) {
    const uint32_t experts = static_cast<uint32_t>(random.Below(70)) + 1;
    const uint32_t top_k = static_cast<uint32_t>(random.Below(8)) + 1;
    std::vector<int64_t> ids((random.Below(60) + 1) * top_k);
    for (int64_t& id : ids) id = static_cast<int64_t>(random.Below(experts + 4)) - 2;
    Routes routes(experts, top_k, ids, round % 2 == 0 ? IdType::kInt32 : IdType::kInt64);
    std::vector<std::vector<uint32_t>> expected(experts);
    for (uint32_t i = 0; i < ids.size(); ++i) {
      if (ids[i] >= 0 && ids[i] < experts) expected[static_cast<size_t>(ids[i])].push_back(i);
    }
    ASSERT_EQ(routes.Pack(0, routes.args.num_tokens), expected);
  }
}

TEST(LocalExpert, MapsAndHides) {
  Routes routes(3, 5, {0, 1, 2, 3, 4});
  const std::vector<int32_t> map = {2, -1, 0, 3};  // 3 lies outside the package, id 4 outside the map
  routes.args.expert_map = map.data();
  routes.args.expert_map_size = 4;
  const int64_t expected[] = {2, -1, 0, -1, -1};
  for (uint32_t j = 0; j < 5; ++j) {
    EXPECT_EQ(LocalExpert(routes.options, routes.geometry, routes.args, 0, j), expected[j]) << j;
  }
}

TEST(LocalExpert, WideIdsAreNotCut) {
  const int64_t wide = (int64_t{1} << 32) + 1;  // the low half is a legal id
  Routes routes(3, 3, {wide, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()});
  for (uint32_t j = 0; j < 3; ++j) {
    EXPECT_EQ(LocalExpert(routes.options, routes.geometry, routes.args, 0, j), -1) << j;
  }
}

TEST(CheckIds, NamesTheFirstBadOne) {
  Routes good(3, 2, {0, -1, 2, 1});
  EXPECT_TRUE(CheckIds(good.options, good.geometry, good.args));
  Routes bad(3, 2, {0, -1, 3, -2});
  const Result<void> checked = CheckIds(bad.options, bad.geometry, bad.args);
  ASSERT_FALSE(checked);
  EXPECT_EQ(checked.error().code(), StatusCode::kGeometry);
  EXPECT_EQ(checked.error().message(), "topk_ids[1][0] is 3; legal: -1 and 0 to 2");
}

TEST(CheckIds, ChecksBothSidesOfAMap) {
  const std::vector<int32_t> map = {2, -1, 3};
  Routes routes(3, 1, {0, 1});
  routes.args.expert_map = map.data();
  routes.args.expert_map_size = 3;
  EXPECT_TRUE(CheckIds(routes.options, routes.geometry, routes.args));
  Routes outside_map(5, 1, {3});
  outside_map.args.expert_map = map.data();
  outside_map.args.expert_map_size = 3;
  EXPECT_FALSE(CheckIds(outside_map.options, outside_map.geometry, outside_map.args));
  Routes outside_package(3, 1, {2});
  outside_package.args.expert_map = map.data();
  outside_package.args.expert_map_size = 3;
  const Result<void> checked =
      CheckIds(outside_package.options, outside_package.geometry, outside_package.args);
  ASSERT_FALSE(checked);
  EXPECT_EQ(checked.error().message(), "topk_ids[0][0] is 2 and expert_map[2] is 3; legal: -1 and 0 to 2");
}

TEST(RoutePackBytes, RefusesOverflow) {
  EXPECT_EQ(RoutePackBytes(10, 2, 5).value(), (20 + 6) * sizeof(uint32_t));
  const Result<uint64_t> bytes = RoutePackBytes(~uint64_t{0}, 2, 5);
  ASSERT_FALSE(bytes);
  EXPECT_EQ(bytes.error().code(), StatusCode::kCapacity);
}

}  // namespace
}  // namespace espalier
