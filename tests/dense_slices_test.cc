// SPDX-License-Identifier: Apache-2.0
//
// What a rank holds outside the routed experts: the splits against their published tables, the loaders
// against the whole tensor, and the sum over the ranks of what they compute against the unsplit model.
#include <espalier/dense_slices.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/half.h"
#include "reference/activation.h"
#include "support/checkpoint_writer.h"
#include "support/memory_file_system.h"
#include "support/refusal_cases.h"

namespace espalier {
namespace {

using testing::CheckpointFiles;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::MemoryCheckpoint;
using testing::MemoryFileSystem;
using testing::NamedTensor;

constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();
const std::string kFile = "model.safetensors";

template <typename T>
void ExpectRefused(const Result<T>& result, StatusCode code, std::initializer_list<std::string> words) {
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().code(), code) << result.error().message();
  for (const std::string& word : words) EXPECT_THAT(result.error().message(), HasSubstr(word));
}

template <typename Split>
std::vector<uint64_t> ValidByRank(const Split& split) {
  std::vector<uint64_t> valid;
  for (int rank = 0; rank < split.tp; ++rank) {
    if constexpr (requires { split.width; }) {
      valid.push_back(split.ValidChannels(rank));
    } else {
      valid.push_back(split.ValidHeads(rank));
    }
  }
  return valid;
}

uint64_t Sum(const std::vector<uint64_t>& values) {
  return std::accumulate(values.begin(), values.end(), uint64_t{0});
}

struct KimiRow {
  int tp;
  uint64_t padded;
  uint64_t local;
  uint64_t last_valid;
};

// docs/format.md, "The rest of a model": 96 heads.
TEST(SplitHeads, GivesThePublishedTable) {
  for (const KimiRow& row : {KimiRow{8, 96, 12, 12}, KimiRow{9, 99, 11, 8}, KimiRow{10, 100, 10, 6},
                             KimiRow{12, 96, 8, 8}, KimiRow{16, 96, 6, 6}}) {
    const HeadSplit split = SplitHeads(96, row.tp).value();
    EXPECT_EQ(split,
              (HeadSplit{.heads = 96, .padded_heads = row.padded, .local_heads = row.local, .tp = row.tp}));
    std::vector<uint64_t> valid(static_cast<size_t>(row.tp), row.local);
    valid.back() = row.last_valid;
    EXPECT_EQ(ValidByRank(split), valid) << "tp " << row.tp;
    EXPECT_EQ(SplitHeads(split.heads, row.tp).value(), split) << "from the original count, again and again";
    EXPECT_EQ(SplitHeads(split.heads, 8).value().padded_heads, 96u) << "also at another tp";
  }
}

TEST(SplitHeads, CoversEveryHeadOnce) {
  for (uint64_t heads = 1; heads <= 130; ++heads) {
    for (const int tp : {1, 2, 3, 5, 9, 24, 128, 1024}) {
      const HeadSplit split = SplitHeads(heads, tp).value();
      uint64_t next = 0;
      for (int rank = 0; rank < tp; ++rank) {
        ASSERT_EQ(split.FirstHead(rank), next);
        ASSERT_LE(split.ValidHeads(rank), split.local_heads);
        next += split.ValidHeads(rank);
      }
      ASSERT_EQ(next, heads) << "tp " << tp;
      ASSERT_LT(split.padded_heads - heads, static_cast<uint64_t>(tp));
    }
  }
}

TEST(SplitWidth, GivesThePublishedWidths) {
  const WidthSplit dense = SplitWidth(6144, 9).value();
  EXPECT_EQ(dense.local, 704u);
  EXPECT_EQ(dense.FirstChannel(8), 5632u);
  EXPECT_THAT(ValidByRank(dense), ElementsAre(704, 704, 704, 704, 704, 704, 704, 704, 512));
  EXPECT_EQ(SplitWidth(6144, 9, 32).value().local, 704u);
  EXPECT_EQ(SplitWidth(3072, 9, 32).value().local, 352u);
  const WidthSplit shared = SplitWidth(3072, 9).value();
  EXPECT_EQ(shared.local, 384u);
  EXPECT_THAT(ValidByRank(shared), ElementsAre(384, 384, 384, 384, 384, 384, 384, 384, 0));
  EXPECT_EQ(SplitWidth(6144, 8).value().local, 768u);
  // A router of 384 outputs, or a latent projection, padded to ceil(out / tp) * tp.
  EXPECT_THAT(ValidByRank(SplitWidth(384, 9, 1).value()), ElementsAre(43, 43, 43, 43, 43, 43, 43, 43, 40));
}

TEST(SplitWidth, CoversEveryChannelOnce) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 2000; ++i) {
    const uint64_t width = 1 + random() % 20000;
    const int tp = 1 + static_cast<int>(random() % 1024);
    const uint64_t alignment = std::vector<uint64_t>{1, 16, 32, 64, 128}[random() % 5];
    const WidthSplit split = SplitWidth(width, tp, alignment).value();
    ASSERT_EQ(Sum(ValidByRank(split)), width);
    ASSERT_EQ(split.local % alignment, 0u);
    ASSERT_GE(split.local * static_cast<uint64_t>(tp), width);
    ASSERT_LT(split.local, (width + static_cast<uint64_t>(tp) - 1) / static_cast<uint64_t>(tp) + alignment);
  }
}

TEST(SplitKvHeads, ReplicatesPadsOrRefuses) {
  const KvSplit replicated = SplitKvHeads(32, 4, 16).value();
  EXPECT_EQ(replicated, (KvSplit{.kv_heads = 4, .local_heads = 1, .replicas = 4, .tp = 16}));
  for (int rank = 0; rank < 16; ++rank) {
    EXPECT_EQ(replicated.FirstHead(rank), static_cast<uint64_t>(rank) / 4);
    EXPECT_EQ(replicated.ValidHeads(rank), 1u);
  }
  EXPECT_EQ(SplitKvHeads(32, 8, 4).value(),
            (KvSplit{.kv_heads = 8, .local_heads = 2, .replicas = 1, .tp = 4}));
  // As many as heads: padded with them.
  EXPECT_THAT(ValidByRank(SplitKvHeads(96, 96, 9).value()), ElementsAre(11, 11, 11, 11, 11, 11, 11, 11, 8));
  // One serves all heads, wherever they are.
  EXPECT_EQ(SplitKvHeads(10, 1, 3).value(),
            (KvSplit{.kv_heads = 1, .local_heads = 1, .replicas = 3, .tp = 3}));
  ExpectRefused(SplitKvHeads(96, 8, 9), StatusCode::kGeometry,
                {"tp 9", "96 heads", "8 k/v heads", "legal tp: 1, 2, 4, 8, 16, 24"});
  EXPECT_THAT(LegalKvTpSizes(96, 8), ElementsAre(1, 2, 4, 8, 16, 24));
  // 8 ranks of 2 heads would cut the groups of 3.
  ExpectRefused(SplitKvHeads(12, 4, 8), StatusCode::kGeometry, {"legal tp: 1, 2, 4, 5, 12"});
  ExpectRefused(SplitKvHeads(96, 5, 1), StatusCode::kGeometry, {"5 k/v heads", "a divisor of 96"});
  EXPECT_THAT(LegalKvTpSizes(96, 5), IsEmpty());
  EXPECT_THAT(LegalKvTpSizes(0, 0), IsEmpty());
}

TEST(SplitKvHeads, KeepsEveryHeadBesideItsOwn) {
  int accepted = 0;
  for (uint64_t heads = 1; heads <= 48; ++heads) {
    for (uint64_t kv_heads = 1; kv_heads <= heads; ++kv_heads) {
      if (heads % kv_heads != 0) continue;
      const uint64_t group = heads / kv_heads;
      for (int tp = 1; tp <= 64; ++tp) {
        const auto ranks = static_cast<uint64_t>(tp);
        const Result<KvSplit> kv = SplitKvHeads(heads, kv_heads, tp);
        const bool even = heads % ranks == 0 && (kv_heads % ranks == 0 || ranks % kv_heads == 0);
        if (even || kv_heads == heads || kv_heads == 1) {
          ASSERT_TRUE(kv.has_value()) << heads << " " << kv_heads << " " << tp;
        }
        if (!kv) continue;
        ++accepted;
        const HeadSplit split = SplitHeads(heads, tp).value();
        for (int rank = 0; rank < tp; ++rank) {
          for (uint64_t h = 0; h < split.ValidHeads(rank); ++h) {
            const uint64_t local = kv->replicas > 1 ? 0 : h / group;
            ASSERT_LT(local, kv->ValidHeads(rank)) << heads << " " << kv_heads << " " << tp;
            ASSERT_EQ(kv->FirstHead(rank) + local, (split.FirstHead(rank) + h) / group);
          }
        }
      }
    }
  }
  EXPECT_GT(accepted, 1000);
}

TEST(Splits, RefuseWhatIsOutOfRange) {
  const std::string most = std::to_string(kMaxSplit);
  for (const int tp : {0, -1, 1025, std::numeric_limits<int>::max(), std::numeric_limits<int>::min()}) {
    ExpectRefused(SplitHeads(96, tp), StatusCode::kGeometry, {"found tp " + std::to_string(tp), "1..1024"});
    ExpectRefused(SplitWidth(96, tp), StatusCode::kGeometry, {"1..1024"});
    ExpectRefused(SplitKvHeads(96, 96, tp), StatusCode::kGeometry, {"1..1024"});
    ExpectRefused(PlanDense({}, tp), StatusCode::kGeometry, {"1..1024"});
  }
  for (const uint64_t count : {uint64_t{0}, kMaxSplit + 1, kHuge}) {
    ExpectRefused(SplitHeads(count, 9), StatusCode::kGeometry, {std::to_string(count), most});
    ExpectRefused(SplitWidth(count, 9), StatusCode::kGeometry, {std::to_string(count), most});
    ExpectRefused(SplitKvHeads(count, 1, 9), StatusCode::kGeometry, {std::to_string(count), most});
    ExpectRefused(SplitKvHeads(96, count, 9), StatusCode::kGeometry, {std::to_string(count), most});
  }
  for (const uint64_t alignment : {uint64_t{0}, kMaxWidthAlignment + 1, kHuge}) {
    ExpectRefused(SplitWidth(96, 9, alignment), StatusCode::kGeometry, {"alignment", "1..65536"});
    ExpectRefused(PlanDense({}, 9, alignment), StatusCode::kGeometry, {"alignment", "1..65536"});
  }
  EXPECT_EQ(SplitWidth(kMaxSplit, 1024, kMaxWidthAlignment).value().local, uint64_t{1} << 30);
  const HeadSplit heads = SplitHeads(kMaxSplit, 2).value();
  ExpectRefused(HeadSlice(heads, uint64_t{1} << 30, 0), StatusCode::kGeometry, {"2^64"});
  EXPECT_EQ(HeadSlice(heads, uint64_t{1} << 20, 1).value().first, uint64_t{1} << 59);
  for (const int rank : {-1, 2}) {
    ExpectRefused(HeadSlice(heads, 1, rank), StatusCode::kUsage, {"legal: 0..1"});
    ExpectRefused(KvHeadSlice(SplitKvHeads(2, 1, 2).value(), 1, rank), StatusCode::kUsage, {"legal: 0..1"});
    ExpectRefused(WidthSlice(SplitWidth(2, 2).value(), rank), StatusCode::kUsage, {"legal: 0..1"});
  }
}

TEST(PlanDense, PlansWhatTheConfigNames) {
  ModelConfig config;
  EXPECT_FALSE(PlanDense(config, 9)->heads.has_value());
  config.attention_heads = 96;
  config.kv_heads = 96;
  config.linear_heads = 96;
  config.dense_intermediate_channels = 6144;
  config.shared_intermediate_channels = 3072;
  const DensePlan plan = PlanDense(config, 9).value();
  EXPECT_EQ(plan.tp, 9);
  EXPECT_EQ(plan.heads, SplitHeads(96, 9).value());
  EXPECT_EQ(plan.linear_heads, SplitHeads(96, 9).value());
  EXPECT_EQ(plan.kv_heads, SplitKvHeads(96, 96, 9).value());
  EXPECT_EQ(plan.dense, SplitWidth(6144, 9).value());
  EXPECT_EQ(plan.shared, SplitWidth(3072, 9).value());
  EXPECT_FALSE(plan.kv_refusal.has_value());
  EXPECT_EQ(PlanDense(config, 9, 32)->shared->local, 352u);
  EXPECT_EQ(config.attention_heads, 96u);

  config.kv_heads = 8;
  const DensePlan refused = PlanDense(config, 9).value();
  EXPECT_FALSE(refused.kv_heads.has_value());
  ASSERT_TRUE(refused.kv_refusal.has_value());
  EXPECT_EQ(refused.kv_refusal->code(), StatusCode::kGeometry);
  EXPECT_THAT(refused.kv_legal_tp, ElementsAre(1, 2, 4, 8, 16, 24));
  EXPECT_EQ(refused.heads, plan.heads);

  config.dense_intermediate_channels = kHuge;
  ExpectRefused(PlanDense(config, 9), StatusCode::kGeometry, {"intermediate_size", std::to_string(kHuge)});
  config = {};
  config.linear_heads = kHuge;
  ExpectRefused(PlanDense(config, 9), StatusCode::kGeometry, {"linear_attn_config.num_heads"});
}

// ---- Loading.

std::string RandomBytes(std::mt19937_64& random, uint64_t count) {
  std::string bytes(count, '\0');
  // No zeros: a byte that was left out must not pass for one that was read.
  for (char& byte : bytes) byte = static_cast<char>(1 + random() % 255);
  return bytes;
}

NamedTensor RandomTensor(std::mt19937_64& random, std::string name, std::string dtype, uint64_t element_bytes,
                         std::vector<uint64_t> shape) {
  uint64_t bytes = element_bytes;
  for (const uint64_t size : shape) bytes *= size;
  return {.name = std::move(name),
          .dtype = std::move(dtype),
          .shape = std::move(shape),
          .data = RandomBytes(random, bytes)};
}

struct OpenTensors {
  MemoryCheckpoint opened;
  const Checkpoint& checkpoint() const { return *opened.checkpoint; }
  uint64_t bytes_read() const { return opened.file_system->bytes_read(); }
};

OpenTensors Open(std::vector<NamedTensor> tensors) {
  CheckpointFiles files;
  files.shards[kFile].tensors = std::move(tensors);
  OpenTensors open{.opened = testing::OpenInMemory(files.Serialize())};
  EXPECT_TRUE(open.opened.checkpoint.has_value()) << open.opened.checkpoint.error().message();
  return open;
}

std::string Bytes(const DenseTensor& part) {
  return {reinterpret_cast<const char*>(part.data.data()), part.data.size_bytes()};
}

// What a part must hold, entry by entry.
std::string ExpectedPart(const NamedTensor& tensor, uint64_t element_bytes, size_t axis,
                         const std::vector<AxisSlice>& sections) {
  uint64_t outer = 1, inner = element_bytes;
  for (size_t i = 0; i < axis; ++i) outer *= tensor.shape[i];
  for (size_t i = axis + 1; i < tensor.shape.size(); ++i) inner *= tensor.shape[i];
  std::string part;
  for (uint64_t o = 0; o < outer; ++o) {
    uint64_t section = 0;
    for (const AxisSlice& s : sections) {
      for (uint64_t i = 0; i < s.local; ++i) {
        const uint64_t entry = o * tensor.shape[axis] + section + s.first + i;
        part += i < s.valid ? tensor.data.substr(entry * inner, inner) : std::string(inner, '\0');
      }
      section += s.size;
    }
  }
  return part;
}

struct Element {
  const char* dtype;
  uint64_t bytes;
};
constexpr Element kElements[] = {{"BF16", 2}, {"F16", 2}, {"F32", 4}, {"F8_E4M3", 1}, {"U8", 1}, {"I64", 8}};

AxisSlice RandomSlice(uint64_t size, int tp, int rank, std::mt19937_64& random) {
  switch (random() % 3) {
    case 0: {
      std::vector<uint64_t> divisors;
      for (uint64_t d = 1; d <= size; ++d) {
        if (size % d == 0) divisors.push_back(d);
      }
      const uint64_t heads = divisors[random() % divisors.size()];
      return HeadSlice(SplitHeads(heads, tp).value(), size / heads, rank).value();
    }
    case 1:
      return WidthSlice(SplitWidth(size, tp, 1).value(), rank).value();
    default:
      return WidthSlice(SplitWidth(size, tp, 8).value(), rank).value();
  }
}

TEST(LoadDenseSlice, RanksTogetherAreTheWholeAndReadNothingElse) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 400; ++round) {
    const Element element = kElements[random() % std::size(kElements)];
    std::vector<uint64_t> shape(1 + random() % 4);
    for (uint64_t& size : shape) size = 1 + random() % 20;
    const NamedTensor tensor = RandomTensor(random, "w", element.dtype, element.bytes, shape);
    const OpenTensors open = Open({RandomTensor(random, "before", "U8", 1, {random() % 9}), tensor});
    const size_t axis = random() % shape.size();
    const int tp = 1 + static_cast<int>(random() % 24);
    const uint64_t seed = random();
    const uint64_t before_all = open.bytes_read();
    uint64_t owned = 0;
    for (int rank = 0; rank < tp; ++rank) {
      std::mt19937_64 same(seed);
      const AxisSlice slice = RandomSlice(shape[axis], tp, rank, same);
      ASSERT_EQ(slice.first, owned) << "ranks follow each other";
      owned += slice.valid;
      const uint64_t before = open.bytes_read();
      const Result<DenseTensor> part = LoadDenseSlice(open.checkpoint(), "w", axis, slice);
      ASSERT_TRUE(part.has_value()) << part.error().message();
      EXPECT_EQ(open.bytes_read() - before, tensor.data.size() / shape[axis] * slice.valid);
      EXPECT_EQ(part->read_bytes, open.bytes_read() - before);
      EXPECT_EQ(DtypeName(part->dtype), element.dtype);
      std::vector<uint64_t> local = shape;
      local[axis] = slice.local;
      EXPECT_EQ(part->shape, local);
      ASSERT_EQ(Bytes(*part), ExpectedPart(tensor, element.bytes, axis, {slice}))
          << fmt::format("rank {} of {}, axis {}", rank, tp, axis);
    }
    ASSERT_EQ(owned, shape[axis]);
    EXPECT_EQ(open.bytes_read() - before_all, tensor.data.size());
  }
}

TEST(LoadDenseSlice, FillsEverySectionOnItsOwn) {
  std::mt19937_64 random(3);
  const uint64_t d = 5, heads = 6, kernel = 4;
  // Fused q, k, v of a convolution, and its transposed copy.
  const NamedTensor conv = RandomTensor(random, "conv", "BF16", 2, {3 * heads * d, 1, kernel});
  const NamedTensor transposed = RandomTensor(random, "transposed", "BF16", 2, {kernel, 3 * heads * d});
  const OpenTensors open = Open({conv, transposed});
  for (int tp = 1; tp <= 8; ++tp) {
    for (int rank = 0; rank < tp; ++rank) {
      const std::vector<AxisSlice> sections(3, HeadSlice(SplitHeads(heads, tp).value(), d, rank).value());
      const DenseTensor rows = LoadDenseSlice(open.checkpoint(), "conv", 0, sections).value();
      EXPECT_EQ(rows.shape, (std::vector<uint64_t>{3 * sections[0].local, 1, kernel}));
      EXPECT_EQ(Bytes(rows), ExpectedPart(conv, 2, 0, sections));
      const DenseTensor columns = LoadDenseSlice(open.checkpoint(), "transposed", 1, sections).value();
      EXPECT_EQ(columns.shape, (std::vector<uint64_t>{kernel, 3 * sections[0].local}));
      EXPECT_EQ(Bytes(columns), ExpectedPart(transposed, 2, 1, sections));
      EXPECT_EQ(columns.read_bytes, 3 * sections[0].valid * kernel * 2);
    }
  }
  // Sections of different widths, one of them whole on every rank.
  const std::vector<AxisSlice> mixed = {WholeAxis(10), WidthSlice(SplitWidth(80, 3, 64).value(), 1).value()};
  EXPECT_EQ(Bytes(LoadDenseSlice(open.checkpoint(), "conv", 0, mixed).value()),
            ExpectedPart(conv, 2, 0, mixed));
}

TEST(LoadDenseSlice, ReplicatesKvHeads) {
  std::mt19937_64 random(4);
  const NamedTensor k = RandomTensor(random, "k", "BF16", 2, {2 * 16, 8});
  const OpenTensors open = Open({k});
  const KvSplit split = SplitKvHeads(8, 2, 8).value();
  for (int rank = 0; rank < 8; ++rank) {
    const DenseTensor part =
        LoadDenseSlice(open.checkpoint(), "k", 0, KvHeadSlice(split, 16, rank).value()).value();
    EXPECT_EQ(Bytes(part), k.data.substr(rank < 4 ? 0 : 256, 256)) << "rank " << rank;
  }
}

TEST(LoadDense, ReadsAWholeTensorAsItIs) {
  std::mt19937_64 random(5);
  const NamedTensor router = RandomTensor(random, "router", "F32", 4, {7, 3});
  const NamedTensor scalar = RandomTensor(random, "scalar", "F32", 4, {});
  const OpenTensors open = Open({router, scalar, RandomTensor(random, "empty", "BF16", 2, {0, 3})});
  const DenseTensor whole = LoadDense(open.checkpoint(), "router").value();
  EXPECT_EQ(Bytes(whole), router.data);
  EXPECT_EQ(whole.shape, router.shape);
  EXPECT_EQ(whole.name, "router");
  EXPECT_EQ(Bytes(LoadDenseSlice(open.checkpoint(), "router", 1, WholeAxis(3)).value()), router.data);
  EXPECT_EQ(Bytes(LoadDense(open.checkpoint(), "scalar").value()), scalar.data);
  EXPECT_EQ(LoadDense(open.checkpoint(), "empty")->data.size_bytes(), 0u);
  const DenseTensor none = LoadDenseSlice(open.checkpoint(), "empty", 1, WholeAxis(3)).value();
  EXPECT_EQ(none.shape, (std::vector<uint64_t>{0, 3}));
  ExpectRefused(LoadDense(open.checkpoint(), "absent"), StatusCode::kUsage, {"'absent'", "/ckpt"});
  ExpectRefused(LoadDenseSlice(open.checkpoint(), "scalar", 0, WholeAxis(1)), StatusCode::kGeometry,
                {"'scalar'", kFile, "axis 0"});
}

TEST(LoadDenseSlice, RefusesAnAxisOfAnotherLength) {
  std::mt19937_64 random(6);
  const HeadSplit split = SplitHeads(96, 9).value();
  const OpenTensors open = Open({RandomTensor(random, "q", "BF16", 2, {99 * 4, 2})});
  // A checkpoint that was padded already: the split must start from the original count.
  ExpectRefused(LoadDenseSlice(open.checkpoint(), "q", 0, HeadSlice(split, 4, 0).value()),
                StatusCode::kFormat, {"'q'", kFile, "axis 0", "396", "384"});
  const std::vector<AxisSlice> two(2, HeadSlice(split, 2, 8).value());
  ExpectRefused(LoadDenseSlice(open.checkpoint(), "q", 0, two), StatusCode::kFormat, {"396", "192 + 192"});
  ExpectRefused(LoadDenseSlice(open.checkpoint(), "q", 0, std::span<const AxisSlice>()), StatusCode::kFormat,
                {"396"});
  ExpectRefused(LoadDenseSlice(open.checkpoint(), "q", 2, WholeAxis(396)), StatusCode::kGeometry,
                {"[396, 2]", "axis 2"});
  EXPECT_EQ(open.checkpoint().FindTensor("q")->shape[0], 396u);
}

TEST(LoadDenseSlice, RefusesHostileSlices) {
  std::mt19937_64 random(7);
  const OpenTensors open = Open({RandomTensor(random, "w", "BF16", 2, {8, 4})});
  const auto load = [&](const AxisSlice& slice) { return LoadDenseSlice(open.checkpoint(), "w", 0, slice); };
  const uint64_t before = open.bytes_read();
  for (const AxisSlice& slice : {AxisSlice{8, 9, 0, 0}, AxisSlice{8, 4, 5, 8}, AxisSlice{8, 0, 8, 7},
                                 AxisSlice{8, kHuge, 1, 8}, AxisSlice{8, 1, kHuge, kHuge}}) {
    ExpectRefused(load(slice), StatusCode::kUsage, {"'w'", kFile, "legal: inside 8 entries"});
  }
  ExpectRefused(load({8, 0, 8, kHuge}), StatusCode::kGeometry, {"2^64"});
  ExpectRefused(load({8, 0, 8, kHuge / 8 + 1}), StatusCode::kGeometry, {"2^64"});
  ExpectRefused(load({8, 0, 8, uint64_t{1} << 50}), StatusCode::kCapacity,
                {"'w'", kFile, "9007199254740992 bytes"});
  const std::vector<AxisSlice> wraps = {WholeAxis(kHuge), WholeAxis(9)};
  ExpectRefused(LoadDenseSlice(open.checkpoint(), "w", 0, wraps), StatusCode::kFormat, {"found 8 entries"});
  EXPECT_EQ(open.bytes_read(), before);
}

TEST(LoadDenseSlice, RefusesDtypesOfPartsOfBytes) {
  std::mt19937_64 random(8);
  NamedTensor packed = RandomTensor(random, "fp4", "F4", 1, {4, 4});
  packed.data.resize(8);
  const OpenTensors open = Open({packed});
  ExpectRefused(LoadDenseSlice(open.checkpoint(), "fp4", 0, WholeAxis(4)), StatusCode::kUnsupported,
                {"'fp4'", kFile, "found F4", "whole bytes"});
  EXPECT_EQ(Bytes(LoadDense(open.checkpoint(), "fp4").value()), packed.data);
}

// ---- A_log.

TEST(LoadALog, TakesAFlatVectorWithOrWithoutAZeroTail) {
  std::mt19937_64 random(9);
  const NamedTensor flat = RandomTensor(random, "flat", "F32", 4, {96});
  NamedTensor tail = RandomTensor(random, "tail", "F32", 4, {128});
  tail.data.replace(96 * 4, 32 * 4, 32 * 4, '\0');
  NamedTensor dirty = tail;
  dirty.name = "dirty";
  dirty.data[101 * 4 + 3] = '\x80';  // -0.0
  const OpenTensors open = Open({flat, tail, dirty, RandomTensor(random, "old", "F32", 4, {1, 1, 96, 1}),
                                 RandomTensor(random, "odd", "F32", 4, {127})});
  const HeadSplit split = SplitHeads(96, 9).value();
  for (int rank = 0; rank < 9; ++rank) {
    std::string expected = flat.data.substr(static_cast<size_t>(rank) * 44, rank < 8 ? 44 : 32);
    expected.resize(44);
    EXPECT_EQ(Bytes(LoadALog(open.checkpoint(), "flat", split, rank).value()), expected);
    expected = tail.data.substr(static_cast<size_t>(rank) * 44, 44);
    EXPECT_EQ(Bytes(LoadALog(open.checkpoint(), "tail", split, rank).value()), expected);
    ExpectRefused(LoadALog(open.checkpoint(), "dirty", split, rank), StatusCode::kFormat,
                  {"'dirty'", kFile, "entry 101", "zeros behind the 96 heads"});
    ExpectRefused(LoadALog(open.checkpoint(), "old", split, rank), StatusCode::kFormat,
                  {"'old'", kFile, "[1, 1, 96, 1]", "[96] or [128] with a zero tail"});
    ExpectRefused(LoadALog(open.checkpoint(), "odd", split, rank), StatusCode::kFormat, {"[127]"});
  }
  ExpectRefused(LoadALog(open.checkpoint(), "flat", split, 9), StatusCode::kUsage, {"legal: 0..8"});
  // 128 heads have no tail.
  ExpectRefused(LoadALog(open.checkpoint(), "flat", SplitHeads(128, 2).value(), 0), StatusCode::kFormat,
                {"legal: [128]"});
  EXPECT_EQ(LoadALog(open.checkpoint(), "tail", SplitHeads(128, 2).value(), 0)->shape[0], 64u);
}

// ---- MXFP8.

double E4M3(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return std::nan("");
  const double value =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(1 + mantissa / 8.0, exponent - 7);
  return (bits & 0x80) != 0 ? -value : value;
}

// value[out][in] of a matrix with `in` columns.
std::vector<double> Dequantize(const std::string& weight, const std::string& scale, uint64_t in) {
  const uint64_t blocks = (in + 31) / 32;
  std::vector<double> values;
  for (uint64_t i = 0; i < weight.size(); ++i) {
    const auto exponent = static_cast<uint8_t>(scale[i / in * blocks + i % in / 32]);
    values.push_back(std::ldexp(E4M3(static_cast<uint8_t>(weight[i])), exponent - 127));
  }
  return values;
}

struct Mxfp8Pair {
  NamedTensor weight;
  NamedTensor scale;
};

Mxfp8Pair RandomMxfp8(std::mt19937_64& random, uint64_t out, uint64_t in, const char* scale_dtype = "U8") {
  Mxfp8Pair pair{.weight = RandomTensor(random, "x.weight", "F8_E4M3", 1, {out, in}),
                 .scale = RandomTensor(random, "x.weight_scale", scale_dtype, 1, {out, (in + 31) / 32})};
  for (char& byte : pair.weight.data)
    byte = static_cast<char>(byte & 0x7E ? byte & 0xFE : 2);  // no NaN, no 0
  for (char& byte : pair.scale.data) byte = static_cast<char>(117 + random() % 20);
  return pair;
}

TEST(LoadMxfp8Slice, ReadsTheWorkedExample) {
  NamedTensor weight{.name = "x.weight", .dtype = "F8_E4M3", .shape = {1, 1}, .data = "\x3C"};
  NamedTensor scale{.name = "x.weight_scale", .dtype = "U8", .shape = {1, 1}, .data = "\x82"};
  const OpenTensors open = Open({weight, scale});
  const Mxfp8Tensor whole = LoadMxfp8(open.checkpoint(), "x.weight").value();
  EXPECT_THAT(Dequantize(Bytes(whole.weight), Bytes(whole.scale), 1), ElementsAre(12.0));
}

void ExpectRanksMakeTheWhole(const OpenTensors& open, const Mxfp8Pair& pair, size_t axis, int tp,
                             uint64_t alignment) {
  const uint64_t out = pair.weight.shape[0], in = pair.weight.shape[1];
  const std::vector<double> whole = Dequantize(pair.weight.data, pair.scale.data, in);
  const WidthSplit split = SplitWidth(pair.weight.shape[axis], tp, alignment).value();
  uint64_t covered = 0;
  for (int rank = 0; rank < tp; ++rank) {
    const AxisSlice slice = WidthSlice(split, rank).value();
    const uint64_t before = open.bytes_read();
    const Result<Mxfp8Tensor> part = LoadMxfp8Slice(open.checkpoint(), "x.weight", axis, slice);
    ASSERT_TRUE(part.has_value()) << part.error().message();
    const uint64_t owned =
        axis == 0 ? slice.valid * (in + (in + 31) / 32) : out * (slice.valid + (slice.valid + 31) / 32);
    EXPECT_EQ(open.bytes_read() - before, owned);
    EXPECT_EQ(part->weight.read_bytes + part->scale.read_bytes, owned);
    const uint64_t columns = part->weight.shape[1];
    ASSERT_EQ(part->scale.shape, (std::vector<uint64_t>{part->weight.shape[0], (columns + 31) / 32}));
    const std::vector<double> values = Dequantize(Bytes(part->weight), Bytes(part->scale), columns);
    for (uint64_t i = 0; i < values.size(); ++i) {
      const uint64_t row = i / columns, column = i % columns, at = axis == 0 ? row : column;
      if (at >= slice.valid) {
        ASSERT_EQ(values[i], 0.0) << "padding of rank " << rank;
        continue;
      }
      const uint64_t from = axis == 0 ? (slice.first + row) * in + column : row * in + slice.first + column;
      ASSERT_EQ(values[i], whole[from]) << "rank " << rank;
      ++covered;
    }
  }
  EXPECT_EQ(covered, out * in);
}

TEST(LoadMxfp8Slice, RanksTogetherAreTheWholeOnBothAxes) {
  std::mt19937_64 random(10);
  for (int round = 0; round < 120; ++round) {
    const Mxfp8Pair pair =
        RandomMxfp8(random, 1 + random() % 70, 1 + random() % 300, round % 2 == 0 ? "U8" : "F8_E8M0");
    const OpenTensors open = Open({pair.weight, pair.scale});
    const int tp = 1 + static_cast<int>(random() % 24);
    ExpectRanksMakeTheWhole(open, pair, 0, tp, random() % 2 == 0 ? 1 : 64);
    ExpectRanksMakeTheWhole(open, pair, 1, tp, random() % 2 == 0 ? 32 : 64);
    const Mxfp8Tensor whole = LoadMxfp8(open.checkpoint(), "x.weight").value();
    EXPECT_EQ(Bytes(whole.weight), pair.weight.data);
    EXPECT_EQ(Bytes(whole.scale), pair.scale.data);
  }
}

TEST(LoadMxfp8Slice, PaddingIsZeroBytes) {
  std::mt19937_64 random(11);
  const Mxfp8Pair pair = RandomMxfp8(random, 3, 96);
  const OpenTensors open = Open({pair.weight, pair.scale});
  for (const size_t axis : {0, 1}) {
    const WidthSplit split = SplitWidth(pair.weight.shape[axis], 2, 64).value();
    const Mxfp8Tensor part =
        LoadMxfp8Slice(open.checkpoint(), "x.weight", axis, WidthSlice(split, 1).value()).value();
    const std::vector<AxisSlice> blocks = {axis == 0 ? AxisSlice{3, 3, 0, 64} : AxisSlice{3, 2, 1, 2}};
    EXPECT_EQ(Bytes(part.scale), ExpectedPart(pair.scale, 1, axis, blocks));
  }
}

TEST(LoadMxfp8Slice, CutsBetweenBlocksOnlyAndOnEveryRankAlike) {
  std::mt19937_64 random(12);
  const Mxfp8Pair pair = RandomMxfp8(random, 4, 96);
  const OpenTensors open = Open({pair.weight, pair.scale});
  const uint64_t before = open.bytes_read();
  for (const int tp : {2, 5, 9, 24}) {
    for (int rank = 0; rank < tp; ++rank) {
      const AxisSlice slice = WidthSlice(SplitWidth(96, tp, 8).value(), rank).value();
      if (slice.local % 32 == 0) continue;
      ExpectRefused(LoadMxfp8Slice(open.checkpoint(), "x.weight", 1, slice), StatusCode::kGeometry,
                    {"'x.weight'", kFile, "multiples of 32"});
    }
  }
  const AxisSlice third = WidthSlice(SplitWidth(48, 3, 16).value(), 1).value();
  const std::vector<AxisSlice> sections = {third, third};
  ExpectRefused(LoadMxfp8Slice(open.checkpoint(), "x.weight", 1, sections), StatusCode::kGeometry,
                {"multiples of 32"});
  // Whole sections whose border lies inside a block.
  const std::vector<AxisSlice> borders = {WholeAxis(48), WholeAxis(48)};
  ExpectRefused(LoadMxfp8Slice(open.checkpoint(), "x.weight", 1, borders), StatusCode::kGeometry,
                {"multiples of 32"});
  EXPECT_EQ(open.bytes_read(), before) << "refused before anything is read";
  const std::vector<AxisSlice> legal = {AxisSlice{64, 32, 32, 64}, AxisSlice{32, 0, 32, 32}};
  const Mxfp8Tensor part = LoadMxfp8Slice(open.checkpoint(), "x.weight", 1, legal).value();
  EXPECT_EQ(Bytes(part.weight), ExpectedPart(pair.weight, 1, 1, legal));
  EXPECT_EQ(Bytes(part.scale), ExpectedPart(pair.scale, 1, 1, {{2, 1, 1, 2}, {1, 0, 1, 1}}));
}

TEST(LoadMxfp8Slice, RefusesWhatIsNoMxfp8) {
  std::mt19937_64 random(13);
  const Mxfp8Pair pair = RandomMxfp8(random, 4, 33);
  const auto refused = [&](std::vector<NamedTensor> tensors, StatusCode code,
                           std::initializer_list<std::string> words) {
    const OpenTensors open = Open(std::move(tensors));
    ExpectRefused(LoadMxfp8(open.checkpoint(), "x.weight"), code, words);
    ExpectRefused(LoadMxfp8Slice(open.checkpoint(), "x.weight", 0, WholeAxis(4)), code, words);
  };
  refused({pair.weight}, StatusCode::kFormat, {"'x.weight'", kFile, "'x.weight_scale'"});
  refused({pair.scale}, StatusCode::kUsage, {"'x.weight'"});
  Mxfp8Pair other = pair;
  other.weight = RandomTensor(random, "x.weight", "BF16", 2, {4, 33});
  refused({other.weight, pair.scale}, StatusCode::kFormat, {"BF16 [4, 33]", "F8_E4M3 [out, in]"});
  other.weight = RandomTensor(random, "x.weight", "F8_E4M3", 1, {4, 33, 1});
  refused({other.weight, pair.scale}, StatusCode::kFormat, {"[4, 33, 1]"});
  other.scale = RandomTensor(random, "x.weight_scale", "U8", 1, {4, 1});
  refused({pair.weight, other.scale}, StatusCode::kFormat, {"'x.weight_scale'", "U8 [4, 1]", "[4, 2]"});
  other.scale = RandomTensor(random, "x.weight_scale", "BF16", 2, {4, 2});
  refused({pair.weight, other.scale}, StatusCode::kFormat, {"BF16 [4, 2]", "U8 or F8_E8M0"});
  const OpenTensors open = Open({pair.weight, pair.scale});
  ExpectRefused(LoadMxfp8Slice(open.checkpoint(), "x.weight", 2, WholeAxis(1)), StatusCode::kGeometry,
                {"axis 2"});
  ExpectRefused(LoadMxfp8Slice(open.checkpoint(), "x.weight", 1, AxisSlice{33, 32, kHuge, 64}),
                StatusCode::kUsage, {"inside 33 entries"});
}

// ---- Faults.

TEST(DenseFaults, ShortReadsGiveTheSameAndOnlyOwnedBytesCanFail) {
  std::mt19937_64 random(14);
  const Mxfp8Pair pair = RandomMxfp8(random, 6, 96);
  CheckpointFiles files;
  files.shards[kFile].tensors = {pair.weight, pair.scale};
  MemoryFileSystem disk;
  disk.Write("/m/" + kFile, files.Serialize().at(kFile));
  const auto open = [&](const testing::ReadFaults& faults) {
    disk.SetFaults("/m/" + kFile, faults);
    return Checkpoint::Open("/m", {.file_system = &disk}).value();
  };
  const WidthSplit split = SplitWidth(96, 3, 32).value();
  const auto load = [&](const Checkpoint& checkpoint, int rank) {
    return LoadMxfp8Slice(checkpoint, "x.weight", 1, WidthSlice(split, rank).value());
  };
  const Checkpoint good = open({});
  const Mxfp8Tensor expected = load(good, 1).value();
  for (const size_t bytes : {1, 7}) {
    const Mxfp8Tensor part =
        load(open({.max_bytes_per_read = bytes, .fails_at = {}, .ends_at = {}}), 1).value();
    EXPECT_EQ(Bytes(part.weight), Bytes(expected.weight));
    EXPECT_EQ(Bytes(part.scale), Bytes(expected.scale));
  }
  // Byte 40 of row 5 belongs to rank 1, and so does the scale of block 1 of row 5.
  const uint64_t weight_byte = good.FindTensor("x.weight")->offset_bytes + 5 * 96 + 40;
  const uint64_t scale_byte = good.FindTensor("x.weight_scale")->offset_bytes + 5 * 3 + 1;
  for (const uint64_t place : {weight_byte, scale_byte}) {
    ExpectRefused(load(open({.max_bytes_per_read = 0, .fails_at = place, .ends_at = {}}), 1), StatusCode::kIo,
                  {kFile});
    ExpectRefused(load(open({.max_bytes_per_read = 0, .fails_at = {}, .ends_at = place}), 1), StatusCode::kIo,
                  {kFile});
  }
  // The last byte of the file is the scale of rank 2: nobody else trips over it.
  const uint64_t last = good.files()[0].size_bytes - 1;
  const Checkpoint bad_end = open({.max_bytes_per_read = 0, .fails_at = last, .ends_at = {}});
  EXPECT_TRUE(load(bad_end, 0).has_value());
  EXPECT_TRUE(load(bad_end, 1).has_value());
  ExpectRefused(load(bad_end, 2), StatusCode::kIo, {kFile});
  ExpectRefused(LoadMxfp8(bad_end, "x.weight"), StatusCode::kIo, {kFile});
  ExpectRefused(LoadDense(bad_end, "x.weight_scale"), StatusCode::kIo, {kFile});
  // The open file could still be read, but it is not the one under that name any more.
  disk.Remove("/m/" + kFile);
  ExpectRefused(load(good, 0), StatusCode::kIo, {kFile, "replaced or removed"});
  ExpectRefused(LoadDense(good, "x.weight"), StatusCode::kIo, {kFile, "replaced or removed"});
}

// ---- What the ranks compute.

NamedTensor RandomBf16(std::mt19937_64& random, std::string name, uint64_t out, uint64_t in) {
  NamedTensor tensor{.name = std::move(name), .dtype = "BF16", .shape = {out, in}, .data = {}};
  std::normal_distribution<float> normal;
  for (uint64_t i = 0; i < out * in; ++i) {
    const uint16_t bits = FloatToBf16(normal(random));
    tensor.data.append(reinterpret_cast<const char*>(&bits), 2);
  }
  return tensor;
}

struct Matrix {
  uint64_t out = 0;
  uint64_t in = 0;
  std::vector<double> values;  // [out][in]

  std::vector<double> operator()(std::span<const double> x) const {
    std::vector<double> y(out);
    for (uint64_t o = 0; o < out; ++o) {
      for (uint64_t i = 0; i < in; ++i) y[o] += values[o * in + i] * x[i];
    }
    return y;
  }
};

Matrix AsMatrix(const DenseTensor& tensor) {
  Matrix matrix{.out = tensor.shape[0], .in = tensor.shape[1], .values = {}};
  for (uint64_t i = 0; i < matrix.out * matrix.in; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, tensor.data.data() + 2 * i, 2);
    matrix.values.push_back(Bf16ToFloat(bits));
  }
  return matrix;
}

void Accumulate(std::vector<double>& sum, const std::vector<double>& part) {
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
}

void ExpectClose(const std::vector<double>& expected, const std::vector<double>& found,
                 const std::string& what) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += std::pow(expected[i] - found[i], 2);
    norm += std::pow(expected[i], 2);
  }
  ASSERT_GT(norm, 0) << what;
  EXPECT_LE(std::sqrt(difference / norm), 1e-13) << what;
}

std::vector<double> Activated(const Activation& activation, const std::vector<double>& gate,
                              const std::vector<double>& up) {
  std::vector<double> values;
  for (size_t i = 0; i < gate.size(); ++i) values.push_back(Activate(activation, gate[i], up[i]));
  return values;
}

TEST(DenseSum, RanksOfAnMlpAddUpToTheWhole) {
  std::mt19937_64 random(15);
  const uint64_t hidden = 24, width = 100;
  const OpenTensors open =
      Open({RandomBf16(random, "gate", width, hidden), RandomBf16(random, "up", width, hidden),
            RandomBf16(random, "down", hidden, width)});
  const auto load = [&](const char* name, size_t axis, const AxisSlice& slice) {
    return AsMatrix(LoadDenseSlice(open.checkpoint(), name, axis, slice).value());
  };
  std::vector<double> x(hidden);
  for (double& value : x) value = std::normal_distribution<double>()(random);
  const AxisSlice all = WholeAxis(width);
  for (const char* name : {"silu", "gelu", "situ:4,25", "swiglu-oai"}) {
    const Activation activation = ParseActivation(name).value();
    EXPECT_EQ(Activate(activation, 0.0, 0.0), 0.0) << name;
    const std::vector<double> whole =
        load("down", 1, all)(Activated(activation, load("gate", 0, all)(x), load("up", 0, all)(x)));
    for (int tp = 1; tp <= 24; ++tp) {
      std::vector<double> sum(hidden);
      const WidthSplit split = SplitWidth(width, tp, 16).value();
      for (int rank = 0; rank < tp; ++rank) {
        const AxisSlice slice = WidthSlice(split, rank).value();
        const std::vector<double> inner =
            Activated(activation, load("gate", 0, slice)(x), load("up", 0, slice)(x));
        for (uint64_t i = slice.valid; i < slice.local; ++i) ASSERT_EQ(inner[i], 0.0);
        Accumulate(sum, load("down", 1, slice)(inner));
      }
      ExpectClose(whole, sum, fmt::format("{} at tp {}", name, tp));
    }
  }
}

constexpr uint64_t kHeadDim = 4, kTokens = 3, kModelWidth = 16;

// Softmax attention of `heads` heads for the last token; head h uses k/v head h / group.
std::vector<double> Attend(const Matrix& q, const Matrix& k, const Matrix& v, uint64_t group,
                           const std::vector<std::vector<double>>& x) {
  const std::vector<double> query = q(x.back());
  std::vector<double> output(q.out);
  for (uint64_t h = 0; h < q.out / kHeadDim; ++h) {
    const uint64_t source = h / group * kHeadDim;
    double total = 0;
    for (const std::vector<double>& token : x) {
      const std::vector<double> key = k(token), value = v(token);
      double dot = 0;
      for (uint64_t i = 0; i < kHeadDim; ++i) dot += query[h * kHeadDim + i] * key[source + i];
      const double weight = std::exp(dot / 16);
      total += weight;
      for (uint64_t i = 0; i < kHeadDim; ++i) output[h * kHeadDim + i] += weight * value[source + i];
    }
    for (uint64_t i = 0; i < kHeadDim; ++i) output[h * kHeadDim + i] /= total;
  }
  return output;
}

void ExpectAttentionSum(uint64_t heads, uint64_t kv_heads, int tp, std::mt19937_64& random) {
  const uint64_t group = heads / kv_heads;
  const OpenTensors open = Open({RandomBf16(random, "q", heads * kHeadDim, kModelWidth),
                                 RandomBf16(random, "k", kv_heads * kHeadDim, kModelWidth),
                                 RandomBf16(random, "v", kv_heads * kHeadDim, kModelWidth),
                                 RandomBf16(random, "o", kModelWidth, heads * kHeadDim)});
  const auto load = [&](const char* name, size_t axis, const AxisSlice& slice) {
    return AsMatrix(LoadDenseSlice(open.checkpoint(), name, axis, slice).value());
  };
  std::vector<std::vector<double>> x(kTokens, std::vector<double>(kModelWidth));
  for (std::vector<double>& token : x) {
    for (double& value : token) value = std::normal_distribution<double>()(random);
  }
  const AxisSlice all = WholeAxis(heads * kHeadDim), all_kv = WholeAxis(kv_heads * kHeadDim);
  const std::vector<double> whole =
      load("o", 1, all)(Attend(load("q", 0, all), load("k", 0, all_kv), load("v", 0, all_kv), group, x));
  const HeadSplit split = SplitHeads(heads, tp).value();
  const KvSplit kv = SplitKvHeads(heads, kv_heads, tp).value();
  std::vector<double> sum(kModelWidth);
  for (int rank = 0; rank < tp; ++rank) {
    const AxisSlice own = HeadSlice(split, kHeadDim, rank).value();
    const AxisSlice own_kv = KvHeadSlice(kv, kHeadDim, rank).value();
    const std::vector<double> output = Attend(load("q", 0, own), load("k", 0, own_kv), load("v", 0, own_kv),
                                              kv.replicas > 1 ? split.local_heads : group, x);
    const Matrix o = load("o", 1, own);
    for (uint64_t i = 0; i < o.values.size(); ++i) {
      if (i % own.local < own.valid) continue;
      ASSERT_EQ(o.values[i], 0.0);
    }
    Accumulate(sum, o(output));
  }
  ExpectClose(whole, sum, fmt::format("{} heads, {} k/v heads, tp {}", heads, kv_heads, tp));
}

TEST(DenseSum, RanksOfAnAttentionAddUpToTheWhole) {
  std::mt19937_64 random(16);
  for (int tp = 1; tp <= 12; ++tp) ExpectAttentionSum(6, 6, tp, random);   // padded
  for (int tp = 1; tp <= 5; ++tp) ExpectAttentionSum(5, 1, tp, random);    // one for all
  for (const int tp : {1, 2, 4, 8}) ExpectAttentionSum(8, 2, tp, random);  // plain, then replicated
  ExpectAttentionSum(14, 7, 4, random);                                    // padded by whole groups
}

}  // namespace
}  // namespace espalier
