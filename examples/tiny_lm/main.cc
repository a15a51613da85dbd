// SPDX-License-Identifier: Apache-2.0
//
// Runs a Qwen3-MoE language model from an EXL3 checkpoint: the perplexity of a text, a prompt continued.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <limits>
#include <random>
#include <sstream>

#include "failure.h"
#include "model.h"
#include "tokenizer.h"

namespace tiny_lm {
namespace {

using espalier::StatusCode;
using Clock = std::chrono::steady_clock;

constexpr size_t kWindowTokens = 256;
constexpr double kTemperature = 0.8;

struct Options {
  std::string checkpoint, text_file, prompt = "Elizabeth was surprised", ids_file, logits_file, executor;
  size_t windows = 65536, tokens = 100, top_k = 20;
};

void AddOptions(CLI::App& app, Options& options) {
  const CLI::Range count(0, 65536);
  app.add_option("CHECKPOINT", options.checkpoint, "directory of the model")->required();
  app.add_option("TEXT_FILE", options.text_file,
                 "print the perplexity of this text, in windows of 256 tokens");
  app.add_option("--windows", options.windows, "measure no more windows than this")->check(count);
  app.add_option("--prompt", options.prompt, "continue this text")->capture_default_str();
  app.add_option("--tokens", options.tokens, "by so many tokens")->check(count)->capture_default_str();
  app.add_option("--top-k", options.top_k, "each drawn from so many likeliest ones at temperature 0.8")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  app.add_option("--executor", options.executor, "cpu or reference; default: the best there is");
  CLI::Option* ids =
      app.add_option("--ids", options.ids_file, "run the token ids (numbers) in this file, no prompt");
  CLI::Option* logits =
      app.add_option("--logits", options.logits_file, "write their logits here: fp32 [ids, vocabulary]");
  ids->needs(logits);
  logits->needs(ids);
}

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void PrintPerplexity(Model& model, std::span<const int32_t> tokens, size_t max_windows) {
  const auto start = Clock::now();
  std::function<void(size_t, size_t)> progress;
  if (isatty(STDERR_FILENO)) {
    progress = [](size_t done, size_t all) {
      std::fprintf(stderr, "\rwindow %zu of %zu%s", done, all, done == all ? "\r\033[K" : "");
    };
  }
  const Perplexity result = MeasurePerplexity(model, tokens, kWindowTokens, max_windows, progress);
  if (result.predictions == 0) throw Failure(StatusCode::kUsage, "the text has no window of 257 tokens");
  std::printf("perplexity: %.3f over %zu predictions in %.1f s\n", result.value, result.predictions,
              SecondsSince(start));
}

// One of the `top_k` likeliest tokens.
int32_t Draw(std::span<const float> logits, size_t top_k, std::mt19937_64& random) {
  std::vector<float> rest(logits.begin(), logits.end());
  std::vector<std::pair<int32_t, double>> kept;  // token, sum of the weights up to it
  double sum = 0;
  const float max = *std::max_element(rest.begin(), rest.end());
  while (kept.size() < std::min(top_k, rest.size())) {
    const auto best = std::max_element(rest.begin(), rest.end());
    sum += std::exp((*best - max) / kTemperature);
    kept.emplace_back(static_cast<int32_t>(best - rest.begin()), sum);
    *best = -std::numeric_limits<float>::infinity();
  }
  // Not std::uniform_real_distribution: its numbers differ from one standard library to the next.
  const double at = static_cast<double>(random() >> 11) * 0x1p-53 * sum;
  return std::find_if(kept.begin(), kept.end() - 1, [at](const auto& k) { return at < k.second; })->first;
}

void Continue(Model& model, const Tokenizer& tokenizer, std::vector<int32_t> input, const Options& options) {
  std::printf("%s", options.prompt.c_str());
  std::mt19937_64 random(1);  // the same text on every run
  model.Reset();
  for (size_t i = 0; i < options.tokens; ++i) {
    const std::span<const float> logits = model.Forward(input);
    input = {Draw(logits.last(model.shape().vocab), options.top_k, random)};
    if (input[0] == model.shape().eos_token) break;
    const std::string piece = tokenizer.Decode(input);
    std::fwrite(piece.data(), 1, piece.size(), stdout);
    std::fflush(stdout);
  }
  std::printf("\n");
}

std::vector<int32_t> ReadIds(const std::string& path) {
  std::istringstream in(ReadFile(path));
  std::vector<int32_t> ids;
  for (int32_t id; in >> id;) ids.push_back(id);
  if (!in.eof() || ids.empty()) throw Failure(StatusCode::kFormat, path + ": not a list of numbers");
  return ids;
}

void WriteLogits(std::span<const float> logits, const std::string& path) {
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(logits.data()), static_cast<std::streamsize>(logits.size_bytes()));
  if (!out.flush()) throw Failure(StatusCode::kIo, path + ": cannot be written");
}

void Run(const Options& options) {
  const std::filesystem::path directory = options.checkpoint;
  const Tokenizer tokenizer(directory / "tokenizer.json");
  const std::string text = options.text_file.empty() ? "" : ReadFile(options.text_file);
  const std::vector<int32_t> ids =
      options.ids_file.empty() ? std::vector<int32_t>() : ReadIds(options.ids_file);
  const std::vector<int32_t> prompt = tokenizer.Encode(options.prompt);

  const auto start = Clock::now();
  Model model(directory,
              {.executor = options.executor,
               .context_tokens = std::max({kWindowTokens, ids.size(), prompt.size() + options.tokens})});
  if (tokenizer.vocab_size() > model.shape().vocab) {
    throw Failure(StatusCode::kFormat,
                  options.checkpoint + ": tokenizer.json has ids beyond vocab_size of config.json");
  }
  std::printf("model: %zu layers, %zu experts, top-%zu, executor %s, loaded in %.1f s\n",
              model.shape().layers, model.shape().experts, model.shape().top_k,
              std::string(model.executor()).c_str(), SecondsSince(start));

  if (!options.text_file.empty()) PrintPerplexity(model, tokenizer.Encode(text), options.windows);
  model.Reset();
  if (!ids.empty()) {
    WriteLogits(model.Forward(ids), options.logits_file);
  } else if (!prompt.empty()) {
    Continue(model, tokenizer, prompt, options);
  }
}

}  // namespace
}  // namespace tiny_lm

int main(int argc, char** argv) {
  try {
    CLI::App app("Prints the perplexity of a text, then continues a prompt.", "tiny_lm");
    tiny_lm::Options options;
    tiny_lm::AddOptions(app, options);
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& e) {  // --help comes this way too
      return app.exit(e) == 0 ? 0 : espalier::ExitCode(espalier::StatusCode::kUsage);
    }
    tiny_lm::Run(options);
    return 0;
  } catch (const tiny_lm::Failure& e) {
    std::fprintf(stderr, "tiny_lm: %s\n", e.what());
    return espalier::ExitCode(e.status().code());
  } catch (const std::exception& e) {  // in effect: out of memory
    std::fprintf(stderr, "tiny_lm: %s\n", e.what());
    return espalier::ExitCode(espalier::StatusCode::kCapacity);
  }
}
