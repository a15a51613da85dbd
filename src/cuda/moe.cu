// SPDX-License-Identifier: Apache-2.0
//
// One layer as a chain of kernels on one stream:
//   pack      routes -> rows sorted by segment, tiles of rows
//   rotate    H128(x * suh) of every row, as operands
//   sums      FC1: gate and up products
//   boundary  H128, svh, bias, activation, suh of down, H128: operands again
//   finish    FC2: products, H128, svh, bias, route weight: one row per (route, segment)
//   combine   sum over routes and segments in fixed order, output scale, store
// In the wide class the fifth kernel leaves sums, and combine does what follows them.
// Each kernel starts while the one before it ends (programmatic dependent launch) and fetches codes before it
// waits. A kernel lets the next one start only after its own wait, so whoever runs has everything but its
// direct predecessor complete. No kernel waits for another block: any number of SMs will do.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <string>

#include "cuda/boundary.cuh"
#include "cuda/gemm_launch.cuh"
#include "cuda/launch.h"
#include "cuda/rotate_inputs.cuh"
#include "cuda/routes.cuh"
#include "cuda/values.cuh"

namespace espalier::cuda {
namespace {

constexpr uint32_t kPackThreads = 1024;
constexpr uint32_t kSharedExperts = 4096;  // more are counted in the workspace
constexpr uint32_t kRoutesAhead = 8;       // routes that a thread asks for at once
constexpr uint32_t kBlockRoutes = 512;     // routes that make a further block worth while, up to
constexpr uint32_t kMaxPackBlocks = 32;

struct PackParams {
  Routes routes;
  DeviceExperts experts;
  uint32_t max_segments = 0;
  uint32_t tile_groups = 0;
  uint32_t max_groups = 0;
  uint32_t* num_tiles = nullptr;
  uint32_t* expert_counts = nullptr;  // [2][experts + 1]
  Tile* tiles = nullptr;
  PackedRow* rows = nullptr;
  uint32_t* row_slots = nullptr;
  float* row_weights = nullptr;
};

// Sum of `value` over the threads before this one; *total over all. Two barriers.
__device__ uint32_t ExclusiveSum(uint32_t value, uint32_t* warp_sums, uint32_t* total) {
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  uint32_t sum = value;
#pragma unroll
  for (uint32_t stride = 1; stride < 32; stride *= 2) {
    const uint32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, stride);
    if (lane >= stride) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  uint32_t before = 0, all = 0;
  for (uint32_t i = 0; i < blockDim.x / 32; ++i) {
    if (i < warp) before += warp_sums[i];
    all += warp_sums[i];
  }
  __syncthreads();
  *total = all;
  return before + sum - value;
}

// Calls use(route, local expert) for the routes of this thread that lead to an expert here, asked for a batch
// at a time.
template <typename Function>
__device__ __forceinline__ void ForEachRoute(const PackParams& params, Function&& use) {
  const uint32_t num_routes = params.routes.num_tokens * params.routes.top_k;
  for (uint32_t first = threadIdx.x; first < num_routes; first += kRoutesAhead * blockDim.x) {
    int32_t experts[kRoutesAhead];
#pragma unroll
    for (uint32_t i = 0; i < kRoutesAhead; ++i) {
      const uint32_t route = min(first + i * blockDim.x, num_routes - 1);
      experts[i] = LocalExpert(params.routes, params.experts.experts, route / params.routes.top_k,
                               route % params.routes.top_k);
    }
#pragma unroll
    for (uint32_t i = 0; i < kRoutesAhead; ++i) {
      const uint32_t route = first + i * blockDim.x;
      if (route < num_routes && experts[i] >= 0) use(route, static_cast<uint32_t>(experts[i]));
    }
  }
}

// Every block counts all routes, and then writes what belongs to its experts, one out of gridDim.x: no block
// needs another one. The order of rows within a segment is not fixed, and nothing depends on it.
__global__ void __launch_bounds__(kPackThreads) PackRoutes(const __grid_constant__ PackParams params) {
  __shared__ uint32_t shared_counts[2 * kSharedExperts];
  __shared__ uint32_t warp_sums[kPackThreads / 32];
  const uint32_t experts = params.experts.experts;
  const uint32_t* first_segments = params.experts.first_segment;
  // More experts than fit: one block, and the next row of the workspace for groups.
  uint32_t* counts = experts <= kSharedExperts ? shared_counts : params.expert_counts;
  uint32_t* group_counts = counts + experts;
  for (uint32_t e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
  __syncthreads();
  ForEachRoute(params, [&](uint32_t, uint32_t expert) { atomicAdd(&counts[expert], 1u); });
  __syncthreads();

  uint32_t num_groups = 0, num_tiles = 0;
  for (uint32_t first = 0; first < experts; first += blockDim.x) {
    const uint32_t expert = first + threadIdx.x;
    const uint32_t rows = expert < experts ? counts[expert] : 0;
    const uint32_t first_segment = expert < experts ? first_segments[expert] : 0;
    const uint32_t segments = expert < experts ? first_segments[expert + 1] - first_segment : 0;
    const uint32_t groups = (rows + kGroupRows - 1) / kGroupRows;
    const uint32_t tiles = (groups + params.tile_groups - 1) / params.tile_groups;
    uint32_t all_groups, all_tiles;
    const uint32_t group = num_groups + ExclusiveSum(groups * segments, warp_sums, &all_groups);
    uint32_t tile = num_tiles + ExclusiveSum(tiles * segments, warp_sums, &all_tiles);
    num_groups += all_groups;
    num_tiles += all_tiles;
    if (expert >= experts) continue;
    counts[expert] = group * kGroupRows;
    group_counts[expert] = groups;
    if (tiles == 0 || expert % gridDim.x != blockIdx.x) continue;
    // Tiles of nearly equal height: 56 rows become 32 + 24, not 48 + 8. There are exactly `tiles` of them.
    const uint32_t height = (groups + tiles - 1) / tiles;
    for (uint32_t s = 0; s < segments; ++s) {
      const uint32_t first_group = group + s * groups;
      for (uint32_t done = 0; done < groups; done += height) {
        params.tiles[tile++] = {first_segment + s, first_group + done,
                                min(rows - done * kGroupRows, height * kGroupRows), 0};
      }
      for (uint32_t row = rows; row < groups * kGroupRows; ++row) {
        params.rows[first_group * kGroupRows + row].route = -1;
      }
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *params.num_tiles = num_tiles;
  for (uint32_t i = num_groups * kGroupRows + blockIdx.x * blockDim.x + threadIdx.x;
       i < params.max_groups * kGroupRows; i += gridDim.x * blockDim.x) {
    params.rows[i].route = -1;
  }
  __syncthreads();

  ForEachRoute(params, [&](uint32_t route, uint32_t expert) {
    if (expert % gridDim.x != blockIdx.x) return;
    const uint32_t first_segment = first_segments[expert];
    const uint32_t segments = first_segments[expert + 1] - first_segment;
    if (segments == 0) return;
    const uint32_t token = route / params.routes.top_k, j = route % params.routes.top_k;
    const float weight = params.routes.weights[token * params.routes.weights_stride + j];
    const uint32_t row = atomicAdd(&counts[expert], 1u);
    for (uint32_t s = 0; s < segments; ++s) {
      const uint32_t at = row + s * group_counts[expert] * kGroupRows;
      params.rows[at] = {static_cast<int32_t>(route), first_segment + s, token, 0};
      params.row_slots[at] = route * params.max_segments + s;
      params.row_weights[at] = weight;
    }
  });
}

constexpr uint32_t kBoundaryThreads = 128;

struct BoundaryLaunch {
  RowSource rows = {};
  BoundaryParams boundary = {};
  uint4* mids = nullptr;
  uint64_t group_room = 0;
  uint64_t quad_room = 0;            // wide
  int32_t* mid_exponents = nullptr;  // of packed rows; wide: by (route, segment)
  float* mid_sums = nullptr;
};

// A block takes one packed row. Rows and exponents were complete before the kernel before this one began.
__global__ void __launch_bounds__(kBoundaryThreads) Boundary(const __grid_constant__ BoundaryLaunch params) {
  extern __shared__ __align__(16) float row_memory[];
  __shared__ float shared[kBoundaryThreads / 32];
  const uint32_t packed = blockIdx.x;
  const PackedRow row = params.rows.RowAt(packed);
  if (row.route < 0) {
    WaitForPreviousKernel();
    return;
  }
  const DeviceSegment& segment = params.rows.experts.segments[row.segment];
  const BoundaryFacts facts = LoadBoundaryFacts(params.boundary, segment, packed);
  WaitForPreviousKernel();
  AllowNextKernel();
  const DeviceMatrix& down = segment.matrices[2];
  const bool wide = params.boundary.row_class == RowClass::kWide;
  const RowBuffer buffer(row_memory, down.in_channels);
  const float max_exponent = BoundaryRow(params.boundary, segment, packed, facts, buffer);
  StoreOperands(buffer, down.in_channels, max_exponent, OperandOf(down, params.boundary.row_class),
                params.mids + packed / kGroupRows * params.group_room, packed % kGroupRows,
                params.mid_exponents + (wide ? params.rows.SlotAt(packed) : packed), params.mid_sums + packed,
                shared, params.quad_room);
}

struct CombineParams {
  Routes routes;
  DeviceExperts experts;
  uint32_t max_segments = 0;
  const float* slots = nullptr;  // [routes * max_segments][stored]
  uint32_t stored_channels = 0;
  uint32_t channels = 0;
  float output_scale = 1;
  Value type = Value::kF32;
  void* y = nullptr;
  uint64_t y_stride = 0;
  bool accumulate = false;
};

constexpr uint32_t kCombineThreads = 128;

// A thread takes four channels of one token.
__global__ void __launch_bounds__(kCombineThreads) Combine(const __grid_constant__ CombineParams params) {
  __shared__ uint32_t segments[kMaxTopK];  // slots of each route that hold something
  const uint32_t blocks = (params.channels + 4 * kCombineThreads - 1) / (4 * kCombineThreads);
  const uint32_t token = blockIdx.x / blocks;
  const uint32_t channel = (blockIdx.x % blocks * kCombineThreads + threadIdx.x) * 4;
  const uint32_t top_k = params.routes.top_k;
  for (uint32_t j = threadIdx.x; j < top_k; j += kCombineThreads) {
    const int32_t expert = LocalExpert(params.routes, params.experts.experts, token, j);
    const uint32_t* first = params.experts.first_segment + max(expert, 0);
    segments[j] = expert < 0 ? 0 : first[1] - first[0];
  }
  __syncthreads();
  WaitForPreviousKernel();
  if (channel >= params.channels) return;
  const float* slots =
      params.slots + uint64_t{token} * top_k * params.max_segments * params.stored_channels + channel;
  float4 sum = {};
  bool reached = false;
  const auto add = [&](float4 v) {
    sum = reached ? float4{sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w} : v;
    reached = true;
  };
  constexpr uint32_t kAtOnce = 8;  // loads in flight; the order of the sum stays
  for (uint32_t first = 0; first < top_k; first += kAtOnce) {
    float4 values[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (first + i < top_k && segments[first + i] > 0) {
        values[i] = *reinterpret_cast<const float4*>(slots + uint64_t{first + i} * params.max_segments *
                                                                 params.stored_channels);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (first + i >= top_k || segments[first + i] == 0) continue;
      add(values[i]);
      for (uint32_t s = 1; s < segments[first + i]; ++s) {
        const uint64_t slot = uint64_t{first + i} * params.max_segments + s;
        add(*reinterpret_cast<const float4*>(slots + slot * params.stored_channels));
      }
    }
  }
  // A row that no expert reached keeps its bits when outputs are added up.
  if (!reached && params.accumulate) return;
  const float values[] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    if (channel + i >= params.channels) break;
    StoreValue(params.type, params.y, token * params.y_stride + channel + i, values[i] * params.output_scale,
               params.accumulate);
  }
}

// Of the wide class, whose down products come as sums: H128, svh, bias and weight first. Eight lanes take a
// block of 128 channels; lane q of them holds channels 32 i + 4 q .. + 3. The sums of a route are on their
// way while those of the one before are worked on.
struct CombineSumsParams {
  CombineParams combine;
  const int32_t* exponents = nullptr;  // by (route, segment)
};

constexpr uint32_t kCombineSumsThreads = 128;
constexpr uint32_t kCombineSumsChannels = kCombineSumsThreads * 16;
constexpr uint32_t kRoutesAtOnce = 32;

// What a route's outputs are made with; vectors and exponent are those of its first segment, mostly all there
// is.
struct RouteFacts {
  const DeviceSegment* segments;
  const uint16_t* svh;
  const uint16_t* bias;
  uint32_t count;
  float weight;
  int exponent;
};

__device__ __forceinline__ void LoadSums(const float* sums, float4 (&v)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = *reinterpret_cast<const float4*>(sums + 32 * i);
}

__device__ __forceinline__ void AddOutputs(const float4 (&sums)[4], const uint16_t* svh, const uint16_t* bias,
                                           int exponent, float weight, float (&total)[16]) {
  uint2 signs[4];  // on their way from here on
#pragma unroll
  for (int i = 0; i < 4; ++i) signs[i] = __ldg(reinterpret_cast<const uint2*>(svh + 32 * i));
  float v[16];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[4 * i] = sums[i].x, v[4 * i + 1] = sums[i].y, v[4 * i + 2] = sums[i].z, v[4 * i + 3] = sums[i].w;
  }
  HadamardOfLanes(v);
  if (bias == nullptr && Ordinary(exponent)) {
    const float scale = SmallPowerOfTwo(exponent) * kHadamardScale * weight;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 sign = FourHalves(signs[i]);
      total[4 * i] += v[4 * i] * sign.x * scale;
      total[4 * i + 1] += v[4 * i + 1] * sign.y * scale;
      total[4 * i + 2] += v[4 * i + 2] * sign.z * scale;
      total[4 * i + 3] += v[4 * i + 3] * sign.w * scale;
    }
    return;
  }
  const double scale = PowerOfTwo(exponent);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 sign = FourHalves(signs[i]);
    const float4 bias4 = bias != nullptr ? LoadVector(bias + 32 * i) : float4{};
    const float factors[] = {sign.x, sign.y, sign.z, sign.w}, adds[] = {bias4.x, bias4.y, bias4.z, bias4.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const double all = double{v[4 * i + j] * kHadamardScale} * double{factors[j]} * scale + double{adds[j]};
      total[4 * i + j] += static_cast<float>(all * double{weight});
    }
  }
}

__global__ void __launch_bounds__(kCombineSumsThreads, 5)
    CombineSums(const __grid_constant__ CombineSumsParams params) {
  __shared__ RouteFacts facts[kRoutesAtOnce];
  const CombineParams& combine = params.combine;
  const uint32_t parts = (combine.channels + kCombineSumsChannels - 1) / kCombineSumsChannels;
  const uint32_t token = blockIdx.x / parts;
  const uint32_t block = blockIdx.x % parts * (kCombineSumsThreads / 8) + threadIdx.x / 8;
  const uint32_t last = combine.stored_channels / kHadamardChannels - 1;
  // Whole warps exchange values: blocks beyond the last one repeat it.
  const uint32_t channel = min(block, last) * kHadamardChannels + (threadIdx.x & 7) * 4;
  const uint32_t top_k = combine.routes.top_k;
  const float* slots =
      combine.slots + uint64_t{token} * top_k * combine.max_segments * combine.stored_channels + channel;
  const int32_t* exponents = params.exponents + uint64_t{token} * top_k * combine.max_segments;
  const uint64_t slot_channels = uint64_t{combine.max_segments} * combine.stored_channels;
  float total[16] = {};
  bool reached = false;
  for (uint32_t first = 0; first < top_k; first += kRoutesAtOnce) {
    const uint32_t routes = min(top_k - first, kRoutesAtOnce);
    if (first > 0) __syncthreads();
    if (threadIdx.x < routes) {
      const uint32_t j = first + threadIdx.x;
      const int32_t expert = LocalExpert(combine.routes, combine.experts.experts, token, j);
      const uint32_t* segments = combine.experts.first_segment + max(expert, 0);
      RouteFacts& route = facts[threadIdx.x];
      route.segments = combine.experts.segments + segments[0];
      route.count = expert < 0 ? 0 : segments[1] - segments[0];
      route.weight = combine.routes.weights[token * combine.routes.weights_stride + j];
      route.svh = route.count > 0 ? route.segments->matrices[2].svh : nullptr;
      route.bias = route.count > 0 ? route.segments->matrices[2].bias : nullptr;
      // Written before the kernel before this one.
      route.exponent = route.count > 0 ? exponents[j * combine.max_segments] : 0;
    }
    __syncthreads();
    if (first == 0) WaitForPreviousKernel();
    float4 next[4];
    if (facts[0].count > 0) LoadSums(slots + first * slot_channels, next);
    for (uint32_t i = 0; i < routes; ++i) {
      const RouteFacts route = facts[i];
      float4 sums[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[k] = next[k];
      if (i + 1 < routes && facts[i + 1].count > 0) LoadSums(slots + (first + i + 1) * slot_channels, next);
      if (route.count == 0) continue;
      reached = true;
      AddOutputs(sums, route.svh + channel, route.bias != nullptr ? route.bias + channel : nullptr,
                 route.exponent, route.weight, total);
      for (uint32_t s = 1; s < route.count; ++s) {
        const DeviceMatrix& down = route.segments[s].matrices[2];
        LoadSums(slots + (first + i) * slot_channels + uint64_t{s} * combine.stored_channels, sums);
        AddOutputs(sums, down.svh + channel, down.bias != nullptr ? down.bias + channel : nullptr,
                   exponents[(first + i) * combine.max_segments + s], route.weight, total);
      }
    }
  }
  // A row that no expert reached keeps its bits when outputs are added up.
  if (block > last || (!reached && combine.accumulate)) return;
  const bool whole = combine.type == Value::kBF16 && !combine.accumulate &&
                     ((reinterpret_cast<uintptr_t>(combine.y) | combine.y_stride * 2) & 7) == 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t in_row = channel + 32 * i;
    const uint64_t at = token * combine.y_stride + in_row;
    const float scale = combine.output_scale;
    if (whole && in_row + 4 <= combine.channels) {
      const __nv_bfloat162 low = __floats2bfloat162_rn(total[4 * i] * scale, total[4 * i + 1] * scale);
      const __nv_bfloat162 high = __floats2bfloat162_rn(total[4 * i + 2] * scale, total[4 * i + 3] * scale);
      *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(combine.y) + at) = {
          *reinterpret_cast<const uint32_t*>(&low), *reinterpret_cast<const uint32_t*>(&high)};
      continue;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (in_row + j >= combine.channels) break;
      StoreValue(combine.type, combine.y, at + j, total[4 * i + j] * scale, combine.accumulate);
    }
  }
}

// One chunk of tokens.
class MoeChain {
 public:
  MoeChain(const MoeLaunch& launch, uint64_t first_token, uint64_t num_tokens)
      : launch_(launch), config_(launch.config), stream_(static_cast<cudaStream_t>(launch.stream)) {
    const MoeArgs& args = launch.args;
    const MoePlanOptions& options = launch.options;
    const bool wide = options.id_type == IdType::kInt64;
    routes_ = {.ids = Advance(args.topk_ids, first_token * args.topk_ids_row_stride * (wide ? 8 : 4)),
               .ids_stride = args.topk_ids_row_stride,
               .wide_ids = wide,
               .weights = args.topk_weights + first_token * args.topk_weights_row_stride,
               .weights_stride = args.topk_weights_row_stride,
               .expert_map = args.expert_map,
               .expert_map_size = args.expert_map_size,
               .num_tokens = static_cast<uint32_t>(num_tokens),
               .top_k = options.top_k};
    x_ = Advance(args.x, first_token * args.x_row_stride * DtypeBits(options.input) / 8);
    y_ = const_cast<void*>(Advance(args.y, first_token * args.y_row_stride * DtypeBits(options.output) / 8));
    const uint64_t rows = num_tokens * options.top_k * config_.max_segments;
    pass_ = PlanMoePass(config_, rows, projections(), launch.limits.compute_capability);
    operand_ = few() ? Operand::kSplit : Operand::kPair;  // kWide takes the room of kPair
  }

  Result<void> Run() {
    // Nothing to compute still means a defined output.
    if (pass_.groups > 0) {
      if (!pass_.direct) chain_.Add("pack", [&] { return Pack(); });
      chain_.Add("rotate", [&] { return Rotate(); });
      chain_.Add("sums", [&] { return Sums(); });
      if (!pass_.direct) chain_.Add("boundary", [&] { return LaunchBoundary(); });
      chain_.Add("finish", [&] { return Finish(); });
    }
    chain_.Add("combine", [&] { return LaunchCombine(); });
    return chain_.result();
  }

 private:
  static const void* Advance(const void* data, uint64_t bytes) {
    return static_cast<const std::byte*>(data) + bytes;
  }
  template <typename T>
  T* At(uint64_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(launch_.args.workspace) + offset);
  }
  bool few() const { return pass_.row_class == RowClass::kFew; }
  bool has_gate() const { return ActivationHasGate(launch_.geometry.activation.kind); }
  uint32_t projections() const { return has_gate() ? 2 : 1; }
  uint32_t first_projection() const { return has_gate() ? 0 : 1; }
  uint32_t num_rows() const { return static_cast<uint32_t>(pass_.groups * kGroupRows); }
  bool wide() const { return pass_.row_class == RowClass::kWide; }
  // Pieces of a group of rows.
  uint64_t InputRoom() const { return GroupPieces(config_.hidden, operand_); }
  uint64_t MidRoom() const { return GroupPieces(config_.intermediate, operand_); }
  // From quad to quad, where all groups of a quad lie together.
  uint64_t QuadRoom() const { return pass_.groups * kWidePieces; }
  uint64_t Fc1Split() const { return uint64_t{num_rows()} * 2 * config_.intermediate; }

  cudaError_t Pack() {
    const PackParams params = {.routes = routes_,
                               .experts = launch_.experts,
                               .max_segments = config_.max_segments,
                               .tile_groups = TileGroups(pass_.row_class),
                               .max_groups = static_cast<uint32_t>(pass_.groups),
                               .num_tiles = At<uint32_t>(config_.counters),
                               .expert_counts = At<uint32_t>(config_.expert_counts),
                               .tiles = At<Tile>(config_.tiles),
                               .rows = At<PackedRow>(config_.rows),
                               .row_slots = At<uint32_t>(config_.row_slots),
                               .row_weights = At<float>(config_.row_weights)};
    // The first kernel follows whatever the caller ran before in the ordinary way.
    const uint64_t wanted = uint64_t{routes_.num_tokens} * routes_.top_k / kBlockRoutes;
    const uint32_t blocks =
        params.experts.experts > kSharedExperts ? 1 : Count(std::clamp<uint64_t>(wanted, 1, kMaxPackBlocks));
    return Launch(PackRoutes, dim3(blocks), kPackThreads, 0, stream_, false, params);
  }

  cudaError_t Rotate() {
    const RotateParams params = {.rows = rows(),
                                 .type = ValueOf(launch_.options.input),
                                 .x = x_,
                                 .x_stride = launch_.args.x_row_stride,
                                 .channels = launch_.geometry.hidden_channels,
                                 .stored_channels = config_.hidden,
                                 .first_projection = first_projection(),
                                 .num_projections = projections(),
                                 .row_class = pass_.row_class,
                                 .inputs = At<uint4>(config_.inputs),
                                 .group_room = wide() ? QuadRoom() : InputRoom(),
                                 .projection_room = pass_.groups * InputRoom(),
                                 .exponents = At<int32_t>(config_.input_exponents),
                                 .sums = At<float>(config_.input_sums),
                                 .num_rows = num_rows()};
    return LaunchRotate(params, pass_.direct ? Count(pass_.groups) : num_rows(), stream_,
                        !pass_.direct && dependent());
  }

  cudaError_t Sums() {
    const GemmParams params = {.rows = rows(),
                               .prefetch = pass_.direct,
                               .first_projection = first_projection(),
                               .num_projections = projections(),
                               .log2_tiles = Log2(pass_.sums.block_channels / kTileChannels),
                               .log2_splits = Log2(pass_.sums.splits),
                               .inputs = At<uint4>(config_.inputs),
                               .group_room = wide() ? QuadRoom() : InputRoom(),
                               .projection_room = pass_.groups * InputRoom(),
                               .input_sums = At<float>(config_.input_sums),
                               .num_rows = num_rows(),
                               .out = At<float>(config_.fc1) + first_projection() * config_.intermediate,
                               .out_row = 2 * config_.intermediate,
                               .out_projection = config_.intermediate,
                               .out_split = Fc1Split()};
    const dim3 grid(config_.intermediate / pass_.sums.block_channels, projections() * pass_.sums.splits,
                    Count(pass_.tiles));
    return LaunchRows(pass_.row_class, params, grid, stream_, dependent());
  }

  BoundaryParams MakeBoundary() const {
    const Activation& activation = launch_.geometry.activation;
    return {.activation = {activation.kind, static_cast<float>(activation.limit),
                           static_cast<float>(activation.beta), static_cast<float>(activation.linear_beta)},
            .has_gate = has_gate(),
            .row_class = pass_.row_class,
            .intermediate = config_.intermediate,
            .fc1 = At<float>(config_.fc1),
            .split_stride = Fc1Split(),
            .splits = pass_.sums.splits,
            // With one projection its exponents come first.
            .exponents = At<int32_t>(config_.input_exponents) - first_projection() * num_rows(),
            .num_rows = num_rows()};
  }

  cudaError_t LaunchBoundary() {
    const BoundaryLaunch params = {.rows = rows(),
                                   .boundary = MakeBoundary(),
                                   .mids = At<uint4>(config_.mids),
                                   .group_room = wide() ? kWidePieces : MidRoom(),
                                   .quad_room = QuadRoom(),
                                   .mid_exponents = At<int32_t>(config_.mid_exponents),
                                   .mid_sums = At<float>(config_.mid_sums)};
    return Launch(Boundary, dim3(num_rows()), kBoundaryThreads, RowBuffer::Bytes(config_.intermediate),
                  stream_, dependent(), params);
  }

  // Blocks of down's outputs that a block of threads takes in one go: enough to look ahead over.
  uint32_t ItemBlocks() const {
    const uint32_t quads = config_.intermediate / kQuadChannels;
    return std::max(1u, 32 / quads);
  }

  cudaError_t Finish() {
    const GemmParams params = {.rows = rows(),
                               .prefetch = pass_.direct,
                               .first_projection = 2,
                               .num_projections = 1,
                               .log2_tiles = Log2(pass_.finish_channels / kTileChannels),
                               .inputs = At<uint4>(config_.mids),
                               .group_room = wide() ? QuadRoom() : MidRoom(),
                               .input_sums = At<float>(config_.mid_sums),
                               .num_rows = num_rows(),
                               .out = At<float>(config_.slots),
                               .out_row = config_.hidden,
                               .finish = true,
                               .input_exponents = At<int32_t>(config_.mid_exponents),
                               .fused = pass_.direct,
                               .boundary = MakeBoundary(),
                               .item_blocks = ItemBlocks()};
    const dim3 grid(config_.hidden / pass_.finish_channels, 1, Count(pass_.tiles));
    return LaunchRows(pass_.row_class, params, grid, stream_, dependent());
  }

  cudaError_t LaunchCombine() {
    const CombineParams params = {.routes = routes_,
                                  .experts = launch_.experts,
                                  .max_segments = config_.max_segments,
                                  .slots = At<float>(config_.slots),
                                  .stored_channels = config_.hidden,
                                  .channels = launch_.geometry.hidden_channels,
                                  .output_scale = static_cast<float>(launch_.geometry.output_scale),
                                  .type = ValueOf(launch_.options.output),
                                  .y = y_,
                                  .y_stride = launch_.args.y_row_stride,
                                  .accumulate = launch_.args.accumulate};
    const uint64_t blocks = (params.channels + 4 * kCombineThreads - 1) / (4 * kCombineThreads);
    if (wide()) {
      const CombineSumsParams sums = {params, At<int32_t>(config_.mid_exponents)};
      const uint64_t parts = (params.channels + kCombineSumsChannels - 1) / kCombineSumsChannels;
      return Launch(CombineSums, dim3(Count(parts * routes_.num_tokens)), kCombineSumsThreads, 0, stream_,
                    dependent(), sums);
    }
    return Launch(Combine, dim3(Count(blocks * routes_.num_tokens)), kCombineThreads, 0, stream_,
                  pass_.groups > 0 && dependent(), params);
  }

  RowSource rows() const {
    return {.kind = pass_.direct ? RowKind::kDirect : RowKind::kPacked,
            .count = static_cast<uint32_t>(pass_.groups),
            .routes = routes_,
            .experts = launch_.experts,
            .max_segments = config_.max_segments,
            .num_tiles = At<uint32_t>(config_.counters),
            .tiles = At<Tile>(config_.tiles),
            .rows = At<PackedRow>(config_.rows),
            .row_slots = At<uint32_t>(config_.row_slots),
            .row_weights = At<float>(config_.row_weights)};
  }
  static uint32_t Count(uint64_t count) { return static_cast<uint32_t>(count); }
  static uint32_t Log2(uint32_t power_of_two) {
    return static_cast<uint32_t>(std::countr_zero(power_of_two));
  }
  bool dependent() const { return launch_.limits.compute_capability >= 90; }

  const MoeLaunch& launch_;
  const MoeConfig& config_;
  cudaStream_t stream_;
  Routes routes_;
  const void* x_ = nullptr;
  void* y_ = nullptr;
  MoePass pass_;
  Operand operand_ = Operand::kSplit;
  Chain chain_;
};

}  // namespace

Result<void> LaunchMoe(const MoeLaunch& launch) {
  for (uint64_t first = 0; first < launch.args.num_tokens; first += launch.config.chunk_tokens) {
    const uint64_t tokens = std::min(launch.config.chunk_tokens, launch.args.num_tokens - first);
    Result<void> run = MoeChain(launch, first, tokens).Run();
    if (!run) return run;
  }
  return {};
}

}  // namespace espalier::cuda
