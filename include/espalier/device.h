// SPDX-License-Identifier: Apache-2.0
//
// Where memory lies and an executor runs: the host, or one GPU. Everything here may be used in any build; in
// one without CUDA, and on a machine without a GPU, what needs one returns kDevice.
#ifndef ESPALIER_DEVICE_H_
#define ESPALIER_DEVICE_H_

#include <espalier/host_buffer.h>
#include <espalier/status.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace espalier {

// The numbers are part of the C interface: never renumber.
enum class DeviceType : uint8_t { kCpu = 0, kCuda = 1 };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;  // of the GPU, as the CUDA runtime counts; 0 for the host

  bool is_host() const { return type == DeviceType::kCpu; }
  friend bool operator==(const Device&, const Device&) = default;
};

// "cpu", "cuda" (the first GPU), "cuda:1". Says nothing about whether there is one. Error: kUsage.
Result<Device> ParseDevice(std::string_view text);

// "cpu", "cuda:0".
std::string DeviceText(const Device& device);

struct DeviceInfo {
  int index = 0;
  std::string name;
  int compute_capability = 0;  // 90 for 9.0
  int num_sms = 0;
  uint64_t memory_bytes = 0;
  uint64_t l2_bytes = 0;
  int clock_mhz = 0;  // the highest that the driver gives, 0 = not known
  // 13020 for 13.2.
  int driver_version = 0;   // the newest CUDA that the driver can run
  int runtime_version = 0;  // in this build
};

// The CUDA runtime of this build, as in DeviceInfo; 0 in a build without CUDA.
int CudaRuntimeVersion();

// "13.2" of 13020.
std::string CudaVersionText(int version);

// The GPUs of this machine, never an empty list. Error: kDevice with the driver's reason where there is none
// that can be used, or the build has no CUDA. Makes no context: cheap.
Result<std::vector<DeviceInfo>> CudaDevices();

// Owned memory of one device, not initialised. Movable, not copyable.
class DeviceBuffer {
 public:
  // Aligned to 256 bytes. Errors: kDevice (no such device, or it failed), kCapacity (it has not that much).
  static Result<DeviceBuffer> Create(const Device& device, uint64_t size_bytes);

  // Memory of the caller's allocator, handed back with release(data) when the buffer dies.
  // REQUIRES: aligned to 64 bytes, on `device`.
  static DeviceBuffer Adopt(const Device& device, std::byte* data, uint64_t size_bytes,
                            std::function<void(std::byte*)> release);

  DeviceBuffer() = default;
  explicit DeviceBuffer(HostBuffer host);
  DeviceBuffer(DeviceBuffer&&) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&&) noexcept;
  ~DeviceBuffer();

  const Device& device() const { return device_; }
  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  uint64_t size_bytes() const { return size_bytes_; }

 private:
  Device device_;
  std::byte* data_ = nullptr;
  uint64_t size_bytes_ = 0;
  HostBuffer host_;                          // owns the memory of the host
  std::function<void(std::byte*)> release_;  // of Adopt; empty: memory of Create
};

}  // namespace espalier

#endif  // ESPALIER_DEVICE_H_
