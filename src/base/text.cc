// SPDX-License-Identifier: Apache-2.0
#include "base/text.h"

#include <fmt/format.h>

namespace espalier {
namespace {

constexpr size_t kMaxShownBytes = 200;
constexpr size_t kMaxMessageBytes = 4000;

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

void AppendShortened(std::string_view text, size_t max_bytes, std::string* out) {
  if (text.size() <= max_bytes) return AppendPrintable(text, out);
  const size_t head = CharacterStart(text, max_bytes / 2);
  const size_t tail = CharacterStart(text, text.size() - max_bytes / 2);
  AppendPrintable(text.substr(0, head), out);
  *out += "...";
  AppendPrintable(text.substr(tail), out);
}

}  // namespace

std::string Quoted(std::string_view name) {
  std::string out = "'";
  AppendShortened(name, kMaxShownBytes, &out);
  return out + "'";
}

std::string Printable(std::string_view message) {
  std::string out;
  AppendShortened(message, kMaxMessageBytes, &out);
  return out;
}

}  // namespace espalier
