// SPDX-License-Identifier: Apache-2.0
#include <espalier/host_buffer.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <new>
#include <utility>

namespace espalier {
namespace {

constexpr std::align_val_t kBufferAlignment{4096};
constexpr uint64_t kSmallPageBytes = 4096;
constexpr uint64_t kHugePagesFrom = uint64_t{8} << 20;
constexpr uint64_t kMaxBufferBytes = uint64_t{1} << 47;  // the user half of a 48-bit address space

}  // namespace

Result<HostBuffer> HostBuffer::Create(uint64_t size_bytes) {
  HostBuffer buffer;
  if (size_bytes == 0) return buffer;
  if (size_bytes <= kMaxBufferBytes) {
    buffer.data_ = static_cast<std::byte*>(::operator new(size_bytes, kBufferAlignment, std::nothrow));
  }
  if (buffer.data_ == nullptr) {
    return Error(StatusCode::kCapacity, fmt::format("no memory for a buffer of {} bytes", size_bytes));
  }
  buffer.size_bytes_ = size_bytes;
  // A page of 2 MiB takes one fault instead of 512 when a slab is filled, and one entry of the TLB when it is
  // run. Advice only: the system may not have them.
  if (size_bytes >= kHugePagesFrom) {
    madvise(buffer.data_, size_bytes / kSmallPageBytes * kSmallPageBytes, MADV_HUGEPAGE);
  }
  return buffer;
}

HostBuffer HostBuffer::Adopt(std::byte* data, uint64_t size_bytes, std::function<void(std::byte*)> release) {
  HostBuffer buffer;
  buffer.data_ = data;
  buffer.size_bytes_ = size_bytes;
  buffer.release_ = std::move(release);
  return buffer;
}

HostBuffer::HostBuffer(HostBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)),
      release_(std::exchange(other.release_, nullptr)) {}

HostBuffer& HostBuffer::operator=(HostBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  std::swap(release_, other.release_);
  return *this;
}

HostBuffer::~HostBuffer() {
  if (release_) {
    release_(data_);
  } else {
    ::operator delete(data_, kBufferAlignment);
  }
}

}  // namespace espalier
