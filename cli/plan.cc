// SPDX-License-Identifier: Apache-2.0
//
// espalier plan: who owns what at a number of ranks, and what it takes, from headers alone.
#include <espalier/dense_slices.h>
#include <espalier/extent_plan.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "command.h"
#include "geometry.h"
#include "plan_svg.h"
#include "preflight.h"

namespace espalier::cli {
namespace {

constexpr size_t kMaxLayerLines = 24;
constexpr size_t kMaxRankLines = 64;

struct PlanOptions {
  std::string checkpoint;
  std::string geometry;
  std::string bits = "4";
  std::string tp;
  std::string ep = "1";
  bool equal = false;
  std::string align = "64";
  std::string max_tokens = "4096";
  std::string top_k;
  std::string memory;
  std::string svg;
};

// "24GiB", "24G" (both 2^30), "1000000".
Result<uint64_t> ParseBytes(std::string_view option, std::string_view text) {
  constexpr std::string_view kUnits = "KMGT";
  std::string_view digits = text;
  uint64_t unit = 1;
  if (digits.ends_with("iB")) digits.remove_suffix(2);
  if (!digits.empty() && kUnits.find(digits.back()) != std::string_view::npos) {
    unit <<= 10 * (kUnits.find(digits.back()) + 1);
    digits.remove_suffix(1);
  } else if (digits.size() != text.size()) {
    digits = {};
  }
  const auto number = ParseInteger(option, digits, 0, int64_t{1} << 53);
  if (number && static_cast<uint64_t>(*number) <= (uint64_t{1} << 53) / unit)
    return static_cast<uint64_t>(*number) * unit;
  return Error(StatusCode::kUsage,
               fmt::format("{} '{}': legal: bytes up to 2^53, also with K, M, G, T or KiB, MiB, GiB, TiB",
                           option, text));
}

struct Request {
  ExtentPlanOptions extents;
  uint64_t max_tokens = 0;
  std::optional<uint32_t> top_k = {};
  std::optional<uint64_t> memory_bytes = {};
  int bits = 4;
  uint64_t alignment = kDefaultWidthAlignment;
};

Result<Request> ParseRequest(const PlanOptions& options) {
  if (options.checkpoint.empty() == options.geometry.empty()) {
    return Error(StatusCode::kUsage, "plan needs a checkpoint or --geometry, one of them");
  }
  Request request{.extents = {.tp = 1, .ep = 1, .equal = options.equal}};
  const auto max_tokens = ParseInteger("--max-tokens", options.max_tokens, 0, kMaxPlanTokens);
  if (!max_tokens) return tl::unexpected(max_tokens.error());
  request.max_tokens = static_cast<uint64_t>(*max_tokens);
  if (!options.top_k.empty()) {
    const auto top_k = ParseInteger("--top-k", options.top_k, 1, kMaxTopK);
    if (!top_k) return tl::unexpected(top_k.error());
    request.top_k = static_cast<uint32_t>(*top_k);
  }
  if (!options.memory.empty()) {
    const auto bytes = ParseBytes("--memory", options.memory);
    if (!bytes) return tl::unexpected(bytes.error());
    request.memory_bytes = *bytes;
  }
  const auto bits = ParseInteger("--bits", options.bits, kMinBits, kMaxBits);
  if (!bits) return tl::unexpected(bits.error());
  request.bits = static_cast<int>(*bits);
  const auto alignment = ParseInteger("--align", options.align, 1, kMaxWidthAlignment);
  if (!alignment) return tl::unexpected(alignment.error());
  request.alignment = static_cast<uint64_t>(*alignment);
  return request;
}

// After the checkpoint is open, so that a refusal can list the legal sizes.
Result<void> ParseRanks(const PlanOptions& options, Request& request) {
  const auto tp = ParseInteger("--tp", options.tp, 1, kMaxTp);
  if (!tp) return tl::unexpected(tp.error());
  const auto ep = ParseInteger("--ep", options.ep, 1, kMaxTp);
  if (!ep) return tl::unexpected(ep.error());
  request.extents.tp = static_cast<int>(*tp);
  request.extents.ep = static_cast<int>(*ep);
  return {};
}

Result<Checkpoint> OpenSource(const PlanOptions& options, const Request& request) {
  if (options.geometry.empty()) return Checkpoint::Open(options.checkpoint);
  const Result<const Geometry*> geometry = FindGeometry(options.geometry);
  if (!geometry) return tl::unexpected(geometry.error());
  const std::vector<int> bits((*geometry)->experts, request.bits);
  return OpenGeometry(**geometry, bits, Codebook::kMcg);
}

struct Planned {
  const Checkpoint& checkpoint;
  const ExtentPlan& plan;
  DensePlan dense;
  std::vector<int> legal_tp;
  std::vector<RankMemory> memory;
  uint64_t max_tokens = 0;
  uint32_t top_k = 0;
  std::optional<uint64_t> memory_bytes;
  std::string layout;
};

uint32_t ChooseTopK(const Checkpoint& checkpoint, const Request& request, Output& output) {
  if (request.top_k) return *request.top_k;
  uint64_t from_config = std::min<uint64_t>(checkpoint.config().top_k, kMaxTopK);
  for (const MoeLayer& layer : checkpoint.layers())  // as run does
    from_config = std::min<uint64_t>(from_config, layer.experts);
  if (from_config != 0) return static_cast<uint32_t>(from_config);
  output.Note("no config names a top-k: assuming 2; --top-k sets it");
  return 2;
}

Result<void> CheckMemory(const Planned& planned) {
  if (!planned.memory_bytes) return {};
  for (size_t rank = 0; rank < planned.memory.size(); ++rank) {
    const RankMemory& memory = planned.memory[rank];
    if (memory.max_tokens) continue;
    return Error(StatusCode::kCapacity,
                 fmt::format("rank {} needs {} bytes for weights, {} for staging and {} for the workspace of "
                             "{} tokens; --memory gives {}; legal: more memory or more ranks",
                             rank, memory.weight_memory_bytes(), memory.staging_peak_bytes,
                             memory.workspace_bytes, planned.max_tokens, *planned.memory_bytes));
  }
  return {};
}

Json LayerJson(const Checkpoint& checkpoint, const LayerExtents& layer) {
  const MoeLayer& info = checkpoint.layers()[layer.layer];
  Json ranks = Json::array();
  for (size_t rank = 0; rank < layer.ranks.size(); ++rank) {
    const RankExtent& extent = layer.ranks[rank];
    Json segments = Json::array();
    for (const SliceExtent& segment : extent.segments) {
      segments.push_back({{"slice", segment.slice},
                          {"first_channel", segment.first_channel},
                          {"channels", segment.channels}});
    }
    ranks.push_back({{"rank", rank},
                     {"first_channel", extent.first_channel},
                     {"channels", extent.channels},
                     {"weight_bytes", extent.weight_bytes},
                     {"segments", std::move(segments)}});
  }
  return {{"layer", LayerId(info)},
          {"label", info.label},
          {"experts", info.experts},
          {"ranks", std::move(ranks)}};
}

Json ExpertsJson(const ExtentPlan& plan) {
  Json experts = Json::array();
  for (int ep = 0; ep < plan.ep() && !plan.layers().empty(); ++ep) {
    const ExpertRange range = plan.Experts(0, ep);
    experts.push_back({{"rank", ep}, {"first_expert", range.first_expert}, {"experts", range.experts}});
  }
  return experts;
}

Json RankJson(const Planned& planned, size_t rank) {
  const RankMemory& memory = planned.memory[rank];
  const auto tp = static_cast<size_t>(planned.plan.tp());
  Json json = {{"rank", rank},
               {"tp_rank", rank % tp},
               {"ep_rank", rank / tp},
               {"weight_bytes", planned.plan.WeightBytes(static_cast<int>(rank))},
               {"slab_bytes", memory.slab_bytes},
               {"descriptor_bytes", memory.descriptor_bytes},
               {"workspace_bytes", memory.workspace_bytes},
               {"staging_peak_bytes", memory.staging_peak_bytes},
               {"peak_bytes", memory.peak_bytes()}};
  if (planned.memory_bytes) json["max_tokens"] = *memory.max_tokens;
  return json;
}

template <typename Split>
Json HeadsJson(const Split& split) {
  Json valid = Json::array();
  for (int rank = 0; rank < split.tp; ++rank) valid.push_back(split.ValidHeads(rank));
  return {{"local", split.local_heads}, {"valid", std::move(valid)}};
}

Json HeadsJson(const HeadSplit& split) {
  Json json = {{"heads", split.heads}, {"padded", split.padded_heads}};
  json.update(HeadsJson<HeadSplit>(split));
  return json;
}

Json KvJson(const DensePlan& plan) {
  if (plan.kv_heads) {
    Json json = {{"heads", plan.kv_heads->kv_heads}, {"replicas", plan.kv_heads->replicas}};
    json.update(HeadsJson<KvSplit>(*plan.kv_heads));
    return json;
  }
  if (!plan.kv_refusal) return nullptr;
  return {{"refused", plan.kv_refusal->message()}, {"legal_tp", plan.kv_legal_tp}};
}

Json WidthJson(const WidthSplit& split) {
  Json valid = Json::array();
  for (int rank = 0; rank < split.tp; ++rank) valid.push_back(split.ValidChannels(rank));
  return {{"channels", split.width},
          {"local", split.local},
          {"alignment", split.alignment},
          {"valid", std::move(valid)}};
}

// The rest of the model; null for what the config does not name.
Json DenseJson(const DensePlan& plan) {
  return {{"heads", plan.heads ? HeadsJson(*plan.heads) : Json()},
          {"kv_heads", KvJson(plan)},
          {"linear_heads", plan.linear_heads ? HeadsJson(*plan.linear_heads) : Json()},
          {"dense_mlp", plan.dense ? WidthJson(*plan.dense) : Json()},
          {"shared_experts", plan.shared ? WidthJson(*plan.shared) : Json()}};
}

struct Balance {
  uint64_t least_bytes = 0, most_bytes = 0;
  double most_to_mean = 1;
};

Balance BalanceOf(const ExtentPlan& plan) {
  Balance balance{.least_bytes = ~uint64_t{0}};
  double sum = 0;
  for (int rank = 0; rank < plan.world(); ++rank) {
    const uint64_t bytes = plan.WeightBytes(rank);
    balance.least_bytes = std::min(balance.least_bytes, bytes);
    balance.most_bytes = std::max(balance.most_bytes, bytes);
    sum += static_cast<double>(bytes);
  }
  if (sum > 0) balance.most_to_mean = static_cast<double>(balance.most_bytes) * plan.world() / sum;
  return balance;
}

// Over all ranks; empty without --memory.
std::optional<uint64_t> MostTokens(const Planned& planned) {
  if (!planned.memory_bytes) return std::nullopt;
  uint64_t tokens = kMaxPlanTokens;
  for (const RankMemory& memory : planned.memory) tokens = std::min(tokens, *memory.max_tokens);
  return tokens;
}

Json Document(const Planned& planned) {
  const Balance balance = BalanceOf(planned.plan);
  Json json = {{"schema", "espalier.plan/1"},  {"layout", planned.layout},
               {"tp", planned.plan.tp()},      {"ep", planned.plan.ep()},
               {"legal_tp", planned.legal_tp}, {"max_tokens", planned.max_tokens},
               {"top_k", planned.top_k},       {"executor", "cpu"}};
  Json layers = Json::array();
  for (const LayerExtents& layer : planned.plan.layers())
    layers.push_back(LayerJson(planned.checkpoint, layer));
  json["layers"] = std::move(layers);
  json["expert_ranks"] = ExpertsJson(planned.plan);
  Json ranks = Json::array();
  for (size_t rank = 0; rank < planned.memory.size(); ++rank) ranks.push_back(RankJson(planned, rank));
  json["ranks"] = std::move(ranks);
  json["dense"] = DenseJson(planned.dense);
  json["balance"] = {{"least_bytes", balance.least_bytes},
                     {"most_bytes", balance.most_bytes},
                     {"most_to_mean", balance.most_to_mean}};
  if (const auto tokens = MostTokens(planned)) {
    json["memory"] = {{"bytes", *planned.memory_bytes},
                      {"largest_max_tokens", *tokens},
                      {"fits", *tokens >= planned.max_tokens}};
  }
  return json;
}

// "640 640 512 512", the ranks in order; many equal ones as "128 x 16".
std::string WidthsText(const LayerExtents& layer) {
  std::string text;
  for (size_t rank = 0; rank < layer.ranks.size();) {
    size_t end = rank + 1;
    while (end < layer.ranks.size() && layer.ranks[end].channels == layer.ranks[rank].channels) ++end;
    text += fmt::format("{}{}", text.empty() ? "" : ", ", layer.ranks[rank].channels);
    if (end - rank > 1) text += fmt::format(" x {}", end - rank);
    rank = end;
  }
  return text;
}

void PrintLayers(const Planned& planned, Output& output) {
  output.Print("\nchannels by tp rank\n");
  const std::span<const LayerExtents> layers = planned.plan.layers();
  for (size_t i = 0; i < layers.size() && i < kMaxLayerLines; ++i) {
    output.Print("  layer {:<6} {}\n", planned.checkpoint.layers()[layers[i].layer].label,
                 WidthsText(layers[i]));
  }
  if (layers.size() > kMaxLayerLines)
    output.Print("  ... and {} more layers; --json lists all\n", layers.size() - kMaxLayerLines);
}

// "valid" of the last rank that has any, where it has less than the others.
template <typename Count>
std::string TailText(int tp, uint64_t local, const Count& valid) {
  int short_rank = -1;
  for (int rank = 0; rank < tp && short_rank < 0; ++rank) {
    if (valid(rank) < local) short_rank = rank;
  }
  if (short_rank < 0) return "";
  return fmt::format(", {} real on rank {}{}", valid(short_rank), short_rank,
                     short_rank + 1 < tp ? ", none behind it" : "");
}

void PrintHeads(std::string_view name, const std::optional<HeadSplit>& split, Output& output) {
  if (!split) return;
  output.Print("  {:<16} {} a rank, {} padded to {}{}\n", name, split->local_heads, split->heads,
               split->padded_heads,
               TailText(split->tp, split->local_heads, [&](int rank) { return split->ValidHeads(rank); }));
}

void PrintWidth(std::string_view name, const std::optional<WidthSplit>& split, Output& output) {
  if (!split) return;
  output.Print("  {:<16} {} a rank of {}{}\n", name, split->local, split->width,
               TailText(split->tp, split->local, [&](int rank) { return split->ValidChannels(rank); }));
}

void PrintDense(const DensePlan& plan, Output& output) {
  if (!plan.heads && !plan.linear_heads && !plan.dense && !plan.shared) return;
  output.Print("\nthe rest of the model\n");
  PrintHeads("heads", plan.heads, output);
  if (plan.kv_heads) {
    output.Print(
        "  {:<16} {} a rank of {}{}\n", "k/v heads", plan.kv_heads->local_heads, plan.kv_heads->kv_heads,
        plan.kv_heads->replicas > 1 ? fmt::format(", each on {} ranks", plan.kv_heads->replicas) : "");
  } else if (plan.kv_refusal) {
    output.Print("  {:<16} cannot be split: {}\n", "k/v heads", plan.kv_refusal->message());
  }
  PrintHeads("linear heads", plan.linear_heads, output);
  PrintWidth("dense mlp", plan.dense, output);
  PrintWidth("shared experts", plan.shared, output);
}

void PrintRanks(const Planned& planned, Output& output) {
  output.Print("\n{:>6} {:>12} {:>12} {:>12} {:>12} {:>12}{}\n", "rank", "weights", "slabs", "workspace",
               "staging", "peak", planned.memory_bytes ? "   max tokens" : "");
  for (size_t rank = 0; rank < planned.memory.size() && rank < kMaxRankLines; ++rank) {
    const RankMemory& memory = planned.memory[rank];
    output.Print("{:>6} {:>12} {:>12} {:>12} {:>12} {:>12}{}\n", rank,
                 BytesText(planned.plan.WeightBytes(static_cast<int>(rank))), BytesText(memory.slab_bytes),
                 BytesText(memory.workspace_bytes), BytesText(memory.staging_peak_bytes),
                 BytesText(memory.peak_bytes()),
                 memory.max_tokens ? fmt::format(" {:>12}", *memory.max_tokens) : "");
  }
  if (planned.memory.size() > kMaxRankLines)
    output.Print("  ... and {} more ranks; --json lists all\n", planned.memory.size() - kMaxRankLines);
}

void Print(const Planned& planned, const std::string& name, Output& output) {
  const Balance balance = BalanceOf(planned.plan);
  output.Print("{} ({}): tp {}, ep {}\n", name,
               planned.layout == "geometry" ? "one layer of it" : planned.layout, planned.plan.tp(),
               planned.plan.ep());
  output.Print("legal tp: {}\n", fmt::join(planned.legal_tp, ", "));
  PrintLayers(planned, output);
  if (planned.plan.ep() > 1 && !planned.plan.layers().empty()) {
    output.Print("\nexperts by ep rank\n");
    for (int ep = 0; ep < planned.plan.ep() && ep < static_cast<int>(kMaxRankLines); ++ep) {
      const ExpertRange range = planned.plan.Experts(0, ep);
      output.Print("  ep rank {:<4} {} experts from {}\n", ep, range.experts, range.first_expert);
    }
  }
  PrintDense(planned.dense, output);
  PrintRanks(planned, output);
  output.Print("\nweights: {} to {} a rank, the largest {:.3f} of the mean\n", BytesText(balance.least_bytes),
               BytesText(balance.most_bytes), balance.most_to_mean);
  output.Print("workspace for {} tokens, top-{}, on the cpu executor\n", planned.max_tokens, planned.top_k);
  if (const auto tokens = MostTokens(planned)) {
    output.Print("within {}: up to {} tokens{}{}\n", BytesText(*planned.memory_bytes), *tokens,
                 *tokens == kMaxPlanTokens ? ", the most that any plan takes" : "",
                 *tokens < planned.max_tokens ? ", fewer than asked for" : "");
  }
}

// Of the sizes at which every rank owns something, those at which all own the same.
std::vector<int> EqualSizes(const Checkpoint& checkpoint, const std::vector<int>& sizes) {
  std::vector<int> equal;
  for (const int tp : sizes) {
    if (ExtentPlan::Create(checkpoint, {.tp = tp, .ep = 1, .equal = true})) equal.push_back(tp);
  }
  return equal;
}

Result<int> Run(const PlanOptions& options, Output& output) {
  Result<Request> request = ParseRequest(options);
  if (!request) return tl::unexpected(request.error());
  const Result<Checkpoint> checkpoint = OpenSource(options, *request);
  if (!checkpoint) return tl::unexpected(checkpoint.error());
  const std::vector<int> legal_tp = checkpoint->LegalTpSizes();
  output.SetLegalTp(legal_tp);
  if (Result<void> ranks = ParseRanks(options, *request); !ranks) return tl::unexpected(ranks.error());
  const Result<ExtentPlan> plan = ExtentPlan::Create(*checkpoint, request->extents);
  if (!plan) {
    if (options.equal) output.SetLegalTp(EqualSizes(*checkpoint, legal_tp));
    return tl::unexpected(plan.error());
  }
  Result<DensePlan> dense = PlanDense(checkpoint->config(), request->extents.tp, request->alignment);
  if (!dense) return tl::unexpected(dense.error());
  output.SetLegalTp({});
  if (auto usable = checkpoint->CheckUsable(""); !usable)
    output.Note(fmt::format("a problem: {}", usable.error().message()));
  if (!options.svg.empty()) {
    if (auto other = CheckOutputPath("--svg", options.svg, *checkpoint); !other)
      return tl::unexpected(other.error());
  }
  const uint32_t top_k = ChooseTopK(*checkpoint, *request, output);
  auto memory =
      Preflight(*checkpoint, *plan,
                {.max_tokens = request->max_tokens, .top_k = top_k, .memory_bytes = request->memory_bytes});
  if (!memory) return tl::unexpected(memory.error());
  const Planned planned{
      .checkpoint = *checkpoint,
      .plan = *plan,
      .dense = *std::move(dense),
      .legal_tp = legal_tp,
      .memory = *std::move(memory),
      .max_tokens = request->max_tokens,
      .top_k = top_k,
      .memory_bytes = request->memory_bytes,
      .layout = options.geometry.empty() ? std::string(checkpoint->layout_name()) : "geometry"};
  if (Result<void> fits = CheckMemory(planned); !fits) return tl::unexpected(fits.error());
  const std::string& name = options.geometry.empty() ? options.checkpoint : options.geometry;
  if (!options.svg.empty()) {
    if (auto written = WriteText(options.svg, PlanSvg(name, *checkpoint, *plan, planned.memory)); !written)
      return tl::unexpected(written.error());
  }
  Print(planned, name, output);
  if (!options.svg.empty()) output.Print("wrote {}\n", options.svg);
  output.Document(Document(planned));
  return kExitOk;
}

}  // namespace

void AddPlan(CLI::App& app, Invocation& invocation) {
  auto options = std::make_shared<PlanOptions>();
  CLI::App* command = AddCommand(
      app, invocation, "plan", "Show who owns what at a number of ranks, and what it takes",
      "Reads headers only. Global rank = ep_rank * tp + tp_rank. Workspace and staging are those of the cpu\n"
      "executor on this machine.\n"
      "\n"
      "Example:\n"
      "  espalier plan /models/glm --tp 6 --svg plan.svg\n"
      "  espalier plan --geometry kimi-k3-tp8 --bits 3 --tp 8 --memory 80GiB\n");
  command->add_option("CKPT", options->checkpoint, "Checkpoint: a directory or one .safetensors file");
  std::string names;
  for (const Geometry& geometry : Geometries())
    names += fmt::format("{}{}", names.empty() ? "" : ", ", geometry.name);
  command->add_option("--geometry", options->geometry, "Instead of a checkpoint, one layer of: " + names);
  command->add_option("--bits", options->bits, "Bits a weight, with --geometry")->capture_default_str();
  command->add_option("--tp", options->tp, "Tensor-parallel ranks")->required();
  command->add_option("--ep", options->ep, "Expert-parallel ranks")->capture_default_str();
  command->add_flag("--equal", options->equal, "Refuse unless every rank owns the same number of channels");
  command->add_option("--align", options->align, "Multiple that widths of dense layers are padded to")
      ->capture_default_str();
  command->add_option("--max-tokens", options->max_tokens, "Tokens of one run")->capture_default_str();
  command->add_option("--top-k", options->top_k, "Experts a token; the config's by default");
  command->add_option("--memory", options->memory, "Bytes a rank has: find the most tokens that fit");
  command->add_option("--svg", options->svg, "File to draw the plan into");
  command->callback([options, &invocation] {
    invocation.run = [options](Output& output) { return Run(*options, output); };
  });
}

}  // namespace espalier::cli
