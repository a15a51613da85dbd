// SPDX-License-Identifier: Apache-2.0
//
// One matrix for all rows: rotate, sums, output. The products are those of the experts; where all rows share
// a decoded matrix: rotate, decode, products, and an output kernel only where their inputs are split.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>

#include "cuda/gemm_dense.cuh"
#include "cuda/gemm_launch.cuh"
#include "cuda/launch.h"
#include "cuda/rotate_inputs.cuh"

namespace espalier::cuda {
namespace {

constexpr uint32_t kOutputThreads = 128;

// A warp takes 128 channels of one row.
__global__ void __launch_bounds__(kOutputThreads) StoreOutputs(const __grid_constant__ OutputParams params) {
  const uint32_t block = blockIdx.x * (kOutputThreads / 32) + threadIdx.x / 32;
  const uint32_t row = blockIdx.y;
  const uint32_t channel = block * kHadamardChannels + (threadIdx.x & 31) * 4;
  WaitForPreviousKernel();
  if (block * kHadamardChannels >= params.channels) return;
  const float* at = params.sums + uint64_t{row} * params.matrix.out_channels + channel;
  float4 v = *reinterpret_cast<const float4*>(at);
  for (uint32_t split = 1; split < params.splits; ++split) {
    const float4 more = *reinterpret_cast<const float4*>(at + split * params.split_stride);
    v = {v.x + more.x, v.y + more.y, v.z + more.z, v.w + more.w};
  }
  v = Hadamard128(v);
  const float4 svh = LoadVector(params.matrix.svh + channel);
  float4 bias = {};
  if (params.matrix.bias != nullptr) bias = LoadVector(params.matrix.bias + channel);
  const int exponent = params.exponents[row];
  float values[4];
  if (Ordinary(exponent)) {
    const float scale = static_cast<float>(PowerOfTwo(exponent));
    values[0] = v.x * scale * svh.x + bias.x;
    values[1] = v.y * scale * svh.y + bias.y;
    values[2] = v.z * scale * svh.z + bias.z;
    values[3] = v.w * scale * svh.w + bias.w;
  } else {
    const double scale = PowerOfTwo(exponent);
    values[0] = static_cast<float>(double{v.x} * scale * double{svh.x} + double{bias.x});
    values[1] = static_cast<float>(double{v.y} * scale * double{svh.y} + double{bias.y});
    values[2] = static_cast<float>(double{v.z} * scale * double{svh.z} + double{bias.z});
    values[3] = static_cast<float>(double{v.w} * scale * double{svh.w} + double{bias.w});
  }
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    if (channel + i >= params.channels) break;
    StoreValue(params.type, params.y, row * params.y_stride + channel + i, values[i], params.accumulate);
  }
}

uint32_t Log2(uint32_t power_of_two) { return static_cast<uint32_t>(std::countr_zero(power_of_two)); }

// `decoded`: whether a chunk before has decoded the matrix.
Result<void> LaunchChunk(const LinearLaunch& launch, uint64_t first_token, uint32_t num_tokens,
                         bool& decoded) {
  const LinearArgs& args = launch.args;
  const DeviceMatrix& matrix = launch.matrix;
  std::byte* workspace = static_cast<std::byte*>(args.workspace);
  const cudaStream_t stream = static_cast<cudaStream_t>(launch.stream);
  const LinearSteps& steps = launch.steps;
  const LinearPass pass = PlanLinearPass(num_tokens, matrix.in_channels, matrix.out_channels,
                                         launch.limits.compute_capability, steps.forced);
  const bool few = pass.row_class == RowClass::kFew, dense = pass.row_class == RowClass::kDense;
  const bool wide = pass.row_class == RowClass::kWide || dense;
  const uint32_t num_rows = pass.groups * kGroupRows;
  const RowSource rows = {.kind = RowKind::kSingle,
                          .count = num_tokens,
                          .matrix = matrix,
                          .tile_groups = (pass.groups + pass.tiles - 1) / pass.tiles};
  uint4* inputs = reinterpret_cast<uint4*>(workspace + launch.config.inputs);
  int32_t* exponents = reinterpret_cast<int32_t*>(workspace + launch.config.input_exponents);
  float* input_sums = reinterpret_cast<float*>(workspace + launch.config.input_sums);
  float* sums = reinterpret_cast<float*>(workspace + launch.config.sums);
  std::byte* weights = workspace + launch.config.weights;
  const uint64_t room = wide ? uint64_t{pass.groups} * kWidePieces
                             : GroupPieces(matrix.in_channels, few ? Operand::kSplit : Operand::kPair);

  const RotateParams rotate = {
      .rows = rows,
      .type = ValueOf(launch.options.input),
      .x = static_cast<const std::byte*>(args.x) +
           first_token * args.x_row_stride * static_cast<uint64_t>(DtypeBits(launch.options.input)) / 8,
      .x_stride = args.x_row_stride,
      .channels = launch.in_channels,
      .stored_channels = matrix.in_channels,
      .num_projections = 1,
      .row_class = wide ? RowClass::kWide : pass.row_class,
      .inputs = inputs,
      .group_room = room,
      .exponents = exponents,
      .sums = input_sums,
      .num_rows = num_rows};
  const GemmParams products = {.rows = rows,
                               .prefetch = few,
                               .num_projections = 1,
                               .log2_tiles = Log2(pass.sums.block_channels / kTileChannels),
                               .log2_splits = Log2(pass.sums.splits),
                               .inputs = inputs,
                               .group_room = room,
                               .input_sums = input_sums,
                               .num_rows = num_rows,
                               .out = sums,
                               .out_row = matrix.out_channels,
                               .out_split = uint64_t{num_rows} * matrix.out_channels};
  const OutputParams output = {
      .matrix = matrix,
      .sums = sums,
      .splits = steps.products ? pass.sums.splits : 1,
      .split_stride = products.out_split,
      .exponents = exponents,
      .channels = launch.out_channels,
      .type = ValueOf(launch.options.output),
      .y = static_cast<std::byte*>(args.y) +
           first_token * args.y_row_stride * static_cast<uint64_t>(DtypeBits(launch.options.output)) / 8,
      .y_stride = args.y_row_stride,
      .accumulate = args.accumulate};
  const DenseParams dense_products = {.weights = weights,
                                      .inputs = inputs,
                                      .input_sums = input_sums,
                                      .sums = sums,
                                      .rows = num_tokens,
                                      .groups = pass.groups,
                                      .log2_splits = Log2(pass.sums.splits),
                                      .whole_items = pass.whole_items,
                                      .output = output};

  Chain chain;
  bool follows = false;  // a kernel of this chain, as far as the architecture cares
  const auto add = [&](bool wanted, const char* name, auto&& start) {
    if (!wanted) return;
    chain.Add(name, start);
    follows = launch.limits.compute_capability >= 90;
  };
  add(steps.rotate, "rotate", [&] { return LaunchRotate(rotate, num_tokens, stream, follows); });
  add(steps.decode && dense && !decoded, "decode",
      [&] { return LaunchDecodeMatrix(matrix, weights, stream, follows); });
  decoded = decoded || dense;
  add(steps.products, "sums", [&] {
    if (dense) return LaunchDenseRows(dense_products, stream, follows);
    const dim3 grid(matrix.out_channels / pass.sums.block_channels, pass.sums.splits, pass.tiles);
    return LaunchRows(pass.row_class, products, grid, stream, follows);
  });
  const bool stored = dense && steps.products && pass.sums.splits == 1;  // by the products themselves
  add(steps.output && !stored, "output", [&] {
    const uint32_t blocks = matrix.out_channels / kHadamardChannels;
    const uint32_t warps = kOutputThreads / 32;
    return Launch(StoreOutputs, dim3((blocks + warps - 1) / warps, num_tokens), kOutputThreads, 0, stream,
                  follows, output);
  });
  return chain.result();
}

}  // namespace

Result<void> LaunchLinear(const LinearLaunch& launch) {
  bool decoded = false;
  for (uint64_t first = 0; first < launch.args.num_tokens; first += launch.config.chunk_tokens) {
    const uint64_t tokens = std::min(launch.config.chunk_tokens, launch.args.num_tokens - first);
    Result<void> run = LaunchChunk(launch, first, static_cast<uint32_t>(tokens), decoded);
    if (!run) return run;
  }
  return {};
}

}  // namespace espalier::cuda
