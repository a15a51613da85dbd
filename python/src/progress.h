// SPDX-License-Identifier: Apache-2.0
//
// A Python function as the progress callback of a load.
#ifndef ESPALIER_PYTHON_PROGRESS_H_
#define ESPALIER_PYTHON_PROGRESS_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>

#include "errors.h"

namespace espalier::python {

// Loading cannot be stopped half-way: the first exception ends the calls, and Finish() raises it when the
// load is over.
class CallerProgress {
 public:
  explicit CallerProgress(nb::object function) : function_(std::move(function)) {
    if (!function_.is_none() && !PyCallable_Check(function_.ptr()))
      Raise(StatusCode::kUsage, "progress is no function; legal: None, True, a function of (done, total)");
  }

  // Empty without a function. Takes the GIL on whatever thread it is called.
  std::function<void(uint64_t, uint64_t)> Callback() {
    if (function_.is_none()) return {};
    return [this](uint64_t done, uint64_t total) {
      const GilHeld held;
      if (error_) return;
      try {
        function_(done, total);
      } catch (nb::python_error& error) {
        error_.emplace(std::move(error));
      }
    };
  }

  void Finish() {
    if (error_) throw *std::exchange(error_, std::nullopt);
  }

 private:
  nb::object function_;
  std::optional<nb::python_error> error_;
};

}  // namespace espalier::python

#endif  // ESPALIER_PYTHON_PROGRESS_H_
