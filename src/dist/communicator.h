// SPDX-License-Identifier: Apache-2.0
//
// What tensor and expert parallelism need from a world of ranks: a sum, and the means to agree. One process
// (LocalCommunicator), one process a rank through MPI (world.h) or one GPU a rank through NCCL
// (nccl_communicator.h) offer the same few calls. The core never sees any of them.
#ifndef ESPALIER_SRC_DIST_COMMUNICATOR_H_
#define ESPALIER_SRC_DIST_COMMUNICATOR_H_

#include <espalier/status.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace espalier {

// Every call is collective: all ranks make the same calls in the same order, with the same sizes, counts and
// root, each from the thread that made its communicator. A rank that stays away leaves the others waiting;
// AgreeOn is the way not to. Errors: kUsage for arguments without a meaning, before anything is sent;
// kDevice when a peer or the network failed: the communicator is broken then, and good for nothing but to be
// destroyed.
class Communicator {
 public:
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  virtual ~Communicator() = default;

  int rank() const { return rank_; }
  int world() const { return world_; }
  bool broken() const { return broken_; }

  // Sums. The memory is host memory, or device memory of the rank's GPU for NCCL, where the work is only
  // enqueued: see Synchronize. The order of the additions is the implementation's, so that the last bits
  // depend on the size of the world.
  //
  // Every rank ends with the sum over all ranks of `values`.
  Result<void> AllReduceSum(std::span<float> values);
  // The sum over all ranks of `in`, cut into pieces: rank r gets the r-th, of counts[r] elements, in `out`.
  // Counts may differ and may be 0. `in` and `out` do not overlap; `in` is not changed.
  Result<void> ReduceScatterSum(std::span<const float> in, std::span<const uint64_t> counts,
                                std::span<float> out);
  // Returns when the sums so far are done.
  Result<void> Synchronize();

  // Words between the ranks, always in host memory and done on return.
  //
  // Every rank ends with the bytes of `root`.
  Result<void> Broadcast(std::span<std::byte> bytes, int root);
  Result<int64_t> AllReduceMax(int64_t value);

 protected:
  Communicator(int rank, int world) : rank_(rank), world_(world) {}

 private:
  // The arguments have been checked.
  virtual Result<void> DoAllReduceSum(std::span<float> values) = 0;
  virtual Result<void> DoReduceScatterSum(std::span<const float> in, std::span<const uint64_t> counts,
                                          std::span<float> out) = 0;
  virtual Result<void> DoSynchronize() { return {}; }
  virtual Result<void> DoBroadcast(std::span<std::byte> bytes, int root) = 0;
  virtual Result<int64_t> DoAllReduceMax(int64_t value) = 0;

  template <typename T>
  Result<T> Note(Result<T> done) {
    if (!done) broken_ = true;
    return done;
  }

  int rank_;
  int world_;
  bool broken_ = false;
};

// A world of one.
std::unique_ptr<Communicator> LocalCommunicator();

// Collective. Success when `mine` is a success on every rank, else on every rank the error of the lowest
// rank that has one; its message names that rank unless all of them failed. A rank must come here with its
// error instead of leaving: the others wait for it. Errors of its own: kDevice.
Result<void> AgreeOn(Communicator& communicator, const Result<void>& mine);

}  // namespace espalier

#endif  // ESPALIER_SRC_DIST_COMMUNICATOR_H_
