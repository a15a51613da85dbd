// SPDX-License-Identifier: Apache-2.0
//
// From Status to the exceptions of espalier._errors. All of it needs the GIL.
#ifndef ESPALIER_PYTHON_ERRORS_H_
#define ESPALIER_PYTHON_ERRORS_H_

#include <espalier/status.h>
#include <nanobind/nanobind.h>
// Here for all: a file that lacks one would convert the type in another way.
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <type_traits>
#include <utility>

#include "gil.h"

namespace espalier::python {

namespace nb = nanobind;

// Throws the exception of the category, with the text unchanged.
[[noreturn]] void Raise(StatusCode code, const std::string& message);

// Text that may hold bytes of a file name in any encoding.
nb::str Text(const std::string& text);

template <typename T>
T Value(Result<T> result) {
  if (!result) Raise(result.error().code(), result.error().message());
  if constexpr (!std::is_void_v<T>) return *std::move(result);
}

}  // namespace espalier::python

#endif  // ESPALIER_PYTHON_ERRORS_H_
