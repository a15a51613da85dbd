// SPDX-License-Identifier: Apache-2.0
//
// The safetensors container, every rule of it enforced (grammar: docs/format.md).
//
//   u64 little-endian header length N, N <= 100,000,000
//   N bytes of JSON: an object that begins with '{', may end in spaces
//   the data: tensors in any order, without holes or overlaps, ending exactly with the file
#ifndef ESPALIER_SRC_CHECKPOINT_SAFETENSORS_H_
#define ESPALIER_SRC_CHECKPOINT_SAFETENSORS_H_

#include <espalier/checkpoint.h>
#include <espalier/status.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/file.h"

namespace espalier {

inline constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // in the order of the header; `file` is 0
  std::vector<std::pair<std::string, std::string>> metadata;
};

// Reads and checks the header of `file`; no payload is read. Cost: linear in the header.
// Errors: kIo, kFormat naming the file, the tensor and both numbers.
Result<SafetensorsHeader> ReadSafetensorsHeader(const File& file);

// One tensor to be written. `data` must stay valid until the write.
struct TensorData {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<uint64_t> shape;
  std::span<const std::byte> data;
};

// The bytes before the data: length and JSON header padded with spaces to a multiple of 8. Tensors lie in
// the given order.
std::string SafetensorsHeaderBytes(std::span<const TensorData> tensors,
                                   std::span<const std::pair<std::string, std::string>> metadata);

// Writes a file through a temporary name. Errors: kUsage (size and shape disagree), kIo.
Result<void> WriteSafetensors(const std::filesystem::path& path, std::span<const TensorData> tensors,
                              std::span<const std::pair<std::string, std::string>> metadata = {});

}  // namespace espalier

#endif  // ESPALIER_SRC_CHECKPOINT_SAFETENSORS_H_
