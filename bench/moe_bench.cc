// SPDX-License-Identifier: Apache-2.0
//
// RunMoe on the cpu executor, all threads. The gate against the reference comes first: a wrong executor
// is not timed. Every repetition is printed, then mean, median and deviation.
#include <benchmark/benchmark.h>
#include <espalier/backend.h>
#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <vector>

#include "bench/provenance.h"
#include "support/random_experts.h"

namespace espalier {
namespace {

// The shape of qwen3-30b-a3b with 32 of its 128 experts: 57 MB of codes at 3 bits, more than caches hold.
constexpr uint32_t kHidden = 2048;
constexpr uint32_t kIntermediate = 768;
constexpr uint32_t kExperts = 32;
constexpr uint32_t kTopK = 8;
constexpr double kExactGate = 2e-6;

PreparedExperts MakePackage(Codebook codebook, int bits) {
  const test::MatrixFormat format = {.bits = bits, .codebook = codebook};
  return test::MakeExperts({.experts = kExperts,
                            .hidden_channels = kHidden,
                            .segments = {{.channels = kIntermediate}},
                            .format = [format](uint32_t, Projection) { return format; }});
}

bool GatePasses(const PreparedExperts& experts) {
  test::MoeCall call = test::RandomCall(experts, 3, kTopK, 1);
  call.num_threads = HardwareThreads();
  const std::vector<double> actual = test::RunCall(experts, call, "cpu").values;
  call.output = Dtype::kF64;
  const double rel_l2 = test::Compare(test::RunCall(experts, call, "reference").values, actual).rel_l2;
  std::fprintf(stderr, "gate: relative L2 error %.3g, at most %.3g\n", rel_l2, kExactGate);
  return rel_l2 <= kExactGate;
}

void RunLayer(benchmark::State& state, const PreparedExperts& experts) {
  const uint64_t tokens = static_cast<uint64_t>(state.range(0));
  test::Random random(2);
  std::vector<float> x(tokens * kHidden);
  std::vector<float> y(x.size());
  std::vector<int32_t> ids(tokens * kTopK);
  const std::vector<float> weights(ids.size(), 1.0f / kTopK);
  for (float& value : x) value = static_cast<float>(random.Normal());
  // Distinct experts for a token, as a router gives them.
  for (uint64_t token = 0; token < tokens; ++token) {
    const uint64_t first = random.Below(kExperts);
    for (uint64_t j = 0; j < kTopK; ++j)
      ids[token * kTopK + j] = static_cast<int32_t>((first + 5 * j) % kExperts);
  }
  const Result<MoePlan> plan =
      MoePlan::Create(experts, {.max_tokens = tokens, .top_k = kTopK, .executor = "cpu"});
  if (!plan) return state.SkipWithError(plan.error().message().c_str());
  Result<HostBuffer> workspace = HostBuffer::Create(plan->workspace_bytes());
  if (!workspace) return state.SkipWithError(workspace.error().message().c_str());
  const MoeArgs args = {.num_tokens = tokens,
                        .x = x.data(),
                        .x_row_stride = kHidden,
                        .topk_ids = ids.data(),
                        .topk_ids_row_stride = kTopK,
                        .topk_weights = weights.data(),
                        .topk_weights_row_stride = kTopK,
                        .y = y.data(),
                        .y_row_stride = kHidden,
                        .workspace = workspace->data(),
                        .workspace_bytes = workspace->size_bytes()};
  for (auto _ : state) {
    const Result<void> run = RunMoe(*plan, experts, args);
    if (!run) return state.SkipWithError(run.error().message().c_str());
    benchmark::DoNotOptimize(y.data());
    benchmark::ClobberMemory();
  }
  state.counters["multiply-adds"] =
      benchmark::Counter(3.0 * kHidden * kIntermediate * static_cast<double>(tokens * kTopK),
                         benchmark::Counter::kIsIterationInvariantRate);
}

int RunAll() {
  struct Format {
    Codebook codebook;
    int bits;
  };
  // Packages outlive the benchmarks that refer to them.
  std::vector<std::unique_ptr<PreparedExperts>> packages;
  for (const Format& format : {Format{Codebook::kMcg, 3}, {Codebook::kMcg, 4}, {Codebook::kMul1, 3}}) {
    packages.push_back(std::make_unique<PreparedExperts>(MakePackage(format.codebook, format.bits)));
    const PreparedExperts& experts = *packages.back();
    if (!GatePasses(experts)) return 1;
    const std::string name = fmt::format("moe/{}/K{}/tokens", CodebookName(format.codebook), format.bits);
    benchmark::RegisterBenchmark(name.c_str(),
                                 [&experts](benchmark::State& state) { RunLayer(state, experts); })
        ->Arg(1)
        ->Arg(8)
        ->Arg(64)
        ->Repetitions(5)
        ->UseRealTime()
        ->Unit(benchmark::kMillisecond);
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace
}  // namespace espalier

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  espalier::bench::AddProvenance();
  return espalier::RunAll();
}
