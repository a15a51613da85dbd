// SPDX-License-Identifier: Apache-2.0
//
// Between FC1 and FC2: H128, svh, scale and bias of gate and up, the activation, suh of down, H128. Also how
// any rotated row becomes operands.
#ifndef ESPALIER_SRC_CUDA_BOUNDARY_CUH_
#define ESPALIER_SRC_CUDA_BOUNDARY_CUH_

#include <espalier/formats.h>

#include <cstdint>

#include "cuda/device_table.h"
#include "cuda/launch.h"
#include "cuda/operand.cuh"
#include "cuda/rotate.cuh"
#include "cuda/routes.cuh"
#include "cuda/values.cuh"

namespace espalier::cuda {

__device__ __forceinline__ Operand OperandOf(const DeviceMatrix& matrix, RowClass row_class) {
  if (row_class == RowClass::kWide) return Operand::kWide;
  const bool mul1 = matrix.codebook == static_cast<uint32_t>(Codebook::kMul1);
  return row_class == RowClass::kFew && !mul1 ? Operand::kSplit : Operand::kPair;
}

// Writes a rotated row (fp32 in shared memory), with its scale and, for mul1, its sum.
__device__ inline void StoreOperands(const float* row, uint32_t channels, float max_magnitude, Operand operand,
                              uint4* group, uint32_t row_in_group, float* scale, float* sum, float* shared) {
  const int exponent = RowExponent(BlockMax(max_magnitude, shared));
  const float total = StoreRow(row, channels, PowerOfTwo(-exponent), operand, group, row_in_group);
  if (operand != Operand::kSplit) {
    const float all = BlockSum(total, shared);
    if (threadIdx.x == 0) *sum = all;
  }
  if (threadIdx.x == 0) *scale = PowerOfTwo(exponent);
}

struct BoundaryParams {
  ActivationParams activation = {};
  bool has_gate = true;
  RowClass row_class = RowClass::kFew;
  uint32_t intermediate = 0;  // of the widest segment: the stride
  const float* fc1 = nullptr;
  uint64_t split_stride = 0;
  uint32_t splits = 1;
  const float* scales = nullptr;  // [2][num_rows]
  uint32_t num_rows = 0;
};

// Four channels of a projection's output.
__device__ __forceinline__ float4 ProjectionOutput(const BoundaryParams& params, const DeviceMatrix& matrix,
                                                   uint32_t packed, uint32_t projection, uint32_t channel) {
  const float* at = params.fc1 + (uint64_t{packed} * 2 + projection) * params.intermediate + channel;
  float4 v = *reinterpret_cast<const float4*>(at);
  for (uint32_t split = 1; split < params.splits; ++split) {
    const float4 more = *reinterpret_cast<const float4*>(at + split * params.split_stride);
    v = {v.x + more.x, v.y + more.y, v.z + more.z, v.w + more.w};
  }
  v = Hadamard128(v);
  const float4 svh = LoadVector(matrix.svh + channel);
  const float scale = params.scales[uint64_t{projection} * params.num_rows + packed];
  v = {v.x * scale * svh.x, v.y * scale * svh.y, v.z * scale * svh.z, v.w * scale * svh.w};
  if (matrix.bias != nullptr) {
    const float4 bias = LoadVector(matrix.bias + channel);
    v = {v.x + bias.x, v.y + bias.y, v.z + bias.z, v.w + bias.w};
  }
  return v;
}

// Rotated FC2 inputs of one row, before they are scaled: warps of the block share its blocks of 128 channels.
// Returns this thread's largest magnitude.
__device__ inline float BoundaryRow(const BoundaryParams& params, const DeviceSegment& segment, uint32_t packed,
                                    float* row_values) {
  const DeviceMatrix& down = segment.matrices[2];
  const uint32_t valid = segment.valid_intermediate_channels;
  float max_magnitude = 0;
  for (uint32_t first = threadIdx.x / 32 * 128; first < down.in_channels; first += blockDim.x / 32 * 128) {
    const uint32_t channel = first + 4 * (threadIdx.x & 31);
    float4 gate = {};
    if (params.has_gate) gate = ProjectionOutput(params, segment.matrices[0], packed, 0, channel);
    const float4 up = ProjectionOutput(params, segment.matrices[1], packed, 1, channel);
    const float4 suh = LoadVector(down.suh + channel);
    float4 v = {};
    if (channel < valid) v.x = Activate(params.activation, gate.x, up.x) * suh.x;
    if (channel + 1 < valid) v.y = Activate(params.activation, gate.y, up.y) * suh.y;
    if (channel + 2 < valid) v.z = Activate(params.activation, gate.z, up.z) * suh.z;
    if (channel + 3 < valid) v.w = Activate(params.activation, gate.w, up.w) * suh.w;
    v = Hadamard128(v);
    *reinterpret_cast<float4*>(row_values + channel) = v;
    max_magnitude = fmaxf(max_magnitude, MaxMagnitude(v));
  }
  return max_magnitude;
}

}  // namespace espalier::cuda

#endif  // ESPALIER_SRC_CUDA_BOUNDARY_CUH_
