// SPDX-License-Identifier: Apache-2.0
//
// Checkpoint, what it lists, and who owns what of it.
#include <espalier/checkpoint.h>
#include <espalier/experts.h>
#include <espalier/extent_plan.h>

#include <filesystem>
#include <utility>

#include "arguments.h"
#include "array.h"
#include "packages.h"

namespace espalier::python {
namespace {

nb::dict ConfigDict(const ModelConfig& config) {
  nb::dict dict;
  dict["architecture"] = Text(config.architecture);
  dict["experts"] = config.experts;
  dict["hidden_channels"] = config.hidden_channels;
  dict["intermediate_channels"] = config.intermediate_channels;
  dict["top_k"] = config.top_k;
  dict["activation"] = config.activation ? nb::cast(ActivationText(*config.activation)) : nb::none();
  dict["attention_heads"] = config.attention_heads;
  dict["kv_heads"] = config.kv_heads;
  dict["head_dim"] = config.head_dim;
  dict["linear_heads"] = config.linear_heads;
  dict["linear_head_dim"] = config.linear_head_dim;
  dict["dense_intermediate_channels"] = config.dense_intermediate_channels;
  dict["shared_intermediate_channels"] = config.shared_intermediate_channels;
  return dict;
}

// F4 and F6 are packed below a byte, which no array library shares: their bytes are given as they lie.
bool IsSubByte(Dtype dtype) { return ArrayDtypeName(dtype) == nullptr; }

Array ReadTensor(const Checkpoint& checkpoint, const std::string& name) {
  const TensorInfo* tensor = checkpoint.FindTensor(name);
  if (tensor == nullptr) {
    Raise(StatusCode::kUsage,
          checkpoint.path().string() + ": no tensor '" + name + "'; legal: the names in Checkpoint.tensors");
  }
  Array array = IsSubByte(tensor->dtype)
                    ? Array::Create(Dtype::kU8, {tensor->size_bytes})
                    : Array::Create(tensor->dtype, {tensor->shape.begin(), tensor->shape.end()});
  Value(WithoutGil([&] { return checkpoint.Read(*tensor, array.memory->span()); }));
  return array;
}

Array DecodedMatrix(const Checkpoint& checkpoint, const std::string& name, bool inner) {
  const auto decode = [&]() -> Result<std::pair<MatrixDesc, std::vector<float>>> {
    const Result<PreparedLinear> linear = LoadLinear(checkpoint, name, {.order = CodeOrder::kNative});
    if (!linear) return tl::unexpected(linear.error());
    Result<std::vector<float>> weights = DecodeMatrix(*linear, inner);
    if (!weights) return tl::unexpected(weights.error());
    return std::pair(linear->matrix(), *std::move(weights));
  };
  auto [matrix, weights] = Value(WithoutGil(decode));
  // The vector itself is the memory of the array.
  const auto kept = std::make_shared<std::vector<float>>(std::move(weights));
  HostBuffer memory = HostBuffer::Adopt(reinterpret_cast<std::byte*>(kept->data()),
                                        kept->size() * sizeof(float), [kept](std::byte*) {});
  return {.memory = std::make_shared<HostBuffer>(std::move(memory)),
          .dtype = Dtype::kF32,
          .shape = {matrix.in_channels, matrix.out_channels}};
}

size_t CheckedPosition(const ExtentPlan& plan, const Int& layer) {
  if (plan.layers().empty()) Raise(StatusCode::kUsage, "the plan has no layers");
  return ToInteger(layer, "layer", 0, plan.layers().size() - 1);
}

int CheckedEpRank(const ExtentPlan& plan, const Int& rank) {
  return static_cast<int>(ToInteger(rank, "ep_rank", 0, static_cast<uint64_t>(plan.ep() - 1)));
}

template <typename T>
std::vector<T> List(std::span<const T> items) {
  return {items.begin(), items.end()};
}

// TensorInfo with the names of its file and type.
struct Tensor {
  std::string name;
  std::string dtype;
  std::vector<uint64_t> shape;
  std::string file;
  uint64_t size_bytes = 0;
};

void BindLists(nb::module_& module) {
  nb::class_<Problem>(module, "Problem",
                      "Something readable but wrong in a checkpoint. Errors make the layer fail.")
      .def_prop_ro(
          "severity",
          [](const Problem& problem) {
            return problem.severity == Problem::Severity::kError ? "error" : "warning";
          },
          nb::sig("def severity(self) -> str"), "\"warning\" or \"error\".")
      .def_prop_ro(
          "file", [](const Problem& problem) { return Text(problem.file); }, nb::sig("def file(self) -> str"),
          "Name of the file; may be empty.")
      .def_prop_ro(
          "tensor", [](const Problem& problem) { return Text(problem.tensor); },
          nb::sig("def tensor(self) -> str"), "Name of the tensor; may be empty.")
      .def_prop_ro(
          "message", [](const Problem& problem) { return Text(problem.message); },
          nb::sig("def message(self) -> str"), "What is wrong.")
      .def_prop_ro(
          "layer", [](const Problem& problem) { return Text(problem.layer); },
          nb::sig("def layer(self) -> str"), "Label of the layer, empty for the whole checkpoint.")
      .def("__repr__", [](const Problem& problem) {
        return Text("<espalier.Problem " + problem.file + ": " + problem.tensor + ": " + problem.message +
                    ">");
      });
  nb::class_<MoeLayer>(module, "Layer", "The routed experts of one layer, as a checkpoint has them.")
      .def_ro("label", &MoeLayer::label,
              "What prepare() takes: \"3\", or \"PREFIX.3\" for the smaller of two groups.")
      .def_ro("number", &MoeLayer::number, "The layer's number in the model.")
      .def_ro("prefix", &MoeLayer::prefix, "\"model.layers\".")
      .def_ro("experts", &MoeLayer::experts, "Number of routed experts.")
      .def_ro("slices", &MoeLayer::slices, "Independently quantized slices of every expert.")
      .def_ro("hidden", &MoeLayer::valid_hidden_channels, "Channels of x and y, as the model sees them.")
      .def_ro("intermediate", &MoeLayer::valid_intermediate_channels,
              "Intermediate channels of an expert, as the model sees them.")
      .def_ro("stored_hidden", &MoeLayer::hidden_channels, "Channels of the stored matrices.")
      .def_ro("stored_intermediate", &MoeLayer::intermediate_channels,
              "Intermediate channels as stored, slices summed.")
      .def_ro("has_gate", &MoeLayer::has_gate, "False where experts have no gate matrix.")
      .def("__repr__", [](const MoeLayer& layer) {
        return Text("<espalier.Layer " + layer.label + ": " + std::to_string(layer.experts) + " experts>");
      });
  nb::class_<LinearInfo>(module, "LinearInfo", "One EXL3 matrix outside the routed experts.")
      .def_ro("name", &LinearInfo::name, "Name in the file, without \".trellis\".")
      .def_prop_ro(
          "in_channels", [](const LinearInfo& linear) { return linear.matrix.in_channels; },
          "Stored input channels.")
      .def_prop_ro(
          "out_channels", [](const LinearInfo& linear) { return linear.matrix.out_channels; },
          "Stored output channels.")
      .def_prop_ro(
          "bits", [](const LinearInfo& linear) { return linear.matrix.bits; }, "Bits per weight, 1 to 8.")
      .def_prop_ro(
          "codebook", [](const LinearInfo& linear) { return CodebookName(linear.matrix.codebook); },
          "\"3inst\", \"mcg\" or \"mul1\".")
      .def_prop_ro(
          "has_bias", [](const LinearInfo& linear) { return linear.matrix.has_bias; },
          "Whether it has a bias.")
      .def("__repr__", [](const LinearInfo& linear) {
        return Text("<espalier.LinearInfo " + linear.name + ": " + std::to_string(linear.matrix.in_channels) +
                    " x " + std::to_string(linear.matrix.out_channels) + ">");
      });
  nb::class_<Tensor>(module, "TensorInfo", "One tensor of a safetensors file.")
      .def_ro("name", &Tensor::name, "Name in the file.")
      .def_ro("dtype", &Tensor::dtype, "Type as safetensors names it: \"BF16\", \"F8_E4M3\".")
      .def_prop_ro(
          "shape", [](const Tensor& tensor) { return nb::tuple(nb::cast(tensor.shape)); },
          nb::sig("def shape(self) -> tuple[int, ...]"), "Elements along each axis; () for a scalar.")
      .def_ro("file", &Tensor::file, "Name of the file that it lies in.")
      .def_ro("size_bytes", &Tensor::size_bytes, "Bytes of its payload.")
      .def("__repr__", [](const Tensor& tensor) {
        return Text("<espalier.TensorInfo " + tensor.name + ": " + tensor.dtype + ">");
      });
}

void BindExtents(nb::module_& module) {
  nb::class_<SliceExtent>(module, "SliceExtent", "One extent of the intermediate axis inside one slice.")
      .def_ro("slice", &SliceExtent::slice, "Number of the slice.")
      .def_ro("first_channel", &SliceExtent::first_channel, "Inside the slice; a multiple of 128.")
      .def_ro("channels", &SliceExtent::channels, "A multiple of 128.")
      .def("__repr__", [](const SliceExtent& extent) {
        return "<espalier.SliceExtent slice " + std::to_string(extent.slice) + ", " +
               std::to_string(extent.first_channel) + " + " + std::to_string(extent.channels) + ">";
      });
  nb::class_<RankExtent>(module, "RankExtent",
                         "What one tensor-parallel rank owns of every expert of a layer.")
      .def_ro("first_channel", &RankExtent::first_channel, "Of the layer; 0 where it owns nothing.")
      .def_ro("channels", &RankExtent::channels, "A multiple of 128; may be 0.")
      .def_ro("segments", &RankExtent::segments, "The same inside the slices, ascending.")
      .def_ro("weight_bytes", &RankExtent::weight_bytes, "Bytes of codes and vectors, all experts.")
      .def("__repr__", [](const RankExtent& extent) {
        return "<espalier.RankExtent " + std::to_string(extent.first_channel) + " + " +
               std::to_string(extent.channels) + ">";
      });
  nb::class_<LayerExtents>(module, "LayerExtents", "The ranks of one layer.")
      .def_ro("layer", &LayerExtents::layer, "Position in Checkpoint.layers.")
      .def_ro("ranks", &LayerExtents::ranks, "By tensor-parallel rank.")
      .def("__repr__", [](const LayerExtents& layer) {
        return "<espalier.LayerExtents " + std::to_string(layer.layer) + ": " +
               std::to_string(layer.ranks.size()) + " ranks>";
      });
  nb::class_<ExtentPlan>(
      module, "ExtentPlan",
      "Who owns which channels and experts of every layer, before any weight is read. Made by\n"
      "Checkpoint.extents(). Immutable; usable from any thread. Global rank = ep_rank * tp + tp_rank.")
      .def_prop_ro("tp", &ExtentPlan::tp, "Tensor-parallel size.")
      .def_prop_ro("ep", &ExtentPlan::ep, "Expert-parallel size.")
      .def_prop_ro("world", &ExtentPlan::world, "tp * ep.")
      .def_prop_ro(
          "layers", [](const ExtentPlan& plan) { return List(plan.layers()); },
          "By position in Checkpoint.layers.")
      .def(
          "weight_bytes",
          [](const ExtentPlan& plan, const Int& rank) {
            return plan.WeightBytes(
                static_cast<int>(ToInteger(rank, "rank", 0, static_cast<uint64_t>(plan.world() - 1))));
          },
          nb::arg("rank"), nb::sig("def weight_bytes(self, rank: int) -> int"),
          "Bytes of codes and vectors that a global rank reads over all layers. UsageError: no such rank.")
      .def(
          "experts",
          [](const ExtentPlan& plan, const Int& layer, const Int& ep_rank) {
            const ExpertRange range =
                plan.Experts(CheckedPosition(plan, layer), CheckedEpRank(plan, ep_rank));
            return std::pair(range.first_expert, range.experts);
          },
          nb::arg("layer"), nb::arg("ep_rank"),
          nb::sig("def experts(self, layer: int, ep_rank: int) -> tuple[int, int]"),
          "(first, count) of the global experts of one expert-parallel rank. `layer` is a position in\n"
          "Checkpoint.layers. UsageError: out of range.")
      .def(
          "expert_map",
          [](const ExtentPlan& plan, const Int& layer, const Int& ep_rank) {
            const size_t position = CheckedPosition(plan, layer);
            return ExpertMap(plan, position, CheckedEpRank(plan, ep_rank));
          },
          nb::arg("layer"), nb::arg("ep_rank"),
          nb::sig("def expert_map(self, layer: int, ep_rank: int) -> list[int]"),
          "Local expert ids by global ones, -1 = on another rank: what run(expert_map=...) takes.\n"
          "UsageError: out of range.")
      .def("__repr__", [](const ExtentPlan& plan) {
        return "<espalier.ExtentPlan tp " + std::to_string(plan.tp()) + ", ep " + std::to_string(plan.ep()) +
               ">";
      });
}

}  // namespace

void BindCheckpoint(nb::module_& module) {
  BindLists(module);
  BindExtents(module);
  nb::class_<Checkpoint>(
      module, "Checkpoint",
      "A checkpoint on disk, whatever its layout: a directory, or one .safetensors file.\n\n"
      "Opening reads headers, index and config only. Immutable; usable from any thread at once, and "
      "everything\n"
      "that reads releases the GIL.\n\n"
      "IoError, FormatError, UnsupportedError: with the file and what is wrong in it.")
      .def(
          "__init__",
          [](Checkpoint* self, const std::filesystem::path& path) {
            new (self) Checkpoint(Value(WithoutGil([&] { return Checkpoint::Open(path); })));
          },
          nb::arg("path"), nb::sig("def __init__(self, path: str | os.PathLike) -> None"))
      .def_prop_ro(
          "path", [](const Checkpoint& self) { return Text(self.path().string()); },
          nb::sig("def path(self) -> str"), "As it was opened.")
      .def_prop_ro("layout", &Checkpoint::layout_name, "\"stock\", \"rank-sliced\", \"r7\", \"exl3-v1\".")
      .def_prop_ro(
          "config", [](const Checkpoint& self) { return ConfigDict(self.config()); },
          nb::sig("def config(self) -> dict[str, int | str | None]"),
          "What the config says of the model; absent numbers are 0, an absent activation is None.")
      .def_prop_ro("legal_tp", &Checkpoint::LegalTpSizes,
                   "Tensor-parallel sizes up to 24 at which every rank of every layer owns something.")
      .def_prop_ro(
          "problems", [](const Checkpoint& self) { return List(self.problems()); },
          "What is readable but wrong.")
      .def_prop_ro(
          "layers", [](const Checkpoint& self) { return List(self.layers()); },
          "Layers with routed experts, in ascending order.")
      .def_prop_ro(
          "linears", [](const Checkpoint& self) { return List(self.linears()); },
          "EXL3 matrices outside the routed experts, by name.")
      .def_prop_ro(
          "tensors",
          [](const Checkpoint& self) {
            nb::dict tensors;
            for (const TensorInfo& tensor : self.tensors()) {
              tensors[Text(tensor.name)] = Tensor{.name = tensor.name,
                                                  .dtype = std::string(DtypeName(tensor.dtype)),
                                                  .shape = tensor.shape,
                                                  .file = self.files()[tensor.file].name,
                                                  .size_bytes = tensor.size_bytes};
            }
            return tensors;
          },
          nb::sig("def tensors(self) -> dict[str, TensorInfo]"),
          "Every tensor by its name. A new dict each time.")
      .def("read", &ReadTensor, nb::arg("name"),
           "One whole tensor in its own shape and dtype; F4 and F6 types as [bytes] of uint8.\n\n"
           "UsageError: no such tensor. IoError. CapacityError.")
      .def("matrix", &DecodedMatrix, nb::arg("name"), nb::kw_only(), nb::arg("inner") = false,
           "An EXL3 matrix as float32 [in, out] of its stored size: y = x @ matrix.\n\n"
           "name: as in `linears`, or model.layers.{L}.mlp.experts.{E}.{gate,up,down}_proj[.rank{slice}].\n"
           "inner: leave rotations and vectors off. Takes in * out * 4 bytes.\n"
           "UsageError: no such matrix. IoError, FormatError, CapacityError.")
      .def(
          "extents",
          [](const Checkpoint& self, const Int& tp, const Int& ep, bool equal) {
            const ExtentPlanOptions options{
                .tp = ToCount<int>(tp, "tp"), .ep = ToCount<int>(ep, "ep"), .equal = equal};
            return Value(WithoutGil([&] { return ExtentPlan::Create(self, options); }));
          },
          nb::arg("tp") = 1, nb::arg("ep") = 1, nb::arg("equal") = false,
          nb::sig("def extents(self, tp: int = 1, ep: int = 1, equal: bool = False) -> ExtentPlan"),
          "Who owns what at these sizes. equal: refuse unless every rank owns as much as the others.\n\n"
          "GeometryError: with the sizes that are legal.")
      .def("__repr__", [](const Checkpoint& self) {
        return Text("<espalier.Checkpoint " + self.path().string() + " (" + std::string(self.layout_name()) +
                    ")>");
      });
}

}  // namespace espalier::python
