// SPDX-License-Identifier: Apache-2.0
//
// Arrays in and out, without copies. In: whatever has __dlpack__ or the buffer protocol. Out: Array, which
// has both.
#ifndef ESPALIER_PYTHON_ARRAY_H_
#define ESPALIER_PYTHON_ARRAY_H_

#include <espalier/device.h>
#include <espalier/formats.h>
#include <espalier/host_buffer.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "errors.h"

namespace espalier::python {

// An array in host memory that the library made: row-major, without gaps.
struct Array {
  std::shared_ptr<HostBuffer> memory;
  Dtype dtype = Dtype::kF32;
  std::vector<size_t> shape;

  static Array Create(Dtype dtype, std::vector<size_t> shape);
  uint64_t size_bytes() const { return memory->size_bytes(); }
};

// An array of the caller's, kept alive as long as this.
struct Imported {
  nb::ndarray<nb::ro> keep;
  std::string name;  // of the argument
  std::byte* data = nullptr;
  std::optional<Dtype> dtype;  // empty for types that no checkpoint has
  std::string dtype_text;
  Device device;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // elements

  uint64_t element_bytes() const { return keep.itemsize(); }
};

// `stream` is where a GPU array's producer is told that it will be used. Errors: kUsage for what is no array,
// is read-only and must not be, or refuses.
Imported Import(nb::handle object, std::string_view name, bool writable, std::optional<uint64_t> stream = {});

// [rows, columns] with any distance between rows.
struct Rows {
  Imported array;
  uint64_t num_rows = 0;
  uint64_t row_stride = 0;  // elements

  void* data() const { return array.data; }
};

struct RowsWanted {
  std::vector<Dtype> dtypes;  // one of these
  uint64_t columns = 0;
  std::string_view columns_text;  // "hidden", for messages
  Device device;
};

// Errors: kUsage (dtype, strides inside a row), kGeometry (shape, distance of rows), kDevice.
Rows ToRows(Imported array, const RowsWanted& wanted);

// kGeometry unless both have as many rows.
void CheckSameRows(const Rows& rows, const Rows& like);

// kUsage where memory that is written overlaps memory that is read, or each other.
void CheckApart(const Imported& written, const Imported& other);

// A vector [size] of whole elements side by side, or a longer array in row-major order.
// Errors: kUsage (dtype, strides), kGeometry (shape), kDevice (not on the host).
void CheckDense(const Imported& array, const std::vector<Dtype>& dtypes, const std::vector<uint64_t>& shape);

// One int32 vector and the like on `device`, side by side, of any length up to 2^32.
void CheckVector(const Imported& array, Dtype dtype, const Device& device);

// Any dtype and shape without gaps.
void CheckWorkspace(const Imported& array, const Device& device);

std::string ShapeText(const std::vector<int64_t>& shape);

void BindArray(nb::module_& module);

}  // namespace espalier::python

#endif  // ESPALIER_PYTHON_ARRAY_H_
