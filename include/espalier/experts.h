// SPDX-License-Identifier: Apache-2.0
//
// Weights prepared for execution: the native packed codes of one layer (or of one dense matrix) in a
// single slab, with one descriptor per (segment, projection). No requantization, no dequantized copy,
// no padding experts or channels.
#ifndef ESPALIER_EXPERTS_H_
#define ESPALIER_EXPERTS_H_

#include <espalier/checkpoint.h>
#include <espalier/device.h>
#include <espalier/extent_plan.h>
#include <espalier/formats.h>
#include <espalier/host_buffer.h>
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

// One EXL3 matrix W [in][out] inside a slab. Offsets are bytes from the start of the slab.
struct MatrixDesc {
  uint64_t codes_offset_bytes = kAbsentOffset;  // u16 [in/16][out/16][16*bits], or as `order` says
  uint64_t suh_offset_bytes = kAbsentOffset;    // fp16 [in]
  uint64_t svh_offset_bytes = kAbsentOffset;    // fp16 [out]
  uint64_t bias_offset_bytes = kAbsentOffset;   // fp16 [out], optional
  uint32_t in_channels = 0;                     // a multiple of 128
  uint32_t out_channels = 0;                    // a multiple of 128
  uint8_t bits = 0;
  Codebook codebook = Codebook::k3Inst;
  CodeOrder order = CodeOrder::kNative;

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
  // Type of x that the package was prepared for; a plan for another one is refused. Empty = any.
  std::optional<Dtype> io = {};
  // The least exact type that rotated values may be kept in: kF16 lets an executor store them in fp16, kF32
  // asks for an executor that does not.
  Dtype rotation = Dtype::kF16;

  friend bool operator==(const MoeGeometry&, const MoeGeometry&) = default;
};

// Which share of a layer a package is. Global rank = ep_rank * tp + tp_rank.
struct RankPlan {
  int tp = 1;
  int ep = 1;
  int rank = 0;
  ExpertRange experts = {};               // global ids of the local experts
  std::vector<SliceExtent> extents = {};  // of every expert; empty where the rank owns no channels

  bool SamePlace(const RankPlan& other) const {
    return tp == other.tp && ep == other.ep && rank == other.rank;
  }
};

// A package without its bytes: the descriptors and the size of the slab. All that a plan, a workspace and a
// preflight depend on. Immutable.
class ExpertsTable {
 public:
  // `segments` must be ordered by expert; an expert without a segment contributes nothing (an empty
  // rank). Checks every size, offset and alignment against the slab. `identity` names the content in
  // messages, e.g. "layer 3 of /models/glm". Errors: kGeometry, kUnsupported.
  static Result<ExpertsTable> Create(const MoeGeometry& geometry, std::vector<SegmentDesc> segments,
                                     uint64_t slab_bytes, std::string identity, RankPlan rank_plan = {});

  const MoeGeometry& geometry() const { return geometry_; }
  std::span<const SegmentDesc> segments() const { return segments_; }
  // Segments of one local expert. REQUIRES: expert < geometry().experts.
  std::span<const SegmentDesc> ExpertSegments(uint32_t expert) const;
  uint64_t slab_bytes() const { return slab_bytes_; }
  uint64_t code_bytes() const { return code_bytes_; }
  // Host memory of the descriptors themselves.
  uint64_t descriptor_bytes() const {
    return segments_.size() * sizeof(SegmentDesc) + first_segment_.size() * sizeof(uint32_t);
  }
  uint32_t max_segments_per_expert() const { return max_segments_per_expert_; }
  uint32_t max_intermediate_channels() const { return max_intermediate_channels_; }  // of a segment
  const std::string& identity() const { return identity_; }
  const RankPlan& rank_plan() const { return rank_plan_; }

 private:
  ExpertsTable() = default;
  MoeGeometry geometry_;
  std::vector<SegmentDesc> segments_;
  std::vector<uint32_t> first_segment_;  // [experts + 1]
  uint64_t slab_bytes_ = 0;
  uint64_t code_bytes_ = 0;
  uint32_t max_segments_per_expert_ = 0;
  uint32_t max_intermediate_channels_ = 0;
  std::string identity_;
  RankPlan rank_plan_;
};

// The routed experts of one layer, or of one rank's share of it, on one device. Immutable; may be run from
// several threads at once.
class PreparedExperts {
 public:
  // Errors: kGeometry when the slab is smaller than the table says.
  static Result<PreparedExperts> Create(ExpertsTable table, HostBuffer slab, std::string content_sha256 = {});
  // The same with the table made here.
  static Result<PreparedExperts> Create(const MoeGeometry& geometry, std::vector<SegmentDesc> segments,
                                        HostBuffer slab, std::string identity);
  // A slab of any device, filled. On a GPU the descriptors are put beside it. Errors also: kUnsupported for
  // codes in panels on a GPU, kDevice, kCapacity.
  static Result<PreparedExperts> Create(ExpertsTable table, DeviceBuffer slab,
                                        std::string content_sha256 = {});

  const ExpertsTable& table() const { return table_; }
  const MoeGeometry& geometry() const { return table_.geometry(); }
  std::span<const SegmentDesc> segments() const { return table_.segments(); }
  std::span<const SegmentDesc> ExpertSegments(uint32_t expert) const { return table_.ExpertSegments(expert); }
  const Device& device() const { return slab_.device(); }
  const std::byte* slab() const { return slab_.data(); }  // memory of device()
  uint64_t slab_bytes() const { return slab_.size_bytes(); }
  // The descriptors as the cuda executor reads them, memory of device(); empty on the host.
  const DeviceBuffer& device_table() const { return device_table_; }
  uint64_t code_bytes() const { return table_.code_bytes(); }
  uint32_t max_segments_per_expert() const { return table_.max_segments_per_expert(); }
  uint32_t max_intermediate_channels() const { return table_.max_intermediate_channels(); }
  const std::string& identity() const { return table_.identity(); }
  const RankPlan& rank_plan() const { return table_.rank_plan(); }
  // Lower-case hex over descriptors and bytes: equal packages have equal ones, whatever layout they came
  // from. Empty unless the load was asked for it.
  const std::string& content_sha256() const { return content_sha256_; }

 private:
  PreparedExperts(ExpertsTable table, DeviceBuffer slab, DeviceBuffer device_table,
                  std::string content_sha256)
      : table_(std::move(table)),
        slab_(std::move(slab)),
        device_table_(std::move(device_table)),
        content_sha256_(std::move(content_sha256)) {}
  ExpertsTable table_;
  DeviceBuffer slab_;
  DeviceBuffer device_table_;
  std::string content_sha256_;
};

// One dense EXL3 matrix on one device. Immutable.
class PreparedLinear {
 public:
  // in_channels / out_channels: widths of x and y as the model sees them, <= the stored ones; x is
  // zero-extended, y is cut. 0 = the stored width. Errors: kGeometry; kUnsupported, also for codes in panels
  // on a GPU.
  static Result<PreparedLinear> Create(const MatrixDesc& matrix, uint32_t in_channels, uint32_t out_channels,
                                       HostBuffer slab, std::string identity);
  static Result<PreparedLinear> Create(const MatrixDesc& matrix, uint32_t in_channels, uint32_t out_channels,
                                       DeviceBuffer slab, std::string identity);

  const MatrixDesc& matrix() const { return matrix_; }
  uint32_t in_channels() const { return in_channels_; }
  uint32_t out_channels() const { return out_channels_; }
  const Device& device() const { return slab_.device(); }
  const std::byte* slab() const { return slab_.data(); }  // memory of device()
  uint64_t slab_bytes() const { return slab_.size_bytes(); }
  const std::string& identity() const { return identity_; }

 private:
  PreparedLinear() = default;
  MatrixDesc matrix_;
  uint32_t in_channels_ = 0;
  uint32_t out_channels_ = 0;
  DeviceBuffer slab_;
  std::string identity_;
};

// A copy on another device (or on the same): one allocation, one copy, and the descriptors beside it. What
// the host needs afterwards is the copy alone. Codes keep their order but for those in panels on the way to a
// GPU, which arrive in native order, through 4 MiB of host memory or one row of tiles. Errors: kDevice,
// kCapacity; kGeometry for codes in panels that overlap others without being the same.
Result<PreparedExperts> ToDevice(const PreparedExperts& experts, const Device& device);
Result<PreparedLinear> ToDevice(const PreparedLinear& linear, const Device& device);

inline constexpr uint64_t kDefaultStagingBytes = uint64_t{64} << 20;

struct LoadOptions {
  // Behaviour.
  std::optional<Activation> activation = {};  // overrides the config; without either SiLU is assumed
  double output_scale = 1;
  std::optional<Dtype> io = {};  // as in MoeGeometry
  // Widths of a linear, or of the part that is loaded, as the model sees them, 0 = as stored. LoadLinear
  // only.
  uint32_t in_channels = 0;
  uint32_t out_channels = 0;
  bool hash = false;  // compute content_sha256 while reading
  // Where the slab lies. For a GPU, pieces are read into pinned memory and copied to their place while others
  // are read: no whole layer on the host.
  Device device = {};
  // Order of the codes in the slab; empty = the one that the device's executor reads: panels on the host,
  // native on a GPU, where panels are refused. It costs no memory, and no hash depends on it.
  std::optional<CodeOrder> order = {};
  // Called from one thread at a time with bytes read so far and in all; may be empty. false stops the load,
  // which then fails with kCancelled: pieces that are being read are finished, nothing else is read.
  std::function<bool(uint64_t bytes_done, uint64_t bytes_total)> progress = {};
  // Where a slab on the host comes from; empty = HostBuffer::Create.
  std::function<Result<HostBuffer>(uint64_t size_bytes)> allocate = {};

  // Performance.
  // Host memory beside the slab, over all threads, for bytes that cannot be read straight to their place: on
  // a GPU all of them, in panels all codes. Fewer threads read where it is short. >= 64 KiB; a GPU and panels
  // take at least one row of tiles.
  uint64_t staging_bytes = kDefaultStagingBytes;
  int num_threads = 0;  // 0 = all cores
};

// Reads one whole layer into one slab. `layer` is a position in checkpoint.layers(). Checks the marker
// tensors, and that no file has changed since it was opened. Every byte is read once, by parallel positioned
// reads; where the file and the slab agree on the order, straight to its place. Errors: kUsage, kIo, kFormat,
// kGeometry, kCapacity, kUnsupported, kDevice, kCancelled; nothing is kept on error, and the call may be
// repeated.
Result<PreparedExperts> LoadExperts(const Checkpoint& checkpoint, size_t layer,
                                    const LoadOptions& options = {});

// The same for one rank: only the experts and channels that `plan` gives to `global_rank`, in local ids.
// Nothing else is read. A rank that owns nothing gets a package that contributes nothing. Errors also:
// kUsage (rank out of range), kGeometry (a plan made for another checkpoint).
Result<PreparedExperts> LoadExperts(const Checkpoint& checkpoint, const ExtentPlan& plan, size_t layer,
                                    int global_rank, const LoadOptions& options = {});

// What loading that share takes, before anything is read. Cost: linear in the number of matrices. Errors: as
// above, but kIo.
struct LoadSizes {
  ExpertsTable table;
  uint64_t read_bytes = 0;     // of the files, each byte once; marker tensors not counted
  uint64_t staging_bytes = 0;  // beside the slab, under these options on this machine
};
Result<LoadSizes> SizeExperts(const Checkpoint& checkpoint, const ExtentPlan& plan, size_t layer,
                              int global_rank, const LoadOptions& options = {});

// Global to local expert ids of one ep rank, -1 = elsewhere: what MoeArgs::expert_map takes.
std::vector<int32_t> ExpertMap(const ExtentPlan& plan, size_t layer, int ep_rank);

// Reads one dense matrix, by the name that Checkpoint::linears() gives, or one slice of a routed one.
Result<PreparedLinear> LoadLinear(const Checkpoint& checkpoint, std::string_view name,
                                  const LoadOptions& options = {});

// A rectangle of a matrix: what one tensor-parallel rank owns of an attention projection or of the head. 0
// channels = to the end.
struct LinearExtent {
  uint64_t first_in = 0;  // all four are multiples of 128
  uint64_t in_channels = 0;
  uint64_t first_out = 0;
  uint64_t out_channels = 0;
};

// The same for a part, with nothing else read. Parts of the output axis stand side by side, parts of the
// input axis add up to y; the bias goes with first_in = 0. Errors also: kGeometry for an extent off the grid
// or the matrix.
Result<PreparedLinear> LoadLinear(const Checkpoint& checkpoint, std::string_view name,
                                  const LinearExtent& extent, const LoadOptions& options = {});

// W [in][out] of the stored size as fp32: computed in double, rounded once. `inner` leaves the
// rotations and vectors off (the fp16 codebook values). Cost: in * out * 4 bytes. Errors: kCapacity; kDevice
// for a matrix that is not on the host.
Result<std::vector<float>> DecodeMatrix(const PreparedLinear& linear, bool inner);

}  // namespace espalier

#endif  // ESPALIER_EXPERTS_H_
