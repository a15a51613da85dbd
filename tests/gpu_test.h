// SPDX-License-Identifier: Apache-2.0
//
// Tests that need a GPU: they skip, with the reason, where there is none.
#ifndef ESPALIER_TESTS_GPU_TEST_H_
#define ESPALIER_TESTS_GPU_TEST_H_

#include <espalier/device.h>
#include <espalier/formats.h>
#include <gtest/gtest.h>

#include <iterator>

#include "support/placed_call.h"
#include "support/random_experts.h"

namespace espalier {

class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto devices = CudaDevices(); !devices) GTEST_SKIP() << devices.error().message();
  }
};

inline constexpr int kAllBits[] = {
#define ESPALIER_BITS(bits) bits,
#include <espalier/formats.def>
};

// Every rate and codebook in one package, another pair for each expert and projection.
inline test::MatrixFormat MixedFormat(uint32_t expert, Projection projection) {
  const uint32_t n = expert * 3 + static_cast<uint32_t>(projection);
  return {.bits = kAllBits[(n * 5 + expert) % std::size(kAllBits)],
          .codebook = AllCodebooks()[n % AllCodebooks().size()].codebook};
}

inline PreparedExperts OnGpu(const PreparedExperts& experts) {
  return ToDevice(experts, test::kFirstGpu).value();
}

}  // namespace espalier

#endif  // ESPALIER_TESTS_GPU_TEST_H_
