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

// Writes a rotated row, with its exponent and the sum of its operands. `max_exponent`: this thread's.
__device__ inline void StoreOperands(const RowBuffer& row, uint32_t channels, float max_exponent,
                                     Operand operand, uint4* group, uint32_t row_in_group, int32_t* exponent,
                                     float* sum, float* shared, uint64_t quad_room = 0) {
  const int row_exponent = RowExponent(BlockMax(max_exponent, shared));
  const float total = StoreRow(row, channels, row_exponent, operand, group, row_in_group, quad_room);
  if (operand != Operand::kSplit) {
    const float all = BlockSum(total, shared);
    if (threadIdx.x == 0) *sum = all;
  }
  if (threadIdx.x == 0) *exponent = row_exponent;
}

struct BoundaryParams {
  ActivationParams activation = {};
  bool has_gate = true;
  RowClass row_class = RowClass::kFew;
  uint32_t intermediate = 0;  // of the widest segment: the stride
  const float* fc1 = nullptr;
  uint64_t split_stride = 0;
  uint32_t splits = 1;
  const int32_t* exponents = nullptr;  // [2][num_rows]
  uint32_t num_rows = 0;
};

template <typename Real>
struct Four {
  Real v[4];
};

// What a row's boundary needs beside the sums of FC1. None of it is written by the kernel before, so it is
// asked for ahead of the wait: the vectors come from memory, a microsecond later. Those of the thread's first
// four channels; later ones are asked for on the way.
struct BoundaryFacts {
  int exponents[2];
  uint2 gate_svh, up_svh, down_suh;  // four fp16 each

  __device__ __forceinline__ void LoadVectors(const BoundaryParams& params, const DeviceSegment& segment,
                                              uint32_t channel) {
    const auto load = [&](const uint16_t* vector) {
      return __ldg(reinterpret_cast<const uint2*>(vector + channel));
    };
    if (params.has_gate) gate_svh = load(segment.matrices[0].svh);
    up_svh = load(segment.matrices[1].svh);
    down_suh = load(segment.matrices[2].suh);
  }
};

// First channel of the calling thread.
__device__ __forceinline__ uint32_t BoundaryChannel() { return 4 * threadIdx.x; }

__device__ __forceinline__ BoundaryFacts LoadBoundaryFacts(const BoundaryParams& params,
                                                           const DeviceSegment& segment, uint32_t packed) {
  BoundaryFacts facts = {};
  if (params.has_gate) facts.exponents[0] = params.exponents[packed];
  facts.exponents[1] = params.exponents[params.num_rows + packed];
  if (BoundaryChannel() < segment.matrices[2].in_channels) {
    facts.LoadVectors(params, segment, BoundaryChannel());
  }
  return facts;
}

// Four channels of a projection's output.
template <typename Real>
__device__ __forceinline__ Four<Real> ProjectionOutput(const BoundaryParams& params,
                                                       const DeviceMatrix& matrix, uint32_t packed,
                                                       uint32_t projection, int exponent, uint2 signs,
                                                       uint32_t channel) {
  const float* at = params.fc1 + (uint64_t{packed} * 2 + projection) * params.intermediate + channel;
  float4 sums = *reinterpret_cast<const float4*>(at);
  for (uint32_t split = 1; split < params.splits; ++split) {
    const float4 more = *reinterpret_cast<const float4*>(at + split * params.split_stride);
    sums = {sums.x + more.x, sums.y + more.y, sums.z + more.z, sums.w + more.w};
  }
  sums = Hadamard128(sums);
  const float4 svh = FourHalves(signs);
  const Real scale = static_cast<Real>(PowerOfTwo(exponent));
  Four<Real> out = {{Real{sums.x} * scale * svh.x, Real{sums.y} * scale * svh.y, Real{sums.z} * scale * svh.z,
                     Real{sums.w} * scale * svh.w}};
  if (matrix.bias != nullptr) {
    const float4 bias = LoadVector(matrix.bias + channel);
    out = {{out.v[0] + bias.x, out.v[1] + bias.y, out.v[2] + bias.z, out.v[3] + bias.w}};
  }
  return out;
}

template <typename Real>
__device__ __forceinline__ ScaledBlock BoundaryBlock(const BoundaryParams& params,
                                                     const DeviceSegment& segment, uint32_t packed,
                                                     const BoundaryFacts& facts, uint32_t channel) {
  Four<Real> gate = {};
  if (params.has_gate) {
    gate = ProjectionOutput<Real>(params, segment.matrices[0], packed, 0, facts.exponents[0], facts.gate_svh,
                                  channel);
  }
  const Four<Real> up = ProjectionOutput<Real>(params, segment.matrices[1], packed, 1, facts.exponents[1],
                                               facts.up_svh, channel);
  const float4 suh = FourHalves(facts.down_suh);
  const float signs[] = {suh.x, suh.y, suh.z, suh.w};
  Real v[4] = {};
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    if (channel + i >= segment.valid_intermediate_channels) continue;
    v[i] = Activate<Real>(params.activation, gate.v[i], up.v[i]) * signs[i];
  }
  return ScaleBlock(v[0], v[1], v[2], v[3]);
}

// Rotated FC2 inputs of one row: warps of the block share its blocks of 128 channels. In double where the row
// was so large or small that products leave the range of fp32. Returns this thread's largest exponent.
__device__ inline float BoundaryRow(const BoundaryParams& params, const DeviceSegment& segment,
                                    uint32_t packed, BoundaryFacts facts, const RowBuffer& row) {
  const bool ordinary = Ordinary(2 * facts.exponents[0]) && Ordinary(2 * facts.exponents[1]);
  float max_exponent = kNoExponent;
  for (uint32_t channel = BoundaryChannel(); channel < segment.matrices[2].in_channels;
       channel += 4 * blockDim.x) {
    if (channel != BoundaryChannel()) facts.LoadVectors(params, segment, channel);
    const ScaledBlock block = ordinary ? BoundaryBlock<float>(params, segment, packed, facts, channel)
                                       : BoundaryBlock<double>(params, segment, packed, facts, channel);
    max_exponent = fmaxf(max_exponent, row.PutRotated(channel, block));
  }
  return max_exponent;
}

}  // namespace espalier::cuda

#endif  // ESPALIER_SRC_CUDA_BOUNDARY_CUH_
