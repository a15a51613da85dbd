// SPDX-License-Identifier: Apache-2.0
#include "arguments.h"

#include <utility>

namespace espalier::python {
namespace {

// As numpy and torch call them, by the safetensors name's enumerator.
constexpr std::pair<Dtype, const char*> kArrayDtypes[] = {
    {Dtype::kBool, "bool"},
    {Dtype::kU8, "uint8"},
    {Dtype::kI8, "int8"},
    {Dtype::kI16, "int16"},
    {Dtype::kU16, "uint16"},
    {Dtype::kF16, "float16"},
    {Dtype::kBF16, "bfloat16"},
    {Dtype::kI32, "int32"},
    {Dtype::kU32, "uint32"},
    {Dtype::kF32, "float32"},
    {Dtype::kF64, "float64"},
    {Dtype::kI64, "int64"},
    {Dtype::kU64, "uint64"},
    {Dtype::kC64, "complex64"},
    {Dtype::kF8E4M3, "float8_e4m3fn"},
    {Dtype::kF8E5M2, "float8_e5m2"},
    {Dtype::kF8E8M0, "float8_e8m0fnu"},
    {Dtype::kF8E4M3Fnuz, "float8_e4m3fnuz"},
    {Dtype::kF8E5M2Fnuz, "float8_e5m2fnuz"},
};

}  // namespace

std::string Str(nb::handle object) {
  return nb::cast<std::string>(nb::str(object).attr("encode")("utf-8", "backslashreplace").attr("decode")());
}

std::string TypeName(nb::handle object) {
  const nb::handle type = object.type();
  const std::string module = Str(nb::getattr(type, "__module__", nb::str("")));
  const std::string name = Str(nb::getattr(type, "__qualname__", nb::str("?")));
  return module.empty() || module == "builtins" ? name : module + "." + name;
}

uint64_t ToInteger(const Int& number, std::string_view name, uint64_t low, uint64_t high) {
  const nb::object index = nb::steal(PyNumber_Index(number.value.ptr()));
  if (!index.is_valid()) throw nb::python_error();
  const unsigned long long found = PyLong_AsUnsignedLongLong(index.ptr());
  const bool fits = PyErr_Occurred() == nullptr;
  // Negative, or too large for any type.
  if (!fits) PyErr_Clear();
  if (fits && found >= low && found <= high) return found;
  // Numbers of thousands of digits have no str().
  const nb::object text = nb::steal(PyNumber_ToBase(index.ptr(), 16));
  const std::string digits = text.is_valid() ? Str(text) : "?";
  const std::string shown = digits.size() <= 34 ? Str(index) : digits.substr(0, 18) + "...";
  Raise(StatusCode::kUsage, std::string(name) + " is " + shown + "; legal: " + std::to_string(low) + " to " +
                                std::to_string(high));
}

const char* ArrayDtypeName(Dtype dtype) {
  for (const auto& [of_file, name] : kArrayDtypes) {
    if (of_file == dtype) return name;
  }
  return nullptr;
}

Dtype ToDtype(nb::handle dtype, std::string_view name) {
  std::string text;
  if (nb::isinstance<nb::str>(dtype)) {
    text = Str(dtype);
  } else {
    // numpy.dtype and numpy.float32 have a name, torch.float32 has a str().
    text = Str(nb::getattr(dtype, "name", nb::getattr(dtype, "__name__", nb::str(dtype))));
  }
  if (text.starts_with("torch.")) text.erase(0, 6);
  for (const Dtype legal : {Dtype::kF32, Dtype::kF16, Dtype::kBF16, Dtype::kF64}) {
    if (text == ArrayDtypeName(legal) || text == DtypeName(legal)) return legal;
  }
  Raise(StatusCode::kUsage,
        std::string(name) + " is '" + text + "'; legal: float32, float16, bfloat16, float64");
}

Device ToDeviceArgument(nb::handle device, std::string_view name) {
  const std::string text = Str(device);
  const Result<Device> parsed = ParseDevice(text);
  if (!parsed) Raise(parsed.error().code(), std::string(name) + ": " + parsed.error().message());
  return *parsed;
}

CpuMode ToMode(std::string_view text) {
  for (const CpuMode mode : {CpuMode::kExact, CpuMode::kFast, CpuMode::kInt8}) {
    if (text == CpuModeName(mode)) return mode;
  }
  Raise(StatusCode::kUsage, "mode is '" + std::string(text) + "'; legal: exact, fast, int8");
}

std::optional<Activation> ToActivation(nb::handle activation) {
  if (activation.is_none()) return std::nullopt;
  return Value(ParseActivation(Str(activation)));
}

}  // namespace espalier::python
