// SPDX-License-Identifier: Apache-2.0
//
// Runs a Qwen3-MoE language model from an EXL3 checkpoint: the perplexity of a text, a prompt continued.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

#include <map>
#include "tiny_lm.h"

namespace tiny_lm {
namespace {

constexpr size_t kWindowTokens = 256;

struct Options {
  std::string checkpoint, text_file, executor, prompt = "Mr. Darcy";
  size_t windows = 65536, tokens = 100;
  // The text of mode exact does not depend on which operands a processor multiplies with.
  espalier::CpuMode mode = espalier::CpuMode::kExact;
};

// Over consecutive windows, each token predicting its successor; what does not fill a window (and one token
// more) is left out.
void PrintPerplexity(Model& model, std::span<const int32_t> tokens, size_t max_windows) {
  const size_t windows = std::min(max_windows, (std::max<size_t>(tokens.size(), 1) - 1) / kWindowTokens);
  if (windows == 0) Fail(kUsage, "the text has no window of 257 tokens");
  const size_t vocab = model.config().vocab;
  double nats = 0;
  for (size_t w = 0; w < windows; ++w) {
    const std::span<const int32_t> window = tokens.subspan(w * kWindowTokens, kWindowTokens + 1);
    model.Reset();
    const std::vector<float> logits = model.Forward(window.first(kWindowTokens));
    for (size_t t = 0; t < kWindowTokens; ++t) {
      const std::span<const float> row = std::span(logits).subspan(t * vocab, vocab);
      double sum = 0;
      for (float logit : row) sum += std::exp(double{logit});
      nats += std::log(sum) - row[window[t + 1]];
    }
    if (isatty(STDERR_FILENO)) std::fprintf(stderr, "\rwindow %zu of %zu ", w + 1, windows);
  }
  const size_t predictions = windows * kWindowTokens;
  std::printf("perplexity: %.3f over %zu predictions\n", std::exp(nats / static_cast<double>(predictions)),
              predictions);
}

void Run(const Options& options) {
  const std::filesystem::path directory = options.checkpoint;
  const Tokenizer tokenizer(directory / "tokenizer.json");
  std::vector<int32_t> input = tokenizer.Encode(options.prompt);
  const std::string text = options.text_file.empty() ? "" : ReadFile(options.text_file);
  Model model(directory, options.executor, options.mode, std::max(kWindowTokens, input.size() + options.tokens));
  const Config& config = model.config();
  if (tokenizer.vocab_size() > config.vocab) {
    Fail(kFormat, options.checkpoint, ": tokenizer.json has ids beyond vocab_size of config.json");
  }
  std::printf("model: %zu layers, %zu experts, top-%zu, executor %s\n", config.layers, config.experts,
              config.top_k, model.executor().c_str());
  if (!options.text_file.empty()) PrintPerplexity(model, tokenizer.Encode(text), options.windows);
  if (input.empty()) return;

  model.Reset();
  std::printf("%s", options.prompt.c_str());
  for (size_t i = 0; i < options.tokens; ++i) {
    const std::vector<float> logits = model.Forward(input);
    const auto last_row = logits.end() - config.vocab;
    // The likeliest token: the same text on every run.
    input = {static_cast<int32_t>(std::max_element(last_row, logits.end()) - last_row)};
    if (input[0] == config.eos_token) break;
    const std::string piece = tokenizer.Decode(input);
    std::fwrite(piece.data(), 1, piece.size(), stdout);
    std::fflush(stdout);
  }
  std::printf("\n");
}

}  // namespace
}  // namespace tiny_lm

int main(int argc, char** argv) {
  tiny_lm::Options options;
  CLI::App app("Prints the perplexity of a text, then continues a prompt.", "tiny_lm");
  const CLI::Range count(0, 65536);
  app.add_option("CHECKPOINT", options.checkpoint, "directory of the model")->required();
  app.add_option("TEXT_FILE", options.text_file,
                 "print the perplexity of this text, in windows of 256 tokens");
  app.add_option("--windows", options.windows, "measure no more windows than this")->check(count);
  app.add_option("--prompt", options.prompt, "continue this text")->capture_default_str();
  app.add_option("--tokens", options.tokens, "by so many tokens")->check(count)->capture_default_str();
  app.add_option("--executor", options.executor, "cpu or reference; default: the best there is");
  const std::map<std::string, espalier::CpuMode> modes = {{"exact", espalier::CpuMode::kExact},
                                                          {"fast", espalier::CpuMode::kFast},
                                                          {"int8", espalier::CpuMode::kInt8}};
  app.add_option("--mode", options.mode, "exact, fast or int8, for the cpu executor; exact by default")
      ->transform(CLI::CheckedTransformer(modes));
  try {
    app.parse(argc, argv);
    tiny_lm::Run(options);
    return 0;
  } catch (const CLI::ParseError& e) {  // --help comes this way too
    return app.exit(e) == 0 ? 0 : espalier::ExitCode(tiny_lm::kUsage);
  } catch (const tiny_lm::Failure& e) {
    std::fprintf(stderr, "tiny_lm: %s\n", e.error().message().c_str());
    return espalier::ExitCode(e.error().code());
  } catch (const std::exception& e) {  // in effect: out of memory
    std::fprintf(stderr, "tiny_lm: %s\n", e.what());
    return espalier::ExitCode(tiny_lm::kCapacity);
  }
}
