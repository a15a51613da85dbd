// SPDX-License-Identifier: Apache-2.0
#include "tokenizer.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

#include "failure.h"

namespace tiny_lm {
namespace {

using espalier::StatusCode;
using nlohmann::json;

// Far above any real vocabulary; keeps a wild id from sizing a table.
constexpr uint64_t kMaxVocab = 1u << 22;

enum class CharClass { kLetter, kNumber, kSpace, kOther };

struct CodePoint {
  uint32_t value;
  size_t bytes;
};

// A byte that is not UTF-8 counts as one character of class kOther.
CodePoint DecodeUtf8(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[at + i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || at + length > text.size()) return {0xFFFD, 1};
  uint32_t value = lead & (0x7Fu >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return {0xFFFD, 1};
    value = value << 6 | (byte(i) & 0x3Fu);
  }
  return {value, length};
}

// The pattern's \p{L}, \p{N} and \s: exact for Latin, Cyrillic and their punctuation, by blocks for Greek,
// kana, Han and Hangul. Letters of other scripts count as kOther: such text may be cut elsewhere than in
// training, but it still decodes to itself.
CharClass Classify(uint32_t c) {
  using Range = std::pair<uint32_t, uint32_t>;
  static constexpr Range kLetters[] = {{'a', 'z'},       {'A', 'Z'},       {0xAA, 0xAA},     {0xB5, 0xB5},
                                       {0xBA, 0xBA},     {0xC0, 0xD6},     {0xD8, 0xF6},     {0xF8, 0x2C1},
                                       {0x370, 0x373},   {0x386, 0x386},   {0x388, 0x3F5},   {0x3F7, 0x481},
                                       {0x48A, 0x52F},   {0x1E00, 0x1FBC}, {0x3041, 0x3096}, {0x30A1, 0x30FA},
                                       {0x3400, 0x4DBF}, {0x4E00, 0x9FFF}, {0xAC00, 0xD7A3}};
  static constexpr Range kNumbers[] = {{'0', '9'},       {0xB2, 0xB3},     {0xB9, 0xB9},
                                       {0xBC, 0xBE},     {0x2070, 0x2070}, {0x2074, 0x2079},
                                       {0x2080, 0x2089}, {0x2150, 0x2182}};
  static constexpr Range kSpaces[] = {{' ', ' '},       {'\t', '\r'},     {0x85, 0x85},     {0xA0, 0xA0},
                                      {0x1680, 0x1680}, {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F},
                                      {0x205F, 0x205F}, {0x3000, 0x3000}};
  const auto holds_c = [c](Range range) { return range.first <= c && c <= range.second; };
  if (std::any_of(std::begin(kLetters), std::end(kLetters), holds_c)) return CharClass::kLetter;
  if (std::any_of(std::begin(kNumbers), std::end(kNumbers), holds_c)) return CharClass::kNumber;
  if (std::any_of(std::begin(kSpaces), std::end(kSpaces), holds_c)) return CharClass::kSpace;
  return CharClass::kOther;
}

// Length in bytes of the piece that begins `text`, as the GPT-2 pattern cuts it:
// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
size_t PieceLength(std::string_view text) {
  for (std::string_view contraction : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
    if (text.starts_with(contraction)) return contraction.size();
  }
  const auto class_at = [text](size_t at) { return Classify(DecodeUtf8(text, at).value); };
  size_t at = text[0] == ' ' && text.size() > 1 ? 1 : 0;  // one blank may lead a piece of any class
  const CharClass run_class = class_at(at);
  if (run_class == CharClass::kSpace) at = 0;
  size_t last = at;  // where the last character of the run begins
  while (at < text.size() && class_at(at) == run_class) {
    last = at;
    at += DecodeUtf8(text, at).bytes;
  }
  // A run of spaces leaves its last one to what follows, unless it has no other.
  if (run_class == CharClass::kSpace && at < text.size() && last > 0) return last;
  return at;
}

// GPT-2 spells a byte as a character: itself where it is printable, else U+0100, U+0101 ... in order.
// Text with other characters (special tokens) comes back as it is.
std::string RawBytes(const std::string& spelling) {
  static const std::unordered_map<uint32_t, char> kByteOf = [] {
    std::unordered_map<uint32_t, char> map;
    uint32_t next = 0x100;
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
      map[printable ? byte : next++] = static_cast<char>(byte);
    }
    return map;
  }();
  std::string raw;
  for (size_t at = 0; at < spelling.size();) {
    const CodePoint c = DecodeUtf8(spelling, at);
    const auto found = kByteOf.find(c.value);
    if (found == kByteOf.end()) return spelling;
    raw.push_back(found->second);
    at += c.bytes;
  }
  return raw;
}

uint64_t PairKey(int32_t left, int32_t right) {
  return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
}

}  // namespace

Tokenizer::Tokenizer(const std::filesystem::path& path) {
  ReadJson(path, [this](const json& root) { Parse(root); });
}

void Tokenizer::Parse(const json& root) {
  const json& model = root.at("model");
  const json& splitter = root.at("pre_tokenizer");
  if (!root.value("normalizer", json()).is_null() || model.at("type") != "BPE" ||
      model.value("ignore_merges", false) || model.value("byte_fallback", false) ||
      splitter.at("type") != "ByteLevel" || !splitter.value("use_regex", true) ||
      splitter.value("add_prefix_space", true)) {
    throw Failure(StatusCode::kUnsupported,
                  "this example reads a BPE model without normalizer, ignore_merges and byte_fallback, "
                  "behind a ByteLevel pre_tokenizer with use_regex, without add_prefix_space");
  }
  std::unordered_map<std::string, int32_t> vocab;  // by raw bytes
  for (const auto& [spelling, id] : model.at("vocab").items()) {
    std::string bytes = RawBytes(spelling);
    vocab[bytes] = AddToken(id, bytes);
  }
  const auto id_of = [&vocab](const std::string& bytes, const json& user) {
    const auto found = vocab.find(bytes);
    if (found == vocab.end())
      throw Failure(StatusCode::kFormat, "model.vocab lacks a token of " + user.dump());
    return found->second;
  };
  for (size_t byte = 0; byte < byte_ids_.size(); ++byte) {
    byte_ids_[byte] = id_of(std::string(1, static_cast<char>(byte)), "byte " + std::to_string(byte));
  }
  uint32_t rank = 0;
  for (const json& merge : model.at("merges")) {
    const std::string left = RawBytes(merge.at(0)), right = RawBytes(merge.at(1));
    merges_.emplace(PairKey(id_of(left, merge), id_of(right, merge)),
                    Merge{rank++, id_of(left + right, merge)});
  }
  for (const json& token : root.value("added_tokens", json::array())) {
    const std::string content = token.at("content").get<std::string>();
    if (content.empty()) throw Failure(StatusCode::kFormat, "added_tokens: a token without content");
    added_.emplace_back(content, AddToken(token.at("id"), content));
  }
}

int32_t Tokenizer::AddToken(const json& id, std::string bytes) {
  if (!id.is_number_unsigned() || id.get<uint64_t>() >= kMaxVocab) {
    throw Failure(StatusCode::kFormat,
                  "token id " + id.dump() + ": must be an integer below " + std::to_string(kMaxVocab));
  }
  const size_t index = id.get<size_t>();
  if (index >= tokens_.size()) tokens_.resize(index + 1);
  tokens_[index] = std::move(bytes);
  return static_cast<int32_t>(index);
}

// Joins the leftmost pair of the lowest rank until no pair is a merge. Quadratic, but pieces are words.
void Tokenizer::EncodePiece(std::string_view piece, std::vector<int32_t>* ids) const {
  const size_t first = ids->size();
  for (char byte : piece) ids->push_back(byte_ids_[static_cast<uint8_t>(byte)]);
  for (;;) {
    Merge best{std::numeric_limits<uint32_t>::max(), -1};
    size_t best_at = 0;
    for (size_t i = first; i + 1 < ids->size(); ++i) {
      const auto found = merges_.find(PairKey((*ids)[i], (*ids)[i + 1]));
      if (found == merges_.end() || found->second.rank >= best.rank) continue;
      best = found->second;
      best_at = i;
    }
    if (best.merged < 0) return;
    (*ids)[best_at] = best.merged;
    ids->erase(ids->begin() + static_cast<std::ptrdiff_t>(best_at) + 1);
  }
}

std::vector<int32_t> Tokenizer::Encode(std::string_view text) const {
  std::vector<int32_t> ids;
  while (!text.empty()) {
    std::string_view plain = text;  // up to the first added token
    const std::pair<std::string, int32_t>* special = nullptr;
    for (const auto& added : added_) {
      const size_t at = text.find(added.first);
      if (at >= plain.size()) continue;
      plain = text.substr(0, at);
      special = &added;
    }
    text.remove_prefix(plain.size());
    while (!plain.empty()) {
      const size_t length = PieceLength(plain);
      EncodePiece(plain.substr(0, length), &ids);
      plain.remove_prefix(length);
    }
    if (special == nullptr) break;
    ids.push_back(special->second);
    text.remove_prefix(special->first.size());
  }
  return ids;
}

std::string Tokenizer::Decode(std::span<const int32_t> ids) const {
  std::string text;
  for (int32_t id : ids) {
    if (id >= 0 && static_cast<size_t>(id) < tokens_.size()) text += tokens_[static_cast<size_t>(id)];
  }
  return text;
}

}  // namespace tiny_lm
