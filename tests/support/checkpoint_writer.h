// SPDX-License-Identifier: Apache-2.0
//
// Random mixture-of-experts checkpoints in memory, and writers of them in every layout. Written from
// docs/format.md without the reader's code, so that the two check each other. What a writer returns can be
// changed at will (tensors, metadata, JSON, bytes) before it is serialised: that is how hostile files are
// made.
#ifndef ESPALIER_TESTS_SUPPORT_CHECKPOINT_WRITER_H_
#define ESPALIER_TESTS_SUPPORT_CHECKPOINT_WRITER_H_

#include <espalier/checkpoint.h>
#include <espalier/formats.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace espalier::testing {

using Json = nlohmann::ordered_json;
using FileMap = std::map<std::string, std::string>;  // file name -> bytes

// One EXL3 matrix in native order. Empty vectors are absent.
struct MatrixModel {
  int bits = 0;
  Codebook codebook = Codebook::kMcg;
  uint64_t in_channels = 0;
  uint64_t out_channels = 0;
  std::vector<uint16_t> codes;  // [in/16][out/16][16*bits]
  std::vector<uint16_t> suh;    // fp16 [in]
  std::vector<uint16_t> svh;    // fp16 [out]
  std::vector<uint16_t> bias;   // fp16 [out]

  friend bool operator==(const MatrixModel&, const MatrixModel&) = default;
};

// Channels [first, first + channels) of the output (input) axis. The bias of an input cut goes with channel
// 0. REQUIRES: multiples of 16 inside the matrix.
MatrixModel CutOutputs(const MatrixModel& matrix, uint64_t first, uint64_t channels);
MatrixModel CutInputs(const MatrixModel& matrix, uint64_t first, uint64_t channels);
// Cuts the intermediate axis: outputs of gate and up, inputs of down.
MatrixModel CutIntermediate(const MatrixModel& matrix, Projection projection, uint64_t first,
                            uint64_t channels);

struct ExpertModel {
  // One entry per slice; a whole expert has one. Gate is unused where the layer has none.
  std::vector<std::array<MatrixModel, kNumProjections>> slices;
};

struct LayerModel {
  int64_t number = 0;
  std::vector<ExpertModel> experts;
};

// A tensor of a safetensors file. `dtype` is text, so that a test can write any.
struct NamedTensor {
  std::string name;
  std::string dtype;
  std::vector<uint64_t> shape;
  std::string data;
};

struct LinearModel {
  std::string name;
  MatrixModel matrix;
};

struct CheckpointModel {
  uint64_t hidden_channels = 0;
  uint64_t intermediate_channels = 0;  // slices summed
  uint32_t slices = 1;
  bool has_gate = true;
  std::vector<LayerModel> layers;
  std::vector<LinearModel> linears;
  std::vector<NamedTensor> plain;
};

struct ModelShape {
  std::vector<int64_t> layers = {1, 2};
  uint32_t experts = 3;
  uint64_t hidden_channels = 128;
  uint64_t intermediate_channels = 256;
  uint32_t slices = 1;
  bool has_gate = true;
  // Fixed values; drawn per matrix where empty.
  std::optional<int> bits = std::nullopt;
  std::optional<Codebook> codebook = std::nullopt;
  int min_bits = 1;
  int max_bits = 8;
  bool bits_by_expert = false;    // one K for all matrices of an expert
  bool shared_hidden = false;     // gate suh, up suh, down svh equal for all experts of a layer (and slice)
  bool same_gate_up_suh = false;  // gate suh == up suh of one expert
  bool unit_signs = false;        // every vector is +-1: what legacy su / sv can hold
  bool bias = false;              // up and down
  bool dense = true;              // a dense layer, an attention matrix and plain tensors beside the experts
};

CheckpointModel RandomModel(const ModelShape& shape, uint64_t seed);

// The same model with every expert cut into `slices` equal slices at 128 borders.
// REQUIRES: whole experts whose width is a multiple of 128 * slices.
CheckpointModel CutIntoSlices(const CheckpointModel& model, uint32_t slices);

// One safetensors file to be written.
struct ShardFile {
  std::vector<NamedTensor> tensors;
  std::vector<std::pair<std::string, std::string>> metadata = {{"format", "pt"}};
};

// Bytes of a safetensors file; offsets follow the order and the data of the tensors.
std::string SafetensorsBytes(const ShardFile& file);
// The same from a header text and the bytes behind it.
std::string SafetensorsBytes(std::string_view header, std::string_view data);

// In a manifest: replaced by the hash of the file when serialised.
inline constexpr const char* kHashOfFile = "@sha256";
inline constexpr const char* kIndexName = "model.safetensors.index.json";
inline constexpr const char* kManifestName = "exl3-manifest.json";

// A checkpoint that is not bytes yet.
struct CheckpointFiles {
  std::map<std::string, ShardFile> shards;
  std::map<std::string, Json> json;
  FileMap raw;                                       // further files, byte for byte
  std::vector<std::function<void(FileMap&)>> edits;  // applied in order to the finished files

  // REQUIRE: a tensor of that name exists.
  NamedTensor& Tensor(const std::string& name);
  std::string FileOf(const std::string& name) const;
  // Keep an index in step.
  NamedTensor Remove(const std::string& name);
  void Rename(const std::string& from, const std::string& to);
  void Add(const std::string& file, NamedTensor tensor);

  Json& config() { return json.at("config.json"); }
  Json& index() { return json.at(kIndexName).at("weight_map"); }
  Json& manifest() { return json.at(kManifestName); }

  // Names every tensor of every shard.
  void MakeIndex();

  FileMap Serialize() const;
};

struct StockOptions {
  std::string prefix = "model.layers";
  std::string experts_path = "mlp.experts";  // between the layer number and the expert number
  bool w_names = false;                      // w1 / w3 / w2 instead of gate_proj / up_proj / down_proj
  bool legacy_signs = false;                 // su / sv
  uint32_t shards = 1;
  bool index = false;
  bool spread = false;  // parts of one matrix go to different shards
};
CheckpointFiles WriteStock(const CheckpointModel& model, const StockOptions& options = {});

struct RankSlicedOptions {
  bool shared_h = false;   // shared_h_v1; the model must have been made with shared_hidden
  bool up_vectors = true;  // shared_h only: store the up vectors beside the gate's
  bool markers = true;
  bool tier_table = true;             // the model must have been made with bits_by_expert
  bool bits_per_expert_name = false;  // the field is "bits_per_expert" instead of "k"
  bool index = false;
};
CheckpointFiles WriteRankSliced(const CheckpointModel& model, const RankSlicedOptions& options = {});

struct R7Options {
  uint32_t shards = 2;
  bool index = true;
};
// REQUIRES: whole experts, shared_hidden.
CheckpointFiles WriteR7(const CheckpointModel& model, const R7Options& options = {});

struct Exl3V1Options {
  bool per_expert_vectors = false;  // false requires shared_hidden (up may differ from gate)
  uint64_t row_alignment = 4096;
  uint64_t extent_alignment_slots = 4;
  std::optional<std::vector<uint64_t>> barriers =
      std::nullopt;  // num_slots / 2 where empty and num_slots is even
  bool config = true;
};
// REQUIRES: whole experts, one K and mcg everywhere, a gate, no bias.
CheckpointFiles WriteExl3V1(const CheckpointModel& model, const Exl3V1Options& options = {});

// Writes the files into a directory that exists.
void WriteFiles(const FileMap& files, const std::filesystem::path& directory);

// Reads a matrix (or an extent of it) through the byte ranges of a source into native order.
Result<MatrixModel> ReadSource(const Checkpoint& checkpoint, const MatrixSource& source);

}  // namespace espalier::testing

#endif  // ESPALIER_TESTS_SUPPORT_CHECKPOINT_WRITER_H_
