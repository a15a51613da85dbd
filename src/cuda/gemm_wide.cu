// SPDX-License-Identifier: Apache-2.0
//
// Up to 128 rows a tile, on sm_90a: the products of a warpgroup run on their own while it decodes the next
// quad. A block of two warpgroups takes 128 output channels; every warp decodes one output tile into the A
// registers of its 16 rows. Activations go through a ring in shared memory.
#include "cuda/gemm.cuh"
#include "cuda/gemm_launch.cuh"
#include "cuda/ptx_sm90a.cuh"

namespace espalier::cuda {
namespace {

constexpr uint32_t kStages = 4;       // quads of the ring
constexpr uint32_t kQuadPieces = 64;  // 16-byte pieces of one quad of one group
constexpr int kWideGroups = 16;
constexpr uint32_t kRowFloats = kHadamardChannels + 4;

// What is wanted of the ring, and then of the sums, which come when the ring is done.
constexpr size_t kSharedBytes = sizeof(float) * kRowFloats * kWideGroups * kGroupRows;
static_assert(kSharedBytes >= kStages * kWideGroups * kQuadPieces * sizeof(uint4));

// One quad of T groups into a stage.
template <int T>
__device__ __forceinline__ void CopyQuad(const uint4* inputs, uint64_t group_pieces, uint32_t stage) {
  const uint4* from = inputs + threadIdx.x % kQuadPieces;
  const uint32_t to = stage + threadIdx.x % kQuadPieces * 16;
#pragma unroll
  for (int first = 0; first < T; first += static_cast<int>(kGemmThreads / kQuadPieces)) {
    const uint32_t group = first + threadIdx.x / kQuadPieces;
    if (T % 4 != 0 && group >= T) break;
    CopyAsync(to + group * kQuadPieces * 16, from + group * group_pieces);
  }
}

template <int kBits, Codebook kCodebook>
__device__ __forceinline__ void DecodeQuad(const QuadWords<kBits>& quad, uint32_t flips,
                                           uint32_t (&a)[4][4]) {
  const uint32_t previous = PreviousWord(quad.w[kBits - 1]);
#pragma unroll
  for (int s = 0; s < 4; ++s) PairOperand<kBits, kCodebook>(quad, previous, flips, s, a[s]);
}

// All input channels of one warp's output tile; the sums stay in registers. Two quads a turn, so that the A
// registers of the one are free for decoding while the products of the other read theirs.
template <int kBits, Codebook kCodebook, int T>
__device__ __forceinline__ void MultiplyWide(const WarpWork& work, uint32_t ring, float (&sums)[T][4]) {
  constexpr uint32_t kStageBytes = T * kQuadPieces * sizeof(uint4);
  constexpr uint32_t kGroupBytes = kQuadPieces * sizeof(uint4);
  constexpr uint32_t kBrickBytes = 128;
  const uint32_t* codes = work.codes;
  QuadWords<kBits> ahead[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    ahead[i] = LoadQuad<kBits>(codes);
    codes += work.quad_words;
  }
  WaitForPreviousKernel();
  AllowNextKernel();
  const uint32_t flips = OpaqueConstant(kFoldFlips);
  const uint4* inputs = work.inputs;
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    CopyQuad<T>(inputs, work.group_pieces, ring + i * kStageBytes);
    CommitCopies();
    inputs += kQuadPieces;
  }
  uint32_t a[2][4][4];
  // The number of quads is even: channels are a multiple of 128.
  for (uint32_t first = 0; first < work.quads; first += 2) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t quad = first + i;
      DecodeQuad<kBits, kCodebook>(ahead[i], flips, a[i]);
      if (quad + 2 < work.quads) ahead[i] = LoadQuad<kBits>(codes);
      codes += work.quad_words;
      WaitForCopies<1>();
      FenceShared();
      __syncthreads();
      // All warps have seen the end of the products before the last: their stage is free.
      if (quad + 2 < work.quads) {
        CopyQuad<T>(inputs, work.group_pieces, ring + (quad + 2) % kStages * kStageBytes);
      }
      CommitCopies();
      inputs += kQuadPieces;
      const uint32_t stage = ring + quad % kStages * kStageBytes;
      FenceProducts();
#pragma unroll
      for (uint32_t s = 0; s < 4; ++s) {
        MultiplyAsync<T>(sums, a[i][s], SharedOperand(stage + s * 2 * kBrickBytes, kBrickBytes, kGroupBytes));
      }
      CommitProducts();
      WaitForProducts<1>();
    }
  }
  WaitForProducts<0>();
  __syncthreads();  // the sums take the place of the ring
}

template <int kBits, int T>
__device__ __forceinline__ void MultiplyWideCodebook(uint32_t codebook, const WarpWork& work, uint32_t ring,
                                                     float (&sums)[T][4]) {
  switch (static_cast<Codebook>(codebook)) {
#define ESPALIER_CODEBOOK(enumerator, number, name, marker_tensor, multiplier) \
  case Codebook::enumerator:                                                   \
    return MultiplyWide<kBits, Codebook::enumerator, T>(work, ring, sums);
#include <espalier/formats.def>
  }
}

template <int T>
__device__ __forceinline__ void RunWide(const GemmParams& params, const Unit& unit, float* shared) {
  const DeviceMatrix& matrix = *unit.matrix;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const uint32_t tile_words = 8 * matrix.bits;
  const uint64_t row_words = uint64_t{matrix.out_channels} / kTileChannels * tile_words;
  WarpWork work;
  work.first_quad = 0;
  work.quads = matrix.in_channels / kQuadChannels;
  work.quad_words = 4 * row_words;
  work.codes = matrix.codes + (lane & 3) * row_words + (unit.block * kWarps + warp) * tile_words +
               (lane >> 2) * matrix.bits;
  work.group_pieces = params.group_room;
  work.inputs =
      params.inputs + unit.projection * params.projection_room + unit.tile.first_group * params.group_room;
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  float sums[T][4] = {};
  switch (matrix.bits) {
#define ESPALIER_BITS(number)                                           \
  case number:                                                          \
    MultiplyWideCodebook<number, T>(matrix.codebook, work, ring, sums); \
    break;
#include <espalier/formats.def>
  }
  const SharedSums shared_sums = {shared, T * kGroupRows, kRowFloats};
  ShareSums<T>(sums, shared_sums.At(0, 0, warp * kTileChannels), kRowFloats);
  __syncthreads();
  WriteUnit(params, unit, shared_sums);
}

template <int T, int... kMore>
__device__ __forceinline__ void RunSmallestWide(const GemmParams& params, const Unit& unit, float* shared) {
  if constexpr (sizeof...(kMore) > 0) {
    if (unit.tile.rows > T * kGroupRows) return RunSmallestWide<kMore...>(params, unit, shared);
  }
  RunWide<T>(params, unit, shared);
}

__global__ void __launch_bounds__(kGemmThreads, 2) WideRows(const __grid_constant__ GemmParams params) {
  if constexpr (kAsyncProducts) {
    extern __shared__ __align__(128) float wide_shared[];
    __shared__ Unit unit;
    if (FindUnit(params, unit)) RunSmallestWide<4, 6, 8, 12, 16>(params, unit, wide_shared);
  } else {
    __trap();  // ClassOf sends nothing here, and the build refuses sm_90 without its `a`
  }
}

}  // namespace

cudaError_t LaunchWideRows(const GemmParams& params, dim3 grid, cudaStream_t stream, bool dependent) {
  return Launch(WideRows, grid, kGemmThreads, kSharedBytes, stream, dependent, params);
}

}  // namespace espalier::cuda
