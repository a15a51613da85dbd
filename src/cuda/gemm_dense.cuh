// SPDX-License-Identifier: Apache-2.0
//
// The dense class: a single matrix decoded once into memory, and a product of plain fp16. What a sum becomes
// on its way out of a linear is here too, as that product does it itself.
#ifndef ESPALIER_SRC_CUDA_GEMM_DENSE_CUH_
#define ESPALIER_SRC_CUDA_GEMM_DENSE_CUH_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/device_table.h"
#include "cuda/launch.h"
#include "cuda/values.cuh"

namespace espalier::cuda {

// H128(sums) * 2^exponent * svh + bias.
struct OutputParams {
  DeviceMatrix matrix = {};
  const float* sums = nullptr;  // [splits][num_rows][out]
  uint32_t splits = 1;
  uint64_t split_stride = 0;
  const int32_t* exponents = nullptr;  // [rows]
  uint32_t channels = 0;               // of y
  Value type = Value::kF32;
  void* y = nullptr;
  uint64_t y_stride = 0;
  bool accumulate = false;
};

struct DenseParams {
  const std::byte* weights = nullptr;  // [out / 128][in / 64][128 lines], as decoded
  const uint4* inputs = nullptr;       // Operand::kWide
  const float* input_sums = nullptr;   // [rows], of mul1
  float* sums = nullptr;               // [splits][groups * 8][out], where inputs are split
  uint32_t rows = 0;
  uint32_t groups = 0;  // of 8 rows
  uint32_t log2_splits = 0;
  uint32_t whole_items = 0;
  OutputParams output = {};
};

// The matrix as fp16 (mul1: 1024 + byte sum) to `weights`, 2 * in * out bytes.
cudaError_t LaunchDecodeMatrix(const DeviceMatrix& matrix, std::byte* weights, cudaStream_t stream,
                               bool dependent);
cudaError_t LaunchDenseRows(const DenseParams& params, cudaStream_t stream, bool dependent);

}  // namespace espalier::cuda

#endif  // ESPALIER_SRC_CUDA_GEMM_DENSE_CUH_
