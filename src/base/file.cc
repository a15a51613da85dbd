// SPDX-License-Identifier: Apache-2.0
#include "base/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <random>
#include <system_error>
#include <utility>

#include "base/text.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

std::string Shown(const fs::path& path) { return Quoted(path.native()); }

std::string SystemText(int error) { return std::generic_category().message(error); }

tl::unexpected<Status> IoError(const fs::path& path, std::string_view what) {
  return Error(StatusCode::kIo, fmt::format("{}: {}", Shown(path), what));
}

// The system would silently cut such a path at the NUL and open another file.
bool HasNul(const fs::path& path) { return path.native().find('\0') != std::string::npos; }

std::string_view KindName(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  if (S_ISCHR(mode)) return "a character device";
  if (S_ISBLK(mode)) return "a block device";
  return "a special file";
}

tl::unexpected<Status> NotRegular(const fs::path& path, mode_t mode) {
  return IoError(path, fmt::format("is {}; a regular file is needed", KindName(mode)));
}

bool IsLink(const fs::path& path) {
  struct stat info = {};
  return lstat(path.c_str(), &info) == 0 && S_ISLNK(info.st_mode);
}

tl::unexpected<Status> CannotOpen(const fs::path& path, int error) {
  if ((error == ENOENT || error == ELOOP) && IsLink(path)) {
    std::error_code ignored;
    const fs::path target = fs::read_symlink(path, ignored);
    return IoError(path, fmt::format("is a dangling link: its target {} {}", Shown(target),
                                     error == ELOOP ? "leads back to a link" : "does not exist"));
  }
  if (error == ENOENT || error == ENOTDIR) return IoError(path, "does not exist");
  return IoError(path, fmt::format("cannot be opened: {}", SystemText(error)));
}

class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  Descriptor(Descriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (value_ >= 0) close(value_);
  }
  int get() const { return value_; }

 private:
  int value_;
};

class PosixFile : public File {
 public:
  PosixFile(fs::path path, Descriptor descriptor, const struct stat& info)
      : File(std::move(path)),
        descriptor_(std::move(descriptor)),
        size_bytes_(static_cast<uint64_t>(std::max<off_t>(info.st_size, 0))),
        opened_(info) {}

  uint64_t size_bytes() const override { return size_bytes_; }

  Result<void> CheckUnchanged() const override {
    struct stat now = {};
    if (fstat(descriptor_.get(), &now) != 0) return IoError(path(), SystemText(errno));
    if (now.st_size != opened_.st_size || now.st_mtim.tv_sec != opened_.st_mtim.tv_sec ||
        now.st_mtim.tv_nsec != opened_.st_mtim.tv_nsec) {
      return IoError(path(),
                     fmt::format("was written to since its header was read (found {} bytes, then {}); "
                                 "open the checkpoint again",
                                 opened_.st_size, now.st_size));
    }
    if (stat(path().c_str(), &now) != 0 || now.st_dev != opened_.st_dev || now.st_ino != opened_.st_ino) {
      return IoError(path(), "was replaced or removed since its header was read; open the checkpoint again");
    }
    return {};
  }

  Result<size_t> ReadSome(uint64_t offset, std::span<std::byte> target) const override {
    if (target.empty() || offset > static_cast<uint64_t>(std::numeric_limits<off_t>::max())) return 0;
    while (true) {
      const ssize_t count =
          pread(descriptor_.get(), target.data(), target.size(), static_cast<off_t>(offset));
      if (count >= 0) return static_cast<size_t>(count);
      if (errno != EINTR) {
        return IoError(path(), fmt::format("read error at byte {}: {}", offset, SystemText(errno)));
      }
    }
  }

 private:
  Descriptor descriptor_;
  uint64_t size_bytes_;
  struct stat opened_;
};

class PosixFiles : public FileSystem {
 public:
  EntryKind Kind(const fs::path& path) override {
    if (HasNul(path)) return EntryKind::kAbsent;
    struct stat info = {};
    if (stat(path.c_str(), &info) != 0) {
      if ((errno == ENOENT || errno == ELOOP) && IsLink(path)) return EntryKind::kDanglingLink;
      // Without permission to look there may be something: opening it says what is the matter.
      return errno == EACCES ? EntryKind::kOther : EntryKind::kAbsent;
    }
    if (S_ISREG(info.st_mode)) return EntryKind::kRegular;
    return S_ISDIR(info.st_mode) ? EntryKind::kDirectory : EntryKind::kOther;
  }

  Result<std::unique_ptr<File>> Open(const fs::path& path) override {
    if (HasNul(path)) return IoError(path, "the path contains a NUL byte");
    // Looked at before opening, as opening a device can have effects, and again after it, as the entry may
    // have been replaced in between. O_NONBLOCK: opening a FIFO would wait for a writer.
    struct stat info = {};
    if (stat(path.c_str(), &info) != 0) return CannotOpen(path, errno);
    if (!S_ISREG(info.st_mode)) return NotRegular(path, info.st_mode);
    Descriptor descriptor(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
    if (descriptor.get() < 0) return CannotOpen(path, errno);
    if (fstat(descriptor.get(), &info) != 0) return CannotOpen(path, errno);
    if (!S_ISREG(info.st_mode)) return NotRegular(path, info.st_mode);
    return std::make_unique<PosixFile>(path, std::move(descriptor), info);
  }

  Result<std::vector<std::string>> List(const fs::path& directory) override {
    if (HasNul(directory)) return IoError(directory, "the path contains a NUL byte");
    std::error_code error;
    fs::directory_iterator entry(directory, error);
    if (error) return IoError(directory, fmt::format("cannot be listed: {}", error.message()));
    std::vector<std::string> names;
    while (entry != fs::directory_iterator()) {
      names.push_back(entry->path().filename().native());
      entry.increment(error);
      if (error) return IoError(directory, fmt::format("cannot be listed: {}", error.message()));
    }
    std::sort(names.begin(), names.end());
    return names;
  }
};

// Name of a temporary file beside `path`: ".NAME.LETTERS.tmp", the name cut so that it stays below the 255
// bytes a file system takes.
fs::path TemporaryName(const fs::path& path, std::random_device* random) {
  constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyz0123456789";
  constexpr size_t kMaxNameBytes = 200;
  std::string letters;
  for (int i = 0; i < 6; ++i) letters += kLetters[(*random)() % kLetters.size()];
  const std::string name = path.filename().native().substr(0, kMaxNameBytes);
  return path.parent_path() / fmt::format(".{}.{}.tmp", name, letters);
}

// Makes a rename survive a power cut. Not every file system can sync a directory: best effort.
void SyncDirectory(const fs::path& directory) {
  const fs::path place = directory.empty() ? fs::path(".") : directory;
  const Descriptor descriptor(open(place.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (descriptor.get() >= 0) fsync(descriptor.get());
}

}  // namespace

FileSystem& PosixFileSystem() {
  static PosixFiles files;
  return files;
}

Result<void> File::ReadAt(uint64_t offset, std::span<std::byte> target) const {
  size_t done = 0;
  while (done < target.size()) {
    const Result<size_t> count = ReadSome(offset + done, target.subspan(done));
    if (!count) return tl::unexpected(count.error());
    if (*count == 0) {
      return IoError(path_,
                     fmt::format("file ended at byte {}, needed {}", offset + done, offset + target.size()));
    }
    done += *count;
  }
  return {};
}

Result<std::string> ReadTextFile(const File& file, uint64_t max_bytes) {
  const uint64_t size = file.size_bytes();
  if (size > max_bytes) {
    return Error(StatusCode::kFormat, fmt::format("{}: {} bytes of text; at most {} are allowed",
                                                  Shown(file.path()), size, max_bytes));
  }
  std::string text(size, '\0');
  const Result<void> read = file.ReadAt(0, std::as_writable_bytes(std::span(text)));
  if (!read) return tl::unexpected(read.error());
  return text;
}

AtomicFile::AtomicFile(fs::path path, fs::path temporary, int descriptor)
    : path_(std::move(path)), temporary_(std::move(temporary)), descriptor_(descriptor) {}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::move(other.temporary_)),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  close(descriptor_);
  unlink(temporary_.c_str());
}

Result<AtomicFile> AtomicFile::Create(const fs::path& path) {
  if (HasNul(path)) return IoError(path, "the path contains a NUL byte");
  if (!path.has_filename()) return IoError(path, "is not the name of a file");
  // A rename would replace the link and not what it leads to. (Links such as /dev/stdout lead out of any
  // folder.)
  if (IsLink(path)) return IoError(path, "cannot be written: it is a link");
  // A rename would put a regular file in the place of a device such as /dev/null.
  struct stat info = {};
  if (stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    return IoError(path, fmt::format("cannot be written: it is {}", KindName(info.st_mode)));
  }
  constexpr int kAttempts = 100;  // 36^6 names: a second attempt is already rare
  std::random_device random;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    fs::path temporary = TemporaryName(path, &random);
    const int descriptor =
        open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (descriptor >= 0) return AtomicFile(path, std::move(temporary), descriptor);
    if (errno != EEXIST) return IoError(path, fmt::format("cannot be written: {}", SystemText(errno)));
  }
  return IoError(path, "cannot be written: no free temporary name");
}

Result<void> AtomicFile::Append(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = write(descriptor_, bytes.data(), bytes.size());
    if (count >= 0) {
      bytes = bytes.subspan(static_cast<size_t>(count));
    } else if (errno != EINTR) {
      return IoError(path_, fmt::format("write error: {}", SystemText(errno)));
    }
  }
  return {};
}

Result<void> AtomicFile::Commit() {
  if (fsync(descriptor_) != 0) return IoError(path_, fmt::format("cannot be synced: {}", SystemText(errno)));
  if (rename(temporary_.c_str(), path_.c_str()) != 0) {
    return IoError(path_, fmt::format("cannot be written: {}", SystemText(errno)));
  }
  // The bytes are synced and the name is there: closing can no longer lose anything.
  close(std::exchange(descriptor_, -1));
  SyncDirectory(path_.parent_path());
  return {};
}

}  // namespace espalier
