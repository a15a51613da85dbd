// SPDX-License-Identifier: Apache-2.0
//
// Runs a Qwen3-MoE language model from an EXL3 checkpoint: the perplexity of a text, a prompt continued.
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <limits>
#include <map>
#include <random>
#include <sstream>

#include "model.h"
#include "tokenizer.h"

namespace tiny_lm {
namespace {

using espalier::Error;
using espalier::Result;
using espalier::StatusCode;
using Clock = std::chrono::steady_clock;

constexpr char kUsage[] =
    R"(usage: tiny_lm CHECKPOINT [TEXT_FILE] [option VALUE]...

Prints the perplexity of TEXT_FILE in windows of 256 tokens, then continues a prompt.

  --windows N      measure no more than N windows
  --prompt TEXT    continue TEXT
  --tokens N       by N tokens (default 100)
  --top-k N        drawn from the N likeliest at temperature 0.8 (default 20; 1 = the likeliest)
  --executor NAME  cpu or reference (default: the best there is)
  --ids FILE       instead of a prompt, run the token ids in FILE (decimal numbers) and
  --logits FILE    write their logits: fp32 of this machine's byte order, [ids, vocabulary]
)";
constexpr size_t kWindowTokens = 256;
constexpr size_t kMaxNumber = 65536;
constexpr double kTemperature = 0.8;

struct Options {
  std::string checkpoint, text_file, prompt = "Elizabeth was surprised", ids, logits, executor;
  size_t windows = kMaxNumber, tokens = 100, top_k = 20;
};

Result<Options> ParseOptions(std::span<char* const> args) {
  Options options;
  const std::map<std::string_view, std::string*> texts = {{"--prompt", &options.prompt},
                                                          {"--ids", &options.ids},
                                                          {"--logits", &options.logits},
                                                          {"--executor", &options.executor}};
  const std::map<std::string_view, size_t*> numbers = {
      {"--windows", &options.windows}, {"--tokens", &options.tokens}, {"--top-k", &options.top_k}};
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string arg = args[i];
    const auto text = texts.find(arg);
    const auto number = numbers.find(arg);
    if (text == texts.end() && number == numbers.end()) {
      std::string& operand = options.checkpoint.empty() ? options.checkpoint : options.text_file;
      if (arg.empty() || arg.starts_with("--") || !operand.empty()) {
        return Error(StatusCode::kUsage, "unknown argument " + arg + "; see --help");
      }
      operand = arg;
      continue;
    }
    if (++i == args.size()) return Error(StatusCode::kUsage, arg + " needs a value");
    const std::string value = args[i];
    if (text != texts.end()) {
      *text->second = value;
      continue;
    }
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), *number->second);
    if (error != std::errc() || end != value.data() + value.size() || *number->second > kMaxNumber) {
      return Error(StatusCode::kUsage, arg + " " + value + ": legal are 0 to " + std::to_string(kMaxNumber));
    }
  }
  if (options.checkpoint.empty()) return Error(StatusCode::kUsage, "CHECKPOINT is missing; see --help");
  if (options.ids.empty() != options.logits.empty()) {
    return Error(StatusCode::kUsage, "--ids and --logits go together");
  }
  return options;
}

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Result<void> PrintPerplexity(Model& model, std::span<const int32_t> tokens, size_t max_windows) {
  const auto start = Clock::now();
  std::function<void(size_t, size_t)> progress;
  if (isatty(STDERR_FILENO)) {
    progress = [](size_t done, size_t all) {
      std::fprintf(stderr, "\rwindow %zu of %zu%s", done, all, done == all ? "\r\033[K" : "");
    };
  }
  const auto result = MeasurePerplexity(model, tokens, kWindowTokens, max_windows, progress);
  if (!result) return tl::unexpected(result.error());
  if (result->predictions == 0) return Error(StatusCode::kUsage, "the text has no window of 257 tokens");
  std::printf("perplexity: %.3f over %zu predictions in %.1f s\n", result->value, result->predictions,
              SecondsSince(start));
  return {};
}

// One of the `top_k` likeliest tokens.
int32_t Draw(std::span<const float> logits, size_t top_k, std::mt19937_64& random) {
  std::vector<float> rest(logits.begin(), logits.end());
  std::vector<std::pair<int32_t, double>> kept;  // token, sum of the weights up to it
  double sum = 0;
  const float max = *std::max_element(rest.begin(), rest.end());
  while (kept.size() < std::clamp<size_t>(top_k, 1, rest.size())) {
    const auto best = std::max_element(rest.begin(), rest.end());
    sum += std::exp((*best - max) / kTemperature);
    kept.emplace_back(static_cast<int32_t>(best - rest.begin()), sum);
    *best = -std::numeric_limits<float>::infinity();
  }
  // Not std::uniform_real_distribution: its numbers differ from one standard library to the next.
  const double at = static_cast<double>(random() >> 11) * 0x1p-53 * sum;
  const auto drawn =
      std::find_if(kept.begin(), kept.end() - 1, [at](const auto& k) { return at < k.second; });
  return drawn->first;
}

Result<void> Continue(Model& model, const Tokenizer& tokenizer, std::span<const int32_t> prompt,
                      const Options& options) {
  std::printf("%s", options.prompt.c_str());
  std::mt19937_64 random(1);  // the same text on every run
  const size_t vocab = model.shape().vocab;
  model.Reset();
  Result<std::span<const float>> logits = model.Forward(prompt);
  for (size_t i = 0; i < options.tokens && logits; ++i) {
    const int32_t token = Draw(logits->last(vocab), options.top_k, random);
    if (token == model.shape().eos_token) break;
    const std::string piece = tokenizer.Decode({&token, 1});
    std::fwrite(piece.data(), 1, piece.size(), stdout);
    std::fflush(stdout);
    if (i + 1 < options.tokens) logits = model.Forward({&token, 1});
  }
  std::printf("\n");
  if (!logits) return tl::unexpected(logits.error());
  return {};
}

Result<std::vector<int32_t>> ReadIds(const std::string& path) {
  const Result<std::string> text = ReadFile(path);
  if (!text) return tl::unexpected(text.error());
  std::istringstream in(*text);
  std::vector<int32_t> ids;
  for (int32_t id; in >> id;) ids.push_back(id);
  if (!in.eof()) return Error(StatusCode::kFormat, path + ": not a list of decimal numbers");
  return ids;
}

Result<void> WriteLogits(Model& model, std::span<const int32_t> ids, const std::string& path) {
  model.Reset();
  const auto logits = model.Forward(ids);
  if (!logits) return tl::unexpected(logits.error());
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(logits->data()),
            static_cast<std::streamsize>(logits->size_bytes()));
  if (!out.flush()) return Error(StatusCode::kIo, path + ": cannot be written");
  return {};
}

Result<void> Run(const Options& options) {
  const std::filesystem::path directory = options.checkpoint;
  const Result<Tokenizer> tokenizer = Tokenizer::FromFile(directory / "tokenizer.json");
  if (!tokenizer) return tl::unexpected(tokenizer.error());
  Result<std::vector<int32_t>> ids;
  if (!options.ids.empty()) ids = ReadIds(options.ids);
  if (!ids) return tl::unexpected(ids.error());
  Result<std::string> text;
  if (!options.text_file.empty()) text = ReadFile(options.text_file);
  if (!text) return tl::unexpected(text.error());
  const std::vector<int32_t> prompt = tokenizer->Encode(options.prompt);

  const auto start = Clock::now();
  ModelOptions model_options;
  model_options.executor = options.executor;
  model_options.context_tokens = std::max({kWindowTokens, ids->size(), prompt.size() + options.tokens});
  Result<Model> model = Model::Load(directory, model_options);
  if (!model) return tl::unexpected(model.error());
  if (tokenizer->vocab_size() > model->shape().vocab) {
    return Error(StatusCode::kFormat,
                 options.checkpoint + ": tokenizer.json has ids beyond vocab_size of config.json");
  }
  std::printf("model: %zu layers, %zu experts, top-%zu, executor %s, loaded in %.1f s\n",
              model->shape().layers, model->shape().experts, model->shape().top_k,
              std::string(model->executor()).c_str(), SecondsSince(start));

  Result<void> done;
  if (!options.text_file.empty()) done = PrintPerplexity(*model, tokenizer->Encode(*text), options.windows);
  if (!done) return done;
  if (!options.logits.empty()) return WriteLogits(*model, *ids, options.logits);
  if (!prompt.empty()) return Continue(*model, *tokenizer, prompt, options);
  return {};
}

int Main(std::span<char* const> args) {
  for (const std::string_view arg : args) {
    if (arg != "--help") continue;
    std::fputs(kUsage, stdout);
    return 0;
  }
  const Result<Options> options = ParseOptions(args);
  const Result<void> done = options ? Run(*options) : tl::unexpected(options.error());
  if (done) return 0;
  std::fprintf(stderr, "tiny_lm: %s\n", done.error().message().c_str());
  return espalier::ExitCode(done.error().code());
}

}  // namespace
}  // namespace tiny_lm

int main(int argc, char** argv) {
  try {
    return tiny_lm::Main({argv + 1, argv + argc});
  } catch (const std::exception& e) {  // in effect: out of memory
    std::fprintf(stderr, "tiny_lm: %s\n", e.what());
    return espalier::ExitCode(espalier::StatusCode::kCapacity);
  }
}
