// SPDX-License-Identifier: Apache-2.0
#include "array.h"

#include <algorithm>
#include <utility>

#include "arguments.h"

namespace espalier::python {
namespace {

using Code = nb::dlpack::dtype_code;

constexpr std::pair<Dtype, Code> kCodes[] = {
    {Dtype::kBool, Code::Bool},
    {Dtype::kU8, Code::UInt},
    {Dtype::kI8, Code::Int},
    {Dtype::kI16, Code::Int},
    {Dtype::kU16, Code::UInt},
    {Dtype::kF16, Code::Float},
    {Dtype::kBF16, Code::Bfloat},
    {Dtype::kI32, Code::Int},
    {Dtype::kU32, Code::UInt},
    {Dtype::kF32, Code::Float},
    {Dtype::kF64, Code::Float},
    {Dtype::kI64, Code::Int},
    {Dtype::kU64, Code::UInt},
    {Dtype::kC64, Code::Complex},
    {Dtype::kF8E4M3, Code::Float8_E4M3FN},
    {Dtype::kF8E5M2, Code::Float8_E5M2},
    {Dtype::kF8E8M0, Code::Float8_E8M0FNU},
    {Dtype::kF8E4M3Fnuz, Code::Float8_E4M3FNUZ},
    {Dtype::kF8E5M2Fnuz, Code::Float8_E5M2FNUZ},
};

nb::dlpack::dtype DlpackDtype(Dtype dtype) {
  for (const auto& [candidate, code] : kCodes) {
    if (candidate == dtype) return {static_cast<uint8_t>(code), static_cast<uint8_t>(DtypeBits(dtype)), 1};
  }
  Raise(StatusCode::kUnsupported, std::string(DtypeName(dtype)) + " has no array type");
}

std::optional<Dtype> FromDlpack(nb::dlpack::dtype dtype) {
  if (dtype.lanes != 1) return std::nullopt;
  for (const auto& [candidate, code] : kCodes) {
    if (static_cast<uint8_t>(code) == dtype.code && DtypeBits(candidate) == dtype.bits) return candidate;
  }
  return std::nullopt;
}

std::string DlpackText(nb::dlpack::dtype dtype) {
  if (const std::optional<Dtype> known = FromDlpack(dtype)) return ArrayDtypeName(*known);
  return "DLPack type " + std::to_string(dtype.code) + " of " + std::to_string(dtype.bits) + " bits, " +
         std::to_string(dtype.lanes) + " lanes";
}

constexpr int kDlpackCpu = nb::device::cpu::value;
constexpr int kDlpackCuda = nb::device::cuda::value;
constexpr int kDlpackPinned = nb::device::cuda_host::value;
constexpr int kDlpackManaged = nb::device::cuda_managed::value;

// An error of the array's own methods, in its words. What is not an Exception (KeyboardInterrupt) goes on.
[[noreturn]] void RaiseForeign(std::string_view name, nb::handle object, const char* method,
                               nb::python_error& error) {
  if (!error.matches(PyExc_Exception)) throw std::move(error);
  Raise(StatusCode::kUsage,
        std::string(name) + ": " + TypeName(object) + "." + method + "() failed: " + Str(error.value()));
}

// The first of __dlpack_device__(); empty where an object has no such method.
std::optional<int> DlpackDeviceType(nb::handle object, std::string_view name) {
  try {
    if (!nb::hasattr(object, "__dlpack_device__")) return std::nullopt;
    const nb::object device = object.attr("__dlpack_device__")();
    return nb::cast<int>(nb::object(nb::int_(nb::object(device[0]))));
  } catch (nb::python_error& error) {
    RaiseForeign(name, object, "__dlpack_device__", error);
  } catch (const std::exception&) {
    Raise(StatusCode::kUsage, std::string(name) + ": " + TypeName(object) +
                                  ".__dlpack_device__() did not give a pair of integers");
  }
}

// The capsule of __dlpack__, or an empty object where there is no such method.
nb::object Capsule(nb::handle object, std::string_view name, std::optional<uint64_t> stream) {
  const nb::object method = nb::getattr(object, "__dlpack__", nb::none());
  if (method.is_none() || PyType_Check(object.ptr())) return nb::object();
  nb::dict arguments;
  const std::optional<int> device = DlpackDeviceType(object, name);
  if (device == kDlpackCuda || device == kDlpackManaged) {
    // 1 is the protocol's name for the default stream.
    arguments["stream"] = stream.value_or(0) == 0 ? uint64_t{1} : *stream;
  }
  const nb::dict old_arguments = nb::borrow<nb::dict>(arguments.attr("copy")());
  arguments["max_version"] = nb::make_tuple(1, 1);
  try {
    return method(**arguments);
  } catch (nb::python_error& error) {
    // Before version 1 of the protocol there was no such argument.
    if (!error.matches(PyExc_TypeError)) RaiseForeign(name, object, "__dlpack__", error);
  }
  try {
    return method(**old_arguments);
  } catch (nb::python_error& error) {
    // numpy before 2.1 cannot say in a capsule that an array is read-only, and its buffer can.
    if (error.matches(PyExc_BufferError) && PyObject_CheckBuffer(object.ptr())) return nb::object();
    RaiseForeign(name, object, "__dlpack__", error);
  }
}

bool IsImmutable(nb::handle object) {
  const std::string type = TypeName(object);
  return type.starts_with("jax");
}

[[noreturn]] void RaiseNoArray(nb::handle object, std::string_view name) {
  Raise(StatusCode::kUsage, std::string(name) + " is " +
                                (object.is_none() ? "None" : "of type " + TypeName(object)) +
                                "; legal: an array with __dlpack__ (numpy, torch, cupy, jax) or a buffer");
}

Device FromDlpackDevice(int type, int index, std::string_view name) {
  if (type == kDlpackCpu || type == kDlpackPinned) return {};
  if (type == kDlpackCuda || type == kDlpackManaged) return {.type = DeviceType::kCuda, .index = index};
  Raise(StatusCode::kDevice, std::string(name) + " is on DLPack device " + std::to_string(type) + ":" +
                                 std::to_string(index) + "; legal: the host, a CUDA device");
}

}  // namespace

Array Array::Create(Dtype dtype, std::vector<size_t> shape) {
  uint64_t bytes = static_cast<uint64_t>(DtypeBits(dtype)) / 8;
  for (const size_t size : shape) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) Raise(StatusCode::kCapacity, "array of 2^64 bytes");
  }
  HostBuffer memory = Value(HostBuffer::Create(bytes));
  return {
      .memory = std::make_shared<HostBuffer>(std::move(memory)), .dtype = dtype, .shape = std::move(shape)};
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

Imported Import(nb::handle object, std::string_view name, bool writable, std::optional<uint64_t> stream) {
  nb::object source = Capsule(object, name, stream);
  if (!source.is_valid()) {
    if (!PyObject_CheckBuffer(object.ptr())) RaiseNoArray(object, name);
    source = nb::borrow(object);
  } else if (!PyCapsule_CheckExact(source.ptr())) {
    Raise(StatusCode::kUsage, std::string(name) + ": " + TypeName(object) + ".__dlpack__() gave " +
                                  TypeName(source) + "; legal: a capsule");
  }
  nb::ndarray<> for_writing;
  Imported array;
  array.name = name;
  if (writable && nb::try_cast(source, for_writing, false)) {
    array.keep = nb::ndarray<nb::ro>(for_writing);
  } else if (!nb::try_cast(source, array.keep, false)) {
    Raise(StatusCode::kUsage,
          std::string(name) + ": the array of " + TypeName(object) + " cannot be read through DLPack");
  }
  if (writable && (!for_writing.is_valid() || IsImmutable(object)))
    Raise(StatusCode::kUsage, std::string(name) + " is read-only");
  const nb::ndarray<nb::ro>& keep = array.keep;
  array.dtype = FromDlpack(keep.dtype());
  array.dtype_text = DlpackText(keep.dtype());
  array.device = FromDlpackDevice(keep.device_type(), keep.device_id(), name);
  array.shape.assign(keep.shape_ptr(), keep.shape_ptr() + keep.ndim());
  array.strides.assign(keep.stride_ptr(), keep.stride_ptr() + keep.ndim());
  array.data = const_cast<std::byte*>(static_cast<const std::byte*>(keep.data()));
  if (std::any_of(array.shape.begin(), array.shape.end(), [](int64_t size) { return size < 0; }))
    Raise(StatusCode::kGeometry, std::string(name) + " is " + ShapeText(array.shape) + ", which no array is");
  return array;
}

namespace {

void CheckDtype(const Imported& array, const std::vector<Dtype>& dtypes) {
  if (array.dtype && std::find(dtypes.begin(), dtypes.end(), *array.dtype) != dtypes.end()) return;
  std::string legal;
  for (const Dtype dtype : dtypes) legal += (legal.empty() ? "" : ", ") + std::string(ArrayDtypeName(dtype));
  Raise(StatusCode::kUsage, array.name + " is " + array.dtype_text + "; legal: " + legal);
}

void CheckDevice(const Imported& array, const Device& device) {
  if (array.device == device) return;
  Raise(StatusCode::kDevice,
        array.name + " is on " + DeviceText(array.device) + "; legal: " + DeviceText(device));
}

void CheckNoGaps(const Imported& array) {
  int64_t dense = 1;
  for (size_t i = array.shape.size(); i-- > 0;) {
    if (array.shape[i] > 1 && array.strides[i] != dense) {
      Raise(StatusCode::kUsage, array.name + " has strides of " + ShapeText(array.strides) +
                                    " elements; legal: row-major without gaps (numpy.ascontiguousarray)");
    }
    dense *= array.shape[i];
  }
}

}  // namespace

Rows ToRows(Imported array, const RowsWanted& wanted) {
  CheckDtype(array, wanted.dtypes);
  if (array.shape.size() != 2 || static_cast<uint64_t>(array.shape[1]) != wanted.columns) {
    Raise(StatusCode::kGeometry, array.name + " is " + ShapeText(array.shape) + "; legal: [tokens, " +
                                     std::to_string(wanted.columns) + "], the latter " +
                                     std::string(wanted.columns_text));
  }
  CheckDevice(array, wanted.device);
  const auto num_rows = static_cast<uint64_t>(array.shape[0]);
  if (num_rows > 0 && wanted.columns > 1 && array.strides[1] != 1) {
    Raise(StatusCode::kUsage,
          array.name + " has strides of " + ShapeText(array.strides) + " elements; legal: 1 inside a row");
  }
  // Where there is one row, its distance to the next means nothing.
  const int64_t row_stride = num_rows > 1 ? array.strides[0] : static_cast<int64_t>(wanted.columns);
  if (row_stride < static_cast<int64_t>(wanted.columns)) {
    Raise(StatusCode::kGeometry, array.name + " has strides of " + ShapeText(array.strides) +
                                     " elements; legal: at least " + std::to_string(wanted.columns) +
                                     " from row to row");
  }
  return {.array = std::move(array), .num_rows = num_rows, .row_stride = static_cast<uint64_t>(row_stride)};
}

void CheckSameRows(const Rows& rows, const Rows& like) {
  if (rows.num_rows == like.num_rows) return;
  Raise(StatusCode::kGeometry, rows.array.name + " has " + std::to_string(rows.num_rows) + " rows and " +
                                   like.array.name + " has " + std::to_string(like.num_rows));
}

void CheckApart(const Imported& written, const Imported& other) {
  const auto range = [](const Imported& array) {
    auto elements = uint64_t{1};
    for (size_t i = 0; i < array.shape.size(); ++i) {
      if (array.shape[i] == 0) return std::pair<uintptr_t, uintptr_t>(0, 0);
      elements += static_cast<uint64_t>(array.shape[i] - 1) * static_cast<uint64_t>(array.strides[i]);
    }
    const auto begin = reinterpret_cast<uintptr_t>(array.data);
    return std::pair(begin, begin + elements * array.element_bytes());
  };
  if (written.device != other.device) return;
  const auto [begin, end] = range(written);
  const auto [other_begin, other_end] = range(other);
  if (begin >= other_end || other_begin >= end) return;
  Raise(StatusCode::kUsage, written.name + " overlaps " + other.name + "; legal: memory of its own");
}

void CheckDense(const Imported& array, const std::vector<Dtype>& dtypes, const std::vector<uint64_t>& shape) {
  CheckDtype(array, dtypes);
  CheckDevice(array, Device{});
  if (!std::equal(shape.begin(), shape.end(), array.shape.begin(), array.shape.end(),
                  [](uint64_t wanted, int64_t found) { return wanted == static_cast<uint64_t>(found); })) {
    Raise(StatusCode::kGeometry, array.name + " is " + ShapeText(array.shape) + "; legal: " +
                                     ShapeText(std::vector<int64_t>(shape.begin(), shape.end())));
  }
  CheckNoGaps(array);
}

void CheckVector(const Imported& array, Dtype dtype, const Device& device) {
  CheckDtype(array, {dtype});
  CheckDevice(array, device);
  if (array.shape.size() != 1 || static_cast<uint64_t>(array.shape[0]) > ~uint32_t{0})
    Raise(StatusCode::kGeometry, array.name + " is " + ShapeText(array.shape) + "; legal: a vector");
  if (array.shape[0] > 1 && array.strides[0] != 1) {
    Raise(StatusCode::kUsage,
          array.name + " has strides of " + ShapeText(array.strides) + " elements; legal: 1");
  }
}

void CheckWorkspace(const Imported& array, const Device& device) {
  CheckDevice(array, device);
  CheckNoGaps(array);
}

namespace {

// nanobind's own array object over the same memory; it keeps `self` alive.
nb::object View(nb::handle self) {
  const Array& array = nb::cast<const Array&>(self);
  return nb::cast(nb::ndarray<nb::array_api>(array.memory->data(), array.shape.size(), array.shape.data(),
                                             self, nullptr, DlpackDtype(array.dtype), kDlpackCpu, 0),
                  nb::rv_policy::reference);
}

int GetBuffer(PyObject* self, Py_buffer* view, int flags) noexcept {
  view->obj = nullptr;
  try {
    const Array& array = nb::cast<const Array&>(nb::handle(self));
    const Code code = static_cast<Code>(DlpackDtype(array.dtype).code);
    if (code > Code::Float && code != Code::Complex && code != Code::Bool) {
      PyErr_Format(
          PyExc_BufferError,
          "the buffer protocol has no name for %s; legal: from_dlpack of a library that has the type, "
          "or view() as an unsigned integer",
          ArrayDtypeName(array.dtype));
      return -1;
    }
    return PyObject_GetBuffer(View(self).ptr(), view, flags);
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_BufferError, error.what());
  }
  return -1;
}

nb::object Dlpack(nb::handle self, nb::object stream, nb::object max_version, nb::object dl_device,
                  nb::object copy) {
  nb::dict arguments;
  if (!stream.is_none()) arguments["stream"] = stream;
  if (!max_version.is_none()) arguments["max_version"] = max_version;
  if (!dl_device.is_none()) arguments["dl_device"] = dl_device;
  if (!copy.is_none()) arguments["copy"] = copy;
  return View(self).attr("__dlpack__")(**arguments);
}

// The same memory, its elements named otherwise.
Array ViewAs(const Array& array, nb::handle dtype) {
  const std::string text = Str(nb::getattr(dtype, "name", nb::getattr(dtype, "__name__", nb::str(dtype))));
  for (const auto& [candidate, code] : kCodes) {
    const std::string name = ArrayDtypeName(candidate);
    if (text != name && text != "torch." + name) continue;
    if (DtypeBits(candidate) == DtypeBits(array.dtype))
      return {.memory = array.memory, .dtype = candidate, .shape = array.shape};
    Raise(StatusCode::kUsage, "view as " + name + " of an array of " + ArrayDtypeName(array.dtype) +
                                  "; legal: a dtype of " + std::to_string(DtypeBits(array.dtype)) + " bits");
  }
  Raise(StatusCode::kUsage, "no dtype '" + text + "'");
}

PyType_Slot array_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(GetBuffer)}, {0, nullptr}};

}  // namespace

void BindArray(nb::module_& module) {
  nb::class_<Array>(
      module, "Array", nb::type_slots(array_slots),
      "A row-major array in host memory that the library made and the caller may write to.\n\n"
      "numpy.asarray(a), torch.from_dlpack(a) and memoryview(a) see the same memory; it lives as\n"
      "long as any of them. Not safe to write from one thread while another reads it.")
      .def_prop_ro(
          "shape", [](const Array& array) { return nb::tuple(nb::cast(array.shape)); },
          nb::sig("def shape(self) -> tuple[int, ...]"), "Elements along each axis; () for a scalar.")
      .def_prop_ro(
          "dtype", [](const Array& array) { return ArrayDtypeName(array.dtype); },
          nb::sig("def dtype(self) -> str"),
          "Name of the element type as numpy or torch has it: \"float32\", \"bfloat16\".")
      .def_prop_ro(
          "ndim", [](const Array& array) { return array.shape.size(); }, "Number of axes.")
      .def_prop_ro("nbytes", &Array::size_bytes, "Bytes of all elements.")
      .def("view", &ViewAs, nb::arg("dtype").none(), nb::sig("def view(self, dtype: typing.Any) -> Array"),
           "The same memory as elements of another dtype of the same size, e.g. \"uint16\" for bfloat16.\n\n"
           "UsageError: the sizes differ, or there is no such dtype.")
      .def("__dlpack__", &Dlpack, nb::kw_only(), nb::arg("stream") = nb::none(),
           nb::arg("max_version") = nb::none(), nb::arg("dl_device") = nb::none(),
           nb::arg("copy") = nb::none(),
           nb::sig("def __dlpack__(self, *, stream: typing.Any = None, max_version: tuple[int, int] | None = "
                   "None, "
                   "dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> typing.Any"),
           "A DLPack capsule over the same memory. BufferError for a copy or another device.")
      .def(
          "__dlpack_device__", [](const Array&) { return nb::make_tuple(kDlpackCpu, 0); },
          nb::sig("def __dlpack_device__(self) -> tuple[int, int]"), "(1, 0): the host.")
      .def(
          "__array__",
          [](nb::handle self, nb::object dtype, nb::object copy) {
            return nb::module_::import_("espalier._numpy").attr("to_numpy")(self, dtype, copy);
          },
          nb::arg("dtype") = nb::none(), nb::arg("copy") = nb::none(),
          nb::sig("def __array__(self, dtype: typing.Any = None, copy: bool | None = None) -> typing.Any"),
          "What numpy.asarray asks for. TypeError for types that numpy does not have, unless ml_dtypes has "
          "them.")
      .def("__len__",
           [](const Array& array) {
             if (array.shape.empty()) throw nb::type_error("len() of an array without axes");
             return array.shape[0];
           })
      .def("__repr__", [](const Array& array) {
        return "<espalier.Array " + ShapeText(std::vector<int64_t>(array.shape.begin(), array.shape.end())) +
               " " + ArrayDtypeName(array.dtype) + ">";
      });
}

}  // namespace espalier::python
