// SPDX-License-Identifier: Apache-2.0
//
// The input is a safetensors file. What is accepted has to be what the format promises, and has to come
// back the same from our own writer.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "checkpoint/safetensors.h"
#include "fuzz/check.h"
#include "support/memory_file_system.h"

namespace espalier {
namespace {

using espalier::testing::MemoryFileSystem;
using fuzz::Check;

Result<SafetensorsHeader> Read(MemoryFileSystem* files, std::string bytes) {
  files->Write("/f", std::move(bytes));
  // Short reads are the harder case and give the same result.
  files->SetFaults("/f", {.max_bytes_per_read = 61, .fails_at = {}, .ends_at = {}});
  const auto file = files->Open("/f");
  Check(file.has_value(), "a file that was written opens");
  return ReadSafetensorsHeader(**file);
}

void CheckPromises(const SafetensorsHeader& header, uint64_t file_bytes) {
  std::unordered_set<std::string_view> names;
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  for (const TensorInfo& tensor : header.tensors) {
    Check(names.insert(tensor.name).second, "names are unique");
    Check(!tensor.name.empty(), "names are not empty");
    Check(tensor.offset_bytes <= file_bytes && tensor.size_bytes <= file_bytes - tensor.offset_bytes,
          "tensors lie inside the file");
    unsigned __int128 bits = static_cast<unsigned>(DtypeBits(tensor.dtype));
    for (const uint64_t dimension : tensor.shape) bits = dimension == 0 ? 0 : bits * dimension;
    Check(bits == static_cast<unsigned __int128>(tensor.size_bytes) * 8, "size and shape agree");
    ranges.emplace_back(tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes);
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    Check(ranges[i].first == ranges[i - 1].second, "tensors leave no hole and do not overlap");
  }
  Check(ranges.empty() || ranges.back().second == file_bytes, "the last tensor ends with the file");
}

// The same tensors, in file order, through the writer.
void CheckRoundTrip(const SafetensorsHeader& header, const std::string& bytes) {
  std::vector<TensorInfo> infos = header.tensors;
  std::sort(infos.begin(), infos.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::tie(a.offset_bytes, a.size_bytes, a.name) < std::tie(b.offset_bytes, b.size_bytes, b.name);
  });
  std::vector<TensorData> tensors;
  for (const TensorInfo& info : infos) {
    tensors.push_back({info.name, info.dtype, info.shape,
                       std::as_bytes(std::span(bytes)).subspan(info.offset_bytes, info.size_bytes)});
  }
  std::string written = SafetensorsHeaderBytes(tensors, header.metadata);
  const uint64_t data_begin = written.size();
  for (const TensorInfo& info : infos) written += bytes.substr(info.offset_bytes, info.size_bytes);

  MemoryFileSystem files;
  const auto again = Read(&files, written);
  Check(again.has_value(), "what was written reads back");
  Check(again->metadata == header.metadata, "metadata survives");
  Check(again->tensors.size() == infos.size(), "no tensor is lost");
  uint64_t next = data_begin;
  for (size_t i = 0; i < infos.size(); ++i) {
    const TensorInfo& tensor = again->tensors[i];
    Check(tensor.name == infos[i].name && tensor.dtype == infos[i].dtype && tensor.shape == infos[i].shape,
          "descriptions survive");
    Check(tensor.offset_bytes == next, "tensors lie in the order they were given");
    next += tensor.size_bytes;
  }
}

void TestOneInput(std::string bytes) {
  MemoryFileSystem files;
  const auto header = Read(&files, bytes);
  if (!header) {
    Check(header.error().code() == StatusCode::kFormat, "a broken file is a format error");
    Check(header.error().message().size() < 20'000, "messages stay short");
    return;
  }
  CheckPromises(*header, bytes.size());
  CheckRoundTrip(*header, bytes);
}

}  // namespace
}  // namespace espalier

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  espalier::TestOneInput(std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}
