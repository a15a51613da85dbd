// SPDX-License-Identifier: Apache-2.0
//
// What benchmarks hold their numbers against, on a GPU. No rate is judged.
#include <fmt/format.h>

#include <cmath>

#include "cuda/cold_timer.h"
#include "gpu_test.h"

namespace espalier {
namespace {

using cuda::ColdTimer;

class CudaProbes : public GpuTest {};

TEST_F(CudaProbes, DecodeEveryRateAndCodebook) {
  ColdTimer timer = ColdTimer::Create(test::kFirstGpu).value();
  for (const CodebookInfo& codebook : AllCodebooks()) {
    for (const int bits : kAllBits) {
      SCOPED_TRACE(fmt::format("{} K {}", codebook.name, bits));
      const Result<double> rate = timer.DecodeRate(bits, codebook.codebook, 1);
      ASSERT_TRUE(rate) << rate.error().message();
      EXPECT_GT(*rate, 0);
      EXPECT_TRUE(std::isfinite(*rate));
    }
  }
  EXPECT_TRUE(timer.stream().Synchronize());
}

// A warp decodes two quads a round, and 24 warps share an SM.
TEST_F(CudaProbes, CountTheWeightsThatTheyDecode) {
  const ColdTimer timer = ColdTimer::Create(test::kFirstGpu).value();
  const cuda::DeviceLimits limits = cuda::LimitsOf(test::kFirstGpu).value();
  DeviceBuffer result = DeviceBuffer::Create(test::kFirstGpu, sizeof(cuda::ProbeResult)).value();
  const auto num_sms = static_cast<uint64_t>(limits.num_sms);
  for (const uint64_t rounds : {0, 1, 5}) {
    EXPECT_EQ(
        cuda::EnqueueDecodeProbe(3, Codebook::kMcg, rounds, limits,
                                 reinterpret_cast<cuda::ProbeResult*>(result.data()), timer.stream().get())
            .value(),
        static_cast<uint64_t>(rounds) * 2 * 1024 * 24 * num_sms);
  }
  EXPECT_TRUE(timer.stream().Synchronize());
}

TEST_F(CudaProbes, TellTheClockBesideTheMatrixRate) {
  ColdTimer timer = ColdTimer::Create(test::kFirstGpu).value();
  EXPECT_FALSE(timer.clock_mhz());
  EXPECT_GT(timer.MatrixRate(1).value(), 0);
  EXPECT_GT(timer.clock_mhz().value(), 0);
  EXPECT_GT(timer.ReadRate(uint64_t{64} << 20, 1).value(), 0);
}

}  // namespace
}  // namespace espalier
