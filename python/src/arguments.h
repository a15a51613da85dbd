// SPDX-License-Identifier: Apache-2.0
//
// What functions take from Python besides arrays: numbers of any size, names, devices. What is not legal is a
// UsageError that names the argument, what was found and what would have been legal.
#ifndef ESPALIER_PYTHON_ARGUMENTS_H_
#define ESPALIER_PYTHON_ARGUMENTS_H_

#include <espalier/device.h>
#include <espalier/formats.h>
#include <espalier/moe.h>
#include <nanobind/nanobind.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "errors.h"

namespace espalier::python {

// An integer of Python's, numpy's or any other kind, of any size.
struct Int {
  nb::object value;
};

inline constexpr uint64_t kMaxInt = std::numeric_limits<int64_t>::max();

// Legal: low to high.
uint64_t ToInteger(const Int& number, std::string_view name, uint64_t low, uint64_t high);

// A number of the type T, 0 to the largest there is.
template <typename T>
T ToCount(const Int& number, std::string_view name) {
  return static_cast<T>(ToInteger(number, name, 0, std::numeric_limits<T>::max()));
}

// "float32" as numpy and torch call it; null where neither has a name for it.
const char* ArrayDtypeName(Dtype dtype);

// A name ("float32", "F32"), or a dtype of numpy or torch. Legal: float32, float16, bfloat16, float64.
Dtype ToDtype(nb::handle dtype, std::string_view name);

// "cpu", "cuda", "cuda:1", or anything whose str() is one of these (torch.device).
Device ToDeviceArgument(nb::handle device, std::string_view name);

CpuMode ToMode(std::string_view text);

// A text or None.
std::optional<Activation> ToActivation(nb::handle activation);

// str() of anything, for messages.
std::string Str(nb::handle object);

// "numpy.ndarray", "list".
std::string TypeName(nb::handle object);

}  // namespace espalier::python

namespace nanobind::detail {

template <>
struct type_caster<espalier::python::Int> {
  NB_TYPE_CASTER(espalier::python::Int, const_name("int"))

  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    if (!PyIndex_Check(source.ptr())) return false;
    value.value = borrow(source);
    return true;
  }
  static handle from_cpp(const espalier::python::Int& number, rv_policy, cleanup_list*) noexcept {
    return handle(number.value).inc_ref();
  }
};

}  // namespace nanobind::detail

#endif  // ESPALIER_PYTHON_ARGUMENTS_H_
