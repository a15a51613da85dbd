// SPDX-License-Identifier: Apache-2.0
#include "support/big_checkpoint.h"

#include <fmt/format.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

namespace espalier::testing {
namespace {

constexpr uint64_t kTensorsPerMatrix = 4;  // trellis, suh, svh, mcg
constexpr uint64_t kTensorsPerExpert = 3 * kTensorsPerMatrix;

void WriteSparse(const std::filesystem::path& path, const std::string& text, uint64_t hole_bytes) {
  std::ofstream out(path, std::ios::binary);
  out.write(text.data(), static_cast<std::streamsize>(text.size()));
  if (!out.flush()) throw std::runtime_error("cannot write " + path.string());
  out.close();
  std::filesystem::resize_file(path, text.size() + hole_bytes);
}

class Writer {
 public:
  Writer(const std::filesystem::path& directory, const BigCheckpointOptions& options)
      : directory_(directory), options_(options) {}

  BigCheckpointFacts Write() {
    const uint64_t experts = options_.tensors / kTensorsPerExpert;
    for (uint64_t expert = 0; expert < experts; ++expert) {
      BeginShard(expert * options_.shards / experts);
      AddExpert(expert / options_.experts, expert % options_.experts);
    }
    for (uint64_t i = 0; i < options_.tensors % kTensorsPerExpert; ++i) {
      Add(fmt::format("model.norms.{}.weight", i), "BF16", "4", 8);
    }
    EndShard();
    facts_.layers = (experts + options_.experts - 1) / options_.experts;
    WriteJson("model.safetensors.index.json",
              fmt::format("{{\"metadata\":{{\"total_size\":{}}},\"weight_map\":{{{}}}}}",
                          facts_.payload_bytes, index_));
    const std::string block =
        fmt::format("\"quant_method\":\"exl3\",\"bits\":{},\"codebook\":\"mcg\"", options_.bits);
    if (options_.tensor_storage) {
      WriteJson("quantization_config.json", fmt::format("{{{},\"tensor_storage\":{{{}}}}}", block, storage_));
    }
    WriteJson("config.json", fmt::format("{{\"architectures\":[\"Qwen3MoeForCausalLM\"],\"hidden_size\":{},"
                                         "\"moe_intermediate_size\":{},\"num_experts_per_tok\":8,"
                                         "\"hidden_act\":\"silu\",\"quantization_config\":{{{}}}}}",
                                         options_.hidden_channels, options_.intermediate_channels, block));
    return facts_;
  }

 private:
  void BeginShard(uint64_t shard) {
    if (shard == shard_ && !header_.empty()) return;
    EndShard();
    shard_ = shard;
    file_ = fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, options_.shards);
  }

  void EndShard() {
    if (header_.empty()) return;
    std::string text(8, '\0');
    text += "{" + header_ + "}";
    text.resize((text.size() + 7) / 8 * 8, ' ');
    const uint64_t length = text.size() - 8;
    std::memcpy(text.data(), &length, 8);
    WriteSparse(directory_ / file_, text, offset_);
    facts_.header_bytes += text.size();
    facts_.payload_bytes += offset_;
    header_.clear();
    offset_ = 0;
  }

  void Add(const std::string& name, const char* dtype, const std::string& shape, uint64_t bytes) {
    fmt::format_to(std::back_inserter(header_),
                   "{}\"{}\":{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                   header_.empty() ? "" : ",", name, dtype, shape, offset_, offset_ + bytes);
    fmt::format_to(std::back_inserter(index_), "{}\"{}\":\"{}\"", index_.empty() ? "" : ",", name, file_);
    offset_ += bytes;
    ++facts_.tensors;
  }

  void AddMatrix(const std::string& name, uint64_t in, uint64_t out) {
    const uint64_t bits = static_cast<uint64_t>(options_.bits);
    Add(name + ".trellis", "I16", fmt::format("{},{},{}", in / 16, out / 16, 16 * bits), in * out / 8 * bits);
    Add(name + ".suh", "F16", std::to_string(in), 2 * in);
    Add(name + ".svh", "F16", std::to_string(out), 2 * out);
    Add(name + ".mcg", "I32", "", 4);
    if (!options_.tensor_storage) return;
    fmt::format_to(std::back_inserter(storage_),
                   "{}\"{}\":{{\"stored_tensors\":{{\"{}.trellis\":{{\"shape\":[{},{},{}],\"n_bytes\":{},"
                   "\"dtype\":\"torch.int16\"}}}},\"quant_format\":\"exl3\",\"bits_per_weight\":{},"
                   "\"mcg_multiplier\":3417055213}}",
                   storage_.empty() ? "" : ",", name, name, in / 16, out / 16, 16 * bits, in * out / 8 * bits,
                   bits);
  }

  void AddExpert(uint64_t layer, uint64_t expert) {
    const std::string name = fmt::format("model.layers.{}.mlp.experts.{}", layer, expert);
    AddMatrix(name + ".gate_proj", options_.hidden_channels, options_.intermediate_channels);
    AddMatrix(name + ".up_proj", options_.hidden_channels, options_.intermediate_channels);
    AddMatrix(name + ".down_proj", options_.intermediate_channels, options_.hidden_channels);
  }

  void WriteJson(const char* name, const std::string& text) {
    WriteSparse(directory_ / name, text, 0);
    facts_.json_bytes += text.size();
  }

  std::filesystem::path directory_;
  BigCheckpointOptions options_;
  BigCheckpointFacts facts_;
  uint64_t shard_ = 0;
  std::string file_;
  std::string header_;   // of the shard being written
  uint64_t offset_ = 0;  // bytes of payload in it
  std::string index_;
  std::string storage_;
};

}  // namespace

BigCheckpointFacts WriteBigCheckpoint(const std::filesystem::path& directory,
                                      const BigCheckpointOptions& options) {
  return Writer(directory, options).Write();
}

}  // namespace espalier::testing
