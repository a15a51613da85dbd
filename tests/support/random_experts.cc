// SPDX-License-Identifier: Apache-2.0
#include "support/random_experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <stdexcept>
#include <utility>

#include "base/checked.h"
#include "base/half.h"
#include "moe/slab_order.h"
#include "reference/activation.h"
#include "support/elements.h"
#include "support/require.h"

namespace espalier::test {
namespace {

std::vector<uint16_t> RandomVector(Random& random, uint32_t channels, double scale) {
  std::vector<uint16_t> values(channels);
  for (uint16_t& value : values) {
    const double magnitude = scale * (0.75 + 0.5 * random.Uniform());
    value = DoubleToFp16(random.Below(2) != 0 ? -magnitude : magnitude);
  }
  return values;
}

MatrixDesc AddMatrix(Random& random, SlabWriter& slab, uint32_t in, uint32_t out, const MatrixFormat& format,
                     CodeOrder order) {
  MatrixDesc desc;
  desc.in_channels = in;
  desc.out_channels = out;
  desc.bits = static_cast<uint8_t>(format.bits);
  desc.codebook = format.codebook;
  std::vector<uint64_t> codes(desc.code_bytes() / sizeof(uint64_t));
  for (uint64_t& word : codes) word = random.Next();
  desc.order = order;
  std::vector<std::byte> words(desc.code_bytes());
  if (order == CodeOrder::kPanels) {
    PanelsFromRows(desc, 0, in / kTileChannels, reinterpret_cast<const std::byte*>(codes.data()),
                   words.data());
  } else {
    std::memcpy(words.data(), codes.data(), words.size());
  }
  desc.codes_offset_bytes = slab.Add(words);
  desc.suh_offset_bytes = slab.Add(RandomVector(random, in, 1 / std::sqrt(in)));
  desc.svh_offset_bytes = slab.Add(RandomVector(random, out, 1));
  if (format.bias) desc.bias_offset_bytes = slab.Add(RandomVector(random, out, 0.1));
  return desc;
}

}  // namespace

uint64_t Random::Next() {
  state_ += 0x9E3779B97F4A7C15u;
  uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

double Random::Normal() {
  const double radius = std::sqrt(-2 * std::log(1 - Uniform()));
  return radius * std::cos(2 * std::numbers::pi * Uniform());
}

uint64_t SlabWriter::Add(std::span<const std::byte> bytes) {
  const uint64_t offset = RoundUp(bytes_.size(), kSlabAlignmentBytes);
  bytes_.resize(offset);
  bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  return offset;
}

HostBuffer SlabWriter::Take() const {
  HostBuffer buffer = Require(HostBuffer::Create(bytes_.size()));
  if (!bytes_.empty()) std::memcpy(buffer.data(), bytes_.data(), bytes_.size());
  return buffer;
}

PreparedExperts MakeExperts(const ExpertsSpec& spec) {
  const uint32_t hidden =
      spec.stored_hidden_channels != 0 ? spec.stored_hidden_channels : spec.hidden_channels;
  Random random(spec.seed);
  SlabWriter slab;
  std::vector<SegmentDesc> segments;
  for (uint32_t expert = 0; expert < spec.experts; ++expert) {
    for (const SegmentSpec& segment : spec.segments) {
      SegmentDesc desc;
      desc.expert = expert;
      desc.valid_intermediate_channels = std::min(segment.channels, segment.valid_channels);
      for (const Projection projection : {Projection::kGate, Projection::kUp, Projection::kDown}) {
        if (projection == Projection::kGate && !ActivationHasGate(spec.activation.kind)) continue;
        const MatrixFormat format = spec.format ? spec.format(expert, projection) : MatrixFormat{};
        const bool down = projection == Projection::kDown;
        desc.matrices[static_cast<int>(projection)] =
            AddMatrix(random, slab, down ? segment.channels : hidden, down ? hidden : segment.channels,
                      format, spec.order);
      }
      if (spec.shared_input_vector) desc.matrices[1].suh_offset_bytes = desc.matrices[0].suh_offset_bytes;
      segments.push_back(desc);
    }
  }
  const MoeGeometry geometry = {.experts = spec.experts,
                                .hidden_channels = spec.hidden_channels,
                                .stored_hidden_channels = hidden,
                                .activation = spec.activation,
                                .output_scale = spec.output_scale};
  return Require(PreparedExperts::Create(geometry, std::move(segments), slab.Take(), "random experts"));
}

PreparedExperts TakeExperts(const PreparedExperts& whole, uint32_t first, uint32_t count) {
  std::vector<SegmentDesc> segments;
  for (SegmentDesc segment : whole.segments()) {
    if (segment.expert < first || segment.expert >= first + count) continue;
    segment.expert -= first;
    segments.push_back(segment);
  }
  HostBuffer slab = Require(HostBuffer::Create(whole.slab_bytes()));
  std::memcpy(slab.data(), whole.slab(), whole.slab_bytes());
  MoeGeometry geometry = whole.geometry();
  geometry.experts = count;
  return Require(
      PreparedExperts::Create(geometry, std::move(segments), std::move(slab), "some of " + whole.identity()));
}

PreparedLinear MakeLinear(uint32_t stored_in, uint32_t stored_out, uint32_t in, uint32_t out,
                          const MatrixFormat& format, uint64_t seed, CodeOrder order) {
  Random random(seed);
  SlabWriter slab;
  const MatrixDesc desc = AddMatrix(random, slab, stored_in, stored_out, format, order);
  return Require(PreparedLinear::Create(desc, in, out, slab.Take(), "random linear"));
}

MoeCall RandomCall(const PreparedExperts& experts, uint64_t num_tokens, uint32_t top_k, uint64_t seed) {
  Random random(seed);
  MoeCall call;
  call.num_tokens = num_tokens;
  call.top_k = top_k;
  call.x.resize(num_tokens * experts.geometry().hidden_channels);
  call.ids.resize(num_tokens * top_k);
  call.weights.resize(num_tokens * top_k);
  for (double& value : call.x) value = random.Normal();
  for (int64_t& id : call.ids) id = static_cast<int64_t>(random.Below(experts.geometry().experts + 1)) - 1;
  for (float& weight : call.weights) weight = static_cast<float>(random.Normal());
  return call;
}

PreparedLinear LinearOf(const PreparedExperts& experts, const MatrixDesc& matrix) {
  HostBuffer slab = Require(HostBuffer::Create(experts.slab_bytes()));
  std::memcpy(slab.data(), experts.slab(), experts.slab_bytes());
  return Require(PreparedLinear::Create(matrix, 0, 0, std::move(slab), experts.identity()));
}

namespace {

// x W + bias with W as decoded.
std::vector<double> DenseProduct(const PreparedExperts& experts, const MatrixDesc& matrix,
                                 const std::vector<double>& x) {
  const std::vector<float> weights = Require(DecodeMatrix(LinearOf(experts, matrix), false));
  const uint64_t out = matrix.out_channels;
  std::vector<double> y(out);
  for (uint64_t i = 0; i < x.size(); ++i) {
    for (uint64_t c = 0; c < out; ++c) y[c] += x[i] * double{weights[i * out + c]};
  }
  if (matrix.bias_offset_bytes == kAbsentOffset) return y;
  const uint16_t* bias = reinterpret_cast<const uint16_t*>(experts.slab() + matrix.bias_offset_bytes);
  for (uint64_t c = 0; c < out; ++c) y[c] += double{Fp16ToFloat(bias[c])};
  return y;
}

}  // namespace

std::vector<double> RunDense(const PreparedExperts& experts, const MoeCall& call) {
  const MoeGeometry& geometry = experts.geometry();
  const uint64_t hidden = geometry.hidden_channels;
  std::vector<double> y(call.num_tokens * hidden);
  for (uint64_t token = 0; token < call.num_tokens; ++token) {
    std::vector<double> x(call.x.begin() + static_cast<ptrdiff_t>(token * hidden),
                          call.x.begin() + static_cast<ptrdiff_t>((token + 1) * hidden));
    for (double& value : x) {
      std::byte encoded[sizeof(double)] = {};
      Encode(call.input, value, encoded);
      value = Decode(call.input, encoded);
    }
    for (uint32_t j = 0; j < call.top_k; ++j) {
      int64_t id = call.ids[token * call.top_k + j];
      if (id >= 0 && !call.expert_map.empty()) id = call.expert_map.at(static_cast<size_t>(id));
      if (id < 0) continue;
      const double weight = double{call.weights[token * call.top_k + j]} * geometry.output_scale;
      for (const SegmentDesc& segment : experts.ExpertSegments(static_cast<uint32_t>(id))) {
        std::vector<double> h = DenseProduct(experts, segment.up(), x);
        std::vector<double> gate(h.size());
        if (segment.gate().present()) gate = DenseProduct(experts, segment.gate(), x);
        for (size_t i = 0; i < h.size(); ++i) {
          h[i] = i < segment.valid_intermediate_channels ? Activate(geometry.activation, gate[i], h[i]) : 0;
        }
        const std::vector<double> output = DenseProduct(experts, segment.down(), h);
        for (uint64_t i = 0; i < hidden; ++i) y[token * hidden + i] += weight * output[i];
      }
    }
  }
  return y;
}

Difference Compare(std::span<const double> expected, std::span<const double> actual) {
  if (expected.size() != actual.size()) throw std::runtime_error("arrays of different sizes");
  double error = 0, expected_norm = 0, actual_norm = 0, dot = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (std::isnan(expected[i]) && std::isnan(actual[i])) continue;
    if (std::isnan(expected[i]) || std::isnan(actual[i]))
      return {std::numeric_limits<double>::infinity(), -1};
    if (expected[i] == actual[i] && std::isinf(expected[i])) continue;
    error += (expected[i] - actual[i]) * (expected[i] - actual[i]);
    expected_norm += expected[i] * expected[i];
    actual_norm += actual[i] * actual[i];
    dot += expected[i] * actual[i];
  }
  if (expected_norm == 0 && actual_norm == 0) return {};
  if (expected_norm == 0) return {std::numeric_limits<double>::infinity(), -1};
  return {std::sqrt(error / expected_norm),
          actual_norm == 0 ? 0 : dot / std::sqrt(expected_norm) / std::sqrt(actual_norm)};
}

}  // namespace espalier::test
