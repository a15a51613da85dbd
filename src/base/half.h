// SPDX-License-Identifier: Apache-2.0
//
// IEEE binary16 and bfloat16 as bit patterns. Portable integer code, the same bits on every machine;
// round to nearest even, subnormals kept, NaN stays NaN.
#ifndef ESPALIER_SRC_BASE_HALF_H_
#define ESPALIER_SRC_BASE_HALF_H_

#include <cstdint>

namespace espalier {

float Fp16ToFloat(uint16_t bits);
float Bf16ToFloat(uint16_t bits);
uint16_t FloatToFp16(float value);
uint16_t FloatToBf16(float value);
// One rounding, straight from the double: not the same as rounding to float first.
uint16_t DoubleToFp16(double value);
uint16_t DoubleToBf16(double value);

}  // namespace espalier

#endif  // ESPALIER_SRC_BASE_HALF_H_
