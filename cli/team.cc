// SPDX-License-Identifier: Apache-2.0
#include "team.h"

#include <fmt/format.h>

#include <cstddef>
#include <string>

namespace espalier::cli {
namespace {

constexpr double kNanosecondsPerSecond = 1e9;

// One text that two different lists of arguments cannot share.
std::string Joined(std::span<char* const> arguments) {
  std::string text;
  for (const char* argument : arguments) (text += argument) += '\0';
  return text;
}

// The text of process 0.
Result<std::string> First(Communicator& communicator, std::string text) {
  uint64_t bytes = text.size();
  if (auto sent = communicator.Broadcast(std::as_writable_bytes(std::span(&bytes, 1)), 0); !sent) {
    return tl::unexpected(sent.error());
  }
  text.resize(bytes);
  if (auto sent = communicator.Broadcast(std::as_writable_bytes(std::span(text)), 0); !sent) {
    return tl::unexpected(sent.error());
  }
  return text;
}

// Sums of different lengths would leave some of the processes waiting.
Result<void> CheckSameSize(Communicator& communicator, int64_t size) {
  const Result<int64_t> largest = communicator.AllReduceMax(size);
  if (!largest) return tl::unexpected(largest.error());
  const Result<int64_t> minus_smallest = communicator.AllReduceMax(-size);
  if (!minus_smallest) return tl::unexpected(minus_smallest.error());
  if (*largest == -*minus_smallest) return {};
  return Error(StatusCode::kGeometry,
               "the processes have outputs of different sizes; legal: the same input for each of them");
}

}  // namespace

Result<void> Team::Agree(const Result<void>& mine) {
  if (failure_) return tl::unexpected(*failure_);
  return Keep(AgreeOn(*world_.communicator, mine));
}

Result<void> Team::Sum(std::span<float> values) {
  if (Result<void> ready = Agree({}); !ready) return ready;
  Communicator& communicator = *world_.communicator;
  if (Result<void> same = Keep(CheckSameSize(communicator, static_cast<int64_t>(values.size()))); !same) {
    return same;
  }
  return Keep(communicator.AllReduceSum(values));
}

Result<double> Team::Slowest(double seconds) {
  if (Result<void> ready = Agree({}); !ready) return tl::unexpected(ready.error());
  const auto mine = static_cast<int64_t>(seconds * kNanosecondsPerSecond);
  const Result<int64_t> slowest = Keep(world_.communicator->AllReduceMax(mine));
  if (!slowest) return tl::unexpected(slowest.error());
  return static_cast<double>(*slowest) / kNanosecondsPerSecond;
}

Result<void> Team::CheckSame(std::string_view what, const std::string& text) {
  if (Result<void> ready = Agree({}); !ready) return ready;
  const Result<std::string> first = Keep(First(*world_.communicator, text));
  if (!first) return tl::unexpected(first.error());
  if (*first == text) return Agree({});
  return Agree(Error(StatusCode::kGeometry,
                     fmt::format("the processes have different {}; legal: the same for each of them", what)));
}

Result<void> Team::CheckArguments(std::span<char* const> arguments) {
  if (Result<void> ready = Agree({}); !ready) return ready;
  const std::string mine = Joined(arguments);
  const Result<std::string> first = Keep(First(*world_.communicator, mine));
  if (!first) return tl::unexpected(first.error());
  if (*first == mine) return Agree({});
  return Agree(Error(StatusCode::kUsage,
                     "the processes were started with different arguments; legal: one command for all"));
}

}  // namespace espalier::cli
