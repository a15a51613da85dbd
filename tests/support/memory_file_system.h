// SPDX-License-Identifier: Apache-2.0
//
// A file system in memory, with faults on order. Directories are implied by the paths of the files.
#ifndef ESPALIER_TESTS_SUPPORT_MEMORY_FILE_SYSTEM_H_
#define ESPALIER_TESTS_SUPPORT_MEMORY_FILE_SYSTEM_H_

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/file.h"

namespace espalier::testing {

// What goes wrong when a file is read.
struct ReadFaults {
  // One ReadSome gives at most this many bytes; 0 = as many as asked for.
  size_t max_bytes_per_read = 0;
  // A read that would touch this byte stops before it; one that begins at or after it fails with kIo.
  std::optional<uint64_t> fails_at = {};
  // The file was cut to this size after it was opened: its size_bytes() still says more.
  std::optional<uint64_t> ends_at = {};
  // So many reads fail with kIo, then all is well.
  int failing_reads = 0;
};

// Not to be changed while another thread uses it; its open files may be read by any number of threads.
class MemoryFileSystem : public FileSystem {
 public:
  void Write(const std::filesystem::path& path, std::string bytes);
  // Reads of [bytes.size(), size_bytes) give zeros: a file of 200 GB costs nothing.
  void WriteSparse(const std::filesystem::path& path, std::string bytes, uint64_t size_bytes);
  // Something that is no file: kOther, kDanglingLink, or kDirectory for an empty directory.
  void AddEntry(const std::filesystem::path& path, EntryKind kind);
  // REQUIRES: the file is there. Holds for files opened from now on.
  void SetFaults(const std::filesystem::path& path, const ReadFaults& faults);
  // The same for files that are open already. A replaced file (Write) is a new one.
  void SetLiveFaults(const std::filesystem::path& path, const ReadFaults& faults);
  void Remove(const std::filesystem::path& path);

  // Over all files since the beginning.
  uint64_t bytes_read() const { return bytes_read_; }

  EntryKind Kind(const std::filesystem::path& path) override;
  Result<std::unique_ptr<File>> Open(const std::filesystem::path& path) override;
  Result<std::vector<std::string>> List(const std::filesystem::path& directory) override;

 private:
  struct Entry {
    EntryKind kind = EntryKind::kRegular;
    std::shared_ptr<const std::string> bytes = std::make_shared<std::string>();
    uint64_t size_bytes = 0;
    std::shared_ptr<ReadFaults> faults = std::make_shared<ReadFaults>();
  };
  class OpenFile;

  std::map<std::string, std::shared_ptr<const Entry>> entries_;
  std::mutex failing_;
  std::atomic<uint64_t> bytes_read_{0};
};

}  // namespace espalier::testing

#endif  // ESPALIER_TESTS_SUPPORT_MEMORY_FILE_SYSTEM_H_
