// SPDX-License-Identifier: Apache-2.0
#include <espalier/backend.h>
#include <espalier/moe.h>
#include <fmt/format.h>

#include <cstddef>

#include "moe/route_pack.h"

namespace espalier {
namespace {

// One array of a call: [num_tokens] rows of `row_elements`, `row_stride` elements apart.
struct RowsArgument {
  std::string_view name;
  const void* data = nullptr;
  uint64_t row_stride = 0;
  uint64_t row_elements = 0;
  uint64_t element_bytes = 0;
};

Result<void> CheckRows(const RowsArgument& rows, uint64_t num_tokens) {
  if (rows.data == nullptr) return Error(StatusCode::kUsage, fmt::format("{} is null", rows.name));
  if (reinterpret_cast<uintptr_t>(rows.data) % rows.element_bytes != 0) {
    return Error(StatusCode::kUsage,
                 fmt::format("{} is not aligned to its elements of {} bytes", rows.name, rows.element_bytes));
  }
  // An upper bound that keeps every byte offset of the array inside a pointer difference.
  const uint64_t max_stride = (uint64_t{1} << 62) / rows.element_bytes / (num_tokens + 1);
  if (rows.row_stride < rows.row_elements || rows.row_stride > max_stride) {
    return Error(StatusCode::kGeometry,
                 fmt::format("row stride of {} is {} elements; legal: {} to {}", rows.name, rows.row_stride,
                             rows.row_elements, max_stride));
  }
  return {};
}

Result<void> CheckCapacity(uint64_t num_tokens, uint64_t max_tokens, const void* workspace,
                           uint64_t workspace_bytes, uint64_t needed_bytes) {
  if (num_tokens > max_tokens) {
    return Error(StatusCode::kCapacity,
                 fmt::format("{} tokens; the plan was made for at most {}", num_tokens, max_tokens));
  }
  if (workspace_bytes < needed_bytes) {
    return Error(StatusCode::kCapacity,
                 fmt::format("the workspace has {} bytes; the plan needs {}", workspace_bytes, needed_bytes));
  }
  if (workspace == nullptr && needed_bytes > 0) return Error(StatusCode::kUsage, "workspace is null");
  if (reinterpret_cast<uintptr_t>(workspace) % kWorkspaceAlignmentBytes != 0) {
    return Error(StatusCode::kUsage,
                 fmt::format("workspace is not aligned to {} bytes", kWorkspaceAlignmentBytes));
  }
  return {};
}

// The device of a call: that of its package, and a stream of it.
Result<void> CheckCallDevice(const Device& plan, const Device& package, const std::string& identity,
                             const void* stream) {
  if (package != plan) {
    return Error(StatusCode::kDevice, fmt::format("{}: the package is on {}; the plan was made for {}",
                                                  identity, DeviceText(package), DeviceText(plan)));
  }
  if (stream != nullptr && plan.is_host())
    return Error(StatusCode::kUsage, "a stream on the host; legal: null, or a plan for a GPU");
  return {};
}

uint64_t ElementBytes(Dtype dtype) { return static_cast<uint64_t>(DtypeBits(dtype)) / 8; }

Result<void> CheckMoePackage(const MoePlan& plan, const PreparedExperts& experts) {
  const RankPlan& own = experts.rank_plan();
  if (!own.SamePlace(plan.rank_plan())) {
    return Error(
        StatusCode::kGeometry,
        fmt::format("{}: prepared for rank {} of tp {}, ep {}; the plan was made for rank {} of tp {}, "
                    "ep {}",
                    experts.identity(), own.rank, own.tp, own.ep, plan.rank_plan().rank, plan.rank_plan().tp,
                    plan.rank_plan().ep));
  }
  if (plan.geometry() == experts.geometry() && plan.num_segments() == experts.segments().size() &&
      plan.max_segments_per_expert() == experts.max_segments_per_expert() &&
      plan.max_intermediate_channels() == experts.max_intermediate_channels()) {
    return {};
  }
  return Error(
      StatusCode::kGeometry,
      fmt::format("{}: {} experts, {} segments, hidden {}, widest segment {}; the plan was made for a "
                  "package of {} experts, {} segments, hidden {}, widest segment {}",
                  experts.identity(), experts.geometry().experts, experts.segments().size(),
                  experts.geometry().hidden_channels, experts.max_intermediate_channels(),
                  plan.geometry().experts, plan.num_segments(), plan.geometry().hidden_channels,
                  plan.max_intermediate_channels()));
}

}  // namespace

Result<void> RunMoe(const MoePlan& plan, const PreparedExperts& experts, const MoeArgs& args) {
  if (args.num_tokens == 0) return {};
  const MoePlanOptions& options = plan.options();
  if (Result<void> checked = CheckMoePackage(plan, experts); !checked) return checked;
  if (auto checked = CheckCallDevice(options.device, experts.device(), experts.identity(), args.stream);
      !checked)
    return checked;
  if (Result<void> checked = CheckCapacity(args.num_tokens, options.max_tokens, args.workspace,
                                           args.workspace_bytes, plan.workspace_bytes());
      !checked) {
    return checked;
  }
  const uint64_t hidden = plan.geometry().hidden_channels;
  const RowsArgument rows[] = {
      {"x", args.x, args.x_row_stride, hidden, ElementBytes(options.input)},
      {"topk_ids", args.topk_ids, args.topk_ids_row_stride, options.top_k,
       options.id_type == IdType::kInt64 ? sizeof(int64_t) : sizeof(int32_t)},
      {"topk_weights", args.topk_weights, args.topk_weights_row_stride, options.top_k, sizeof(float)},
      {"y", args.y, args.y_row_stride, hidden, ElementBytes(options.output)},
  };
  for (const RowsArgument& argument : rows) {
    if (Result<void> checked = CheckRows(argument, args.num_tokens); !checked) return checked;
  }
  if (options.checked_ids) {
    if (Result<void> checked = CheckIds(options, plan.geometry(), args); !checked) return checked;
  }
  return plan.backend().Run(plan, experts, args);
}

Result<void> RunLinear(const LinearPlan& plan, const PreparedLinear& linear, const LinearArgs& args) {
  if (args.num_tokens == 0) return {};
  const LinearPlanOptions& options = plan.options();
  if (plan.in_channels_ != linear.in_channels() || plan.out_channels_ != linear.out_channels() ||
      plan.stored_in_channels_ != linear.matrix().in_channels ||
      plan.stored_out_channels_ != linear.matrix().out_channels) {
    return Error(
        StatusCode::kGeometry,
        fmt::format("{}: {} x {}; the plan was made for a matrix of {} x {}", linear.identity(),
                    linear.in_channels(), linear.out_channels(), plan.in_channels_, plan.out_channels_));
  }
  if (auto checked = CheckCallDevice(options.device, linear.device(), linear.identity(), args.stream);
      !checked)
    return checked;
  if (Result<void> checked = CheckCapacity(args.num_tokens, options.max_tokens, args.workspace,
                                           args.workspace_bytes, plan.workspace_bytes());
      !checked) {
    return checked;
  }
  const RowsArgument rows[] = {
      {"x", args.x, args.x_row_stride, plan.in_channels(), ElementBytes(options.input)},
      {"y", args.y, args.y_row_stride, plan.out_channels(), ElementBytes(options.output)},
  };
  for (const RowsArgument& argument : rows) {
    if (Result<void> checked = CheckRows(argument, args.num_tokens); !checked) return checked;
  }
  return plan.backend().Run(plan, linear, args);
}

}  // namespace espalier
