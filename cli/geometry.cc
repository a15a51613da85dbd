// SPDX-License-Identifier: Apache-2.0
#include "geometry.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/file.h"

namespace espalier::cli {
namespace {

constexpr const char* kConfigName = "config.json";
constexpr const char* kShardName = "model.safetensors";

constexpr Geometry kGeometries[] = {
    {"glm-5.2-tp4", 6144, 2048, 256, 8, 0, "silu", 4},
    {"glm-5.2-tp4-64e", 6144, 2048, 64, 8, 0, "silu",
     4},  // for a host that has not the memory or time for all
    {"kimi-k3-tp8", 3584, 3072, 896, 16, 96, "situ", 8},
    {"qwen3-30b-a3b", 2048, 768, 128, 8, 32, "silu", 1},
};

// Text in front, zeros behind.
class MadeFile : public File {
 public:
  MadeFile(const std::filesystem::path& path, std::string text, uint64_t size_bytes)
      : File(path), text_(std::move(text)), size_bytes_(size_bytes) {}

  uint64_t size_bytes() const override { return size_bytes_; }
  Result<void> CheckUnchanged() const override { return {}; }
  Result<size_t> ReadSome(uint64_t offset, std::span<std::byte> target) const override {
    if (offset >= size_bytes_) return 0;
    const auto count = static_cast<size_t>(std::min<uint64_t>(target.size(), size_bytes_ - offset));
    const uint64_t from_text = offset < text_.size() ? std::min<uint64_t>(count, text_.size() - offset) : 0;
    std::memcpy(target.data(), text_.data() + (from_text > 0 ? offset : 0), from_text);
    std::fill(target.begin() + static_cast<ptrdiff_t>(from_text),
              target.begin() + static_cast<ptrdiff_t>(count), std::byte{0});
    return count;
  }

 private:
  std::string text_;
  uint64_t size_bytes_;
};

struct MadeText {
  std::string text;
  uint64_t size_bytes = 0;
};

class MadeFileSystem : public FileSystem {
 public:
  explicit MadeFileSystem(std::map<std::string, MadeText> files) : files_(std::move(files)) {}

  EntryKind Kind(const std::filesystem::path& path) override {
    if (path == directory_) return EntryKind::kDirectory;
    return files_.contains(path.filename().string()) ? EntryKind::kRegular : EntryKind::kAbsent;
  }
  Result<std::unique_ptr<File>> Open(const std::filesystem::path& path) override {
    const auto found = files_.find(path.filename().string());
    if (found == files_.end()) return Error(StatusCode::kIo, path.string() + ": does not exist");
    return std::make_unique<MadeFile>(path, found->second.text, found->second.size_bytes);
  }
  Result<std::vector<std::string>> List(const std::filesystem::path&) override {
    std::vector<std::string> names;
    for (const auto& [name, file] : files_) names.push_back(name);
    return names;
  }

  const std::filesystem::path& directory() const { return directory_; }

 private:
  std::filesystem::path directory_ = "geometry";
  std::map<std::string, MadeText> files_;
};

class HeaderWriter {
 public:
  void Add(const std::string& name, std::string_view dtype, std::vector<uint64_t> shape,
           uint64_t size_bytes) {
    header_[name] = {
        {"dtype", dtype}, {"shape", std::move(shape)}, {"data_offsets", {end_, end_ + size_bytes}}};
    end_ += size_bytes;
  }

  MadeText Take() const {
    std::string text = header_.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    const uint64_t length = text.size();
    std::string file(sizeof(length), '\0');
    std::memcpy(file.data(), &length, sizeof(length));
    file += text;
    return {file, file.size() + end_};
  }

 private:
  nlohmann::ordered_json header_ = nlohmann::ordered_json::object();
  uint64_t end_ = 0;
};

MadeText MakeShard(const Geometry& geometry, std::span<const int> bits, Codebook codebook) {
  const std::string_view marker = AllCodebooks()[static_cast<size_t>(codebook)].marker_tensor;
  HeaderWriter header;
  for (uint64_t expert = 0; expert < geometry.experts; ++expert) {
    for (int p = 0; p < kNumProjections; ++p) {
      const auto projection = static_cast<Projection>(p);
      const bool down = projection == Projection::kDown;
      const uint64_t in = down ? geometry.intermediate_channels : geometry.hidden_channels;
      const uint64_t out = down ? geometry.hidden_channels : geometry.intermediate_channels;
      const auto tile_codes = static_cast<uint64_t>(kTileChannels) * static_cast<uint64_t>(bits[expert]);
      const std::string name =
          fmt::format("model.layers.0.mlp.experts.{}.{}_proj", expert, ProjectionName(projection));
      header.Add(name + ".trellis", "I16", {in / kTileChannels, out / kTileChannels, tile_codes},
                 in * out / 8 * static_cast<uint64_t>(bits[expert]));
      header.Add(name + ".suh", "F16", {in}, in * 2);
      header.Add(name + ".svh", "F16", {out}, out * 2);
      if (!marker.empty()) header.Add(fmt::format("{}.{}", name, marker), "I32", {}, 4);
    }
  }
  return header.Take();
}

MadeText MakeConfig(const Geometry& geometry) {
  nlohmann::ordered_json config = {{"num_experts", geometry.experts},
                                   {"num_experts_per_tok", geometry.top_k},
                                   {"hidden_size", geometry.hidden_channels},
                                   {"moe_intermediate_size", geometry.intermediate_channels},
                                   {"hidden_act", geometry.hidden_act}};
  if (geometry.attention_heads != 0) config["num_attention_heads"] = geometry.attention_heads;
  const std::string text = config.dump();
  return {text, text.size()};
}

}  // namespace

std::span<const Geometry> Geometries() { return kGeometries; }

Result<const Geometry*> FindGeometry(std::string_view name) {
  std::string names;
  for (const Geometry& geometry : kGeometries) {
    if (geometry.name == name) return &geometry;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", geometry.name);
  }
  return Error(StatusCode::kUsage, fmt::format("--geometry '{}': legal: {}", name, names));
}

Result<Checkpoint> OpenGeometry(const Geometry& geometry, std::span<const int> bits, Codebook codebook) {
  MadeFileSystem files(
      {{kConfigName, MakeConfig(geometry)}, {kShardName, MakeShard(geometry, bits, codebook)}});
  // The open files own their text and are all that the checkpoint keeps using.
  return Checkpoint::Open(files.directory(), {.file_system = &files});
}

}  // namespace espalier::cli
