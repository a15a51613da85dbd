// SPDX-License-Identifier: Apache-2.0
#include "support/memory_file_system.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <string_view>
#include <utility>

namespace espalier::testing {
namespace {

std::string Key(const std::filesystem::path& path) {
  std::string key = path.lexically_normal().native();
  while (key.size() > 1 && key.ends_with('/')) key.pop_back();
  return key;
}

// What the keys of the entries inside a directory begin with.
std::string InsidePrefix(const std::filesystem::path& directory) {
  const std::string key = Key(directory);
  if (key == ".") return "";
  return key.ends_with('/') ? key : key + "/";
}

tl::unexpected<Status> IoError(const std::filesystem::path& path, std::string_view what) {
  return Error(StatusCode::kIo, path.native() + ": " + std::string(what));
}

}  // namespace

class MemoryFileSystem::OpenFile : public File {
 public:
  OpenFile(std::filesystem::path path, std::shared_ptr<const Entry> entry, MemoryFileSystem* owner)
      : File(std::move(path)), entry_(std::move(entry)), owner_(owner) {}

  uint64_t size_bytes() const override { return entry_->size_bytes; }

  Result<void> CheckUnchanged() const override {
    const auto now = owner_->entries_.find(Key(path()));
    if (now != owner_->entries_.end() && now->second->bytes == entry_->bytes) return {};
    return IoError(path(), "was replaced or removed since its header was read");
  }

  Result<size_t> ReadSome(uint64_t offset, std::span<std::byte> target) const override {
    ReadFaults& faults = *entry_->faults;
    uint64_t end = std::min(entry_->size_bytes, faults.ends_at.value_or(entry_->size_bytes));
    if (target.empty() || offset >= end) return 0;
    if (faults.fails_at) {
      if (offset >= *faults.fails_at) return IoError(path(), "read error on order");
      end = std::min(end, *faults.fails_at);
    }
    if (TakeFailure(faults)) return IoError(path(), "passing read error on order");
    size_t count = std::min<uint64_t>(target.size(), end - offset);
    if (faults.max_bytes_per_read != 0) count = std::min(count, faults.max_bytes_per_read);
    const uint64_t stored = entry_->bytes->size();
    const size_t from_bytes = offset < stored ? std::min<uint64_t>(count, stored - offset) : 0;
    if (from_bytes > 0) std::memcpy(target.data(), entry_->bytes->data() + offset, from_bytes);
    std::fill_n(target.begin() + static_cast<ptrdiff_t>(from_bytes), count - from_bytes, std::byte{0});
    owner_->bytes_read_ += count;
    return count;
  }

 private:
  bool TakeFailure(ReadFaults& faults) const {
    const std::lock_guard lock(owner_->failing_);
    if (faults.failing_reads == 0) return false;
    --faults.failing_reads;
    return true;
  }

  std::shared_ptr<const Entry> entry_;
  MemoryFileSystem* owner_;
};

void MemoryFileSystem::Write(const std::filesystem::path& path, std::string bytes) {
  const uint64_t size_bytes = bytes.size();
  WriteSparse(path, std::move(bytes), size_bytes);
}

void MemoryFileSystem::WriteSparse(const std::filesystem::path& path, std::string bytes,
                                   uint64_t size_bytes) {
  Entry entry;
  entry.bytes = std::make_shared<const std::string>(std::move(bytes));
  entry.size_bytes = size_bytes;
  entries_[Key(path)] = std::make_shared<const Entry>(std::move(entry));
}

void MemoryFileSystem::AddEntry(const std::filesystem::path& path, EntryKind kind) {
  Entry entry;
  entry.kind = kind;
  entries_[Key(path)] = std::make_shared<const Entry>(std::move(entry));
}

void MemoryFileSystem::SetFaults(const std::filesystem::path& path, const ReadFaults& faults) {
  Entry entry = *entries_.at(Key(path));
  entry.faults = std::make_shared<ReadFaults>(faults);
  entries_[Key(path)] = std::make_shared<const Entry>(std::move(entry));
}

void MemoryFileSystem::SetLiveFaults(const std::filesystem::path& path, const ReadFaults& faults) {
  *entries_.at(Key(path))->faults = faults;
}

void MemoryFileSystem::Remove(const std::filesystem::path& path) { entries_.erase(Key(path)); }

FileSystem::EntryKind MemoryFileSystem::Kind(const std::filesystem::path& path) {
  const auto found = entries_.find(Key(path));
  if (found != entries_.end()) return found->second->kind;
  const std::string prefix = InsidePrefix(path);
  const auto inside = entries_.lower_bound(prefix);
  const bool is_directory = inside != entries_.end() && inside->first.starts_with(prefix);
  return is_directory ? EntryKind::kDirectory : EntryKind::kAbsent;
}

Result<std::unique_ptr<File>> MemoryFileSystem::Open(const std::filesystem::path& path) {
  switch (Kind(path)) {
    case EntryKind::kRegular:
      return std::make_unique<OpenFile>(path, entries_.at(Key(path)), this);
    case EntryKind::kDirectory:
      return IoError(path, "is a directory; a regular file is needed");
    case EntryKind::kDanglingLink:
      return IoError(path, "is a dangling link");
    case EntryKind::kOther:
      return IoError(path, "is a special file; a regular file is needed");
    case EntryKind::kAbsent:
      break;
  }
  return IoError(path, "does not exist");
}

Result<std::vector<std::string>> MemoryFileSystem::List(const std::filesystem::path& directory) {
  if (Kind(directory) != EntryKind::kDirectory)
    return IoError(directory, "cannot be listed: not a directory");
  const std::string prefix = InsidePrefix(directory);
  std::set<std::string> names;
  for (auto entry = entries_.lower_bound(prefix); entry != entries_.end(); ++entry) {
    if (!entry->first.starts_with(prefix)) break;
    const std::string_view rest = std::string_view(entry->first).substr(prefix.size());
    names.emplace(rest.substr(0, rest.find('/')));
  }
  return std::vector<std::string>(names.begin(), names.end());
}

}  // namespace espalier::testing
