// SPDX-License-Identifier: Apache-2.0
//
// The cuda executor: from a plan and a call to a launch. What the kernels are is said in launch.h.
#include <espalier/backend.h>
#include <fmt/format.h>

#include "cuda/device_runtime.h"
#include "cuda/device_table.h"
#include "cuda/launch.h"
#include "cuda/runtime_error.h"
#include "moe/backend_list.h"

namespace espalier {
namespace {

constexpr int kMinComputeCapability = 80;

template <typename Options>
Result<void> CheckOptions(const Options& options) {
  const Result<cuda::DeviceLimits> limits = cuda::LimitsOf(options.device);
  if (!limits) return tl::unexpected(limits.error());
  if (limits->compute_capability < kMinComputeCapability) {
    return Error(StatusCode::kUnsupported,
                 fmt::format("cuda executor: {} has compute capability {}.{}; legal: 8.0 and newer",
                             DeviceText(options.device), limits->compute_capability / 10,
                             limits->compute_capability % 10));
  }
  if (options.mode != CpuMode::kFast) {
    return Error(StatusCode::kUnsupported,
                 fmt::format("cuda executor: mode {} is of the cpu executor", CpuModeName(options.mode)));
  }
  if (options.input != Dtype::kF32 && options.input != Dtype::kF16 && options.input != Dtype::kBF16)
    return Error(StatusCode::kUnsupported, "cuda executor: input types are F32, F16 and BF16");
  if (options.output != Dtype::kF32 && options.output != Dtype::kF16 && options.output != Dtype::kBF16)
    return Error(StatusCode::kUnsupported, "cuda executor: output types are F32, F16 and BF16");
  return {};
}

cuda::DeviceExperts TableOf(const PreparedExperts& experts) {
  const std::byte* table = experts.device_table().data();
  const size_t num_segments = experts.segments().size();
  return {
      .segments = reinterpret_cast<const cuda::DeviceSegment*>(table),
      .first_segment = reinterpret_cast<const uint32_t*>(table + num_segments * sizeof(cuda::DeviceSegment)),
      .num_segments = static_cast<uint32_t>(num_segments),
      .experts = experts.geometry().experts};
}

class CudaExecutor final : public Backend {
 public:
  std::string_view name() const override { return "cuda"; }
  std::string_view description() const override {
    return "fp16 operands, fp32 sums; GPUs of compute capability 8.0 and newer";
  }
  DeviceType device_type() const override { return DeviceType::kCuda; }

  Result<void> Usable() const override {
    const Result<cuda::DeviceLimits> first = cuda::LimitsOf({.type = DeviceType::kCuda});
    if (!first) return Error(StatusCode::kDevice, "executor 'cuda': " + first.error().message());
    return {};
  }

  Result<void> Supports(const ExpertsTable& experts, const MoePlanOptions& options) const override {
    if (auto checked = CheckOptions(options); !checked) return checked;
    if (experts.geometry().rotation != Dtype::kF16) {
      return Error(StatusCode::kUnsupported,
                   fmt::format("cuda executor: {} asks for rotated values in {}; they are kept in F16",
                               experts.identity(), DtypeName(experts.geometry().rotation)));
    }
    return {};
  }
  Result<void> Supports(const PreparedLinear&, const LinearPlanOptions& options) const override {
    return CheckOptions(options);
  }
  Result<uint64_t> WorkspaceBytes(const ExpertsTable& experts, const MoePlanOptions& options) const override {
    return cuda::ConfigureMoe(experts, options).map([](const cuda::MoeConfig& config) {
      return config.total_bytes;
    });
  }
  Result<uint64_t> WorkspaceBytes(const PreparedLinear& linear,
                                  const LinearPlanOptions& options) const override {
    return cuda::ConfigureLinear(linear, options).map([](const cuda::LinearConfig& config) {
      return config.total_bytes;
    });
  }

  Result<void> Run(const MoePlan& plan, const PreparedExperts& experts, const MoeArgs& args) const override {
    const Result<cuda::DeviceLimits> limits = cuda::LimitsOf(experts.device());
    if (!limits) return tl::unexpected(limits.error());
    const Result<cuda::MoeConfig> config = cuda::ConfigureMoe(experts.table(), plan.options());
    if (!config) return tl::unexpected(config.error());
    const cuda::DeviceScope scope(experts.device());
    if (!scope.entered()) return scope.entered();
    Result<void> launched = cuda::LaunchMoe({.config = *config,
                                             .geometry = plan.geometry(),
                                             .options = plan.options(),
                                             .args = args,
                                             .experts = TableOf(experts),
                                             .limits = *limits,
                                             .stream = args.stream});
    if (launched) CountRun();
    return launched;
  }

  Result<void> Run(const LinearPlan& plan, const PreparedLinear& linear,
                   const LinearArgs& args) const override {
    Result<void> launched = cuda::RunLinearSteps(plan, linear, args, {});
    if (launched) CountRun();
    return launched;
  }
};

}  // namespace

const Backend& CudaBackend() {
  static const CudaExecutor executor;
  return executor;
}

namespace cuda {

Result<void> RunLinearSteps(const LinearPlan& plan, const PreparedLinear& linear, const LinearArgs& args,
                            const LinearSteps& steps) {
  const Result<DeviceLimits> limits = LimitsOf(linear.device());
  if (!limits) return tl::unexpected(limits.error());
  const Result<LinearConfig> config = ConfigureLinear(linear, plan.options());
  if (!config) return tl::unexpected(config.error());
  const DeviceScope scope(linear.device());
  if (!scope.entered()) return scope.entered();
  return LaunchLinear({.config = *config,
                       .options = plan.options(),
                       .args = args,
                       .matrix = MatrixAt(linear.matrix(), linear.slab()),
                       .in_channels = linear.in_channels(),
                       .out_channels = linear.out_channels(),
                       .limits = *limits,
                       .stream = args.stream,
                       .steps = steps});
}

}  // namespace cuda
}  // namespace espalier
