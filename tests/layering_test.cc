// SPDX-License-Identifier: Apache-2.0
//
// The rules of docs/architecture.md about which file may include what, checked on the sources themselves.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// A folder may include itself and folders of a lower number. Folders of one number do not see each other.
const std::map<std::string, int, std::less<>> kFolderRank = {
    {"base", 0}, {"checkpoint", 1}, {"moe", 2},    {"reference", 3}, {"cpu", 4},
    {"cuda", 5}, {"encode", 5},     {"repack", 5}, {"dist", 5},      {"c", 6},
};
const std::set<std::string, std::less<>> kBackendFolders = {"reference", "cpu", "cuda"};

// Conditional compilation outside of include guards: file -> the only names it may ask for.
const std::map<std::string, std::set<std::string>, std::less<>> kAllowedConditions = {
    // The instruction of a loop that waits.
    {"src/base/thread_pool.cc", {"defined(__x86_64__)", "defined(__aarch64__)"}},
    {"src/cpu/kernel_list.cc", {"defined(__x86_64__)"}},
    {"src/moe/backend_list.cc", {"ESPALIER_HAS_CUDA"}},
    // The thin functions around instructions that not every architecture has.
    {"src/cuda/ptx.cuh", {"__CUDA_ARCH__ >= 900"}},
    {"src/cuda/ptx_sm90a.cuh", {"__CUDA_ARCH_FEAT_SM90_ALL"}},
    // C and C++ read the same file.
    {"include/espalier/espalier_c.h", {"__cplusplus"}},
    // Says how it was built.
    {"cli/doctor.cc", {"defined(__clang__)", "defined(__x86_64__)"}},
};

std::string ReadFile(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

struct Include {
  std::string target;
  bool quoted = false;
};

std::vector<Include> IncludesOf(const std::string& text) {
  static const std::regex kInclude(R"re((?:^|\n)[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"])re");
  std::vector<Include> includes;
  for (std::sregex_iterator it(text.begin(), text.end(), kInclude), end; it != end; ++it) {
    includes.push_back({.target = (*it)[2], .quoted = (*it)[1] == "\""});
  }
  return includes;
}

// "src/moe/run_moe.cc" -> "moe", "cli/main.cc" -> "cli".
std::string FolderOf(std::string_view path) {
  std::string first(path.substr(0, path.find('/')));
  if (first != "src") return first;
  path.remove_prefix(4);
  return std::string(path.substr(0, path.find('/')));
}

bool StartsWithAny(std::string_view text, std::initializer_list<std::string_view> prefixes) {
  return std::ranges::any_of(prefixes, [&](std::string_view prefix) { return text.starts_with(prefix); });
}

bool IsJson(std::string_view target) { return StartsWithAny(target, {"nlohmann/", "simdjson"}); }
bool IsDevice(std::string_view target) {
  return StartsWithAny(target, {"cuda", "cub/", "torch/", "ATen/", "c10/"});
}
bool IsCommunication(std::string_view target) { return target == "mpi.h" || target == "nccl.h"; }

// Empty when the file at `path` (relative to the project) may include `include`, else why not.
std::string WhyNot(const std::string& path, const Include& include) {
  const std::string folder = FolderOf(path);
  const std::string& target = include.target;
  const std::string target_folder = FolderOf(target);
  const auto target_rank = kFolderRank.find(target_folder);
  const bool internal = include.quoted && target_rank != kFolderRank.end();

  if (path.starts_with("include/")) {
    if (include.quoted) return "a public header includes public headers only, in angle brackets";
    if (IsJson(target) || IsDevice(target) || target.starts_with("fmt/")) {
      return "a public header is free of JSON, fmt, CUDA and torch";
    }
  }
  if (path.starts_with("examples/") &&
      (internal || target.starts_with("src/") || target.starts_with("cli/"))) {
    return "examples use the public headers only";
  }
  if (path.starts_with("src/")) {
    const auto rank = kFolderRank.find(folder);
    if (rank == kFolderRank.end()) return "src/" + folder + " has no place in the order of folders";
    if (include.quoted && !internal) return "quoted includes of src/ name a folder of src/";
    if (internal && target_folder != folder && target_rank->second >= rank->second) {
      return folder + " may not include " + target_folder + ": includes point downwards";
    }
    if (internal && kBackendFolders.contains(folder) && target_folder == "checkpoint") {
      return "a backend never opens a file: it may not include checkpoint/";
    }
    if (target.starts_with("nlohmann/")) return "nlohmann-json is for the command line, tests and examples";
    if (IsDevice(target) && folder != "cuda" && path != "src/dist/nccl_communicator.cc") {
      return "CUDA stays in src/cuda and in what sums between GPUs";
    }
  }
  if ((path.starts_with("cli/") || path.starts_with("examples/")) && !include.quoted && IsDevice(target)) {
    return "the command line sees CUDA through cuda/device_runtime.h only";
  }
  if (IsCommunication(target) && (folder != "dist" || !path.ends_with(".cc"))) {
    return "MPI and NCCL stay in the sources of src/dist";
  }
  return "";
}

// Conditions (#if, #ifdef, #elif ...) of a file apart from its include guard and the defaults of an X-macro
// list ("#ifndef A" followed at once by "#define A").
std::vector<std::string> ConditionsOf(const std::string& text) {
  static const std::regex kCondition(
      R"((?:^|\n)[ \t]*#[ \t]*(if|ifdef|ifndef|elif|elifdef|elifndef)[ \t]+([^\n]*)(?:\n#define[ \t]+(\w+))?)");
  std::vector<std::string> conditions;
  // The optional #define is only peeked at: the search goes on right behind the condition.
  for (auto it = text.cbegin(); it != text.cend();) {
    std::smatch match;
    if (!std::regex_search(it, text.cend(), match, kCondition)) break;
    const bool guard = match[1] == "ifndef" && match[3].matched && match[3] == match[2];
    if (!guard) conditions.push_back(match[2]);
    it = match[2].second;
  }
  return conditions;
}

std::vector<std::string> ViolationsOf(const std::string& path, const std::string& text) {
  std::vector<std::string> violations;
  for (const Include& include : IncludesOf(text)) {
    if (std::string why = WhyNot(path, include); !why.empty()) {
      violations.push_back(fmt::format("{} includes {}: {}", path, include.target, why));
    }
  }
  const auto allowed = kAllowedConditions.find(path);
  for (const std::string& condition : ConditionsOf(text)) {
    if (allowed == kAllowedConditions.end() || !allowed->second.contains(condition)) {
      violations.push_back(
          fmt::format("{}: conditional compilation on '{}' is not on the list", path, condition));
    }
  }
  return violations;
}

// Every C++ source of the given top folders, relative to the project.
std::vector<std::string> Sources(std::initializer_list<std::string_view> folders) {
  static const std::set<std::string> kSuffixes = {".h", ".cc", ".cu", ".cuh", ".def", ".in"};
  const fs::path root = ESPALIER_SOURCE_DIR;
  std::vector<std::string> paths;
  for (const std::string_view folder : folders) {
    if (!fs::exists(root / folder)) continue;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(root / folder)) {
      if (entry.is_regular_file() && kSuffixes.contains(entry.path().extension().string())) {
        paths.push_back(entry.path().lexically_relative(root).generic_string());
      }
    }
  }
  return paths;
}

TEST(Layering, SourcesKeepTheRules) {
  const std::vector<std::string> paths = Sources({"include", "src", "cli", "examples"});
  std::map<std::string, int> files_by_folder;
  size_t num_includes = 0;
  std::vector<std::string> violations;
  for (const std::string& path : paths) {
    const std::string text = ReadFile(fs::path(ESPALIER_SOURCE_DIR) / path);
    ++files_by_folder[FolderOf(path)];
    num_includes += IncludesOf(text).size();
    std::ranges::move(ViolationsOf(path, text), std::back_inserter(violations));
  }
  EXPECT_THAT(violations, IsEmpty());
  // A scan that found nothing has proved nothing.
  for (const char* folder :
       {"include", "base", "checkpoint", "moe", "reference", "cpu", "dist", "c", "cli", "examples"}) {
    EXPECT_GT(files_by_folder[folder], 0) << folder;
  }
  EXPECT_GT(num_includes, 3 * paths.size());
}

TEST(Layering, QuotedIncludesOfTheLibraryExist) {
  size_t num_checked = 0;
  for (const std::string& path : Sources({"src"})) {
    for (const Include& include : IncludesOf(ReadFile(fs::path(ESPALIER_SOURCE_DIR) / path))) {
      if (!include.quoted) continue;
      ++num_checked;
      EXPECT_TRUE(fs::is_regular_file(fs::path(ESPALIER_SOURCE_DIR) / "src" / include.target))
          << path << " includes " << include.target;
    }
  }
  EXPECT_GT(num_checked, 20u);
}

TEST(Layering, EverySourceStatesItsLicence) {
  const std::vector<std::string> paths =
      Sources({"include", "src", "cli", "examples", "tests", "fuzz", "bench"});
  EXPECT_GT(paths.size(), 40u);
  for (const std::string& path : paths) {
    const std::string text = ReadFile(fs::path(ESPALIER_SOURCE_DIR) / path);
    EXPECT_TRUE(text.starts_with("// SPDX-License-Identifier: Apache-2.0\n")) << path;
  }
}

TEST(Layering, HeadersHaveTheirOwnGuard) {
  size_t num_headers = 0;
  for (const std::string& path : Sources({"include", "src"})) {
    if (!path.ends_with(".h")) continue;
    ++num_headers;
    std::string guard = path;
    if (guard.starts_with("include/")) guard.erase(0, std::string_view("include/").size());
    if (guard.starts_with("src/")) guard = "espalier/" + guard;
    std::ranges::transform(guard, guard.begin(), [](char c) {
      return c >= 'a' && c <= 'z'               ? static_cast<char>(c - 'a' + 'A')
             : c == '/' || c == '.' || c == '-' ? '_'
                                                : c;
    });
    guard += '_';
    EXPECT_THAT(ReadFile(fs::path(ESPALIER_SOURCE_DIR) / path),
                HasSubstr("#ifndef " + guard + "\n#define " + guard))
        << path;
  }
  EXPECT_GT(num_headers, 10u);
}

struct BadCase {
  const char* path;
  const char* text;
};

class LayeringRule : public ::testing::TestWithParam<BadCase> {};

TEST_P(LayeringRule, RefusesABreach) {
  EXPECT_THAT(ViolationsOf(GetParam().path, GetParam().text), SizeIs(1));
}

INSTANTIATE_TEST_SUITE_P(
    AllRules, LayeringRule,
    ::testing::Values(BadCase{"src/base/a.cc", "#include \"checkpoint/layout.h\"\n"},
                      BadCase{"src/checkpoint/a.cc", "// x\n#include \"moe/route_pack.h\"\n"},
                      BadCase{"src/checkpoint/a.cc", "#include \"reference/codebook.h\"\n"},
                      BadCase{"src/moe/a.cc", "#include \"cpu/cpu_backend.h\"\n"},
                      BadCase{"src/reference/a.cc", "#include \"checkpoint/layout.h\"\n"},
                      BadCase{"src/cpu/a.cc", "#include \"checkpoint/layout.h\"\n"},
                      BadCase{"src/cuda/a.cc", "#include \"encode/viterbi.h\"\n"},
                      BadCase{"src/new_folder/a.cc", "#include <vector>\n"},
                      BadCase{"src/cpu/a.cc", "#include \"cpu_backend.h\"\n"},
                      BadCase{"src/checkpoint/a.cc", "#include <nlohmann/json.hpp>\n"},
                      BadCase{"src/moe/a.cc", "#include <cuda_runtime.h>\n"},
                      BadCase{"src/moe/a.cc", "#include \"dist/communicator.h\"\n"},
                      BadCase{"src/cuda/a.cc", "#include \"dist/communicator.h\"\n"},
                      BadCase{"src/moe/a.cc", "#include <mpi.h>\n"},
                      BadCase{"src/dist/communicator.h", "#include <mpi.h>\n"},
                      BadCase{"src/dist/mpi_world.cc", "#include <cuda_runtime_api.h>\n"},
                      BadCase{"src/dist/a.cc", "#include \"c/call.h\"\n"},
                      BadCase{"cli/a.cc", "#include <nccl.h>\n"},
                      BadCase{"cli/a.cc", "#include <cuda_runtime.h>\n"},
                      BadCase{"include/espalier/a.h", "#include \"base/file.h\"\n"},
                      BadCase{"include/espalier/a.h", "#include <fmt/format.h>\n"},
                      BadCase{"include/espalier/a.h", "#include <simdjson.h>\n"},
                      BadCase{"include/espalier/a.h", "#include <torch/torch.h>\n"},
                      BadCase{"examples/tiny_lm/main.cc", "#include \"base/half.h\"\n"},
                      BadCase{"src/cpu/a.cc", "int a;\n#ifdef __AVX2__\n"},
                      BadCase{"src/cpu/a.cc", "  # if defined(_WIN32)\n"},
                      BadCase{"src/base/parallel.cc", "#if ESPALIER_OTHER\n"},
                      BadCase{"src/cpu/a.h", "#ifndef A\n#define A\n#ifndef B\n#define C\n"}));

TEST(Layering, AllowsWhatTheRulesAllow) {
  EXPECT_THAT(ViolationsOf("src/cpu/a.h",
                           "#ifndef A\n#define A\n#include \"cpu/b.h\"\n#include \"reference/codebook.h\"\n"
                           "#include <espalier/moe.h>\n#include <vector>\n"),
              IsEmpty());
  EXPECT_THAT(ViolationsOf("cli/a.cc",
                           "#include <nlohmann/json.hpp>\n#include \"base/file.h\"\n"
                           "#include \"cuda/device_runtime.h\"\n"),
              IsEmpty());
  EXPECT_THAT(ViolationsOf("src/dist/a.cc", "#include <mpi.h>\n#include <nccl.h>\n"), IsEmpty());
  EXPECT_THAT(ViolationsOf("src/moe/backend_list.cc", "#ifdef ESPALIER_HAS_CUDA\n#else\n#endif\n"),
              IsEmpty());
}

}  // namespace
