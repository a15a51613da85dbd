// SPDX-License-Identifier: Apache-2.0
#include "device_run.h"

#include <fmt/format.h>

#include <span>
#include <string>
#include <utility>

#include "moe/route_pack.h"

namespace espalier::cli {
namespace {

uint64_t ElementBytes(Dtype dtype) { return static_cast<uint64_t>(DtypeBits(dtype)) / 8; }

// From the first row to the end of the last.
uint64_t RowsBytes(uint64_t num_rows, uint64_t row_stride, uint64_t row_elements, uint64_t element_bytes) {
  return num_rows == 0 ? 0 : ((num_rows - 1) * row_stride + row_elements) * element_bytes;
}

// Copies one array of a call and points the call to the copy.
template <typename Pointer>
Result<void> Bring(const Device& device, uint64_t size_bytes, DeviceBuffer& buffer, Pointer& pointer) {
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(pointer), size_bytes);
  Result<DeviceBuffer> copy = cuda::Upload(device, bytes);
  if (!copy) return tl::unexpected(copy.error());
  buffer = *std::move(copy);
  pointer = reinterpret_cast<Pointer>(buffer.data());
  return {};
}

}  // namespace

Result<Device> FindDevice(std::string_view option, std::string_view text) {
  Result<Device> device = ParseDevice(text);
  if (!device) {
    return Error(StatusCode::kUsage, fmt::format("{} '{}': legal: cpu, cuda, cuda:INDEX", option, text));
  }
  if (device->is_host()) return device;
  if (const Result<cuda::DeviceLimits> there = cuda::LimitsOf(*device); !there) {
    return Error(there.error().code(),
                 fmt::format("{} {}: {}; legal: cpu", option, text, there.error().message()));
  }
  return device;
}

Result<DeviceMoeCall> DeviceMoeCall::Create(const MoePlan& plan, const MoeArgs& host) {
  const MoePlanOptions& options = plan.options();
  const Device& device = options.device;
  if (auto ids = CheckIds(options, plan.geometry(), host); !ids) return tl::unexpected(ids.error());
  Result<cuda::Stream> stream = cuda::Stream::Create(device);
  if (!stream) return tl::unexpected(stream.error());
  DeviceMoeCall call(*std::move(stream));
  MoeArgs& args = call.args_ = host;
  const uint64_t hidden = plan.geometry().hidden_channels;
  const uint64_t id_bytes = options.id_type == IdType::kInt64 ? sizeof(int64_t) : sizeof(int32_t);
  const uint64_t y_bytes =
      RowsBytes(host.num_tokens, host.y_row_stride, hidden, ElementBytes(options.output));
  const auto bring = [&](uint64_t size_bytes, DeviceBuffer& buffer, auto& pointer) {
    return Bring(device, size_bytes, buffer, pointer);
  };
  Result<void> done = bring(
      RowsBytes(host.num_tokens, host.x_row_stride, hidden, ElementBytes(options.input)), call.x_, args.x);
  if (done) {
    done = bring(RowsBytes(host.num_tokens, host.topk_ids_row_stride, options.top_k, id_bytes), call.ids_,
                 args.topk_ids);
  }
  if (done) {
    done = bring(RowsBytes(host.num_tokens, host.topk_weights_row_stride, options.top_k, sizeof(float)),
                 call.weights_, args.topk_weights);
  }
  if (done && host.expert_map != nullptr)
    done = bring(uint64_t{host.expert_map_size} * sizeof(int32_t), call.map_, args.expert_map);
  // Gaps between rows, too, are to come back as they went.
  if (done) done = bring(y_bytes, call.y_, args.y);
  if (!done) return tl::unexpected(done.error());
  Result<DeviceBuffer> workspace = DeviceBuffer::Create(device, plan.workspace_bytes());
  if (!workspace) return tl::unexpected(workspace.error());
  call.workspace_ = *std::move(workspace);
  args.workspace = call.workspace_.data();
  args.workspace_bytes = call.workspace_.size_bytes();
  args.stream = call.stream_.get();
  return call;
}

Result<void> DeviceMoeCall::Finish(void* y) const {
  if (auto done = stream_.Synchronize(); !done) return done;
  return cuda::Download(y_, {static_cast<std::byte*>(y), y_.size_bytes()});
}

}  // namespace espalier::cli
