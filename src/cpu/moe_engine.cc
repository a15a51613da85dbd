// SPDX-License-Identifier: Apache-2.0
#include "cpu/moe_engine.h"

#include <algorithm>
#include <span>

#include "cpu/exact_rows.h"
#include "cpu/group_product.h"
#include "cpu/lane.h"
#include "cpu/scaled_rows.h"
#include "moe/matrix_view.h"
#include "moe/route_pack.h"
#include "moe/rows.h"
#include "moe/workspace.h"

namespace espalier::cpu {
namespace {

// Bounds the workspace, and is large enough that the time to decode a weight is small against the products it
// is used for.
constexpr uint64_t kChunkTokens = 512;
constexpr uint64_t kChunkRoutes = 8192;  // so that a large top-k does not enlarge it further
// Up to here FC2 is bound by reading weights: a thread takes its hidden channels expert by expert, in one run
// through the memory of each.
constexpr uint32_t kStreamedRoutes = 64;
// Above, a task takes so many blocks of 128 hidden channels, so that a group's inputs are read from the third
// level once for all of them, unless fewer tasks than this a thread are left.
constexpr uint64_t kJoinedBlocks = 4;
constexpr uint64_t kFewestTasks = 2;

// Up to kGroupRows routes of one segment's expert.
struct Group {
  uint32_t segment = 0;
  uint32_t begin = 0;  // packed routes
  uint32_t count = 0;
  uint32_t first_block = 0;  // of the segment among the 128-channel blocks of its expert
};

struct MoeLayout {
  uint64_t chunk_tokens = 0;
  uint64_t expert_blocks = 0;  // 128-channel blocks of the widest expert, segments summed
  uint64_t pack = 0;
  uint64_t groups = 0;  // Group [..]
  LaneLayout lane = {};
  uint64_t lanes = 0;
  uint64_t rows = 0;           // float [tokens][stored hidden]; x, then y
  uint64_t row_exponents = 0;  // int32 [tokens]
  uint64_t reached = 0;        // uint8 [tokens]: a route of the token leads to a segment
  // Rotated and packed inputs of FC2, by group and then by block.
  uint64_t mid_words = 0;      // uint32 [packed routes][expert blocks][128]
  uint64_t mid_scales = 0;     // float [packed routes][expert blocks]
  uint64_t mid_starts = 0;     // int32, likewise
  uint64_t mid_exponents = 0;  // int32, likewise
  uint64_t total_bytes = 0;
};

Result<MoeLayout> LayOut(const KernelTable& table, const ExpertsTable& experts,
                         const MoePlanOptions& options) {
  const MoeGeometry& geometry = experts.geometry();
  MoeLayout layout;
  layout.chunk_tokens = ChunkTokens(options, kChunkTokens, kChunkRoutes);
  for (uint32_t expert = 0; expert < geometry.experts; ++expert) {
    uint64_t channels = 0;
    for (const SegmentDesc& segment : experts.ExpertSegments(expert))
      channels += segment.intermediate_channels();
    layout.expert_blocks = std::max(layout.expert_blocks, channels / kBlockChannels);
  }
  const Result<uint64_t> pack_bytes = RoutePackBytes(layout.chunk_tokens, options.top_k, geometry.experts);
  if (!pack_bytes) return tl::unexpected(pack_bytes.error());
  const CheckedBytes routes = layout.chunk_tokens * options.top_k;
  layout.lane = LayOutLane(table, options.mode, geometry.stored_hidden_channels,
                           layout.chunk_tokens * options.top_k, layout.expert_blocks);

  WorkspaceLayout arrays;
  layout.pack = arrays.Add(*pack_bytes, 1);
  layout.groups = arrays.Add(routes * experts.max_segments_per_expert(), sizeof(Group));
  layout.lanes = arrays.Add(static_cast<uint64_t>(NumLanes(options.num_threads)), layout.lane.total_bytes);
  layout.rows = arrays.Add(layout.chunk_tokens * geometry.stored_hidden_channels, sizeof(float));
  layout.row_exponents = arrays.Add(layout.chunk_tokens, sizeof(int32_t));
  layout.reached = arrays.Add(layout.chunk_tokens, sizeof(uint8_t));
  layout.mid_words = arrays.Add(routes * layout.expert_blocks, kBlockChannels * sizeof(uint32_t));
  layout.mid_scales = arrays.Add(routes * layout.expert_blocks, sizeof(float));
  layout.mid_starts = arrays.Add(routes * layout.expert_blocks, sizeof(int32_t));
  layout.mid_exponents = arrays.Add(routes * layout.expert_blocks, sizeof(int32_t));
  const Result<uint64_t> total = arrays.TotalBytes();
  if (!total) return tl::unexpected(total.error());
  layout.total_bytes = *total;
  return layout;
}

uint32_t ValidBlocks(const SegmentDesc& segment) {
  return (segment.valid_intermediate_channels + kBlockChannels - 1) / kBlockChannels;
}

class MoeChunk {
 public:
  MoeChunk(const KernelTable& table, const MoePlan& plan, const PreparedExperts& experts, const MoeArgs& args,
           const MoeLayout& layout)
      : table_(table), plan_(plan), experts_(experts), args_(args), layout_(layout) {
    rows_ = {.values = reinterpret_cast<float*>(At(layout.rows)),
             .exponents = reinterpret_cast<int32_t*>(At(layout.row_exponents)),
             .stored_channels = plan.geometry().stored_hidden_channels};
  }

  void Run(uint64_t first_token, uint64_t num_tokens);

 private:
  std::byte* At(uint64_t offset) const { return static_cast<std::byte*>(args_.workspace) + offset; }
  Lane LaneAt(uint64_t index) const {
    return Lane(layout_.lane, At(layout_.lanes) + index * layout_.lane.total_bytes);
  }
  uint64_t TokenOf(uint32_t packed) const {
    return pack_.packed_route_indices[packed] / plan_.options().top_k;
  }
  float WeightOf(uint32_t packed) const {
    const uint32_t route = pack_.packed_route_indices[packed];
    const uint64_t token = first_token_ + route / plan_.options().top_k;
    return args_.topk_weights[token * args_.topk_weights_row_stride + route % plan_.options().top_k];
  }
  bool exact() const { return plan_.options().mode == CpuMode::kExact; }

  void MarkReached();
  void MakeGroups();
  GroupInputs MidInputs(const Group& group, const MatrixView& down) const;
  int32_t* MidExponents(const Group& group) const;

  void RunFc1(const Group& group, uint32_t block, Lane& lane) const;
  void Rotate(const Group& group, std::span<const MatrixView> matrices,
              std::span<const GroupInputs> inputs) const;
  void Boundary(const Group& group, uint32_t block, uint32_t row, const MatrixView* gate,
                const MatrixView& up, const MatrixView& down, Lane& lane) const;

  void RunFc2(uint32_t first_block, uint32_t num_blocks, Lane& lane) const;
  bool ScaleMid(const Group& group, GroupInputs& inputs, Lane& lane) const;
  void AddToRows(const Group& group, const MatrixView& down, uint32_t out_block, const GroupInputs& inputs,
                 bool scaled, Lane& lane) const;
  void Store(uint64_t token) const;

  const KernelTable& table_;
  const MoePlan& plan_;
  const PreparedExperts& experts_;
  const MoeArgs& args_;
  const MoeLayout& layout_;
  uint64_t first_token_ = 0;
  uint64_t num_tokens_ = 0;
  RoutePack pack_ = {};
  ScaledRows rows_ = {};
  std::span<Group> groups_ = {};
};

void MoeChunk::MarkReached() {
  uint8_t* reached = reinterpret_cast<uint8_t*>(At(layout_.reached));
  std::fill_n(reached, num_tokens_, uint8_t{0});
  for (const Group& group : groups_) {
    for (uint32_t i = 0; i < group.count; ++i) reached[TokenOf(group.begin + i)] = 1;
  }
}

// By expert, then by routes, then by segment: the order in which FC2 adds.
void MoeChunk::MakeGroups() {
  Group* groups = reinterpret_cast<Group*>(At(layout_.groups));
  size_t count = 0;
  for (uint32_t expert = 0; expert < plan_.geometry().experts; ++expert) {
    const uint32_t end = pack_.expert_offsets[expert + 1];
    const std::span<const SegmentDesc> segments = experts_.ExpertSegments(expert);
    for (uint32_t begin = pack_.expert_offsets[expert]; begin < end; begin += kGroupRows) {
      uint32_t first_block = 0;
      for (const SegmentDesc& segment : segments) {
        groups[count++] = {.segment = static_cast<uint32_t>(&segment - experts_.segments().data()),
                           .begin = begin,
                           .count = std::min(kGroupRows, end - begin),
                           .first_block = first_block};
        first_block += segment.intermediate_channels() / kBlockChannels;
      }
    }
  }
  groups_ = {groups, count};
}

// Of the blocks of the group's segment.
GroupInputs MoeChunk::MidInputs(const Group& group, const MatrixView& down) const {
  const uint64_t first =
      uint64_t{group.begin} * layout_.expert_blocks + uint64_t{group.first_block} * group.count;
  return {.operand = table_.operand(plan_.options().mode, down.codebook, group.count),
          .rows = group.count,
          .words = reinterpret_cast<uint32_t*>(At(layout_.mid_words)) + first * kBlockChannels,
          .scales = reinterpret_cast<float*>(At(layout_.mid_scales)) + first,
          .starts = reinterpret_cast<int32_t*>(At(layout_.mid_starts)) + first};
}

int32_t* MoeChunk::MidExponents(const Group& group) const {
  return reinterpret_cast<int32_t*>(At(layout_.mid_exponents)) +
         uint64_t{group.begin} * layout_.expert_blocks + uint64_t{group.first_block} * group.count;
}

// Inputs of FC1: H128(x * suh) of every row and block, for each of the matrices.
void MoeChunk::Rotate(const Group& group, std::span<const MatrixView> matrices,
                      std::span<const GroupInputs> inputs) const {
  alignas(64) float rotated[kBlockChannels];
  for (uint32_t row = 0; row < group.count; ++row) {
    const float* x = rows_.Row(TokenOf(group.begin + row));
    for (uint32_t first = 0; first < matrices[0].in_channels; first += kBlockChannels) {
      for (size_t i = 0; i < matrices.size(); ++i) {
        table_.rotate(x + first, matrices[i].suh + first, rotated);
        PackRow(table_, inputs[i], row, first / kBlockChannels, rotated);
      }
    }
  }
}

void MoeChunk::RunFc1(const Group& group, uint32_t block, Lane& lane) const {
  const SegmentDesc& segment = experts_.segments()[group.segment];
  const MatrixView down = ViewOf(segment.down(), experts_.slab());
  const bool has_gate = segment.gate().present();
  const MatrixView both[] = {ViewOf(segment.gate(), experts_.slab()), ViewOf(segment.up(), experts_.slab())};
  const uint64_t blocks = both[1].in_channels / kBlockChannels;
  GroupInputs inputs[2];
  for (int i = has_gate ? 0 : 1; i < 2; ++i)
    inputs[i] =
        lane.Inputs(i, table_.operand(plan_.options().mode, both[i].codebook, group.count), group.count);
  const bool shared = has_gate && both[0].suh == both[1].suh && inputs[0].operand == inputs[1].operand;
  if (shared) inputs[1] = inputs[0];
  // A thread mostly walks through the blocks of one group.
  if (lane.state().group != &group) {
    lane.state().group = &group;
    const size_t first = shared || !has_gate ? 1 : 0;
    Rotate(group, std::span(both).subspan(first), std::span(inputs).subspan(first));
    for (size_t i = first; i < 2; ++i) {
      for (uint32_t row = 0; row < group.count; ++row)
        lane.offsets(static_cast<int>(i))[row] = SumOffset(inputs[i], row, blocks);
    }
    if (shared) std::copy_n(lane.offsets(1), group.count, lane.offsets(0));
  }
  for (int i = has_gate ? 0 : 1; i < 2; ++i) {
    if (i == 0) FetchFirstBlock(both[1], block, inputs[1]);
    MultiplyGroup(table_, both[i], block, static_cast<uint32_t>(blocks), inputs[i], lane.scratch(),
                  lane.sums(i));
  }
  const MatrixView& next = both[has_gate ? 0 : 1];
  if (block + 1 < next.out_channels / kBlockChannels)
    FetchFirstBlock(next, block + 1, inputs[has_gate ? 0 : 1]);
  for (uint32_t row = 0; row < group.count; ++row)
    Boundary(group, block, row, has_gate ? &both[0] : nullptr, both[1], down, lane);
}

// Rotated inputs of FC2 of one row and block: H128(act(g, u) * suh), scaled by a power of two of their own
// where they are not in the safe range.
void MoeChunk::Boundary(const Group& group, uint32_t block, uint32_t row, const MatrixView* gate,
                        const MatrixView& up, const MatrixView& down, Lane& lane) const {
  const Activation& activation = plan_.geometry().activation;
  const SegmentDesc& segment = experts_.segments()[group.segment];
  const uint64_t first = uint64_t{block} * kBlockChannels;
  const uint64_t valid = std::min<uint64_t>(kBlockChannels, segment.valid_intermediate_channels - first);
  const int32_t exponent = rows_.exponents[TokenOf(group.begin + row)];
  const float* sums[] = {lane.sums(0) + row * kBlockChannels, lane.sums(1) + row * kBlockChannels};
  int32_t* mid_exponent = MidExponents(group) + uint64_t{block} * group.count + row;
  alignas(64) float mid[kBlockChannels];
  const GroupInputs inputs = MidInputs(group, down);
  if (!exact() && exponent == 0) {
    alignas(64) float values[2][kBlockChannels] = {};
    if (gate != nullptr) {
      table_.finish(sums[0], lane.offsets(0)[row], gate->svh + first,
                    gate->bias != nullptr ? gate->bias + first : nullptr, values[0]);
    }
    table_.finish(sums[1], lane.offsets(1)[row], up.svh + first,
                  up.bias != nullptr ? up.bias + first : nullptr, values[1]);
    for (auto& channels : values) std::fill(channels + valid, channels + kBlockChannels, 0.0f);
    const float largest = table_.activate(activation, values[0], values[1], down.suh + first, mid);
    // An infinity may be a product of two values that has its place in double: it goes that way, as NaN does.
    if (largest >= kLeastSafe && largest < kMostSafe) {
      *mid_exponent = 0;
      table_.rotate(mid, nullptr, mid);
      return PackRow(table_, inputs, row, block, mid);
    }
  }
  double values[2][kBlockChannels] = {};
  if (gate != nullptr) FinishExact(*gate, block, exponent, sums[0], lane.offsets(0)[row], values[0]);
  FinishExact(up, block, exponent, sums[1], lane.offsets(1)[row], values[1]);
  *mid_exponent = BoundaryExact(activation, values[0], values[1], down.suh + first, valid, mid);
  PackRow(table_, inputs, row, block, mid);
}

// Puts the scales of a row's blocks relative to its largest exponent. False when all are 0.
bool MoeChunk::ScaleMid(const Group& group, GroupInputs& inputs, Lane& lane) const {
  const uint32_t blocks = ValidBlocks(experts_.segments()[group.segment]);
  const int32_t* exponents = MidExponents(group);
  const uint64_t count = uint64_t{blocks} * group.count;
  if (std::all_of(exponents, exponents + count,
                  [](int32_t exponent) { return exponent == 0 || exponent == kZeroExponent; }))
    return false;
  for (uint32_t row = 0; row < group.count; ++row) {
    int32_t largest = kZeroExponent;
    for (uint32_t b = 0; b < blocks; ++b) largest = std::max(largest, exponents[b * group.count + row]);
    lane.exponents()[row] = largest == kZeroExponent ? 0 : largest;
    for (uint32_t b = 0; b < blocks; ++b) {
      const uint64_t place = uint64_t{b} * group.count + row;
      const int32_t relative = exponents[place] - lane.exponents()[row];
      lane.scales()[place] = static_cast<float>(inputs.scales[place] * PowerOfTwo(relative));
    }
  }
  inputs.scales = lane.scales();
  return true;
}

void MoeChunk::AddToRows(const Group& group, const MatrixView& down, uint32_t out_block,
                         const GroupInputs& inputs, bool scaled, Lane& lane) const {
  const uint32_t blocks = ValidBlocks(experts_.segments()[group.segment]);
  const uint64_t first = uint64_t{out_block} * kBlockChannels;
  for (uint32_t row = 0; row < group.count; ++row) {
    float* y = rows_.values + TokenOf(group.begin + row) * rows_.stored_channels + first;
    const float weight = WeightOf(group.begin + row);
    const float* sums = lane.sums(0) + row * kBlockChannels;
    const float offset = SumOffset(inputs, row, blocks);
    if (!exact() && !scaled) {
      alignas(64) float values[kBlockChannels];
      table_.finish(sums, offset, down.svh + first, down.bias != nullptr ? down.bias + first : nullptr,
                    values);
      table_.accumulate(weight, values, y);
      continue;
    }
    double values[kBlockChannels];
    FinishExact(down, out_block, scaled ? lane.exponents()[row] : 0, sums, offset, values);
    for (uint32_t c = 0; c < kBlockChannels; ++c) y[c] += static_cast<float>(double{weight} * values[c]);
  }
}

// y of hidden blocks [first_block, + num_blocks) for every row of the chunk.
void MoeChunk::RunFc2(uint32_t first_block, uint32_t num_blocks, Lane& lane) const {
  for (uint64_t token = 0; token < num_tokens_; ++token) {
    std::fill_n(rows_.values + token * rows_.stored_channels + uint64_t{first_block} * kBlockChannels,
                num_blocks * kBlockChannels, 0.0f);
  }
  for (const Group& group : groups_) {
    const SegmentDesc& segment = experts_.segments()[group.segment];
    const MatrixView down = ViewOf(segment.down(), experts_.slab());
    GroupInputs inputs = MidInputs(group, down);
    const bool scaled = ScaleMid(group, inputs, lane);
    if (&group != &groups_.back()) {
      const Group& next = *(&group + 1);
      const MatrixView matrix = ViewOf(experts_.segments()[next.segment].down(), experts_.slab());
      FetchFirstBlock(matrix, first_block, MidInputs(next, matrix));
    }
    for (uint32_t block = first_block; block < first_block + num_blocks; ++block) {
      MultiplyGroup(table_, down, block, ValidBlocks(segment), inputs, lane.scratch(), lane.sums(0));
      AddToRows(group, down, block, inputs, scaled, lane);
    }
  }
}

void MoeChunk::Store(uint64_t token) const {
  const MoePlanOptions& options = plan_.options();
  const MoeGeometry& geometry = plan_.geometry();
  if (args_.accumulate && reinterpret_cast<const uint8_t*>(At(layout_.reached))[token] == 0) return;
  float* row = rows_.values + token * rows_.stored_channels;
  if (geometry.output_scale != 1) {
    for (uint32_t i = 0; i < geometry.hidden_channels; ++i)
      row[i] = static_cast<float>(row[i] * geometry.output_scale);
  }
  StoreRow(options.output, args_.y, (first_token_ + token) * args_.y_row_stride, geometry.hidden_channels,
           row, args_.accumulate);
}

void MoeChunk::Run(uint64_t first_token, uint64_t num_tokens) {
  const MoePlanOptions& options = plan_.options();
  const MoeGeometry& geometry = plan_.geometry();
  first_token_ = first_token;
  num_tokens_ = num_tokens;
  pack_ = PackRoutes(options, geometry, args_, first_token, num_tokens, At(layout_.pack));
  MakeGroups();
  MarkReached();
  const auto lanes = static_cast<uint64_t>(NumLanes(options.num_threads));
  for (uint64_t lane = 0; lane < lanes; ++lane) LaneAt(lane).state() = {};
  ParallelFor(options.pool.get(), options.num_threads, num_tokens, [&](uint64_t token) {
    rows_.Load(token, options.input, args_.x, (first_token + token) * args_.x_row_stride,
               geometry.hidden_channels);
  });
  const uint64_t max_blocks = experts_.max_intermediate_channels() / kBlockChannels;
  RunOnRanges(options.pool.get(), options.num_threads, groups_.size() * max_blocks,
              [&](uint64_t lane_index, uint64_t task) {
                const Group& group = groups_[task / max_blocks];
                const auto block = static_cast<uint32_t>(task % max_blocks);
                if (block >= ValidBlocks(experts_.segments()[group.segment])) return;
                Lane lane = LaneAt(lane_index);
                RunFc1(group, block, lane);
              });
  const uint64_t hidden_blocks = (uint64_t{geometry.hidden_channels} + kBlockChannels - 1) / kBlockChannels;
  const uint64_t tasks =
      std::min(hidden_blocks,
               pack_.num_packed_routes <= kStreamedRoutes
                   ? lanes
                   : std::max(lanes * kFewestTasks, (hidden_blocks + kJoinedBlocks - 1) / kJoinedBlocks));
  RunOnRanges(options.pool.get(), options.num_threads, tasks, [&](uint64_t lane_index, uint64_t task) {
    const uint64_t first = task * hidden_blocks / tasks, end = (task + 1) * hidden_blocks / tasks;
    Lane lane = LaneAt(lane_index);
    RunFc2(static_cast<uint32_t>(first), static_cast<uint32_t>(end - first), lane);
  });
  ParallelFor(options.pool.get(), options.num_threads, num_tokens, [&](uint64_t token) { Store(token); });
}

}  // namespace

Result<uint64_t> MoeWorkspaceBytes(const KernelTable& table, const ExpertsTable& experts,
                                   const MoePlanOptions& options) {
  return LayOut(table, experts, options).map([](const MoeLayout& layout) { return layout.total_bytes; });
}

Result<void> RunMoeOn(const KernelTable& table, const MoePlan& plan, const PreparedExperts& experts,
                      const MoeArgs& args) {
  const Result<MoeLayout> layout = LayOut(table, experts.table(), plan.options());
  if (!layout) return tl::unexpected(layout.error());
  MoeChunk chunk(table, plan, experts, args, *layout);
  for (uint64_t first = 0; first < args.num_tokens; first += layout->chunk_tokens)
    chunk.Run(first, std::min(layout->chunk_tokens, args.num_tokens - first));
  return {};
}

}  // namespace espalier::cpu
