// SPDX-License-Identifier: Apache-2.0
//
// The input draws a small package and a call; every executor has to agree with the reference within its
// gate, and with itself at another thread count bit for bit.
#include <espalier/backend.h>
#include <fuzzer/FuzzedDataProvider.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "fuzz/check.h"
#include "support/random_experts.h"

namespace espalier {
namespace {

using fuzz::Check;
using test::MoeCall;
using test::Random;

constexpr double kExactGate = 2e-6;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

constexpr int kAllBits[] = {
#define ESPALIER_BITS(bits) bits,
#include <espalier/formats.def>
};

Activation DrawActivation(FuzzedDataProvider& bytes) {
  constexpr ActivationKind kKinds[] = {
#define ESPALIER_ACTIVATION(enumerator, number, name, has_gate, num_parameters) ActivationKind::enumerator,
#include <espalier/formats.def>
  };
  Activation activation = {.kind = kKinds[bytes.ConsumeIntegralInRange<size_t>(0, std::size(kKinds) - 1)]};
  const bool limits = activation.kind != ActivationKind::kSitu && activation.kind != ActivationKind::kRelu2;
  if (limits && bytes.ConsumeBool()) activation.limit = bytes.ConsumeFloatingPointInRange(0.125, 8.0);
  activation.beta = bytes.ConsumeFloatingPointInRange(0.5, 8.0);
  if (bytes.ConsumeBool()) activation.linear_beta = bytes.ConsumeBool() ? 0 : 2;
  return activation;
}

test::MatrixFormat DrawFormat(FuzzedDataProvider& bytes) {
  const std::span<const CodebookInfo> codebooks = AllCodebooks();
  return {.bits = kAllBits[bytes.ConsumeIntegralInRange<size_t>(0, std::size(kAllBits) - 1)],
          .codebook = codebooks[bytes.ConsumeIntegralInRange<size_t>(0, codebooks.size() - 1)].codebook,
          .bias = bytes.ConsumeBool()};
}

test::ExpertsSpec DrawExperts(FuzzedDataProvider& bytes) {
  test::ExpertsSpec spec;
  spec.seed = bytes.ConsumeIntegral<uint32_t>();
  spec.experts = bytes.ConsumeIntegralInRange<uint32_t>(1, 3);
  spec.stored_hidden_channels = 128 * bytes.ConsumeIntegralInRange<uint32_t>(1, 2);
  spec.hidden_channels = bytes.ConsumeBool()
                             ? spec.stored_hidden_channels
                             : bytes.ConsumeIntegralInRange<uint32_t>(1, spec.stored_hidden_channels);
  spec.activation = DrawActivation(bytes);
  spec.output_scale = bytes.ConsumeBool() ? 1 : 2.5;
  spec.shared_input_vector = ActivationHasGate(spec.activation.kind) && bytes.ConsumeBool();
  spec.segments.resize(bytes.ConsumeIntegralInRange<size_t>(1, 2));
  for (test::SegmentSpec& segment : spec.segments) {
    segment.channels = 128 * bytes.ConsumeIntegralInRange<uint32_t>(1, 2);
    if (bytes.ConsumeBool())
      segment.valid_channels = bytes.ConsumeIntegralInRange<uint32_t>(1, segment.channels);
  }
  std::array<test::MatrixFormat, 3 * kNumProjections> formats;
  for (test::MatrixFormat& format : formats) format = DrawFormat(bytes);
  spec.format = [formats](uint32_t expert, Projection projection) {
    return formats[expert * kNumProjections + static_cast<size_t>(projection)];
  };
  return spec;
}

// The same weights with every stored channel counted as valid.
PreparedExperts MakeUncut(test::ExpertsSpec spec) {
  spec.hidden_channels = spec.stored_hidden_channels;
  for (test::SegmentSpec& segment : spec.segments) segment.valid_channels = segment.channels;
  return test::MakeExperts(spec);
}

MoeCall DrawCall(FuzzedDataProvider& bytes, const PreparedExperts& experts) {
  constexpr Dtype kInputs[] = {Dtype::kF32, Dtype::kF16, Dtype::kBF16};
  MoeCall call =
      test::RandomCall(experts, bytes.ConsumeIntegralInRange<uint64_t>(0, 9),
                       bytes.ConsumeIntegralInRange<uint32_t>(1, 4), bytes.ConsumeIntegral<uint32_t>());
  call.input = kInputs[bytes.ConsumeIntegralInRange<size_t>(0, 2)];
  call.id_type = bytes.ConsumeBool() ? IdType::kInt32 : IdType::kInt64;
  call.stride_padding = bytes.ConsumeIntegralInRange<uint64_t>(0, 3);
  const double magnitude = std::ldexp(1.0, bytes.ConsumeIntegralInRange<int>(-12, 5));
  for (double& value : call.x) value *= magnitude;
  const int64_t experts_here = experts.geometry().experts;
  if (bytes.ConsumeBool()) {
    call.expert_map.resize(bytes.ConsumeIntegralInRange<size_t>(1, 6));
    for (int32_t& local : call.expert_map) {
      local = bytes.ConsumeIntegralInRange<int32_t>(-2, static_cast<int32_t>(experts_here) + 1);
    }
  }
  for (int64_t& id : call.ids) {
    if (bytes.ConsumeBool()) id = bytes.ConsumeIntegralInRange<int64_t>(-2, 7);
  }
  for (float& weight : call.weights) {
    if (bytes.ConsumeBool()) weight = bytes.ConsumeFloatingPointInRange(-4.0f, 4.0f);
  }
  if (!call.x.empty() && bytes.ConsumeBool()) {
    call.x[bytes.ConsumeIntegralInRange<size_t>(0, call.x.size() - 1)] = double{kNan};
  }
  return call;
}

// What an error is measured against: sqrt of the sum of |weight * expert output|^2 over all routes, of
// experts without cut channels. Routes that cancel each other, or the one channel that a cut leaves of a
// rotation of 128, then do not turn a rounding error into a finding: the relative error of a single sum has
// no bound.
double NormOfRoutes(const PreparedExperts& uncut, const MoeCall& call) {
  MoeCall routes = call;
  routes.num_tokens = call.ids.size();
  routes.top_k = 1;
  routes.x.clear();
  const size_t hidden = uncut.geometry().hidden_channels;
  const size_t valid = call.num_tokens == 0 ? hidden : call.x.size() / call.num_tokens;
  for (size_t route = 0; route < call.ids.size(); ++route) {
    const auto row = call.x.begin() + static_cast<ptrdiff_t>(route / call.top_k * valid);
    routes.x.insert(routes.x.end(), row, row + static_cast<ptrdiff_t>(valid));
    routes.x.resize((route + 1) * hidden, 0.0);
  }
  routes.output = Dtype::kF64;
  double squares = 0;
  for (const double value : test::RunCall(uncut, routes, "reference").values) {
    if (!std::isnan(value)) squares += value * value;
  }
  return std::sqrt(squares);
}

void CheckAgreement(const PreparedExperts& experts, const MoeCall& call, const std::string& executor,
                    double norm) {
  MoeCall oracle = call;
  oracle.output = Dtype::kF64;
  const std::vector<double> expected = test::RunCall(experts, oracle, "reference").values;
  const std::vector<double> actual = test::RunCall(experts, call, executor).values;
  double squares = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    Check(std::isnan(expected[i]) == std::isnan(actual[i]), "NaN appears where the reference has it");
    if (!std::isnan(expected[i])) squares += (expected[i] - actual[i]) * (expected[i] - actual[i]);
  }
  Check(std::sqrt(squares) <= kExactGate * norm, "the executor is within its gate");
}

void TestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider bytes(data, size);
  const test::ExpertsSpec spec = DrawExperts(bytes);
  const PreparedExperts experts = test::MakeExperts(spec);
  MoeCall call = DrawCall(bytes, experts);
  const int other_threads = bytes.ConsumeIntegralInRange<int>(2, 4);
  constexpr Dtype kOutputs[] = {Dtype::kF32, Dtype::kF16, Dtype::kBF16};
  const Dtype output = kOutputs[bytes.ConsumeIntegralInRange<size_t>(0, 2)];
  const double norm = NormOfRoutes(MakeUncut(spec), call);
  for (const Backend* backend : Backends()) {
    if (backend->device_type() != DeviceType::kCpu) continue;
    const std::string name(backend->name());
    call.num_threads = 1;
    call.output = Dtype::kF32;
    if (name != "reference") CheckAgreement(experts, call, name, norm);
    call.output = output;
    const std::vector<std::byte> alone = test::RunCall(experts, call, name).bytes;
    call.num_threads = other_threads;
    Check(test::RunCall(experts, call, name).bytes == alone, "the thread count does not change a bit");
  }
}

}  // namespace
}  // namespace espalier

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  espalier::TestOneInput(data, size);
  return 0;
}
