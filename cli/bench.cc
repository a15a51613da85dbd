// SPDX-License-Identifier: Apache-2.0
//
// espalier bench: is a layer right, and how long does it take, as shares of what the machine can do.
#include <espalier/device.h>
#include <espalier/experts.h>
#include <espalier/extent_plan.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/half.h"
#include "bench_engine.h"
#include "bench_package.h"
#include "bench_report.h"
#include "command.h"
#include "device_run.h"
#include "gates.h"
#include "geometry.h"
#include "moe_run.h"

namespace espalier::cli {
namespace {

constexpr std::string_view kDefaultGeometry = "qwen3-30b-a3b";
constexpr int kDefaultBits = 3;
constexpr uint32_t kDefaultTopK = 2;
constexpr int64_t kMaxSamples = 100'000;
constexpr int64_t kMaxThreads = 4096;
// Without --samples: as many as fit into the time, within these bounds.
constexpr size_t kMinDefaultSamples = 5;
constexpr size_t kMaxDefaultSamples = 50;
constexpr double kDefaultRowSeconds = 1;
// The reference decodes some 10^8 weights a second and core: a row is checked within seconds.
constexpr double kWeightsChecked = 3e8;

struct BenchOptions {
  std::string checkpoint;
  std::string layer;
  std::string geometry;
  std::string tiers;
  std::string tokens = "1,8,64";
  std::string codebook;
  std::string mode;
  std::string device = "cpu";
  std::string svg;
  std::string samples;
  std::string top_k;
  std::string threads;
  std::string seed = "1";
  std::string max_rel_l2;
};

struct Request {
  const Geometry* geometry = nullptr;  // null = a checkpoint
  std::vector<int> bits;               // of a geometry's experts
  Codebook codebook = Codebook::kMcg;
  std::vector<uint64_t> tokens;
  Device device;
  std::string executor;
  CpuMode mode = CpuMode::kFast;
  std::optional<size_t> samples;
  std::optional<uint32_t> top_k;
  int num_threads = 0;
  uint64_t seed = 1;
  std::optional<double> max_rel_l2;
};

Result<void> ParseGeometry(const BenchOptions& options, Request& request) {
  const Result<const Geometry*> geometry =
      FindGeometry(options.geometry.empty() ? kDefaultGeometry : options.geometry);
  if (!geometry) return tl::unexpected(geometry.error());
  request.geometry = *geometry;
  std::vector<TierSpec> tiers = {
      {.bits = kDefaultBits, .experts = static_cast<uint32_t>((*geometry)->experts)}};
  if (!options.tiers.empty()) {
    Result<std::vector<TierSpec>> parsed = ParseTiers(options.tiers, (*geometry)->experts);
    if (!parsed) return tl::unexpected(parsed.error());
    tiers = *std::move(parsed);
  }
  request.bits = Interleave(tiers);
  if (options.codebook.empty()) return {};
  const std::optional<Codebook> codebook = CodebookFromName(options.codebook);
  if (!codebook) {
    std::string names;
    for (const CodebookInfo& info : AllCodebooks()) {
      names += fmt::format("{}{}", names.empty() ? "" : ", ", info.name);
    }
    return Error(StatusCode::kUsage, fmt::format("--codebook '{}': legal: {}", options.codebook, names));
  }
  request.codebook = *codebook;
  return {};
}

Result<void> ParseSource(const BenchOptions& options, Request& request) {
  if (options.checkpoint.empty()) {
    if (options.layer.empty()) return ParseGeometry(options, request);
    return Error(StatusCode::kUsage, "--layer is of a checkpoint, and none is given");
  }
  if (!options.geometry.empty()) {
    return Error(StatusCode::kUsage, "bench takes a checkpoint or --geometry, not both");
  }
  if (options.layer.empty()) return Error(StatusCode::kUsage, "a checkpoint needs --layer");
  if (!options.tiers.empty() || !options.codebook.empty()) {
    return Error(StatusCode::kUsage,
                 "--tiers and --codebook are for made-up weights, a checkpoint has its own");
  }
  return {};
}

Result<std::vector<uint64_t>> ParseTokens(std::string_view text) {
  std::vector<uint64_t> tokens;
  for (size_t start = 0; start <= text.size();) {
    const size_t end = std::min(text.find(',', start), text.size());
    const Result<int64_t> count =
        ParseInteger("--tokens", text.substr(start, end - start), 1, static_cast<int64_t>(kMaxPlanTokens));
    if (!count) return tl::unexpected(count.error());
    tokens.push_back(static_cast<uint64_t>(*count));
    start = end + 1;
  }
  return tokens;
}

Result<void> ParseExecutor(const BenchOptions& options, Request& request) {
  const Result<Device> device = ParseDevice(options.device);
  if (!device) return tl::unexpected(device.error());
  request.device = *device;
  const char* forced = std::getenv("ESPALIER_FORCE_BACKEND");
  const bool is_forced = forced != nullptr && *forced != '\0';
  const std::string usual = device->is_host() ? "cpu" : "cuda";
  if (!is_forced) request.executor = usual;  // else the library reads it
  if (options.mode.empty()) return {};
  const Result<CpuMode> mode = ParseMode("--mode", options.mode);
  if (!mode) return tl::unexpected(mode.error());
  const std::string_view effective = is_forced ? std::string_view(forced) : std::string_view(usual);
  if (effective != "cpu") {
    return Error(StatusCode::kUsage,
                 fmt::format("--mode applies to the cpu executor, the executor is {}", effective));
  }
  request.mode = *mode;
  return {};
}

Result<void> ParseBound(const BenchOptions& options, Request& request) {
  if (options.max_rel_l2.empty()) return {};
  char* end = nullptr;
  const double bound = std::strtod(options.max_rel_l2.c_str(), &end);
  if (*end != '\0' || !(bound >= 0)) {
    return Error(StatusCode::kUsage,
                 fmt::format("--max-rel-l2 '{}': legal: a number from 0", options.max_rel_l2));
  }
  request.max_rel_l2 = bound;
  return {};
}

Result<Request> ParseRequest(const BenchOptions& options) {
  Request request;
  if (auto source = ParseSource(options, request); !source) return tl::unexpected(source.error());
  if (auto executor = ParseExecutor(options, request); !executor) return tl::unexpected(executor.error());
  if (auto bound = ParseBound(options, request); !bound) return tl::unexpected(bound.error());
  Result<std::vector<uint64_t>> tokens = ParseTokens(options.tokens);
  if (!tokens) return tl::unexpected(tokens.error());
  request.tokens = *std::move(tokens);
  if (!options.samples.empty()) {
    const Result<int64_t> samples = ParseInteger("--samples", options.samples, 1, kMaxSamples);
    if (!samples) return tl::unexpected(samples.error());
    request.samples = static_cast<size_t>(*samples);
  }
  if (!options.top_k.empty()) {
    const Result<int64_t> top_k = ParseInteger("--top-k", options.top_k, 1, kMaxTopK);
    if (!top_k) return tl::unexpected(top_k.error());
    request.top_k = static_cast<uint32_t>(*top_k);
  }
  if (!options.threads.empty()) {
    const Result<int64_t> threads = ParseInteger("--threads", options.threads, 1, kMaxThreads);
    if (!threads) return tl::unexpected(threads.error());
    if (!request.device.is_host()) {
      return Error(StatusCode::kUsage,
                   "--threads is for the host, the device is " + DeviceText(request.device));
    }
    request.num_threads = static_cast<int>(*threads);
  }
  const Result<uint64_t> seed = ParseSeed("--seed", options.seed);
  if (!seed) return tl::unexpected(seed.error());
  request.seed = *seed;
  // Is it there? After all that can be said without it.
  if (auto found = FindDevice("--device", options.device); !found) return tl::unexpected(found.error());
  return request;
}

Result<uint32_t> ChooseTopK(const Request& request, uint64_t usual, uint32_t experts) {
  const uint64_t top_k = request.top_k.value_or(static_cast<uint32_t>(
      std::min({usual != 0 ? usual : kDefaultTopK, uint64_t{experts}, uint64_t{kMaxTopK}})));
  if (top_k > experts) {
    return Error(StatusCode::kGeometry,
                 fmt::format("--top-k {}: a token's experts are distinct; legal: 1 to {}", top_k, experts));
  }
  return static_cast<uint32_t>(top_k);
}

// Refuses what no run could do, before there are weights.
Result<void> CheckPlan(const Request& request, const ExpertsTable& table, uint32_t top_k) {
  const Result<MoePlan> plan =
      MoePlan::Create(table, {.max_tokens = *std::max_element(request.tokens.begin(), request.tokens.end()),
                              .top_k = top_k,
                              .input = request.device.is_host() ? Dtype::kF32 : Dtype::kBF16,
                              .device = request.device,
                              .executor = request.executor,
                              .mode = request.mode,
                              .num_threads = request.num_threads});
  if (!plan) return tl::unexpected(plan.error());
  return {};
}

struct Package {
  PreparedExperts experts;
  std::string name;
  std::string layer;
  uint32_t top_k;
};

Result<Package> MakePackage(const Request& request) {
  const Geometry& geometry = *request.geometry;
  Result<ExpertsTable> table = SizeRandomExperts(geometry, request.bits, request.codebook, request.device);
  if (!table) return tl::unexpected(table.error());
  const Result<uint32_t> top_k = ChooseTopK(request, geometry.top_k, table->geometry().experts);
  if (!top_k) return tl::unexpected(top_k.error());
  if (auto legal = CheckPlan(request, *table, *top_k); !legal) return tl::unexpected(legal.error());
  Result<PreparedExperts> experts = FillRandomly(*std::move(table), request.seed);
  if (!experts) return tl::unexpected(experts.error());
  return Package{
      .experts = *std::move(experts), .name = std::string(geometry.name), .layer = {}, .top_k = *top_k};
}

Result<Package> LoadPackage(const BenchOptions& options, const Request& request, Output& output) {
  const Result<Checkpoint> checkpoint = Checkpoint::Open(options.checkpoint);
  if (!checkpoint) return tl::unexpected(checkpoint.error());
  const Result<size_t> position = checkpoint->FindLayer(options.layer);
  if (!position) return tl::unexpected(position.error());
  const MoeLayer& layer = checkpoint->layers()[*position];
  if (auto usable = checkpoint->CheckUsable(layer.label); !usable) return tl::unexpected(usable.error());
  if (!options.svg.empty()) {
    if (auto other = CheckOutputPath("--svg", options.svg, *checkpoint); !other)
      return tl::unexpected(other.error());
  }
  const Result<uint32_t> top_k = ChooseTopK(request, checkpoint->config().top_k, layer.experts);
  if (!top_k) return tl::unexpected(top_k.error());
  const Result<ExtentPlan> plan = ExtentPlan::Create(*checkpoint, {.tp = 1, .ep = 1, .equal = false});
  if (!plan) return tl::unexpected(plan.error());
  const Result<LoadSizes> sizes = SizeExperts(*checkpoint, *plan, *position, 0);
  if (!sizes) return tl::unexpected(sizes.error());
  if (auto legal = CheckPlan(request, sizes->table, *top_k); !legal) return tl::unexpected(legal.error());
  if (!checkpoint->config().activation) output.Note("no config names an activation: assuming silu");
  Progress progress("loading");
  LoadOptions load;
  // Whatever runs here, the reference reads both; a GPU gets its copy without a detour.
  if (!request.device.is_host()) load.order = CodeOrder::kNative;
  load.progress = [&progress](uint64_t done, uint64_t total) {
    progress.Update(done, total);
    return true;
  };
  Result<PreparedExperts> experts = LoadExperts(*checkpoint, *plan, *position, 0, load);
  if (!experts) return tl::unexpected(experts.error());
  return Package{
      .experts = *std::move(experts), .name = options.checkpoint, .layer = layer.label, .top_k = *top_k};
}

// Different for every (tokens, sample).
uint64_t RouteSeed(uint64_t seed, uint64_t tokens, uint64_t sample) {
  return (seed * 0x9E3779B97F4A7C15u + tokens) * 0xBF58476D1CE4E5B9u + sample;
}

Result<MoeInput> DrawRoutes(const BenchReport& report, uint64_t tokens, uint64_t sample) {
  return RandomMoeInput({.tokens = tokens,
                         .hidden_channels = 0,
                         .experts = report.experts->geometry().experts,
                         .top_k = report.top_k},
                        RouteSeed(report.seed, tokens, sample));
}

Result<MoeInput> DrawTokens(const BenchReport& report, uint64_t tokens, Dtype dtype) {
  Result<MoeInput> drawn = RandomMoeInput({.tokens = tokens,
                                           .hidden_channels = report.experts->geometry().hidden_channels,
                                           .experts = report.experts->geometry().experts,
                                           .top_k = report.top_k},
                                          report.seed);
  if (!drawn || dtype == Dtype::kF32) return drawn;
  const uint64_t count = drawn->x.size_bytes() / sizeof(float);
  Result<HostBuffer> x = HostBuffer::Create(count * sizeof(uint16_t));
  if (!x) return tl::unexpected(x.error());
  const auto* floats = reinterpret_cast<const float*>(drawn->x.data());
  auto* halves = reinterpret_cast<uint16_t*>(x->data());
  for (uint64_t i = 0; i < count; ++i) {
    halves[i] = dtype == Dtype::kBF16 ? DoubleToBf16(double{floats[i]}) : DoubleToFp16(double{floats[i]});
  }
  drawn->x = *std::move(x);
  drawn->dtype = dtype;
  return drawn;
}

// Tokens that the reference is asked about: the first, the last, the rest evenly between them.
std::vector<uint64_t> ChooseRows(uint64_t tokens, double weights_per_row) {
  const auto affordable = static_cast<uint64_t>(kWeightsChecked / std::max(weights_per_row, 1.0));
  const uint64_t count = std::min(tokens, std::max<uint64_t>(affordable, 2));
  std::vector<uint64_t> rows;
  for (uint64_t i = 0; i < count; ++i) rows.push_back(count == 1 ? 0 : i * (tokens - 1) / (count - 1));
  return rows;
}

Result<MoeInput> TakeRows(const MoeInput& x, const MoeInput& routes, std::span<const uint64_t> rows) {
  MoeInput taken;
  taken.tokens = rows.size();
  taken.top_k = routes.top_k;
  taken.dtype = x.dtype;
  taken.id_type = routes.id_type;
  const uint64_t x_bytes = x.x.size_bytes() / x.tokens;
  const uint64_t id_bytes = routes.topk_ids.size_bytes() / routes.tokens;
  Result<HostBuffer> taken_x = HostBuffer::Create(rows.size() * x_bytes);
  if (!taken_x) return tl::unexpected(taken_x.error());
  Result<HostBuffer> taken_ids = HostBuffer::Create(rows.size() * id_bytes);
  if (!taken_ids) return tl::unexpected(taken_ids.error());
  taken.x = *std::move(taken_x);
  taken.topk_ids = *std::move(taken_ids);
  for (size_t i = 0; i < rows.size(); ++i) {
    std::memcpy(taken.x.data() + i * x_bytes, x.x.data() + rows[i] * x_bytes, x_bytes);
    std::memcpy(taken.topk_ids.data() + i * id_bytes, routes.topk_ids.data() + rows[i] * id_bytes, id_bytes);
    const float* weights = routes.weights.data() + rows[i] * routes.top_k;
    taken.weights.insert(taken.weights.end(), weights, weights + routes.top_k);
  }
  return taken;
}

Result<Metrics> AgainstReference(const PreparedExperts& experts, const MoeInput& x, const MoeInput& routes,
                                 std::span<const uint64_t> rows, std::span<const float> y) {
  const Result<MoeInput> input = TakeRows(x, routes, rows);
  if (!input) return tl::unexpected(input.error());
  const Result<MoeOutput> reference = RunLayer(experts, *input, "reference", CpuMode::kExact, Dtype::kF64);
  if (!reference) return tl::unexpected(reference.error());
  const auto* expected = reinterpret_cast<const double*>(reference->y.data());
  const uint64_t hidden = experts.geometry().hidden_channels;
  MetricsSum sum;
  for (size_t i = 0; i < rows.size(); ++i) {
    for (uint64_t c = 0; c < hidden; ++c) sum.Add(double{y[rows[i] * hidden + c]}, expected[i * hidden + c]);
  }
  return sum.Result();
}

bool SameBits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

// Everything that must hold before a time means anything. What fails goes into row.failure.
Result<void> CheckGates(BenchEngine& engine, const BenchReport& report, const MoeInput& x, BenchRow& row) {
  const Result<MoeInput> routes = DrawRoutes(report, row.tokens, 0);
  if (!routes) return tl::unexpected(routes.error());
  const Result<std::vector<float>> y = engine.Run(*routes, BenchForm::kTogether);
  if (!y) return tl::unexpected(y.error());
  const double mean_weights = static_cast<double>(std::accumulate(report.tiers.weights.begin(),
                                                                  report.tiers.weights.end(), uint64_t{0})) /
                              static_cast<double>(report.tiers.weights.size());
  const std::vector<uint64_t> rows = ChooseRows(row.tokens, mean_weights * report.top_k);
  const Result<Metrics> metrics = AgainstReference(*report.experts, x, *routes, rows, *y);
  if (!metrics) return tl::unexpected(metrics.error());
  row.metrics = *metrics;
  row.rows_checked = rows.size();
  if (!metrics->Within(report.gate.max_rel_l2, report.gate.min_cosine)) {
    row.failure =
        fmt::format("rel_l2 {:.3g}, cosine {:.9f} against the reference", metrics->rel_l2, metrics->cosine);
  }
  if (!std::all_of(y->begin(), y->end(), [](float value) { return std::isfinite(value); })) {
    row.failure = "some of the output is not finite";
  }
  if (engine.has_graphs()) {
    const Result<std::vector<float>> eager = engine.Run(*routes, BenchForm::kEager);
    if (!eager) return tl::unexpected(eager.error());
    if (!SameBits(*y, *eager)) row.failure = "the graph and the eager run differ";
  }
  if (report.tiers.names.size() > 1) {
    const Result<std::vector<float>> serial = engine.Run(*routes, BenchForm::kSerial);
    if (!serial) return tl::unexpected(serial.error());
    MetricsSum sum;
    for (size_t i = 0; i < y->size(); ++i) sum.Add(double{(*y)[i]}, double{(*serial)[i]});
    row.serial_rel_l2 = sum.Result().rel_l2;
    if (!(*row.serial_rel_l2 <= kSerialGate)) {
      row.failure = fmt::format("rel_l2 {:.3g} against serial tiers", *row.serial_rel_l2);
    }
  }
  row.gate_passed = row.failure.empty();
  return {};
}

void AddWork(const ExpertTiers& tiers, const MoeInput& routes, BenchWork& work) {
  const std::span ids(reinterpret_cast<const int32_t*>(routes.topk_ids.data()), routes.tokens * routes.top_k);
  std::vector<bool> touched(tiers.weights.size());
  for (const int32_t id : ids) {
    const auto expert = static_cast<size_t>(id);
    work.flops += 2 * static_cast<double>(tiers.weights[expert]);
    if (touched[expert]) continue;
    touched[expert] = true;
    work.experts_touched += 1;
    work.weights_touched += static_cast<double>(tiers.weights[expert]);
    for (size_t format = 0; format < tiers.format_weights[expert].size(); ++format) {
      work.format_weights[format] += static_cast<double>(tiers.format_weights[expert][format]);
    }
    work.packed_bytes += static_cast<double>(tiers.code_bytes[expert]);
  }
}

Result<void> TimeRow(BenchEngine& engine, const BenchReport& report, std::optional<size_t> samples,
                     BenchRow& row) {
  const bool serial = report.tiers.names.size() > 1;
  row.work.format_weights.resize(report.tiers.formats.size());
  double measured_us = 0;
  const auto enough = [&] {
    const size_t taken = row.samples_us.size();
    if (samples) return taken >= *samples;
    return taken >= kMaxDefaultSamples ||
           (taken >= kMinDefaultSamples && measured_us > kDefaultRowSeconds * 1e6);
  };
  // The forms take turns, so that whatever drifts drifts for all.
  const auto take = [&](const MoeInput& routes, BenchForm form, std::vector<double>& times) -> Result<void> {
    const Result<double> time = engine.Time(routes, form);
    if (!time) return tl::unexpected(time.error());
    times.push_back(*time);
    measured_us += *time;
    return {};
  };
  while (!enough()) {
    const Result<MoeInput> routes = DrawRoutes(report, row.tokens, row.samples_us.size() + 1);
    if (!routes) return tl::unexpected(routes.error());
    AddWork(report.tiers, *routes, row.work);
    if (auto taken = take(*routes, BenchForm::kTogether, row.samples_us); !taken) return taken;
    if (engine.has_graphs()) {
      if (auto taken = take(*routes, BenchForm::kEager, row.eager_us); !taken) return taken;
    }
    if (serial) {
      if (auto taken = take(*routes, BenchForm::kSerial, row.serial_us); !taken) return taken;
    }
  }
  const auto count = static_cast<double>(row.samples_us.size());
  for (double& weights : row.work.format_weights) weights /= count;
  for (double* sum :
       {&row.work.experts_touched, &row.work.weights_touched, &row.work.packed_bytes, &row.work.flops})
    *sum /= count;
  return {};
}

Result<void> Measure(BenchEngine& engine, const Request& request, BenchReport& report) {
  Progress progress("measuring");
  report.machine = engine.machine();
  report.input = engine.input();
  report.has_graphs = engine.has_graphs();
  report.cold_text = engine.cold_text();
  Result<BenchLimits> limits = engine.MeasureLimits();
  if (!limits) return tl::unexpected(limits.error());
  report.limits = *std::move(limits);
  report.clock_mhz = engine.ClockMhz();
  for (const uint64_t tokens : request.tokens) {
    progress.SetLabel(fmt::format("{} tokens", tokens));
    progress.Update(report.rows.size(), request.tokens.size());
    const Result<MoeInput> x = DrawTokens(report, tokens, engine.input());
    if (!x) return tl::unexpected(x.error());
    if (auto ready = engine.Prepare(*x); !ready) return ready;
    report.executor = engine.executor();
    report.mode = report.executor == "cpu" ? CpuModeName(request.mode) : "";
    report.gate = GateOf(report.executor, request.mode, *report.experts);
    if (request.max_rel_l2) report.gate.max_rel_l2 = std::min(report.gate.max_rel_l2, *request.max_rel_l2);
    BenchRow& row = report.rows.emplace_back();
    row.tokens = tokens;
    if (auto checked = CheckGates(engine, report, *x, row); !checked) return checked;
    if (!row.gate_passed) continue;
    if (auto timed = TimeRow(engine, report, request.samples, row); !timed) return timed;
  }
  if (auto updated = engine.UpdateClock(); !updated) return updated;
  report.clock_mhz_after = engine.ClockMhz();
  return {};
}

std::string CommandText(std::span<const std::string> arguments) {
  std::string text = "espalier";
  for (const std::string& argument : arguments) {
    const bool plain = argument.find_first_of(" \t\n\"'\\$*?;&|<>()") == argument.npos;
    text += plain ? " " + argument : fmt::format(" '{}'", argument);
  }
  return text;
}

std::string UtcNow() {
  const std::time_t now = std::time(nullptr);
  std::tm utc = {};
  gmtime_r(&now, &utc);
  char text[32];
  const size_t length = std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc);
  return {text, length};
}

Result<int> Run(const BenchOptions& options, const std::vector<std::string>& arguments, Output& output) {
  const Result<Request> request = ParseRequest(options);
  if (!request) return tl::unexpected(request.error());
  // A picture that cannot be written is known before an hour of measuring.
  std::optional<AtomicFile> svg;
  const auto open_svg = [&]() -> Result<void> {
    if (options.svg.empty()) return {};
    Result<AtomicFile> file = AtomicFile::Create(options.svg);
    if (!file) return tl::unexpected(file.error());
    svg.emplace(*std::move(file));
    return {};
  };
  if (auto opened = open_svg(); !opened) return tl::unexpected(opened.error());
  const Result<Package> package =
      request->geometry != nullptr ? MakePackage(*request) : LoadPackage(options, *request, output);
  if (!package) return tl::unexpected(package.error());
  BenchReport report;
  report.name = package->name;
  report.layer = package->layer;
  report.experts = &package->experts;
  report.tiers = TiersOf(package->experts);
  report.top_k = package->top_k;
  report.seed = request->seed;
  report.command = CommandText(arguments);
  report.time = UtcNow();
  BenchSetup setup{.experts = package->experts,
                   .tier_maps = {},
                   .formats = report.tiers.formats,
                   .executor = request->executor,
                   .top_k = package->top_k,
                   .mode = request->mode,
                   .num_threads = request->num_threads};
  for (size_t i = 0; i < report.tiers.names.size(); ++i) setup.tier_maps.push_back(report.tiers.MapOf(i));
  const Result<std::unique_ptr<BenchEngine>> engine =
      request->device.is_host() ? MakeCpuBench(setup) : MakeCudaBench(setup, request->device);
  if (!engine) return tl::unexpected(engine.error());
  if (auto measured = Measure(**engine, *request, report); !measured) return tl::unexpected(measured.error());
  if (svg) {
    const std::string picture = BenchSvg(report);
    if (auto written = svg->Append(std::as_bytes(std::span(picture))); !written)
      return tl::unexpected(written.error());
    if (auto written = svg->Commit(); !written) return tl::unexpected(written.error());
  }
  PrintBench(report, output);
  if (svg) output.Print("wrote {}\n", options.svg);
  output.Document(BenchDocument(report));
  return report.ok() ? kExitOk : kExitCheckFailed;
}

}  // namespace

void AddBench(CLI::App& app, Invocation& invocation) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command =
      AddCommand(app, invocation, "bench", "Check and time one MoE layer against what the machine can do",
                 "Every number of tokens is compared with the reference first; what fails is not timed, and "
                 "the exit code\n"
                 "is 1. A layer of mixed rates is also timed tier by tier. Times are microseconds of one run "
                 "with weights\n"
                 "that no cache holds and routes that no sample shares.\n"
                 "\n"
                 "Example:\n"
                 "  espalier bench --geometry glm-5.2-tp4 --tiers 3:192,4:64 --tokens 1,64 --svg bench.svg\n"
                 "  espalier bench /models/glm --layer 3\n");
  std::string names;
  for (const Geometry& geometry : Geometries())
    names += fmt::format("{}{}", names.empty() ? "" : ", ", geometry.name);
  command->add_option("CKPT", options->checkpoint, "Checkpoint: a directory or one .safetensors file");
  command->add_option("--layer", options->layer, "Layer label of the checkpoint, as inspect shows it");
  command->add_option(
      "--geometry", options->geometry,
      fmt::format("Instead of a checkpoint, random weights at the size that one rank has: {}; {} "
                  "by default",
                  names, kDefaultGeometry));
  command->add_option(
      "--tiers", options->tiers,
      fmt::format("K:EXPERTS,... of a geometry, spread evenly over the ids; all K {} by default",
                  kDefaultBits));
  command->add_option("--codebook", options->codebook, "3inst, mcg or mul1, of a geometry; mcg by default");
  command->add_option("--tokens", options->tokens, "Numbers of tokens, as in 1,8,64")->capture_default_str();
  command->add_option("--top-k", options->top_k, "Experts a token; the model's by default");
  command->add_option("--mode", options->mode, "exact, fast or int8, for the cpu executor; fast by default");
  command->add_option("--device", options->device, "cpu or cuda[:INDEX]")->capture_default_str();
  command->add_option("--threads", options->threads, "Threads of the cpu executor; all cores by default");
  command->add_option("--samples", options->samples,
                      fmt::format("Timed runs of each; by default as many as take {} s, {} to {}",
                                  kDefaultRowSeconds, kMinDefaultSamples, kMaxDefaultSamples));
  command->add_option("--seed", options->seed, "Seed of weights, tokens and routes")->capture_default_str();
  command->add_option("--max-rel-l2", options->max_rel_l2,
                      "A tighter bound on the error than the executor's own");
  command->add_option("--svg", options->svg, "File to draw time against tokens into");
  command->callback([options, &invocation] {
    invocation.run = [options, arguments = invocation.arguments](Output& output) {
      return Run(*options, arguments, output);
    };
  });
}

}  // namespace espalier::cli
