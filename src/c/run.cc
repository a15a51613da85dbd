// SPDX-License-Identifier: Apache-2.0
//
// Plans and runs of the C interface.
#include <espalier/espalier.h>

#include <limits>
#include <memory>
#include <string>

#include "c/call.h"

namespace espalier::c {
namespace {

// What the two kinds of plans share.
struct PlanChoices {
  uint64_t max_tokens = 4096;
  Dtype input = Dtype::kF32;
  Dtype output = Dtype::kF32;
  CpuMode mode = CpuMode::kFast;
  std::shared_ptr<ThreadPool> pool;
};

Result<PlanChoices> ToChoices(const espalier_plan_options& options) {
  PlanChoices choices;
  if (options.max_tokens != 0) choices.max_tokens = options.max_tokens;
  const auto dtype = [](int32_t number, std::string_view name) {
    return ToDtype(number == 0 ? int32_t{ESPALIER_DTYPE_F32} : number, name);
  };
  const Result<Dtype> input = dtype(options.input, "input");
  if (!input) return tl::unexpected(input.error());
  const Result<Dtype> output = dtype(options.output, "output");
  if (!output) return tl::unexpected(output.error());
  choices.input = *input;
  choices.output = *output;
  if (auto checked = InRange(options.mode, 4, "mode"); !checked) return tl::unexpected(checked.error());
  if (options.mode == ESPALIER_MODE_EXACT) choices.mode = CpuMode::kExact;
  if (options.mode == ESPALIER_MODE_INT8) choices.mode = CpuMode::kInt8;
  if (auto checked = InRange(options.num_threads, ThreadPool::kMaxThreads + 1, "num_threads"); !checked)
    return tl::unexpected(checked.error());
  if (options.pool != nullptr) {
    const auto pool = Find(options.pool);
    if (!pool) return tl::unexpected(pool.error());
    choices.pool = (*pool)->pool;
  }
  return choices;
}

template <typename Plan>
espalier_plan_info InfoOf(const Plan& plan, const std::string& executor) {
  espalier_plan_info known = {};
  known.workspace_bytes = plan.workspace_bytes();
  known.max_tokens = plan.options().max_tokens;
  known.executor = executor.c_str();
  known.device = FromDevice(plan.options().device);
  known.input = static_cast<int32_t>(plan.options().input);
  known.output = static_cast<int32_t>(plan.options().output);
  return known;
}

}  // namespace
}  // namespace espalier::c

using namespace espalier;     // NOLINT(google-build-using-namespace): the functions below are the C side
using namespace espalier::c;  // NOLINT(google-build-using-namespace)

int32_t espalier_moe_plan_create(const espalier_experts* experts, const espalier_plan_options* options,
                                 espalier_moe_plan** plan) {
  return Call([&]() -> Result<void> {
    const auto object = Find(experts);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = NotNull(plan, "plan"); !checked) return checked;
    const auto read = ReadStruct(options, "options");
    if (!read) return tl::unexpected(read.error());
    const Result<PlanChoices> choices = ToChoices(*read);
    if (!choices) return tl::unexpected(choices.error());
    if (auto checked = InRange(read->id_type, 2, "id_type"); !checked) return checked;
    MoePlanOptions known;
    known.max_tokens = choices->max_tokens;
    known.top_k = read->top_k;
    known.id_type = static_cast<IdType>(read->id_type);
    known.input = choices->input;
    known.output = choices->output;
    known.checked_ids = read->checked_ids != 0;
    known.device = (*object)->experts.device();
    if (read->executor != nullptr) known.executor = read->executor;
    known.mode = choices->mode;
    known.num_threads = read->num_threads;
    known.pool = choices->pool;
    Result<MoePlan> made = MoePlan::Create((*object)->experts, known);
    if (!made) return tl::unexpected(made.error());
    std::string executor(made->backend().name());
    return AddHandle({.plan = *std::move(made), .executor = std::move(executor)}, plan);
  });
}

int32_t espalier_moe_plan_get_info(const espalier_moe_plan* plan, espalier_plan_info* info) {
  return Call([&]() -> Result<void> {
    const auto object = Find(plan);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = CheckSize(info, "info"); !checked) return checked;
    const MoePlan& from = (*object)->plan;
    espalier_plan_info known = InfoOf(from, (*object)->executor);
    known.top_k = from.options().top_k;
    known.in_channels = known.out_channels = from.geometry().hidden_channels;
    WriteStruct(known, info);
    return {};
  });
}

int32_t espalier_moe_plan_free(espalier_moe_plan* plan) {
  return Call([&] { return HandleTable<espalier_moe_plan>::Get().Free(plan); });
}

int32_t espalier_moe_run(const espalier_moe_plan* plan, const espalier_experts* experts,
                         const espalier_moe_args* args) {
  return Call([&]() -> Result<void> {
    const auto plan_object = Find(plan);
    if (!plan_object) return tl::unexpected(plan_object.error());
    const auto object = Find(experts);
    if (!object) return tl::unexpected(object.error());
    const auto read = ReadStruct(args, "args");
    if (!read) return tl::unexpected(read.error());
    constexpr uint64_t kMostIds = std::numeric_limits<uint32_t>::max();
    if (read->expert_map_size > kMostIds) {
      return UsageError(
          fmt::format("expert_map_size is {}; legal: 0 to {}", read->expert_map_size, kMostIds));
    }
    MoeArgs known;
    known.num_tokens = read->num_tokens;
    known.x = read->x;
    known.x_row_stride = read->x_row_stride;
    known.topk_ids = read->topk_ids;
    known.topk_ids_row_stride = read->topk_ids_row_stride;
    known.topk_weights = read->topk_weights;
    known.topk_weights_row_stride = read->topk_weights_row_stride;
    known.expert_map = read->expert_map;
    known.expert_map_size = static_cast<uint32_t>(read->expert_map_size);
    known.y = read->y;
    known.y_row_stride = read->y_row_stride;
    known.accumulate = read->accumulate != 0;
    known.workspace = read->workspace;
    known.workspace_bytes = read->workspace_bytes;
    known.stream = read->stream;
    return RunMoe((*plan_object)->plan, (*object)->experts, known);
  });
}

int32_t espalier_linear_plan_create(const espalier_linear* linear, const espalier_plan_options* options,
                                    espalier_linear_plan** plan) {
  return Call([&]() -> Result<void> {
    const auto object = Find(linear);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = NotNull(plan, "plan"); !checked) return checked;
    const auto read = ReadOptions(options, "options");
    if (!read) return tl::unexpected(read.error());
    const Result<PlanChoices> choices = ToChoices(*read);
    if (!choices) return tl::unexpected(choices.error());
    LinearPlanOptions known;
    known.max_tokens = choices->max_tokens;
    known.input = choices->input;
    known.output = choices->output;
    known.device = (*object)->linear.device();
    if (read->executor != nullptr) known.executor = read->executor;
    known.mode = choices->mode;
    known.num_threads = read->num_threads;
    known.pool = choices->pool;
    Result<LinearPlan> made = LinearPlan::Create((*object)->linear, known);
    if (!made) return tl::unexpected(made.error());
    std::string executor(made->backend().name());
    return AddHandle({.plan = *std::move(made), .executor = std::move(executor)}, plan);
  });
}

int32_t espalier_linear_plan_get_info(const espalier_linear_plan* plan, espalier_plan_info* info) {
  return Call([&]() -> Result<void> {
    const auto object = Find(plan);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = CheckSize(info, "info"); !checked) return checked;
    const LinearPlan& from = (*object)->plan;
    espalier_plan_info known = InfoOf(from, (*object)->executor);
    known.in_channels = from.in_channels();
    known.out_channels = from.out_channels();
    WriteStruct(known, info);
    return {};
  });
}

int32_t espalier_linear_plan_free(espalier_linear_plan* plan) {
  return Call([&] { return HandleTable<espalier_linear_plan>::Get().Free(plan); });
}

int32_t espalier_linear_run(const espalier_linear_plan* plan, const espalier_linear* linear,
                            const espalier_linear_args* args) {
  return Call([&]() -> Result<void> {
    const auto plan_object = Find(plan);
    if (!plan_object) return tl::unexpected(plan_object.error());
    const auto object = Find(linear);
    if (!object) return tl::unexpected(object.error());
    const auto read = ReadStruct(args, "args");
    if (!read) return tl::unexpected(read.error());
    LinearArgs known;
    known.num_tokens = read->num_tokens;
    known.x = read->x;
    known.x_row_stride = read->x_row_stride;
    known.y = read->y;
    known.y_row_stride = read->y_row_stride;
    known.accumulate = read->accumulate != 0;
    known.workspace = read->workspace;
    known.workspace_bytes = read->workspace_bytes;
    known.stream = read->stream;
    return RunLinear((*plan_object)->plan, (*object)->linear, known);
  });
}
