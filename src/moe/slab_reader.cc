// SPDX-License-Identifier: Apache-2.0
#include "moe/slab_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <set>

#include "base/sha256.h"
#include "moe/device_memory.h"
#include "moe/slab_order.h"
#include "moe/workspace.h"

namespace espalier {
namespace {

constexpr uint64_t kMaxScratchBytes = uint64_t{1} << 20;
constexpr uint64_t kMinScratchBytes = uint64_t{64} << 10;
// A copy of a window takes longer than its call, and a smaller part of what reading it takes: so one window a
// thread is enough, and the other threads read meanwhile.
constexpr uint64_t kMaxDeviceWindowBytes = uint64_t{4} << 20;
// Bytes stay in a core's cache from the read to the permutation, and a read still costs more than its call.
// With 2 threads out of the page cache 4.3 GB take 0.49 s, straight to their place 0.33 s; 128 KiB to 1 MiB
// are alike.
constexpr uint64_t kMaxPanelWindowBytes = uint64_t{512} << 10;
constexpr uint64_t kPageBytes = 4096;
constexpr int kMaxLanes = 4096;
constexpr uint16_t kFp16One = 0x3C00;
constexpr uint16_t kFp16MinusOne = 0xBC00;

uint64_t RegionBytes(const CopyRegion& region) { return region.rows * region.row_bytes; }

bool IsRun(const CopyRegion& region) {
  return region.rows == 1 ||
         (region.source_stride == region.row_bytes && region.target_stride == region.row_bytes);
}

// One run in the file whose rows go to different places.
bool NeedsStaging(const CopyRegion& region) {
  return !IsRun(region) && region.source_stride == region.row_bytes;
}

// The part of a region whose target lies in [begin, end). Rows are whole or absent, as pieces begin and end
// where rows of tiles do.
std::optional<CopyRegion> CutTarget(const CopyRegion& region, uint64_t begin, uint64_t end) {
  CopyRegion cut = region;
  if (IsRun(region)) {
    const uint64_t first = std::max(begin, region.target_offset);
    const uint64_t last = std::min(end, region.target_offset + RegionBytes(region));
    if (first >= last) return std::nullopt;
    cut.rows = 1;
    cut.row_bytes = last - first;
    cut.source_offset += first - region.target_offset;
    cut.target_offset = first;
    return cut;
  }
  const uint64_t stride = region.target_stride;
  const auto rows_before = [&](uint64_t at) {
    if (at <= region.target_offset) return uint64_t{0};
    return std::min(region.rows, (at - region.target_offset + stride - 1) / stride);
  };
  const uint64_t first = rows_before(begin);
  cut.rows = rows_before(end) - first;
  if (cut.rows == 0) return std::nullopt;
  cut.source_offset += first * region.source_stride;
  cut.target_offset += first * stride;
  return cut;
}

// Keeps the error of the earliest task that failed, the bytes done, and whether the caller stopped it all.
class Outcome {
 public:
  Outcome(const LoadOptions& options, uint64_t total) : options_(options), total_(total) { Report(); }

  // Nothing more is to be read.
  bool ended() const { return ended_.load(std::memory_order_relaxed); }

  void Finish(uint64_t task, const Result<void>& result, uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (!result) {
      ended_ = true;
      if (!error_ || task < error_task_) {
        error_ = result.error();
        error_task_ = task;
      }
      return;
    }
    done_ += bytes;
    if (!ended()) Report();
  }

  Result<void> Take(const std::string& identity) const {
    if (error_) return tl::unexpected(*error_);
    if (ended()) {
      return Error(StatusCode::kCancelled, fmt::format("{}: stopped by the caller, {} of {} bytes were read",
                                                       identity, done_, total_));
    }
    return {};
  }

 private:
  void Report() {
    if (options_.progress && !options_.progress(done_, total_)) ended_ = true;
  }

  const LoadOptions& options_;
  uint64_t total_;
  std::mutex mutex_;
  std::atomic<bool> ended_{false};
  std::optional<Status> error_;
  uint64_t error_task_ = 0;
  uint64_t done_ = 0;
};

}  // namespace

Result<SlabReader> SlabReader::Create(const Checkpoint& checkpoint, std::string identity,
                                      std::span<const PlacedMatrix> matrices) {
  SlabReader reader(checkpoint, std::move(identity));
  if (auto added = reader.AddCodes(matrices); !added) return tl::unexpected(added.error());
  std::set<uint64_t> placed;  // vectors that several matrices share are read once
  for (const PlacedMatrix& matrix : matrices) {
    const MatrixDesc& desc = matrix.desc;
    if (placed.insert(desc.suh_offset_bytes).second)
      reader.AddVector(matrix.source->suh, desc.suh_offset_bytes, desc.in_channels);
    if (placed.insert(desc.svh_offset_bytes).second)
      reader.AddVector(matrix.source->svh, desc.svh_offset_bytes, desc.out_channels);
    if (desc.bias_offset_bytes != kAbsentOffset)
      reader.AddVector(matrix.source->bias, desc.bias_offset_bytes, desc.out_channels);
  }
  std::set<uint32_t> read;
  for (const Task& task : reader.tasks_) {
    reader.read_bytes_ += task.bytes;
    for (const CopyRegion& region : task.regions) {
      read.insert(region.file);
      reader.needs_staging_ = reader.needs_staging_ || NeedsStaging(region);
    }
    reader.needs_staging_ = reader.needs_staging_ || task.sign_channels != 0;
  }
  reader.files_.assign(read.begin(), read.end());
  return reader;
}

Result<void> SlabReader::AddCodes(std::span<const PlacedMatrix> matrices) {
  for (const PlacedMatrix& matrix : matrices) matrices_.push_back(matrix.desc);
  pieces_ = CodePieces(matrices_);
  for (const CodePiece& piece : pieces_) {
    const MatrixSource& source = *matrices[piece.matrix].source;
    Task task;
    for (const CopyRegion& region : source.codes) {
      std::optional<CopyRegion> cut =
          CutTarget(region, piece.first_byte, piece.first_byte + piece.size_bytes);
      if (!cut) continue;
      cut->target_offset += matrices_[piece.matrix].codes_offset_bytes;
      task.bytes += RegionBytes(*cut);
      task.regions.push_back(*cut);
    }
    task.target_offset = matrices_[piece.matrix].codes_offset_bytes + piece.first_byte;
    task.target_bytes = piece.size_bytes;
    task.unit_bytes = TileRowBytes(matrices_[piece.matrix]);
    if (matrices_[piece.matrix].order == CodeOrder::kPanels) task.panels = matrices_[piece.matrix];
    if (task.bytes != piece.size_bytes) {
      return Error(StatusCode::kFormat,
                   fmt::format("{}: found {} bytes for codes [{}, +{}), legal: all of them", source.name,
                               task.bytes, piece.first_byte, piece.size_bytes));
    }
    tasks_.push_back(std::move(task));
  }
  return {};
}

void SlabReader::AddVector(const VectorSource& source, uint64_t offset, uint64_t channels) {
  Task task;
  task.regions = source.regions;
  for (const CopyRegion& region : task.regions) task.bytes += RegionBytes(region);
  task.target_offset = offset;
  task.target_bytes = task.unit_bytes = channels * sizeof(uint16_t);
  if (source.kind == VectorSource::Kind::kSignBits) {
    task.sign_channels = channels;
  } else {
    for (CopyRegion& region : task.regions) region.target_offset += offset;
  }
  tasks_.push_back(std::move(task));
}

SlabReader::Staging SlabReader::ChooseStaging(const LoadOptions& options) const {
  const int threads = NumLanes(options.num_threads);
  const auto tasks = static_cast<int>(std::clamp<uint64_t>(tasks_.size(), 1, kMaxLanes));
  const int max_lanes = std::min(threads, tasks);
  uint64_t least_window = 0, most_window = 0;
  for (const Task& task : tasks_) {
    if (!NeedsWindow(task, options.device)) continue;
    least_window = std::max(least_window, RoundUp(task.unit_bytes, kPageBytes));
    most_window = std::max(most_window, RoundUp(task.target_bytes, kPageBytes));
  }
  if (least_window != 0) {
    const uint64_t usual = options.device.is_host() ? kMaxPanelWindowBytes : kMaxDeviceWindowBytes;
    return ChooseWindows(options, max_lanes, least_window, std::clamp(usual, least_window, most_window));
  }
  if (!needs_staging_) return {.lanes = max_lanes};
  const uint64_t most = std::max<uint64_t>(options.staging_bytes / kMinScratchBytes, 1);
  const int lanes = std::min(max_lanes, static_cast<int>(std::min<uint64_t>(most, kMaxLanes)));
  // Whole pages, so that the sum stays below what was asked for.
  const uint64_t share = options.staging_bytes / static_cast<uint64_t>(lanes) / kPageBytes * kPageBytes;
  return {.lanes = lanes, .scratch_bytes = std::clamp(share, kMinScratchBytes, kMaxScratchBytes)};
}

SlabReader::Staging SlabReader::ChooseWindows(const LoadOptions& options, int max_lanes,
                                              uint64_t least_window, uint64_t most_window) const {
  const uint64_t least_scratch = needs_staging_ ? kMinScratchBytes : 0;
  const uint64_t most = std::max<uint64_t>(options.staging_bytes / (least_window + least_scratch), 1);
  const int lanes = std::min(max_lanes, static_cast<int>(std::min<uint64_t>(most, kMaxLanes)));
  const uint64_t share = options.staging_bytes / static_cast<uint64_t>(lanes) / kPageBytes * kPageBytes;
  // One thread may need more than was asked for: a row of tiles is the least that can be read.
  const uint64_t spare = share - std::min(share, least_window + least_scratch);
  const uint64_t more_scratch =
      std::min(spare / 4 / kPageBytes * kPageBytes, kMaxScratchBytes - kMinScratchBytes);
  const uint64_t scratch = needs_staging_ ? least_scratch + more_scratch : 0;
  const uint64_t window = share - std::min(share, scratch);
  return {.lanes = lanes,
          .scratch_bytes = scratch,
          .window_bytes = std::clamp(window, least_window, most_window)};
}

uint64_t SlabReader::StagingBytes(const LoadOptions& options) const {
  const Staging staging = ChooseStaging(options);
  return static_cast<uint64_t>(staging.lanes) * staging.lane_bytes();
}

Result<HostBuffer> SlabReader::AllocateStaging(const Staging& staging, const Device& device) const {
  const uint64_t bytes = static_cast<uint64_t>(staging.lanes) * staging.lane_bytes();
  return device.is_host() ? HostBuffer::Create(bytes) : AllocatePinned(device, bytes);
}

Result<void> SlabReader::RunTask(const Task& task, uint64_t target_offset, std::span<std::byte> target,
                                 std::span<std::byte> scratch) const {
  if (task.sign_channels == 0) {
    if (target_offset == 0) return checkpoint_->ReadRegions(task.regions, target, scratch);
    std::vector<CopyRegion> regions = task.regions;
    for (CopyRegion& region : regions) region.target_offset -= target_offset;
    return checkpoint_->ReadRegions(regions, target, scratch);
  }
  // A row of bits fits: 64 KiB hold the signs of 524,288 channels.
  const uint64_t bytes = task.sign_channels / 8;
  if (bytes > scratch.size()) {
    return Error(StatusCode::kCapacity, fmt::format("{}: {} channels of packed signs; legal: at most {}",
                                                    identity_, task.sign_channels, scratch.size() * 8));
  }
  const std::span<std::byte> bits = scratch.first(bytes);
  if (auto read = checkpoint_->ReadRegions(task.regions, bits); !read) return read;
  std::byte* signs = target.data() + (task.target_offset - target_offset);
  for (uint64_t i = 0; i < task.sign_channels; ++i) {
    // 16-bit little-endian words, least significant bit first: the same as bytes, bit by bit.
    const bool negative = (static_cast<unsigned>(bits[i / 8]) >> (i % 8) & 1u) != 0;
    const uint16_t value = negative ? kFp16MinusOne : kFp16One;
    std::memcpy(signs + i * sizeof(value), &value, sizeof(value));
  }
  return {};
}

Result<void> SlabReader::Deliver(const Task& task, uint64_t begin, std::span<const std::byte> bytes,
                                 DeviceBuffer& slab) const {
  if (task.panels.present()) {
    const uint64_t codes = task.panels.codes_offset_bytes;
    PanelsFromRows(task.panels, (begin - codes) / task.unit_bytes, bytes.size() / task.unit_bytes,
                   bytes.data(), slab.data() + codes);
    return {};
  }
  if (auto written = WriteBuffer(slab, begin, bytes); !written)
    return Error(written.error().code(), fmt::format("{}: {}", identity_, written.error().message()));
  return {};
}

Result<void> SlabReader::RunThroughWindow(const Task& task, std::span<std::byte> scratch,
                                          std::span<std::byte> window, DeviceBuffer& slab,
                                          std::string* hash) const {
  Sha256 sha256;
  const uint64_t end = task.target_offset + task.target_bytes;
  const uint64_t step = window.size() / task.unit_bytes * task.unit_bytes;
  for (uint64_t begin = task.target_offset; begin < end; begin += step) {
    const std::span<std::byte> target = window.first(std::min(step, end - begin));
    Task part = task;
    if (task.sign_channels == 0) {
      part.regions.clear();
      for (const CopyRegion& region : task.regions) {
        if (auto cut = CutTarget(region, begin, begin + target.size())) part.regions.push_back(*cut);
      }
    }
    if (auto read = RunTask(part, begin, target, scratch); !read) return read;
    if (hash != nullptr) sha256.Update(target);
    if (auto delivered = Deliver(task, begin, target, slab); !delivered) return delivered;
  }
  if (hash != nullptr) *hash = sha256.FinishHex();
  return {};
}

// A file that was replaced or written to since its header was read holds other bytes than the table says.
Result<void> SlabReader::CheckFiles() const {
  for (const uint32_t file : files_) {
    if (auto same = checkpoint_->CheckUnchanged(file); !same) return same;
  }
  return {};
}

Result<std::vector<std::string>> SlabReader::Read(const LoadOptions& options, DeviceBuffer& slab) const {
  const Staging staging = ChooseStaging(options);
  Result<HostBuffer> memory = AllocateStaging(staging, options.device);
  if (!memory) return tl::unexpected(memory.error());
  std::vector<std::string> hashes(options.hash ? pieces_.size() : 0);
  Outcome outcome(options, read_bytes_);
  RunOnLanes(staging.lanes, tasks_.size(), [&](uint64_t lane, uint64_t index) {
    if (outcome.ended()) return;
    const Task& task = tasks_[index];
    const std::span<std::byte> own =
        memory->span().subspan(lane * staging.lane_bytes(), staging.lane_bytes());
    const std::span<std::byte> scratch = own.first(staging.scratch_bytes);
    std::string* hash = index < hashes.size() ? &hashes[index] : nullptr;
    Result<void> done;
    if (NeedsWindow(task, slab.device())) {
      done = RunThroughWindow(task, scratch, own.subspan(staging.scratch_bytes), slab, hash);
    } else {
      done = RunTask(task, 0, {slab.data(), slab.size_bytes()}, scratch);
      // While the piece is still in the cache.
      if (done && hash != nullptr) *hash = Sha256Hex({slab.data() + task.target_offset, task.target_bytes});
    }
    outcome.Finish(index, done, task.bytes);
  });
  if (auto done = outcome.Take(identity_); !done) return tl::unexpected(done.error());
  if (auto same = CheckFiles(); !same) return tl::unexpected(same.error());
  return hashes;
}

}  // namespace espalier
