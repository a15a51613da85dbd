// SPDX-License-Identifier: Apache-2.0
#include "model.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <utility>

#include "failure.h"

namespace tiny_lm {
namespace {

using espalier::Checkpoint;
using espalier::StatusCode;
using nlohmann::json;

// Eight partial sums: without them the compiler may not vectorise a sum of floats.
float Dot(const float* a, const float* b, size_t size) {
  float sums[8] = {};
  size_t i = 0;
  for (; i + 8 <= size; i += 8) {
    for (size_t lane = 0; lane < 8; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (; i < size; ++i) sums[0] += a[i] * b[i];
  return std::accumulate(std::begin(sums), std::end(sums), 0.0f);
}

// x and y may be the same row.
void RmsNorm(const float* x, const std::vector<float>& weight, float eps, float* y) {
  const size_t size = weight.size();
  const float scale = 1 / std::sqrt(Dot(x, x, size) / static_cast<float>(size) + eps);
  for (size_t i = 0; i < size; ++i) y[i] = x[i] * scale * weight[i];
}

// In place; returns the sum of the exponentials, by which the caller divides.
float ExpMinusMax(std::span<float> x) {
  const float max = *std::max_element(x.begin(), x.end());
  float sum = 0;
  for (float& value : x) sum += value = std::exp(value - max);
  return sum;
}

ModelShape ParseConfig(const json& config) {
  // What this example computes; any other value needs other code.
  const std::pair<const char*, json> wanted[] = {
      {"model_type", "qwen3_moe"},    {"hidden_act", "silu"},        {"attention_bias", false},
      {"norm_topk_prob", true},       {"decoder_sparse_step", 1},    {"mlp_only_layers", json::array()},
      {"tie_word_embeddings", false}, {"use_sliding_window", false}, {"rope_scaling", nullptr},
  };
  for (const auto& [key, value] : wanted) {
    const json found = config.value(key, json());
    if (found == value) continue;
    throw Failure(StatusCode::kUnsupported,
                  std::string(key) + " is " + found.dump() + ", this example knows " + value.dump());
  }
  ModelShape shape{};
  const std::pair<const char*, size_t*> sizes[] = {
      {"hidden_size", &shape.hidden},
      {"num_hidden_layers", &shape.layers},
      {"num_attention_heads", &shape.heads},
      {"num_key_value_heads", &shape.kv_heads},
      {"head_dim", &shape.head_dim},
      {"vocab_size", &shape.vocab},
      {"num_experts", &shape.experts},
      {"num_experts_per_tok", &shape.top_k},
      {"max_position_embeddings", &shape.max_positions},
  };
  for (const auto& [key, size] : sizes) {
    const json& found = config.at(key);
    if (!found.is_number_unsigned() || found == 0 || found > (1 << 20)) {
      throw Failure(StatusCode::kFormat, std::string(key) + " is " + found.dump() + ", legal: 1 to 1048576");
    }
    *size = found.get<size_t>();
  }
  shape.norm_eps = config.at("rms_norm_eps").get<float>();
  shape.rope_theta = config.at("rope_theta").get<double>();
  const json eos = config.value("eos_token_id", json());
  shape.eos_token = eos.is_number_unsigned() ? eos.get<int32_t>() : -1;
  if (shape.heads % shape.kv_heads != 0 || shape.head_dim % 2 != 0 || shape.top_k > shape.experts ||
      shape.norm_eps <= 0 || shape.rope_theta <= 0) {
    throw Failure(StatusCode::kFormat,
                  "num_attention_heads must be a multiple of num_key_value_heads, head_dim even, "
                  "num_experts_per_tok at most num_experts, rms_norm_eps and rope_theta positive");
  }
  return shape;
}

// Reads weights and makes their plans. Opening reads headers only: whatever is wrong with the files is said
// there, before any weight is read.
class Loader {
 public:
  Loader(const std::filesystem::path& directory, const ModelOptions& options)
      : options_(options),
        checkpoint_(Value(Checkpoint::Open(directory))),
        shape_(ReadJson(directory / "config.json", ParseConfig)) {
    if (options.context_tokens == 0 || options.context_tokens > shape_.max_positions) {
      throw Failure(StatusCode::kCapacity, "a context of " + std::to_string(options.context_tokens) +
                                               " tokens; the model takes 1 to " +
                                               std::to_string(shape_.max_positions));
    }
  }

  const ModelShape& shape() const { return shape_; }
  uint64_t workspace_bytes() const { return workspace_bytes_; }  // enough for every plan so far

  // A plain tensor as fp32.
  std::vector<float> LoadPlain(const std::string& name, const std::vector<uint64_t>& shape) const {
    const espalier::TensorInfo* info = checkpoint_.FindTensor(name);
    if (info != nullptr && info->shape == shape) return Value(checkpoint_.ReadFloats(name));
    throw Mismatch("tensor " + name, info == nullptr ? json("absent") : json(info->shape), shape);
  }

  Linear LoadLinear(const std::string& name, size_t in, size_t out) {
    espalier::PreparedLinear weights = Value(espalier::LoadLinear(checkpoint_, name));
    const json found = {weights.in_channels(), weights.out_channels()}, wanted = {in, out};
    if (found != wanted) throw Mismatch("matrix " + name, found, wanted);
    espalier::LinearPlanOptions plan_options;
    plan_options.max_tokens = options_.context_tokens;
    plan_options.executor = options_.executor;
    espalier::LinearPlan plan = Value(espalier::LinearPlan::Create(weights, plan_options));
    workspace_bytes_ = std::max(workspace_bytes_, plan.workspace_bytes());
    return {std::move(weights), std::move(plan)};
  }

  Experts LoadExperts(const std::string& layer) {
    espalier::PreparedExperts weights =
        Value(espalier::LoadExperts(checkpoint_, Value(checkpoint_.FindLayer(layer))));
    const json found = {weights.geometry().experts, weights.geometry().hidden_channels};
    const json wanted = {shape_.experts, shape_.hidden};
    if (found != wanted) throw Mismatch("[experts, hidden] of layer " + layer, found, wanted);
    espalier::MoePlanOptions plan_options;
    plan_options.max_tokens = options_.context_tokens;
    plan_options.top_k = static_cast<uint32_t>(shape_.top_k);
    plan_options.executor = options_.executor;
    espalier::MoePlan plan = Value(espalier::MoePlan::Create(weights, plan_options));
    workspace_bytes_ = std::max(workspace_bytes_, plan.workspace_bytes());
    return {std::move(weights), std::move(plan)};
  }

  Layer LoadLayer(size_t number) {
    const std::string prefix = "model.layers." + std::to_string(number) + ".";
    const std::string attention = prefix + "self_attn.";
    const size_t q_size = shape_.heads * shape_.head_dim, kv_size = shape_.kv_heads * shape_.head_dim;
    return {
        .experts = LoadExperts(std::to_string(number)),
        .q = LoadLinear(attention + "q_proj", shape_.hidden, q_size),
        .k = LoadLinear(attention + "k_proj", shape_.hidden, kv_size),
        .v = LoadLinear(attention + "v_proj", shape_.hidden, kv_size),
        .o = LoadLinear(attention + "o_proj", q_size, shape_.hidden),
        .attention_norm = LoadPlain(prefix + "input_layernorm.weight", {shape_.hidden}),
        .experts_norm = LoadPlain(prefix + "post_attention_layernorm.weight", {shape_.hidden}),
        .q_norm = LoadPlain(attention + "q_norm.weight", {shape_.head_dim}),
        .k_norm = LoadPlain(attention + "k_norm.weight", {shape_.head_dim}),
        .router = LoadPlain(prefix + "mlp.gate.weight", {shape_.experts, shape_.hidden}),
        .k_cache = std::vector<float>(options_.context_tokens * kv_size),
        .v_cache = std::vector<float>(options_.context_tokens * kv_size),
    };
  }

 private:
  Failure Mismatch(const std::string& what, const json& found, const json& wanted) const {
    return Failure(StatusCode::kFormat, checkpoint_.path().string() + ": " + what + ": found " +
                                            found.dump() + ", config.json asks for " + wanted.dump());
  }

  const ModelOptions& options_;
  Checkpoint checkpoint_;
  ModelShape shape_;
  uint64_t workspace_bytes_ = 0;
};

}  // namespace

Model::Model(const std::filesystem::path& directory, const ModelOptions& options) {
  Loader loader(directory, options);
  shape_ = loader.shape();
  context_tokens_ = options.context_tokens;
  embedding_ = loader.LoadPlain("model.embed_tokens.weight", {shape_.vocab, shape_.hidden});
  final_norm_ = loader.LoadPlain("model.norm.weight", {shape_.hidden});
  head_ = loader.LoadLinear("lm_head", shape_.hidden, shape_.vocab);
  for (size_t number = 0; number < shape_.layers; ++number) layers_.push_back(loader.LoadLayer(number));
  workspace_ = Value(espalier::HostBuffer::Create(loader.workspace_bytes()));

  const size_t half = shape_.head_dim / 2;
  for (size_t i = 0; i < context_tokens_ * half; ++i) {
    const double turns = -static_cast<double>(i % half) / static_cast<double>(half);
    const double angle = static_cast<double>(i / half) * std::pow(shape_.rope_theta, turns);
    rope_cos_.push_back(static_cast<float>(std::cos(angle)));
    rope_sin_.push_back(static_cast<float>(std::sin(angle)));
  }
  stream_.resize(context_tokens_ * shape_.hidden);
  normed_.resize(context_tokens_ * shape_.hidden);
  q_.resize(context_tokens_ * shape_.heads * shape_.head_dim);
  attended_.resize(q_.size());
  scores_.resize(std::max(context_tokens_, shape_.experts));
  route_ids_.resize(context_tokens_ * shape_.top_k);
  route_weights_.resize(context_tokens_ * shape_.top_k);
  logits_.resize(context_tokens_ * shape_.vocab);
}

std::span<const float> Model::Forward(std::span<const int32_t> tokens) {
  if (tokens.size() > context_tokens_ - position_) {
    throw Failure(StatusCode::kCapacity, "the context holds " + std::to_string(context_tokens_) +
                                             " tokens, asked for " +
                                             std::to_string(position_ + tokens.size()));
  }
  for (size_t t = 0; t < tokens.size(); ++t) {
    const auto id = static_cast<size_t>(tokens[t]);  // a negative one becomes huge
    if (id >= shape_.vocab) {
      throw Failure(StatusCode::kUsage, "token id " + std::to_string(tokens[t]) +
                                            " is outside the vocabulary of " + std::to_string(shape_.vocab));
    }
    std::copy_n(&embedding_[id * shape_.hidden], shape_.hidden, &stream_[t * shape_.hidden]);
  }
  for (Layer& layer : layers_) {
    Attention(layer, tokens.size());
    RunExperts(layer, tokens.size());
  }
  Norm(final_norm_, tokens.size());
  Project(*head_, tokens.size(), normed_.data(), logits_.data());
  position_ += tokens.size();
  return std::span<const float>(logits_).first(tokens.size() * shape_.vocab);
}

// normed = norm(stream), row by row.
void Model::Norm(const std::vector<float>& weight, size_t tokens) {
  for (size_t row = 0; row < tokens * shape_.hidden; row += shape_.hidden) {
    RmsNorm(&stream_[row], weight, shape_.norm_eps, &normed_[row]);
  }
}

// One EXL3 matrix: the caller owns input, output and workspace, and says where rows begin.
void Model::Project(const Linear& linear, size_t tokens, const float* x, float* y, bool accumulate) {
  espalier::LinearArgs args;
  args.num_tokens = tokens;
  args.x = x;
  args.x_row_stride = linear.weights.in_channels();
  args.y = y;
  args.y_row_stride = linear.weights.out_channels();
  args.accumulate = accumulate;
  args.workspace = workspace_.data();
  args.workspace_bytes = workspace_.size_bytes();
  Value(espalier::RunLinear(linear.plan, linear.weights, args));
}

// stream += o_proj(attention(norm(stream))). New keys and values go straight into the cache.
void Model::Attention(Layer& layer, size_t tokens) {
  Norm(layer.attention_norm, tokens);
  const size_t q_size = shape_.heads * shape_.head_dim, kv_size = shape_.kv_heads * shape_.head_dim;
  float* k = layer.k_cache.data() + position_ * kv_size;
  float* v = layer.v_cache.data() + position_ * kv_size;
  Project(layer.q, tokens, normed_.data(), q_.data());
  Project(layer.k, tokens, normed_.data(), k);
  Project(layer.v, tokens, normed_.data(), v);
  for (size_t t = 0; t < tokens; ++t) {
    NormAndRotate(&q_[t * q_size], shape_.heads, layer.q_norm, position_ + t);
    NormAndRotate(&k[t * kv_size], shape_.kv_heads, layer.k_norm, position_ + t);
  }
  Attend(layer, tokens);
  Project(layer.o, tokens, attended_.data(), stream_.data(), /*accumulate=*/true);
}

// RMS norm of each head, then the rotary position: channel i turns with channel i + head_dim / 2.
void Model::NormAndRotate(float* heads, size_t num_heads, const std::vector<float>& norm,
                          size_t position) const {
  const size_t half = shape_.head_dim / 2;
  for (size_t h = 0; h < num_heads; ++h) {
    float* x = heads + h * shape_.head_dim;
    RmsNorm(x, norm, shape_.norm_eps, x);
    for (size_t i = 0; i < half; ++i) {
      const float cos = rope_cos_[position * half + i], sin = rope_sin_[position * half + i];
      const float first = x[i], second = x[i + half];
      x[i] = first * cos - second * sin;
      x[i + half] = second * cos + first * sin;
    }
  }
}

// Causal attention over the cache; consecutive query heads share a key-value head.
void Model::Attend(const Layer& layer, size_t tokens) {
  const size_t dim = shape_.head_dim, kv_size = shape_.kv_heads * dim;
  const float scale = 1 / std::sqrt(static_cast<float>(dim));
  for (size_t row = 0; row < tokens * shape_.heads; ++row) {
    const size_t kv_offset = (row % shape_.heads) / (shape_.heads / shape_.kv_heads) * dim;
    const std::span<float> scores(scores_.data(), position_ + row / shape_.heads + 1);
    for (size_t s = 0; s < scores.size(); ++s) {
      scores[s] = scale * Dot(&q_[row * dim], &layer.k_cache[s * kv_size + kv_offset], dim);
    }
    const float sum = ExpMinusMax(scores);
    float* out = &attended_[row * dim];
    std::fill_n(out, dim, 0.0f);
    for (size_t s = 0; s < scores.size(); ++s) {
      const float weight = scores[s] / sum;
      const float* v = &layer.v_cache[s * kv_size + kv_offset];
      for (size_t i = 0; i < dim; ++i) out[i] += weight * v[i];
    }
  }
}

// stream += experts(norm(stream)), routed.
void Model::RunExperts(const Layer& layer, size_t tokens) {
  Norm(layer.experts_norm, tokens);
  for (size_t t = 0; t < tokens; ++t) {
    Route(layer, &normed_[t * shape_.hidden], &route_ids_[t * shape_.top_k],
          &route_weights_[t * shape_.top_k]);
  }
  espalier::MoeArgs args;
  args.num_tokens = tokens;
  args.x = normed_.data();
  args.x_row_stride = shape_.hidden;
  args.topk_ids = route_ids_.data();
  args.topk_ids_row_stride = shape_.top_k;
  args.topk_weights = route_weights_.data();
  args.topk_weights_row_stride = shape_.top_k;
  args.y = stream_.data();
  args.y_row_stride = shape_.hidden;
  args.accumulate = true;  // adds to the residual stream
  args.workspace = workspace_.data();
  args.workspace_bytes = workspace_.size_bytes();
  Value(espalier::RunMoe(layer.experts.plan, layer.experts.weights, args));
}

// Softmax over all experts, the top k of them, renormalised. The router is the engine's business: the
// library takes ids and final weights.
void Model::Route(const Layer& layer, const float* x, int32_t* ids, float* weights) {
  const std::span<float> scores(scores_.data(), shape_.experts);
  for (size_t e = 0; e < scores.size(); ++e)
    scores[e] = Dot(x, &layer.router[e * shape_.hidden], shape_.hidden);
  ExpMinusMax(scores);  // the sum over all of them cancels in the renormalisation
  float sum = 0;
  for (size_t j = 0; j < shape_.top_k; ++j) {
    const auto best = std::max_element(scores.begin(), scores.end());
    ids[j] = static_cast<int32_t>(best - scores.begin());
    sum += weights[j] = *best;
    *best = -1;
  }
  for (size_t j = 0; j < shape_.top_k; ++j) weights[j] /= sum;
}

Perplexity MeasurePerplexity(Model& model, std::span<const int32_t> tokens, size_t window_tokens,
                             size_t max_windows, const std::function<void(size_t, size_t)>& progress) {
  const size_t windows = tokens.empty() ? 0 : std::min(max_windows, (tokens.size() - 1) / window_tokens);
  const size_t vocab = model.shape().vocab;
  double nats = 0;
  for (size_t w = 0; w < windows; ++w) {
    model.Reset();
    const std::span<const float> logits = model.Forward(tokens.subspan(w * window_tokens, window_tokens));
    for (size_t t = 0; t < window_tokens; ++t) {
      const std::span<const float> row = logits.subspan(t * vocab, vocab);
      const float max = *std::max_element(row.begin(), row.end());
      double sum = 0;
      for (float logit : row) sum += std::exp(static_cast<double>(logit - max));
      nats += std::log(sum) - (row[static_cast<size_t>(tokens[w * window_tokens + t + 1])] - max);
    }
    if (progress) progress(w + 1, windows);
  }
  const size_t predictions = windows * window_tokens;
  return {std::exp(nats / static_cast<double>(predictions)), predictions};
}

}  // namespace tiny_lm
