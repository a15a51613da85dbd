// SPDX-License-Identifier: Apache-2.0
//
// What `bench` found, as JSON, as a table and as a picture.
#ifndef ESPALIER_CLI_BENCH_REPORT_H_
#define ESPALIER_CLI_BENCH_REPORT_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bench_engine.h"
#include "bench_package.h"
#include "gates.h"
#include "metrics.h"
#include "output.h"

namespace espalier::cli {

// Of the timed samples; their mean, as every sample has routes of its own.
struct BenchWork {
  double experts_touched = 0;
  double weights_touched = 0;               // those of every touched expert once
  std::vector<double> format_weights = {};  // the same by ExpertTiers::formats
  double packed_bytes = 0;                  // their codes
  double flops = 0;                         // two a weight and route
};

struct BenchRow {
  uint64_t tokens = 0;
  bool gate_passed = false;
  Metrics metrics;                           // against the reference
  uint64_t rows_checked = 0;                 // tokens that were compared
  std::optional<double> serial_rel_l2 = {};  // together against one by one, all tokens; empty with one tier
  std::string failure = {};                  // why the gate failed
  // Microseconds; all empty where the gate failed.
  std::vector<double> samples_us = {};
  std::vector<double> eager_us = {};
  std::vector<double> serial_us = {};
  BenchWork work = {};
};

struct BenchReport {
  std::string name;   // of the geometry, or the checkpoint
  std::string layer;  // of a checkpoint; empty = a geometry
  const PreparedExperts* experts = nullptr;
  ExpertTiers tiers;
  uint32_t top_k = 0;
  std::string executor;
  std::string mode;  // empty = the executor has none
  Gate gate = {};
  uint64_t seed = 0;

  std::string command;
  std::string time;  // when it began, ISO 8601 in UTC
  BenchMachine machine;
  std::optional<double> clock_mhz = {};
  std::optional<double> clock_mhz_after = {};
  BenchLimits limits;
  Dtype input = Dtype::kF32;
  bool has_graphs = false;
  std::string cold_text;
  std::vector<BenchRow> rows;

  bool ok() const;
};

// Of sorted or unsorted samples. REQUIRES: not empty.
double MedianOf(std::vector<double> samples);

// Microseconds that decoding as many weights of each format takes at the measured rates: one after the other.
// Empty where no rate was measured.
std::optional<double> DecodeMicroseconds(const BenchLimits& limits, std::span<const double> format_weights);

Json BenchDocument(const BenchReport& report);

void PrintBench(const BenchReport& report, Output& output);

// Time against tokens, both logarithmic: the medians with their spread, the serial form, and the least times
// that the measured limits allow. Standalone SVG.
std::string BenchSvg(const BenchReport& report);

}  // namespace espalier::cli

#endif  // ESPALIER_CLI_BENCH_REPORT_H_
