// SPDX-License-Identifier: Apache-2.0
//
// The inner loops of the cpu executor, fp32 and portable. All work on blocks of 128 x 128 weights: the
// unit of the rotations. What happens to one row never depends on the other rows of a call.
#ifndef ESPALIER_SRC_CPU_KERNELS_H_
#define ESPALIER_SRC_CPU_KERNELS_H_

#include <espalier/formats.h>

#include <cstdint>

#include "moe/matrix_view.h"

namespace espalier {

inline constexpr uint32_t kBlockChannels = kHadamardChannels;
inline constexpr uint32_t kBlockWeights = kBlockChannels * kBlockChannels;

// Exponent of a row or block that holds nothing but zeros: below every real one.
inline constexpr int32_t kZeroExponent = -(1 << 20);

// Values of the 8 x 8 tiles at (in_block, out_block): weights[128][128], input channel first.
void DecodeBlock(const MatrixView& matrix, uint32_t in_block, uint32_t out_block, float* weights);

// sums[row][0..127] += scale[row] * (inputs[row][0..127] * weights). The product is summed over its 128
// terms first, so that long sums are sums of block sums: the rounding error grows with
// sqrt(128) + sqrt(blocks) instead of sqrt(128 * blocks). `scales` may be null (all 1).
void MultiplyBlock(const float* inputs, uint64_t input_stride, uint32_t num_rows, const float* weights,
                   const float* scales, float* sums);

// 0 when the largest magnitude of the row lies in [2^-30, 2^30] or is not finite, kZeroExponent when it
// is 0, else its binary exponent: scaled by 2^-exponent the row is safe from overflow and underflow in
// everything that a matrix product does with it.
template <typename Real>
int32_t RowExponent(const Real* values, uint64_t count);

// 2^exponent, 0 far below and infinity far above the range of a double.
double PowerOfTwo(int32_t exponent);

// fp16 vector [first, first + 128) as floats.
void LoadBlockVector(const uint16_t* vector, uint64_t first, float* values);

}  // namespace espalier

#endif  // ESPALIER_SRC_CPU_KERNELS_H_
