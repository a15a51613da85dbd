// SPDX-License-Identifier: Apache-2.0
#include "base/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace espalier {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The message of the refusal, or "" when the text is accepted.
std::string Refusal(std::string_view text) {
  const Result<JsonDocument> document = JsonDocument::Parse(text, "config.json");
  if (document) return "";
  EXPECT_EQ(document.error().code(), StatusCode::kFormat) << text;
  EXPECT_THAT(document.error().message(), HasSubstr("config.json"));
  return document.error().message();
}

std::string Nested(int depth, const std::string& open, const std::string& close) {
  std::string text;
  for (int i = 0; i < depth; ++i) text += open;
  text += "1";
  for (int i = 0; i < depth; ++i) text += close;
  return text;
}

TEST(JsonTest, ValuesSurviveTheTextTheyCameFrom) {
  Result<JsonDocument> document = Error(StatusCode::kFormat, "not parsed");
  {
    std::string text = R"({"a": [1, -2, 2.5, 18446744073709551615], "b": "\u00e9\n", "c": {"d": null}})";
    document = JsonDocument::Parse(text, "text");
    text.assign(text.size(), 'x');
  }
  ASSERT_TRUE(document) << document.error().message();
  const JsonDocument moved = std::move(*document);
  EXPECT_EQ(moved.root().at_pointer("/a/0").get_uint64().value_unsafe(), 1u);
  EXPECT_EQ(moved.root().at_pointer("/a/1").get_int64().value_unsafe(), -2);
  EXPECT_EQ(moved.root().at_pointer("/a/2").get_double().value_unsafe(), 2.5);
  EXPECT_EQ(moved.root().at_pointer("/a/3").get_uint64().value_unsafe(), UINT64_MAX);
  EXPECT_EQ(moved.root().at_pointer("/b").get_string().value_unsafe(), "\u00e9\n");
  EXPECT_TRUE(moved.root().at_pointer("/c/d").is_null());
}

TEST(JsonTest, AcceptsWhatIsLegal) {
  for (const char* text : {"{}", "[]", "1", "\"a\"", " {\"a\" : 1}\n", "{\"a\":{\"a\":{\"a\":1}}}", "null",
                           "{\"\":1,\"a\":2}", "[{\"a\":1},{\"a\":1}]", "{\"a\":1,\"A\":2}"}) {
    EXPECT_EQ(Refusal(text), "") << text;
  }
}

TEST(JsonTest, RefusesWhatIsNotJson) {
  for (const char* text : {"",
                           " ",
                           "{",
                           "}",
                           "{]",
                           "[1,]",
                           "{\"a\":1,}",
                           "{\"a\"}",
                           "{a:1}",
                           "{'a':1}",
                           "{\"a\":1}}",
                           "{} {}",
                           "{}x",
                           "1 2",
                           "[1] // comment",
                           "/**/{}",
                           "{\"a\":NaN}",
                           "{\"a\":Infinity}",
                           "{\"a\":-}",
                           "{\"a\":01}",
                           "{\"a\":.5}",
                           "{\"a\":1.}",
                           "{\"a\":+1}",
                           "{\"a\":0x1}",
                           "{\"a\":1e}",
                           "{\"a\":True}",
                           "\"a",
                           "\"\\x\"",
                           "\"\\u12\"",
                           "\"\\ud800\"",
                           "\"a\nb\"",
                           "{\"a\":1e999}",
                           "{\"a\":\"\xC0\x80\"}",
                           "\"\xFF\"",
                           "\"\xED\xA0\x80\"",
                           "\xEF\xBB\xBF{}",
                           "{\"a\":123456789012345678901234567890}"}) {
    EXPECT_NE(Refusal(text), "") << text;
  }
  EXPECT_NE(Refusal(std::string_view("{}\0", 3)), "");
  EXPECT_NE(Refusal(std::string_view("{\"a\0b\":1}", 9)), "");
  EXPECT_NE(Refusal(std::string_view("\0{}", 3)), "");
}

TEST(JsonTest, NonFiniteNumbersBecomeNull) {
  EXPECT_EQ(NonFiniteAsNull(R"({"a":NaN,"b":[0.0, Infinity,-Infinity ],"c":NaN})"),
            R"({"a":null,"b":[0.0, null,null ],"c":null})");
  EXPECT_EQ(NonFiniteAsNull(R"({"NaN":"Infinity","\"Infinity":"\\"})"),
            R"({"NaN":"Infinity","\"Infinity":"\\"})");
  // Whatever is no such word stays, to be refused.
  for (const char* text : {"{\"a\":NaNs}", "{\"a\":+Infinity}", "{\"a\":nan}", "{\"a\":\"NaN", "\"\\", ""}) {
    EXPECT_EQ(NonFiniteAsNull(text), text);
  }
}

TEST(JsonTest, RefusesAKeyThatOccursTwice) {
  EXPECT_THAT(Refusal(R"({"a":1,"b":2,"a":1})"), HasSubstr("key 'a' occurs twice"));
  EXPECT_THAT(Refusal(R"({"a":1,"\u0061":2})"), HasSubstr("key 'a' occurs twice"));
  EXPECT_THAT(Refusal(R"({"":1,"":2})"), HasSubstr("key '' occurs twice"));
  EXPECT_THAT(Refusal(R"({"x":[0,{"y":{"k":1,"k":2}}]})"),
              AllOf(HasSubstr("at .'x'[1].'y'"), HasSubstr("key 'k' occurs twice")));
}

TEST(JsonTest, DepthIsCountedExactly) {
  EXPECT_EQ(Refusal(Nested(kMaxJsonDepth, "[", "]")), "");
  EXPECT_THAT(Refusal(Nested(kMaxJsonDepth + 1, "[", "]")), HasSubstr("deeper than 64"));
  EXPECT_EQ(Refusal(Nested(kMaxJsonDepth, "{\"a\":", "}")), "");
  EXPECT_THAT(Refusal(Nested(kMaxJsonDepth + 1, "{\"a\":", "}")), HasSubstr("deeper than 64"));
  std::string empty = Nested(kMaxJsonDepth, "[", "]");
  empty.replace(empty.find('1'), 1, "{}");
  EXPECT_THAT(Refusal(empty), HasSubstr("deeper than 64"));
}

TEST(JsonTest, DepthCannotExhaustTheStack) {
  EXPECT_NE(Refusal(std::string(1000000, '[')), "");
  EXPECT_NE(Refusal(Nested(1000000, "[", "]")), "");
  EXPECT_NE(Refusal(Nested(300000, "{\"a\":", "}")), "");
}

// An index has 500,000 names; comparing each with each would take minutes.
TEST(JsonTest, ManyKeysAreCheckedInLinearTime) {
  std::string text = "{\"weight_map\":{";
  for (int i = 0; i < 500000; ++i) {
    text += "\"model.layers.10.mlp.experts." + std::to_string(i) + ".gate_proj.trellis\":\"a\",";
  }
  const std::string good = text + "\"last\":\"a\"}}";
  const std::string bad = text + "\"model.layers.10.mlp.experts.7.gate_proj.trellis\":\"a\"}}";
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(Refusal(good), "");
  EXPECT_THAT(Refusal(bad), HasSubstr("'model.layers.10.mlp.experts.7.gate_proj.trellis' occurs twice"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

TEST(JsonTest, HostileKeysMakeNoLongMessage) {
  const std::string key(1000000, 'k');
  EXPECT_LT(Refusal("{\"" + key + "\":1,\"" + key + "\":2}").size(), 1000u);
  EXPECT_LT(Refusal("{\"" + key + "\":{\"a\":1,\"a\":2}}").size(), 1000u);
}

TEST(JsonTest, TypeNames) {
  const Result<JsonDocument> document =
      JsonDocument::Parse(R"([{}, [], "a", 1, -1, 18446744073709551615, 1.0, true, null])", "types");
  ASSERT_TRUE(document) << document.error().message();
  std::vector<std::string> names;
  for (const simdjson::dom::element item :
       simdjson::dom::array(document->root().get_array().value_unsafe())) {
    names.emplace_back(JsonTypeName(item));
  }
  EXPECT_THAT(names,
              ::testing::ElementsAre("object", "array", "string", "integer", "negative integer", "integer",
                                     "number with a fraction or exponent", "boolean", "null"));
}

}  // namespace
}  // namespace espalier
