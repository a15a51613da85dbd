// SPDX-License-Identifier: Apache-2.0
//
// JSON as the library accepts it: strict JSON in valid UTF-8, no key twice in one object, nested at
// most kMaxJsonDepth deep. Parsing is simdjson's; this adds the checks and the error texts.
#ifndef ESPALIER_SRC_BASE_JSON_H_
#define ESPALIER_SRC_BASE_JSON_H_

#include <espalier/status.h>
#include <simdjson.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace espalier {

inline constexpr int kMaxJsonDepth = 64;

// Owns the parsed text; elements and string views point into it and die with it.
class JsonDocument {
 public:
  // `source` names the text in messages ("config.json", "header of model.safetensors").
  // Error: kFormat.
  static Result<JsonDocument> Parse(std::string_view text, std::string_view source);

  simdjson::dom::element root() const { return root_; }

 private:
  std::unique_ptr<simdjson::dom::parser> parser_;
  simdjson::dom::element root_;
};

// Python's json module writes a float without a finite value as NaN, Infinity or -Infinity, and configs of
// published models hold such ("time_step_limit": [0.0, Infinity]). The text with `null` in their place;
// strings stay as they are.
std::string NonFiniteAsNull(std::string_view text);

// Short name of an element's type for messages: "object", "string", "negative integer" ...
std::string_view JsonTypeName(simdjson::dom::element element);

}  // namespace espalier

#endif  // ESPALIER_SRC_BASE_JSON_H_
