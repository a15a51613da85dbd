// SPDX-License-Identifier: Apache-2.0
//
// From packed codes to matrix-unit operands, in registers.
//
// A warp decodes a quad: four tiles that follow each other on the input axis (64 channels), one output tile
// (16 channels). Lane (g, q) = (lane / 4, lane % 4) takes the 32 consecutive states of tile q that are output
// channels g and g + 8 and all 16 input channels: `bits` whole words and the end of the word before them. So
// every shift is an immediate, the same in all lanes. Read as W^T the states already lie in the order of the
// A operand of mma.m16n8k16; which input channel an operand element means is the activations' business
// (operand.cuh).
#ifndef ESPALIER_SRC_CUDA_DECODE_CUH_
#define ESPALIER_SRC_CUDA_DECODE_CUH_

#include <espalier/formats.h>

#include <cstdint>

#include "cuda/ptx.cuh"

namespace espalier::cuda {

inline constexpr uint32_t kQuadChannels = 64;  // input channels of one step

template <int kBits>
struct QuadWords {
  uint32_t w[kBits];
};

// `p`: word g * kBits of tile q.
template <int kBits>
__device__ __forceinline__ QuadWords<kBits> LoadQuad(const uint32_t* p) {
  QuadWords<kBits> quad;
  if constexpr (kBits % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kBits; i += 4) {
      const uint4 v = LoadStream128(p + i);
      quad.w[i] = v.x, quad.w[i + 1] = v.y, quad.w[i + 2] = v.z, quad.w[i + 3] = v.w;
    }
  } else if constexpr (kBits % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kBits; i += 2) {
      const uint2 v = LoadStream64(p + i);
      quad.w[i] = v.x, quad.w[i + 1] = v.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kBits; ++i) quad.w[i] = LoadStream32(p + i);
  }
  return quad;
}

// How many of four masks go to the multiply pipe. Measured on an H200: 3 of 4 at 3 bits, 2 of 4 at 4 bits,
// where two states share a window and fewer shifts load the other pipe.
template <int kBits>
inline constexpr int kMasksByDot = (16 % kBits == 0) ? 2 : 3;

// State j (0..31) of the lane, zero-extended. `j` is a constant after unrolling, so all of this is one shift
// and one mask, or less. Where `bits` divides 16, states j and j + 16 / bits are the two halves of one
// window.
template <int kBits>
__device__ __forceinline__ uint32_t QuadState(const QuadWords<kBits>& quad, uint32_t previous, int j) {
  const int end = (j + 1) * kBits;  // stream bits of the lane up to the end of this state
  const int word = end / 32;
  const int rest = end % 32;
  const bool by_dot = j % 4 < kMasksByDot<kBits>;
  const auto low = [&](uint32_t v) { return by_dot ? LowHalfByDot(v) : v & 0xFFFFu; };
  const auto high = [&](uint32_t v) { return by_dot ? HighHalfByDot(v) : v >> 16; };
  if (rest == 0) return low(quad.w[word - 1]);
  if (rest == 16) return high(quad.w[word]);
  const uint32_t before = word > 0 ? quad.w[word > 0 ? word - 1 : 0] : previous;
  if constexpr (16 % kBits == 0) {
    if (rest < 16) return high(__funnelshift_l(quad.w[word], before, rest + 16));
    return low(__funnelshift_l(quad.w[word], before, rest));
  }
  if (rest > 16) return low(quad.w[word] >> (32 - rest));
  return low(__funnelshift_l(quad.w[word], before, rest));
}

inline constexpr uint32_t kFoldFlips = 0x3B603B60u;

// 3inst and mcg: a word whose two fp16 halves add up to the value. `flips`: kFoldFlips in a register.
template <Codebook kCodebook>
__device__ __forceinline__ uint32_t FoldedHalves(uint32_t state, uint32_t flips) {
  const uint32_t product = kCodebook == Codebook::kMcg ? state * 0xCBAC1FEDu : state * 89226354u + 64248484u;
  return MaskAndFlip(product, 0x8FFF8FFFu, flips);
}

// The word that lies before the lane's own: the last one of the row quad before, cyclic over the tile.
__device__ __forceinline__ uint32_t PreviousWord(uint32_t last_word) {
  return __shfl_sync(0xFFFFFFFFu, last_word, (threadIdx.x - 4) & 31);
}

// How operands come out, and with that what their partner must look like.
//   kSplit  one weight = two operand elements, its fp16 halves: saves the addition and doubles the matrix
//           instructions; the activation stands in both. The sum is not rounded to fp16: up to half an ulp
//           (2^-12 relative) off the format's value.
//   kPair   two weights = two operand elements. mul1 comes as 1024 + byte sum (exact in fp16); the affine
//   part
//           c * s + d is taken after the sum: y = c * sum + d * (sum of activations).
//   kWide   as kPair, with both operands in shared memory
enum class Operand { kSplit, kPair, kWide };

inline constexpr float kMul1Scale = 1774.0f / 262144.0f;  // 0x1EEE
inline constexpr float kMul1Offset = -1329.0f / 128.0f;   // 0xC931

// kPair: A operand of step s (0..3): weights of input channels 2s, 2s + 1, 2s + 8, 2s + 9.
template <int kBits, Codebook kCodebook>
__device__ __forceinline__ void PairOperand(const QuadWords<kBits>& quad, uint32_t previous, uint32_t flips,
                                            int s, uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // Operand order: (g, low channels), (g + 8, low), (g, high), (g + 8, high).
    const int j = 8 * s + (i & 1) * 4 + (i >> 1) * 2;
    const uint32_t first = QuadState<kBits>(quad, previous, j);
    const uint32_t second = QuadState<kBits>(quad, previous, j + 1);
    if constexpr (kCodebook == Codebook::kMul1) {
      const uint32_t sum = AddBytes(first * 0x83DCD12Du, 0x64006400u);
      a[i] = AddBytes(second * 0x83DCD12Du, 0) * 65536u + sum;
    } else {
      const uint32_t x = FoldedHalves<kCodebook>(first, flips);
      const uint32_t y = FoldedHalves<kCodebook>(second, flips);
      const uint32_t low = __byte_perm(x, y, 0x5410);
      const uint32_t high = __byte_perm(x, y, 0x7632);
      asm("add.rn.f16x2 %0, %1, %2;" : "=r"(a[i]) : "r"(low), "r"(high));
    }
  }
}

// kSplit: the two A operands of step s: input channels 2s, 2s + 1 and 2s + 8, 2s + 9.
template <int kBits, Codebook kCodebook>
__device__ __forceinline__ void SplitOperands(const QuadWords<kBits>& quad, uint32_t previous, uint32_t flips,
                                              int s, uint32_t (&low)[4], uint32_t (&high)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int j = 8 * s + (i & 1) * 4 + (i >> 1);
    low[i] = FoldedHalves<kCodebook>(QuadState<kBits>(quad, previous, j), flips);
    high[i] = FoldedHalves<kCodebook>(QuadState<kBits>(quad, previous, j + 2), flips);
  }
}

}  // namespace espalier::cuda

#endif  // ESPALIER_SRC_CUDA_DECODE_CUH_
