// SPDX-License-Identifier: Apache-2.0
//
// Weights prepared for execution: the native packed codes of one layer (or of one dense matrix) in a
// single slab, with one descriptor per (segment, projection). No requantization, no dequantized copy,
// no padding experts or channels.
#ifndef ESPALIER_EXPERTS_H_
#define ESPALIER_EXPERTS_H_

#include <espalier/checkpoint.h>
#include <espalier/extent_plan.h>
#include <espalier/formats.h>
#include <espalier/status.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace espalier {

inline constexpr uint64_t kSlabAlignmentBytes = 64;  // every offset in a slab is a multiple of this
inline constexpr uint64_t kAbsentOffset = ~uint64_t{0};

// Owned host memory, aligned to 4096 bytes, not initialised. Movable, not copyable.
class HostBuffer {
 public:
  // Error: kCapacity when the machine refuses the memory.
  static Result<HostBuffer> Create(uint64_t size_bytes);

  HostBuffer() = default;
  HostBuffer(HostBuffer&&) noexcept;
  HostBuffer& operator=(HostBuffer&&) noexcept;
  ~HostBuffer();

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  uint64_t size_bytes() const { return size_bytes_; }
  std::span<std::byte> span() { return {data_, size_bytes_}; }
  std::span<const std::byte> span() const { return {data_, size_bytes_}; }

 private:
  std::byte* data_ = nullptr;
  uint64_t size_bytes_ = 0;
};

// One EXL3 matrix W [in][out] inside a slab. Offsets are bytes from the start of the slab.
struct MatrixDesc {
  uint64_t codes_offset_bytes = kAbsentOffset;  // u16 [in/16][out/16][16*bits]
  uint64_t suh_offset_bytes = kAbsentOffset;    // fp16 [in]
  uint64_t svh_offset_bytes = kAbsentOffset;    // fp16 [out]
  uint64_t bias_offset_bytes = kAbsentOffset;   // fp16 [out], optional
  uint32_t in_channels = 0;                     // a multiple of 128
  uint32_t out_channels = 0;                    // a multiple of 128
  uint8_t bits = 0;
  Codebook codebook = Codebook::k3Inst;

  bool present() const { return codes_offset_bytes != kAbsentOffset; }
  uint64_t code_bytes() const { return uint64_t{in_channels} * out_channels / 8 * bits; }
};

// One (gate, up, down) triple. A whole expert is one segment; an expert of a rank-sliced checkpoint is
// one per slice, and its output is the sum over them. Segments may differ in width, bits and codebook.
struct SegmentDesc {
  uint32_t expert = 0;  // local id
  // Intermediate channels at or beyond this one count as absent: their activation is 0. <= width.
  uint32_t valid_intermediate_channels = 0;
  MatrixDesc matrices[kNumProjections];  // by Projection; gate absent where the activation has none

  const MatrixDesc& gate() const { return matrices[0]; }
  const MatrixDesc& up() const { return matrices[1]; }
  const MatrixDesc& down() const { return matrices[2]; }
  uint32_t intermediate_channels() const { return matrices[2].in_channels; }
};

struct MoeGeometry {
  uint32_t experts = 0;                 // local experts of this package
  uint32_t hidden_channels = 0;         // of x and y, as the model sees them
  uint32_t stored_hidden_channels = 0;  // of the matrices; a multiple of 128, >= hidden_channels
  Activation activation = {};
  double output_scale = 1;  // y is multiplied by it

  friend bool operator==(const MoeGeometry&, const MoeGeometry&) = default;
};

// The routed experts of one layer on the host. Immutable; may be run from several threads at once.
class PreparedExperts {
 public:
  // `segments` must be ordered by expert; an expert without a segment contributes nothing (an empty
  // rank). Checks every size, offset and alignment against the slab. `identity` names the content in
  // messages, e.g. "layer 3 of /models/glm". Errors: kGeometry, kUnsupported.
  static Result<PreparedExperts> Create(const MoeGeometry& geometry, std::vector<SegmentDesc> segments,
                                        HostBuffer slab, std::string identity);

  const MoeGeometry& geometry() const { return geometry_; }
  std::span<const SegmentDesc> segments() const { return segments_; }
  // Segments of one local expert. REQUIRES: expert < geometry().experts.
  std::span<const SegmentDesc> ExpertSegments(uint32_t expert) const;
  const std::byte* slab() const { return slab_.data(); }
  uint64_t slab_bytes() const { return slab_.size_bytes(); }
  uint64_t code_bytes() const { return code_bytes_; }
  uint32_t max_segments_per_expert() const { return max_segments_per_expert_; }
  uint32_t max_intermediate_channels() const { return max_intermediate_channels_; }  // of a segment
  const std::string& identity() const { return identity_; }

 private:
  PreparedExperts() = default;
  MoeGeometry geometry_;
  std::vector<SegmentDesc> segments_;
  std::vector<uint32_t> first_segment_;  // [experts + 1]
  HostBuffer slab_;
  uint64_t code_bytes_ = 0;
  uint32_t max_segments_per_expert_ = 0;
  uint32_t max_intermediate_channels_ = 0;
  std::string identity_;
};

// One dense EXL3 matrix on the host. Immutable.
class PreparedLinear {
 public:
  // in_channels / out_channels: widths of x and y as the model sees them, <= the stored ones; x is
  // zero-extended, y is cut. 0 = the stored width. Errors: kGeometry.
  static Result<PreparedLinear> Create(const MatrixDesc& matrix, uint32_t in_channels, uint32_t out_channels,
                                       HostBuffer slab, std::string identity);

  const MatrixDesc& matrix() const { return matrix_; }
  uint32_t in_channels() const { return in_channels_; }
  uint32_t out_channels() const { return out_channels_; }
  const std::byte* slab() const { return slab_.data(); }
  const std::string& identity() const { return identity_; }

 private:
  PreparedLinear() = default;
  MatrixDesc matrix_;
  uint32_t in_channels_ = 0;
  uint32_t out_channels_ = 0;
  HostBuffer slab_;
  std::string identity_;
};

struct LoadOptions {
  // Behaviour.
  std::optional<Activation> activation = {};  // overrides the config; without either SiLU is assumed
  double output_scale = 1;
  // Widths of a linear as the model sees them, 0 = as stored. LoadLinear only.
  uint32_t in_channels = 0;
  uint32_t out_channels = 0;
  // Called from one thread at a time with bytes read so far and in all; may be empty.
  std::function<void(uint64_t bytes_done, uint64_t bytes_total)> progress = {};
};

// Reads one whole layer into one slab. `layer` is a position in checkpoint.layers(). Checks the marker
// tensors. Errors: kUsage, kIo, kFormat, kGeometry, kCapacity, kUnsupported; nothing is kept on error.
Result<PreparedExperts> LoadExperts(const Checkpoint& checkpoint, size_t layer,
                                    const LoadOptions& options = {});

// The same for one rank: only the experts and channels that `plan` gives to `global_rank`, in local ids.
// Nothing else is read. A rank that owns nothing gets a package that contributes nothing. Errors also:
// kUsage (rank out of range), kGeometry (a plan made for another checkpoint).
Result<PreparedExperts> LoadExperts(const Checkpoint& checkpoint, const ExtentPlan& plan, size_t layer,
                                    int global_rank, const LoadOptions& options = {});

// Global to local expert ids of one ep rank, -1 = elsewhere: what MoeArgs::expert_map takes.
std::vector<int32_t> ExpertMap(const ExtentPlan& plan, size_t layer, int ep_rank);

// Reads one dense matrix, by the name that Checkpoint::linears() gives, or one slice of a routed one.
Result<PreparedLinear> LoadLinear(const Checkpoint& checkpoint, std::string_view name,
                                  const LoadOptions& options = {});

// W [in][out] of the stored size as fp32: computed in double, rounded once. `inner` leaves the
// rotations and vectors off (the fp16 codebook values). Cost: in * out * 4 bytes.
Result<std::vector<float>> DecodeMatrix(const PreparedLinear& linear, bool inner);

}  // namespace espalier

#endif  // ESPALIER_EXPERTS_H_
