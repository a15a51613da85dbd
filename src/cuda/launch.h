// SPDX-License-Identifier: Apache-2.0
//
// From a layer and a capacity to a configuration (host integers), from a configuration to kernel launches.
// Configure* needs no GPU; Launch* only enqueues: no allocation, no synchronisation, no state outside the
// caller's workspace, so streams and graphs may run side by side with a workspace each.
#ifndef ESPALIER_SRC_CUDA_LAUNCH_H_
#define ESPALIER_SRC_CUDA_LAUNCH_H_

#include <espalier/moe.h>

#include <cstdint>
#include <optional>

#include "cuda/device_table.h"

namespace espalier::cuda {

// What the launch needs to know of a device.
struct DeviceLimits {
  int compute_capability = 0;  // 80, 86, 89, 90, 100, 120
  int num_sms = 0;             // for probes of the machine; no layer depends on it
};

inline constexpr uint64_t kWideRows = 8;
inline constexpr uint64_t kWideTokens = 64;
inline constexpr uint64_t kDenseTokens = 256;        // from here on where it is faster than wide
inline constexpr uint32_t kDenseItemChannels = 256;  // output channels that a cluster takes at a time

// How products are made.
//   few   up to 8 rows share a decoded weight, whose fp16 halves go into the matrix unit unadded
//   many  up to 48 rows share it
//   wide  up to 128 rows share it, on the asynchronous matrix unit of sm_90a
//   dense all rows share it: the matrix is decoded into memory first. Of single matrices, on sm_90a
// A row's bits do not depend on the other rows of a call as long as the class is the same, nor on the device
// within a class.
enum class RowClass { kFew, kMany, kWide, kDense };

constexpr uint64_t TileRows(RowClass row_class) {
  switch (row_class) {
    case RowClass::kFew:
      return 8;
    case RowClass::kMany:
      return 48;
    case RowClass::kWide:
      return 128;
    case RowClass::kDense:
      break;
  }
  return 256;
}

// Rows are (route, segment) pairs: tokens * top_k * segments per expert. Few while experts get 4 rows on
// average: then 98 of 100 have 8 or less. Wide from where it measured faster.
constexpr RowClass ClassOf(uint64_t rows, uint64_t segments, int compute_capability) {
  if (rows <= 4 * segments) return RowClass::kFew;
  return compute_capability == 90 && rows >= kWideRows * segments ? RowClass::kWide : RowClass::kMany;
}
// The same for a single matrix. PlanLinearPass takes kDense in place of kWide where that is faster.
constexpr RowClass LinearClassOf(uint64_t tokens, int compute_capability) {
  if (tokens <= 8) return RowClass::kFew;
  if (compute_capability != 90 || tokens < kWideTokens) return RowClass::kMany;
  return RowClass::kWide;
}
// Groups of 8 rows that `rows` rows of at most `segments` segments can need: each segment begins a group.
constexpr uint64_t MaxGroups(uint64_t rows, uint64_t segments) {
  const uint64_t begun = rows < segments ? rows : segments;
  const uint64_t groups = (rows + 7 * begun) / 8;
  return rows < groups ? rows : groups;
}

// Whether each row is a tile of its own: no kernel that packs, no kernel between FC1 and FC2, at the price of
// decoding an expert once for each of its rows. Then also the operands of FC2 are made in shared memory,
// which bounds the width.
constexpr bool DirectRows(uint64_t rows, uint64_t segments, uint64_t intermediate) {
  return rows <= 32 && rows <= segments && intermediate <= 2048;
}

// Offsets are bytes from the start of the workspace.
struct MoeConfig {
  uint64_t chunk_tokens = 0;  // tokens of one pass over the experts
  uint32_t max_segments = 0;  // per expert, at least 1
  // experts * max_segments: what rows are compared with. Not the segments there are, so that a missing one
  // changes nothing for the others.
  uint32_t segment_slots = 0;
  uint32_t hidden = 0;                           // as stored
  uint32_t intermediate = 0;                     // of the widest segment
  uint64_t counters = 0;                         // uint32 [16]: number of tiles first
  uint64_t expert_counts = 0;                    // uint32 [2][experts + 1]
  uint64_t tiles = 0;                            // Tile [groups]
  uint64_t rows = 0;                             // PackedRow [groups * 8]
  uint64_t row_slots = 0;                        // uint32 [groups * 8]
  uint64_t row_weights = 0;                      // float [groups * 8]
  uint64_t input_exponents = 0, input_sums = 0;  // int32, float [2][groups * 8]
  uint64_t mid_exponents = 0, mid_sums = 0;      // int32, float [groups * 8]
  uint64_t inputs = 0;                           // operands of gate, then of up
  uint64_t fc1 = 0;                              // float [splits][groups * 8][2][intermediate]
  uint64_t mids = 0;                             // operands of down
  uint64_t slots = 0;                            // float [rows][hidden], weighted outputs by (route, segment)
  uint64_t total_bytes = 0;
};

// How the sums of one product are cut into units: by output channels, and by input channels where that is too
// little to fill the machine. Depends on shapes and the number of rows only, so results do not depend on the
// device.
struct SumsPlan {
  uint32_t block_channels = 128;  // 32, 64, 128
  uint32_t splits = 1;
};
SumsPlan PlanSums(RowClass row_class, uint64_t tiles, uint32_t projections, uint32_t in_channels,
                  uint32_t out_channels);

// How one chunk is run: all that the launches depend on, apart from pointers.
struct MoePass {
  RowClass row_class = RowClass::kFew;
  bool direct = false;
  uint64_t groups = 0;             // of 8 packed rows, at most
  uint64_t tiles = 0;              // at most
  SumsPlan sums;                   // of FC1
  uint32_t finish_channels = 128;  // of a unit of FC2: 128, 256
};
// `rows`: tokens * top_k * max_segments. `projections`: 2, or 1 for an activation without gate.
MoePass PlanMoePass(const MoeConfig& config, uint64_t rows, uint32_t projections, int compute_capability);

// Independent of the device. Cost: constant. Errors: kCapacity, kUnsupported (rows too wide).
Result<MoeConfig> ConfigureMoe(const ExpertsTable& experts, const MoePlanOptions& options);

// All pointers of `args`, the table and the workspace are of the device that is current; `stream` is a
// cudaStream_t. Error: kDevice with the name of the launch that failed.
struct MoeLaunch {
  const MoeConfig& config;
  const MoeGeometry& geometry;
  const MoePlanOptions& options;
  const MoeArgs& args;
  DeviceExperts experts;
  DeviceLimits limits;
  void* stream = nullptr;
};
Result<void> LaunchMoe(const MoeLaunch& launch);

struct LinearConfig {
  uint64_t chunk_tokens = 0;
  uint64_t weights = 0;                          // fp16 [out][in], where chunks get as far as kDense
  uint64_t input_exponents = 0, input_sums = 0;  // float [groups * 8]
  uint64_t inputs = 0;                           // operands
  uint64_t sums = 0;                             // float [splits][groups * 8][out]
  uint64_t total_bytes = 0;
};
struct LinearPass {
  RowClass row_class = RowClass::kFew;
  uint32_t groups = 0;
  uint32_t tiles = 0;
  SumsPlan sums;
  // kDense: of the items (a tile of rows, 256 output channels), those that are taken whole; the others are
  // taken by halves, which fill the last turn better. All of them where inputs are split.
  uint32_t whole_items = 0;
};
// `forced`: for tests and benchmarks, a class in place of the one that the numbers give.
LinearPass PlanLinearPass(uint64_t tokens, uint32_t in_channels, uint32_t out_channels,
                          int compute_capability, std::optional<RowClass> forced = {});

Result<LinearConfig> ConfigureLinear(const PreparedLinear& linear, const LinearPlanOptions& options);

// What a call does; other than this only in tests and benchmarks. REQUIRES of a forced class: it is one of
// the device, and for kDense the plan's max_tokens are kDenseTokens or more.
struct LinearSteps {
  std::optional<RowClass> forced = {};
  bool rotate = true;
  bool decode = true;  // kDense
  bool products = true;
  bool output = true;  // kDense without products: of one set of sums, whatever they are
};

struct LinearLaunch {
  const LinearConfig& config;
  const LinearPlanOptions& options;
  const LinearArgs& args;
  DeviceMatrix matrix;
  uint32_t in_channels = 0;  // as the model sees them
  uint32_t out_channels = 0;
  DeviceLimits limits;
  void* stream = nullptr;
  LinearSteps steps = {};
};
Result<void> LaunchLinear(const LinearLaunch& launch);

// RunLinear by this executor with `steps`. REQUIRES: a plan, a linear and arguments that RunLinear takes.
Result<void> RunLinearSteps(const LinearPlan& plan, const PreparedLinear& linear, const LinearArgs& args,
                            const LinearSteps& steps);

}  // namespace espalier::cuda

#endif  // ESPALIER_SRC_CUDA_LAUNCH_H_
