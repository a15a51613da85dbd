// SPDX-License-Identifier: Apache-2.0
#include <espalier/backend.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/parallel.h"
#include "bench_engine.h"
#include "cpu/probes.h"
#include "machine.h"
#include "output.h"

namespace espalier::cli {
namespace {

constexpr uint64_t kDefaultCacheBytes = uint64_t{32} << 20;
constexpr uint64_t kMinBufferBytes = uint64_t{64} << 20;
constexpr int kPasses = 5;
constexpr std::byte kPoison{0xFF};  // NaN as a float

class CpuBench final : public BenchEngine {
 public:
  CpuBench(const BenchSetup& setup, HostBuffer buffer) : setup_(setup), buffer_(std::move(buffer)) {
    // Pages that were never written may all be the same one.
    std::fill_n(buffer_.data(), buffer_.size_bytes(), std::byte{1});
  }

  std::string executor() const override { return std::string(plan_->backend().name()); }
  BenchMachine machine() const override { return {.device = CpuModel(), .threads = Threads(), .driver = {}}; }
  std::optional<double> ClockMhz() const override { return clock_mhz_; }
  Result<void> UpdateClock() override {
    clock_mhz_ = CpuClockMhz();
    return {};
  }
  Dtype input() const override { return Dtype::kF32; }
  bool has_graphs() const override { return false; }
  std::string cold_text() const override {
    return fmt::format("{} are read before every sample", BytesText(buffer_.size_bytes()));
  }

  Result<BenchLimits> MeasureLimits() override {
    BenchLimits limits;
    limits.read_gb_s = ReadRate(buffer_.span(), setup_.num_threads, kPasses) * 1e-9;
    // Matrices of several codebooks are told against what the first one could have.
    const ProductKernel products =
        FastestProducts(UnitOf(setup_.mode, setup_.experts.segments()[0].up().codebook));
    limits.matrix_tflop_s = ProductRate(products, setup_.num_threads, kPasses) * 1e-12;
    clock_mhz_ = CpuClockMhz();
    limits.read_text = fmt::format("sum over {}, best of {}", BytesText(buffer_.size_bytes()), kPasses);
    limits.matrix_text = fmt::format("products in registers ({}), best of {}", products.name, kPasses);
    return limits;
  }

  Result<void> Prepare(const MoeInput& x) override {
    Result<MoePlan> plan = MoePlan::Create(setup_.experts, {.max_tokens = x.tokens,
                                                            .top_k = setup_.top_k,
                                                            .id_type = x.id_type,
                                                            .input = x.dtype,
                                                            .executor = setup_.executor,
                                                            .mode = setup_.mode,
                                                            .num_threads = setup_.num_threads});
    if (!plan) return tl::unexpected(plan.error());
    Result<HostBuffer> workspace = HostBuffer::Create(plan->workspace_bytes());
    if (!workspace) return tl::unexpected(workspace.error());
    Result<HostBuffer> copy = HostBuffer::Create(x.x.size_bytes());
    if (!copy) return tl::unexpected(copy.error());
    if (x.x.size_bytes() > 0) std::memcpy(copy->data(), x.x.data(), x.x.size_bytes());
    plan_ = *std::move(plan);
    workspace_ = *std::move(workspace);
    x_ = *std::move(copy);
    tokens_ = x.tokens;
    y_.resize(tokens_ * setup_.experts.geometry().hidden_channels);
    return {};
  }

  Result<std::vector<float>> Run(const MoeInput& routes, BenchForm form) override {
    std::memset(y_.data(), static_cast<int>(kPoison), y_.size() * sizeof(float));
    if (Result<void> run = Enqueue(routes, form); !run) return tl::unexpected(run.error());
    return y_;
  }

  Result<double> Time(const MoeInput& routes, BenchForm form) override {
    cold_sum_ += SumWords(buffer_.span(), setup_.num_threads);
    const auto start = std::chrono::steady_clock::now();
    if (Result<void> run = Enqueue(routes, form); !run) return tl::unexpected(run.error());
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
  }

 private:
  int Threads() const { return setup_.num_threads > 0 ? setup_.num_threads : HardwareThreads(); }

  Result<void> Enqueue(const MoeInput& routes, BenchForm form) {
    const uint64_t hidden = setup_.experts.geometry().hidden_channels;
    MoeArgs args = {.num_tokens = tokens_,
                    .x = x_.data(),
                    .x_row_stride = hidden,
                    .topk_ids = routes.topk_ids.data(),
                    .topk_ids_row_stride = setup_.top_k,
                    .topk_weights = routes.weights.data(),
                    .topk_weights_row_stride = setup_.top_k,
                    .y = y_.data(),
                    .y_row_stride = hidden,
                    .workspace = workspace_.data(),
                    .workspace_bytes = workspace_.size_bytes()};
    if (form == BenchForm::kTogether) return RunMoe(*plan_, setup_.experts, args);
    for (const std::vector<int32_t>& map : setup_.tier_maps) {
      args.expert_map = map.data();
      args.expert_map_size = static_cast<uint32_t>(map.size());
      if (Result<void> run = RunMoe(*plan_, setup_.experts, args); !run) return run;
      args.accumulate = true;
    }
    return {};
  }

  const BenchSetup setup_;
  HostBuffer buffer_;  // larger than all caches: measured on, and read to make weights cold
  uint64_t cold_sum_ = 0;
  std::optional<double> clock_mhz_;
  std::optional<MoePlan> plan_;
  HostBuffer workspace_;
  HostBuffer x_;
  std::vector<float> y_;
  uint64_t tokens_ = 0;
};

}  // namespace

Result<std::unique_ptr<BenchEngine>> MakeCpuBench(const BenchSetup& setup) {
  const uint64_t cache_bytes = CpuCacheBytes().value_or(kDefaultCacheBytes);
  Result<HostBuffer> buffer = HostBuffer::Create(std::max(kMinBufferBytes, 5 * cache_bytes));
  if (!buffer) return tl::unexpected(buffer.error());
  return std::make_unique<CpuBench>(setup, *std::move(buffer));
}

}  // namespace espalier::cli
