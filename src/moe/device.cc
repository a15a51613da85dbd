// SPDX-License-Identifier: Apache-2.0
#include <espalier/device.h>
#include <fmt/format.h>

#include <charconv>
#include <cstring>
#include <utility>

#include "moe/device_memory.h"

namespace espalier {

Result<Device> ParseDevice(std::string_view text) {
  if (text == "cpu") return Device{};
  if (text == "cuda") return Device{.type = DeviceType::kCuda, .index = 0};
  constexpr std::string_view kPrefix = "cuda:";
  constexpr size_t kMaxDigits = 4;  // keeps the number inside an int, and far above any machine
  const std::string_view digits = text.starts_with(kPrefix) ? text.substr(kPrefix.size()) : "";
  unsigned index = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
  if (digits.empty() || digits.size() > kMaxDigits || error != std::errc() ||
      end != digits.data() + digits.size()) {
    return Error(StatusCode::kUsage, fmt::format("device '{}'; legal: cpu, cuda, cuda:INDEX", text));
  }
  return Device{.type = DeviceType::kCuda, .index = static_cast<int>(index)};
}

std::string DeviceText(const Device& device) {
  return device.is_host() ? "cpu" : fmt::format("cuda:{}", device.index);
}

std::string CudaVersionText(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

Result<DeviceBuffer> DeviceBuffer::Create(const Device& device, uint64_t size_bytes) {
  if (device.is_host()) {
    Result<HostBuffer> host = HostBuffer::Create(size_bytes);
    if (!host) return tl::unexpected(host.error());
    return DeviceBuffer(*std::move(host));
  }
  const Result<std::byte*> data = AllocateOnDevice(device, size_bytes);
  if (!data) return tl::unexpected(data.error());
  DeviceBuffer buffer;
  buffer.device_ = device;
  buffer.data_ = *data;
  buffer.size_bytes_ = size_bytes;
  return buffer;
}

DeviceBuffer DeviceBuffer::Adopt(const Device& device, std::byte* data, uint64_t size_bytes,
                                 std::function<void(std::byte*)> release) {
  if (device.is_host()) return DeviceBuffer(HostBuffer::Adopt(data, size_bytes, std::move(release)));
  DeviceBuffer buffer;
  buffer.device_ = device;
  buffer.data_ = data;
  buffer.size_bytes_ = size_bytes;
  buffer.release_ = std::move(release);
  return buffer;
}

DeviceBuffer::DeviceBuffer(HostBuffer host)
    : data_(host.data()), size_bytes_(host.size_bytes()), host_(std::move(host)) {}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : device_(std::exchange(other.device_, Device{})),
      data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)),
      host_(std::move(other.host_)),
      release_(std::exchange(other.release_, nullptr)) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  std::swap(host_, other.host_);
  std::swap(release_, other.release_);
  return *this;
}

DeviceBuffer::~DeviceBuffer() {
  if (device_.is_host()) return;  // host_ owns it
  if (release_) {
    release_(data_);
  } else if (data_ != nullptr) {
    FreeOnDevice(device_, data_);
  }
}

Result<void> WriteBuffer(DeviceBuffer& buffer, uint64_t offset, std::span<const std::byte> bytes) {
  if (bytes.empty()) return {};
  if (!buffer.device().is_host())
    return CopyBytes(buffer.device(), buffer.data() + offset, bytes.data(), bytes.size());
  std::memcpy(buffer.data() + offset, bytes.data(), bytes.size());
  return {};
}

Result<void> ReadBuffer(const DeviceBuffer& buffer, uint64_t offset, std::span<std::byte> bytes) {
  if (bytes.empty()) return {};
  if (!buffer.device().is_host())
    return CopyBytes(buffer.device(), bytes.data(), buffer.data() + offset, bytes.size());
  std::memcpy(bytes.data(), buffer.data() + offset, bytes.size());
  return {};
}

}  // namespace espalier
