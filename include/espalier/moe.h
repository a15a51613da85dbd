// SPDX-License-Identifier: Apache-2.0
//
// Running the routed experts of a layer (RunMoe) and a single EXL3 matrix (RunLinear). A plan is made
// once for a capacity; it states the workspace and holds all validation that can be done once. The
// run functions validate cheaply, never allocate on success and never synchronise: on a GPU they put work on
// a stream, and may be captured in a graph.
#ifndef ESPALIER_MOE_H_
#define ESPALIER_MOE_H_

#include <espalier/experts.h>
#include <espalier/formats.h>
#include <espalier/status.h>
#include <espalier/thread_pool.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace espalier {

class Backend;

enum class IdType : uint8_t { kInt32, kInt64 };

// What the cpu executor multiplies with (docs/architecture.md, numerics).
//   exact  fp32 throughout; a row's bits do not depend on the other rows
//   fast   mul1 as exact 16-bit weights with 16-bit activations, 3inst and mcg as bf16, where the processor has such
//          products; fp32 elsewhere
//   int8   mul1 from three rows of an expert on with 8-bit weights and activations, the rest as in fast
enum class CpuMode : uint8_t { kExact, kFast, kInt8 };

std::string_view CpuModeName(CpuMode mode);  // "exact", "fast", "int8"

inline constexpr uint64_t kMaxPlanTokens = uint64_t{1} << 20;
inline constexpr uint32_t kMaxTopK = 1024;
inline constexpr uint64_t kWorkspaceAlignmentBytes = 64;

struct MoePlanOptions {
  // Capacity: a plan runs any number of tokens from 0 to max_tokens.
  uint64_t max_tokens = 4096;
  uint32_t top_k = 1;
  IdType id_type = IdType::kInt32;
  Dtype input = Dtype::kF32;   // kF16, kBF16, kF32
  Dtype output = Dtype::kF32;  // kF32, kBF16, kF16; kF64 on the reference executor only

  // Behaviour. With checked_ids an id outside [0, experts) other than -1 makes the run fail with
  // kGeometry before anything is written; otherwise it contributes nothing. On a GPU it is refused: the ids
  // are in device memory, and a run does not wait for them.
  bool checked_ids = false;
  // Where the package and every array of a call lie, the workspace included.
  Device device = {};
  // Where the caller stands: tp, ep and rank. A package made for another place is refused. Empty = wherever
  // the package says.
  std::optional<RankPlan> place = {};
  // Backend name; empty = the best one of the device that supports the package.
  std::string executor = {};
  CpuMode mode = CpuMode::kFast;

  // Performance. Threads of a call, which also number its scratch memory; 0 = all of `pool`, and without one
  // all cores. Results do not depend on it.
  int num_threads = 0;
  // Null = ThreadPool::Default(), which grows to num_threads; another has the threads it has. Host only.
  std::shared_ptr<ThreadPool> pool = {};
};

// Immutable; may be used from several threads at once, each with its own workspace.
class MoePlan {
 public:
  // Errors: kUsage (unknown executor), kUnsupported (with the backend's reason), kCapacity, kGeometry (a
  // package of another rank or world), kDevice (no such device; an executor or a package of another one).
  static Result<MoePlan> Create(const ExpertsTable& experts, const MoePlanOptions& options);
  static Result<MoePlan> Create(const PreparedExperts& experts, const MoePlanOptions& options);

  const MoePlanOptions& options() const { return options_; }
  const MoeGeometry& geometry() const { return geometry_; }
  const RankPlan& rank_plan() const { return rank_plan_; }  // of the package it was made from
  const Backend& backend() const { return *backend_; }
  // Exact; at kWorkspaceAlignmentBytes. The contents beforehand do not matter.
  uint64_t workspace_bytes() const { return workspace_bytes_; }
  uint32_t num_segments() const { return num_segments_; }
  uint32_t max_segments_per_expert() const { return max_segments_per_expert_; }
  uint32_t max_intermediate_channels() const { return max_intermediate_channels_; }

 private:
  MoePlan() = default;
  MoePlanOptions options_;
  MoeGeometry geometry_;
  RankPlan rank_plan_;
  const Backend* backend_ = nullptr;
  uint64_t workspace_bytes_ = 0;
  uint32_t num_segments_ = 0;
  uint32_t max_segments_per_expert_ = 0;
  uint32_t max_intermediate_channels_ = 0;
};

// Strides are in elements from row to row and may exceed the row's length.
struct MoeArgs {
  uint64_t num_tokens = 0;
  const void* x = nullptr;  // [num_tokens, hidden], plan's input type
  uint64_t x_row_stride = 0;
  const void* topk_ids = nullptr;  // [num_tokens, top_k], plan's id type; -1 = no expert
  uint64_t topk_ids_row_stride = 0;
  const float* topk_weights = nullptr;  // [num_tokens, top_k], final weights
  uint64_t topk_weights_row_stride = 0;
  // Global to local expert ids, -1 = not here. Null: ids are local. Ids are then checked against
  // expert_map_size, mapped ones against the package.
  const int32_t* expert_map = nullptr;
  uint32_t expert_map_size = 0;
  void* y = nullptr;  // [num_tokens, hidden], plan's output type
  uint64_t y_row_stride = 0;
  bool accumulate = false;  // y += instead of y =
  void* workspace = nullptr;
  uint64_t workspace_bytes = 0;
  // cudaStream_t of the plan's device, null = its default stream. Null on the host.
  void* stream = nullptr;
};

// y[t] = sum over j of topk_weights[t, j] * Expert_{topk_ids[t, j]}(x[t]), in fp32 (double on the
// reference), rounded once. Rows are independent; num_tokens = 0 succeeds and touches nothing. The same
// call gives the same bits at any thread count. Errors: kCapacity (tokens, workspace), kGeometry (ids in
// checked mode, strides, a package of another shape, rank or world than the plan's), kUsage (null pointers, a
// stream on the host), kDevice (a package of another device than the plan's; a launch that fails).
// On a GPU the arrays must stay until the stream has come past the call, and a workspace serves one call at a
// time.
Result<void> RunMoe(const MoePlan& plan, const PreparedExperts& experts, const MoeArgs& args);

struct LinearPlanOptions {
  uint64_t max_tokens = 4096;
  Dtype input = Dtype::kF32;
  Dtype output = Dtype::kF32;
  Device device = {};  // as in MoePlanOptions
  std::string executor = {};
  CpuMode mode = CpuMode::kFast;
  int num_threads = 0;
  std::shared_ptr<ThreadPool> pool = {};
};

class LinearPlan {
 public:
  static Result<LinearPlan> Create(const PreparedLinear& linear, const LinearPlanOptions& options);

  const LinearPlanOptions& options() const { return options_; }
  const Backend& backend() const { return *backend_; }
  uint64_t workspace_bytes() const { return workspace_bytes_; }
  uint32_t in_channels() const { return in_channels_; }
  uint32_t out_channels() const { return out_channels_; }

 private:
  LinearPlan() = default;
  LinearPlanOptions options_;
  const Backend* backend_ = nullptr;
  uint64_t workspace_bytes_ = 0;
  uint32_t in_channels_ = 0;
  uint32_t out_channels_ = 0;
  uint32_t stored_in_channels_ = 0;
  uint32_t stored_out_channels_ = 0;
  friend Result<void> RunLinear(const LinearPlan&, const PreparedLinear&, const struct LinearArgs&);
};

struct LinearArgs {
  uint64_t num_tokens = 0;
  const void* x = nullptr;  // [num_tokens, in]
  uint64_t x_row_stride = 0;
  void* y = nullptr;  // [num_tokens, out]
  uint64_t y_row_stride = 0;
  bool accumulate = false;
  void* workspace = nullptr;
  uint64_t workspace_bytes = 0;
  void* stream = nullptr;  // as in MoeArgs
};

// y = x W (+ bias). Same promises and errors as RunMoe.
Result<void> RunLinear(const LinearPlan& plan, const PreparedLinear& linear, const LinearArgs& args);

}  // namespace espalier

#endif  // ESPALIER_MOE_H_
