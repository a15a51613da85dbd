// SPDX-License-Identifier: Apache-2.0
//
// A MoE call on a GPU for callers whose arrays are on the host. Streams, graphs and timing themselves are in
// cuda/device_runtime.h.
#ifndef ESPALIER_CLI_DEVICE_RUN_H_
#define ESPALIER_CLI_DEVICE_RUN_H_

#include <espalier/device.h>
#include <espalier/moe.h>
#include <espalier/status.h>

#include "cuda/device_runtime.h"

namespace espalier::cli {

// The device that an option names, with a check that it is there. Errors: kUsage, kDevice.
Result<Device> FindDevice(std::string_view option, std::string_view text);

// The arrays of one call in device memory, a workspace and a stream of its own. What it points to stays at
// its place for as long as it lives, so that a graph may be captured over it.
class DeviceMoeCall {
 public:
  // Uploads the arrays of `host`, y included when it accumulates. Ids are checked here, as they cannot be in
  // the run. Errors: kGeometry (ids), kDevice, kCapacity.
  static Result<DeviceMoeCall> Create(const MoePlan& plan, const MoeArgs& host);

  const MoeArgs& args() const { return args_; }  // on the device
  const cuda::Stream& stream() const { return stream_; }

  // Puts one run on the stream.
  Result<void> Run(const MoePlan& plan, const PreparedExperts& experts) const {
    return RunMoe(plan, experts, args_);
  }
  // Waits for the stream and copies y, rows and gaps, to the host.
  Result<void> Finish(void* y) const;

 private:
  explicit DeviceMoeCall(cuda::Stream stream) : stream_(std::move(stream)) {}
  cuda::Stream stream_;
  DeviceBuffer x_, ids_, weights_, map_, y_, workspace_;
  MoeArgs args_;
};

}  // namespace espalier::cli

#endif  // ESPALIER_CLI_DEVICE_RUN_H_
