// SPDX-License-Identifier: Apache-2.0
//
// Prepared packages as Python holds them: handles that can be closed while runs elsewhere go on.
#ifndef ESPALIER_PYTHON_PACKAGES_H_
#define ESPALIER_PYTHON_PACKAGES_H_

#include <espalier/checkpoint.h>
#include <espalier/experts.h>
#include <espalier/extent_plan.h>
#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <utility>

#include "errors.h"

namespace espalier::python {

// What a closed handle still knows is its name. All members need the GIL, which is the lock.
template <typename Package>
class Handle {
 public:
  explicit Handle(Package package)
      : identity_(package.identity()), package_(std::make_shared<const Package>(std::move(package))) {}

  // A run holds this until it ends: close() never takes memory away from under it.
  std::shared_ptr<const Package> Get() const {
    if (package_ == nullptr) Raise(StatusCode::kUsage, identity_ + ": used after close()");
    return package_;
  }
  void Close() {
    std::shared_ptr<const Package> last = std::exchange(package_, nullptr);
    // Giving gigabytes back takes a while.
    const GilReleased released;
    last.reset();
  }
  bool closed() const { return package_ == nullptr; }
  const std::string& identity() const { return identity_; }

 private:
  std::string identity_;
  std::shared_ptr<const Package> package_;
};

using Experts = Handle<PreparedExperts>;
using Linear = Handle<PreparedLinear>;

void BindCheckpoint(nb::module_& module);
void BindPackages(nb::module_& module);
void BindPrepareArrays(nb::module_& module);
void BindRun(nb::module_& module);

}  // namespace espalier::python

#endif  // ESPALIER_PYTHON_PACKAGES_H_
