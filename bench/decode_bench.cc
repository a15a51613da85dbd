// SPDX-License-Identifier: Apache-2.0
//
// One thread decoding blocks of 128 x 128 weights: weights a second for every codebook and bit rate.
// The codes of a run (2048 x 2048 weights) do not fit in the second-level cache, a layer's never do.
#include <benchmark/benchmark.h>
#include <espalier/moe.h>
#include <fmt/format.h>

#include <vector>

#include "bench/provenance.h"
#include "cpu/kernels.h"
#include "support/random_experts.h"

namespace espalier {
namespace {

constexpr uint32_t kChannels = 2048;

void DecodeBlocks(benchmark::State& state, Codebook codebook, int bits) {
  const PreparedLinear linear =
      test::MakeLinear(kChannels, kChannels, 0, 0, {.bits = bits, .codebook = codebook}, 1);
  const MatrixView matrix = ViewOf(linear.matrix(), linear.slab());
  std::vector<float> weights(kBlockWeights);
  constexpr uint32_t kBlocks = kChannels / kBlockChannels;
  uint32_t block = 0;
  for (auto _ : state) {
    DecodeBlock(matrix, block / kBlocks, block % kBlocks, weights.data());
    benchmark::DoNotOptimize(weights.data());
    benchmark::ClobberMemory();
    block = (block + 1) % (kBlocks * kBlocks);
  }
  state.SetItemsProcessed(state.iterations() * int64_t{kBlockWeights});
}

void RegisterAll() {
  for (const CodebookInfo& info : AllCodebooks()) {
#define ESPALIER_BITS(bits)                                                                         \
  benchmark::RegisterBenchmark(fmt::format("decode/{}/K{}", info.name, bits).c_str(), DecodeBlocks, \
                               info.codebook, bits);
#include <espalier/formats.def>
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
