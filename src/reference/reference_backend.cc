// SPDX-License-Identifier: Apache-2.0
//
// The oracle: double precision everywhere, nothing rounded before the final store, obvious loops.
#include <espalier/backend.h>

#include <algorithm>
#include <span>

#include "base/half.h"
#include "moe/backend_list.h"
#include "moe/matrix_view.h"
#include "moe/route_pack.h"
#include "moe/rows.h"
#include "moe/workspace.h"
#include "reference/activation.h"
#include "reference/codebook.h"
#include "reference/hadamard.h"
#include "reference/trellis.h"

namespace espalier {
namespace {

// Tokens are taken in chunks, which bounds the workspace. An expert's codes are decoded once a chunk.
constexpr uint64_t kChunkTokens = 64;
constexpr uint64_t kChunkRoutes = 1024;
constexpr uint32_t kPanelColumns = kHadamardChannels;

// Scratch of a single matrix product: a panel of decoded weights for every thread, and rotated inputs.
struct ProductScratch {
  std::byte* panels = nullptr;
  double* rotated = nullptr;  // [rows][in]
  uint64_t panel_bytes = 0;
  int num_lanes = 1;
  ThreadPool* pool = nullptr;
};

struct MoeLayout {
  uint64_t chunk_tokens = 0;
  uint64_t panel_bytes = 0;
  uint64_t pack = 0, panels = 0, rotated = 0;
  uint64_t x = 0;        // double [routes][stored hidden], inputs of one expert's routes
  uint64_t gate = 0;     // double [routes][widest segment]
  uint64_t up = 0;       // the same; then the activation's output
  uint64_t down = 0;     // double [routes][stored hidden], outputs of one segment
  uint64_t outputs = 0;  // double [routes][stored hidden], sums over segments, by route number
  uint64_t sum = 0;      // double [stored hidden]
  uint64_t total_bytes = 0;
};

Result<MoeLayout> LayOut(const ExpertsTable& experts, const MoePlanOptions& options) {
  const MoeGeometry& geometry = experts.geometry();
  const uint64_t hidden = geometry.stored_hidden_channels;
  const uint64_t width = experts.max_intermediate_channels();
  MoeLayout layout;
  layout.chunk_tokens = ChunkTokens(options, kChunkTokens, kChunkRoutes);
  layout.panel_bytes = std::max(hidden, width) * kPanelColumns * sizeof(float);
  const Result<uint64_t> pack_bytes = RoutePackBytes(layout.chunk_tokens, options.top_k, geometry.experts);
  if (!pack_bytes) return tl::unexpected(pack_bytes.error());
  const CheckedBytes routes = layout.chunk_tokens * options.top_k;

  WorkspaceLayout arrays;
  layout.pack = arrays.Add(*pack_bytes, 1);
  layout.panels = arrays.Add(layout.panel_bytes, static_cast<uint64_t>(NumLanes(options.num_threads)));
  layout.rotated = arrays.Add(routes * std::max(hidden, width), sizeof(double));
  layout.x = arrays.Add(routes * hidden, sizeof(double));
  layout.gate = arrays.Add(routes * width, sizeof(double));
  layout.up = arrays.Add(routes * width, sizeof(double));
  layout.down = arrays.Add(routes * hidden, sizeof(double));
  layout.outputs = arrays.Add(routes * hidden, sizeof(double));
  layout.sum = arrays.Add(hidden, sizeof(double));
  const Result<uint64_t> total = arrays.TotalBytes();
  if (!total) return tl::unexpected(total.error());
  layout.total_bytes = *total;
  return layout;
}

struct LinearLayout {
  uint64_t chunk_tokens = 0;
  uint64_t panel_bytes = 0;
  uint64_t panels = 0, rotated = 0, x = 0, y = 0;
  uint64_t total_bytes = 0;
};

Result<LinearLayout> LayOut(const PreparedLinear& linear, const LinearPlanOptions& options) {
  const uint64_t in = linear.matrix().in_channels;
  const uint64_t out = linear.matrix().out_channels;
  LinearLayout layout;
  layout.chunk_tokens = std::min(options.max_tokens, kChunkTokens);
  layout.panel_bytes = in * kPanelColumns * sizeof(float);
  WorkspaceLayout arrays;
  layout.panels = arrays.Add(layout.panel_bytes, static_cast<uint64_t>(NumLanes(options.num_threads)));
  layout.rotated = arrays.Add(CheckedBytes(layout.chunk_tokens) * in, sizeof(double));
  layout.x = arrays.Add(CheckedBytes(layout.chunk_tokens) * in, sizeof(double));
  layout.y = arrays.Add(CheckedBytes(layout.chunk_tokens) * out, sizeof(double));
  const Result<uint64_t> total = arrays.TotalBytes();
  if (!total) return tl::unexpected(total.error());
  layout.total_bytes = *total;
  return layout;
}

// Columns [128 * panel, 128 * panel + 128) of the codes as values: weights[in][128]. fp16 values are
// exact as floats.
void DecodePanel(const MatrixView& matrix, uint64_t panel, float* weights) {
  const std::span<const float, kNumStates> codebook = CodebookTableFloat(matrix.codebook);
  constexpr uint32_t kTiles = kPanelColumns / kTileChannels;
  TileWords words;
  for (uint32_t tile_row = 0; tile_row < matrix.in_channels / kTileChannels; ++tile_row) {
    for (uint32_t tile_column = 0; tile_column < kTiles; ++tile_column) {
      const std::byte* tile =
          matrix.Tile(tile_row, static_cast<uint32_t>(panel) * kTiles + tile_column, words);
      for (int i = 0; i < static_cast<int>(kTileWeights); ++i) {
        const TilePosition position = PositionOf(i);
        const uint64_t row = uint64_t{tile_row} * kTileChannels + static_cast<uint64_t>(position.row);
        const uint64_t column = tile_column * kTileChannels + static_cast<uint64_t>(position.column);
        weights[row * kPanelColumns + column] = codebook[TileState(tile, matrix.bits, i)];
      }
    }
  }
}

// y = H(W H(x * suh)) * svh + bias for every row.
void ApplyMatrix(const MatrixView& matrix, uint64_t num_rows, const double* x, const ProductScratch& scratch,
                 double* y) {
  const uint64_t in = matrix.in_channels;
  const uint64_t out = matrix.out_channels;
  for (uint64_t row = 0; row < num_rows; ++row) {
    double* rotated = scratch.rotated + row * in;
    for (uint64_t i = 0; i < in; ++i) rotated[i] = x[row * in + i] * double{Fp16ToFloat(matrix.suh[i])};
    Hadamard128Blocks(rotated, matrix.in_channels);
  }
  RunOnLanes(scratch.pool, scratch.num_lanes, out / kPanelColumns, [&](uint64_t lane, uint64_t panel) {
    float* weights = reinterpret_cast<float*>(scratch.panels + lane * scratch.panel_bytes);
    DecodePanel(matrix, panel, weights);
    const uint64_t first = panel * kPanelColumns;
    for (uint64_t row = 0; row < num_rows; ++row) {
      double* result = y + row * out + first;
      std::fill_n(result, kPanelColumns, 0.0);
      for (uint64_t i = 0; i < in; ++i) {
        const double a = scratch.rotated[row * in + i];
        for (uint64_t c = 0; c < kPanelColumns; ++c) result[c] += a * double{weights[i * kPanelColumns + c]};
      }
      Hadamard128(result);
      for (uint64_t c = 0; c < kPanelColumns; ++c) {
        result[c] *= double{Fp16ToFloat(matrix.svh[first + c])};
        if (matrix.bias != nullptr) result[c] += double{Fp16ToFloat(matrix.bias[first + c])};
      }
    }
  });
}

// All arrays of one MoE call.
struct MoeCall {
  const MoePlan& plan;
  const PreparedExperts& experts;
  const MoeArgs& args;
  ProductScratch scratch;
  double *x, *gate, *up, *down, *outputs, *sum;

  MoeCall(const MoePlan& moe_plan, const PreparedExperts& package, const MoeArgs& moe_args,
          const MoeLayout& layout)
      : plan(moe_plan), experts(package), args(moe_args) {
    std::byte* base = static_cast<std::byte*>(args.workspace);
    const auto doubles = [base](uint64_t offset) { return reinterpret_cast<double*>(base + offset); };
    scratch = {.panels = base + layout.panels,
               .rotated = doubles(layout.rotated),
               .panel_bytes = layout.panel_bytes,
               .num_lanes = plan.options().num_threads,
               .pool = plan.options().pool.get()};
    x = doubles(layout.x);
    gate = doubles(layout.gate);
    up = doubles(layout.up);
    down = doubles(layout.down);
    outputs = doubles(layout.outputs);
    sum = doubles(layout.sum);
  }
};

// down = D(act(G(x), U(x))) of one segment for all routes of its expert.
void RunSegment(const MoeCall& call, const SegmentDesc& segment, uint64_t num_routes) {
  const std::byte* slab = call.experts.slab();
  const Activation& activation = call.plan.geometry().activation;
  const uint64_t width = segment.intermediate_channels();
  const bool has_gate = segment.gate().present();
  if (has_gate) ApplyMatrix(ViewOf(segment.gate(), slab), num_routes, call.x, call.scratch, call.gate);
  ApplyMatrix(ViewOf(segment.up(), slab), num_routes, call.x, call.scratch, call.up);
  for (uint64_t row = 0; row < num_routes; ++row) {
    for (uint64_t i = 0; i < width; ++i) {
      double& value = call.up[row * width + i];
      const double gate = has_gate ? call.gate[row * width + i] : 0.0;
      value = i < segment.valid_intermediate_channels ? Activate(activation, gate, value) : 0.0;
    }
  }
  ApplyMatrix(ViewOf(segment.down(), slab), num_routes, call.up, call.scratch, call.down);
}

// outputs[route] = Expert(x[token of route]) for the routes of one expert.
void RunExpert(const MoeCall& call, uint32_t expert, std::span<const uint32_t> routes, uint64_t first_token) {
  const MoeGeometry& geometry = call.plan.geometry();
  const uint64_t hidden = geometry.stored_hidden_channels;
  for (size_t row = 0; row < routes.size(); ++row) {
    const uint64_t token = first_token + routes[row] / call.plan.options().top_k;
    double* x = call.x + row * hidden;
    LoadRow(call.plan.options().input, call.args.x, token * call.args.x_row_stride, geometry.hidden_channels,
            x);
    std::fill(x + geometry.hidden_channels, x + hidden, 0.0);
    std::fill_n(call.outputs + routes[row] * hidden, hidden, 0.0);
  }
  for (const SegmentDesc& segment : call.experts.ExpertSegments(expert)) {
    RunSegment(call, segment, routes.size());
    for (size_t row = 0; row < routes.size(); ++row) {
      double* output = call.outputs + routes[row] * hidden;
      for (uint64_t i = 0; i < hidden; ++i) output[i] += call.down[row * hidden + i];
    }
  }
}

// y[token] = sum over j of weight * outputs. A row that no route reaches is 0, or left alone when
// accumulating.
void StoreToken(const MoeCall& call, uint64_t first_token, uint64_t token) {
  const MoePlanOptions& options = call.plan.options();
  const MoeGeometry& geometry = call.plan.geometry();
  const uint64_t hidden = geometry.stored_hidden_channels;
  std::fill_n(call.sum, hidden, 0.0);
  bool reached = false;
  for (uint32_t j = 0; j < options.top_k; ++j) {
    const int64_t expert = LocalExpert(options, geometry, call.args, first_token + token, j);
    if (expert < 0 || call.experts.ExpertSegments(static_cast<uint32_t>(expert)).empty()) continue;
    reached = true;
    const double weight =
        call.args.topk_weights[(first_token + token) * call.args.topk_weights_row_stride + j];
    const double* output = call.outputs + (token * options.top_k + j) * hidden;
    for (uint64_t i = 0; i < hidden; ++i) call.sum[i] += weight * output[i];
  }
  if (!reached && call.args.accumulate) return;
  for (uint64_t i = 0; i < hidden; ++i) call.sum[i] *= geometry.output_scale;
  StoreRow(options.output, call.args.y, (first_token + token) * call.args.y_row_stride,
           geometry.hidden_channels, call.sum, call.args.accumulate);
}

template <typename Options>
Result<void> CheckTypes(const Options& options) {
  if (options.input != Dtype::kF32 && options.input != Dtype::kF16 && options.input != Dtype::kBF16) {
    return Error(StatusCode::kUnsupported, "reference executor: input types are F32, F16 and BF16");
  }
  if (options.output != Dtype::kF64 && options.output != Dtype::kF32 && options.output != Dtype::kF16 &&
      options.output != Dtype::kBF16) {
    return Error(StatusCode::kUnsupported, "reference executor: output types are F64, F32, F16 and BF16");
  }
  return {};
}

class ReferenceExecutor final : public Backend {
 public:
  std::string_view name() const override { return "reference"; }
  std::string_view description() const override {
    return "double precision, portable; defines what is right";
  }

  Result<void> Supports(const ExpertsTable&, const MoePlanOptions& options) const override {
    return CheckTypes(options);
  }
  Result<void> Supports(const PreparedLinear&, const LinearPlanOptions& options) const override {
    return CheckTypes(options);
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
    const MoeCall call(plan, experts, args, *layout);
    std::byte* pack_storage = static_cast<std::byte*>(args.workspace) + layout->pack;
    for (uint64_t first = 0; first < args.num_tokens; first += layout->chunk_tokens) {
      const uint64_t tokens = std::min(layout->chunk_tokens, args.num_tokens - first);
      const RoutePack pack = PackRoutes(plan.options(), plan.geometry(), args, first, tokens, pack_storage);
      for (uint32_t expert = 0; expert < plan.geometry().experts; ++expert) {
        const uint32_t begin = pack.expert_offsets[expert];
        const uint32_t count = pack.expert_offsets[expert + 1] - begin;
        if (count > 0) RunExpert(call, expert, pack.packed_route_indices.subspan(begin, count), first);
      }
      for (uint64_t token = 0; token < tokens; ++token) StoreToken(call, first, token);
    }
    CountRun();
    return {};
  }

  Result<void> Run(const LinearPlan& plan, const PreparedLinear& linear,
                   const LinearArgs& args) const override {
    const Result<LinearLayout> layout = LayOut(linear, plan.options());
    if (!layout) return tl::unexpected(layout.error());
    std::byte* base = static_cast<std::byte*>(args.workspace);
    const auto doubles = [base](uint64_t offset) { return reinterpret_cast<double*>(base + offset); };
    const ProductScratch scratch = {.panels = base + layout->panels,
                                    .rotated = doubles(layout->rotated),
                                    .panel_bytes = layout->panel_bytes,
                                    .num_lanes = plan.options().num_threads,
                                    .pool = plan.options().pool.get()};
    const MatrixView matrix = ViewOf(linear.matrix(), linear.slab());
    double* x = doubles(layout->x);
    double* y = doubles(layout->y);
    for (uint64_t first = 0; first < args.num_tokens; first += layout->chunk_tokens) {
      const uint64_t tokens = std::min(layout->chunk_tokens, args.num_tokens - first);
      for (uint64_t token = 0; token < tokens; ++token) {
        double* row = x + token * matrix.in_channels;
        LoadRow(plan.options().input, args.x, (first + token) * args.x_row_stride, plan.in_channels(), row);
        std::fill(row + plan.in_channels(), row + matrix.in_channels, 0.0);
      }
      ApplyMatrix(matrix, tokens, x, scratch, y);
      for (uint64_t token = 0; token < tokens; ++token) {
        StoreRow(plan.options().output, args.y, (first + token) * args.y_row_stride, plan.out_channels(),
                 y + token * matrix.out_channels, args.accumulate);
      }
    }
    CountRun();
    return {};
  }
};

}  // namespace

const Backend& ReferenceBackend() {
  static const ReferenceExecutor executor;
  return executor;
}

}  // namespace espalier
