// SPDX-License-Identifier: Apache-2.0
#include <string>

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

}  // namespace espalier::cuda
