// SPDX-License-Identifier: Apache-2.0
//
// Overflow-checked size arithmetic: every number that comes from a file goes through these.
#ifndef ESPALIER_SRC_BASE_CHECKED_H_
#define ESPALIER_SRC_BASE_CHECKED_H_

#include <cstdint>
#include <optional>

namespace espalier {

inline std::optional<uint64_t> CheckedAdd(uint64_t a, uint64_t b) {
  uint64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) return std::nullopt;
  return sum;
}

inline std::optional<uint64_t> CheckedMul(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

// A byte count that remembers an overflow, for sums and products of several terms.
class CheckedBytes {
 public:
  CheckedBytes(uint64_t value = 0) : value_(value) {}  // NOLINT(google-explicit-constructor)

  CheckedBytes& operator+=(CheckedBytes other) {
    overflow_ = overflow_ || other.overflow_ || __builtin_add_overflow(value_, other.value_, &value_);
    return *this;
  }
  CheckedBytes& operator*=(CheckedBytes other) {
    overflow_ = overflow_ || other.overflow_ || __builtin_mul_overflow(value_, other.value_, &value_);
    return *this;
  }
  friend CheckedBytes operator+(CheckedBytes a, CheckedBytes b) { return a += b; }
  friend CheckedBytes operator*(CheckedBytes a, CheckedBytes b) { return a *= b; }

  // Empty after an overflow.
  std::optional<uint64_t> value() const {
    if (overflow_) return std::nullopt;
    return value_;
  }

 private:
  uint64_t value_ = 0;
  bool overflow_ = false;
};

constexpr uint64_t RoundUp(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace espalier

#endif  // ESPALIER_SRC_BASE_CHECKED_H_
