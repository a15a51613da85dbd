// SPDX-License-Identifier: Apache-2.0
//
// What every function of the C interface does around its call: no exception leaves, errors become a number
// and a text, structs of other versions are read and written as far as both sides know them.
#ifndef ESPALIER_SRC_C_CALL_H_
#define ESPALIER_SRC_C_CALL_H_

#include <espalier/espalier_c.h>
#include <espalier/status.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "c/handles.h"

namespace espalier::c {

// Keeps the text for espalier_last_error of this thread; returns the number.
int32_t Fail(const Status& status) noexcept;
int32_t FailInternal(const char* what) noexcept;
int32_t FailMemory() noexcept;

// Runs a function that returns Result<void>.
template <typename Function>
int32_t Call(Function&& function) noexcept {
  try {
    const Result<void> result = function();
    return result ? int32_t{ESPALIER_OK} : Fail(result.error());
  } catch (const std::bad_alloc&) {
    return FailMemory();
  } catch (const std::exception& error) {
    return FailInternal(error.what());
  } catch (...) {
    return FailInternal("an exception of an unknown type");
  }
}

inline tl::unexpected<Status> UsageError(std::string message) {
  return Error(StatusCode::kUsage, std::move(message));
}

inline Result<void> NotNull(const void* pointer, std::string_view name) {
  if (pointer != nullptr) return {};
  return UsageError(fmt::format("{} is NULL", name));
}

// 0 <= value < count.
inline Result<void> InRange(uint64_t value, uint64_t count, std::string_view name) {
  if (value < count) return {};
  if (count == 0) return UsageError(fmt::format("{} {}; there is none", name, value));
  return UsageError(fmt::format("{} {}; legal: 0 to {}", name, value, count - 1));
}
inline Result<void> InRange(int32_t value, int count, std::string_view name) {
  if (value >= 0 && value < count) return {};
  return UsageError(fmt::format("{} {}; legal: 0 to {}", name, value, count - 1));
}

// Size of a struct in the first version that had it. One that grows gets its old size here, as a
// specialisation.
template <typename Struct>
inline constexpr uint64_t kFirstBytes = sizeof(Struct);
template <>
inline constexpr uint64_t kFirstBytes<espalier_load_options> = 80;
template <>
inline constexpr uint64_t kFirstBytes<espalier_plan_options> = 56;

template <typename Struct>
Result<void> CheckSize(const Struct* value, std::string_view name) {
  if (value == nullptr) return UsageError(fmt::format("{} is NULL", name));
  if (value->size >= kFirstBytes<Struct>) return {};
  return UsageError(fmt::format("{}: size is {}; legal: {} or more (sizeof the struct)", name, value->size,
                                kFirstBytes<Struct>));
}

// The caller's struct, with zeros in the fields that its header did not have.
template <typename Struct>
Result<Struct> ReadStruct(const Struct* value, std::string_view name) {
  if (auto checked = CheckSize(value, name); !checked) return tl::unexpected(checked.error());
  Struct known = {};
  std::memcpy(&known, value, std::min<uint64_t>(value->size, sizeof(Struct)));
  if constexpr (requires { known.reserved; }) {
    if (known.reserved != 0)
      return UsageError(fmt::format("{}: reserved is {}; legal: 0", name, known.reserved));
  }
  if constexpr (requires { known.reserved_2; }) {
    if (known.reserved_2 != 0)
      return UsageError(fmt::format("{}: reserved_2 is {}; legal: 0", name, known.reserved_2));
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(value);
  for (uint64_t i = sizeof(Struct); i < value->size; ++i) {
    if (bytes[i] == 0) continue;
    return Error(
        StatusCode::kUnsupported,
        fmt::format("{}: byte {} of {} is set, in a field that this library ({} bytes) does not know", name,
                    i, value->size, sizeof(Struct)));
  }
  return known;
}

// NULL stands for all defaults.
template <typename Struct>
Result<Struct> ReadOptions(const Struct* value, std::string_view name) {
  if (value == nullptr) return Struct{};
  return ReadStruct(value, name);
}

// The caller's own size is kept. REQUIRES: CheckSize passed.
template <typename Struct>
void WriteStruct(Struct known, Struct* value) {
  known.size = value->size;
  std::memcpy(value, &known, std::min<uint64_t>(value->size, sizeof(Struct)));
}

template <typename Value>
Result<void> WriteList(std::span<const Value> values, Value* target, uint64_t* count) {
  if (auto checked = NotNull(count, "count"); !checked) return checked;
  const uint64_t room = *count;
  *count = values.size();
  if (target == nullptr) return {};
  if (room < values.size())
    return UsageError(fmt::format("the array holds {} entries; legal: {} or more", room, values.size()));
  std::copy(values.begin(), values.end(), target);
  return {};
}

// The same with the zero at the end of a text.
inline Result<void> WriteText(const std::string& text, char* target, uint64_t* count) {
  return WriteList(std::span<const char>(text.c_str(), text.size() + 1), target, count);
}

template <typename Handle>
Result<void> AddHandle(typename HandleTraits<Handle>::Object object, Handle** handle) {
  *handle = HandleTable<Handle>::Get().Add(std::move(object));
  return {};
}

// Numbers of the C interface as types of the library.
Result<Device> ToDevice(const espalier_device& device);
espalier_device FromDevice(const Device& device);
Result<Dtype> ToDtype(int32_t number, std::string_view name);
Result<Codebook> ToCodebook(int32_t number, std::string_view name);
Result<LoadOptions> ToLoadOptions(const espalier_load_options* options);

}  // namespace espalier::c

#endif  // ESPALIER_SRC_C_CALL_H_
