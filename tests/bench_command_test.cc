// SPDX-License-Identifier: Apache-2.0
//
// espalier bench: its JSON against what the layer is made of, gates that fail, its refusals, its picture. No
// time is judged.
#include <espalier/checkpoint.h>
#include <espalier/device.h>
#include <espalier/formats.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <string>
#include <vector>

#include "cpu/probes.h"
#include "espalier_command.h"
#include "support/temporary_directory.h"

namespace espalier {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::TemporaryDirectory;

const std::string kBundled = ESPALIER_BUNDLED_CHECKPOINT;
const std::string kFixtures = ESPALIER_TEST_DATA "/fixtures";

// Of the bundled checkpoint: hidden 256, intermediate 512.
constexpr uint64_t kWeightsPerExpert = 3 * 256 * 512;

JsonResult Bench(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "bench");
  return EspalierJson(std::move(arguments));
}

JsonResult BenchBundled(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {kBundled, "--layer", "1", "--samples", "3"});
  return Bench(std::move(arguments));
}

double MedianOf(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  return samples[samples.size() / 2];  // of an odd number
}

TEST(BenchCommand, MeasuresEveryNumberOfTokens) {
  const JsonResult result = BenchBundled({"--tokens", "1,7,40", "--threads", "2"});
  ASSERT_EQ(result.exit_code, 0) << result.standard_error;
  const Json& json = result.document;
  EXPECT_EQ(json["schema"], "espalier.bench/1");
  EXPECT_EQ(json["ok"], true);
  const Json& provenance = json["provenance"];
  EXPECT_EQ(provenance["command"], fmt::format("espalier bench {} --layer 1 --samples 3 --tokens 1,7,40 "
                                               "--threads 2 --json",
                                               kBundled));
  EXPECT_EQ(provenance["version"], EspalierJson({"doctor"}).document["version"]);
  EXPECT_EQ(provenance["commit"], EspalierJson({"doctor"}).document["commit"]);
  EXPECT_EQ(provenance["device"], EspalierJson({"doctor"}).document["cpu"]["model"]);
  EXPECT_EQ(provenance["threads"], 2);
  EXPECT_TRUE(std::regex_match(provenance["time"].get<std::string>(),
                               std::regex(R"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)")));
  const double read_gb_s = json["limits"]["read_gb_s"];
  const double matrix_tflop_s = json["limits"]["matrix_tflop_s"];
  EXPECT_GT(read_gb_s, 0);
  EXPECT_GT(matrix_tflop_s, 0);
  EXPECT_TRUE(json["limits"].at("decode_tweights_s").is_null());
  EXPECT_TRUE(json["limits"].at("decode").is_null());
  EXPECT_EQ(json["limits"].at("decode_rates"), Json::array());

  ASSERT_EQ(json["results"].size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    const Json& row = json["results"][i];
    SCOPED_TRACE(row.dump());
    const uint64_t tokens = std::vector<uint64_t>{1, 7, 40}[i];
    EXPECT_EQ(row["tokens"], tokens);
    EXPECT_EQ(row["geometry"], kBundled);
    EXPECT_EQ(row["layer"], "1");
    EXPECT_EQ(row["tiers"], Json({{"3", 12}, {"4", 4}}));
    EXPECT_EQ(row["codebook"], "mcg");
    EXPECT_EQ(row["executor"], "cpu");
    EXPECT_EQ(row["mode"], "fast");
    EXPECT_EQ(row["top_k"], 4);
    EXPECT_EQ(row["gate_passed"], true);
    EXPECT_GT(row["rel_l2"].get<double>(), 0);
    EXPECT_LE(row["rel_l2"].get<double>(), 6e-3);
    EXPECT_GT(row["cosine"].get<double>(), 0.99998);
    EXPECT_EQ(row["tokens_checked"], tokens);
    EXPECT_LE(row["serial_rel_l2"].get<double>(), 1e-4);
    const auto samples = row["samples_us"].get<std::vector<double>>();
    const auto serial = row["serial_samples_us"].get<std::vector<double>>();
    ASSERT_EQ(samples.size(), 3u);
    ASSERT_EQ(serial.size(), 3u);
    const double median_us = row["median_us"];
    EXPECT_GT(median_us, 0);
    EXPECT_EQ(median_us, MedianOf(samples));
    EXPECT_EQ(row["serial_median_us"], MedianOf(serial));
    EXPECT_DOUBLE_EQ(row["serial_ratio"].get<double>(), MedianOf(serial) / median_us);
    EXPECT_TRUE(row["eager_median_us"].is_null());

    const double experts = row["experts_touched"];
    EXPECT_GE(experts, 4);
    EXPECT_LE(experts, std::min<double>(16, static_cast<double>(4 * tokens)));
    EXPECT_NEAR(row["weights_touched"].get<double>(), experts * kWeightsPerExpert, 0.5);
    const double packed = row["packed_bytes"];
    EXPECT_GE(packed, experts * kWeightsPerExpert * 3 / 8 - 0.5);
    EXPECT_LE(packed, experts * kWeightsPerExpert * 4 / 8 + 0.5);
    EXPECT_NEAR(row["share_of_read"].get<double>(), packed / (median_us * read_gb_s * 1e3), 1e-5);
    const double flops = 2.0 * 4 * static_cast<double>(tokens) * kWeightsPerExpert;
    EXPECT_NEAR(row["share_of_matrix"].get<double>(), flops / (median_us * matrix_tflop_s * 1e6), 1e-9);
    EXPECT_TRUE(row["share_of_decode"].is_null());
  }
  // At 40 tokens and 4 of 16 experts a token, one expert left out would be a chance of 1 in 6000.
  EXPECT_EQ(json["results"][2]["experts_touched"], 16);
  EXPECT_EQ(json["results"][2]["packed_bytes"], kWeightsPerExpert * (12 * 3 + 4 * 4) / 8);
}

// Each weight at the rate of its own format, one after the other.
TEST(BenchCommand, TellsTheShareOfDecodingOnCuda) {
  if (const auto devices = CudaDevices(); !devices) GTEST_SKIP() << devices.error().message();
  const JsonResult result = BenchBundled({"--tokens", "1,40", "--device", "cuda"});
  ASSERT_EQ(result.exit_code, 0) << result.standard_error;
  const Json& limits = result.document["limits"];
  std::map<int, double> rates;
  for (const Json& rate : limits["decode_rates"]) {
    EXPECT_EQ(rate["codebook"], "mcg");
    EXPECT_GT(rate["tweights_s"].get<double>(), 0);
    rates[rate["bits"]] = rate["tweights_s"];
  }
  EXPECT_EQ(limits["decode_rates"].size(), 2u);
  ASSERT_EQ(rates.size(), 2u) << limits;
  const double us_of_k3 = static_cast<double>(kWeightsPerExpert) / (rates.at(3) * 1e6);
  const double us_of_k4 = static_cast<double>(kWeightsPerExpert) / (rates.at(4) * 1e6);
  EXPECT_NEAR(limits["decode_tweights_s"].get<double>(),
              16.0 * kWeightsPerExpert / (12 * us_of_k3 + 4 * us_of_k4) * 1e-6, 1e-9);
  ASSERT_EQ(result.document["results"].size(), 2u);
  for (const Json& row : result.document["results"]) {
    SCOPED_TRACE(row.dump());
    // How many of each were touched follows from weights and bytes.
    const double experts = row["experts_touched"];
    const double bits = row["packed_bytes"].get<double>() * 8 / kWeightsPerExpert;
    const double experts_of_k4 = bits - 3 * experts;
    const double decode_us = (experts - experts_of_k4) * us_of_k3 + experts_of_k4 * us_of_k4;
    const double expected = decode_us / row["median_us"].get<double>();
    EXPECT_NEAR(row["share_of_decode"].get<double>(), expected, 1e-4 * expected);
  }
  const auto text =
      Espalier({"bench", kBundled, "--layer", "1", "--tokens", "8", "--samples", "1", "--device", "cuda"});
  EXPECT_THAT(text.standard_output, AllOf(HasSubstr("\n          decode "), HasSubstr("K3 mcg "),
                                          HasSubstr("K4 mcg "), HasSubstr("mma.m16n8k16")));
}

TEST(BenchCommand, HasNoSerialFormOfOneTier) {
  const JsonResult result =
      Bench({kFixtures + "/v1-k3", "--layer", "1", "--tokens", "5", "--samples", "1", "--top-k", "1"});
  ASSERT_EQ(result.exit_code, 0) << result.standard_error;
  const Json& row = result.document["results"][0];
  EXPECT_EQ(row["tiers"].size(), 1u);
  EXPECT_EQ(row["top_k"], 1);
  EXPECT_TRUE(row["serial_median_us"].is_null());
  EXPECT_TRUE(row["serial_rel_l2"].is_null());
  EXPECT_TRUE(row["serial_ratio"].is_null());
  EXPECT_FALSE(row["median_us"].is_null());
}

TEST(BenchCommand, DrawsAllFromTheSeed) {
  const auto rel_l2 = [](const std::string& seed) {
    const JsonResult result = BenchBundled({"--tokens", "3", "--seed", seed});
    EXPECT_EQ(result.exit_code, 0) << result.standard_error;
    const Json& row = result.document["results"][0];
    return std::pair(row["rel_l2"].get<double>(), row["packed_bytes"].get<uint64_t>());
  };
  EXPECT_EQ(rel_l2("5"), rel_l2("5"));
  EXPECT_NE(rel_l2("5").first, rel_l2("6").first);
}

TEST(BenchCommand, ForcesTheExecutor) {
  testing::SubprocessOptions forced;
  forced.environment = {{"ESPALIER_FORCE_BACKEND", "reference"}};
  const JsonResult result =
      EspalierJson({"bench", kBundled, "--layer", "0", "--tokens", "2", "--samples", "1"}, forced);
  ASSERT_EQ(result.exit_code, 0) << result.standard_error;
  const Json& row = result.document["results"][0];
  EXPECT_EQ(row["executor"], "reference");
  EXPECT_TRUE(row["mode"].is_null());
  EXPECT_LT(row["rel_l2"].get<double>(), 1e-7);
  EXPECT_EQ(EspalierJson({"bench", kBundled, "--layer", "0", "--mode", "exact"}, forced).exit_code, 2);
}

// What is wrong is not timed, and the others still are.
TEST(BenchCommand, TimesNothingThatFailsItsGate) {
  const JsonResult result = BenchBundled({"--tokens", "1,8", "--max-rel-l2", "1e-12"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.document["ok"], false);
  EXPECT_EQ(result.document["gate"]["max_rel_l2"], 1e-12);
  ASSERT_EQ(result.document["results"].size(), 2u);
  for (const Json& row : result.document["results"]) {
    EXPECT_EQ(row["gate_passed"], false);
    EXPECT_GT(row["rel_l2"].get<double>(), 1e-12);
    EXPECT_THAT(row["failure"].get<std::string>(), HasSubstr("against the reference"));
    EXPECT_TRUE(row["median_us"].is_null());
    EXPECT_TRUE(row["serial_median_us"].is_null());
    EXPECT_TRUE(row["samples_us"].empty());
    for (const char* key :
         {"experts_touched", "weights_touched", "packed_bytes", "share_of_read", "share_of_matrix"}) {
      EXPECT_TRUE(row.at(key).is_null()) << key;
    }
  }
  const auto text = Espalier({"bench", kBundled, "--layer", "1", "--tokens", "8", "--max-rel-l2", "0"});
  EXPECT_EQ(text.exit_code, 1);
  EXPECT_THAT(text.standard_output, HasSubstr("gate failed: rel_l2"));
  // A wider bound than the executor's own changes nothing.
  EXPECT_EQ(BenchBundled({"--tokens", "1", "--max-rel-l2", "1"}).document["gate"]["max_rel_l2"], 6e-3);
  EXPECT_EQ(BenchBundled({"--tokens", "1", "--mode", "exact"}).document["gate"]["max_rel_l2"], 2e-6);
  EXPECT_EQ(BenchBundled({"--tokens", "1", "--mode", "int8"}).document["gate"]["max_rel_l2"], 2.5e-2);
}

TEST(BenchCommand, PrintsATable) {
  const auto result = Espalier({"bench", kBundled, "--layer", "1", "--tokens", "1,8", "--samples", "2"});
  ASSERT_EQ(result.exit_code, 0) << result.standard_error;
  EXPECT_THAT(result.standard_output,
              AllOf(HasSubstr("hidden 256, intermediate 512, 16 experts, top-4, silu"),
                    HasSubstr("12 x K3 + 4 x K4, mcg, 2.44 MiB packed"), HasSubstr("limits    read "),
                    HasSubstr("cold      "), HasSubstr("gate      rel_l2 <= 0.006")));
  // Every column in its place: as many fields in the rows as in the head.
  std::vector<size_t> widths;
  std::istringstream lines(result.standard_output);
  for (std::string line; std::getline(lines, line);) {
    if (std::regex_search(line, std::regex("^ +(tokens|[0-9]+) "))) widths.push_back(line.size());
  }
  ASSERT_EQ(widths.size(), 3u) << result.standard_output;
  EXPECT_EQ(widths[0], widths[1]) << result.standard_output;
  EXPECT_EQ(widths[0], widths[2]) << result.standard_output;
}

#ifndef ESPALIER_SANITIZED

// Each takes a quarter of a gigabyte.
TEST(BenchCommand, MakesUpWeightsOfAGeometry) {
  struct Case {
    std::vector<std::string> arguments;
    std::string codebook;
    Json tiers;
    uint64_t code_bits;  // of all experts, for every weight of one
  };
  const std::vector<Case> cases = {
      {{}, "mcg", {{"3", 128}}, 128 * 3},
      {{"--codebook", "mul1", "--tiers", "1:1,8:2,3:125"},
       "mul1",
       {{"1", 1}, {"3", 125}, {"8", 2}},
       1 + 16 + 375},
      {{"--geometry", "qwen3-30b-a3b", "--codebook", "3inst", "--tiers", "4:32,2:96"},
       "3inst",
       {{"2", 96}, {"4", 32}},
       128 + 192},
  };
  for (const Case& test : cases) {
    std::vector<std::string> arguments = test.arguments;
    arguments.insert(arguments.end(), {"--tokens", "2", "--samples", "1"});
    const JsonResult result = Bench(arguments);
    ASSERT_EQ(result.exit_code, 0) << result.standard_error;
    const Json& row = result.document["results"][0];
    EXPECT_EQ(row["geometry"], "qwen3-30b-a3b");
    EXPECT_TRUE(row["layer"].is_null());
    EXPECT_EQ(row["codebook"], test.codebook);
    EXPECT_EQ(row["tiers"], test.tiers);
    EXPECT_EQ(row["top_k"], 8);
    EXPECT_EQ(row["gate_passed"], true);
    EXPECT_EQ(row["serial_median_us"].is_null(), test.tiers.size() == 1);
    constexpr uint64_t kExpert = uint64_t{3} * 2048 * 768;
    const Json& package = result.document["package"];
    EXPECT_EQ(package["hidden_channels"], 2048);
    EXPECT_EQ(package["intermediate_channels"], 768);
    EXPECT_EQ(package["experts"], 128);
    EXPECT_EQ(package["weights"], 128 * kExpert);
    EXPECT_EQ(package["code_bytes"], kExpert / 8 * test.code_bits);
  }
}

#endif  // ESPALIER_SANITIZED

TEST(BenchCommand, RefusesBeforeLongWork) {
  struct Case {
    std::vector<std::string> arguments;
    int exit_code;
    std::string words;
  };
  const std::vector<Case> cases = {
      {{"--geometry", "gpt-5"}, 2, "legal: glm-5.2-tp4, glm-5.2-tp4-64e, kimi-k3-tp8, qwen3-30b-a3b"},
      {{"--codebook", "lut_fp16"}, 2, "legal: 3inst, mcg, mul1"},
      {{"--layer", "0"}, 2, "--layer"},
      {{kBundled}, 2, "--layer"},
      {{kBundled, "--layer", "0", "--geometry", "qwen3-30b-a3b"}, 2, "not both"},
      {{kBundled, "--layer", "0", "--tiers", "3:16"}, 2, "--tiers"},
      {{kBundled, "--layer", "0", "--codebook", "mcg"}, 2, "--codebook"},
      {{kBundled, "--layer", "9"}, 2, "9"},
      {{kBundled + "/absent", "--layer", "0"}, 3, "absent"},
      {{kFixtures + "/v1-coupled", "--layer", "0"}, 5, "not executed yet"},
      {{"--tiers", "3"}, 2, "K:EXPERTS"},
      {{"--tiers", "3:"}, 2, "K:EXPERTS"},
      {{"--tiers", ":128"}, 2, "K:EXPERTS"},
      {{"--tiers", "3:64,"}, 2, "K:EXPERTS"},
      {{"--tiers", "x:128"}, 2, "'x'"},
      {{"--tiers", "3:many"}, 2, "'many'"},
      {{"--tiers", "3:64,3:64"}, 2, "twice"},
      {{"--tiers", "0:128"}, 6, "legal: 1 to 8"},
      {{"--tiers", "9:128"}, 6, "legal: 1 to 8"},
      {{"--tiers", "3:0,4:128"}, 6, "legal: 1 to 128"},
      {{"--tiers", "3:129"}, 6, "legal: 1 to 128"},
      {{"--tiers", "3:100,4:27"}, 6, "found 127 experts in all; legal: 128"},
      {{"--geometry", "kimi-k3-tp8", "--tiers", "3:128"}, 6, "legal: 896"},
      {{"--tokens", "1,,8"}, 2, "--tokens"},
      {{"--tokens", "1,"}, 2, "--tokens"},
      {{"--tokens", "all"}, 2, "'all'"},
      {{"--tokens", "0"}, 6, "legal: 1 to "},
      {{"--tokens", "1,1048577"}, 6, "legal: 1 to 1048576"},
      {{"--samples", "0"}, 6, "legal: 1 to "},
      {{"--samples", "1.5"}, 2, "--samples"},
      {{"--threads", "0"}, 6, "legal: 1 to "},
      {{"--top-k", "0"}, 6, "legal: 1 to "},
      {{"--top-k", "129"}, 6, "legal: 1 to 128"},
      {{"--seed", "-1"}, 2, "--seed"},
      {{"--max-rel-l2", "-1"}, 2, "--max-rel-l2"},
      {{"--max-rel-l2", "nan"}, 2, "--max-rel-l2"},
      {{"--mode", "slow"}, 2, "legal: exact, fast, int8"},
      {{"--device", "tpu"}, 2, "tpu"},
      {{"--device", "cuda:99"}, 7, "cuda"},
      {{"--device", "cuda", "--threads", "2"}, 2, "--threads"},
      {{"--device", "cuda", "--mode", "exact"}, 2, "--mode"},
      {{"--svg", "/nowhere/at/all.svg"}, 3, "/nowhere/at/all.svg"},
      {{"--svg", ""}, 2, "--svg"},
  };
  for (const Case& test : cases) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(test.arguments, " ")));
    // Made-up weights would not fit.
    testing::SubprocessOptions options;
#ifndef ESPALIER_SANITIZED
    options.max_address_space_bytes = uint64_t{160} << 20;
#endif
    std::vector<std::string> arguments = {"bench"};
    arguments.insert(arguments.end(), test.arguments.begin(), test.arguments.end());
    const JsonResult result = EspalierJson(arguments, options);
    EXPECT_EQ(result.exit_code, test.exit_code) << result.standard_error;
    EXPECT_THAT(result.document["error"]["message"].get<std::string>(), HasSubstr(test.words));
  }
}

std::string ReadText(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(BenchCommand, DrawsTimeAgainstTokens) {
  const TemporaryDirectory directory;
  const std::string path = directory / "bench.svg";
  ASSERT_EQ(BenchBundled({"--tokens", "1,8", "--svg", path}).exit_code, 0);
  const std::string svg = ReadText(path);
  EXPECT_THAT(svg, AllOf(HasSubstr("<svg xmlns="), HasSubstr("packed bytes / read rate"),
                         HasSubstr("products / matrix rate"), HasSubstr("tiers one by one"),
                         HasSubstr("cpu fast: 8 tokens, "), HasSubstr("</svg>"), Not(HasSubstr("nan")),
                         Not(HasSubstr("inf"))));
  const std::regex dot("<circle ");
  EXPECT_EQ(std::distance(std::sregex_iterator(svg.begin(), svg.end(), dot), std::sregex_iterator()), 4);
  // Every point lies on the paper.
  const std::regex points(R"(([0-9.-]+),([0-9.-]+))");
  size_t num_points = 0;
  for (std::sregex_iterator it(svg.begin(), svg.end(), points), end; it != end; ++it) {
    ++num_points;
    EXPECT_GE(std::stod((*it)[1]), 80);
    EXPECT_GE(std::stod((*it)[2]), 50);
    EXPECT_LE(std::stod((*it)[2]), 50 + 380);
  }
  EXPECT_GE(num_points, 8u);

  const std::string failed = directory / "failed.svg";
  EXPECT_EQ(BenchBundled({"--tokens", "1", "--max-rel-l2", "0", "--svg", failed}).exit_code, 1);
  EXPECT_THAT(ReadText(failed), HasSubstr("no run passed its gate"));
}

TEST(BenchCommand, WritesNoPictureOverItsInput) {
  const TemporaryDirectory directory;
  const std::filesystem::path copy = directory / "model";
  std::filesystem::copy(kBundled, copy);
  for (const char* name : {"model.safetensors", "config.json"}) {
    const std::string before = ReadText(copy / name);
    EXPECT_EQ(Bench({copy, "--layer", "0", "--svg", copy / name}).exit_code, 2) << name;
    EXPECT_EQ(ReadText(copy / name), before);
  }
  // Nor a part of one where the command fails later.
  EXPECT_EQ(Bench({copy, "--layer", "7", "--svg", directory / "x.svg"}).exit_code, 2);
  std::vector<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(directory.path()))
    left.push_back(entry.path().filename());
  EXPECT_THAT(left, ElementsAre("model"));
}

TEST(CpuProbes, ReadEveryByteOnce) {
  for (const size_t words : {0, 1, 15, 16, 17, 1000, 100'003}) {
    std::vector<uint64_t> buffer(words);
    uint64_t expected = 0;
    for (size_t i = 0; i < words; ++i) expected += buffer[i] = i * 0x9E3779B97F4A7C15u + 1;
    for (const int threads : {1, 2, 7}) {
      EXPECT_EQ(SumWords(std::as_bytes(std::span(buffer)), threads), expected) << words << " " << threads;
    }
  }
}

TEST(CpuProbes, TakeTheProductsThatTheyCount) {
  for (const ProductUnit unit : {ProductUnit::kFp32, ProductUnit::kInt16, ProductUnit::kInt8}) {
    const ProductKernel kernel = FastestProducts(unit);
    SCOPED_TRACE(kernel.name);
    EXPECT_EQ(kernel.run(0), 0);
    EXPECT_EQ(kernel.run(1000), 500.0 * static_cast<double>(kernel.ops_per_round));
  }
}

}  // namespace
}  // namespace espalier
