// SPDX-License-Identifier: Apache-2.0
#include "command.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <vector>

#include "base/file.h"

namespace espalier::cli {
namespace {

constexpr size_t kMaxProblemLines = 12;

}  // namespace

CLI::App* AddCommand(CLI::App& app, Invocation& invocation, const std::string& name,
                     const std::string& description, const std::string& footer) {
  CLI::App* command = app.add_subcommand(name, description);
  command->add_flag("--json", invocation.json, "One JSON document on stdout, everything else on stderr");
  command->footer(footer);
  return command;
}

Result<int64_t> ParseInteger(std::string_view option, std::string_view text, int64_t minimum,
                             int64_t maximum) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = end == text.data() + text.size() && !text.empty();
  if (!whole || error == std::errc::invalid_argument) {
    return Error(StatusCode::kUsage, fmt::format("{} '{}' is not a whole number", option, text));
  }
  if (error == std::errc::result_out_of_range || value < minimum || value > maximum) {
    return Error(StatusCode::kGeometry,
                 fmt::format("{} {} is out of range; legal: {} to {}", option, text, minimum, maximum));
  }
  return value;
}

Result<CpuMode> ParseMode(std::string_view option, std::string_view text) {
  for (const CpuMode mode : {CpuMode::kExact, CpuMode::kFast, CpuMode::kInt8}) {
    if (text == CpuModeName(mode)) return mode;
  }
  return Error(StatusCode::kUsage, fmt::format("{} '{}': legal: exact, fast, int8", option, text));
}

Result<uint64_t> ParseSeed(std::string_view option, std::string_view text) {
  uint64_t seed = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
  if (error != std::errc() || end != text.data() + text.size()) {
    return Error(StatusCode::kUsage, fmt::format("{} '{}': legal: 0 to 2^64 - 1", option, text));
  }
  return seed;
}

Result<void> CheckOutputPath(std::string_view option, const std::string& output,
                             std::span<const std::filesystem::path> inputs) {
  for (const std::filesystem::path& input : inputs) {
    std::error_code none;  // a file that is not there is no other file
    if (!std::filesystem::equivalent(output, input, none)) continue;
    return Error(StatusCode::kUsage, fmt::format("{} {}: is the input {} itself; legal: another file", option,
                                                 output, input.string()));
  }
  return {};
}

Result<void> CheckOutputPath(std::string_view option, const std::string& output, const Checkpoint& checkpoint,
                             const std::string& input) {
  std::vector<std::filesystem::path> inputs;
  for (const FileInfo& file : checkpoint.files()) inputs.push_back(file.path);
  std::error_code none;
  const bool is_folder = std::filesystem::is_directory(checkpoint.path(), none);
  const std::filesystem::path folder = is_folder ? checkpoint.path() : checkpoint.path().parent_path();
  for (auto entry = std::filesystem::directory_iterator(folder.empty() ? "." : folder, none);
       !none && entry != std::filesystem::directory_iterator(); entry.increment(none)) {
    if (entry->path().extension() == ".json") inputs.push_back(entry->path());
  }
  if (!input.empty()) inputs.emplace_back(input);
  return CheckOutputPath(option, output, inputs);
}

Result<void> WriteText(const std::string& path, const std::string& text) {
  Result<AtomicFile> file = AtomicFile::Create(path);
  if (!file) return tl::unexpected(file.error());
  if (auto appended = file->Append(std::as_bytes(std::span(text))); !appended) return appended;
  return file->Commit();
}

Json LayerId(const MoeLayer& layer) {
  if (layer.label == std::to_string(layer.number)) return layer.number;
  return layer.label;
}

Json ProblemJson(const Problem& problem) {
  return {{"severity", problem.severity == Problem::Severity::kError ? "error" : "warning"},
          {"file", TextOrNull(problem.file)},
          {"tensor", TextOrNull(problem.tensor)},
          {"message", problem.message},
          {"layer", TextOrNull(problem.layer)}};
}

void PrintProblems(Output& output, std::span<const Problem> problems) {
  if (problems.empty()) {
    output.Print("problems       none\n");
    return;
  }
  std::vector<const Problem*> ordered;
  for (const auto severity : {Problem::Severity::kError, Problem::Severity::kWarning}) {
    for (const Problem& problem : problems) {
      if (problem.severity == severity) ordered.push_back(&problem);
    }
  }
  output.Print("problems       {}\n", problems.size());
  for (size_t i = 0; i < std::min(ordered.size(), kMaxProblemLines); ++i) {
    const Problem& problem = *ordered[i];
    // Messages about a config name it themselves.
    std::string text = problem.message;
    if (!problem.tensor.empty()) text = problem.tensor + ": " + text;
    if (!problem.file.empty() && !text.starts_with(problem.file)) text = problem.file + ": " + text;
    output.Print("  {:<8} {}\n", problem.severity == Problem::Severity::kError ? "error" : "warning", text);
  }
  if (ordered.size() > kMaxProblemLines) {
    output.Print("  and {} more (--json lists all)\n", ordered.size() - kMaxProblemLines);
  }
}

}  // namespace espalier::cli
