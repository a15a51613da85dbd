// SPDX-License-Identifier: Apache-2.0
//
// Device memory for plans and loaders.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <span>
#include <vector>

#include "cuda/device_table.h"
#include "cuda/runtime_error.h"
#include "moe/device_memory.h"

namespace espalier {
namespace {

// Before a call that names a device: the runtime's own sentence would not say which there are.
Result<void> CheckIndex(const Device& device) {
  const Result<std::vector<DeviceInfo>> devices = CudaDevices();
  if (!devices) return tl::unexpected(devices.error());
  if (static_cast<size_t>(device.index) < devices->size()) return {};
  return Error(StatusCode::kDevice, fmt::format("no device {}; legal: cuda:0 to cuda:{}", DeviceText(device),
                                                devices->size() - 1));
}

}  // namespace

Result<std::byte*> AllocateOnDevice(const Device& device, uint64_t size_bytes) {
  if (auto known = CheckIndex(device); !known) return tl::unexpected(known.error());
  if (size_bytes == 0) return nullptr;
  const cuda::DeviceScope scope(device);
  if (!scope.entered()) return tl::unexpected(scope.entered().error());
  void* data = nullptr;
  auto allocated = cuda::Check(fmt::format("{} bytes on {}: cudaMalloc", size_bytes, DeviceText(device)),
                               cudaMalloc(&data, size_bytes));
  if (!allocated) return tl::unexpected(allocated.error());
  return static_cast<std::byte*>(data);
}

void FreeOnDevice(const Device& device, std::byte* data) {
  const cuda::DeviceScope scope(device);
  // Also takes away the error of a context that is gone.
  if (cudaFree(data) != cudaSuccess) cudaGetLastError();
}

Result<HostBuffer> AllocatePinned(const Device& device, uint64_t size_bytes) {
  if (auto known = CheckIndex(device); !known) return tl::unexpected(known.error());
  const cuda::DeviceScope scope(device);
  if (!scope.entered()) return tl::unexpected(scope.entered().error());
  void* data = nullptr;
  if (size_bytes == 0) return HostBuffer();
  auto allocated = cuda::Check(fmt::format("{} bytes of page-locked memory: cudaHostAlloc", size_bytes),
                               cudaHostAlloc(&data, size_bytes, cudaHostAllocPortable));
  if (!allocated) return tl::unexpected(allocated.error());
  return HostBuffer::Adopt(static_cast<std::byte*>(data), size_bytes, [](std::byte* memory) {
    if (cudaFreeHost(memory) != cudaSuccess) cudaGetLastError();
  });
}

Result<void> CopyBytes(const Device& device, void* to, const void* from, uint64_t size_bytes) {
  if (size_bytes == 0) return {};
  const cuda::DeviceScope scope(device);
  if (!scope.entered()) return scope.entered();
  // The stream of this thread: copies of different threads do not wait for each other.
  const cudaError_t started = cudaMemcpyAsync(to, from, size_bytes, cudaMemcpyDefault, cudaStreamPerThread);
  if (auto copied = cuda::Check("cudaMemcpyAsync", started); !copied) return copied;
  return cuda::Check("copy to or from the device", cudaStreamSynchronize(cudaStreamPerThread));
}

Result<DeviceBuffer> MakeDeviceTable(const ExpertsTable& table, const DeviceBuffer& slab) {
  const std::vector<cuda::DeviceSegment> segments = cuda::SegmentsAt(table, slab.data());
  std::vector<uint32_t> first_segment = {0};
  for (uint32_t expert = 0; expert < table.geometry().experts; ++expert) {
    first_segment.push_back(first_segment.back() +
                            static_cast<uint32_t>(table.ExpertSegments(expert).size()));
  }
  const auto segment_bytes = std::as_bytes(std::span(segments));
  const auto first_bytes = std::as_bytes(std::span(first_segment));
  Result<DeviceBuffer> buffer =
      DeviceBuffer::Create(slab.device(), segment_bytes.size() + first_bytes.size());
  if (!buffer) return buffer;
  if (auto written = WriteBuffer(*buffer, 0, segment_bytes); !written) return tl::unexpected(written.error());
  if (auto written = WriteBuffer(*buffer, segment_bytes.size(), first_bytes); !written)
    return tl::unexpected(written.error());
  return buffer;
}

}  // namespace espalier
