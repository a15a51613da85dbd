// SPDX-License-Identifier: Apache-2.0
#include "model.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <tuple>
#include <utility>

#include "tokenizer.h"

namespace tiny_lm {
namespace {

using espalier::Checkpoint;
using espalier::Error;
using espalier::Result;
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

Result<ModelShape> ParseConfig(const json& config) {
  // What this example computes; any other value needs other code.
  const std::pair<const char*, json> wanted[] = {
      {"model_type", "qwen3_moe"},    {"hidden_act", "silu"},        {"attention_bias", false},
      {"norm_topk_prob", true},       {"decoder_sparse_step", 1},    {"mlp_only_layers", json::array()},
      {"tie_word_embeddings", false}, {"use_sliding_window", false}, {"rope_scaling", nullptr},
  };
  for (const auto& [key, value] : wanted) {
    const json found = config.value(key, json());
    if (found == value) continue;
    return Error(StatusCode::kUnsupported,
                 std::string(key) + " is " + found.dump() + ", this example knows " + value.dump());
  }
  ModelShape shape{};
  const std::pair<const char*, size_t*> sizes[] = {
      {"hidden_size", &shape.hidden},
      {"num_hidden_layers", &shape.layers},
      {"head_dim", &shape.head_dim},
      {"num_attention_heads", &shape.heads},
      {"vocab_size", &shape.vocab},
      {"num_key_value_heads", &shape.kv_heads},
      {"num_experts", &shape.experts},
      {"num_experts_per_tok", &shape.top_k},
      {"max_position_embeddings", &shape.max_positions},
  };
  for (const auto& [key, size] : sizes) {
    const json& found = config.at(key);
    if (!found.is_number_unsigned() || found == 0 || found > (1 << 20)) {
      return Error(StatusCode::kFormat,
                   std::string(key) + " is " + found.dump() + ", legal are 1 to 1048576");
    }
    *size = found.get<size_t>();
  }
  shape.norm_eps = config.at("rms_norm_eps").get<float>();
  shape.rope_theta = config.at("rope_theta").get<double>();
  const json eos = config.value("eos_token_id", json());
  shape.eos_token = eos.is_number_unsigned() ? eos.get<int32_t>() : -1;
  if (shape.heads % shape.kv_heads != 0 || shape.head_dim % 2 != 0 || shape.top_k > shape.experts ||
      shape.norm_eps <= 0 || shape.rope_theta <= 0) {
    return Error(StatusCode::kFormat,
                 "num_attention_heads must be a multiple of num_key_value_heads, head_dim even, "
                 "num_experts_per_tok at most num_experts, rms_norm_eps and rope_theta positive");
  }
  return shape;
}

Result<ModelShape> ReadConfig(const std::filesystem::path& path) {
  const Result<json> config = ReadJson(path);
  if (!config) return tl::unexpected(config.error());
  Result<ModelShape> shape = Error(StatusCode::kFormat, "");
  try {
    shape = ParseConfig(*config);
  } catch (const json::exception& e) {
    shape = Error(StatusCode::kFormat, e.what());
  }
  if (!shape) return Error(shape.error().code(), path.string() + ": " + shape.error().message());
  return shape;
}

// A plain tensor as fp32, of the size that config.json implies.
Result<void> ReadTensor(const Checkpoint& checkpoint, const std::string& name, std::vector<uint64_t> shape,
                        std::vector<float>* target) {
  const espalier::TensorInfo* info = checkpoint.FindTensor(name);
  if (info == nullptr || info->shape != shape) {
    const json found = info == nullptr ? json("absent") : json(info->shape);
    return Error(StatusCode::kFormat, checkpoint.path().string() + ": tensor " + name + " is " +
                                          found.dump() + ", config.json asks for " + json(shape).dump());
  }
  Result<std::vector<float>> values = checkpoint.ReadFloats(name);
  if (!values) return tl::unexpected(values.error());
  *target = std::move(*values);
  return {};
}

}  // namespace

Result<Model> Model::Load(const std::filesystem::path& directory, const ModelOptions& options) {
  // Headers only: whatever is wrong with the files is said here, before any weight is read.
  const Result<Checkpoint> checkpoint = Checkpoint::Open(directory);
  if (!checkpoint) return tl::unexpected(checkpoint.error());
  const Result<ModelShape> shape = ReadConfig(directory / "config.json");
  if (!shape) return tl::unexpected(shape.error());
  if (options.context_tokens == 0 || options.context_tokens > shape->max_positions) {
    return Error(StatusCode::kCapacity, "a context of " + std::to_string(options.context_tokens) +
                                            " tokens; the model takes 1 to " +
                                            std::to_string(shape->max_positions));
  }
  Model model;
  model.shape_ = *shape;
  model.context_tokens_ = options.context_tokens;
  if (Result<void> loaded = model.LoadWeights(*checkpoint, options); !loaded) {
    return tl::unexpected(loaded.error());
  }

  const size_t context = options.context_tokens, half = shape->head_dim / 2;
  for (size_t i = 0; i < context * half; ++i) {
    const double angle =
        static_cast<double>(i / half) *
        std::pow(shape->rope_theta, -static_cast<double>(i % half) / static_cast<double>(half));
    model.rope_cos_.push_back(static_cast<float>(std::cos(angle)));
    model.rope_sin_.push_back(static_cast<float>(std::sin(angle)));
  }
  model.stream_.resize(context * shape->hidden);
  model.normed_.resize(context * shape->hidden);
  model.q_.resize(context * shape->heads * shape->head_dim);
  model.attended_.resize(model.q_.size());
  model.scores_.resize(std::max(context, shape->experts));
  model.route_ids_.resize(context * shape->top_k);
  model.route_weights_.resize(context * shape->top_k);
  model.logits_.resize(context * shape->vocab);
  return model;
}

Result<void> Model::LoadWeights(const Checkpoint& checkpoint, const ModelOptions& options) {
  Result<void> read =
      ReadTensor(checkpoint, "model.embed_tokens.weight", {shape_.vocab, shape_.hidden}, &embedding_);
  if (read) read = ReadTensor(checkpoint, "model.norm.weight", {shape_.hidden}, &final_norm_);
  if (!read) return read;
  Result<Linear> head = LoadProjection(checkpoint, "lm_head", shape_.hidden, shape_.vocab, options);
  if (!head) return tl::unexpected(head.error());
  uint64_t workspace_bytes = head->plan.workspace_bytes();
  head_.push_back(std::move(*head));
  for (size_t number = 0; number < shape_.layers; ++number) {
    Result<Layer> layer = LoadLayer(checkpoint, number, options);
    if (!layer) return tl::unexpected(layer.error());
    workspace_bytes = std::max(workspace_bytes, layer->experts.plan.workspace_bytes());
    for (const Linear& projection : layer->projections) {
      workspace_bytes = std::max(workspace_bytes, projection.plan.workspace_bytes());
    }
    layers_.push_back(std::move(*layer));
  }
  Result<espalier::HostBuffer> workspace = espalier::HostBuffer::Create(workspace_bytes);
  if (!workspace) return tl::unexpected(workspace.error());
  workspace_ = std::move(*workspace);
  return {};
}

Result<Model::Linear> Model::LoadProjection(const Checkpoint& checkpoint, const std::string& name, size_t in,
                                            size_t out, const ModelOptions& options) {
  Result<espalier::PreparedLinear> weights = espalier::LoadLinear(checkpoint, name);
  if (!weights) return tl::unexpected(weights.error());
  if (weights->in_channels() != in || weights->out_channels() != out) {
    return Error(StatusCode::kFormat, weights->identity() + ": config.json asks for " + std::to_string(in) +
                                          " inputs and " + std::to_string(out) + " outputs, found " +
                                          std::to_string(weights->in_channels()) + " and " +
                                          std::to_string(weights->out_channels()));
  }
  espalier::LinearPlanOptions plan_options;
  plan_options.max_tokens = options.context_tokens;
  plan_options.executor = options.executor;
  Result<espalier::LinearPlan> plan = espalier::LinearPlan::Create(*weights, plan_options);
  if (!plan) return tl::unexpected(plan.error());
  return Linear{std::move(*weights), std::move(*plan)};
}

Result<Model::Layer> Model::LoadLayer(const Checkpoint& checkpoint, size_t number,
                                      const ModelOptions& options) {
  const std::string prefix = "model.layers." + std::to_string(number) + ".";
  const Result<size_t> index = checkpoint.FindLayer(std::to_string(number));
  if (!index) return tl::unexpected(index.error());
  Result<espalier::PreparedExperts> experts = espalier::LoadExperts(checkpoint, *index);
  if (!experts) return tl::unexpected(experts.error());
  if (experts->geometry().experts != shape_.experts || experts->geometry().hidden_channels != shape_.hidden) {
    return Error(StatusCode::kFormat,
                 experts->identity() + ": experts or hidden size differ from config.json");
  }
  espalier::MoePlanOptions plan_options;
  plan_options.max_tokens = options.context_tokens;
  plan_options.top_k = static_cast<uint32_t>(shape_.top_k);
  plan_options.executor = options.executor;
  Result<espalier::MoePlan> plan = espalier::MoePlan::Create(*experts, plan_options);
  if (!plan) return tl::unexpected(plan.error());

  Layer layer({std::move(*experts), std::move(*plan)});
  const size_t q_size = shape_.heads * shape_.head_dim, kv_size = shape_.kv_heads * shape_.head_dim;
  const std::tuple<const char*, std::vector<uint64_t>, std::vector<float>*> tensors[] = {
      {"input_layernorm.weight", {shape_.hidden}, &layer.attention_norm},
      {"post_attention_layernorm.weight", {shape_.hidden}, &layer.experts_norm},
      {"self_attn.q_norm.weight", {shape_.head_dim}, &layer.q_norm},
      {"self_attn.k_norm.weight", {shape_.head_dim}, &layer.k_norm},
      {"mlp.gate.weight", {shape_.experts, shape_.hidden}, &layer.router},
  };
  for (const auto& [name, shape, target] : tensors) {
    if (Result<void> read = ReadTensor(checkpoint, prefix + name, shape, target); !read) {
      return tl::unexpected(read.error());
    }
  }
  const std::tuple<const char*, size_t, size_t> projections[] = {{"q_proj", shape_.hidden, q_size},
                                                                 {"k_proj", shape_.hidden, kv_size},
                                                                 {"v_proj", shape_.hidden, kv_size},
                                                                 {"o_proj", q_size, shape_.hidden}};
  for (const auto& [name, in, out] : projections) {
    Result<Linear> linear = LoadProjection(checkpoint, prefix + "self_attn." + name, in, out, options);
    if (!linear) return tl::unexpected(linear.error());
    layer.projections.push_back(std::move(*linear));
  }
  layer.k_cache.resize(options.context_tokens * kv_size);
  layer.v_cache.resize(options.context_tokens * kv_size);
  return layer;
}

Result<std::span<const float>> Model::Forward(std::span<const int32_t> tokens) {
  if (tokens.size() > context_tokens_ - position_) {
    return Error(StatusCode::kCapacity, "the context holds " + std::to_string(context_tokens_) +
                                            " tokens, asked for " +
                                            std::to_string(position_ + tokens.size()));
  }
  for (size_t t = 0; t < tokens.size(); ++t) {
    if (tokens[t] < 0 || static_cast<size_t>(tokens[t]) >= shape_.vocab) {
      return Error(StatusCode::kUsage, "token id " + std::to_string(tokens[t]) +
                                           " is outside the vocabulary of " + std::to_string(shape_.vocab));
    }
    std::copy_n(&embedding_[static_cast<size_t>(tokens[t]) * shape_.hidden], shape_.hidden,
                &stream_[t * shape_.hidden]);
  }
  for (Layer& layer : layers_) {
    Result<void> ran = Attention(layer, tokens.size());
    if (ran) ran = RunExperts(layer, tokens.size());
    if (!ran) return tl::unexpected(ran.error());
  }
  for (size_t t = 0; t < tokens.size(); ++t) {
    RmsNorm(&stream_[t * shape_.hidden], final_norm_, shape_.norm_eps, &normed_[t * shape_.hidden]);
  }
  Result<void> ran = Project(head_.front(), tokens.size(), normed_.data(), logits_.data());
  if (!ran) return tl::unexpected(ran.error());
  position_ += tokens.size();
  return std::span<const float>(logits_).first(tokens.size() * shape_.vocab);
}

// One EXL3 matrix: the caller owns input, output and workspace, and says where rows begin.
Result<void> Model::Project(const Linear& linear, size_t tokens, const float* x, float* y, bool accumulate) {
  espalier::LinearArgs args;
  args.num_tokens = tokens;
  args.x = x;
  args.x_row_stride = linear.weights.in_channels();
  args.y = y;
  args.y_row_stride = linear.weights.out_channels();
  args.accumulate = accumulate;
  args.workspace = workspace_.data();
  args.workspace_bytes = workspace_.size_bytes();
  return espalier::RunLinear(linear.plan, linear.weights, args);
}

// stream += o_proj(attention(norm(stream))). New keys and values go straight into the cache.
Result<void> Model::Attention(Layer& layer, size_t tokens) {
  for (size_t t = 0; t < tokens; ++t) {
    RmsNorm(&stream_[t * shape_.hidden], layer.attention_norm, shape_.norm_eps, &normed_[t * shape_.hidden]);
  }
  const size_t q_size = shape_.heads * shape_.head_dim, kv_size = shape_.kv_heads * shape_.head_dim;
  float* k = layer.k_cache.data() + position_ * kv_size;
  float* v = layer.v_cache.data() + position_ * kv_size;
  Result<void> ran = Project(layer.projections[0], tokens, normed_.data(), q_.data());
  if (ran) ran = Project(layer.projections[1], tokens, normed_.data(), k);
  if (ran) ran = Project(layer.projections[2], tokens, normed_.data(), v);
  if (!ran) return ran;
  for (size_t t = 0; t < tokens; ++t) {
    NormAndRotate(&q_[t * q_size], shape_.heads, layer.q_norm, position_ + t);
    NormAndRotate(&k[t * kv_size], shape_.kv_heads, layer.k_norm, position_ + t);
  }
  Attend(layer, tokens);
  return Project(layer.projections[3], tokens, attended_.data(), stream_.data(), /*accumulate=*/true);
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
Result<void> Model::RunExperts(const Layer& layer, size_t tokens) {
  for (size_t t = 0; t < tokens; ++t) {
    float* x = &normed_[t * shape_.hidden];
    RmsNorm(&stream_[t * shape_.hidden], layer.experts_norm, shape_.norm_eps, x);
    Route(layer, x, &route_ids_[t * shape_.top_k], &route_weights_[t * shape_.top_k]);
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
  return espalier::RunMoe(layer.experts.plan, layer.experts.weights, args);
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

Result<Perplexity> MeasurePerplexity(Model& model, std::span<const int32_t> tokens, size_t window_tokens,
                                     size_t max_windows,
                                     const std::function<void(size_t, size_t)>& progress) {
  const size_t windows = tokens.empty() ? 0 : std::min(max_windows, (tokens.size() - 1) / window_tokens);
  const size_t vocab = model.shape().vocab;
  double nats = 0;
  for (size_t w = 0; w < windows; ++w) {
    model.Reset();
    const Result<std::span<const float>> logits =
        model.Forward(tokens.subspan(w * window_tokens, window_tokens));
    if (!logits) return tl::unexpected(logits.error());
    for (size_t t = 0; t < window_tokens; ++t) {
      const std::span<const float> row = logits->subspan(t * vocab, vocab);
      const float max = *std::max_element(row.begin(), row.end());
      double sum = 0;
      for (float logit : row) sum += std::exp(static_cast<double>(logit - max));
      nats += std::log(sum) - (row[static_cast<size_t>(tokens[w * window_tokens + t + 1])] - max);
    }
    if (progress) progress(w + 1, windows);
  }
  const size_t predictions = windows * window_tokens;
  return Perplexity{std::exp(nats / static_cast<double>(predictions)), predictions};
}

}  // namespace tiny_lm
