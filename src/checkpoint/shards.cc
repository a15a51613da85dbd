// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/shards.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <unordered_set>

#include "base/text.h"
#include "checkpoint/json_fields.h"
#include "checkpoint/safetensors.h"

namespace espalier {
namespace {

constexpr std::string_view kIndexName = "model.safetensors.index.json";
constexpr std::string_view kIndexSuffix = ".safetensors.index.json";
constexpr std::string_view kShardSuffix = ".safetensors";
constexpr size_t kCompareBytes = size_t{1} << 20;

// The index as (tensor, file) pairs; views into the document.
struct ShardIndex {
  std::unique_ptr<JsonFile> file;
  std::vector<std::pair<std::string_view, std::string_view>> entries;
};

Result<std::string> IndexName(const ShardSet& shards, const std::vector<std::string>& names) {
  std::vector<std::string> found;
  for (const std::string& name : names) {
    if (name == kIndexName) return name;
    if (name.ends_with(kIndexSuffix)) found.push_back(name);
  }
  if (found.size() > 1) {
    return Error(StatusCode::kFormat,
                 fmt::format("{}: {} index files and none is named {}; found: {}", shards.directory.string(),
                             found.size(), kIndexName, fmt::join(found, ", ")));
  }
  return found.empty() ? std::string() : found[0];
}

Result<ShardIndex> ReadIndex(const ShardSet& shards, const std::string& name) {
  auto file = ReadRequiredJson(shards, name);
  if (!file) return tl::unexpected(file.error());
  ShardIndex index{.file = std::move(*file), .entries = {}};
  const auto root = RootObject(index.file->document.root(), name);
  if (!root) return tl::unexpected(root.error());
  const auto map = root->RequireObject("weight_map");
  if (!map) return tl::unexpected(map.error());
  for (const auto field : map->object) {
    std::string_view shard;
    if (field.value.get_string().get(shard)) {
      return Error(StatusCode::kFormat, fmt::format("{}: found {}, legal: a file name", map->Place(field.key),
                                                    JsonTypeName(field.value)));
    }
    if (auto plain = CheckPlainName(shard, map->Place(field.key)); !plain)
      return tl::unexpected(plain.error());
    index.entries.emplace_back(field.key, shard);
  }
  return index;
}

bool IsListed(const std::vector<std::string>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Opens what the index names. A name that is not there at all is the index's fault (kFormat); one that
// is there but cannot be opened (dangling link, FIFO, directory) is the file system's (kIo).
Result<void> OpenIndexedShards(ShardSet& shards, const ShardIndex& index,
                               const std::vector<std::string>& skip) {
  std::vector<std::string_view> order;
  std::unordered_set<std::string_view> seen;
  for (const auto& [tensor, shard] : index.entries) {
    if (!seen.insert(shard).second || IsListed(skip, shard)) continue;
    if (shards.file_system->Kind(shards.directory / shard) == FileSystem::EntryKind::kAbsent) {
      return Error(StatusCode::kFormat,
                   fmt::format("{}: tensor '{}' is said to be in {}, but there is no such file",
                               index.file->name, tensor, shard));
    }
    order.push_back(shard);
  }
  std::sort(order.begin(), order.end());
  for (const std::string_view shard : order) {
    if (auto appended = AppendShard(shards, std::string(shard)); !appended) return appended;
  }
  return {};
}

Result<bool> SameBytes(const ShardSet& shards, const TensorInfo& a, const TensorInfo& b) {
  if (a.dtype != b.dtype || a.shape != b.shape) return false;
  const size_t buffer_bytes = static_cast<size_t>(std::min<uint64_t>(kCompareBytes, a.size_bytes));
  std::vector<std::byte> bytes_a(buffer_bytes), bytes_b(buffer_bytes);
  for (uint64_t done = 0; done < a.size_bytes; done += kCompareBytes) {
    const size_t count = static_cast<size_t>(std::min<uint64_t>(kCompareBytes, a.size_bytes - done));
    if (auto r = shards.handles[a.file]->ReadAt(a.offset_bytes + done, {bytes_a.data(), count}); !r) {
      return tl::unexpected(r.error());
    }
    if (auto r = shards.handles[b.file]->ReadAt(b.offset_bytes + done, {bytes_b.data(), count}); !r) {
      return tl::unexpected(r.error());
    }
    if (std::memcmp(bytes_a.data(), bytes_b.data(), count) != 0) return false;
  }
  return true;
}

// Tensors that lie in more than one shard, as (name, file of a further copy).
using Copies = std::set<std::pair<std::string_view, uint32_t>>;

// Builds by_name from tensors [first, end); of equal copies the first stays.
Result<Copies> BuildNameMap(ShardSet& shards, size_t first) {
  Copies copies;
  shards.by_name.reserve(shards.tensors.size() - first);
  for (size_t i = first; i < shards.tensors.size(); ++i) {
    const TensorInfo& tensor = shards.tensors[i];
    const auto [entry, inserted] = shards.by_name.emplace(tensor.name, static_cast<int32_t>(i));
    if (inserted) continue;
    const TensorInfo& other = shards.tensors[entry->second];
    const auto same = SameBytes(shards, other, tensor);
    if (!same) return tl::unexpected(same.error());
    if (!*same) {
      return Error(StatusCode::kFormat,
                   fmt::format("tensor '{}' is in {} and in {} with different content", tensor.name,
                               shards.files[other.file].name, shards.files[tensor.file].name));
    }
    copies.emplace(tensor.name, tensor.file);
  }
  return copies;
}

Result<void> CheckIndex(ShardSet& shards, const ShardIndex& index, const Copies& copies,
                        const std::vector<std::string>& skip) {
  std::unordered_map<std::string_view, uint32_t> file_by_name;
  for (uint32_t i = 0; i < shards.files.size(); ++i) file_by_name.emplace(shards.files[i].name, i);
  std::unordered_set<std::string_view> named;
  named.reserve(index.entries.size());
  for (const auto& [name, shard] : index.entries) {
    if (IsListed(skip, shard)) continue;
    named.insert(name);
    const uint32_t file = file_by_name.at(shard);
    const auto found = shards.by_name.find(name);
    const bool present = found != shards.by_name.end();
    if (present && (shards.tensors[found->second].file == file || copies.contains({name, file}))) continue;
    return Error(
        StatusCode::kFormat,
        fmt::format("{}: tensor '{}' is said to be in {}, but that file does not hold it{}", index.file->name,
                    name, shard, present ? fmt::format(" ({} does)", shards.FileName(found->second)) : ""));
  }
  for (const auto& [name, tensor] : shards.by_name) {
    if (!named.contains(name)) shards.not_in_index.push_back(tensor);
  }
  std::sort(shards.not_in_index.begin(), shards.not_in_index.end());
  return {};
}

}  // namespace

std::string ShardSet::Describe(int32_t tensor) const {
  return fmt::format("tensor {} in {}", Quoted(tensors[tensor].name), FileName(tensor));
}

Result<void> CheckPlainName(std::string_view name, std::string_view place) {
  const bool bad = name.empty() || name == "." || name == ".." || name.find('/') != std::string_view::npos ||
                   name.find('\\') != std::string_view::npos || name.find('\0') != std::string_view::npos;
  if (!bad) return {};
  return Error(StatusCode::kFormat,
               fmt::format("{}: found file name '{}', legal: a plain name without separators", place, name));
}

Result<std::unique_ptr<JsonFile>> ReadRequiredJson(const ShardSet& shards, const std::string& name) {
  const auto file = shards.file_system->Open(shards.directory / name);
  if (!file) return tl::unexpected(file.error());
  const auto text = ReadTextFile(**file, kMaxJsonFileBytes);
  if (!text) return tl::unexpected(text.error());
  // Configs come from Python's json module; an index and a manifest hold no real numbers.
  const bool is_config = name.ends_with("config.json");
  auto document = JsonDocument::Parse(is_config ? NonFiniteAsNull(*text) : *text, name);
  if (!document) return tl::unexpected(document.error());
  return std::make_unique<JsonFile>(JsonFile{name, std::move(*document)});
}

Result<std::unique_ptr<JsonFile>> ReadOptionalJson(const ShardSet& shards, const std::string& name) {
  if (shards.file_system->Kind(shards.directory / name) == FileSystem::EntryKind::kAbsent) return nullptr;
  return ReadRequiredJson(shards, name);
}

Result<ShardSet> LocateCheckpoint(const std::filesystem::path& path, FileSystem& file_system) {
  ShardSet shards;
  shards.file_system = &file_system;
  switch (file_system.Kind(path)) {
    case FileSystem::EntryKind::kDirectory:
      shards.directory = path;
      return shards;
    case FileSystem::EntryKind::kRegular:
      shards.directory = path.parent_path();
      shards.single_file = true;
      shards.files.push_back({.name = path.filename().string(),
                              .path = path,
                              .size_bytes = 0,
                              .num_tensors = 0,
                              .expected_sha256 = {}});
      return shards;
    case FileSystem::EntryKind::kAbsent:
      return Error(StatusCode::kIo, fmt::format("{}: no such file or directory", path.string()));
    case FileSystem::EntryKind::kDanglingLink:
      return Error(StatusCode::kIo,
                   fmt::format("{}: a link to something that does not exist", path.string()));
    case FileSystem::EntryKind::kOther:
      break;
  }
  return Error(StatusCode::kIo,
               fmt::format("{}: found a special file, legal: a directory or a regular file", path.string()));
}

Result<void> AppendShard(ShardSet& shards, const std::string& name) {
  const std::filesystem::path path = shards.directory / name;
  auto file = shards.file_system->Open(path);
  if (!file) return tl::unexpected(file.error());
  auto header = ReadSafetensorsHeader(**file);
  if (!header) return tl::unexpected(header.error());
  const auto index = static_cast<uint32_t>(shards.files.size());
  for (TensorInfo& tensor : header->tensors) {
    tensor.file = index;
    shards.tensors.push_back(std::move(tensor));
  }
  if (shards.tensors.size() > static_cast<size_t>(INT32_MAX)) {
    return Error(StatusCode::kUnsupported, fmt::format("{}: more than {} tensors", path.string(), INT32_MAX));
  }
  shards.files.push_back({.name = name,
                          .path = path,
                          .size_bytes = (*file)->size_bytes(),
                          .num_tensors = header->tensors.size(),
                          .expected_sha256 = {}});
  shards.handles.push_back(std::move(*file));
  shards.metadata.push_back(std::move(header->metadata));
  return {};
}

Result<void> OpenShards(ShardSet& shards, const std::vector<std::string>& skip) {
  const size_t first = shards.tensors.size();
  if (shards.single_file) {
    const std::string name = shards.files[0].name;
    shards.files.clear();
    if (auto appended = AppendShard(shards, name); !appended) return appended;
    if (const auto copies = BuildNameMap(shards, first); !copies) return tl::unexpected(copies.error());
    return {};
  }
  const auto names = shards.file_system->List(shards.directory);
  if (!names) return tl::unexpected(names.error());
  const auto index_name = IndexName(shards, *names);
  if (!index_name) return tl::unexpected(index_name.error());
  if (!index_name->empty()) {
    const auto index = ReadIndex(shards, *index_name);
    if (!index) return tl::unexpected(index.error());
    if (auto opened = OpenIndexedShards(shards, *index, skip); !opened) return opened;
    if (shards.files.empty()) {
      return Error(StatusCode::kFormat, fmt::format("{}: weight_map is empty", *index_name));
    }
    const auto copies = BuildNameMap(shards, first);
    if (!copies) return tl::unexpected(copies.error());
    return CheckIndex(shards, *index, *copies, skip);
  }
  for (const std::string& name : *names) {
    if (!name.ends_with(kShardSuffix) || name.starts_with('.') || IsListed(skip, name)) continue;
    if (auto appended = AppendShard(shards, name); !appended) return appended;
  }
  if (shards.files.empty()) {
    return Error(StatusCode::kIo,
                 fmt::format("{}: no .safetensors file in this directory", shards.directory.string()));
  }
  if (const auto copies = BuildNameMap(shards, first); !copies) return tl::unexpected(copies.error());
  return {};
}

}  // namespace espalier
