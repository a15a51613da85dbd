// SPDX-License-Identifier: Apache-2.0
#include "bench_package.h"

#include <espalier/extent_plan.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/half.h"
#include "base/parallel.h"
#include "command.h"
#include "random.h"

namespace espalier::cli {
namespace {

constexpr std::string_view kTiersOption = "--tiers";

Result<TierSpec> ParseTier(std::string_view item, std::string_view text, uint64_t experts) {
  const size_t colon = item.find(':');
  if (colon == item.npos || colon == 0 || colon + 1 == item.size()) {
    return Error(StatusCode::kUsage, fmt::format("{} '{}': legal: K:EXPERTS for every tier, as in 3:192,4:64",
                                                 kTiersOption, text));
  }
  const Result<int64_t> bits =
      ParseInteger(fmt::format("{}: K", kTiersOption), item.substr(0, colon), kMinBits, kMaxBits);
  if (!bits) return tl::unexpected(bits.error());
  const Result<int64_t> count = ParseInteger(fmt::format("{}: experts", kTiersOption), item.substr(colon + 1),
                                             1, static_cast<int64_t>(experts));
  if (!count) return tl::unexpected(count.error());
  return TierSpec{.bits = static_cast<int>(*bits), .experts = static_cast<uint32_t>(*count)};
}

void FillVector(Random& random, double scale, uint32_t channels, std::byte* target) {
  for (uint32_t i = 0; i < channels; ++i) {
    const double magnitude = scale * (0.75 + 0.5 * random.Uniform());
    const uint16_t value = DoubleToFp16(random.Below(2) != 0 ? -magnitude : magnitude);
    std::memcpy(target + i * sizeof(value), &value, sizeof(value));
  }
}

void FillMatrix(Random& random, const MatrixDesc& matrix, std::byte* slab) {
  if (!matrix.present()) return;
  std::byte* codes = slab + matrix.codes_offset_bytes;
  for (uint64_t i = 0; i < matrix.code_bytes(); i += sizeof(uint64_t)) {  // a multiple of 32 bytes
    const uint64_t word = random.Next();
    std::memcpy(codes + i, &word, sizeof(word));
  }
  FillVector(random, 1 / std::sqrt(matrix.in_channels), matrix.in_channels, slab + matrix.suh_offset_bytes);
  FillVector(random, 1, matrix.out_channels, slab + matrix.svh_offset_bytes);
}

// "3" or "3-4-3"; segments one after the other.
std::string RateName(std::span<const SegmentDesc> segments) {
  std::string name;
  bool uniform = true;
  int first = 0;
  for (const SegmentDesc& segment : segments) {
    for (const MatrixDesc& matrix : segment.matrices) {
      if (!matrix.present()) continue;
      if (first == 0) first = matrix.bits;
      uniform = uniform && matrix.bits == first;
      name += fmt::format("{}{}", name.empty() ? "" : "-", matrix.bits);
    }
  }
  return uniform ? std::to_string(first) : name;
}

// To the last expert.
void AddWeights(const CodeFormat& format, uint64_t weights, ExpertTiers& tiers) {
  const auto found = std::find(tiers.formats.begin(), tiers.formats.end(), format);
  const auto index = static_cast<size_t>(found - tiers.formats.begin());
  if (found == tiers.formats.end()) tiers.formats.push_back(format);
  std::vector<uint64_t>& by_format = tiers.format_weights.back();
  if (by_format.size() <= index) by_format.resize(index + 1);
  by_format[index] += weights;
}

}  // namespace

Result<std::vector<TierSpec>> ParseTiers(std::string_view text, uint64_t experts) {
  std::vector<TierSpec> tiers;
  uint64_t sum = 0;
  for (size_t start = 0; start <= text.size();) {
    const size_t end = std::min(text.find(',', start), text.size());
    const Result<TierSpec> tier = ParseTier(text.substr(start, end - start), text, experts);
    if (!tier) return tl::unexpected(tier.error());
    for (const TierSpec& other : tiers) {
      if (other.bits == tier->bits) {
        return Error(StatusCode::kUsage,
                     fmt::format("{} '{}': K {} is there twice", kTiersOption, text, tier->bits));
      }
    }
    tiers.push_back(*tier);
    sum += tier->experts;
    start = end + 1;
  }
  if (sum != experts) {
    return Error(StatusCode::kGeometry,
                 fmt::format("{} {}: found {} experts in all; legal: {}", kTiersOption, text, sum, experts));
  }
  return tiers;
}

std::vector<int> Interleave(std::span<const TierSpec> tiers) {
  uint64_t experts = 0;
  for (const TierSpec& tier : tiers) experts += tier.experts;
  std::vector<int> bits;
  std::vector<uint64_t> placed(tiers.size());
  while (bits.size() < experts) {
    // The tier that is furthest behind its share of the ids so far, in units of 1 / experts.
    size_t next = 0;
    int64_t most_behind = INT64_MIN;
    for (size_t i = 0; i < tiers.size(); ++i) {
      const auto behind = static_cast<int64_t>((bits.size() + 1) * tiers[i].experts) -
                          static_cast<int64_t>(placed[i] * experts);
      if (behind > most_behind) {
        most_behind = behind;
        next = i;
      }
    }
    ++placed[next];
    bits.push_back(tiers[next].bits);
  }
  return bits;
}

Result<ExpertsTable> SizeRandomExperts(const Geometry& geometry, std::span<const int> bits, Codebook codebook,
                                       const Device& device) {
  const Result<Checkpoint> checkpoint = OpenGeometry(geometry, bits, codebook);
  if (!checkpoint) return tl::unexpected(checkpoint.error());
  const Result<ExtentPlan> plan =
      ExtentPlan::Create(*checkpoint, {.tp = geometry.bench_tp, .ep = 1, .equal = false});
  if (!plan) return tl::unexpected(plan.error());
  Result<LoadSizes> sizes = SizeExperts(*checkpoint, *plan, 0, 0, {.device = device});
  if (!sizes) return tl::unexpected(sizes.error());
  return std::move(sizes->table);
}

Result<PreparedExperts> FillRandomly(ExpertsTable table, uint64_t seed) {
  Result<HostBuffer> slab = HostBuffer::Create(table.slab_bytes());
  if (!slab) return tl::unexpected(slab.error());
  const std::span<const SegmentDesc> segments = table.segments();
  ParallelFor(0, segments.size(), [&](uint64_t i) {
    Random seeds(seed + i);
    Random random(seeds.Next());
    for (const MatrixDesc& matrix : segments[i].matrices) FillMatrix(random, matrix, slab->data());
  });
  return PreparedExperts::Create(std::move(table), *std::move(slab));
}

std::vector<int32_t> ExpertTiers::MapOf(size_t tier) const {
  std::vector<int32_t> map(tier_of.size(), -1);
  for (size_t expert = 0; expert < map.size(); ++expert) {
    if (tier_of[expert] == tier) map[expert] = static_cast<int32_t>(expert);
  }
  return map;
}

ExpertTiers TiersOf(const PreparedExperts& experts) {
  ExpertTiers tiers;
  std::vector<bool> has_codebook(AllCodebooks().size());
  for (uint32_t expert = 0; expert < experts.geometry().experts; ++expert) {
    const std::span<const SegmentDesc> segments = experts.ExpertSegments(expert);
    const std::string name = RateName(segments);
    const auto found = std::find(tiers.names.begin(), tiers.names.end(), name);
    const auto tier = static_cast<uint32_t>(found - tiers.names.begin());
    if (found == tiers.names.end()) {
      tiers.names.push_back(name);
      tiers.experts.push_back(0);
    }
    ++tiers.experts[tier];
    tiers.tier_of.push_back(tier);
    uint64_t& weights = tiers.weights.emplace_back();
    uint64_t& bytes = tiers.code_bytes.emplace_back();
    tiers.format_weights.emplace_back();
    for (const SegmentDesc& segment : segments) {
      for (const MatrixDesc& matrix : segment.matrices) {
        if (!matrix.present()) continue;
        const uint64_t matrix_weights = uint64_t{matrix.in_channels} * matrix.out_channels;
        weights += matrix_weights;
        AddWeights({.bits = static_cast<int>(matrix.bits), .codebook = matrix.codebook}, matrix_weights,
                   tiers);
        bytes += matrix.code_bytes();
        has_codebook[static_cast<size_t>(matrix.codebook)] = true;
      }
    }
  }
  for (const CodebookInfo& codebook : AllCodebooks()) {
    if (has_codebook[static_cast<size_t>(codebook.codebook)]) tiers.codebooks.emplace_back(codebook.name);
  }
  return tiers;
}

}  // namespace espalier::cli
