// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numeric>

#include "tiny_lm.h"

namespace tiny_lm {
namespace {

float Dot(const float* a, const float* b, size_t size) { return std::transform_reduce(a, a + size, b, 0.0f); }

// Every row of weight.size() numbers becomes x / rms(x) * weight.
void Normalize(std::span<float> x, const std::vector<float>& weight, float eps) {
  const size_t size = weight.size();
  for (float* row = x.data(); row != x.data() + x.size(); row += size) {
    const float scale = 1 / std::sqrt(Dot(row, row, size) / static_cast<float>(size) + eps);
    for (size_t i = 0; i < size; ++i) row[i] *= scale * weight[i];
  }
}

// In place; returns the sum of the exponentials, by which the caller divides.
float ExpMinusMax(std::vector<float>& x) {
  const float max = *std::max_element(x.begin(), x.end());
  float sum = 0;
  for (float& value : x) sum += value = std::exp(value - max);
  return sum;
}

Config ParseConfig(const json& root) {
  // What this example computes; any other value needs other code.
  Require(root, R"({"/model_type": "qwen3_moe", "/hidden_act": "silu", "/attention_bias": false,
                    "/norm_topk_prob": true, "/decoder_sparse_step": 1, "/mlp_only_layers": [],
                    "/tie_word_embeddings": false, "/use_sliding_window": false, "/rope_scaling": null})"_json);
  const auto size = [&root](const char* key) { return WholeNumber(key, root.at(key), 1); };
  const Config config = {.hidden = size("hidden_size"),
                         .layers = size("num_hidden_layers"),
                         .heads = size("num_attention_heads"),
                         .kv_heads = size("num_key_value_heads"),
                         .head_dim = size("head_dim"),
                         .vocab = size("vocab_size"),
                         .experts = size("num_experts"),
                         .top_k = size("num_experts_per_tok"),
                         .max_positions = size("max_position_embeddings"),
                         .norm_eps = root.at("rms_norm_eps"),
                         .rope_theta = root.at("rope_theta"),
                         .eos_token = root.at("eos_token_id")};
  if (config.heads % config.kv_heads != 0 || config.head_dim % 2 != 0 || config.top_k > config.experts ||
      config.norm_eps <= 0 || config.rope_theta <= 0) {
    Fail(kFormat, "num_attention_heads must be a multiple of num_key_value_heads, head_dim even, ",
         "num_experts_per_tok at most num_experts, rms_norm_eps and rope_theta positive");
  }
  return config;
}

// Reads weights and makes their plans; refuses sizes other than config.json's.
struct Loader {
  espalier::Checkpoint checkpoint;
  const Config& config;
  std::string executor;
  espalier::CpuMode mode;
  size_t context_tokens;
  uint64_t workspace_bytes = 0;  // enough for every plan so far

  void CheckSize(const std::string& name, const json& found, const json& wanted) const {
    if (found == wanted) return;
    Fail(kFormat, checkpoint.path().string(), ": ", name, " is ", found, ", config.json asks for ", wanted);
  }

  // A plain tensor as fp32.
  std::vector<float> LoadPlain(const std::string& name, const std::vector<uint64_t>& shape) const {
    const espalier::TensorInfo* info = checkpoint.FindTensor(name);
    CheckSize(name, info == nullptr ? json() : json(info->shape), shape);
    return checkpoint.ReadFloats(name).value();
  }

  Linear LoadLinear(const std::string& name, size_t in, size_t out) {
    auto weights = espalier::LoadLinear(checkpoint, name).value();
    CheckSize(name, {weights.in_channels(), weights.out_channels()}, {in, out});
    auto plan = espalier::LinearPlan::Create(weights, {.max_tokens = context_tokens, .executor = executor, .mode = mode});
    workspace_bytes = std::max(workspace_bytes, plan.value().workspace_bytes());
    return {std::move(weights), std::move(plan).value()};
  }

  Experts LoadExperts(const std::string& layer) {
    auto weights = espalier::LoadExperts(checkpoint, checkpoint.FindLayer(layer).value()).value();
    const auto& geometry = weights.geometry();
    CheckSize("[experts, hidden] of layer " + layer, {geometry.experts, geometry.hidden_channels},
              {config.experts, config.hidden});
    const auto top_k = static_cast<uint32_t>(config.top_k);
    auto plan = espalier::MoePlan::Create(
        weights, {.max_tokens = context_tokens, .top_k = top_k, .executor = executor, .mode = mode});
    workspace_bytes = std::max(workspace_bytes, plan.value().workspace_bytes());
    return {std::move(weights), std::move(plan).value()};
  }

  Layer LoadLayer(const std::string& number) {
    const std::string prefix = "model.layers." + number + ".", attention = prefix + "self_attn.";
    const size_t q_size = config.heads * config.head_dim, kv_size = config.kv_heads * config.head_dim;
    return {.experts = LoadExperts(number),
            .q = LoadLinear(attention + "q_proj", config.hidden, q_size),
            .k = LoadLinear(attention + "k_proj", config.hidden, kv_size),
            .v = LoadLinear(attention + "v_proj", config.hidden, kv_size),
            .o = LoadLinear(attention + "o_proj", q_size, config.hidden),
            .attention_norm = LoadPlain(prefix + "input_layernorm.weight", {config.hidden}),
            .experts_norm = LoadPlain(prefix + "post_attention_layernorm.weight", {config.hidden}),
            .q_norm = LoadPlain(attention + "q_norm.weight", {config.head_dim}),
            .k_norm = LoadPlain(attention + "k_norm.weight", {config.head_dim}),
            .router = LoadPlain(prefix + "mlp.gate.weight", {config.experts, config.hidden}),
            .k_cache = std::vector<float>(context_tokens * kv_size),
            .v_cache = std::vector<float>(context_tokens * kv_size)};
  }
};

}  // namespace

Model::Model(const std::filesystem::path& directory, const std::string& executor,
             espalier::CpuMode mode, size_t context_tokens)
    : context_tokens_(context_tokens) {
  // Opening reads headers only: what is wrong with the files is said before any weight is read.
  Loader loader{espalier::Checkpoint::Open(directory).value(), config_, executor, mode, context_tokens};
  ReadJson(directory / "config.json", [this](const json& root) { config_ = ParseConfig(root); });
  if (context_tokens == 0 || context_tokens > config_.max_positions) {
    Fail(kCapacity, "a context of ", context_tokens, ", legal: 1 to ", config_.max_positions, " tokens");
  }
  embedding_ = loader.LoadPlain("model.embed_tokens.weight", {config_.vocab, config_.hidden});
  final_norm_ = loader.LoadPlain("model.norm.weight", {config_.hidden});
  head_ = loader.LoadLinear("lm_head", config_.hidden, config_.vocab);
  for (size_t i = 0; i < config_.layers; ++i) layers_.push_back(loader.LoadLayer(std::to_string(i)));
  workspace_ = espalier::HostBuffer::Create(loader.workspace_bytes).value();
}

std::vector<float> Model::Forward(std::span<const int32_t> tokens) {
  if (tokens.size() > context_tokens_ - position_) {
    Fail(kCapacity, "the context holds ", context_tokens_, " tokens, asked for ", position_ + tokens.size());
  }
  std::vector<float> stream(tokens.size() * config_.hidden);
  for (size_t t = 0; t < tokens.size(); ++t) {
    const auto id = static_cast<size_t>(tokens[t]);  // a negative one becomes huge
    if (id >= config_.vocab) Fail(kUsage, "token id ", tokens[t], " is outside the vocabulary");
    std::copy_n(&embedding_[id * config_.hidden], config_.hidden, &stream[t * config_.hidden]);
  }
  for (Layer& layer : layers_) {
    AddAttention(layer, stream);
    AddExperts(layer, stream);
  }
  Normalize(stream, final_norm_, config_.norm_eps);
  std::vector<float> logits(tokens.size() * config_.vocab);
  Project(*head_, stream, logits.data());
  position_ += tokens.size();
  return logits;
}

// One EXL3 matrix: the caller owns input, output and workspace, and says where rows begin.
void Model::Project(const Linear& linear, const std::vector<float>& x, float* y, bool accumulate) {
  const size_t in = linear.weights.in_channels(), out = linear.weights.out_channels();
  const espalier::LinearArgs args = {.num_tokens = x.size() / in,
                                     .x = x.data(),
                                     .x_row_stride = in,
                                     .y = y,
                                     .y_row_stride = out,
                                     .accumulate = accumulate,
                                     .workspace = workspace_.data(),
                                     .workspace_bytes = workspace_.size_bytes()};
  const auto done = espalier::RunLinear(linear.plan, linear.weights, args);
  if (!done) throw Failure(done.error());
}

// stream += o_proj(attention(norm(stream))): causal, over the cache, into which new keys and values go
// straight. Consecutive query heads share a key-value head.
void Model::AddAttention(Layer& layer, std::vector<float>& stream) {
  const size_t dim = config_.head_dim, heads = config_.heads, kv_size = config_.kv_heads * dim;
  const size_t tokens = stream.size() / config_.hidden;
  std::vector<float> normed = stream, q(tokens * heads * dim), attended(q.size());
  Normalize(normed, layer.attention_norm, config_.norm_eps);
  const std::span<float> k(layer.k_cache.data() + position_ * kv_size, tokens * kv_size);
  Project(layer.q, normed, q.data());
  Project(layer.k, normed, k.data());
  Project(layer.v, normed, layer.v_cache.data() + position_ * kv_size);
  Normalize(q, layer.q_norm, config_.norm_eps);
  Normalize(k, layer.k_norm, config_.norm_eps);
  Rotate(q, heads);
  Rotate(k, config_.kv_heads);
  const float scale = 1 / std::sqrt(static_cast<float>(dim));
  for (size_t row = 0; row < tokens * heads; ++row) {
    const size_t kv_offset = row % heads / (heads / config_.kv_heads) * dim;
    std::vector<float> scores(position_ + row / heads + 1);
    for (size_t s = 0; s < scores.size(); ++s) {
      scores[s] = scale * Dot(&q[row * dim], &layer.k_cache[s * kv_size + kv_offset], dim);
    }
    const float sum = ExpMinusMax(scores);
    for (size_t s = 0; s < scores.size(); ++s) {
      const float weight = scores[s] / sum, *v = &layer.v_cache[s * kv_size + kv_offset];
      for (size_t i = 0; i < dim; ++i) attended[row * dim + i] += weight * v[i];
    }
  }
  Project(layer.o, attended, stream.data(), /*accumulate=*/true);
}

// Rotary positions: in every head of every token channel i turns with channel i + head_dim / 2.
void Model::Rotate(std::span<float> x, size_t num_heads) const {
  const size_t dim = config_.head_dim;
  for (size_t i = 0; i < dim / 2; ++i) {
    const double turn =
        std::pow(config_.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(dim));
    for (size_t row = 0; row < x.size() / dim; ++row) {
      const size_t position = position_ + row / num_heads;
      const double angle = static_cast<double>(position) * turn;
      const auto cos = static_cast<float>(std::cos(angle)), sin = static_cast<float>(std::sin(angle));
      float &a = x[row * dim + i], &b = x[row * dim + i + dim / 2];
      std::tie(a, b) = std::pair(a * cos - b * sin, b * cos + a * sin);
    }
  }
}

// stream += experts(norm(stream)). The router is the engine's business: softmax over all experts, the top k
// of them, renormalised. The library takes ids and final weights.
void Model::AddExperts(const Layer& layer, std::vector<float>& stream) {
  const size_t hidden = config_.hidden, top_k = config_.top_k, tokens = stream.size() / hidden;
  std::vector<float> normed = stream, scores(config_.experts), weights(tokens * top_k);
  std::vector<int32_t> ids(tokens * top_k);
  Normalize(normed, layer.experts_norm, config_.norm_eps);
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t e = 0; e < scores.size(); ++e) {
      scores[e] = Dot(&normed[t * hidden], &layer.router[e * hidden], hidden);
    }
    ExpMinusMax(scores);  // the sum over all of them cancels in the renormalisation
    float sum = 0;
    for (size_t j = t * top_k; j < (t + 1) * top_k; ++j) {
      const auto best = std::max_element(scores.begin(), scores.end());
      ids[j] = static_cast<int32_t>(best - scores.begin());
      sum += weights[j] = *best;
      *best = -1;
    }
    for (size_t j = t * top_k; j < (t + 1) * top_k; ++j) weights[j] /= sum;
  }
  const espalier::MoeArgs args = {.num_tokens = tokens,
                                  .x = normed.data(),
                                  .x_row_stride = hidden,
                                  .topk_ids = ids.data(),
                                  .topk_ids_row_stride = top_k,
                                  .topk_weights = weights.data(),
                                  .topk_weights_row_stride = top_k,
                                  .y = stream.data(),
                                  .y_row_stride = hidden,
                                  .accumulate = true,
                                  .workspace = workspace_.data(),
                                  .workspace_bytes = workspace_.size_bytes()};
  const auto done = espalier::RunMoe(layer.experts.plan, layer.experts.weights, args);
  if (!done) throw Failure(done.error());
}

}  // namespace tiny_lm
