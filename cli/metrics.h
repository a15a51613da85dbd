// SPDX-License-Identifier: Apache-2.0
//
// How far values lie from a reference: the numbers that every gate is stated in.
#ifndef ESPALIER_CLI_METRICS_H_
#define ESPALIER_CLI_METRICS_H_

#include <cstdint>

namespace espalier::cli {

struct Metrics {
  double rel_l2 = 0;  // infinite when only one side is NaN somewhere, or only the reference is zero
  double cosine = 1;
  double max_abs = 0;

  bool Within(double max_rel_l2, double min_cosine) const {
    return rel_l2 <= max_rel_l2 && cosine >= min_cosine;
  }
};

// Over a whole tensor, in double. Positions where both sides are NaN, or the same infinity, are left
// out. Both norms 0: rel_l2 0 and cosine 1; only the reference 0: rel_l2 infinite, cosine 0.
class MetricsSum {
 public:
  void Add(double value, double reference);
  // For integers whose difference a double cannot hold.
  void Add(double value, double reference, double difference);

  Metrics Result() const;

 private:
  double difference_squares_ = 0;
  double value_squares_ = 0;
  double reference_squares_ = 0;
  double products_ = 0;
  double max_abs_ = 0;
  bool one_sided_ = false;
};

}  // namespace espalier::cli

#endif  // ESPALIER_CLI_METRICS_H_
