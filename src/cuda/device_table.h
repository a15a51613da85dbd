// SPDX-License-Identifier: Apache-2.0
//
// Descriptors of a prepared package as the kernels read them, in device memory: the twin of SegmentDesc with
// pointers in place of offsets. Plain integers only, so that host code needs no CUDA header.
#ifndef ESPALIER_SRC_CUDA_DEVICE_TABLE_H_
#define ESPALIER_SRC_CUDA_DEVICE_TABLE_H_

#include <espalier/experts.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace espalier::cuda {

// One EXL3 matrix W [in][out] in device memory; codes == nullptr where it is absent.
struct DeviceMatrix {
  const uint32_t* codes = nullptr;  // [in/16][out/16][8 * bits] words, native order
  const uint16_t* suh = nullptr;    // fp16 [in]
  const uint16_t* svh = nullptr;    // fp16 [out]
  const uint16_t* bias = nullptr;   // fp16 [out] or null
  uint32_t in_channels = 0;
  uint32_t out_channels = 0;
  uint32_t bits = 0;
  uint32_t codebook = 0;  // number of formats.def
};

struct DeviceSegment {
  DeviceMatrix matrices[kNumProjections];
  uint32_t expert = 0;
  uint32_t valid_intermediate_channels = 0;
};

// A package in device memory.
struct DeviceExperts {
  const DeviceSegment* segments = nullptr;  // [num_segments]
  const uint32_t* first_segment = nullptr;  // [experts + 1]
  uint32_t num_segments = 0;
  uint32_t experts = 0;
};

// The table for a slab that lies, or will lie, at `device_slab`.
inline DeviceMatrix MatrixAt(const MatrixDesc& matrix, const std::byte* device_slab) {
  DeviceMatrix device;
  if (!matrix.present()) return device;
  const auto at = [&](uint64_t offset) {
    return offset == kAbsentOffset ? nullptr : reinterpret_cast<const uint16_t*>(device_slab + offset);
  };
  device.codes = reinterpret_cast<const uint32_t*>(device_slab + matrix.codes_offset_bytes);
  device.suh = at(matrix.suh_offset_bytes);
  device.svh = at(matrix.svh_offset_bytes);
  device.bias = at(matrix.bias_offset_bytes);
  device.in_channels = matrix.in_channels;
  device.out_channels = matrix.out_channels;
  device.bits = matrix.bits;
  device.codebook = static_cast<uint32_t>(matrix.codebook);
  return device;
}

inline std::vector<DeviceSegment> SegmentsAt(const ExpertsTable& table, const std::byte* device_slab) {
  std::vector<DeviceSegment> segments;
  segments.reserve(table.segments().size());
  for (const SegmentDesc& segment : table.segments()) {
    DeviceSegment& device = segments.emplace_back();
    for (int i = 0; i < kNumProjections; ++i) device.matrices[i] = MatrixAt(segment.matrices[i], device_slab);
    device.expert = segment.expert;
    device.valid_intermediate_channels = segment.valid_intermediate_channels;
  }
  return segments;
}

}  // namespace espalier::cuda

#endif  // ESPALIER_SRC_CUDA_DEVICE_TABLE_H_
