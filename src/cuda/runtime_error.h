// SPDX-License-Identifier: Apache-2.0
//
// Errors of the CUDA runtime as Status, and the current device of a thread.
#ifndef ESPALIER_SRC_CUDA_RUNTIME_ERROR_H_
#define ESPALIER_SRC_CUDA_RUNTIME_ERROR_H_

#include <cuda_runtime_api.h>
#include <espalier/device.h>
#include <espalier/status.h>

#include <string_view>

namespace espalier::cuda {

// Empty for cudaSuccess; else kCapacity where memory is short, kDevice otherwise, with the call and the
// driver's sentence. Takes the error away, so that the next call does not report it again.
Result<void> Check(std::string_view call, cudaError_t error);

// Makes a device current in this thread, and puts back the one before when it dies. Costs no driver call
// worth naming where it is current already.
class DeviceScope {
 public:
  explicit DeviceScope(const Device& device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

  // Whether it is current now. Error: kDevice.
  const Result<void>& entered() const { return entered_; }

 private:
  int before_ = -1;  // to be put back; -1 = nothing
  Result<void> entered_;
};

}  // namespace espalier::cuda

#endif  // ESPALIER_SRC_CUDA_RUNTIME_ERROR_H_
