// SPDX-License-Identifier: Apache-2.0
#include "support/subprocess.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>

namespace espalier::testing {
namespace {

constexpr int kCannotStart = 127;

struct Pipe {
  int read_end = -1;
  int write_end = -1;

  Pipe() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) std::abort();
    read_end = ends[0];
    write_end = ends[1];
  }
};

void ConnectStdout(SubprocessOptions::Stdout kind, const Pipe& pipe) {
  switch (kind) {
    case SubprocessOptions::Stdout::kCapture:
    case SubprocessOptions::Stdout::kBrokenPipe:
      dup2(pipe.write_end, STDOUT_FILENO);
      return;
    case SubprocessOptions::Stdout::kClosed:
      close(STDOUT_FILENO);
      return;
    case SubprocessOptions::Stdout::kFull:
      dup2(open("/dev/full", O_WRONLY | O_CLOEXEC), STDOUT_FILENO);
      return;
  }
}

[[noreturn]] void StartChild(const std::vector<std::string>& arguments, const SubprocessOptions& options,
                             const Pipe& out, const Pipe& err) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  for (const auto& [name, value] : options.environment) setenv(name.c_str(), value.c_str(), 1);
  if (!options.directory.empty() && chdir(options.directory.c_str()) != 0) _exit(kCannotStart);
  if (options.max_address_space_bytes != 0) {
    const rlimit limit{options.max_address_space_bytes, options.max_address_space_bytes};
    if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(kCannotStart);
  }
  dup2(open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
  dup2(err.write_end, STDERR_FILENO);
  ConnectStdout(options.standard_output, out);
  alarm(options.timeout_seconds);
  execv(argv[0], argv.data());
  _exit(kCannotStart);
}

// Both ends at once: a program that fills one pipe while we wait at the other would hang.
void ReadBoth(int out, int err, SubprocessResult& result) {
  std::array<pollfd, 2> files{pollfd{out, POLLIN, 0}, pollfd{err, POLLIN, 0}};
  std::array<std::string*, 2> texts{&result.standard_output, &result.standard_error};
  int open_files = (out >= 0 ? 1 : 0) + (err >= 0 ? 1 : 0);
  while (open_files > 0) {
    if (poll(files.data(), files.size(), -1) < 0 && errno != EINTR) return;
    for (size_t i = 0; i < files.size(); ++i) {
      if (files[i].fd < 0 || files[i].revents == 0) continue;
      char buffer[65536];
      const ssize_t bytes = read(files[i].fd, buffer, sizeof(buffer));
      if (bytes > 0) {
        texts[i]->append(buffer, static_cast<size_t>(bytes));
      } else if (bytes == 0 || errno != EINTR) {
        files[i].fd = -1;
        --open_files;
      }
    }
  }
}

}  // namespace

SubprocessResult RunSubprocess(const std::vector<std::string>& arguments, const SubprocessOptions& options) {
  const Pipe out;
  const Pipe err;
  if (options.standard_output == SubprocessOptions::Stdout::kBrokenPipe) close(out.read_end);
  const pid_t child = fork();
  if (child < 0) std::abort();
  if (child == 0) StartChild(arguments, options, out, err);
  close(out.write_end);
  close(err.write_end);

  SubprocessResult result;
  const bool broken = options.standard_output == SubprocessOptions::Stdout::kBrokenPipe;
  ReadBoth(broken ? -1 : out.read_end, err.read_end, result);
  if (!broken) close(out.read_end);
  close(err.read_end);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) result.signal = WTERMSIG(status);
  return result;
}

}  // namespace espalier::testing
