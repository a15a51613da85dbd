// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints with as many tensors and as much payload as one likes, for measuring what opening costs. The
// payload is a hole in a sparse file: it takes no disk and reads as zeros.
#ifndef ESPALIER_TESTS_SUPPORT_BIG_CHECKPOINT_H_
#define ESPALIER_TESTS_SUPPORT_BIG_CHECKPOINT_H_

#include <cstdint>
#include <filesystem>

namespace espalier::testing {

struct BigCheckpointOptions {
  uint64_t tensors = 500'000;  // exactly this many: experts of 12 tensors each, plain ones for the rest
  uint32_t shards = 60;
  uint32_t experts = 448;  // a layer; the last layer may have fewer
  uint64_t hidden_channels = 128;
  uint64_t intermediate_channels = 128;
  int bits = 3;
  // A quantization_config.json with one tensor_storage entry per matrix, as the converter writes it.
  bool tensor_storage = true;
};

struct BigCheckpointFacts {
  uint64_t tensors = 0;
  uint64_t layers = 0;
  uint64_t header_bytes = 0;   // of all shards, with the lengths in front
  uint64_t json_bytes = 0;     // config, quantization config, index
  uint64_t payload_bytes = 0;  // holes
};

// Writes a stock checkpoint (codebook mcg, markers zero like the rest of the payload) into a directory that
// exists. Throws std::runtime_error when it cannot. REQUIRES: tensors >= 12 * shards.
BigCheckpointFacts WriteBigCheckpoint(const std::filesystem::path& directory,
                                      const BigCheckpointOptions& options);

}  // namespace espalier::testing

#endif  // ESPALIER_TESTS_SUPPORT_BIG_CHECKPOINT_H_
