// SPDX-License-Identifier: Apache-2.0
#include "reference/codebook.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <thread>
#include <vector>

#include "base/half.h"

namespace espalier {
namespace {

// Values are usable at compile time.
static_assert(CodebookValueFp16(Codebook::k3Inst, 0x0000) == 0x3a25);
static_assert(CodebookValueFp16(Codebook::kMcg, 0x0001) == 0x304e);
static_assert(CodebookValueFp16(Codebook::kMul1, 0xFFFF) == 0xb936);

TEST(ScaledIntegerToFp16, AgreesWithTheGeneralConversion) {
  for (const int exponent : {-30, -24, -18, -13, -8, -3, 0}) {
    for (int32_t n = -70000; n <= 70000; n += n > -3000 && n < 3000 ? 1 : 7) {
      const double value = std::ldexp(static_cast<double>(n), exponent);
      if (std::abs(value) >= 65520) continue;
      const uint16_t expected = n == 0 ? uint16_t{0} : DoubleToFp16(value);
      ASSERT_EQ(ScaledIntegerToFp16(n, exponent), expected) << n << " * 2^" << exponent;
    }
  }
}

// docs/format.md, section 2.5.
TEST(Codebook, StatisticsOfTheFormat) {
  struct Row {
    Codebook codebook;
    double rms, low, high;
    size_t distinct;
  };
  const Row rows[] = {{Codebook::k3Inst, 1.24371, -3.957, 3.973, 10598},
                      {Codebook::kMcg, 1.24411, -3.94921875, 3.94921875, 10746},
                      {Codebook::kMul1, 1.00031, -3.453125, 3.348, 913}};
  for (const Row& row : rows) {
    double squares = 0;
    std::set<float> values;
    for (const float value : CodebookTableFloat(row.codebook)) {
      squares += double{value} * double{value};
      values.insert(value);
    }
    EXPECT_NEAR(std::sqrt(squares / kNumStates), row.rms, 1e-5) << CodebookName(row.codebook);
    EXPECT_NEAR(*values.begin(), row.low, 1e-3) << CodebookName(row.codebook);
    EXPECT_NEAR(*values.rbegin(), row.high, 1e-3) << CodebookName(row.codebook);
    EXPECT_EQ(values.size(), row.distinct) << CodebookName(row.codebook);
  }
}

TEST(Codebook, TablesAreTheSameFromEveryThread) {
  std::vector<const float*> seen(4);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < seen.size(); ++i) {
    threads.emplace_back([&seen, i] { seen[i] = CodebookTableFloat(Codebook::kMul1).data(); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(std::ranges::all_of(seen, [&](const float* table) { return table == seen[0]; }));
}

}  // namespace
}  // namespace espalier
