// SPDX-License-Identifier: Apache-2.0
//
// Memory that loaders fill: slabs of experts, slices of dense tensors, workspaces.
#ifndef ESPALIER_HOST_BUFFER_H_
#define ESPALIER_HOST_BUFFER_H_

#include <espalier/status.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace espalier {

// Owned host memory, not initialised. Movable, not copyable.
class HostBuffer {
 public:
  // Aligned to 4096 bytes. Error: kCapacity when the machine refuses the memory.
  static Result<HostBuffer> Create(uint64_t size_bytes);

  // Memory of the caller's kind (pinned, shared), handed back with release(data) when the buffer dies.
  // REQUIRES: aligned to 64 bytes.
  static HostBuffer Adopt(std::byte* data, uint64_t size_bytes, std::function<void(std::byte*)> release);

  HostBuffer() = default;
  HostBuffer(HostBuffer&&) noexcept;
  HostBuffer& operator=(HostBuffer&&) noexcept;
  ~HostBuffer();

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  uint64_t size_bytes() const { return size_bytes_; }
  std::span<std::byte> span() { return {data_, size_bytes_}; }
  std::span<const std::byte> span() const { return {data_, size_bytes_}; }

 private:
  std::byte* data_ = nullptr;
  uint64_t size_bytes_ = 0;
  std::function<void(std::byte*)> release_;  // empty: memory of Create
};

}  // namespace espalier

#endif  // ESPALIER_HOST_BUFFER_H_
