// SPDX-License-Identifier: Apache-2.0
//
// Several ranks: the communicators by themselves, and the command line under a real mpirun. The sum over the
// processes is the layer, whatever the layout; and whatever goes wrong in one of them ends all of them with
// one message and one exit code.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "dist/communicator.h"
#include "dist/launcher.h"
#include "support/subprocess.h"
#include "support/temporary_directory.h"

namespace espalier {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::RunSubprocess;
using testing::SubprocessOptions;
using testing::SubprocessResult;
using testing::TemporaryDirectory;
using Json = nlohmann::json;

const std::string kFixtures = ESPALIER_TEST_DATA "/fixtures";
const std::string kBundled = ESPALIER_BUNDLED_CHECKPOINT;

size_t Count(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(LocalCommunicator, IsAWorldOfOne) {
  const std::unique_ptr<Communicator> local = LocalCommunicator();
  EXPECT_EQ(local->rank(), 0);
  EXPECT_EQ(local->world(), 1);
  std::vector<float> values = {1, 2, 3};
  std::vector<float> out(3);
  const std::vector<uint64_t> counts = {3};
  EXPECT_TRUE(local->AllReduceSum(values));
  EXPECT_TRUE(local->ReduceScatterSum(values, counts, out));
  EXPECT_TRUE(local->Synchronize());
  EXPECT_THAT(values, ElementsAre(1, 2, 3));
  EXPECT_THAT(out, ElementsAre(1, 2, 3));
  EXPECT_EQ(*local->AllReduceMax(-5), -5);
  EXPECT_TRUE(local->Broadcast(std::as_writable_bytes(std::span(values)), 0));
  EXPECT_EQ(local->Broadcast({}, 1).error().code(), StatusCode::kUsage);
  EXPECT_EQ(local->ReduceScatterSum(values, counts, std::span(out).first(2)).error().code(),
            StatusCode::kUsage);
  EXPECT_FALSE(local->broken());
}

TEST(LocalCommunicator, AgreesWithItself) {
  const std::unique_ptr<Communicator> local = LocalCommunicator();
  EXPECT_TRUE(AgreeOn(*local, {}));
  const Result<void> failed = AgreeOn(*local, Error(StatusCode::kIo, "no such file"));
  EXPECT_EQ(failed.error().code(), StatusCode::kIo);
  EXPECT_EQ(failed.error().message(), "no such file");
}

TEST(Launcher, IsReadFromTheEnvironment) {
  using Environment = std::map<std::string, std::string>;
  const auto find = [](const Environment& environment) {
    return FindLauncher([&](const char* name) -> const char* {
      const auto at = environment.find(name);
      return at == environment.end() ? nullptr : at->second.c_str();
    });
  };
  EXPECT_FALSE(find({}));
  EXPECT_FALSE(find({{"PMI_RANK", ""}}));
  EXPECT_FALSE(find({{"PMI_RANK", "-1"}, {"PMI_SIZE", "2"}}));
  EXPECT_FALSE(find({{"SLURM_STEP_NUM_TASKS", "4"}}));
  struct Case {
    Environment environment;
    int rank;
    int processes;
  };
  for (const Case& c : std::vector<Case>{
           {{{"OMPI_COMM_WORLD_RANK", "2"}, {"OMPI_COMM_WORLD_SIZE", "3"}, {"PMIX_RANK", "2"}}, 2, 3},
           {{{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}, 0, 1},
           {{{"MV2_COMM_WORLD_RANK", "7"}, {"MV2_COMM_WORLD_SIZE", "8"}}, 7, 8},
           {{{"PMIX_RANK", "1"}, {"SLURM_STEP_NUM_TASKS", "4"}}, 1, 4},
           {{{"PMIX_RANK", "1"}}, 1, 0},
           {{{"PMI_RANK", "1"}, {"PMI_SIZE", "many"}}, 1, 0},
       }) {
    const auto found = find(c.environment);
    ASSERT_TRUE(found);
    EXPECT_EQ(found->rank, c.rank);
    EXPECT_EQ(found->processes, c.processes);
  }
}

#ifdef ESPALIER_MPIEXEC

// Programs under mpirun, each with a time limit of its own: what must not hang is shown not to.
class Mpirun : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(ESPALIER_MPIEXEC)) GTEST_SKIP() << "there is no " ESPALIER_MPIEXEC;
  }

  // `arguments` as mpirun takes them, number of processes included.
  static SubprocessResult Launch(const std::vector<std::string>& arguments) {
    SubprocessOptions options;
    options.environment = {
        // Root, more processes than cores, and shared memory in a container, where the processes may not read
        // each other's.
        {"OMPI_ALLOW_RUN_AS_ROOT", "1"},
        {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
        {"OMPI_MCA_btl_vader_single_copy_mechanism", "none"},
    };
    std::vector<std::string> command = {ESPALIER_MPIEXEC, "--oversubscribe", "--bind-to",
                                        "none",           "--timeout",       "100"};
    command.insert(command.end(), arguments.begin(), arguments.end());
    return RunSubprocess(command, options);
  }

  static SubprocessResult Espalier(int processes, const std::vector<std::string>& arguments) {
    std::vector<std::string> command = {"-n", std::to_string(processes), ESPALIER_BINARY};
    command.insert(command.end(), arguments.begin(), arguments.end());
    return Launch(command);
  }

  static void ExpectRanksPass(int world, const std::vector<std::string>& arguments) {
    std::vector<std::string> command = {"-n", std::to_string(world), ESPALIER_CHECK_RANKS};
    command.insert(command.end(), arguments.begin(), arguments.end());
    const SubprocessResult result = Launch(command);
    EXPECT_EQ(result.exit_code, 0) << result.standard_error;
    EXPECT_EQ(result.standard_output, fmt::format("ok: {} in a world of {}\n", arguments[0], world));
  }
};

TEST_F(Mpirun, SumsAreExactOnWholeNumbers) {
  for (const int world : {1, 2, 3, 4}) ExpectRanksPass(world, {"sums"});
}

// As sums of more than 2^31 - 1 elements are, without the memory for that.
TEST_F(Mpirun, SumsCutIntoCallsAreTheSame) {
  ExpectRanksPass(3, {"sums", "7"});
  ExpectRanksPass(2, {"sums", "1000"});
}

TEST_F(Mpirun, EverySetOfFailingRanksIsAgreedOn) {
  for (const int world : {1, 2, 4}) ExpectRanksPass(world, {"agree"});
}

TEST_F(Mpirun, ARankThatLeavesEndsTheOthers) {
  const SubprocessResult result = Launch({"-n", "3", ESPALIER_CHECK_RANKS, "leave"});
  EXPECT_EQ(result.exit_code, 7) << result.standard_error;
  EXPECT_EQ(result.standard_output, "");
}

TEST_F(Mpirun, AnErrorOfMpiIsADeviceError) {
  const SubprocessResult result = Launch({"-n", "2", ESPALIER_CHECK_RANKS, "truncate"});
  EXPECT_EQ(result.exit_code, 7) << result.standard_error;
  EXPECT_THAT(result.standard_error, HasSubstr("check_ranks: MPI_Bcast failed: MPI_ERR_TRUNCATE"));
}

#ifdef ESPALIER_BINARY

struct RankCase {
  std::string name;
  std::string checkpoint;
  std::string layer;
  std::string input;  // empty: random tokens
  int tp;
  int ep;
};

std::vector<RankCase> RankCases() {
  struct Layer {
    std::string name;
    std::string checkpoint;
    std::string layer;
    std::string input;
  };
  const std::string inputs = kFixtures + "/inputs/";
  const std::vector<Layer> layers = {
      {"bundled", kBundled, "2", ""},
      {"stock", kFixtures + "/stock-qwen3", "1", inputs + "in-5-384-3.m33-f32.safetensors"},
      {"padded", kFixtures + "/stock-deepseek-padded", "1", inputs + "in-5-320-3.m33-f32.safetensors"},
      {"rank_sliced", kFixtures + "/rs-per-expert", "3", inputs + "in-4-128-2.m129-bf16.safetensors"},
      {"shared_h", kFixtures + "/rs-shared-h", "3", inputs + "in-4-128-2.m33-f32.safetensors"},
      {"r7", kFixtures + "/rs-r7", "2", inputs + "in-3-128-2.m33-f32.safetensors"},
      {"exl3_v1", kFixtures + "/v1-k3", "1", inputs + "in-3-128-2.m33-f32.safetensors"},
  };
  std::vector<RankCase> cases;
  for (const Layer& layer : layers) {
    for (const auto& [tp, ep] : {std::pair(2, 1), {3, 1}, {4, 1}, {1, 2}, {2, 2}}) {
      cases.push_back({fmt::format("{}_tp{}_ep{}", layer.name, tp, ep), layer.checkpoint, layer.layer,
                       layer.input, tp, ep});
    }
  }
  return cases;
}

class MpirunLayer : public Mpirun, public ::testing::WithParamInterface<RankCase> {};

// 2e-6 is the gate of the CPU's exact mode.
TEST_P(MpirunLayer, SumOfTheProcessesIsTheLayer) {
  const RankCase& c = GetParam();
  const TemporaryDirectory directory;
  const std::string whole = directory / "whole.safetensors";
  const std::string sum = directory / "sum.safetensors";
  const auto arguments = [&](const std::string& output, std::vector<std::string> more) {
    std::vector<std::string> list = {"run", c.checkpoint, "--layer", c.layer, "-o", output, "--json"};
    if (!c.input.empty()) list.insert(list.end(), {"--input", c.input});
    list.insert(list.end(), more.begin(), more.end());
    return list;
  };
  std::vector<std::string> alone = arguments(whole, {});
  alone.insert(alone.begin(), ESPALIER_BINARY);
  ASSERT_EQ(RunSubprocess(alone).exit_code, 0);

  const SubprocessResult result =
      Espalier(c.tp * c.ep, arguments(sum, {"--tp", std::to_string(c.tp), "--ep", std::to_string(c.ep)}));
  ASSERT_EQ(result.exit_code, 0) << result.standard_error;
  const Json document = Json::parse(result.standard_output, nullptr, false);
  ASSERT_TRUE(document.is_object()) << "not one JSON document: " << result.standard_output;
  EXPECT_EQ(document.at("schema"), "espalier.run/1");
  EXPECT_EQ(document.at("tp"), c.tp);
  EXPECT_EQ(document.at("ep"), c.ep);
  EXPECT_EQ(document.at("processes"), c.tp * c.ep);
  EXPECT_TRUE(document.at("rank").is_null());
  EXPECT_EQ(document.at("output"), sum);
  EXPECT_GT(document.at("seconds").get<double>(), 0);
  EXPECT_EQ(Count(result.standard_error, "no --input"), c.input.empty() ? 1u : 0u);

  const SubprocessResult compared =
      RunSubprocess({ESPALIER_BINARY, "compare", sum, whole, "--max-rel-l2", "2e-6"});
  EXPECT_EQ(compared.exit_code, 0) << compared.standard_output << compared.standard_error;
}

INSTANTIATE_TEST_SUITE_P(Layouts, MpirunLayer, ::testing::ValuesIn(RankCases()),
                         [](const auto& test) { return test.param.name; });

class MpirunRun : public Mpirun {
 protected:
  static std::string ReadText(const std::filesystem::path& path) {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
  }

  // Every process must end with `exit_code`, and one of them must have said so once, on stderr and as JSON.
  // `launch` stands between mpirun and the arguments: the number of processes, and more for some of them.
  static void ExpectRefusal(int processes, const std::vector<std::string>& arguments, int exit_code,
                            const std::string& category, const std::string& message) {
    SCOPED_TRACE(message);
    const TemporaryDirectory directory;
    // mpirun itself ends all as soon as one fails. Under a shell that always succeeds each gets to its end.
    const std::string script =
        R"("$@"; echo $? > )" + directory.path().string() + R"(/code.$OMPI_COMM_WORLD_RANK)";
    std::vector<std::string> command = {
        "-n", std::to_string(processes), "/bin/sh", "-c", script, "sh", ESPALIER_BINARY};
    command.insert(command.end(), arguments.begin(), arguments.end());
    command.push_back("--json");
    const SubprocessResult each = Launch(command);
    EXPECT_EQ(each.exit_code, 0) << each.standard_error;
    for (int rank = 0; rank < processes; ++rank) {
      EXPECT_EQ(ReadText(directory / fmt::format("code.{}", rank)), fmt::format("{}\n", exit_code)) << rank;
    }
    EXPECT_EQ(Count(each.standard_error, "espalier: "), 1u) << each.standard_error;
    EXPECT_THAT(each.standard_error, HasSubstr(fmt::format("espalier: {} error: ", category)));
    EXPECT_THAT(each.standard_error, HasSubstr(message));
    const Json document = Json::parse(each.standard_output, nullptr, false);
    ASSERT_TRUE(document.is_object()) << "not one JSON document: " << each.standard_output;
    EXPECT_EQ(document.at("error").at("category"), category);
    EXPECT_THAT(document.at("error").at("message").get<std::string>(), HasSubstr(message));

    // Straight under mpirun its exit code is that of the processes.
    const SubprocessResult straight = Espalier(processes, arguments);
    EXPECT_EQ(straight.exit_code, exit_code) << straight.standard_error;
    EXPECT_EQ(straight.standard_output, "");
    EXPECT_EQ(Count(straight.standard_error, "espalier: "), 1u) << straight.standard_error;
  }
};

TEST_F(MpirunRun, WrongNumberOfProcesses) {
  const std::vector<std::string> run = {"run", kBundled, "--layer", "0", "--input", "none", "--tp", "2"};
  ExpectRefusal(3, run, 2, "usage", "mpirun started 3 processes; legal: 2");
  ExpectRefusal(1, run, 2, "usage", "mpirun started 1 processes; legal: 2");
  std::vector<std::string> both = run;
  both.insert(both.end(), {"--ep", "2"});
  ExpectRefusal(2, both, 2, "usage", "legal: 4, as --tp 2 and --ep 2 make 4 ranks");
}

TEST_F(MpirunRun, ARankIsNotToBeChosen) {
  ExpectRefusal(2, {"run", kBundled, "--layer", "0", "--tp", "2", "--rank", "1"}, 2, "usage",
                "--rank is not for mpirun");
}

TEST_F(MpirunRun, WhatAllProcessesFindIsSaidOnceWithoutARank) {
  ExpectRefusal(3, {"run", "/absent", "--layer", "0", "--tp", "3"}, 3, "io", "/absent: ");
  ExpectRefusal(2, {"run", kBundled, "--layer", "99", "--tp", "2"}, 2, "usage", "99");
  ExpectRefusal(2, {"run", kBundled, "--layer", "0", "--layre"}, 2, "usage", "--layre");
  ExpectRefusal(2, {"frobnicate"}, 2, "usage", "unknown command");
}

// Only the process with the second half of the experts reads what is wrong here.
TEST_F(MpirunRun, AFailingRankEndsAll) {
  const TemporaryDirectory directory;
  const std::string checkpoint = directory / "checkpoint";
  std::filesystem::copy(kFixtures + "/stock-qwen3", checkpoint);
  size_t patched = 0;
  for (const auto& entry : std::filesystem::directory_iterator(checkpoint)) {
    if (entry.path().extension() != ".safetensors") continue;
    const auto file = PosixFileSystem().Open(entry.path());
    const auto header = ReadSafetensorsHeader(**file);
    for (const TensorInfo& tensor : header->tensors) {
      if (!tensor.name.ends_with("layers.1.mlp.experts.4.gate_proj.mcg")) continue;
      std::fstream stream(entry.path(), std::ios::binary | std::ios::in | std::ios::out);
      stream.seekp(static_cast<std::streamoff>(tensor.offset_bytes));
      stream.write("\1\2\3\4", 4);
      ++patched;
    }
  }
  ASSERT_EQ(patched, 1u);
  const std::string input = kFixtures + "/inputs/in-5-384-3.m33-f32.safetensors";
  const std::string output = directory / "y.safetensors";
  const std::vector<std::string> run = {"run", checkpoint, "--layer", "1", "--input", input, "-o", output};
  std::vector<std::string> split = run;
  split.insert(split.end(), {"--ep", "2"});
  ExpectRefusal(2, split, 4, "format", "rank 1 of 2: ");
  split.insert(split.end(), {"--tp", "2"});
  ExpectRefusal(4, split, 4, "format", "rank 2 of 4: ");
  EXPECT_FALSE(std::filesystem::exists(output));
}

// Stands for a disk that one of the machines does not have.
TEST_F(MpirunRun, AFileThatOneProcessLacks) {
  const TemporaryDirectory directory;
  const std::string here = directory / "here";
  const std::string there = directory / "there";
  std::filesystem::create_directory(there);
  std::filesystem::create_directory(here);
  std::filesystem::create_directory_symlink(kBundled, here + "/checkpoint");
  for (const bool first_lacks : {false, true}) {
    const std::vector<std::string> run = {ESPALIER_BINARY, "run", "checkpoint", "--layer", "0",
                                          "--tokens",      "2",   "--tp",       "2"};
    std::vector<std::string> command = {"-n", "1", "--wdir", first_lacks ? there : here};
    command.insert(command.end(), run.begin(), run.end());
    command.insert(command.end(), {":", "-n", "1", "--wdir", first_lacks ? here : there});
    command.insert(command.end(), run.begin(), run.end());
    const SubprocessResult result = Launch(command);
    EXPECT_EQ(result.exit_code, 3) << result.standard_error;
    EXPECT_EQ(result.standard_output, "");
    EXPECT_EQ(Count(result.standard_error, "espalier: io error: "), 1u) << result.standard_error;
    EXPECT_THAT(result.standard_error,
                HasSubstr(fmt::format("rank {} of 2: checkpoint", first_lacks ? 0 : 1)));
  }
}

TEST_F(MpirunRun, AnOutputThatCannotBeWritten) {
  const TemporaryDirectory directory;
  const std::string input = kFixtures + "/inputs/in-5-384-3.m1.safetensors";
  ExpectRefusal(2,
                {"run", kFixtures + "/stock-qwen3", "--layer", "1", "--input", input, "--tp", "2", "-o",
                 directory / "no" / "such.safetensors"},
                3, "io", "rank 0 of 2: ");
}

TEST_F(MpirunRun, ProcessesWithDifferentArguments) {
  const SubprocessResult result = Launch({"-n", "1", ESPALIER_BINARY, "run", kBundled, "--layer", "0", "--tp",
                                          "2", ":", "-n", "1", ESPALIER_BINARY, "doctor"});
  EXPECT_EQ(result.exit_code, 2) << result.standard_error;
  EXPECT_THAT(result.standard_error, HasSubstr("started with different arguments"));
}

// As where each machine has a file of its own under the same name.
TEST_F(MpirunRun, ProcessesWithDifferentInputs) {
  const TemporaryDirectory directory;
  const std::vector<std::string> run = {
      ESPALIER_BINARY, "run",          kFixtures + "/stock-qwen3", "--layer", "1", "--tp", "2",
      "--input",       "x.safetensors"};
  std::vector<std::string> command;
  for (const std::string tokens : {"m1", "m33-f32"}) {
    const std::string folder = directory / tokens;
    std::filesystem::create_directory(folder);
    std::filesystem::copy(kFixtures + "/inputs/in-5-384-3." + tokens + ".safetensors",
                          folder + "/x.safetensors");
    if (!command.empty()) command.emplace_back(":");
    command.insert(command.end(), {"-n", "1", "--wdir", folder});
    command.insert(command.end(), run.begin(), run.end());
  }
  const SubprocessResult result = Launch(command);
  EXPECT_EQ(result.exit_code, 6) << result.standard_error;
  EXPECT_THAT(result.standard_error, HasSubstr("the processes have different inputs"));
  // Of one shape, with one byte between them.
  const std::string second = directory.path() / "m33-f32" / "x.safetensors";
  std::filesystem::copy_file(directory.path() / "m1" / "x.safetensors", second,
                             std::filesystem::copy_options::overwrite_existing);
  std::fstream file(second, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-1, std::ios::end);
  file.put('\x3c');
  file.close();
  const SubprocessResult close = Launch(command);
  EXPECT_EQ(close.exit_code, 6) << close.standard_error;
  EXPECT_THAT(close.standard_error, HasSubstr("the processes have different inputs"));
}

TEST_F(MpirunRun, OtherCommandsAreForOneProcess) {
  for (const std::vector<std::string>& command : std::vector<std::vector<std::string> >{
           {"inspect", kBundled},
           {"verify", kBundled},
           {"compare", kBundled, kBundled},
           {"decode", kBundled, "model.layers.0.mlp.experts.0.up_proj", "-o", "/dev/null"}}) {
    ExpectRefusal(2, command, 2, "usage", command[0] + " is for one process, 2 were started");
  }
  EXPECT_EQ(Espalier(1, {"inspect", kBundled}).exit_code, 0);
}

TEST_F(MpirunRun, DoctorAndHelpAreSaidOnce) {
  const SubprocessResult doctor = Espalier(3, {"doctor", "--json"});
  EXPECT_EQ(doctor.exit_code, 0) << doctor.standard_error;
  const Json document = Json::parse(doctor.standard_output, nullptr, false);
  ASSERT_TRUE(document.is_object()) << doctor.standard_output;
  EXPECT_THAT(document.at("mpi").get<std::string>(), HasSubstr("MPI"));
  const SubprocessResult help = Espalier(3, {"run", "--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_EQ(Count(help.standard_output, "Example:"), 1u);
}

#endif  // ESPALIER_BINARY
#endif  // ESPALIER_MPIEXEC

#ifdef ESPALIER_BINARY

// Another vendor's launcher, or a build without MPI: n processes that do not know of each other.
TEST(Launched, ProcessesThatCannotMeetRefuse) {
  for (const std::string rank : {"0", "1"}) {
    SubprocessOptions options;
    options.environment = {{"PMI_RANK", rank}, {"PMI_SIZE", "3"}};
    const SubprocessResult result = RunSubprocess({ESPALIER_BINARY, "inspect", kBundled, "--json"}, options);
    EXPECT_EQ(result.exit_code, 5) << result.standard_error;
    EXPECT_EQ(Count(result.standard_output, "\"unsupported\""), rank == "0" ? 1u : 0u);
    EXPECT_EQ(Count(result.standard_error, "espalier: unsupported error: "), rank == "0" ? 1u : 0u);
  }
}

TEST(Launched, DoctorSaysWhatIsBuilt) {
  const SubprocessResult result = RunSubprocess({ESPALIER_BINARY, "doctor", "--json"});
  ASSERT_EQ(result.exit_code, 0);
  const Json document = Json::parse(result.standard_output);
#ifdef ESPALIER_MPIEXEC
  EXPECT_THAT(document.at("mpi").get<std::string>(), HasSubstr("MPI"));
#else
  EXPECT_EQ(document.at("mpi"), "not in this build");
#endif
#ifdef ESPALIER_HAS_NCCL
  EXPECT_THAT(document.at("nccl").get<std::string>(), ::testing::MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+"));
#else
  EXPECT_EQ(document.at("nccl"), "not in this build");
#endif
}

#endif  // ESPALIER_BINARY

}  // namespace
}  // namespace espalier
