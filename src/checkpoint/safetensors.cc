// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>
#include <optional>
#include <unordered_set>

#include "base/checked.h"
#include "base/json.h"
#include "base/text.h"

namespace espalier {
namespace {

using simdjson::dom::element;
using simdjson::dom::object;

constexpr uint64_t kLengthBytes = 8;
constexpr std::string_view kMetadataKey = "__metadata__";
// What a double holds exactly: larger numbers do not survive every JSON reader.
constexpr uint64_t kMaxDimension = uint64_t{1} << 53;

std::string Shown(const File& file) { return Quoted(file.path().native()); }

tl::unexpected<Status> FormatError(const File& file, std::string_view what) {
  return Error(StatusCode::kFormat, fmt::format("{}: {}", Shown(file), what));
}

tl::unexpected<Status> TensorError(const File& file, std::string_view tensor, std::string_view what) {
  return Error(StatusCode::kFormat, fmt::format("{}: tensor {}: {}", Shown(file), Quoted(tensor), what));
}

struct HeaderText {
  std::string json;  // without the spaces at its end
  uint64_t data_begin = 0;
};

// A hostile shape can have millions of dimensions.
std::string ShapeText(std::span<const uint64_t> shape) {
  constexpr size_t kMaxShown = 8;
  if (shape.size() <= kMaxShown) return fmt::format("[{}]", fmt::join(shape, ", "));
  return fmt::format("[{}, ... {} dimensions]", fmt::join(shape.first(kMaxShown), ", "), shape.size());
}

// The header, checked as far as that goes without parsing it.
Result<HeaderText> ReadHeaderText(const File& file) {
  const uint64_t file_bytes = file.size_bytes();
  if (file_bytes < kLengthBytes) {
    return FormatError(
        file, fmt::format("{} bytes long; a safetensors file has at least {}", file_bytes, kLengthBytes));
  }
  std::array<std::byte, kLengthBytes> raw_length;
  if (const auto read = file.ReadAt(0, raw_length); !read) return tl::unexpected(read.error());
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;) length = length << 8 | std::to_integer<uint64_t>(raw_length[i]);

  if (length > kMaxSafetensorsHeaderBytes) {
    return FormatError(
        file, fmt::format("header length {}; at most {} is allowed", length, kMaxSafetensorsHeaderBytes));
  }
  if (length > file_bytes - kLengthBytes) {
    return FormatError(file, fmt::format("header length {}, but only {} bytes follow it: truncated", length,
                                         file_bytes - kLengthBytes));
  }
  if (length < 2)
    return FormatError(file, fmt::format("header length {}; the shortest header has 2", length));

  std::string text(length, '\0');
  const auto read = file.ReadAt(kLengthBytes, std::as_writable_bytes(std::span(text)));
  if (!read) return tl::unexpected(read.error());
  if (text.front() != '{') {
    return FormatError(file, fmt::format("header begins with byte {:#04x}, not with '{{'",
                                         static_cast<unsigned char>(text.front())));
  }
  const size_t last = text.find_last_not_of(' ');
  if (text[last] != '}') {
    return FormatError(file,
                       fmt::format("header ends with byte {:#04x}; only '}}' and spaces are allowed there",
                                   static_cast<unsigned char>(text[last])));
  }
  text.resize(last + 1);
  return HeaderText{std::move(text), kLengthBytes + length};
}

// A member that must be there, or the words that say it is not.
tl::expected<element, std::string> Member(const object& entry, std::string_view key) {
  element value;
  if (entry.at_key(key).get(value) != simdjson::SUCCESS)
    return tl::unexpected(fmt::format("has no '{}'", key));
  return value;
}

tl::expected<Dtype, std::string> ParseDtype(const object& entry) {
  const auto member = Member(entry, "dtype");
  if (!member) return tl::unexpected(member.error());
  std::string_view name;
  if (member->get_string().get(name) != simdjson::SUCCESS) {
    return tl::unexpected(fmt::format("dtype is {}, not a string", JsonTypeName(*member)));
  }
  const std::optional<Dtype> dtype = DtypeFromName(name);
  if (!dtype) return tl::unexpected(fmt::format("unknown dtype {}", Quoted(name)));
  return *dtype;
}

tl::expected<std::vector<uint64_t>, std::string> ParseNumbers(const object& entry, std::string_view key) {
  const auto member = Member(entry, key);
  if (!member) return tl::unexpected(member.error());
  simdjson::dom::array array;
  if (member->get_array().get(array) != simdjson::SUCCESS) {
    return tl::unexpected(fmt::format("{} is {}, not an array", key, JsonTypeName(*member)));
  }
  std::vector<uint64_t> numbers;
  for (const element item : array) {
    uint64_t number = 0;
    if (item.get_uint64().get(number) != simdjson::SUCCESS) {
      return tl::unexpected(fmt::format("{}[{}] is {}; a whole number >= 0 is needed", key, numbers.size(),
                                        JsonTypeName(item)));
    }
    numbers.push_back(number);
  }
  return numbers;
}

// Bytes of a tensor, or the words that say why it has no such number.
tl::expected<uint64_t, std::string> TensorBytes(Dtype dtype, std::span<const uint64_t> shape) {
  CheckedBytes bits = static_cast<uint64_t>(DtypeBits(dtype));
  bool empty = false;
  for (const uint64_t dimension : shape) {
    if (dimension > kMaxDimension) {
      return tl::unexpected(fmt::format("dimension {} of its shape is above 2^53", dimension));
    }
    // An empty tensor's other dimensions must fit too: readers multiply them in any order.
    if (dimension == 0) {
      empty = true;
    } else {
      bits *= dimension;
    }
  }
  if (!bits.value()) return tl::unexpected(std::string("the size of its shape overflows 64 bits"));
  if (empty) return 0;
  if (*bits.value() % 8 != 0) {
    return tl::unexpected(fmt::format("{} elements of {} bits do not fill whole bytes",
                                      *bits.value() / static_cast<uint64_t>(DtypeBits(dtype)),
                                      DtypeBits(dtype)));
  }
  return *bits.value() / 8;
}

// Fills everything but the name; the offset is still relative to the data.
tl::expected<TensorInfo, std::string> ParseEntry(element value, uint64_t data_bytes) {
  object entry;
  if (value.get_object().get(entry) != simdjson::SUCCESS) {
    return tl::unexpected(fmt::format("its entry is {}, not an object", JsonTypeName(value)));
  }
  const auto dtype = ParseDtype(entry);
  if (!dtype) return tl::unexpected(dtype.error());
  auto shape = ParseNumbers(entry, "shape");
  if (!shape) return tl::unexpected(shape.error());
  const auto offsets = ParseNumbers(entry, "data_offsets");
  if (!offsets) return tl::unexpected(offsets.error());
  if (offsets->size() != 2) {
    return tl::unexpected(fmt::format("data_offsets has {} numbers, not 2", offsets->size()));
  }
  const uint64_t begin = (*offsets)[0];
  const uint64_t end = (*offsets)[1];
  if (begin > end) return tl::unexpected(fmt::format("data_offsets [{}, {}] run backwards", begin, end));
  const auto size = TensorBytes(*dtype, *shape);
  if (!size) return tl::unexpected(size.error());
  if (*size != end - begin) {
    return tl::unexpected(fmt::format("data_offsets [{}, {}] hold {} bytes, but {} {} takes {}", begin, end,
                                      end - begin, DtypeName(*dtype), ShapeText(*shape), *size));
  }
  if (end > data_bytes) {
    return tl::unexpected(
        fmt::format("ends at byte {} of the data, but the file holds only {}: truncated", end, data_bytes));
  }
  return TensorInfo{.name = {},
                    .dtype = *dtype,
                    .shape = std::move(*shape),
                    .file = 0,
                    .offset_bytes = begin,
                    .size_bytes = *size};
}

Result<void> ParseMetadata(const File& file, element value,
                           std::vector<std::pair<std::string, std::string>>* metadata) {
  object entries;
  if (value.get_object().get(entries) != simdjson::SUCCESS) {
    return FormatError(file, fmt::format("{} is {}, not an object", kMetadataKey, JsonTypeName(value)));
  }
  for (const auto field : entries) {
    std::string_view text;
    if (field.value.get_string().get(text) != simdjson::SUCCESS) {
      return FormatError(file, fmt::format("{} {} is {}, not a string", kMetadataKey, Quoted(field.key),
                                           JsonTypeName(field.value)));
    }
    metadata->emplace_back(field.key, text);
  }
  return {};
}

// Tensors, offsets relative to the data, must tile it: the first begins at 0, each begins where the one
// before it ends, the last ends with the file.
Result<void> CheckTiling(const File& file, const std::vector<TensorInfo>& tensors, uint64_t data_bytes) {
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  // Of tensors that begin at one place the empty ones come first.
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::pair(tensors[a].offset_bytes, tensors[a].size_bytes) <
           std::pair(tensors[b].offset_bytes, tensors[b].size_bytes);
  });
  uint64_t end = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    const TensorInfo& tensor = tensors[order[i]];
    if (tensor.offset_bytes > end) {
      return TensorError(file, tensor.name,
                         fmt::format("begins at byte {} of the data, the one before it ends "
                                     "at {}: a hole",
                                     tensor.offset_bytes, end));
    }
    if (tensor.offset_bytes < end) {
      return TensorError(
          file, tensor.name,
          fmt::format("begins at byte {} of the data, inside tensor {}, which ends at {}: overlap",
                      tensor.offset_bytes, Quoted(tensors[order[i - 1]].name), end));
    }
    end += tensor.size_bytes;
  }
  if (end != data_bytes) {
    return FormatError(
        file, fmt::format("the tensors end at byte {} of the data, the file at {}: {} trailing bytes", end,
                          data_bytes, data_bytes - end));
  }
  return {};
}

// A JSON string, quotes included. The name is valid UTF-8.
void AppendJsonString(std::string_view text, std::string* out) {
  *out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      *out += '\\';
      *out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      *out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      *out += c;
    }
  }
  *out += '"';
}

tl::unexpected<Status> CannotWrite(const std::filesystem::path& path, std::string_view tensor,
                                   std::string_view why) {
  return Error(StatusCode::kUsage,
               fmt::format("cannot write {}: tensor {}: {}", Quoted(path.native()), Quoted(tensor), why));
}

using Metadata = std::span<const std::pair<std::string, std::string>>;

Result<void> CheckWritable(const std::filesystem::path& path, Metadata metadata) {
  std::unordered_set<std::string_view> keys;
  for (const auto& [key, value] : metadata) {
    const bool utf8 = simdjson::validate_utf8(key) && simdjson::validate_utf8(value);
    if (utf8 && keys.insert(key).second) continue;
    return Error(StatusCode::kUsage,
                 fmt::format("cannot write {}: metadata {}: {}", Quoted(path.native()), Quoted(key),
                             utf8 ? "the key occurs twice" : "not valid UTF-8"));
  }
  return {};
}

Result<void> CheckWritable(const std::filesystem::path& path, std::span<const TensorData> tensors) {
  std::unordered_set<std::string_view> names;
  for (const TensorData& tensor : tensors) {
    const std::string& name = tensor.name;
    if (name.empty() || name == kMetadataKey || name.find('\0') != std::string::npos ||
        !simdjson::validate_utf8(name)) {
      return CannotWrite(path, name, "not a name that a tensor can have");
    }
    if (!names.insert(name).second) return CannotWrite(path, name, "the name occurs twice");
    const auto size = TensorBytes(tensor.dtype, tensor.shape);
    if (!size) return CannotWrite(path, name, size.error());
    if (*size != tensor.data.size()) {
      return CannotWrite(path, name,
                         fmt::format("{} {} takes {} bytes, {} were given", DtypeName(tensor.dtype),
                                     ShapeText(tensor.shape), *size, tensor.data.size()));
    }
  }
  return {};
}

}  // namespace

Result<SafetensorsHeader> ReadSafetensorsHeader(const File& file) {
  const Result<HeaderText> text = ReadHeaderText(file);
  if (!text) return tl::unexpected(text.error());
  const Result<JsonDocument> document =
      JsonDocument::Parse(text->json, fmt::format("header of {}", Shown(file)));
  if (!document) return tl::unexpected(document.error());
  object entries;
  if (document->root().get_object().get(entries) != simdjson::SUCCESS) {
    return FormatError(file, "the header is not a JSON object");
  }

  SafetensorsHeader header;
  const uint64_t data_bytes = file.size_bytes() - text->data_begin;
  for (const auto field : entries) {
    if (field.key == kMetadataKey) {
      const Result<void> parsed = ParseMetadata(file, field.value, &header.metadata);
      if (!parsed) return tl::unexpected(parsed.error());
      continue;
    }
    if (field.key.empty()) return TensorError(file, field.key, "the name is empty");
    if (field.key.find('\0') != std::string_view::npos) {
      return TensorError(file, field.key, "the name contains a NUL byte");
    }
    auto tensor = ParseEntry(field.value, data_bytes);
    if (!tensor) return TensorError(file, field.key, tensor.error());
    tensor->name = field.key;
    header.tensors.push_back(std::move(*tensor));
  }
  const Result<void> tiled = CheckTiling(file, header.tensors, data_bytes);
  if (!tiled) return tl::unexpected(tiled.error());
  for (TensorInfo& tensor : header.tensors) tensor.offset_bytes += text->data_begin;
  return header;
}

std::string SafetensorsHeaderBytes(std::span<const TensorData> tensors,
                                   std::span<const std::pair<std::string, std::string>> metadata) {
  std::string bytes(kLengthBytes, '\0');
  bytes += '{';
  std::string_view separator;
  if (!metadata.empty()) {
    AppendJsonString(kMetadataKey, &bytes);
    bytes += ":{";
    for (const auto& [key, value] : metadata) {
      bytes += separator;
      AppendJsonString(key, &bytes);
      bytes += ':';
      AppendJsonString(value, &bytes);
      separator = ",";
    }
    bytes += '}';
    separator = ",";
  }
  uint64_t begin = 0;
  for (const TensorData& tensor : tensors) {
    bytes += separator;
    AppendJsonString(tensor.name, &bytes);
    const uint64_t end = begin + tensor.data.size();
    bytes += fmt::format(R"(:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", DtypeName(tensor.dtype),
                         fmt::join(tensor.shape, ","), begin, end);
    begin = end;
    separator = ",";
  }
  bytes += '}';
  bytes.resize(RoundUp(bytes.size(), kLengthBytes), ' ');
  uint64_t length = bytes.size() - kLengthBytes;
  for (size_t i = 0; i < kLengthBytes; ++i, length >>= 8) bytes[i] = static_cast<char>(length & 0xFF);
  return bytes;
}

Result<void> WriteSafetensors(const std::filesystem::path& path, std::span<const TensorData> tensors,
                              std::span<const std::pair<std::string, std::string>> metadata) {
  if (const auto writable = CheckWritable(path, tensors); !writable) return writable;
  if (const auto writable = CheckWritable(path, metadata); !writable) return writable;
  const std::string header = SafetensorsHeaderBytes(tensors, metadata);
  if (header.size() - kLengthBytes > kMaxSafetensorsHeaderBytes) {
    return Error(
        StatusCode::kUsage,
        fmt::format("cannot write {}: its header has {} bytes; at most {} are allowed", Quoted(path.native()),
                    header.size() - kLengthBytes, kMaxSafetensorsHeaderBytes));
  }
  Result<AtomicFile> file = AtomicFile::Create(path);
  if (!file) return tl::unexpected(file.error());
  const Result<void> appended = file->Append(std::as_bytes(std::span(header)));
  if (!appended) return appended;
  for (const TensorData& tensor : tensors) {
    const Result<void> written = file->Append(tensor.data);
    if (!written) return written;
  }
  return file->Commit();
}

}  // namespace espalier
