// SPDX-License-Identifier: Apache-2.0
//
// Every layout from disk to output, against answers of an implementation of docs/format.md that shares
// no code with this one: tests/data/fixtures/README.md.
#include <espalier/backend.h>
#include <espalier/checkpoint.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "support/fixture_call.h"
#include "support/random_experts.h"
#include "support/tensor_file.h"

namespace espalier {
namespace {

using test::Compare;
using test::TensorFile;

const std::string kFixtures = std::string(ESPALIER_TEST_DATA) + "/fixtures/";

// Containers with rank-table codebooks: refused by name.
const std::set<std::string> kRefused = {"v1-coupled", "v1-lut-fp16"};

nlohmann::json FixtureList(const std::string& key) {
  return nlohmann::json::parse(std::ifstream(kFixtures + "fixtures.json")).at(key);
}

std::vector<double> Doubles(const std::vector<float>& values) { return {values.begin(), values.end()}; }

TEST(Fixtures, EveryRunAgrees) {
  int runs = 0;
  int refused = 0;
  for (const nlohmann::json& run : FixtureList("runs")) {
    const std::string checkpoint_name = run.at("checkpoint");
    const std::string expected_path = run.at("expected");
    const std::string input_path = run.at("input");
    SCOPED_TRACE(expected_path);
    Result<Checkpoint> checkpoint = Checkpoint::Open(kFixtures + checkpoint_name);
    if (kRefused.contains(checkpoint_name)) {
      ASSERT_FALSE(checkpoint);
      EXPECT_EQ(checkpoint.error().code(), StatusCode::kUnsupported);
      EXPECT_THAT(checkpoint.error().message(), testing::HasSubstr("lut_"));
      ++refused;
      continue;
    }
    ASSERT_TRUE(checkpoint) << checkpoint.error().message();
    const Result<size_t> layer = checkpoint->FindLayer(std::to_string(run.at("layer").get<int>()));
    ASSERT_TRUE(layer) << layer.error().message();
    const Result<PreparedExperts> experts = LoadExperts(*checkpoint, *layer);
    ASSERT_TRUE(experts) << experts.error().message();
    const test::MoeCall call = test::ReadFixtureCall(kFixtures + input_path);
    const std::vector<double> expected = Doubles(TensorFile(kFixtures + expected_path).Read<float>("y"));
    EXPECT_LE(Compare(expected, test::RunCall(*experts, call, "reference").values).rel_l2, 5e-7);
    const test::Difference cpu = Compare(expected, test::RunCall(*experts, call, "cpu").values);
    EXPECT_LE(cpu.rel_l2, 2e-6);
    EXPECT_GE(cpu.cosine, 1 - 1e-10);
    ++runs;
  }
  EXPECT_GE(runs, 40);
  EXPECT_GE(refused, 4);
}

TEST(Fixtures, EveryDecodeAgrees) {
  int decodes = 0;
  for (const nlohmann::json& decode : FixtureList("decodes")) {
    const std::string checkpoint_name = decode.at("checkpoint");
    const std::string expected_path = decode.at("expected");
    if (kRefused.contains(checkpoint_name)) continue;
    SCOPED_TRACE(expected_path);
    const Result<Checkpoint> checkpoint = Checkpoint::Open(kFixtures + checkpoint_name);
    ASSERT_TRUE(checkpoint) << checkpoint.error().message();
    const Result<PreparedLinear> linear = LoadLinear(*checkpoint, decode.at("matrix").get<std::string>());
    ASSERT_TRUE(linear) << linear.error().message();
    const std::vector<float> expected = TensorFile(kFixtures + expected_path).Read<float>("weight");
    EXPECT_LE(Compare(Doubles(expected), Doubles(DecodeMatrix(*linear, false).value())).rel_l2, 5e-7);
    ++decodes;
  }
  EXPECT_GE(decodes, 6);
}

}  // namespace
}  // namespace espalier
