// SPDX-License-Identifier: Apache-2.0
//
// Byte-level BPE from a tokenizer.json, with the GPT-2 pre-tokenizer.
#ifndef ESPALIER_EXAMPLES_TINY_LM_TOKENIZER_H_
#define ESPALIER_EXAMPLES_TINY_LM_TOKENIZER_H_

#include <array>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tiny_lm {

// Immutable; may be used from several threads at once.
class Tokenizer {
 public:
  // Throws Failure: kIo, kFormat; kUnsupported for any other kind of tokenizer.
  explicit Tokenizer(const std::filesystem::path& path);

  // Decode(Encode(text)) == text for every string of bytes.
  std::vector<int32_t> Encode(std::string_view text) const;
  // Ids that the vocabulary lacks decode to nothing.
  std::string Decode(std::span<const int32_t> ids) const;
  size_t vocab_size() const { return tokens_.size(); }  // largest id + 1

 private:
  struct Merge {
    uint32_t rank;
    int32_t merged;
  };

  void Parse(const nlohmann::json& root);
  int32_t AddToken(const nlohmann::json& id, std::string bytes);
  void EncodePiece(std::string_view piece, std::vector<int32_t>* ids) const;

  std::vector<std::string> tokens_;                     // by id, as raw bytes
  std::array<int32_t, 256> byte_ids_;                   // the tokens of one byte
  std::unordered_map<uint64_t, Merge> merges_;          // key: left id << 32 | right id
  std::vector<std::pair<std::string, int32_t>> added_;  // found in the text before anything else
};

}  // namespace tiny_lm

#endif  // ESPALIER_EXAMPLES_TINY_LM_TOKENIZER_H_
