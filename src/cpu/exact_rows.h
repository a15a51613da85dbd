// SPDX-License-Identifier: Apache-2.0
//
// What happens to a row between its products, in double: for mode exact, and in every mode for rows whose values
// leave the range in which fp32 needs no care.
#ifndef ESPALIER_SRC_CPU_EXACT_ROWS_H_
#define ESPALIER_SRC_CPU_EXACT_ROWS_H_

#include <espalier/formats.h>

#include <cstdint>

#include "cpu/kernel_table.h"
#include "moe/matrix_view.h"

namespace espalier::cpu {

// Exponent of a row or block that holds nothing but zeros: below every real one.
inline constexpr int32_t kZeroExponent = -(1 << 20);
// Magnitudes within these bounds are safe from overflow and underflow in everything that a matrix product and an
// activation do with them.
inline constexpr float kLeastSafe = 0x1p-30f;
inline constexpr float kMostSafe = 0x1p30f;

// 0 when the largest magnitude of the row lies in the safe range or is not finite, kZeroExponent when it is 0,
// else its binary exponent: scaled by 2^-exponent the row is safe.
template <typename Real>
int32_t RowExponent(const Real* values, uint64_t count);

// 2^exponent, 0 far below and infinity far above the range of a double.
double PowerOfTwo(int32_t exponent);

// values = H128(sums + offset) * svh * 2^exponent + bias for output channels [128 * out_block, + 128). Sums in
// lane order.
void FinishExact(const MatrixView& matrix, uint32_t out_block, int32_t exponent, const float* sums,
                 float offset, double* values);

// rotated = H128(act(gate, up) * suh * 2^-exponent); `valid` of the 128 channels count, the others are 0. Returns
// the exponent, which makes the row safe.
int32_t BoundaryExact(const Activation& activation, const double* gate, const double* up,
                      const uint16_t* suh, uint64_t valid, float* rotated);

}  // namespace espalier::cpu

#endif  // ESPALIER_SRC_CPU_EXACT_ROWS_H_
