// SPDX-License-Identifier: Apache-2.0
#include "support/placed_call.h"

#include <espalier/backend.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "moe/device_memory.h"
#include "support/elements.h"
#include "support/require.h"

namespace espalier::test {
namespace {

constexpr std::byte kPoison{0xFF};  // NaN in every float type, -1 in every integer
constexpr size_t kGuardBytes = 256;

uint64_t IdBytes(const MoeCall& call) { return call.id_type == IdType::kInt64 ? 8 : 4; }

}  // namespace

ExecutorChoice ChoiceOf(const std::string& executor) {
  for (const CpuMode mode : {CpuMode::kFast, CpuMode::kInt8}) {
    if (executor == "cpu_" + std::string(CpuModeName(mode))) return {.name = "cpu", .mode = mode};
  }
  return {.name = executor, .mode = executor == "cpu" ? CpuMode::kExact : CpuMode::kFast};
}

std::vector<std::string> AllExecutors() {
  std::vector<std::string> names;
  for (const Backend* backend : Backends()) {
    names.emplace_back(backend->name());
    if (backend->name() == "cpu") names.insert(names.end(), {"cpu_fast", "cpu_int8"});
  }
  return names;
}

Device DeviceOf(const std::string& executor) { return executor == "cuda" ? kFirstGpu : Device{}; }

Rows::Rows(uint64_t num_rows, uint64_t row_elements, uint64_t padding, uint64_t element_bytes)
    : num_rows_(num_rows),
      row_bytes_(row_elements * element_bytes),
      stride_bytes_((row_elements + padding) * element_bytes),
      element_bytes_(element_bytes),
      storage_(num_rows * stride_bytes_ + kGuardBytes, kPoison) {}

std::byte* Rows::At(uint64_t element) {
  const uint64_t per_row = row_bytes_ / element_bytes_;
  return storage_.data() + element / per_row * stride_bytes_ + element % per_row * element_bytes_;
}

void Rows::Poison() { std::ranges::fill(storage_, kPoison); }

void Rows::CheckGaps() const {
  for (uint64_t i = 0; i < storage_.size(); ++i) {
    const bool inside = i / stride_bytes_ < num_rows_ && i % stride_bytes_ < row_bytes_;
    if (!inside && storage_[i] != kPoison) throw std::runtime_error("written outside the rows of y");
  }
}

PlacedBytes::PlacedBytes(const Device& device, std::span<std::byte> host) : host_(host) {
  if (!device.is_host()) twin_ = Require(cuda::Upload(device, host));
}

void PlacedBytes::Push() {
  if (twin_) Require(WriteBuffer(*twin_, 0, host_));
}

void PlacedBytes::Pull() {
  if (twin_) Require(cuda::Download(*twin_, host_));
}

Result<std::unique_ptr<PlacedCall>> PlacedCall::Create(const PreparedExperts& experts, const MoeCall& call,
                                                       const std::string& executor) {
  Result<MoePlan> plan =
      MoePlan::Create(experts, {.max_tokens = call.max_tokens != 0 ? call.max_tokens : call.num_tokens,
                                .top_k = call.top_k,
                                .id_type = call.id_type,
                                .input = call.input,
                                .output = call.output,
                                .checked_ids = call.checked_ids,
                                .device = DeviceOf(executor),
                                .executor = ChoiceOf(executor).name,
                                .mode = ChoiceOf(executor).mode,
                                .num_threads = call.num_threads});
  if (!plan) return tl::unexpected(plan.error());
  return std::unique_ptr<PlacedCall>(new PlacedCall(experts, call, *std::move(plan)));
}

PlacedCall::PlacedCall(const PreparedExperts& experts, const MoeCall& call, MoePlan plan)
    : experts_(experts),
      plan_(std::move(plan)),
      x_(call.num_tokens, experts.geometry().hidden_channels, call.stride_padding, BytesOf(call.input)),
      y_(call.num_tokens, experts.geometry().hidden_channels, call.stride_padding, BytesOf(call.output)),
      ids_(call.num_tokens, call.top_k, call.stride_padding, IdBytes(call)),
      weights_(call.num_tokens, call.top_k, call.stride_padding, sizeof(float)),
      map_(call.expert_map),
      workspace_(Require(HostBuffer::Create(plan_.workspace_bytes() + kGuardBytes))) {
  const Device& device = plan_.options().device;
  if (!device.is_host()) stream_ = Require(cuda::Stream::Create(device));
  const std::span<std::byte> arrays[] = {
      x_.bytes(),       y_.bytes(), ids_.bytes(), weights_.bytes(), std::as_writable_bytes(std::span(map_)),
      workspace_.span()};
  for (const std::span<std::byte> array : arrays) placed_.emplace_back(device, array);
  Fill(call);
}

void PlacedCall::Fill(const MoeCall& call) {
  for (uint64_t i = 0; i < call.x.size(); ++i) Encode(call.input, call.x[i], x_.At(i));
  for (uint64_t i = 0; i < call.ids.size(); ++i) {
    std::memcpy(ids_.At(i), &call.ids[i], IdBytes(call));
    std::memcpy(weights_.At(i), &call.weights[i], sizeof(float));
  }
  y_.Poison();
  for (uint64_t i = 0; i < call.y.size(); ++i) Encode(call.output, call.y[i], y_.At(i));
  std::memset(workspace_.data(), static_cast<int>(kPoison), workspace_.size_bytes());
  for (PlacedBytes& placed : placed_) placed.Push();
  args_ = {.num_tokens = call.num_tokens,
           .x = placed_[0].data(),
           .x_row_stride = x_.stride(),
           .topk_ids = placed_[2].data(),
           .topk_ids_row_stride = ids_.stride(),
           .topk_weights = reinterpret_cast<const float*>(placed_[3].data()),
           .topk_weights_row_stride = weights_.stride(),
           .expert_map = map_.empty() ? nullptr : reinterpret_cast<const int32_t*>(placed_[4].data()),
           .expert_map_size = static_cast<uint32_t>(map_.size()),
           .y = placed_[1].data(),
           .y_row_stride = y_.stride(),
           .accumulate = call.accumulate,
           .workspace = placed_[5].data(),
           .workspace_bytes = plan_.workspace_bytes(),
           .stream = stream_ ? stream_->get() : nullptr};
}

MoeOutput PlacedCall::Finish() {
  if (stream_) Require(stream_->Synchronize());
  placed_[1].Pull();
  placed_[5].Pull();
  y_.CheckGaps();
  for (uint64_t i = plan_.workspace_bytes(); i < workspace_.size_bytes(); ++i) {
    if (workspace_.data()[i] != kPoison) throw std::runtime_error("written behind the workspace");
  }
  MoeOutput output;
  const Dtype dtype = plan_.options().output;
  for (uint64_t i = 0; i < args_.num_tokens * experts_.geometry().hidden_channels; ++i) {
    output.bytes.insert(output.bytes.end(), y_.At(i), y_.At(i) + BytesOf(dtype));
    output.values.push_back(Decode(dtype, y_.At(i)));
  }
  return output;
}

std::vector<double> RunLinearCall(const PreparedLinear& linear, const std::vector<float>& x,
                                  const std::string& executor, Dtype output) {
  const uint64_t tokens = x.size() / linear.in_channels();
  const LinearPlan plan = Require(LinearPlan::Create(linear, {.max_tokens = tokens,
                                                              .output = output,
                                                              .executor = ChoiceOf(executor).name,
                                                              .mode = ChoiceOf(executor).mode}));
  HostBuffer workspace = Require(HostBuffer::Create(plan.workspace_bytes()));
  std::vector<std::byte> y(tokens * linear.out_channels() * BytesOf(output), kPoison);
  Require(RunLinear(plan, linear,
                    {.num_tokens = tokens,
                     .x = x.data(),
                     .x_row_stride = linear.in_channels(),
                     .y = y.data(),
                     .y_row_stride = linear.out_channels(),
                     .workspace = workspace.data(),
                     .workspace_bytes = workspace.size_bytes()}));
  std::vector<double> values;
  for (size_t at = 0; at < y.size(); at += BytesOf(output)) values.push_back(Decode(output, &y[at]));
  return values;
}

Result<MoeOutput> TryRunCall(const PreparedExperts& experts, const MoeCall& call,
                             const std::string& executor) {
  std::optional<PreparedExperts> copy;
  if (experts.device() != DeviceOf(executor)) {
    Result<PreparedExperts> moved = ToDevice(experts, DeviceOf(executor));
    if (!moved) return tl::unexpected(moved.error());
    copy = *std::move(moved);
  }
  const auto placed = PlacedCall::Create(copy ? *copy : experts, call, executor);
  if (!placed) return tl::unexpected(placed.error());
  if (const Result<void> run = (*placed)->Run(); !run) return tl::unexpected(run.error());
  return (*placed)->Finish();
}

MoeOutput RunCall(const PreparedExperts& experts, const MoeCall& call, const std::string& executor) {
  return Require(TryRunCall(experts, call, executor));
}

}  // namespace espalier::test
