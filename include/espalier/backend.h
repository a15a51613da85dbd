// SPDX-License-Identifier: Apache-2.0
//
// Executors. A list, best first, ending in the reference, which supports everything and defines what is
// right. ESPALIER_FORCE_BACKEND=name overrides the choice (an empty value counts as unset).
#ifndef ESPALIER_BACKEND_H_
#define ESPALIER_BACKEND_H_

#include <espalier/moe.h>

#include <atomic>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace espalier {

// Stateless apart from the run counter; all members may be called from any thread at once.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string_view name() const = 0;         // "cuda", "cpu", "reference"
  virtual std::string_view description() const = 0;  // one line for doctor
  // Where it runs: packages and arrays of a call are of such a device.
  virtual DeviceType device_type() const { return DeviceType::kCpu; }

  // Empty when it may be chosen on this machine, else kDevice with the reason; kUsage where the environment
  // asks it for what it does not have (CpuKernelsName).
  virtual Result<void> Usable() const { return {}; }

  // Empty when it can run the package under these options, else a kUnsupported reason.
  virtual Result<void> Supports(const ExpertsTable& experts, const MoePlanOptions& options) const = 0;
  virtual Result<void> Supports(const PreparedLinear& linear, const LinearPlanOptions& options) const = 0;

  // Exact workspace for a capacity. Error: kCapacity when the arithmetic overflows.
  virtual Result<uint64_t> WorkspaceBytes(const ExpertsTable& experts,
                                          const MoePlanOptions& options) const = 0;
  virtual Result<uint64_t> WorkspaceBytes(const PreparedLinear& linear,
                                          const LinearPlanOptions& options) const = 0;

  // Called by RunMoe / RunLinear after their validation, never with 0 tokens.
  virtual Result<void> Run(const MoePlan& plan, const PreparedExperts& experts,
                           const MoeArgs& args) const = 0;
  virtual Result<void> Run(const LinearPlan& plan, const PreparedLinear& linear,
                           const LinearArgs& args) const = 0;

  // Successful Run calls so far: lets a test prove which executor ran.
  uint64_t num_runs() const { return num_runs_.load(std::memory_order_relaxed); }

 protected:
  void CountRun() const { num_runs_.fetch_add(1, std::memory_order_relaxed); }

 private:
  mutable std::atomic<uint64_t> num_runs_{0};
};

// Every backend of this build, best first, whether or not this machine can run it. A plan chooses among those
// of its device.
std::span<const Backend* const> Backends();

// Error: kUsage with the names there are; kDevice for "cuda" in a build or on a machine without it.
Result<const Backend*> BackendByName(std::string_view name);

// Kernels of the cpu executor, one set per instruction set: "avx512-bf16", ..., "portable". This process has
// those it is told of: the best that the machine runs, or those that ESPALIER_CPU_ISA names (an empty value
// counts as unset; read once). Error: kUsage with the legal names, and the executor is not usable.
Result<std::string_view> CpuKernelsName();
// What ESPALIER_CPU_ISA may name on this machine, best first; the last one runs everywhere.
std::vector<std::string_view> UsableCpuKernels();

}  // namespace espalier

#endif  // ESPALIER_BACKEND_H_
