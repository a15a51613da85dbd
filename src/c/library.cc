// SPDX-License-Identifier: Apache-2.0
//
// Versions, errors, capabilities, and the numbers of the C interface held against formats.def.
#include <espalier/espalier.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "c/call.h"

namespace espalier::c {
namespace {

// One list drives everything: the numbers of the header are those of formats.def, in order and to the end.
constexpr int32_t kCodebooks[] = {ESPALIER_CODEBOOK_3INST, ESPALIER_CODEBOOK_MCG, ESPALIER_CODEBOOK_MUL1};
constexpr int32_t kDtypes[] = {
    ESPALIER_DTYPE_BOOL,        ESPALIER_DTYPE_U8,         ESPALIER_DTYPE_I8,      ESPALIER_DTYPE_I16,
    ESPALIER_DTYPE_U16,         ESPALIER_DTYPE_F16,        ESPALIER_DTYPE_BF16,    ESPALIER_DTYPE_I32,
    ESPALIER_DTYPE_U32,         ESPALIER_DTYPE_F32,        ESPALIER_DTYPE_F64,     ESPALIER_DTYPE_I64,
    ESPALIER_DTYPE_U64,         ESPALIER_DTYPE_F8_E4M3,    ESPALIER_DTYPE_F8_E5M2, ESPALIER_DTYPE_F8_E8M0,
    ESPALIER_DTYPE_F4,          ESPALIER_DTYPE_F6_E2M3,    ESPALIER_DTYPE_F6_E3M2, ESPALIER_DTYPE_C64,
    ESPALIER_DTYPE_F8_E4M3FNUZ, ESPALIER_DTYPE_F8_E5M2FNUZ};
constexpr auto kListedCodebooks = std::to_array<int32_t>({
#define ESPALIER_CODEBOOK(enumerator, number, name, marker_tensor, multiplier) number,
#include <espalier/formats.def>
});
constexpr auto kListedDtypes = std::to_array<int32_t>({
#define ESPALIER_DTYPE(enumerator, number, name, bits_per_element) number,
#include <espalier/formats.def>
});
static_assert(std::ranges::equal(kCodebooks, kListedCodebooks));
static_assert(std::ranges::equal(kDtypes, kListedDtypes));

static_assert(ESPALIER_USAGE == static_cast<int>(StatusCode::kUsage));
static_assert(ESPALIER_IO == static_cast<int>(StatusCode::kIo));
static_assert(ESPALIER_FORMAT == static_cast<int>(StatusCode::kFormat));
static_assert(ESPALIER_UNSUPPORTED == static_cast<int>(StatusCode::kUnsupported));
static_assert(ESPALIER_GEOMETRY == static_cast<int>(StatusCode::kGeometry));
static_assert(ESPALIER_CAPACITY == static_cast<int>(StatusCode::kCapacity));
static_assert(ESPALIER_DEVICE == static_cast<int>(StatusCode::kDevice));
static_assert(ESPALIER_CANCELLED == static_cast<int>(StatusCode::kCancelled));
static_assert(ESPALIER_PROJECTION_GATE == static_cast<int>(Projection::kGate));
static_assert(ESPALIER_PROJECTION_UP == static_cast<int>(Projection::kUp));
static_assert(ESPALIER_PROJECTION_DOWN == static_cast<int>(Projection::kDown));
static_assert(ESPALIER_DEVICE_CPU == static_cast<int>(DeviceType::kCpu));
static_assert(ESPALIER_DEVICE_CUDA == static_cast<int>(DeviceType::kCuda));
static_assert(ESPALIER_ID_INT32 == static_cast<int>(IdType::kInt32));
static_assert(ESPALIER_ID_INT64 == static_cast<int>(IdType::kInt64));
static_assert(ESPALIER_SEVERITY_WARNING == static_cast<int>(Problem::Severity::kWarning));
static_assert(ESPALIER_SEVERITY_ERROR == static_cast<int>(Problem::Severity::kError));

// A destroyed string must not be read by what ends later on the same thread.
struct LastError {
  std::string text;
  const char* shown = "";
};
thread_local LastError g_last_error;

int32_t Keep(int32_t status, const char* fixed, const std::string* text) noexcept {
  try {
    g_last_error.text = text != nullptr ? *text : std::string(fixed);
    g_last_error.shown = g_last_error.text.c_str();
  } catch (...) {
    g_last_error.shown = "no memory for the text of an error";
  }
  return status;
}

std::vector<std::string_view> BackendNames() {
  std::vector<std::string_view> names;
  for (const Backend* backend : Backends()) names.push_back(backend->name());
  return names;
}

// By espalier_names.
std::vector<std::vector<std::string>> MakeNames() {
  const auto texts = [](const std::vector<std::string_view>& views) {
    return std::vector<std::string>(views.begin(), views.end());
  };
  return {
      texts(BackendNames()),
      {
#define ESPALIER_CODEBOOK(enumerator, number, name, marker_tensor, multiplier) name,
#include <espalier/formats.def>
      },
      {
#define ESPALIER_DTYPE(enumerator, number, name, bits_per_element) name,
#include <espalier/formats.def>
      },
      {
#define ESPALIER_ACTIVATION(enumerator, number, name, has_gate, num_parameters) name,
#include <espalier/formats.def>
      },
      texts(UsableCpuKernels()),
  };
}

}  // namespace

int32_t Fail(const Status& status) noexcept {
  return Keep(static_cast<int32_t>(status.code()), "", &status.message());
}
int32_t FailInternal(const char* what) noexcept { return Keep(ESPALIER_INTERNAL, what, nullptr); }
int32_t FailMemory() noexcept { return Keep(ESPALIER_CAPACITY, "the system refuses memory", nullptr); }

Result<Device> ToDevice(const espalier_device& device) {
  if (device.type != ESPALIER_DEVICE_CPU && device.type != ESPALIER_DEVICE_CUDA)
    return UsageError(fmt::format("device type {}; legal: 0 (cpu), 1 (cuda)", device.type));
  if (device.index < 0 || (device.type == ESPALIER_DEVICE_CPU && device.index != 0))
    return UsageError(fmt::format("device index {}; legal: 0 on the host, 0 and up on a GPU", device.index));
  return Device{.type = static_cast<DeviceType>(device.type), .index = device.index};
}

espalier_device FromDevice(const Device& device) {
  return {.type = static_cast<int32_t>(device.type), .index = device.index};
}

Result<Dtype> ToDtype(int32_t number, std::string_view name) {
  if (auto checked = InRange(number, static_cast<int>(std::size(kDtypes)), name); !checked)
    return tl::unexpected(checked.error());
  return static_cast<Dtype>(number);
}

Result<Codebook> ToCodebook(int32_t number, std::string_view name) {
  if (auto checked = InRange(number, static_cast<int>(std::size(kCodebooks)), name); !checked)
    return tl::unexpected(checked.error());
  return static_cast<Codebook>(number);
}

}  // namespace espalier::c

using namespace espalier;     // NOLINT(google-build-using-namespace): the functions below are the C side
using namespace espalier::c;  // NOLINT(google-build-using-namespace)

const char* espalier_version(void) { return ESPALIER_VERSION; }
int32_t espalier_abi_version(void) { return ESPALIER_C_ABI; }
const char* espalier_last_error(void) { return c::g_last_error.shown; }

const char* espalier_status_name(int32_t status) {
  switch (status) {
    case ESPALIER_OK:
      return "ok";
    case ESPALIER_INTERNAL:
      return "internal";
    case ESPALIER_USAGE:
    case ESPALIER_IO:
    case ESPALIER_FORMAT:
    case ESPALIER_UNSUPPORTED:
    case ESPALIER_GEOMETRY:
    case ESPALIER_CAPACITY:
    case ESPALIER_DEVICE:
    case ESPALIER_CANCELLED:
      return StatusCodeName(static_cast<StatusCode>(status)).data();  // literals
    default:
      return "unknown";
  }
}

int32_t espalier_get_capabilities(espalier_capabilities* capabilities) {
  return Call([&]() -> Result<void> {
    if (auto checked = CheckSize(capabilities, "capabilities"); !checked) return checked;
    espalier_capabilities known = {};
    known.abi_version = ESPALIER_C_ABI;
    known.min_bits = kMinBits;
    known.max_bits = kMaxBits;
    known.cuda_runtime_version = CudaRuntimeVersion();
    known.has_cuda = known.cuda_runtime_version != 0 ? 1 : 0;
    if (const auto gpus = CudaDevices()) known.num_gpus = static_cast<int32_t>(gpus->size());
    known.max_plan_tokens = kMaxPlanTokens;
    known.max_top_k = kMaxTopK;
    known.workspace_alignment_bytes = kWorkspaceAlignmentBytes;
    WriteStruct(known, capabilities);
    return {};
  });
}

int32_t espalier_list_names(int32_t which, const char** names, uint64_t* count) {
  return Call([&]() -> Result<void> {
    static const auto* const names_of =
        new std::vector<std::vector<std::string>>(MakeNames());  // kept for ever
    if (auto checked = InRange(which, static_cast<int>(names_of->size()), "list"); !checked) return checked;
    std::vector<const char*> pointers;
    for (const std::string& text : (*names_of)[static_cast<size_t>(which)]) pointers.push_back(text.c_str());
    return WriteList(std::span<const char* const>(pointers), names, count);
  });
}

int32_t espalier_thread_pool_create(int32_t num_threads, espalier_thread_pool** pool) {
  return Call([&]() -> Result<void> {
    if (auto checked = NotNull(pool, "pool"); !checked) return checked;
    Result<std::shared_ptr<ThreadPool>> made = ThreadPool::Create(num_threads);
    if (!made) return tl::unexpected(made.error());
    return AddHandle({.pool = *std::move(made)}, pool);
  });
}

int32_t espalier_thread_pool_get_size(const espalier_thread_pool* pool, int32_t* num_threads) {
  return Call([&]() -> Result<void> {
    const auto object = Find(pool);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = NotNull(num_threads, "num_threads"); !checked) return checked;
    *num_threads = (*object)->pool->num_threads();
    return {};
  });
}

int32_t espalier_thread_pool_free(espalier_thread_pool* pool) {
  return Call([&] { return HandleTable<espalier_thread_pool>::Get().Free(pool); });
}

int32_t espalier_get_gpu(uint64_t index, espalier_gpu_info* info) {
  return Call([&]() -> Result<void> {
    if (auto checked = CheckSize(info, "info"); !checked) return checked;
    const Result<std::vector<DeviceInfo>> gpus = CudaDevices();
    if (!gpus) return tl::unexpected(gpus.error());
    if (auto checked = InRange(index, gpus->size(), "GPU"); !checked) return checked;
    const DeviceInfo& gpu = (*gpus)[index];
    thread_local std::string name;
    name = gpu.name;
    espalier_gpu_info known = {};
    known.device = {.type = ESPALIER_DEVICE_CUDA, .index = gpu.index};
    known.name = name.c_str();
    known.compute_capability = gpu.compute_capability;
    known.num_sms = gpu.num_sms;
    known.memory_bytes = gpu.memory_bytes;
    known.driver_version = gpu.driver_version;
    WriteStruct(known, info);
    return {};
  });
}
