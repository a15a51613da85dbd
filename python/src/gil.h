// SPDX-License-Identifier: Apache-2.0
//
// Giving up the GIL and taking it. While the interpreter ends, CPython before 3.14 ends threads that ask for
// it, by an unwinding that no noexcept function survives; those are put to sleep instead, as 3.14 does.
#ifndef ESPALIER_PYTHON_GIL_H_
#define ESPALIER_PYTHON_GIL_H_

#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <unistd.h>

#include <utility>

namespace espalier::python {

template <typename Function>
auto OrSleep(Function&& take) noexcept {
  try {
    return take();
  } catch (abi::__forced_unwind&) {
    while (true) pause();
  }
}

class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    OrSleep([this] { PyEval_RestoreThread(state_); });
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

class GilHeld {
 public:
  GilHeld() : state_(OrSleep([] { return PyGILState_Ensure(); })) {}
  ~GilHeld() { PyGILState_Release(state_); }
  GilHeld(const GilHeld&) = delete;
  GilHeld& operator=(const GilHeld&) = delete;

 private:
  PyGILState_STATE state_;
};

// What may take long, or call back from other threads.
template <typename Function>
auto WithoutGil(Function&& function) {
  const GilReleased released;
  return function();
}

}  // namespace espalier::python

#endif  // ESPALIER_PYTHON_GIL_H_
