// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "dist/launcher.h"
#include "dist/world.h"

namespace espalier {
namespace {

Result<void> Check(int code, std::string_view what) {
  if (code == MPI_SUCCESS) return {};
  char text[MPI_MAX_ERROR_STRING] = {};
  int size = 0;
  if (MPI_Error_string(code, text, &size) != MPI_SUCCESS) size = 0;
  return Error(StatusCode::kDevice,
               fmt::format("{} failed: {}", what, std::string_view(text, static_cast<size_t>(size))));
}

// All processes of the launcher. Owns the initialised MPI.
class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(int rank, int world, int64_t max_elements_per_call)
      : Communicator(rank, world), max_elements_(static_cast<uint64_t>(max_elements_per_call)) {}
  ~MpiCommunicator() override {
    if (!broken() && std::uncaught_exceptions() == 0) MPI_Finalize();
  }

 private:
  Result<void> DoAllReduceSum(std::span<float> values) override {
    return InChunks(values.size(), [&](uint64_t first, int count) {
      return Check(
          MPI_Allreduce(MPI_IN_PLACE, values.data() + first, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD),
          "MPI_Allreduce");
    });
  }

  Result<void> DoReduceScatterSum(std::span<const float> in, std::span<const uint64_t> counts,
                                  std::span<float> out) override {
    if (in.size() > max_elements_) return ReducePieces(in, counts, out);
    const std::vector<int> int_counts(counts.begin(), counts.end());
    return Check(
        MPI_Reduce_scatter(in.data(), out.data(), int_counts.data(), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD),
        "MPI_Reduce_scatter");
  }

  // What does not fit one call: each rank's piece is summed to it by itself.
  Result<void> ReducePieces(std::span<const float> in, std::span<const uint64_t> counts,
                            std::span<float> out) {
    for (int root = 0; root < world(); ++root) {
      const uint64_t size = counts[static_cast<size_t>(root)];
      const auto piece = in.first(size);
      in = in.subspan(size);
      Result<void> done = InChunks(size, [&](uint64_t first, int count) {
        float* sum = root == rank() ? out.data() + first : nullptr;
        return Check(MPI_Reduce(piece.data() + first, sum, count, MPI_FLOAT, MPI_SUM, root, MPI_COMM_WORLD),
                     "MPI_Reduce");
      });
      if (!done) return done;
    }
    return {};
  }

  Result<void> DoBroadcast(std::span<std::byte> bytes, int root) override {
    return InChunks(bytes.size(), [&](uint64_t first, int count) {
      return Check(MPI_Bcast(bytes.data() + first, count, MPI_BYTE, root, MPI_COMM_WORLD), "MPI_Bcast");
    });
  }

  Result<int64_t> DoAllReduceMax(int64_t value) override {
    int64_t max = 0;
    auto done = Check(MPI_Allreduce(&value, &max, 1, MPI_INT64_T, MPI_MAX, MPI_COMM_WORLD), "MPI_Allreduce");
    if (!done) return tl::unexpected(done.error());
    return max;
  }

  // call(first, count) until `size` elements are done.
  template <typename Call>
  Result<void> InChunks(uint64_t size, const Call& call) {
    for (uint64_t first = 0; first < size; first += max_elements_) {
      const auto count = static_cast<int>(std::min(max_elements_, size - first));
      if (Result<void> done = call(first, count); !done) return done;
    }
    return {};
  }

  uint64_t max_elements_;
};

}  // namespace

Result<World> JoinWorld(const WorldOptions& options) {
  const std::optional<Launcher> launcher = FindLauncher();
  if (!launcher) return World{.communicator = LocalCommunicator(), .launched = false};
  int level = 0;
  // Executors have threads of their own; only the caller's thread talks to MPI.
  if (auto started = Check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level), "MPI_Init_thread");
      !started) {
    return tl::unexpected(started.error());
  }
  int rank = 0;
  int world = 1;
  // MPI's default is to end the process.
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  auto communicator = std::make_unique<MpiCommunicator>(rank, world, options.max_elements_per_call);
  // Under another vendor's launcher MPI finds nobody and makes a world of one: n programs, each rank 0.
  if (launcher->processes > 0 && launcher->processes != world) {
    return Error(
        StatusCode::kUnsupported,
        fmt::format("the launcher started {} processes, but {} sees {}; legal: the mpirun that belongs "
                    "to it",
                    launcher->processes, MpiVersion(), world));
  }
  return World{.communicator = std::move(communicator), .launched = true};
}

std::string MpiVersion() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int size = 0;
  // One of the few calls that MPI allows before it is initialised.
  if (MPI_Get_library_version(text, &size) != MPI_SUCCESS) return "unknown";
  const std::string_view whole(text, static_cast<size_t>(size));
  return std::string(whole.substr(0, whole.find_first_of(",\n")));
}

}  // namespace espalier
