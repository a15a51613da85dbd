// SPDX-License-Identifier: Apache-2.0
//
// What the handles of the C interface stand for. A handle is a number that is never used again, not an
// address: whatever a caller does with a freed one, it names nothing.
#ifndef ESPALIER_SRC_C_HANDLES_H_
#define ESPALIER_SRC_C_HANDLES_H_

#include <espalier/espalier.h>
#include <espalier/espalier_c.h>
#include <fmt/format.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace espalier::c {

// Texts that info structs point to are kept beside what they tell of.
struct CheckpointObject {
  Checkpoint checkpoint;
  std::string path;
  std::string layout;
  std::string activation;
};
struct ThreadPoolObject {
  std::shared_ptr<ThreadPool> pool;
};
struct ExtentsObject {
  ExtentPlan plan;
};
struct ExpertsObject {
  PreparedExperts experts;
  std::string activation;
};
struct LinearObject {
  PreparedLinear linear;
};
struct MoePlanObject {
  MoePlan plan;
  std::string executor;
};
struct LinearPlanObject {
  LinearPlan plan;
  std::string executor;
};

// The opaque type, its object, and what messages call it.
template <typename Handle>
struct HandleTraits;
#define ESPALIER_C_HANDLE(handle, object)              \
  template <>                                          \
  struct HandleTraits<handle> {                        \
    using Object = object;                             \
    static constexpr std::string_view kName = #handle; \
  };
ESPALIER_C_HANDLE(espalier_checkpoint, CheckpointObject)
ESPALIER_C_HANDLE(espalier_thread_pool, ThreadPoolObject)
ESPALIER_C_HANDLE(espalier_extents, ExtentsObject)
ESPALIER_C_HANDLE(espalier_experts, ExpertsObject)
ESPALIER_C_HANDLE(espalier_linear, LinearObject)
ESPALIER_C_HANDLE(espalier_moe_plan, MoePlanObject)
ESPALIER_C_HANDLE(espalier_linear_plan, LinearPlanObject)
#undef ESPALIER_C_HANDLE

inline uintptr_t NextHandle() {
  static std::atomic<uintptr_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

template <typename Handle>
class HandleTable {
 public:
  using Object = typename HandleTraits<Handle>::Object;

  // Never destroyed: threads may still run while the process exits.
  static HandleTable& Get() {
    static HandleTable* const table = new HandleTable;
    return *table;
  }

  Handle* Add(Object object) {
    auto shared = std::make_shared<const Object>(std::move(object));
    const uintptr_t number = NextHandle();
    const std::unique_lock lock(mutex_);
    objects_.emplace(number, std::move(shared));
    return reinterpret_cast<Handle*>(number);
  }

  // The caller's share keeps the object alive through a call, whoever frees the handle meanwhile.
  Result<std::shared_ptr<const Object>> Find(const Handle* handle) const {
    if (handle == nullptr)
      return Error(StatusCode::kUsage, fmt::format("{}: the handle is NULL", HandleTraits<Handle>::kName));
    const std::shared_lock lock(mutex_);
    const auto found = objects_.find(reinterpret_cast<uintptr_t>(handle));
    if (found == objects_.end()) return NoHandle();
    return found->second;
  }

  Result<void> Free(Handle* handle) {
    if (handle == nullptr) return {};
    std::shared_ptr<const Object> last;  // dies outside the lock
    const std::unique_lock lock(mutex_);
    const auto found = objects_.find(reinterpret_cast<uintptr_t>(handle));
    if (found == objects_.end()) return NoHandle();
    last = std::move(found->second);
    objects_.erase(found);
    return {};
  }

 private:
  static tl::unexpected<Status> NoHandle() {
    return Error(StatusCode::kUsage,
                 fmt::format("{}: the handle was freed, or is of another kind", HandleTraits<Handle>::kName));
  }

  mutable std::shared_mutex mutex_;
  std::unordered_map<uintptr_t, std::shared_ptr<const Object>> objects_;
};

template <typename Handle>
auto Find(const Handle* handle) {
  return HandleTable<Handle>::Get().Find(handle);
}

}  // namespace espalier::c

#endif  // ESPALIER_SRC_C_HANDLES_H_
