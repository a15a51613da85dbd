// SPDX-License-Identifier: Apache-2.0
//
// The slot-major container exl3-v1: one file per MoE layer, cut into slots of 32 intermediate channels
// so that any extent is a contiguous byte range. Grammar: docs/format.md.
#ifndef ESPALIER_SRC_CHECKPOINT_EXL3_V1_LAYOUT_H_
#define ESPALIER_SRC_CHECKPOINT_EXL3_V1_LAYOUT_H_

#include <espalier/checkpoint.h>
#include <espalier/status.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/pack_layout.h"
#include "checkpoint/shards.h"

namespace espalier {

inline constexpr std::string_view kExl3V1ManifestName = "exl3-manifest.json";

// exl3-manifest.json with every rule of it checked.
struct Exl3V1Manifest {
  std::string name;  // of the file
  std::string codebook;
  uint64_t experts = 0;
  uint64_t hidden_channels = 0;
  uint64_t intermediate_channels = 0;
  uint64_t num_slots = 0;
  int bits = 0;
  bool per_expert_input_rotations = false;
  uint64_t row_alignment_bytes = 0;
  uint64_t extent_alignment_slots = 0;
  std::vector<uint64_t> extent_barriers;
  struct LayerFile {
    std::string file;
    std::string sha256;  // lower case
  };
  std::map<uint64_t, LayerFile> layers;
};

// Errors: kFormat for a broken rule; kUnsupported for another schema or codebook, the coupled mode and
// rates per expert pair, which are well-formed but not executed yet.
Result<Exl3V1Manifest> ParseExl3V1Manifest(const JsonFile& file);

// Opens the layer files (appending to `shards`; their tensors stay out of by_name) and checks them
// against the manifest. Errors: kIo, kFormat.
Result<void> OpenExl3V1Files(ShardSet& shards, const Exl3V1Manifest& manifest);

// REQUIRES: OpenExl3V1Files has succeeded on context.shards.
std::unique_ptr<Layout> MakeExl3V1Layout(LayoutContext& context, Exl3V1Manifest manifest);

}  // namespace espalier

#endif  // ESPALIER_SRC_CHECKPOINT_EXL3_V1_LAYOUT_H_
