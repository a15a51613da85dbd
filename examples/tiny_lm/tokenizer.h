// SPDX-License-Identifier: Apache-2.0
//
// Byte-level BPE from a tokenizer.json, with the GPT-2 pre-tokenizer.
#ifndef ESPALIER_EXAMPLES_TINY_LM_TOKENIZER_H_
#define ESPALIER_EXAMPLES_TINY_LM_TOKENIZER_H_

#include <espalier/espalier.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tiny_lm {

// A whole file, and a JSON file parsed. Errors: kIo, kFormat.
espalier::Result<std::string> ReadFile(const std::filesystem::path& path);
espalier::Result<nlohmann::json> ReadJson(const std::filesystem::path& path);

// Immutable; may be used from several threads at once.
class Tokenizer {
 public:
  // Errors: kIo, kFormat; kUnsupported for any other kind of tokenizer.
  static espalier::Result<Tokenizer> FromFile(const std::filesystem::path& path);

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

  Tokenizer() = default;
  espalier::Result<void> Parse(const nlohmann::json& root);
  espalier::Result<int32_t> AddToken(const nlohmann::json& id, std::string bytes);
  void EncodePiece(std::string_view piece, std::vector<int32_t>* ids) const;

  std::vector<std::string> tokens_;                     // by id, as raw bytes
  std::array<int32_t, 256> byte_ids_;                   // the tokens of one byte
  std::unordered_map<uint64_t, Merge> merges_;          // key: left id << 32 | right id
  std::vector<std::pair<std::string, int32_t>> added_;  // found in the text before anything else
};

}  // namespace tiny_lm

#endif  // ESPALIER_EXAMPLES_TINY_LM_TOKENIZER_H_
