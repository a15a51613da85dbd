// SPDX-License-Identifier: Apache-2.0
//
// Where activations lie so that one 16-byte load gives a lane its part of the B operand.
//
// Rows come in groups of 8 (the columns of one matrix instruction). Lane (g, q) of a quad needs, for row g,
// input channels 16 q .. 16 q + 15 of the quad's 64, in the order of the states: step s takes channels
// 2s, 2s + 1, 2s + 8, 2s + 9. A group is [quads][pieces][32 lanes][16 bytes]:
//   kPair   2 pieces; piece h holds steps 2h and 2h + 1, four fp16 each
//   kSplit  4 pieces; piece s holds step s, every fp16 twice
// kWide is what a copy of whole lines and the asynchronous matrix unit like: channels in their order, per
// quad all groups of a projection, [quads][groups][8 rows][8 pieces of 16 bytes], where piece p of row r lies
// at p ^ r (the 128-byte swizzle of shared memory).
#ifndef ESPALIER_SRC_CUDA_OPERAND_CUH_
#define ESPALIER_SRC_CUDA_OPERAND_CUH_

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/decode.cuh"
#include "cuda/rotate.cuh"

namespace espalier::cuda {

inline constexpr uint32_t kOperandRows = 8;

template <Operand kOperand>
inline constexpr uint32_t kPieces = kOperand == Operand::kSplit ? 4 : 2;

inline constexpr uint32_t kWidePieces = 64;  // of a quad of a group

// Of one group of rows. The room for kSplit is twice that for kPair and kWide.
__host__ __device__ inline uint64_t GroupPieces(uint32_t channels, Operand operand) {
  return uint64_t{channels} / kQuadChannels * (operand == Operand::kSplit ? 4 : 2) * 32;
}

__device__ __forceinline__ uint32_t PackHalves(float low, float high) {
  const __half2 v = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}

__device__ __forceinline__ float SumOfHalves(uint4 piece) {
  float sum = 0;
  const uint32_t words[] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (const uint32_t word : words) {
    const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&word));
    sum += values.x + values.y;
  }
  return sum;
}

// Writes one row times 2^-exponent into its place in a group; threads of the block share the pieces. Returns
// this thread's share of the sum over the values as they were rounded. `quad_room`, of kWide: pieces from
// quad to quad.
__device__ inline float StoreRow(const RowBuffer& buffer, uint32_t channels, int exponent, Operand operand,
                                 uint4* group, uint32_t row_in_group, uint64_t quad_room) {
  const float* row = buffer.values;
  float sum = 0;
  const uint32_t pieces = operand == Operand::kSplit ? 4 : 2;
  for (uint32_t i = threadIdx.x; i < channels / kQuadChannels * pieces * 4; i += blockDim.x) {
    const uint32_t q = i & 3;
    const uint32_t piece = (i >> 2) & (pieces - 1);
    const uint32_t quad = (i >> 2) / pieces;
    const float* lane = row + quad * kQuadChannels + q * 16;
    // Blocks far below the row's peak become zero; above it there are none but blocks of zeros.
    const float scale = SmallPowerOfTwo(min(max(buffer.exponents[quad / 2] - exponent, -126), 127));
    uint4 out;
    if (operand == Operand::kWide) {
      // Here `piece` and `q` count the pieces of a row: eight of them.
      const uint32_t part = piece * 4 + q;
      const float4* from = reinterpret_cast<const float4*>(row + quad * kQuadChannels + part * 8);
      const float4 low = from[0], high = from[1];
      out = {PackHalves(low.x * scale, low.y * scale), PackHalves(low.z * scale, low.w * scale),
             PackHalves(high.x * scale, high.y * scale), PackHalves(high.z * scale, high.w * scale)};
      sum += SumOfHalves(out);
      group[quad * quad_room + row_in_group * 8 + (part ^ row_in_group)] = out;
      continue;
    }
    if (operand == Operand::kSplit) {
      const float2 low = *reinterpret_cast<const float2*>(lane + 2 * piece);
      const float2 high = *reinterpret_cast<const float2*>(lane + 2 * piece + 8);
      out = {PackHalves(low.x * scale, low.x * scale), PackHalves(low.y * scale, low.y * scale),
             PackHalves(high.x * scale, high.x * scale), PackHalves(high.y * scale, high.y * scale)};
    } else {
      const float4 low = *reinterpret_cast<const float4*>(lane + 4 * piece);
      const float4 high = *reinterpret_cast<const float4*>(lane + 4 * piece + 8);
      out = {PackHalves(low.x * scale, low.y * scale), PackHalves(high.x * scale, high.y * scale),
             PackHalves(low.z * scale, low.w * scale), PackHalves(high.z * scale, high.w * scale)};
      sum += SumOfHalves(out);
    }
    group[(quad * pieces + piece) * 32 + row_in_group * 4 + q] = out;
  }
  return sum;
}

}  // namespace espalier::cuda

#endif  // ESPALIER_SRC_CUDA_OPERAND_CUH_
