// SPDX-License-Identifier: Apache-2.0
#include "cuda/runtime_error.h"

#include <fmt/format.h>

namespace espalier::cuda {

Result<void> Check(std::string_view call, cudaError_t error) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  const bool short_of_memory = error == cudaErrorMemoryAllocation;
  return Error(short_of_memory ? StatusCode::kCapacity : StatusCode::kDevice,
               fmt::format("{}: {} ({})", call, cudaGetErrorString(error), cudaGetErrorName(error)));
}

DeviceScope::DeviceScope(const Device& device) {
  int current = -1;
  if (entered_ = Check("cudaGetDevice", cudaGetDevice(&current)); !entered_ || current == device.index)
    return;
  entered_ = Check(fmt::format("cudaSetDevice({})", device.index), cudaSetDevice(device.index));
  if (entered_) before_ = current;
}

DeviceScope::~DeviceScope() {
  if (before_ >= 0) cudaSetDevice(before_);
}

}  // namespace espalier::cuda
