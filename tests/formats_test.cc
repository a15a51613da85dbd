// SPDX-License-Identifier: Apache-2.0
#include <espalier/formats.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

namespace espalier {
namespace {

using ::testing::HasSubstr;

TEST(FormatsTest, PersistentNumbers) {
  EXPECT_EQ(static_cast<int>(Codebook::k3Inst), 0);
  EXPECT_EQ(static_cast<int>(Codebook::kMcg), 1);
  EXPECT_EQ(static_cast<int>(Codebook::kMul1), 2);
  EXPECT_EQ(static_cast<int>(ActivationKind::kSilu), 0);
  EXPECT_EQ(static_cast<int>(ActivationKind::kGelu), 1);
  EXPECT_EQ(static_cast<int>(ActivationKind::kRelu2), 2);
  EXPECT_EQ(static_cast<int>(ActivationKind::kSitu), 3);
  EXPECT_EQ(static_cast<int>(ActivationKind::kSwigluOai), 4);
  EXPECT_EQ(static_cast<int>(Dtype::kF16), 5);
  EXPECT_EQ(static_cast<int>(Dtype::kF8E5M2Fnuz), 21);
}

TEST(FormatsTest, CodebookNamesReadBack) {
  std::set<std::string_view> names;
  for (const CodebookInfo& info : AllCodebooks()) {
    EXPECT_TRUE(names.insert(info.name).second) << info.name;
    EXPECT_EQ(CodebookName(info.codebook), info.name);
    EXPECT_EQ(CodebookFromName(info.name), info.codebook);
  }
  EXPECT_EQ(names, (std::set<std::string_view>{"3inst", "mcg", "mul1"}));
  EXPECT_FALSE(CodebookFromName("MCG"));
  EXPECT_FALSE(CodebookFromName(""));
}

// Every row names the number that its marker tensor holds.
TEST(FormatsTest, MarkersOfTheCodebooks) {
  EXPECT_EQ(AllCodebooks()[0].marker_tensor, "");
  EXPECT_EQ(AllCodebooks()[1].multiplier, 3417055213u);
  EXPECT_EQ(AllCodebooks()[2].multiplier, 0x83DCD12Du);
}

// The element types of the safetensors format and their widths.
TEST(FormatsTest, DtypesOfSafetensors) {
  const std::map<std::string, int> bits = {
      {"BOOL", 8},    {"U8", 8},      {"I8", 8},          {"I16", 16},       {"U16", 16}, {"F16", 16},
      {"BF16", 16},   {"I32", 32},    {"U32", 32},        {"F32", 32},       {"F64", 64}, {"I64", 64},
      {"U64", 64},    {"F8_E4M3", 8}, {"F8_E5M2", 8},     {"F8_E8M0", 8},    {"F4", 4},   {"F6_E2M3", 6},
      {"F6_E3M2", 6}, {"C64", 64},    {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}};
  for (const auto& [name, width] : bits) {
    const auto dtype = DtypeFromName(name);
    ASSERT_TRUE(dtype) << name;
    EXPECT_EQ(DtypeName(*dtype), name);
    EXPECT_EQ(DtypeBits(*dtype), width) << name;
  }
  for (const char* name : {"", "f32", "F128", "F32 ", "I4"}) EXPECT_FALSE(DtypeFromName(name)) << name;
}

TEST(FormatsTest, ProjectionNames) {
  EXPECT_EQ(ProjectionName(Projection::kGate), "gate");
  EXPECT_EQ(ProjectionName(Projection::kUp), "up");
  EXPECT_EQ(ProjectionName(Projection::kDown), "down");
}

TEST(FormatsTest, ActivationsRead) {
  const struct {
    const char* text;
    Activation activation;
  } cases[] = {
      {"silu", {}},
      {"silu:7", {.kind = ActivationKind::kSilu, .limit = 7}},
      {"gelu", {.kind = ActivationKind::kGelu}},
      {"gelu:0.5", {.kind = ActivationKind::kGelu, .limit = 0.5}},
      {"relu2", {.kind = ActivationKind::kRelu2}},
      {"situ:4,25", {.kind = ActivationKind::kSitu, .beta = 4, .linear_beta = 25}},
      {"situ:3.5,none", {.kind = ActivationKind::kSitu, .beta = 3.5, .linear_beta = 0}},
      {"swiglu-oai", {.kind = ActivationKind::kSwigluOai, .limit = 7}},
      {"swiglu-oai:5", {.kind = ActivationKind::kSwigluOai, .limit = 5}},
  };
  for (const auto& c : cases) {
    const auto parsed = ParseActivation(c.text);
    ASSERT_TRUE(parsed) << parsed.error().message();
    EXPECT_EQ(*parsed, c.activation) << c.text;
    const auto again = ParseActivation(ActivationText(*parsed));
    ASSERT_TRUE(again) << ActivationText(*parsed);
    EXPECT_EQ(*again, c.activation) << ActivationText(*parsed);
  }
  EXPECT_EQ(ActivationText({.kind = ActivationKind::kSitu}), "situ:4,25");
  EXPECT_EQ(ActivationText({.kind = ActivationKind::kSwigluOai, .limit = 7}), "swiglu-oai:7");
  EXPECT_EQ(ActivationText({}), "silu");
}

TEST(FormatsTest, ActivationsRefused) {
  for (const char* text :
       {"",        "SiLU",     "relu",         "silu:",       "silu:x",           "silu:-1",
        "silu:0",  "silu:nan", "silu:inf",     "silu:1,2",    "relu2:1",          "situ:4,25,1",
        "situ:4,", "situ:,25", "situ:none,25", "swiglu-oai:", "swiglu-oai:1e999", "gelu:0x1",
        "silu:1 ", " silu"}) {
    const auto parsed = ParseActivation(text);
    ASSERT_FALSE(parsed) << text;
    EXPECT_EQ(parsed.error().code(), StatusCode::kUsage) << text;
    EXPECT_THAT(parsed.error().message(), HasSubstr("swiglu-oai")) << text;
  }
}

TEST(FormatsTest, OnlyRelu2HasNoGate) {
  for (const ActivationKind kind :
       {ActivationKind::kSilu, ActivationKind::kGelu, ActivationKind::kSitu, ActivationKind::kSwigluOai}) {
    EXPECT_TRUE(ActivationHasGate(kind));
  }
  EXPECT_FALSE(ActivationHasGate(ActivationKind::kRelu2));
}

TEST(FormatsTest, TileBytes) {
  for (int bits = kMinBits; bits <= kMaxBits; ++bits) {
    EXPECT_EQ(TileBytes(bits), kTileWeights * static_cast<uint64_t>(bits) / 8);
  }
}

}  // namespace
}  // namespace espalier
