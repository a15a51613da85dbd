// SPDX-License-Identifier: Apache-2.0
//
// A Qwen3-MoE language model around the library: EXL3 matrices and experts are the library's, the rest
// (embedding, norms, rotary positions, attention, router) is plain fp32 here.
#ifndef ESPALIER_EXAMPLES_TINY_LM_MODEL_H_
#define ESPALIER_EXAMPLES_TINY_LM_MODEL_H_

#include <espalier/espalier.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tiny_lm {

struct ModelOptions {
  std::string executor;         // "cpu", "reference"; empty = the best one
  size_t context_tokens = 256;  // that the key-value cache holds; at most max_position_embeddings
};

// From config.json, under its names.
struct ModelShape {
  size_t hidden, layers, heads, kv_heads, head_dim, vocab, experts, top_k, max_positions;
  float norm_eps;
  double rope_theta;
  int32_t eos_token;  // -1 = none
};

// The library's pair: weights, and a plan that holds all that can be decided before the first token.
struct Linear {
  espalier::PreparedLinear weights;
  espalier::LinearPlan plan;
};
struct Experts {
  espalier::PreparedExperts weights;
  espalier::MoePlan plan;
};
struct Layer {
  Experts experts;
  Linear q, k, v, o;
  std::vector<float> attention_norm, experts_norm, q_norm, k_norm, router;
  std::vector<float> k_cache, v_cache;  // [context, kv_heads * head_dim]
};

// Not safe for use from several threads: it owns one cache and one workspace. Its functions throw Failure
// with the library's Status, or with their own.
class Model {
 public:
  // Reads the whole checkpoint. kUnsupported: another architecture; kCapacity: a context longer than the
  // model's.
  Model(const std::filesystem::path& directory, const ModelOptions& options);

  // Appends tokens to the context and returns their logits [tokens, vocab], valid until the next call.
  // kUsage: an id outside the vocabulary; kCapacity: a full context. The context is then as before.
  std::span<const float> Forward(std::span<const int32_t> tokens);

  void Reset() { position_ = 0; }  // empties the context
  size_t position() const { return position_; }
  const ModelShape& shape() const { return shape_; }
  std::string_view executor() const { return layers_.front().experts.plan.backend().name(); }

 private:
  void Project(const Linear& linear, size_t tokens, const float* x, float* y, bool accumulate = false);
  void Attention(Layer& layer, size_t tokens);
  void Attend(const Layer& layer, size_t tokens);
  void RunExperts(const Layer& layer, size_t tokens);
  void Route(const Layer& layer, const float* x, int32_t* ids, float* weights);
  void Norm(const std::vector<float>& weight, size_t tokens);
  void NormAndRotate(float* heads, size_t num_heads, const std::vector<float>& norm, size_t position) const;

  ModelShape shape_;
  size_t context_tokens_;
  size_t position_ = 0;
  std::vector<float> embedding_, final_norm_;
  std::vector<Layer> layers_;
  std::optional<Linear> head_;
  std::vector<float> rope_cos_, rope_sin_;  // [context, head_dim / 2]
  // Scratch for one Forward, sized at load: nothing is allocated per token.
  std::vector<float> stream_, normed_, q_, attended_, scores_, route_weights_, logits_;
  std::vector<int32_t> route_ids_;
  espalier::HostBuffer workspace_;  // as large as the largest plan asks for: they run one after another
};

struct Perplexity {
  double value = 0;
  size_t predictions = 0;
};

// Perplexity over consecutive windows of `window_tokens` tokens, each token predicting its successor;
// what does not fill a window (and one token more) is left out. `progress` gets windows done and in all.
// REQUIRES: tokens inside the vocabulary, window_tokens no more than the model's context.
Perplexity MeasurePerplexity(Model& model, std::span<const int32_t> tokens, size_t window_tokens,
                             size_t max_windows, const std::function<void(size_t, size_t)>& progress);

}  // namespace tiny_lm

#endif  // ESPALIER_EXAMPLES_TINY_LM_MODEL_H_
