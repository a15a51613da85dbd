// SPDX-License-Identifier: Apache-2.0
//
// Opening reads headers: with half a million tensors, and with 200 GB of payload. No timing here
// (bench/open_bench.cc has it); bytes are counted at the file seam.
#include "support/big_checkpoint.h"

#include <espalier/checkpoint.h>
#include <gtest/gtest.h>

#include <atomic>

#include "base/file.h"
#include "support/temporary_directory.h"

namespace espalier::testing {
namespace {

// The operating system's files, every byte read counted.
class CountingFileSystem : public FileSystem {
 public:
  uint64_t bytes_read() const { return bytes_read_; }
  uint64_t files_opened() const { return files_opened_; }

  EntryKind Kind(const std::filesystem::path& path) override { return PosixFileSystem().Kind(path); }

  Result<std::unique_ptr<File>> Open(const std::filesystem::path& path) override {
    Result<std::unique_ptr<File>> file = PosixFileSystem().Open(path);
    if (!file) return file;
    ++files_opened_;
    return std::make_unique<CountingFile>(*std::move(file), bytes_read_);
  }

  Result<std::vector<std::string>> List(const std::filesystem::path& directory) override {
    return PosixFileSystem().List(directory);
  }

 private:
  class CountingFile : public File {
   public:
    CountingFile(std::unique_ptr<File> file, std::atomic<uint64_t>& bytes_read)
        : File(file->path()), file_(std::move(file)), bytes_read_(bytes_read) {}
    uint64_t size_bytes() const override { return file_->size_bytes(); }
    Result<void> CheckUnchanged() const override { return file_->CheckUnchanged(); }
    Result<size_t> ReadSome(uint64_t offset, std::span<std::byte> target) const override {
      Result<size_t> count = file_->ReadSome(offset, target);
      if (count) bytes_read_ += *count;
      return count;
    }

   private:
    std::unique_ptr<File> file_;
    std::atomic<uint64_t>& bytes_read_;
  };

  std::atomic<uint64_t> bytes_read_{0};
  std::atomic<uint64_t> files_opened_{0};
};

class BigCheckpointTest : public ::testing::Test {
 protected:
  // Opens what the options ask for and checks that headers and JSON were read once, and nothing else.
  void ExpectHeadersOnly(const BigCheckpointOptions& options, uint64_t min_payload_bytes) {
    const BigCheckpointFacts facts = WriteBigCheckpoint(directory_.path(), options);
    ASSERT_EQ(facts.tensors, options.tensors);
    ASSERT_GE(facts.payload_bytes, min_payload_bytes);
    CountingFileSystem counting;
    OpenOptions open_options;
    open_options.file_system = &counting;
    const Result<Checkpoint> opened = Checkpoint::Open(directory_.path(), open_options);
    ASSERT_TRUE(opened.has_value()) << opened.error().message();
    EXPECT_EQ(counting.bytes_read(), facts.header_bytes + facts.json_bytes);
    EXPECT_EQ(counting.files_opened(), options.shards + 3u);
    EXPECT_EQ(opened->tensors().size(), options.tensors);
    EXPECT_EQ(opened->files().size(), options.shards);
    EXPECT_EQ(opened->problems().size(), 0u);
    ASSERT_EQ(opened->layers().size(), facts.layers);
    uint64_t experts = 0;
    for (const MoeLayer& layer : opened->layers()) experts += layer.experts;
    EXPECT_EQ(experts, options.tensors / 12);
    uint64_t size_bytes = 0;
    for (const FileInfo& file : opened->files()) size_bytes += file.size_bytes;
    EXPECT_EQ(size_bytes, facts.header_bytes + facts.payload_bytes);
    const MatrixInfo last = opened->Matrix(facts.layers - 1, 0, Projection::kDown, 0);
    EXPECT_EQ(last.in_channels, options.intermediate_channels);
    EXPECT_EQ(last.bits, options.bits);
  }

 private:
  TemporaryDirectory directory_;
};

TEST_F(BigCheckpointTest, HalfAMillionTensorsInSixtyShards) { ExpectHeadersOnly({}, 0); }

TEST_F(BigCheckpointTest, TwoHundredGigabytesOfPayload) {
  BigCheckpointOptions options;
  options.tensors = 60'000;
  options.hidden_channels = 6144;
  options.intermediate_channels = 6144;
  ExpectHeadersOnly(options, 200'000'000'000);
}

}  // namespace
}  // namespace espalier::testing
