// SPDX-License-Identifier: Apache-2.0
//
// Times work of a GPU with cold weights, and what the GPU can do at most beside it.
#ifndef ESPALIER_SRC_CUDA_COLD_TIMER_H_
#define ESPALIER_SRC_CUDA_COLD_TIMER_H_

#include <espalier/device.h>
#include <espalier/formats.h>
#include <espalier/status.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "cuda/device_runtime.h"
#include "cuda/probes.h"

namespace espalier::cuda {

// Owns a stream and the memory that is read between samples. Not to be used from several threads. Errors:
// kDevice, kCapacity.
class ColdTimer {
 public:
  static Result<ColdTimer> Create(const Device& device);

  const DeviceInfo& info() const { return info_; }
  const Stream& stream() const { return stream_; }
  uint64_t cold_bytes() const { return cold_.size_bytes(); }
  // Of a multiprocessor in the last MatrixRate: what a benchmark gets, not what the device is set to.
  std::optional<double> clock_mhz() const { return clock_mhz_; }

  // The fastest of `passes`.
  Result<double> ReadRate(uint64_t size_bytes, int passes);  // bytes a second
  Result<double> MatrixRate(int passes);                     // operations a second
  // Weights a second. REQUIRES: a rate and codebook of formats.def.
  Result<double> DecodeRate(int bits, Codebook codebook, int passes);

  // Microseconds of what `run` puts on the stream. Before it and untimed: a read of everything cold, then
  // what `place` puts on the stream. The host is ahead of the device by then, so its own time does not count.
  Result<double> Time(const std::function<Result<void>()>& place, const std::function<Result<void>()>& run);

 private:
  ColdTimer(Stream stream, Timer timer) : stream_(std::move(stream)), timer_(std::move(timer)) {}
  // `enqueue` puts work on the stream and tells how much; amount a second.
  Result<double> FastestRate(int passes, const std::function<Result<uint64_t>()>& enqueue);
  ProbeResult* result() { return reinterpret_cast<ProbeResult*>(result_.data()); }

  Stream stream_;
  Timer timer_;
  DeviceInfo info_;
  DeviceLimits limits_;
  DeviceBuffer cold_;
  DeviceBuffer result_;
  std::optional<double> clock_mhz_;
};

}  // namespace espalier::cuda

#endif  // ESPALIER_SRC_CUDA_COLD_TIMER_H_
