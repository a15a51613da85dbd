// SPDX-License-Identifier: Apache-2.0
#include "output.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

namespace espalier::cli {
namespace {

constexpr auto kRedrawInterval = std::chrono::milliseconds(100);
constexpr int kBarCharacters = 30;

void WriteStderr(std::string_view text) { std::fwrite(text.data(), 1, text.size(), stderr); }

}  // namespace

void Output::Note(std::string_view sentence) {
  if (muted_) return;
  WriteStderr(fmt::format("espalier: {}\n", Printable(sentence)));
}

void Output::Document(const Json& document) {
  if (!json_ || muted_ || document_written_) return;
  document_written_ = true;
  // Names in files need not be valid UTF-8, a JSON document must be.
  Write(document.dump(2, ' ', false, Json::error_handler_t::replace));
  Write("\n");
}

void Output::Fail(std::string_view category, std::string_view message) {
  if (muted_) return;
  WriteStderr(fmt::format("espalier: {} error: {}\n", category, Printable(message)));
  Json error = {{"category", category}, {"message", message}};
  if (!legal_tp_.empty()) error["legal_tp"] = legal_tp_;
  Document({{"error", error}});
}

bool Output::Flush() {
  if (std::fflush(stdout) != 0 && errno != EPIPE && errno != EBADF) write_failed_ = true;
  return !write_failed_;
}

void Output::PrintText(const std::string& text) { Write(Printable(text)); }

void Output::Write(std::string_view text) {
  // A reader that has gone away (`espalier inspect ... | head`) is no failure of the command.
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() && errno != EPIPE && errno != EBADF) {
    write_failed_ = true;
  }
}

Progress::Progress(std::string label) : label_(std::move(label)), enabled_(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() {
  if (drawn_) WriteStderr("\r\x1b[K");
}

void Progress::Update(uint64_t done, uint64_t total) {
  if (!enabled_ || total == 0) return;
  const auto now = std::chrono::steady_clock::now();
  if (drawn_ && now - last_draw_ < kRedrawInterval) return;
  last_draw_ = now;
  drawn_ = true;
  const double share = std::min(1.0, static_cast<double>(done) / static_cast<double>(total));
  const int filled = static_cast<int>(share * kBarCharacters);
  WriteStderr(fmt::format("\r\x1b[K{} [{:#<{}}{:.<{}}] {:3.0f}%", Printable(label_), "", filled, "",
                          kBarCharacters - filled, share * 100));
  std::fflush(stderr);
}

std::string Printable(std::string_view text) {
  std::string printable;
  printable.reserve(text.size());
  unsigned char before = 0;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    const bool second_controls = before == 0xC2 && byte >= 0x80 && byte < 0xA0;  // U+0080 to U+009F
    before = byte;
    if ((byte < 0x20 && c != '\n') || byte == 0x7f || second_controls) {
      printable += fmt::format("\\x{:02x}", byte);
    } else {
      printable += c;
    }
  }
  return printable;
}

std::string BytesText(uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", value, value < 100 ? 2 : 0, kUnits[unit]);
}

Json NumberOrNull(uint64_t number) { return number == 0 ? Json() : Json(number); }

Json TextOrNull(std::string_view text) { return text.empty() ? Json() : Json(text); }

}  // namespace espalier::cli
