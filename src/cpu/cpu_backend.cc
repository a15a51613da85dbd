// SPDX-License-Identifier: Apache-2.0
//
// The cpu executor: one algorithm (cpu/moe_engine.h), one table of kernels per instruction set, the best that
// the machine has. ESPALIER_CPU_ISA forces another.
#include <espalier/backend.h>
#include <fmt/format.h>

#include <string>
#include <string_view>
#include <vector>

#include "cpu/kernel_table.h"
#include "cpu/moe_engine.h"
#include "moe/backend_list.h"

namespace espalier {
namespace {

template <typename Options>
Result<void> CheckOptions(const Options& options) {
  if (options.input != Dtype::kF32 && options.input != Dtype::kF16 && options.input != Dtype::kBF16) {
    return Error(StatusCode::kUnsupported, "cpu executor: input types are F32, F16 and BF16");
  }
  if (options.output != Dtype::kF32 && options.output != Dtype::kF16 && options.output != Dtype::kBF16) {
    return Error(StatusCode::kUnsupported, "cpu executor: output types are F32, F16 and BF16");
  }
  return {};
}

// Read once: a plan's workspace fits the table it was made for.
const Result<const cpu::KernelTable*>& Table() {
  static const Result<const cpu::KernelTable*> table = cpu::ChooseTable();
  return table;
}

class CpuExecutor final : public Backend {
 public:
  std::string_view name() const override { return "cpu"; }
  std::string_view description() const override {
    static const std::string text =
        Table() ? fmt::format("modes exact, fast and int8, threads; kernels: {}", (*Table())->name)
                : Table().error().message();
    return text;
  }

  Result<void> Usable() const override {
    if (!Table()) return tl::unexpected(Table().error());
    return {};
  }
  Result<void> Supports(const ExpertsTable&, const MoePlanOptions& options) const override {
    if (Result<void> usable = Usable(); !usable) return usable;
    return CheckOptions(options);
  }
  Result<void> Supports(const PreparedLinear&, const LinearPlanOptions& options) const override {
    if (Result<void> usable = Usable(); !usable) return usable;
    return CheckOptions(options);
  }
  Result<uint64_t> WorkspaceBytes(const ExpertsTable& experts, const MoePlanOptions& options) const override {
    return cpu::MoeWorkspaceBytes(**Table(), experts, options);
  }
  Result<uint64_t> WorkspaceBytes(const PreparedLinear& linear,
                                  const LinearPlanOptions& options) const override {
    return cpu::LinearWorkspaceBytes(**Table(), linear, options);
  }

  Result<void> Run(const MoePlan& plan, const PreparedExperts& experts, const MoeArgs& args) const override {
    if (auto done = cpu::RunMoeOn(**Table(), plan, experts, args); !done) return done;
    CountRun();
    return {};
  }
  Result<void> Run(const LinearPlan& plan, const PreparedLinear& linear,
                   const LinearArgs& args) const override {
    if (auto done = cpu::RunLinearOn(**Table(), plan, linear, args); !done) return done;
    CountRun();
    return {};
  }
};

}  // namespace

const Backend& CpuBackend() {
  static const CpuExecutor executor;
  return executor;
}

Result<std::string_view> CpuKernelsName() {
  if (!Table()) return tl::unexpected(Table().error());
  return (*Table())->name;
}

std::vector<std::string_view> UsableCpuKernels() {
  std::vector<std::string_view> names;
  for (const cpu::KernelTable* table : cpu::UsableTables()) names.push_back(table->name);
  return names;
}

}  // namespace espalier
