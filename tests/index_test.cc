// SPDX-License-Identifier: Apache-2.0
//
// Which files belong to a checkpoint: the index against the shards, tensors that occur twice, and what the
// named entries are on a real file system (links of a hub cache, FIFOs, folders, nothing at all).
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "support/refusal_cases.h"
#include "support/temporary_directory.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

const std::string kName = "model.layers.1.mlp.experts.1.gate_proj.suh";
const std::string kFirst = "model-00001-of-00002.safetensors";
const std::string kSecond = "model-00002-of-00002.safetensors";

Mutation Entry(std::string name, Json shard) {
  return [=](CheckpointFiles& files) { files.index()[name] = shard; };
}

// The same tensor in the other shard as well, changed by `change`.
Mutation Copy(std::function<void(NamedTensor&)> change) {
  return [=](CheckpointFiles& files) {
    NamedTensor copy = files.Tensor(kName);
    change(copy);
    const std::string home = files.FileOf(kName);
    for (auto& [file, shard] : files.shards) {
      if (file != home) {
        shard.tensors.push_back(copy);
        return;
      }
    }
  };
}

std::vector<RefusalCase> IndexCases() {
  const Base base = Base::kStock;
  const std::string index = kIndexName;
  const auto nothing = [](NamedTensor&) {};
  const auto other_bytes = [](NamedTensor& tensor) {
    tensor.data.back() = static_cast<char>(tensor.data.back() ^ 1);
  };
  const auto other_shape = [](NamedTensor& tensor) { tensor.shape = {1, 128}; };
  const auto other_dtype = [](NamedTensor& tensor) { tensor.dtype = "BF16"; };
  return {
      {"absent_shard", base, Entry(kName, "model-00009-of-00002.safetensors"),
       Format({index, kName, "model-00009-of-00002.safetensors"})},
      {"wrong_shard", base,
       [](CheckpointFiles& files) {
         files.index()[kName] = files.FileOf(kName) == kFirst ? kSecond : kFirst;
       },
       Format({index, kName, kFirst, kSecond})},
      {"tensor_of_no_shard", base, Entry("model.ghost.weight", kFirst),
       Format({index, "model.ghost.weight", kFirst})},
      {"tensor_not_in_index", base, [](CheckpointFiles& files) { files.index().erase(kName); },
       ErrorProblem({kName, ".safetensors"})},
      {"plain_tensor_not_in_index", base,
       [](CheckpointFiles& files) { files.index().erase("model.norm.weight"); },
       ErrorProblem({"model.norm.weight"})},
      {"parent", base, Entry(kName, "../" + kFirst), Format({index, kName, "../"})},
      {"absolute", base, Entry(kName, "/etc/passwd"), Format({index, kName, "/etc/passwd"})},
      {"folder", base, Entry(kName, "sub/" + kFirst), Format({index, kName, "sub/"})},
      {"backslash", base, Entry(kName, "..\\" + kFirst), Format({index, kName})},
      {"empty_name", base, Entry(kName, ""), Format({index, kName})},
      {"dot", base, Entry(kName, "."), Format({index, kName})},
      {"dots", base, Entry(kName, ".."), Format({index, kName})},
      {"nul", base, Entry(kName, std::string("model\0.safetensors", 18)), Format({index, kName})},
      {"number", base, Entry(kName, 1), Format({index, kName})},
      {"list", base, Entry(kName, Json::array({kFirst})), Format({index, kName})},
      {"null", base, Entry(kName, nullptr), Format({index, kName})},
      {"terminal_escape", base, Entry(kName, "\x1b[31mred\x07"), Format({index, "\\x1b[31mred\\x07"})},
      {"megabyte_name", base, Entry(kName, std::string(1 << 20, 'x')), Format({index, "xxx"})},
      {"not_a_shard", base, Entry(kName, "config.json"), Format({"config.json"})},
      {"no_weight_map", base, EraseJson(index, "/weight_map"), Format({index, "weight_map"})},
      {"weight_map_list", base, SetJson(index, "/weight_map", Json::array()), Format({index, "weight_map"})},
      {"root_list", base, SetJson(index, "", Json::array()), Format({index})},
      {"no_metadata", base, EraseJson(index, "/metadata"), Accepted()},
      {"unknown_key", base, SetJson(index, "/made_by", "somebody"), Accepted()},
      {"key_twice", base,
       [](CheckpointFiles& files) {
         files.edits.push_back([](FileMap& bytes) {
           std::string& text = bytes.at(kIndexName);
           text.insert(text.find('{', 1) + 1,
                       "\"" + kName + "\": \"" + kFirst + "\", \"" + kName + "\": \"" + kFirst + "\",");
         });
       },
       Format({index})},
      {"copy_with_equal_bytes", base, Copy(nothing), Accepted()},
      {"copy_with_other_bytes", base, Copy(other_bytes), Format({kName, kFirst, kSecond})},
      {"copy_with_other_shape", base, Copy(other_shape), Format({kName, kFirst, kSecond})},
      {"copy_with_other_dtype", base, Copy(other_dtype), Format({kName, kFirst, kSecond})},
      {"copy_without_index_with_equal_bytes", Base::kStockShards, Copy(nothing), Accepted()},
      {"copy_without_index_with_other_bytes", Base::kStockShards, Copy(other_bytes),
       Format({kName, "model-00001-of-00003"})},
      {"twice_in_one_shard", base,
       [](CheckpointFiles& files) {
         files.edits.push_back([](FileMap& bytes) {
           // The header names one tensor twice: first key again, with a scalar of no bytes behind the data.
           std::string& file = bytes.at(kFirst);
           const size_t key = file.find("\"model.", 8);
           const size_t end = file.find('}', key);
           const std::string again = file.substr(key, end + 1 - key) + ",";
           const std::string header = file.substr(8, file.find("}}", 8) + 2 - 8);
           std::string twice = header;
           twice.insert(header.find("\"model."), again);
           uint64_t length = 0;
           std::memcpy(&length, file.data(), 8);
           file = SafetensorsBytes(twice, file.substr(8 + length));
         });
       },
       Format({kFirst})},
  };
}

class IndexTest : public ::testing::TestWithParam<RefusalCase> {};

TEST_P(IndexTest, EndsAsExpected) { EXPECT_EQ(RunCase(GetParam()), ""); }

std::string CaseName(const ::testing::TestParamInfo<RefusalCase>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Cases, IndexTest, ::testing::ValuesIn(IndexCases()), CaseName);

// Every tensor twice, in two shards, and the index names the second: looked up one by one in the list of all,
// this would not end within the test's time limit.
TEST(IndexCostTest, CopiesOfEverythingAreFoundInLinearTime) {
  constexpr int kTensors = 150'000;
  std::string header;
  std::string index;
  for (int i = 0; i < kTensors; ++i) {
    const std::string name = "model.layers." + std::to_string(i) + ".mlp.shared_expert_gate.weight";
    header += (i == 0 ? "{\"" : ",\"") + name + R"(":{"dtype":"F32","shape":[0],"data_offsets":[0,0]})";
    index += (i == 0 ? "\"" : ",\"") + name + R"(":"b.safetensors")";
  }
  FileMap files;
  files["a.safetensors"] = files["b.safetensors"] = SafetensorsBytes(header + "}", "");
  // One entry keeps the first shard in the game.
  files[kIndexName] = R"({"weight_map":{)" + index + R"(,"x":"a.safetensors"}})";
  MemoryCheckpoint opened = OpenInMemory(files);
  ASSERT_FALSE(opened.checkpoint.has_value());
  EXPECT_EQ(opened.checkpoint.error().code(), StatusCode::kFormat);
  EXPECT_NE(opened.checkpoint.error().message().find("'x'"), std::string::npos)
      << opened.checkpoint.error().message();
}

// A stock checkpoint on the real file system.
class ShardEntryTest : public ::testing::Test {
 protected:
  void SetUp() override { WriteFiles(MakeBase(Base::kStock).Serialize(), dir()); }

  fs::path dir() const { return directory_.path(); }
  fs::path first() const { return dir() / kFirst; }

  void ExpectRefused(StatusCode code, const std::string& word) {
    const Result<Checkpoint> opened = Checkpoint::Open(dir());
    ASSERT_FALSE(opened.has_value());
    EXPECT_EQ(opened.error().code(), code) << opened.error().message();
    EXPECT_NE(opened.error().message().find(word), std::string::npos) << opened.error().message();
  }

  void ExpectAccepted() {
    const Result<Checkpoint> opened = Checkpoint::Open(dir());
    ASSERT_TRUE(opened.has_value()) << opened.error().message();
    EXPECT_TRUE(opened->problems().empty());
    EXPECT_EQ(opened->layers().size(), 2u);
  }

 private:
  TemporaryDirectory directory_;
};

TEST_F(ShardEntryTest, RegularFilesAreAccepted) { ExpectAccepted(); }

TEST_F(ShardEntryTest, FifoIsRefusedWithoutWaiting) {
  fs::remove(first());
  ASSERT_EQ(mkfifo(first().c_str(), 0600), 0);
  ExpectRefused(StatusCode::kIo, kFirst);
}

TEST_F(ShardEntryTest, FolderIsRefused) {
  fs::remove(first());
  fs::create_directory(first());
  ExpectRefused(StatusCode::kIo, kFirst);
}

TEST_F(ShardEntryTest, DanglingLinkIsRefused) {
  fs::remove(first());
  fs::create_symlink("blobs/0123abcd", first());
  ExpectRefused(StatusCode::kIo, kFirst);
}

TEST_F(ShardEntryTest, LinkToItselfIsRefused) {
  fs::remove(first());
  fs::create_symlink(kFirst, first());
  ExpectRefused(StatusCode::kIo, kFirst);
}

TEST_F(ShardEntryTest, LinkToADeviceIsRefused) {
  fs::remove(first());
  fs::create_symlink("/dev/zero", first());
  ExpectRefused(StatusCode::kIo, kFirst);
}

TEST_F(ShardEntryTest, FifoAsConfigIsRefusedWithoutWaiting) {
  fs::remove(dir() / "config.json");
  ASSERT_EQ(mkfifo((dir() / "config.json").c_str(), 0600), 0);
  ExpectRefused(StatusCode::kIo, "config.json");
}

TEST_F(ShardEntryTest, FolderAsIndexIsRefused) {
  fs::remove(dir() / kIndexName);
  fs::create_directory(dir() / kIndexName);
  ExpectRefused(StatusCode::kIo, kIndexName);
}

TEST_F(ShardEntryTest, EmptyFolderIsRefused) {
  for (const auto& entry : fs::directory_iterator(dir())) fs::remove(entry.path());
  ExpectRefused(StatusCode::kIo, dir().string());
}

TEST_F(ShardEntryTest, MissingPathIsRefused) {
  const Result<Checkpoint> opened = Checkpoint::Open(dir() / "nothing");
  ASSERT_FALSE(opened.has_value());
  EXPECT_EQ(opened.error().code(), StatusCode::kIo);
  EXPECT_NE(opened.error().message().find("nothing"), std::string::npos);
}

// What huggingface_hub makes: snapshots/<rev>/<name> -> ../../blobs/<hash>, no suffix on the blob.
TEST_F(ShardEntryTest, HubCacheOfLinksIsReadByTheGivenNames) {
  const fs::path blobs = dir() / "blobs";
  const fs::path snapshot = dir() / "snapshots" / "0f3e";
  fs::create_directories(blobs);
  fs::create_directories(snapshot);
  int number = 0;
  for (const auto& [name, bytes] : MakeBase(Base::kStock).Serialize()) {
    const std::string blob = "5e884898da28047151d0e56f8dc629277360" + std::to_string(number++);
    WriteFiles({{blob, bytes}}, blobs);
    fs::create_symlink(fs::path("../../blobs") / blob, snapshot / name);
  }
  for (const bool absolute : {false, true}) {
    if (absolute) {
      const fs::path link = snapshot / kSecond;
      const fs::path target = fs::canonical(link);
      fs::remove(link);
      fs::create_symlink(target, link);
    }
    const Result<Checkpoint> opened = Checkpoint::Open(snapshot);
    ASSERT_TRUE(opened.has_value()) << opened.error().message();
    EXPECT_TRUE(opened->problems().empty());
    ASSERT_EQ(opened->files().size(), 2u);
    EXPECT_EQ(opened->files()[0].name, kFirst);
    EXPECT_EQ(opened->layers().size(), 2u);
  }
  // A shard given on its own through its link keeps its name.
  const Result<Checkpoint> one = Checkpoint::Open(snapshot / kFirst);
  if (!one) {
    EXPECT_NE(one.error().code(), StatusCode::kIo) << one.error().message();
  }
  // The blob cut behind the link: the size of the target counts, not that of the link.
  const fs::path blob = fs::canonical(snapshot / kFirst);
  fs::resize_file(blob, fs::file_size(blob) - 1);
  const Result<Checkpoint> cut = Checkpoint::Open(snapshot);
  ASSERT_FALSE(cut.has_value());
  EXPECT_EQ(cut.error().code(), StatusCode::kFormat) << cut.error().message();
}

TEST_F(ShardEntryTest, OneByteMoreIsRefused) {
  fs::resize_file(first(), fs::file_size(first()) + 1);
  ExpectRefused(StatusCode::kFormat, kFirst);
}

// Files that belong to something else do not disturb.
TEST_F(ShardEntryTest, ForeignFilesAreIgnored) {
  WriteFiles({{"README.md", "hello"}, {"tokenizer.json", "{"}, {"model.bin", "\x80"}}, dir());
  fs::create_directory(dir() / "original");
  ExpectAccepted();
}

TEST_F(ShardEntryTest, ShardTheIndexDoesNotNameIsNotRead) {
  WriteFiles({{"consolidated.safetensors", "not safetensors at all"}}, dir());
  ExpectAccepted();
}

}  // namespace
}  // namespace espalier::testing
