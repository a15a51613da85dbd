// SPDX-License-Identifier: Apache-2.0
#include <re2/re2.h>

#include <algorithm>

#include "tiny_lm.h"

namespace tiny_lm {
namespace {

// Length in bytes of the piece that begins `text`, as the GPT-2 pattern cuts it:
// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// RE2 has no (?!): group 2 is a run of spaces that leaves its last one to what follows. Its \s is ASCII only.
size_t PieceLength(std::string_view text) {
  static const RE2 kPattern(R"(('s|'t|'re|'ve|'m|'ll|'d| ?\pL+| ?\pN+| ?[^\t-\r\x{85}\pZ\pL\pN]+))"
                            R"(|([\t-\r\x{85}\pZ]+)[\t-\r\x{85}\pZ][^\t-\r\x{85}\pZ]|([\t-\r\x{85}\pZ]+))");
  re2::StringPiece groups[4];
  const re2::StringPiece piece(text.data(), text.size());
  if (!kPattern.Match(piece, 0, piece.size(), RE2::ANCHOR_START, groups, 4)) return 1;  // not UTF-8
  return groups[1].size() + groups[2].size() + groups[3].size();
}

// GPT-2 spells a byte as a character: itself where it is printable, else U+0100, U+0101 ... in order.
// Text with other characters (special tokens) comes back as it is.
std::string RawBytes(const std::string& spelling) {
  std::string raw;
  for (size_t at = 0; at < spelling.size(); ++at) {
    int c = static_cast<uint8_t>(spelling[at]);
    // Right for a character of two bytes, above 0x143 for a longer one.
    if (c >= 0x80) c = (c & 0x3F) << 6 | (spelling[++at] & 0x3F);
    if (c > 0x143) return spelling;
    raw += static_cast<char>(c < 0x100 ? c : c <= 0x120 ? c - 0x100 : c <= 0x142 ? c - 0xA2 : 0xAD);
  }
  return raw;
}

}  // namespace

Tokenizer::Tokenizer(const std::filesystem::path& path) : byte_ids_(256, -1) {
  ReadJson(path, [this](const json& root) {
    const json& vocab = root.at("model").at("vocab");
    Require(root, R"({"/normalizer": null, "/model/type": "BPE", "/model/ignore_merges": false,
                      "/model/byte_fallback": false, "/pre_tokenizer/type": "ByteLevel",
                      "/pre_tokenizer/use_regex": true, "/pre_tokenizer/add_prefix_space": false})"_json);
    const auto add_token = [this](const json& id, const std::string& bytes) {
      const size_t index = WholeNumber("token id", id, 0);
      if (index >= tokens_.size()) tokens_.resize(index + 1);
      tokens_[index] = bytes;
      return static_cast<int32_t>(index);
    };
    for (const auto& [spelling, id] : vocab.items()) {
      const std::string bytes = RawBytes(spelling);
      const int32_t token = add_token(id, bytes);
      if (bytes.size() == 1) byte_ids_[static_cast<uint8_t>(bytes[0])] = token;
    }
    const auto absent = std::find(byte_ids_.begin(), byte_ids_.end(), -1) - byte_ids_.begin();
    if (absent < 256) Fail(kFormat, "model.vocab lacks a token of byte ", absent);
    for (const json& merge : root.at("model").at("merges")) {
      const std::string left = merge.at(0), right = merge.at(1);
      merges_.emplace(std::pair(vocab.at(left), vocab.at(right)),
                      std::pair(merges_.size(), vocab.at(left + right)));
    }
    for (const json& token : root.at("added_tokens")) {
      const std::string content = token.at("content");
      if (content.empty()) Fail(kFormat, "added_tokens: a token without content");
      added_.push_back(add_token(token.at("id"), content));
    }
  });
}

// Joins the leftmost pair of the lowest rank until no pair is a merge. Quadratic, but pieces are words.
void Tokenizer::EncodePiece(std::string_view piece, std::vector<int32_t>& ids) const {
  const size_t first = ids.size();
  for (char byte : piece) ids.push_back(byte_ids_[static_cast<uint8_t>(byte)]);
  for (;;) {
    std::pair<size_t, int32_t> best(merges_.size(), -1);
    size_t best_at = 0;
    for (size_t i = first; i + 1 < ids.size(); ++i) {
      const auto found = merges_.find({ids[i], ids[i + 1]});
      if (found == merges_.end() || found->second >= best) continue;
      best = found->second;
      best_at = i;
    }
    if (best.second < 0) return;
    ids[best_at] = best.second;
    ids.erase(ids.begin() + best_at + 1);
  }
}

std::vector<int32_t> Tokenizer::Encode(std::string_view text) const {
  std::vector<int32_t> ids;
  while (!text.empty()) {
    size_t plain_bytes = text.size();  // up to the first added token
    int32_t added = -1;
    for (int32_t id : added_) {
      const size_t at = text.find(tokens_[id]);
      if (at >= plain_bytes) continue;
      plain_bytes = at;
      added = id;
    }
    for (std::string_view plain = text.substr(0, plain_bytes); !plain.empty();) {
      const size_t length = PieceLength(plain);
      EncodePiece(plain.substr(0, length), ids);
      plain.remove_prefix(length);
    }
    text.remove_prefix(plain_bytes);
    if (added < 0) break;
    ids.push_back(added);
    text.remove_prefix(tokens_[added].size());
  }
  return ids;
}

std::string Tokenizer::Decode(std::span<const int32_t> ids) const {
  std::string text;
  for (int32_t id : ids) {
    if (id >= 0 && id < std::ssize(tokens_)) text += tokens_[id];
  }
  return text;
}

}  // namespace tiny_lm
