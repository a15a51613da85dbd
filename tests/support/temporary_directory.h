// SPDX-License-Identifier: Apache-2.0
#ifndef ESPALIER_TESTS_SUPPORT_TEMPORARY_DIRECTORY_H_
#define ESPALIER_TESTS_SUPPORT_TEMPORARY_DIRECTORY_H_

#include <stdlib.h>

#include <filesystem>
#include <string>
#include <system_error>

namespace espalier::testing {

// A fresh directory that goes away with the object, whatever is in it.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "espalier-test-XXXXXX").native();
    if (mkdtemp(pattern.data()) != nullptr) path_ = pattern;
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

}  // namespace espalier::testing

#endif  // ESPALIER_TESTS_SUPPORT_TEMPORARY_DIRECTORY_H_
