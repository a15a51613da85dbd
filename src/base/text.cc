// SPDX-License-Identifier: Apache-2.0
#include "base/text.h"

#include <fmt/format.h>

namespace espalier {
namespace {

constexpr size_t kMaxShownBytes = 200;

// First byte at or after `position` that does not continue a UTF-8 character.
size_t CharacterStart(std::string_view text, size_t position) {
  while (position < text.size() && (static_cast<unsigned char>(text[position]) & 0xC0) == 0x80) ++position;
  return position;
}

void AppendPrintable(std::string_view text, std::string* out) {
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) {
      *out += fmt::format("\\x{:02x}", byte);
    } else {
      *out += c;
    }
  }
}

}  // namespace

std::string Quoted(std::string_view name) {
  std::string out = "'";
  if (name.size() <= kMaxShownBytes) {
    AppendPrintable(name, &out);
  } else {
    const size_t head = CharacterStart(name, kMaxShownBytes / 2);
    const size_t tail = CharacterStart(name, name.size() - kMaxShownBytes / 2);
    AppendPrintable(name.substr(0, head), &out);
    out += "...";
    AppendPrintable(name.substr(tail), &out);
  }
  return out + "'";
}

}  // namespace espalier
