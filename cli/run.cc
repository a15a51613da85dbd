// SPDX-License-Identifier: Apache-2.0
//
// espalier run: executes the routed experts of one layer over a file of tokens, or over random ones.
#include <espalier/backend.h>
#include <espalier/experts.h>
#include <espalier/extent_plan.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "checkpoint/safetensors.h"
#include "command.h"
#include "device_run.h"
#include "moe_run.h"
#include "team.h"

namespace espalier::cli {
namespace {

struct RunOptions {
  std::string checkpoint;
  std::string layer;
  std::string tp = "1";
  std::string rank;
  std::string ep = "1";
  std::string activation;
  std::string input;
  std::string output;
  std::string tokens = "4";
  std::string seed = "1";
  std::string device;  // empty: what the executor runs on
  std::string executor;
  std::string mode;
};

struct Executor {
  std::string name;  // empty: what ESPALIER_FORCE_BACKEND names
  CpuMode mode = CpuMode::kFast;
  Device device = {};
};

Result<Executor> ChooseExecutor(const RunOptions& options) {
  const char* forced = std::getenv("ESPALIER_FORCE_BACKEND");
  Executor executor{.name = options.executor};
  std::string_view effective = options.executor;
  if (options.executor.empty()) {
    const bool is_forced = forced != nullptr && *forced != '\0';
    if (!is_forced) executor.name = options.device.starts_with("cuda") ? "cuda" : "cpu";
    effective = is_forced ? std::string_view(forced) : executor.name;
  }
  if (effective != "reference" && effective != "cpu" && effective != "cuda") {
    return Error(StatusCode::kUsage, fmt::format("--executor '{}': legal: reference, cpu, cuda", effective));
  }
  if (!options.mode.empty()) {
    const Result<CpuMode> mode = ParseMode("--mode", options.mode);
    if (!mode) return tl::unexpected(mode.error());
    if (effective != "cpu") {
      return Error(StatusCode::kUsage,
                   fmt::format("--mode applies to the cpu executor, the executor is {}", effective));
    }
    executor.mode = *mode;
  }
  const bool on_gpu = effective == "cuda";
  const std::string device = options.device.empty() ? (on_gpu ? "cuda" : "cpu") : options.device;
  const Result<Device> found =
      FindDevice(options.device.empty() && on_gpu ? "--executor" : "--device", device);
  if (!found) return tl::unexpected(found.error());
  if (found->is_host() == on_gpu) {
    return Error(StatusCode::kUsage, fmt::format("--device {}: the executor is {}, which runs on {}", device,
                                                 effective, on_gpu ? "a GPU" : "the host"));
  }
  // Now, and not when a layer has been read.
  if (const Result<const Backend*> backend = BackendByName(effective); !backend)
    return tl::unexpected(backend.error());
  executor.device = *found;
  return executor;
}

struct Ranks {
  int tp = 1;
  int ep = 1;
  int first = 0;  // global ranks to run in this process
  int count = 1;
  int processes = 1;  // that each run as many
};

// One rank a process.
Result<Ranks> TeamRanks(Ranks ranks, const RunOptions& options, const Team& team) {
  if (!options.rank.empty()) {
    return Error(StatusCode::kUsage, "--rank is not for mpirun, where each process is one rank");
  }
  const int world = ranks.tp * ranks.ep;
  if (team.processes() != world) {
    return Error(StatusCode::kUsage,
                 fmt::format("mpirun started {} processes; legal: {}, as --tp {} and --ep {} make {} ranks",
                             team.processes(), world, ranks.tp, ranks.ep, world));
  }
  ranks.first = team.rank();
  ranks.count = 1;
  ranks.processes = world;
  return ranks;
}

Result<Ranks> ParseRanks(const RunOptions& options, const Team& team) {
  const Result<int64_t> tp = ParseInteger("--tp", options.tp, 1, kMaxTp);
  if (!tp) return tl::unexpected(tp.error());
  const Result<int64_t> ep = ParseInteger("--ep", options.ep, 1, kMaxTp);
  if (!ep) return tl::unexpected(ep.error());
  Ranks ranks{.tp = static_cast<int>(*tp),
              .ep = static_cast<int>(*ep),
              .first = 0,
              .count = static_cast<int>(*tp * *ep),
              .processes = 1};
  if (team.launched()) return TeamRanks(ranks, options, team);
  if (options.rank.empty()) return ranks;
  const Result<int64_t> rank = ParseInteger("--rank", options.rank, 0, *tp * *ep - 1);
  if (!rank) return tl::unexpected(rank.error());
  ranks.first = static_cast<int>(*rank);
  ranks.count = 1;
  return ranks;
}

Result<MoeInput> MakeInput(const RunOptions& options, const ModelConfig& config, const MoeLayer& layer,
                           Output& output) {
  if (!options.input.empty()) return ReadMoeInput(options.input, layer.valid_hidden_channels);
  const Result<int64_t> tokens = ParseInteger("--tokens", options.tokens, 0, kMaxPlanTokens);
  if (!tokens) return tl::unexpected(tokens.error());
  const Result<uint64_t> seed = ParseSeed("--seed", options.seed);
  if (!seed) return tl::unexpected(seed.error());
  const uint64_t wanted = config.top_k != 0 ? config.top_k : 2;
  const RandomInputSize size{
      .tokens = static_cast<uint64_t>(*tokens),
      .hidden_channels = layer.valid_hidden_channels,
      .experts = layer.experts,
      .top_k = static_cast<uint32_t>(std::min({wanted, uint64_t{layer.experts}, uint64_t{kMaxTopK}}))};
  output.Note(fmt::format("no --input: {} random tokens, {} of {} experts each, seed {}", size.tokens,
                          size.top_k, size.experts, *seed));
  return RandomMoeInput(size, *seed);
}

Result<LoadOptions> MakeLoadOptions(const Checkpoint& checkpoint, const RunOptions& options, Output& output) {
  LoadOptions load;
  if (!options.activation.empty()) {
    const Result<Activation> activation = ParseActivation(options.activation);
    if (!activation) return tl::unexpected(activation.error());
    load.activation = *activation;
  } else if (!checkpoint.config().activation) {
    output.Note("no config names an activation: assuming silu");
  }
  return load;
}

struct LayerRun {
  MoeOutput output;
  Activation activation;
};

// All ranks asked for, one after the other, so that one share is in memory at a time. The sum over the ranks
// is the whole; a single rank's part is what it would hand to the all-reduce.
Result<LayerRun> RunRanks(const Checkpoint& checkpoint, const ExtentPlan& plan, size_t layer,
                          const Ranks& ranks, const MoeInput& input, const Executor& executor,
                          LoadOptions load) {
  Progress progress("loading");
  load.device = executor.device;
  load.progress = [&progress](uint64_t done, uint64_t total) {
    progress.Update(done, total);
    return true;
  };
  const uint64_t hidden = checkpoint.layers()[layer].valid_hidden_channels;
  Result<HostBuffer> y = HostBuffer::Create(input.tokens * hidden * sizeof(float));
  if (!y) return tl::unexpected(y.error());
  std::fill_n(y->data(), y->size_bytes(), std::byte{0});
  LayerRun run{.output = {.y = *std::move(y), .seconds = 0, .executor = {}, .kernels = {}}, .activation = {}};
  for (int rank = ranks.first; rank < ranks.first + ranks.count; ++rank) {
    if (ranks.count > 1) progress.SetLabel(fmt::format("rank {} of {}", rank, plan.world()));
    const Result<PreparedExperts> experts = LoadExperts(checkpoint, plan, layer, rank, load);
    if (!experts) return tl::unexpected(experts.error());
    const std::vector<int32_t> map = ExpertMap(plan, layer, rank / plan.tp());
    const RankPlan place{.tp = ranks.tp, .ep = ranks.ep, .rank = rank};
    if (Result<void> added = AddLayer(*experts, input, executor.name, executor.mode, map, place, run.output);
        !added) {
      return tl::unexpected(added.error());
    }
    run.activation = experts->geometry().activation;
  }
  return run;
}

// The rank of this process becomes the sum over all processes.
Result<void> SumOverTeam(Team& team, MoeOutput& output) {
  auto* y = reinterpret_cast<float*>(output.y.data());
  if (auto sum = team.Sum(std::span(y, output.y.size_bytes() / sizeof(float))); !sum) return sum;
  const Result<double> seconds = team.Slowest(output.seconds);
  if (!seconds) return tl::unexpected(seconds.error());
  output.seconds = *seconds;
  return {};
}

Result<void> CheckOptions(const RunOptions& options) {
  if (!options.activation.empty()) {
    if (Result<Activation> activation = ParseActivation(options.activation); !activation) {
      return tl::unexpected(activation.error());
    }
  }
  return {};
}

void Report(const MoeLayer& layer, const Ranks& ranks, const MoeInput& input, const LayerRun& run,
            const Executor& executor, const std::string& path, Output& output) {
  const MoeOutput& result = run.output;
  const bool has_mode = result.executor == "cpu";
  const std::string activation = ActivationText(run.activation);
  output.Print("layer {}: {} tokens, top-{}, {} experts, {}\n", layer.label, input.tokens, input.top_k,
               layer.experts, activation);
  const std::string where = executor.device.is_host() ? "" : " on " + DeviceText(executor.device);
  output.Print("executor {}{}{}{}, {:.6f} s\n", result.executor, has_mode ? " " : "",
               has_mode ? CpuModeName(executor.mode) : "", where, result.seconds);
  const int num_ranks = ranks.count * ranks.processes;
  if (num_ranks > 1) {
    output.Print("sum over {} ranks{}: tp {}, ep {}\n", num_ranks,
                 ranks.processes > 1 ? " in as many processes" : "", ranks.tp, ranks.ep);
  }
  if (num_ranks < ranks.tp * ranks.ep) {
    output.Print("part of rank {} of {}: tp {}, ep {}\n", ranks.first, ranks.tp * ranks.ep, ranks.tp,
                 ranks.ep);
  }
  if (!path.empty()) output.Print("wrote {}\n", path);
  output.Document({{"schema", "espalier.run/1"},
                   {"layer", LayerId(layer)},
                   {"label", layer.label},
                   {"tokens", input.tokens},
                   {"top_k", input.top_k},
                   {"activation", activation},
                   {"executor", result.executor},
                   {"mode", has_mode ? Json(CpuModeName(executor.mode)) : Json()},
                   {"kernels", TextOrNull(result.kernels)},
                   {"device", DeviceText(executor.device)},
                   {"seconds", result.seconds},
                   {"tp", ranks.tp},
                   {"ep", ranks.ep},
                   {"rank", num_ranks == ranks.tp * ranks.ep ? Json() : Json(ranks.first)},
                   {"processes", ranks.processes},
                   {"output", TextOrNull(path)}});
}

Result<int> Run(const RunOptions& options, Team& team, Output& output) {
  if (Result<void> legal = CheckOptions(options); !legal) return tl::unexpected(legal.error());
  const Result<Executor> executor = ChooseExecutor(options);
  if (!executor) return tl::unexpected(executor.error());
  const Result<Checkpoint> checkpoint = Checkpoint::Open(options.checkpoint);
  if (!checkpoint) return tl::unexpected(checkpoint.error());
  const Result<size_t> position = checkpoint->FindLayer(options.layer);
  if (!position) return tl::unexpected(position.error());
  const Result<Ranks> ranks = ParseRanks(options, team);
  // The sizes are an answer to an illegal one, not to a number of processes that does not fit it.
  if (!ranks && !ranks.error().message().starts_with("--tp")) return tl::unexpected(ranks.error());
  output.SetLegalTp(checkpoint->LegalTpSizes());
  if (!ranks) return tl::unexpected(ranks.error());
  const Result<ExtentPlan> plan =
      ExtentPlan::Create(*checkpoint, {.tp = ranks->tp, .ep = ranks->ep, .equal = false});
  if (!plan) return tl::unexpected(plan.error());
  output.SetLegalTp({});
  const MoeLayer& layer = checkpoint->layers()[*position];
  if (Result<void> usable = checkpoint->CheckUsable(layer.label); !usable) {
    return tl::unexpected(usable.error());
  }
  // The input first: it is small, and a wrong one should not cost the reading of a layer.
  const Result<MoeInput> input = MakeInput(options, checkpoint->config(), layer, output);
  if (!input) return tl::unexpected(input.error());
  if (auto same = team.CheckSame("inputs", HashOf(*input)); !same) return tl::unexpected(same.error());
  if (!options.output.empty()) {
    if (auto other = CheckOutputPath("-o", options.output, *checkpoint, options.input); !other)
      return tl::unexpected(other.error());
  }
  const Result<LoadOptions> load = MakeLoadOptions(*checkpoint, options, output);
  if (!load) return tl::unexpected(load.error());
  Result<LayerRun> run = RunRanks(*checkpoint, *plan, *position, *ranks, *input, *executor, *load);
  if (!run) return tl::unexpected(run.error());
  if (auto summed = SumOverTeam(team, run->output); !summed) return tl::unexpected(summed.error());
  if (!team.speaks()) return kExitOk;
  if (!options.output.empty()) {
    const TensorData y{.name = "y",
                       .dtype = Dtype::kF32,
                       .shape = {input->tokens, layer.valid_hidden_channels},
                       .data = run->output.y.span()};
    if (Result<void> written = WriteSafetensors(options.output, std::span(&y, 1)); !written) {
      return tl::unexpected(written.error());
    }
  }
  Report(layer, *ranks, *input, *run, *executor, options.output, output);
  return kExitOk;
}

}  // namespace

void AddRun(CLI::App& app, Invocation& invocation) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* command = AddCommand(
      app, invocation, "run", "Run the routed experts of one layer",
      "FILE of --input holds x [tokens, hidden] (F32, F16, BF16), topk_ids [tokens, k] (I32, I64; -1 = no\n"
      "expert) and topk_weights [tokens, k] (F32, F16, BF16). The output holds y [tokens, hidden] F32.\n"
      "\n"
      "Example:\n"
      "  espalier run /models/glm --layer 3 --input tokens.safetensors -o y.safetensors\n"
      "  espalier run /models/glm --layer 3 --tokens 16 --executor reference\n"
      "  mpirun -n 4 espalier run /models/glm --layer 3 --tp 4\n");
  command->add_option("CKPT", options->checkpoint, "Checkpoint: a directory or one .safetensors file")
      ->required();
  command->add_option("--layer", options->layer, "Layer label, as inspect shows it")->required();
  command->add_option("--input", options->input, "Safetensors file with tokens and routes");
  command->add_option("-o,--output", options->output, "Safetensors file to write y to");
  command->add_option("--tokens", options->tokens, "Random tokens without --input")->capture_default_str();
  command->add_option("--seed", options->seed, "Seed of the random tokens and routes")->capture_default_str();
  command->add_option(
      "--activation", options->activation,
      "silu, gelu, relu2, situ:BETA,LINEAR_BETA or swiglu-oai[:LIMIT] instead of the config's");
  command->add_option("--executor", options->executor,
                      "reference, cpu or cuda; cpu by default, cuda on a GPU");
  command->add_option("--mode", options->mode, "exact, fast or int8, for the cpu executor; fast by default");
  command->add_option("--device", options->device,
                      "cpu or cuda[:INDEX]; cpu by default, cuda for the cuda executor");
  command
      ->add_option(
          "--tp", options->tp,
          "Tensor-parallel ranks, run one after the other (under mpirun: each by a process) and summed")
      ->capture_default_str();
  command->add_option("--rank", options->rank, "Run this rank only: ep_rank * tp + tp_rank");
  command->add_option("--ep", options->ep, "Expert-parallel ranks")->capture_default_str();
  command->callback([options, &invocation] {
    invocation.for_teams = true;
    invocation.run = [options, &team = invocation.team](Output& output) {
      return Run(*options, team, output);
    };
  });
}

}  // namespace espalier::cli
