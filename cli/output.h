// SPDX-License-Identifier: Apache-2.0
//
// What the commands print, in one place. Without --json, text goes to stdout; with it, stdout holds
// exactly one JSON document and everything else goes to stderr. Of several processes under mpirun one
// prints; the others are muted.
#ifndef ESPALIER_CLI_OUTPUT_H_
#define ESPALIER_CLI_OUTPUT_H_

#include <espalier/status.h>
#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace espalier::cli {

// Keys stay in the order in which they are written.
using Json = nlohmann::ordered_json;

class Output {
 public:
  explicit Output(bool json, bool muted = false) : json_(json), muted_(muted) {}
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  bool json() const { return json_; }

  // Text for people on stdout; dropped under --json. Control characters other than newlines are
  // written as \xNN: names come from files and must not drive the terminal.
  template <typename... Args>
  void Print(fmt::format_string<Args...> format, Args&&... args) {
    if (!json_ && !muted_) PrintText(fmt::format(format, std::forward<Args>(args)...));
  }

  // A remark on stderr, in both modes.
  void Note(std::string_view sentence);

  // The result of the command; dropped without --json. Numbers that are not finite become null.
  void Document(const Json& document);

  // The sizes that a refused --tp could have had; part of the error object.
  void SetLegalTp(std::vector<int> sizes) { legal_tp_ = std::move(sizes); }

  // The sentence on stderr and, under --json, the error object on stdout unless a document is there
  // already.
  void Fail(std::string_view category, std::string_view message);

  // False when stdout could not take everything for another reason than being closed.
  bool Flush();

 private:
  void PrintText(const std::string& text);
  void Write(std::string_view text);

  bool json_;
  bool muted_;
  bool document_written_ = false;
  bool write_failed_ = false;
  std::vector<int> legal_tp_;
};

// One line on stderr while long work goes on, only when stderr is a terminal; cleared at the end.
class Progress {
 public:
  explicit Progress(std::string label);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Redraws at most ten times a second.
  void Update(uint64_t done, uint64_t total);
  void SetLabel(std::string label) { label_ = std::move(label); }

 private:
  std::string label_;
  bool enabled_ = false;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point last_draw_;
};

// Control characters as \xNN, newlines kept.
std::string Printable(std::string_view text);

// "17 B", "2.44 MiB".
std::string BytesText(uint64_t bytes);

// Null for 0: what an absent number of a config is.
Json NumberOrNull(uint64_t number);

// Null for an empty text.
Json TextOrNull(std::string_view text);

}  // namespace espalier::cli

#endif  // ESPALIER_CLI_OUTPUT_H_
