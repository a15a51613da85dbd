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

// An exception stops the load, and Finish() raises it; so does the value False, which is a CancelledError of
// the library.
class CallerProgress {
 public:
  explicit CallerProgress(nb::object function) : function_(std::move(function)) {
    if (!function_.is_none() && !PyCallable_Check(function_.ptr()))
      Raise(StatusCode::kUsage, "progress is no function; legal: None, True, a function of (done, total)");
  }

  // Empty without a function. Takes the GIL on whatever thread it is called.
  std::function<bool(uint64_t, uint64_t)> Callback() {
    if (function_.is_none()) return {};
    return [this](uint64_t done, uint64_t total) {
      const GilHeld held;
      try {
        return !function_(done, total).is(nb::handle(Py_False));
      } catch (nb::python_error& error) {
        error_.emplace(std::move(error));
        return false;
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
