// SPDX-License-Identifier: Apache-2.0
//
// Prepared packages made of random codes and sane vectors: every bit pattern is a valid tile, so any
// mix of bit rates, codebooks and widths costs nothing to make.
#ifndef ESPALIER_TESTS_SUPPORT_RANDOM_EXPERTS_H_
#define ESPALIER_TESTS_SUPPORT_RANDOM_EXPERTS_H_

#include <espalier/experts.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace espalier::test {

// SplitMix64: the same numbers everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Next();
  uint64_t Below(uint64_t bound) { return Next() % bound; }
  double Uniform() { return static_cast<double>(Next() >> 11) * 0x1p-53; }  // [0, 1)
  double Normal();

 private:
  uint64_t state_;
};

// Collects arrays at slab alignment.
class SlabWriter {
 public:
  uint64_t Add(std::span<const std::byte> bytes);
  template <typename T>
  uint64_t Add(const std::vector<T>& values) {
    return Add(std::as_bytes(std::span(values)));
  }
  HostBuffer Take() const;

 private:
  std::vector<std::byte> bytes_;
};

struct MatrixFormat {
  int bits = 3;
  Codebook codebook = Codebook::kMcg;
  bool bias = false;
};

// One segment of every expert.
struct SegmentSpec {
  uint32_t channels = 128;
  uint32_t valid_channels = ~0u;  // cut to `channels`
};

struct ExpertsSpec {
  uint32_t experts = 1;
  uint32_t hidden_channels = 128;
  uint32_t stored_hidden_channels = 0;  // 0 = hidden_channels
  Activation activation;
  double output_scale = 1;
  std::vector<SegmentSpec> segments = {SegmentSpec{}};
  // Format of one matrix; empty = MatrixFormat{}.
  std::function<MatrixFormat(uint32_t expert, Projection projection)> format;
  bool shared_input_vector = false;  // gate and up use one suh
  uint64_t seed = 1;
};

// suh about +-1/sqrt(in), svh about +-1, bias about +-0.1. REQUIRES: a legal spec.
PreparedExperts MakeExperts(const ExpertsSpec& spec);

// Experts [first, first + count) of the same package, with the same bytes.
PreparedExperts TakeExperts(const PreparedExperts& whole, uint32_t first, uint32_t count);

PreparedLinear MakeLinear(uint32_t stored_in, uint32_t stored_out, uint32_t in, uint32_t out,
                          const MatrixFormat& format, uint64_t seed);

// Relative L2 error and cosine over all elements; elements that are NaN on both sides are left out, NaN
// on one side gives an infinite error.
struct Difference {
  double rel_l2 = 0;
  double cosine = 1;
};
Difference Compare(std::span<const double> expected, std::span<const double> actual);

}  // namespace espalier::test

#endif  // ESPALIER_TESTS_SUPPORT_RANDOM_EXPERTS_H_
