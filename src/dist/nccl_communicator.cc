// SPDX-License-Identifier: Apache-2.0
#include "dist/nccl_communicator.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <nccl.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <string_view>
#include <thread>

namespace espalier {
namespace {

Result<void> Check(ncclResult_t code, std::string_view what) {
  if (code == ncclSuccess) return {};
  return Error(StatusCode::kDevice, fmt::format("{} failed: {}", what, ncclGetErrorString(code)));
}

Result<void> Check(cudaError_t code, std::string_view what) {
  if (code == cudaSuccess) return {};
  return Error(StatusCode::kDevice, fmt::format("{} failed: {}", what, cudaGetErrorString(code)));
}

// Makes a device the current one of this thread, as the caller may be at work on another.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = device;
    set_ = Check(cudaSetDevice(device), fmt::format("device cuda:{}: cudaSetDevice", device));
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() { cudaSetDevice(before_); }

  const Result<void>& set() const { return set_; }

 private:
  int before_ = 0;
  Result<void> set_;
};

class Nccl final : public Communicator {
 public:
  Nccl(Communicator& bootstrap, const NcclOptions& options, ncclComm_t comm)
      : Communicator(bootstrap.rank(), bootstrap.world()),
        bootstrap_(bootstrap),
        device_(options.device),
        stream_(static_cast<cudaStream_t>(options.stream)),
        comm_(comm) {}

  ~Nccl() override {
    const CurrentDevice current(device_);
    // Destroying waits for work in flight, which a lost peer would never let end.
    if (broken()) {
      ncclCommAbort(comm_);
    } else {
      ncclCommDestroy(comm_);
    }
  }

 private:
  Result<void> DoSynchronize() override {
    const CurrentDevice current(device_);
    if (!current.set()) return current.set();
    // Waiting in the driver would miss what NCCL finds out about the other ranks.
    for (;;) {
      const cudaError_t state = cudaStreamQuery(stream_);
      if (state != cudaErrorNotReady) return Check(state, "cudaStreamQuery");
      ncclResult_t found = ncclSuccess;
      Result<void> asked = Check(ncclCommGetAsyncError(comm_, &found), "ncclCommGetAsyncError");
      if (asked && found != ncclInProgress) asked = Check(found, "a sum over NCCL");
      if (!asked) return asked;
      std::this_thread::yield();
    }
  }

  Result<void> DoAllReduceSum(std::span<float> values) override {
    const CurrentDevice current(device_);
    if (!current.set()) return current.set();
    return Check(
        ncclAllReduce(values.data(), values.data(), values.size(), ncclFloat, ncclSum, comm_, stream_),
        "ncclAllReduce");
  }

  Result<void> DoReduceScatterSum(std::span<const float> in, std::span<const uint64_t> counts,
                                  std::span<float> out) override {
    const CurrentDevice current(device_);
    if (!current.set()) return current.set();
    if (std::ranges::adjacent_find(counts, std::ranges::not_equal_to()) == counts.end()) {
      return Check(ncclReduceScatter(in.data(), out.data(), out.size(), ncclFloat, ncclSum, comm_, stream_),
                   "ncclReduceScatter");
    }
    return Check(ReducePieces(in, counts, out), "ncclReduce");
  }

  // ncclReduceScatter knows pieces of one size only. As one group, the reductions run side by side.
  ncclResult_t ReducePieces(std::span<const float> in, std::span<const uint64_t> counts,
                            std::span<float> out) {
    ncclResult_t worst = ncclGroupStart();
    if (worst != ncclSuccess) return worst;
    for (int root = 0; root < world(); ++root) {
      const auto piece = in.first(counts[static_cast<size_t>(root)]);
      in = in.subspan(piece.size());
      if (piece.empty()) continue;
      // Only the root's output is written, but some releases want a pointer from everyone.
      float* sum = root == rank() ? out.data() : const_cast<float*>(piece.data());
      const ncclResult_t code =
          ncclReduce(piece.data(), sum, piece.size(), ncclFloat, ncclSum, root, comm_, stream_);
      if (worst == ncclSuccess) worst = code;
    }
    const ncclResult_t ended = ncclGroupEnd();
    return worst == ncclSuccess ? ended : worst;
  }

  Result<void> DoBroadcast(std::span<std::byte> bytes, int root) override {
    return bootstrap_.Broadcast(bytes, root);
  }

  Result<int64_t> DoAllReduceMax(int64_t value) override { return bootstrap_.AllReduceMax(value); }

  Communicator& bootstrap_;
  int device_;
  cudaStream_t stream_;
  ncclComm_t comm_;
};

}  // namespace

Result<std::unique_ptr<Communicator>> NcclCommunicator(Communicator& bootstrap, const NcclOptions& options) {
  const CurrentDevice current(options.device);
  ncclUniqueId id = {};
  Result<void> ready = current.set();
  if (ready && bootstrap.rank() == 0) ready = Check(ncclGetUniqueId(&id), "ncclGetUniqueId");
  // Each step is collective, so nobody takes it before all can.
  if (ready = AgreeOn(bootstrap, ready); !ready) return tl::unexpected(ready.error());
  if (auto sent = bootstrap.Broadcast(std::as_writable_bytes(std::span(&id, 1)), 0); !sent) {
    return tl::unexpected(sent.error());
  }
  ncclComm_t comm = nullptr;
  ready = Check(ncclCommInitRank(&comm, bootstrap.world(), id, bootstrap.rank()), "ncclCommInitRank");
  if (Result<void> all = AgreeOn(bootstrap, ready); !all) {
    if (ready) ncclCommAbort(comm);
    return tl::unexpected(all.error());
  }
  return std::make_unique<Nccl>(bootstrap, options, comm);
}

std::string NcclVersion() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "unknown";
  // NCCL_VERSION_CODE since 2.9: two digits more for the minor number than before.
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace espalier
