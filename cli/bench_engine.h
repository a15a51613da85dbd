// SPDX-License-Identifier: Apache-2.0
//
// The machine side of `bench`: runs a layer in one of two forms and times it with cold weights. One
// implementation a device.
#ifndef ESPALIER_CLI_BENCH_ENGINE_H_
#define ESPALIER_CLI_BENCH_ENGINE_H_

#include <espalier/device.h>
#include <espalier/experts.h>
#include <espalier/moe.h>
#include <espalier/status.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench_package.h"
#include "moe_run.h"

namespace espalier::cli {

enum class BenchForm {
  kTogether,  // one RunMoe over all tiers
  kSerial,    // one RunMoe a tier with the others hidden by an expert map; the later ones accumulate
  kEager,     // kTogether without a graph; only where has_graphs()
};

struct BenchLimits {
  double read_gb_s = 0;
  double matrix_tflop_s = 0;
  std::vector<double> decode_tweights_s;  // of every format of the setup; empty = no probe on this device
  std::string read_text;                  // how each was measured
  std::string matrix_text;
  std::string decode_text;
};

struct BenchMachine {
  std::string device;  // the processor's name
  std::optional<int> threads;
  std::string driver;  // empty = none
};

struct BenchSetup {
  const PreparedExperts& experts;  // on the host; outlives the engine
  std::vector<std::vector<int32_t>> tier_maps;
  std::vector<CodeFormat> formats;  // that the experts have
  std::string executor;             // as for MoePlanOptions
  uint32_t top_k = 0;
  CpuMode mode = CpuMode::kFast;
  int num_threads = 0;
};

// Not to be used from several threads.
class BenchEngine {
 public:
  virtual ~BenchEngine() = default;

  virtual std::string executor() const = 0;  // that runs; after Prepare
  virtual BenchMachine machine() const = 0;
  virtual std::optional<double> ClockMhz()
      const = 0;                    // as of MeasureLimits or UpdateClock, where it is known
  virtual Dtype input() const = 0;  // of x
  virtual bool has_graphs() const = 0;
  virtual std::string cold_text() const = 0;  // how weights are kept cold

  virtual Result<BenchLimits> MeasureLimits() = 0;
  virtual Result<void> UpdateClock() = 0;

  // Takes a copy of x and makes room for runs of as many rows: what follows is about these.
  virtual Result<void> Prepare(const MoeInput& x) = 0;
  // y [tokens, hidden] over poisoned output. `routes` holds ids and weights of as many tokens as x.
  virtual Result<std::vector<float>> Run(const MoeInput& routes, BenchForm form) = 0;
  // Microseconds of one run, with cold weights. REQUIRES: a Run of that form before.
  virtual Result<double> Time(const MoeInput& routes, BenchForm form) = 0;
};

// Error: kCapacity.
Result<std::unique_ptr<BenchEngine>> MakeCpuBench(const BenchSetup& setup);

// Puts a copy of the experts on the device. Errors: kDevice, kCapacity.
Result<std::unique_ptr<BenchEngine>> MakeCudaBench(const BenchSetup& setup, const Device& device);

}  // namespace espalier::cli

#endif  // ESPALIER_CLI_BENCH_ENGINE_H_
