// SPDX-License-Identifier: Apache-2.0
#ifndef ESPALIER_BENCH_PROVENANCE_H_
#define ESPALIER_BENCH_PROVENANCE_H_

#include <benchmark/benchmark.h>

#include <cstdio>
#include <fstream>
#include <string>

#include "base/parallel.h"

namespace espalier::bench {

inline std::string ProcessorName() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

// Puts beside the numbers what they depend on, and says so when they mean nothing.
inline void AddProvenance() {
  benchmark::AddCustomContext("commit", ESPALIER_COMMIT);
  benchmark::AddCustomContext("compiler", ESPALIER_COMPILER);
  benchmark::AddCustomContext("processor", ProcessorName());
  benchmark::AddCustomContext("threads", std::to_string(HardwareThreads()));
#ifndef __OPTIMIZE__
  std::fprintf(stderr, "WARNING: built without optimisation, the numbers below are not timings\n");
#endif
}

}  // namespace espalier::bench

#endif  // ESPALIER_BENCH_PROVENANCE_H_
