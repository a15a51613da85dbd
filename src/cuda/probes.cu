// SPDX-License-Identifier: Apache-2.0
#include <espalier/formats.h>

#include <string>

#include "cuda/decode.cuh"
#include "cuda/probes.h"
#include "cuda/ptx.cuh"

namespace espalier::cuda {
namespace {

constexpr int kReadThreads = 512;
constexpr int kReadBlocksPerSm = 4;
constexpr int kLoads = 8;  // in flight a thread

constexpr int kMatrixThreads = 256;
constexpr int kMatrixBlocksPerSm = 2;
constexpr int kChains = 8;  // sums a warp, independent of each other
constexpr uint64_t kFlopsPerMma = 2 * 16 * 8 * 16;

// As the products of few rows: 24 warps an SM, two output tiles a warp.
constexpr int kDecodeThreads = 256;
constexpr int kDecodeBlocksPerSm = 3;
constexpr int kDecodeTiles = 2;
constexpr uint64_t kQuadWeights = uint64_t{kQuadChannels} * kTileChannels;

__global__ void __launch_bounds__(kReadThreads)
    Read(const uint4* __restrict__ data, uint64_t count, ProbeResult* result) {
  const uint64_t step = uint64_t{gridDim.x} * kReadThreads;
  uint64_t at = uint64_t{blockIdx.x} * kReadThreads + threadIdx.x;
  uint32_t sum = 0;
  for (; at + (kLoads - 1) * step < count; at += kLoads * step) {
    uint4 words[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) words[i] = data[at + i * step];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) sum += words[i].x ^ words[i].y ^ words[i].z ^ words[i].w;
  }
  for (; at < count; at += step) {
    const uint4 words = data[at];
    sum += words.x ^ words.y ^ words.z ^ words.w;
  }
  // Every warp once: the loads cannot be left out, and the additions cost nothing beside them.
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&result->sum), static_cast<unsigned long long>(sum));
  }
}

__global__ void __launch_bounds__(kMatrixThreads) Multiply(uint64_t rounds, ProbeResult* result) {
  const bool timed = blockIdx.x == 0 && threadIdx.x == 0;
  uint64_t first_ticks = 0, first_nanoseconds = 0;
  if (timed) {
    first_ticks = static_cast<uint64_t>(clock64());
    first_nanoseconds = GlobalNanoseconds();
  }
  // Small fp16 numbers that differ by lane, so that nothing is constant and nothing overflows.
  uint32_t a[4];
  for (int i = 0; i < 4; ++i) a[i] = 0x10001000u + threadIdx.x + 32 * i;
  const uint32_t b0 = 0x10001000u + threadIdx.x, b1 = 0x90009000u + threadIdx.x;
  float sums[kChains][4] = {};
  for (uint64_t round = 0; round < rounds; ++round) {
#pragma unroll
    for (int chain = 0; chain < kChains; ++chain) Mma16816(sums[chain], a, b0, b1);
  }
  float total = 0;
  for (const auto& sum : sums) total += sum[0] + sum[1] + sum[2] + sum[3];
  if (total != 0) result->sum = static_cast<uint64_t>(__float_as_uint(total));
  if (timed) {
    result->clock_ticks = static_cast<uint64_t>(clock64()) - first_ticks;
    result->nanoseconds = GlobalNanoseconds() - first_nanoseconds;
  }
}

// One quad into the matrix unit. Its last operands are the words of the next round: new ones, and no
// instruction is spent on them.
template <int kBits, Codebook kCodebook>
__device__ __forceinline__ void DecodeQuad(QuadWords<kBits>& quad, uint32_t flips, uint32_t b0, uint32_t b1,
                                           float (&sums)[4]) {
  constexpr bool kSplit = kCodebook != Codebook::kMul1;
  constexpr int kPairsOfOperands = kSplit ? 4 : 2;
  const uint32_t previous = PreviousWord(quad.w[kBits - 1]);
  uint32_t operands[2][4];
#pragma unroll
  for (int i = 0; i < kPairsOfOperands; ++i) {
    if constexpr (kSplit) {
      SplitOperands<kBits, kCodebook>(quad, previous, flips, i, operands[0], operands[1]);
    } else {
      PairOperand<kBits, kCodebook>(quad, previous, flips, 2 * i, operands[0]);
      PairOperand<kBits, kCodebook>(quad, previous, flips, 2 * i + 1, operands[1]);
    }
    Mma16816(sums, operands[0], b0, b1);
    Mma16816(sums, operands[1], b0, b1);
  }
#pragma unroll
  for (int i = 0; i < kBits; ++i) quad.w[i] = operands[i / 4][i % 4];
}

template <int kBits, Codebook kCodebook>
__global__ void __launch_bounds__(kDecodeThreads, kDecodeBlocksPerSm)
    DecodeQuads(uint64_t rounds, ProbeResult* result) {
  const uint32_t flips = OpaqueConstant(kFoldFlips);
  const uint32_t b0 = 0x10001000u + threadIdx.x, b1 = 0x90009000u + threadIdx.x;
  QuadWords<kBits> quads[kDecodeTiles];
#pragma unroll
  for (int tile = 0; tile < kDecodeTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < kBits; ++i) {
      quads[tile].w[i] = (threadIdx.x + kDecodeThreads * (tile * kBits + i) + 1) * 0x9E3779B9u;
    }
  }
  float sums[kDecodeTiles][4] = {};
#pragma unroll 1
  for (uint64_t round = 0; round < rounds; ++round) {
#pragma unroll
    for (int tile = 0; tile < kDecodeTiles; ++tile) {
      DecodeQuad<kBits, kCodebook>(quads[tile], flips, b0, b1, sums[tile]);
    }
  }
  float total = 0;
  for (const auto& sum : sums) total += sum[0] + sum[1] + sum[2] + sum[3];
  if (total != 0) result->sum = static_cast<uint64_t>(__float_as_uint(total));
}

using DecodeKernel = void (*)(uint64_t rounds, ProbeResult* result);

template <int kBits>
DecodeKernel DecodeKernelOf(Codebook codebook) {
  switch (codebook) {
#define ESPALIER_CODEBOOK(enumerator, number, name, marker_tensor, multiplier) \
  case Codebook::enumerator:                                                   \
    return DecodeQuads<kBits, Codebook::enumerator>;
#include <espalier/formats.def>
  }
  return nullptr;
}

DecodeKernel DecodeKernelOf(int bits, Codebook codebook) {
  switch (bits) {
#define ESPALIER_BITS(number) \
  case number:                \
    return DecodeKernelOf<number>(codebook);
#include <espalier/formats.def>
  }
  return nullptr;
}

Result<void> LastLaunch(const char* name) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return {};
  return Error(StatusCode::kDevice, std::string(name) + ": " + cudaGetErrorString(error));
}

}  // namespace

Result<void> EnqueueReadProbe(const void* buffer, uint64_t size_bytes, const DeviceLimits& limits,
                              ProbeResult* result, void* stream) {
  Read<<<limits.num_sms * kReadBlocksPerSm, kReadThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint4*>(buffer), size_bytes / sizeof(uint4), result);
  return LastLaunch("read probe");
}

Result<uint64_t> EnqueueMatrixProbe(uint64_t rounds, const DeviceLimits& limits, ProbeResult* result,
                                    void* stream) {
  const int blocks = limits.num_sms * kMatrixBlocksPerSm;
  Multiply<<<blocks, kMatrixThreads, 0, static_cast<cudaStream_t>(stream)>>>(rounds, result);
  if (auto launched = LastLaunch("matrix probe"); !launched) return tl::unexpected(launched.error());
  return rounds * kChains * kFlopsPerMma * static_cast<uint64_t>(blocks) * (kMatrixThreads / 32);
}

Result<uint64_t> EnqueueDecodeProbe(int bits, Codebook codebook, uint64_t rounds, const DeviceLimits& limits,
                                    ProbeResult* result, void* stream) {
  const DecodeKernel kernel = DecodeKernelOf(bits, codebook);
  const int blocks = limits.num_sms * kDecodeBlocksPerSm;
  kernel<<<blocks, kDecodeThreads, 0, static_cast<cudaStream_t>(stream)>>>(rounds, result);
  if (auto launched = LastLaunch("decode probe"); !launched) return tl::unexpected(launched.error());
  return rounds * kDecodeTiles * kQuadWeights * static_cast<uint64_t>(blocks) * (kDecodeThreads / 32);
}

}  // namespace espalier::cuda
