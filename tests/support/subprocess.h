// SPDX-License-Identifier: Apache-2.0
//
// Runs a program and takes down what it printed.
#ifndef ESPALIER_TESTS_SUPPORT_SUBPROCESS_H_
#define ESPALIER_TESTS_SUPPORT_SUBPROCESS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace espalier::testing {

struct SubprocessOptions {
  enum class Stdout {
    kCapture,
    kClosed,      // no descriptor 1 at all
    kBrokenPipe,  // a pipe whose reader is gone
    kFull,        // /dev/full
  };
  Stdout standard_output = Stdout::kCapture;
  std::vector<std::pair<std::string, std::string>> environment;  // added to the caller's
  std::string directory;                                         // to start in; empty = the caller's
  uint64_t max_address_space_bytes = 0;                          // 0 = no limit
  unsigned timeout_seconds = 120;                                // then it is killed by SIGALRM
};

struct SubprocessResult {
  int exit_code = -1;  // -1 when a signal ended it
  int signal = 0;
  std::string standard_output;
  std::string standard_error;
};

// `arguments[0]` is the program's path. Standard input is empty. A program that cannot be started gives
// exit code 127.
SubprocessResult RunSubprocess(const std::vector<std::string>& arguments,
                               const SubprocessOptions& options = {});

}  // namespace espalier::testing

#endif  // ESPALIER_TESTS_SUPPORT_SUBPROCESS_H_
