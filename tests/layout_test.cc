// SPDX-License-Identifier: Apache-2.0
//
// What the neutral description says of each layout: layers and labels, sizes, bits and codebook per matrix,
// dense matrices, names, legal tensor-parallel sizes. On the fixtures and on generated checkpoints.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "support/refusal_cases.h"
#include "support/temporary_directory.h"

namespace espalier::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::filesystem::path Fixture(const std::string& name) {
  return std::filesystem::path(ESPALIER_TEST_DATA) / "fixtures" / name;
}

Checkpoint OpenFixture(const std::string& name) {
  Result<Checkpoint> opened = Checkpoint::Open(Fixture(name));
  EXPECT_TRUE(opened.has_value()) << opened.error().message();
  return *std::move(opened);
}

std::vector<std::string> Labels(const Checkpoint& checkpoint) {
  std::vector<std::string> labels;
  for (const MoeLayer& layer : checkpoint.layers()) labels.push_back(layer.label);
  return labels;
}

std::vector<std::string> LinearNames(const Checkpoint& checkpoint) {
  std::vector<std::string> names;
  for (const LinearInfo& linear : checkpoint.linears()) names.push_back(linear.name);
  return names;
}

std::vector<std::string> Errors(const Checkpoint& checkpoint) {
  std::vector<std::string> errors;
  for (const Problem& problem : checkpoint.problems()) {
    if (problem.severity == Problem::Severity::kError)
      errors.push_back(problem.tensor + ": " + problem.message);
  }
  return errors;
}

// "K codebook" of one matrix.
std::string Format(const Checkpoint& checkpoint, size_t layer, uint32_t expert, Projection projection,
                   uint32_t slice = 0) {
  const MatrixInfo info = checkpoint.Matrix(layer, expert, projection, slice);
  return fmt::format("{} {}", info.bits, CodebookName(info.codebook));
}

// Every number from 1 to last.
std::vector<int> UpTo(int last) {
  std::vector<int> numbers;
  for (int n = 1; n <= last; ++n) numbers.push_back(n);
  return numbers;
}

// What each fixture is, from its README and config.
struct FixtureFacts {
  const char* name;
  const char* layout;
  std::vector<std::string> labels;
  uint32_t experts;
  uint32_t slices;
  uint64_t hidden;
  uint64_t intermediate;
  uint64_t valid_hidden;
  uint64_t valid_intermediate;
  std::vector<int> legal_tp;
  size_t linears;
};

class FixtureTest : public ::testing::TestWithParam<FixtureFacts> {};

TEST_P(FixtureTest, IsDescribed) {
  const FixtureFacts& facts = GetParam();
  const Checkpoint checkpoint = OpenFixture(facts.name);
  EXPECT_EQ(checkpoint.layout_name(), facts.layout);
  EXPECT_EQ(Labels(checkpoint), facts.labels);
  EXPECT_THAT(Errors(checkpoint), IsEmpty());
  EXPECT_EQ(checkpoint.LegalTpSizes(), facts.legal_tp);
  EXPECT_EQ(checkpoint.linears().size(), facts.linears);
  for (size_t l = 0; l < checkpoint.layers().size(); ++l) {
    const MoeLayer& layer = checkpoint.layers()[l];
    EXPECT_EQ(layer.prefix, "model.layers");
    EXPECT_EQ(std::to_string(layer.number), layer.label);
    EXPECT_EQ(layer.experts, facts.experts);
    EXPECT_EQ(layer.slices, facts.slices);
    EXPECT_EQ(layer.hidden_channels, facts.hidden);
    EXPECT_EQ(layer.intermediate_channels, facts.intermediate);
    EXPECT_EQ(layer.valid_hidden_channels, facts.valid_hidden);
    EXPECT_EQ(layer.valid_intermediate_channels, facts.valid_intermediate);
    EXPECT_TRUE(layer.has_gate);
    EXPECT_EQ(*checkpoint.FindLayer(layer.label), l);
    EXPECT_TRUE(checkpoint.CheckUsable(layer.label).has_value());
    const uint64_t width = facts.intermediate / facts.slices;
    for (uint32_t e = 0; e < layer.experts; ++e) {
      for (uint32_t s = 0; s < layer.slices; ++s) {
        for (int p = 0; p < kNumProjections; ++p) {
          const MatrixInfo info = checkpoint.Matrix(l, e, static_cast<Projection>(p), s);
          EXPECT_EQ(info.in_channels, p == 2 ? width : facts.hidden);
          EXPECT_EQ(info.out_channels, p == 2 ? facts.hidden : width);
          EXPECT_TRUE(checkpoint.CheckMarker(info).has_value());
        }
      }
    }
  }
}

const std::vector<int> kFour = {1, 2, 3, 4};
INSTANTIATE_TEST_SUITE_P(
    All, FixtureTest,
    ::testing::Values(
        FixtureFacts{"stock-qwen3", "stock", {"1", "2"}, 5, 1, 384, 256, 384, 256, {1, 2}, 5},
        FixtureFacts{"stock-deepseek-padded", "stock", {"1", "2"}, 5, 1, 384, 256, 320, 200, {1, 2}, 11},
        FixtureFacts{"stock-mixtral", "stock", {"0", "1"}, 3, 1, 128, 256, 128, 256, {1, 2}, 2},
        FixtureFacts{"stock-legacy-signs", "stock", {"0"}, 2, 1, 128, 128, 128, 128, {1}, 0},
        FixtureFacts{"stock-bias", "stock", {"0"}, 3, 1, 128, 256, 128, 256, {1, 2}, 0},
        FixtureFacts{"stock-situ", "stock", {"0"}, 2, 1, 128, 128, 128, 128, {1}, 0},
        FixtureFacts{"rs-per-expert", "rank-sliced", {"3", "4"}, 4, 4, 128, 512, 128, 512, kFour, 0},
        FixtureFacts{"rs-shared-h", "rank-sliced", {"3"}, 4, 4, 128, 512, 128, 512, kFour, 0},
        FixtureFacts{"rs-r7", "r7", {"2", "3"}, 3, 1, 128, 512, 128, 512, kFour, 0},
        // 24 slots of 32, barrier 12, alignment 4: three blocks a side. TP 1 needs no planner; an odd TP
        // leaves (tp + 1) / 2 owners on the lower side, so every rank owns a block up to TP 6.
        FixtureFacts{"v1-k3", "exl3-v1", {"1", "2"}, 3, 1, 128, 768, 128, 768, {1, 2, 3, 4, 5, 6}, 0},
        FixtureFacts{"v1-k2-per-expert", "exl3-v1", {"1"}, 3, 1, 128, 512, 128, 512, kFour, 0}),
    [](const ::testing::TestParamInfo<FixtureFacts>& facts) {
      std::string name = facts.param.name;
      std::replace(name.begin(), name.end(), '-', '_');
      return name;
    });

TEST(FixtureRefusalTest, ContainersThatAreNotBuiltYetAreRefusedByName) {
  for (const auto& [name, word] : {std::pair{"v1-coupled", "lut_e4m3"}, {"v1-lut-fp16", "lut_fp16"}}) {
    const Result<Checkpoint> opened = Checkpoint::Open(Fixture(name));
    ASSERT_FALSE(opened.has_value());
    EXPECT_EQ(opened.error().code(), StatusCode::kUnsupported);
    EXPECT_THAT(opened.error().message(), ::testing::HasSubstr(word));
    EXPECT_THAT(opened.error().message(), ::testing::HasSubstr("exl3-manifest.json"));
  }
}

TEST(FixtureRatesTest, BitsAndCodebookAreReadPerMatrix) {
  const Checkpoint sliced = OpenFixture("rs-per-expert");
  const int tiers[2][4] = {{3, 4, 6, 3}, {4, 6, 3, 4}};
  for (size_t l = 0; l < 2; ++l) {
    for (uint32_t e = 0; e < 4; ++e) {
      for (uint32_t s = 0; s < 4; ++s) {
        EXPECT_EQ(Format(sliced, l, e, Projection::kUp, s), fmt::format("{} mcg", tiers[l][e]));
      }
    }
  }
  const Checkpoint r7 = OpenFixture("rs-r7");
  EXPECT_EQ(Format(r7, 0, 0, Projection::kGate), "5 mcg");
  EXPECT_EQ(Format(r7, 0, 0, Projection::kUp), "3 mcg");
  EXPECT_EQ(Format(r7, 0, 0, Projection::kDown), "4 mcg");
  EXPECT_EQ(Format(r7, 1, 2, Projection::kGate), "5 mcg");
  const Checkpoint padded = OpenFixture("stock-deepseek-padded");
  EXPECT_EQ(Format(padded, 0, 0, Projection::kGate), "5 mul1");
  EXPECT_EQ(Format(padded, 0, 0, Projection::kUp), "1 mcg");
  EXPECT_EQ(Format(padded, 0, 0, Projection::kDown), "3 mul1");
  // Every (K, codebook) pair occurs in this one.
  const Checkpoint all = OpenFixture("stock-qwen3");
  std::vector<std::string> formats;
  for (size_t l = 0; l < 2; ++l) {
    for (uint32_t e = 0; e < 5; ++e) {
      for (const Projection p : {Projection::kGate, Projection::kUp, Projection::kDown}) {
        formats.push_back(Format(all, l, e, p));
      }
    }
  }
  std::sort(formats.begin(), formats.end());
  formats.erase(std::unique(formats.begin(), formats.end()), formats.end());
  EXPECT_EQ(formats.size(), 24u);
}

TEST(FixtureNamesTest, LinearsAreOrderedAndOutsideTheExperts) {
  EXPECT_THAT(LinearNames(OpenFixture("stock-qwen3")),
              ElementsAre("model.layers.0.mlp.down_proj", "model.layers.0.mlp.gate_proj",
                          "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.k_proj",
                          "model.layers.2.self_attn.k_proj"));
  const std::vector<std::string> shared = LinearNames(OpenFixture("stock-deepseek-padded"));
  EXPECT_EQ(std::count(shared.begin(), shared.end(), "model.layers.1.mlp.shared_experts.gate_proj"), 1);
}

MemoryCheckpoint OpenFiles(const CheckpointFiles& files, const std::string& path = "") {
  MemoryCheckpoint opened = OpenInMemory(files.Serialize(), path);
  EXPECT_TRUE(opened.checkpoint.has_value()) << opened.checkpoint.error().message();
  return opened;
}

// Complete matrices of experts in a layer that no rule can read must not pass for dense ones.
TEST(LayoutTest, ExpertsWithoutAReadableLayerAreErrors) {
  for (const char* from_to : {"layers.x.", "layers.00.", "layers.-1.", "layers.99999999999999999999."}) {
    ModelShape shape;
    shape.layers = {1};
    shape.dense = false;
    CheckpointFiles files = WriteStock(RandomModel(shape, 1));
    for (auto& [name, shard] : files.shards) {
      for (NamedTensor& tensor : shard.tensors) {
        const size_t at = tensor.name.find("layers.1.");
        if (at != std::string::npos) tensor.name.replace(at, 9, from_to);
      }
    }
    const MemoryCheckpoint opened = OpenInMemory(files.Serialize());
    if (!opened.checkpoint) continue;  // refused at once is as good
    EXPECT_TRUE(opened.checkpoint->linears().empty()) << from_to;
    EXPECT_FALSE(opened.checkpoint->CheckUsable("")) << from_to;
  }
}

TEST(LayoutTest, LayersBeginAnywhereWithGapsAndDraftLayers) {
  const CheckpointModel model = RandomModel({.layers = {3, 4, 7, 78}, .experts = 2}, 21);
  CheckpointFiles files = WriteStock(model, {.shards = 2, .index = true});
  files.config()["num_hidden_layers"] = 8;
  const MemoryCheckpoint opened = OpenFiles(files);
  EXPECT_THAT(Labels(*opened.checkpoint), ElementsAre("3", "4", "7", "78"));
  EXPECT_THAT(opened.checkpoint->problems(), IsEmpty());
  EXPECT_EQ(*opened.checkpoint->FindLayer("78"), 3u);
  const Result<size_t> dense = opened.checkpoint->FindLayer("0");
  ASSERT_FALSE(dense.has_value());
  EXPECT_EQ(dense.error().code(), StatusCode::kUsage);
  EXPECT_THAT(dense.error().message(), ::testing::HasSubstr("3, 4, 7, 78"));
}

TEST(LayoutTest, LayersAreOrderedByNumberNotByName) {
  const CheckpointModel model =
      RandomModel({.layers = {2, 9, 10, 100, 101}, .experts = 1, .dense = false}, 22);
  const MemoryCheckpoint opened = OpenFiles(WriteStock(model));
  EXPECT_THAT(Labels(*opened.checkpoint), ElementsAre("2", "9", "10", "100", "101"));
}

// The larger group keeps its numbers; the other is PREFIX.N. Whatever comes first in the file.
TEST(LayoutTest, TwoGroupsWithTheSameNumbers) {
  const CheckpointModel main_model = RandomModel({.layers = {0, 1, 2}, .experts = 2, .dense = false}, 23);
  const CheckpointModel draft_model = RandomModel({.layers = {0, 1}, .experts = 3, .dense = false}, 24);
  for (const char* draft_prefix : {"mtp.layers", "a.draft"}) {
    CheckpointFiles files = WriteStock(main_model);
    CheckpointFiles draft = WriteStock(draft_model, {.prefix = draft_prefix});
    for (NamedTensor& tensor : draft.shards.begin()->second.tensors) {
      files.shards.begin()->second.tensors.push_back(std::move(tensor));
    }
    files.config().erase("num_experts");
    // The second half of the matrices has its own bits: the average of the first does not hold.
    files.config().erase("quantization_config");
    const MemoryCheckpoint opened = OpenFiles(files);
    const std::string first = fmt::format("{}.0", draft_prefix);
    EXPECT_THAT(Labels(*opened.checkpoint),
                ElementsAre("0", "1", "2", first, fmt::format("{}.1", draft_prefix)));
    EXPECT_THAT(opened.checkpoint->problems(), IsEmpty());
    EXPECT_EQ(opened.checkpoint->layers()[0].experts, 2u);
    EXPECT_EQ(opened.checkpoint->layers()[0].prefix, "model.layers");
    EXPECT_EQ(opened.checkpoint->layers()[3].experts, 3u);
    EXPECT_EQ(opened.checkpoint->layers()[3].prefix, draft_prefix);
    EXPECT_EQ(opened.checkpoint->layers()[3].number, 0);
    EXPECT_EQ(*opened.checkpoint->FindLayer(first), 3u);
    EXPECT_EQ(*opened.checkpoint->FindLayer("0"), 0u);
    // The canonical name means the main group, the file's own name means what it says.
    const auto canonical = opened.checkpoint->FindMatrix("model.layers.1.mlp.experts.1.up_proj");
    ASSERT_TRUE(canonical.has_value()) << canonical.error().message();
    EXPECT_EQ(canonical->layer, 1u);
    const auto own = opened.checkpoint->FindMatrix(fmt::format("{}.1.mlp.experts.2.up_proj", draft_prefix));
    ASSERT_TRUE(own.has_value()) << own.error().message();
    EXPECT_EQ(own->layer, 4u);
    EXPECT_EQ(own->expert, 2u);
  }
}

TEST(LayoutTest, DraftLayersBehindTheMainOnesKeepTheirNumbers) {
  const CheckpointModel main_model = RandomModel({.layers = {0, 1, 2}, .experts = 2, .dense = false}, 25);
  const CheckpointModel draft_model = RandomModel({.layers = {5}, .experts = 2, .dense = false}, 26);
  CheckpointFiles files = WriteStock(main_model);
  CheckpointFiles draft = WriteStock(draft_model, {.prefix = "mtp.layers"});
  for (NamedTensor& tensor : draft.shards.begin()->second.tensors) {
    files.shards.begin()->second.tensors.push_back(std::move(tensor));
  }
  files.config().erase("quantization_config");
  const MemoryCheckpoint opened = OpenFiles(files);
  EXPECT_THAT(Labels(*opened.checkpoint), ElementsAre("0", "1", "2", "5"));
}

TEST(LayoutTest, MatrixNamesOfEveryKind) {
  struct Style {
    StockOptions options;
    std::string own;  // layer 1, expert 2, up
  };
  const Style styles[] = {
      {{}, "model.layers.1.mlp.experts.2.up_proj"},
      {{.experts_path = "block_sparse_moe.experts", .w_names = true},
       "model.layers.1.block_sparse_moe.experts.2.w3"},
      {{.prefix = "model.language_model.layers"}, "model.language_model.layers.1.mlp.experts.2.up_proj"},
      {{.experts_path = "moe.experts"}, "model.layers.1.moe.experts.2.up_proj"},
      {{.experts_path = "mlp.moe.experts"}, "model.layers.1.mlp.moe.experts.2.up_proj"}};
  for (const Style& style : styles) {
    const MemoryCheckpoint opened = OpenFiles(WriteStock(RandomModel({}, 27), style.options));
    EXPECT_THAT(opened.checkpoint->problems(), IsEmpty()) << style.own;
    EXPECT_EQ(opened.checkpoint->MatrixName(0, 2, Projection::kUp, 0), style.own);
    for (const std::string& name : {style.own, std::string("model.layers.1.mlp.experts.2.up_proj")}) {
      const auto found = opened.checkpoint->FindMatrix(name);
      ASSERT_TRUE(found.has_value()) << found.error().message();
      EXPECT_TRUE(found->routed);
      EXPECT_EQ(found->layer, 0u);
      EXPECT_EQ(found->expert, 2u);
      EXPECT_EQ(found->projection, Projection::kUp);
    }
    const auto linear = opened.checkpoint->FindMatrix("lm_head");
    ASSERT_TRUE(linear.has_value());
    EXPECT_FALSE(linear->routed);
    EXPECT_EQ(opened.checkpoint->linears()[linear->linear].name, "lm_head");
    for (const char* wrong :
         {"model.layers.1.mlp.experts.3.up_proj", "model.layers.5.mlp.experts.0.up_proj",
          "model.layers.1.mlp.experts.2.up_proj.rank0", "lm_head.trellis", "", "model.norm",
          "model.layers.1.mlp.experts.02.up_proj", "model.layers.1.mlp.experts.2.up_proj.x"}) {
      const auto found = opened.checkpoint->FindMatrix(wrong);
      ASSERT_FALSE(found.has_value()) << wrong;
      EXPECT_EQ(found.error().code(), StatusCode::kUsage);
    }
  }
}

TEST(LayoutTest, SliceNames) {
  const MemoryCheckpoint opened = OpenFiles(MakeBase(Base::kRankSliced));
  const auto all = opened.checkpoint->FindMatrix("model.layers.4.mlp.experts.3.down_proj");
  ASSERT_TRUE(all.has_value());
  EXPECT_EQ(all->layer, 1u);
  EXPECT_FALSE(all->slice.has_value());
  const auto one = opened.checkpoint->FindMatrix("model.layers.4.mlp.experts.3.down_proj.rank1");
  ASSERT_TRUE(one.has_value());
  EXPECT_EQ(one->slice, 1u);
  for (const char* wrong :
       {"model.layers.4.mlp.experts.3.down_proj.rank2", "model.layers.4.mlp.experts.3.down_proj.rank",
        "model.layers.4.mlp.experts.3.down_proj.rank01"}) {
    EXPECT_FALSE(opened.checkpoint->FindMatrix(wrong).has_value()) << wrong;
  }
}

// K 1..8 and all codebooks inside one layer, down to one matrix each.
TEST(LayoutTest, MixedBitsAndCodebooks) {
  const CheckpointModel model = RandomModel({.layers = {0}, .experts = 40, .dense = false}, 28);
  const MemoryCheckpoint opened = OpenFiles(WriteStock(model));
  std::vector<std::string> formats;
  for (uint32_t e = 0; e < 40; ++e) {
    for (int p = 0; p < kNumProjections; ++p) {
      const MatrixModel& expected = model.layers[0].experts[e].slices[0][p];
      const MatrixInfo info = opened.checkpoint->Matrix(0, e, static_cast<Projection>(p), 0);
      EXPECT_EQ(info.bits, expected.bits);
      EXPECT_EQ(info.codebook, expected.codebook);
      EXPECT_EQ(info.code_bytes(), expected.codes.size() * 2);
      formats.push_back(Format(*opened.checkpoint, 0, e, static_cast<Projection>(p)));
    }
  }
  std::sort(formats.begin(), formats.end());
  formats.erase(std::unique(formats.begin(), formats.end()), formats.end());
  EXPECT_EQ(formats.size(), 24u) << "the model must hold every pair for this test to mean something";
}

TEST(LayoutTest, PaddedSizesFromAnyConfigSpelling) {
  const CheckpointModel model = RandomModel({.hidden_channels = 256}, 29);
  for (const bool nested : {false, true}) {
    CheckpointFiles files = WriteStock(model);
    Json sizes = files.config();
    sizes["hidden_size"] = 200;
    sizes["moe_intermediate_size"] = 130;
    files.config() = nested ? Json{{"text_config", sizes}} : sizes;
    const MemoryCheckpoint opened = OpenFiles(files);
    const MoeLayer& layer = opened.checkpoint->layers()[0];
    EXPECT_EQ(layer.hidden_channels, 256u);
    EXPECT_EQ(layer.intermediate_channels, 256u);
    EXPECT_EQ(layer.valid_hidden_channels, 200u);
    EXPECT_EQ(layer.valid_intermediate_channels, 130u);
  }
}

TEST(LayoutTest, LegalTpIsWhatLeavesNoRankEmpty) {
  const auto legal = [](uint64_t intermediate, uint32_t slices = 1) {
    ModelShape shape{.layers = {1}, .experts = 1, .intermediate_channels = intermediate, .slices = slices};
    shape.codebook = Codebook::kMcg;
    shape.bits_by_expert = true;
    shape.dense = false;
    const CheckpointModel model = RandomModel(shape, 30);
    return OpenFiles(slices > 1 ? WriteRankSliced(model) : WriteStock(model)).checkpoint->LegalTpSizes();
  };
  EXPECT_EQ(legal(128), UpTo(1));
  EXPECT_EQ(legal(512), UpTo(4));
  EXPECT_EQ(legal(2304), UpTo(18));  // uneven cuts are legal, 576 = 2304 / 4 is not asked for
  EXPECT_EQ(legal(2176), UpTo(17));
  EXPECT_EQ(legal(4096), UpTo(24));
  EXPECT_EQ(legal(512, 4), UpTo(4));
  EXPECT_EQ(legal(1024, 2), UpTo(8));
}

TEST(LayoutTest, OneShardOfARankSlicedPackAlone) {
  CheckpointFiles files = MakeBase(Base::kRankSliced);
  const MemoryCheckpoint opened = OpenFiles(files, "model-layer-004.safetensors");
  EXPECT_EQ(opened.checkpoint->layout_name(), "rank-sliced");
  EXPECT_THAT(Labels(*opened.checkpoint), ElementsAre("4"));
  EXPECT_EQ(opened.checkpoint->layers()[0].slices, 2u);
  EXPECT_EQ(opened.checkpoint->files().size(), 1u);
  EXPECT_THAT(opened.checkpoint->problems(), IsEmpty());
  // Without any companion the names and the markers carry what is needed.
  files.json.clear();
  const MemoryCheckpoint bare = OpenFiles(files, "model-layer-004.safetensors");
  EXPECT_EQ(bare.checkpoint->layout_name(), "rank-sliced");
  EXPECT_EQ(bare.checkpoint->layers()[0].slices, 2u);
  EXPECT_EQ(bare.checkpoint->Matrix(0, 0, Projection::kGate, 1).codebook, Codebook::kMcg);
  EXPECT_EQ(bare.checkpoint->layers()[0].valid_hidden_channels, 128u);
}

TEST(LayoutTest, SingleFileUnderAnyName) {
  CheckpointFiles files = MakeBase(Base::kStockSingle);
  files.shards["weights.v2.safetensors"] = files.shards.at("model.safetensors");
  files.shards.erase("model.safetensors");
  const MemoryCheckpoint opened = OpenFiles(files, "weights.v2.safetensors");
  EXPECT_EQ(opened.checkpoint->layers().size(), 2u);
  EXPECT_EQ(opened.checkpoint->config().top_k, 2u);  // config.json beside it is read
  EXPECT_EQ(opened.checkpoint->files()[0].name, "weights.v2.safetensors");
}

TEST(LayoutTest, ExpertsInTheHundreds) {
  ModelShape shape{.layers = {1}, .experts = 896, .intermediate_channels = 128, .dense = false};
  shape.bits = 1;
  const CheckpointModel model = RandomModel(shape, 31);
  const MemoryCheckpoint opened = OpenFiles(WriteStock(model, {.shards = 3, .index = true}));
  ASSERT_EQ(opened.checkpoint->layers().size(), 1u);
  EXPECT_EQ(opened.checkpoint->layers()[0].experts, 896u);
  for (const uint32_t e : {0u, 255u, 256u, 895u}) {
    EXPECT_EQ(opened.checkpoint->MatrixName(0, e, Projection::kDown, 0),
              fmt::format("model.layers.1.mlp.experts.{}.down_proj", e));
    EXPECT_EQ(Format(*opened.checkpoint, 0, e, Projection::kDown),
              fmt::format("1 {}", CodebookName(model.layers[0].experts[e].slices[0][2].codebook)));
  }
}

// A dense matrix whose sizes fit 16 but not 128 stays as stored and is reported.
TEST(LayoutTest, DenseMatrixOffTheGridIsLeftAsStored) {
  CheckpointFiles files = MakeBase(Base::kStockSingle);
  const std::string name = "model.vision.blocks.0.mlp.fc2";
  files.Add("model.safetensors",
            {name + ".trellis", "I16", {269, 72, 48}, std::string(269 * 72 * 48 * 2, '\0')});
  files.Add("model.safetensors", {name + ".suh", "F16", {4304}, std::string(8608, '\0')});
  files.Add("model.safetensors", {name + ".svh", "F16", {1152}, std::string(2304, '\0')});
  files.config().erase("quantization_config");
  const MemoryCheckpoint opened = OpenFiles(files);
  const auto found = opened.checkpoint->FindMatrix(name);
  ASSERT_TRUE(found.has_value()) << found.error().message();
  EXPECT_EQ(opened.checkpoint->linears()[found->linear].matrix.in_channels, 4304u);
  ASSERT_EQ(opened.checkpoint->problems().size(), 1u);
  EXPECT_EQ(opened.checkpoint->problems()[0].severity, Problem::Severity::kWarning);
  EXPECT_THAT(opened.checkpoint->problems()[0].message, ::testing::HasSubstr("4304"));
}

TEST(LayoutTest, DenseOnlyCheckpointHasNoLayers) {
  CheckpointModel model = RandomModel({}, 33);
  model.layers.clear();
  const MemoryCheckpoint opened = OpenFiles(WriteStock(model));
  EXPECT_THAT(opened.checkpoint->layers(), IsEmpty());
  EXPECT_EQ(opened.checkpoint->linears().size(), 5u);
  EXPECT_THAT(opened.checkpoint->LegalTpSizes(), IsEmpty());
}

TEST(LayoutTest, PlainTensorsAreReachable) {
  const CheckpointModel model = RandomModel({}, 34);
  const MemoryCheckpoint opened = OpenFiles(WriteStock(model, {.shards = 3}));
  const TensorInfo* norm = opened.checkpoint->FindTensor("model.norm.weight");
  ASSERT_NE(norm, nullptr);
  EXPECT_EQ(norm->dtype, Dtype::kBF16);
  EXPECT_EQ(norm->shape, std::vector<uint64_t>{128});
  std::string bytes(norm->size_bytes, '\0');
  ASSERT_TRUE(opened.checkpoint->Read(*norm, std::as_writable_bytes(std::span(bytes))).has_value());
  EXPECT_EQ(bytes, model.plain[1].data);
  EXPECT_EQ(opened.checkpoint->FindTensor("model.norm.bias"), nullptr);
  EXPECT_FALSE(opened.checkpoint->ReadFloats("model.norm.bias").has_value());
  const Result<std::vector<float>> codes = opened.checkpoint->ReadFloats("lm_head.trellis");
  ASSERT_FALSE(codes.has_value());
  EXPECT_EQ(codes.error().code(), StatusCode::kUnsupported);
}

TEST(LayoutTest, ErrorsBelongToTheirLayer) {
  CheckpointFiles files = MakeBase(Base::kStock);
  files.index().erase("model.layers.2.mlp.experts.1.up_proj.suh");
  const MemoryCheckpoint opened = OpenFiles(files);
  ASSERT_EQ(opened.checkpoint->problems().size(), 1u);
  EXPECT_EQ(opened.checkpoint->problems()[0].layer, "2");
  EXPECT_TRUE(opened.checkpoint->CheckUsable("1").has_value());
  const Result<void> usable = opened.checkpoint->CheckUsable("2");
  ASSERT_FALSE(usable.has_value());
  EXPECT_EQ(usable.error().code(), StatusCode::kFormat);
  EXPECT_THAT(usable.error().message(), ::testing::HasSubstr("model.layers.2.mlp.experts.1.up_proj.suh"));
  EXPECT_FALSE(opened.checkpoint->CheckUsable("").has_value());
}

}  // namespace
}  // namespace espalier::testing
