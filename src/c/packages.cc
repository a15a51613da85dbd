// SPDX-License-Identifier: Apache-2.0
//
// Prepared weights of the C interface: from files, from memory, on any device.
#include <espalier/espalier.h>

#include <span>
#include <string>
#include <vector>

#include "c/call.h"

namespace espalier::c {
namespace {

Result<void> CheckThreads(int32_t num_threads) {
  return InRange(num_threads, ThreadPool::kMaxThreads + 1, "num_threads");
}

// A source as the library takes it, and the bytes beside it.
struct MemorySource {
  ExpertsSource source;
  std::vector<SegmentWeights> weights;
};

Result<MatrixSpec> ToSpec(const espalier_matrix& matrix) {
  const Result<Codebook> codebook = ToCodebook(matrix.codebook, "codebook");
  if (!codebook) return tl::unexpected(codebook.error());
  return MatrixSpec{.in_channels = matrix.in_channels,
                    .out_channels = matrix.out_channels,
                    .bits = matrix.bits,
                    .codebook = *codebook,
                    .has_bias = matrix.bias != nullptr,
                    .suh_key = matrix.suh_key,
                    .svh_key = matrix.svh_key};
}

Result<void> AddSegments(std::span<const espalier_segment> segments, MemorySource& memory) {
  for (const espalier_segment& segment : segments) {
    SegmentSpec spec{.expert = segment.expert,
                     .valid_intermediate_channels = segment.valid_intermediate_channels,
                     .matrices = {}};
    SegmentWeights weights;
    for (int p = 0; p < kNumProjections; ++p) {
      const espalier_matrix& matrix = segment.matrices[p];
      const Result<MatrixSpec> matrix_spec = ToSpec(matrix);
      if (!matrix_spec) return tl::unexpected(matrix_spec.error());
      if (!matrix_spec->present()) continue;
      spec.matrices[p] = *matrix_spec;
      weights.matrices[p] = {
          .codes = matrix.codes, .suh = matrix.suh, .svh = matrix.svh, .bias = matrix.bias};
    }
    if (spec.valid_intermediate_channels == 0)
      spec.valid_intermediate_channels = segment.matrices[ESPALIER_PROJECTION_DOWN].in_channels;
    memory.source.segments.push_back(spec);
    memory.weights.push_back(weights);
  }
  return {};
}

// The library takes the place of a source as it is told.
Result<void> CheckPlace(const RankPlan& place) {
  const bool sizes = place.tp >= 1 && place.tp <= kMaxTp && place.ep >= 1 &&
                     static_cast<uint64_t>(place.ep) <= kMaxWorld / static_cast<uint64_t>(place.tp);
  if (sizes && place.rank >= 0 && place.rank < place.tp * place.ep) return {};
  return UsageError(fmt::format(
      "source: rank {} of tp {}, ep {}; legal: tp 1 to {}, tp * ep at most {}, a rank below tp * ep",
      place.rank, place.tp, place.ep, kMaxTp, kMaxWorld));
}

Result<MemorySource> ToMemorySource(const espalier_experts_source* source, const LoadOptions& options) {
  const auto read = ReadStruct(source, "source");
  if (!read) return tl::unexpected(read.error());
  const Result<Dtype> io = ToDtype(read->io, "io");
  if (!io) return tl::unexpected(io.error());
  const Result<Dtype> rotation =
      ToDtype(read->rotation == 0 ? int32_t{ESPALIER_DTYPE_F16} : read->rotation, "rotation");
  if (!rotation) return tl::unexpected(rotation.error());
  if (read->num_segments != 0) {
    if (auto checked = NotNull(read->segments, "segments"); !checked) return tl::unexpected(checked.error());
  }
  MemorySource memory;
  memory.source.identity = read->identity != nullptr ? read->identity : "experts in memory";
  memory.source.experts = read->experts;
  memory.source.hidden_channels = read->hidden_channels;
  memory.source.stored_hidden_channels = read->stored_hidden_channels;
  memory.source.activation = {.activation = options.activation.value_or(Activation{}), .rotation = *rotation};
  memory.source.activation.io = options.io;
  if (read->io != 0) memory.source.activation.io = *io;
  memory.source.output_scale = options.output_scale;
  memory.source.rank_plan.tp = read->tp == 0 ? 1 : read->tp;
  memory.source.rank_plan.ep = read->ep == 0 ? 1 : read->ep;
  memory.source.rank_plan.rank = read->rank;
  if (auto checked = CheckPlace(memory.source.rank_plan); !checked) return tl::unexpected(checked.error());
  if (auto added = AddSegments({read->segments, read->num_segments}, memory); !added)
    return tl::unexpected(added.error());
  return memory;
}

espalier_load_sizes SizesOf(const ExpertsTable& table) {
  espalier_load_sizes known = {};
  known.slab_bytes = table.slab_bytes();
  known.code_bytes = table.code_bytes();
  known.descriptor_bytes = table.descriptor_bytes();
  return known;
}

Result<void> AddExperts(Result<PreparedExperts> experts, espalier_experts** handle) {
  if (!experts) return tl::unexpected(experts.error());
  std::string activation = ActivationText(experts->geometry().activation);
  return AddHandle({.experts = *std::move(experts), .activation = std::move(activation)}, handle);
}

Result<void> AddLinear(Result<PreparedLinear> linear, espalier_linear** handle) {
  if (!linear) return tl::unexpected(linear.error());
  return AddHandle({.linear = *std::move(linear)}, handle);
}

}  // namespace

Result<LoadOptions> ToLoadOptions(const espalier_load_options* options) {
  const auto read = ReadOptions(options, "options");
  if (!read) return tl::unexpected(read.error());
  LoadOptions known;
  if (read->activation != nullptr) {
    const Result<Activation> activation = ParseActivation(read->activation);
    if (!activation) return tl::unexpected(activation.error());
    known.activation = *activation;
  }
  if (read->output_scale != 0) known.output_scale = read->output_scale;
  known.in_channels = read->in_channels;
  known.out_channels = read->out_channels;
  const Result<Device> device = ToDevice(read->device);
  if (!device) return tl::unexpected(device.error());
  known.device = *device;
  if (auto checked = InRange(read->order, 3, "order"); !checked) return tl::unexpected(checked.error());
  if (read->order == ESPALIER_ORDER_NATIVE) known.order = CodeOrder::kNative;
  if (read->order == ESPALIER_ORDER_PANELS) known.order = CodeOrder::kPanels;
  known.hash = read->hash != 0;
  if (auto checked = CheckThreads(read->num_threads); !checked) return tl::unexpected(checked.error());
  known.num_threads = read->num_threads;
  if (read->io != 0) {
    const Result<Dtype> io = ToDtype(read->io, "io");
    if (!io) return tl::unexpected(io.error());
    known.io = *io;
  }
  if (read->staging_bytes != 0) known.staging_bytes = read->staging_bytes;
  if (read->progress != nullptr || read->stop != nullptr) {
    known.progress = [call = read->progress, stop = read->stop, context = read->progress_context](
                         uint64_t done, uint64_t total) {
      if (call != nullptr) call(context, done, total);
      return stop == nullptr || stop(context) == 0;
    };
  }
  return known;
}

}  // namespace espalier::c

using namespace espalier;     // NOLINT(google-build-using-namespace): the functions below are the C side
using namespace espalier::c;  // NOLINT(google-build-using-namespace)

int32_t espalier_experts_load(const espalier_checkpoint* checkpoint, uint64_t layer,
                              const espalier_load_options* options, espalier_experts** experts) {
  return Call([&]() -> Result<void> {
    const auto object = Find(checkpoint);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = NotNull(experts, "experts"); !checked) return checked;
    const Result<LoadOptions> known = ToLoadOptions(options);
    if (!known) return tl::unexpected(known.error());
    return AddExperts(LoadExperts((*object)->checkpoint, layer, *known), experts);
  });
}

int32_t espalier_experts_load_rank(const espalier_checkpoint* checkpoint, const espalier_extents* extents,
                                   uint64_t layer, int32_t rank, const espalier_load_options* options,
                                   espalier_experts** experts) {
  return Call([&]() -> Result<void> {
    const auto object = Find(checkpoint);
    if (!object) return tl::unexpected(object.error());
    const auto plan = Find(extents);
    if (!plan) return tl::unexpected(plan.error());
    if (auto checked = NotNull(experts, "experts"); !checked) return checked;
    const Result<LoadOptions> known = ToLoadOptions(options);
    if (!known) return tl::unexpected(known.error());
    return AddExperts(LoadExperts((*object)->checkpoint, (*plan)->plan, layer, rank, *known), experts);
  });
}

int32_t espalier_experts_load_sizes(const espalier_checkpoint* checkpoint, const espalier_extents* extents,
                                    uint64_t layer, int32_t rank, const espalier_load_options* options,
                                    espalier_load_sizes* sizes) {
  return Call([&]() -> Result<void> {
    const auto object = Find(checkpoint);
    if (!object) return tl::unexpected(object.error());
    const auto plan = Find(extents);
    if (!plan) return tl::unexpected(plan.error());
    if (auto checked = CheckSize(sizes, "sizes"); !checked) return checked;
    const Result<LoadOptions> known = ToLoadOptions(options);
    if (!known) return tl::unexpected(known.error());
    const Result<LoadSizes> found = SizeExperts((*object)->checkpoint, (*plan)->plan, layer, rank, *known);
    if (!found) return tl::unexpected(found.error());
    espalier_load_sizes result = SizesOf(found->table);
    result.read_bytes = found->read_bytes;
    result.staging_bytes = found->staging_bytes;
    WriteStruct(result, sizes);
    return {};
  });
}

int32_t espalier_experts_prepare(const espalier_experts_source* source, const espalier_load_options* options,
                                 espalier_experts** experts) {
  return Call([&]() -> Result<void> {
    if (auto checked = NotNull(experts, "experts"); !checked) return checked;
    const Result<LoadOptions> known = ToLoadOptions(options);
    if (!known) return tl::unexpected(known.error());
    const Result<MemorySource> memory = ToMemorySource(source, *known);
    if (!memory) return tl::unexpected(memory.error());
    return AddExperts(PrepareExperts(memory->source, memory->weights, *known), experts);
  });
}

int32_t espalier_experts_prepare_sizes(const espalier_experts_source* source,
                                       const espalier_load_options* options, espalier_load_sizes* sizes) {
  return Call([&]() -> Result<void> {
    if (auto checked = CheckSize(sizes, "sizes"); !checked) return checked;
    const Result<LoadOptions> known = ToLoadOptions(options);
    if (!known) return tl::unexpected(known.error());
    const Result<MemorySource> memory = ToMemorySource(source, *known);
    if (!memory) return tl::unexpected(memory.error());
    const Result<ExpertsTable> table = PlanExperts(memory->source, *known);
    if (!table) return tl::unexpected(table.error());
    WriteStruct(SizesOf(*table), sizes);
    return {};
  });
}

int32_t espalier_experts_get_info(const espalier_experts* experts, espalier_experts_info* info) {
  return Call([&]() -> Result<void> {
    const auto object = Find(experts);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = CheckSize(info, "info"); !checked) return checked;
    const PreparedExperts& from = (*object)->experts;
    espalier_experts_info known = {};
    known.identity = from.identity().c_str();
    known.content_sha256 = from.content_sha256().c_str();
    known.activation = (*object)->activation.c_str();
    known.experts = from.geometry().experts;
    known.hidden_channels = from.geometry().hidden_channels;
    known.stored_hidden_channels = from.geometry().stored_hidden_channels;
    known.max_intermediate_channels = from.max_intermediate_channels();
    known.num_segments = from.segments().size();
    known.slab_bytes = from.slab_bytes();
    known.code_bytes = from.code_bytes();
    known.output_scale = from.geometry().output_scale;
    known.device = FromDevice(from.device());
    known.tp = from.rank_plan().tp;
    known.ep = from.rank_plan().ep;
    known.rank = from.rank_plan().rank;
    known.first_expert = from.rank_plan().experts.first_expert;
    WriteStruct(known, info);
    return {};
  });
}

int32_t espalier_experts_to_device(const espalier_experts* experts, espalier_device device,
                                   espalier_experts** copy) {
  return Call([&]() -> Result<void> {
    const auto object = Find(experts);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = NotNull(copy, "copy"); !checked) return checked;
    const Result<Device> target = c::ToDevice(device);
    if (!target) return tl::unexpected(target.error());
    return AddExperts(espalier::ToDevice((*object)->experts, *target), copy);
  });
}

int32_t espalier_experts_free(espalier_experts* experts) {
  return Call([&] { return HandleTable<espalier_experts>::Get().Free(experts); });
}

int32_t espalier_linear_load(const espalier_checkpoint* checkpoint, const char* name,
                             const espalier_linear_extent* extent, const espalier_load_options* options,
                             espalier_linear** linear) {
  return Call([&]() -> Result<void> {
    const auto object = Find(checkpoint);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = NotNull(name, "name"); !checked) return checked;
    if (auto checked = NotNull(linear, "linear"); !checked) return checked;
    const auto part = ReadOptions(extent, "extent");
    if (!part) return tl::unexpected(part.error());
    const Result<LoadOptions> known = ToLoadOptions(options);
    if (!known) return tl::unexpected(known.error());
    const LinearExtent channels{.first_in = part->first_in,
                                .in_channels = part->in_channels,
                                .first_out = part->first_out,
                                .out_channels = part->out_channels};
    return AddLinear(LoadLinear((*object)->checkpoint, name, channels, *known), linear);
  });
}

int32_t espalier_linear_get_info(const espalier_linear* linear, espalier_linear_info* info) {
  return Call([&]() -> Result<void> {
    const auto object = Find(linear);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = CheckSize(info, "info"); !checked) return checked;
    const PreparedLinear& from = (*object)->linear;
    espalier_linear_info known = {};
    known.identity = from.identity().c_str();
    known.in_channels = from.in_channels();
    known.out_channels = from.out_channels();
    known.stored_in_channels = from.matrix().in_channels;
    known.stored_out_channels = from.matrix().out_channels;
    known.slab_bytes = from.slab_bytes();
    known.bits = from.matrix().bits;
    known.codebook = static_cast<int32_t>(from.matrix().codebook);
    known.has_bias = from.matrix().bias_offset_bytes != kAbsentOffset ? 1 : 0;
    known.device = FromDevice(from.device());
    WriteStruct(known, info);
    return {};
  });
}

int32_t espalier_linear_to_device(const espalier_linear* linear, espalier_device device,
                                  espalier_linear** copy) {
  return Call([&]() -> Result<void> {
    const auto object = Find(linear);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = NotNull(copy, "copy"); !checked) return checked;
    const Result<Device> target = c::ToDevice(device);
    if (!target) return tl::unexpected(target.error());
    return AddLinear(espalier::ToDevice((*object)->linear, *target), copy);
  });
}

int32_t espalier_linear_decode(const espalier_linear* linear, int32_t inner, float* weights,
                               uint64_t* count) {
  return Call([&]() -> Result<void> {
    const auto object = Find(linear);
    if (!object) return tl::unexpected(object.error());
    if (auto checked = NotNull(count, "count"); !checked) return checked;
    const MatrixDesc& matrix = (*object)->linear.matrix();
    const uint64_t need = uint64_t{matrix.in_channels} * matrix.out_channels;
    if (weights == nullptr || *count < need)
      return WriteList(std::span<const float>(weights, need), weights, count);
    const Result<std::vector<float>> decoded = DecodeMatrix((*object)->linear, inner != 0);
    if (!decoded) return tl::unexpected(decoded.error());
    return WriteList(std::span<const float>(*decoded), weights, count);
  });
}

int32_t espalier_linear_free(espalier_linear* linear) {
  return Call([&] { return HandleTable<espalier_linear>::Get().Free(linear); });
}
