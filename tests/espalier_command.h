// SPDX-License-Identifier: Apache-2.0
//
// The built binary, run as a script would run it.
#ifndef ESPALIER_TESTS_ESPALIER_COMMAND_H_
#define ESPALIER_TESTS_ESPALIER_COMMAND_H_

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "support/subprocess.h"

namespace espalier {

using Json = nlohmann::json;

inline testing::SubprocessResult Espalier(std::vector<std::string> arguments,
                                          const testing::SubprocessOptions& options = {}) {
  arguments.insert(arguments.begin(), ESPALIER_BINARY);
  return testing::RunSubprocess(arguments, options);
}

// Runs with --json and parses the one document that stdout must hold.
struct JsonResult {
  int exit_code = -1;
  Json document;
  std::string standard_error;
};

inline JsonResult EspalierJson(std::vector<std::string> arguments,
                               const testing::SubprocessOptions& options = {}) {
  arguments.push_back("--json");
  testing::SubprocessResult result = Espalier(std::move(arguments), options);
  Json document = Json::parse(result.standard_output, nullptr, false);
  EXPECT_FALSE(document.is_discarded())
      << "not one JSON document: " << result.standard_output << result.standard_error;
  return {result.exit_code, std::move(document), std::move(result.standard_error)};
}

}  // namespace espalier

#endif  // ESPALIER_TESTS_ESPALIER_COMMAND_H_
