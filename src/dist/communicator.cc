// SPDX-License-Identifier: Apache-2.0
#include "dist/communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

namespace espalier {
namespace {

class Local final : public Communicator {
 public:
  Local() : Communicator(0, 1) {}

 private:
  Result<void> DoAllReduceSum(std::span<float>) override { return {}; }
  Result<void> DoReduceScatterSum(std::span<const float> in, std::span<const uint64_t>,
                                  std::span<float> out) override {
    std::ranges::copy(in, out.begin());
    return {};
  }
  Result<void> DoBroadcast(std::span<std::byte>, int) override { return {}; }
  Result<int64_t> DoAllReduceMax(int64_t value) override { return value; }
};

// A Status on its way from one rank to the others.
struct StatusHeader {
  int64_t code = 0;
  uint64_t message_bytes = 0;
};

Result<Status> BroadcastStatus(Communicator& communicator, const Result<void>& mine, int root) {
  const bool is_root = communicator.rank() == root;
  std::string message = is_root ? mine.error().message() : std::string();
  StatusHeader header;
  if (is_root) header = {.code = static_cast<int64_t>(mine.error().code()), .message_bytes = message.size()};
  if (auto sent = communicator.Broadcast(std::as_writable_bytes(std::span(&header, 1)), root); !sent) {
    return tl::unexpected(sent.error());
  }
  message.resize(header.message_bytes);
  if (auto sent = communicator.Broadcast(std::as_writable_bytes(std::span(message)), root); !sent) {
    return tl::unexpected(sent.error());
  }
  return Status(static_cast<StatusCode>(header.code), std::move(message));
}

}  // namespace

Result<void> Communicator::AllReduceSum(std::span<float> values) { return Note(DoAllReduceSum(values)); }

Result<void> Communicator::Synchronize() { return Note(DoSynchronize()); }

Result<int64_t> Communicator::AllReduceMax(int64_t value) { return Note(DoAllReduceMax(value)); }

Result<void> Communicator::ReduceScatterSum(std::span<const float> in, std::span<const uint64_t> counts,
                                            std::span<float> out) {
  if (counts.size() != static_cast<size_t>(world_)) {
    return Error(StatusCode::kUsage,
                 fmt::format("reduce-scatter: {} counts; legal: {}, one a rank", counts.size(), world_));
  }
  uint64_t left = in.size();
  bool fits = true;
  for (const uint64_t count : counts) {
    fits = fits && count <= left;
    if (fits) left -= count;
  }
  if (!fits || left != 0) {
    return Error(StatusCode::kUsage,
                 fmt::format("reduce-scatter: the counts {} do not add up to the {} elements of the input",
                             fmt::join(counts, " + "), in.size()));
  }
  if (out.size() != counts[static_cast<size_t>(rank_)]) {
    return Error(StatusCode::kUsage,
                 fmt::format("reduce-scatter: room for {} elements; legal: {}, the count of rank {}",
                             out.size(), counts[static_cast<size_t>(rank_)], rank_));
  }
  return Note(DoReduceScatterSum(in, counts, out));
}

Result<void> Communicator::Broadcast(std::span<std::byte> bytes, int root) {
  if (root < 0 || root >= world_) {
    return Error(StatusCode::kUsage, fmt::format("broadcast: root {}; legal: 0 to {}", root, world_ - 1));
  }
  return Note(DoBroadcast(bytes, root));
}

std::unique_ptr<Communicator> LocalCommunicator() { return std::make_unique<Local>(); }

Result<void> AgreeOn(Communicator& communicator, const Result<void>& mine) {
  // The largest of these is that of the lowest failing rank; 0 when there is none.
  const Result<int64_t> worst =
      communicator.AllReduceMax(mine ? 0 : int64_t{communicator.world()} - communicator.rank());
  if (!worst) return tl::unexpected(worst.error());
  if (*worst == 0) return {};
  const Result<int64_t> some_are_well = communicator.AllReduceMax(mine ? 1 : 0);
  if (!some_are_well) return tl::unexpected(some_are_well.error());
  const int failing = communicator.world() - static_cast<int>(*worst);
  const Result<Status> status = BroadcastStatus(communicator, mine, failing);
  if (!status) return tl::unexpected(status.error());
  // What stops all of them, such as a wrong path, is not about a rank.
  if (*some_are_well == 0) return tl::unexpected(*status);
  return Error(status->code(),
               fmt::format("rank {} of {}: {}", failing, communicator.world(), status->message()));
}

}  // namespace espalier
