// SPDX-License-Identifier: Apache-2.0
//
// The binary side of the C interface: the header as C99 and as C++, and sizes, offsets, numbers, signatures
// and exported symbols against the list that programs of today were compiled with. A test that fails here for
// anything but an addition breaks them: then ESPALIER_C_ABI changes too. ESPALIER_UPDATE_ABI=1 writes the
// list.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace {

namespace fs = std::filesystem;
using ::testing::IsEmpty;

const fs::path kHeader = fs::path(ESPALIER_SOURCE_DIR) / "include/espalier/espalier_c.h";
const fs::path kList = fs::path(ESPALIER_TEST_DATA) / "abi/espalier_c.txt";

std::string ReadFile(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

// stdout and stderr; fails the test when the command does.
std::string Shell(const std::string& command) {
  std::string output;
  FILE* pipe = popen((command + " 2>&1 </dev/null").c_str(), "r");
  if (pipe == nullptr) {
    ADD_FAILURE() << command;
    return output;
  }
  char buffer[4096];
  for (size_t n = 0; (n = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) output.append(buffer, n);
  EXPECT_EQ(pclose(pipe), 0) << command << "\n" << output;
  return output;
}

struct Header {
  struct Struct {
    std::string name;
    std::vector<std::string> fields;
  };
  std::vector<Struct> structs;
  std::vector<std::pair<std::string, std::vector<std::string>>> enums;
  std::vector<std::pair<std::string, std::string>> functions;  // name, signature
};

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) {
    if (part.find_first_not_of(" \n") != std::string::npos) parts.push_back(part);
  }
  return parts;
}

// The header keeps to a few forms, of which every one is found here: FindsEverything counts them another way.
Header ReadHeader() {
  const std::string text = std::regex_replace(ReadFile(kHeader), std::regex("//[^\n]*"), "");
  Header header;
  static const std::regex kStruct(R"(typedef struct (\w+) \{([^}]*)\} \1;)");
  static const std::regex kEnum(R"(\nenum (\w+) \{([^}]*)\};)");
  static const std::regex kFunction(R"(ESPALIER_C_API ([^;(]*?)(\w+)\(([^;]*)\);)");
  static const std::regex kLastName(R"((\w+)(\[\d+\])?\s*$)");
  for (std::sregex_iterator it(text.begin(), text.end(), kStruct), end; it != end; ++it) {
    Header::Struct entry{.name = (*it)[1], .fields = {}};
    for (const std::string& field : Split((*it)[2], ';')) {
      std::smatch name;
      if (std::regex_search(field, name, kLastName)) entry.fields.push_back(name[1]);
    }
    header.structs.push_back(std::move(entry));
  }
  for (std::sregex_iterator it(text.begin(), text.end(), kEnum), end; it != end; ++it) {
    std::vector<std::string> names;
    for (const std::string& entry : Split((*it)[2], ',')) {
      std::smatch name;
      if (std::regex_search(entry, name, std::regex(R"(\w+)"))) names.push_back(name[0]);
    }
    header.enums.emplace_back((*it)[1], std::move(names));
  }
  for (std::sregex_iterator it(text.begin(), text.end(), kFunction), end; it != end; ++it) {
    const std::string signature = fmt::format("{}{}({})", (*it)[1].str(), (*it)[2].str(), (*it)[3].str());
    header.functions.emplace_back((*it)[2], std::regex_replace(signature, std::regex(R"(\s+)"), " "));
  }
  return header;
}

// A C program that prints what the compiler makes of the header.
std::string Program(const Header& header) {
  std::string program =
      "#include <espalier/espalier_c.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n"
      "  printf(\"abi %d\\n\", ESPALIER_C_ABI);\n";
  for (const auto& [name, values] : header.enums) {
    program += fmt::format("  puts(\"enum {}\");\n", name);
    for (const std::string& value : values)
      program += fmt::format("  printf(\"  {} %d\\n\", (int){});\n", value, value);
  }
  for (const Header::Struct& entry : header.structs) {
    program += fmt::format("  printf(\"struct {} %d\\n\", (int)sizeof({}));\n", entry.name, entry.name);
    for (const std::string& field : entry.fields) {
      program +=
          fmt::format("  printf(\"  {} %d %d\\n\", (int)offsetof({}, {}), (int)sizeof((({}*)0)->{}));\n",
                      field, entry.name, field, entry.name, field);
    }
  }
  return program + "  return 0;\n}\n";
}

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (fs::temp_directory_path() / "espalier-abi-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = name;
  }
  ~TemporaryFolder() { fs::remove_all(path_); }

  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

std::string CompileAndRun(const std::string& compiler, const std::string& flags, const std::string& suffix,
                          const std::string& program) {
  const TemporaryFolder folder;
  const fs::path source = folder.path() / ("program." + suffix);
  std::ofstream(source) << program;
  const fs::path binary = folder.path() / "program";
  Shell(fmt::format("'{}' {} -pedantic -Wall -Wextra -Werror -I'{}/include' '{}' -o '{}'", compiler, flags,
                    ESPALIER_SOURCE_DIR, source.string(), binary.string()));
  return Shell(fmt::format("'{}'", binary.string()));
}

TEST(CAbi, FindsEverything) {
  const Header header = ReadHeader();
  const std::string text = ReadFile(kHeader);
  const auto count = [&](const char* pattern) {
    const std::regex regex(pattern);
    return static_cast<size_t>(
        std::distance(std::sregex_iterator(text.begin(), text.end(), regex), std::sregex_iterator()));
  };
  EXPECT_EQ(header.structs.size(), count("typedef struct \\w+ \\{"));
  EXPECT_EQ(header.enums.size(), count("\nenum "));
  EXPECT_EQ(header.functions.size(), count("\nESPALIER_C_API "));
  EXPECT_GT(header.functions.size(), 40u);
}

// Plain C99 and plain C++, on this compiler: the same layout from both, and the one of the list.
TEST(CAbi, IsTheOneThatProgramsWereCompiledWith) {
  const Header header = ReadHeader();
  const std::string program = Program(header);
  std::string found = CompileAndRun(ESPALIER_C_COMPILER, "-std=c99", "c", program);
  EXPECT_EQ(CompileAndRun(ESPALIER_CXX_COMPILER, "-std=c++98 -Wno-long-long", "cc", program), found);
  for (const auto& [name, signature] : header.functions) found += fmt::format("function {}\n", signature);
  if (const char* update = getenv("ESPALIER_UPDATE_ABI"); update != nullptr && *update == '1') {
    std::ofstream(kList) << found;
  }
  EXPECT_EQ(found, ReadFile(kList)) << "programs that are there would break; see the head of this file";
}

// All that the header declares, and nothing else: neither the core nor what it is linked with.
TEST(CAbi, ExportsWhatTheHeaderDeclares) {
  std::set<std::string> declared, exported;
  for (const auto& [name, signature] : ReadHeader().functions) declared.insert(name);
  for (const std::string& line : Split(
           Shell(fmt::format("'{}' -D --defined-only --format=posix '{}'", ESPALIER_NM, ESPALIER_C_LIBRARY)),
           '\n'))
    exported.insert(line.substr(0, line.find(' ')));
  EXPECT_EQ(exported, declared);
}

TEST(CAbi, LibraryIsNamedAfterItsNumber) {
  const std::string name = fs::path(ESPALIER_C_SONAME).filename().string();
  std::smatch abi;
  const std::string text = ReadFile(kHeader);
  ASSERT_TRUE(std::regex_search(text, abi, std::regex("#define ESPALIER_C_ABI (\\d+)")));
  EXPECT_EQ(name, "libespalier_c.so." + abi[1].str());
}

}  // namespace
