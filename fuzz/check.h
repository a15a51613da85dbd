// SPDX-License-Identifier: Apache-2.0
#ifndef ESPALIER_FUZZ_CHECK_H_
#define ESPALIER_FUZZ_CHECK_H_

#include <cstdio>
#include <cstdlib>

namespace espalier::fuzz {

// Ends the fuzzer with a finding when a promise does not hold.
inline void Check(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", promise);
  std::abort();
}

}  // namespace espalier::fuzz

#endif  // ESPALIER_FUZZ_CHECK_H_
