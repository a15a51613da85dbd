// SPDX-License-Identifier: Apache-2.0
#include <espalier/backend.h>
#include <espalier/moe.h>
#include <fmt/format.h>

#include <algorithm>

#include "base/parallel.h"
#include "moe/backend_list.h"

namespace espalier {
namespace {

Result<void> CheckBackendDevice(const Backend& backend, const Device& device) {
  if (backend.device_type() == device.type) return {};
  if (device.is_host()) {
    return Error(
        StatusCode::kDevice,
        fmt::format("executor '{}' runs on a GPU and the plan's device is cpu; legal: device cuda:INDEX "
                    "with a package of that device (LoadOptions::device, ToDevice)",
                    backend.name()));
  }
  return Error(StatusCode::kDevice, fmt::format("executor '{}' runs on the host and the plan's device is {}; "
                                                "legal: executor cuda there, or device cpu",
                                                backend.name(), DeviceText(device)));
}

Result<void> CheckPackageDevice(const std::string& identity, const Device& package, const Device& device) {
  if (package == device) return {};
  return Error(StatusCode::kDevice,
               fmt::format("{}: the package is on {} and the plan's device is {}; legal: the same (ToDevice "
                           "copies a package)",
                           identity, DeviceText(package), DeviceText(device)));
}

// The forced backend, or the best one of the device that supports the package; then its refusal is an error.
template <typename Package, typename Options>
Result<const Backend*> ChooseBackend(const Package& package, const Options& options) {
  std::string_view name = ForcedBackendName(options.executor);
  // A mode other than the default asks for the cpu executor: another in its place would be a silent
  // fallback.
  if (name.empty() && options.mode != CpuMode::kFast) name = CpuBackend().name();
  if (name.empty() && !options.device.is_host()) name = "cuda";
  const Backend* chosen = nullptr;
  if (!name.empty()) {
    const Result<const Backend*> forced = BackendByName(name);
    if (!forced) return forced;
    chosen = *forced;
    if (auto device = CheckBackendDevice(*chosen, options.device); !device)
      return tl::unexpected(device.error());
  } else {
    for (const Backend* backend : Backends()) {
      if (backend->device_type() != options.device.type) continue;
      chosen = backend;
      // The caller asked for something that is not there: another executor would be a silent fallback.
      if (auto usable = backend->Usable(); !usable && usable.error().code() == StatusCode::kUsage)
        return tl::unexpected(usable.error());
      if (backend->Supports(package, options)) return chosen;
    }
  }
  const Result<void> supported = chosen->Supports(package, options);
  if (!supported) return tl::unexpected(supported.error());
  return chosen;
}

template <typename Options>
Result<void> CheckCommonOptions(const Options& options) {
  if (options.max_tokens > kMaxPlanTokens) {
    return Error(StatusCode::kCapacity,
                 fmt::format("max_tokens is {}; legal: 0 to {}", options.max_tokens, kMaxPlanTokens));
  }
  if (options.num_threads < 0 || options.num_threads > ThreadPool::kMaxThreads) {
    return Error(StatusCode::kUsage, fmt::format("num_threads is {}; legal: 0 (all cores) to {}",
                                                 options.num_threads, int{ThreadPool::kMaxThreads}));
  }
  return {};
}

// Of the pool, or as many as the default pool has when it is asked for all cores.
int AllThreads(const ThreadPool* pool) {
  return pool != nullptr ? pool->num_threads() : std::min(HardwareThreads(), ThreadPool::kMaxThreads);
}

// What package and caller have to agree on.
Result<void> CheckTerms(const ExpertsTable& experts, const MoePlanOptions& options) {
  const RankPlan& own = experts.rank_plan();
  if (options.place && !options.place->SamePlace(own)) {
    return Error(
        StatusCode::kGeometry,
        fmt::format("{}: prepared for rank {} of tp {}, ep {}; the caller is rank {} of tp {}, ep {}",
                    experts.identity(), own.rank, own.tp, own.ep, options.place->rank, options.place->tp,
                    options.place->ep));
  }
  const std::optional<Dtype>& io = experts.geometry().io;
  if (io && *io != options.input) {
    return Error(StatusCode::kGeometry,
                 fmt::format("{}: prepared for inputs of type {}; the plan asks for {}", experts.identity(),
                             DtypeName(*io), DtypeName(options.input)));
  }
  return {};
}

}  // namespace

std::string_view CpuModeName(CpuMode mode) {
  switch (mode) {
    case CpuMode::kExact:
      return "exact";
    case CpuMode::kFast:
      return "fast";
    case CpuMode::kInt8:
      return "int8";
  }
  return "unknown";
}

Result<MoePlan> MoePlan::Create(const ExpertsTable& experts, const MoePlanOptions& options) {
  if (Result<void> checked = CheckCommonOptions(options); !checked) return tl::unexpected(checked.error());
  if (options.top_k < 1 || options.top_k > kMaxTopK) {
    return Error(StatusCode::kGeometry, fmt::format("top_k is {}; legal: 1 to {}", options.top_k, kMaxTopK));
  }
  if (Result<void> checked = CheckTerms(experts, options); !checked) return tl::unexpected(checked.error());
  if (options.checked_ids && !options.device.is_host()) {
    return Error(
        StatusCode::kUnsupported,
        fmt::format("checked ids on {}: the ids are in device memory, and a run does not wait for them; "
                    "legal: ids that were checked on the host, or none (others contribute nothing)",
                    DeviceText(options.device)));
  }
  MoePlan plan;
  plan.options_ = options;
  // Fixed here, because the workspace holds scratch memory for every thread.
  if (options.num_threads == 0) plan.options_.num_threads = AllThreads(options.pool.get());
  plan.geometry_ = experts.geometry();
  plan.rank_plan_ = experts.rank_plan();
  plan.num_segments_ = static_cast<uint32_t>(experts.segments().size());
  plan.max_segments_per_expert_ = experts.max_segments_per_expert();
  plan.max_intermediate_channels_ = experts.max_intermediate_channels();

  const Result<const Backend*> backend = ChooseBackend(experts, plan.options_);
  if (!backend) return tl::unexpected(backend.error());
  plan.backend_ = *backend;
  const Result<uint64_t> bytes = plan.backend_->WorkspaceBytes(experts, plan.options_);
  if (!bytes) return tl::unexpected(bytes.error());
  plan.workspace_bytes_ = *bytes;
  return plan;
}

Result<MoePlan> MoePlan::Create(const PreparedExperts& experts, const MoePlanOptions& options) {
  if (auto same = CheckPackageDevice(experts.identity(), experts.device(), options.device); !same)
    return tl::unexpected(same.error());
  return Create(experts.table(), options);
}

Result<LinearPlan> LinearPlan::Create(const PreparedLinear& linear, const LinearPlanOptions& options) {
  if (Result<void> checked = CheckCommonOptions(options); !checked) return tl::unexpected(checked.error());
  if (auto same = CheckPackageDevice(linear.identity(), linear.device(), options.device); !same)
    return tl::unexpected(same.error());
  LinearPlan plan;
  plan.options_ = options;
  if (options.num_threads == 0) plan.options_.num_threads = AllThreads(options.pool.get());
  plan.in_channels_ = linear.in_channels();
  plan.out_channels_ = linear.out_channels();
  plan.stored_in_channels_ = linear.matrix().in_channels;
  plan.stored_out_channels_ = linear.matrix().out_channels;

  const Result<const Backend*> backend = ChooseBackend(linear, plan.options_);
  if (!backend) return tl::unexpected(backend.error());
  plan.backend_ = *backend;
  const Result<uint64_t> bytes = plan.backend_->WorkspaceBytes(linear, plan.options_);
  if (!bytes) return tl::unexpected(bytes.error());
  plan.workspace_bytes_ = *bytes;
  return plan;
}

}  // namespace espalier
