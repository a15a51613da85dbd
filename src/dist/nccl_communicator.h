// SPDX-License-Identifier: Apache-2.0
//
// Sums between GPUs, one a rank. Built where NCCL and the CUDA runtime are found (ESPALIER_NCCL).
#ifndef ESPALIER_SRC_DIST_NCCL_COMMUNICATOR_H_
#define ESPALIER_SRC_DIST_NCCL_COMMUNICATOR_H_

#include <espalier/status.h>

#include <memory>
#include <string>

#include "dist/communicator.h"

namespace espalier {

struct NcclOptions {
  int device = 0;          // of this rank; NCCL refuses two ranks on one
  void* stream = nullptr;  // cudaStream_t the sums are enqueued on; null = the default stream
};

// Collective over `bootstrap`, whose ranks the new world has, and which carries its words (Broadcast,
// AllReduceMax) between hosts; it must live longer. Success or failure on all ranks alike. The spans of the
// sums are device memory, and a sum is done when the stream gets past it, or when Synchronize returns: that
// also reports, as kDevice, a peer that was lost meanwhile. Errors: kDevice.
Result<std::unique_ptr<Communicator>> NcclCommunicator(Communicator& bootstrap, const NcclOptions& options);

// "2.28.9", of the library that is loaded.
std::string NcclVersion();

}  // namespace espalier

#endif  // ESPALIER_SRC_DIST_NCCL_COMMUNICATOR_H_
