// SPDX-License-Identifier: Apache-2.0
#include "metrics.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace espalier::cli {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

void MetricsSum::Add(double value, double reference) { Add(value, reference, value - reference); }

void MetricsSum::Add(double value, double reference, double difference) {
  if (std::isnan(value) && std::isnan(reference)) return;
  if (!std::isfinite(value) || !std::isfinite(reference)) {
    if (value != reference) one_sided_ = true;
    return;
  }
  difference_squares_ += difference * difference;
  value_squares_ += value * value;
  reference_squares_ += reference * reference;
  products_ += value * reference;
  max_abs_ = std::max(max_abs_, std::abs(difference));
}

Metrics MetricsSum::Result() const {
  if (one_sided_) return {.rel_l2 = kInfinity, .cosine = 0, .max_abs = kInfinity};
  // Covers two zero tensors, and squares that underflow or overflow on both sides alike.
  if (max_abs_ == 0) return {};
  Metrics metrics{.max_abs = max_abs_};
  metrics.rel_l2 =
      reference_squares_ > 0 ? std::sqrt(difference_squares_) / std::sqrt(reference_squares_) : kInfinity;
  const double norms = std::sqrt(value_squares_) * std::sqrt(reference_squares_);
  metrics.cosine = norms > 0 ? products_ / norms : 0;
  if (std::isnan(metrics.rel_l2)) metrics.rel_l2 = kInfinity;
  if (std::isnan(metrics.cosine)) metrics.cosine = 0;
  return metrics;
}

}  // namespace espalier::cli
