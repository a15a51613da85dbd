// SPDX-License-Identifier: Apache-2.0
//
// Prepared packages made of random codes and sane vectors: every bit pattern is a valid tile, so any
// mix of bit rates, codebooks and widths costs nothing to make.
#ifndef ESPALIER_TESTS_SUPPORT_RANDOM_EXPERTS_H_
#define ESPALIER_TESTS_SUPPORT_RANDOM_EXPERTS_H_

#include <espalier/moe.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
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
  Activation activation = {};
  double output_scale = 1;
  std::vector<SegmentSpec> segments = {SegmentSpec{}};
  // Format of one matrix; empty = MatrixFormat{}.
  std::function<MatrixFormat(uint32_t expert, Projection projection)> format = {};
  bool shared_input_vector = false;      // gate and up use one suh
  CodeOrder order = CodeOrder::kNative;  // the weights are the same in either
  uint64_t seed = 1;
};

// suh about +-1/sqrt(in), svh about +-1, bias about +-0.1. REQUIRES: a legal spec.
PreparedExperts MakeExperts(const ExpertsSpec& spec);

// Experts [first, first + count) of the same package, with the same bytes.
PreparedExperts TakeExperts(const PreparedExperts& whole, uint32_t first, uint32_t count);

PreparedLinear MakeLinear(uint32_t stored_in, uint32_t stored_out, uint32_t in, uint32_t out,
                          const MatrixFormat& format, uint64_t seed, CodeOrder order = CodeOrder::kNative);

// One call of RunMoe in plain vectors.
struct MoeCall {
  uint64_t num_tokens = 1;
  uint32_t top_k = 1;
  IdType id_type = IdType::kInt64;
  Dtype input = Dtype::kF32;
  Dtype output = Dtype::kF32;
  int num_threads = 1;
  bool checked_ids = false;
  bool accumulate = false;
  uint64_t stride_padding = 0;  // elements added to every row stride, filled with garbage
  uint64_t max_tokens = 0;      // capacity of the plan; 0 = num_tokens
  std::vector<double> x;        // [num_tokens][hidden], rounded to the input type
  std::vector<int64_t> ids;     // [num_tokens][top_k]
  std::vector<float> weights;
  std::vector<int32_t> expert_map;  // empty = none
  std::vector<double> y;            // before an accumulating call
};

// What tests call an executor: "cpu" is its mode exact, "cpu_fast" and "cpu_int8" are the others.
struct ExecutorChoice {
  std::string name;
  CpuMode mode = CpuMode::kFast;
};
ExecutorChoice ChoiceOf(const std::string& executor);
// Every executor of this build by those names.
std::vector<std::string> AllExecutors();

// Normal x, ids from [-1, experts), normal weights.
MoeCall RandomCall(const PreparedExperts& experts, uint64_t num_tokens, uint32_t top_k, uint64_t seed);

struct MoeOutput {
  std::vector<std::byte> bytes;  // [num_tokens][hidden] of the output type, without padding
  std::vector<double> values;    // the same
};

// Runs on poisoned workspace and (unless accumulating) poisoned output, on a copy of the package where the
// executor works on another device. Throws when a byte outside the rows of y or behind the workspace was
// written.
Result<MoeOutput> TryRunCall(const PreparedExperts& experts, const MoeCall& call,
                             const std::string& executor);

// The same; throws on an error.
MoeOutput RunCall(const PreparedExperts& experts, const MoeCall& call, const std::string& executor);

// One matrix on the host: y of x [tokens][in] in fp32, on poisoned output. Throws on an error.
std::vector<double> RunLinearCall(const PreparedLinear& linear, const std::vector<float>& x,
                                  const std::string& executor, Dtype output);

// The same function of the decoded matrices, without rotations or tiles: an independent way to the same
// numbers, exact to the rounding of DecodeMatrix (6e-8 of a weight).
std::vector<double> RunDense(const PreparedExperts& experts, const MoeCall& call);

// One matrix of a package on its own.
PreparedLinear LinearOf(const PreparedExperts& experts, const MatrixDesc& matrix);

// Relative L2 error and cosine over all elements; elements that are NaN on both sides are left out, NaN
// on one side gives an infinite error.
struct Difference {
  double rel_l2 = 0;
  double cosine = 1;
};
Difference Compare(std::span<const double> expected, std::span<const double> actual);

}  // namespace espalier::test

#endif  // ESPALIER_TESTS_SUPPORT_RANDOM_EXPERTS_H_
