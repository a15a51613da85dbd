// SPDX-License-Identifier: Apache-2.0
//
// Layouts are views of the same thing: one random model written in every layout that can hold it gives the
// same bytes for every matrix and every legal extent, and the same outputs.
#include <espalier/backend.h>
#include <espalier/experts.h>
#include <espalier/moe.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "support/random_experts.h"
#include "support/refusal_cases.h"

namespace espalier::testing {
namespace {

using Variants = std::vector<std::pair<std::string, CheckpointFiles>>;

// Every way to write whole experts that keeps what the model holds.
Variants StockVariants(const CheckpointModel& model) {
  return {
      {"one file", WriteStock(model)},
      {"shards with index, parts spread", WriteStock(model, {.shards = 3, .index = true, .spread = true})},
      {"shards without index", WriteStock(model, {.shards = 2})},
      {"w1 w3 w2", WriteStock(model, {.experts_path = "block_sparse_moe.experts", .w_names = true})},
      {"language model prefix", WriteStock(model, {.prefix = "model.language_model.layers"})},
      {"backbone prefix", WriteStock(model, {.prefix = "backbone.blocks", .experts_path = "moe.experts"})},
      {"spliced moe", WriteStock(model, {.experts_path = "mlp.moe.experts"})},
      {"feed_forward", WriteStock(model, {.prefix = "layers", .experts_path = "feed_forward.experts"})},
      {"no block", WriteStock(model, {.experts_path = "experts"})}};
}

uint64_t SliceWidth(const MoeLayer& layer) { return layer.intermediate_channels / layer.slices; }

// Names the first difference of two matrices, empty when there is none.
std::string Difference(const MatrixModel& expected, const MatrixModel& actual) {
  if (expected.bits != actual.bits) return fmt::format("bits {} against {}", expected.bits, actual.bits);
  if (expected.codebook != actual.codebook) return "another codebook";
  if (expected.in_channels != actual.in_channels || expected.out_channels != actual.out_channels) {
    return fmt::format("{} x {} against {} x {}", expected.in_channels, expected.out_channels,
                       actual.in_channels, actual.out_channels);
  }
  const std::pair<const char*, std::pair<const std::vector<uint16_t>*, const std::vector<uint16_t>*>>
      parts[] = {{"codes", {&expected.codes, &actual.codes}},
                 {"suh", {&expected.suh, &actual.suh}},
                 {"svh", {&expected.svh, &actual.svh}},
                 {"bias", {&expected.bias, &actual.bias}}};
  for (const auto& [name, vectors] : parts) {
    if (vectors.first->size() != vectors.second->size()) {
      return fmt::format("{}: {} words against {}", name, vectors.first->size(), vectors.second->size());
    }
    for (size_t i = 0; i < vectors.first->size(); ++i) {
      if ((*vectors.first)[i] != (*vectors.second)[i]) {
        return fmt::format("{}[{}]: {:04x} against {:04x}", name, i, (*vectors.first)[i],
                           (*vectors.second)[i]);
      }
    }
  }
  return "";
}

void ExpectMatrix(const Checkpoint& checkpoint, size_t layer, uint32_t expert, Projection projection,
                  const SliceExtent& extent, const MatrixModel& expected) {
  const Result<MatrixSource> source = checkpoint.Source(layer, expert, projection, extent);
  ASSERT_TRUE(source.has_value()) << source.error().message();
  const Result<MatrixModel> read = ReadSource(checkpoint, *source);
  ASSERT_TRUE(read.has_value()) << read.error().message();
  EXPECT_EQ(Difference(expected, *read), "") << source->name << " slice " << extent.slice << " ["
                                             << extent.first_channel << ", +" << extent.channels << ")";
}

// Whole matrices, the first and last 128 channels and a few random extents of every slice of the checkpoint
// against the model, whose experts are whole or cut in the same way.
void ExpectSameSources(const Checkpoint& checkpoint, const CheckpointModel& model, std::mt19937_64& random) {
  ASSERT_EQ(checkpoint.layers().size(), model.layers.size());
  for (size_t l = 0; l < model.layers.size(); ++l) {
    const MoeLayer& layer = checkpoint.layers()[l];
    ASSERT_EQ(layer.number, model.layers[l].number);
    ASSERT_EQ(layer.experts, model.layers[l].experts.size());
    ASSERT_EQ(layer.slices, model.slices);
    ASSERT_EQ(layer.hidden_channels, model.hidden_channels);
    ASSERT_EQ(layer.intermediate_channels, model.intermediate_channels);
    ASSERT_EQ(layer.has_gate, model.has_gate);
    const uint64_t blocks = SliceWidth(layer) / 128;
    for (uint32_t e = 0; e < layer.experts; ++e) {
      for (int p = model.has_gate ? 0 : 1; p < kNumProjections; ++p) {
        const Projection projection = static_cast<Projection>(p);
        for (uint32_t s = 0; s < layer.slices; ++s) {
          const MatrixModel& expected = model.layers[l].experts[e].slices[s][p];
          const uint64_t first = random() % blocks;
          const uint64_t count = 1 + random() % (blocks - first);
          const std::pair<uint64_t, uint64_t> extents[] = {
              {0, blocks}, {0, 1}, {blocks - 1, 1}, {first, count}};
          for (const auto& [begin, length] : extents) {
            ExpectMatrix(checkpoint, l, e, projection, {s, begin * 128, length * 128},
                         CutIntermediate(expected, projection, begin * 128, length * 128));
          }
        }
      }
    }
  }
}

std::vector<double> Run(const Checkpoint& checkpoint, size_t layer, test::MoeCall call,
                        const char* executor) {
  const Result<PreparedExperts> experts = LoadExperts(checkpoint, layer);
  EXPECT_TRUE(experts.has_value()) << experts.error().message();
  if (!experts) return {};
  call.output = std::string_view(executor) == "reference" ? Dtype::kF64 : Dtype::kF32;
  return test::RunCall(*experts, call, executor).values;
}

// Outputs of every layer. With the same segments the bits are the same; cut into slices, sums run in another
// order.
void ExpectSameOutputs(const Checkpoint& expected, const Checkpoint& actual, bool same_segments,
                       uint64_t seed) {
  std::mt19937_64 random(seed);
  for (size_t l = 0; l < expected.layers().size(); ++l) {
    const MoeLayer& layer = expected.layers()[l];
    const Result<PreparedExperts> experts = LoadExperts(expected, l);
    ASSERT_TRUE(experts.has_value()) << experts.error().message();
    const test::MoeCall call = test::RandomCall(*experts, /*num_tokens=*/5, /*top_k=*/2, random());
    const std::vector<double> a = Run(expected, l, call, "reference");
    const std::vector<double> b = Run(actual, l, call, "reference");
    const std::vector<double> c = Run(expected, l, call, "cpu");
    const std::vector<double> d = Run(actual, l, call, "cpu");
    ASSERT_EQ(a.size(), call.num_tokens * layer.valid_hidden_channels);
    ASSERT_EQ(a.size(), b.size());
    ASSERT_EQ(c.size(), d.size());
    if (same_segments) {
      EXPECT_EQ(a, b);
      EXPECT_EQ(c, d);
    }
    EXPECT_LE(test::Compare(a, b).rel_l2, 1e-12);
    EXPECT_LE(test::Compare(c, d).rel_l2, 2e-6);
    EXPECT_LE(test::Compare(a, d).rel_l2, 2e-6);
  }
}

struct Opened {
  std::string name;
  MemoryCheckpoint memory;
  const Checkpoint& checkpoint() const { return *memory.checkpoint; }
};

Opened OpenOrFail(const std::string& name, const CheckpointFiles& files) {
  Opened opened{name, OpenInMemory(files.Serialize())};
  EXPECT_TRUE(opened.memory.checkpoint.has_value())
      << name << ": " << opened.memory.checkpoint.error().message();
  return opened;
}

ModelShape RandomShape(std::mt19937_64& random) {
  ModelShape shape;
  const int64_t first = static_cast<int64_t>(random() % 4);
  shape.layers = {first, first + 1 + static_cast<int64_t>(random() % 3)};
  shape.experts = 1 + static_cast<uint32_t>(random() % 4);
  shape.hidden_channels = 128 * (1 + random() % 3);
  shape.intermediate_channels = 128 * (1 + random() % 5);
  shape.dense = random() % 2 == 0;
  return shape;
}

constexpr int kRounds = 6;

TEST(LayoutViewsTest, StockVariantsHoldTheSameBytes) {
  std::mt19937_64 random(1);
  for (int round = 0; round < kRounds; ++round) {
    ModelShape shape = RandomShape(random);
    shape.bias = round % 2 == 1;
    shape.has_gate = round % 3 != 2;
    const CheckpointModel model = RandomModel(shape, random());
    std::vector<Opened> opened;
    for (const auto& [name, files] : StockVariants(model)) {
      SCOPED_TRACE(fmt::format("round {}, {}", round, name));
      opened.push_back(OpenOrFail(name, files));
      ASSERT_TRUE(opened.back().memory.checkpoint.has_value());
      EXPECT_EQ(opened.back().checkpoint().layout_name(), "stock");
      ExpectSameSources(opened.back().checkpoint(), model, random);
      ExpectSameOutputs(opened.front().checkpoint(), opened.back().checkpoint(), true, 100 + round);
    }
  }
}

TEST(LayoutViewsTest, LegacySignsAreVectorsOfOnes) {
  std::mt19937_64 random(2);
  for (int round = 0; round < kRounds; ++round) {
    ModelShape shape = RandomShape(random);
    shape.unit_signs = true;
    const CheckpointModel model = RandomModel(shape, random());
    const Opened plain = OpenOrFail("stock", WriteStock(model));
    const Opened legacy = OpenOrFail("legacy", WriteStock(model, {.legacy_signs = true}));
    ASSERT_TRUE(plain.memory.checkpoint.has_value() && legacy.memory.checkpoint.has_value());
    ExpectSameSources(legacy.checkpoint(), model, random);
    ExpectSameOutputs(plain.checkpoint(), legacy.checkpoint(), true, 200 + round);
  }
}

TEST(LayoutViewsTest, R7IsStockWithSharedVectors) {
  std::mt19937_64 random(3);
  for (int round = 0; round < kRounds; ++round) {
    ModelShape shape = RandomShape(random);
    shape.layers = {3, 4};
    shape.codebook = Codebook::kMcg;
    shape.shared_hidden = true;
    shape.same_gate_up_suh = true;
    const CheckpointModel model = RandomModel(shape, random());
    const Opened stock = OpenOrFail("stock", WriteStock(model));
    const Opened r7 = OpenOrFail("r7", WriteR7(model));
    ASSERT_TRUE(stock.memory.checkpoint.has_value() && r7.memory.checkpoint.has_value());
    EXPECT_EQ(r7.checkpoint().layout_name(), "r7");
    ExpectSameSources(r7.checkpoint(), model, random);
    ExpectSameOutputs(stock.checkpoint(), r7.checkpoint(), true, 300 + round);
  }
}

TEST(LayoutViewsTest, Exl3V1IsStockTransposed) {
  std::mt19937_64 random(4);
  for (int round = 0; round < 2 * kRounds; ++round) {
    ModelShape shape = RandomShape(random);
    shape.layers = {1, 3};
    shape.codebook = Codebook::kMcg;
    shape.bits = 2 + round % 5;
    shape.shared_hidden = round % 2 == 0;
    shape.dense = false;
    Exl3V1Options options;
    options.per_expert_vectors = !shape.shared_hidden;
    options.row_alignment = round % 3 == 0 ? 4096 : 512 * (1 + random() % 40);
    if (round % 3 == 1) options.barriers = std::vector<uint64_t>{};
    const CheckpointModel model = RandomModel(shape, random());
    const Opened stock = OpenOrFail("stock", WriteStock(model));
    const Opened container = OpenOrFail("exl3-v1", WriteExl3V1(model, options));
    ASSERT_TRUE(stock.memory.checkpoint.has_value() && container.memory.checkpoint.has_value());
    EXPECT_EQ(container.checkpoint().layout_name(), "exl3-v1");
    ExpectSameSources(container.checkpoint(), model, random);
    ExpectSameOutputs(stock.checkpoint(), container.checkpoint(), true, 400 + round);
  }
}

// A whole model cut at 128 borders: the slices share the hidden-side vectors, so the sum over them is the
// whole.
TEST(LayoutViewsTest, RankSlicedIsStockCutApart) {
  std::mt19937_64 random(5);
  for (int round = 0; round < kRounds; ++round) {
    ModelShape shape = RandomShape(random);
    const uint32_t slices = 2 + static_cast<uint32_t>(round % 3);
    shape.layers = {3, 4};
    shape.intermediate_channels = 128 * slices * (1 + random() % 2);
    shape.codebook = Codebook::kMcg;
    shape.bits_by_expert = true;
    shape.shared_hidden = true;
    const CheckpointModel whole = RandomModel(shape, random());
    const CheckpointModel cut = CutIntoSlices(whole, slices);
    const Opened stock = OpenOrFail("stock", WriteStock(whole));
    ASSERT_TRUE(stock.memory.checkpoint.has_value());
    const Variants variants = {{"per expert", WriteRankSliced(cut)},
                               {"index, no markers", WriteRankSliced(cut, {.markers = false, .index = true})},
                               {"other field name", WriteRankSliced(cut, {.bits_per_expert_name = true})},
                               {"shared", WriteRankSliced(cut, {.shared_h = true})}};
    for (const auto& [name, files] : variants) {
      SCOPED_TRACE(fmt::format("round {}, {}", round, name));
      const Opened sliced = OpenOrFail(name, files);
      ASSERT_TRUE(sliced.memory.checkpoint.has_value());
      EXPECT_EQ(sliced.checkpoint().layout_name(), "rank-sliced");
      ExpectSameSources(sliced.checkpoint(), cut, random);
      ExpectSameOutputs(stock.checkpoint(), sliced.checkpoint(), false, 500 + round);
    }
  }
}

// Slices quantized independently of each other, as the real packs are.
TEST(LayoutViewsTest, SharedRotationIsPerExpertWithEqualVectors) {
  std::mt19937_64 random(6);
  for (int round = 0; round < kRounds; ++round) {
    ModelShape shape = RandomShape(random);
    shape.layers = {3, 5};
    shape.slices = 1 + static_cast<uint32_t>(round % 4);
    shape.intermediate_channels = 128 * shape.slices;
    shape.codebook = Codebook::kMcg;
    shape.bits_by_expert = true;
    shape.shared_hidden = true;
    shape.same_gate_up_suh = round % 2 == 0;
    const CheckpointModel model = RandomModel(shape, random());
    CheckpointFiles apart_files = WriteRankSliced(model);
    CheckpointFiles shared_files =
        WriteRankSliced(model, {.shared_h = true, .up_vectors = !shape.same_gate_up_suh});
    // Layers 3 and 5 only: the range of the config would promise layer 4.
    for (CheckpointFiles* files : {&apart_files, &shared_files}) {
      files->config().at("hybrid_tr3_tail").erase("moe_layers");
    }
    const Opened apart = OpenOrFail("per expert", apart_files);
    const Opened shared = OpenOrFail("shared", shared_files);
    ASSERT_TRUE(apart.memory.checkpoint.has_value() && shared.memory.checkpoint.has_value());
    ExpectSameSources(apart.checkpoint(), model, random);
    ExpectSameSources(shared.checkpoint(), model, random);
    ExpectSameOutputs(apart.checkpoint(), shared.checkpoint(), true, 600 + round);
  }
}

// An expert's own vector wins over the layer's.
TEST(LayoutViewsTest, OwnVectorBeforeTheSharedOne) {
  ModelShape shape{.layers = {3}, .experts = 3, .intermediate_channels = 256, .slices = 2};
  shape.codebook = Codebook::kMcg;
  shape.bits_by_expert = true;
  shape.shared_hidden = true;
  CheckpointModel model = RandomModel(shape, 77);
  CheckpointFiles files = WriteRankSliced(model, {.shared_h = true});
  MatrixModel& gate = model.layers[0].experts[1].slices[1][0];
  for (uint16_t& value : gate.suh) value = static_cast<uint16_t>(value ^ 0x8001);
  std::string bytes(gate.suh.size() * 2, '\0');
  std::memcpy(bytes.data(), gate.suh.data(), bytes.size());
  files.Add("model-layer-003.safetensors",
            {"model.layers.3.mlp.experts.1.gate_proj.rank1.suh", "F16", {gate.suh.size()}, bytes});
  const Opened opened = OpenOrFail("own vector", files);
  ASSERT_TRUE(opened.memory.checkpoint.has_value());
  std::mt19937_64 random(7);
  ExpectSameSources(opened.checkpoint(), model, random);
}

// Off the grid, across slices, empty or outside: refused in every layout, whatever the numbers.
TEST(LayoutViewsTest, IllegalExtentsAreRefused) {
  for (const Base base : AllBases()) {
    const Opened opened = OpenOrFail(BaseName(base), MakeBase(base));
    ASSERT_TRUE(opened.memory.checkpoint.has_value());
    const MoeLayer& layer = opened.checkpoint().layers()[0];
    const uint64_t width = SliceWidth(layer);
    const SliceExtent extents[] = {{0, 0, 0},
                                   {0, 64, 64},
                                   {0, 0, 64},
                                   {0, 64, 128},
                                   {0, 0, 144},
                                   {0, width, 128},
                                   {0, 0, width + 128},
                                   {0, 128, width},
                                   {layer.slices, 0, 128},
                                   {0, ~uint64_t{0} - 127, 128},
                                   {0, 128, ~uint64_t{0} - 127},
                                   {~uint32_t{0}, 0, 128}};
    for (const SliceExtent& extent : extents) {
      for (const Projection projection : {Projection::kGate, Projection::kUp, Projection::kDown}) {
        const Result<MatrixSource> source = opened.checkpoint().Source(0, 0, projection, extent);
        ASSERT_FALSE(source.has_value()) << opened.name << " slice " << extent.slice << " ["
                                         << extent.first_channel << ", +" << extent.channels << ")";
        EXPECT_EQ(source.error().code(), StatusCode::kGeometry);
      }
    }
  }
}

// Equal share keys with equal ranges promise equal bytes: a loader that trusts them must not go wrong.
TEST(LayoutViewsTest, ShareKeysTellTheTruth) {
  for (const Base base : AllBases()) {
    const Opened opened = OpenOrFail(BaseName(base), MakeBase(base));
    ASSERT_TRUE(opened.memory.checkpoint.has_value());
    const Checkpoint& checkpoint = opened.checkpoint();
    std::map<std::pair<uint64_t, uint64_t>, std::vector<uint16_t>> known;  // (key, channels) -> vector
    size_t shared = 0;
    for (size_t l = 0; l < checkpoint.layers().size(); ++l) {
      const MoeLayer& layer = checkpoint.layers()[l];
      for (uint32_t e = 0; e < layer.experts; ++e) {
        for (int p = 0; p < kNumProjections; ++p) {
          for (uint32_t s = 0; s < layer.slices; ++s) {
            const Result<MatrixSource> source =
                checkpoint.Source(l, e, static_cast<Projection>(p), {s, 0, SliceWidth(layer)});
            ASSERT_TRUE(source.has_value());
            const Result<MatrixModel> matrix = ReadSource(checkpoint, *source);
            ASSERT_TRUE(matrix.has_value());
            for (const auto& [vector, values] :
                 {std::pair{&source->suh, &matrix->suh}, {&source->svh, &matrix->svh}}) {
              if (vector->share_key == 0) continue;
              const auto [entry, inserted] =
                  known.emplace(std::pair{vector->share_key, values->size()}, *values);
              if (inserted) continue;
              ++shared;
              EXPECT_EQ(entry->second, *values) << BaseName(base) << ": " << source->name;
            }
          }
        }
      }
    }
    const bool has_shared = base == Base::kSharedH || base == Base::kR7 || base == Base::kExl3V1;
    EXPECT_EQ(shared > 0, has_shared) << BaseName(base);
  }
}

}  // namespace
}  // namespace espalier::testing
