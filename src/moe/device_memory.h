// SPDX-License-Identifier: Apache-2.0
//
// Device memory as plans and loaders need it, by declaration only: src/cuda defines what needs CUDA, or, in a
// build without it, the refusals (no_cuda.cc).
#ifndef ESPALIER_SRC_MOE_DEVICE_MEMORY_H_
#define ESPALIER_SRC_MOE_DEVICE_MEMORY_H_

#include <espalier/device.h>
#include <espalier/experts.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace espalier {

// Errors: kDevice, kCapacity. REQUIRES: a GPU's device.
Result<std::byte*> AllocateOnDevice(const Device& device, uint64_t size_bytes);

// Passes over failures: a process that ends has lost its context before its last buffers die.
void FreeOnDevice(const Device& device, std::byte* data);

// Page-locked host memory, which a copy to the device reads without a detour. Errors: kDevice, kCapacity.
Result<HostBuffer> AllocatePinned(const Device& device, uint64_t size_bytes);

// Copies between any two places and waits until the bytes are there; calls of several threads run side by
// side. `device` is the GPU that takes part. Error: kDevice.
Result<void> CopyBytes(const Device& device, void* to, const void* from, uint64_t size_bytes);

// What the cuda executor reads beside a slab on its device: DeviceSegment [segments], then uint32
// first_segment [experts + 1].
Result<DeviceBuffer> MakeDeviceTable(const ExpertsTable& table, const DeviceBuffer& slab);

// Bytes of a buffer on any device. REQUIRES: inside the buffer.
Result<void> WriteBuffer(DeviceBuffer& buffer, uint64_t offset, std::span<const std::byte> bytes);
Result<void> ReadBuffer(const DeviceBuffer& buffer, uint64_t offset, std::span<std::byte> bytes);

}  // namespace espalier

#endif  // ESPALIER_SRC_MOE_DEVICE_MEMORY_H_
