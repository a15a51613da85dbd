// SPDX-License-Identifier: Apache-2.0
//
// What every executor promises, on every bit rate, codebook and shape. The reference is measured against
// plain products with decoded matrices, every other executor against the reference.
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
#include "support/random_experts.h"

namespace espalier {
namespace {

using test::Compare;
using test::ExpertsSpec;
using test::MakeExperts;
using test::MatrixFormat;
using test::MoeCall;
using test::MoeOutput;
using test::Random;
using test::RandomCall;
using test::RunCall;
using test::TakeExperts;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Decoded weights are rounded to fp32 once, 6e-8 at most each.
constexpr double kDenseGate = 2e-7;
constexpr double kExactGate = 2e-6;

constexpr int kAllBits[] = {
#define ESPALIER_BITS(bits) bits,
#include <espalier/formats.def>
};

// Every rate and codebook in one package, another pair for each expert and projection.
MatrixFormat MixedFormat(uint32_t expert, Projection projection) {
  const uint32_t n = expert * 3 + static_cast<uint32_t>(projection);
  return {.bits = kAllBits[(n * 5 + expert) % std::size(kAllBits)],
          .codebook = AllCodebooks()[n % AllCodebooks().size()].codebook};
}

constexpr CodeOrder kOrders[] = {CodeOrder::kNative, CodeOrder::kPanels};
const char* OrderText(CodeOrder order) { return order == CodeOrder::kNative ? "native order" : "panels"; }

struct Gate {
  double max_rel_l2;
  double min_cosine;
};

bool OnlyMul1(const PreparedExperts& experts) {
  for (const SegmentDesc& segment : experts.segments()) {
    for (const MatrixDesc& matrix : segment.matrices) {
      if (matrix.present() && matrix.codebook != Codebook::kMul1) return false;
    }
  }
  return true;
}

Gate GateOf(const std::string& executor, const PreparedExperts& experts) {
  if (executor == "cpu_int8") return {2.5e-2, 0.9997};
  if (executor == "cpu_fast") return OnlyMul1(experts) ? Gate{2e-3, 0.999998} : Gate{6e-3, 0.99998};
  if (executor != "cuda") return {kExactGate, 1 - 1e-10};
  return experts.geometry().activation.limit > 0 ? Gate{2e-3, 0.999995} : Gate{1e-3, 0.999999};
}

// Whether a row has the same bits however many others there are: not where the number of rows of an expert
// chooses the kernel.
bool RowsNeverDependOnTheBatch(const std::string& executor) {
  return executor == "cpu" || executor == "reference";
}

// How far apart two ways to the same sum may be: where the number of rows chooses the kernel, or routes are added
// in another order.
double SameSumGate(const std::string& executor, double exact) {
  if (executor == "cuda") return 1e-4;
  return executor == "cpu_fast" ? 6e-3 : executor == "cpu_int8" ? 2.5e-2 : exact;
}

// fp32 output of `executor` against the oracle, at `share` of its gate.
void ExpectWithinGate(const PreparedExperts& experts, MoeCall call, const std::string& executor,
                      double share = 1) {
  if (executor == "reference") {
    call.output = Dtype::kF64;
    const test::Difference difference =
        Compare(RunDense(experts, call), RunCall(experts, call, executor).values);
    EXPECT_LE(difference.rel_l2, kDenseGate);
    return;
  }
  call.output = Dtype::kF32;
  const MoeOutput actual = RunCall(experts, call, executor);
  call.output = Dtype::kF64;
  const test::Difference difference = Compare(RunCall(experts, call, "reference").values, actual.values);
  const Gate gate = GateOf(executor, experts);
  EXPECT_LE(difference.rel_l2, gate.max_rel_l2 * share);
  EXPECT_GE(difference.cosine, gate.min_cosine);
}

// Part of a result against the same rows on their own: `alone` are bytes of fp32.
void ExpectSameRows(const MoeOutput& alone, const MoeOutput& all, size_t first_byte,
                    const std::string& executor) {
  const auto begin = all.bytes.begin() + static_cast<ptrdiff_t>(first_byte);
  if (RowsNeverDependOnTheBatch(executor)) {
    EXPECT_TRUE(std::equal(alone.bytes.begin(), alone.bytes.end(), begin));
    return;
  }
  const std::span<const double> rows =
      std::span(all.values).subspan(first_byte / sizeof(float), alone.values.size());
  EXPECT_LE(Compare(rows, alone.values).rel_l2, 1e-3);
}

// A GPU's executor is in the list of every build with CUDA.
void SkipUnlessUsable(const std::string& executor) {
  if (const Result<const Backend*> backend = BackendByName(test::ChoiceOf(executor).name); !backend)
    GTEST_SKIP() << backend.error().message();
}

class Conformance : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { SkipUnlessUsable(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Backends, Conformance, testing::ValuesIn(test::AllExecutors()),
                         [](const auto& parameter) { return parameter.param; });

class FormatConformance : public testing::TestWithParam<std::tuple<std::string, CodebookInfo, int>> {
 protected:
  void SetUp() override { SkipUnlessUsable(std::get<0>(GetParam())); }
};
INSTANTIATE_TEST_SUITE_P(Formats, FormatConformance,
                         testing::Combine(testing::ValuesIn(test::AllExecutors()),
                                          testing::ValuesIn(AllCodebooks().begin(), AllCodebooks().end()),
                                          testing::ValuesIn(kAllBits)),
                         [](const auto& parameter) {
                           return fmt::format("{}_{}_K{}", std::get<0>(parameter.param),
                                              std::get<1>(parameter.param).name,
                                              std::get<2>(parameter.param));
                         });

TEST_P(FormatConformance, OneRateAndCodebook) {
  const auto& [executor, codebook, bits] = GetParam();
  const MatrixFormat format = {.bits = bits, .codebook = codebook.codebook};
  for (const CodeOrder order : kOrders) {
    SCOPED_TRACE(OrderText(order));
    const PreparedExperts experts = MakeExperts({.experts = 2,
                                                 .hidden_channels = 256,
                                                 .activation = {},
                                                 .segments = {{.channels = 128}},
                                                 .format = [format](uint32_t, Projection) { return format; },
                                                 .order = order,
                                                 .seed = static_cast<uint64_t>(bits)});
    ExpectWithinGate(experts, RandomCall(experts, 5, 2, 7), executor);
  }
}

struct Shape {
  uint32_t hidden, intermediate, experts;
  uint64_t tokens;
  uint32_t top_k;
};

TEST_P(Conformance, ShapesWithMixedFormats) {
  const Shape shapes[] = {{128, 128, 1, 1, 1},   {128, 384, 5, 2, 3},    {384, 128, 5, 7, 4},
                          {640, 640, 1, 33, 1},  {640, 384, 5, 7, 2},    {384, 640, 5, 33, 8},
                          {128, 640, 60, 7, 8},  {128, 128, 60, 129, 8}, {384, 384, 5, 129, 2},
                          {640, 128, 60, 2, 16}, {128, 128, 5, 0, 2}};
  for (const Shape& shape : shapes) {
    SCOPED_TRACE(fmt::format("hidden {}, intermediate {}, {} experts, {} tokens, top-{}", shape.hidden,
                             shape.intermediate, shape.experts, shape.tokens, shape.top_k));
    ExpertsSpec spec = {.experts = shape.experts,
                        .hidden_channels = shape.hidden,
                        .activation = {},
                        .segments = {{.channels = shape.intermediate}},
                        .format = MixedFormat,
                        .order = CodeOrder::kPanels,
                        .seed = 11};
    const PreparedExperts experts = MakeExperts(spec);
    // The dense oracle decodes once a route: a few rows of it are enough.
    const uint64_t tokens = GetParam() == "reference" ? std::min<uint64_t>(shape.tokens, 2) : shape.tokens;
    MoeCall call = RandomCall(experts, tokens, std::min(shape.top_k, 8u), 12);
    call.num_threads = 2;
    ExpectWithinGate(experts, call, GetParam());
    spec.order = CodeOrder::kNative;
    EXPECT_EQ(RunCall(MakeExperts(spec), call, GetParam()).bytes, RunCall(experts, call, GetParam()).bytes)
        << "the order of the codes changed a bit";
  }
}

PreparedExperts SmallExperts(uint64_t seed = 3, Activation activation = {}) {
  return MakeExperts(
      {.experts = 5, .hidden_channels = 128, .activation = activation, .format = MixedFormat, .seed = seed});
}

TEST_P(Conformance, SegmentsOfDifferentWidthsAddUp) {
  const PreparedExperts experts =
      MakeExperts({.experts = 3,
                   .hidden_channels = 256,
                   .activation = {},
                   .segments = {{.channels = 128}, {.channels = 384}, {.channels = 256}},
                   .format = MixedFormat,
                   .seed = 4});
  EXPECT_EQ(experts.max_segments_per_expert(), 3u);
  ExpectWithinGate(experts, RandomCall(experts, 9, 3, 5), GetParam());
}

TEST_P(Conformance, SharedInputVectorsChangeNothing) {
  ExpertsSpec spec = {.experts = 2, .hidden_channels = 256, .activation = {}, .format = MixedFormat};
  spec.shared_input_vector = true;
  const PreparedExperts experts = MakeExperts(spec);
  ExpectWithinGate(experts, RandomCall(experts, 9, 3, 5), GetParam());
}

TEST_P(Conformance, PaddedChannelsCountAsAbsent) {
  const PreparedExperts experts = MakeExperts(
      {.experts = 3,
       .hidden_channels = 200,
       .stored_hidden_channels = 384,
       .activation = {},
       .segments = {{.channels = 384, .valid_channels = 200}, {.channels = 128, .valid_channels = 0}},
       .format = [](uint32_t, Projection) { return MatrixFormat{.bits = 4, .bias = true}; },
       .seed = 6});
  ExpectWithinGate(experts, RandomCall(experts, 9, 3, 5), GetParam());
}

TEST_P(Conformance, BiasOnOneProjectionOnly) {
  for (const Projection with_bias : {Projection::kGate, Projection::kUp, Projection::kDown}) {
    SCOPED_TRACE(ProjectionName(with_bias));
    const PreparedExperts experts = MakeExperts({.experts = 3,
                                                 .hidden_channels = 128,
                                                 .activation = {},
                                                 .segments = {{.channels = 128}, {.channels = 256}},
                                                 .format =
                                                     [with_bias](uint32_t, Projection projection) {
                                                       return MatrixFormat{.bias = projection == with_bias};
                                                     },
                                                 .seed = 8});
    ExpectWithinGate(experts, RandomCall(experts, 4, 3, 5), GetParam());
  }
}

TEST_P(Conformance, EveryActivation) {
  std::vector<Activation> activations;
#define ESPALIER_ACTIVATION(enumerator, number, name, has_gate, num_parameters) \
  activations.push_back({.kind = ActivationKind::enumerator});
#include <espalier/formats.def>
  activations.push_back({.kind = ActivationKind::kSilu, .limit = 0.5});
  activations.push_back({.kind = ActivationKind::kGelu, .limit = 0.5});
  activations.push_back({.kind = ActivationKind::kSwigluOai, .limit = 7});
  activations.push_back({.kind = ActivationKind::kSwigluOai, .limit = 0.25});
  activations.push_back({.kind = ActivationKind::kSitu, .beta = 0.5, .linear_beta = 0});
  activations.push_back({.kind = ActivationKind::kSitu, .beta = 0.5, .linear_beta = 0.75});
  for (const Activation& activation : activations) {
    SCOPED_TRACE(ActivationText(activation));
    const PreparedExperts experts = SmallExperts(9, activation);
    ExpectWithinGate(experts, RandomCall(experts, 5, 2, 5), GetParam());
  }
}

TEST_P(Conformance, OutputScaleMultipliesTheSum) {
  ExpertsSpec spec = {.experts = 2, .hidden_channels = 128, .activation = {}};
  spec.output_scale = 2.5;
  const PreparedExperts experts = MakeExperts(spec);
  ExpectWithinGate(experts, RandomCall(experts, 5, 2, 5), GetParam());
}

TEST_P(Conformance, InputTypes) {
  const PreparedExperts experts = SmallExperts();
  for (const Dtype input : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
    SCOPED_TRACE(DtypeName(input));
    MoeCall call = RandomCall(experts, 7, 2, 5);
    call.input = input;
    ExpectWithinGate(experts, call, GetParam());
  }
}

// The fp32 result (double on the reference) is rounded once, with or without a sum.
TEST_P(Conformance, OutputTypesRoundOnce) {
  const PreparedExperts experts = SmallExperts();
  MoeCall call = RandomCall(experts, 7, 2, 5);
  call.output = GetParam() == "reference" ? Dtype::kF64 : Dtype::kF32;
  const std::vector<double> exact = RunCall(experts, call, GetParam()).values;
  Random random(6);
  std::vector<double> before;
  for (size_t i = 0; i < exact.size(); ++i)
    before.push_back(double{Bf16ToFloat(DoubleToBf16(random.Normal()))});
  for (const Dtype output : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
    for (const bool accumulate : {false, true}) {
      SCOPED_TRACE(fmt::format("{}, accumulate {}", DtypeName(output), accumulate));
      call.output = output;
      call.accumulate = accumulate;
      if (accumulate) call.y = before;
      if (accumulate && output == Dtype::kF16) {
        for (double& value : call.y) value = Fp16ToFloat(DoubleToFp16(value));
      }
      const std::vector<double> actual = RunCall(experts, call, GetParam()).values;
      for (size_t i = 0; i < exact.size(); ++i) {
        const double sum = exact[i] + (accumulate ? call.y[i] : 0);
        const double expected = output == Dtype::kF32   ? static_cast<double>(static_cast<float>(sum))
                                : output == Dtype::kF16 ? double{Fp16ToFloat(DoubleToFp16(sum))}
                                                        : double{Bf16ToFloat(DoubleToBf16(sum))};
        ASSERT_EQ(actual[i], expected) << i;
      }
    }
  }
}

TEST_P(Conformance, IdTypesGiveTheSameBits) {
  const PreparedExperts experts = SmallExperts();
  MoeCall call = RandomCall(experts, 17, 3, 5);
  call.id_type = IdType::kInt64;
  const MoeOutput wide = RunCall(experts, call, GetParam());
  call.id_type = IdType::kInt32;
  EXPECT_EQ(RunCall(experts, call, GetParam()).bytes, wide.bytes);
}

TEST_P(Conformance, StridesGiveTheSameBits) {
  const PreparedExperts experts = SmallExperts();
  for (const Dtype type : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
    MoeCall call = RandomCall(experts, 7, 3, 5);
    call.input = type;
    call.output = type;
    call.id_type = IdType::kInt32;
    const MoeOutput dense = RunCall(experts, call, GetParam());
    call.stride_padding = 5;
    EXPECT_EQ(RunCall(experts, call, GetParam()).bytes, dense.bytes) << DtypeName(type);
  }
}

TEST_P(Conformance, IdsOutsideContributeNothing) {
  const PreparedExperts experts = SmallExperts();
  MoeCall call = RandomCall(experts, 8, 2, 5);
  const int64_t outside[] = {5,
                             6,
                             -2,
                             std::numeric_limits<int64_t>::min(),
                             std::numeric_limits<int64_t>::max(),
                             (int64_t{1} << 32) + 1,
                             -(int64_t{1} << 32),
                             1 << 20};
  for (uint64_t token = 0; token < 8; ++token) {
    call.ids[2 * token] = -1;
    call.ids[2 * token + 1] = static_cast<int64_t>(token % 5);
  }
  const MoeOutput expected = RunCall(experts, call, GetParam());
  for (uint64_t token = 0; token < 8; ++token) {
    call.ids[2 * token] = outside[token];
    call.weights[2 * token] = kNan;  // never looked at
  }
  EXPECT_EQ(RunCall(experts, call, GetParam()).bytes, expected.bytes);
}

TEST_P(Conformance, RowsWithoutRoutesAreZeroOrUntouched) {
  const PreparedExperts experts = SmallExperts();
  MoeCall call = RandomCall(experts, 6, 2, 5);
  for (uint64_t i = 0; i < call.ids.size(); ++i) call.ids[i] = i / 2 % 2 == 0 ? -1 : 1;
  for (uint64_t i = 0; i < call.weights.size(); ++i) {
    if (call.ids[i] == -1) call.weights[i] = i % 2 == 0 ? kNan : kInfinity;
  }
  const uint64_t hidden = experts.geometry().hidden_channels;
  for (const Dtype output : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
    call.output = output;
    call.accumulate = false;
    const MoeOutput plain = RunCall(experts, call, GetParam());
    const size_t row_bytes = hidden * static_cast<size_t>(DtypeBits(output)) / 8;
    for (size_t i = 0; i < row_bytes; ++i) ASSERT_EQ(plain.bytes[i], std::byte{0}) << i;

    // Not even the sign of a zero or the bits of a NaN change.
    call.accumulate = true;
    call.y.assign(6 * hidden, -0.0);
    call.y[1] = kNan;
    const MoeOutput added = RunCall(experts, call, GetParam());
    EXPECT_TRUE(std::signbit(added.values[0]));
    EXPECT_TRUE(std::isnan(added.values[1]));
    EXPECT_NE(added.values[hidden], 0);
  }
}

TEST_P(Conformance, AllRoutesAbsent) {
  const PreparedExperts experts = SmallExperts();
  MoeCall call = RandomCall(experts, 6, 2, 5);
  call.ids.assign(call.ids.size(), -1);
  const MoeOutput output = RunCall(experts, call, GetParam());
  for (const double value : output.values) ASSERT_TRUE(value == 0 && !std::signbit(value));
}

TEST_P(Conformance, NoTokens) {
  const PreparedExperts experts = SmallExperts();
  EXPECT_TRUE(RunCall(experts, RandomCall(experts, 0, 2, 5), GetParam()).bytes.empty());
}

TEST_P(Conformance, ExpertsWithoutSegmentsContributeNothing) {
  const PreparedExperts whole = SmallExperts();
  std::vector<SegmentDesc> segments;
  for (const SegmentDesc& segment : whole.segments()) {
    if (segment.expert != 2) segments.push_back(segment);
  }
  HostBuffer slab = HostBuffer::Create(whole.slab_bytes()).value();
  std::memcpy(slab.data(), whole.slab(), whole.slab_bytes());
  const PreparedExperts rest =
      PreparedExperts::Create(whole.geometry(), segments, std::move(slab), "without expert 2").value();
  MoeCall call = RandomCall(whole, 9, 2, 5);
  for (size_t i = 0; i < 4; ++i) call.ids[i] = 2;
  MoeCall masked = call;
  for (int64_t& id : masked.ids) id = id == 2 ? -1 : id;
  EXPECT_EQ(RunCall(rest, call, GetParam()).bytes, RunCall(whole, masked, GetParam()).bytes);
}

TEST_P(Conformance, SameExpertTwiceCountsTwice) {
  const PreparedExperts experts = SmallExperts();
  MoeCall twice = RandomCall(experts, 4, 2, 5);
  twice.ids.assign(twice.ids.size(), 3);
  ExpectWithinGate(experts, twice, GetParam());
  for (size_t i = 1; i < twice.weights.size(); i += 2) twice.weights[i] = twice.weights[i - 1];
  MoeCall once = twice;
  for (size_t i = 0; i < once.weights.size(); i += 2) {
    once.weights[i] *= 2;
    once.ids[i + 1] = -1;
  }
  const std::vector<double> expected = RunCall(experts, once, GetParam()).values;
  EXPECT_LE(Compare(expected, RunCall(experts, twice, GetParam()).values).rel_l2,
            SameSumGate(GetParam(), 1e-6));
}

TEST_P(Conformance, OneExpertTakesEveryRow) {
  const PreparedExperts experts = SmallExperts();
  for (const uint64_t tokens : {257, 1025}) {
    if (GetParam() == "reference") continue;  // measured against dense products, one row at a time
    MoeCall call = RandomCall(experts, tokens, 1, 5);
    call.ids.assign(tokens, 4);
    call.num_threads = 2;
    ExpectWithinGate(experts, call, GetParam());
  }
  // Each row is the same as alone.
  MoeCall call = RandomCall(experts, 257, 1, 5);
  call.ids.assign(257, 4);
  const MoeOutput all = RunCall(experts, call, GetParam());
  const uint64_t hidden = experts.geometry().hidden_channels;
  for (const uint64_t row : {0, 63, 64, 200, 256}) {
    MoeCall one = call;
    one.num_tokens = 1;
    one.x.assign(call.x.begin() + static_cast<ptrdiff_t>(row * hidden),
                 call.x.begin() + static_cast<ptrdiff_t>((row + 1) * hidden));
    one.ids = {4};
    one.weights = {call.weights[row]};
    const MoeOutput alone = RunCall(experts, one, GetParam());
    SCOPED_TRACE(row);
    ExpectSameRows(alone, all, row * alone.bytes.size(), GetParam());
  }
}

TEST_P(Conformance, ExpertMapSplitsAddUpToTheWhole) {
  const PreparedExperts whole = SmallExperts();
  MoeCall call = RandomCall(whole, 33, 3, 5);
  call.output = GetParam() == "reference" ? Dtype::kF64 : Dtype::kF32;
  const std::vector<double> expected = RunCall(whole, call, GetParam()).values;
  std::vector<double> sum(expected.size());
  for (const auto& [first, count] : {std::pair{0u, 2u}, {2u, 3u}}) {
    const PreparedExperts part = TakeExperts(whole, first, count);
    MoeCall partial = call;
    for (uint32_t id = 0; id < 5; ++id) {
      const bool here = id >= first && id < first + count;
      partial.expert_map.push_back(here ? static_cast<int32_t>(id - first) : -1);
    }
    const std::vector<double> y = RunCall(part, partial, GetParam()).values;
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += y[i];
  }
  EXPECT_LE(Compare(expected, sum).rel_l2, GetParam() == "reference" ? 1e-14 : SameSumGate(GetParam(), 2e-7));
}

TEST_P(Conformance, ExpertMapPermutesAndHides) {
  const PreparedExperts experts = SmallExperts();
  MoeCall local = RandomCall(experts, 17, 3, 5);
  MoeCall mapped = local;
  // Global ids 0..9; every second one lives here, in reverse order, and 9 points outside the package.
  mapped.expert_map = {4, -1, 3, -1, 2, -1, 1, -1, 0, 77};
  for (size_t i = 0; i < local.ids.size(); ++i) {
    const int64_t global = static_cast<int64_t>(i % 10);
    mapped.ids[i] = global;
    local.ids[i] = global == 9 ? -1 : mapped.expert_map[static_cast<size_t>(global)];
  }
  mapped.ids[0] = 10;  // outside the map, though inside the package's range of nothing
  local.ids[0] = -1;
  EXPECT_EQ(RunCall(experts, mapped, GetParam()).bytes, RunCall(experts, local, GetParam()).bytes);
}

TEST_P(Conformance, ThreadsRepeatsAndCapacityGiveTheSameBits) {
  const PreparedExperts experts = MakeExperts({.experts = 5,
                                               .hidden_channels = 384,
                                               .activation = {},
                                               .segments = {{.channels = 256}},
                                               .format = MixedFormat,
                                               .seed = 3});
  MoeCall call = RandomCall(experts, 33, 3, 5);
  const MoeOutput expected = RunCall(experts, call, GetParam());
  EXPECT_EQ(RunCall(experts, call, GetParam()).bytes, expected.bytes);
  for (const int threads : {2, 3, 7}) {
    call.num_threads = threads;
    EXPECT_EQ(RunCall(experts, call, GetParam()).bytes, expected.bytes) << threads << " threads";
  }
  call.max_tokens = 700;
  EXPECT_EQ(RunCall(experts, call, GetParam()).bytes, expected.bytes) << "larger capacity";
}

// A row's bits depend neither on its neighbours nor on where chunks (512 or 64 tokens) and groups end.
TEST_P(Conformance, RowsAreIndependent) {
  const PreparedExperts experts = SmallExperts();
  const uint64_t tokens = 600;
  const MoeCall call = RandomCall(experts, tokens, 2, 5);
  const MoeOutput all = RunCall(experts, call, GetParam());
  const uint64_t hidden = experts.geometry().hidden_channels;
  const auto rows_of = [&](uint64_t first, uint64_t count) {
    MoeCall some = call;
    const auto cut = [&](auto& values, uint64_t width) {
      values = {values.begin() + static_cast<ptrdiff_t>(first * width),
                values.begin() + static_cast<ptrdiff_t>((first + count) * width)};
    };
    some.num_tokens = count;
    cut(some.x, hidden);
    cut(some.ids, 2);
    cut(some.weights, 2);
    return some;
  };
  for (const auto& [first, count] :
       {std::pair{0, 1}, {1, 2}, {60, 7}, {500, 30}, {511, 1}, {512, 1}, {599, 1}}) {
    const MoeOutput part =
        RunCall(experts, rows_of(static_cast<uint64_t>(first), static_cast<uint64_t>(count)), GetParam());
    SCOPED_TRACE(fmt::format("rows {} to {}", first, first + count));
    ExpectSameRows(part, all, static_cast<uint64_t>(first) * hidden * sizeof(float), GetParam());
  }
}

TEST_P(Conformance, NanAndInfinityStayInTheirRow) {
  const PreparedExperts experts = SmallExperts();
  const uint64_t hidden = experts.geometry().hidden_channels;
  MoeCall call = RandomCall(experts, 8, 2, 5);
  call.ids.assign(call.ids.size(), 1);
  const MoeOutput clean = RunCall(experts, call, GetParam());
  call.x[2 * hidden + 17] = kNan;
  call.x[5 * hidden + 3] = kInfinity;
  call.weights[2 * 6] = kNan;
  const MoeOutput dirty = RunCall(experts, call, GetParam());
  for (uint64_t row = 0; row < 8; ++row) {
    for (uint64_t i = row * hidden; i < (row + 1) * hidden; ++i) {
      if (row == 5) {
        ASSERT_FALSE(std::isfinite(dirty.values[i]));
      } else if (row == 2 || row == 6) {
        ASSERT_TRUE(std::isnan(dirty.values[i])) << row;
      } else {
        ASSERT_EQ(dirty.values[i], clean.values[i]) << row;
      }
    }
  }
}

TEST_P(Conformance, LargeExpertOutputWithSmallWeightIsFinite) {
  const PreparedExperts experts = SmallExperts();
  MoeCall call = RandomCall(experts, 4, 1, 5);
  call.ids.assign(4, 2);
  for (double& value : call.x) value *= 1000;
  call.weights.assign(4, 1);
  double largest = 0;
  for (const double value : RunCall(experts, call, GetParam()).values)
    largest = std::max(largest, std::abs(value));
  EXPECT_GT(largest, 1e5);
  EXPECT_LT(largest, 1e7);
  call.weights.assign(4, 1e-3f);
  call.output = Dtype::kF16;
  for (const double value : RunCall(experts, call, GetParam()).values) ASSERT_TRUE(std::isfinite(value));
  ExpectWithinGate(experts, call, GetParam());
}

// The route weight brings results back into the range of fp32; with the limits of the other
// activations they never leave it.
TEST_P(Conformance, InputsOfAnyMagnitude) {
  const Activation activations[] = {{.kind = ActivationKind::kSilu},
                                    {.kind = ActivationKind::kSwigluOai, .limit = 7},
                                    {.kind = ActivationKind::kSitu}};
  for (const Activation& activation : activations) {
    const PreparedExperts experts = SmallExperts(3, activation);
    for (const double magnitude : {1e-30, 1e-20, 1e-10, 1e10, 1e20, 1e30, 1e38}) {
      for (const Dtype input : {Dtype::kF32, Dtype::kBF16}) {
        SCOPED_TRACE(
            fmt::format("{}, x about {}, {}", ActivationText(activation), magnitude, DtypeName(input)));
        MoeCall call = RandomCall(experts, 3, 1, 5);
        call.ids.assign(3, 2);
        call.input = input;
        for (double& value : call.x) value = std::remainder(value, 2.0) * magnitude;
        const bool scaled = activation.kind == ActivationKind::kSilu || magnitude < 1;
        const double factor = scaled ? std::min(std::max(1 / magnitude, 1e-38), 1e30) : 1;
        call.weights.assign(3, static_cast<float>(factor));
        ExpectWithinGate(experts, call, GetParam());
        for (const double value : RunCall(experts, call, GetParam()).values)
          ASSERT_TRUE(std::isfinite(value));
      }
    }
  }
}

// Rows of very different size in one batch, and channels of very different size in one row.
TEST_P(Conformance, MixedMagnitudes) {
  const PreparedExperts experts = SmallExperts(3, {.kind = ActivationKind::kSwigluOai, .limit = 7});
  MoeCall call = RandomCall(experts, 7, 1, 5);
  call.ids.assign(7, 2);
  const uint64_t hidden = experts.geometry().hidden_channels;
  for (uint64_t i = 0; i < call.x.size(); ++i)
    call.x[i] *= std::pow(10.0, static_cast<double>(i / hidden) * 10 - 30);
  for (uint64_t i = 0; i < hidden; ++i) call.x[6 * hidden + i] *= i % 2 == 0 ? 1 : 1e-30;
  const std::vector<double> actual = RunCall(experts, call, GetParam()).values;
  call.output = Dtype::kF64;
  const std::vector<double> expected = RunCall(experts, call, "reference").values;
  for (uint64_t row = 0; row < 7; ++row) {
    const auto part = [&](const std::vector<double>& values) {
      return std::span(values).subspan(row * hidden, hidden);
    };
    EXPECT_LE(Compare(part(expected), part(actual)).rel_l2, GateOf(GetParam(), experts).max_rel_l2) << row;
  }
}

// A saturation so low that its double is subnormal: scaling it up must not leave the range of a double.
TEST_P(Conformance, TheSmallestSaturationIsZeroAndNotNan) {
  const PreparedExperts experts =
      SmallExperts(3, {.kind = ActivationKind::kSitu, .beta = 1e-320, .linear_beta = 25});
  const MoeCall call = RandomCall(experts, 3, 2, 5);
  for (const double value : RunCall(experts, call, GetParam()).values) EXPECT_EQ(value, 0);
}

// One channel of a rotation of 128 may be a sum that cancels: its error is small against the whole block.
TEST(NarrowCuts, StayWithinTheGateOfTheUncutLayer) {
  struct Cut {
    uint32_t hidden, intermediate;
  };
  for (const Cut& size : {Cut{1, 128}, Cut{2, 1}, Cut{7, 65}, Cut{128, 1}, Cut{33, 3}}) {
    for (uint64_t seed = 1; seed <= 20; ++seed) {
      test::ExpertsSpec spec{.experts = 3,
                             .hidden_channels = size.hidden,
                             .stored_hidden_channels = 128,
                             .activation = {},
                             .segments = {{.channels = 128, .valid_channels = size.intermediate}},
                             .format = MixedFormat,
                             .seed = seed};
      const PreparedExperts cut = MakeExperts(spec);
      spec.hidden_channels = 128;
      spec.segments[0].valid_channels = 128;
      MoeCall call = RandomCall(cut, 1, 1, seed);
      call.ids = {static_cast<int64_t>(seed % 3)};
      MoeCall wide = call;
      wide.x.resize(128, 0.0);
      call.output = wide.output = Dtype::kF64;
      double norm = 0;
      for (const double y : RunCall(MakeExperts(spec), wide, "reference").values) norm = std::hypot(norm, y);
      const std::vector<double> expected = RunCall(cut, call, "reference").values;
      call.output = Dtype::kF32;
      const std::vector<double> actual = RunCall(cut, call, "cpu").values;
      double error = 0;
      for (size_t i = 0; i < expected.size(); ++i) error = std::hypot(error, expected[i] - actual[i]);
      EXPECT_LE(error, kExactGate * norm)
          << size.hidden << " of 128, " << size.intermediate << " of 128, seed " << seed;
    }
  }
}

// Not the reference: its dense oracle rounds weights, and the golden vectors are sharper.
TEST(WideRows, StayWithinTheGate) {
  const PreparedExperts experts = MakeExperts(
      {.experts = 1, .hidden_channels = 6144, .activation = {}, .segments = {{.channels = 2048}}, .seed = 3});
  MoeCall call = RandomCall(experts, 2, 1, 5);
  call.ids.assign(2, 0);
  call.num_threads = 2;
  for (const std::string& executor : test::AllExecutors()) {
    if (executor == "reference" || !BackendByName(executor)) continue;
    ExpectWithinGate(experts, call, executor, executor == "cpu" ? 0.5 : 1);
  }
}

}  // namespace
}  // namespace espalier
