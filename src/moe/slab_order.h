// SPDX-License-Identifier: Apache-2.0
//
// Whole rows of tiles from one order of codes to the other, and which order a slab gets.
#ifndef ESPALIER_SRC_MOE_SLAB_ORDER_H_
#define ESPALIER_SRC_MOE_SLAB_ORDER_H_

#include <espalier/experts.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace espalier {

// Bytes of a row of tiles in native order.
uint64_t TileRowBytes(const MatrixDesc& matrix);

// Rows [first_row, first_row + num_rows) of tiles, native at `rows` (any alignment), to their places in
// `codes`, those of the whole matrix in panels. On the calling thread: each byte is read once, and written in
// runs of num_rows steps.
void PanelsFromRows(const MatrixDesc& matrix, uint64_t first_row, uint64_t num_rows, const std::byte* rows,
                    std::byte* codes);

// The inverse.
void RowsFromPanels(const MatrixDesc& matrix, uint64_t first_row, uint64_t num_rows, const std::byte* codes,
                    std::byte* rows);

// The order of a slab that is made under these options: where they leave it open, the one that the device's
// executor reads. `identity` is for messages. Error: kUnsupported as for CheckOrder.
Result<CodeOrder> ChooseOrder(const LoadOptions& options, std::string_view identity);

// Error: kUnsupported for a number that names no order, and for panels on a GPU.
Result<void> CheckOrder(CodeOrder order, const Device& device, std::string_view identity);

// Fills `target` with a slab whose matrices have any order, each of them in native order; what lies between
// them is copied as it is. Permutes through host memory of `window_bytes`, or of one row of tiles where that
// is more. Errors: kGeometry for codes that overlap others without being the same; kCapacity, kDevice.
// REQUIRES: descriptors checked against the slab, which is on the host; a target that is as large.
Result<void> CopyToNative(std::span<const MatrixDesc> matrices, std::span<const std::byte> slab,
                          uint64_t window_bytes, DeviceBuffer& target);

}  // namespace espalier

#endif  // ESPALIER_SRC_MOE_SLAB_ORDER_H_
