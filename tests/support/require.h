// SPDX-License-Identifier: Apache-2.0
#ifndef ESPALIER_TESTS_SUPPORT_REQUIRE_H_
#define ESPALIER_TESTS_SUPPORT_REQUIRE_H_

#include <espalier/status.h>

#include <stdexcept>
#include <utility>

namespace espalier::test {

// What a test sets up is legal: a refusal is a mistake in the test, loud at once.
template <typename T>
T Require(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().message());
  return *std::move(result);
}

inline void Require(const Result<void>& result) {
  if (!result) throw std::runtime_error(result.error().message());
}

}  // namespace espalier::test

#endif  // ESPALIER_TESTS_SUPPORT_REQUIRE_H_
