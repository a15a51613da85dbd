// SPDX-License-Identifier: Apache-2.0
#include "cuda/cold_timer.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

namespace espalier::cuda {
namespace {

// Reading that many times the second-level cache leaves nothing of what was there. It also takes longer than
// putting a run on the stream.
constexpr uint64_t kColdFactor = 8;
constexpr uint64_t kMinColdBytes = uint64_t{256} << 20;
// Some milliseconds each.
constexpr uint64_t kMatrixRounds = 20'000;
constexpr uint64_t kDecodeRounds = 4'000;

// Memory that was never written need not be there at all.
Result<DeviceBuffer> FilledBuffer(const Stream& stream, uint64_t size_bytes) {
  Result<DeviceBuffer> buffer = DeviceBuffer::Create(stream.device(), size_bytes);
  if (!buffer) return buffer;
  if (auto filled = stream.Fill(buffer->data(), std::byte{1}, size_bytes); !filled)
    return tl::unexpected(filled.error());
  return buffer;
}

}  // namespace

Result<ColdTimer> ColdTimer::Create(const Device& device) {
  const Result<std::vector<DeviceInfo>> devices = CudaDevices();
  if (!devices) return tl::unexpected(devices.error());
  const auto info = std::find_if(devices->begin(), devices->end(), [&device](const DeviceInfo& candidate) {
    return candidate.index == device.index;
  });
  if (info == devices->end()) return Error(StatusCode::kDevice, DeviceText(device) + " is not there");
  const Result<DeviceLimits> limits = LimitsOf(device);
  if (!limits) return tl::unexpected(limits.error());
  Result<Stream> stream = Stream::Create(device);
  if (!stream) return tl::unexpected(stream.error());
  Result<Timer> timer = Timer::Create(device);
  if (!timer) return tl::unexpected(timer.error());
  Result<DeviceBuffer> cold = FilledBuffer(*stream, std::max(kMinColdBytes, kColdFactor * info->l2_bytes));
  if (!cold) return tl::unexpected(cold.error());
  Result<DeviceBuffer> result = FilledBuffer(*stream, sizeof(ProbeResult));
  if (!result) return tl::unexpected(result.error());
  ColdTimer cold_timer(*std::move(stream), *std::move(timer));
  cold_timer.info_ = *info;
  cold_timer.limits_ = *limits;
  cold_timer.cold_ = *std::move(cold);
  cold_timer.result_ = *std::move(result);
  return cold_timer;
}

Result<double> ColdTimer::ReadRate(uint64_t size_bytes, int passes) {
  const Result<DeviceBuffer> buffer = FilledBuffer(stream_, size_bytes);
  if (!buffer) return tl::unexpected(buffer.error());
  return FastestRate(passes, [&] {
    return EnqueueReadProbe(buffer->data(), size_bytes, limits_, result(), stream_.get()).map([&] {
      return size_bytes;
    });
  });
}

Result<double> ColdTimer::MatrixRate(int passes) {
  const Result<double> fastest = FastestRate(
      passes, [&] { return EnqueueMatrixProbe(kMatrixRounds, limits_, result(), stream_.get()); });
  if (!fastest) return fastest;
  ProbeResult last = {};
  if (auto read = Download(result_, std::as_writable_bytes(std::span(&last, 1))); !read)
    return tl::unexpected(read.error());
  if (last.nanoseconds > 0) {
    clock_mhz_ =
        std::round(1e3 * static_cast<double>(last.clock_ticks) / static_cast<double>(last.nanoseconds));
  }
  return fastest;
}

Result<double> ColdTimer::DecodeRate(int bits, Codebook codebook, int passes) {
  return FastestRate(passes, [&] {
    return EnqueueDecodeProbe(bits, codebook, kDecodeRounds, limits_, result(), stream_.get());
  });
}

Result<double> ColdTimer::FastestRate(int passes, const std::function<Result<uint64_t>()>& enqueue) {
  double fastest = 0;
  for (int pass = 0; pass < passes; ++pass) {
    double amount = 0;
    const Result<double> us = Time([]() -> Result<void> { return {}; },
                                   [&]() -> Result<void> {
                                     const Result<uint64_t> enqueued = enqueue();
                                     if (!enqueued) return tl::unexpected(enqueued.error());
                                     amount = static_cast<double>(*enqueued);
                                     return {};
                                   });
    if (!us) return us;
    fastest = std::max(fastest, amount / *us * 1e6);
  }
  return fastest;
}

Result<double> ColdTimer::Time(const std::function<Result<void>()>& place,
                               const std::function<Result<void>()>& run) {
  if (auto cold = EnqueueReadProbe(cold_.data(), cold_.size_bytes(), limits_, result(), stream_.get()); !cold)
    return tl::unexpected(cold.error());
  if (auto placed = place(); !placed) return tl::unexpected(placed.error());
  if (auto started = timer_.Start(stream_); !started) return tl::unexpected(started.error());
  if (auto ran = run(); !ran) return tl::unexpected(ran.error());
  if (auto stopped = timer_.Stop(stream_); !stopped) return tl::unexpected(stopped.error());
  return timer_.Microseconds();
}

}  // namespace espalier::cuda
