// SPDX-License-Identifier: Apache-2.0
//
// Fills a slab from the files of a checkpoint: parallel positioned reads, each byte once.
#ifndef ESPALIER_SRC_MOE_SLAB_READER_H_
#define ESPALIER_SRC_MOE_SLAB_READER_H_

#include <espalier/experts.h>

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "moe/slab_hash.h"

namespace espalier {

struct PlacedMatrix {
  MatrixDesc desc;
  const MatrixSource* source = nullptr;
};

class SlabReader {
 public:
  // `identity` names the content in messages. Cost: linear in the regions. The sources are not needed
  // afterwards. Error: kFormat when they do not cover the codes exactly.
  static Result<SlabReader> Create(const Checkpoint& checkpoint, std::string identity,
                                   std::span<const PlacedMatrix> matrices);

  uint64_t read_bytes() const { return read_bytes_; }
  // Host memory beside the slab that Read takes under these options.
  uint64_t StagingBytes(const LoadOptions& options) const;

  // kIo when one of the files is not what it was when its header was read. Read checks again at its end.
  Result<void> CheckFiles() const;

  // Fills a slab on options.device; returns the hashes of CodePieces, none unless options.hash. Errors: kIo
  // (also a file that changed since it was opened), kCapacity, kDevice.
  Result<std::vector<std::string>> Read(const LoadOptions& options, DeviceBuffer& slab) const;

 private:
  // One thread's work at a time.
  struct Task {
    std::vector<CopyRegion> regions;  // targets are bytes of the slab, or of the bits where those are signs
    uint64_t bytes = 0;               // to be read
    // What it fills; in panels, what it would fill in native order. A part of it that is a multiple of the
    // unit can be read on its own.
    uint64_t target_offset = 0;
    uint64_t target_bytes = 0;
    uint64_t unit_bytes = 0;
    uint64_t sign_channels = 0;  // not 0: sign bits to be expanded to fp16 values
    // Of codes that go to panels: the matrix, otherwise absent.
    MatrixDesc panels = {};
  };
  // Host memory of one thread: what is read row by row goes through the scratch; a slab on a GPU, and panels,
  // are filled through the window.
  struct Staging {
    int lanes = 1;
    uint64_t scratch_bytes = 0;
    uint64_t window_bytes = 0;

    uint64_t lane_bytes() const { return scratch_bytes + window_bytes; }
  };

  SlabReader(const Checkpoint& checkpoint, std::string identity)
      : checkpoint_(&checkpoint), identity_(std::move(identity)) {}

  Result<void> AddCodes(std::span<const PlacedMatrix> matrices);
  void AddVector(const VectorSource& source, uint64_t offset, uint64_t channels);
  static bool NeedsWindow(const Task& task, const Device& device) {
    return !device.is_host() || task.panels.present();
  }
  Staging ChooseStaging(const LoadOptions& options) const;
  // With windows of `least_window` to `most_window` bytes.
  Staging ChooseWindows(const LoadOptions& options, int max_lanes, uint64_t least_window,
                        uint64_t most_window) const;
  Result<HostBuffer> AllocateStaging(const Staging& staging, const Device& device) const;
  // Fills `target`, which begins at byte `target_offset` of the slab, with the task or a part of it.
  Result<void> RunTask(const Task& task, uint64_t target_offset, std::span<std::byte> target,
                       std::span<std::byte> scratch) const;
  // Through the window to a slab elsewhere, or of another order. Hashes on the way when `hash` is not null.
  Result<void> RunThroughWindow(const Task& task, std::span<std::byte> scratch, std::span<std::byte> window,
                                DeviceBuffer& slab, std::string* hash) const;
  // Bytes of a task, from byte `begin` of what it fills, to their place.
  Result<void> Deliver(const Task& task, uint64_t begin, std::span<const std::byte> bytes,
                       DeviceBuffer& slab) const;

  const Checkpoint* checkpoint_;
  std::string identity_;
  std::vector<MatrixDesc> matrices_;
  std::vector<CodePiece> pieces_;
  std::vector<Task> tasks_;  // of the pieces, in order, then of the vectors
  uint64_t read_bytes_ = 0;
  bool needs_staging_ = false;
  std::vector<uint32_t> files_;  // that are read, ascending
};

}  // namespace espalier

#endif  // ESPALIER_SRC_MOE_SLAB_READER_H_
