// SPDX-License-Identifier: Apache-2.0
//
// Packages from weights that are in memory already: what a framework with a loader of its own goes through.
// Source -> plan -> prepare: describe the experts, learn every size and offset, hand over the bytes.
// LoadExperts takes the same way with files for bytes.
#ifndef ESPALIER_PREPARE_H_
#define ESPALIER_PREPARE_H_

#include <espalier/experts.h>
#include <espalier/formats.h>
#include <espalier/status.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace espalier {

// What a model asks of whoever runs it.
struct ActivationSpec {
  Activation activation = {};
  std::optional<Dtype> io = {};  // as in MoeGeometry
  Dtype rotation = Dtype::kF16;  // as in MoeGeometry
};

// One EXL3 matrix W [in][out] before it has a place.
struct MatrixSpec {
  uint32_t in_channels = 0;  // a multiple of 128
  uint32_t out_channels = 0;
  int bits = 0;
  Codebook codebook = Codebook::k3Inst;
  bool has_bias = false;
  // Equal keys other than 0 mean equal vectors, which are stored and rotated once.
  uint64_t suh_key = 0;
  uint64_t svh_key = 0;

  bool present() const { return bits != 0; }
};

struct SegmentSpec {
  uint32_t expert = 0;                        // local id, ascending
  uint32_t valid_intermediate_channels = 0;   // <= the width of the segment
  MatrixSpec matrices[kNumProjections] = {};  // by Projection; gate absent where the activation has none
};

// The experts of one layer that one rank owns.
struct ExpertsSource {
  std::string identity;  // for messages, e.g. "model.layers.3 of glm"
  uint32_t experts = 0;
  uint32_t hidden_channels = 0;
  uint32_t stored_hidden_channels = 0;  // 0 = hidden_channels
  ActivationSpec activation = {};
  double output_scale = 1;
  std::vector<SegmentSpec> segments = {};
  RankPlan rank_plan = {};
};

// Bytes of one matrix in native order, host memory. Null where the source says absent.
struct MatrixWeights {
  const void* codes = nullptr;     // u16 [in/16][out/16][16*bits]
  const uint16_t* suh = nullptr;   // fp16 [in]
  const uint16_t* svh = nullptr;   // fp16 [out]
  const uint16_t* bias = nullptr;  // fp16 [out]
};
struct SegmentWeights {
  MatrixWeights matrices[kNumProjections];
};

// Sizes and offsets of everything, before any memory is taken. Of the options: device, order. Errors:
// kGeometry, kUnsupported, kCapacity.
Result<ExpertsTable> PlanExperts(const ExpertsSource& source, const LoadOptions& options = {});

// One allocation, one copy; `weights` has an entry per segment of the source and may be freed afterwards.
// Of the options: device, order, allocate, hash, num_threads. Errors also: kUsage for a null pointer or a
// wrong count, kDevice.
Result<PreparedExperts> PrepareExperts(const ExpertsSource& source, std::span<const SegmentWeights> weights,
                                       const LoadOptions& options = {});

}  // namespace espalier

#endif  // ESPALIER_PREPARE_H_
