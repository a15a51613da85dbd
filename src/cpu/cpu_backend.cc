// SPDX-License-Identifier: Apache-2.0
//
// The cpu executor, mode exact: fp32 products on decoded blocks, nothing stored in less. Tokens are
// taken in chunks. Per chunk:
//   load   every row of x as fp32, scaled by a power of two where its range asks for it
//   FC1    a task is (segment, 128 intermediate channels): rotate, decode, multiply, activate, rotate
//   FC2    a task is 128 hidden channels: all experts in order, added up into the block of every row
//   store  one rounding
// A row's result depends on its own inputs only: neither on the thread count nor on chunks and groups.
#include <espalier/backend.h>

#include <algorithm>
#include <array>
#include <span>

#include "base/half.h"
#include "cpu/kernels.h"
#include "moe/backend_list.h"
#include "moe/matrix_view.h"
#include "moe/route_pack.h"
#include "moe/rows.h"
#include "moe/workspace.h"
#include "reference/activation.h"
#include "reference/hadamard.h"

namespace espalier {
namespace {

// Bounds the workspace (glm-5.2, top-8: 46 MiB), and is large enough that the time to decode a block is
// small against the products it is used for.
constexpr uint64_t kChunkTokens = 512;
constexpr uint64_t kChunkRoutes = 8192;  // so that a large top-k does not enlarge it further
// Rows that share one decoded block: inputs and sums of a group stay in the second-level cache.
constexpr uint32_t kGroupRows = 64;
constexpr uint32_t kGroupValues = kGroupRows * kBlockChannels;

// Scratch of one thread.
struct Lane {
  float weights[kBlockWeights];
  float inputs[kGroupValues];
  float first_sums[kGroupValues];
  float second_sums[kGroupValues];
  float factors[kGroupRows];
  int32_t exponents[kGroupRows];
};

struct MoeLayout {
  uint64_t chunk_tokens = 0;
  uint64_t expert_channels = 0;  // intermediate channels of the widest expert, segments summed
  uint64_t pack = 0;
  uint64_t lanes = 0;
  uint64_t rows = 0;           // float [tokens][stored hidden]; x, then y
  uint64_t row_exponents = 0;  // int32 [tokens]
  uint64_t reached = 0;        // uint8 [tokens]: a route of the token leads to a segment
  uint64_t mid = 0;            // float [packed routes][expert channels], rotated inputs of FC2
  uint64_t mid_exponents = 0;  // int32 [packed routes][expert channels / 128]
  uint64_t total_bytes = 0;
};

Result<MoeLayout> LayOut(const ExpertsTable& experts, const MoePlanOptions& options) {
  const MoeGeometry& geometry = experts.geometry();
  MoeLayout layout;
  layout.chunk_tokens = ChunkTokens(options, kChunkTokens, kChunkRoutes);
  for (uint32_t expert = 0; expert < geometry.experts; ++expert) {
    uint64_t channels = 0;
    for (const SegmentDesc& segment : experts.ExpertSegments(expert))
      channels += segment.intermediate_channels();
    layout.expert_channels = std::max(layout.expert_channels, channels);
  }
  const Result<uint64_t> pack_bytes = RoutePackBytes(layout.chunk_tokens, options.top_k, geometry.experts);
  if (!pack_bytes) return tl::unexpected(pack_bytes.error());
  const CheckedBytes routes = layout.chunk_tokens * options.top_k;

  WorkspaceLayout arrays;
  layout.pack = arrays.Add(*pack_bytes, 1);
  layout.lanes = arrays.Add(static_cast<uint64_t>(NumLanes(options.num_threads)), sizeof(Lane));
  layout.rows = arrays.Add(layout.chunk_tokens * geometry.stored_hidden_channels, sizeof(float));
  layout.row_exponents = arrays.Add(layout.chunk_tokens, sizeof(int32_t));
  layout.reached = arrays.Add(layout.chunk_tokens, sizeof(uint8_t));
  layout.mid = arrays.Add(routes * layout.expert_channels, sizeof(float));
  layout.mid_exponents = arrays.Add(routes * (layout.expert_channels / kBlockChannels), sizeof(int32_t));
  const Result<uint64_t> total = arrays.TotalBytes();
  if (!total) return tl::unexpected(total.error());
  layout.total_bytes = *total;
  return layout;
}

struct LinearLayout {
  uint64_t chunk_tokens = 0;
  uint64_t lanes = 0, rows = 0, row_exponents = 0;
  uint64_t total_bytes = 0;
};

Result<LinearLayout> LayOut(const PreparedLinear& linear, const LinearPlanOptions& options) {
  LinearLayout layout;
  layout.chunk_tokens = std::min(options.max_tokens, kChunkTokens);
  WorkspaceLayout arrays;
  layout.lanes = arrays.Add(static_cast<uint64_t>(NumLanes(options.num_threads)), sizeof(Lane));
  layout.rows = arrays.Add(layout.chunk_tokens * linear.matrix().in_channels, sizeof(float));
  layout.row_exponents = arrays.Add(layout.chunk_tokens, sizeof(int32_t));
  const Result<uint64_t> total = arrays.TotalBytes();
  if (!total) return tl::unexpected(total.error());
  layout.total_bytes = *total;
  return layout;
}

// Inputs of one call as fp32 rows times 2^-exponent.
struct ScaledRows {
  float* values = nullptr;       // [tokens][stored_channels]
  int32_t* exponents = nullptr;  // [tokens]
  uint64_t stored_channels = 0;

  void Load(uint64_t token, Dtype dtype, const void* x, uint64_t first, uint64_t channels) const {
    float* row = values + token * stored_channels;
    LoadRow(dtype, x, first, channels, row);
    std::fill(row + channels, row + stored_channels, 0.0f);
    const int32_t exponent = RowExponent(row, channels);
    exponents[token] = exponent == kZeroExponent ? 0 : exponent;
    if (exponents[token] == 0) return;
    const double factor = PowerOfTwo(-exponent);  // up to 2^149: beyond fp32
    for (uint64_t i = 0; i < channels; ++i) row[i] = static_cast<float>(row[i] * factor);
  }
};

// Rows that are multiplied together.
struct RowGroup {
  std::array<const float*, kGroupRows> rows;
  uint32_t count = 0;
};

struct Product {
  MatrixView matrix;
  float* sums = nullptr;  // [group rows][128]
};

void RotateInputs(const RowGroup& group, const uint16_t* suh, uint64_t first, float* inputs) {
  float signs[kBlockChannels];
  LoadBlockVector(suh, first, signs);
  for (uint32_t row = 0; row < group.count; ++row) {
    float* target = inputs + row * kBlockChannels;
    for (uint32_t i = 0; i < kBlockChannels; ++i) target[i] = group.rows[row][first + i] * signs[i];
    Hadamard128(target);
  }
}

// sums = H(x * suh) W[:, out_block] for every product. Products with the same vector share a rotation.
void MultiplyInputs(std::span<const Product> products, uint32_t out_block, const RowGroup& group,
                    Lane& lane) {
  for (const Product& product : products) std::fill_n(product.sums, group.count * kBlockChannels, 0.0f);
  for (uint32_t block = 0; block < products[0].matrix.in_channels / kBlockChannels; ++block) {
    const uint16_t* rotated_with = nullptr;
    for (const Product& product : products) {
      if (product.matrix.suh != rotated_with) {
        RotateInputs(group, product.matrix.suh, uint64_t{block} * kBlockChannels, lane.inputs);
        rotated_with = product.matrix.suh;
      }
      DecodeBlock(product.matrix, block, out_block, lane.weights);
      MultiplyBlock(lane.inputs, kBlockChannels, group.count, lane.weights, nullptr, product.sums);
    }
  }
}

// values = H(sums) * svh * 2^exponent + bias for one row of a block. In double: a row that was scaled
// may leave the range of fp32 here.
void FinishBlock(const MatrixView& matrix, uint32_t out_block, int32_t exponent, float* sums,
                 double* values) {
  Hadamard128(sums);
  const uint64_t first = uint64_t{out_block} * kBlockChannels;
  const double factor = exponent == 0 ? 1.0 : PowerOfTwo(exponent);
  for (uint32_t i = 0; i < kBlockChannels; ++i) {
    values[i] = double{sums[i]} * double{Fp16ToFloat(matrix.svh[first + i])} * factor;
    if (matrix.bias != nullptr) values[i] += double{Fp16ToFloat(matrix.bias[first + i])};
  }
}

// Everything that the tasks of one chunk share.
struct MoeChunk {
  const MoePlan& plan;
  const PreparedExperts& experts;
  const MoeArgs& args;
  const MoeLayout& layout;
  uint64_t first_token = 0;
  uint64_t num_tokens = 0;
  RoutePack pack = {};
  ScaledRows rows = {};

  std::byte* At(uint64_t offset) const { return static_cast<std::byte*>(args.workspace) + offset; }
  Lane& lane(uint64_t index) const { return reinterpret_cast<Lane*>(At(layout.lanes))[index]; }
  float* mid(uint64_t packed) const {
    return reinterpret_cast<float*>(At(layout.mid)) + packed * layout.expert_channels;
  }
  int32_t* mid_exponents(uint64_t packed) const {
    return reinterpret_cast<int32_t*>(At(layout.mid_exponents)) +
           packed * (layout.expert_channels / kBlockChannels);
  }
  uint8_t* reached() const { return reinterpret_cast<uint8_t*>(At(layout.reached)); }
  uint64_t TokenOf(uint32_t packed) const { return pack.packed_route_indices[packed] / plan.options().top_k; }
  float WeightOf(uint32_t packed) const {
    const uint32_t route = pack.packed_route_indices[packed];
    const uint64_t token = first_token + route / plan.options().top_k;
    return args.topk_weights[token * args.topk_weights_row_stride + route % plan.options().top_k];
  }
};

uint32_t ValidBlocks(const SegmentDesc& segment) {
  return (segment.valid_intermediate_channels + kBlockChannels - 1) / kBlockChannels;
}

// Rotated FC2 inputs of one row and block: H(act(g, u) * suh), scaled by their own power of two.
void Boundary(const MoeChunk& chunk, const SegmentDesc& segment, const uint16_t* down_suh, uint32_t block,
              const double* gate, const double* up, float* mid, int32_t* mid_exponent) {
  const Activation& activation = chunk.plan.geometry().activation;
  const uint64_t first = uint64_t{block} * kBlockChannels;
  const uint64_t valid = std::min<uint64_t>(kBlockChannels, segment.valid_intermediate_channels - first);
  double values[kBlockChannels] = {};
  for (uint64_t i = 0; i < valid; ++i) {
    values[i] = Activate(activation, gate[i], up[i]) * double{Fp16ToFloat(down_suh[first + i])};
  }
  *mid_exponent = RowExponent(values, kBlockChannels);
  const bool scaled = *mid_exponent != 0 && *mid_exponent != kZeroExponent;
  const double factor = scaled ? PowerOfTwo(-*mid_exponent) : 1.0;
  for (uint32_t i = 0; i < kBlockChannels; ++i) mid[i] = static_cast<float>(values[i] * factor);
  Hadamard128(mid);
}

// FC1 and activation of one segment and 128 intermediate channels, for all routes of the expert.
// `first_block` is the segment's place among the blocks of its expert.
void RunFc1Block(const MoeChunk& chunk, const SegmentDesc& segment, uint32_t first_block, uint32_t block,
                 Lane& lane) {
  const std::byte* slab = chunk.experts.slab();
  const MatrixView gate = ViewOf(segment.gate(), slab);
  const MatrixView up = ViewOf(segment.up(), slab);
  const MatrixView down = ViewOf(segment.down(), slab);
  const bool has_gate = segment.gate().present();
  const Product both[] = {{gate, lane.first_sums}, {up, lane.second_sums}};
  const std::span<const Product> products = std::span(both).subspan(has_gate ? 0 : 1);

  const uint32_t end = chunk.pack.expert_offsets[segment.expert + 1];
  for (uint32_t begin = chunk.pack.expert_offsets[segment.expert]; begin < end; begin += kGroupRows) {
    RowGroup group;
    group.count = std::min(kGroupRows, end - begin);
    for (uint32_t i = 0; i < group.count; ++i) {
      group.rows[i] = chunk.rows.values + chunk.TokenOf(begin + i) * chunk.rows.stored_channels;
    }
    MultiplyInputs(products, block, group, lane);
    for (uint32_t i = 0; i < group.count; ++i) {
      const int32_t exponent = chunk.rows.exponents[chunk.TokenOf(begin + i)];
      double gate_values[kBlockChannels] = {};
      double up_values[kBlockChannels];
      if (has_gate) FinishBlock(gate, block, exponent, lane.first_sums + i * kBlockChannels, gate_values);
      FinishBlock(up, block, exponent, lane.second_sums + i * kBlockChannels, up_values);
      Boundary(chunk, segment, down.suh, block, gate_values, up_values,
               chunk.mid(begin + i) + uint64_t{first_block + block} * kBlockChannels,
               chunk.mid_exponents(begin + i) + first_block + block);
    }
  }
}

// sums = mid W_down[:, out_block] for packed routes [begin, begin + count) and one segment, each row
// relative to its own exponent (the largest of its blocks).
void MultiplyMid(const MoeChunk& chunk, const MatrixView& down, uint32_t first_block, uint32_t num_blocks,
                 uint32_t out_block, uint32_t begin, uint32_t count, Lane& lane) {
  for (uint32_t i = 0; i < count; ++i) {
    const int32_t* exponents = chunk.mid_exponents(begin + i) + first_block;
    const int32_t largest = num_blocks > 0 ? *std::max_element(exponents, exponents + num_blocks) : 0;
    lane.exponents[i] = largest == kZeroExponent ? 0 : largest;
  }
  std::fill_n(lane.first_sums, count * kBlockChannels, 0.0f);
  for (uint32_t block = 0; block < num_blocks; ++block) {
    for (uint32_t i = 0; i < count; ++i) {
      const int32_t exponent = chunk.mid_exponents(begin + i)[first_block + block] - lane.exponents[i];
      lane.factors[i] = exponent == 0 ? 1.0f : static_cast<float>(PowerOfTwo(exponent));
    }
    DecodeBlock(down, block, out_block, lane.weights);
    MultiplyBlock(chunk.mid(begin) + uint64_t{first_block + block} * kBlockChannels,
                  chunk.layout.expert_channels, count, lane.weights, lane.factors, lane.first_sums);
  }
}

// y of 128 hidden channels for every row of the chunk: experts in order, then routes, then segments.
void RunFc2Block(const MoeChunk& chunk, uint32_t out_block, Lane& lane) {
  const uint64_t hidden = chunk.rows.stored_channels;
  float* y = chunk.rows.values + uint64_t{out_block} * kBlockChannels;
  for (uint64_t token = 0; token < chunk.num_tokens; ++token) {
    std::fill_n(y + token * hidden, kBlockChannels, 0.0f);
  }
  for (uint32_t expert = 0; expert < chunk.plan.geometry().experts; ++expert) {
    const uint32_t end = chunk.pack.expert_offsets[expert + 1];
    for (uint32_t begin = chunk.pack.expert_offsets[expert]; begin < end; begin += kGroupRows) {
      const uint32_t count = std::min(kGroupRows, end - begin);
      uint32_t first_block = 0;
      for (const SegmentDesc& segment : chunk.experts.ExpertSegments(expert)) {
        const MatrixView down = ViewOf(segment.down(), chunk.experts.slab());
        MultiplyMid(chunk, down, first_block, ValidBlocks(segment), out_block, begin, count, lane);
        first_block += segment.intermediate_channels() / kBlockChannels;
        for (uint32_t i = 0; i < count; ++i) {
          double values[kBlockChannels];
          FinishBlock(down, out_block, lane.exponents[i], lane.first_sums + i * kBlockChannels, values);
          const double weight = chunk.WeightOf(begin + i);
          float* row = y + chunk.TokenOf(begin + i) * hidden;
          for (uint32_t c = 0; c < kBlockChannels; ++c) row[c] += static_cast<float>(weight * values[c]);
        }
      }
    }
  }
}

void RunFc1(const MoeChunk& chunk) {
  const MoePlanOptions& options = chunk.plan.options();
  const uint32_t max_blocks = chunk.experts.max_intermediate_channels() / kBlockChannels;
  const std::span<const SegmentDesc> segments = chunk.experts.segments();
  const uint64_t num_tasks = uint64_t{segments.size()} * max_blocks;
  RunOnLanes(options.pool.get(), options.num_threads, num_tasks, [&](uint64_t lane, uint64_t task) {
    const SegmentDesc& segment = segments[task / max_blocks];
    const uint32_t block = static_cast<uint32_t>(task % max_blocks);
    const uint32_t routes =
        chunk.pack.expert_offsets[segment.expert + 1] - chunk.pack.expert_offsets[segment.expert];
    if (routes == 0 || block >= ValidBlocks(segment)) return;
    uint32_t first_block = 0;
    for (const SegmentDesc& other : chunk.experts.ExpertSegments(segment.expert)) {
      if (&other == &segment) break;
      first_block += other.intermediate_channels() / kBlockChannels;
    }
    RunFc1Block(chunk, segment, first_block, block, chunk.lane(lane));
  });
}

void StoreTokens(const MoeChunk& chunk) {
  const MoePlanOptions& options = chunk.plan.options();
  const MoeGeometry& geometry = chunk.plan.geometry();
  ParallelFor(options.pool.get(), options.num_threads, chunk.num_tokens, [&](uint64_t token) {
    if (chunk.args.accumulate && chunk.reached()[token] == 0) return;
    float* row = chunk.rows.values + token * chunk.rows.stored_channels;
    if (geometry.output_scale != 1) {
      for (uint32_t i = 0; i < geometry.hidden_channels; ++i) {
        row[i] = static_cast<float>(row[i] * geometry.output_scale);
      }
    }
    StoreRow(options.output, chunk.args.y, (chunk.first_token + token) * chunk.args.y_row_stride,
             geometry.hidden_channels, row, chunk.args.accumulate);
  });
}

void RunChunk(MoeChunk& chunk) {
  const MoePlanOptions& options = chunk.plan.options();
  const MoeGeometry& geometry = chunk.plan.geometry();
  chunk.pack = PackRoutes(options, geometry, chunk.args, chunk.first_token, chunk.num_tokens,
                          chunk.At(chunk.layout.pack));
  std::fill_n(chunk.reached(), chunk.num_tokens, uint8_t{0});
  for (uint32_t expert = 0; expert < geometry.experts; ++expert) {
    if (chunk.experts.ExpertSegments(expert).empty()) continue;
    for (uint32_t i = chunk.pack.expert_offsets[expert]; i < chunk.pack.expert_offsets[expert + 1]; ++i) {
      chunk.reached()[chunk.TokenOf(i)] = 1;
    }
  }
  ParallelFor(options.pool.get(), options.num_threads, chunk.num_tokens, [&](uint64_t token) {
    chunk.rows.Load(token, options.input, chunk.args.x, (chunk.first_token + token) * chunk.args.x_row_stride,
                    geometry.hidden_channels);
  });
  RunFc1(chunk);
  const uint64_t hidden_blocks = (geometry.hidden_channels + kBlockChannels - 1) / kBlockChannels;
  RunOnLanes(options.pool.get(), options.num_threads, hidden_blocks, [&](uint64_t lane, uint64_t block) {
    RunFc2Block(chunk, static_cast<uint32_t>(block), chunk.lane(lane));
  });
  StoreTokens(chunk);
}

// 128 output channels of a linear for all rows of a chunk.
void RunLinearBlock(const LinearPlan& plan, const MatrixView& matrix, const ScaledRows& rows,
                    const LinearArgs& args, uint64_t first_token, uint64_t num_tokens, uint32_t block,
                    Lane& lane) {
  const Product product = {matrix, lane.first_sums};
  const uint64_t first = uint64_t{block} * kBlockChannels;
  const uint64_t channels = std::min<uint64_t>(kBlockChannels, plan.out_channels() - first);
  for (uint64_t begin = 0; begin < num_tokens; begin += kGroupRows) {
    RowGroup group;
    group.count = static_cast<uint32_t>(std::min<uint64_t>(kGroupRows, num_tokens - begin));
    for (uint32_t i = 0; i < group.count; ++i)
      group.rows[i] = rows.values + (begin + i) * rows.stored_channels;
    MultiplyInputs({&product, 1}, block, group, lane);
    for (uint32_t i = 0; i < group.count; ++i) {
      double values[kBlockChannels];
      FinishBlock(matrix, block, rows.exponents[begin + i], lane.first_sums + i * kBlockChannels, values);
      StoreRow(plan.options().output, args.y, (first_token + begin + i) * args.y_row_stride + first, channels,
               values, args.accumulate);
    }
  }
}

template <typename Options>
Result<void> CheckOptions(const Options& options) {
  if (options.mode != CpuMode::kExact) {
    return Error(StatusCode::kUnsupported,
                 "cpu executor: the fast engine is not built yet; legal mode: exact");
  }
  if (options.input != Dtype::kF32 && options.input != Dtype::kF16 && options.input != Dtype::kBF16) {
    return Error(StatusCode::kUnsupported, "cpu executor: input types are F32, F16 and BF16");
  }
  if (options.output != Dtype::kF32 && options.output != Dtype::kF16 && options.output != Dtype::kBF16) {
    return Error(StatusCode::kUnsupported, "cpu executor: output types are F32, F16 and BF16");
  }
  return {};
}

class CpuExecutor final : public Backend {
 public:
  std::string_view name() const override { return "cpu"; }
  std::string_view description() const override { return "fp32 products, threads; portable code path"; }

  Result<void> Supports(const ExpertsTable&, const MoePlanOptions& options) const override {
    return CheckOptions(options);
  }
  Result<void> Supports(const PreparedLinear&, const LinearPlanOptions& options) const override {
    return CheckOptions(options);
  }
  Result<uint64_t> WorkspaceBytes(const ExpertsTable& experts, const MoePlanOptions& options) const override {
    return LayOut(experts, options).map([](const MoeLayout& layout) { return layout.total_bytes; });
  }
  Result<uint64_t> WorkspaceBytes(const PreparedLinear& linear,
                                  const LinearPlanOptions& options) const override {
    return LayOut(linear, options).map([](const LinearLayout& layout) { return layout.total_bytes; });
  }

  Result<void> Run(const MoePlan& plan, const PreparedExperts& experts, const MoeArgs& args) const override {
    const Result<MoeLayout> layout = LayOut(experts.table(), plan.options());
    if (!layout) return tl::unexpected(layout.error());
    MoeChunk chunk{.plan = plan, .experts = experts, .args = args, .layout = *layout};
    chunk.rows = {.values = reinterpret_cast<float*>(chunk.At(layout->rows)),
                  .exponents = reinterpret_cast<int32_t*>(chunk.At(layout->row_exponents)),
                  .stored_channels = plan.geometry().stored_hidden_channels};
    for (uint64_t first = 0; first < args.num_tokens; first += layout->chunk_tokens) {
      chunk.first_token = first;
      chunk.num_tokens = std::min(layout->chunk_tokens, args.num_tokens - first);
      RunChunk(chunk);
    }
    CountRun();
    return {};
  }

  Result<void> Run(const LinearPlan& plan, const PreparedLinear& linear,
                   const LinearArgs& args) const override {
    const Result<LinearLayout> layout = LayOut(linear, plan.options());
    if (!layout) return tl::unexpected(layout.error());
    std::byte* base = static_cast<std::byte*>(args.workspace);
    const MatrixView matrix = ViewOf(linear.matrix(), linear.slab());
    const ScaledRows rows = {.values = reinterpret_cast<float*>(base + layout->rows),
                             .exponents = reinterpret_cast<int32_t*>(base + layout->row_exponents),
                             .stored_channels = matrix.in_channels};
    Lane* lanes = reinterpret_cast<Lane*>(base + layout->lanes);
    ThreadPool* const pool = plan.options().pool.get();
    const uint64_t blocks = (uint64_t{plan.out_channels()} + kBlockChannels - 1) / kBlockChannels;
    for (uint64_t first = 0; first < args.num_tokens; first += layout->chunk_tokens) {
      const uint64_t tokens = std::min(layout->chunk_tokens, args.num_tokens - first);
      ParallelFor(pool, plan.options().num_threads, tokens, [&](uint64_t token) {
        rows.Load(token, plan.options().input, args.x, (first + token) * args.x_row_stride,
                  plan.in_channels());
      });
      RunOnLanes(pool, plan.options().num_threads, blocks, [&](uint64_t lane, uint64_t block) {
        RunLinearBlock(plan, matrix, rows, args, first, tokens, static_cast<uint32_t>(block), lanes[lane]);
      });
    }
    CountRun();
    return {};
  }
};

}  // namespace

const Backend& CpuBackend() {
  static const CpuExecutor executor;
  return executor;
}

}  // namespace espalier
