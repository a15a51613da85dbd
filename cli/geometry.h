// SPDX-License-Identifier: Apache-2.0
//
// Known models by name: one MoE layer of their real size, as a checkpoint without payload.
#ifndef ESPALIER_CLI_GEOMETRY_H_
#define ESPALIER_CLI_GEOMETRY_H_

#include <espalier/checkpoint.h>

#include <cstdint>
#include <span>
#include <string_view>

namespace espalier::cli {

struct Geometry {
  std::string_view name;
  uint64_t hidden_channels;
  uint64_t intermediate_channels;  // of the whole model
  uint64_t experts;
  uint64_t top_k;
  uint64_t attention_heads;  // 0 = not known
  std::string_view hidden_act;
  int bench_tp;  // the ranks whose share the name stands for in `bench`; 1 = the whole layer
};

std::span<const Geometry> Geometries();

// Error: kUsage with the names there are.
Result<const Geometry*> FindGeometry(std::string_view name);

// One layer, "0", with the bits of every expert. Its tensors have places and no bytes. REQUIRES: 1 to 8 bits,
// as many as experts.
Result<Checkpoint> OpenGeometry(const Geometry& geometry, std::span<const int> bits, Codebook codebook);

}  // namespace espalier::cli

#endif  // ESPALIER_CLI_GEOMETRY_H_
