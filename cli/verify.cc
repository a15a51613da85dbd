// SPDX-License-Identifier: Apache-2.0
//
// espalier verify: is a checkpoint whole, are its numbers numbers, and do the executors agree with the
// reference on every layer.
#include <espalier/backend.h>
#include <espalier/experts.h>
#include <espalier/moe.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "command.h"
#include "device_run.h"
#include "gates.h"
#include "metrics.h"
#include "moe_run.h"
#include "vector_check.h"

namespace espalier::cli {
namespace {

constexpr uint64_t kTokens = 17;  // one more than a tile: the last row is alone
constexpr uint64_t kSeed = 1;
constexpr uint32_t kDefaultTopK = 2;

struct VerifyOptions {
  std::string checkpoint;
  std::string layers = "all";
  std::string device = "cpu";
  bool hash = false;
};

struct FileResult {
  std::string name;
  bool ok = true;
  std::string sha256;
};

struct ExecutorResult {
  const MoeLayer* layer = nullptr;
  std::string executor;
  std::optional<CpuMode> mode;
  Metrics metrics;
  bool ok = false;
};

struct Report {
  std::vector<FileResult> files;
  std::vector<ExecutorResult> executors;
  std::vector<Problem> problems;
  bool ok = true;
};

std::optional<uint64_t> ParseNumber(std::string_view text) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

// Adds the layers that "3", "3-7" or "PREFIX.3" names.
Result<void> AddLayers(const Checkpoint& checkpoint, const std::string& item, std::set<size_t>& chosen) {
  const size_t dash = item.find('-');
  std::optional<uint64_t> first;
  std::optional<uint64_t> last;
  if (dash != std::string::npos) {
    first = ParseNumber(std::string_view(item).substr(0, dash));
    last = ParseNumber(std::string_view(item).substr(dash + 1));
  }
  if (!first || !last) {
    const Result<size_t> layer = checkpoint.FindLayer(item);
    if (!layer) return tl::unexpected(layer.error());
    chosen.insert(*layer);
    return {};
  }
  bool any = false;
  for (size_t i = 0; i < checkpoint.layers().size(); ++i) {
    const MoeLayer& layer = checkpoint.layers()[i];
    const auto number = static_cast<uint64_t>(layer.number);
    if (layer.label != std::to_string(layer.number) || number < *first || number > *last) continue;
    chosen.insert(i);
    any = true;
  }
  if (!any) {
    return Error(StatusCode::kUsage, fmt::format("--layers {}: there is no MoE layer in this range", item));
  }
  return {};
}

Result<std::set<size_t>> ChooseLayers(const Checkpoint& checkpoint, const std::string& text) {
  std::set<size_t> chosen;
  if (text == "all") {
    for (size_t i = 0; i < checkpoint.layers().size(); ++i) chosen.insert(i);
    return chosen;
  }
  for (size_t start = 0; start <= text.size();) {
    const size_t end = std::min(text.find(',', start), text.size());
    if (Result<void> added = AddLayers(checkpoint, text.substr(start, end - start), chosen); !added) {
      return tl::unexpected(added.error());
    }
    start = end + 1;
  }
  return chosen;
}

struct HashProgress {
  Progress* progress;
  uint64_t done = 0;
  uint64_t total = 0;
};

Result<FileResult> CheckFile(const Checkpoint& checkpoint, size_t index, HashProgress& state,
                             Report& report) {
  const FileInfo& file = checkpoint.files()[index];
  const Result<std::string> sha256 = checkpoint.FileSha256(
      index,
      [](void* context, uint64_t bytes) {
        auto* hash = static_cast<HashProgress*>(context);
        hash->done += bytes;
        hash->progress->Update(hash->done, hash->total);
      },
      &state);
  if (!sha256) return tl::unexpected(sha256.error());
  FileResult result{.name = file.name, .ok = true, .sha256 = *sha256};
  if (!file.expected_sha256.empty() && file.expected_sha256 != *sha256) {
    result.ok = false;
    report.ok = false;
    report.problems.push_back(
        {.severity = Problem::Severity::kError,
         .file = file.name,
         .tensor = "",
         .message = fmt::format("SHA-256 is {}, the manifest states {}", *sha256, file.expected_sha256),
         .layer = ""});
  }
  return result;
}

Result<void> CheckFiles(const Checkpoint& checkpoint, bool hash, Report& report) {
  Progress progress("hashing");
  HashProgress state{.progress = &progress};
  for (const FileInfo& file : checkpoint.files()) state.total += file.size_bytes;
  for (size_t i = 0; i < checkpoint.files().size(); ++i) {
    if (!hash) {
      report.files.push_back({.name = checkpoint.files()[i].name, .ok = true, .sha256 = ""});
      continue;
    }
    Result<FileResult> file = CheckFile(checkpoint, i, state, report);
    if (!file) return tl::unexpected(file.error());
    report.files.push_back(*std::move(file));
  }
  return {};
}

Metrics Measure(const MoeOutput& result, const MoeOutput& reference) {
  MetricsSum sum;
  const auto* values = reinterpret_cast<const float*>(result.y.data());
  const auto* expected = reinterpret_cast<const double*>(reference.y.data());
  for (uint64_t i = 0; i < result.y.size_bytes() / sizeof(float); ++i) sum.Add(values[i], expected[i]);
  return sum.Result();
}

Result<void> Supports(const Backend& backend, const PreparedExperts& experts, const MoeInput& input,
                      CpuMode mode) {
  MoePlanOptions options;
  options.device = experts.device();
  options.max_tokens = input.tokens;
  options.top_k = input.top_k;
  options.executor = std::string(backend.name());
  options.mode = mode;
  return backend.Supports(experts.table(), options);
}

// Every (executor, mode) of a device that can run the layer, against the reference on the host. What cannot
// becomes a problem with its reason.
Result<void> CheckExecutors(const PreparedExperts& host_experts, const Device& device, const MoeLayer& layer,
                            uint64_t top_k, std::vector<ExecutorResult>& results,
                            std::vector<Problem>& problems) {
  const RandomInputSize size{
      .tokens = kTokens,
      .hidden_channels = host_experts.geometry().hidden_channels,
      .experts = layer.experts,
      .top_k = static_cast<uint32_t>(
          std::min({top_k != 0 ? top_k : kDefaultTopK, uint64_t{layer.experts}, uint64_t{kMaxTopK}}))};
  const Result<MoeInput> input = RandomMoeInput(size, kSeed);
  if (!input) return tl::unexpected(input.error());
  const Result<MoeOutput> reference =
      RunLayer(host_experts, *input, "reference", CpuMode::kExact, Dtype::kF64);
  if (!reference) return tl::unexpected(reference.error());
  std::optional<PreparedExperts> copy;
  if (!device.is_host()) {
    Result<PreparedExperts> uploaded = ToDevice(host_experts, device);
    if (!uploaded) return tl::unexpected(uploaded.error());
    copy = *std::move(uploaded);
  }
  const PreparedExperts& experts = copy ? *copy : host_experts;
  for (const Backend* backend : Backends()) {
    if (backend->name() == "reference" || backend->device_type() != device.type) continue;
    const bool has_modes = backend->name() == "cpu";
    for (const CpuMode mode : {CpuMode::kExact, CpuMode::kFast, CpuMode::kInt8}) {
      // Others take the default and nothing else.
      if (!has_modes && mode != MoePlanOptions{}.mode) continue;
      if (Result<void> supported = Supports(*backend, experts, *input, mode); !supported) {
        problems.push_back({.severity = Problem::Severity::kWarning,
                            .file = {},
                            .tensor = {},
                            .message = "not compared: " + supported.error().message(),
                            .layer = layer.label});
        continue;
      }
      const Result<MoeOutput> output =
          RunLayer(experts, *input, std::string(backend->name()), mode, Dtype::kF32);
      if (!output) return tl::unexpected(output.error());
      ExecutorResult result{.layer = &layer,
                            .executor = output->executor,
                            .mode = has_modes ? std::optional(mode) : std::nullopt,
                            .metrics = Measure(*output, *reference),
                            .ok = false};
      const Gate gate = GateOf(backend->name(), mode, experts);
      result.ok = result.metrics.Within(gate.max_rel_l2, gate.min_cosine);
      results.push_back(std::move(result));
    }
  }
  return {};
}

Result<std::vector<ExecutorResult>> CheckLayer(const Checkpoint& checkpoint, size_t index,
                                               const Device& device, Report& report) {
  const MoeLayer& layer = checkpoint.layers()[index];
  Progress progress(fmt::format("layer {}", layer.label));
  VectorCheck vectors(checkpoint, report.problems);
  if (Result<void> checked = vectors.CheckLayer(index); !checked) return tl::unexpected(checked.error());
  LoadOptions load;
  load.progress = [&progress](uint64_t done, uint64_t total) {
    progress.Update(done, total);
    return true;
  };
  const Result<PreparedExperts> experts = LoadExperts(checkpoint, index, load);
  if (!experts) return tl::unexpected(experts.error());
  std::vector<ExecutorResult> results;
  if (auto run = CheckExecutors(*experts, device, layer, checkpoint.config().top_k, results, report.problems);
      !run) {
    return tl::unexpected(run.error());
  }
  for (ExecutorResult& result : results) result.ok = result.ok && !vectors.found_error();
  report.ok =
      report.ok && !vectors.found_error() &&
      std::all_of(results.begin(), results.end(), [](const ExecutorResult& result) { return result.ok; });
  return results;
}

void PrintLayer(const MoeLayer& layer, const std::vector<ExecutorResult>& results, Output& output) {
  bool ok = true;
  std::string text;
  for (const ExecutorResult& result : results) {
    ok = ok && result.ok;
    text += fmt::format("  {}{}{} rel_l2 {:.3g} cosine {:.9f}", result.executor, result.mode ? " " : "",
                        result.mode ? CpuModeName(*result.mode) : "", result.metrics.rel_l2,
                        result.metrics.cosine);
  }
  if (results.empty()) text = "  only the reference supports it";
  output.Print("layer {:<8} {:<6}{}\n", layer.label, ok ? "ok" : "FAILED", text);
}

void PrintFiles(const Report& report, Output& output) {
  for (const FileResult& file : report.files) {
    output.Print("file  {:<8} {}{}{}\n", file.ok ? "ok" : "FAILED", file.name,
                 file.sha256.empty() ? "" : "  sha256 ", file.sha256);
  }
}

Json ToJson(const Report& report) {
  Json layers = Json::array();
  for (const ExecutorResult& result : report.executors) {
    layers.push_back({{"layer", LayerId(*result.layer)},
                      {"label", result.layer->label},
                      {"ok", result.ok},
                      {"executor", result.executor},
                      {"mode", result.mode ? Json(CpuModeName(*result.mode)) : Json()},
                      {"rel_l2", result.metrics.rel_l2},
                      {"cosine", result.metrics.cosine}});
  }
  Json files = Json::array();
  for (const FileResult& file : report.files) {
    Json json = {{"name", file.name}, {"ok", file.ok}};
    if (!file.sha256.empty()) json["sha256"] = file.sha256;
    files.push_back(std::move(json));
  }
  Json problems = Json::array();
  for (const Problem& problem : report.problems) problems.push_back(ProblemJson(problem));
  return {{"schema", "espalier.verify/1"},
          {"layers", layers},
          {"files", files},
          {"problems", problems},
          {"ok", report.ok}};
}

// Errors that opening found make the chosen layers unusable; with all layers, any of them counts.
Result<void> CheckUsable(const Checkpoint& checkpoint, const std::set<size_t>& chosen, bool all) {
  if (all) return checkpoint.CheckUsable("");
  for (const size_t index : chosen) {
    if (auto usable = checkpoint.CheckUsable(checkpoint.layers()[index].label); !usable) return usable;
  }
  return {};
}

Result<int> Verify(const VerifyOptions& options, Output& output) {
  const Result<Device> device = FindDevice("--device", options.device);
  if (!device) return tl::unexpected(device.error());
  // An executor that is left out must not look like one that agrees.
  for (const Backend* backend : Backends()) {
    if (backend->device_type() != device->type) continue;
    if (Result<void> usable = backend->Usable(); !usable) return tl::unexpected(usable.error());
  }
  const Result<Checkpoint> checkpoint = Checkpoint::Open(options.checkpoint);
  if (!checkpoint) return tl::unexpected(checkpoint.error());
  const Result<std::set<size_t>> chosen = ChooseLayers(*checkpoint, options.layers);
  if (!chosen) return tl::unexpected(chosen.error());
  const bool all = options.layers == "all";
  if (auto usable = CheckUsable(*checkpoint, *chosen, all); !usable) return tl::unexpected(usable.error());

  Report report;
  report.problems.assign(checkpoint->problems().begin(), checkpoint->problems().end());
  if (Result<void> files = CheckFiles(*checkpoint, options.hash, report); !files) {
    return tl::unexpected(files.error());
  }
  PrintFiles(report, output);
  for (const size_t index : *chosen) {
    Result<std::vector<ExecutorResult>> results = CheckLayer(*checkpoint, index, *device, report);
    if (!results) return tl::unexpected(results.error());
    PrintLayer(checkpoint->layers()[index], *results, output);
    report.executors.insert(report.executors.end(), results->begin(), results->end());
  }
  if (all) {
    VectorCheck vectors(*checkpoint, report.problems);
    if (Result<void> dense = vectors.CheckLinears(); !dense) return tl::unexpected(dense.error());
    report.ok = report.ok && !vectors.found_error();
    if (!checkpoint->linears().empty()) {
      output.Print("dense {:<8} {} EXL3 matrices\n", vectors.found_error() ? "FAILED" : "ok",
                   checkpoint->linears().size());
    }
  }
  PrintProblems(output, report.problems);
  output.Print("{}\n", report.ok ? "ok" : "FAILED");
  output.Document(ToJson(report));
  return report.ok ? kExitOk : kExitCheckFailed;
}

}  // namespace

void AddVerify(CLI::App& app, Invocation& invocation) {
  auto options = std::make_shared<VerifyOptions>();
  CLI::App* command = AddCommand(
      app, invocation, "verify", "Check files, tensors and executors, layer by layer",
      "Checks markers, padding and scale vectors, then runs 17 random tokens through every executor of the\n"
      "device and measures them against the reference on the host. Exit 1 when a check fails; warnings alone "
      "exit 0.\n"
      "\n"
      "Example:\n"
      "  espalier verify /models/glm --layers 3-7 --hash\n");
  command->add_option("CKPT", options->checkpoint, "Checkpoint: a directory or one .safetensors file")
      ->required();
  command->add_option("--layers", options->layers, "all, 3, 3,5 or 3-7")->capture_default_str();
  command->add_flag("--hash", options->hash, "SHA-256 of every file, compared where a manifest states it");
  command->add_option("--device", options->device, "cpu or cuda[:INDEX]")->capture_default_str();
  command->callback([options, &invocation] {
    invocation.run = [options](Output& output) { return Verify(*options, output); };
  });
}

}  // namespace espalier::cli
