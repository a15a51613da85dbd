// SPDX-License-Identifier: Apache-2.0
#include "moe_run.h"

#include <espalier/backend.h>
#include <fmt/format.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include "base/file.h"
#include "base/half.h"
#include "base/sha256.h"
#include "checkpoint/safetensors.h"
#include "device_run.h"
#include "random.h"

namespace espalier::cli {
namespace {

std::string TensorText(const TensorInfo& tensor) {
  return fmt::format("{} [{}]", DtypeName(tensor.dtype), fmt::join(tensor.shape, ", "));
}

// One input tensor with one of the `legal` dtypes and two dimensions.
Result<const TensorInfo*> FindInput(const std::string& path, const SafetensorsHeader& header,
                                    std::string_view name, std::string_view shape,
                                    std::initializer_list<Dtype> legal) {
  std::string legal_text;
  for (const Dtype dtype : legal) {
    legal_text += (legal_text.empty() ? "" : ", ") + std::string(DtypeName(dtype));
  }
  for (const TensorInfo& tensor : header.tensors) {
    if (tensor.name != name) continue;
    for (const Dtype dtype : legal) {
      if (tensor.dtype == dtype && tensor.shape.size() == 2) return &tensor;
    }
    return Error(StatusCode::kGeometry, fmt::format("{}: tensor '{}' is {}; legal: {} of {}", path, name,
                                                    TensorText(tensor), shape, legal_text));
  }
  return Error(StatusCode::kGeometry,
               fmt::format("{}: tensor '{}' is missing; legal: {} of {}", path, name, shape, legal_text));
}

Result<HostBuffer> ReadTensor(const File& file, const TensorInfo& tensor) {
  Result<HostBuffer> buffer = HostBuffer::Create(tensor.size_bytes);
  if (!buffer) return buffer;
  if (Result<void> read = file.ReadAt(tensor.offset_bytes, buffer->span()); !read) {
    return tl::unexpected(read.error());
  }
  return buffer;
}

std::vector<float> ToFloats(const HostBuffer& buffer, Dtype dtype, uint64_t count) {
  std::vector<float> floats(count);
  if (dtype == Dtype::kF32) {
    if (count > 0) std::memcpy(floats.data(), buffer.data(), count * sizeof(float));
    return floats;
  }
  for (uint64_t i = 0; i < count; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, buffer.data() + i * sizeof(bits), sizeof(bits));
    floats[i] = dtype == Dtype::kF16 ? Fp16ToFloat(bits) : Bf16ToFloat(bits);
  }
  return floats;
}

Result<void> CheckInputShapes(const std::string& path, const TensorInfo& x, const TensorInfo& ids,
                              const TensorInfo& weights, uint64_t hidden_channels) {
  if (x.shape[1] != hidden_channels) {
    return Error(StatusCode::kGeometry,
                 fmt::format("{}: x is {}; legal: [tokens, {}], the hidden size of the layer", path,
                             TensorText(x), hidden_channels));
  }
  if (ids.shape[0] != x.shape[0]) {
    return Error(StatusCode::kGeometry,
                 fmt::format("{}: topk_ids is {}; legal: [{}, top_k], as x has {} rows", path,
                             TensorText(ids), x.shape[0], x.shape[0]));
  }
  if (weights.shape != ids.shape) {
    return Error(StatusCode::kGeometry,
                 fmt::format("{}: topk_weights is {}; legal: [{}], the shape of topk_ids", path,
                             TensorText(weights), fmt::join(ids.shape, ", ")));
  }
  if (ids.shape[1] < 1 || ids.shape[1] > kMaxTopK) {
    return Error(StatusCode::kGeometry,
                 fmt::format("{}: topk_ids is {}; legal: 1 to {} columns", path, TensorText(ids), kMaxTopK));
  }
  if (x.shape[0] > kMaxPlanTokens) {
    return Error(StatusCode::kCapacity,
                 fmt::format("{}: x has {} rows; legal: 0 to {}", path, x.shape[0], kMaxPlanTokens));
  }
  return {};
}

// top_k distinct experts: the head of a shuffle, redone for every token.
void DrawExperts(Random& random, uint32_t top_k, std::vector<uint32_t>& deck, int32_t* ids) {
  for (uint32_t j = 0; j < top_k; ++j) {
    const uint32_t pick = j + random.Below(static_cast<uint32_t>(deck.size()) - j);
    std::swap(deck[j], deck[pick]);
    ids[j] = static_cast<int32_t>(deck[j]);
  }
}

void DrawWeights(Random& random, uint32_t top_k, float* weights) {
  std::vector<double> drawn(top_k);
  for (double& weight : drawn) weight = 0.05 + random.Uniform();
  const double sum = std::accumulate(drawn.begin(), drawn.end(), 0.0);
  for (uint32_t j = 0; j < top_k; ++j) weights[j] = static_cast<float>(drawn[j] / sum);
}

}  // namespace

Result<MoeInput> ReadMoeInput(const std::string& path, uint64_t hidden_channels) {
  const Result<std::unique_ptr<File>> file = PosixFileSystem().Open(path);
  if (!file) return tl::unexpected(file.error());
  const Result<SafetensorsHeader> header = ReadSafetensorsHeader(**file);
  if (!header) return tl::unexpected(header.error());
  const auto x = FindInput(path, *header, "x", "[tokens, hidden]", {Dtype::kF32, Dtype::kF16, Dtype::kBF16});
  if (!x) return tl::unexpected(x.error());
  const auto ids = FindInput(path, *header, "topk_ids", "[tokens, top_k]", {Dtype::kI32, Dtype::kI64});
  if (!ids) return tl::unexpected(ids.error());
  const auto weights =
      FindInput(path, *header, "topk_weights", "[tokens, top_k]", {Dtype::kF32, Dtype::kF16, Dtype::kBF16});
  if (!weights) return tl::unexpected(weights.error());
  if (auto shapes = CheckInputShapes(path, **x, **ids, **weights, hidden_channels); !shapes) {
    return tl::unexpected(shapes.error());
  }
  MoeInput input;
  input.tokens = (*x)->shape[0];
  input.top_k = static_cast<uint32_t>((*ids)->shape[1]);
  input.dtype = (*x)->dtype;
  input.id_type = (*ids)->dtype == Dtype::kI32 ? IdType::kInt32 : IdType::kInt64;
  Result<HostBuffer> x_bytes = ReadTensor(**file, **x);
  if (!x_bytes) return tl::unexpected(x_bytes.error());
  Result<HostBuffer> id_bytes = ReadTensor(**file, **ids);
  if (!id_bytes) return tl::unexpected(id_bytes.error());
  const Result<HostBuffer> weight_bytes = ReadTensor(**file, **weights);
  if (!weight_bytes) return tl::unexpected(weight_bytes.error());
  input.x = *std::move(x_bytes);
  input.topk_ids = *std::move(id_bytes);
  input.weights = ToFloats(*weight_bytes, (*weights)->dtype, input.tokens * input.top_k);
  return input;
}

Result<MoeInput> RandomMoeInput(const RandomInputSize& size, uint64_t seed) {
  MoeInput input;
  input.tokens = size.tokens;
  input.top_k = size.top_k;
  const uint64_t x_count = size.tokens * size.hidden_channels;
  const uint64_t route_count = size.tokens * size.top_k;
  Result<HostBuffer> x = HostBuffer::Create(x_count * sizeof(float));
  if (!x) return tl::unexpected(x.error());
  Result<HostBuffer> ids = HostBuffer::Create(route_count * sizeof(int32_t));
  if (!ids) return tl::unexpected(ids.error());
  input.x = *std::move(x);
  input.topk_ids = *std::move(ids);
  input.weights.resize(route_count);

  Random random(seed);
  auto* x_values = reinterpret_cast<float*>(input.x.data());
  for (uint64_t i = 0; i < x_count; ++i) x_values[i] = static_cast<float>(random.Normal());
  auto* id_values = reinterpret_cast<int32_t*>(input.topk_ids.data());
  std::vector<uint32_t> deck(size.experts);
  std::iota(deck.begin(), deck.end(), 0u);
  for (uint64_t token = 0; token < size.tokens; ++token) {
    DrawExperts(random, size.top_k, deck, id_values + token * size.top_k);
    DrawWeights(random, size.top_k, input.weights.data() + token * size.top_k);
  }
  return input;
}

namespace {

struct RunTarget {
  Dtype output = Dtype::kF32;
  std::span<const int32_t> expert_map;
  bool accumulate = false;
  std::optional<RankPlan> place;  // of this process
};

// Runs `args`, whose arrays are on the host, where the plan's package is. Gives the seconds of the run.
Result<double> RunWhereItIs(const MoePlan& plan, const PreparedExperts& experts, MoeArgs args) {
  const auto seconds_since = [](std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  if (plan.options().device.is_host()) {
    Result<HostBuffer> workspace = HostBuffer::Create(plan.workspace_bytes());
    if (!workspace) return tl::unexpected(workspace.error());
    args.workspace = workspace->data();
    args.workspace_bytes = workspace->size_bytes();
    const auto start = std::chrono::steady_clock::now();
    if (auto run = RunMoe(plan, experts, args); !run) return tl::unexpected(run.error());
    return seconds_since(start);
  }
  const Result<DeviceMoeCall> call = DeviceMoeCall::Create(plan, args);
  if (!call) return tl::unexpected(call.error());
  const auto start = std::chrono::steady_clock::now();
  if (auto run = call->Run(plan, experts); !run) return tl::unexpected(run.error());
  if (auto done = call->stream().Synchronize(); !done) return tl::unexpected(done.error());
  const double seconds = seconds_since(start);
  if (auto copied = call->Finish(args.y); !copied) return tl::unexpected(copied.error());
  return seconds;
}

// One run into result.y, which is large enough. Sets the executor, adds the time.
Result<void> RunInto(const PreparedExperts& experts, const MoeInput& input, const std::string& executor,
                     CpuMode mode, const RunTarget& target, MoeOutput& result) {
  MoePlanOptions options;
  options.max_tokens = input.tokens;
  options.top_k = input.top_k;
  options.id_type = input.id_type;
  options.input = input.dtype;
  options.output = target.output;
  options.device = experts.device();
  options.checked_ids = options.device.is_host();  // for a GPU, before they go there
  options.executor = executor;
  options.mode = mode;
  options.place = target.place;
  const Result<MoePlan> plan = MoePlan::Create(experts, options);
  if (!plan) return tl::unexpected(plan.error());
  const uint64_t hidden = experts.geometry().hidden_channels;

  MoeArgs args;
  args.num_tokens = input.tokens;
  args.x = input.x.data();
  args.x_row_stride = hidden;
  args.topk_ids = input.topk_ids.data();
  args.topk_ids_row_stride = input.top_k;
  args.topk_weights = input.weights.data();
  args.topk_weights_row_stride = input.top_k;
  args.expert_map = target.expert_map.empty() ? nullptr : target.expert_map.data();
  args.expert_map_size = static_cast<uint32_t>(target.expert_map.size());
  args.y = result.y.data();
  args.y_row_stride = hidden;
  args.accumulate = target.accumulate;
  const Result<double> seconds = RunWhereItIs(*plan, experts, args);
  if (!seconds) return tl::unexpected(seconds.error());
  result.seconds += *seconds;
  result.executor = std::string(plan->backend().name());
  if (result.executor == "cpu") result.kernels = std::string(CpuKernelsName().value_or(""));
  return {};
}

}  // namespace

std::string HashOf(const MoeInput& input) {
  Sha256 hash;
  const uint64_t sizes[] = {input.tokens, input.top_k, static_cast<uint64_t>(input.dtype),
                            static_cast<uint64_t>(input.id_type)};
  hash.Update(std::as_bytes(std::span(sizes)));
  hash.Update(input.x.span());
  hash.Update(input.topk_ids.span());
  hash.Update(std::as_bytes(std::span(input.weights)));
  return hash.FinishHex();
}

Result<MoeOutput> RunLayer(const PreparedExperts& experts, const MoeInput& input, const std::string& executor,
                           CpuMode mode, Dtype output) {
  const uint64_t hidden = experts.geometry().hidden_channels;
  const auto element_bytes = static_cast<uint64_t>(DtypeBits(output) / 8);
  Result<HostBuffer> y = HostBuffer::Create(input.tokens * hidden * element_bytes);
  if (!y) return tl::unexpected(y.error());
  MoeOutput result{.y = *std::move(y), .seconds = 0, .executor = {}, .kernels = {}};
  const RunTarget target{.output = output, .expert_map = {}, .accumulate = false, .place = {}};
  if (Result<void> run = RunInto(experts, input, executor, mode, target, result); !run) {
    return tl::unexpected(run.error());
  }
  return result;
}

Result<void> AddLayer(const PreparedExperts& experts, const MoeInput& input, const std::string& executor,
                      CpuMode mode, std::span<const int32_t> expert_map, const RankPlan& place,
                      MoeOutput& sum) {
  return RunInto(experts, input, executor, mode,
                 {.output = Dtype::kF32, .expert_map = expert_map, .accumulate = true, .place = place}, sum);
}

}  // namespace espalier::cli
