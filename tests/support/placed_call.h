// SPDX-License-Identifier: Apache-2.0
//
// Calls with their arrays where the executor works: on the host, or in copies on a GPU.
#ifndef ESPALIER_TESTS_SUPPORT_PLACED_CALL_H_
#define ESPALIER_TESTS_SUPPORT_PLACED_CALL_H_

#include <espalier/device.h>
#include <espalier/moe.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuda/device_runtime.h"
#include "support/random_experts.h"

namespace espalier::test {

inline constexpr Device kFirstGpu = {.type = DeviceType::kCuda, .index = 0};

// Where an executor works: the first GPU for "cuda", else the host.
Device DeviceOf(const std::string& executor);

// Rows with padding between them and a guard behind the last; all of it poisoned to begin with.
class Rows {
 public:
  Rows(uint64_t num_rows, uint64_t row_elements, uint64_t padding, uint64_t element_bytes);

  std::span<std::byte> bytes() { return storage_; }
  uint64_t stride() const { return stride_bytes_ / element_bytes_; }
  std::byte* At(uint64_t element);
  void Poison();
  // Throws when a byte outside the rows is not as Poison left it.
  void CheckGaps() const;

 private:
  uint64_t num_rows_;
  uint64_t row_bytes_;
  uint64_t stride_bytes_;
  uint64_t element_bytes_;
  std::vector<std::byte> storage_;
};

// Host memory and, where the device is a GPU, its twin there.
class PlacedBytes {
 public:
  // `host` must outlive it.
  PlacedBytes(const Device& device, std::span<std::byte> host);

  std::byte* data() { return twin_ ? twin_->data() : host_.data(); }
  void Push();  // host -> device; throws on an error
  void Pull();

 private:
  std::span<std::byte> host_;
  std::optional<DeviceBuffer> twin_;
};

// One call and its memory, for any number of runs. Not movable: the memory stays at its place.
class PlacedCall {
 public:
  // `experts` is on the device of the executor and outlives the call. Errors: those of the plan; the rest
  // throws.
  static Result<std::unique_ptr<PlacedCall>> Create(const PreparedExperts& experts, const MoeCall& call,
                                                    const std::string& executor);
  PlacedCall(const PlacedCall&) = delete;
  PlacedCall& operator=(const PlacedCall&) = delete;

  const MoePlan& plan() const { return plan_; }
  const MoeArgs& args() const { return args_; }
  const cuda::Stream& stream() const { return *stream_; }  // on a GPU

  // Other numbers in the same arrays; poisons workspace and output, but for the y of an accumulating call.
  // REQUIRES: the shape of the call that it was made with.
  void Fill(const MoeCall& call);
  // On a GPU puts the run on the stream.
  Result<void> Run() const { return RunMoe(plan_, experts_, args_); }
  // Waits, and gives y. Throws when a byte outside the rows of y or behind the workspace was written.
  MoeOutput Finish();

 private:
  PlacedCall(const PreparedExperts& experts, const MoeCall& call, MoePlan plan);

  const PreparedExperts& experts_;
  MoePlan plan_;
  Rows x_, y_, ids_, weights_;
  std::vector<int32_t> map_;
  HostBuffer workspace_;
  std::vector<PlacedBytes> placed_;  // x, y, ids, weights, map, workspace
  std::optional<cuda::Stream> stream_;
  MoeArgs args_;
};

}  // namespace espalier::test

#endif  // ESPALIER_TESTS_SUPPORT_PLACED_CALL_H_
