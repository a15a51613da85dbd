// SPDX-License-Identifier: Apache-2.0
//
// The documents against the program: tables that restate formats.def, exit codes, links, and every command
// and its output in README.md.
#include <espalier/formats.h>
#include <espalier/status.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

namespace fs = std::filesystem;
using ::testing::Contains;

const fs::path kRoot = ESPALIER_SOURCE_DIR;

std::string ReadFile(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(stream), {}};
  EXPECT_FALSE(text.empty()) << path << " is missing or empty";
  return text;
}

std::vector<std::string> LinesOf(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// What stands between "<!-- generated: NAME -->" and "<!-- end -->".
std::string GeneratedBlock(const std::string& text, std::string_view name) {
  const std::string begin = fmt::format("<!-- generated: {} -->\n", name);
  const size_t at = text.find(begin);
  if (at == std::string::npos) return "";
  const size_t from = at + begin.size();
  return text.substr(from, text.find("<!-- end -->", from) - from);
}

std::string CodebookTable() {
  std::string table = "| number | name | marker tensor | its value |\n|---|---|---|---|\n";
#define ESPALIER_CODEBOOK(enumerator, number, name, marker_tensor, multiplier) \
  table += std::string_view(marker_tensor).empty()                             \
               ? fmt::format("| {} | `{}` | none | |\n", number, name)         \
               : fmt::format("| {} | `{}` | `.{}` | 0x{:08X} |\n", number, name, marker_tensor, multiplier);
#include <espalier/formats.def>
  return table;
}

std::string BitsTable() {
  std::string table = "| K | last dimension of a trellis | bytes of a tile |\n|---|---|---|\n";
#define ESPALIER_BITS(bits) \
  table += fmt::format("| {} | {} | {} |\n", bits, 16 * bits, espalier::TileBytes(bits));
#include <espalier/formats.def>
  return table;
}

std::string DtypeTable() {
  std::string table = "| number | name | bits |\n|---|---|---|\n";
#define ESPALIER_DTYPE(enumerator, number, name, bits_per_element) \
  table += fmt::format("| {} | `{}` | {} |\n", number, name, bits_per_element);
#include <espalier/formats.def>
  return table;
}

std::string ActivationTable() {
  std::string table = "| number | name | gate matrix | parameters |\n|---|---|---|---|\n";
#define ESPALIER_ACTIVATION(enumerator, number, name, has_gate, num_parameters) \
  table += fmt::format("| {} | `{}` | {} | {} |\n", number, name, has_gate ? "yes" : "no", num_parameters);
#include <espalier/formats.def>
  return table;
}

TEST(Docs, FormatTablesRestateFormatsDef) {
  const std::string text = ReadFile(kRoot / "docs/format.md");
  EXPECT_EQ(GeneratedBlock(text, "codebooks"), CodebookTable());
  EXPECT_EQ(GeneratedBlock(text, "bits"), BitsTable());
  EXPECT_EQ(GeneratedBlock(text, "dtypes"), DtypeTable());
  EXPECT_EQ(GeneratedBlock(text, "activations"), ActivationTable());
}

TEST(Docs, ErrorsListsEveryCategoryWithItsExitCode) {
  std::string table = "| category | exit code |\n|---|---|\n";
  int num_categories = 0;
  for (int number = 0; number < 64; ++number) {
    const auto code = static_cast<espalier::StatusCode>(number);
    const std::string_view name = espalier::StatusCodeName(code);
    if (name == "unknown") continue;
    ++num_categories;
    table += fmt::format("| `{}` | {} |\n", name, espalier::ExitCode(code));
  }
  EXPECT_EQ(num_categories, 8);
  EXPECT_EQ(GeneratedBlock(ReadFile(kRoot / "docs/errors.md"), "exit codes"), table);
}

std::vector<fs::path> MarkdownFiles() {
  static const std::set<std::string> kSkipped = {"build", ".git", ".venv"};
  std::vector<fs::path> paths;
  for (auto it = fs::recursive_directory_iterator(kRoot); it != fs::recursive_directory_iterator(); ++it) {
    const std::string name = it->path().filename().string();
    if (it->is_directory() && (kSkipped.contains(name) || name.starts_with("build")))
      it.disable_recursion_pending();
    if (it->is_regular_file() && it->path().extension() == ".md") paths.push_back(it->path());
  }
  return paths;
}

TEST(Docs, RelativeLinksLeadSomewhere) {
  static const std::regex kLink(R"(\]\(([^)#\s]+)[^)]*\))");
  size_t num_links = 0;
  for (const fs::path& path : MarkdownFiles()) {
    const std::string text = ReadFile(path);
    for (std::sregex_iterator it(text.begin(), text.end(), kLink), end; it != end; ++it) {
      const std::string target = (*it)[1];
      if (target.starts_with("http")) continue;
      ++num_links;
      EXPECT_TRUE(fs::exists(path.parent_path() / target)) << path << " links to " << target;
    }
  }
  EXPECT_GT(num_links, 10u);
}

TEST(Docs, ReadmeOpensWithTheTwoCommands) {
  const std::string text = ReadFile(kRoot / "README.md");
  const std::string makefile = ReadFile(kRoot / "Makefile");
  const size_t demo = text.find("make demo");
  const size_t test = text.find("make test");
  ASSERT_NE(test, std::string::npos);
  EXPECT_LT(demo, test);
  // Before the second heading: nobody should have to scroll.
  EXPECT_LT(test, text.find("\n## "));
  static const std::regex kMake("(?:\n|`|&& )make ([a-z]+)");
  for (std::sregex_iterator it(text.begin(), text.end(), kMake), end; it != end; ++it) {
    EXPECT_NE(makefile.find("\n" + std::string((*it)[1]) + ":"), std::string::npos) << (*it)[0];
  }
}

TEST(Docs, ReadmeProgramIsTheOneThatInstallTestBuilds) {
  const std::string text = ReadFile(kRoot / "README.md");
  const std::string program = ReadFile(kRoot / "tests/install/main.cc");
  const std::string licence = "// SPDX-License-Identifier: Apache-2.0\n";
  ASSERT_TRUE(program.starts_with(licence));
  EXPECT_NE(text.find("```cpp\n" + program.substr(licence.size()) + "```\n"), std::string::npos);
}

TEST(Docs, ProgramInCIsTheExample) {
  const std::string program = ReadFile(kRoot / "examples/c/one_layer.c");
  const std::string licence = "// SPDX-License-Identifier: Apache-2.0\n";
  ASSERT_TRUE(program.starts_with(licence));
  EXPECT_NE(ReadFile(kRoot / "docs/c.md").find("```c\n" + program.substr(licence.size()) + "```\n"),
            std::string::npos);
}

#ifdef ESPALIER_BINARY

struct Ran {
  int exit_code = -1;
  std::string output;  // stdout and stderr together
};

Ran Shell(const std::string& command) {
  Ran ran;
  FILE* pipe = popen(("( " + command + " ) 2>&1 </dev/null").c_str(), "r");
  if (pipe == nullptr) return ran;
  char buffer[4096];
  for (size_t n = 0; (n = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) ran.output.append(buffer, n);
  const int status = pclose(pipe);
  if (WIFEXITED(status)) ran.exit_code = WEXITSTATUS(status);
  return ran;
}

// A command of a ```console block ("$ command") with the lines that follow it.
struct Example {
  std::string command;
  std::vector<std::string> output;
};

std::vector<Example> ExamplesOf(const std::string& text) {
  std::vector<Example> examples;
  bool inside = false;
  for (const std::string& line : LinesOf(text)) {
    if (line.starts_with("```")) {
      inside = line == "```console";
    } else if (inside && line.starts_with("$ ")) {
      examples.push_back({.command = line.substr(2), .output = {}});
    } else if (inside && !examples.empty()) {
      examples.back().output.push_back(line);
    }
  }
  return examples;
}

// Measured reals (times, errors) differ from machine to machine: each becomes '#' with the unit of bytes
// behind it, as memory of the threads may, and the blanks beside it, which depend on its width, become one.
// Whole numbers stay; blanks at the end of a line do not.
std::string WithoutReals(const std::string& line) {
  static const std::regex kReal(R"( *-?[0-9]+(\.[0-9]+(e[-+]?[0-9]+)?|e[-+]?[0-9]+)( [KMG]iB)?)");
  std::string text = std::regex_replace(line, kReal, " #");
  while (text.ends_with(' ')) text.pop_back();
  return text;
}

// A line "..." of the document stands for any number of lines.
bool Matches(const std::vector<std::string>& document, size_t d, const std::vector<std::string>& printed,
             size_t p) {
  if (d == document.size()) return p == printed.size();
  if (document[d] == "...") {
    for (size_t next = p; next <= printed.size(); ++next) {
      if (Matches(document, d + 1, printed, next)) return true;
    }
    return false;
  }
  return p < printed.size() && WithoutReals(document[d]) == WithoutReals(printed[p]) &&
         Matches(document, d + 1, printed, p + 1);
}

class ReadmeExamples : public ::testing::Test {
 protected:
  // The commands run in an empty folder that looks like the project's: data/ and build/release/.
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "espalier-docs-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    fs::create_directories(folder_ / "build/release");
    fs::create_symlink(kRoot / "data", folder_ / "data");
    fs::create_symlink(ESPALIER_BINARY, folder_ / "build/release/espalier");
    text_ = ReadFile(kRoot / "README.md");
  }
  void TearDown() override { fs::remove_all(folder_); }

  Ran Run(const std::string& command) { return Shell("cd '" + folder_.string() + "' && " + command); }

  fs::path folder_;
  std::string text_;
};

TEST_F(ReadmeExamples, PrintWhatTheReadmeShows) {
  size_t num_run = 0;
  for (const Example& example : ExamplesOf(text_)) {
    if (!example.command.starts_with("build/release/espalier ")) continue;
    ++num_run;
    const Ran ran = Run(example.command);
    EXPECT_EQ(ran.exit_code, 0) << example.command << "\n" << ran.output;
    EXPECT_TRUE(Matches(example.output, 0, LinesOf(ran.output), 0))
        << "README.md shows something else for: " << example.command << "\nit prints now:\n"
        << ran.output;
  }
  EXPECT_GE(num_run, 5u);
}

TEST_F(ReadmeExamples, NameVerbsThatExist) {
  static const std::regex kVerb("espalier ([a-z]+)");
  const std::string help = Run("build/release/espalier --help").output;
  std::set<std::string> verbs;
  for (const Example& example : ExamplesOf(text_)) {
    std::smatch match;
    if (std::regex_search(example.command, match, kVerb)) verbs.insert(match[1]);
  }
  for (const std::string& verb : verbs) {
    EXPECT_THAT(help, ::testing::HasSubstr(verb));
    EXPECT_EQ(Run("build/release/espalier " + verb + " --help").exit_code, 0) << verb;
  }
  for (const char* verb : {"doctor", "inspect", "decode", "run", "verify", "compare"}) {
    EXPECT_THAT(verbs, Contains(std::string(verb)));
  }
}

#ifdef ESPALIER_ONE_LAYER
TEST_F(ReadmeExamples, ProgramInCPrintsWhatItsPageShows) {
  fs::create_symlink(ESPALIER_ONE_LAYER, folder_ / "build/release/one_layer");
  const std::vector<Example> examples = ExamplesOf(ReadFile(kRoot / "docs/c.md"));
  ASSERT_EQ(examples.size(), 1u);
  const Ran ran = Run(examples[0].command);
  EXPECT_EQ(ran.exit_code, 0);
  EXPECT_TRUE(Matches(examples[0].output, 0, LinesOf(ran.output), 0)) << ran.output;
}
#endif  // ESPALIER_ONE_LAYER

TEST(DocsMatching, ComparesAllButReals) {
  EXPECT_TRUE(Matches({"a 1 0.5", "...", "z"}, 0, {"a 1 0.75e-3", "b", "c", "z"}, 0));
  EXPECT_TRUE(Matches({"...", "z"}, 0, {"z"}, 0));
  EXPECT_FALSE(Matches({"a 1 0.5"}, 0, {"a 2 0.5"}, 0));
  EXPECT_TRUE(Matches({"a  64.00 KiB  b"}, 0, {"a 1.00 MiB  b"}, 0));
  EXPECT_FALSE(Matches({"a 64 KiB"}, 0, {"a 1 MiB"}, 0));
  EXPECT_FALSE(Matches({"a"}, 0, {"a", "b"}, 0));
  EXPECT_FALSE(Matches({"a", "b"}, 0, {"a"}, 0));
  EXPECT_FALSE(Matches({"rel 0.5"}, 0, {"rel nan"}, 0));
}

#endif  // ESPALIER_BINARY

}  // namespace
