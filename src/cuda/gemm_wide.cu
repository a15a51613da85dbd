// SPDX-License-Identifier: Apache-2.0
//
// Up to 128 rows a tile, on sm_90a. A block stays and takes one unit (128 output channels of a tile) after
// the other, so that starts and ends of units overlap. Its warps have three tasks, tied by barriers in shared
// memory over a ring of stages, 64 input channels each:
//   decoders   groups of four warps take the stages by turns and write 128 x 64 weights, as fp16
//   producer   one warp asks for the rows' inputs
//   publisher  one warp finds out what comes next, ahead of the others
//   consumers  a group of four warps multiplies, asynchronously, and writes the sums
#include <algorithm>

#include "cuda/gemm.cuh"
#include "cuda/gemm_launch.cuh"
#include "cuda/ptx_sm90a.cuh"

namespace espalier::cuda {
namespace {

constexpr uint32_t kGroupWarps = 4;
constexpr uint32_t kConsumers = kGroupWarps;
constexpr uint32_t kDecoderGroups = 3;
constexpr uint32_t kDecoders = kDecoderGroups * kGroupWarps;
constexpr uint32_t kProducer = kConsumers + kDecoders;
constexpr uint32_t kPublisher = kProducer + 1;
// Registers are dealt out to whole groups of warps, so there are two that do nothing.
constexpr uint32_t kWideThreads = 32 * (kProducer + kGroupWarps);
constexpr int kConsumerRegisters = 168, kDecoderRegisters = 96, kProducerRegisters = 24;
constexpr uint32_t kMaxTileRows = TileRows(RowClass::kWide);

constexpr uint32_t kStages = 6;
constexpr uint32_t kWeightBytes = kHadamardChannels * kQuadChannels * 2;
constexpr uint32_t kInputBytes = kMaxTileRows * kQuadChannels * 2;
constexpr uint32_t kStageBytes = kWeightBytes + kInputBytes;
constexpr uint32_t kGroupBytes = kWidePieces * 16;  // of one quad
// Published at a time. A decoder waits for the item of a stage three turns of its group beyond what it has
// handed over, and an item has two stages or more: with fewer than six the two could wait for each other.
constexpr uint32_t kItems = 8;

// Consecutive blocks of 128 output channels of one matrix, for one tile of rows and one share of the inputs.
struct Item {
  const uint32_t* codes;  // of the first block's first quad
  uint32_t row_words;     // from one row of code tiles to the next
  uint32_t tile_words;
  uint32_t bits;
  uint32_t codebook;
  uint32_t quads;  // stages of a block
  uint32_t blocks;
  uint32_t last;    // no item follows; this one is none
  uint32_t groups;  // of 8 rows
  const uint4* inputs;
  float* out;         // first channel of row 0
  const float* sums;  // of the tile's inputs; null but for the first share of a mul1 matrix
  uint32_t mul1;
  uint32_t rows[kMaxTileRows];  // where each goes; ~0: nowhere
};

struct Shared {
  Item items[kItems];
  uint64_t full[kStages], empty[kStages];
  uint64_t published[kItems], released[kItems];
};
constexpr size_t kSharedBytes = size_t{kStages} * kStageBytes + sizeof(Shared) + 1024;  // to align stages

// A place in a ring, and how often it was gone through.
template <uint32_t kSize>
struct RingPlace {
  uint32_t index = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void Advance(uint32_t steps) {
    index += steps;
    if (index >= kSize) {
      index -= kSize;
      phase ^= 1;
    }
  }
};

struct Block {
  Shared& shared;
  uint32_t stages;  // address in shared memory

  static __device__ __forceinline__ uint32_t Address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
  }
  __device__ __forceinline__ uint32_t Full(uint32_t stage) const { return Address(&shared.full[stage]); }
  __device__ __forceinline__ uint32_t Empty(uint32_t stage) const { return Address(&shared.empty[stage]); }
  __device__ __forceinline__ const Item& Wait(RingPlace<kItems> item) const {
    WaitBarrier(Address(&shared.published[item.index]), item.phase);
    return shared.items[item.index];
  }
  // By each warp of consumers and decoders and the producer, when it does not look at the item any more.
  __device__ __forceinline__ void Release(RingPlace<kItems> item) const {
    __syncwarp();
    Arrive(Address(&shared.released[item.index]));
  }
};

// ---- Decoders

// Where a decoder warp asks for codes: stages of its group, over all items. What is not needed at every turn
// stays in shared memory.
struct CodeCursor {
  const uint32_t* codes = nullptr;  // of this lane and stage
  uint32_t step = 0;                // words to the group's next stage
  uint32_t quad = 0, quads = 0;     // of the block of output channels
  uint32_t blocks = 0;              // that follow
  RingPlace<kItems> place;
  uint32_t format = 0;  // of the codes that come next; kEnd: none do

  static constexpr uint32_t kEnd = ~0u;
  static constexpr __device__ __forceinline__ uint32_t FormatOf(uint32_t bits, uint32_t codebook) {
    return bits + 16 * codebook;
  }

  // The first stage that is at `quad` or, if the item has less, at what is left of it in the items that
  // follow.
  __device__ __forceinline__ void Take(const Block& block) {
    const uint32_t lane = threadIdx.x & 31, warp = (threadIdx.x / 32) % kGroupWarps;
    while (true) {
      const Item& item = block.Wait(place);
      if (item.last != 0) {
        format = kEnd;
        return;
      }
      quads = item.quads;
      if (quad < quads * item.blocks) {
        const uint32_t before = quad / quads;
        quad -= before * quads;
        blocks = item.blocks - 1 - before;
        step = kDecoderGroups * 4 * item.row_words;
        format = FormatOf(item.bits, item.codebook);
        codes = item.codes + ((lane & 3) + 4 * quad) * item.row_words +
                (2 * warp + before * (kHadamardChannels / kTileChannels)) * item.tile_words +
                (lane >> 2) * item.bits;
        return;
      }
      quad -= quads * item.blocks;
      block.Release(place);
      place.Advance(1);
    }
  }
  __device__ __forceinline__ void Advance(const Block& block) {
    codes += step;
    quad += kDecoderGroups;
    if (quad < quads) return;
    const Item& item = block.shared.items[place.index];
    do {
      if (blocks == 0) {
        quad -= quads;
        block.Release(place);
        place.Advance(1);
        return Take(block);
      }
      --blocks;
      quad -= quads;
      codes += kHadamardChannels / kTileChannels * item.tile_words;
      codes -= quads * 4 * item.row_words;
    } while (quad >= quads);
  }
};

template <int kBits, Codebook kCodebook>
__device__ __forceinline__ void DecodeTile(const QuadWords<kBits>& quad, uint32_t flips,
                                           uint32_t (&a)[4][4]) {
  const uint32_t previous = PreviousWord(quad.w[kBits - 1]);
#pragma unroll
  for (int s = 0; s < 4; ++s) PairOperand<kBits, kCodebook>(quad, previous, flips, s, a[s]);
}
// 16 lines; `to0` and `to1`: the lane's pieces of its first one.
__device__ __forceinline__ void WriteTile(const uint32_t (&a)[4][4], uint32_t to0, uint32_t to1) {
  StoreShared128(to0, a[0][0], a[1][0], a[2][0], a[3][0]);
  StoreShared128(to1, a[0][2], a[1][2], a[2][2], a[3][2]);
  StoreShared128(to0 + 1024, a[0][1], a[1][1], a[2][1], a[3][1]);
  StoreShared128(to1 + 1024, a[0][3], a[1][3], a[2][3], a[3][3]);
}

// All that follows in this format; returns where another one begins, or the end. A turn is two output tiles
// that lie beside each other. The loop is one turn long, so that it stays in the instruction cache of an SM
// quarter, whose warps are at different places of it; codes are asked for again as soon as they are decoded.
template <int kBits, Codebook kCodebook>
__device__ __forceinline__ void DecodeRun(const Block& block, CodeCursor& cursor, RingPlace<kStages>& place) {
  constexpr uint32_t kFormat = CodeCursor::FormatOf(kBits, static_cast<uint32_t>(kCodebook));
  constexpr uint32_t kTileWords = 8 * kBits;
  const uint32_t lane = threadIdx.x & 31, warp = (threadIdx.x / 32) % kGroupWarps;
  const uint32_t row = lane >> 2, piece = (lane & 3) * 2;
  // A warp's tiles are 32 lines of 128 bytes.
  const uint32_t to = block.stages + warp * 4096 + row * 128;
  const uint32_t to0 = to + ((piece ^ row) << 4), to1 = to + (((piece + 1) ^ row) << 4);
  const uint32_t flips = OpaqueConstant(kFoldFlips);
  QuadWords<kBits> first = LoadQuad<kBits>(cursor.codes);
  QuadWords<kBits> second = LoadQuad<kBits>(cursor.codes + kTileWords);
  cursor.Advance(block);
  // A stage is handed over in the middle of the next turn, when its stores have long been done: a fence right
  // behind them would wait for each.
  uint32_t written = kStages;
  const auto hand_over = [&] {
    FenceShared();
    __syncwarp();
    if (lane == 0) Arrive(block.Full(written));
  };
  bool more = true;
#pragma unroll 1
  while (more) {
    more = cursor.format == kFormat;
    const uint32_t* next = cursor.codes;
    uint32_t a[4][4];
    DecodeTile<kBits, kCodebook>(first, flips, a);
    if (more) {
      first = LoadQuad<kBits>(next);
      cursor.Advance(block);
      // Both tiles of the turn after.
      if (cursor.format == kFormat) PrefetchToL2(cursor.codes + row * kBits);
    }
    if (written < kStages) hand_over();
    written = place.index;
    WaitBarrier(block.Empty(place.index), place.phase ^ 1);
    const uint32_t stage = place.index * kStageBytes;
    WriteTile(a, to0 + stage, to1 + stage);
    DecodeTile<kBits, kCodebook>(second, flips, a);
    if (more) second = LoadQuad<kBits>(next + kTileWords);
    WriteTile(a, to0 + stage + 2048, to1 + stage + 2048);
    place.Advance(kDecoderGroups);
  }
  hand_over();
}

__device__ __forceinline__ void Decode(const Block& block, uint32_t group) {
  RingPlace<kStages> place{group, 0};
  CodeCursor cursor;
  cursor.quad = group;
  cursor.Take(block);
  while (cursor.format != CodeCursor::kEnd) {
    switch (cursor.format) {
#define ESPALIER_FORMAT(bits, codebook)                                       \
  case CodeCursor::FormatOf(bits, static_cast<uint32_t>(Codebook::codebook)): \
    DecodeRun<bits, Codebook::codebook>(block, cursor, place);                \
    break;
#define ESPALIER_CODEBOOK(enumerator, number, name, marker_tensor, multiplier) \
  ESPALIER_FORMAT(1, enumerator)                                               \
  ESPALIER_FORMAT(2, enumerator)                                               \
  ESPALIER_FORMAT(3, enumerator)                                               \
  ESPALIER_FORMAT(4, enumerator)                                               \
  ESPALIER_FORMAT(5, enumerator)                                               \
  ESPALIER_FORMAT(6, enumerator)                                               \
  ESPALIER_FORMAT(7, enumerator)                                               \
  ESPALIER_FORMAT(8, enumerator)
#include <espalier/formats.def>
#undef ESPALIER_FORMAT
    }
  }
}

// ---- Consumers

// One block of output channels: `quads` stages, then the sums go out.
template <int T>
__device__ __forceinline__ void ConsumeBlock(const GemmParams& params, const Block& block, const Item& item,
                                             float* out, RingPlace<kStages>& place) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const uint32_t weights = block.stages;
  const uint32_t inputs = block.stages + kWeightBytes;
  const uint32_t quads = item.quads;
  float sums[2][T][4] = {};  // of 64 output channels each
  uint32_t before = 0;
  for (uint32_t quad = 0; quad < quads; ++quad) {
    WaitBarrier(block.Full(place.index), place.phase);
    const uint32_t stage = place.index * kStageBytes;
    const uint64_t a = SharedOperand(weights + stage), b = SharedOperand(inputs + stage);
    FenceProducts();
#pragma unroll
    for (uint32_t s = 0; s < 4; ++s) {
      MultiplyAsync<T>(sums[0], a + 2 * s, b + 2 * s, true);
      MultiplyAsync<T>(sums[1], a + kWeightBytes / 2 / 16 + 2 * s, b + 2 * s, true);
    }
    CommitProducts();
    WaitForProducts<1>();
    if (quad > 0 && lane == 0) Arrive(block.Empty(before));
    before = place.index;
    place.Advance(1);
  }
  WaitForProducts<0>();
  if (lane == 0) Arrive(block.Empty(before));
  const uint32_t channel = warp * kTileChannels + lane / 4;
#pragma unroll
  for (int t = 0; t < T; ++t) {
    const uint32_t first = 8 * t + 2 * (lane & 3);
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t row = item.rows[first + i];
      if (row == ~0u) continue;
      float values[4] = {sums[0][t][i], sums[0][t][2 + i], sums[1][t][i], sums[1][t][2 + i]};
      if (item.mul1 != 0) {
        const float offset = item.sums != nullptr ? kMul1Offset * item.sums[first + i] : 0.0f;
#pragma unroll
        for (float& value : values) value = value * kMul1Scale + offset;
      }
      float* at = out + row * params.out_row + channel;
      at[0] = values[0];
      at[8] = values[1];
      at[64] = values[2];
      at[72] = values[3];
    }
  }
}

template <int T>
__device__ __forceinline__ void ConsumeItem(const GemmParams& params, const Block& block, const Item& item,
                                            RingPlace<kStages>& place) {
  float* out = item.out;
  for (uint32_t i = item.blocks; i > 0; --i) {
    ConsumeBlock<T>(params, block, item, out, place);
    out += kHadamardChannels;
  }
}

template <int T, int... kMore>
__device__ __forceinline__ void ConsumeSmallest(const GemmParams& params, const Block& block,
                                                const Item& item, RingPlace<kStages>& place) {
  if constexpr (sizeof...(kMore) > 0) {
    if (item.groups > T) return ConsumeSmallest<kMore...>(params, block, item, place);
  }
  ConsumeItem<T>(params, block, item, place);
}

__device__ __forceinline__ void Consume(const GemmParams& params, const Block& block) {
  WaitForPreviousKernel();
  RingPlace<kItems> item_place;
  RingPlace<kStages> place;
  while (true) {
    const Item& item = block.Wait(item_place);
    if (item.last != 0) return;
    ConsumeSmallest<2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16>(params, block, item, place);
    block.Release(item_place);
    item_place.Advance(1);
  }
}

// ---- Publisher and producer

// The whole warp: what this block has to do, one out of gridDim.x items. Everything that it reads was written
// before the kernel before this one. `blocks`: of the widest matrix.
__device__ __forceinline__ void Publish(const GemmParams& params, const Block& block, uint32_t blocks,
                                        uint32_t shares, uint32_t tiles) {
  const uint32_t lane = threadIdx.x & 31;
  const uint32_t runs = (blocks + params.item_blocks - 1) / params.item_blocks;
  const uint32_t there = params.rows.kind == RowKind::kPacked ? *params.rows.num_tiles : tiles;
  const uint32_t count = min(there, tiles) * shares * runs;
  RingPlace<kItems> place;
  for (uint32_t index = blockIdx.x; index < count; index += gridDim.x) {
    const uint32_t share = index / runs % shares;
    const Tile tile = params.rows.TileAt(index / runs / shares);
    const uint32_t split = share & ((1u << params.log2_splits) - 1);
    const uint32_t projection = share >> params.log2_splits;
    const DeviceMatrix& matrix = params.rows.MatrixOf(tile.segment, params.first_projection + projection);
    const uint32_t first_block = index % runs * params.item_blocks;
    const uint32_t blocks_there = matrix.out_channels / kHadamardChannels;
    if (first_block >= blocks_there) continue;  // a narrow segment
    Item& item = block.shared.items[place.index];
    WaitBarrier(Block::Address(&block.shared.released[place.index]), place.phase ^ 1);
    const uint32_t first_packed = tile.first_group * kGroupRows;
#pragma unroll
    for (uint32_t row = lane; row < kMaxTileRows; row += 32) {
      uint32_t to = ~0u;
      if (row < tile.rows) to = params.finish ? params.rows.SlotAt(first_packed + row) : first_packed + row;
      item.rows[row] = to;
    }
    if (lane == 0) {
      const uint32_t quads = matrix.in_channels / kQuadChannels;
      const uint32_t first_quad = quads * split >> params.log2_splits;
      item.last = 0;
      item.bits = matrix.bits;
      item.codebook = matrix.codebook;
      item.tile_words = 8 * matrix.bits;
      item.row_words = matrix.out_channels / kTileChannels * item.tile_words;
      item.codes = matrix.codes + uint64_t{first_quad} * 4 * item.row_words +
                   first_block * (kHadamardChannels / kTileChannels) * item.tile_words;
      item.quads = (quads * (split + 1) >> params.log2_splits) - first_quad;
      item.blocks = min(blocks_there - first_block, params.item_blocks);
      item.groups = (tile.rows + kGroupRows - 1) / kGroupRows;
      item.inputs = params.inputs + projection * params.projection_room + first_quad * params.group_room +
                    tile.first_group * kWidePieces;
      item.out = params.out + split * params.out_split + projection * params.out_projection +
                 first_block * kHadamardChannels;
      item.mul1 = matrix.codebook == static_cast<uint32_t>(Codebook::kMul1);
      item.sums = split == 0 ? params.input_sums + projection * params.num_rows + first_packed : nullptr;
    }
    __syncwarp();
    Arrive(Block::Address(&block.shared.published[place.index]));
    place.Advance(1);
  }
  WaitBarrier(Block::Address(&block.shared.released[place.index]), place.phase ^ 1);
  if (lane == 0) block.shared.items[place.index].last = 1;
  Arrive(Block::Address(&block.shared.published[place.index]));
}

__device__ __forceinline__ void Produce(const GemmParams& params, const Block& block) {
  WaitForPreviousKernel();
  AllowNextKernel();
  RingPlace<kItems> item_place;
  RingPlace<kStages> place;
  while (true) {
    const Item& item = block.Wait(item_place);
    if (item.last != 0) return;
    const uint32_t bytes = item.groups * kGroupBytes, quads = item.quads;
    for (uint32_t i = item.blocks; i > 0; --i) {
      const uint4* inputs = item.inputs;
      for (uint32_t quad = 0; quad < quads; ++quad) {
        WaitBarrier(block.Empty(place.index), place.phase ^ 1);
        if ((threadIdx.x & 31) == 0) {
          const uint32_t full = block.Full(place.index);
          ArriveAndExpect(full, bytes);
          CopyBlock(block.stages + place.index * kStageBytes + kWeightBytes, inputs, bytes, full);
        }
        place.Advance(1);
        inputs += params.group_room;
      }
    }
    block.Release(item_place);
    item_place.Advance(1);
  }
}

__global__ void __launch_bounds__(kWideThreads, 1)
    WideRows(const __grid_constant__ GemmParams params, uint32_t blocks, uint32_t shares, uint32_t tiles) {
  if constexpr (kAsyncProducts) {
    extern __shared__ uint8_t memory[];
    const uint32_t stages = (Block::Address(memory) + 1023) & ~1023u;
    uint8_t* aligned = memory + (stages - Block::Address(memory));
    const Block block = {*reinterpret_cast<Shared*>(aligned + kStages * kStageBytes), stages};
    if (threadIdx.x == 0) {
      for (uint32_t i = 0; i < kStages; ++i) {
        InitBarrier(block.Full(i), kGroupWarps + 1);
        InitBarrier(block.Empty(i), kConsumers);
      }
      for (uint32_t i = 0; i < kItems; ++i) {
        // Every lane arrives for itself: racecheck does not follow a __syncwarp before the arrival of one.
        InitBarrier(Block::Address(&block.shared.published[i]), 32);
        InitBarrier(Block::Address(&block.shared.released[i]), 32 * (kConsumers + kDecoders + 1));
      }
      FenceBarriers();
    }
    __syncthreads();
    const uint32_t warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
    if (warp < kConsumers) {
      GrowRegisters<kConsumerRegisters>();
      Consume(params, block);
    } else if (warp < kProducer) {
      ShrinkRegisters<kDecoderRegisters>();
      Decode(block, (warp - kConsumers) / kGroupWarps);
    } else {
      ShrinkRegisters<kProducerRegisters>();
      if (warp == kProducer) Produce(params, block);
      if (warp == kPublisher) Publish(params, block, blocks, shares, tiles);
    }
  } else {
    __trap();  // ClassOf sends nothing here, and the build refuses sm_90 without its `a`
  }
}

}  // namespace

cudaError_t LaunchWideRows(const GemmParams& params, dim3 grid, cudaStream_t stream, bool dependent) {
  int device = 0, sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  // As many blocks as run at a time; each takes what is its turn, whatever their number is.
  const uint64_t runs = (grid.x + params.item_blocks - 1) / params.item_blocks;
  const uint64_t items = runs * grid.y * grid.z;
  const dim3 blocks(static_cast<uint32_t>(std::min<uint64_t>(items, static_cast<uint64_t>(sms))));
  return Launch(WideRows, blocks, kWideThreads, kSharedBytes, stream, dependent, params, grid.x, grid.y,
                grid.z);
}

}  // namespace espalier::cuda
