// SPDX-License-Identifier: Apache-2.0
#include <espalier/backend.h>
#include <espalier/device.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "bench_engine.h"
#include "cuda/cold_timer.h"
#include "cuda/device_runtime.h"
#include "machine.h"
#include "moe/device_memory.h"
#include "output.h"

namespace espalier::cli {
namespace {

constexpr int kPasses = 5;
constexpr uint64_t kReadBytes = uint64_t{2} << 30;
constexpr std::byte kPoison{0xFF};  // NaN as a float

// Memory and work of one device. Samples are [cold read, inputs to their place, start, run, stop] on one
// stream: ids, weights and x are as warm as a router leaves them, the expert weights are cold.
class CudaBench final : public BenchEngine {
 public:
  static Result<std::unique_ptr<BenchEngine>> Create(const BenchSetup& setup, const Device& device);

  std::string executor() const override { return std::string(plan_->backend().name()); }
  BenchMachine machine() const override {
    return {.device = timer_.info().name, .threads = std::nullopt, .driver = DriverText()};
  }
  std::optional<double> ClockMhz() const override { return timer_.clock_mhz(); }
  Dtype input() const override { return Dtype::kBF16; }
  bool has_graphs() const override { return true; }
  std::string cold_text() const override {
    return fmt::format("{} are read before every sample", BytesText(timer_.cold_bytes()));
  }

  Result<BenchLimits> MeasureLimits() override;
  Result<void> UpdateClock() override {
    return timer_.MatrixRate(kPasses).map([](double) {});
  }
  Result<void> Prepare(const MoeInput& x) override;
  Result<std::vector<float>> Run(const MoeInput& routes, BenchForm form) override;
  Result<double> Time(const MoeInput& routes, BenchForm form) override;

 private:
  CudaBench(const BenchSetup& setup, const Device& device, PreparedExperts experts, cuda::ColdTimer timer)
      : setup_(setup), device_(device), experts_(std::move(experts)), timer_(std::move(timer)) {}

  std::string DriverText() const {
    const std::string version = NvidiaDriverVersion();
    const std::string cuda = "CUDA " + CudaVersionText(timer_.info().driver_version);
    return version.empty() ? cuda : fmt::format("{} ({})", version, cuda);
  }

  Result<void> Stage(const MoeInput& routes);
  Result<void> PlaceInputs() const;
  Result<void> Enqueue(BenchForm form) const;
  Result<void> Launch(BenchForm form) const;

  const BenchSetup setup_;
  const Device device_;
  const PreparedExperts experts_;
  cuda::ColdTimer timer_;
  std::vector<DeviceBuffer> tier_maps_;

  // Of the number of tokens prepared. Graphs go first: they point into the rest.
  std::optional<MoePlan> plan_;
  uint64_t tokens_ = 0;
  DeviceBuffer workspace_, y_;
  DeviceBuffer x_, ids_, weights_;
  DeviceBuffer staged_x_, staged_ids_, staged_weights_;
  std::optional<cuda::Graph> together_, serial_;
};

Result<std::unique_ptr<BenchEngine>> CudaBench::Create(const BenchSetup& setup, const Device& device) {
  Result<cuda::ColdTimer> timer = cuda::ColdTimer::Create(device);
  if (!timer) return tl::unexpected(timer.error());
  Result<PreparedExperts> experts = ToDevice(setup.experts, device);
  if (!experts) return tl::unexpected(experts.error());
  std::unique_ptr<CudaBench> bench(new CudaBench(setup, device, *std::move(experts), *std::move(timer)));
  for (const std::vector<int32_t>& map : setup.tier_maps) {
    Result<DeviceBuffer> uploaded = cuda::Upload(device, std::as_bytes(std::span(map)));
    if (!uploaded) return tl::unexpected(uploaded.error());
    bench->tier_maps_.push_back(*std::move(uploaded));
  }
  return bench;
}

Result<BenchLimits> CudaBench::MeasureLimits() {
  const uint64_t read_bytes = std::min(kReadBytes, timer_.info().memory_bytes / 16 / 256 * 256);
  const Result<double> read = timer_.ReadRate(read_bytes, kPasses);
  if (!read) return tl::unexpected(read.error());
  const Result<double> matrix = timer_.MatrixRate(kPasses);
  if (!matrix) return tl::unexpected(matrix.error());
  BenchLimits limits;
  limits.read_gb_s = *read * 1e-9;
  limits.matrix_tflop_s = *matrix * 1e-12;
  limits.read_text = fmt::format("{} read by a kernel, best of {}", BytesText(read_bytes), kPasses);
  limits.matrix_text = fmt::format("mma.m16n8k16, fp16 into fp32, best of {}", kPasses);
  for (const CodeFormat& format : setup_.formats) {
    const Result<double> decode = timer_.DecodeRate(format.bits, format.codebook, kPasses);
    if (!decode) return tl::unexpected(decode.error());
    limits.decode_tweights_s.push_back(*decode * 1e-12);
  }
  limits.decode_text = fmt::format("codes in registers into mma.m16n8k16, best of {}", kPasses);
  return limits;
}

Result<void> CudaBench::Prepare(const MoeInput& x) {
  together_.reset();
  serial_.reset();
  Result<MoePlan> plan = MoePlan::Create(experts_, {.max_tokens = x.tokens,
                                                    .top_k = setup_.top_k,
                                                    .id_type = x.id_type,
                                                    .input = x.dtype,
                                                    .device = device_,
                                                    .executor = setup_.executor});
  if (!plan) return tl::unexpected(plan.error());
  plan_ = *std::move(plan);
  tokens_ = x.tokens;
  const uint64_t route_bytes = tokens_ * setup_.top_k * sizeof(float);  // of ids as well
  const struct {
    DeviceBuffer& buffer;
    uint64_t size_bytes;
  } arrays[] = {{workspace_, plan_->workspace_bytes()},
                {y_, tokens_ * experts_.geometry().hidden_channels * sizeof(float)},
                {x_, x.x.size_bytes()},
                {staged_x_, x.x.size_bytes()},
                {ids_, route_bytes},
                {staged_ids_, route_bytes},
                {weights_, route_bytes},
                {staged_weights_, route_bytes}};
  for (const auto& array : arrays) {
    array.buffer = DeviceBuffer();  // the old one first: both might not fit
    Result<DeviceBuffer> buffer = DeviceBuffer::Create(device_, array.size_bytes);
    if (!buffer) return tl::unexpected(buffer.error());
    array.buffer = *std::move(buffer);
  }
  return CopyBytes(device_, staged_x_.data(), x.x.data(), x.x.size_bytes());
}

Result<void> CudaBench::Stage(const MoeInput& routes) {
  if (auto copied =
          CopyBytes(device_, staged_ids_.data(), routes.topk_ids.data(), routes.topk_ids.size_bytes());
      !copied)
    return copied;
  return CopyBytes(device_, staged_weights_.data(), routes.weights.data(),
                   routes.weights.size() * sizeof(float));
}

Result<void> CudaBench::PlaceInputs() const {
  const std::pair<const DeviceBuffer&, const DeviceBuffer&> arrays[] = {
      {x_, staged_x_}, {ids_, staged_ids_}, {weights_, staged_weights_}};
  for (const auto& [to, from] : arrays) {
    if (auto copied =
            timer_.stream().CopyAsync(const_cast<std::byte*>(to.data()), from.data(), to.size_bytes());
        !copied)
      return copied;
  }
  return {};
}

Result<void> CudaBench::Enqueue(BenchForm form) const {
  const uint64_t hidden = experts_.geometry().hidden_channels;
  MoeArgs args = {.num_tokens = tokens_,
                  .x = x_.data(),
                  .x_row_stride = hidden,
                  .topk_ids = ids_.data(),
                  .topk_ids_row_stride = setup_.top_k,
                  .topk_weights = reinterpret_cast<const float*>(weights_.data()),
                  .topk_weights_row_stride = setup_.top_k,
                  .y = const_cast<std::byte*>(y_.data()),
                  .y_row_stride = hidden,
                  .workspace = const_cast<std::byte*>(workspace_.data()),
                  .workspace_bytes = workspace_.size_bytes(),
                  .stream = timer_.stream().get()};
  if (form != BenchForm::kSerial) return RunMoe(*plan_, experts_, args);
  for (const DeviceBuffer& map : tier_maps_) {
    args.expert_map = reinterpret_cast<const int32_t*>(map.data());
    args.expert_map_size = experts_.geometry().experts;
    if (Result<void> run = RunMoe(*plan_, experts_, args); !run) return run;
    args.accumulate = true;
  }
  return {};
}

Result<void> CudaBench::Launch(BenchForm form) const {
  if (form == BenchForm::kEager) return Enqueue(form);
  return (form == BenchForm::kSerial ? serial_ : together_)->Launch(timer_.stream());
}

Result<std::vector<float>> CudaBench::Run(const MoeInput& routes, BenchForm form) {
  std::optional<cuda::Graph>& graph = form == BenchForm::kSerial ? serial_ : together_;
  if (form != BenchForm::kEager && !graph) {
    Result<cuda::Graph> captured = cuda::Graph::Capture(timer_.stream(), [&] { return Enqueue(form); });
    if (!captured) return tl::unexpected(captured.error());
    graph.emplace(*std::move(captured));
  }
  if (auto staged = Stage(routes); !staged) return tl::unexpected(staged.error());
  if (auto placed = PlaceInputs(); !placed) return tl::unexpected(placed.error());
  if (auto filled = timer_.stream().Fill(y_.data(), kPoison, y_.size_bytes()); !filled)
    return tl::unexpected(filled.error());
  if (auto filled = timer_.stream().Fill(workspace_.data(), kPoison, workspace_.size_bytes()); !filled)
    return tl::unexpected(filled.error());
  if (auto launched = Launch(form); !launched) return tl::unexpected(launched.error());
  if (auto done = timer_.stream().Synchronize(); !done) return tl::unexpected(done.error());
  std::vector<float> y(y_.size_bytes() / sizeof(float));
  if (auto read = cuda::Download(y_, std::as_writable_bytes(std::span(y))); !read)
    return tl::unexpected(read.error());
  return y;
}

Result<double> CudaBench::Time(const MoeInput& routes, BenchForm form) {
  if (auto staged = Stage(routes); !staged) return tl::unexpected(staged.error());
  return timer_.Time([this] { return PlaceInputs(); }, [this, form] { return Launch(form); });
}

}  // namespace

Result<std::unique_ptr<BenchEngine>> MakeCudaBench(const BenchSetup& setup, const Device& device) {
  return CudaBench::Create(setup, device);
}

}  // namespace espalier::cli
