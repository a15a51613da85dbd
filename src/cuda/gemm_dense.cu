// SPDX-License-Identifier: Apache-2.0
//
// Many rows of a single matrix, on sm_90a: one kernel decodes the matrix into memory, another one multiplies.
//
// Weights lie in tiles of 128 output channels x 64 input channels, 128 lines of 128 bytes with the swizzle
// that the matrix unit reads, so that a copy of 16 KB brings one into shared memory. A thread of the product
// holds, of each of its rows, columns 8t + 2q + {0, 1} of every 8 (q = lane % 4), which are channels for it
// to say: line 16u + 8a + 2q + b is channel 16u + 4q + 2a + b, so that a thread has four channels side by
// side and four lanes have whole sectors. For H128 it does not matter which bit of a channel a lane stands
// for.
//
// The product: clusters of two blocks stay and take one item after the other, 256 rows x 256 output channels
// of all input channels or a share of them. Each block has up to 128 of the rows; the weights that both need
// are copied by halves, by each block to both. In a block one warp copies and two groups of four warps
// multiply, 64 rows each, over a ring of stages of 64 input channels.
#include <algorithm>

#include "cuda/decode.cuh"
#include "cuda/gemm_dense.cuh"
#include "cuda/gemm_launch.cuh"
#include "cuda/operand.cuh"
#include "cuda/ptx_sm90a.cuh"

namespace espalier::cuda {
namespace {

constexpr uint32_t kLineBytes = kQuadChannels * 2;
constexpr uint32_t kTileBytes = kHadamardChannels * kLineBytes;

// ---- Decoding

constexpr uint32_t kDecodeWarps = kHadamardChannels / kTileChannels;
constexpr uint32_t kDecodeThreads = 32 * kDecodeWarps;
// Of a warp: its codes are all asked for at the start, which hides the way to memory.
constexpr uint32_t kDecodeQuads = 4;
constexpr uint32_t kDecodedBytes = kTileChannels * kLineBytes;  // of a warp and quad

// A block takes 128 output channels and kDecodeQuads quads of them. Its warps write to shared memory first,
// as only copies from there write whole lines.
template <int kBits, Codebook kCodebook>
__global__ void __launch_bounds__(kDecodeThreads)
    DecodeMatrix(const uint32_t* codes, std::byte* weights, uint32_t quads) {
  if constexpr (kAsyncProducts) {
    extern __shared__ __align__(128) uint8_t memory[];
    const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const uint32_t first = blockIdx.y * kDecodeQuads;
    const uint64_t row_words = uint64_t{gridDim.x} * kDecodeWarps * 8 * kBits;
    const uint32_t* at = codes + ((lane & 3) + 4 * first) * row_words +
                         (blockIdx.x * kDecodeWarps + warp) * (8 * kBits) + (lane >> 2) * kBits;
    QuadWords<kBits> words[kDecodeQuads];
#pragma unroll
    for (uint32_t i = 0; i < kDecodeQuads; ++i) {
      if (first + i < quads) words[i] = LoadQuad<kBits>(at + 4 * i * row_words);
    }
    // Channel g of a tile; g + 8 is four lines on.
    const uint32_t g = lane >> 2, piece = (lane & 3) * 2;
    const uint32_t line = (g & 2) << 2 | (g & 4) >> 1 | (g & 1), swizzle = line & 7;
    const uint32_t shared = SharedAddress(memory) + warp * kDecodeQuads * kDecodedBytes;
    std::byte* to = weights + (uint64_t{blockIdx.x} * quads + first) * kTileBytes + warp * kDecodedBytes;
    const uint32_t flips = OpaqueConstant(kFoldFlips);
#pragma unroll
    for (uint32_t i = 0; i < kDecodeQuads; ++i) {
      if (first + i >= quads) break;
      const uint32_t previous = PreviousWord(words[i].w[kBits - 1]);
      uint32_t a[4][4];
#pragma unroll
      for (int s = 0; s < 4; ++s) PairOperand<kBits, kCodebook>(words[i], previous, flips, s, a[s]);
      const uint32_t low = shared + i * kDecodedBytes + line * kLineBytes;
      const uint32_t high = low + 4 * kLineBytes;
      const auto place = [&](uint32_t p) { return (p ^ swizzle) << 4; };
      StoreShared128(low + place(piece), a[0][0], a[1][0], a[2][0], a[3][0]);
      StoreShared128(low + place(piece + 1), a[0][2], a[1][2], a[2][2], a[3][2]);
      StoreShared128(high + place(piece ^ 4), a[0][1], a[1][1], a[2][1], a[3][1]);
      StoreShared128(high + place((piece + 1) ^ 4), a[0][3], a[1][3], a[2][3], a[3][3]);
      FenceShared();
      __syncwarp();
      if (lane == 0) StoreBlock(to + i * kTileBytes, shared + i * kDecodedBytes, kDecodedBytes);
    }
    if (lane == 0) WaitForStores();
    // Nothing that came before touches the weights; the kernel that comes next relies on all of it.
    WaitForPreviousKernel();
  } else {
    __trap();
  }
}

using DecodeKernel = void (*)(const uint32_t*, std::byte*, uint32_t);
template <Codebook kCodebook>
DecodeKernel DecodeKernelOf(uint32_t bits) {
  constexpr DecodeKernel kKernels[] = {DecodeMatrix<1, kCodebook>, DecodeMatrix<2, kCodebook>,
                                       DecodeMatrix<3, kCodebook>, DecodeMatrix<4, kCodebook>,
                                       DecodeMatrix<5, kCodebook>, DecodeMatrix<6, kCodebook>,
                                       DecodeMatrix<7, kCodebook>, DecodeMatrix<8, kCodebook>};
  return kKernels[bits - 1];
}
DecodeKernel DecodeKernelOf(const DeviceMatrix& matrix) {
  switch (static_cast<Codebook>(matrix.codebook)) {
#define ESPALIER_CODEBOOK(enumerator, number, name, marker_tensor, multiplier) \
  case Codebook::enumerator:                                                   \
    return DecodeKernelOf<Codebook::enumerator>(matrix.bits);
#include <espalier/formats.def>
  }
  return nullptr;
}

// ---- Products

constexpr uint32_t kCluster = 2;
constexpr uint32_t kGroupWarps = 4;
constexpr uint32_t kConsumerGroups = 2;
constexpr uint32_t kConsumers = kConsumerGroups * kGroupWarps;
// Registers are dealt out to whole groups of warps, so there are three beside the producer that do nothing.
constexpr uint32_t kDenseThreads = 32 * (kConsumers + kGroupWarps);
constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;

constexpr uint32_t kSlotRows = 64;  // of a group of consumers
constexpr uint32_t kSlotGroups = kSlotRows / kGroupRows;
constexpr uint32_t kItemGroups = TileRows(RowClass::kDense) / kGroupRows;
static_assert(kItemGroups == kCluster * kConsumerGroups * kSlotGroups);
constexpr uint32_t kItemBlocks = kDenseItemChannels / kHadamardChannels;
static_assert(kItemBlocks == 2);

constexpr uint32_t kStages = 4;
constexpr uint32_t kInputBytes = kConsumerGroups * kSlotRows * kLineBytes;
constexpr uint32_t kStageBytes = kInputBytes + kItemBlocks * kTileBytes;
constexpr uint32_t kGroupBytes = kGroupRows * kLineBytes;

struct Shared {
  uint64_t full[kStages], empty[kStages];
};
constexpr size_t kSharedBytes = size_t{kStages} * kStageBytes + sizeof(Shared) + 1024;  // to align stages

// A place in the ring, and whether it was gone through an even number of times.
struct StagePlace {
  uint32_t index = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void Advance() {
    if (++index < kStages) return;
    index = 0;
    phase ^= 1;
  }
};

struct Block {
  uint32_t stages;  // addresses in shared memory: inputs first, then weights
  uint32_t barriers;
  uint32_t rank;  // in the cluster

  __device__ __forceinline__ uint32_t Full(uint32_t stage) const { return barriers + stage * 8; }
  __device__ __forceinline__ uint32_t Empty(uint32_t stage) const { return barriers + (kStages + stage) * 8; }
};

// What a cluster does at a time, and the rows of it that are this block's.
struct Item {
  uint32_t first_block;  // of 128 output channels
  uint32_t blocks;
  uint32_t first_group;  // of rows
  uint32_t groups;
  uint32_t first_quad;
  uint32_t quads;
  uint32_t split;
};

// All items of a call, the longest first.
struct Items {
  uint32_t blocks, pairs;  // of output channels
  uint32_t quads;
  uint32_t groups, full_tiles;  // of rows
  uint32_t tiles;               // of rows and pairs
  uint32_t log2_splits;
  uint32_t whole;  // those after are taken by single blocks

  __device__ __forceinline__ explicit Items(const DenseParams& params)
      : blocks(params.output.matrix.out_channels / kHadamardChannels),
        pairs((blocks + 1) / 2),
        quads(params.output.matrix.in_channels / kQuadChannels),
        groups(params.groups),
        full_tiles(groups / kItemGroups),
        tiles((groups + kItemGroups - 1) / kItemGroups * pairs),
        log2_splits(params.log2_splits),
        whole(params.whole_items) {}

  __device__ __forceinline__ uint32_t count() const {
    return log2_splits > 0 ? tiles << log2_splits : whole + 2 * (tiles - whole);
  }
  // `rank`: whose rows. May have no rows, and no output channels.
  __device__ __forceinline__ Item At(uint32_t index, uint32_t rank) const {
    Item item;
    uint32_t tile = index, half = 0, most = kItemBlocks;
    item.split = 0;
    if (log2_splits > 0) {
      item.split = index / tiles;
      tile = index % tiles;
    } else if (index >= whole) {
      tile = whole + (index - whole) / 2;
      half = (index - whole) & 1;
      most = 1;
    }
    item.first_quad = quads * item.split >> log2_splits;
    item.quads = (quads * (item.split + 1) >> log2_splits) - item.first_quad;
    // Items that run at a time make a square of rows and channels, so that they share what they read.
    constexpr uint32_t kBandTiles = 8;
    uint32_t row_tile = full_tiles, pair = tile - full_tiles * pairs;
    if (tile < full_tiles * pairs) {
      const uint32_t band = tile / (kBandTiles * pairs), in_band = tile - band * kBandTiles * pairs;
      const uint32_t band_tiles = min(kBandTiles, full_tiles - band * kBandTiles);
      row_tile = band * kBandTiles + in_band % band_tiles;
      pair = in_band / band_tiles;
    }
    item.first_block = 2 * pair + half;
    item.blocks = item.first_block < blocks ? min(most, blocks - item.first_block) : 0;
    const uint32_t there = min(kItemGroups, groups - row_tile * kItemGroups);
    const uint32_t slots = (there + kSlotGroups - 1) / kSlotGroups;
    const uint32_t block_groups = (slots + kCluster - 1) / kCluster * kSlotGroups;
    const uint32_t before = rank * block_groups;
    item.first_group = row_tile * kItemGroups + before;
    item.groups = before < there ? min(block_groups, there - before) : 0;
    return item;
  }
};

// ---- Outputs

// Four channels of a row, `channel` the first one.
template <Value kType>
__device__ __forceinline__ void StoreFour(const OutputParams& params, bool vectors, uint64_t row,
                                          uint32_t channel, float4 v) {
  const uint64_t at = row * params.y_stride + channel;
  if (!vectors || channel + 4 > params.channels) {
    const float values[] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      if (channel + i < params.channels) StoreValue(kType, params.y, at + i, values[i], params.accumulate);
    }
    return;
  }
  if constexpr (kType == Value::kF32) {
    float4* y = reinterpret_cast<float4*>(static_cast<float*>(params.y) + at);
    if (params.accumulate) {
      const float4 old = *y;
      v = {old.x + v.x, old.y + v.y, old.z + v.z, old.w + v.w};
    }
    *y = v;
  } else {
    uint2* y = reinterpret_cast<uint2*>(static_cast<uint16_t*>(params.y) + at);
    if (params.accumulate) {
      const uint2 old = *y;
      const auto add = [](uint32_t bits, float& low, float& high) {
        if constexpr (kType == Value::kF16) {
          const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&bits));
          low = AddToOdd(values.x, low), high = AddToOdd(values.y, high);
        } else {
          low = AddToOdd(__uint_as_float(bits << 16), low);
          high = AddToOdd(__uint_as_float(bits & 0xFFFF0000u), high);
        }
      };
      add(old.x, v.x, v.y);
      add(old.y, v.z, v.w);
    }
    const auto pack = [](float low, float high) {
      if constexpr (kType == Value::kF16) {
        return PackHalves(low, high);
      } else {
        const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const uint32_t*>(&both);
      }
    };
    *y = {pack(v.x, v.y), pack(v.z, v.w)};
  }
}

// 128 channels of a row, a quarter of them in each of four lanes.
template <bool kSplit, Value kType>
__device__ __forceinline__ void StoreRowBlock(const DenseParams& params, bool vectors, uint32_t split,
                                              uint32_t row, uint32_t first_channel, float (&v)[32]) {
  const OutputParams& output = params.output;
  const bool there = row < params.rows;
  if (output.matrix.codebook == static_cast<uint32_t>(Codebook::kMul1)) {
    const float offset = there && split == 0 ? kMul1Offset * params.input_sums[row] : 0.0f;
#pragma unroll
    for (float& value : v) value = value * kMul1Scale + offset;
  }
  const uint32_t first = first_channel + 4 * (threadIdx.x & 3);
  if constexpr (kSplit) {
    if (!there) return;
    float* to = params.sums +
                (uint64_t{split} * params.groups * kGroupRows + row) * output.matrix.out_channels + first;
#pragma unroll
    for (uint32_t u = 0; u < 8; ++u) {
      *reinterpret_cast<float4*>(to + 16 * u) = {v[4 * u], v[4 * u + 1], v[4 * u + 2], v[4 * u + 3]};
    }
  } else {
    HadamardOfLanes(v);
    if (!there) return;
    // In two steps, neither of which leaves fp32 on its way to a value inside.
    const int exponent = output.exponents[row];
    const float scale = SmallPowerOfTwo(exponent / 2), rest = SmallPowerOfTwo(exponent - exponent / 2);
#pragma unroll
    for (uint32_t u = 0; u < 8; ++u) {
      const uint32_t channel = first + 16 * u;
      if (channel >= output.channels) break;
      const float4 svh = LoadVector(output.matrix.svh + channel);
      float4 bias = {};
      if (output.matrix.bias != nullptr) bias = LoadVector(output.matrix.bias + channel);
      const auto value = [&](uint32_t i, float factor, float more) {
        return v[4 * u + i] * (kHadamardScale * factor) * scale * rest + more;
      };
      StoreFour<kType>(output, vectors, row, channel,
                       {value(0, svh.x, bias.x), value(1, svh.y, bias.y), value(2, svh.z, bias.z),
                        value(3, svh.w, bias.w)});
    }
  }
}

// ---- Consumers

// A group's 64 rows of an item. A stage is given back to both blocks, as each writes to the stages of both.
template <int kBlocks, bool kSplit, Value kType>
__device__ __forceinline__ void ConsumeItem(const DenseParams& params, const Block& block, const Item& item,
                                            bool vectors, StagePlace& place) {
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const uint32_t inputs = block.stages + warp / kGroupWarps * (kSlotRows * kLineBytes);
  const uint32_t weights = block.stages + kInputBytes;
  float sums[16 * kBlocks][4] = {};
  uint32_t before = 0;
  for (uint32_t quad = 0; quad < item.quads; ++quad) {
    WaitBarrier(block.Full(place.index), place.phase);
    const uint32_t stage = place.index * kStageBytes;
    const uint64_t a = SharedOperand(inputs + stage), b = SharedOperand(weights + stage);
    FenceProducts();
#pragma unroll
    for (uint32_t s = 0; s < 4; ++s) MultiplyAsync<16 * kBlocks>(sums, a + 2 * s, b + 2 * s, true);
    CommitProducts();
    WaitForProducts<1>();
    if (quad > 0) ArriveAtAll<kCluster>(block.Empty(before));
    before = place.index;
    place.Advance();
  }
  WaitForProducts<0>();
  ArriveAtAll<kCluster>(block.Empty(before));
  const uint32_t first_row = item.first_group * kGroupRows + warp * kTileChannels + lane / 4;
#pragma unroll
  for (uint32_t b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      float v[32];
#pragma unroll
      for (uint32_t i = 0; i < 32; ++i) v[i] = sums[16 * b + i / 2][2 * half + i % 2];
      StoreRowBlock<kSplit, kType>(params, vectors, item.split, first_row + 8 * half,
                                   (item.first_block + b) * kHadamardChannels, v);
    }
  }
}

template <bool kSplit, Value kType>
__device__ __forceinline__ void Consume(const DenseParams& params, const Block& block) {
  WaitForPreviousKernel();
  const Items items(params);
  const OutputParams& output = params.output;
  constexpr uint32_t kFourBytes = kType == Value::kF32 ? 16 : 8;
  const bool vectors = reinterpret_cast<uintptr_t>(output.y) % kFourBytes == 0 && output.y_stride % 4 == 0;
  const uint32_t first_group = threadIdx.x / (32 * kGroupWarps) * kSlotGroups;
  StagePlace place;
  for (uint32_t index = blockIdx.x / kCluster; index < items.count(); index += gridDim.x / kCluster) {
    const Item item = items.At(index, block.rank);
    if (item.blocks == 0) continue;
    if (item.groups <= first_group) {
#pragma unroll 1
      for (uint32_t quad = 0; quad < item.quads; ++quad) {
        WaitBarrier(block.Full(place.index), place.phase);
        __syncwarp();
        ArriveAtAll<kCluster>(block.Empty(place.index));
        place.Advance();
      }
    } else if (item.blocks == 2) {
      ConsumeItem<2, kSplit, kType>(params, block, item, vectors, place);
    } else {
      ConsumeItem<1, kSplit, kType>(params, block, item, vectors, place);
    }
  }
}

// ---- Producer

// One thread. Inputs of this block's rows, and this block's half of the weights for both.
__device__ __forceinline__ void Produce(const DenseParams& params, const Block& block) {
  const Items items(params);
  constexpr uint32_t kEveryRank = (1u << kCluster) - 1;
  StagePlace place;
  for (uint32_t index = blockIdx.x / kCluster; index < items.count(); index += gridDim.x / kCluster) {
    const Item item = items.At(index, block.rank);
    if (item.blocks == 0) continue;
    const uint32_t input_bytes = item.groups * kGroupBytes;
    const uint32_t bytes = input_bytes + item.blocks * kTileBytes;
    const uint64_t quad_room = uint64_t{params.groups} * kWidePieces;
    const uint4* inputs = params.inputs + item.first_quad * quad_room + item.first_group * kWidePieces;
    // A block of output channels each, or half of one.
    const uint32_t share_bytes = item.blocks * (kTileBytes / kCluster), share = block.rank * share_bytes;
    const std::byte* weights =
        params.weights +
        (uint64_t{item.first_block + share / kTileBytes} * items.quads + item.first_quad) * kTileBytes +
        share % kTileBytes;
#pragma unroll 1
    for (uint32_t quad = 0; quad < item.quads; ++quad) {
      WaitBarrier(block.Empty(place.index), place.phase ^ 1);
      const uint32_t full = block.Full(place.index), stage = block.stages + place.index * kStageBytes;
      ArriveAndExpect(full, bytes);
      if (input_bytes > 0) CopyBlock(stage, inputs, input_bytes, full);
      CopyBlockToCluster(stage + kInputBytes + share, weights, share_bytes, full, kEveryRank);
      inputs += quad_room;
      weights += kTileBytes;
      place.Advance();
    }
  }
}

template <bool kSplit, Value kType>
__global__ void __launch_bounds__(kDenseThreads, 1) DenseRows(const __grid_constant__ DenseParams params) {
  if constexpr (kAsyncProducts) {
    extern __shared__ uint8_t memory[];
    const uint32_t stages = (SharedAddress(memory) + 1023) & ~1023u;
    const Block block = {stages, stages + kStages * kStageBytes, ClusterRank()};
    if (threadIdx.x == 0) {
      for (uint32_t i = 0; i < kStages; ++i) {
        InitBarrier(block.Full(i), 1);
        InitBarrier(block.Empty(i), kCluster * kConsumers);
      }
      FenceBarriers();
    }
    SyncCluster();
    const uint32_t warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
    if (warp < kConsumers) {
      GrowRegisters<kConsumerRegisters>();
      Consume<kSplit, kType>(params, block);
    } else {
      ShrinkRegisters<kProducerRegisters>();
      WaitForPreviousKernel();
      AllowNextKernel();
      if (warp == kConsumers && (threadIdx.x & 31) == 0) Produce(params, block);
      __syncwarp();
    }
    // The other block may still arrive at barriers of this one.
    SyncCluster();
  } else {
    __trap();  // LinearClassOf sends nothing here, and the build refuses sm_90 without its `a`
  }
}

cudaError_t LaunchClusters(void (*kernel)(DenseParams), dim3 grid, cudaStream_t stream, bool dependent,
                           const DenseParams& params) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(kSharedBytes));
  if (error != cudaSuccess) return error;
  // Not by __cluster_dims__, which compilers for older architectures refuse.
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = kCluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(kDenseThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = dependent ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace

cudaError_t LaunchDecodeMatrix(const DeviceMatrix& matrix, std::byte* weights, cudaStream_t stream,
                               bool dependent) {
  const uint32_t quads = matrix.in_channels / kQuadChannels;
  const dim3 grid(matrix.out_channels / kHadamardChannels, (quads + kDecodeQuads - 1) / kDecodeQuads);
  return Launch(DecodeKernelOf(matrix), grid, kDecodeThreads, kDecodeWarps * kDecodeQuads * kDecodedBytes,
                stream, dependent, matrix.codes, weights, quads);
}

cudaError_t LaunchDenseRows(const DenseParams& params, cudaStream_t stream, bool dependent) {
  int device = 0, sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  // As many clusters as run at a time; each takes what is its turn, whatever their number is.
  const uint64_t tiles = uint64_t{(params.groups + kItemGroups - 1) / kItemGroups} *
                         ((params.output.matrix.out_channels + kDenseItemChannels - 1) / kDenseItemChannels);
  const uint64_t items =
      params.log2_splits > 0 ? tiles << params.log2_splits : 2 * tiles - params.whole_items;
  const uint64_t clusters = std::min<uint64_t>(items, std::max(static_cast<uint32_t>(sms) / kCluster, 1u));
  const dim3 grid(static_cast<uint32_t>(clusters) * kCluster);
  const auto launch = [&](auto kernel) { return LaunchClusters(kernel, grid, stream, dependent, params); };
  if (params.log2_splits > 0) return launch(DenseRows<true, Value::kF32>);
  switch (params.output.type) {
    case Value::kF16:
      return launch(DenseRows<false, Value::kF16>);
    case Value::kBF16:
      return launch(DenseRows<false, Value::kBF16>);
    case Value::kF32:
      break;
  }
  return launch(DenseRows<false, Value::kF32>);
}

}  // namespace espalier::cuda
