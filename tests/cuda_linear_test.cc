// SPDX-License-Identifier: Apache-2.0
//
// RunLinear on a GPU beyond linear_test: every rate and codebook in every regime of token counts, and in
// graphs.
#include <espalier/backend.h>
#include <fmt/format.h>

#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "cuda/launch.h"
#include "gpu_test.h"
#include "support/elements.h"

namespace espalier {
namespace {

using test::BytesOf;
using test::Compare;
using test::kFirstGpu;
using test::MakeLinear;
using test::MatrixFormat;
using test::PlacedBytes;
using test::Random;

constexpr int kDense = cuda::kDenseTokens;  // from where on a matrix may be decoded first
constexpr double kGate = 1e-3;
constexpr double kCosine = 0.999999;

struct Options {
  Dtype input = Dtype::kF32;
  Dtype output = Dtype::kF32;
  std::optional<cuda::RowClass> forced = {};  // of a GPU
};

// That class where there are so many rows and the GPU has it, whether or not it would be chosen.
std::optional<cuda::RowClass> DenseIfPossible(uint64_t tokens) {
  if (tokens < cuda::kDenseTokens || CudaDevices()->front().compute_capability != 90) return {};
  return cuda::RowClass::kDense;
}

// One call and its memory on the host or a GPU, poisoned.
class LinearCall {
 public:
  LinearCall(const PreparedLinear& linear, const std::vector<double>& x, const Options& options)
      : linear_(linear),
        options_(options),
        tokens_(x.size() / linear.in_channels()),
        plan_(
            LinearPlan::Create(linear, {.max_tokens = tokens_,
                                        .input = options.input,
                                        .output = options.output,
                                        .device = linear.device(),
                                        .mode = linear.device().is_host() ? CpuMode::kExact : CpuMode::kFast})
                .value()),
        x_bytes_(x.size() * BytesOf(options.input)),
        y_bytes_(tokens_ * linear.out_channels() * BytesOf(options.output), std::byte{0xFF}),
        workspace_(HostBuffer::Create(plan_.workspace_bytes()).value()),
        x_(linear.device(), x_bytes_),
        y_(linear.device(), y_bytes_),
        work_(linear.device(), workspace_.span()) {
    for (size_t i = 0; i < x.size(); ++i)
      test::Encode(options.input, x[i], x_bytes_.data() + i * BytesOf(options.input));
    std::memset(workspace_.data(), 0xFF, workspace_.size_bytes());
    x_.Push();
    work_.Push();
    if (!linear.device().is_host()) stream_ = cuda::Stream::Create(linear.device()).value();
  }

  const cuda::Stream& stream() const { return *stream_; }

  Result<void> Run(bool accumulate = false) {
    const LinearArgs args = {.num_tokens = tokens_,
                             .x = x_.data(),
                             .x_row_stride = linear_.in_channels(),
                             .y = y_.data(),
                             .y_row_stride = linear_.out_channels(),
                             .accumulate = accumulate,
                             .workspace = work_.data(),
                             .workspace_bytes = plan_.workspace_bytes(),
                             .stream = stream_ ? stream_->get() : nullptr};
    if (!options_.forced) return RunLinear(plan_, linear_, args);
    return cuda::RunLinearSteps(plan_, linear_, args, {.forced = options_.forced});
  }

  const std::vector<std::byte>& Finish() {
    if (stream_) {
      EXPECT_TRUE(stream_->Synchronize());
    }
    y_.Pull();
    return y_bytes_;
  }

  std::vector<double> Values() {
    std::vector<double> values;
    const std::vector<std::byte>& bytes = Finish();
    for (size_t at = 0; at < bytes.size(); at += BytesOf(options_.output))
      values.push_back(test::Decode(options_.output, bytes.data() + at));
    return values;
  }

 private:
  const PreparedLinear& linear_;
  Options options_;
  uint64_t tokens_;
  LinearPlan plan_;
  std::vector<std::byte> x_bytes_;
  std::vector<std::byte> y_bytes_;
  HostBuffer workspace_;
  PlacedBytes x_, y_, work_;
  std::optional<cuda::Stream> stream_;
};

std::vector<double> RandomInput(const PreparedLinear& linear, uint64_t tokens, uint64_t seed) {
  Random random(seed);
  std::vector<double> x(tokens * linear.in_channels());
  for (double& value : x) value = random.Normal();
  return x;
}

double Rounded(Dtype type, double value) {
  if (type == Dtype::kF16) return double{Fp16ToFloat(DoubleToFp16(value))};
  if (type == Dtype::kBF16) return double{Bf16ToFloat(DoubleToBf16(value))};
  return double{static_cast<float>(value)};
}

std::vector<double> Values(const PreparedLinear& linear, const std::vector<double>& x,
                           const Options& options) {
  LinearCall call(linear, x, options);
  EXPECT_TRUE(call.Run());
  return call.Values();
}

class CudaLinear : public GpuTest {
 protected:
  // Against the cpu executor in mode exact, which is 2e-6 from the reference.
  static void ExpectWithinGate(const PreparedLinear& linear, uint64_t tokens, Dtype input) {
    const std::vector<double> x = RandomInput(linear, tokens, tokens + 1);
    const PreparedLinear placed = ToDevice(linear, kFirstGpu).value();
    const std::vector<double> expected = Values(linear, x, {.input = input});
    const auto expect = [&](const Options& options) {
      const test::Difference difference = Compare(expected, Values(placed, x, options));
      EXPECT_LE(difference.rel_l2, kGate);
      EXPECT_GE(difference.cosine, kCosine);
    };
    expect({.input = input});
    if (const auto dense = DenseIfPossible(tokens)) {
      SCOPED_TRACE("decoded first");
      expect({.input = input, .forced = dense});
    }
  }
};

TEST_F(CudaLinear, EveryRateAndCodebookAtEveryTokenCount) {
  for (const CodebookInfo& codebook : AllCodebooks()) {
    for (const int bits : kAllBits) {
      const PreparedLinear linear =
          MakeLinear(640, 384, 0, 0, {.bits = bits, .codebook = codebook.codebook}, 3);
      for (const uint64_t tokens : {1, 2, 8, 9, 16, 17, 32, 33, 64, 144, 145, kDense, kDense + 44}) {
        SCOPED_TRACE(fmt::format("{} K {}, {} tokens", codebook.name, bits, tokens));
        ExpectWithinGate(linear, static_cast<uint64_t>(tokens), Dtype::kBF16);
      }
    }
  }
}

TEST_F(CudaLinear, ShapesPaddingAndBias) {
  struct Shape {
    uint32_t stored_in, stored_out, in, out;
  };
  for (const Shape& shape : {Shape{128, 128, 0, 0},
                             {2048, 256, 0, 0},
                             {256, 4096, 0, 0},
                             {384, 384, 300, 260},
                             {256, 384, 129, 127},
                             {128, 256, 1, 1}}) {
    const PreparedLinear linear =
        MakeLinear(shape.stored_in, shape.stored_out, shape.in, shape.out, {.bits = 4, .bias = true}, 5);
    for (const uint64_t tokens : {1, 17, 200, 320}) {
      SCOPED_TRACE(fmt::format("{} x {}, {} tokens", shape.stored_in, shape.stored_out, tokens));
      ExpectWithinGate(linear, static_cast<uint64_t>(tokens), Dtype::kF32);
    }
  }
}

TEST_F(CudaLinear, TypesOfInputAndOutput) {
  const PreparedLinear linear = MakeLinear(256, 384, 0, 0, {.bits = 3}, 3);
  const PreparedLinear placed = ToDevice(linear, kFirstGpu).value();
  for (const Dtype input : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
    const std::vector<double> x = RandomInput(linear, 17, 4);
    const std::vector<double> exact = Values(placed, x, {.input = input});
    EXPECT_LE(Compare(Values(linear, x, {.input = input}), exact).rel_l2, kGate) << DtypeName(input);
    for (const Dtype output : {Dtype::kF16, Dtype::kBF16}) {
      const std::vector<double> rounded = Values(placed, x, {.input = input, .output = output});
      for (size_t i = 0; i < exact.size(); ++i) {
        ASSERT_EQ(rounded[i], Rounded(output, exact[i])) << i;
      }
    }
  }
}

// Rows in every remainder of a tile, with whole items, halves of items and shares of the inputs (4096 x 128).
TEST_F(CudaLinear, RowsThatShareADecodedMatrix) {
  struct Shape {
    uint32_t in, out;
  };
  for (const Shape& shape : {Shape{256, 640}, {4096, 128}, {128, 17024}}) {
    for (const Codebook codebook : {Codebook::kMcg, Codebook::kMul1}) {
      const PreparedLinear linear =
          MakeLinear(shape.in, shape.out, 0, 0, {.bits = 4, .codebook = codebook, .bias = true}, 6);
      for (const uint64_t more : {0, 1, 44, 65, 193, 255, 444}) {
        const uint64_t tokens = kDense + more;
        SCOPED_TRACE(
            fmt::format("{} x {} {}, {} tokens", shape.in, shape.out, CodebookName(codebook), tokens));
        ExpectWithinGate(linear, static_cast<uint64_t>(tokens), Dtype::kBF16);
      }
    }
  }
}

// Also where rows of y begin at odd places.
TEST_F(CudaLinear, TypesOfManyRows) {
  const PreparedLinear linear = MakeLinear(256, 384, 0, 381, {.bits = 3}, 3);
  const PreparedLinear even = MakeLinear(256, 384, 0, 0, {.bits = 3}, 3);
  for (const PreparedLinear* host : {&linear, &even}) {
    const PreparedLinear placed = ToDevice(*host, kFirstGpu).value();
    const std::vector<double> x = RandomInput(*host, 300, 4);
    const auto dense = DenseIfPossible(300);
    const std::vector<double> exact = Values(placed, x, {.forced = dense});
    for (const Dtype output : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
      SCOPED_TRACE(fmt::format("{} channels, {}", host->out_channels(), DtypeName(output)));
      LinearCall call(placed, x, {.output = output, .forced = dense});
      ASSERT_TRUE(call.Run());
      const std::vector<double> rounded = call.Values();
      ASSERT_TRUE(call.Run(true));
      const std::vector<double> twice = call.Values();
      for (size_t i = 0; i < exact.size(); ++i) {
        ASSERT_EQ(rounded[i], Rounded(output, exact[i])) << i;
        ASSERT_EQ(twice[i], Rounded(output, rounded[i] + exact[i])) << i;
      }
    }
  }
}

// A row's bits come from that row alone, wherever the other rows are far away or not numbers.
TEST_F(CudaLinear, RowsDoNotTouchEachOther) {
  const PreparedLinear placed = ToDevice(MakeLinear(640, 384, 0, 0, {.bits = 3}, 3), kFirstGpu).value();
  constexpr uint64_t kTokens = kDense + 44;
  std::vector<double> x = RandomInput(placed, kTokens, 4);
  const Options options = {.forced = DenseIfPossible(kTokens)};
  const std::vector<double> expected = Values(placed, x, options);
  for (uint64_t row = 0; row < kTokens; row += 2) {
    for (uint64_t i = 0; i < placed.in_channels(); ++i) {
      double& value = x[row * placed.in_channels() + i];
      value = row % 4 == 0 ? std::numeric_limits<double>::quiet_NaN() : value * 1e30;
    }
  }
  const std::vector<double> actual = Values(placed, x, options);
  for (uint64_t row = 1; row < kTokens; row += 2) {
    for (uint64_t i = 0; i < placed.out_channels(); ++i) {
      ASSERT_EQ(actual[row * placed.out_channels() + i], expected[row * placed.out_channels() + i]) << row;
    }
  }
}

// Rows at both ends of what fp32 holds.
TEST_F(CudaLinear, MagnitudesOfManyRows) {
  const PreparedLinear linear = MakeLinear(256, 384, 0, 0, {.bits = 3, .bias = false}, 3);
  const PreparedLinear placed = ToDevice(linear, kFirstGpu).value();
  const std::vector<double> x = RandomInput(linear, 256, 4);
  const Options options = {.forced = DenseIfPossible(256)};
  for (const double factor : {0x1p-100, 0x1p100}) {
    std::vector<double> scaled = x;
    for (double& value : scaled) value *= factor;
    std::vector<double> expected = Values(placed, x, options);
    for (double& value : expected) value *= factor;
    EXPECT_EQ(Values(placed, scaled, options), expected) << factor;
  }
}

TEST_F(CudaLinear, RepeatsAndGraphsGiveTheSameBits) {
  const PreparedLinear placed = ToDevice(MakeLinear(640, 384, 0, 0, {.bits = 3}, 3), kFirstGpu).value();
  for (const uint64_t tokens : {1, 9, 65, kDense + 44, kDense + 444}) {
    SCOPED_TRACE(tokens);
    const std::vector<double> x = RandomInput(placed, static_cast<uint64_t>(tokens), 4);
    const Options options = {.forced = DenseIfPossible(tokens)};
    LinearCall eager(placed, x, options);
    ASSERT_TRUE(eager.Run());
    const std::vector<std::byte> expected = eager.Finish();
    for (int repeat = 0; repeat < 10; ++repeat) {
      LinearCall again(placed, x, options);
      ASSERT_TRUE(again.Run());
      ASSERT_EQ(again.Finish(), expected) << repeat;
    }
    LinearCall captured(placed, x, options);
    const cuda::Graph graph = cuda::Graph::Capture(captured.stream(), [&] { return captured.Run(); }).value();
    for (int launch = 0; launch < 3; ++launch) ASSERT_TRUE(graph.Launch(captured.stream()));
    EXPECT_EQ(captured.Finish(), expected);
  }
}

}  // namespace
}  // namespace espalier
