// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/safetensors.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "support/memory_file_system.h"
#include "support/temporary_directory.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;
using espalier::testing::MemoryFileSystem;
using espalier::testing::TemporaryDirectory;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

std::string LengthBytes(uint64_t length) {
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(length >> (8 * i) & 0xFF);
  return bytes;
}

// A file with this header and `data_bytes` of data.
std::string FileOf(const std::string& header, size_t data_bytes) {
  return LengthBytes(header.size()) + header + std::string(data_bytes, 'd');
}

Result<SafetensorsHeader> ReadBytes(std::string bytes) {
  MemoryFileSystem files;
  files.Write("/m/model.safetensors", std::move(bytes));
  return ReadSafetensorsHeader(**files.Open("/m/model.safetensors"));
}

// The message of the refusal; fails the test when the file is accepted or refused as something else.
std::string Refusal(std::string bytes, StatusCode code = StatusCode::kFormat) {
  const Result<SafetensorsHeader> header = ReadBytes(std::move(bytes));
  if (header) {
    ADD_FAILURE() << "accepted";
    return "";
  }
  EXPECT_EQ(header.error().code(), code) << header.error().message();
  EXPECT_THAT(header.error().message(), HasSubstr("/m/model.safetensors"));
  return header.error().message();
}

std::string Entry(std::string_view dtype, std::string_view shape, std::string_view offsets) {
  return fmt::format(R"({{"dtype":"{}","shape":{},"data_offsets":{}}})", dtype, shape, offsets);
}

// A header with the one tensor "t".
std::string One(std::string_view entry) { return fmt::format(R"({{"t":{}}})", entry); }

TEST(SafetensorsTest, DescribesTensorsAndMetadata) {
  const std::string header = R"({"__metadata__":{"format":"pt","note":"\u00e9"},"b":)" +
                             Entry("F32", "[2,3]", "[4,28]") + R"(,"a":)" + Entry("I32", "[]", "[0,4]") +
                             "}  ";
  const auto read = ReadBytes(FileOf(header, 28));
  ASSERT_TRUE(read) << read.error().message();
  EXPECT_THAT(read->metadata, ElementsAre(Pair("format", "pt"), Pair("note", "\u00e9")));
  ASSERT_EQ(read->tensors.size(), 2u);
  const TensorInfo& b = read->tensors[0];
  EXPECT_EQ(b.name, "b");
  EXPECT_EQ(b.dtype, Dtype::kF32);
  EXPECT_THAT(b.shape, ElementsAre(2, 3));
  EXPECT_EQ(b.file, 0u);
  EXPECT_EQ(b.offset_bytes, 8 + header.size() + 4);
  EXPECT_EQ(b.size_bytes, 24u);
  const TensorInfo& a = read->tensors[1];
  EXPECT_EQ(a.name, "a");
  EXPECT_THAT(a.shape, ElementsAre());
  EXPECT_EQ(a.offset_bytes, 8 + header.size());
  EXPECT_EQ(a.size_bytes, 4u);
}

TEST(SafetensorsTest, AcceptsWhatIsLegal) {
  const std::string legal[] = {
      FileOf("{}", 0),
      FileOf("{}      ", 0),
      FileOf("{ \"t\" :\n\t" + Entry("U8", "[ 3 ]", "[ 0 , 3 ]") + "\r\n}", 3),
      FileOf(R"({"__metadata__":{}})", 0),
      // Unknown members of an entry mean nothing to a reader.
      FileOf(R"({"t":{"dtype":"U8","shape":[3],"data_offsets":[0,3],"stride":[1],"x":{"y":null}}})", 3),
      // Empty tensors at the beginning, between two and at the end.
      FileOf(R"({"e":)" + Entry("F32", "[0]", "[0,0]") + R"(,"t":)" + Entry("U8", "[2]", "[0,2]") +
                 R"(,"f":)" + Entry("F32", "[4,0,2]", "[2,2]") + R"(,"u":)" + Entry("U8", "[1]", "[2,3]") +
                 R"(,"g":)" + Entry("I64", "[0]", "[3,3]") + "}",
             3),
      FileOf(One(Entry("F4", "[3,2]", "[0,3]")), 3),
      FileOf(One(Entry("F6_E2M3", "[4]", "[0,3]")), 3),
      FileOf(One(Entry("C64", "[2]", "[0,16]")), 16),
      FileOf(R"({"a\"b\\c\n/\u00e9":)" + Entry("U8", "[1]", "[0,1]") + "}", 1),
  };
  for (const std::string& bytes : legal) {
    const auto read = ReadBytes(bytes);
    EXPECT_TRUE(read) << bytes << "\n" << read.error().message();
  }
}

TEST(SafetensorsTest, EveryDtypeHasItsSize) {
  const std::map<std::string, size_t> bytes_of_eight = {
      {"BOOL", 8},    {"U8", 8},      {"I8", 8},          {"F8_E4M3", 8},    {"F8_E5M2", 8}, {"F8_E8M0", 8},
      {"I16", 16},    {"U16", 16},    {"F16", 16},        {"BF16", 16},      {"I32", 32},    {"U32", 32},
      {"F32", 32},    {"I64", 64},    {"U64", 64},        {"F64", 64},       {"C64", 64},    {"F4", 4},
      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}};
  for (const auto& [dtype, size] : bytes_of_eight) {
    const auto header = [&](size_t end) { return One(Entry(dtype, "[2,4]", fmt::format("[0,{}]", end))); };
    EXPECT_TRUE(ReadBytes(FileOf(header(size), size))) << dtype;
    EXPECT_THAT(Refusal(FileOf(header(size - 1), size - 1)), HasSubstr("takes " + std::to_string(size)));
    EXPECT_THAT(Refusal(FileOf(header(size + 1), size + 1)), HasSubstr("takes " + std::to_string(size)));
  }
}

TEST(SafetensorsTest, RefusesHeaderLengths) {
  for (size_t size = 0; size < 8; ++size) {
    EXPECT_THAT(Refusal(std::string(size, '\0')), HasSubstr(std::to_string(size) + " bytes long"));
  }
  EXPECT_THAT(Refusal(LengthBytes(0)), HasSubstr("header length 0"));
  EXPECT_THAT(Refusal(LengthBytes(1) + "{"), HasSubstr("header length 1"));
  EXPECT_THAT(Refusal(LengthBytes(2)), HasSubstr("only 0 bytes follow"));
  EXPECT_THAT(Refusal(LengthBytes(3) + "{}"), AllOf(HasSubstr("header length 3"), HasSubstr("only 2 bytes")));
  for (const uint64_t length : {uint64_t{100'000'001}, uint64_t{1} << 31, uint64_t{1} << 32,
                                uint64_t{1} << 63, UINT64_MAX - 8, UINT64_MAX - 7, UINT64_MAX}) {
    EXPECT_THAT(Refusal(LengthBytes(length) + "{}"),
                AllOf(HasSubstr(std::to_string(length)), HasSubstr("at most 100000000")));
  }
  EXPECT_THAT(Refusal(LengthBytes(100'000'000) + "{}"), HasSubstr("only 2 bytes follow"));
}

TEST(SafetensorsTest, RefusesWhatIsAroundTheJson) {
  EXPECT_THAT(Refusal(FileOf(" {}", 0)), HasSubstr("begins with byte 0x20"));
  EXPECT_THAT(Refusal(FileOf("[]", 0)), HasSubstr("begins with byte 0x5b"));
  EXPECT_THAT(Refusal(FileOf("\xEF\xBB\xBF{}", 0)), HasSubstr("begins with byte 0xef"));
  EXPECT_THAT(Refusal(FileOf("{}\n", 0)), HasSubstr("ends with byte 0x0a"));
  EXPECT_THAT(Refusal(FileOf("{}\t", 0)), HasSubstr("ends with byte 0x09"));
  EXPECT_THAT(Refusal(FileOf(std::string("{}\0", 3), 0)), HasSubstr("ends with byte 0x00"));
  EXPECT_THAT(Refusal(FileOf("{}x", 0)), HasSubstr("ends with byte 0x78"));
  EXPECT_THAT(Refusal(FileOf("{}  {}", 0)), HasSubstr("not valid JSON"));
  EXPECT_THAT(Refusal(FileOf("{      ", 0)), HasSubstr("ends with byte 0x7b"));
  EXPECT_THAT(Refusal(FileOf(R"({"t"})", 0)), HasSubstr("not valid JSON"));
  EXPECT_THAT(Refusal(FileOf("{\"\xFF\":1}", 0)), HasSubstr("not valid JSON"));
}

TEST(SafetensorsTest, RefusesNames) {
  const std::string u8 = Entry("U8", "[1]", "[0,1]");
  EXPECT_THAT(Refusal(FileOf("{\"t\":" + u8 + ",\"t\":" + u8 + "}", 1)), HasSubstr("'t' occurs twice"));
  EXPECT_THAT(Refusal(FileOf("{\"t\":" + u8 + ",\"\\u0074\":" + u8 + "}", 1)), HasSubstr("'t' occurs twice"));
  EXPECT_THAT(Refusal(FileOf(R"({"__metadata__":{},"__metadata__":{}})", 0)), HasSubstr("occurs twice"));
  EXPECT_THAT(Refusal(FileOf(R"({"__metadata__":{"a":"1","a":"2"}})", 0)), HasSubstr("'a' occurs twice"));
  EXPECT_THAT(Refusal(FileOf(One(R"({"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]})"), 1)),
              HasSubstr("'dtype' occurs twice"));
  EXPECT_THAT(Refusal(FileOf("{\"\":" + u8 + "}", 1)), HasSubstr("name is empty"));
  EXPECT_THAT(Refusal(FileOf("{\"a\\u0000b\":" + u8 + "}", 1)), HasSubstr("NUL"));
}

TEST(SafetensorsTest, RefusesMetadataThatIsNotStrings) {
  for (const char* metadata : {"[]", "1", "\"a\"", "null", "true"}) {
    EXPECT_THAT(Refusal(FileOf(std::string(R"({"__metadata__":)") + metadata + "}", 0)),
                HasSubstr("__metadata__ is "));
  }
  for (const char* value : {"1", "null", "{}", "[\"a\"]", "true", "1.5"}) {
    EXPECT_THAT(Refusal(FileOf(std::string(R"({"__metadata__":{"k":)") + value + "}}", 0)),
                AllOf(HasSubstr("'k'"), HasSubstr("not a string")));
  }
}

TEST(SafetensorsTest, RefusesEntries) {
  const struct {
    std::string entry;
    const char* message;
  } cases[] = {
      {"1", "not an object"},
      {"[]", "not an object"},
      {"null", "not an object"},
      {"{}", "has no 'dtype'"},
      {R"({"shape":[1],"data_offsets":[0,4]})", "has no 'dtype'"},
      {R"({"dtype":"F32","data_offsets":[0,4]})", "has no 'shape'"},
      {R"({"dtype":"F32","shape":[1]})", "has no 'data_offsets'"},
      {R"({"Dtype":"F32","shape":[1],"data_offsets":[0,4]})", "has no 'dtype'"},
      {R"({"dtype":5,"shape":[1],"data_offsets":[0,4]})", "dtype is integer, not a string"},
      {Entry("F128", "[1]", "[0,4]"), "unknown dtype 'F128'"},
      {Entry("f32", "[1]", "[0,4]"), "unknown dtype 'f32'"},
      {Entry("", "[1]", "[0,4]"), "unknown dtype ''"},
      {Entry("F32", "1", "[0,4]"), "shape is integer, not an array"},
      {Entry("F32", "null", "[0,4]"), "shape is null, not an array"},
      {Entry("F32", "[-1]", "[0,4]"), "shape[0] is negative integer"},
      {Entry("F32", "[1,1.0]", "[0,4]"), "shape[1] is number with a fraction"},
      {Entry("F32", "[1e0]", "[0,4]"), "shape[0] is number with a fraction"},
      {Entry("F32", "[\"1\"]", "[0,4]"), "shape[0] is string"},
      {Entry("F32", "[[1]]", "[0,4]"), "shape[0] is array"},
      {Entry("F32", "[true]", "[0,4]"), "shape[0] is boolean"},
      {Entry("F32", "[1]", "4"), "data_offsets is integer, not an array"},
      {Entry("F32", "[1]", "[]"), "data_offsets has 0 numbers"},
      {Entry("F32", "[1]", "[4]"), "data_offsets has 1 numbers"},
      {Entry("F32", "[1]", "[0,4,4]"), "data_offsets has 3 numbers"},
      {Entry("F32", "[1]", "[-4,0]"), "data_offsets[0] is negative integer"},
      {Entry("F32", "[1]", "[0,4.0]"), "data_offsets[1] is number with a fraction"},
      {Entry("F32", "[1]", "[0,null]"), "data_offsets[1] is null"},
      {Entry("F32", "[1]", "[4,0]"), "run backwards"},
      {Entry("F32", "[1]", "[0,3]"), "hold 3 bytes, but F32 [1] takes 4"},
      {Entry("F32", "[2]", "[0,4]"), "hold 4 bytes, but F32 [2] takes 8"},
      {Entry("F32", "[0]", "[0,4]"), "hold 4 bytes, but F32 [0] takes 0"},
      {Entry("F32", "[]", "[0,0]"), "hold 0 bytes, but F32 [] takes 4"},
      {Entry("F4", "[3]", "[0,2]"), "3 elements of 4 bits do not fill whole bytes"},
      {Entry("F6_E3M2", "[2]", "[0,2]"), "2 elements of 6 bits do not fill whole bytes"},
  };
  for (const auto& c : cases) {
    EXPECT_THAT(Refusal(FileOf(One(c.entry), 4)), AllOf(HasSubstr("'t'"), HasSubstr(c.message))) << c.entry;
  }
  EXPECT_NE(Refusal(FileOf(One(Entry("F32", "[99999999999999999999]", "[0,4]")), 4)), "");
}

TEST(SafetensorsTest, RefusesShapesThatOverflow) {
  // Each product is 0 or 4 modulo 2^64, what an unchecked multiplication would take for a small tensor.
  for (const char* shape : {"[4294967296,4294967296]", "[4294967296,1073741824,4]", "[9007199254740992,2048]",
                            "[4611686018427387905]", "[18446744073709551615,18446744073709551615]",
                            "[0,4294967296,4294967296]", "[4294967296,4294967296,0]"}) {
    for (const char* offsets : {"[0,4]", "[0,0]"}) {
      EXPECT_THAT(Refusal(FileOf(One(Entry("F32", shape, offsets)), 4)),
                  ::testing::AnyOf(HasSubstr("overflows"), HasSubstr("above 2^53")))
          << shape;
    }
  }
  EXPECT_THAT(Refusal(FileOf(One(Entry("F32", "[9007199254740992]", "[0,4]")), 4)),
              HasSubstr("takes 36028797018963968"));
}

TEST(SafetensorsTest, RefusesOffsetsOutsideTheFile) {
  EXPECT_THAT(Refusal(FileOf(One(Entry("U8", "[5]", "[0,5]")), 4)),
              AllOf(HasSubstr("ends at byte 5"), HasSubstr("holds only 4"), HasSubstr("truncated")));
  EXPECT_THAT(Refusal(FileOf(One(Entry("U8", "[4]", "[4,8]")), 4)), HasSubstr("truncated"));
  EXPECT_THAT(Refusal(FileOf(One(Entry("U8", "[1]", "[18446744073709551614,18446744073709551615]")), 4)),
              HasSubstr("truncated"));
  EXPECT_THAT(Refusal(FileOf(One(Entry("U8", "[0]", "[5,5]")), 4)), HasSubstr("truncated"));
}

TEST(SafetensorsTest, RefusesWhatDoesNotTile) {
  const auto two = [](std::string_view a, std::string_view a_size, std::string_view b,
                      std::string_view b_size) {
    return fmt::format(R"({{"a":{},"b":{}}})", Entry("U8", fmt::format("[{}]", a_size), a),
                       Entry("U8", fmt::format("[{}]", b_size), b));
  };
  EXPECT_TRUE(ReadBytes(FileOf(two("[0,4]", "4", "[4,8]", "4"), 8)));
  EXPECT_TRUE(ReadBytes(FileOf(two("[4,8]", "4", "[0,4]", "4"), 8)));
  EXPECT_THAT(Refusal(FileOf(two("[0,4]", "4", "[3,8]", "5"), 8)),
              AllOf(HasSubstr("tensor 'b'"), HasSubstr("begins at byte 3"), HasSubstr("inside tensor 'a'"),
                    HasSubstr("ends at 4"), HasSubstr("overlap")));
  EXPECT_THAT(Refusal(FileOf(two("[0,8]", "8", "[0,8]", "8"), 8)), HasSubstr("overlap"));
  EXPECT_THAT(Refusal(FileOf(two("[0,8]", "8", "[2,4]", "2"), 8)), HasSubstr("overlap"));
  EXPECT_THAT(Refusal(FileOf(two("[0,4]", "4", "[5,8]", "3"), 8)),
              AllOf(HasSubstr("tensor 'b'"), HasSubstr("begins at byte 5"), HasSubstr("ends at 4"),
                    HasSubstr("hole")));
  EXPECT_THAT(Refusal(FileOf(two("[1,4]", "3", "[4,8]", "4"), 8)), HasSubstr("hole"));
  EXPECT_THAT(Refusal(FileOf(two("[0,4]", "4", "[4,8]", "4"), 9)),
              AllOf(HasSubstr("end at byte 8"), HasSubstr("the file at 9"), HasSubstr("1 trailing")));
  EXPECT_THAT(Refusal(FileOf("{}", 3)), HasSubstr("3 trailing"));
  // An empty tensor inside another one is no place between tensors.
  EXPECT_THAT(Refusal(FileOf(two("[0,8]", "8", "[4,4]", "0"), 8)), HasSubstr("overlap"));
}

TEST(SafetensorsTest, RefusesDepth) {
  std::string deep = R"({"t":)";
  for (int i = 0; i < 100000; ++i) deep += R"({"a":)";
  deep += '1';
  deep.append(100001, '}');
  EXPECT_THAT(Refusal(FileOf(deep, 0)), HasSubstr("deeper than 64"));
  EXPECT_THAT(Refusal(FileOf("{\"t\":" + std::string(1000000, '[') + "}", 0)), HasSubstr("header of"));
}

TEST(SafetensorsTest, HostileTextMakesNoLongMessage) {
  const std::string name(1000000, 'n');
  EXPECT_LT(Refusal(FileOf("{\"" + name + "\":1}", 0)).size(), 1000u);
  EXPECT_LT(Refusal(FileOf(One(Entry(name, "[1]", "[0,1]")), 1)).size(), 1000u);
  std::string shape = "[1";
  for (int i = 0; i < 100000; ++i) shape += ",1";
  EXPECT_LT(Refusal(FileOf(One(Entry("U8", shape + "]", "[0,2]")), 2)).size(), 1000u);
}

TEST(SafetensorsTest, ReadErrorsAreIoErrors) {
  const std::string bytes = FileOf(One(Entry("U8", "[4]", "[0,4]")), 4);
  const size_t header_end = bytes.size() - 4;
  for (size_t place = 0; place < header_end; ++place) {
    MemoryFileSystem files;
    files.Write("/f", bytes);
    files.SetFaults("/f", {.max_bytes_per_read = 0, .fails_at = place, .ends_at = {}});
    const auto failed = ReadSafetensorsHeader(**files.Open("/f"));
    ASSERT_FALSE(failed) << place;
    EXPECT_EQ(failed.error().code(), StatusCode::kIo) << place;
    files.SetFaults("/f", {.max_bytes_per_read = 0, .fails_at = {}, .ends_at = place});
    const auto cut = ReadSafetensorsHeader(**files.Open("/f"));
    ASSERT_FALSE(cut) << place;
    EXPECT_EQ(cut.error().code(), StatusCode::kIo) << place;
    EXPECT_THAT(cut.error().message(), HasSubstr("file ended at byte " + std::to_string(place)));
  }
}

TEST(SafetensorsTest, ReadsTheHeaderAndNothingElse) {
  const std::string header = One(Entry("U8", "[200000000000]", "[0,200000000000]"));
  MemoryFileSystem files;
  files.WriteSparse("/big", LengthBytes(header.size()) + header, 8 + header.size() + 200'000'000'000);
  files.SetFaults("/big", {.max_bytes_per_read = 3, .fails_at = 8 + header.size(), .ends_at = {}});
  const auto read = ReadSafetensorsHeader(**files.Open("/big"));
  ASSERT_TRUE(read) << read.error().message();
  EXPECT_EQ(read->tensors[0].size_bytes, 200'000'000'000u);
  EXPECT_EQ(files.bytes_read(), 8 + header.size());
}

TEST(SafetensorsTest, ManyTensorsTakeLinearTime) {
  std::string header = "{";
  for (int i = 0; i < 500000; ++i) {
    header += fmt::format(R"({}"layers.{}.trellis":{})", i == 0 ? "" : ",", i,
                          Entry("I16", "[4]", fmt::format("[{},{}]", 8 * i, 8 * i + 8)));
  }
  MemoryFileSystem files;
  files.WriteSparse("/f", LengthBytes(header.size() + 1) + header + "}", 8 + header.size() + 1 + 4'000'000);
  const auto start = std::chrono::steady_clock::now();
  const auto read = ReadSafetensorsHeader(**files.Open("/f"));
  ASSERT_TRUE(read) << read.error().message();
  EXPECT_EQ(read->tensors.size(), 500000u);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

// The files in the tree come from other writers; what they say is compared with a second reader of the
// JSON, written here.
TEST(SafetensorsTest, FilesOfOtherWritersReadAsTheirJsonSays) {
  size_t files = 0;
  for (const fs::path root : {ESPALIER_TEST_DATA, ESPALIER_BUNDLED_CHECKPOINT}) {
    for (const auto& entry : fs::recursive_directory_iterator(root)) {
      if (entry.path().extension() != ".safetensors") continue;
      ++files;
      std::ifstream in(entry.path(), std::ios::binary);
      uint64_t length = 0;
      in.read(reinterpret_cast<char*>(&length), 8);
      std::string text(length, ' ');
      in.read(text.data(), static_cast<std::streamsize>(length));
      nlohmann::json json = nlohmann::json::parse(text);
      json.erase("__metadata__");

      const auto file = PosixFileSystem().Open(entry.path());
      ASSERT_TRUE(file) << file.error().message();
      const auto header = ReadSafetensorsHeader(**file);
      ASSERT_TRUE(header) << header.error().message();
      ASSERT_EQ(header->tensors.size(), json.size()) << entry.path();
      for (const TensorInfo& tensor : header->tensors) {
        const nlohmann::json& expected = json.at(tensor.name);
        EXPECT_EQ(DtypeName(tensor.dtype), expected.at("dtype").get<std::string>());
        EXPECT_EQ(tensor.shape, expected.at("shape").get<std::vector<uint64_t>>());
        EXPECT_EQ(tensor.offset_bytes, 8 + length + expected.at("data_offsets").at(0).get<uint64_t>());
        EXPECT_EQ(tensor.offset_bytes + tensor.size_bytes,
                  8 + length + expected.at("data_offsets").at(1).get<uint64_t>());
      }
    }
  }
  EXPECT_GT(files, 50u);
}

TEST(SafetensorsWriterTest, WhatIsWrittenReadsBack) {
  const TemporaryDirectory directory;
  const std::string names[] = {
      "plain", "quote\" back\\slash", "control\n\x01\x7f", "größe \xF0\x9F\x8C\xB3", "empty", "scalar"};
  const std::vector<float> floats = {1, -2, 3, 4, 5, 6};
  const std::vector<TensorData> tensors = {
      {names[0], Dtype::kF32, {2, 3}, std::as_bytes(std::span(floats))},
      {names[1], Dtype::kU8, {5}, std::as_bytes(std::span(floats)).first(5)},
      {names[2], Dtype::kF4, {2, 3}, std::as_bytes(std::span(floats)).first(3)},
      {names[3], Dtype::kBF16, {1, 1, 2}, std::as_bytes(std::span(floats)).first(4)},
      {names[4], Dtype::kI64, {7, 0}, {}},
      {names[5], Dtype::kF64, {}, std::as_bytes(std::span(floats)).first(8)},
  };
  const std::vector<std::pair<std::string, std::string>> metadata = {{"format", "pt"}, {"k\"", "v\n"}};
  const Result<void> written = WriteSafetensors(directory / "out.safetensors", tensors, metadata);
  ASSERT_TRUE(written) << written.error().message();

  const auto file = PosixFileSystem().Open(directory / "out.safetensors");
  ASSERT_TRUE(file);
  const auto header = ReadSafetensorsHeader(**file);
  ASSERT_TRUE(header) << header.error().message();
  EXPECT_EQ(header->metadata, metadata);
  ASSERT_EQ(header->tensors.size(), tensors.size());
  EXPECT_EQ(header->tensors[0].offset_bytes % 8, 0u);
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(header->tensors[i].name, tensors[i].name);
    EXPECT_EQ(header->tensors[i].dtype, tensors[i].dtype);
    EXPECT_EQ(header->tensors[i].shape, tensors[i].shape);
    std::vector<std::byte> bytes(header->tensors[i].size_bytes);
    ASSERT_TRUE((*file)->ReadAt(header->tensors[i].offset_bytes, bytes));
    EXPECT_TRUE(std::ranges::equal(bytes, tensors[i].data)) << names[i];
  }
  EXPECT_THAT(*PosixFileSystem().List(directory.path()), ElementsAre("out.safetensors"));
}

TEST(SafetensorsWriterTest, AnEmptyFileIsAFile) {
  const TemporaryDirectory directory;
  ASSERT_TRUE(WriteSafetensors(directory / "out", {}));
  const auto header = ReadSafetensorsHeader(**PosixFileSystem().Open(directory / "out"));
  ASSERT_TRUE(header) << header.error().message();
  EXPECT_TRUE(header->tensors.empty());
}

TEST(SafetensorsWriterTest, RefusesWhatItsReaderWouldRefuse) {
  const TemporaryDirectory directory;
  const std::byte bytes[8] = {};
  const auto refusal = [&](const std::vector<TensorData>& tensors,
                           const std::vector<std::pair<std::string, std::string>>& metadata = {}) {
    const Result<void> written = WriteSafetensors(directory / "out", tensors, metadata);
    if (written) {
      ADD_FAILURE() << "written";
      return std::string();
    }
    EXPECT_EQ(written.error().code(), StatusCode::kUsage);
    return written.error().message();
  };
  EXPECT_THAT(refusal({{"t", Dtype::kF32, {3}, bytes}}), HasSubstr("F32 [3] takes 12 bytes, 8 were given"));
  EXPECT_THAT(refusal({{"t", Dtype::kF32, {1}, bytes}}), HasSubstr("takes 4 bytes, 8 were given"));
  EXPECT_THAT(refusal({{"t", Dtype::kF32, {uint64_t{1} << 32, uint64_t{1} << 32}, {}}}),
              HasSubstr("overflows"));
  EXPECT_THAT(refusal({{"t", Dtype::kF4, {3}, std::span(bytes).first(2)}}), HasSubstr("whole bytes"));
  EXPECT_THAT(refusal({{"t", Dtype::kU8, {8}, bytes}, {"t", Dtype::kU8, {8}, bytes}}),
              HasSubstr("occurs twice"));
  for (const std::string& name : {std::string(), std::string("__metadata__"), std::string("a\0b", 3),
                                  std::string("\xFF"), std::string("\xED\xA0\x80")}) {
    EXPECT_THAT(refusal({{name, Dtype::kU8, {8}, bytes}}), HasSubstr("not a name"));
  }
  EXPECT_THAT(refusal({}, {{"k", "1"}, {"k", "2"}}), HasSubstr("occurs twice"));
  EXPECT_THAT(refusal({}, {{"k", "\xFF"}}), HasSubstr("UTF-8"));
  EXPECT_THAT(*PosixFileSystem().List(directory.path()), ElementsAre());
}

TEST(SafetensorsWriterTest, TargetsThatCannotBeWrittenAreIoErrors) {
  const TemporaryDirectory directory;
  for (const fs::path& path : {directory.path(), directory / "missing/out"}) {
    const Result<void> written = WriteSafetensors(path, {});
    ASSERT_FALSE(written);
    EXPECT_EQ(written.error().code(), StatusCode::kIo);
  }
}

}  // namespace
}  // namespace espalier
