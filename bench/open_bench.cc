// SPDX-License-Identifier: Apache-2.0
//
// open_bench [ESPALIER]
//
// What opening a checkpoint costs: wall time, processor time and peak memory, each sample in a process of its
// own. Shows that the cost is linear in the number of tensors and independent of the payload. With the path
// of the espalier binary, `espalier inspect` is measured as well. Prints raw samples; files come from the
// page cache.
#include <espalier/checkpoint.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/big_checkpoint.h"
#include "support/temporary_directory.h"

namespace espalier {
namespace {

constexpr int kSamples = 5;

struct Sample {
  double wall_seconds = 0;
  double cpu_seconds = 0;
  double peak_mib = 0;
};

double Seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

// Runs a command with its standard output thrown away. Throws when it fails.
Sample Measure(std::vector<std::string> command) {
  std::vector<char*> arguments;
  for (std::string& word : command) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  const auto begin = std::chrono::steady_clock::now();
  pid_t child = 0;
  const int error = posix_spawn(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0)
    throw std::runtime_error(fmt::format("cannot run {}: {}", command[0], std::strerror(error)));
  int status = 0;
  rusage usage{};
  if (wait4(child, &status, 0, &usage) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    throw std::runtime_error(fmt::format("{} failed with status {}", fmt::join(command, " "), status));
  }
  const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - begin;
  return {.wall_seconds = wall.count(),
          .cpu_seconds = Seconds(usage.ru_utime) + Seconds(usage.ru_stime),
          .peak_mib = static_cast<double>(usage.ru_maxrss) / 1024};
}

void Report(const std::string& what, uint64_t tensors, const std::vector<std::string>& command) {
  std::vector<double> wall;
  std::vector<double> cpu;
  double peak_mib = 0;
  for (int i = 0; i < kSamples; ++i) {
    const Sample sample = Measure(command);
    wall.push_back(sample.wall_seconds);
    cpu.push_back(sample.cpu_seconds);
    peak_mib = std::max(peak_mib, sample.peak_mib);
  }
  std::vector<double> sorted = cpu;
  std::sort(sorted.begin(), sorted.end());
  fmt::print("{:<28} wall_s [{:.3f}]  cpu_s [{:.3f}]  cpu_us_per_tensor {:.3f}  peak_mib {:.0f}\n", what,
             fmt::join(wall, " "), fmt::join(cpu, " "),
             1e6 * sorted[kSamples / 2] / static_cast<double>(tensors), peak_mib);
}

void MeasureCheckpoint(const std::string& what, const testing::BigCheckpointOptions& options,
                       const std::string& self, const std::string& binary) {
  const testing::TemporaryDirectory directory;
  const testing::BigCheckpointFacts facts = testing::WriteBigCheckpoint(directory.path(), options);
  fmt::print("# {}: {} tensors, {} shards, {} bytes of headers, {} of JSON, {} of payload\n", what,
             facts.tensors, options.shards, facts.header_bytes, facts.json_bytes, facts.payload_bytes);
  Report(what + " open", facts.tensors, {self, "--open", directory.path().string()});
  if (!binary.empty()) {
    Report(what + " inspect", facts.tensors, {binary, "inspect", directory.path().string(), "--json"});
  }
}

int Open(const char* path) {
  const Result<Checkpoint> opened = Checkpoint::Open(path);
  if (!opened) {
    fmt::print(stderr, "{}\n", opened.error().message());
    return ExitCode(opened.error().code());
  }
  return opened->layers().empty() ? 1 : 0;
}

void MeasureAll(const std::string& binary) {
#ifndef NDEBUG
  fmt::print(
      "# WARNING: assertions are on; build with CMAKE_BUILD_TYPE=Release before quoting these numbers\n");
#endif
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  for (const uint64_t tensors : {125'000, 250'000, 500'000}) {
    testing::BigCheckpointOptions options;
    options.tensors = tensors;
    MeasureCheckpoint(fmt::format("{}k", tensors / 1000), options, self, binary);
  }
  // The same number of tensors without and with 197 GB behind them.
  testing::BigCheckpointOptions wide;
  wide.hidden_channels = 2048;
  wide.intermediate_channels = 2048;
  MeasureCheckpoint("500k, 197 GB", wide, self, binary);
}

}  // namespace
}  // namespace espalier

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "--open") == 0) return espalier::Open(argv[2]);
  try {
    espalier::MeasureAll(argc > 1 ? argv[1] : "");
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 3;
  }
  return 0;
}
