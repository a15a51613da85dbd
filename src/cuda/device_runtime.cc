// SPDX-License-Identifier: Apache-2.0
#include "cuda/device_runtime.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/runtime_error.h"
#include "moe/device_memory.h"

namespace espalier {
namespace {

// An attribute that not every driver knows is 0.
int Attribute(cudaDeviceAttr attribute, int index) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, attribute, index) != cudaSuccess) cudaGetLastError();
  return value;
}

Result<DeviceInfo> InfoOf(int index) {
  cudaDeviceProp properties;
  if (auto got = cuda::Check("cudaGetDeviceProperties", cudaGetDeviceProperties(&properties, index)); !got)
    return tl::unexpected(got.error());
  DeviceInfo info;
  info.index = index;
  info.name = properties.name;
  info.compute_capability = properties.major * 10 + properties.minor;
  info.num_sms = properties.multiProcessorCount;
  info.memory_bytes = properties.totalGlobalMem;
  info.l2_bytes = static_cast<uint64_t>(std::max(properties.l2CacheSize, 0));
  info.clock_mhz = Attribute(cudaDevAttrClockRate, index) / 1000;
  info.runtime_version = CudaRuntimeVersion();
  if (cudaDriverGetVersion(&info.driver_version) != cudaSuccess) cudaGetLastError();
  return info;
}

Result<std::vector<DeviceInfo>> FindDevices() {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) cudaGetLastError();
  if (driver == 0)
    return Error(StatusCode::kDevice, "no usable GPU: there is no CUDA driver on this machine");
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    cudaGetLastError();
    return Error(StatusCode::kDevice,
                 fmt::format("no usable GPU: {} ({}); the driver runs CUDA {}, this build needs {}",
                             cudaGetErrorString(error), cudaGetErrorName(error), CudaVersionText(driver),
                             CudaVersionText(CudaRuntimeVersion())));
  }
  if (count == 0) return Error(StatusCode::kDevice, "no usable GPU: the driver finds none");
  std::vector<DeviceInfo> devices;
  for (int index = 0; index < count; ++index) {
    Result<DeviceInfo> info = InfoOf(index);
    if (!info) return tl::unexpected(info.error());
    devices.push_back(*std::move(info));
  }
  return devices;
}

// The machine does not change under a process, and a run may not ask the driver.
const Result<std::vector<DeviceInfo>>& KnownDevices() {
  static const Result<std::vector<DeviceInfo>> devices = FindDevices();
  return devices;
}

}  // namespace

int CudaRuntimeVersion() { return CUDART_VERSION; }

Result<std::vector<DeviceInfo>> CudaDevices() { return KnownDevices(); }

namespace cuda {
namespace {

cudaStream_t StreamOf(const Stream& stream) { return static_cast<cudaStream_t>(stream.get()); }
cudaEvent_t EventOf(const Handle& handle) { return static_cast<cudaEvent_t>(handle.get()); }

// Makes an object on a device: `create(out)` is the call of the runtime.
template <typename Object, typename Create>
Result<Handle> MakeHandle(const Device& device, std::string_view call, Handle::Destroy destroy,
                          const Create& create) {
  const Result<DeviceLimits> known = LimitsOf(device);
  if (!known) return tl::unexpected(known.error());
  const DeviceScope scope(device);
  if (!scope.entered()) return tl::unexpected(scope.entered().error());
  Object object = nullptr;
  if (auto made = Check(call, create(&object)); !made) return tl::unexpected(made.error());
  return Handle(device, object, destroy);
}

Result<Handle> MakeEvent(const Device& device) {
  return MakeHandle<cudaEvent_t>(
      device, "cudaEventCreate", [](void* event) { cudaEventDestroy(static_cast<cudaEvent_t>(event)); },
      [](cudaEvent_t* event) { return cudaEventCreate(event); });
}

}  // namespace

Result<DeviceLimits> LimitsOf(const Device& device) {
  const Result<std::vector<DeviceInfo>>& devices = KnownDevices();
  if (!devices) return tl::unexpected(devices.error());
  if (device.is_host() || device.index < 0 || static_cast<size_t>(device.index) >= devices->size()) {
    return Error(StatusCode::kDevice, fmt::format("no device {}; legal: cuda:0 to cuda:{}",
                                                  DeviceText(device), devices->size() - 1));
  }
  const DeviceInfo& info = (*devices)[static_cast<size_t>(device.index)];
  return DeviceLimits{.compute_capability = info.compute_capability, .num_sms = info.num_sms};
}

Result<DeviceBuffer> Upload(const Device& device, std::span<const std::byte> bytes) {
  Result<DeviceBuffer> buffer = DeviceBuffer::Create(device, bytes.size());
  if (!buffer) return buffer;
  if (auto written = WriteBuffer(*buffer, 0, bytes); !written) return tl::unexpected(written.error());
  return buffer;
}

Result<void> Download(const DeviceBuffer& buffer, std::span<std::byte> bytes) {
  return ReadBuffer(buffer, 0, bytes);
}

Result<void> SynchronizeDevice(const Device& device) {
  const DeviceScope scope(device);
  if (!scope.entered()) return scope.entered();
  return Check("cudaDeviceSynchronize", cudaDeviceSynchronize());
}

Handle::Handle(Handle&& other) noexcept
    : device_(other.device_), object_(std::exchange(other.object_, nullptr)), destroy_(other.destroy_) {}

Handle& Handle::operator=(Handle&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(object_, other.object_);
  std::swap(destroy_, other.destroy_);
  return *this;
}

Handle::~Handle() {
  if (object_ == nullptr) return;
  const DeviceScope scope(device_);
  destroy_(object_);
}

Result<Stream> Stream::Create(const Device& device) {
  Result<Handle> handle = MakeHandle<cudaStream_t>(
      device, "cudaStreamCreateWithFlags",
      [](void* stream) { cudaStreamDestroy(static_cast<cudaStream_t>(stream)); },
      [](cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking); });
  if (!handle) return tl::unexpected(handle.error());
  return Stream(*std::move(handle));
}

Result<void> Stream::Synchronize() const {
  return Check("cudaStreamSynchronize", cudaStreamSynchronize(StreamOf(*this)));
}

Result<void> Stream::CopyAsync(void* to, const void* from, uint64_t size_bytes) const {
  if (size_bytes == 0) return {};
  const DeviceScope scope(device());
  if (!scope.entered()) return scope.entered();
  return Check("cudaMemcpyAsync", cudaMemcpyAsync(to, from, size_bytes, cudaMemcpyDefault, StreamOf(*this)));
}

Result<void> Stream::Fill(void* memory, std::byte value, uint64_t size_bytes) const {
  if (size_bytes == 0) return {};
  const DeviceScope scope(device());
  if (!scope.entered()) return scope.entered();
  return Check("cudaMemsetAsync",
               cudaMemsetAsync(memory, static_cast<int>(value), size_bytes, StreamOf(*this)));
}

Result<Graph> Graph::Capture(const Stream& stream, const std::function<Result<void>()>& enqueue) {
  const DeviceScope scope(stream.device());
  if (!scope.entered()) return tl::unexpected(scope.entered().error());
  const cudaError_t begun = cudaStreamBeginCapture(StreamOf(stream), cudaStreamCaptureModeThreadLocal);
  if (auto started = Check("cudaStreamBeginCapture", begun); !started) return tl::unexpected(started.error());
  const Result<void> enqueued = enqueue();
  cudaGraph_t graph = nullptr;
  // Also after a failure: the stream must leave its capture.
  const Result<void> ended = Check("cudaStreamEndCapture", cudaStreamEndCapture(StreamOf(stream), &graph));
  const auto destroy = [](void* captured) { cudaGraphDestroy(static_cast<cudaGraph_t>(captured)); };
  const Handle captured(stream.device(), graph, destroy);
  if (!enqueued) return tl::unexpected(enqueued.error());
  if (!ended) return tl::unexpected(ended.error());
  Result<Handle> handle = MakeHandle<cudaGraphExec_t>(
      stream.device(), "cudaGraphInstantiate",
      [](void* executable) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(executable)); },
      [graph](cudaGraphExec_t* executable) { return cudaGraphInstantiate(executable, graph, 0); });
  if (!handle) return tl::unexpected(handle.error());
  return Graph(*std::move(handle));
}

Result<void> Graph::Launch(const Stream& stream) const {
  const DeviceScope scope(stream.device());
  if (!scope.entered()) return scope.entered();
  return Check("cudaGraphLaunch",
               cudaGraphLaunch(static_cast<cudaGraphExec_t>(handle_.get()), StreamOf(stream)));
}

Result<Timer> Timer::Create(const Device& device) {
  Result<Handle> start = MakeEvent(device);
  if (!start) return tl::unexpected(start.error());
  Result<Handle> stop = MakeEvent(device);
  if (!stop) return tl::unexpected(stop.error());
  return Timer(*std::move(start), *std::move(stop));
}

Result<void> Timer::Start(const Stream& stream) const {
  return Check("cudaEventRecord", cudaEventRecord(EventOf(start_), StreamOf(stream)));
}

Result<void> Timer::Stop(const Stream& stream) const {
  return Check("cudaEventRecord", cudaEventRecord(EventOf(stop_), StreamOf(stream)));
}

Result<double> Timer::Microseconds() const {
  if (auto waited = Check("cudaEventSynchronize", cudaEventSynchronize(EventOf(stop_))); !waited)
    return tl::unexpected(waited.error());
  float milliseconds = 0;
  const cudaError_t elapsed = cudaEventElapsedTime(&milliseconds, EventOf(start_), EventOf(stop_));
  if (auto got = Check("cudaEventElapsedTime", elapsed); !got) return tl::unexpected(got.error());
  return double{milliseconds} * 1000;
}

}  // namespace cuda
}  // namespace espalier
