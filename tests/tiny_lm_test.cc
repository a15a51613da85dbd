// SPDX-License-Identifier: Apache-2.0
//
// The example language model: its tokenizer, both executors against the logits of the reference
// implementation, and what the program prints.
#include "tiny_lm.h"

#include <espalier/espalier.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "support/subprocess.h"
#include "support/temporary_directory.h"

namespace tiny_lm {
namespace {

using ::espalier::StatusCode;
using ::espalier::testing::RunSubprocess;
using ::espalier::testing::SubprocessResult;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr size_t kWindowTokens = 256;
const std::filesystem::path kCheckpoint = ESPALIER_BUNDLED_CHECKPOINT;

// The whole text costs seconds in an optimised build, many minutes under a sanitizer.
constexpr bool kSlowBuild =
#if defined(ESPALIER_SANITIZED) || !defined(__OPTIMIZE__)
    true;
#else
    false;
#endif

// One tensor of tests/data/golden/model_golden.safetensors.
template <typename T>
std::vector<T> Golden(const std::string& name) {
  const std::string file = ReadFile(ESPALIER_TEST_DATA "/golden/model_golden.safetensors");
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), sizeof header_bytes);
  const json offsets = json::parse(file.substr(8, header_bytes)).at(name).at("data_offsets");
  std::vector<T> values((offsets.at(1).get<size_t>() - offsets.at(0).get<size_t>()) / sizeof(T));
  std::memcpy(values.data(), file.data() + 8 + header_bytes + offsets.at(0).get<size_t>(),
              values.size() * sizeof(T));
  return values;
}

std::vector<int32_t> PromptIds() {
  const std::vector<int64_t> ids = Golden<int64_t>("prompt_ids");
  return {ids.begin(), ids.end()};
}

const Tokenizer& BundledTokenizer() {
  static const Tokenizer tokenizer(kCheckpoint / "tokenizer.json");
  return tokenizer;
}

std::string HeldOutText() { return ReadFile(ESPALIER_SOURCE_DIR "/data/heldout.txt"); }

Model LoadBundled(const std::string& executor, size_t context_tokens) {
  return Model(kCheckpoint, executor, espalier::CpuMode::kExact, context_tokens);
}

// The failure of a call that must fail.
template <typename Call>
espalier::Status FailureOf(const Call& call) {
  try {
    call();
  } catch (const Failure& failure) {
    return failure.error();
  }
  ADD_FAILURE() << "did not fail";
  return {StatusCode::kDevice, "none"};
}

double RelativeL2(std::span<const float> found, std::span<const float> wanted) {
  EXPECT_EQ(found.size(), wanted.size());
  double error = 0, norm = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    error += std::pow(double{found[i]} - wanted[i], 2);
    norm += std::pow(double{wanted[i]}, 2);
  }
  return std::sqrt(error / norm);
}

// A copy of the bundled checkpoint with other JSON files; the weights are a link.
class ChangedCheckpoint {
 public:
  ChangedCheckpoint() {
    for (const char* name : {"config.json", "quantization_config.json", "tokenizer.json"}) {
      std::filesystem::copy_file(kCheckpoint / name, directory_ / name);
    }
    std::filesystem::create_symlink(kCheckpoint / "model.safetensors", directory_ / "model.safetensors");
  }

  // An RFC 7386 patch: null removes a key.
  void Patch(const char* file, const json& patch) const {
    json root = json::parse(ReadFile(kCheckpoint / file));
    root.merge_patch(patch);
    std::ofstream(directory_ / file) << root;
  }
  const std::filesystem::path& path() const { return directory_.path(); }

 private:
  espalier::testing::TemporaryDirectory directory_;
};

TEST(TinyLmTokenizer, HeldOutTextSurvivesAndFills77Windows) {
  const std::string text = HeldOutText();
  const std::vector<int32_t> ids = BundledTokenizer().Encode(text);
  EXPECT_EQ(ids.size(), 19915u);
  EXPECT_EQ((ids.size() - 1) / kWindowTokens, 77u);
  EXPECT_EQ(BundledTokenizer().Decode(ids), text);
  // The reference's prompt is cut from this text at token 512: a tokenizer that cuts words elsewhere than
  // the reference's differs before that.
  const std::vector<int32_t> prompt = PromptIds();
  EXPECT_EQ(std::vector<int32_t>(ids.begin() + 512, ids.begin() + 512 + prompt.size()), prompt);
}

TEST(TinyLmTokenizer, PromptEncodesToTheReferenceIds) {
  const std::string text = BundledTokenizer().Decode(PromptIds());
  EXPECT_THAT(text, HasSubstr("Bennet and Kitty"));
  EXPECT_EQ(BundledTokenizer().Encode(text), PromptIds());
}

// Ids by the tokenizers package (0.23.3) from the same tokenizer.json.
TEST(TinyLmTokenizer, CutsAsTheReferenceDoes) {
  const std::pair<std::string, std::vector<int32_t>> cases[] = {
      {"don't we'll I'M they've 'sir'", {70, 265, 920, 553, 1863, 317, 9, 47, 569, 3216, 661, 85, 347, 9}},
      {"  two  spaces \n\n and\ttabs  ", {223, 814, 223, 670, 1989, 223, 451, 296, 200, 86, 367, 85, 262}},
      {"in 1812, 25th", {263, 1119, 1527, 14, 3447, 390}},
      {"\u201cOh!\u201d\u2014said she.<|im_end|>\n<|im_start|>x",
       {420, 2502, 2103, 2991, 85, 1841, 439, 16, 2, 201, 1, 90}},
      // A contraction stands alone behind a letter or number of any script, but not behind a mark.
      {"\u0645's \u0663's \U00020c0d's \u0903's\u2028 's",
       {152, 230, 470, 223, 152, 99, 470, 223, 175, 257, 111, 238,
        470, 223, 159, 100, 228, 9,  85,  314, 104, 661, 85}},
      {" caf\u00e9\u00a0\u0436\u4e2d 2\u00bd", {279, 1577, 1626, 1658, 143, 117, 1987, 258, 422, 129, 124}},
  };
  for (const auto& [text, ids] : cases) {
    EXPECT_EQ(BundledTokenizer().Encode(text), ids) << text;
    EXPECT_EQ(BundledTokenizer().Decode(ids), text);
  }
}

TEST(TinyLmTokenizer, AnyBytesSurvive) {
  std::string bytes;
  for (int i = 0; i < 512; ++i) bytes.push_back(static_cast<char>(i * 167 % 256));
  EXPECT_EQ(BundledTokenizer().Decode(BundledTokenizer().Encode(bytes)), bytes);
  EXPECT_TRUE(BundledTokenizer().Encode("").empty());
  EXPECT_EQ(BundledTokenizer().Decode(std::vector<int32_t>{-1, 1 << 30}), "");
}

TEST(TinyLmTokenizer, RefusesWhatItDoesNotKnow) {
  struct Case {
    json patch;
    StatusCode code;
    const char* message;
  };
  const Case cases[] = {
      {{{"model", nullptr}}, StatusCode::kFormat, "'model' not found"},
      {{{"model", {{"vocab", {{"A", nullptr}}}}}}, StatusCode::kFormat, "lacks a token of byte 65"},
      {{{"model", {{"vocab", {{"A", -1}}}}}}, StatusCode::kFormat, "token id is -1"},
      {{{"model", {{"vocab", {{"A", 4294967296}}}}}}, StatusCode::kFormat, "token id is 4294967296"},
      {{{"model", {{"vocab", 7}}}}, StatusCode::kFormat, "lacks a token of byte 0"},
      {{{"model", {{"merges", {"a b"}}}}}, StatusCode::kFormat, "cannot use at() with string"},
      {{{"model", {{"merges", json::array({json::array({"a", "\u00e9\u00e9\u00e9"})})}}}},
       StatusCode::kFormat,
       "\u00e9\u00e9\u00e9' not found"},  // alone or behind the "a": the compiler chooses the order
      {{{"added_tokens", {{{"id", 0}, {"content", ""}}}}}, StatusCode::kFormat, "without content"},
      {{{"model", {{"type", "Unigram"}}}}, StatusCode::kUnsupported, "BPE"},
      {{{"normalizer", {{"type", "NFC"}}}}, StatusCode::kUnsupported, "normalizer"},
      {{{"pre_tokenizer", {{"add_prefix_space", true}}}}, StatusCode::kUnsupported, "add_prefix_space"},
  };
  const ChangedCheckpoint checkpoint;
  const std::filesystem::path path = checkpoint.path() / "tokenizer.json";
  for (const Case& c : cases) {
    checkpoint.Patch("tokenizer.json", c.patch);
    const espalier::Status status = FailureOf([&path] { Tokenizer tokenizer(path); });
    EXPECT_EQ(status.code(), c.code) << c.patch;
    EXPECT_THAT(status.message(), AllOf(HasSubstr("tokenizer.json: "), HasSubstr(c.message)));
  }
  std::ofstream(path) << "{\"model\": ";
  EXPECT_EQ(FailureOf([&] { Tokenizer tokenizer(path); }).code(), StatusCode::kFormat);
  EXPECT_EQ(FailureOf([&] { Tokenizer tokenizer(checkpoint.path() / "absent.json"); }).code(),
            StatusCode::kIo);
  EXPECT_EQ(FailureOf([&] { Tokenizer tokenizer(checkpoint.path()); }).code(), StatusCode::kIo);
}

class TinyLmExecutor : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(, TinyLmExecutor, ::testing::Values("reference", "cpu"),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(TinyLmExecutor, LogitsMatchTheReferenceImplementation) {
  const espalier::Backend* backend = espalier::BackendByName(GetParam()).value();
  const uint64_t runs_before = backend->num_runs();
  Model model = LoadBundled(GetParam(), 48);
  EXPECT_EQ(model.executor(), GetParam());
  const std::vector<float> logits = model.Forward(PromptIds());
  // Four layers of four projections and a block of experts, then the head.
  EXPECT_EQ(backend->num_runs() - runs_before, 4u * 5 + 1);
  const double error = RelativeL2(logits, Golden<float>("logits_fp32ref_mixed"));
  RecordProperty("rel_l2", std::to_string(error));
  EXPECT_LE(error, 1e-3);
  // The unquantized model's logits are 0.035 away: the bound above notices other weights.
  EXPECT_GT(RelativeL2(logits, Golden<float>("logits_fp32ref_bf16")), 1e-2);
}

TEST(TinyLmModel, TokenByTokenGivesTheBitsOfOneCall) {
  Model model = LoadBundled("cpu", 48);
  const std::vector<int32_t> ids = PromptIds();
  const std::vector<float> at_once = model.Forward(ids);
  model.Reset();
  std::vector<float> in_steps;
  for (size_t at = 0; at < ids.size();) {
    const size_t step = at == 0 ? 29 : 1;
    const std::vector<float> part = model.Forward(std::span(ids).subspan(at, step));
    in_steps.insert(in_steps.end(), part.begin(), part.end());
    at += step;
  }
  ASSERT_EQ(in_steps.size(), at_once.size());
  EXPECT_EQ(std::memcmp(in_steps.data(), at_once.data(), at_once.size() * sizeof(float)), 0);
}

TEST(TinyLmModel, RefusedTokensLeaveTheContextAsItWas) {
  Model model = LoadBundled("cpu", 4);
  model.Forward(std::vector<int32_t>{5, 6, 7});
  EXPECT_EQ(FailureOf([&] { model.Forward(std::vector<int32_t>{8, 9}); }).code(), StatusCode::kCapacity);
  EXPECT_EQ(FailureOf([&] { model.Forward(std::vector<int32_t>{4096}); }).code(), StatusCode::kUsage);
  EXPECT_EQ(FailureOf([&] { model.Forward(std::vector<int32_t>{-1}); }).code(), StatusCode::kUsage);
  model.Forward(std::vector<int32_t>{});
  model.Forward(std::vector<int32_t>{8});
  EXPECT_EQ(FailureOf([&] { model.Forward(std::vector<int32_t>{9}); }).code(), StatusCode::kCapacity);
}

TEST(TinyLmModel, RefusesAConfigThatItCannotRun) {
  struct Case {
    json patch;
    StatusCode code;
    const char* message;
  };
  const Case cases[] = {
      {{{"rope_theta", nullptr}}, StatusCode::kFormat, "'rope_theta' not found"},
      {{{"head_dim", "64"}}, StatusCode::kFormat, "head_dim: found string"},
      {{{"head_dim", 32}}, StatusCode::kFormat, "q_proj"},
      {{{"head_dim", 32}, {"num_attention_heads", 8}, {"num_key_value_heads", 4}},
       StatusCode::kFormat,
       "q_norm"},
      {{{"num_attention_heads", 0}}, StatusCode::kFormat, "num_attention_heads is 0"},
      {{{"num_key_value_heads", 3}}, StatusCode::kFormat, "multiple of num_key_value_heads"},
      {{{"num_key_value_heads", 4}}, StatusCode::kFormat, "k_proj"},
      {{{"vocab_size", 4095}}, StatusCode::kFormat, "embed_tokens"},
      {{{"num_hidden_layers", 5}}, StatusCode::kUsage, "4"},
      {{{"num_experts_per_tok", 17}}, StatusCode::kFormat, "num_experts_per_tok"},
      {{{"norm_topk_prob", false}}, StatusCode::kUnsupported, "norm_topk_prob is false"},
      {{{"rope_scaling", {{"type", "yarn"}}}}, StatusCode::kUnsupported, "rope_scaling"},
  };
  const ChangedCheckpoint checkpoint;
  for (const Case& c : cases) {
    checkpoint.Patch("config.json", c.patch);
    const espalier::Status status = FailureOf([&checkpoint] { Model model(checkpoint.path(), "", espalier::CpuMode::kFast, 256); });
    EXPECT_EQ(status.code(), c.code) << c.patch;
    EXPECT_THAT(status.message(), HasSubstr(c.message));
  }
  EXPECT_EQ(FailureOf([&] { Model model(checkpoint.path() / "absent", "", espalier::CpuMode::kFast, 256); }).code(), StatusCode::kIo);
  EXPECT_EQ(FailureOf([] { LoadBundled("abacus", 1); }).code(), StatusCode::kUsage);
  EXPECT_EQ(FailureOf([] { LoadBundled("cpu", 1025); }).code(), StatusCode::kCapacity);
}

SubprocessResult RunTinyLm(const std::vector<std::string>& arguments) {
  std::vector<std::string> command = {ESPALIER_TINY_LM};
  command.insert(command.end(), arguments.begin(), arguments.end());
  espalier::testing::SubprocessOptions options;
  options.timeout_seconds = 600;
  return RunSubprocess(command, options);
}

struct Perplexity {
  double value = 0;
  size_t predictions = 0;
};

// Of the held-out text, as the program prints it.
Perplexity PrintedPerplexity(const std::string& executor, size_t windows, const std::string& mode = "exact") {
  const SubprocessResult ran =
      RunTinyLm({kCheckpoint, ESPALIER_SOURCE_DIR "/data/heldout.txt", "--executor", executor, "--mode", mode,
                 "--windows", std::to_string(windows), "--tokens", "0"});
  EXPECT_EQ(ran.exit_code, 0) << ran.standard_error;
  EXPECT_THAT(ran.standard_output,
              HasSubstr("model: 4 layers, 16 experts, top-4, executor " + executor + "\n"));
  const size_t at = ran.standard_output.find("perplexity: ");
  Perplexity printed;
  EXPECT_NE(at, std::string::npos) << ran.standard_output;
  if (at == std::string::npos) return printed;
  EXPECT_EQ(std::sscanf(&ran.standard_output[at], "perplexity: %lf over %zu predictions\n", &printed.value,
                        &printed.predictions),
            2);
  return printed;
}

TEST(TinyLmProgram, ExecutorsAgreeOnThePerplexity) {
  const size_t windows = kSlowBuild ? 1 : 3;
  const Perplexity reference = PrintedPerplexity("reference", windows);
  const Perplexity cpu = PrintedPerplexity("cpu", windows);
  EXPECT_EQ(reference.predictions, windows * kWindowTokens);
  EXPECT_EQ(cpu.predictions, windows * kWindowTokens);
  EXPECT_NEAR(reference.value, cpu.value, 1.5e-3);  // 1e-3, and the last printed digit
}

TEST(TinyLmProgram, PerplexityOfTheHeldOutText) {
  if (kSlowBuild) GTEST_SKIP() << "takes minutes without optimisation or under a sanitizer";
  const Perplexity exact = PrintedPerplexity("cpu", 65536);
  EXPECT_EQ(exact.predictions, 19712u);
  EXPECT_NEAR(exact.value, 38.111, 0.02);
  for (const char* mode : {"fast", "int8"}) {
    const Perplexity printed = PrintedPerplexity("cpu", 65536, mode);
    EXPECT_EQ(printed.predictions, 19712u);
    EXPECT_NEAR(printed.value, exact.value, 0.05) << mode;
  }
}

TEST(TinyLmProgram, ContinuesAPromptAsTheReadmeShows) {
  const SubprocessResult ran = RunTinyLm({kCheckpoint, "--tokens", "60"});
  EXPECT_EQ(ran.exit_code, 0) << ran.standard_error;
  const size_t text = ran.standard_output.find("\nMr. Darcy");
  ASSERT_NE(text, std::string::npos) << ran.standard_output;
  EXPECT_THAT(ReadFile(ESPALIER_SOURCE_DIR "/README.md"),
              HasSubstr(ran.standard_output.substr(text) + "```"));
  // Another prompt, an empty continuation.
  EXPECT_THAT(RunTinyLm({kCheckpoint, "--prompt", "Oh!", "--tokens", "0"}).standard_output,
              ::testing::EndsWith("\nOh!\n"));
}

TEST(TinyLmProgram, RefusesWithTheExitCodesOfTheLibrary) {
  struct Case {
    std::vector<std::string> arguments;
    StatusCode code;
    const char* message;
  };
  const std::string text = ESPALIER_SOURCE_DIR "/data/README.md";
  const ChangedCheckpoint dense, corrupt;
  dense.Patch("config.json", {{"model_type", "qwen3"}});
  std::ofstream(corrupt.path() / "config.json") << "{\"model_type\": ";
  const Case cases[] = {
      {{}, StatusCode::kUsage, "CHECKPOINT is required"},
      {{kCheckpoint, "--windows", "-1"}, StatusCode::kUsage, "--windows"},
      {{kCheckpoint, "--executor", "abacus"}, StatusCode::kUsage, "abacus"},
      {{kCheckpoint, text + "/absent"}, StatusCode::kIo, "/absent: cannot be read"},
      {{kCheckpoint, ESPALIER_SOURCE_DIR "/data"}, StatusCode::kIo, "/data: cannot be read"},
      {{kCheckpoint, "/dev/null"}, StatusCode::kUsage, "no window of 257 tokens"},
      {{kCheckpoint, "--tokens", "1022"}, StatusCode::kCapacity, "legal: 1 to 1024 tokens"},
      {{kCheckpoint / "absent"}, StatusCode::kIo, "absent"},
      {{dense.path()}, StatusCode::kUnsupported, "/model_type is \"qwen3\""},
      {{corrupt.path()}, StatusCode::kFormat, "config.json"},
  };
  for (const Case& c : cases) {
    const SubprocessResult ran = RunTinyLm(c.arguments);
    EXPECT_EQ(ran.exit_code, espalier::ExitCode(c.code)) << c.message;
    EXPECT_THAT(ran.standard_error, HasSubstr(c.message));
  }
}

}  // namespace
}  // namespace tiny_lm
