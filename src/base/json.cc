// SPDX-License-Identifier: Apache-2.0
#include "base/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "base/text.h"

namespace espalier {
namespace {

using simdjson::dom::element;
using simdjson::dom::element_type;

// What is wrong inside an element, and where: a path such as ".weight_map.a", built from the inside out.
struct Fault {
  std::string path;
  std::string text;
};

// A key that occurs twice. Sorted by hash, then by text: an index has 500,000 keys of 60 bytes with long
// common prefixes, and keys that were made to collide still cost no more than a sort.
std::optional<std::string_view> DuplicateKey(const simdjson::dom::object& object) {
  struct HashedKey {
    size_t hash;
    std::string_view text;
  };
  std::vector<HashedKey> keys;
  for (const auto field : object) keys.push_back({std::hash<std::string_view>()(field.key), field.key});
  std::sort(keys.begin(), keys.end(), [](const HashedKey& a, const HashedKey& b) {
    return a.hash != b.hash ? a.hash < b.hash : a.text < b.text;
  });
  for (size_t i = 1; i < keys.size(); ++i) {
    if (keys[i].hash == keys[i - 1].hash && keys[i].text == keys[i - 1].text) return keys[i].text;
  }
  return std::nullopt;
}

// The recursion ends at kMaxJsonDepth.
std::optional<Fault> FindFault(element value, int depth) {
  const element_type type = value.type();
  if (type != element_type::OBJECT && type != element_type::ARRAY) return std::nullopt;
  if (depth == kMaxJsonDepth) return Fault{"", fmt::format("nested deeper than {} levels", kMaxJsonDepth)};
  if (type == element_type::ARRAY) {
    size_t index = 0;
    for (const element child : simdjson::dom::array(value.get_array().value_unsafe())) {
      std::optional<Fault> fault = FindFault(child, depth + 1);
      if (fault) return Fault{fmt::format("[{}]{}", index, fault->path), std::move(fault->text)};
      ++index;
    }
    return std::nullopt;
  }
  const simdjson::dom::object object = value.get_object().value_unsafe();
  if (const auto key = DuplicateKey(object))
    return Fault{"", fmt::format("key {} occurs twice", Quoted(*key))};
  for (const auto field : object) {
    std::optional<Fault> fault = FindFault(field.value, depth + 1);
    if (fault) return Fault{fmt::format(".{}{}", Quoted(field.key), fault->path), std::move(fault->text)};
  }
  return std::nullopt;
}

}  // namespace

Result<JsonDocument> JsonDocument::Parse(std::string_view text, std::string_view source) {
  const auto fail = [source](std::string_view why) {
    return Error(StatusCode::kFormat, fmt::format("{}: not valid JSON: {}", source, why));
  };
  if (text.empty()) return fail("the text is empty");
  // simdjson skips a byte order mark since 3.2.
  if (text.starts_with("\xEF\xBB\xBF")) return fail("it begins with a byte order mark");

  JsonDocument document;
  document.parser_ = std::make_unique<simdjson::dom::parser>();
  // simdjson counts depth in its own way, which differs between versions by one or two; FindFault counts
  // exactly, simdjson only has to bound its stack.
  constexpr size_t kDepthSlack = 4;
  simdjson::error_code error = document.parser_->allocate(text.size(), kMaxJsonDepth + kDepthSlack);
  if (error == simdjson::SUCCESS) {
    const simdjson::padded_string padded(text);
    if (padded.data() == nullptr) {
      error = simdjson::MEMALLOC;
    } else {
      error = document.parser_->parse(padded).get(document.root_);
    }
  }
  if (error == simdjson::MEMALLOC) {
    return Error(StatusCode::kCapacity,
                 fmt::format("{}: no memory to parse {} bytes of JSON", source, text.size()));
  }
  if (error == simdjson::DEPTH_ERROR) return fail(fmt::format("nested deeper than {} levels", kMaxJsonDepth));
  if (error != simdjson::SUCCESS) return fail(simdjson::error_message(error));
  if (const auto fault = FindFault(document.root_, 0)) {
    const std::string place = fault->path.empty() ? "" : fmt::format("at {}: ", fault->path);
    return fail(place + fault->text);
  }
  return document;
}

std::string NonFiniteAsNull(std::string_view text) {
  constexpr std::string_view kWordEnds = " \t\r\n,:[]{}\"";
  std::string result;
  result.reserve(text.size() + 1);
  for (size_t at = 0; at < text.size();) {
    size_t end = at + 1;
    if (text[at] == '"') {
      while (end < text.size() && text[end] != '"') end += text[end] == '\\' ? 2 : 1;
      end = std::min(end + 1, text.size());
    } else if (kWordEnds.find(text[at]) == std::string_view::npos) {
      end = std::min(text.find_first_of(kWordEnds, at), text.size());
    }
    const std::string_view word = text.substr(at, end - at);
    const bool not_finite = word == "NaN" || word == "Infinity" || word == "-Infinity";
    result += not_finite ? "null" : word;
    at = end;
  }
  return result;
}

std::string_view JsonTypeName(simdjson::dom::element element) {
  switch (element.type()) {
    case element_type::ARRAY:
      return "array";
    case element_type::OBJECT:
      return "object";
    case element_type::INT64:
      return element.get_int64().value_unsafe() < 0 ? "negative integer" : "integer";
    case element_type::UINT64:
      return "integer";
    case element_type::DOUBLE:
      return "number with a fraction or exponent";
    case element_type::STRING:
      return "string";
    case element_type::BOOL:
      return "boolean";
    case element_type::NULL_VALUE:
      return "null";
    default:  // later versions of simdjson have more types
      return "value of an unknown type";
  }
}

}  // namespace espalier
