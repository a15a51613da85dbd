// SPDX-License-Identifier: Apache-2.0
//
// What `bench` measures: experts made of random codes at the size of a known model, and the tiers among them.
#ifndef ESPALIER_CLI_BENCH_PACKAGE_H_
#define ESPALIER_CLI_BENCH_PACKAGE_H_

#include <espalier/experts.h>
#include <espalier/status.h>

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "geometry.h"

namespace espalier::cli {

struct TierSpec {
  int bits = 0;
  uint32_t experts = 0;
};

// "3:192,4:64". Errors: kUsage for another syntax or one K twice; kGeometry for K outside 1..8 and where the
// counts do not sum to `experts`.
Result<std::vector<TierSpec>> ParseTiers(std::string_view text, uint64_t experts);

// Bits of every expert: the tiers are spread evenly over the ids, the first one first.
std::vector<int> Interleave(std::span<const TierSpec> tiers);

// What rank 0 of the geometry's tensor-parallel size owns, laid out as loading for `device` would, before
// there are bytes. REQUIRES: bits as for OpenGeometry. Error: kCapacity.
Result<ExpertsTable> SizeRandomExperts(const Geometry& geometry, std::span<const int> bits, Codebook codebook,
                                       const Device& device);

// The table with bytes in it, on the host: every bit pattern is a legal code, in either order. suh about
// +-1/sqrt(in) and svh about +-1, of every matrix its own, keep values near 1 from end to end. Cost: writes
// the slab once. Error: kCapacity.
Result<PreparedExperts> FillRandomly(ExpertsTable table, uint64_t seed);

// How a matrix is coded: what the cost of decoding it depends on.
struct CodeFormat {
  int bits = 0;
  Codebook codebook = Codebook::kMcg;

  friend bool operator==(const CodeFormat&, const CodeFormat&) = default;
};

// Experts with the same bits: what running the tiers one by one means.
struct ExpertTiers {
  std::vector<std::string> names;                     // "3"; "3-4-3" where gate, up and down differ
  std::vector<uint32_t> experts;                      // by tier
  std::vector<uint32_t> tier_of;                      // by expert
  std::vector<uint64_t> weights;                      // by expert
  std::vector<uint64_t> code_bytes;                   // by expert
  std::vector<std::string> codebooks;                 // that occur, by formats.def
  std::vector<CodeFormat> formats;                    // that occur, the first one first
  std::vector<std::vector<uint64_t>> format_weights;  // by expert, then by format as far as it has them

  // Ids to themselves where they are of this tier, to -1 elsewhere: what MoeArgs::expert_map takes.
  std::vector<int32_t> MapOf(size_t tier) const;
};

// In the order in which they first occur.
ExpertTiers TiersOf(const PreparedExperts& experts);

}  // namespace espalier::cli

#endif  // ESPALIER_CLI_BENCH_PACKAGE_H_
