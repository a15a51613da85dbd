// SPDX-License-Identifier: Apache-2.0
//
// The CUDA runtime as the command line, tests and benchmarks need it, without its types: copies, streams,
// graphs, timing. In a build without CUDA everything here returns kDevice, so callers need no #ifdef.
// Device memory itself is DeviceBuffer (espalier/device.h).
//
// Every function makes the device of its argument current and puts back what was current before. Errors are
// kDevice with the call and the driver's reason; an asynchronous failure shows at the next Synchronize.
#ifndef ESPALIER_SRC_CUDA_DEVICE_RUNTIME_H_
#define ESPALIER_SRC_CUDA_DEVICE_RUNTIME_H_

#include <espalier/device.h>
#include <espalier/status.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>

#include "cuda/launch.h"

namespace espalier::cuda {

// A new device array with these bytes in it.
Result<DeviceBuffer> Upload(const Device& device, std::span<const std::byte> bytes);

// All or the first bytes of a buffer. REQUIRES: bytes.size() <= buffer.size_bytes().
Result<void> Download(const DeviceBuffer& buffer, std::span<std::byte> bytes);

// What a launch needs to know of a device. Asked once a process and kept. No synchronisation.
Result<DeviceLimits> LimitsOf(const Device& device);

// Waits for everything on the device.
Result<void> SynchronizeDevice(const Device& device);

// One owner of a runtime object; the kinds below say what of.
class Handle {
 public:
  using Destroy = void (*)(void* object);

  Handle() = default;
  Handle(const Device& device, void* object, Destroy destroy)
      : device_(device), object_(object), destroy_(destroy) {}
  Handle(Handle&& other) noexcept;
  Handle& operator=(Handle&& other) noexcept;
  ~Handle();

  const Device& device() const { return device_; }
  void* get() const { return object_; }

 private:
  Device device_;
  void* object_ = nullptr;
  [[maybe_unused]] Destroy destroy_ = nullptr;  // not used in a build without CUDA
};

// A stream of its own (non-blocking: it does not wait for the default stream).
class Stream {
 public:
  static Result<Stream> Create(const Device& device);

  const Device& device() const { return handle_.device(); }
  void* get() const { return handle_.get(); }  // cudaStream_t: what MoeArgs::stream takes

  Result<void> Synchronize() const;
  // In stream order, without waiting; may be captured in a graph. Host memory of CopyAsync should be pinned
  // or outlive a Synchronize.
  Result<void> CopyAsync(void* to, const void* from, uint64_t size_bytes) const;
  Result<void> Fill(void* memory, std::byte value, uint64_t size_bytes) const;

 private:
  explicit Stream(Handle handle) : handle_(std::move(handle)) {}
  Handle handle_;
};

// A CUDA graph that can be launched. Launches of one graph run one after the other; what they point to must
// outlive them.
class Graph {
 public:
  // Captures what `enqueue` puts on the stream; nothing runs. Other threads are not disturbed. The error of
  // `enqueue` is returned as it is.
  static Result<Graph> Capture(const Stream& stream, const std::function<Result<void>()>& enqueue);

  Result<void> Launch(const Stream& stream) const;

 private:
  explicit Graph(Handle handle) : handle_(std::move(handle)) {}
  Handle handle_;
};

// Time between two places of a stream, as the device counts it.
class Timer {
 public:
  static Result<Timer> Create(const Device& device);

  Result<void> Start(const Stream& stream) const;
  Result<void> Stop(const Stream& stream) const;
  // Waits for the stop. Resolution about half a microsecond.
  Result<double> Microseconds() const;

 private:
  Timer(Handle start, Handle stop) : start_(std::move(start)), stop_(std::move(stop)) {}
  Handle start_;
  Handle stop_;
};

}  // namespace espalier::cuda

#endif  // ESPALIER_SRC_CUDA_DEVICE_RUNTIME_H_
