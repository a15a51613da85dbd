// SPDX-License-Identifier: Apache-2.0
//
// The rest of a model for the same tensor-parallel ranks: which heads and which channels of dense layers a
// rank holds, as data, and loaders that read just these from BF16 and MXFP8 tensors.
//
// The sizes of a checkpoint are never altered. Where they do not divide, every rank gets the same local
// size, the last ranks hold less than that, and the rest is zero. Every split starts from the sizes of the
// checkpoint; what it pads to stands beside them. Rules and tables: docs/format.md, "The rest of a model".
#ifndef ESPALIER_DENSE_SLICES_H_
#define ESPALIER_DENSE_SLICES_H_

#include <espalier/checkpoint.h>
#include <espalier/formats.h>
#include <espalier/host_buffer.h>
#include <espalier/status.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace espalier {

inline constexpr uint64_t kDefaultWidthAlignment = 64;     // channels
inline constexpr uint64_t kMaxWidthAlignment = 1u << 16;   // channels
inline constexpr uint64_t kMaxSplit = uint64_t{1} << 40;   // heads or channels: no axis is longer
inline constexpr uint64_t kMxfp8BlockChannels = 32;        // input channels that share a scale
inline constexpr uint64_t kPaddedHeadVectorEntries = 128;  // of an A_log that is stored with a zero tail
inline constexpr std::string_view kMxfp8ScaleSuffix = "_scale";  // "x.weight" has "x.weight_scale"

// Attention heads, or linear-attention heads, of every rank: local_heads each, the valid ones first.
// REQUIRES for all members below: 0 <= rank < tp.
struct HeadSplit {
  uint64_t heads = 0;         // of the checkpoint
  uint64_t padded_heads = 0;  // local_heads * tp
  uint64_t local_heads = 0;
  int tp = 1;

  uint64_t FirstHead(int rank) const { return std::min(static_cast<uint64_t>(rank) * local_heads, heads); }
  uint64_t ValidHeads(int rank) const { return std::min(heads - FirstHead(rank), local_heads); }

  friend bool operator==(const HeadSplit&, const HeadSplit&) = default;
};

// `heads` is the checkpoint's count, so that a second call changes nothing. tp is 1..kMaxTp.
// Errors: kGeometry.
Result<HeadSplit> SplitHeads(uint64_t heads, int tp);

// Key/value heads. With fewer of them than ranks each is held by `replicas` neighbouring ranks; otherwise
// (replicas 1) they are padded like the heads that they serve.
struct KvSplit {
  uint64_t kv_heads = 0;  // of the checkpoint
  uint64_t local_heads = 0;
  uint64_t replicas = 1;
  int tp = 1;

  uint64_t FirstHead(int rank) const {
    const auto r = static_cast<uint64_t>(rank);
    return replicas > 1 ? r / replicas : std::min(r * local_heads, kv_heads);
  }
  uint64_t ValidHeads(int rank) const { return std::min(kv_heads - FirstHead(rank), local_heads); }

  friend bool operator==(const KvSplit&, const KvSplit&) = default;
};

// The split under which every rank holds the k/v heads of its own heads of SplitHeads(heads, tp), and local
// head h uses local k/v head h / (heads / kv_heads), or 0 where they are replicated. Errors: kGeometry when
// there is none; the message lists the tp sizes up to 24 that have one.
Result<KvSplit> SplitKvHeads(uint64_t heads, uint64_t kv_heads, int tp);

// The tp sizes up to 24 for which SplitKvHeads succeeds; none when kv_heads does not divide heads.
std::vector<int> LegalKvTpSizes(uint64_t heads, uint64_t kv_heads);

// Channels of a dense MLP, a shared expert, or (with alignment 1) any other projection: every rank has
// `local` of them, the valid ones first.
struct WidthSplit {
  uint64_t width = 0;  // of the checkpoint
  uint64_t local = 0;  // ceil(width / tp), rounded up to the alignment
  uint64_t alignment = 1;
  int tp = 1;

  uint64_t FirstChannel(int rank) const { return std::min(static_cast<uint64_t>(rank) * local, width); }
  uint64_t ValidChannels(int rank) const { return std::min(width - FirstChannel(rank), local); }

  friend bool operator==(const WidthSplit&, const WidthSplit&) = default;
};

// alignment is 1..kMaxWidthAlignment. Errors: kGeometry.
Result<WidthSplit> SplitWidth(uint64_t width, int tp, uint64_t alignment = kDefaultWidthAlignment);

// Everything above for one model. Parts that the config does not name are empty.
struct DensePlan {
  int tp = 1;
  std::optional<HeadSplit> heads;         // num_attention_heads
  std::optional<KvSplit> kv_heads;        // num_key_value_heads
  std::optional<HeadSplit> linear_heads;  // linear_attn_config.num_heads
  std::optional<WidthSplit> dense;        // intermediate_size
  std::optional<WidthSplit> shared;       // of the shared experts together
  // Set instead of kv_heads where these cannot be split at this tp. Not an error of the whole plan: who runs
  // the attention in another way still needs the rest.
  std::optional<Status> kv_refusal;
  std::vector<int> kv_legal_tp;  // beside kv_refusal
};

// Pure; costs nothing. Errors: kGeometry (tp, alignment, a size of the config beyond kMaxSplit).
Result<DensePlan> PlanDense(const ModelConfig& config, int tp, uint64_t alignment = kDefaultWidthAlignment);

// What one rank holds of one axis, or of one section of it: entries [first, first + valid) of the `size` that
// the checkpoint must have, then zeros up to `local`.
struct AxisSlice {
  uint64_t size = 0;
  uint64_t first = 0;
  uint64_t valid = 0;
  uint64_t local = 0;

  friend bool operator==(const AxisSlice&, const AxisSlice&) = default;
};

// Errors: kUsage (rank outside 0..tp-1), kGeometry (an axis beyond 64 bits). `entries_per_head` is the head's
// width on that axis: head_dim for projections, 1 for A_log and the like.
Result<AxisSlice> HeadSlice(const HeadSplit& split, uint64_t entries_per_head, int rank);
Result<AxisSlice> KvHeadSlice(const KvSplit& split, uint64_t entries_per_head, int rank);
Result<AxisSlice> WidthSlice(const WidthSplit& split, int rank);

// All of it, on every rank: norms, routers, whatever is not split.
constexpr AxisSlice WholeAxis(uint64_t size) {
  return {.size = size, .first = 0, .valid = size, .local = size};
}

// One rank's part of a tensor, in C order.
struct DenseTensor {
  std::string name;  // the file's own
  Dtype dtype = Dtype::kU8;
  std::vector<uint64_t> shape;  // of the part
  HostBuffer data;
  uint64_t read_bytes = 0;  // of the file; the rest of `data` is zero
};

// Reads a whole tensor. Errors: kUsage (no such tensor), kIo (here and below also a file that changed since
// its header was read), kCapacity.
Result<DenseTensor> LoadDense(const Checkpoint& checkpoint, std::string_view tensor);

// Reads one rank's slice along one axis; no byte of another rank is read. Several sections are parts that lie
// behind each other on the axis (fused q, k and v), each cut, and filled with zeros, on its own. Any dtype of
// whole bytes. Errors: kUsage (no such tensor, a slice that is none), kFormat (the axis is not as long as the
// sections), kGeometry (no such axis, sizes beyond 64 bits), kUnsupported (a dtype of 4 or 6 bits), kIo,
// kCapacity.
Result<DenseTensor> LoadDenseSlice(const Checkpoint& checkpoint, std::string_view tensor, size_t axis,
                                   std::span<const AxisSlice> sections);
Result<DenseTensor> LoadDenseSlice(const Checkpoint& checkpoint, std::string_view tensor, size_t axis,
                                   const AxisSlice& slice);

// A_log: one entry a head. Also takes a flat vector of 128 entries where those behind the checkpoint's heads
// are zero bits, which is checked; any other shape is kFormat. Errors otherwise as LoadDenseSlice.
Result<DenseTensor> LoadALog(const Checkpoint& checkpoint, std::string_view tensor, const HeadSplit& split,
                             int rank);

// An MXFP8 matrix: weight F8_E4M3 [out, in], scale U8 or F8_E8M0 [out, ceil(in / 32)] under the weight's name
// with "_scale" behind it; value = weight * 2^(scale - 127).
struct Mxfp8Tensor {
  DenseTensor weight;
  DenseTensor scale;
};

// Weight and scale together, whole.
Result<Mxfp8Tensor> LoadMxfp8(const Checkpoint& checkpoint, std::string_view weight);

// The same for one rank's slice along axis 0 (out) or 1 (in). Padding is zero in both: a weight of 0 at a
// scale of 2^-127, that is, exactly 0. Cuts of the input axis fall on multiples of 32, else kGeometry, on
// every rank alike. Errors otherwise as LoadDenseSlice.
Result<Mxfp8Tensor> LoadMxfp8Slice(const Checkpoint& checkpoint, std::string_view weight, size_t axis,
                                   std::span<const AxisSlice> sections);
Result<Mxfp8Tensor> LoadMxfp8Slice(const Checkpoint& checkpoint, std::string_view weight, size_t axis,
                                   const AxisSlice& slice);

}  // namespace espalier

#endif  // ESPALIER_DENSE_SLICES_H_
