// SPDX-License-Identifier: Apache-2.0
//
// One dense matrix. A task is (group of up to 64 rows, 128 output channels).
#include <algorithm>

#include "cpu/exact_rows.h"
#include "cpu/group_product.h"
#include "cpu/lane.h"
#include "cpu/moe_engine.h"
#include "cpu/scaled_rows.h"
#include "moe/matrix_view.h"
#include "moe/rows.h"
#include "moe/workspace.h"

namespace espalier::cpu {
namespace {

constexpr uint64_t kChunkTokens = 512;

struct LinearLayout {
  uint64_t chunk_tokens = 0;
  LaneLayout lane = {};
  uint64_t lanes = 0, rows = 0, row_exponents = 0;
  uint64_t total_bytes = 0;
};

Result<LinearLayout> LayOut(const KernelTable& table, const PreparedLinear& linear,
                            const LinearPlanOptions& options) {
  LinearLayout layout;
  const uint64_t in_channels = linear.matrix().in_channels;
  layout.chunk_tokens = std::min(options.max_tokens, kChunkTokens);
  layout.lane = LayOutLane(table, options.mode, in_channels, layout.chunk_tokens, 0);
  WorkspaceLayout arrays;
  layout.lanes = arrays.Add(static_cast<uint64_t>(NumLanes(options.num_threads)), layout.lane.total_bytes);
  layout.rows = arrays.Add(layout.chunk_tokens * in_channels, sizeof(float));
  layout.row_exponents = arrays.Add(layout.chunk_tokens, sizeof(int32_t));
  const Result<uint64_t> total = arrays.TotalBytes();
  if (!total) return tl::unexpected(total.error());
  layout.total_bytes = *total;
  return layout;
}

class LinearChunk {
 public:
  LinearChunk(const KernelTable& table, const LinearPlan& plan, const PreparedLinear& linear,
              const LinearArgs& args, const LinearLayout& layout)
      : table_(table), plan_(plan), args_(args), layout_(layout), matrix_(ViewOf(linear.matrix(), linear.slab())) {
    rows_ = {.values = reinterpret_cast<float*>(At(layout.rows)),
             .exponents = reinterpret_cast<int32_t*>(At(layout.row_exponents)),
             .stored_channels = matrix_.in_channels};
  }

  void Run(uint64_t first_token, uint64_t num_tokens);

 private:
  std::byte* At(uint64_t offset) const { return static_cast<std::byte*>(args_.workspace) + offset; }
  Lane LaneAt(uint64_t index) const {
    return Lane(layout_.lane, At(layout_.lanes) + index * layout_.lane.total_bytes);
  }
  void RunBlock(uint32_t begin, uint32_t count, uint32_t block, Lane& lane) const;
  void Rotate(uint32_t begin, const GroupInputs& inputs) const;
  void Store(uint32_t row, uint32_t block, const float* sums, float offset) const;

  const KernelTable& table_;
  const LinearPlan& plan_;
  const LinearArgs& args_;
  const LinearLayout& layout_;
  MatrixView matrix_;
  ScaledRows rows_ = {};
  uint64_t first_token_ = 0;
};

void LinearChunk::Rotate(uint32_t begin, const GroupInputs& inputs) const {
  alignas(64) float rotated[kBlockChannels];
  for (uint32_t row = 0; row < inputs.rows; ++row) {
    for (uint32_t first = 0; first < matrix_.in_channels; first += kBlockChannels) {
      table_.rotate(rows_.Row(begin + row) + first, matrix_.suh + first, rotated);
      PackRow(table_, inputs, row, first / kBlockChannels, rotated);
    }
  }
}

void LinearChunk::Store(uint32_t row, uint32_t block, const float* sums, float offset) const {
  const uint64_t first = uint64_t{block} * kBlockChannels;
  const uint64_t channels = std::min<uint64_t>(kBlockChannels, plan_.out_channels() - first);
  const uint64_t target = (first_token_ + row) * args_.y_row_stride + first;
  if (plan_.options().mode != CpuMode::kExact && rows_.exponents[row] == 0) {
    alignas(64) float values[kBlockChannels];
    table_.finish(sums, offset, matrix_.svh + first, matrix_.bias != nullptr ? matrix_.bias + first : nullptr,
                  values);
    return StoreRow(plan_.options().output, args_.y, target, channels, values, args_.accumulate);
  }
  double values[kBlockChannels];
  FinishExact(matrix_, block, rows_.exponents[row], sums, offset, values);
  StoreRow(plan_.options().output, args_.y, target, channels, values, args_.accumulate);
}

void LinearChunk::RunBlock(uint32_t begin, uint32_t count, uint32_t block, Lane& lane) const {
  const uint32_t blocks = matrix_.in_channels / kBlockChannels;
  const GroupInputs inputs =
      lane.Inputs(0, table_.operand(plan_.options().mode, matrix_.codebook, count), count);
  // A thread mostly walks through the blocks of one group; its first row names it.
  if (lane.state().group != rows_.Row(begin)) {
    lane.state().group = rows_.Row(begin);
    Rotate(begin, inputs);
    for (uint32_t row = 0; row < count; ++row) lane.offsets(0)[row] = SumOffset(inputs, row, blocks);
  }
  MultiplyGroup(table_, matrix_, block, blocks, inputs, lane.scratch(), lane.sums(0));
  for (uint32_t row = 0; row < count; ++row)
    Store(begin + row, block, lane.sums(0) + row * kBlockChannels, lane.offsets(0)[row]);
}

void LinearChunk::Run(uint64_t first_token, uint64_t num_tokens) {
  const LinearPlanOptions& options = plan_.options();
  first_token_ = first_token;
  const auto lanes = static_cast<uint64_t>(NumLanes(options.num_threads));
  for (uint64_t lane = 0; lane < lanes; ++lane) LaneAt(lane).state() = {};
  ParallelFor(options.pool.get(), options.num_threads, num_tokens, [&](uint64_t token) {
    rows_.Load(token, options.input, args_.x, (first_token + token) * args_.x_row_stride, plan_.in_channels());
  });
  const uint64_t blocks = (uint64_t{plan_.out_channels()} + kBlockChannels - 1) / kBlockChannels;
  const uint64_t groups = (num_tokens + kGroupRows - 1) / kGroupRows;
  RunOnRanges(options.pool.get(), options.num_threads, groups * blocks, [&](uint64_t lane_index, uint64_t task) {
    const auto begin = static_cast<uint32_t>(task / blocks * kGroupRows);
    const auto count = static_cast<uint32_t>(std::min<uint64_t>(kGroupRows, num_tokens - begin));
    Lane lane = LaneAt(lane_index);
    RunBlock(begin, count, static_cast<uint32_t>(task % blocks), lane);
  });
}

}  // namespace

Result<uint64_t> LinearWorkspaceBytes(const KernelTable& table, const PreparedLinear& linear,
                                      const LinearPlanOptions& options) {
  return LayOut(table, linear, options).map([](const LinearLayout& layout) { return layout.total_bytes; });
}

Result<void> RunLinearOn(const KernelTable& table, const LinearPlan& plan, const PreparedLinear& linear,
                         const LinearArgs& args) {
  const Result<LinearLayout> layout = LayOut(table, linear, plan.options());
  if (!layout) return tl::unexpected(layout.error());
  LinearChunk chunk(table, plan, linear, args, *layout);
  for (uint64_t first = 0; first < args.num_tokens; first += layout->chunk_tokens)
    chunk.Run(first, std::min(layout->chunk_tokens, args.num_tokens - first));
  return {};
}

}  // namespace espalier::cpu
