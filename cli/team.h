// SPDX-License-Identifier: Apache-2.0
//
// The processes that run one command together: one, or one for each rank under mpirun. They do the same
// things in the same order and end with the same exit code; the first of them speaks.
#ifndef ESPALIER_CLI_TEAM_H_
#define ESPALIER_CLI_TEAM_H_

#include <espalier/status.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "dist/world.h"

namespace espalier::cli {

class Team {
 public:
  explicit Team(World world) : world_(std::move(world)) {}

  // By mpirun or its like, be it as a single process.
  bool launched() const { return world_.launched; }
  int rank() const { return world_.communicator->rank(); }
  int processes() const { return world_.communicator->world(); }
  bool speaks() const { return rank() == 0; }
  // The processes cannot reach each other any more: each speaks for itself now.
  bool lost() const { return world_.communicator->broken(); }

  // These are for all processes together, and begin by agreeing that each of them is well. A process that
  // fails on its way to one of them returns its error to main(), which brings it to Agree: there it meets the
  // others, at whichever call they have come to, and all of them have that error. From then on every call
  // gives it at once, without a word to the others.
  //
  // The error of the lowest process that has one; success when none has.
  Result<void> Agree(const Result<void>& mine);
  // Adds up `values` over the processes; all get the sum. Error: kGeometry when they have different numbers.
  Result<void> Sum(std::span<float> values);
  // The largest of the processes' times, which is how long the work took.
  Result<double> Slowest(double seconds);
  // Error: kGeometry when the processes do not hold the same text; `what` names it.
  Result<void> CheckSame(std::string_view what, const std::string& text);
  // Error: kUsage when the processes were not started with the same arguments.
  Result<void> CheckArguments(std::span<char* const> arguments);

 private:
  template <typename T>
  Result<T> Keep(Result<T> result) {
    if (!result) failure_ = result.error();
    return result;
  }

  World world_;
  std::optional<Status> failure_;
};

}  // namespace espalier::cli

#endif  // ESPALIER_CLI_TEAM_H_
