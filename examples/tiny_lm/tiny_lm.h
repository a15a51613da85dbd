// SPDX-License-Identifier: Apache-2.0
//
// A Qwen3-MoE language model around the library: EXL3 matrices and experts are the library's; tokenizer,
// embedding, norms, rotary positions, attention and router are plain code here.
#ifndef ESPALIER_EXAMPLES_TINY_LM_TINY_LM_H_
#define ESPALIER_EXAMPLES_TINY_LM_TINY_LM_H_

#include <espalier/espalier.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <vector>

namespace tiny_lm {

using nlohmann::json;
using enum espalier::StatusCode;  // kFormat ...

// The library returns Result<T> and never throws. Result<T>::value() throws this; what this program refuses
// itself is thrown alike, and main() makes an exit code of it.
using Failure = tl::bad_expected_access<espalier::Status>;

template <typename... Parts>
[[noreturn]] void Fail(espalier::StatusCode code, const Parts&... message_parts) {
  std::ostringstream message;
  (message << ... << message_parts);
  throw Failure(espalier::Status(code, message.str()));
}

inline std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  // A directory can be opened, and throws when it is read.
  if (!in.is_open() || std::filesystem::is_directory(path)) Fail(kIo, path.string(), ": cannot be read");
  return {std::istreambuf_iterator<char>(in), {}};
}

// parse(root of the JSON file). Failures of `parse` get the file's name; a key that is missing or of another
// type is kFormat.
template <typename Parse>
void ReadJson(const std::filesystem::path& path, const Parse& parse) {
  const std::string text = ReadFile(path);
  try {
    parse(json::parse(text));
  } catch (const json::exception& e) {
    Fail(kFormat, path.string(), ": ", e.what());
  } catch (const Failure& e) {
    Fail(e.error().code(), path.string(), ": ", e.error().message());
  }
}

// `wanted` maps JSON pointers to the values that this program implements; others are kUnsupported. An absent
// value counts as null.
inline void Require(const json& root, const json& wanted) {
  for (const auto& [pointer, value] : wanted.items()) {
    const json found = root.value(json::json_pointer(pointer), json());
    if (found == value) continue;
    Fail(kUnsupported, pointer, " is ", found, ", this example knows only ", value);
  }
}

// A whole number from `min` to 2^20, so that a wild one sizes no table; anything else is kFormat.
inline size_t WholeNumber(const char* name, const json& number, size_t min) {
  if (number.is_number_unsigned() && number >= min && number <= (1 << 20)) return number;
  Fail(kFormat, name, " is ", number, ", legal: ", min, " to ", 1 << 20);
}

// Byte-level BPE from a tokenizer.json, with the GPT-2 pre-tokenizer. Immutable.
class Tokenizer {
 public:
  explicit Tokenizer(const std::filesystem::path& path);

  // Decode(Encode(text)) == text for every string of bytes.
  std::vector<int32_t> Encode(std::string_view text) const;
  // Ids that the vocabulary lacks decode to nothing.
  std::string Decode(std::span<const int32_t> ids) const;
  size_t vocab_size() const { return tokens_.size(); }  // largest id + 1

 private:
  void EncodePiece(std::string_view piece, std::vector<int32_t>& ids) const;

  std::vector<std::string> tokens_;  // by id, as raw bytes
  std::vector<int32_t> byte_ids_;    // the tokens of one byte
  std::vector<int32_t> added_;       // found in the text before anything else
  // {left id, right id} to {rank, id of the two together}; the lowest rank goes first.
  std::map<std::pair<int32_t, int32_t>, std::pair<size_t, int32_t>> merges_;
};

struct Config {
  size_t hidden, layers, heads, kv_heads, head_dim, vocab, experts, top_k, max_positions;
  float norm_eps;
  double rope_theta;
  int32_t eos_token;
};

// The library's pairs: weights, and a plan that holds all that can be decided before the first token.
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

// Not safe for use from several threads: it owns one cache and one workspace.
class Model {
 public:
  // Reads the whole checkpoint. `executor`: "cpu", "reference", empty = the best one. `context_tokens`: what
  // the cache holds; kCapacity beyond max_position_embeddings. kUnsupported: another architecture.
  Model(const std::filesystem::path& directory, const std::string& executor, espalier::CpuMode mode,
        size_t context_tokens);

  // Appends tokens to the context and returns their logits [tokens, vocab]. kUsage: an id outside the
  // vocabulary; kCapacity: a full context. The context is then as before.
  std::vector<float> Forward(std::span<const int32_t> tokens);

  void Reset() { position_ = 0; }  // empties the context
  const Config& config() const { return config_; }
  std::string executor() const { return std::string(layers_[0].experts.plan.backend().name()); }

 private:
  void Project(const Linear& linear, const std::vector<float>& x, float* y, bool accumulate = false);
  void AddAttention(Layer& layer, std::vector<float>& stream);
  void AddExperts(const Layer& layer, std::vector<float>& stream);
  void Rotate(std::span<float> x, size_t num_heads) const;

  Config config_;
  size_t context_tokens_, position_ = 0;
  std::vector<float> embedding_, final_norm_;
  std::vector<Layer> layers_;
  std::optional<Linear> head_;
  espalier::HostBuffer workspace_;  // as large as the largest plan asks for: they run one after another
};

}  // namespace tiny_lm

#endif  // ESPALIER_EXAMPLES_TINY_LM_TINY_LM_H_
