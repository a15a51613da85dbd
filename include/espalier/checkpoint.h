// SPDX-License-Identifier: Apache-2.0
//
// A checkpoint on disk, whatever its layout: what is in it, where the bytes of every matrix are, and
// plain tensors by name. Opening reads headers, index and config only; everything that can be
// refused without reading a payload is refused there.
#ifndef ESPALIER_CHECKPOINT_H_
#define ESPALIER_CHECKPOINT_H_

#include <espalier/formats.h>
#include <espalier/status.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace espalier {

class FileSystem;  // src/base/file.h; a seam for tests and fault injection
class Layout;      // src/checkpoint/layout.h; one per way of storing a checkpoint

inline constexpr int32_t kNoTensor = -1;
inline constexpr int32_t kAnyLayer = -1;

// One tensor of a safetensors file. `name` is the file's own.
struct TensorInfo {
  std::string name;
  Dtype dtype = Dtype::kU8;
  std::vector<uint64_t> shape;  // elements; empty = a scalar
  uint32_t file = 0;            // index into Checkpoint::files()
  uint64_t offset_bytes = 0;    // from the start of the file
  uint64_t size_bytes = 0;
};

struct FileInfo {
  std::string name;  // as the directory, index or manifest gives it
  std::filesystem::path path;
  uint64_t size_bytes = 0;
  uint64_t num_tensors = 0;
  std::string expected_sha256;  // lower-case hex where a manifest states it, else empty
};

// Something readable but wrong. Errors make run, verify and decode of `layer` fail with kFormat.
struct Problem {
  enum class Severity { kWarning, kError };
  Severity severity = Severity::kWarning;
  std::string file;    // may be empty
  std::string tensor;  // may be empty
  std::string message;
  std::string layer;  // label of the layer it belongs to, empty = the whole checkpoint
};

// What the config says. Absent numbers are 0.
struct ModelConfig {
  std::string architecture;              // architectures[0]; empty when absent
  uint64_t experts = 0;                  // num_experts | n_routed_experts | num_local_experts
  uint64_t hidden_channels = 0;          // hidden_size
  uint64_t intermediate_channels = 0;    // moe_intermediate_size, else intermediate_size
  uint64_t top_k = 0;                    // num_experts_per_tok
  std::optional<Activation> activation;  // empty when no config names one: SiLU is assumed then

  // The rest of the model; a list with one value per layer counts as absent. Never what a tensor-parallel
  // size pads them to: an original_ key that such a size left in the config comes first.
  uint64_t attention_heads = 0;              // [original_]num_attention_heads
  uint64_t kv_heads = 0;                     // num_key_value_heads
  uint64_t head_dim = 0;                     // head_dim
  uint64_t linear_heads = 0;                 // linear_attn_config.[original_]num_heads
  uint64_t linear_head_dim = 0;              // linear_attn_config.head_dim
  uint64_t dense_intermediate_channels = 0;  // intermediate_size, whether or not a layer is dense
  // Of the shared experts together: shared_expert_intermediate_size, else n_shared_experts |
  // num_shared_experts times the routed width.
  uint64_t shared_intermediate_channels = 0;
};

// A rectangle of bytes of one file and where it goes: row i is `row_bytes` bytes from
// source_offset + i * source_stride to target_offset + i * target_stride.
struct CopyRegion {
  uint32_t file = 0;
  uint64_t rows = 0;
  uint64_t row_bytes = 0;
  uint64_t source_offset = 0;  // bytes from the start of the file
  uint64_t source_stride = 0;  // bytes
  uint64_t target_offset = 0;  // bytes from the start of the matrix' or vector's target buffer
  uint64_t target_stride = 0;  // bytes
};

// Where a vector comes from. kSignBits: one bit a channel, LSB first in 16-bit words, set = -1
// (legacy su / sv). The target is always fp16.
struct VectorSource {
  enum class Kind : uint8_t { kAbsent, kFp16, kSignBits };
  Kind kind = Kind::kAbsent;
  std::vector<CopyRegion> regions;  // kSignBits: a single row of whole bytes
  // Identity of the stored vector: equal keys with equal channel ranges are the same bytes, so a
  // loader may store and rotate them once. 0 = unknown.
  uint64_t share_key = 0;
};

// One stored EXL3 matrix W [in][out], y = x W. A slice of a rank-sliced expert is a matrix.
struct MatrixInfo {
  int bits = 0;
  Codebook codebook = Codebook::k3Inst;
  uint64_t in_channels = 0;   // stored, a multiple of 16
  uint64_t out_channels = 0;  // stored, a multiple of 16
  bool has_bias = false;
  // Indices into Checkpoint::tensors(), kNoTensor where the layout has no such tensor of its own.
  int32_t trellis = kNoTensor;
  int32_t marker = kNoTensor;

  uint64_t code_bytes() const { return in_channels * out_channels / 8 * static_cast<uint64_t>(bits); }
};

// Everything needed to read one matrix, or the part of it that an extent of its intermediate axis
// covers, in native order: codes as [in/16][out/16][16*bits] u16, suh [in], svh [out], bias [out].
struct MatrixSource {
  MatrixInfo info;   // sizes of the part, not of the whole
  std::string name;  // the file's own
  std::vector<CopyRegion> codes;
  VectorSource suh;
  VectorSource svh;
  VectorSource bias;
};

// The routed experts of one layer.
struct MoeLayer {
  std::string label;   // what --layer takes: "3", or "PREFIX.3" for the smaller of two groups
  std::string prefix;  // "model.layers"
  int64_t number = 0;
  uint32_t experts = 0;
  uint32_t slices = 1;                 // independently quantized slices of every expert
  uint64_t hidden_channels = 0;        // as stored
  uint64_t intermediate_channels = 0;  // as stored, slices summed
  // As the model sees it: the config's sizes where it is padded, else the stored ones.
  uint64_t valid_hidden_channels = 0;
  uint64_t valid_intermediate_channels = 0;
  bool has_gate = true;
};

// One EXL3 matrix outside the routed experts: attention projections, dense MLPs, shared experts, head.
struct LinearInfo {
  std::string name;  // without ".trellis"
  MatrixInfo matrix;
};

// One extent of the intermediate axis inside one slice.
struct SliceExtent {
  uint32_t slice = 0;
  uint64_t first_channel = 0;  // inside the slice; a multiple of 128
  uint64_t channels = 0;       // a multiple of 128
};

inline constexpr uint64_t kSlotChannels = 32;  // the storage unit of the slot-major container

// How a slot-major container lets itself be cut.
struct SlotGrid {
  uint64_t num_slots = 0;
  uint64_t extent_alignment_slots = 0;    // extents start and end on multiples of it
  std::vector<uint64_t> extent_barriers;  // slots that no extent may cross
};

struct OpenOptions {
  // Where bytes come from; null = the operating system. Must outlive the Checkpoint.
  FileSystem* file_system = nullptr;
};

// Immutable once open; all const members may be called from any thread at once.
class Checkpoint {
 public:
  // `path` is a directory or one .safetensors file (config.json and its companions are then looked
  // for beside it). Cost: linear in the number of tensors, no payload is read except of tensors that
  // occur twice. Errors: kIo, kFormat, kUnsupported as docs/errors.md lists them.
  static Result<Checkpoint> Open(const std::filesystem::path& path, const OpenOptions& options = {});

  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

  const std::filesystem::path& path() const;
  std::string_view layout_name() const;  // "stock", "rank-sliced", "r7", "exl3-v1"
  const ModelConfig& config() const;
  std::span<const FileInfo> files() const;
  std::span<const TensorInfo> tensors() const;
  std::span<const MoeLayer> layers() const;     // primary group first, then by label; ascending numbers
  std::span<const LinearInfo> linears() const;  // ordered by name
  std::span<const Problem> problems() const;

  // Empty for every layout but exl3-v1.
  const std::optional<SlotGrid>& slot_grid() const;

  // TP sizes N <= 24 at which every rank of every layer owns at least 128 channels.
  std::vector<int> LegalTpSizes() const;

  // Null when there is no such tensor.
  const TensorInfo* FindTensor(std::string_view name) const;

  // Reads one whole tensor; `target` must be size_bytes long. Errors: kUsage (size), kIo.
  Result<void> Read(const TensorInfo& tensor, std::span<std::byte> target) const;

  // The same as fp32, from F16, BF16, F32 or F64. Errors: kUsage (unknown name), kUnsupported (dtype).
  Result<std::vector<float>> ReadFloats(std::string_view name) const;

  // Position in layers() of the layer with this label. Error: kUsage, with the labels there are.
  Result<size_t> FindLayer(std::string_view label) const;

  // kFormat with the first error among problems() that belongs to the layer or to all; an empty
  // label means "any".
  Result<void> CheckUsable(std::string_view layer_label) const;

  // Shapes, bits and codebook of one stored matrix. REQUIRES: arguments in range.
  MatrixInfo Matrix(size_t layer, uint32_t expert, Projection projection, uint32_t slice) const;

  // The file's own name of that matrix.
  std::string MatrixName(size_t layer, uint32_t expert, Projection projection, uint32_t slice) const;

  // Byte ranges of the part of a matrix that `extent` covers. Errors: kGeometry when the extent is
  // outside the slice, or off the 128 grid without being the whole of it.
  Result<MatrixSource> Source(size_t layer, uint32_t expert, Projection projection,
                              const SliceExtent& extent) const;

  // The same for a dense matrix, whole. REQUIRES: linear < linears().size().
  Result<MatrixSource> LinearSource(size_t linear) const;

  // What a matrix name means: a routed matrix (all slices when `slice` is empty) or a linear.
  struct MatrixRef {
    bool routed = false;
    size_t layer = 0;
    uint32_t expert = 0;
    Projection projection = Projection::kGate;
    std::optional<uint32_t> slice;
    size_t linear = 0;
  };
  // Takes the canonical name (model.layers.{L}.mlp.experts.{E}.{gate,up,down}_proj[.rank{r}]) or the
  // file's own, without ".trellis". Error: kUsage.
  Result<MatrixRef> FindMatrix(std::string_view name) const;

  // Checks the marker tensor of a matrix against its codebook (reads 4 bytes). Errors: kFormat, kIo.
  Result<void> CheckMarker(const MatrixInfo& matrix) const;

  // Payload bytes that a layout requires to be zero are zero (row padding of exl3-v1) for the rows of one
  // extent. REQUIRES: inside the slice.
  // Errors: kFormat naming the place, kIo.
  Result<void> CheckPadding(size_t layer, const SliceExtent& extent) const;

  // Reads the regions into `target`. Regions must lie inside it. `staging` is scratch memory for runs of the
  // file whose rows go to different places; without it they are read row by row. Errors: kIo, kUsage.
  Result<void> ReadRegions(std::span<const CopyRegion> regions, std::span<std::byte> target,
                           std::span<std::byte> staging = {}) const;

  // kIo when the file was written to, cut or replaced under its name since it was opened: what its header
  // said may not hold any more. REQUIRES: file < files().size().
  Result<void> CheckUnchanged(uint32_t file) const;

  // One file's SHA-256 as lower-case hex. Cost: reads the whole file. `progress` (may be null) gets
  // the bytes read since its last call.
  Result<std::string> FileSha256(size_t file, void (*progress)(void* context, uint64_t bytes),
                                 void* context) const;

 private:
  struct State;
  explicit Checkpoint(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace espalier

#endif  // ESPALIER_CHECKPOINT_H_
