// SPDX-License-Identifier: Apache-2.0
//
// The files of a checkpoint and the tensors in them: which files belong to it, their headers, and that
// index and headers agree. Knows nothing of EXL3.
#ifndef ESPALIER_SRC_CHECKPOINT_SHARDS_H_
#define ESPALIER_SRC_CHECKPOINT_SHARDS_H_

#include <espalier/checkpoint.h>
#include <espalier/status.h>

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/json.h"

namespace espalier {

inline constexpr uint64_t kMaxJsonFileBytes = uint64_t{512} << 20;

// A JSON file of the checkpoint folder.
struct JsonFile {
  std::string name;
  JsonDocument document;
};

struct ShardSet {
  std::filesystem::path directory;  // holds the companions (config.json, index, manifest)
  bool single_file = false;
  FileSystem* file_system = nullptr;
  std::vector<FileInfo> files;
  std::vector<std::unique_ptr<File>> handles;  // open for the life of the checkpoint, by file
  // By file. Views into nothing: owned strings.
  std::vector<std::vector<std::pair<std::string, std::string>>> metadata;
  std::vector<TensorInfo> tensors;
  // Name to position in `tensors`; container files keep their names out of it. The views point into
  // `tensors`, which must not grow once it is built.
  std::unordered_map<std::string_view, int32_t> by_name;
  // Tensors that a shard holds but the index does not name.
  std::vector<int32_t> not_in_index;

  const std::string& FileName(int32_t tensor) const { return files[tensors[tensor].file].name; }

  // "tensor 'x' in model.safetensors"
  std::string Describe(int32_t tensor) const;
};

// kFormat unless `name` is a plain file name: not empty, no separators, no NUL, not "." or "..".
Result<void> CheckPlainName(std::string_view name, std::string_view place);

// Reads a JSON file that may be absent (then null). Errors: kIo, kFormat.
Result<std::unique_ptr<JsonFile>> ReadOptionalJson(const ShardSet& shards, const std::string& name);
// The same, kIo when absent.
Result<std::unique_ptr<JsonFile>> ReadRequiredJson(const ShardSet& shards, const std::string& name);

// Directory, file system and kind of `path`; no shard is opened yet. Error: kIo.
Result<ShardSet> LocateCheckpoint(const std::filesystem::path& path, FileSystem& file_system);

// Opens one file, checks its header and appends its tensors (not to by_name). Errors: kIo, kFormat.
Result<void> AppendShard(ShardSet& shards, const std::string& name);

// Opens the shards that the index names, or every *.safetensors of the folder except `skip`, or the
// single file; then builds by_name over the tensors of these. Errors: kIo, kFormat.
Result<void> OpenShards(ShardSet& shards, const std::vector<std::string>& skip);

}  // namespace espalier

#endif  // ESPALIER_SRC_CHECKPOINT_SHARDS_H_
