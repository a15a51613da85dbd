// SPDX-License-Identifier: Apache-2.0
//
// RunLinear on every executor: the promises of RunMoe for a single matrix.
#include <espalier/backend.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "base/half.h"
#include "support/placed_call.h"
#include "support/random_experts.h"

namespace espalier {
namespace {

using test::Compare;
using test::MakeLinear;
using test::MatrixFormat;
using test::Random;

std::vector<std::string> Executors() {
  std::vector<std::string> names;
  for (const Backend* backend : Backends()) names.emplace_back(backend->name());
  return names;
}

std::vector<float> RandomInput(const PreparedLinear& linear, uint64_t tokens, uint64_t seed) {
  Random random(seed);
  std::vector<float> x(tokens * linear.in_channels());
  for (float& value : x) value = static_cast<float>(random.Normal());
  return x;
}

struct CallOptions {
  int num_threads = 1;
  uint64_t padding = 0;
  uint64_t max_tokens = 0;
  std::vector<float> accumulate_on;  // not empty: y += with this before
};

// fp32 in, fp32 out, on poisoned memory.
std::vector<float> RunRows(const PreparedLinear& linear, const std::vector<float>& x,
                           const std::string& executor, const CallOptions& options = {}) {
  const uint64_t in = linear.in_channels();
  const uint64_t out = linear.out_channels();
  const uint64_t tokens = x.size() / in;
  const Device device = test::DeviceOf(executor);
  const PreparedLinear placed = ToDevice(linear, device).value();
  const LinearPlan plan =
      LinearPlan::Create(placed, {.max_tokens = options.max_tokens != 0 ? options.max_tokens : tokens,
                                  .device = device,
                                  .executor = test::ChoiceOf(executor).name,
                                  .mode = test::ChoiceOf(executor).mode,
                                  .num_threads = options.num_threads})
          .value();
  HostBuffer workspace = HostBuffer::Create(plan.workspace_bytes()).value();
  std::memset(workspace.data(), 0xFF, workspace.size_bytes());
  const float poison = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> padded_x(tokens * (in + options.padding), poison);
  std::vector<float> padded_y(tokens * (out + options.padding), poison);
  for (uint64_t i = 0; i < x.size(); ++i) padded_x[i / in * (in + options.padding) + i % in] = x[i];
  for (uint64_t i = 0; i < options.accumulate_on.size(); ++i) {
    padded_y[i / out * (out + options.padding) + i % out] = options.accumulate_on[i];
  }
  test::PlacedBytes placed_x(device, std::as_writable_bytes(std::span(padded_x)));
  test::PlacedBytes placed_y(device, std::as_writable_bytes(std::span(padded_y)));
  test::PlacedBytes placed_workspace(device, workspace.span());
  const Result<void> run = RunLinear(plan, placed,
                                     {.num_tokens = tokens,
                                      .x = placed_x.data(),
                                      .x_row_stride = in + options.padding,
                                      .y = placed_y.data(),
                                      .y_row_stride = out + options.padding,
                                      .accumulate = !options.accumulate_on.empty(),
                                      .workspace = placed_workspace.data(),
                                      .workspace_bytes = workspace.size_bytes()});
  if (!run) {
    ADD_FAILURE() << run.error().message();
    return {};
  }
  if (!device.is_host()) {
    EXPECT_TRUE(cuda::SynchronizeDevice(device));
  }
  placed_y.Pull();
  std::vector<float> y;
  for (uint64_t row = 0; row < tokens; ++row) {
    const float* begin = padded_y.data() + row * (out + options.padding);
    y.insert(y.end(), begin, begin + out);
    for (uint64_t i = 0; i < options.padding; ++i) EXPECT_TRUE(std::isnan(begin[out + i]));
  }
  return y;
}

std::vector<double> Doubles(const std::vector<float>& values) { return {values.begin(), values.end()}; }

// x W + bias with the decoded matrix.
std::vector<double> Dense(const PreparedLinear& linear, const std::vector<float>& x) {
  const std::vector<float> weights = DecodeMatrix(linear, false).value();
  const uint64_t in = linear.in_channels();
  const uint64_t out = linear.out_channels();
  const uint64_t bias = linear.matrix().bias_offset_bytes;
  std::vector<double> y(x.size() / in * out);
  for (uint64_t row = 0; row < x.size() / in; ++row) {
    for (uint64_t c = 0; c < out; ++c) {
      double& sum = y[row * out + c];
      if (bias != kAbsentOffset) {
        sum = Fp16ToFloat(reinterpret_cast<const uint16_t*>(linear.slab() + bias)[c]);
      }
      for (uint64_t i = 0; i < in; ++i) {
        sum += double{x[row * in + i]} * double{weights[i * linear.matrix().out_channels + c]};
      }
    }
  }
  return y;
}

double GateOf(const std::string& executor) { return executor == "cuda" ? 1e-3 : 2e-6; }

class Linear : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (const Result<const Backend*> backend = BackendByName(GetParam()); !backend)
      GTEST_SKIP() << backend.error().message();
  }
};
INSTANTIATE_TEST_SUITE_P(Backends, Linear, testing::ValuesIn(Executors()),
                         [](const auto& parameter) { return parameter.param; });

TEST_P(Linear, EveryRateAndCodebook) {
  constexpr int kAllBits[] = {
#define ESPALIER_BITS(bits) bits,
#include <espalier/formats.def>
  };
  for (const int bits : kAllBits) {
    for (const CodebookInfo& info : AllCodebooks()) {
      SCOPED_TRACE(fmt::format("{} K {}", info.name, bits));
      const PreparedLinear linear = MakeLinear(256, 384, 0, 0, {.bits = bits, .codebook = info.codebook}, 1);
      const std::vector<float> x = RandomInput(linear, 3, 2);
      EXPECT_LE(Compare(Dense(linear, x), Doubles(RunRows(linear, x, GetParam()))).rel_l2,
                GateOf(GetParam()));
    }
  }
}

TEST_P(Linear, ShapesPaddingAndBias) {
  struct Shape {
    uint32_t stored_in, stored_out, in, out;
    uint64_t tokens;
  };
  const Shape shapes[] = {{128, 128, 0, 0, 1},     {640, 128, 0, 0, 7},     {128, 640, 0, 0, 65},
                          {384, 384, 300, 260, 5}, {256, 384, 129, 127, 2}, {128, 256, 1, 1, 130}};
  for (const Shape& shape : shapes) {
    for (const bool bias : {false, true}) {
      SCOPED_TRACE(fmt::format("{} x {} as {} x {}, bias {}", shape.stored_in, shape.stored_out, shape.in,
                               shape.out, bias));
      const PreparedLinear linear =
          MakeLinear(shape.stored_in, shape.stored_out, shape.in, shape.out, {.bits = 4, .bias = bias}, 5);
      const std::vector<float> x = RandomInput(linear, shape.tokens, 6);
      EXPECT_LE(Compare(Dense(linear, x), Doubles(RunRows(linear, x, GetParam()))).rel_l2,
                GateOf(GetParam()));
    }
  }
}

TEST_P(Linear, SameBitsAtAnyThreadCountCapacityStrideAndBatch) {
  const PreparedLinear linear = MakeLinear(256, 384, 0, 0, {.bits = 3}, 1);
  const std::vector<float> x = RandomInput(linear, 600, 2);
  const std::vector<float> expected = RunRows(linear, x, GetParam());
  EXPECT_EQ(RunRows(linear, x, GetParam()), expected);
  for (const int threads : {2, 3, 7})
    EXPECT_EQ(RunRows(linear, x, GetParam(), {.num_threads = threads, .accumulate_on = {}}), expected);
  EXPECT_EQ(RunRows(linear, x, GetParam(), {.padding = 3, .accumulate_on = {}}), expected);
  EXPECT_EQ(RunRows(linear, x, GetParam(), {.max_tokens = 1000, .accumulate_on = {}}), expected);
  for (const uint64_t row : {0, 1, 63, 64, 511, 512, 599}) {
    const std::vector<float> one(x.begin() + static_cast<ptrdiff_t>(row * 256),
                                 x.begin() + static_cast<ptrdiff_t>(row * 256 + 256));
    const std::vector<float> y = RunRows(linear, one, GetParam());
    const auto begin = expected.begin() + static_cast<ptrdiff_t>(row * 384);
    if (GetParam() == "cuda") {  // where the number of rows chooses the kernel
      EXPECT_LE(Compare(std::vector<double>(begin, begin + 384), Doubles(y)).rel_l2, 1e-3) << row;
    } else {
      EXPECT_TRUE(std::equal(y.begin(), y.end(), begin)) << row;
    }
  }
}

TEST_P(Linear, Accumulates) {
  const PreparedLinear linear = MakeLinear(128, 256, 0, 200, {}, 1);
  const std::vector<float> x = RandomInput(linear, 3, 2);
  const std::vector<float> plain = RunRows(linear, x, GetParam());
  const std::vector<float> before(plain.size(), 1.5f);
  const std::vector<float> sum = RunRows(linear, x, GetParam(), {.accumulate_on = before});
  for (size_t i = 0; i < sum.size(); ++i) EXPECT_NEAR(sum[i], plain[i] + 1.5f, 1e-6) << i;
}

TEST_P(Linear, NanStaysInItsRowAndRangeIsKept) {
  const PreparedLinear linear = MakeLinear(128, 128, 0, 0, {}, 1);
  std::vector<float> x = RandomInput(linear, 4, 2);
  const std::vector<float> clean = RunRows(linear, x, GetParam());
  x[128 + 5] = std::numeric_limits<float>::quiet_NaN();
  for (uint64_t i = 256; i < 384; ++i) x[i] *= 0x1p100f;
  for (uint64_t i = 384; i < 512; ++i) x[i] *= 0x1p-100f;
  const std::vector<float> y = RunRows(linear, x, GetParam());
  for (uint64_t i = 0; i < 128; ++i) {
    EXPECT_EQ(y[i], clean[i]);
    EXPECT_TRUE(std::isnan(y[128 + i]));
    const double bound = GetParam() == "cuda" ? 1e-2 : 1e-5;
    EXPECT_NEAR(y[256 + i] * 0x1p-100f, clean[256 + i], bound);
    EXPECT_NEAR(y[384 + i] * 0x1p100f, clean[384 + i], bound);
  }
}

TEST_P(Linear, Refusals) {
  const Device device = test::DeviceOf(GetParam());
  const auto make = [&](uint32_t in, uint32_t out, uint32_t seen_in) {
    return ToDevice(MakeLinear(in, out, seen_in, 0, {}, 1), device).value();
  };
  const PreparedLinear linear = make(256, 128, 0);
  const LinearPlan plan =
      LinearPlan::Create(linear,
                         {.max_tokens = 2,
                          .device = device,
                          .executor = test::ChoiceOf(GetParam()).name,
                          .mode = test::ChoiceOf(GetParam()).mode,
                          .num_threads = 1})
          .value();
  DeviceBuffer workspace = DeviceBuffer::Create(device, plan.workspace_bytes() + 64).value();
  DeviceBuffer x = DeviceBuffer::Create(device, 3 * 256 * sizeof(float)).value();
  DeviceBuffer y = DeviceBuffer::Create(device, 3 * 128 * sizeof(float)).value();
  const LinearArgs legal = {.num_tokens = 2,
                            .x = x.data(),
                            .x_row_stride = 256,
                            .y = y.data(),
                            .y_row_stride = 128,
                            .workspace = workspace.data(),
                            .workspace_bytes = plan.workspace_bytes()};
  const auto refusal = [&](const PreparedLinear& matrix, auto spoil) {
    LinearArgs args = legal;
    spoil(args);
    const Result<void> run = RunLinear(plan, matrix, args);
    return run ? StatusCode{} : run.error().code();
  };
  EXPECT_EQ(refusal(linear, [](LinearArgs&) {}), StatusCode{});
  EXPECT_EQ(refusal(linear, [](LinearArgs& args) { args = {}; }), StatusCode{});
  EXPECT_EQ(refusal(linear, [](LinearArgs& args) { args.num_tokens = 3; }), StatusCode::kCapacity);
  EXPECT_EQ(refusal(linear, [](LinearArgs& args) { --args.workspace_bytes; }), StatusCode::kCapacity);
  EXPECT_EQ(refusal(linear, [](LinearArgs& args) { args.x = nullptr; }), StatusCode::kUsage);
  EXPECT_EQ(refusal(linear, [](LinearArgs& args) { args.y = nullptr; }), StatusCode::kUsage);
  EXPECT_EQ(refusal(linear, [](LinearArgs& args) { args.workspace = nullptr; }), StatusCode::kUsage);
  EXPECT_EQ(refusal(linear, [](LinearArgs& args) { --args.x_row_stride; }), StatusCode::kGeometry);
  EXPECT_EQ(refusal(linear, [](LinearArgs& args) { --args.y_row_stride; }), StatusCode::kGeometry);
  EXPECT_EQ(refusal(make(128, 128, 0), [](LinearArgs&) {}), StatusCode::kGeometry);
  EXPECT_EQ(refusal(make(256, 128, 255), [](LinearArgs&) {}), StatusCode::kGeometry);
}

TEST(LinearPlan, RefusesModesAndTypes) {
  const PreparedLinear linear = MakeLinear(128, 128, 0, 0, {}, 1);
  EXPECT_EQ(LinearPlan::Create(linear, {.input = Dtype::kI32, .executor = "cpu"}).error().code(),
            StatusCode::kUnsupported);
  // No other executor steps in for a mode.
  EXPECT_EQ(LinearPlan::Create(linear, {.output = Dtype::kF64, .mode = CpuMode::kExact}).error().code(),
            StatusCode::kUnsupported);
  EXPECT_EQ(LinearPlan::Create(linear, {.max_tokens = kMaxPlanTokens + 1}).error().code(),
            StatusCode::kCapacity);
}

}  // namespace
}  // namespace espalier
