// SPDX-License-Identifier: Apache-2.0
//
// The one seam through which the library touches the file system: tests put memory, short reads and
// errors behind it.
#ifndef ESPALIER_SRC_BASE_FILE_H_
#define ESPALIER_SRC_BASE_FILE_H_

#include <espalier/status.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace espalier {

// An open regular file. Const members may be called from any thread at once.
class File {
 public:
  virtual ~File() = default;

  virtual uint64_t size_bytes() const = 0;  // at the time of opening

  // Reads at least one byte unless `target` is empty or `offset` is at or past the end (returns 0).
  // May read less than asked for. Error: kIo with the reason of the system.
  virtual Result<size_t> ReadSome(uint64_t offset, std::span<std::byte> target) const = 0;

  // kIo when the content may have changed since the file was opened: it was written to, cut, or another file
  // stands under its name now.
  virtual Result<void> CheckUnchanged() const = 0;

  // Fills `target` or fails: kIo naming the file, the place and how much was there.
  Result<void> ReadAt(uint64_t offset, std::span<std::byte> target) const;

  const std::filesystem::path& path() const { return path_; }

 protected:
  explicit File(std::filesystem::path path) : path_(std::move(path)) {}

 private:
  std::filesystem::path path_;
};

class FileSystem {
 public:
  enum class EntryKind { kAbsent, kRegular, kDirectory, kDanglingLink, kOther };

  virtual ~FileSystem() = default;

  // What a path is, links followed. Never blocks (a FIFO is kOther).
  virtual EntryKind Kind(const std::filesystem::path& path) = 0;

  // Opens a regular file for reading, links followed. Error: kIo that tells apart a missing path, a
  // dangling link, a directory, another special file and a refusal of the system. Never blocks.
  virtual Result<std::unique_ptr<File>> Open(const std::filesystem::path& path) = 0;

  // Names (not paths) of a directory's entries, ordered. Error: kIo.
  virtual Result<std::vector<std::string>> List(const std::filesystem::path& directory) = 0;
};

FileSystem& PosixFileSystem();

// Whole content. Error: kIo; kFormat when the file is larger than max_bytes.
Result<std::string> ReadTextFile(const File& file, uint64_t max_bytes);

// A file that appears under its name only when complete: written beside it under a temporary name,
// synced, then renamed. Destroyed without Commit, it leaves nothing behind.
class AtomicFile {
 public:
  static Result<AtomicFile> Create(const std::filesystem::path& path);
  AtomicFile(AtomicFile&&) noexcept;
  AtomicFile& operator=(AtomicFile&&) = delete;
  ~AtomicFile();

  Result<void> Append(std::span<const std::byte> bytes);
  Result<void> Commit();

 private:
  AtomicFile(std::filesystem::path path, std::filesystem::path temporary, int descriptor);
  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int descriptor_ = -1;
};

}  // namespace espalier

#endif  // ESPALIER_SRC_BASE_FILE_H_
