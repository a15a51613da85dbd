// SPDX-License-Identifier: Apache-2.0
#include "base/text.h"

#include <gtest/gtest.h>
#include <simdjson.h>

#include <string>

namespace espalier {
namespace {

TEST(TextTest, OrdinaryNamesStayAsTheyAre) {
  EXPECT_EQ(Quoted("model.layers.0.mlp"), "'model.layers.0.mlp'");
  EXPECT_EQ(Quoted(""), "''");
  EXPECT_EQ(Quoted("größe"), "'größe'");
}

TEST(TextTest, ControlCharactersAreWrittenOut) {
  EXPECT_EQ(Quoted(std::string_view("a\0b\n\x1b[31m\x7f", 10)), "'a\\x00b\\x0a\\x1b[31m\\x7f'");
}

TEST(TextTest, LongNamesLoseTheirMiddle) {
  EXPECT_EQ(Quoted(std::string(200, 'a')).size(), 202u);
  const std::string shown = Quoted(std::string(100, 'a') + std::string(1000000, 'b') + std::string(100, 'c'));
  EXPECT_EQ(shown, "'" + std::string(100, 'a') + "..." + std::string(100, 'c') + "'");
}

TEST(TextTest, NoCharacterIsCutInTwo) {
  for (size_t shift = 0; shift < 4; ++shift) {
    std::string name(shift, 'a');
    for (int i = 0; i < 300; ++i) name += "\xF0\x9F\x8C\xB3";
    EXPECT_TRUE(simdjson::validate_utf8(Quoted(name))) << shift;
    EXPECT_LT(Quoted(name).size(), 220u);
  }
}

}  // namespace
}  // namespace espalier
