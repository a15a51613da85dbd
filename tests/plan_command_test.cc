// SPDX-License-Identifier: Apache-2.0
//
// espalier plan: its JSON against the library and against loading, its refusals, its picture.
#include <espalier/experts.h>
#include <espalier/moe.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#include <vector>

#include "espalier_command.h"
#include "support/checkpoint_writer.h"
#include "support/temporary_directory.h"

namespace espalier {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::TemporaryDirectory;

const std::string kBundled = ESPALIER_BUNDLED_CHECKPOINT;
const std::string kFixtures = ESPALIER_TEST_DATA "/fixtures";

std::vector<std::string> Folders() {
  std::vector<std::string> folders = {kBundled};
  for (const char* name :
       {"stock-qwen3", "stock-deepseek-padded", "rs-per-expert", "rs-r7", "rs-shared-h", "v1-k3"}) {
    folders.push_back(kFixtures + "/" + name);
  }
  return folders;
}

TEST(PlanCommand, SaysWhatLoadingTakes) {
  for (const std::string& folder : Folders()) {
    const Checkpoint checkpoint = Checkpoint::Open(folder).value();
    for (const auto& [tp, ep] : {std::pair{1, 1}, {2, 1}, {2, 2}}) {
      SCOPED_TRACE(fmt::format("{} tp {} ep {}", folder, tp, ep));
      const JsonResult result = EspalierJson({"plan", folder, "--tp", std::to_string(tp), "--ep",
                                              std::to_string(ep), "--max-tokens", "33", "--top-k", "2"});
      ASSERT_EQ(result.exit_code, 0) << result.standard_error;
      const Json& json = result.document;
      EXPECT_EQ(json["schema"], "espalier.plan/1");
      EXPECT_EQ(json["layout"], checkpoint.layout_name());
      EXPECT_EQ(json["tp"], tp);
      EXPECT_EQ(json["ep"], ep);
      EXPECT_EQ(json["legal_tp"].get<std::vector<int>>(), checkpoint.LegalTpSizes());
      const ExtentPlan plan = ExtentPlan::Create(checkpoint, {.tp = tp, .ep = ep}).value();
      ASSERT_EQ(json["ranks"].size(), static_cast<size_t>(tp * ep));
      ASSERT_EQ(json["layers"].size(), checkpoint.layers().size());
      ASSERT_EQ(json["expert_ranks"].size(), static_cast<size_t>(ep));
      for (int rank = 0; rank < plan.world(); ++rank) {
        const Json& row = json["ranks"][static_cast<size_t>(rank)];
        uint64_t slabs = 0, workspace = 0;
        for (size_t l = 0; l < checkpoint.layers().size(); ++l) {
          const PreparedExperts experts = LoadExperts(checkpoint, plan, l, rank).value();
          slabs += experts.slab_bytes();
          const MoePlan moe =
              MoePlan::Create(experts, {.max_tokens = 33, .top_k = 2, .executor = "cpu"}).value();
          workspace = std::max(workspace, moe.workspace_bytes());
        }
        EXPECT_EQ(row["rank"], rank);
        EXPECT_EQ(row["weight_bytes"], plan.WeightBytes(rank));
        EXPECT_EQ(row["slab_bytes"], slabs);
        EXPECT_EQ(row["workspace_bytes"], workspace);
        EXPECT_GE(row["staging_peak_bytes"], 0);
      }
      for (const Json& layer : json["layers"]) {
        uint64_t channels = 0;
        for (const Json& rank : layer["ranks"]) {
          uint64_t in_segments = 0;
          for (const Json& segment : rank["segments"]) in_segments += segment["channels"].get<uint64_t>();
          EXPECT_EQ(rank["channels"], in_segments);
          channels += in_segments;
        }
        EXPECT_EQ(channels, checkpoint.layers()[0].intermediate_channels);
      }
    }
  }
}

TEST(PlanCommand, FindsTheMostTokensThatFit) {
  const auto plan = [](const std::string& memory) {
    return EspalierJson({"plan", kBundled, "--tp", "2", "--max-tokens", "256", "--memory", memory});
  };
  const JsonResult roomy = plan("1GiB");
  ASSERT_EQ(roomy.exit_code, 0);
  EXPECT_EQ(roomy.document["memory"]["bytes"], 1 << 30);
  EXPECT_EQ(roomy.document["memory"]["largest_max_tokens"], kMaxPlanTokens);
  const Json& rank = roomy.document["ranks"][0];
  const auto held = rank["slab_bytes"].get<uint64_t>() + rank["descriptor_bytes"].get<uint64_t>();
  const JsonResult tight = plan(std::to_string(held + rank["workspace_bytes"].get<uint64_t>() - 1));
  ASSERT_EQ(tight.exit_code, 0) << tight.standard_error;
  EXPECT_EQ(tight.document["memory"]["fits"], false);
  const auto tokens = tight.document["memory"]["largest_max_tokens"].get<uint64_t>();
  EXPECT_LT(tokens, 256u);
  EXPECT_GT(tokens, 200u);
  const JsonResult none = plan(std::to_string(held - 1));
  EXPECT_EQ(none.exit_code, 6);
  EXPECT_EQ(none.document["error"]["category"], "capacity");
  EXPECT_THAT(none.document["error"]["message"].get<std::string>(), HasSubstr(std::to_string(held)));
  // The weights fit and the scratch memory of the threads does not.
  EXPECT_EQ(plan(std::to_string(held + 64)).exit_code, 6);
  for (const char* bad : {"x", "", "-1", "1.5G", "10B", "9007199254740993", "9000000T", "iB"}) {
    EXPECT_EQ(plan(bad).exit_code, 2) << bad;
  }
}

// Layers of different widths: the one that needs most decides, whatever capacity was asked for.
TEST(PlanCommand, FindsTheMostTokensOverAllLayers) {
  testing::ModelShape shape;
  shape.layers = {1};
  shape.experts = 2;
  shape.intermediate_channels = 1024;
  shape.dense = false;
  testing::CheckpointModel model = testing::RandomModel(shape, 1);
  shape.layers = {2};
  shape.intermediate_channels = 128;
  model.layers.push_back(testing::RandomModel(shape, 2).layers[0]);
  testing::CheckpointFiles files = testing::WriteStock(model);
  files.json.erase("config.json");
  const TemporaryDirectory directory;
  testing::WriteFiles(files.Serialize(), directory.path());
  const auto most = [&](const std::string& max_tokens, uint64_t memory) {
    const JsonResult result = EspalierJson({"plan", directory.path(), "--tp", "1", "--top-k", "2",
                                            "--max-tokens", max_tokens, "--memory", std::to_string(memory)});
    EXPECT_EQ(result.exit_code, 0) << result.standard_error;
    return result.document["memory"]["largest_max_tokens"].get<uint64_t>();
  };
  const Json rank =
      EspalierJson({"plan", directory.path(), "--tp", "1", "--top-k", "2", "--max-tokens", "100"})
          .document["ranks"][0];
  const uint64_t memory = rank["slab_bytes"].get<uint64_t>() + rank["descriptor_bytes"].get<uint64_t>() +
                          rank["workspace_bytes"].get<uint64_t>();
  for (const char* max_tokens : {"0", "1", "17", "4096"}) EXPECT_EQ(most(max_tokens, memory), 100u);
}

TEST(PlanCommand, TakesCheckpointsWithoutExperts) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() / "empty.safetensors";
  std::ofstream(path, std::ios::binary) << std::string("\x02\0\0\0\0\0\0\0{}", 10);
  EXPECT_EQ(EspalierJson({"plan", path, "--tp", "4", "--memory", "5G"}).exit_code, 0);
}

TEST(PlanCommand, RefusesWithTheLegalSizes) {
  struct Case {
    std::vector<std::string> arguments;
    int exit_code;
    const char* message;
  };
  const Case cases[] = {{{"--tp", "3", "--equal"}, 6, "legal tp: 1, 2, 4"},
                        {{"--tp", "0"}, 6, "1"},
                        {{"--tp", "1025"}, 6, "1024"},
                        {{"--tp", "2", "--ep", "0"}, 6, "--ep"},
                        {{"--tp", "1024", "--ep", "1024"}, 6, "65536"}};
  for (const Case& c : cases) {
    std::vector<std::string> arguments = {"plan", kBundled};
    arguments.insert(arguments.end(), c.arguments.begin(), c.arguments.end());
    const JsonResult result = EspalierJson(arguments);
    EXPECT_EQ(result.exit_code, c.exit_code) << result.standard_error;
    EXPECT_THAT(result.document["error"]["message"].get<std::string>(), HasSubstr(c.message));
    EXPECT_EQ(result.document["error"]["legal_tp"],
              c.arguments.back() == "--equal" ? (std::vector<int>{1, 2, 4}) : (std::vector<int>{1, 2, 3, 4}));
  }
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"plan", kBundled},
                                             {"plan", "--tp", "2"},
                                             {"plan", kBundled, "--geometry", "qwen3-30b-a3b", "--tp", "2"},
                                             {"plan", "--geometry", "no-such-model", "--tp", "2"},
                                             {"plan", kBundled, "--tp", "two"},
                                             {"plan", kBundled, "--tp", "2", "--top-k", "none"}}) {
    EXPECT_EQ(EspalierJson(arguments).exit_code, 2) << arguments.back();
  }
  EXPECT_EQ(EspalierJson({"plan", "/no/such/folder", "--tp", "2"}).exit_code, 3);
}

// More ranks than blocks: some own nothing, and the sums still hold.
TEST(PlanCommand, RanksMayOwnNothing) {
  const JsonResult result = EspalierJson({"plan", kBundled, "--tp", "9"});
  ASSERT_EQ(result.exit_code, 0);
  const Json& ranks = result.document["layers"][0]["ranks"];
  uint64_t empty = 0;
  for (const Json& rank : ranks) {
    if (rank["channels"] != 0) continue;
    ++empty;
    EXPECT_EQ(rank["first_channel"], 0);
    EXPECT_TRUE(rank["segments"].empty());
    EXPECT_EQ(rank["weight_bytes"], 0);
  }
  EXPECT_EQ(empty, 5u);
}

TEST(PlanCommand, KnowsModelsByName) {
  struct Case {
    const char* name;
    uint64_t channels, experts;
  };
  for (const Case& c :
       {Case{"glm-5.2-tp4", 2048, 256}, Case{"kimi-k3-tp8", 3072, 896}, Case{"qwen3-30b-a3b", 768, 128}}) {
    const JsonResult result =
        EspalierJson({"plan", "--geometry", c.name, "--tp", "3", "--ep", "5", "--bits", "3"});
    ASSERT_EQ(result.exit_code, 0) << result.standard_error;
    uint64_t channels = 0, experts = 0;
    for (const Json& rank : result.document["layers"][0]["ranks"])
      channels += rank["channels"].get<uint64_t>();
    for (const Json& rank : result.document["expert_ranks"]) experts += rank["experts"].get<uint64_t>();
    EXPECT_EQ(channels, c.channels);
    EXPECT_EQ(experts, c.experts);
  }
}

// The published tables of heads and dense widths.
TEST(PlanCommand, GivesTheRestOfTheModel) {
  struct Case {
    int tp;
    uint64_t padded, local, last;
  };
  for (const Case& c : {Case{8, 96, 12, 12}, Case{9, 99, 11, 8}, Case{10, 100, 10, 6}, Case{12, 96, 8, 8},
                        Case{16, 96, 6, 6}}) {
    const JsonResult result =
        EspalierJson({"plan", "--geometry", "kimi-k3-tp8", "--tp", std::to_string(c.tp)});
    ASSERT_EQ(result.exit_code, 0) << result.standard_error;
    const Json& heads = result.document["dense"]["heads"];
    EXPECT_EQ(heads["heads"], 96);
    EXPECT_EQ(heads["padded"], c.padded);
    EXPECT_EQ(heads["local"], c.local);
    ASSERT_EQ(heads["valid"].size(), static_cast<size_t>(c.tp));
    EXPECT_EQ(heads["valid"].back(), c.last);
  }
  const TemporaryDirectory directory;
  testing::ModelShape shape;
  shape.dense = false;
  testing::CheckpointFiles files = testing::WriteStock(testing::RandomModel(shape, 1));
  files.config()["intermediate_size"] = 6144;
  files.config()["moe_intermediate_size"] = 256;
  testing::WriteFiles(files.Serialize(), directory.path());
  const Json dense = EspalierJson({"plan", directory.path(), "--tp", "9"}).document["dense"];
  EXPECT_EQ(dense["dense_mlp"]["local"], 704);
  EXPECT_EQ(dense["dense_mlp"]["valid"], (std::vector<int>{704, 704, 704, 704, 704, 704, 704, 704, 512}));
  EXPECT_TRUE(dense["heads"].is_null());
  EXPECT_EQ(EspalierJson({"plan", directory.path(), "--tp", "9", "--align", "1"})
                .document["dense"]["dense_mlp"]["local"],
            683);
  EXPECT_EQ(EspalierJson({"plan", directory.path(), "--tp", "9", "--align", "0"}).exit_code, 6);
}

TEST(PlanCommand, DrawsEveryOwner) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() / "plan.svg";
  ASSERT_EQ(EspalierJson({"plan", kBundled, "--tp", "3", "--ep", "2", "--svg", path}).exit_code, 0);
  std::ifstream file(path);
  const std::string svg{std::istreambuf_iterator<char>(file), {}};
  EXPECT_THAT(svg,
              AllOf(HasSubstr("<svg xmlns="), HasSubstr("layer 3, tp rank 2: channels"),
                    HasSubstr("ep rank 1: experts 8 to 15"), HasSubstr("rank 5: "), HasSubstr("</svg>")));
  const std::regex box("<rect [^>]*fill=\"#[0-9a-f]{6}");
  // 4 layers x 3 ranks, 2 ranges of experts, 6 bars.
  EXPECT_EQ(std::distance(std::sregex_iterator(svg.begin(), svg.end(), box), std::sregex_iterator()), 20);
  EXPECT_EQ(
      EspalierJson({"plan", kBundled, "--tp", "3", "--svg", directory.path() / "no" / "x.svg"}).exit_code, 3);
}

}  // namespace
}  // namespace espalier
