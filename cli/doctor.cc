// SPDX-License-Identifier: Apache-2.0
//
// espalier doctor: what this binary is and what the machine offers it.
#include <espalier/backend.h>
#include <espalier/device.h>
#include <espalier/version.h>
#include <openssl/crypto.h>
#include <simdjson.h>

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "base/parallel.h"
#include "command.h"
#include "dist/world.h"
#include "machine.h"

namespace espalier::cli {
namespace {

constexpr std::string_view kNotInThisBuild = "not in this build";

std::string CompilerText() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "g++ " __VERSION__;
#endif
}

struct CpuFeature {
  const char* name;
  bool present;
};

// The instruction sets that the CPU paths of this project can tell apart.
std::vector<CpuFeature> CpuFeatures() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return {{"avx2", __builtin_cpu_supports("avx2") != 0},
          {"fma", __builtin_cpu_supports("fma") != 0},
          {"f16c", __builtin_cpu_supports("f16c") != 0},
          {"avx512f", __builtin_cpu_supports("avx512f") != 0},
          {"avx512bw", __builtin_cpu_supports("avx512bw") != 0},
          {"avx512vl", __builtin_cpu_supports("avx512vl") != 0},
          {"avx512vbmi", __builtin_cpu_supports("avx512vbmi") != 0},
          {"avx512vnni", __builtin_cpu_supports("avx512vnni") != 0},
          {"avx512bf16", __builtin_cpu_supports("avx512bf16") != 0},
          {"avx_vnni", __builtin_cpu_supports("avxvnni") != 0}};
#else
  return {};
#endif
}

// What runs CUDA here, or why nothing does.
std::string CudaText(const Result<std::vector<DeviceInfo>>& devices) {
  if (CudaRuntimeVersion() == 0) return std::string(kNotInThisBuild);
  const std::string runtime = CudaVersionText(CudaRuntimeVersion());
  if (!devices) return fmt::format("{}; {}", runtime, devices.error().message());
  return fmt::format("{}; the driver runs {}", runtime, CudaVersionText(devices->front().driver_version));
}

Json DevicesJson(const Result<std::vector<DeviceInfo>>& devices) {
  Json json = Json::array();
  if (!devices) return json;
  for (const DeviceInfo& info : *devices) {
    json.push_back({{"index", info.index},
                    {"name", info.name},
                    {"compute_capability", info.compute_capability},
                    {"sms", info.num_sms},
                    {"memory_bytes", info.memory_bytes},
                    {"l2_bytes", info.l2_bytes},
                    {"clock_mhz", info.clock_mhz}});
  }
  return json;
}

void PrintDevices(const Result<std::vector<DeviceInfo>>& devices, Output& output) {
  if (!devices) return;
  for (const DeviceInfo& info : *devices) {
    output.Print("gpu            cuda:{}     {}, compute capability {}.{}, {} SMs, {}, up to {} MHz\n",
                 info.index, info.name, info.compute_capability / 10, info.compute_capability % 10,
                 info.num_sms, BytesText(info.memory_bytes), info.clock_mhz);
  }
}

// The executor that runs on the host when none is asked for: ESPALIER_FORCE_BACKEND, else the best.
Result<const Backend*> ChosenBackend() {
  const char* forced = std::getenv("ESPALIER_FORCE_BACKEND");
  if (forced != nullptr && *forced != '\0') return BackendByName(forced);
  for (const Backend* backend : Backends()) {
    if (backend->device_type() == DeviceType::kCpu)
      return backend;  // usable or not: no other takes its place
  }
  return Backends().back();
}

// Kernels of the cpu executor: the ones that run, or why none do, and what could be asked for.
Json KernelsJson() {
  const Result<std::string_view> chosen = CpuKernelsName();
  return {{"chosen", chosen ? Json(*chosen) : Json()},
          {"usable", UsableCpuKernels()},
          {"problem", chosen ? Json() : Json(chosen.error().message())}};
}

std::string MpiText() {
  std::string version = MpiVersion();
  return version.empty() ? std::string(kNotInThisBuild) : version;
}

Result<int> Doctor(Output& output) {
  const Result<const Backend*> chosen = ChosenBackend();
  if (!chosen) return tl::unexpected(chosen.error());
  Json features = Json::object();
  std::string present;
  for (const CpuFeature& feature : CpuFeatures()) {
    features[feature.name] = feature.present;
    if (feature.present) present += (present.empty() ? "" : " ") + std::string(feature.name);
  }
  const Result<std::vector<DeviceInfo>> devices = CudaDevices();
  Json backends = Json::array();
  const std::string fmt_version =
      fmt::format("{}.{}.{}", FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100);

  output.Print("espalier       {} ({})\n", ESPALIER_VERSION, BuildCommit());
  output.Print("compiler       {}, {}\n", CompilerText(), ESPALIER_BUILD_TYPE);
  output.Print("cpu            {}, {}\n", CpuModel(), Architecture());
  output.Print("cpu features   {}\n", present.empty() ? "none that matter here" : present);
  output.Print("cpu kernels    {}; ESPALIER_CPU_ISA may be {}\n", CpuKernelsName().value_or("none"),
               fmt::join(UsableCpuKernels(), ", "));
  output.Print("threads        {}\n", HardwareThreads());
  for (const Backend* backend : Backends()) {
    output.Print("executor       {:<10} {}{}\n", backend->name(), backend->description(),
                 backend == *chosen ? " (chosen)" : "");
    backends.push_back(
        {{"name", backend->name()}, {"description", backend->description()}, {"chosen", backend == *chosen}});
  }
  output.Print("cuda           {}\n", CudaText(devices));
  PrintDevices(devices, output);
  output.Print("mpi            {}\n", MpiText());
  output.Print("nccl           {}\n", ESPALIER_NCCL);
  output.Print("libraries      simdjson {} ({}), fmt {}, {}\n", SIMDJSON_STRINGIFY(SIMDJSON_VERSION),
               simdjson::get_active_implementation()->name(), fmt_version, OpenSSL_version(OPENSSL_VERSION));

  output.Document({{"schema", "espalier.doctor/1"},
                   {"version", ESPALIER_VERSION},
                   {"commit", BuildCommit()},
                   {"compiler", CompilerText()},
                   {"build_type", ESPALIER_BUILD_TYPE},
                   {"cpu",
                    {{"model", CpuModel()},
                     {"architecture", Architecture()},
                     {"features", features},
                     {"kernels", KernelsJson()}}},
                   {"threads", HardwareThreads()},
                   {"backends", backends},
                   {"cuda", CudaText(devices)},
                   {"cuda_devices", DevicesJson(devices)},
                   {"mpi", MpiText()},
                   {"nccl", ESPALIER_NCCL},
                   {"libraries",
                    {{"simdjson", SIMDJSON_STRINGIFY(SIMDJSON_VERSION)},
                     {"simdjson_kernel", simdjson::get_active_implementation()->name()},
                     {"fmt", fmt_version},
                     {"openssl", OpenSSL_version(OPENSSL_VERSION)}}}});
  return kExitOk;
}

}  // namespace

void AddDoctor(CLI::App& app, Invocation& invocation) {
  CLI::App* command =
      AddCommand(app, invocation, "doctor", "Show the build, the CPU, the GPUs and the executors",
                 "Example:\n"
                 "  espalier doctor --json\n");
  command->callback([&invocation] {
    invocation.for_teams = true;
    invocation.run = [](Output& output) { return Doctor(output); };
  });
}

}  // namespace espalier::cli
