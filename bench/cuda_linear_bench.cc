// SPDX-License-Identifier: Apache-2.0
//
// RunLinear on a GPU: correctness first, then the median time of a graph with cold weights, as shares of what
// the GPU reads and multiplies at most in the same run.
//   cuda_linear_bench [CODEBOOK [DEVICE]]     mcg, cuda
#include <espalier/device.h>
#include <espalier/moe.h>
#include <espalier/version.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/half.h"
#include "cuda/cold_timer.h"
#include "cuda/device_table.h"
#include "cuda/launch.h"
#include "support/random_experts.h"

namespace espalier {
namespace {

struct Shape {
  uint32_t in;
  uint32_t out;
  int bits;
};
constexpr Shape kShapes[] = {{6144, 2048, 3}, {6144, 12288, 4}};
constexpr uint64_t kTokens[] = {1, 16, 144, 256, 512, 1024, 4096};
constexpr int kSamples = 30;
constexpr int kPasses = 5;
constexpr uint64_t kCheckedRows = 8;
constexpr double kMaxRelL2 = 1e-3;
constexpr double kMinCosine = 0.999999;
constexpr uint64_t kReadBytes = uint64_t{2} << 30;
constexpr int kDecodingCapability = 90;  // where linears of many rows decode their matrix first

struct Limits {
  double read_bytes_s = 0;
  double matrix_flop_s = 0;
};

struct Host {
  std::vector<uint16_t> x;  // bf16 [tokens][in]
  std::vector<float> y;     // [tokens][out]
};

// Rows 0 to tokens - 1, evenly, both ends among them.
std::vector<uint64_t> CheckedRows(uint64_t tokens) {
  const uint64_t count = std::min(tokens, kCheckedRows);
  std::vector<uint64_t> rows;
  for (uint64_t i = 0; i < count; ++i) rows.push_back(count == 1 ? 0 : i * (tokens - 1) / (count - 1));
  return rows;
}

Result<test::Difference> AgainstReference(const PreparedLinear& linear, const Host& host, uint64_t tokens) {
  const std::vector<uint64_t> rows = CheckedRows(tokens);
  const uint64_t in = linear.in_channels();
  const uint64_t out = linear.out_channels();
  std::vector<uint16_t> x;
  std::vector<double> actual;
  for (const uint64_t row : rows) {
    x.insert(x.end(), host.x.begin() + static_cast<ptrdiff_t>(row * in),
             host.x.begin() + static_cast<ptrdiff_t>((row + 1) * in));
    actual.insert(actual.end(), host.y.begin() + static_cast<ptrdiff_t>(row * out),
                  host.y.begin() + static_cast<ptrdiff_t>((row + 1) * out));
  }
  const Result<LinearPlan> plan = LinearPlan::Create(
      linear,
      {.max_tokens = rows.size(), .input = Dtype::kBF16, .output = Dtype::kF64, .executor = "reference"});
  if (!plan) return tl::unexpected(plan.error());
  Result<HostBuffer> workspace = HostBuffer::Create(plan->workspace_bytes());
  if (!workspace) return tl::unexpected(workspace.error());
  std::vector<double> expected(rows.size() * out);
  const Result<void> run = RunLinear(*plan, linear,
                                     {.num_tokens = rows.size(),
                                      .x = x.data(),
                                      .x_row_stride = in,
                                      .y = expected.data(),
                                      .y_row_stride = out,
                                      .workspace = workspace->data(),
                                      .workspace_bytes = workspace->size_bytes()});
  if (!run) return tl::unexpected(run.error());
  return test::Compare(expected, actual);
}

// Sorted times in us.
struct Samples {
  std::vector<double> us;

  double median() const { return (us[kSamples / 2 - 1] + us[kSamples / 2]) / 2; }
};

Result<Samples> Take(cuda::ColdTimer& timer, const std::function<Result<void>()>& place,
                     const std::function<Result<void>()>& run) {
  Samples samples;
  for (int i = 0; i < kSamples; ++i) {
    const Result<double> us = timer.Time(place, run);
    if (!us) return tl::unexpected(us.error());
    samples.us.push_back(*us);
  }
  std::sort(samples.us.begin(), samples.us.end());
  return samples;
}

std::string NameOf(const MatrixDesc& matrix) {
  return fmt::format("{}x{} K{}", matrix.in_channels, matrix.out_channels, matrix.bits);
}

// The first step of a linear of many rows, which is also what a product of another library would need: the
// matrix as fp16 in memory.
Result<void> MeasureDecoding(cuda::ColdTimer& timer, const PreparedLinear& linear) {
  const MatrixDesc& matrix = linear.matrix();
  const uint64_t weights = uint64_t{matrix.in_channels} * matrix.out_channels;
  Result<DeviceBuffer> decoded = DeviceBuffer::Create(linear.device(), 2 * weights);
  if (!decoded) return tl::unexpected(decoded.error());
  const cuda::DeviceMatrix on_device = cuda::MatrixAt(matrix, linear.slab());
  Result<cuda::Graph> graph = cuda::Graph::Capture(
      timer.stream(), [&] { return cuda::LaunchDecode(on_device, decoded->data(), timer.stream().get()); });
  if (!graph) return tl::unexpected(graph.error());
  const Result<Samples> samples =
      Take(timer, []() -> Result<void> { return {}; }, [&] { return graph->Launch(timer.stream()); });
  if (!samples) return tl::unexpected(samples.error());
  fmt::print("{:<16} {:>6} {:>10} {:>9.2f} {:>9.2f} {:>9.2f} {:>9.3f}\n", NameOf(matrix), "decode", "",
             samples->median(), samples->us.front(), samples->us.back(),
             static_cast<double>(weights) / samples->median() * 1e-6);
  return {};
}

// One line of the table. Gives false where the gate failed.
Result<bool> Measure(cuda::ColdTimer& timer, const Limits& limits, const PreparedLinear& linear,
                     const PreparedLinear& on_device, uint64_t tokens) {
  const Device& device = on_device.device();
  const uint64_t in = linear.in_channels();
  const uint64_t out = linear.out_channels();
  test::Random random(tokens);
  Host host{.x = std::vector<uint16_t>(tokens * in), .y = std::vector<float>(tokens * out)};
  for (uint16_t& value : host.x) value = DoubleToBf16(random.Normal());
  const Result<LinearPlan> plan =
      LinearPlan::Create(on_device, {.max_tokens = tokens, .input = Dtype::kBF16, .device = device});
  if (!plan) return tl::unexpected(plan.error());
  Result<DeviceBuffer> staged = cuda::Upload(device, std::as_bytes(std::span(host.x)));
  if (!staged) return tl::unexpected(staged.error());
  Result<DeviceBuffer> x = DeviceBuffer::Create(device, staged->size_bytes());
  if (!x) return tl::unexpected(x.error());
  Result<DeviceBuffer> y = DeviceBuffer::Create(device, host.y.size() * sizeof(float));
  if (!y) return tl::unexpected(y.error());
  Result<DeviceBuffer> workspace = DeviceBuffer::Create(device, plan->workspace_bytes());
  if (!workspace) return tl::unexpected(workspace.error());
  const LinearArgs args = {.num_tokens = tokens,
                           .x = x->data(),
                           .x_row_stride = in,
                           .y = y->data(),
                           .y_row_stride = out,
                           .workspace = workspace->data(),
                           .workspace_bytes = workspace->size_bytes(),
                           .stream = timer.stream().get()};
  Result<cuda::Graph> graph =
      cuda::Graph::Capture(timer.stream(), [&] { return RunLinear(*plan, on_device, args); });
  if (!graph) return tl::unexpected(graph.error());
  const auto place = [&] { return timer.stream().CopyAsync(x->data(), staged->data(), x->size_bytes()); };
  const auto launch = [&] { return graph->Launch(timer.stream()); };
  if (auto poisoned = timer.stream().Fill(y->data(), std::byte{0xFF}, y->size_bytes()); !poisoned)
    return tl::unexpected(poisoned.error());
  if (const Result<double> first = timer.Time(place, launch); !first) return tl::unexpected(first.error());
  if (auto read = cuda::Download(*y, std::as_writable_bytes(std::span(host.y))); !read)
    return tl::unexpected(read.error());
  const Result<test::Difference> difference = AgainstReference(linear, host, tokens);
  if (!difference) return tl::unexpected(difference.error());
  const MatrixDesc& matrix = linear.matrix();
  const std::string name = NameOf(matrix);
  if (!(difference->rel_l2 <= kMaxRelL2 && difference->cosine >= kMinCosine)) {
    fmt::print("{:<16} {:>6} {:>10.3g}  gate failed, cosine {:.9f}\n", name, tokens, difference->rel_l2,
               difference->cosine);
    return false;
  }
  const Result<Samples> samples = Take(timer, place, launch);
  if (!samples) return tl::unexpected(samples.error());
  const double median_us = samples->median();
  const auto weights = static_cast<double>(in) * static_cast<double>(out);
  fmt::print("{:<16} {:>6} {:>10.3g} {:>9.2f} {:>9.2f} {:>9.2f} {:>9.3f} {:>7.1f} % {:>7.1f} %\n", name,
             tokens, difference->rel_l2, median_us, samples->us.front(), samples->us.back(),
             weights / median_us * 1e-6,
             100 * static_cast<double>(matrix.code_bytes()) / (median_us * 1e-6) / limits.read_bytes_s,
             100 * 2 * weights * static_cast<double>(tokens) / (median_us * 1e-6) / limits.matrix_flop_s);
  return true;
}

Result<Limits> MeasureLimits(cuda::ColdTimer& timer) {
  const Result<double> read = timer.ReadRate(kReadBytes, kPasses);
  if (!read) return tl::unexpected(read.error());
  const Result<double> matrix = timer.MatrixRate(kPasses);
  if (!matrix) return tl::unexpected(matrix.error());
  return Limits{.read_bytes_s = *read, .matrix_flop_s = *matrix};
}

Result<bool> RunAll(const std::string& codebook_name, const std::string& device_text) {
  const std::optional<Codebook> codebook = CodebookFromName(codebook_name);
  if (!codebook) return Error(StatusCode::kUsage, "codebook '" + codebook_name + "' is not known");
  const Result<Device> device = ParseDevice(device_text);
  if (!device) return tl::unexpected(device.error());
  if (device->is_host())
    return Error(StatusCode::kUsage, "this program is for GPUs; legal: cuda, cuda:INDEX");
  Result<cuda::ColdTimer> timer = cuda::ColdTimer::Create(*device);
  if (!timer) return tl::unexpected(timer.error());
  const Result<Limits> limits = MeasureLimits(*timer);
  if (!limits) return tl::unexpected(limits.error());
  const std::time_t now = std::time(nullptr);
  char time[32] = {};
  std::strftime(time, sizeof(time), "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  fmt::print("linears   {}, bf16 in, fp32 out, graph, {} MiB read before every sample, median of {}\n",
             codebook_name, timer->cold_bytes() >> 20, kSamples);
  fmt::print("machine   {}, CUDA {} driver, {:.0f} MHz under load\n", timer->info().name,
             CudaVersionText(timer->info().driver_version), timer->clock_mhz().value_or(0));
  fmt::print("build     {} ({}), {}\n", ESPALIER_VERSION, ESPALIER_COMMIT, time);
  fmt::print("limits    read {:.0f} GB/s, matrix {:.0f} TFLOP/s (mma.m16n8k16)\n\n",
             limits->read_bytes_s * 1e-9, limits->matrix_flop_s * 1e-12);
  fmt::print("{:<16} {:>6} {:>10} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}\n", "linear", "tokens", "rel_l2", "us",
             "min", "max", "Tw/s", "read", "matrix");
  bool ok = true;
  for (const Shape& shape : kShapes) {
    const PreparedLinear linear =
        test::MakeLinear(shape.in, shape.out, 0, 0, {.bits = shape.bits, .codebook = *codebook}, 1);
    const Result<PreparedLinear> on_device = ToDevice(linear, *device);
    if (!on_device) return tl::unexpected(on_device.error());
    if (timer->info().compute_capability == kDecodingCapability) {
      if (auto measured = MeasureDecoding(*timer, *on_device); !measured)
        return tl::unexpected(measured.error());
    }
    for (const uint64_t tokens : kTokens) {
      const Result<bool> passed = Measure(*timer, *limits, linear, *on_device, tokens);
      if (!passed) return passed;
      ok = ok && *passed;
    }
  }
  if (auto clock = timer->MatrixRate(kPasses); !clock) return tl::unexpected(clock.error());
  fmt::print("\n{:.0f} MHz afterwards\n", timer->clock_mhz().value_or(0));
  return ok;
}

}  // namespace
}  // namespace espalier

int main(int argc, char** argv) {
  const espalier::Result<bool> ok = espalier::RunAll(argc > 1 ? argv[1] : "mcg", argc > 2 ? argv[2] : "cuda");
  if (ok) return *ok ? 0 : 1;
  std::fprintf(stderr, "cuda_linear_bench: %s\n", ok.error().message().c_str());
  return espalier::ExitCode(ok.error().code());
}
