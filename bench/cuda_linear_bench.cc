// SPDX-License-Identifier: Apache-2.0
//
// RunLinear on a GPU: correctness first, then the median time of a graph with cold weights, as shares of what
// the GPU reads and multiplies at most in the same run. Where a matrix may be decoded first, also the class
// of kernels that was not chosen, in parentheses, and what a product of another library would need beside
// itself, in graphs of their own: rotate, decode, both as a chain (prepare), and output, of warm fp32 sums.
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
#include <string_view>
#include <utility>
#include <vector>

#include "base/half.h"
#include "cuda/cold_timer.h"
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
constexpr int kDecodingCapability = 90;  // where linears of many rows may decode their matrix first

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

std::string_view NameOf(cuda::RowClass row_class) {
  switch (row_class) {
    case cuda::RowClass::kFew:
      return "few";
    case cuda::RowClass::kMany:
      return "many";
    case cuda::RowClass::kWide:
      return "wide";
    case cuda::RowClass::kDense:
      break;
  }
  return "dense";
}

// A linear on the host and on a device, and memory for calls with one number of tokens.
struct Call {
  const PreparedLinear& linear;
  const PreparedLinear& on_device;
  uint64_t tokens;
  LinearPlan plan;
  Host host;
  DeviceBuffer staged, x, y, workspace;
  uint64_t sums_offset;

  static Result<Call> Create(const PreparedLinear& linear, const PreparedLinear& on_device, uint64_t tokens) {
    const Device& device = on_device.device();
    test::Random random(tokens);
    Host host{.x = std::vector<uint16_t>(tokens * linear.in_channels()),
              .y = std::vector<float>(tokens * linear.out_channels())};
    for (uint16_t& value : host.x) value = DoubleToBf16(random.Normal());
    // Room for a decoded matrix, however few the tokens are.
    const Result<LinearPlan> plan = LinearPlan::Create(
        on_device,
        {.max_tokens = std::max(tokens, cuda::kDenseTokens), .input = Dtype::kBF16, .device = device});
    if (!plan) return tl::unexpected(plan.error());
    const Result<cuda::LinearConfig> config = cuda::ConfigureLinear(on_device, plan->options());
    if (!config) return tl::unexpected(config.error());
    Result<DeviceBuffer> staged = cuda::Upload(device, std::as_bytes(std::span(host.x)));
    if (!staged) return tl::unexpected(staged.error());
    Result<DeviceBuffer> x = DeviceBuffer::Create(device, staged->size_bytes());
    if (!x) return tl::unexpected(x.error());
    Result<DeviceBuffer> y = DeviceBuffer::Create(device, host.y.size() * sizeof(float));
    if (!y) return tl::unexpected(y.error());
    Result<DeviceBuffer> workspace = DeviceBuffer::Create(device, plan->workspace_bytes());
    if (!workspace) return tl::unexpected(workspace.error());
    return Call{.linear = linear,
                .on_device = on_device,
                .tokens = tokens,
                .plan = *plan,
                .host = std::move(host),
                .staged = *std::move(staged),
                .x = *std::move(x),
                .y = *std::move(y),
                .workspace = *std::move(workspace),
                .sums_offset = config->sums};
  }

  Result<cuda::Graph> Capture(const cuda::Stream& stream, const cuda::LinearSteps& steps) {
    return cuda::Graph::Capture(stream, [&] {
      return cuda::RunLinearSteps(plan, on_device,
                                  {.num_tokens = tokens,
                                   .x = x.data(),
                                   .x_row_stride = linear.in_channels(),
                                   .y = y.data(),
                                   .y_row_stride = linear.out_channels(),
                                   .workspace = workspace.data(),
                                   .workspace_bytes = workspace.size_bytes(),
                                   .stream = stream.get()},
                                  steps);
    });
  }
  // Puts the inputs where they are read, as the kernel before a linear would.
  Result<void> Place(const cuda::Stream& stream) {
    return stream.CopyAsync(x.data(), staged.data(), x.size_bytes());
  }
  // The same with sums, for the kernel that comes after a product.
  Result<void> PlaceSums(const cuda::Stream& stream) {
    return stream.Fill(workspace.data() + sums_offset, std::byte{0}, host.y.size() * sizeof(float));
  }
  double weights() const {
    return static_cast<double>(linear.in_channels()) * static_cast<double>(linear.out_channels());
  }
  std::string Label(std::string_view what) const {
    return fmt::format("{:<16} {:>6} {:>7}", NameOf(linear.matrix()), tokens, what);
  }
};

// Kernels of a linear alone. One line of the table.
Result<void> MeasureSteps(cuda::ColdTimer& timer, Call& call, std::string_view name,
                          const cuda::LinearSteps& steps) {
  Result<cuda::Graph> graph = call.Capture(timer.stream(), steps);
  if (!graph) return tl::unexpected(graph.error());
  const auto place = [&] {
    return steps.output ? call.PlaceSums(timer.stream()) : call.Place(timer.stream());
  };
  const Result<Samples> samples = Take(timer, place, [&] { return graph->Launch(timer.stream()); });
  if (!samples) return tl::unexpected(samples.error());
  fmt::print("{} {:>10} {:>9.2f} {:>9.2f} {:>9.2f}\n", call.Label(name), "-", samples->median(),
             samples->us.front(), samples->us.back());
  return {};
}

// A whole linear. One line of the table; gives false where the gate failed.
Result<bool> MeasureClass(cuda::ColdTimer& timer, const Limits& limits, Call& call, std::string_view name,
                          const cuda::LinearSteps& steps) {
  Result<cuda::Graph> graph = call.Capture(timer.stream(), steps);
  if (!graph) return tl::unexpected(graph.error());
  const auto place = [&] { return call.Place(timer.stream()); };
  const auto launch = [&] { return graph->Launch(timer.stream()); };
  if (auto poisoned = timer.stream().Fill(call.y.data(), std::byte{0xFF}, call.y.size_bytes()); !poisoned)
    return tl::unexpected(poisoned.error());
  if (const Result<double> first = timer.Time(place, launch); !first) return tl::unexpected(first.error());
  if (auto read = cuda::Download(call.y, std::as_writable_bytes(std::span(call.host.y))); !read)
    return tl::unexpected(read.error());
  const Result<test::Difference> difference = AgainstReference(call.linear, call.host, call.tokens);
  if (!difference) return tl::unexpected(difference.error());
  if (!(difference->rel_l2 <= kMaxRelL2 && difference->cosine >= kMinCosine)) {
    fmt::print("{} {:>10.3g}  gate failed, cosine {:.9f}\n", call.Label(name), difference->rel_l2,
               difference->cosine);
    return false;
  }
  const Result<Samples> samples = Take(timer, place, launch);
  if (!samples) return tl::unexpected(samples.error());
  const double us = samples->median();
  const auto code_bytes = static_cast<double>(call.linear.matrix().code_bytes());
  const double operations = 2 * call.weights() * static_cast<double>(call.tokens);
  fmt::print("{} {:>10.3g} {:>9.2f} {:>9.2f} {:>9.2f} {:>9.3f} {:>7.1f} % {:>7.1f} %\n", call.Label(name),
             difference->rel_l2, us, samples->us.front(), samples->us.back(), call.weights() / us * 1e-6,
             100 * code_bytes / (us * 1e-6) / limits.read_bytes_s,
             100 * operations / (us * 1e-6) / limits.matrix_flop_s);
  return true;
}

// The lines of one number of tokens. Gives false where a gate failed.
Result<bool> Measure(cuda::ColdTimer& timer, const Limits& limits, Call& call) {
  using cuda::RowClass;
  const MatrixDesc& matrix = call.linear.matrix();
  const int capability = timer.info().compute_capability;
  const RowClass chosen =
      cuda::PlanLinearPass(call.tokens, matrix.in_channels, matrix.out_channels, capability).row_class;
  const Result<bool> passed = MeasureClass(timer, limits, call, NameOf(chosen), {});
  if (!passed || capability != kDecodingCapability || call.tokens < cuda::kWideTokens) return passed;
  const RowClass other = chosen == RowClass::kDense ? RowClass::kWide : RowClass::kDense;
  const Result<bool> other_passed =
      MeasureClass(timer, limits, call, fmt::format("({})", NameOf(other)), {.forced = other});
  if (!other_passed) return other_passed;
  struct Part {
    std::string_view name;
    bool rotate, decode, output;
  };
  for (const Part& part : {Part{"rotate", true, false, false},
                           {"decode", false, true, false},
                           {"output", false, false, true},
                           {"prepare", true, true, false}}) {
    const Result<void> measured = MeasureSteps(timer, call, part.name,
                                               {.forced = RowClass::kDense,
                                                .rotate = part.rotate,
                                                .decode = part.decode,
                                                .products = false,
                                                .output = part.output});
    if (!measured) return tl::unexpected(measured.error());
  }
  return *passed && *other_passed;
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
  fmt::print("{:<16} {:>6} {:>7} {:>10} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}\n", "linear", "tokens", "class",
             "rel_l2", "us", "min", "max", "Tw/s", "read", "matrix");
  bool ok = true;
  for (const Shape& shape : kShapes) {
    const PreparedLinear linear =
        test::MakeLinear(shape.in, shape.out, 0, 0, {.bits = shape.bits, .codebook = *codebook}, 1);
    const Result<PreparedLinear> on_device = ToDevice(linear, *device);
    if (!on_device) return tl::unexpected(on_device.error());
    for (const uint64_t tokens : kTokens) {
      Result<Call> call = Call::Create(linear, *on_device, tokens);
      if (!call) return tl::unexpected(call.error());
      const Result<bool> passed = Measure(*timer, *limits, *call);
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
