// SPDX-License-Identifier: Apache-2.0
#ifndef ESPALIER_TESTS_SUPPORT_TENSOR_FILE_H_
#define ESPALIER_TESTS_SUPPORT_TENSOR_FILE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/half.h"
#include "checkpoint/safetensors.h"

namespace espalier::test {

// A safetensors file with test data, by tensor name. What is missing or of another type throws.
class TensorFile {
 public:
  explicit TensorFile(const std::string& path) {
    Result<std::unique_ptr<File>> file = PosixFileSystem().Open(path);
    if (!file) throw std::runtime_error(file.error().message());
    file_ = *std::move(file);
    Result<SafetensorsHeader> header = ReadSafetensorsHeader(*file_);
    if (!header) throw std::runtime_error(header.error().message());
    for (const TensorInfo& tensor : header->tensors) tensors_.emplace(tensor.name, tensor);
  }

  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }

  const TensorInfo& Info(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) throw std::runtime_error(name + " is not there");
    return found->second;
  }

  template <typename T>
  std::vector<T> Read(const std::string& name) const {
    const TensorInfo& info = Info(name);
    if (static_cast<size_t>(DtypeBits(info.dtype)) != 8 * sizeof(T)) {
      throw std::runtime_error(name + " has another element size");
    }
    std::vector<T> values(info.size_bytes / sizeof(T));
    const Result<void> read = file_->ReadAt(info.offset_bytes, std::as_writable_bytes(std::span(values)));
    if (!read) throw std::runtime_error(read.error().message());
    return values;
  }

  // An F16 tensor as floats.
  std::vector<float> ReadHalves(const std::string& name) const {
    std::vector<float> values;
    for (const uint16_t bits : Read<uint16_t>(name)) values.push_back(Fp16ToFloat(bits));
    return values;
  }

 private:
  std::unique_ptr<File> file_;
  std::map<std::string, TensorInfo> tensors_;
};

}  // namespace espalier::test

#endif  // ESPALIER_TESTS_SUPPORT_TENSOR_FILE_H_
