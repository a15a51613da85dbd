// SPDX-License-Identifier: Apache-2.0
//
// The command line as scripts see it: exit codes, JSON names and types, and right answers on every
// fixture.
#include <espalier/device.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "base/file.h"
#include "checkpoint/safetensors.h"
#include "espalier_command.h"
#include "support/checkpoint_writer.h"
#include "support/subprocess.h"
#include "support/temporary_directory.h"

namespace espalier {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using testing::SubprocessOptions;
using testing::SubprocessResult;
using testing::TemporaryDirectory;

const std::string kFixtures = ESPALIER_TEST_DATA "/fixtures";
const std::string kBundled = ESPALIER_BUNDLED_CHECKPOINT;
const std::string kQwen = kFixtures + "/stock-qwen3";
const std::string kQwenInput = kFixtures + "/inputs/in-5-384-3.m7-i64.safetensors";
const std::vector<std::string> kCommands = {"doctor", "inspect", "plan",  "decode",
                                            "run",    "verify",  "bench", "compare"};

std::string Text(const std::vector<std::string>& arguments) {
  std::string text = "espalier";
  for (const std::string& argument : arguments) text += " " + argument;
  return text;
}

std::string ReadBytes(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream bytes;
  bytes << file.rdbuf();
  return bytes.str();
}

void WriteBytes(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

struct FloatTensor {
  std::vector<uint64_t> shape;
  std::vector<float> values;
};

FloatTensor ReadFloatTensor(const std::string& path, const std::string& name) {
  const auto file = PosixFileSystem().Open(path);
  if (!file) {
    ADD_FAILURE() << file.error().message();
    return {};
  }
  const auto header = ReadSafetensorsHeader(**file);
  if (!header || header->tensors.size() != 1 || header->tensors[0].name != name ||
      header->tensors[0].dtype != Dtype::kF32) {
    ADD_FAILURE() << path << " does not hold just the F32 tensor " << name;
    return {};
  }
  FloatTensor tensor{.shape = header->tensors[0].shape,
                     .values = std::vector<float>(header->tensors[0].size_bytes / sizeof(float))};
  EXPECT_TRUE(
      (*file)->ReadAt(header->tensors[0].offset_bytes, std::as_writable_bytes(std::span(tensor.values))));
  return tensor;
}

// Relative L2 error with the rules of the gates: NaN on both sides is left out, on one side it fails.
double RelL2(const FloatTensor& found, const FloatTensor& expected) {
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < expected.values.size(); ++i) {
    const double a = found.values[i];
    const double b = expected.values[i];
    if (std::isnan(a) && std::isnan(b)) continue;
    if (!std::isfinite(a) || !std::isfinite(b)) return INFINITY;
    difference += (a - b) * (a - b);
    norm += b * b;
  }
  if (difference == 0) return 0;
  return std::sqrt(difference / norm);
}

void ExpectClose(const std::string& found_path, const std::string& expected_path, const std::string& name,
                 double bound) {
  const FloatTensor found = ReadFloatTensor(found_path, name);
  const FloatTensor expected = ReadFloatTensor(expected_path, name);
  ASSERT_EQ(found.shape, expected.shape);
  EXPECT_LE(RelL2(found, expected), bound);
}

Json FixtureList() { return Json::parse(ReadBytes(kFixtures + "/fixtures.json")); }

// These containers are recognised and refused by name.
bool IsRefused(const std::string& checkpoint) {
  return checkpoint == "v1-coupled" || checkpoint == "v1-lut-fp16";
}

void CheckFixtureRuns(const std::string& executor, double bound, const std::string& mode = "") {
  const TemporaryDirectory directory;
  const std::string output = directory.path() / "y.safetensors";
  size_t compared = 0;
  size_t refused = 0;
  const Json fixtures = FixtureList();
  for (const Json& run : fixtures.at("runs")) {
    const std::string checkpoint = run.at("checkpoint");
    const std::string input = run.at("input");
    SCOPED_TRACE(checkpoint + " " + input);
    std::vector<std::string> arguments = {"run",        kFixtures + "/" + checkpoint,
                                          "--layer",    std::to_string(run.at("layer").get<int>()),
                                          "--input",    kFixtures + "/" + input,
                                          "-o",         output,
                                          "--executor", executor};
    if (!mode.empty()) arguments.insert(arguments.end(), {"--mode", mode});
    const JsonResult result = EspalierJson(arguments);
    if (IsRefused(checkpoint)) {
      EXPECT_EQ(result.exit_code, 5);
      EXPECT_EQ(result.document.at("error").at("category"), "unsupported");
      ++refused;
      continue;
    }
    ASSERT_EQ(result.exit_code, 0) << result.standard_error;
    EXPECT_EQ(result.document.at("executor"), executor);
    ExpectClose(output, kFixtures + "/" + run.at("expected").get<std::string>(), "y", bound);
    std::filesystem::remove(output);
    ++compared;
  }
  EXPECT_GE(compared, 40u);
  EXPECT_GE(refused, 6u);
}

TEST(CliFixtures, RunsMatchOnTheReference) { CheckFixtureRuns("reference", 5e-7); }

TEST(CliFixtures, RunsMatchOnTheCpu) { CheckFixtureRuns("cpu", 2e-6, "exact"); }

TEST(CliFixtures, FastRunsMatchOnTheCpu) { CheckFixtureRuns("cpu", 6e-3); }

TEST(CliFixtures, RunsOfBytesMatchOnTheCpu) { CheckFixtureRuns("cpu", 2.5e-2, "int8"); }

TEST(CliFixtures, RunsMatchOnAGpu) {
  if (const auto devices = CudaDevices(); !devices) GTEST_SKIP() << devices.error().message();
  CheckFixtureRuns("cuda", 1e-3);
}

TEST(CliFixtures, DecodesMatch) {
  const TemporaryDirectory directory;
  const std::string output = directory.path() / "weight.safetensors";
  size_t compared = 0;
  const Json fixtures = FixtureList();
  for (const Json& decode : fixtures.at("decodes")) {
    const std::string checkpoint = decode.at("checkpoint");
    const std::string matrix = decode.at("matrix");
    SCOPED_TRACE(checkpoint + " " + matrix);
    const JsonResult result = EspalierJson({"decode", kFixtures + "/" + checkpoint, matrix, "-o", output});
    if (IsRefused(checkpoint)) {
      EXPECT_EQ(result.exit_code, 5);
      continue;
    }
    ASSERT_EQ(result.exit_code, 0) << result.standard_error;
    ExpectClose(output, kFixtures + "/" + decode.at("expected").get<std::string>(), "weight", 5e-7);
    std::filesystem::remove(output);
    ++compared;
  }
  EXPECT_GE(compared, 6u);
}

TEST(CliFixtures, VerifyPassesOnAGpu) {
  if (const auto devices = CudaDevices(); !devices) GTEST_SKIP() << devices.error().message();
  for (const std::string& checkpoint :
       {kBundled, kFixtures + "/stock-qwen3", kFixtures + "/stock-deepseek-padded", kFixtures + "/stock-bias",
        kFixtures + "/stock-situ", kFixtures + "/rs-shared-h", kFixtures + "/rs-r7", kFixtures + "/v1-k3"}) {
    SCOPED_TRACE(checkpoint);
    const JsonResult result = EspalierJson({"verify", checkpoint, "--device", "cuda"});
    ASSERT_EQ(result.exit_code, 0) << result.standard_error << result.document;
    EXPECT_GE(result.document.at("layers").size(), 1u);
    for (const Json& layer : result.document.at("layers")) {
      EXPECT_EQ(layer.at("executor"), "cuda");
      EXPECT_TRUE(layer.at("mode").is_null());
      EXPECT_TRUE(layer.at("ok").get<bool>());
      EXPECT_LE(layer.at("rel_l2").get<double>(), 2e-3);
    }
  }
}

// Ranks on the device add up, and an id that the layer does not have is refused before anything is sent.
TEST(CliRun, OnAGpu) {
  if (const auto devices = CudaDevices(); !devices) GTEST_SKIP() << devices.error().message();
  const TemporaryDirectory directory;
  const std::string whole = directory.path() / "whole.safetensors";
  const std::string ranks = directory.path() / "ranks.safetensors";
  const std::string exact = directory.path() / "exact.safetensors";
  const std::vector<std::string> run = {"run", kBundled, "--layer", "0", "--tokens", "33"};
  const auto run_with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), run.begin(), run.end());
    return EspalierJson(more);
  };
  const JsonResult first = run_with({"--device", "cuda:0", "-o", whole});
  ASSERT_EQ(first.exit_code, 0) << first.standard_error;
  EXPECT_EQ(first.document.at("executor"), "cuda");
  EXPECT_EQ(first.document.at("device"), "cuda:0");
  EXPECT_TRUE(first.document.at("mode").is_null());
  ASSERT_EQ(run_with({"--executor", "cuda", "--tp", "2", "--ep", "2", "-o", ranks}).exit_code, 0);
  ASSERT_EQ(run_with({"--executor", "reference", "-o", exact}).exit_code, 0);
  ExpectClose(whole, exact, "y", 1e-3);
  ExpectClose(ranks, exact, "y", 1e-3);

  const std::string input = directory.path() / "input.safetensors";
  const std::vector<float> x(256, 1.0f);
  const int32_t ids[] = {0, 16};
  const float weights[] = {0.5f, 0.5f};
  const TensorData tensors[] = {
      {.name = "x", .dtype = Dtype::kF32, .shape = {1, 256}, .data = std::as_bytes(std::span(x))},
      {.name = "topk_ids", .dtype = Dtype::kI32, .shape = {1, 2}, .data = std::as_bytes(std::span(ids))},
      {.name = "topk_weights",
       .dtype = Dtype::kF32,
       .shape = {1, 2},
       .data = std::as_bytes(std::span(weights))}};
  ASSERT_TRUE(WriteSafetensors(input, tensors));
  const JsonResult outside =
      EspalierJson({"run", kBundled, "--layer", "0", "--device", "cuda", "--input", input});
  EXPECT_EQ(outside.exit_code, 6);
  EXPECT_THAT(outside.standard_error, HasSubstr("topk_ids[0][1] is 16"));
}

TEST(CliFixtures, VerifyPasses) {
  for (const std::string checkpoint :
       {"stock-qwen3", "stock-deepseek-padded", "stock-mixtral", "stock-legacy-signs", "stock-bias",
        "stock-situ", "rs-per-expert", "rs-shared-h", "rs-r7", "v1-k3", "v1-k2-per-expert"}) {
    SCOPED_TRACE(checkpoint);
    const JsonResult result = EspalierJson({"verify", kFixtures + "/" + checkpoint, "--hash"});
    ASSERT_EQ(result.exit_code, 0) << result.standard_error << result.document;
    EXPECT_EQ(result.document.at("schema"), "espalier.verify/1");
    EXPECT_GE(result.document.at("layers").size(), 1u);
    std::map<std::string, size_t> layers;
    for (const Json& layer : result.document.at("layers")) {
      EXPECT_TRUE(layer.at("layer").is_number_integer());
      EXPECT_TRUE(layer.at("ok").get<bool>());
      EXPECT_EQ(layer.at("executor"), "cpu");
      const std::string mode = layer.at("mode");
      ++layers[mode];
      EXPECT_GT(layer.at("rel_l2").get<double>(), 0);
      EXPECT_LE(layer.at("rel_l2").get<double>(), mode == "exact" ? 2e-6 : mode == "fast" ? 6e-3 : 2.5e-2);
      EXPECT_GT(layer.at("cosine").get<double>(), mode == "exact" ? 0.999999 : 0.9997);
    }
    EXPECT_EQ(layers.size(), 3u);
    EXPECT_EQ(layers["exact"], layers["fast"]);
    EXPECT_EQ(layers["int8"], layers["fast"]);
    for (const Json& file : result.document.at("files")) {
      EXPECT_TRUE(file.at("name").is_string());
      EXPECT_TRUE(file.at("ok").get<bool>());
      EXPECT_EQ(file.at("sha256").get<std::string>().size(), 64u);
    }
    for (const Json& problem : result.document.at("problems")) EXPECT_EQ(problem.at("severity"), "warning");
  }
}

TEST(CliHelp, EveryCommandShowsAnExample) {
  for (const std::string& command : kCommands) {
    const SubprocessResult result = Espalier({command, "--help"});
    EXPECT_EQ(result.exit_code, 0) << command;
    EXPECT_THAT(result.standard_output, HasSubstr("Example:\n  espalier " + command));
    EXPECT_THAT(result.standard_output, HasSubstr("--json"));
    EXPECT_EQ(result.standard_error, "");
  }
  const SubprocessResult result = Espalier({"--help"});
  EXPECT_EQ(result.exit_code, 0);
  for (const std::string& command : kCommands)
    EXPECT_THAT(result.standard_output, HasSubstr("\n  " + command));
}

TEST(CliHelp, VersionAndHelpAreJsonWhenAskedFor) {
  EXPECT_THAT(Espalier({"--version"}).standard_output, HasSubstr("espalier 0."));
  EXPECT_TRUE(EspalierJson({"--version"}).document.at("version").is_string());
  EXPECT_TRUE(EspalierJson({"inspect", "--help"}).document.at("help").is_string());
}

struct Refusal {
  std::vector<std::string> arguments;
  int exit_code;
  std::string category;
};

void ExpectRefusals(const std::vector<Refusal>& refusals) {
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(Text(refusal.arguments));
    const SubprocessResult plain = Espalier(refusal.arguments);
    EXPECT_EQ(plain.exit_code, refusal.exit_code) << plain.standard_error;
    EXPECT_EQ(plain.standard_output, "");
    const JsonResult json = EspalierJson(refusal.arguments);
    EXPECT_EQ(json.exit_code, refusal.exit_code);
    ASSERT_TRUE(json.document.contains("error")) << json.document;
    const Json& error = json.document.at("error");
    EXPECT_EQ(error.at("category"), refusal.category);
    EXPECT_FALSE(error.at("message").get<std::string>().empty());
    EXPECT_THAT(json.standard_error, HasSubstr(error.at("message").get<std::string>()));
  }
}

TEST(CliRefusals, Usage) {
  const std::string missing_output = "model.layers.1.mlp.experts.0.up_proj";
  ExpectRefusals({
      {{}, 2, "usage"},
      {{"frobnicate"}, 2, "usage"},
      {{"plan", kQwen}, 2, "usage"},
      {{"inspect"}, 2, "usage"},
      {{"inspect", kQwen, "extra"}, 2, "usage"},
      {{"inspect", kQwen, "--no-such-option"}, 2, "usage"},
      {{"inspect", kQwen, "--layer", "77"}, 2, "usage"},
      {{"inspect", kQwen, "--layer", "0"}, 2, "usage"},
      {{"inspect", kQwen, "--layer"}, 2, "usage"},
      {{"decode", kQwen, missing_output}, 2, "usage"},
      {{"decode", kQwen, "model.no.such.matrix", "-o", "/dev/null"}, 2, "usage"},
      {{"run", kQwen}, 2, "usage"},
      {{"run", kQwen, "--layer", "0"}, 2, "usage"},
      {{"run", kQwen, "--layer", "77"}, 2, "usage"},
      {{"run", kQwen, "--layer", "1", "--layer", "2"}, 2, "usage"},
      {{"run", kQwen, "--layer", "1", "--executor", "gpu"}, 2, "usage"},
      {{"run", kQwen, "--layer", "1", "--executor", "reference", "--mode", "exact"}, 2, "usage"},
      {{"run", kQwen, "--layer", "1", "--mode", "sloppy"}, 2, "usage"},
      {{"run", kQwen, "--layer", "1", "--device", "cuda:"}, 2, "usage"},
      {{"run", kQwen, "--layer", "1", "--device", "cuda:x"}, 2, "usage"},
      {{"run", kQwen, "--layer", "1", "--device", "tpu"}, 2, "usage"},
      {{"run", kQwen, "--layer", "1", "--tokens", "four"}, 2, "usage"},
      {{"run", kQwen, "--layer", "1", "--tokens", "1.5"}, 2, "usage"},
      {{"run", kQwen, "--layer", "1", "--seed", "-1"}, 2, "usage"},
      {{"run", kQwen, "--layer", "1", "--tp", "two"}, 2, "usage"},
      {{"run", kQwen, "--layer", "1", "--activation", "tanh"}, 2, "usage"},
      {{"verify", kQwen, "--layers", "77"}, 2, "usage"},
      {{"verify", kQwen, "--layers", "70-77"}, 2, "usage"},
      {{"verify", kQwen, "--layers", ""}, 2, "usage"},
      {{"verify", kQwen, "--layers", "1,,2"}, 2, "usage"},
      {{"verify", kQwen, "--device", "junk"}, 2, "usage"},
      {{"compare", kQwenInput}, 2, "usage"},
      {{"compare", kQwenInput, kQwenInput, "--max-rel-l2", "-1"}, 2, "usage"},
      {{"compare", kQwenInput, kQwenInput, "--max-rel-l2", "nan"}, 2, "usage"},
      {{"compare", kQwenInput, kQwenInput, "--max-rel-l2", "small"}, 2, "usage"},
  });
}

TEST(CliRefusals, FilesAndFeatures) {
  const TemporaryDirectory directory;
  const std::string broken = directory.path() / "broken.safetensors";
  WriteBytes(broken, ReadBytes(kBundled + "/model.safetensors").substr(0, 100000));
  const std::string absent = directory.path() / "absent";
  const std::string matrix = "model.layers.1.mlp.experts.0.up_proj";
  const std::string unwritable = directory.path() / "no" / "such" / "folder.safetensors";
  ExpectRefusals({
      {{"inspect", absent}, 3, "io"},
      {{"verify", absent}, 3, "io"},
      {{"run", absent, "--layer", "1"}, 3, "io"},
      {{"decode", absent, matrix, "-o", directory.path() / "w"}, 3, "io"},
      {{"decode", kQwen, matrix, "-o", unwritable}, 3, "io"},
      {{"run", kQwen, "--layer", "1", "-o", unwritable}, 3, "io"},
      {{"run", kQwen, "--layer", "1", "--input", absent}, 3, "io"},
      {{"compare", kQwenInput, absent}, 3, "io"},
      {{"compare", kQwen, kQwenInput}, 3, "io"},
      {{"inspect", broken}, 4, "format"},
      {{"verify", broken}, 4, "format"},
      {{"compare", broken, kQwenInput}, 4, "format"},
      {{"run", kQwen, "--layer", "1", "--input", broken}, 4, "format"},
      {{"inspect", kFixtures + "/v1-coupled"}, 5, "unsupported"},
      {{"verify", kFixtures + "/v1-lut-fp16"}, 5, "unsupported"},
      {{"run", kQwen, "--layer", "1", "--tp", "0"}, 6, "geometry"},
      {{"run", kQwen, "--layer", "1", "--tp", "1025"}, 6, "geometry"},
      {{"run", kQwen, "--layer", "1", "--tp", "99999999999999999999"}, 6, "geometry"},
      {{"run", kQwen, "--layer", "1", "--ep", "-1"}, 6, "geometry"},
      {{"run", kQwen, "--layer", "1", "--tp", "1024", "--ep", "1024"}, 6, "geometry"},
      {{"run", kFixtures + "/v1-k3", "--layer", "1", "--tp", "25"}, 6, "geometry"},
      {{"run", kQwen, "--layer", "1", "--tp", "1", "--rank", "1"}, 6, "geometry"},
      {{"run", kQwen, "--layer", "1", "--tokens", "1048577"}, 6, "geometry"},
      {{"run", kQwen, "--layer", "1", "--device", "cuda:999"}, 7, "device"},
      {{"verify", kQwen, "--device", "cuda:999"}, 7, "device"},
  });
}

TEST(CliRefusals, NoGpu) {
  if (CudaDevices()) GTEST_SKIP() << "there is a GPU here";
  ExpectRefusals({
      {{"run", kQwen, "--layer", "1", "--device", "cuda"}, 7, "device"},
      {{"run", kQwen, "--layer", "1", "--device", "cuda:3"}, 7, "device"},
      {{"run", kQwen, "--layer", "1", "--executor", "cuda"}, 7, "device"},
      {{"verify", kQwen, "--device", "cuda"}, 7, "device"},
  });
}

TEST(CliRefusals, AnExecutorOnTheWrongDevice) {
  ExpectRefusals({
      {{"run", kQwen, "--layer", "1", "--device", "cpu", "--executor", "cuda"}, 2, "usage"},
  });
  SubprocessOptions options;
  options.environment = {{"ESPALIER_FORCE_BACKEND", "cuda"}};
  const JsonResult forced = EspalierJson({"run", kQwen, "--layer", "1", "--device", "cpu"}, options);
  EXPECT_EQ(forced.exit_code, 2);
  EXPECT_THAT(forced.standard_error, HasSubstr("the executor is cuda, which runs on a GPU"));
}

TEST(CliRefusals, ATpErrorNamesTheLegalSizes) {
  const JsonResult result = EspalierJson({"run", kBundled, "--layer", "0", "--tp", "0"});
  EXPECT_EQ(result.exit_code, 6);
  EXPECT_EQ(result.document.at("error").at("legal_tp"), Json({1, 2, 3, 4}));
}

// The sum over all ranks is the whole, and so is the sum of ranks run one by one.
TEST(CliRun, RanksAddUpToTheLayer) {
  const TemporaryDirectory directory;
  const std::string whole = directory.path() / "whole.safetensors";
  const std::string sum = directory.path() / "sum.safetensors";
  for (const std::string& checkpoint :
       {kFixtures + "/rs-shared-h", kFixtures + "/v1-k3", std::string(kQwen)}) {
    const std::string layer = checkpoint == kFixtures + "/rs-shared-h" ? "3" : "1";
    const auto run = [&](const std::string& output, std::vector<std::string> more) {
      std::vector<std::string> arguments = {"run",      checkpoint, "--layer", layer,
                                            "--tokens", "9",        "-o",      output};
      arguments.insert(arguments.end(), more.begin(), more.end());
      const JsonResult result = EspalierJson(arguments);
      EXPECT_EQ(result.exit_code, 0) << result.standard_error;
      return result;
    };
    run(whole, {});
    for (const std::vector<std::string>& ranks :
         {std::vector<std::string>{"--tp", "2"}, {"--tp", "3", "--ep", "2"}, {"--tp", "8"}}) {
      const JsonResult result = run(sum, ranks);
      EXPECT_EQ(result.document.at("tp"), std::stoi(ranks[1]));
      const JsonResult compared = EspalierJson({"compare", sum, whole, "--max-rel-l2", "2e-6"});
      EXPECT_EQ(compared.exit_code, 0) << compared.document.dump();
    }
    const JsonResult part = run(sum, {"--tp", "2", "--rank", "1"});
    EXPECT_EQ(part.document.at("rank"), 1);
    EXPECT_EQ(EspalierJson({"compare", sum, whole, "--max-rel-l2", "1e-2"}).exit_code, 1)
        << "one rank is not the whole";
  }
}

TEST(CliInspect, BundledCheckpoint) {
  const JsonResult result = EspalierJson({"inspect", kBundled});
  ASSERT_EQ(result.exit_code, 0) << result.standard_error;
  const Json& json = result.document;
  EXPECT_EQ(json.at("schema"), "espalier.inspect/1");
  EXPECT_EQ(json.at("layout"), "stock");
  EXPECT_EQ(json.at("architecture"), "Qwen3MoeForCausalLM");
  const Json geometry = {{"experts", 16},        {"hidden_channels", 256},     {"intermediate_channels", 512},
                         {"config_hidden", 256}, {"config_intermediate", 512}, {"top_k", 4},
                         {"slices", 1},          {"activation", "silu"},       {"activation_limit", nullptr}};
  EXPECT_EQ(json.at("geometry"), geometry);
  EXPECT_EQ(json.at("codebooks"), Json({{"mcg", 4 * 16 * 3}}));
  ASSERT_EQ(json.at("layers").size(), 4u);
  for (int i = 0; i < 4; ++i) {
    const Json& layer = json.at("layers")[i];
    EXPECT_EQ(layer.at("layer"), i);
    const Json rates = {{"3", 12}, {"4", 4}};
    EXPECT_EQ(layer.at("bits"), Json({{"gate", rates}, {"up", rates}, {"down", rates}}));
    const int weights_per_matrix = 256 * 512;
    EXPECT_EQ(layer.at("code_bytes"), 3 * (12 * 3 + 4 * 4) * weights_per_matrix / 8);
    EXPECT_DOUBLE_EQ(layer.at("bits_per_weight").get<double>(), 3.25);
    EXPECT_TRUE(layer.at("vector_bytes").is_number_integer());
  }
  ASSERT_EQ(json.at("files").size(), 1u);
  EXPECT_EQ(json.at("files")[0].at("name"), "model.safetensors");
  EXPECT_EQ(json.at("files")[0].at("bytes"), std::filesystem::file_size(kBundled + "/model.safetensors"));
  EXPECT_TRUE(json.at("files")[0].at("tensors").is_number_integer());
  EXPECT_EQ(json.at("legal_tp"), Json({1, 2, 3, 4}));
  EXPECT_TRUE(json.at("problems").is_array());
  EXPECT_FALSE(json.contains("tensors"));
  EXPECT_GT(json.at("dense").at("matrices"), 0);
}

TEST(CliInspect, OneLayerAndTensors) {
  const JsonResult result = EspalierJson({"inspect", kQwen, "--layer", "2", "--tensors"});
  ASSERT_EQ(result.exit_code, 0) << result.standard_error;
  ASSERT_EQ(result.document.at("layers").size(), 1u);
  EXPECT_EQ(result.document.at("layers")[0].at("layer"), 2);
  uint64_t tensors = 0;
  for (const Json& file : result.document.at("files")) tensors += file.at("tensors").get<uint64_t>();
  ASSERT_EQ(result.document.at("tensors").size(), tensors);
  for (const Json& tensor : result.document.at("tensors")) {
    EXPECT_TRUE(tensor.at("name").is_string());
    EXPECT_TRUE(tensor.at("dtype").is_string());
    EXPECT_TRUE(tensor.at("shape").is_array());
    EXPECT_TRUE(tensor.at("file").is_string());
    EXPECT_TRUE(tensor.at("offset_bytes").is_number_unsigned());
    EXPECT_TRUE(tensor.at("size_bytes").is_number_unsigned());
  }
}

TEST(CliInspect, LayoutsAndSlices) {
  const std::map<std::string, std::pair<std::string, int>> expected = {
      {"stock-mixtral", {"stock", 1}},     {"rs-per-expert", {"rank-sliced", 4}},
      {"rs-shared-h", {"rank-sliced", 4}}, {"rs-r7", {"r7", 1}},
      {"v1-k3", {"exl3-v1", 1}},           {"v1-k2-per-expert", {"exl3-v1", 1}},
  };
  for (const auto& [checkpoint, what] : expected) {
    SCOPED_TRACE(checkpoint);
    const JsonResult result = EspalierJson({"inspect", kFixtures + "/" + checkpoint});
    ASSERT_EQ(result.exit_code, 0) << result.standard_error;
    EXPECT_EQ(result.document.at("layout"), what.first);
    EXPECT_EQ(result.document.at("geometry").at("slices"), what.second);
    EXPECT_EQ(result.document.at("geometry").at("hidden_channels"), 128);
    for (const Json& layer : result.document.at("layers")) {
      EXPECT_GT(layer.at("bits_per_weight").get<double>(), 0);
      EXPECT_GT(layer.at("vector_bytes").get<uint64_t>(), 0u);
      for (const char* projection : {"gate", "up", "down"}) {
        EXPECT_FALSE(layer.at("bits").at(projection).empty());
      }
    }
  }
}

// Shared vectors count once: the shared-H pack stores fewer of them than the per-expert one.
TEST(CliInspect, SharedVectorsCountOnce) {
  const testing::ModelShape shape{.experts = 4,
                                  .intermediate_channels = 512,
                                  .slices = 4,
                                  .bits_by_expert = true,
                                  .shared_hidden = true,
                                  .dense = false};
  const testing::CheckpointModel model = testing::RandomModel(shape, 7);
  uint64_t bytes[2];
  for (const bool shared : {false, true}) {
    const TemporaryDirectory directory;
    testing::WriteFiles(testing::WriteRankSliced(model, {.shared_h = shared}).Serialize(), directory.path());
    const JsonResult result = EspalierJson({"inspect", directory.path()});
    ASSERT_EQ(result.exit_code, 0) << result.standard_error;
    bytes[shared ? 1 : 0] = result.document.at("layers")[0].at("vector_bytes");
  }
  // Per expert and slice: gate and up suh [128], svh [128]; down suh [128], svh [128]; fp16.
  EXPECT_EQ(bytes[0], 4u * 4 * 6 * 128 * 2);
  EXPECT_LT(bytes[1], bytes[0]);
}

TEST(CliInspect, TextShowsEveryLayer) {
  const SubprocessResult result = Espalier({"inspect", kBundled});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.standard_output, HasSubstr("3333333333334444"));
  EXPECT_THAT(result.standard_output, HasSubstr("Qwen3MoeForCausalLM"));
  EXPECT_THAT(result.standard_output, HasSubstr("K3"));
}

TEST(CliDoctor, Json) {
  const JsonResult result = EspalierJson({"doctor"});
  ASSERT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.document.at("schema"), "espalier.doctor/1");
  for (const char* key : {"version", "commit", "compiler", "cuda", "mpi", "nccl"}) {
    EXPECT_FALSE(result.document.at(key).get<std::string>().empty()) << key;
  }
  EXPECT_GE(result.document.at("threads"), 1);
  const Json& backends = result.document.at("backends");
  ASSERT_GE(backends.size(), 2u);
  EXPECT_EQ(backends.back().at("name"), "reference");
  for (const Json& backend : backends)
    EXPECT_EQ(backend.at("chosen").get<bool>(), backend.at("name") == "cpu") << backend;
  EXPECT_TRUE(result.document.at("cuda_devices").is_array());
  EXPECT_EQ(result.document.at("cuda_devices").empty(), !CudaDevices());
}

TEST(CliDoctor, AForcedExecutorIsChosen) {
  SubprocessOptions options;
  options.environment = {{"ESPALIER_FORCE_BACKEND", "reference"}};
  const JsonResult forced = EspalierJson({"doctor"}, options);
  EXPECT_TRUE(forced.document.at("backends").back().at("chosen").get<bool>());
  const JsonResult run = EspalierJson({"run", kQwen, "--layer", "1"}, options);
  EXPECT_EQ(run.document.at("executor"), "reference");
  EXPECT_TRUE(run.document.at("mode").is_null());
}

TEST(CliRun, Json) {
  const TemporaryDirectory directory;
  const std::string output = directory.path() / "y.safetensors";
  const JsonResult result =
      EspalierJson({"run", kQwen, "--layer", "1", "--tokens", "3", "-o", output, "--tp", "1", "--ep", "1"});
  ASSERT_EQ(result.exit_code, 0) << result.standard_error;
  const Json& json = result.document;
  EXPECT_EQ(json.at("schema"), "espalier.run/1");
  EXPECT_EQ(json.at("layer"), 1);
  EXPECT_EQ(json.at("tokens"), 3);
  EXPECT_EQ(json.at("executor"), "cpu");
  EXPECT_EQ(json.at("mode"), "fast");
  EXPECT_TRUE(json.at("seconds").is_number_float());
  EXPECT_EQ(json.at("tp"), 1);
  EXPECT_EQ(json.at("output"), output);
  EXPECT_EQ(ReadFloatTensor(output, "y").shape, (std::vector<uint64_t>{3, 384}));

  const JsonResult reference = EspalierJson({"run", kQwen, "--layer", "1", "--executor", "reference"});
  EXPECT_TRUE(reference.document.at("mode").is_null());
  EXPECT_TRUE(reference.document.at("output").is_null());
  EXPECT_EQ(reference.document.at("tokens"), 4);
}

TEST(CliRun, TheSameSeedGivesTheSameBytes) {
  const TemporaryDirectory directory;
  std::map<std::string, std::string> bytes;
  for (const std::string name : {"first", "second", "other"}) {
    const std::string output = directory.path() / name;
    const std::string seed = name == "other" ? "12" : "11";
    ASSERT_EQ(
        Espalier({"run", kQwen, "--layer", "1", "--tokens", "9", "--seed", seed, "-o", output}).exit_code, 0);
    bytes[name] = ReadBytes(output);
  }
  EXPECT_EQ(bytes["first"], bytes["second"]);
  EXPECT_NE(bytes["first"], bytes["other"]);
}

TEST(CliRun, NoTokens) {
  const TemporaryDirectory directory;
  const std::string output = directory.path() / "y.safetensors";
  ASSERT_EQ(Espalier({"run", kQwen, "--layer", "1", "--tokens", "0", "-o", output}).exit_code, 0);
  EXPECT_EQ(ReadFloatTensor(output, "y").shape, (std::vector<uint64_t>{0, 384}));
}

TEST(CliRun, AnAssumedActivationIsSaid) {
  const TemporaryDirectory directory;
  const testing::CheckpointModel model = testing::RandomModel({.dense = false}, 3);
  testing::CheckpointFiles files = testing::WriteStock(model);
  files.config().erase("hidden_act");
  testing::WriteFiles(files.Serialize(), directory.path());
  const JsonResult assumed = EspalierJson({"run", directory.path(), "--layer", "1"});
  ASSERT_EQ(assumed.exit_code, 0) << assumed.standard_error;
  EXPECT_THAT(assumed.standard_error, HasSubstr("assuming silu"));
  EXPECT_EQ(assumed.document.at("activation"), "silu");
  EXPECT_TRUE(EspalierJson({"inspect", directory.path()}).document.at("geometry").at("activation").is_null());
  const JsonResult stated =
      EspalierJson({"run", directory.path(), "--layer", "1", "--activation", "situ:4,25"});
  EXPECT_THAT(stated.standard_error, Not(HasSubstr("assuming")));
  EXPECT_EQ(stated.document.at("activation"), "situ:4,25");
}

// Tensors of a run input, one of them changed or left out.
class InputFile {
 public:
  InputFile() {
    x_.assign(2 * 384, 0.5f);
    ids_ = {0, 1, 4, -1};
    weights_ = {0.5f, 0.5f, 1.0f, 0.25f};
    tensors_ = {{"x", Dtype::kF32, {2, 384}, std::as_bytes(std::span(x_))},
                {"topk_ids", Dtype::kI64, {2, 2}, std::as_bytes(std::span(ids_))},
                {"topk_weights", Dtype::kF32, {2, 2}, std::as_bytes(std::span(weights_))}};
  }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  TensorData& tensor(size_t index) { return tensors_[index]; }
  std::vector<int64_t>& ids() { return ids_; }
  void Remove(size_t index) { tensors_.erase(tensors_.begin() + static_cast<std::ptrdiff_t>(index)); }

  JsonResult Run() {
    const std::string path = directory_.path() / "input.safetensors";
    EXPECT_TRUE(WriteSafetensors(path, tensors_));
    return EspalierJson({"run", kQwen, "--layer", "1", "--input", path});
  }

 private:
  TemporaryDirectory directory_;
  std::vector<float> x_;
  std::vector<int64_t> ids_;
  std::vector<float> weights_;
  std::vector<TensorData> tensors_;
};

TEST(CliRunInput, AGoodOneRuns) { EXPECT_EQ(InputFile().Run().exit_code, 0); }

TEST(CliRunInput, MissingTensorsAreRefused) {
  for (size_t i = 0; i < 3; ++i) {
    InputFile input;
    const std::string name = input.tensor(i).name;
    input.Remove(i);
    const JsonResult result = input.Run();
    EXPECT_EQ(result.exit_code, 6);
    EXPECT_THAT(result.standard_error, HasSubstr("'" + name + "' is missing"));
  }
}

TEST(CliRunInput, WrongDtypesAreRefused) {
  const Dtype wrong[] = {Dtype::kI32, Dtype::kF64, Dtype::kI32};
  for (size_t i = 0; i < 3; ++i) {
    InputFile input;
    TensorData& tensor = input.tensor(i);
    tensor.dtype = wrong[i];
    const JsonResult result = input.Run();
    EXPECT_EQ(result.exit_code, 6);
    EXPECT_THAT(result.standard_error, HasSubstr(std::string(DtypeName(wrong[i]))));
  }
}

TEST(CliRunInput, WrongShapesAreRefused) {
  const std::vector<std::pair<size_t, std::vector<uint64_t>>> shapes = {
      {0, {768}},  {0, {1, 2, 384}}, {0, {384, 2}}, {0, {4, 192}}, {1, {4}},
      {1, {4, 1}}, {1, {1, 4}},      {2, {4}},      {2, {4, 1}},   {2, {1, 4}}};
  for (const auto& [index, shape] : shapes) {
    InputFile input;
    input.tensor(index).shape = shape;
    const JsonResult result = input.Run();
    EXPECT_EQ(result.exit_code, 6) << input.tensor(index).name;
    EXPECT_EQ(result.document.at("error").at("category"), "geometry");
  }
}

TEST(CliRunInput, IdsOutsideTheExpertsAreRefused) {
  for (const int64_t id : {int64_t{5}, int64_t{-2}, INT64_MAX, INT64_MIN, int64_t{1} << 32}) {
    InputFile input;
    input.ids()[2] = id;
    const JsonResult result = input.Run();
    EXPECT_EQ(result.exit_code, 6) << id;
    EXPECT_THAT(result.standard_error, HasSubstr(std::to_string(id)));
  }
}

TEST(CliDecode, SlicesAreConcatenated) {
  const TemporaryDirectory directory;
  const std::string checkpoint = kFixtures + "/rs-per-expert";
  for (const std::string projection : {"gate_proj", "up_proj", "down_proj"}) {
    SCOPED_TRACE(projection);
    const std::string name = "model.layers.3.mlp.experts.1." + projection;
    const std::string whole_path = directory.path() / "whole.safetensors";
    const JsonResult result = EspalierJson({"decode", checkpoint, name, "-o", whole_path});
    ASSERT_EQ(result.exit_code, 0) << result.standard_error;
    const FloatTensor whole = ReadFloatTensor(whole_path, "weight");
    const bool down = projection == "down_proj";
    uint64_t first = 0;
    for (int slice = 0; slice < 4; ++slice) {
      const std::string path = directory.path() / "slice.safetensors";
      ASSERT_EQ(
          Espalier({"decode", checkpoint, name + ".rank" + std::to_string(slice), "-o", path}).exit_code, 0);
      const FloatTensor part = ReadFloatTensor(path, "weight");
      for (uint64_t row = 0; row < part.shape[0]; ++row) {
        const uint64_t whole_row = down ? first + row : row;
        const uint64_t whole_column = down ? 0 : first;
        ASSERT_EQ(std::memcmp(part.values.data() + row * part.shape[1],
                              whole.values.data() + whole_row * whole.shape[1] + whole_column,
                              part.shape[1] * sizeof(float)),
                  0)
            << "slice " << slice << " row " << row;
      }
      first += part.shape[down ? 0 : 1];
    }
    EXPECT_EQ(first, whole.shape[down ? 0 : 1]);
    EXPECT_EQ(Espalier({"decode", checkpoint, name, "--inner", "-o", whole_path}).exit_code, 2);
    EXPECT_EQ(Espalier({"decode", checkpoint, name + ".rank0", "--inner", "-o", whole_path}).exit_code, 0);
  }
}

TEST(CliDecode, DenseMatricesAndTheFilesOwnNames) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() / "w.safetensors";
  const JsonResult dense = EspalierJson({"decode", kBundled, "model.layers.0.self_attn.q_proj", "-o", path});
  ASSERT_EQ(dense.exit_code, 0) << dense.standard_error;
  EXPECT_EQ(dense.document.at("schema"), "espalier.decode/1");
  EXPECT_EQ(ReadFloatTensor(path, "weight").shape, (std::vector<uint64_t>{256, 256}));

  ASSERT_EQ(
      Espalier({"decode", kFixtures + "/stock-mixtral", "model.layers.0.mlp.experts.0.down_proj", "-o", path})
          .exit_code,
      0);
  const std::string canonical = ReadBytes(path);
  ASSERT_EQ(Espalier({"decode", kFixtures + "/stock-mixtral", "model.layers.0.block_sparse_moe.experts.0.w2",
                      "-o", path})
                .exit_code,
            0);
  EXPECT_EQ(ReadBytes(path), canonical);
}

// Sets bytes of one tensor in a copy of a fixture.
class PatchedCheckpoint {
 public:
  explicit PatchedCheckpoint(const std::string& name) {
    std::filesystem::copy(kFixtures + "/" + name, directory_.path() / name);
    path_ = directory_.path() / name;
  }

  std::string path() const { return path_; }

  // Overwrites `bytes` at `offset` of the first tensor, by name, that ends in `suffix`; gives its name.
  std::string Patch(const std::string& suffix, uint64_t offset, const std::string& bytes) {
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      if (entry.path().extension() != ".safetensors") continue;
      const auto file = PosixFileSystem().Open(entry.path());
      const auto header = ReadSafetensorsHeader(**file);
      for (const TensorInfo& tensor : header->tensors) {
        if (!tensor.name.ends_with(suffix)) continue;
        std::fstream stream(entry.path(), std::ios::binary | std::ios::in | std::ios::out);
        stream.seekp(static_cast<std::streamoff>(tensor.offset_bytes + offset));
        stream.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
        return tensor.name;
      }
    }
    ADD_FAILURE() << "no tensor ends in " << suffix;
    return "";
  }

 private:
  TemporaryDirectory directory_;
  std::string path_;
};

TEST(CliVerify, FindsNanAndInfInScaleVectors) {
  const std::map<std::string, std::string> values = {{"NaN", {"\x01\x7e", 2}}, {"infinite", {"\x00\xfc", 2}}};
  for (const auto& [word, bytes] : values) {
    for (const std::string suffix :
         {"experts.1.up_proj.suh", "experts.0.down_proj.svh", "experts.1.up_proj.bias"}) {
      SCOPED_TRACE(word + " in " + suffix);
      PatchedCheckpoint checkpoint("stock-bias");
      const std::string tensor = checkpoint.Patch(suffix, 2 * 17, bytes);
      const JsonResult result = EspalierJson({"verify", checkpoint.path()});
      EXPECT_EQ(result.exit_code, 1);
      EXPECT_FALSE(result.document.at("ok").get<bool>());
      EXPECT_FALSE(result.document.at("layers")[0].at("ok").get<bool>());
      const Json& problem = result.document.at("problems").back();
      EXPECT_EQ(problem.at("severity"), "error");
      EXPECT_EQ(problem.at("tensor"), tensor);
      EXPECT_FALSE(problem.at("file").is_null());
      EXPECT_THAT(problem.at("message").get<std::string>(), HasSubstr("element 17 is " + word));
      EXPECT_EQ(Espalier({"verify", checkpoint.path()}).exit_code, 1);
    }
  }
}

TEST(CliVerify, FindsNanInDenseMatrices) {
  PatchedCheckpoint checkpoint("stock-qwen3");
  const auto inspect = EspalierJson({"inspect", checkpoint.path(), "--tensors"});
  ASSERT_GT(inspect.document.at("dense").at("matrices"), 0);
  const std::string tensor = checkpoint.Patch("layers.0.mlp.up_proj.svh", 0, {"\x01\x7e", 2});
  const JsonResult result = EspalierJson({"verify", checkpoint.path()});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.document.at("problems").back().at("tensor"), tensor);
  EXPECT_EQ(Espalier({"verify", checkpoint.path(), "--layers", "1-2"}).exit_code, 0);
}

TEST(CliVerify, AWrongMarkerIsAFormatError) {
  PatchedCheckpoint checkpoint("stock-qwen3");
  checkpoint.Patch(".mcg", 0, {"\x01\x02\x03\x04", 4});
  EXPECT_EQ(Espalier({"inspect", checkpoint.path()}).exit_code, 0);
  EXPECT_EQ(Espalier({"verify", checkpoint.path()}).exit_code, 4);
}

TEST(CliVerify, HashesAreComparedOnDemand) {
  PatchedCheckpoint checkpoint("v1-k3");
  checkpoint.Patch("codes", 5, {"\x5a\xa5", 2});
  EXPECT_EQ(Espalier({"verify", checkpoint.path()}).exit_code, 0);
  const JsonResult result = EspalierJson({"verify", checkpoint.path(), "--hash"});
  EXPECT_EQ(result.exit_code, 1);
  size_t bad = 0;
  for (const Json& file : result.document.at("files")) bad += file.at("ok").get<bool>() ? 0 : 1;
  EXPECT_EQ(bad, 1u);
}

TEST(CliVerify, LayersCanBeChosen) {
  const std::map<std::string, std::vector<int>> choices = {{"all", {0, 1, 2, 3}}, {"2", {2}},
                                                           {"3,1", {1, 3}},       {"1-2", {1, 2}},
                                                           {"0-1,3", {0, 1, 3}},  {"2-9", {2, 3}}};
  for (const auto& [choice, expected] : choices) {
    SCOPED_TRACE(choice);
    const JsonResult result = EspalierJson({"verify", kBundled, "--layers", choice});
    ASSERT_EQ(result.exit_code, 0) << result.standard_error;
    std::vector<int> layers;
    for (const Json& layer : result.document.at("layers")) {
      if (layer.at("mode") == "exact") layers.push_back(layer.at("layer"));
    }
    EXPECT_EQ(layers, expected);
  }
}

TEST(CliVerify, NonZeroScalesInPaddingAreAWarning) {
  PatchedCheckpoint checkpoint("stock-deepseek-padded");
  const JsonResult before = EspalierJson({"verify", checkpoint.path(), "--layers", "1"});
  ASSERT_EQ(before.exit_code, 0) << before.standard_error;
  // The config's intermediate size is 200 of 256.
  checkpoint.Patch("layers.1.mlp.experts.0.up_proj.svh", 2 * 201, {"\x00\x3c", 2});
  const JsonResult after = EspalierJson({"verify", checkpoint.path(), "--layers", "1"});
  EXPECT_EQ(after.exit_code, 0);
  const Json& problem = after.document.at("problems").back();
  EXPECT_EQ(problem.at("severity"), "warning");
  EXPECT_THAT(problem.at("message").get<std::string>(), HasSubstr("padding"));
}

// Two files with one tensor each.
class Pair {
 public:
  template <typename T>
  JsonResult Compare(Dtype dtype, const std::vector<T>& a, const std::vector<T>& b,
                     const std::vector<std::string>& more = {}) {
    Write("a", "t", dtype, {a.size()}, std::as_bytes(std::span(a)));
    Write("b", "t", dtype, {b.size()}, std::as_bytes(std::span(b)));
    return Run(more);
  }
  void Write(const std::string& file, const std::string& name, Dtype dtype, std::vector<uint64_t> shape,
             std::span<const std::byte> data) {
    const TensorData tensor{.name = name, .dtype = dtype, .shape = std::move(shape), .data = data};
    EXPECT_TRUE(WriteSafetensors(directory_.path() / file, std::span(&tensor, 1)));
  }
  JsonResult Run(const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {"compare", directory_.path() / "a", directory_.path() / "b"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return EspalierJson(arguments);
  }

 private:
  TemporaryDirectory directory_;
};

TEST(CliCompare, EqualFilesPass) {
  const JsonResult result =
      EspalierJson({"compare", kBundled + "/model.safetensors", kBundled + "/model.safetensors"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.document.at("schema"), "espalier.compare/1");
  EXPECT_TRUE(result.document.at("ok").get<bool>());
  for (const Json& tensor : result.document.at("tensors")) {
    EXPECT_EQ(tensor.at("rel_l2"), 0.0);
    EXPECT_EQ(tensor.at("cosine"), 1.0);
    EXPECT_EQ(tensor.at("max_abs"), 0.0);
  }
}

TEST(CliCompare, TheBoundDecides) {
  const std::vector<float> a = {3, 4.5f};
  const std::vector<float> b = {3, 4};
  const JsonResult strict = Pair().Compare(Dtype::kF32, a, b);
  EXPECT_EQ(strict.exit_code, 1);
  EXPECT_FALSE(strict.document.at("ok").get<bool>());
  const Json& tensor = strict.document.at("tensors")[0];
  EXPECT_EQ(tensor.at("name"), "t");
  EXPECT_DOUBLE_EQ(tensor.at("rel_l2").get<double>(), 0.1);
  EXPECT_DOUBLE_EQ(tensor.at("max_abs").get<double>(), 0.5);
  EXPECT_NEAR(tensor.at("cosine").get<double>(), 27 / (5 * std::sqrt(29.25)), 1e-12);
  EXPECT_EQ(Pair().Compare(Dtype::kF32, a, b, {"--max-rel-l2", "0.1000001"}).exit_code, 0);
  EXPECT_EQ(Pair().Compare(Dtype::kF32, a, b, {"--max-rel-l2", "0.0999999"}).exit_code, 1);
}

TEST(CliCompare, NanAndZeroRules) {
  const float nan = std::nanf("");
  const std::vector<std::string> wide = {"--max-rel-l2", "1e30"};
  EXPECT_EQ(Pair().Compare<float>(Dtype::kF32, {nan, 1}, {nan, 1}).exit_code, 0);
  EXPECT_EQ(Pair().Compare<float>(Dtype::kF32, {0, 0}, {0, 0}).exit_code, 0);
  EXPECT_EQ(Pair().Compare<float>(Dtype::kF32, {}, {}).exit_code, 0);
  const JsonResult one_sided = Pair().Compare<float>(Dtype::kF32, {nan, 1}, {1, 1}, wide);
  EXPECT_EQ(one_sided.exit_code, 1);
  EXPECT_TRUE(one_sided.document.at("tensors")[0].at("rel_l2").is_null());
  EXPECT_EQ(Pair().Compare<float>(Dtype::kF32, {1, 1}, {1, nan}, wide).exit_code, 1);
  EXPECT_EQ(Pair().Compare<float>(Dtype::kF32, {1, 0}, {0, 0}, wide).exit_code, 1);
}

TEST(CliCompare, IntegersAreExact) {
  const int64_t big = int64_t{1} << 53;
  const JsonResult result = Pair().Compare<int64_t>(Dtype::kI64, {big}, {big + 1});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.document.at("tensors")[0].at("max_abs"), 1.0);
  EXPECT_EQ(Pair().Compare<int64_t>(Dtype::kI64, {INT64_MIN}, {INT64_MAX}).exit_code, 1);
  EXPECT_EQ(Pair().Compare<uint64_t>(Dtype::kU64, {UINT64_MAX}, {UINT64_MAX - 1}).exit_code, 1);
  EXPECT_EQ(Pair().Compare<uint8_t>(Dtype::kU8, {7}, {7}).exit_code, 0);
}

TEST(CliCompare, EveryFloatType) {
  // 1.0 against 1.5, -2.0 against -2.0 in each type's own bits.
  const auto check = [](Dtype dtype, const std::vector<uint8_t>& a, const std::vector<uint8_t>& b) {
    SCOPED_TRACE(std::string(DtypeName(dtype)));
    const JsonResult result = Pair().Compare<uint8_t>(dtype, a, b);
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_DOUBLE_EQ(result.document.at("tensors")[0].at("max_abs").get<double>(), 0.5);
    EXPECT_DOUBLE_EQ(result.document.at("tensors")[0].at("rel_l2").get<double>(), 0.2);
  };
  check(Dtype::kF8E4M3, {0x38, 0xC0}, {0x3C, 0xC0});
  check(Dtype::kF8E5M2, {0x3C, 0xC0}, {0x3E, 0xC0});
  check(Dtype::kF8E4M3Fnuz, {0x40, 0xC8}, {0x44, 0xC8});
  check(Dtype::kF8E5M2Fnuz, {0x40, 0xC4}, {0x42, 0xC4});
}

TEST(CliCompare, DifferencesFail) {
  const std::vector<float> values = {1, 2, 3, 4};
  const auto bytes = std::as_bytes(std::span(values));
  Pair names;
  names.Write("a", "left", Dtype::kF32, {4}, bytes);
  names.Write("b", "right", Dtype::kF32, {4}, bytes);
  const JsonResult by_name = names.Run({"--max-rel-l2", "10"});
  EXPECT_EQ(by_name.exit_code, 1);
  EXPECT_EQ(by_name.document.at("differences").size(), 2u);
  Pair shapes;
  shapes.Write("a", "t", Dtype::kF32, {4}, bytes);
  shapes.Write("b", "t", Dtype::kF32, {2, 2}, bytes);
  EXPECT_EQ(shapes.Run({"--max-rel-l2", "10"}).exit_code, 1);
  Pair dtypes;
  dtypes.Write("a", "t", Dtype::kF32, {4}, bytes);
  dtypes.Write("b", "t", Dtype::kI32, {4}, bytes);
  const JsonResult by_dtype = dtypes.Run({"--max-rel-l2", "10"});
  EXPECT_EQ(by_dtype.exit_code, 1);
  EXPECT_THAT(by_dtype.document.at("differences")[0].at("message").get<std::string>(), HasSubstr("I32"));
}

TEST(CliStreams, AClosedOrBrokenStdoutDoesNoHarm) {
  for (const auto kind : {SubprocessOptions::Stdout::kClosed, SubprocessOptions::Stdout::kBrokenPipe}) {
    SubprocessOptions options;
    options.standard_output = kind;
    const TemporaryDirectory directory;
    const std::string output = directory.path() / "y.safetensors";
    EXPECT_EQ(Espalier({"inspect", kQwen, "--tensors"}, options).exit_code, 0);
    EXPECT_EQ(Espalier({"run", kQwen, "--layer", "1", "--tokens", "2", "-o", output}, options).exit_code, 0);
    EXPECT_EQ(ReadFloatTensor(output, "y").shape, (std::vector<uint64_t>{2, 384}));
    EXPECT_EQ(Espalier({"inspect", kQwen + "/absent", "--json"}, options).exit_code, 3);
  }
}

TEST(CliStreams, AFullDiskUnderStdoutIsAnIoError) {
  SubprocessOptions options;
  options.standard_output = SubprocessOptions::Stdout::kFull;
  EXPECT_EQ(Espalier({"inspect", kQwen, "--json"}, options).exit_code, 3);
}

TEST(CliStreams, NamesInFilesDoNotDriveTheTerminal) {
  const TemporaryDirectory directory;
  const std::vector<float> values = {1};
  for (const char* file : {"a", "b"}) {
    const TensorData tensor{
        .name = "\x1b[2Jgone", .dtype = Dtype::kF32, .shape = {1}, .data = std::as_bytes(std::span(values))};
    ASSERT_TRUE(WriteSafetensors(directory.path() / file, std::span(&tensor, 1)));
  }
  const SubprocessResult result = Espalier({"compare", directory.path() / "a", directory.path() / "b"});
  EXPECT_EQ(result.exit_code, 0) << result.standard_error;
  EXPECT_THAT(result.standard_output, Not(HasSubstr("\x1b")));
  EXPECT_THAT(result.standard_output, HasSubstr("\\x1b[2Jgone"));
}

TEST(CliOutput, NeverReplacesWhatItIsMadeFrom) {
  const TemporaryDirectory directory;
  const std::filesystem::path model = directory.path() / "model";
  std::filesystem::copy(kQwen, model, std::filesystem::copy_options::recursive);
  const std::filesystem::path input = directory.path() / "x.safetensors";
  std::filesystem::copy_file(kQwenInput, input);
  std::string shard;
  for (const auto& entry : std::filesystem::directory_iterator(model)) {
    if (entry.path().extension() == ".safetensors") shard = entry.path();
  }
  const std::string before = ReadBytes(shard);
  const std::string matrix = "model.layers.1.mlp.experts.0.up_proj";
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"run", model, "--layer", "1", "-o", shard},
                                             {"run", model, "--layer", "1", "-o", model / "config.json"},
                                             {"run", model, "--layer", "1", "--input", input, "-o", input},
                                             {"decode", model, matrix, "-o", shard},
                                             {"plan", model, "--tp", "2", "--svg", shard}}) {
    const JsonResult result = EspalierJson(arguments);
    EXPECT_EQ(result.exit_code, 2) << Text(arguments);
    EXPECT_THAT(result.standard_error, HasSubstr("is the input")) << Text(arguments);
  }
  EXPECT_EQ(ReadBytes(shard), before);
  EXPECT_EQ(ReadBytes(input), ReadBytes(kQwenInput));
}

TEST(CliOutput, DoesNotReplaceALink) {
  const TemporaryDirectory directory;
  const std::filesystem::path link = directory.path() / "link";
  std::filesystem::create_symlink(directory.path() / "target", link);
  EXPECT_EQ(Espalier({"run", kQwen, "--layer", "1", "-o", link}).exit_code, 3);
  EXPECT_TRUE(std::filesystem::is_symlink(link));
}

TEST(CliOutput, AFileSizeLimitIsAnIoErrorThatLeavesNothing) {
  const TemporaryDirectory directory;
  const std::string command = "ulimit -f 8; exec '" ESPALIER_BINARY "' decode '" + kQwen +
                              "' model.layers.1.mlp.experts.0.up_proj -o '" +
                              (directory.path() / "w.safetensors").string() + "'";
  const SubprocessResult result = testing::RunSubprocess({"/bin/bash", "-c", command}, {});
  EXPECT_EQ(result.exit_code, 3) << result.standard_error;
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

// A variable of a script that was not set must not turn into another run.
TEST(CliUsage, EmptyValuesAreRefused) {
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"run", kQwen, "--layer", "1", "--tp", "2", "--rank", ""},
                                             {"run", kQwen, "--layer", "1", "--input", ""},
                                             {"run", kQwen, "--layer", "1", "-o", ""},
                                             {"plan", kQwen, "--tp", "2", "--top-k", ""},
                                             {"plan", kQwen, "--tp", "2", "--svg", ""}}) {
    EXPECT_EQ(EspalierJson(arguments).exit_code, 2) << Text(arguments);
  }
  EXPECT_EQ(Espalier({"run", kQwen, "--layer", "1", "--json=true"}).exit_code, 2);
}

TEST(CliMemory, TooLittleIsACapacityError) {
#ifdef ESPALIER_SANITIZED
  GTEST_SKIP() << "a sanitizer's shadow memory does not fit under an address space limit";
#endif
  SubprocessOptions options;
  options.max_address_space_bytes = uint64_t{1} << 30;
  // x alone takes 1.6 GB.
  const JsonResult result = EspalierJson({"run", kQwen, "--layer", "1", "--tokens", "1048576"}, options);
  EXPECT_EQ(result.exit_code, 6) << result.standard_error;
  EXPECT_EQ(result.document.at("error").at("category"), "capacity");
}

}  // namespace
}  // namespace espalier
