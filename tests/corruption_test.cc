// SPDX-License-Identifier: Apache-2.0
//
// A small valid safetensors file, damaged in every place.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <unordered_set>
#include <vector>

#include "checkpoint/safetensors.h"
#include "support/memory_file_system.h"
#include "support/temporary_directory.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;
using espalier::testing::MemoryFileSystem;
using espalier::testing::TemporaryDirectory;
using ::testing::HasSubstr;

struct SmallFile {
  std::string bytes;
  size_t header_end = 0;
};

// Three tensors, metadata, an escaped name, padding.
SmallFile MakeSmallFile() {
  static const std::string data = "abcdefghijklmnopqrstuvwxyz";
  const auto part = [](size_t begin, size_t size) {
    return std::as_bytes(std::span(data)).subspan(begin, size);
  };
  const std::vector<TensorData> tensors = {{"layers.0.trellis", Dtype::kI16, {2, 1, 3}, part(0, 12)},
                                           {"scalar\n", Dtype::kI32, {}, part(12, 4)},
                                           {"empty", Dtype::kF16, {0, 4}, {}},
                                           {"suh", Dtype::kF16, {5}, part(16, 10)}};
  const std::vector<std::pair<std::string, std::string>> metadata = {{"format", "pt"}};
  SmallFile file;
  file.bytes = SafetensorsHeaderBytes(tensors, metadata);
  file.header_end = file.bytes.size();
  file.bytes += data;
  return file;
}

Result<SafetensorsHeader> ReadBytes(const std::string& bytes) {
  MemoryFileSystem files;
  files.Write("/m/small.safetensors", bytes);
  return ReadSafetensorsHeader(**files.Open("/m/small.safetensors"));
}

// What has to hold whenever a file is accepted, however it came about.
void CheckInBounds(const SafetensorsHeader& header, uint64_t file_bytes) {
  std::unordered_set<std::string> names;
  uint64_t covered = 0;
  uint64_t data_begin = file_bytes;
  for (const TensorInfo& tensor : header.tensors) {
    EXPECT_TRUE(names.insert(tensor.name).second) << tensor.name;
    ASSERT_LE(tensor.offset_bytes, file_bytes);
    ASSERT_LE(tensor.size_bytes, file_bytes - tensor.offset_bytes);
    covered += tensor.size_bytes;
    data_begin = std::min(data_begin, tensor.offset_bytes);
  }
  EXPECT_EQ(covered, file_bytes - data_begin);
}

TEST(CorruptionTest, TheFileItselfIsValid) {
  const SmallFile file = MakeSmallFile();
  const auto header = ReadBytes(file.bytes);
  ASSERT_TRUE(header) << header.error().message();
  EXPECT_EQ(header->tensors.size(), 4u);
  CheckInBounds(*header, file.bytes.size());
}

TEST(CorruptionTest, EveryTruncationIsRefused) {
  const SmallFile file = MakeSmallFile();
  for (size_t size = 0; size < file.bytes.size(); ++size) {
    const auto header = ReadBytes(file.bytes.substr(0, size));
    ASSERT_FALSE(header) << size;
    EXPECT_EQ(header.error().code(), StatusCode::kFormat) << size;
    EXPECT_THAT(header.error().message(), HasSubstr("small.safetensors"));
  }
}

TEST(CorruptionTest, EveryTruncationOnDiskIsRefused) {
  const SmallFile file = MakeSmallFile();
  const TemporaryDirectory directory;
  const fs::path path = directory / "small.safetensors";
  std::ofstream(path, std::ios::binary) << file.bytes;
  for (size_t size = file.bytes.size(); size-- > 0;) {
    fs::resize_file(path, size);
    const auto opened = PosixFileSystem().Open(path);
    ASSERT_TRUE(opened) << opened.error().message();
    const auto header = ReadSafetensorsHeader(**opened);
    ASSERT_FALSE(header) << size;
    EXPECT_EQ(header.error().code(), StatusCode::kFormat) << size;
  }
}

TEST(CorruptionTest, EveryExtensionIsRefused) {
  const SmallFile file = MakeSmallFile();
  for (size_t extra = 1; extra < 20; ++extra) {
    const auto header = ReadBytes(file.bytes + std::string(extra, '\0'));
    ASSERT_FALSE(header) << extra;
    EXPECT_THAT(header.error().message(), HasSubstr(std::to_string(extra) + " trailing"));
  }
}

// Cut after it was opened, at every place of the header: an error of the system, never other data.
TEST(CorruptionTest, EveryCutWhileReadingIsRefused) {
  const SmallFile file = MakeSmallFile();
  for (size_t size = 0; size < file.header_end; ++size) {
    MemoryFileSystem files;
    files.Write("/f", file.bytes);
    files.SetFaults("/f", {.max_bytes_per_read = 5, .fails_at = {}, .ends_at = size});
    const auto header = ReadSafetensorsHeader(**files.Open("/f"));
    ASSERT_FALSE(header) << size;
    EXPECT_EQ(header.error().code(), StatusCode::kIo);
  }
}

TEST(CorruptionTest, EveryByteOfTheHeaderWithEveryValue) {
  const SmallFile file = MakeSmallFile();
  size_t refused = 0;
  size_t accepted = 0;
  for (size_t place = 0; place < file.header_end; ++place) {
    std::string bytes = file.bytes;
    for (int value = 0; value < 256; ++value) {
      if (static_cast<char>(value) == file.bytes[place]) continue;
      bytes[place] = static_cast<char>(value);
      const auto header = ReadBytes(bytes);
      if (header) {
        CheckInBounds(*header, bytes.size());
        ++accepted;
      } else {
        EXPECT_EQ(header.error().code(), StatusCode::kFormat);
        ++refused;
      }
    }
  }
  // Other letters in a name or in the metadata make another valid file; most damage does not.
  EXPECT_GT(refused, accepted);
  EXPECT_GT(accepted, 0u);
}

TEST(CorruptionTest, EveryBitOfTheLengthIsRefused) {
  const SmallFile file = MakeSmallFile();
  for (size_t bit = 0; bit < 64; ++bit) {
    std::string bytes = file.bytes;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ 1 << bit % 8);
    const auto header = ReadBytes(bytes);
    ASSERT_FALSE(header) << bit;
    EXPECT_EQ(header.error().code(), StatusCode::kFormat);
  }
}

TEST(CorruptionTest, EveryByteRemovedOrDoubled) {
  const SmallFile file = MakeSmallFile();
  for (size_t place = 0; place < file.bytes.size(); ++place) {
    std::string removed = file.bytes;
    removed.erase(place, 1);
    EXPECT_FALSE(ReadBytes(removed)) << place;
    std::string doubled = file.bytes;
    doubled.insert(place, 1, file.bytes[place]);
    EXPECT_FALSE(ReadBytes(doubled)) << place;
  }
}

// The places of a shard that are no files: refused as kIo, at once.
TEST(CorruptionTest, WhatIsNoFileIsRefused) {
  const SmallFile file = MakeSmallFile();
  const TemporaryDirectory directory;
  std::ofstream(directory / "3f2a91", std::ios::binary) << file.bytes;
  fs::create_symlink("3f2a91", directory / "model.safetensors");
  const auto linked = PosixFileSystem().Open(directory / "model.safetensors");
  ASSERT_TRUE(linked) << linked.error().message();
  EXPECT_TRUE(ReadSafetensorsHeader(**linked));

  ASSERT_EQ(mkfifo((directory / "fifo.safetensors").c_str(), 0600), 0);
  fs::create_directory(directory / "directory.safetensors");
  fs::create_symlink("missing", directory / "dangling.safetensors");
  fs::create_symlink("fifo.safetensors", directory / "fifo-link.safetensors");
  for (const char* name : {"fifo.safetensors", "directory.safetensors", "dangling.safetensors",
                           "fifo-link.safetensors", "absent.safetensors"}) {
    const auto opened = PosixFileSystem().Open(directory / name);
    ASSERT_FALSE(opened) << name;
    EXPECT_EQ(opened.error().code(), StatusCode::kIo) << name;
    EXPECT_THAT(opened.error().message(), HasSubstr(name));
  }
}

// A blob whose size belongs to the link's target, not to the link.
TEST(CorruptionTest, TruncatedTargetOfALinkIsRefused) {
  const SmallFile file = MakeSmallFile();
  const TemporaryDirectory directory;
  fs::create_directory(directory / "blobs");
  std::ofstream(directory / "blobs/3f2a", std::ios::binary) << file.bytes.substr(0, file.bytes.size() - 1);
  fs::create_symlink("blobs/3f2a", directory / "model.safetensors");
  const auto opened = PosixFileSystem().Open(directory / "model.safetensors");
  ASSERT_TRUE(opened);
  const auto header = ReadSafetensorsHeader(**opened);
  ASSERT_FALSE(header);
  EXPECT_THAT(header.error().message(), HasSubstr("truncated"));
}

}  // namespace
}  // namespace espalier
