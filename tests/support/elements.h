// SPDX-License-Identifier: Apache-2.0
//
// Numbers in the element types of calls.
#ifndef ESPALIER_TESTS_SUPPORT_ELEMENTS_H_
#define ESPALIER_TESTS_SUPPORT_ELEMENTS_H_

#include <espalier/formats.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/half.h"

namespace espalier::test {

inline uint64_t BytesOf(Dtype dtype) { return static_cast<uint64_t>(DtypeBits(dtype)) / 8; }

inline void Encode(Dtype dtype, double value, std::byte* target) {
  const auto put = [target](auto element) { std::memcpy(target, &element, sizeof(element)); };
  if (dtype == Dtype::kF64) put(value);
  if (dtype == Dtype::kF32) put(static_cast<float>(value));
  if (dtype == Dtype::kF16) put(DoubleToFp16(value));
  if (dtype == Dtype::kBF16) put(DoubleToBf16(value));
}

inline double Decode(Dtype dtype, const std::byte* source) {
  const auto get = [source](auto element) {
    std::memcpy(&element, source, sizeof(element));
    return element;
  };
  if (dtype == Dtype::kF64) return get(double{});
  if (dtype == Dtype::kF32) return double{get(float{})};
  const uint16_t bits = get(uint16_t{});
  return dtype == Dtype::kF16 ? double{Fp16ToFloat(bits)} : double{Bf16ToFloat(bits)};
}

}  // namespace espalier::test

#endif  // ESPALIER_TESTS_SUPPORT_ELEMENTS_H_
