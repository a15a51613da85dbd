// SPDX-License-Identifier: Apache-2.0
//
// What main and the verbs agree on: a verb declares its options and leaves behind what is to be run.
#ifndef ESPALIER_CLI_COMMAND_H_
#define ESPALIER_CLI_COMMAND_H_

#include <espalier/checkpoint.h>
#include <espalier/moe.h>
#include <espalier/status.h>

#include <CLI/CLI.hpp>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "output.h"
#include "team.h"

namespace espalier::cli {

inline constexpr int kExitOk = 0;
inline constexpr int kExitCheckFailed = 1;
inline constexpr int kExitUsage = 2;

struct Invocation {
  Team& team;
  bool json = false;
  std::vector<std::string> arguments = {};  // as the caller gave them
  bool for_teams = false;                   // may be run by several processes
  std::function<Result<int>(Output&)> run;  // gives kExitOk or kExitCheckFailed
};

// One function per verb.
void AddDoctor(CLI::App& app, Invocation& invocation);
void AddInspect(CLI::App& app, Invocation& invocation);
void AddPlan(CLI::App& app, Invocation& invocation);
void AddDecode(CLI::App& app, Invocation& invocation);
void AddRun(CLI::App& app, Invocation& invocation);
void AddVerify(CLI::App& app, Invocation& invocation);
void AddCompare(CLI::App& app, Invocation& invocation);
void AddBench(CLI::App& app, Invocation& invocation);

// A subcommand with --json and an example under its help.
CLI::App* AddCommand(CLI::App& app, Invocation& invocation, const std::string& name,
                     const std::string& description, const std::string& footer);

// A decimal number given to `option`. Errors: kUsage for what is no number, kGeometry outside
// [minimum, maximum].
Result<int64_t> ParseInteger(std::string_view option, std::string_view text, int64_t minimum,
                             int64_t maximum);

// "exact", "fast", "int8". Error: kUsage.
Result<CpuMode> ParseMode(std::string_view option, std::string_view text);

// Error: kUsage.
Result<uint64_t> ParseSeed(std::string_view option, std::string_view text);

// An output must not replace what it is made from. `inputs` that do not exist are passed over. Error: kUsage.
Result<void> CheckOutputPath(std::string_view option, const std::string& output,
                             std::span<const std::filesystem::path> inputs);
// The same for all files of a checkpoint, its configs included, and one input more.
Result<void> CheckOutputPath(std::string_view option, const std::string& output, const Checkpoint& checkpoint,
                             const std::string& input = "");

// A whole file, or none. Error: kIo.
Result<void> WriteText(const std::string& path, const std::string& text);

// What JSON calls a layer: its number in the primary group, else its label.
Json LayerId(const MoeLayer& layer);

Json ProblemJson(const Problem& problem);

// One line per problem, errors first, and a count of those left out.
void PrintProblems(Output& output, std::span<const Problem> problems);

}  // namespace espalier::cli

#endif  // ESPALIER_CLI_COMMAND_H_
