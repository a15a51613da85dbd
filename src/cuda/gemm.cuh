// SPDX-License-Identifier: Apache-2.0
//
// Rows times one coded matrix: the products of FC1, FC2 and of single linears. A block of 8 warps takes a
// unit: up to 8 * T rows, `block_channels` output channels, a share of the input channels. A warp takes
// kTiles output tiles (16 channels each) over one set of inputs. The warps split the unit by output tiles
// and, where that leaves warps over, by input channels; their sums meet in shared memory in a fixed order.
// Whatever T is, a row's sums are made in the same order: tiles may be chosen by the rows an expert has.
#ifndef ESPALIER_SRC_CUDA_GEMM_CUH_
#define ESPALIER_SRC_CUDA_GEMM_CUH_

#include <espalier/formats.h>

#include <cstdint>

#include "cuda/boundary.cuh"
#include "cuda/decode.cuh"
#include "cuda/device_table.h"
#include "cuda/operand.cuh"
#include "cuda/ptx.cuh"
#include "cuda/rotate.cuh"
#include "cuda/routes.cuh"
#include "cuda/values.cuh"

namespace espalier::cuda {

inline constexpr uint32_t kLog2Warps = 3;
inline constexpr uint32_t kWarps = 1u << kLog2Warps;
inline constexpr uint32_t kGemmThreads = 32 * kWarps;
template <int kTiles>
inline constexpr uint32_t Log2Of = kTiles == 1 ? 0 : 1;

// One warp's part of a unit.
struct WarpWork {
  const uint32_t* codes;  // first word of the lane in the first quad
  uint64_t quad_words;    // from quad to quad
  const uint4* inputs;    // first piece of the lane in the first group
  uint64_t group_pieces;  // from group to group
  uint32_t first_quad;
  uint32_t quads;
  uint32_t row_floats;  // of the sums in shared memory
};

// Steps that codes are asked for ahead. 16 to 24 warps an SM times 2 * 512 bytes cover the 20 KB that the
// latency of the memory wants in flight at 2.3 TB/s.
template <int kBits, int kTiles>
inline constexpr int kAhead = (kBits <= 4 ? 4 : 2) / kTiles;
template <int kBits>
inline constexpr int kAhead<kBits, 1> = kBits <= 4 ? 3 : 2;

// Up to three groups the inputs of a quad fit in registers beside everything else.
template <int T>
inline constexpr bool kInputsAhead = T <= 3;

// Activations of one quad: [pieces][groups].
template <Operand kOperand, int T>
struct QuadInputs {
  uint4 b[kInputsAhead<T> ? kPieces<kOperand> : 1][T];
};

// Codes of one step: a quad of each output tile.
template <int kBits, int kTiles>
struct StepCodes {
  QuadWords<kBits> quads[kTiles];
};

// `p`: the lane's first word in the first tile.
template <int kBits, int kTiles>
__device__ __forceinline__ StepCodes<kBits, kTiles> LoadStep(const uint32_t* p) {
  StepCodes<kBits, kTiles> codes;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) codes.quads[tile] = LoadQuad<kBits>(p + tile * 8 * kBits);
  return codes;
}

// The sums of one step. Each piece of the inputs is asked for again, for the next quad at `next`, as soon as
// it has been used: a whole step hides the way to the second-level cache. With more groups `next` is this
// quad, and a piece is asked for before its weights are decoded.
template <int kBits, Codebook kCodebook, Operand kOperand, int T, int kTiles>
__device__ __forceinline__ void MultiplyStep(const StepCodes<kBits, kTiles>& codes,
                                             QuadInputs<kOperand, T>& inputs, const uint4* next,
                                             uint64_t group_pieces, uint32_t flips,
                                             float (&sums)[kTiles][T][4]) {
  uint32_t previous[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) previous[tile] = PreviousWord(codes.quads[tile].w[kBits - 1]);
#pragma unroll
  for (int piece = 0; piece < static_cast<int>(kPieces<kOperand>); ++piece) {
    uint4(&b)[T] = inputs.b[kInputsAhead<T> ? piece : 0];
    if constexpr (!kInputsAhead<T>) {
#pragma unroll
      for (int t = 0; t < T; ++t) b[t] = LoadInputs(next + t * group_pieces + piece * 32);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const QuadWords<kBits>& quad = codes.quads[tile];
      uint32_t first[4], second[4];
      if constexpr (kOperand == Operand::kSplit) {
        SplitOperands<kBits, kCodebook>(quad, previous[tile], flips, piece, first, second);
      } else {
        PairOperand<kBits, kCodebook>(quad, previous[tile], flips, 2 * piece, first);
        PairOperand<kBits, kCodebook>(quad, previous[tile], flips, 2 * piece + 1, second);
      }
#pragma unroll
      for (int t = 0; t < T; ++t) Mma16816(sums[tile][t], first, b[t].x, b[t].y);
#pragma unroll
      for (int t = 0; t < T; ++t) Mma16816(sums[tile][t], second, b[t].z, b[t].w);
    }
    if constexpr (kInputsAhead<T>) {
#pragma unroll
      for (int t = 0; t < T; ++t) b[t] = LoadInputs(next + t * group_pieces + piece * 32);
    }
  }
}

template <int kBits, Codebook kCodebook, Operand kOperand, int T, int kTiles>
__device__ __forceinline__ void MultiplyWarp(const WarpWork& work, float (&sums)[kTiles][T][4]) {
  constexpr int kSteps = kAhead<kBits, kTiles>;
  constexpr uint32_t kInputStep = kPieces<kOperand> * 32;
  StepCodes<kBits, kTiles> ahead[kSteps];
  const uint32_t* codes = work.codes;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (i < work.quads) ahead[i] = LoadStep<kBits, kTiles>(codes);
    codes += work.quad_words;
  }
  // Not before the codes are on their way: they do not depend on the kernel that writes the inputs.
  WaitForPreviousKernel();
  AllowNextKernel();
  const uint32_t flips = OpaqueConstant(kFoldFlips);
  const uint4* next = work.inputs + uint64_t{work.first_quad} * kInputStep;
  QuadInputs<kOperand, T> inputs;
  if constexpr (kInputsAhead<T>) {
#pragma unroll
    for (int piece = 0; piece < static_cast<int>(kPieces<kOperand>); ++piece) {
#pragma unroll
      for (int t = 0; t < T; ++t) inputs.b[piece][t] = LoadInputs(next + t * work.group_pieces + piece * 32);
    }
  }
  uint32_t first = 0;
  // Without conditions while every load has a quad to ask for. Beside the weights of several tiles conditions
  // are cheap, and one loop is half the code in the instruction cache.
  for (; kTiles == 1 && first + 2 * kSteps <= work.quads; first += kSteps) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if constexpr (kInputsAhead<T>) next += kInputStep;
      MultiplyStep<kBits, kCodebook, kOperand>(ahead[i], inputs, next, work.group_pieces, flips, sums);
      if constexpr (!kInputsAhead<T>) next += kInputStep;
      ahead[i] = LoadStep<kBits, kTiles>(codes);
      codes += work.quad_words;
    }
  }
#pragma unroll 1
  for (; first < work.quads; first += kSteps) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (first + i >= work.quads) break;
      // The last step asks for its own inputs again: no branch, and nothing outside the row is touched.
      if (kInputsAhead<T> && first + i + 1 < work.quads) next += kInputStep;
      MultiplyStep<kBits, kCodebook, kOperand>(ahead[i], inputs, next, work.group_pieces, flips, sums);
      if constexpr (!kInputsAhead<T>) next += kInputStep;
      if (first + i + kSteps < work.quads) ahead[i] = LoadStep<kBits, kTiles>(codes);
      codes += work.quad_words;
    }
  }
}

// One product of all tiles. Its sums go to out[split][projection][packed row][channel].
struct GemmParams {
  RowSource rows = {};
  bool prefetch = false;  // codes are on their way before the kernel before has ended
  uint32_t first_projection = 0;
  uint32_t num_projections = 0;
  uint32_t log2_tiles = 0;   // output tiles of a unit: 32, 64, 128 or, of few rows that finish, 256 channels
  uint32_t log2_splits = 0;  // shares of the input channels, each a unit of its own
  const uint4* inputs = nullptr;
  uint64_t group_room = 0;            // pieces from group to group; wide: from quad to quad
  uint64_t projection_room = 0;       // pieces from projection to projection
  const float* input_sums = nullptr;  // [projections][rows], for mul1
  uint32_t num_rows = 0;
  float* out = nullptr;
  uint64_t out_row = 0;         // floats from row to row
  uint64_t out_projection = 0;  // ... from projection to projection
  uint64_t out_split = 0;       // ... from split to split
  // Instead of sums, outputs: H128(sums) * svh * scale (+ bias), times the row's weight, in blocks of 128.
  // Wide: sums still, in the order of the routes.
  bool finish = false;
  const int32_t* input_exponents = nullptr;  // [rows]
  // Makes the operands itself, from the sums of FC1: for tiles of one row.
  bool fused = false;
  BoundaryParams boundary = {};
  uint32_t item_blocks = 1;  // wide: blocks of 128 channels that follow each other in one place
};

// How a unit's sums meet in shared memory: [warp splits][rows][block channels + 4]. The padding keeps the
// rows of a matrix instruction's column pairs in different banks.
struct SharedSums {
  float* data;
  uint32_t splits;
  uint32_t rows;
  uint32_t row_floats;

  __device__ __forceinline__ float* At(uint32_t split, uint32_t row, uint32_t channel) const {
    return data + (split * rows + row) * row_floats + channel;
  }
};

// `to`: where the warp's first row and channel go.
template <int T>
__device__ __forceinline__ void ShareSums(const float (&sums)[T][4], float* to, uint32_t row_floats) {
  to += (threadIdx.x & 3) * 2 * row_floats + (threadIdx.x & 31) / 4;
#pragma unroll
  for (int t = 0; t < T; ++t) {
    to[0] = sums[t][0];
    to[row_floats] = sums[t][1];
    to[8] = sums[t][2];
    to[row_floats + 8] = sums[t][3];
    to += kGroupRows * row_floats;
  }
}

__device__ __forceinline__ float4 TotalSums(const SharedSums& shared, uint32_t row, uint32_t channel) {
  float4 total = *reinterpret_cast<const float4*>(shared.At(0, row, channel));
  for (uint32_t split = 1; split < shared.splits; ++split) {
    const float4 more = *reinterpret_cast<const float4*>(shared.At(split, row, channel));
    total = {total.x + more.x, total.y + more.y, total.z + more.z, total.w + more.w};
  }
  return total;
}

__device__ __forceinline__ float4 Affine(float4 v, float scale, float offset) {
  return {v.x * scale + offset, v.y * scale + offset, v.z * scale + offset, v.w * scale + offset};
}

inline constexpr uint32_t kMaxUnitBlocks = 2;  // of 128 channels

// What a block of threads works on. Lies in shared memory and is read again where it is needed, so that
// nothing of it occupies registers while a warp multiplies.
struct Unit {
  Tile tile;
  const DeviceMatrix* matrix;
  uint32_t projection;
  uint32_t block;
  uint32_t split;
  int32_t fused_exponent;  // of the one row of a fused unit
  float fused_sum;
  uint2 svh[kMaxUnitBlocks * 32];  // of a unit that finishes, once CopiesDone
};

// What a row of a finishing product is multiplied with and where it goes.
struct RowFacts {
  int exponent = 0;
  float weight = 0;
  uint32_t slot = 0;
  float sum = 0;  // of its operands, for mul1

  __device__ __forceinline__ RowFacts From(uint32_t lane) const {
    return {__shfl_sync(0xFFFFFFFFu, exponent, lane), __shfl_sync(0xFFFFFFFFu, weight, lane),
            __shfl_sync(0xFFFFFFFFu, slot, lane), __shfl_sync(0xFFFFFFFFu, sum, lane)};
  }
};

// H128(sums) * svh * 2^exponent (+ bias), times the row's weight. In double where a factor alone would leave
// the range of fp32.
__device__ __forceinline__ float4 FinishSums(float4 v, float4 svh, float4 bias, const RowFacts& row) {
  v = Hadamard128(v);
  if (Ordinary(row.exponent)) {
    const float scale = SmallPowerOfTwo(row.exponent);
    v = {v.x * svh.x * scale + bias.x, v.y * svh.y * scale + bias.y, v.z * svh.z * scale + bias.z,
         v.w * svh.w * scale + bias.w};
    return {v.x * row.weight, v.y * row.weight, v.z * row.weight, v.w * row.weight};
  }
  const double scale = PowerOfTwo(row.exponent);
  const auto finish = [&](float sum, float sign, float add) {
    return static_cast<float>((double{sum} * double{sign} * scale + double{add}) * double{row.weight});
  };
  return {finish(v.x, svh.x, bias.x), finish(v.y, svh.y, bias.y), finish(v.z, svh.z, bias.z),
          finish(v.w, svh.w, bias.w)};
}

// Outputs in blocks of 128 channels: the warps that share a block take its rows by turns.
struct FinishPlace {
  uint32_t block, first_row, row_step;

  __device__ __forceinline__ explicit FinishPlace(uint32_t log2_tiles) {
    const uint32_t log2_blocks = log2_tiles - 3, warp = threadIdx.x / 32;
    block = warp & ((1u << log2_blocks) - 1);
    first_row = warp >> log2_blocks;
    row_step = kWarps >> log2_blocks;
  }
};

// Lane i fetches what there is to know of the warp's i-th row, so that no row waits for it: 32 times 4 rows,
// more than a tile has.
__device__ __forceinline__ RowFacts LoadFacts(const GemmParams& params, const Unit& unit) {
  const FinishPlace place(params.log2_tiles);
  const uint32_t row = place.first_row + place.row_step * (threadIdx.x & 31);
  if (row >= unit.tile.rows) return {};
  const uint32_t packed = unit.tile.first_group * kGroupRows + row;
  const bool mul1 = unit.matrix->codebook == static_cast<uint32_t>(Codebook::kMul1);
  return {params.fused ? unit.fused_exponent : params.input_exponents[packed], params.rows.WeightAt(packed),
          params.rows.SlotAt(packed),
          !mul1          ? 0.0f
          : params.fused ? unit.fused_sum
                         : params.input_sums[packed]};
}

__device__ __forceinline__ void FinishUnit(const GemmParams& params, const Unit& unit,
                                           const SharedSums& shared, const RowFacts& facts) {
  const DeviceMatrix& matrix = *unit.matrix;
  const FinishPlace place(params.log2_tiles);
  const uint32_t lane = threadIdx.x & 31;
  const uint32_t in_unit = place.block * kHadamardChannels + 4 * lane;
  const uint32_t channel = (unit.block << (params.log2_tiles + 4)) + in_unit;
  const bool mul1 = matrix.codebook == static_cast<uint32_t>(Codebook::kMul1);
  const float4 svh = FourHalves(unit.svh[place.block * 32 + lane]);
  float4 bias = {};
  if (matrix.bias != nullptr) bias = LoadVector(matrix.bias + channel);
  uint32_t index = 0;
  for (uint32_t row = place.first_row; row < unit.tile.rows; row += place.row_step) {
    const RowFacts own = facts.From(index++);
    float4 v = TotalSums(shared, row, in_unit);
    if (mul1) v = Affine(v, kMul1Scale, kMul1Offset * own.sum);
    v = FinishSums(v, svh, bias, own);
    *reinterpret_cast<float4*>(params.out + own.slot * params.out_row + channel) = v;
  }
}

__device__ __forceinline__ void WriteUnit(const GemmParams& params, const Unit& unit,
                                          const SharedSums& shared) {
  const uint32_t log2_lanes = params.log2_tiles + 2;  // threads that share a row
  const bool mul1 = unit.matrix->codebook == static_cast<uint32_t>(Codebook::kMul1);
  const uint32_t in_block = (threadIdx.x & ((1u << log2_lanes) - 1)) * 4;
  const uint32_t channel = (unit.block << (params.log2_tiles + 4)) + in_block;
  float* out = params.out + unit.split * params.out_split + unit.projection * params.out_projection + channel;
  for (uint32_t row = threadIdx.x >> log2_lanes; row < unit.tile.rows; row += kGemmThreads >> log2_lanes) {
    const uint32_t packed = unit.tile.first_group * kGroupRows + row;
    float4 v = TotalSums(shared, row, in_block);
    if (mul1) {
      const float sum = params.input_sums[unit.projection * params.num_rows + packed];
      v = Affine(v, kMul1Scale, unit.split == 0 ? kMul1Offset * sum : 0.0f);
    }
    *reinterpret_cast<float4*>(out + packed * params.out_row) = v;
  }
}

// Sums of one warp over its share of the input channels, left in shared memory.
template <int kBits, Codebook kCodebook, Operand kOperand, int T, int kTiles>
__device__ __forceinline__ void MultiplyAndShare(const WarpWork& work, float* shared) {
  float sums[kTiles][T][4] = {};
  MultiplyWarp<kBits, kCodebook, kOperand>(work, sums);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    ShareSums<T>(sums[tile], shared + tile * kTileChannels, work.row_floats);
  }
}

template <int kBits, bool kSplitOperands, int T, int kTiles>
__device__ __forceinline__ void MultiplyCodebook(uint32_t codebook, const WarpWork& work, float* shared) {
  switch (static_cast<Codebook>(codebook)) {
#define ESPALIER_CODEBOOK(enumerator, number, name, marker_tensor, multiplier)                        \
  case Codebook::enumerator: {                                                                        \
    constexpr Operand kOperand =                                                                      \
        kSplitOperands && Codebook::enumerator != Codebook::kMul1 ? Operand::kSplit : Operand::kPair; \
    return MultiplyAndShare<kBits, Codebook::enumerator, kOperand, T, kTiles>(work, shared);          \
  }
#include <espalier/formats.def>
  }
}

// One warp's part of one block of output channels.
template <bool kSplitOperands, int T, int kTiles>
__device__ __forceinline__ void MultiplyBlock(const GemmParams& params, const Unit& unit, const uint4* inputs,
                                              const SharedSums& shared) {
  const DeviceMatrix& matrix = *unit.matrix;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  // Everything is a power of two: a block is short, and divisions would cost it as much as a step.
  const uint32_t log2_tile_warps = params.log2_tiles - Log2Of<kTiles>;
  const uint32_t first_tile = (warp & ((1u << log2_tile_warps) - 1)) * kTiles;
  const uint32_t warp_split = warp >> log2_tile_warps;
  const uint32_t log2_warp_splits = kLog2Warps - log2_tile_warps;
  const uint32_t log2_shares = params.log2_splits + log2_warp_splits;
  const uint32_t quads = matrix.in_channels / kQuadChannels;
  const uint32_t share = (unit.split << log2_warp_splits) + warp_split;
  const uint32_t tile_words = 8 * matrix.bits;
  const uint64_t row_words = uint64_t{matrix.out_channels} / kTileChannels * tile_words;

  WarpWork work;
  work.first_quad = quads * share >> log2_shares;
  work.quads = (quads * (share + 1) >> log2_shares) - work.first_quad;
  work.quad_words = 4 * row_words;
  work.codes = matrix.codes + (uint64_t{work.first_quad} * 4 + (lane & 3)) * row_words +
               ((unit.block << params.log2_tiles) + first_tile) * tile_words + (lane >> 2) * matrix.bits;
  work.group_pieces = params.group_room;
  // Where one group is all, rows beyond the last one repeat it: their columns are never read, and repeats
  // cost no traffic.
  const uint32_t row = T == 1 ? min(lane >> 2, unit.tile.rows - 1) : lane >> 2;
  work.inputs = inputs + row * 4 + (lane & 3);
  work.row_floats = shared.row_floats;
  float* to = shared.At(warp_split, 0, first_tile * kTileChannels);
  switch (matrix.bits) {
#define ESPALIER_BITS(number) \
  case number:                \
    return MultiplyCodebook<number, kSplitOperands, T, kTiles>(matrix.codebook, work, to);
#include <espalier/formats.def>
  }
}

// Asks for a unit's codes ahead of the wait for the kernel before: the memory works while that one ends.
__device__ __forceinline__ void PrefetchUnit(const DeviceMatrix& matrix, uint32_t first_tile, uint32_t tiles,
                                             uint32_t first_row, uint32_t rows) {
  const uint64_t row_words = uint64_t{matrix.out_channels} / kTileChannels * 8 * matrix.bits;
  // A row of tiles is 64 to 2048 bytes: 16 threads take the lines of 16 rows at a time.
  const uint32_t row_bytes = tiles * 32 * matrix.bits;
  const char* codes =
      reinterpret_cast<const char*>(matrix.codes + first_row * row_words + first_tile * 8 * matrix.bits);
  for (uint32_t row = threadIdx.x / 16; row < rows; row += kGemmThreads / 16) {
    for (uint32_t offset = threadIdx.x % 16 * 128; offset < row_bytes + 127; offset += 16 * 128) {
      PrefetchToL2(codes + row * row_words * 4 + min(offset, row_bytes - 4));
    }
  }
}

// Operands of a fused unit in shared memory: one row of the first group. Waits for the kernel before.
__device__ __forceinline__ void MakeOperands(const GemmParams& params, Unit& unit, uint4* operands,
                                             float* shared) {
  const uint32_t channels = unit.matrix->in_channels;
  const uint32_t packed = unit.tile.first_group * kGroupRows;
  const RowBuffer row(operands + GroupPieces(channels, Operand::kSplit), channels);
  const DeviceSegment& segment = params.rows.experts.segments[unit.tile.segment];
  const BoundaryFacts facts = LoadBoundaryFacts(params.boundary, segment, packed);
  WaitForPreviousKernel();
  const float max_exponent = BoundaryRow(params.boundary, segment, packed, facts, row);
  StoreOperands(row, channels, max_exponent, OperandOf(*unit.matrix, RowClass::kFew), operands, 0,
                &unit.fused_exponent, &unit.fused_sum, shared);
}

template <bool kSplitOperands, int kTiles, int T>
__device__ __forceinline__ void RunUnit(const GemmParams& params, Unit& unit, float* shared) {
  const uint4* inputs =
      params.inputs + unit.projection * params.projection_room + unit.tile.first_group * params.group_room;
  if constexpr (kSplitOperands) {
    extern __shared__ uint4 operands[];
    if (params.prefetch) {
      const uint32_t quads = unit.matrix->in_channels / kQuadChannels;
      const uint32_t first_row = (quads * unit.split >> params.log2_splits) * 4;
      PrefetchUnit(*unit.matrix, unit.block << params.log2_tiles, 1u << params.log2_tiles, first_row,
                   (quads * (unit.split + 1) >> params.log2_splits) * 4 - first_row);
    }
    if (params.fused) {
      MakeOperands(params, unit, operands, shared);
      __syncthreads();
      inputs = operands;
    }
  }
  const SharedSums shared_sums = {shared, (kWarps * kTiles) >> params.log2_tiles, T * kGroupRows,
                                  (kTileChannels << params.log2_tiles) + 4};
  MultiplyBlock<kSplitOperands, T, kTiles>(params, unit, inputs, shared_sums);
  if (!params.finish) {
    __syncthreads();
    return WriteUnit(params, unit, shared_sums);
  }
  // On their way while the slower warps end.
  const RowFacts facts = LoadFacts(params, unit);
  CopiesDone();
  __syncthreads();
  FinishUnit(params, unit, shared_sums, facts);
}

// The block's unit, in shared memory after a barrier; false where there is none.
__device__ __forceinline__ bool FindUnit(const GemmParams& params, Unit& unit) {
  const Tile tile = params.rows.TileAt(blockIdx.z);
  const uint32_t projection = blockIdx.y >> params.log2_splits;
  const uint32_t block = blockIdx.x;
  const DeviceMatrix* matrix =
      tile.rows == 0 ? nullptr : &params.rows.MatrixOf(tile.segment, params.first_projection + projection);
  if (matrix == nullptr || (block << (params.log2_tiles + 4)) >= matrix->out_channels) {
    // Also blocks without work wait: a kernel must not end before the one it follows, since the next but one
    // counts on both.
    WaitForPreviousKernel();
    return false;
  }
  if (threadIdx.x == 0) {
    unit.tile = tile;
    unit.matrix = matrix;
    unit.projection = projection;
    unit.block = block;
    unit.split = blockIdx.y & ((1u << params.log2_splits) - 1);
  }
  const uint32_t channel = (block << (params.log2_tiles + 4)) + 4 * threadIdx.x;
  if (params.finish && 4 * threadIdx.x < (kTileChannels << params.log2_tiles)) {
    CopyAsync8(&unit.svh[threadIdx.x], matrix->svh + channel);
  }
  __syncthreads();
  return true;
}

// The first of kGroups that holds the tile's groups.
template <bool kSplitOperands, int kTiles, int T, int... kMore>
__device__ __forceinline__ void RunSmallest(const GemmParams& params, Unit& unit, float* shared) {
  if constexpr (sizeof...(kMore) > 0) {
    if (unit.tile.rows > T * kGroupRows)
      return RunSmallest<kSplitOperands, kTiles, kMore...>(params, unit, shared);
  }
  RunUnit<kSplitOperands, kTiles, T>(params, unit, shared);
}

// kGroups: ascending numbers of groups that there is a loop for, the last is kMaxGroups. Blocks of one tile
// follow each other: they read the same inputs and neighbouring codes.
template <bool kSplitOperands, int kTiles, int kMaxGroups, int... kGroups>
__device__ __forceinline__ void RunBlock(const GemmParams& params) {
  // With blocks of 32 channels the sums of four or eight warps meet: the most there can be.
  __shared__ __align__(16) float shared[kMaxGroups * kGroupRows * kWarps * kTiles * (kTileChannels + 2)];
  __shared__ Unit unit;
  if (FindUnit(params, unit)) RunSmallest<kSplitOperands, kTiles, kGroups...>(params, unit, shared);
}

}  // namespace espalier::cuda

#endif  // ESPALIER_SRC_CUDA_GEMM_CUH_
