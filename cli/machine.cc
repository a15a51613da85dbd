// SPDX-License-Identifier: Apache-2.0
#include "machine.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <string_view>
#include <system_error>

namespace espalier::cli {
namespace {

std::string FirstLine(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// The values of one key of /proc/cpuinfo, one a core.
template <typename Function>
void ForCpuInfo(std::string_view key, const Function& function) {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with(key) && colon != std::string::npos) function(line.substr(colon + 2));
  }
}

}  // namespace

std::string BuildCommit() { return ESPALIER_COMMIT; }

std::string Architecture() { return ESPALIER_ARCHITECTURE; }

std::string CpuModel() {
  std::string model;
  ForCpuInfo("model name", [&](const std::string& value) {
    if (model.empty()) model = value;
  });
  return model.empty() ? Architecture() : model;
}

std::string NvidiaDriverVersion() {
  const std::string line = FirstLine("/proc/driver/nvidia/version");
  static const std::regex kVersion(R"( ([0-9]+(\.[0-9]+)+) )");
  std::smatch match;
  return std::regex_search(line, match, kVersion) ? match[1].str() : "";
}

std::optional<double> CpuClockMhz() {
  std::optional<double> fastest;
  ForCpuInfo("cpu MHz", [&](const std::string& value) {
    double mhz = 0;
    if (std::from_chars(value.data(), value.data() + value.size(), mhz).ec != std::errc()) return;
    fastest = std::max(fastest.value_or(0), mhz);
  });
  return fastest;
}

std::optional<uint64_t> CpuCacheBytes() {
  namespace fs = std::filesystem;
  std::set<std::string> seen;  // by the cores that share one
  uint64_t bytes = 0;
  std::error_code none;
  for (fs::directory_iterator cpu("/sys/devices/system/cpu", none), end; !none && cpu != end;
       cpu.increment(none)) {
    const fs::path cache = cpu->path() / "cache" / "index3";
    const std::string size = FirstLine(cache / "size");  // "32768K"
    uint64_t kilobytes = 0;
    const auto [rest, error] = std::from_chars(size.data(), size.data() + size.size(), kilobytes);
    if (error != std::errc() || *rest != 'K') continue;
    if (seen.insert(FirstLine(cache / "shared_cpu_list")).second) bytes += kilobytes << 10;
  }
  if (bytes == 0) return std::nullopt;
  return bytes;
}

}  // namespace espalier::cli
