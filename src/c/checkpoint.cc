// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints and extents of the C interface.
#include <espalier/espalier.h>

#include <span>
#include <string>
#include <vector>

#include "c/call.h"

namespace espalier::c {
namespace {

// Checkpoint::Matrix and MatrixName ask for arguments in range.
Result<void> CheckMatrix(const Checkpoint& checkpoint, uint64_t layer, uint64_t expert, int32_t projection,
                         uint64_t slice) {
  if (auto checked = InRange(layer, checkpoint.layers().size(), "layer"); !checked) return checked;
  const MoeLayer& info = checkpoint.layers()[layer];
  if (auto checked = InRange(expert, info.experts, "expert"); !checked) return checked;
  if (auto checked = InRange(projection, kNumProjections, "projection"); !checked) return checked;
  if (projection == ESPALIER_PROJECTION_GATE && !info.has_gate)
    return UsageError(fmt::format("layer {} has no gate matrices; legal: 1 (up), 2 (down)", info.label));
  return InRange(slice, info.slices, "slice");
}

espalier_matrix_info MatrixInfoOf(const MatrixInfo& matrix) {
  espalier_matrix_info known = {};
  known.in_channels = matrix.in_channels;
  known.out_channels = matrix.out_channels;
  known.bits = matrix.bits;
  known.codebook = static_cast<int32_t>(matrix.codebook);
  known.has_bias = matrix.has_bias ? 1 : 0;
  known.code_bytes = matrix.code_bytes();
  return known;
}

// One tp rank's share of a layer.
Result<const RankExtent*> FindRank(const ExtentPlan& plan, uint64_t layer, int32_t tp_rank) {
  if (auto checked = InRange(layer, plan.layers().size(), "layer"); !checked)
    return tl::unexpected(checked.error());
  if (auto checked = InRange(tp_rank, plan.tp(), "tp rank"); !checked) return tl::unexpected(checked.error());
  return &plan.layers()[layer].ranks[static_cast<size_t>(tp_rank)];
}

Result<void> CheckExpertRank(const ExtentPlan& plan, uint64_t layer, int32_t ep_rank) {
  if (auto checked = InRange(layer, plan.layers().size(), "layer"); !checked) return checked;
  return InRange(ep_rank, plan.ep(), "ep rank");
}

}  // namespace
}  // namespace espalier::c

using namespace espalier;     // NOLINT(google-build-using-namespace): the functions below are the C side
using namespace espalier::c;  // NOLINT(google-build-using-namespace)

int32_t espalier_checkpoint_open(const char* path, espalier_checkpoint** checkpoint) {
  return Call([&]() -> Result<void> {
    if (auto checked = NotNull(path, "path"); !checked) return checked;
    if (auto checked = NotNull(checkpoint, "checkpoint"); !checked) return checked;
    Result<Checkpoint> opened = Checkpoint::Open(path);
    if (!opened) return tl::unexpected(opened.error());
    CheckpointObject object{.checkpoint = *std::move(opened), .path = {}, .layout = {}, .activation = {}};
    object.path = object.checkpoint.path().string();
    object.layout = std::string(object.checkpoint.layout_name());
    if (const auto& activation = object.checkpoint.config().activation; activation)
      object.activation = ActivationText(*activation);
    return AddHandle(std::move(object), checkpoint);
  });
}

int32_t espalier_checkpoint_free(espalier_checkpoint* checkpoint) {
  return Call([&] { return HandleTable<espalier_checkpoint>::Get().Free(checkpoint); });
}

int32_t espalier_checkpoint_get_info(const espalier_checkpoint* checkpoint, espalier_checkpoint_info* info) {
  return Call([&]() -> Result<void> {
    const auto object = Find(checkpoint);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = CheckSize(info, "info"); !checked) return checked;
    const Checkpoint& from = (*object)->checkpoint;
    const ModelConfig& config = from.config();
    espalier_checkpoint_info known = {};
    known.path = (*object)->path.c_str();
    known.layout = (*object)->layout.c_str();
    known.architecture = config.architecture.c_str();
    known.activation = (*object)->activation.c_str();
    known.num_layers = from.layers().size();
    known.num_linears = from.linears().size();
    known.num_tensors = from.tensors().size();
    known.num_problems = from.problems().size();
    known.experts = config.experts;
    known.hidden_channels = config.hidden_channels;
    known.intermediate_channels = config.intermediate_channels;
    known.top_k = config.top_k;
    known.attention_heads = config.attention_heads;
    known.kv_heads = config.kv_heads;
    known.head_dim = config.head_dim;
    known.dense_intermediate_channels = config.dense_intermediate_channels;
    known.shared_intermediate_channels = config.shared_intermediate_channels;
    WriteStruct(known, info);
    return {};
  });
}

int32_t espalier_checkpoint_legal_tp(const espalier_checkpoint* checkpoint, int32_t* sizes, uint64_t* count) {
  return Call([&]() -> Result<void> {
    const auto object = Find(checkpoint);
    if (!object) return tl::unexpected(object.error());
    const std::vector<int> legal = (*object)->checkpoint.LegalTpSizes();
    return WriteList(std::span<const int32_t>(legal), sizes, count);
  });
}

int32_t espalier_checkpoint_check(const espalier_checkpoint* checkpoint, const char* label) {
  return Call([&]() -> Result<void> {
    const auto object = Find(checkpoint);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = NotNull(label, "label"); !checked) return checked;
    return (*object)->checkpoint.CheckUsable(label);
  });
}

int32_t espalier_checkpoint_get_problem(const espalier_checkpoint* checkpoint, uint64_t index,
                                        espalier_problem* problem) {
  return Call([&]() -> Result<void> {
    const auto object = Find(checkpoint);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = CheckSize(problem, "problem"); !checked) return checked;
    const auto problems = (*object)->checkpoint.problems();
    if (auto checked = InRange(index, problems.size(), "problem"); !checked) return checked;
    espalier_problem known = {};
    known.severity = static_cast<int32_t>(problems[index].severity);
    known.file = problems[index].file.c_str();
    known.tensor = problems[index].tensor.c_str();
    known.message = problems[index].message.c_str();
    known.layer = problems[index].layer.c_str();
    WriteStruct(known, problem);
    return {};
  });
}

int32_t espalier_checkpoint_get_layer(const espalier_checkpoint* checkpoint, uint64_t layer,
                                      espalier_layer_info* info) {
  return Call([&]() -> Result<void> {
    const auto object = Find(checkpoint);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = CheckSize(info, "info"); !checked) return checked;
    const auto layers = (*object)->checkpoint.layers();
    if (auto checked = InRange(layer, layers.size(), "layer"); !checked) return checked;
    const MoeLayer& from = layers[layer];
    espalier_layer_info known = {};
    known.label = from.label.c_str();
    known.prefix = from.prefix.c_str();
    known.number = from.number;
    known.experts = from.experts;
    known.slices = from.slices;
    known.hidden_channels = from.hidden_channels;
    known.intermediate_channels = from.intermediate_channels;
    known.valid_hidden_channels = from.valid_hidden_channels;
    known.valid_intermediate_channels = from.valid_intermediate_channels;
    known.has_gate = from.has_gate ? 1 : 0;
    WriteStruct(known, info);
    return {};
  });
}

int32_t espalier_checkpoint_find_layer(const espalier_checkpoint* checkpoint, const char* label,
                                       uint64_t* layer) {
  return Call([&]() -> Result<void> {
    const auto object = Find(checkpoint);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = NotNull(label, "label"); !checked) return checked;
    if (auto checked = NotNull(layer, "layer"); !checked) return checked;
    const Result<size_t> found = (*object)->checkpoint.FindLayer(label);
    if (!found) return tl::unexpected(found.error());
    *layer = *found;
    return {};
  });
}

int32_t espalier_checkpoint_get_linear(const espalier_checkpoint* checkpoint, uint64_t index,
                                       espalier_matrix_info* info) {
  return Call([&]() -> Result<void> {
    const auto object = Find(checkpoint);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = CheckSize(info, "info"); !checked) return checked;
    const auto linears = (*object)->checkpoint.linears();
    if (auto checked = InRange(index, linears.size(), "linear"); !checked) return checked;
    espalier_matrix_info known = MatrixInfoOf(linears[index].matrix);
    known.name = linears[index].name.c_str();
    WriteStruct(known, info);
    return {};
  });
}

int32_t espalier_checkpoint_get_matrix(const espalier_checkpoint* checkpoint, uint64_t layer, uint64_t expert,
                                       int32_t projection, uint64_t slice, espalier_matrix_info* info) {
  return Call([&]() -> Result<void> {
    const auto object = Find(checkpoint);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = CheckSize(info, "info"); !checked) return checked;
    const Checkpoint& from = (*object)->checkpoint;
    if (auto checked = CheckMatrix(from, layer, expert, projection, slice); !checked) return checked;
    WriteStruct(MatrixInfoOf(from.Matrix(layer, static_cast<uint32_t>(expert),
                                         static_cast<Projection>(projection), static_cast<uint32_t>(slice))),
                info);
    return {};
  });
}

int32_t espalier_checkpoint_matrix_name(const espalier_checkpoint* checkpoint, uint64_t layer,
                                        uint64_t expert, int32_t projection, uint64_t slice, char* name,
                                        uint64_t* name_bytes) {
  return Call([&]() -> Result<void> {
    const auto object = Find(checkpoint);
    if (!object) return tl::unexpected(object.error());
    const Checkpoint& from = (*object)->checkpoint;
    if (auto checked = CheckMatrix(from, layer, expert, projection, slice); !checked) return checked;
    return WriteText(from.MatrixName(layer, static_cast<uint32_t>(expert),
                                     static_cast<Projection>(projection), static_cast<uint32_t>(slice)),
                     name, name_bytes);
  });
}

int32_t espalier_checkpoint_get_tensor(const espalier_checkpoint* checkpoint, uint64_t index,
                                       espalier_tensor_info* info) {
  return Call([&]() -> Result<void> {
    const auto object = Find(checkpoint);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = CheckSize(info, "info"); !checked) return checked;
    const auto tensors = (*object)->checkpoint.tensors();
    if (auto checked = InRange(index, tensors.size(), "tensor"); !checked) return checked;
    const TensorInfo& from = tensors[index];
    espalier_tensor_info known = {};
    known.name = from.name.c_str();
    known.shape = from.shape.data();
    known.num_dimensions = from.shape.size();
    known.size_bytes = from.size_bytes;
    known.dtype = static_cast<int32_t>(from.dtype);
    WriteStruct(known, info);
    return {};
  });
}

int32_t espalier_checkpoint_find_tensor(const espalier_checkpoint* checkpoint, const char* name,
                                        uint64_t* index) {
  return Call([&]() -> Result<void> {
    const auto object = Find(checkpoint);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = NotNull(name, "name"); !checked) return checked;
    if (auto checked = NotNull(index, "index"); !checked) return checked;
    const Checkpoint& from = (*object)->checkpoint;
    const TensorInfo* tensor = from.FindTensor(name);
    if (tensor == nullptr)
      return UsageError(fmt::format("{}: no tensor of the name '{}'", (*object)->path, name));
    *index = static_cast<uint64_t>(tensor - from.tensors().data());
    return {};
  });
}

int32_t espalier_checkpoint_read_tensor(const espalier_checkpoint* checkpoint, uint64_t index, void* target,
                                        uint64_t target_bytes) {
  return Call([&]() -> Result<void> {
    const auto object = Find(checkpoint);
    if (!object) return tl::unexpected(object.error());
    const auto tensors = (*object)->checkpoint.tensors();
    if (auto checked = InRange(index, tensors.size(), "tensor"); !checked) return checked;
    if (tensors[index].size_bytes != 0) {
      if (auto checked = NotNull(target, "target"); !checked) return checked;
    }
    return (*object)->checkpoint.Read(tensors[index], {static_cast<std::byte*>(target), target_bytes});
  });
}

int32_t espalier_extents_create(const espalier_checkpoint* checkpoint,
                                const espalier_extents_options* options, espalier_extents** extents) {
  return Call([&]() -> Result<void> {
    const auto object = Find(checkpoint);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = NotNull(extents, "extents"); !checked) return checked;
    const auto read = ReadOptions(options, "options");
    if (!read) return tl::unexpected(read.error());
    Result<ExtentPlan> plan = ExtentPlan::Create(
        (*object)->checkpoint,
        {.tp = read->tp == 0 ? 1 : read->tp, .ep = read->ep == 0 ? 1 : read->ep, .equal = read->equal != 0});
    if (!plan) return tl::unexpected(plan.error());
    return AddHandle({.plan = *std::move(plan)}, extents);
  });
}

int32_t espalier_extents_free(espalier_extents* extents) {
  return Call([&] { return HandleTable<espalier_extents>::Get().Free(extents); });
}

int32_t espalier_extents_get_info(const espalier_extents* extents, espalier_extents_info* info) {
  return Call([&]() -> Result<void> {
    const auto object = Find(extents);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = CheckSize(info, "info"); !checked) return checked;
    const ExtentPlan& plan = (*object)->plan;
    espalier_extents_info known = {};
    known.tp = plan.tp();
    known.ep = plan.ep();
    known.num_layers = plan.layers().size();
    WriteStruct(known, info);
    return {};
  });
}

int32_t espalier_extents_weight_bytes(const espalier_extents* extents, int32_t rank, uint64_t* bytes) {
  return Call([&]() -> Result<void> {
    const auto object = Find(extents);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = NotNull(bytes, "bytes"); !checked) return checked;
    if (auto checked = InRange(rank, (*object)->plan.world(), "rank"); !checked) return checked;
    *bytes = (*object)->plan.WeightBytes(rank);
    return {};
  });
}

int32_t espalier_extents_get_rank(const espalier_extents* extents, uint64_t layer, int32_t tp_rank,
                                  espalier_rank_extent* extent) {
  return Call([&]() -> Result<void> {
    const auto object = Find(extents);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = CheckSize(extent, "extent"); !checked) return checked;
    const auto rank = FindRank((*object)->plan, layer, tp_rank);
    if (!rank) return tl::unexpected(rank.error());
    espalier_rank_extent known = {};
    known.first_channel = (*rank)->first_channel;
    known.channels = (*rank)->channels;
    known.weight_bytes = (*rank)->weight_bytes;
    WriteStruct(known, extent);
    return {};
  });
}

int32_t espalier_extents_segments(const espalier_extents* extents, uint64_t layer, int32_t tp_rank,
                                  espalier_slice_extent* segments, uint64_t* count) {
  return Call([&]() -> Result<void> {
    const auto object = Find(extents);
    if (!object) return tl::unexpected(object.error());
    const auto rank = FindRank((*object)->plan, layer, tp_rank);
    if (!rank) return tl::unexpected(rank.error());
    std::vector<espalier_slice_extent> known;
    for (const SliceExtent& segment : (*rank)->segments) {
      known.push_back(
          {.slice = segment.slice, .first_channel = segment.first_channel, .channels = segment.channels});
    }
    return WriteList(std::span<const espalier_slice_extent>(known), segments, count);
  });
}

int32_t espalier_extents_experts(const espalier_extents* extents, uint64_t layer, int32_t ep_rank,
                                 uint64_t* first_expert, uint64_t* experts) {
  return Call([&]() -> Result<void> {
    const auto object = Find(extents);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = NotNull(first_expert, "first_expert"); !checked) return checked;
    if (auto checked = NotNull(experts, "experts"); !checked) return checked;
    if (auto checked = CheckExpertRank((*object)->plan, layer, ep_rank); !checked) return checked;
    const ExpertRange range = (*object)->plan.Experts(layer, ep_rank);
    *first_expert = range.first_expert;
    *experts = range.experts;
    return {};
  });
}

int32_t espalier_extents_expert_map(const espalier_extents* extents, uint64_t layer, int32_t ep_rank,
                                    int32_t* map, uint64_t* count) {
  return Call([&]() -> Result<void> {
    const auto object = Find(extents);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = CheckExpertRank((*object)->plan, layer, ep_rank); !checked) return checked;
    const std::vector<int32_t> ids = ExpertMap((*object)->plan, layer, ep_rank);
    return WriteList(std::span<const int32_t>(ids), map, count);
  });
}
