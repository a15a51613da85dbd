// SPDX-License-Identifier: Apache-2.0
//
// The executors by declaration only: each is defined in its own folder, above this one.
#ifndef ESPALIER_SRC_MOE_BACKEND_LIST_H_
#define ESPALIER_SRC_MOE_BACKEND_LIST_H_

#include <espalier/backend.h>

#include <string_view>

namespace espalier {

const Backend& CudaBackend();  // in a build with CUDA
const Backend& CpuBackend();
const Backend& ReferenceBackend();

// The name to look for: `executor` when it is not empty, else ESPALIER_FORCE_BACKEND, else empty.
std::string_view ForcedBackendName(std::string_view executor);

}  // namespace espalier

#endif  // ESPALIER_SRC_MOE_BACKEND_LIST_H_
