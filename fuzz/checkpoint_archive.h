// SPDX-License-Identifier: Apache-2.0
//
// A checkpoint folder as one fuzzer input. Bulk bytes are left out: of a safetensors file the header text and
// the size of the data are kept, the data is the marker value of mcg again and again (as fp16 two finite
// numbers, as codes as good as any). So inputs stay at a few KiB and most mutations hit text.
//
//   entry:  u8 name length, name, u8 kind, u32 text length, text, u32 data bytes (kind 1 only)
//   kind:   0 = the text is the file; 1 = safetensors, the text is its header
#ifndef ESPALIER_FUZZ_CHECKPOINT_ARCHIVE_H_
#define ESPALIER_FUZZ_CHECKPOINT_ARCHIVE_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace espalier::fuzz {

using Json = nlohmann::ordered_json;

inline constexpr uint32_t kMaxDataBytes = 1u << 20;
inline constexpr size_t kMaxEntries = 32;

struct Entry {
  std::string name;
  bool safetensors = false;
  std::string text;
  uint32_t data_bytes = 0;
};

using Archive = std::vector<Entry>;

// Takes what there is: lengths beyond the end are cut.
class ArchiveReader {
 public:
  ArchiveReader(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  Archive Read() {
    Archive archive;
    while (at_ < size_ && archive.size() < kMaxEntries) {
      Entry entry;
      entry.name = Bytes(Number(1));
      entry.safetensors = (Number(1) & 1) != 0;
      entry.text = Bytes(Number(4));
      if (entry.safetensors) entry.data_bytes = static_cast<uint32_t>(Number(4) % (kMaxDataBytes + 1));
      archive.push_back(std::move(entry));
    }
    return archive;
  }

 private:
  uint64_t Number(size_t bytes) {
    uint64_t value = 0;
    for (size_t i = 0; i < bytes && at_ < size_; ++i) value |= uint64_t{data_[at_++]} << (8 * i);
    return value;
  }
  std::string Bytes(uint64_t count) {
    const size_t taken = static_cast<size_t>(std::min<uint64_t>(count, size_ - at_));
    std::string bytes(reinterpret_cast<const char*>(data_ + at_), taken);
    at_ += taken;
    return bytes;
  }

  const uint8_t* data_;
  size_t size_;
  size_t at_ = 0;
};

inline std::string WriteArchive(const Archive& archive) {
  std::string bytes;
  const auto number = [&](uint64_t value, size_t count) {
    for (size_t i = 0; i < count; ++i) bytes += static_cast<char>(value >> (8 * i));
  };
  for (const Entry& entry : archive) {
    const std::string name = entry.name.substr(0, 255);
    number(name.size(), 1);
    bytes += name;
    number(entry.safetensors ? 1 : 0, 1);
    number(entry.text.size(), 4);
    bytes += entry.text;
    if (entry.safetensors) number(entry.data_bytes, 4);
  }
  return bytes;
}

// The file that an entry stands for.
inline std::string EntryBytes(const Entry& entry) {
  if (!entry.safetensors) return entry.text;
  const uint64_t length = entry.text.size();
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  bytes += entry.text;
  constexpr char kMcg[] = {'\xED', '\x1F', '\xAC', '\xCB'};  // 0xCBAC1FED
  const size_t begin = bytes.size();
  bytes.resize(begin + entry.data_bytes);
  for (size_t i = 0; i < entry.data_bytes; ++i) bytes[begin + i] = kMcg[i % 4];
  return bytes;
}

// Lays the tensors of a header out again, one behind the other, after their shapes changed.
inline void LayOut(Json& header, uint32_t& data_bytes) {
  uint64_t offset = 0;
  for (auto& [name, tensor] : header.items()) {
    if (name == "__metadata__" || !tensor.is_object()) continue;
    static const std::pair<const char*, uint64_t> widths[] = {{"I64", 8}, {"F64", 8}, {"U64", 8},
                                                              {"I32", 4}, {"U32", 4}, {"F32", 4},
                                                              {"I8", 1},  {"U8", 1},  {"BOOL", 1}};
    uint64_t bytes = 2;
    for (const auto& [dtype, width] : widths) {
      if (tensor.value("dtype", Json()) == dtype) bytes = width;
    }
    if (tensor.contains("shape") && tensor["shape"].is_array()) {
      for (const Json& extent : tensor["shape"]) {
        // Whatever overflows is left to the reader to refuse.
        bytes *= extent.is_number_unsigned() ? extent.get<uint64_t>() : 1;
      }
    }
    tensor["data_offsets"] = {offset, offset + bytes};
    offset += bytes;
  }
  if (offset <= kMaxDataBytes) data_bytes = static_cast<uint32_t>(offset);
}

// Mutations that keep the structure: what random bytes would take ages to find.
class ArchiveMutator {
 public:
  explicit ArchiveMutator(unsigned seed) : random_(seed) {}

  void Mutate(Archive& archive) {
    if (archive.empty()) return;
    Entry& entry = archive[Below(archive.size())];
    switch (Below(8)) {
      case 0:
        archive.erase(archive.begin() + static_cast<ptrdiff_t>(Below(archive.size())));
        return;
      case 1:
        archive.push_back(entry);
        archive.back().name = archive[Below(archive.size())].name + (Below(2) == 0 ? "" : "2.safetensors");
        return;
      case 2:
        entry.data_bytes = static_cast<uint32_t>(Below(2) == 0 ? entry.data_bytes + 1 : Below(kMaxDataBytes));
        return;
      default:
        break;
    }
    Json json = Json::parse(entry.text, nullptr, false);
    if (json.is_discarded()) return;
    if (entry.safetensors && json.is_object() && !json.empty()) {
      MutateTensor(json);
      LayOut(json, entry.data_bytes);
    } else {
      MutateValue(json, 0);
    }
    entry.text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  }

 private:
  uint64_t Below(uint64_t bound) { return bound == 0 ? 0 : random_() % bound; }

  Json AnyValue() {
    static const std::vector<Json> values = {nullptr,
                                             true,
                                             0,
                                             1,
                                             -1,
                                             2,
                                             3,
                                             4,
                                             9,
                                             16,
                                             32,
                                             128,
                                             256,
                                             1u << 31,
                                             1ull << 32,
                                             ~0ull,
                                             0.5,
                                             1e300,
                                             "",
                                             "mcg",
                                             "mul1",
                                             "3inst",
                                             "lut_e4m3",
                                             "mixed",
                                             "shared_h_v1",
                                             "per_expert_v1",
                                             "exl3",
                                             "silu",
                                             "situ",
                                             "relu2",
                                             "..",
                                             "a/b",
                                             "model.safetensors",
                                             Json::array(),
                                             Json::object(),
                                             Json::array({0}),
                                             Json::array({3, 3, 3})};
    return values[Below(values.size())];
  }

  // One place of a config, index, table or manifest.
  void MutateValue(Json& value, int depth) {
    const bool deeper =
        (value.is_object() || value.is_array()) && !value.empty() && depth < 8 && Below(6) != 0;
    if (deeper && value.is_array()) return MutateValue(value[Below(value.size())], depth + 1);
    if (deeper) {
      auto item = value.begin();
      std::advance(item, static_cast<ptrdiff_t>(Below(value.size())));
      const std::string key = item.key();
      switch (Below(8)) {
        case 0:
          value.erase(key);
          return;
        case 1: {
          const Json moved = *item;
          value.erase(key);
          value[AnyKey(key)] = moved;
          return;
        }
        default:
          return MutateValue(*item, depth + 1);
      }
    }
    if (value.is_object() && Below(2) == 0) {
      value[AnyKey("x")] = AnyValue();
    } else if (value.is_array() && Below(2) == 0) {
      value.push_back(AnyValue());
    } else if (value.is_number_integer() && Below(2) == 0) {
      value = value.get<int64_t>() + (Below(2) == 0 ? 1 : -1);
    } else {
      value = AnyValue();
    }
  }

  std::string AnyKey(const std::string& key) {
    static const std::vector<std::string> keys = {
        "tile_order", "rotation_layout", "codebook",    "text_config", "hidden_size",     "hybrid_tr3_tail",
        "hidden_act", "swiglu_limit",    "num_experts", "k",           "extent_barriers", "bits"};
    return Below(3) == 0 ? key + "2" : keys[Below(keys.size())];
  }

  // One tensor of a header: gone, renamed, doubled, of another type or size.
  void MutateTensor(Json& header) {
    auto item = header.begin();
    std::advance(item, static_cast<ptrdiff_t>(Below(header.size())));
    const std::string name = item.key();
    Json tensor = *item;
    switch (Below(6)) {
      case 0:
        header.erase(name);
        return;
      case 1:
        header.erase(name);
        header[Rename(name)] = tensor;
        return;
      case 2:
        header[Rename(name)] = tensor;
        return;
      case 3:
        if (tensor.is_object()) header[name]["dtype"] = AnyDtype();
        return;
      default:
        if (!tensor.is_object() || !tensor.contains("shape") || !tensor["shape"].is_array()) return;
        MutateShape(header[name]["shape"]);
        return;
    }
  }

  std::string AnyDtype() {
    static const char* const dtypes[] = {"I16", "F16", "BF16", "I32", "F32",    "U8",
                                         "I8",  "U16", "I64",  "F4",  "F8_E4M3"};
    return dtypes[Below(std::size(dtypes))];
  }

  void MutateShape(Json& shape) {
    static const uint64_t extents[] = {0, 1, 2, 3, 8, 16, 24, 32, 48, 64, 128, 144, 256};
    if (shape.empty() || Below(6) == 0) {
      shape.push_back(extents[Below(std::size(extents))]);
    } else if (Below(6) == 0) {
      shape.erase(Below(shape.size()));
    } else {
      shape[Below(shape.size())] = extents[Below(std::size(extents))];
    }
  }

  // Another component in place of one of the dotted name.
  std::string Rename(const std::string& name) {
    static const std::vector<std::string> words = {
        "0",         "1",          "2",           "7",        "65536", "01",      "gate_proj",
        "up_proj",   "down_proj",  "w1",          "w2",       "w3",    "experts", "mlp",
        "layers",    "model",      "rank0",       "rank1",    "rank9", "trellis", "suh",
        "svh",       "su",         "sv",          "bias",     "mcg",   "mul1",    "shared_h",
        "r7_shared", "tile_order", "gate_up_suh", "down_svh", "codes", "",        "shared_experts"};
    std::vector<std::string> parts(1);
    for (const char c : name) {
      if (c == '.') {
        parts.emplace_back();
      } else {
        parts.back() += c;
      }
    }
    const size_t at = Below(parts.size());
    if (Below(4) == 0) {
      parts.insert(parts.begin() + static_cast<ptrdiff_t>(at), words[Below(words.size())]);
    } else {
      parts[at] = words[Below(words.size())];
    }
    std::string renamed = parts[0];
    for (size_t i = 1; i < parts.size(); ++i) renamed += "." + parts[i];
    return renamed;
  }

  std::minstd_rand random_;
};

}  // namespace espalier::fuzz

#endif  // ESPALIER_FUZZ_CHECKPOINT_ARCHIVE_H_
