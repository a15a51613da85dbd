// SPDX-License-Identifier: Apache-2.0
//
// One rank of a world, started by mpirun: makes every call of the communicator and compares with what must
// come out. dist_test runs it at several sizes. Exit code 0 and "ok" from rank 0, else 1 and a line on
// stderr.
//
//   mpirun -n 3 check_ranks sums [MAX_ELEMENTS_PER_CALL]    sums and words, cut into calls of that size
//   mpirun -n 3 check_ranks agree                           every set of failing ranks
//   mpirun -n 3 check_ranks leave                           rank 1 ends while the others wait for it
//   mpirun -n 3 check_ranks truncate                        rank 1 expects less than is sent to it
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "dist/world.h"

namespace espalier {
namespace {

constexpr int kFailed = 1;
constexpr int kLeft = 7;

[[noreturn]] void Die(const std::string& message) {
  std::fprintf(stderr, "check_ranks: %s\n", message.c_str());
  // Not exit(): the launcher ends the others when one leaves without a farewell.
  std::_Exit(kFailed);
}

void Expect(bool holds, const std::string& what) {
  if (!holds) Die(what);
}

void Expect(const Result<void>& done) {
  if (!done) Die(done.error().message());
}

// Whole numbers, so that every order of additions gives the same sum.
float Value(int rank, uint64_t index) { return static_cast<float>((rank + 1) * (index % 97 + 1)); }

float Sum(int world, uint64_t index) {
  float sum = 0;
  for (int rank = 0; rank < world; ++rank) sum += Value(rank, index);
  return sum;
}

std::vector<float> Values(int rank, uint64_t size) {
  std::vector<float> values(size);
  for (uint64_t i = 0; i < size; ++i) values[i] = Value(rank, i);
  return values;
}

void CheckAllReduce(Communicator& communicator, uint64_t size) {
  std::vector<float> values = Values(communicator.rank(), size);
  Expect(communicator.AllReduceSum(values));
  Expect(communicator.Synchronize());
  for (uint64_t i = 0; i < size; ++i) {
    Expect(values[i] == Sum(communicator.world(), i), fmt::format("all-reduce of {}: element {}", size, i));
  }
}

void CheckReduceScatter(Communicator& communicator, const std::vector<uint64_t>& counts) {
  const auto rank = static_cast<size_t>(communicator.rank());
  uint64_t size = 0;
  uint64_t first = 0;
  for (size_t r = 0; r < counts.size(); ++r) {
    if (r == rank) first = size;
    size += counts[r];
  }
  const std::vector<float> values = Values(communicator.rank(), size);
  // One more on either side, which must stay as it is.
  std::vector<float> piece(counts[rank] + 2, -1);
  Expect(communicator.ReduceScatterSum(values, counts, std::span(piece).subspan(1, counts[rank])));
  Expect(communicator.Synchronize());
  const std::string what = fmt::format("reduce-scatter of {}", fmt::join(counts, " + "));
  for (uint64_t i = 0; i < counts[rank]; ++i) {
    Expect(piece[i + 1] == Sum(communicator.world(), first + i), fmt::format("{}: element {}", what, i));
  }
  Expect(piece.front() == -1 && piece.back() == -1, what + ": wrote beyond its piece");
  Expect(values == Values(communicator.rank(), size), what + ": changed its input");
}

// 0, 1, 2 ... of `unit` elements, or the other way round, or all for one rank, or the same for all.
std::vector<std::vector<uint64_t>> CountLists(int world, uint64_t unit) {
  std::vector<std::vector<uint64_t>> lists(4);
  for (int rank = 0; rank < world; ++rank) {
    const auto r = static_cast<uint64_t>(rank);
    lists[0].push_back(r * unit);
    lists[1].push_back((static_cast<uint64_t>(world) - r) * unit + r);
    lists[2].push_back(rank == world - 1 ? unit : 0);
    lists[3].push_back(unit);
  }
  return lists;
}

void CheckWords(Communicator& communicator) {
  const int rank = communicator.rank();
  const int world = communicator.world();
  for (int root = 0; root < world; ++root) {
    std::string text(100, static_cast<char>('a' + rank));
    Expect(communicator.Broadcast(std::as_writable_bytes(std::span(text)), root));
    Expect(text == std::string(100, static_cast<char>('a' + root)), fmt::format("broadcast from {}", root));
  }
  Expect(communicator.Broadcast({}, 0));
  const Result<int64_t> max = communicator.AllReduceMax(-(int64_t{1} << 40) * (rank + 1));
  Expect(max && *max == -(int64_t{1} << 40), "the largest of negative numbers");
}

// Refused before anything is sent: the calls after these still find each other.
void CheckRefusals(Communicator& communicator) {
  const auto world = static_cast<size_t>(communicator.world());
  const auto refused = [](const Result<void>& done) {
    return !done && done.error().code() == StatusCode::kUsage;
  };
  std::vector<float> in(world);
  std::vector<float> out(1);
  std::vector<uint64_t> counts(world, 1);
  Expect(refused(communicator.ReduceScatterSum(in, std::span(counts).first(world - 1), out)), "few counts");
  Expect(refused(communicator.ReduceScatterSum(in, counts, {})), "no room");
  counts.back() = 2;
  Expect(refused(communicator.ReduceScatterSum(in, counts, out)), "counts above the input");
  counts.back() = ~uint64_t{0};
  Expect(refused(communicator.ReduceScatterSum(in, counts, out)), "counts that overflow");
  counts.back() = 0;
  Expect(refused(communicator.ReduceScatterSum(in, counts, out)), "counts below the input");
  for (const int root : {-1, communicator.world()}) {
    Expect(refused(communicator.Broadcast({}, root)), "a root that is not there");
  }
  Expect(!communicator.broken(), "a refusal does not break anything");
}

void CheckSums(Communicator& communicator) {
  for (const uint64_t size : {0, 1, 7, 1000, 100003}) CheckAllReduce(communicator, size);
  for (const uint64_t unit : {0, 1, 5, 4099}) {
    for (const auto& counts : CountLists(communicator.world(), unit))
      CheckReduceScatter(communicator, counts);
  }
  CheckWords(communicator);
  CheckRefusals(communicator);
  CheckAllReduce(communicator, 3);
}

void CheckAgree(Communicator& communicator) {
  const int rank = communicator.rank();
  const int world = communicator.world();
  for (unsigned failing = 0; failing < 1u << world; ++failing) {
    const auto fails = [&](int r) { return (failing >> r & 1) != 0; };
    Result<void> mine;
    if (fails(rank)) mine = Error(StatusCode::kFormat, fmt::format("message of {}", rank));
    const Result<void> agreed = AgreeOn(communicator, mine);
    Expect(agreed.has_value() == (failing == 0), fmt::format("agreement on {:b}", failing));
    if (agreed) continue;
    int lowest = 0;
    while (!fails(lowest)) ++lowest;
    const bool all = failing + 1 == 1u << world;
    const std::string message =
        all ? "message of 0" : fmt::format("rank {} of {}: message of {}", lowest, world, lowest);
    Expect(agreed.error().code() == StatusCode::kFormat && agreed.error().message() == message,
           fmt::format("agreement on {:b}: {}", failing, agreed.error().message()));
  }
}

void Leave(Communicator& communicator) {
  if (communicator.rank() == 1) std::_Exit(kLeft);
  std::vector<float> values(1000);
  Expect(communicator.AllReduceSum(values));
}

// The way to an error from MPI that needs no broken network.
int Truncate(Communicator& communicator) {
  std::vector<std::byte> bytes(communicator.rank() == 1 ? 8 : 64);
  const Result<void> sent = communicator.Broadcast(bytes, 0);
  if (communicator.rank() != 1) return 0;
  Expect(!sent && sent.error().code() == StatusCode::kDevice && communicator.broken(),
         "a truncated message is an error");
  std::fprintf(stderr, "check_ranks: %s\n", sent.error().message().c_str());
  return ExitCode(sent.error().code());
}

int Main(std::span<char*> arguments) {
  const std::string_view what = arguments.size() > 1 ? arguments[1] : "";
  WorldOptions options;
  if (arguments.size() > 2) options.max_elements_per_call = std::atoi(arguments[2]);
  const Result<World> world = JoinWorld(options);
  if (!world) Die(world.error().message());
  Communicator& communicator = *world->communicator;
  if (what == "truncate") return Truncate(communicator);
  if (what == "sums") {
    CheckSums(communicator);
  } else if (what == "agree") {
    CheckAgree(communicator);
  } else if (what == "leave") {
    Leave(communicator);
  } else {
    Die("sums, agree, leave or truncate?");
  }
  if (communicator.rank() == 0) std::printf("ok: %s in a world of %d\n", what.data(), communicator.world());
  return 0;
}

}  // namespace
}  // namespace espalier

int main(int argc, char** argv) { return espalier::Main({argv, static_cast<size_t>(argc)}); }
