// SPDX-License-Identifier: Apache-2.0
//
// One thread decoding blocks of 128 x 32 weights by every table of kernels that this machine has: weights a second
// for every codebook, bit rate and operand. The codes of a run (2048 x 2048 weights) do not fit in the second-level
// cache, a layer's never do.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <random>
#include <vector>

#include "bench/provenance.h"
#include "cpu/kernel_table.h"

namespace espalier {
namespace {

constexpr uint64_t kWeights = 2048 * 2048;
constexpr uint64_t kBlockWeights = uint64_t{cpu::kBlockChannels} * kPanelChannels;

void DecodeBlocks(benchmark::State& state, cpu::KernelTable::Decode decode, int bits) {
  std::mt19937 random(1);
  // Decoding fetches the block behind the last one.
  std::vector<uint32_t> codes((kWeights + kBlockWeights) / 32 * static_cast<uint64_t>(bits));
  for (uint32_t& word : codes) word = random();
  std::vector<uint32_t> weights(kBlockWeights);
  uint64_t block = 0;
  for (auto _ : state) {
    decode(codes.data() + block * kBlockWeights / 32 * static_cast<uint64_t>(bits), weights.data());
    benchmark::DoNotOptimize(weights.data());
    benchmark::ClobberMemory();
    block = (block + 1) % (kWeights / kBlockWeights);
  }
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(kBlockWeights));
}

void RegisterAll() {
  for (const cpu::KernelTable* table : cpu::UsableTables()) {
    for (const CodebookInfo& info : AllCodebooks()) {
      for (int operand = 0; operand < cpu::kNumOperands; ++operand) {
        const auto& decode = table->decode[operand][static_cast<int>(info.codebook)];
#define ESPALIER_BITS(bits)                                                                                        \
  if (decode[bits] != nullptr)                                                                                     \
    benchmark::RegisterBenchmark(                                                                                  \
        fmt::format("decode/{}/{}/{}/K{}", table->name, cpu::OperandName(static_cast<cpu::Operand>(operand)),      \
                    info.name, bits)                                                                               \
            .c_str(),                                                                                              \
        DecodeBlocks, decode[bits], bits);
#include <espalier/formats.def>
      }
    }
  }
}

}  // namespace
}  // namespace espalier

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  espalier::bench::AddProvenance();
  espalier::RegisterAll();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
