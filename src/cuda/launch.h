// SPDX-License-Identifier: Apache-2.0
//
// From a layer and a capacity to a configuration (host integers), from a configuration to kernel launches.
// Configure* needs no GPU; Launch* only enqueues: no allocation, no synchronisation, no state outside the
// caller's workspace, so streams and graphs may run side by side with a workspace each.
#ifndef ESPALIER_SRC_CUDA_LAUNCH_H_
#define ESPALIER_SRC_CUDA_LAUNCH_H_

#include <espalier/moe.h>

#include <cstdint>

#include "cuda/device_table.h"

namespace espalier::cuda {

// What the launch needs to know of a device.
struct DeviceLimits {
  int compute_capability = 0;  // 80, 86, 89, 90, 100, 120
  int num_sms = 0;             // that the grid may count on; fewer is slower, never wrong
};

// Offsets are bytes from the start of the workspace, sizes are for one chunk of tokens.
struct MoeConfig {
  uint64_t chunk_tokens = 0;   // tokens of one pass over the experts
  uint64_t chunk_rows = 0;     // (route, segment) pairs of a chunk at most
  uint64_t chunk_groups = 0;   // groups of 8 rows at most
  uint32_t max_segments = 0;   // per expert
  uint32_t hidden = 0;         // stored
  uint32_t intermediate = 0;   // of the widest segment
  uint64_t counters = 0, segment_rows = 0, tiles = 0, rows = 0, row_slots = 0;
  uint64_t inputs = 0, input_scales = 0, fc1 = 0, mids = 0, mid_scales = 0, slots = 0;
  uint64_t total_bytes = 0;
};

// Independent of the device. Cost: constant. Error: kCapacity.
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
  uint64_t inputs = 0, input_scales = 0, sums = 0;
  uint64_t total_bytes = 0;
};
Result<LinearConfig> ConfigureLinear(const PreparedLinear& linear, const LinearPlanOptions& options);

struct LinearLaunch {
  const LinearConfig& config;
  const LinearPlanOptions& options;
  const LinearArgs& args;
  DeviceMatrix matrix;
  uint32_t in_channels = 0;   // as the model sees them
  uint32_t out_channels = 0;
  DeviceLimits limits;
  void* stream = nullptr;
};
Result<void> LaunchLinear(const LinearLaunch& launch);

}  // namespace espalier::cuda

#endif  // ESPALIER_SRC_CUDA_LAUNCH_H_
