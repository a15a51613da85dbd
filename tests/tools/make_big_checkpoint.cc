// SPDX-License-Identifier: Apache-2.0
//
// make_big_checkpoint DIR [TENSORS [SHARDS [HIDDEN [INTERMEDIATE [BITS]]]]]
//
// Writes a checkpoint of sparse files: `make_big_checkpoint /tmp/big` has 500,000 tensors in 60 shards,
// `make_big_checkpoint /tmp/wide 500000 60 2048 2048 3` holds 198 GB of payload besides and takes no more
// disk.
#include <fmt/format.h>

#include <cstdlib>
#include <exception>
#include <filesystem>

#include "support/big_checkpoint.h"

int main(int argc, char** argv) {
  if (argc < 2) {
    fmt::print(stderr, "usage: {} DIR [TENSORS [SHARDS [HIDDEN [INTERMEDIATE [BITS]]]]]\n", argv[0]);
    return 2;
  }
  const auto number = [&](int position, uint64_t fallback) {
    return argc > position ? std::strtoull(argv[position], nullptr, 10) : fallback;
  };
  espalier::testing::BigCheckpointOptions options;
  options.tensors = number(2, options.tensors);
  options.shards = static_cast<uint32_t>(number(3, options.shards));
  options.hidden_channels = number(4, options.hidden_channels);
  options.intermediate_channels = number(5, options.intermediate_channels);
  options.bits = static_cast<int>(number(6, static_cast<uint64_t>(options.bits)));
  try {
    std::filesystem::create_directories(argv[1]);
    const auto facts = espalier::testing::WriteBigCheckpoint(argv[1], options);
    fmt::print("{} tensors, {} layers, {} bytes of headers, {} of JSON, {} of payload\n", facts.tensors,
               facts.layers, facts.header_bytes, facts.json_bytes, facts.payload_bytes);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 3;
  }
  return 0;
}
