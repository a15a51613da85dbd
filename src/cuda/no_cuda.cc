// SPDX-License-Identifier: Apache-2.0
//
// What a build without CUDA answers in place of the other sources of this folder.
#include "cuda/device_runtime.h"
#include "cuda/probes.h"
#include "moe/device_memory.h"

namespace espalier {
namespace {

tl::unexpected<Status> NoCuda() { return Error(StatusCode::kDevice, "this build has no CUDA"); }

}  // namespace

int CudaRuntimeVersion() { return 0; }

Result<std::vector<DeviceInfo>> CudaDevices() { return NoCuda(); }

Result<std::byte*> AllocateOnDevice(const Device&, uint64_t) { return NoCuda(); }
void FreeOnDevice(const Device&, std::byte*) {}
Result<HostBuffer> AllocatePinned(const Device&, uint64_t) { return NoCuda(); }
Result<void> CopyBytes(const Device&, void*, const void*, uint64_t) { return NoCuda(); }
Result<DeviceBuffer> MakeDeviceTable(const ExpertsTable&, const DeviceBuffer&) { return NoCuda(); }

namespace cuda {

Result<DeviceBuffer> Upload(const Device&, std::span<const std::byte>) { return NoCuda(); }
Result<void> Download(const DeviceBuffer&, std::span<std::byte>) { return NoCuda(); }
Result<DeviceLimits> LimitsOf(const Device&) { return NoCuda(); }
Result<void> SynchronizeDevice(const Device&) { return NoCuda(); }

// No object of these can exist, so none of them owns anything.
Handle::Handle(Handle&&) noexcept = default;
Handle& Handle::operator=(Handle&&) noexcept = default;
Handle::~Handle() = default;

Result<Stream> Stream::Create(const Device&) { return NoCuda(); }
Result<void> Stream::Synchronize() const { return NoCuda(); }
Result<void> Stream::CopyAsync(void*, const void*, uint64_t) const { return NoCuda(); }
Result<void> Stream::Fill(void*, std::byte, uint64_t) const { return NoCuda(); }
Result<Graph> Graph::Capture(const Stream&, const std::function<Result<void>()>&) { return NoCuda(); }
Result<void> Graph::Launch(const Stream&) const { return NoCuda(); }
Result<Timer> Timer::Create(const Device&) { return NoCuda(); }
Result<void> Timer::Start(const Stream&) const { return NoCuda(); }
Result<void> Timer::Stop(const Stream&) const { return NoCuda(); }
Result<double> Timer::Microseconds() const { return NoCuda(); }

Result<void> EnqueueReadProbe(const void*, uint64_t, const DeviceLimits&, ProbeResult*, void*) {
  return NoCuda();
}
Result<void> RunLinearSteps(const LinearPlan&, const PreparedLinear&, const LinearArgs&, const LinearSteps&) {
  return NoCuda();
}
Result<uint64_t> EnqueueMatrixProbe(uint64_t, const DeviceLimits&, ProbeResult*, void*) { return NoCuda(); }
Result<uint64_t> EnqueueDecodeProbe(int, Codebook, uint64_t, const DeviceLimits&, ProbeResult*, void*) {
  return NoCuda();
}

}  // namespace cuda
}  // namespace espalier
