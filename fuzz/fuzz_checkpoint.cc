// SPDX-License-Identifier: Apache-2.0
//
// Opens a checkpoint of any layout made of hostile index, manifest, config, tier table and headers, and if it
// is accepted uses all of it: every description, byte range, name and vector, and one token through every
// layer.
//
//   fuzz_checkpoint --make-corpus DIR   writes one seed per layout
#include <espalier/backend.h>
#include <espalier/checkpoint.h>
#include <espalier/dense_slices.h>
#include <espalier/experts.h>
#include <espalier/moe.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "fuzz/check.h"
#include "fuzz/checkpoint_archive.h"
#include "support/checkpoint_writer.h"
#include "support/memory_file_system.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace espalier::fuzz {
namespace {

// What one input may cost at most: larger matrices are described and addressed, but not read.
constexpr uint64_t kMaxLayerBytes = 1u << 20;

void CheckRegions(const Checkpoint& checkpoint, const std::vector<CopyRegion>& regions,
                  uint64_t target_bytes) {
  uint64_t covered = 0;
  for (const CopyRegion& region : regions) {
    Check(region.rows > 0 && region.row_bytes > 0, "a region is not empty");
    Check(region.file < checkpoint.files().size(), "a region names a file of the checkpoint");
    const uint64_t source_end =
        region.source_offset + (region.rows - 1) * region.source_stride + region.row_bytes;
    Check(source_end <= checkpoint.files()[region.file].size_bytes, "a region lies inside its file");
    const uint64_t target_end =
        region.target_offset + (region.rows - 1) * region.target_stride + region.row_bytes;
    Check(target_end <= target_bytes, "a region lies inside its target");
    covered += region.rows * region.row_bytes;
  }
  Check(covered == target_bytes, "the regions fill their target exactly");
}

void CheckVector(const Checkpoint& checkpoint, const VectorSource& vector, uint64_t channels) {
  if (vector.kind == VectorSource::Kind::kAbsent) return;
  CheckRegions(checkpoint, vector.regions,
               vector.kind == VectorSource::Kind::kFp16 ? channels * 2 : channels / 8);
}

void CheckSource(const Checkpoint& checkpoint, const MatrixSource& source, bool read) {
  const MatrixInfo& info = source.info;
  Check(info.bits >= kMinBits && info.bits <= kMaxBits, "bits are 1..8");
  CheckRegions(checkpoint, source.codes, info.code_bytes());
  CheckVector(checkpoint, source.suh, info.in_channels);
  CheckVector(checkpoint, source.svh, info.out_channels);
  CheckVector(checkpoint, source.bias, info.out_channels);
  if (read) Check(testing::ReadSource(checkpoint, source).has_value(), "a described matrix can be read");
}

void CheckFound(const Checkpoint& checkpoint, size_t layer, uint32_t expert, Projection projection,
                uint32_t slice) {
  const Result<Checkpoint::MatrixRef> found =
      checkpoint.FindMatrix(checkpoint.MatrixName(layer, expert, projection, slice));
  Check(found.has_value(), "a matrix is found by its own name");
  Check(found->routed && found->layer == layer && found->expert == expert && found->projection == projection,
        "its own name means the matrix itself");
}

uint64_t LayerBytes(const MoeLayer& layer) {
  const uint64_t matrix = layer.hidden_channels * layer.intermediate_channels;
  return matrix * layer.experts * kNumProjections;  // 8 bits a weight at most
}

void RunOneToken(const Checkpoint& checkpoint, size_t index) {
  const Result<PreparedExperts> experts = LoadExperts(checkpoint, index);
  if (!experts) return;
  const uint64_t hidden = experts->geometry().hidden_channels;
  MoePlanOptions options;
  options.max_tokens = 1;
  options.executor = "cpu";
  options.num_threads = 1;
  const Result<MoePlan> plan = MoePlan::Create(*experts, options);
  if (!plan) return;
  Result<HostBuffer> workspace = HostBuffer::Create(plan->workspace_bytes());
  Check(workspace.has_value(), "a small workspace fits");
  const std::vector<float> x(hidden, 0.25f);
  std::vector<float> y(hidden);
  const int32_t id = 0;
  const float weight = 1;
  MoeArgs args;
  args.num_tokens = 1;
  args.x = x.data();
  args.x_row_stride = hidden;
  args.topk_ids = &id;
  args.topk_ids_row_stride = 1;
  args.topk_weights = &weight;
  args.topk_weights_row_stride = 1;
  args.y = y.data();
  args.y_row_stride = hidden;
  args.workspace = workspace->data();
  args.workspace_bytes = workspace->size_bytes();
  Check(RunMoe(*plan, *experts, args).has_value(), "a loaded layer runs");
}

void UseLayer(const Checkpoint& checkpoint, size_t index) {
  const MoeLayer& layer = checkpoint.layers()[index];
  Check(layer.experts > 0 && layer.slices > 0, "a layer has experts");
  Check(layer.valid_hidden_channels <= layer.hidden_channels,
        "the config's hidden size is at most the stored one");
  Check(layer.valid_intermediate_channels <= layer.intermediate_channels,
        "nor is the intermediate size larger");
  const Result<size_t> found = checkpoint.FindLayer(layer.label);
  Check(found.has_value() && *found == index, "a layer is found by its label");
  const uint64_t width = layer.intermediate_channels / layer.slices;
  const bool small = LayerBytes(layer) <= kMaxLayerBytes;
  for (uint32_t expert = 0; expert < layer.experts; ++expert) {
    for (int p = layer.has_gate ? 0 : 1; p < kNumProjections; ++p) {
      const Projection projection = static_cast<Projection>(p);
      for (uint32_t slice = 0; slice < layer.slices; ++slice) {
        CheckFound(checkpoint, index, expert, projection, slice);
        (void)checkpoint.CheckMarker(checkpoint.Matrix(index, expert, projection, slice));
        for (const SliceExtent& extent :
             {SliceExtent{slice, 0, width}, SliceExtent{slice, width - 128, 128}}) {
          const Result<MatrixSource> source = checkpoint.Source(index, expert, projection, extent);
          if (source) CheckSource(checkpoint, *source, small);
        }
      }
    }
  }
  if (small) (void)checkpoint.CheckPadding(index, {.slice = 0, .first_channel = 0, .channels = width});
  if (small) RunOneToken(checkpoint, index);
}

void UseLinears(const Checkpoint& checkpoint) {
  for (size_t i = 0; i < checkpoint.linears().size(); ++i) {
    const LinearInfo& linear = checkpoint.linears()[i];
    const Result<Checkpoint::MatrixRef> found = checkpoint.FindMatrix(linear.name);
    Check(found.has_value() && !found->routed && found->linear == i, "a linear is found by its name");
    const bool small = linear.matrix.code_bytes() <= kMaxLayerBytes;
    const Result<MatrixSource> source = checkpoint.LinearSource(i);
    if (source) CheckSource(checkpoint, *source, small);
    if (!small) continue;
    const Result<PreparedLinear> loaded = LoadLinear(checkpoint, linear.name);
    if (loaded && i == 0 && linear.matrix.in_channels * linear.matrix.out_channels <= 128 * 128) {
      Check(DecodeMatrix(*loaded, false).has_value(), "a loaded linear decodes");
    }
  }
}

// Names of a file must not reach a terminal as they are, nor fill it.
void CheckMessage(const std::string& message) {
  Check(!message.empty(), "a message says something");
  Check(message.size() < 20'000, "a message is not a file");
  for (const char c : message)
    Check((c < 0 || c >= 0x20) && c != 0x7F, "a message holds no control characters");
}

// Three ranks of every axis of a small tensor, and the same read as MXFP8.
void UseDense(const Checkpoint& checkpoint, const TensorInfo& tensor) {
  if (checkpoint.FindTensor(tensor.name) != &tensor) return;  // one of a container, or a second copy
  for (size_t axis = 0; axis < tensor.shape.size() && axis < 8; ++axis) {
    const Result<WidthSplit> split = SplitWidth(tensor.shape[axis], 3, 1);
    if (!split) continue;
    uint64_t read_bytes = 0;
    for (int rank = 0; rank < 3; ++rank) {
      const AxisSlice slice = WidthSlice(*split, rank).value();
      const Result<DenseTensor> part = LoadDenseSlice(checkpoint, tensor.name, axis, slice);
      (void)LoadMxfp8Slice(checkpoint, tensor.name, axis, slice);
      if (!part) return;
      Check(part->read_bytes <= part->data.size_bytes(), "a slice has room for what is read");
      read_bytes += part->read_bytes;
    }
    Check(read_bytes == tensor.size_bytes, "three ranks read every byte once");
  }
}

void UseCheckpoint(const Checkpoint& checkpoint) {
  int last = 0;
  for (const int size : checkpoint.LegalTpSizes()) {
    Check(size > last && size <= 24, "legal sizes ascend to 24");
    last = size;
  }
  for (const Problem& problem : checkpoint.problems()) CheckMessage(problem.message);
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    const FileInfo& file = checkpoint.files()[tensor.file];
    Check(tensor.offset_bytes + tensor.size_bytes <= file.size_bytes, "a tensor lies inside its file");
    (void)checkpoint.FindTensor(tensor.name);
    if (tensor.size_bytes > 4096) continue;
    (void)checkpoint.ReadFloats(tensor.name);
    UseDense(checkpoint, tensor);
  }
  for (size_t layer = 0; layer < checkpoint.layers().size(); ++layer) UseLayer(checkpoint, layer);
  UseLinears(checkpoint);
  for (const int tp : {1, 9}) (void)PlanDense(checkpoint.config(), tp);
  (void)checkpoint.CheckUsable("");
}

// Whether the folder was accepted.
bool OpenAndUse(const Archive& archive) {
  testing::MemoryFileSystem files;
  // A folder is there even when nothing is in it.
  files.AddEntry("/c", FileSystem::EntryKind::kDirectory);
  for (const Entry& entry : archive) {
    // Names are entries of one folder, as on any file system.
    if (entry.name.empty() || entry.name == "." || entry.name == ".." ||
        entry.name.find_first_of(std::string("/\0", 2)) != std::string::npos) {
      continue;
    }
    files.Write("/c/" + entry.name, EntryBytes(entry));
  }
  OpenOptions options;
  options.file_system = &files;
  const Result<Checkpoint> opened = Checkpoint::Open("/c", options);
  if (opened) {
    UseCheckpoint(*opened);
    return true;
  }
  const StatusCode code = opened.error().code();
  Check(code == StatusCode::kIo || code == StatusCode::kFormat || code == StatusCode::kUnsupported,
        "opening refuses with io, format or unsupported");
  CheckMessage(opened.error().message());
  return false;
}

Archive ToArchive(const testing::CheckpointFiles& files) {
  Archive archive;
  const testing::FileMap finished = files.Serialize();
  for (const auto& [name, shard] : files.shards) {
    uint64_t length = 0;
    const std::string& bytes = finished.at(name);
    std::memcpy(&length, bytes.data(), 8);
    archive.push_back(
        {name, true, bytes.substr(8, length), static_cast<uint32_t>(bytes.size() - 8 - length)});
  }
  for (const auto& [name, json] : files.json) {
    archive.push_back({name, false, Json::parse(finished.at(name)).dump(), 0});
  }
  return archive;
}

std::vector<std::pair<std::string, testing::CheckpointFiles>> Seeds() {
  using testing::RandomModel;
  testing::ModelShape whole{.layers = {1}, .experts = 2, .intermediate_channels = 128};
  whole.codebook = Codebook::kMcg;
  whole.max_bits = 2;
  testing::ModelShape bare = whole;
  bare.dense = false;
  bare.layers = {0, 3};
  bare.experts = 1;
  testing::ModelShape biased = bare;
  biased.bias = true;
  testing::ModelShape no_gate = bare;
  no_gate.has_gate = false;
  testing::ModelShape shared = bare;
  shared.layers = {3, 4};
  shared.shared_hidden = true;
  shared.same_gate_up_suh = true;
  testing::ModelShape sliced = shared;
  sliced.layers = {3};
  sliced.slices = 2;
  sliced.intermediate_channels = 256;
  sliced.bits_by_expert = true;
  sliced.min_bits = sliced.max_bits = 3;
  testing::ModelShape container = shared;
  container.bits = 2;
  container.intermediate_channels = 256;
  testing::CheckpointFiles two_blocks =
      WriteStock(RandomModel(whole, 1), {.shards = 2, .index = true, .spread = true});
  two_blocks.json["quantization_config.json"] = two_blocks.config()["quantization_config"];
  testing::CheckpointFiles nested = WriteStock(RandomModel(bare, 2));
  nested.config() = {{"text_config", nested.config()}};
  testing::CheckpointFiles situ =
      WriteStock(RandomModel(bare, 3), {.experts_path = "block_sparse_moe.experts", .w_names = true});
  situ.config()["hidden_act"] = "situ";
  situ.config()["activation_situ_beta"] = 4;
  return {{"stock", WriteStock(RandomModel(whole, 4))},
          {"stock-two-blocks", two_blocks},
          {"stock-nested", nested},
          {"stock-situ-w", situ},
          {"stock-legacy", WriteStock(RandomModel(bare, 5), {.legacy_signs = true})},
          {"stock-bias", WriteStock(RandomModel(biased, 6), {.shards = 2})},
          {"stock-no-gate", WriteStock(RandomModel(no_gate, 7))},
          {"rank-sliced", WriteRankSliced(RandomModel(sliced, 8))},
          {"shared-h", WriteRankSliced(RandomModel(sliced, 9), {.shared_h = true, .index = true})},
          {"r7", WriteR7(RandomModel(shared, 10))},
          {"exl3-v1", WriteExl3V1(RandomModel(container, 11))},
          {"exl3-v1-per-expert",
           WriteExl3V1(RandomModel(container, 12), {.per_expert_vectors = true, .config = false})}};
}

int MakeCorpus(const std::string& directory) {
  for (const auto& [name, files] : Seeds()) {
    const Archive archive = ToArchive(files);
    Check(OpenAndUse(archive), "a seed is accepted: it would reach nothing otherwise");
    std::ofstream out(directory + "/" + name, std::ios::binary);
    out << WriteArchive(archive);
    if (!out.flush()) return 3;
  }
  return 0;
}

size_t Store(const Archive& archive, uint8_t* data, size_t max_size) {
  const std::string bytes = WriteArchive(archive);
  if (bytes.size() > max_size) return 0;
  std::memcpy(data, bytes.data(), bytes.size());
  return bytes.size();
}

}  // namespace
}  // namespace espalier::fuzz

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  if (*argc == 3 && std::string((*argv)[1]) == "--make-corpus")
    std::exit(espalier::fuzz::MakeCorpus((*argv)[2]));
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  espalier::fuzz::OpenAndUse(espalier::fuzz::ArchiveReader(data, size).Read());
  return 0;
}

// One in four: the bytes of one text. Else a change that keeps archive and JSON whole.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
  espalier::fuzz::Archive archive = espalier::fuzz::ArchiveReader(data, size).Read();
  if (archive.empty()) return LLVMFuzzerMutate(data, size, max_size);
  if (seed % 4 == 0) {
    std::string& text = archive[(seed / 4) % archive.size()].text;
    const size_t length = text.size();
    text.resize(length + 64);
    text.resize(LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(text.data()), length, text.size()));
  } else {
    espalier::fuzz::ArchiveMutator mutator(seed);
    for (unsigned i = 0; i <= seed / 4 % 3; ++i) mutator.Mutate(archive);
  }
  const size_t stored = espalier::fuzz::Store(archive, data, max_size);
  return stored != 0 ? stored : LLVMFuzzerMutate(data, size, max_size);
}

// Files of one checkpoint in the folder of another.
extern "C" size_t LLVMFuzzerCustomCrossOver(const uint8_t* a, size_t a_size, const uint8_t* b, size_t b_size,
                                            uint8_t* out, size_t max_size, unsigned int seed) {
  espalier::fuzz::Archive archive = espalier::fuzz::ArchiveReader(a, a_size).Read();
  std::minstd_rand random(seed);
  for (espalier::fuzz::Entry& entry : espalier::fuzz::ArchiveReader(b, b_size).Read()) {
    if (random() % 2 == 0) archive.push_back(std::move(entry));
  }
  return espalier::fuzz::Store(archive, out, max_size);
}
