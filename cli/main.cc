// SPDX-License-Identifier: Apache-2.0
//
// espalier: the command line over the library. Picks the verb, turns every failure into a sentence on
// stderr (and an error object under --json) and a stable exit code.
#include <espalier/version.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "command.h"
#include "dist/launcher.h"
#include "dist/world.h"
#include "output.h"
#include "team.h"

namespace espalier::cli {
namespace {

constexpr const char* kFooter =
    "Exit codes: 0 ok, 1 a check failed, 2 usage, 3 io, 4 format, 5 unsupported,\n"
    "            6 geometry or capacity, 7 device\n"
    "\n"
    "Example:\n"
    "  espalier inspect data/tiny-qwen3moe-exl3-mixed\n";

// Opened files must not land on descriptors 0 to 2: text for a closed stdout would go into them.
void KeepStandardStreamsOpen() {
  for (int descriptor = 0; descriptor <= 2; ++descriptor) {
    if (fcntl(descriptor, F_GETFD) != -1 || errno != EBADF) continue;
    // open() takes the lowest free number, which is this one.
    if (open("/dev/null", O_RDWR) != descriptor) return;
  }
}

// Known before parsing, since a parse error must be printed as JSON too.
bool AsksForJson(std::span<char* const> arguments) {
  for (const std::string_view argument : arguments) {
    if (argument == "--") return false;
    if (argument == "--json") return true;
  }
  return false;
}

std::vector<const CLI::App*> Commands(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

std::string CommandNames(const CLI::App& app) {
  std::string names;
  for (const CLI::App* command : Commands(app)) {
    names += (names.empty() ? "" : ", ") + command->get_name();
  }
  return names;
}

// An empty text when there is a known command, or none is needed.
std::string CommandProblem(const CLI::App& app, std::span<char* const> arguments) {
  for (const std::string_view argument : arguments) {
    if (argument.starts_with("--json=")) return "--json takes no value";
  }
  for (const std::string_view argument : arguments) {
    if (argument == "--help" || argument == "-h" || argument == "--version") return "";
    if (argument.starts_with("-")) continue;
    for (const CLI::App* command : Commands(app)) {
      if (command->get_name() == argument) return "";
    }
    return fmt::format("unknown command '{}'; commands: {}", argument, CommandNames(app));
  }
  return fmt::format("a command is missing; commands: {}", CommandNames(app));
}

void AddCommands(CLI::App& app, Invocation& invocation) {
  app.name("espalier");
  app.set_version_flag("--version", "espalier " ESPALIER_VERSION);
  app.add_flag("--json", invocation.json, "One JSON document on stdout, everything else on stderr");
  app.footer(kFooter);
  app.require_subcommand(1);
  AddDoctor(app, invocation);
  AddInspect(app, invocation);
  AddPlan(app, invocation);
  AddDecode(app, invocation);
  AddRun(app, invocation);
  AddVerify(app, invocation);
  AddBench(app, invocation);
  AddCompare(app, invocation);
}

// Most commands are for one process: that many would all do the same work.
Result<void> CheckForTeam(const CLI::App& app, const Invocation& invocation) {
  if (invocation.for_teams || invocation.team.processes() == 1) return {};
  return Error(StatusCode::kUsage,
               fmt::format("{} is for one process, {} were started; under mpirun: run, doctor",
                           app.get_subcommands().front()->get_name(), invocation.team.processes()));
}

// An empty value is mostly a variable of a script that was not set. Taken for "not given", `--rank ""` would
// run all ranks.
Result<void> CheckValues(const CLI::App& app) {
  for (const CLI::Option* option : app.get_subcommands().front()->get_options()) {
    for (const std::string& value : option->results()) {
      if (value.empty()) return Error(StatusCode::kUsage, option->get_name() + ": the value is empty");
    }
  }
  return {};
}

Result<int> ParseAndRun(std::span<char* const> arguments, Team& team, Output& output) {
  if (Result<void> same = team.CheckArguments(arguments); !same) return tl::unexpected(same.error());
  CLI::App app("Runs, checks and shows mixture-of-experts models stored as EXL3 trellis codes.");
  Invocation invocation{.team = team,
                        .json = false,
                        .arguments = {arguments.begin(), arguments.end()},
                        .for_teams = false,
                        .run = {}};
  AddCommands(app, invocation);
  const std::string problem = CommandProblem(app, arguments);
  if (!problem.empty()) return Error(StatusCode::kUsage, problem);
  try {
    // CLI11 takes arguments last first.
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::CallForHelp&) {
    output.Print("{}", app.help());
    output.Document({{"help", app.help()}});
    return kExitOk;
  } catch (const CLI::CallForVersion& version) {
    output.Print("{}\n", version.what());
    output.Document({{"version", ESPALIER_VERSION}});
    return kExitOk;
  } catch (const CLI::ParseError& error) {
    return Error(StatusCode::kUsage, fmt::format("{} (--help shows the options)", error.what()));
  }
  if (Result<void> given = CheckValues(app); !given) return tl::unexpected(given.error());
  if (Result<void> legal = CheckForTeam(app, invocation); !legal) return tl::unexpected(legal.error());
  return invocation.run(output);
}

// What this process comes to by itself, its output written: an error in any case, where an exception would
// leave the others of the team waiting.
Result<int> RunAlone(std::span<char* const> arguments, Team& team, Output& output) {
  try {
    Result<int> result = ParseAndRun(arguments, team, output);
    if (result && !output.Flush()) return Error(StatusCode::kIo, "standard output could not be written");
    return result;
  } catch (const std::bad_alloc&) {
    return Error(StatusCode::kCapacity, "the machine has not enough memory for this");
  } catch (const std::filesystem::filesystem_error& error) {
    return Error(StatusCode::kIo, error.what());
  } catch (const std::system_error& error) {  // in effect: no thread to be had
    return Error(StatusCode::kCapacity, error.what());
  } catch (const std::exception& error) {
    return Error(StatusCode::kUsage, fmt::format("internal error: {}", error.what()));
  }
}

int Fail(const Status& status, Output& output) {
  output.Fail(StatusCodeName(status.code()), status.message());
  if (output.Flush()) return ExitCode(status.code());
  output.Note("io error: standard output could not be written");
  return ExitCode(StatusCode::kIo);
}

int Main(std::span<char* const> arguments) {
  const bool json = AsksForJson(arguments);
  Result<World> world = JoinWorld();
  if (!world) {
    const std::optional<Launcher> launcher = FindLauncher();
    Output output(json, launcher && launcher->rank != 0);
    return Fail(world.error(), output);
  }
  Team team(*std::move(world));
  Output output(json, !team.speaks());
  const Result<int> result = RunAlone(arguments, team, output);
  const Result<void> mine = result ? Result<void>() : tl::unexpected(result.error());
  const Result<void> agreed = team.Agree(mine);
  if (agreed) return *result;
  if (!team.lost()) return Fail(agreed.error(), output);
  // Process 0 may not come to speak. As text, since a second JSON document would be one too many.
  Output own(json && team.speaks());
  return Fail(agreed.error(), own);
}

}  // namespace
}  // namespace espalier::cli

int main(int argc, char** argv) {
  espalier::cli::KeepStandardStreamsOpen();
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a write beyond the limit is an error like any other
  const auto count = static_cast<size_t>(std::max(argc - 1, 0));
  try {
    return espalier::cli::Main(std::span<char* const>(argv + (argc > 0 ? 1 : 0), count));
  } catch (...) {
    // Even the error report failed, most likely for want of memory.
    std::fputs("espalier: capacity error: the machine has not enough memory for this\n", stderr);
    return espalier::ExitCode(espalier::StatusCode::kCapacity);
  }
}
