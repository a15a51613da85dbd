// SPDX-License-Identifier: Apache-2.0
//
// Typed access to fields of a parsed config or manifest, with messages that name file, key, found and
// legal. Absent and null are the same thing unless a key is required.
#ifndef ESPALIER_SRC_CHECKPOINT_JSON_FIELDS_H_
#define ESPALIER_SRC_CHECKPOINT_JSON_FIELDS_H_

#include <espalier/status.h>
#include <simdjson.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace espalier {

// One JSON object of a file; `where` is the key path to it, empty at the root.
struct JsonObject {
  simdjson::dom::object object;
  std::string source;  // file name for messages
  std::string where;

  // "config.json: text_config.hidden_size"
  std::string Place(std::string_view key) const;

  // The value, or empty when absent or null.
  std::optional<simdjson::dom::element> Find(std::string_view key) const;

  // Empty when absent or null. Error: kFormat when it has another type.
  Result<std::optional<uint64_t>> Unsigned(std::string_view key) const;
  Result<std::optional<double>> Number(std::string_view key) const;
  Result<std::optional<bool>> Bool(std::string_view key) const;
  Result<std::optional<std::string>> String(std::string_view key) const;
  Result<std::optional<JsonObject>> Object(std::string_view key) const;
  Result<std::optional<std::vector<uint64_t>>> UnsignedList(std::string_view key) const;

  // The same, kFormat when absent or null.
  Result<uint64_t> RequireUnsigned(std::string_view key) const;
  Result<bool> RequireBool(std::string_view key) const;
  Result<std::string> RequireString(std::string_view key) const;
  Result<JsonObject> RequireObject(std::string_view key) const;

  // kFormat when a key is not in `known`.
  Result<void> OnlyKeys(std::initializer_list<std::string_view> known) const;
};

// The root as an object. Error: kFormat.
Result<JsonObject> RootObject(simdjson::dom::element root, std::string_view source);

// Equal as JSON values; numbers by value.
bool JsonEqual(simdjson::dom::element a, simdjson::dom::element b);

// Decimal without sign and leading zeros, at most `max`. Empty otherwise.
std::optional<uint64_t> ParseDecimal(std::string_view text, uint64_t max);

}  // namespace espalier

#endif  // ESPALIER_SRC_CHECKPOINT_JSON_FIELDS_H_
