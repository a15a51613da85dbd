// SPDX-License-Identifier: Apache-2.0
#ifndef ESPALIER_SRC_CPU_SCALED_ROWS_H_
#define ESPALIER_SRC_CPU_SCALED_ROWS_H_

#include <espalier/formats.h>

#include <algorithm>
#include <cstdint>

#include "cpu/exact_rows.h"
#include "moe/rows.h"

namespace espalier::cpu {

// Inputs of one call as fp32 rows times 2^-exponent.
struct ScaledRows {
  float* values = nullptr;       // [tokens][stored_channels]
  int32_t* exponents = nullptr;  // [tokens]
  uint64_t stored_channels = 0;

  const float* Row(uint64_t token) const { return values + token * stored_channels; }
  float* Row(uint64_t token) { return values + token * stored_channels; }

  void Load(uint64_t token, Dtype dtype, const void* x, uint64_t first, uint64_t channels) const {
    float* row = values + token * stored_channels;
    LoadRow(dtype, x, first, channels, row);
    std::fill(row + channels, row + stored_channels, 0.0f);
    const int32_t exponent = RowExponent(row, channels);
    exponents[token] = exponent == kZeroExponent ? 0 : exponent;
    if (exponents[token] == 0) return;
    const double factor = PowerOfTwo(-exponent);  // up to 2^149: beyond fp32
    for (uint64_t i = 0; i < channels; ++i) row[i] = static_cast<float>(row[i] * factor);
  }
};

}  // namespace espalier::cpu

#endif  // ESPALIER_SRC_CPU_SCALED_ROWS_H_
