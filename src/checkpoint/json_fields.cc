// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/json_fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "base/json.h"

namespace espalier {
namespace {

tl::unexpected<Status> WrongType(const JsonObject& object, std::string_view key, simdjson::dom::element found,
                                 std::string_view legal) {
  return Error(StatusCode::kFormat,
               fmt::format("{}: found {}, legal: {}", object.Place(key), JsonTypeName(found), legal));
}

tl::unexpected<Status> Missing(const JsonObject& object, std::string_view key) {
  return Error(StatusCode::kFormat, fmt::format("{}: the key is missing", object.Place(key)));
}

template <typename T>
Result<T> Require(const JsonObject& object, std::string_view key, Result<std::optional<T>> found) {
  if (!found) return tl::unexpected(found.error());
  if (!*found) return Missing(object, key);
  return **std::move(found);
}

bool NumbersEqual(simdjson::dom::element a, simdjson::dom::element b) {
  int64_t signed_a = 0, signed_b = 0;
  if (!a.get_int64().get(signed_a) && !b.get_int64().get(signed_b)) return signed_a == signed_b;
  uint64_t unsigned_a = 0, unsigned_b = 0;
  if (!a.get_uint64().get(unsigned_a) && !b.get_uint64().get(unsigned_b)) return unsigned_a == unsigned_b;
  double double_a = 0, double_b = 0;
  return !a.get_double().get(double_a) && !b.get_double().get(double_b) && double_a == double_b;
}

bool ObjectsEqual(simdjson::dom::object a, simdjson::dom::object b) {
  // Not at_key, which walks: two objects of a million keys each would take a day.
  std::unordered_map<std::string_view, simdjson::dom::element> fields;
  for (const auto field : b) fields.emplace(field.key, field.value);
  size_t count = 0;
  for (const auto field : a) {
    const auto other = fields.find(field.key);
    if (other == fields.end() || !JsonEqual(field.value, other->second)) return false;
    ++count;
  }
  return count == fields.size();
}

bool ArraysEqual(simdjson::dom::array a, simdjson::dom::array b) {
  auto other = b.begin();
  for (const simdjson::dom::element value : a) {
    if (!(other != b.end()) || !JsonEqual(value, *other)) return false;
    ++other;
  }
  return !(other != b.end());
}

}  // namespace

std::string JsonObject::Place(std::string_view key) const {
  return where.empty() ? fmt::format("{}: {}", source, key) : fmt::format("{}: {}.{}", source, where, key);
}

std::optional<simdjson::dom::element> JsonObject::Find(std::string_view key) const {
  simdjson::dom::element value;
  if (object.at_key(key).get(value) || value.is_null()) return std::nullopt;
  return value;
}

Result<std::optional<uint64_t>> JsonObject::Unsigned(std::string_view key) const {
  const auto value = Find(key);
  if (!value) return std::nullopt;
  uint64_t number = 0;
  if (value->get_uint64().get(number)) return WrongType(*this, key, *value, "an integer of 0 or more");
  return number;
}

Result<std::optional<double>> JsonObject::Number(std::string_view key) const {
  const auto value = Find(key);
  if (!value) return std::nullopt;
  double number = 0;
  if (value->get_double().get(number)) return WrongType(*this, key, *value, "a number");
  return number;
}

Result<std::optional<bool>> JsonObject::Bool(std::string_view key) const {
  const auto value = Find(key);
  if (!value) return std::nullopt;
  bool flag = false;
  if (value->get_bool().get(flag)) return WrongType(*this, key, *value, "true or false");
  return flag;
}

Result<std::optional<std::string>> JsonObject::String(std::string_view key) const {
  const auto value = Find(key);
  if (!value) return std::nullopt;
  std::string_view text;
  if (value->get_string().get(text)) return WrongType(*this, key, *value, "a string");
  return std::string(text);
}

Result<std::optional<JsonObject>> JsonObject::Object(std::string_view key) const {
  const auto value = Find(key);
  if (!value) return std::nullopt;
  JsonObject child{.object = {},
                   .source = source,
                   .where = where.empty() ? std::string(key) : where + "." + std::string(key)};
  if (value->get_object().get(child.object)) return WrongType(*this, key, *value, "an object");
  return child;
}

Result<std::optional<std::vector<uint64_t>>> JsonObject::UnsignedList(std::string_view key) const {
  const auto value = Find(key);
  if (!value) return std::nullopt;
  simdjson::dom::array array;
  if (value->get_array().get(array)) return WrongType(*this, key, *value, "a list of integers of 0 or more");
  std::vector<uint64_t> numbers;
  for (const simdjson::dom::element item : array) {
    uint64_t number = 0;
    if (item.get_uint64().get(number)) return WrongType(*this, key, item, "a list of integers of 0 or more");
    numbers.push_back(number);
  }
  return numbers;
}

Result<uint64_t> JsonObject::RequireUnsigned(std::string_view key) const {
  return Require<uint64_t>(*this, key, Unsigned(key));
}
Result<bool> JsonObject::RequireBool(std::string_view key) const {
  return Require<bool>(*this, key, Bool(key));
}
Result<std::string> JsonObject::RequireString(std::string_view key) const {
  return Require<std::string>(*this, key, String(key));
}
Result<JsonObject> JsonObject::RequireObject(std::string_view key) const {
  return Require<JsonObject>(*this, key, Object(key));
}

Result<void> JsonObject::OnlyKeys(std::initializer_list<std::string_view> known) const {
  for (const auto field : object) {
    if (std::find(known.begin(), known.end(), field.key) != known.end()) continue;
    return Error(StatusCode::kFormat, fmt::format("{}: unknown key; legal: {}", Place(field.key),
                                                  fmt::join(known.begin(), known.end(), ", ")));
  }
  return {};
}

Result<JsonObject> RootObject(simdjson::dom::element root, std::string_view source) {
  JsonObject object{.object = {}, .source = std::string(source), .where = {}};
  if (root.get_object().get(object.object)) {
    return Error(StatusCode::kFormat,
                 fmt::format("{}: found {} at the root, legal: an object", source, JsonTypeName(root)));
  }
  return object;
}

bool JsonEqual(simdjson::dom::element a, simdjson::dom::element b) {
  if (a.is_number() && b.is_number()) return NumbersEqual(a, b);
  if (a.type() != b.type()) return false;
  simdjson::dom::object object_a, object_b;
  if (!a.get_object().get(object_a) && !b.get_object().get(object_b)) return ObjectsEqual(object_a, object_b);
  simdjson::dom::array array_a, array_b;
  if (!a.get_array().get(array_a) && !b.get_array().get(array_b)) return ArraysEqual(array_a, array_b);
  std::string_view text_a, text_b;
  if (!a.get_string().get(text_a) && !b.get_string().get(text_b)) return text_a == text_b;
  bool flag_a = false, flag_b = false;
  if (!a.get_bool().get(flag_a) && !b.get_bool().get(flag_b)) return flag_a == flag_b;
  return true;  // both null
}

std::optional<uint64_t> ParseDecimal(std::string_view text, uint64_t max) {
  if (text.empty() || text.size() > 19 || (text.size() > 1 && text[0] == '0')) return std::nullopt;
  uint64_t value = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return std::nullopt;
    value = value * 10 + static_cast<uint64_t>(c - '0');
  }
  if (value > max) return std::nullopt;
  return value;
}

}  // namespace espalier
