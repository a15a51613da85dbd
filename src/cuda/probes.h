// SPDX-License-Identifier: Apache-2.0
//
// What a GPU can do at most: put on a stream beside a benchmark, so that its numbers can be told as shares of
// it. All of it only enqueues; errors are kDevice.
#ifndef ESPALIER_SRC_CUDA_PROBES_H_
#define ESPALIER_SRC_CUDA_PROBES_H_

#include <espalier/formats.h>
#include <espalier/status.h>

#include <cstdint>

#include "cuda/launch.h"

namespace espalier::cuda {

// What the probes leave behind, in device memory. All but MatrixProbe touch `sum` only.
struct ProbeResult {
  uint64_t sum;          // depends on everything that was read or computed
  uint64_t clock_ticks;  // of one multiprocessor, from the begin to the end of MatrixProbe
  uint64_t nanoseconds;  // the same by the wall clock
};

// Reads the buffer once, all multiprocessors together. What it read is in the caches afterwards and nothing
// there waits to be written, so it is also the way to make everything else cold. REQUIRES: size_bytes is a
// multiple of 16.
Result<void> EnqueueReadProbe(const void* buffer, uint64_t size_bytes, const DeviceLimits& limits,
                              ProbeResult* result, void* stream);

// `rounds` times a fixed number of matrix instructions (fp16 operands, fp32 sums, the instruction that every
// architecture here has) without memory. Returns the operations, two a multiply-add.
Result<uint64_t> EnqueueMatrixProbe(uint64_t rounds, const DeviceLimits& limits, ProbeResult* result,
                                    void* stream);

// `rounds` times two quads a warp, decoded from registers into the matrix unit as the products of few rows do
// it, with as many warps an SM, and without memory. Returns the weights decoded. REQUIRES: a rate and
// codebook of formats.def.
Result<uint64_t> EnqueueDecodeProbe(int bits, Codebook codebook, uint64_t rounds, const DeviceLimits& limits,
                                    ProbeResult* result, void* stream);

}  // namespace espalier::cuda

#endif  // ESPALIER_SRC_CUDA_PROBES_H_
