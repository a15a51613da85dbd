// SPDX-License-Identifier: Apache-2.0
#include "cpu/probes.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "base/parallel.h"
#include "cpu/kernel_table.h"

namespace espalier {
namespace {

// Enough tasks that a thread which starts late holds nobody up.
constexpr uint64_t kTasksPerThread = 8;
constexpr uint64_t kRoundsPerTask = 1'000'000;  // one or two milliseconds

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

uint64_t SumRange(const std::byte* data, uint64_t size_bytes) {
  // Independent sums: one chain of additions would be slower than the memory.
  constexpr int kSums = 16;
  uint64_t sums[kSums] = {};
  constexpr uint64_t kStep = kSums * sizeof(uint64_t);
  uint64_t at = 0;
  for (; at + kStep <= size_bytes; at += kStep) {
    uint64_t words[kSums];
    std::memcpy(words, data + at, sizeof(words));
    for (int i = 0; i < kSums; ++i) sums[i] += words[i];
  }
  uint64_t sum = 0;
  for (const uint64_t part : sums) sum += part;
  for (; at + sizeof(uint64_t) <= size_bytes; at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, data + at, sizeof(word));
    sum += word;
  }
  return sum;
}

int Threads(int num_threads) { return num_threads > 0 ? num_threads : HardwareThreads(); }

}  // namespace

uint64_t SumWords(std::span<const std::byte> buffer, int num_threads) {
  const auto tasks = static_cast<uint64_t>(Threads(num_threads)) * kTasksPerThread;
  const uint64_t task_bytes = (buffer.size() / tasks + 64) / 64 * 64;
  std::atomic<uint64_t> sum{0};
  ParallelFor(num_threads, tasks, [&](uint64_t task) {
    const uint64_t begin = std::min<uint64_t>(task * task_bytes, buffer.size());
    const uint64_t end = std::min<uint64_t>(begin + task_bytes, buffer.size());
    sum.fetch_add(SumRange(buffer.data() + begin, end - begin), std::memory_order_relaxed);
  });
  return sum.load();
}

double ReadRate(std::span<const std::byte> buffer, int num_threads, int passes) {
  double fastest = 0;
  const uint64_t expected = SumWords(buffer, num_threads);  // also brings the pages in
  for (int pass = 0; pass < passes; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    const uint64_t sum = SumWords(buffer, num_threads);
    const double seconds = SecondsSince(start);
    // Also what keeps the compiler from leaving the reading out.
    if (sum == expected) fastest = std::max(fastest, static_cast<double>(buffer.size()) / seconds);
  }
  return fastest;
}

double ProductRate(const ProductKernel& kernel, int num_threads, int passes) {
  const auto tasks = static_cast<uint64_t>(Threads(num_threads)) * kTasksPerThread;
  double fastest = 0;
  for (int pass = 0; pass < passes; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    std::atomic<double> products{0};
    ParallelFor(num_threads, tasks,
                [&](uint64_t) { products.store(kernel.run(kRoundsPerTask), std::memory_order_relaxed); });
    const double seconds = SecondsSince(start);
    if (products.load() > 0)
      fastest =
          std::max(fastest, static_cast<double>(tasks * kRoundsPerTask * kernel.ops_per_round) / seconds);
  }
  return fastest;
}

ProductUnit UnitOf(CpuMode mode, Codebook codebook) {
  const Result<const cpu::KernelTable*> table = cpu::ChooseTable();
  if (!table) return ProductUnit::kFp32;
  switch ((*table)->operand(mode, codebook, cpu::kMaxTableRows)) {
    case cpu::Operand::kInt8:
      return ProductUnit::kInt8;
    case cpu::Operand::kInt16:
    case cpu::Operand::kInt16Apart:
    case cpu::Operand::kFixed16:
      return ProductUnit::kInt16;
    case cpu::Operand::kFloat:
    case cpu::Operand::kCutFloat:
    case cpu::Operand::kBf16Halves:
      break;
  }
  return ProductUnit::kFp32;
}

}  // namespace espalier
