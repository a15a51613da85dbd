// SPDX-License-Identifier: Apache-2.0
//
// ESPALIER_CPU_ISA forces a table of kernels, the forced one is the one that runs, and its answers are right.
#include <espalier/backend.h>
#include <espalier/checkpoint.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "cpu/kernel_table.h"
#include "espalier_command.h"
#include "support/fixture_call.h"
#include "support/random_experts.h"
#include "support/table_call.h"
#include "support/temporary_directory.h"
#include "support/tensor_file.h"

namespace espalier {
namespace {

using ::testing::HasSubstr;
using testing::SubprocessOptions;
using testing::SubprocessResult;
using testing::TemporaryDirectory;

const std::string kFixtures = ESPALIER_TEST_DATA "/fixtures/";
const std::string kQwen = kFixtures + "stock-qwen3";
constexpr const char* kWrongName = "avx1024";

SubprocessOptions Forced(std::string_view name) {
  SubprocessOptions options;
  options.environment = {{"ESPALIER_CPU_ISA", std::string(name)}};
  return options;
}

std::vector<std::string> UsableNames() {
  std::vector<std::string> names;
  for (const cpu::KernelTable* table : cpu::UsableTables()) names.emplace_back(table->name);
  return names;
}

Json KernelsOf(const JsonResult& doctor) { return doctor.document.at("cpu").at("kernels"); }

TEST(CpuIsa, TheLibraryNamesItsKernels) {
  const std::vector<std::string_view> usable = UsableCpuKernels();
  EXPECT_EQ(std::vector<std::string>(usable.begin(), usable.end()), UsableNames());
  EXPECT_EQ(usable.back(), "portable");
  const Result<std::string_view> name = CpuKernelsName();
  ASSERT_TRUE(name) << name.error().message();
  EXPECT_NE(std::ranges::find(usable, *name), usable.end());
}

TEST(CpuIsa, DoctorNamesTheForcedKernels) {
  for (const std::string& name : UsableNames()) {
    SCOPED_TRACE(name);
    const JsonResult doctor = EspalierJson({"doctor"}, Forced(name));
    ASSERT_EQ(doctor.exit_code, 0) << doctor.standard_error;
    EXPECT_EQ(KernelsOf(doctor).at("chosen"), name);
    EXPECT_EQ(KernelsOf(doctor).at("usable"), Json(UsableNames()));
    EXPECT_TRUE(KernelsOf(doctor).at("problem").is_null());
    const SubprocessResult text = Espalier({"doctor"}, Forced(name));
    EXPECT_THAT(text.standard_output, HasSubstr("cpu kernels    " + name + ";"));
  }
}

TEST(CpuIsa, AnEmptyNameIsNoName) {
  EXPECT_EQ(KernelsOf(EspalierJson({"doctor"}, Forced(""))).at("chosen"), UsableNames().front());
}

TEST(CpuIsa, OtherExecutorsHaveNoKernels) {
  const JsonResult run =
      EspalierJson({"run", kQwen, "--layer", "1", "--executor", "reference"}, Forced("portable"));
  ASSERT_EQ(run.exit_code, 0) << run.standard_error;
  EXPECT_TRUE(run.document.at("kernels").is_null());
}

// ---- Names that are not there ----------------------------------------------------------------------------

TEST(CpuIsa, AWrongNameIsAUsageErrorThatListsTheLegalOnes) {
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"run", kQwen, "--layer", "1"},
                                             {"run", kQwen, "--layer", "1", "--executor", "cpu"},
                                             {"run", kQwen, "--layer", "1", "--mode", "exact"},
                                             {"verify", kQwen},
                                             {"bench", kQwen, "--layer", "1", "--tokens", "1"}}) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(arguments, " ")));
    const JsonResult result = EspalierJson(arguments, Forced(kWrongName));
    EXPECT_EQ(result.exit_code, 2);
    ASSERT_TRUE(result.document.contains("error")) << result.document;
    EXPECT_EQ(result.document.at("error").at("category"), "usage");
    const std::string message = result.document.at("error").at("message");
    EXPECT_THAT(message, HasSubstr(kWrongName));
    for (const std::string& name : UsableNames()) EXPECT_THAT(message, HasSubstr(name));
  }
  // Names are whole: no prefix, no other case.
  for (const char* name : {"avx", "Portable", "portable ", "portable,avx2"})
    EXPECT_EQ(Espalier({"run", kQwen, "--layer", "1"}, Forced(name)).exit_code, 2) << name;
}

TEST(CpuIsa, AWrongNameIsNoConcernOfOtherExecutors) {
  EXPECT_EQ(Espalier({"run", kQwen, "--layer", "1", "--executor", "reference"}, Forced(kWrongName)).exit_code,
            0);
  EXPECT_EQ(Espalier({"inspect", kQwen}, Forced(kWrongName)).exit_code, 0);
}

TEST(CpuIsa, DoctorShowsAWrongName) {
  const JsonResult doctor = EspalierJson({"doctor"}, Forced(kWrongName));
  ASSERT_EQ(doctor.exit_code, 0) << doctor.standard_error;
  EXPECT_TRUE(KernelsOf(doctor).at("chosen").is_null());
  EXPECT_EQ(KernelsOf(doctor).at("usable"), Json(UsableNames()));
  EXPECT_THAT(KernelsOf(doctor).at("problem").get<std::string>(), HasSubstr(kWrongName));
  for (const Json& backend : doctor.document.at("backends")) {
    if (backend.at("name") != "cpu") continue;
    EXPECT_THAT(backend.at("description").get<std::string>(), HasSubstr(kWrongName));
  }
  const SubprocessResult text = Espalier({"doctor"}, Forced(kWrongName));
  EXPECT_EQ(text.exit_code, 0);
  EXPECT_THAT(text.standard_output, HasSubstr("cpu kernels    none;"));
}

// The reference would take the package, and does not: nobody asked for it.
TEST(CpuIsaDeathTest, APlanDoesNotFallBackToTheReference) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process that has not read the variable yet
  EXPECT_EXIT(
      {
        setenv("ESPALIER_CPU_ISA", kWrongName, 1);
        const PreparedExperts experts = test::MakeExperts({.activation = {}});
        const Result<MoePlan> plan = MoePlan::Create(experts, {});
        const PreparedLinear linear = test::MakeLinear(128, 128, 0, 0, {}, 1);
        const Result<LinearPlan> linear_plan = LinearPlan::Create(linear, {});
        const bool refused = !plan && plan.error().code() == StatusCode::kUsage && !linear_plan &&
                             linear_plan.error().code() == StatusCode::kUsage;
        std::exit(refused ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

// ---- Right answers from the forced kernels ---------------------------------------------------------------

struct FixtureRun {
  std::string checkpoint;
  int layer;
  std::string input;  // without folder and suffix
};

// stock-qwen3 has every rate and codebook; the others padding, biases, a saturating activation, rank-sliced
// files and a row of NaN.
const FixtureRun kRuns[] = {
    {"stock-qwen3", 1, "in-5-384-3.m33-f32"}, {"stock-deepseek-padded", 1, "in-5-320-3.m7-i64"},
    {"stock-bias", 0, "in-3-128-2.m33-f32"},  {"stock-situ", 0, "in-2-128-2.m7-i64"},
    {"rs-r7", 2, "in-3-128-2.m33-f32"},       {"v1-k3", 1, "in-3-128-2.nan-row"}};

std::string ExpectedPath(const FixtureRun& run) {
  const std::string routes = run.input.substr(run.input.find('.'));
  return fmt::format("{}expected/{}.L{}{}.safetensors", kFixtures, run.checkpoint, run.layer, routes);
}

// -0 and 0 are one: the command adds to zeros.
void ExpectSameValues(const std::vector<float>& expected, const std::vector<float>& actual) {
  ASSERT_EQ(expected.size(), actual.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    if (std::isnan(expected[i]) && std::isnan(actual[i])) continue;
    ASSERT_EQ(std::bit_cast<uint32_t>(expected[i] + 0.0f), std::bit_cast<uint32_t>(actual[i] + 0.0f)) << i;
  }
}

std::vector<double> Doubles(const std::vector<float>& values) { return {values.begin(), values.end()}; }

// y of one `espalier run` with kernels by name, which it must report.
std::vector<float> RunCommand(const FixtureRun& run, std::string_view kernels, CpuMode mode) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() / "y.safetensors";
  const JsonResult result =
      EspalierJson({"run", kFixtures + run.checkpoint, "--layer", std::to_string(run.layer), "--input",
                    kFixtures + "inputs/" + run.input + ".safetensors", "--mode",
                    std::string(CpuModeName(mode)), "-o", path},
                   Forced(kernels));
  EXPECT_EQ(result.exit_code, 0) << result.standard_error;
  if (result.exit_code != 0) return {};
  EXPECT_EQ(result.document.at("executor"), "cpu");
  EXPECT_EQ(result.document.at("kernels"), kernels);
  return test::TensorFile(path).Read<float>("y");
}

// A name in a report is a claim; the bits are the proof. The command gives those of the table that was asked
// for, run here by hand.
TEST(CpuIsa, FixturesOnEveryForcedTable) {
  for (const FixtureRun& run : kRuns) {
    const Checkpoint checkpoint = Checkpoint::Open(kFixtures + run.checkpoint).value();
    const PreparedExperts experts =
        LoadExperts(checkpoint, checkpoint.FindLayer(std::to_string(run.layer)).value()).value();
    const test::MoeCall call = test::ReadFixtureCall(kFixtures + "inputs/" + run.input + ".safetensors");
    const std::vector<double> expected = Doubles(test::TensorFile(ExpectedPath(run)).Read<float>("y"));
    for (const cpu::KernelTable* table : cpu::UsableTables()) {
      for (const CpuMode mode : {CpuMode::kExact, CpuMode::kFast}) {
        SCOPED_TRACE(fmt::format("{} layer {}, {}, {}, {}", run.checkpoint, run.layer, run.input, table->name,
                                 CpuModeName(mode)));
        const std::vector<float> y = RunCommand(run, table->name, mode);
        const test::Difference difference = test::Compare(expected, Doubles(y));
        EXPECT_LE(difference.rel_l2, mode == CpuMode::kExact ? 2e-6 : 6e-3);
        EXPECT_GE(difference.cosine, mode == CpuMode::kExact ? 1 - 1e-10 : 0.99998);
        ExpectSameValues(test::RunOnTable(*table, experts, call, {.mode = mode}), y);
      }
    }
  }
}

// Were the variable ignored, all of the above would still hold for the table that runs unasked. Tables that
// multiply other operands give other bits.
TEST(CpuIsa, AnotherTableGivesOtherBits) {
  if (cpu::UsableTables().size() < 2) GTEST_SKIP() << "this machine runs the portable table only";
  const std::vector<float> best = RunCommand(kRuns[0], UsableNames().front(), CpuMode::kFast);
  EXPECT_NE(best, RunCommand(kRuns[0], "portable", CpuMode::kFast));
  EXPECT_EQ(best, RunCommand(kRuns[0], UsableNames().front(), CpuMode::kFast));
}

}  // namespace
}  // namespace espalier
