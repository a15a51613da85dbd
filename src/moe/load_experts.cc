// SPDX-License-Identifier: Apache-2.0
//
// From a checkpoint to a slab: describe the share of a rank, place it, allocate once, read each byte to its
// place.
#include <espalier/experts.h>
#include <espalier/prepare.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "moe/matrix_part.h"
#include "moe/slab_hash.h"
#include "moe/slab_order.h"
#include "moe/slab_plan.h"
#include "moe/slab_reader.h"

namespace espalier {
namespace {

tl::unexpected<Status> SizeError(const std::string& name, const MatrixInfo& info) {
  return Error(StatusCode::kGeometry, fmt::format("{}: {} x {} channels; legal: multiples of {}", name,
                                                  info.in_channels, info.out_channels, kHadamardChannels));
}

Result<void> CheckSize(const std::string& name, const MatrixInfo& info) {
  for (const uint64_t channels : {info.in_channels, info.out_channels}) {
    if (channels == 0 || channels % kHadamardChannels != 0 || channels > ~uint32_t{0})
      return SizeError(name, info);
  }
  return {};
}

// Turns sources into specs. Vectors that are the same bytes of a file get the same key.
class SpecMaker {
 public:
  Result<MatrixSpec> Make(const MatrixSource& source) {
    const MatrixInfo& info = source.info;
    if (auto size = CheckSize(source.name, info); !size) return tl::unexpected(size.error());
    if (source.suh.kind == VectorSource::Kind::kAbsent || source.svh.kind == VectorSource::Kind::kAbsent) {
      return Error(StatusCode::kFormat,
                   fmt::format("{}: no scale vector on the {} side", source.name,
                               source.suh.kind == VectorSource::Kind::kAbsent ? "input" : "output"));
    }
    return MatrixSpec{.in_channels = static_cast<uint32_t>(info.in_channels),
                      .out_channels = static_cast<uint32_t>(info.out_channels),
                      .bits = info.bits,
                      .codebook = info.codebook,
                      .has_bias = source.bias.kind != VectorSource::Kind::kAbsent,
                      .suh_key = KeyOf(source.suh),
                      .svh_key = KeyOf(source.svh)};
  }

 private:
  uint64_t KeyOf(const VectorSource& source) {
    if (source.share_key == 0 || source.regions.empty()) return 0;
    const auto place = std::tuple(source.share_key, source.regions[0].file, source.regions[0].source_offset);
    return keys_.try_emplace(place, keys_.size() + 1).first->second;
  }

  std::map<std::tuple<uint64_t, uint32_t, uint64_t>, uint64_t> keys_;
};

std::string Identity(const Checkpoint& checkpoint, std::string_view what) {
  return fmt::format("{} of {}", what, checkpoint.path().string());
}

// What `extent` owns of an expert's valid channels.
uint32_t ValidChannels(const MoeLayer& layer, const SliceExtent& extent) {
  const uint64_t first = layer.intermediate_channels / layer.slices * extent.slice + extent.first_channel;
  const uint64_t valid = layer.valid_intermediate_channels;
  return static_cast<uint32_t>(valid <= first ? 0 : std::min(valid - first, extent.channels));
}

Result<Activation> ChooseActivation(const Checkpoint& checkpoint, const MoeLayer& layer,
                                    const LoadOptions& options) {
  const Activation activation =
      options.activation ? *options.activation : checkpoint.config().activation.value_or(Activation{});
  if (ActivationHasGate(activation.kind) && !layer.has_gate) {
    return Error(StatusCode::kFormat,
                 fmt::format("{}: activation {} needs a gate matrix and the experts have none",
                             Identity(checkpoint, "layer " + layer.label), ActivationText(activation)));
  }
  return activation;
}

// One rank's share of a layer, and the places it comes from.
struct Share {
  size_t layer = 0;
  ExpertsSource source;
  std::vector<MatrixSource> files;  // of the present matrices, by segment, then by projection
};

Result<void> AddSegment(const Checkpoint& checkpoint, size_t layer_index, uint32_t expert,
                        const SliceExtent& extent, bool with_gate, SpecMaker& specs, Share& share) {
  const MoeLayer& layer = checkpoint.layers()[layer_index];
  const MatrixInfo down = checkpoint.Matrix(layer_index, expert, Projection::kDown, extent.slice);
  if (down.in_channels == 0 || down.in_channels % kHadamardChannels != 0) {
    return SizeError(checkpoint.MatrixName(layer_index, expert, Projection::kDown, extent.slice), down);
  }
  SegmentSpec segment;
  segment.expert = expert - share.source.rank_plan.experts.first_expert;
  segment.valid_intermediate_channels = ValidChannels(layer, extent);
  for (int p = with_gate ? 0 : 1; p < kNumProjections; ++p) {
    Result<MatrixSource> source = checkpoint.Source(layer_index, expert, static_cast<Projection>(p), extent);
    if (!source) return tl::unexpected(source.error());
    const Result<MatrixSpec> spec = specs.Make(*source);
    if (!spec) return tl::unexpected(spec.error());
    segment.matrices[p] = *spec;
    share.files.push_back(*std::move(source));
  }
  share.source.segments.push_back(segment);
  return {};
}

Result<void> CheckMarkers(const Checkpoint& checkpoint, const Share& share) {
  for (const MatrixSource& source : share.files) {
    if (auto marker = checkpoint.CheckMarker(source.info); !marker) return marker;
  }
  return {};
}

Result<SlabReader> MakeReader(const Checkpoint& checkpoint, const Share& share, const ExpertsTable& table) {
  std::vector<PlacedMatrix> matrices;
  for (const MatrixDesc& desc : PresentMatrices(table)) {
    matrices.push_back({.desc = desc, .source = &share.files[matrices.size()]});
  }
  return SlabReader::Create(checkpoint, table.identity(), matrices);
}

// A linear belongs to no layer: it is stopped by errors of the whole checkpoint and by its own.
Result<void> CheckLinearUsable(const Checkpoint& checkpoint, const std::string& name) {
  for (const Problem& problem : checkpoint.problems()) {
    if (problem.severity != Problem::Severity::kError) continue;
    if (!problem.layer.empty() && !problem.tensor.starts_with(name + ".")) continue;
    return Error(StatusCode::kFormat,
                 fmt::format("{}: {}: {}", problem.file, problem.tensor, problem.message));
  }
  return {};
}

Result<MatrixSource> FindLinearSource(const Checkpoint& checkpoint, std::string_view name) {
  const Result<Checkpoint::MatrixRef> ref = checkpoint.FindMatrix(name);
  if (!ref) return tl::unexpected(ref.error());
  if (!ref->routed) {
    Result<MatrixSource> source = checkpoint.LinearSource(ref->linear);
    if (!source) return source;
    if (Result<void> usable = CheckLinearUsable(checkpoint, source->name); !usable) {
      return tl::unexpected(usable.error());
    }
    return source;
  }
  const MoeLayer& layer = checkpoint.layers()[ref->layer];
  if (!ref->slice && layer.slices > 1) {
    return Error(StatusCode::kUsage, fmt::format("{} has {} slices; name one: {}.rank0 to {}.rank{}", name,
                                                 layer.slices, name, name, layer.slices - 1));
  }
  if (Result<void> usable = checkpoint.CheckUsable(layer.label); !usable)
    return tl::unexpected(usable.error());
  const uint32_t slice = ref->slice.value_or(0);
  const MatrixInfo info = checkpoint.Matrix(ref->layer, ref->expert, ref->projection, slice);
  const uint64_t width = ref->projection == Projection::kDown ? info.in_channels : info.out_channels;
  if (width == 0 || width % kHadamardChannels != 0) {
    return SizeError(checkpoint.MatrixName(ref->layer, ref->expert, ref->projection, slice), info);
  }
  const SliceExtent whole{.slice = slice, .first_channel = 0, .channels = width};
  if (auto padding = checkpoint.CheckPadding(ref->layer, whole); !padding)
    return tl::unexpected(padding.error());
  return checkpoint.Source(ref->layer, ref->expert, ref->projection, whole);
}

Result<Share> DescribeShare(const Checkpoint& checkpoint, size_t layer, RankPlan rank_plan, std::string owner,
                            const LoadOptions& options) {
  const MoeLayer& info = checkpoint.layers()[layer];
  const std::string identity = Identity(checkpoint, owner + "layer " + info.label);
  const Result<Activation> activation = ChooseActivation(checkpoint, info, options);
  if (!activation) return tl::unexpected(activation.error());
  if (info.hidden_channels == 0 || info.hidden_channels % kHadamardChannels != 0 ||
      info.hidden_channels > ~uint32_t{0}) {
    return Error(StatusCode::kGeometry, fmt::format("{}: {} hidden channels; legal: multiples of {}",
                                                    identity, info.hidden_channels, kHadamardChannels));
  }
  Share share;
  share.layer = layer;
  share.source = {.identity = identity,
                  .experts = rank_plan.experts.experts,
                  .hidden_channels = static_cast<uint32_t>(info.valid_hidden_channels),
                  .stored_hidden_channels = static_cast<uint32_t>(info.hidden_channels),
                  .activation = {.activation = *activation, .io = options.io},
                  .output_scale = options.output_scale,
                  .rank_plan = std::move(rank_plan)};
  SpecMaker specs;
  const RankPlan& plan = share.source.rank_plan;
  for (uint32_t local = 0; local < plan.experts.experts; ++local) {
    for (const SliceExtent& extent : plan.extents) {
      auto added = AddSegment(checkpoint, layer, plan.experts.first_expert + local, extent,
                              ActivationHasGate(activation->kind), specs, share);
      if (!added) return tl::unexpected(added.error());
    }
  }
  return share;
}

Result<PreparedExperts> LoadShare(const Checkpoint& checkpoint, const Share& share,
                                  const LoadOptions& options) {
  if (Result<void> usable = checkpoint.CheckUsable(checkpoint.layers()[share.layer].label); !usable)
    return tl::unexpected(usable.error());
  Result<ExpertsTable> table = PlanExperts(share.source, options);
  if (!table) return tl::unexpected(table.error());
  const Result<SlabReader> reader = MakeReader(checkpoint, share, *table);
  if (!reader) return tl::unexpected(reader.error());
  // Before the first byte of payload: a marker of another file would tell another story.
  if (auto same = reader->CheckFiles(); !same) return tl::unexpected(same.error());
  if (auto markers = CheckMarkers(checkpoint, share); !markers) return tl::unexpected(markers.error());
  // Padding that is not zero is all that tells a wrong rate in a manifest from a right one.
  for (const SliceExtent& extent : share.source.rank_plan.extents) {
    if (auto padding = checkpoint.CheckPadding(share.layer, extent); !padding)
      return tl::unexpected(padding.error());
  }
  Result<DeviceBuffer> slab = AllocateSlab(table->slab_bytes(), table->identity(), options);
  if (!slab) return tl::unexpected(slab.error());
  const Result<std::vector<std::string>> hashes = reader->Read(options, *slab);
  if (!hashes) return tl::unexpected(hashes.error());
  Result<std::string> hash = options.hash ? HashTable(*table, *hashes, *slab) : std::string();
  if (!hash) return tl::unexpected(hash.error());
  return PreparedExperts::Create(*std::move(table), *std::move(slab), *std::move(hash));
}

Result<void> CheckLayer(const Checkpoint& checkpoint, size_t layer) {
  if (layer < checkpoint.layers().size()) return {};
  return Error(StatusCode::kUsage, fmt::format("layer position {}; the checkpoint has {} layers", layer,
                                               checkpoint.layers().size()));
}

Result<Share> DescribeWhole(const Checkpoint& checkpoint, size_t layer, const LoadOptions& options) {
  if (Result<void> checked = CheckLayer(checkpoint, layer); !checked) return tl::unexpected(checked.error());
  const MoeLayer& info = checkpoint.layers()[layer];
  RankPlan plan{.experts = {.first_expert = 0, .experts = info.experts}};
  for (uint32_t slice = 0; slice < info.slices; ++slice) {
    plan.extents.push_back(
        {.slice = slice, .first_channel = 0, .channels = info.intermediate_channels / info.slices});
  }
  return DescribeShare(checkpoint, layer, std::move(plan), "", options);
}

// A plan of another checkpoint may name experts and slices that this one does not have.
Result<void> CheckPlan(const Checkpoint& checkpoint, const ExtentPlan& plan, size_t layer,
                       const RankExtent& extent) {
  const MoeLayer& info = checkpoint.layers()[layer];
  const ExpertRange last = plan.Experts(layer, plan.ep() - 1);
  bool fits = last.first_expert + last.experts == info.experts;
  for (const SliceExtent& segment : extent.segments) {
    fits = fits && segment.slice < info.slices &&
           segment.first_channel + segment.channels <= info.intermediate_channels / info.slices;
  }
  if (fits) return {};
  return Error(StatusCode::kGeometry,
               fmt::format("{}: {} experts of {} channels in {} slices; the plan was made for other ones",
                           Identity(checkpoint, "layer " + info.label), info.experts,
                           info.intermediate_channels, info.slices));
}

Result<Share> DescribeRank(const Checkpoint& checkpoint, const ExtentPlan& plan, size_t layer,
                           int global_rank, const LoadOptions& options) {
  if (Result<void> checked = CheckLayer(checkpoint, layer); !checked) return tl::unexpected(checked.error());
  if (global_rank < 0 || global_rank >= plan.world()) {
    return Error(StatusCode::kUsage, fmt::format("rank {}; legal: 0 to {}", global_rank, plan.world() - 1));
  }
  if (plan.layers().size() != checkpoint.layers().size()) {
    return Error(StatusCode::kGeometry, fmt::format("the plan has {} layers, {} has {}", plan.layers().size(),
                                                    checkpoint.path().string(), checkpoint.layers().size()));
  }
  const RankExtent& extent = plan.layers()[layer].ranks[static_cast<size_t>(global_rank % plan.tp())];
  if (auto fits = CheckPlan(checkpoint, plan, layer, extent); !fits) return tl::unexpected(fits.error());
  return DescribeShare(
      checkpoint, layer,
      {.tp = plan.tp(),
       .ep = plan.ep(),
       .rank = global_rank,
       .experts = plan.Experts(layer, global_rank / plan.tp()),
       .extents = extent.segments},
      fmt::format("rank {} of {} (tp {}, ep {}), ", global_rank, plan.world(), plan.tp(), plan.ep()),
      options);
}

}  // namespace

Result<PreparedExperts> LoadExperts(const Checkpoint& checkpoint, size_t layer, const LoadOptions& options) {
  const Result<Share> share = DescribeWhole(checkpoint, layer, options);
  if (!share) return tl::unexpected(share.error());
  return LoadShare(checkpoint, *share, options);
}

Result<PreparedExperts> LoadExperts(const Checkpoint& checkpoint, const ExtentPlan& plan, size_t layer,
                                    int global_rank, const LoadOptions& options) {
  const Result<Share> share = DescribeRank(checkpoint, plan, layer, global_rank, options);
  if (!share) return tl::unexpected(share.error());
  return LoadShare(checkpoint, *share, options);
}

Result<LoadSizes> SizeExperts(const Checkpoint& checkpoint, const ExtentPlan& plan, size_t layer,
                              int global_rank, const LoadOptions& options) {
  const Result<Share> share = DescribeRank(checkpoint, plan, layer, global_rank, options);
  if (!share) return tl::unexpected(share.error());
  Result<ExpertsTable> table = PlanExperts(share->source, options);
  if (!table) return tl::unexpected(table.error());
  const Result<SlabReader> reader = MakeReader(checkpoint, *share, *table);
  if (!reader) return tl::unexpected(reader.error());
  const uint64_t staging = reader->StagingBytes(options);
  return LoadSizes{.table = *std::move(table), .read_bytes = reader->read_bytes(), .staging_bytes = staging};
}

std::vector<int32_t> ExpertMap(const ExtentPlan& plan, size_t layer, int ep_rank) {
  const ExpertRange last = plan.Experts(layer, plan.ep() - 1);
  const ExpertRange own = plan.Experts(layer, ep_rank);
  std::vector<int32_t> map(last.first_expert + last.experts, -1);
  for (uint32_t local = 0; local < own.experts; ++local)
    map[own.first_expert + local] = static_cast<int32_t>(local);
  return map;
}

Result<PreparedLinear> LoadLinear(const Checkpoint& checkpoint, std::string_view name,
                                  const LinearExtent& extent, const LoadOptions& options) {
  Result<MatrixSource> whole = FindLinearSource(checkpoint, name);
  if (!whole) return tl::unexpected(whole.error());
  if (auto marker = checkpoint.CheckMarker(whole->info); !marker) return tl::unexpected(marker.error());
  if (auto size = CheckSize(whole->name, whole->info); !size) return tl::unexpected(size.error());
  const Result<MatrixSource> source = CutMatrix(*std::move(whole), extent);
  if (!source) return tl::unexpected(source.error());
  const Result<MatrixSpec> spec = SpecMaker().Make(*source);
  if (!spec) return tl::unexpected(spec.error());
  const Result<CodeOrder> order = ChooseOrder(options, source->name);
  if (!order) return tl::unexpected(order.error());
  SlabPlan plan(*order);
  const Result<MatrixDesc> desc = plan.Add(*spec, source->name);
  if (!desc) return tl::unexpected(desc.error());
  const Result<uint64_t> size = plan.SizeBytes();
  if (!size) return tl::unexpected(size.error());
  const std::string identity = Identity(checkpoint, source->name);
  const PlacedMatrix matrix{.desc = *desc, .source = &*source};
  const Result<SlabReader> reader = SlabReader::Create(checkpoint, identity, {&matrix, 1});
  if (!reader) return tl::unexpected(reader.error());
  Result<DeviceBuffer> slab = AllocateSlab(*size, identity, options);
  if (!slab) return tl::unexpected(slab.error());
  if (auto read = reader->Read(options, *slab); !read) return tl::unexpected(read.error());
  return PreparedLinear::Create(*desc, options.in_channels, options.out_channels, *std::move(slab), identity);
}

Result<PreparedLinear> LoadLinear(const Checkpoint& checkpoint, std::string_view name,
                                  const LoadOptions& options) {
  return LoadLinear(checkpoint, name, LinearExtent{}, options);
}

}  // namespace espalier
