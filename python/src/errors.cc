// SPDX-License-Identifier: Apache-2.0
#include "errors.h"

namespace espalier::python {
namespace {

const char* ExceptionName(StatusCode code) {
  switch (code) {
    case StatusCode::kUsage:
      return "UsageError";
    case StatusCode::kIo:
      return "IoError";
    case StatusCode::kFormat:
      return "FormatError";
    case StatusCode::kUnsupported:
      return "UnsupportedError";
    case StatusCode::kGeometry:
      return "GeometryError";
    case StatusCode::kCapacity:
      return "CapacityError";
    case StatusCode::kDevice:
      return "DeviceError";
    case StatusCode::kCancelled:
      return "CancelledError";
  }
  return "EspalierError";
}

}  // namespace

nb::str Text(const std::string& text) {
  PyObject* decoded =
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogateescape");
  if (decoded == nullptr) throw nb::python_error();
  return nb::steal<nb::str>(decoded);
}

void Raise(StatusCode code, const std::string& message) {
  const nb::object type = nb::module_::import_("espalier._errors").attr(ExceptionName(code));
  PyErr_SetObject(type.ptr(), Text(message).ptr());
  throw nb::python_error();
}

}  // namespace espalier::python
