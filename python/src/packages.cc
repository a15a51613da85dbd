// SPDX-License-Identifier: Apache-2.0
//
// Prepared experts and linears: what they tell of themselves, and loading them.
#include "packages.h"

#include <optional>
#include <utility>

#include "arguments.h"
#include "progress.h"

namespace espalier::python {
namespace {

// One matrix of a package, for reading.
struct Matrix {
  uint32_t in_channels = 0;
  uint32_t out_channels = 0;
  int bits = 0;
  std::string codebook;
  bool has_bias = false;
  uint64_t code_bytes = 0;
};

struct Segment {
  uint32_t expert = 0;
  uint32_t intermediate = 0;
  uint32_t valid_intermediate = 0;
  std::optional<Matrix> gate;
  std::optional<Matrix> up;
  std::optional<Matrix> down;
};

std::optional<Matrix> DescribeMatrix(const MatrixDesc& desc) {
  if (!desc.present()) return std::nullopt;
  return Matrix{.in_channels = desc.in_channels,
                .out_channels = desc.out_channels,
                .bits = desc.bits,
                .codebook = std::string(CodebookName(desc.codebook)),
                .has_bias = desc.bias_offset_bytes != kAbsentOffset,
                .code_bytes = desc.code_bytes()};
}

std::vector<Segment> DescribeSegments(const PreparedExperts& experts) {
  std::vector<Segment> segments;
  for (const SegmentDesc& segment : experts.segments()) {
    segments.push_back({.expert = segment.expert,
                        .intermediate = segment.intermediate_channels(),
                        .valid_intermediate = segment.valid_intermediate_channels,
                        .gate = DescribeMatrix(segment.gate()),
                        .up = DescribeMatrix(segment.up()),
                        .down = DescribeMatrix(segment.down())});
  }
  return segments;
}

size_t FindLayer(const Checkpoint& checkpoint, nb::handle layer) {
  if (nb::isinstance<nb::str>(layer)) return Value(checkpoint.FindLayer(Str(layer)));
  if (!PyIndex_Check(layer.ptr())) {
    Raise(StatusCode::kUsage,
          "layer is of type " + TypeName(layer) + "; legal: a position in Checkpoint.layers or a label");
  }
  if (checkpoint.layers().empty())
    Raise(StatusCode::kUsage, checkpoint.path().string() + " has no layers with routed experts");
  return ToInteger(Int{nb::borrow(layer)}, "layer", 0, checkpoint.layers().size() - 1);
}

// What both kinds of loading take.
struct LoadArguments {
  nb::object device;
  const Int& staging_bytes;
  const Int& num_threads;
};

LoadOptions MakeOptions(const LoadArguments& arguments, CallerProgress& progress) {
  LoadOptions options;
  options.device = ToDeviceArgument(arguments.device, "device");
  options.staging_bytes = ToCount<uint64_t>(arguments.staging_bytes, "staging_bytes");
  options.num_threads = ToCount<int>(arguments.num_threads, "num_threads");
  options.progress = progress.Callback();
  return options;
}

Experts LoadLayer(const Checkpoint& checkpoint, nb::object layer, const ExtentPlan* extents, const Int& rank,
                  nb::object device, nb::object activation, double output_scale, nb::object io, bool hash,
                  const Int& staging_bytes, const Int& num_threads, nb::object progress) {
  CallerProgress caller(std::move(progress));
  LoadOptions options = MakeOptions({device, staging_bytes, num_threads}, caller);
  const size_t position = FindLayer(checkpoint, layer);
  const int global_rank = ToCount<int>(rank, "rank");
  if (extents == nullptr && global_rank != 0) {
    Raise(StatusCode::kUsage, "rank is " + std::to_string(global_rank) +
                                  " without extents; legal: 0, or a plan of Checkpoint.extents()");
  }
  options.activation = ToActivation(activation);
  options.output_scale = output_scale;
  if (!io.is_none()) options.io = ToDtype(io, "io");
  options.hash = hash;
  Result<PreparedExperts> loaded = WithoutGil([&] {
    return extents == nullptr ? LoadExperts(checkpoint, position, options)
                              : LoadExperts(checkpoint, *extents, position, global_rank, options);
  });
  caller.Finish();
  return Experts(Value(std::move(loaded)));
}

Linear LoadMatrix(const Checkpoint& checkpoint, const std::string& name, const Int& first_in,
                  const Int& in_channels, const Int& first_out, const Int& out_channels, const Int& model_in,
                  const Int& model_out, nb::object device, const Int& staging_bytes, const Int& num_threads,
                  nb::object progress) {
  CallerProgress caller(std::move(progress));
  LoadOptions options = MakeOptions({device, staging_bytes, num_threads}, caller);
  options.in_channels = ToCount<uint32_t>(model_in, "model_in");
  options.out_channels = ToCount<uint32_t>(model_out, "model_out");
  const LinearExtent extent{.first_in = ToCount<uint64_t>(first_in, "first_in"),
                            .in_channels = ToCount<uint64_t>(in_channels, "in_channels"),
                            .first_out = ToCount<uint64_t>(first_out, "first_out"),
                            .out_channels = ToCount<uint64_t>(out_channels, "out_channels")};
  Result<PreparedLinear> loaded = WithoutGil([&] { return LoadLinear(checkpoint, name, extent, options); });
  caller.Finish();
  return Linear(Value(std::move(loaded)));
}

template <typename Package>
Handle<Package> CopyTo(const Handle<Package>& handle, nb::object device) {
  const Device target = ToDeviceArgument(device, "device");
  const std::shared_ptr<const Package> package = handle.Get();
  return Handle<Package>(Value(WithoutGil([&] { return ToDevice(*package, target); })));
}

template <typename Package>
nb::object Describe(const Handle<Package>& handle, const char* type) {
  const std::string end = handle.closed() ? " (closed)>" : " on " + DeviceText(handle.Get()->device()) + ">";
  return Text("<espalier." + std::string(type) + " " + handle.identity() + end);
}

// Members that a closed handle does not have any more.
template <typename Package, typename Function>
auto Open(Function function) {
  return [function](const Handle<Package>& handle) { return function(*handle.Get()); };
}

template <typename Package, typename Class>
void BindCommon(Class& bound, const char* type) {
  bound
      .def_prop_ro(
          "identity", [](const Handle<Package>& handle) { return Text(handle.identity()); },
          nb::sig("def identity(self) -> str"),
          "What it is and where it came from, as messages name it. Known after close() too.")
      .def_prop_ro("device",
                   Open<Package>([](const Package& package) { return DeviceText(package.device()); }),
                   "\"cpu\", \"cuda:0\".")
      .def_prop_ro("slab_bytes", Open<Package>([](const Package& package) { return package.slab_bytes(); }),
                   "Memory that it takes on its device.")
      .def_prop_ro("closed", &Handle<Package>::closed, "Whether close() was called.")
      .def("close", &Handle<Package>::Close,
           "Gives the memory back, at the latest when the runs that are in progress have ended. Every later "
           "use\n"
           "raises UsageError; closing again does nothing.")
      .def(
          "__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> typing.Self"))
      .def(
          "__exit__", [](Handle<Package>& handle, nb::args) { handle.Close(); },
          nb::sig("def __exit__(self, *args: object) -> None"))
      .def("__repr__", [type](const Handle<Package>& handle) { return Describe(handle, type); });
}

void BindMatrix(nb::module_& module) {
  nb::class_<Matrix>(module, "Matrix", "One EXL3 matrix of a package.")
      .def_ro("in_channels", &Matrix::in_channels, "Stored input channels.")
      .def_ro("out_channels", &Matrix::out_channels, "Stored output channels.")
      .def_ro("bits", &Matrix::bits, "Bits per weight, 1 to 8.")
      .def_ro("codebook", &Matrix::codebook, "\"3inst\", \"mcg\" or \"mul1\".")
      .def_ro("has_bias", &Matrix::has_bias, "Whether it has a bias.")
      .def_ro("code_bytes", &Matrix::code_bytes, "Bytes of its packed codes.")
      .def("__repr__", [](const Matrix& matrix) {
        return "<espalier.Matrix " + std::to_string(matrix.in_channels) + " x " +
               std::to_string(matrix.out_channels) + ", K" + std::to_string(matrix.bits) + " " +
               matrix.codebook + ">";
      });
  nb::class_<Segment>(module, "Segment", "One (gate, up, down) triple: a whole expert, or a slice of one.")
      .def_ro("expert", &Segment::expert, "Local expert id.")
      .def_ro("intermediate", &Segment::intermediate, "Intermediate channels of its matrices.")
      .def_ro("valid_intermediate", &Segment::valid_intermediate, "Those that are not padding.")
      .def_ro("gate", &Segment::gate, "None where the activation has no gate.")
      .def_ro("up", &Segment::up, "Hidden to intermediate.")
      .def_ro("down", &Segment::down, "Intermediate to hidden.")
      .def("__repr__", [](const Segment& segment) {
        return "<espalier.Segment of expert " + std::to_string(segment.expert) + ", " +
               std::to_string(segment.intermediate) + " channels>";
      });
}

}  // namespace

void BindPackages(nb::module_& module) {
  BindMatrix(module);
  using P = PreparedExperts;
  auto experts = nb::class_<Experts>(module, "Experts",
                                     "The routed experts of one layer, or one rank's share of it, in memory "
                                     "of one device, packed as they are\n"
                                     "stored. Made by prepare() or prepare_arrays(). Immutable; may be run "
                                     "from several threads at once. As a\n"
                                     "context manager it closes itself. UsageError: used after close().");
  experts
      .def_prop_ro("experts", Open<P>([](const P& p) { return p.geometry().experts; }),
                   "Number of local experts.")
      .def_prop_ro("hidden", Open<P>([](const P& p) { return p.geometry().hidden_channels; }),
                   "Channels of x and y.")
      .def_prop_ro("intermediate", Open<P>([](const P& p) { return p.max_intermediate_channels(); }),
                   "Intermediate channels of the widest segment.")
      .def_prop_ro("activation", Open<P>([](const P& p) { return ActivationText(p.geometry().activation); }),
                   "\"silu\", \"situ:4,25\".")
      .def_prop_ro("io", Open<P>([](const P& p) {
                     return p.geometry().io ? std::optional<std::string>(ArrayDtypeName(*p.geometry().io))
                                            : std::nullopt;
                   }),
                   "The one type of x that plans may take, None = any.")
      .def_prop_ro("output_scale", Open<P>([](const P& p) { return p.geometry().output_scale; }),
                   "y is multiplied by it.")
      .def_prop_ro("code_bytes", Open<P>([](const P& p) { return p.code_bytes(); }), "Bytes of packed codes.")
      .def_prop_ro("content_sha256", Open<P>([](const P& p) { return p.content_sha256(); }),
                   "Lower-case hex over descriptors and bytes; empty unless hash=True.")
      .def_prop_ro("tp", Open<P>([](const P& p) { return p.rank_plan().tp; }), "Tensor-parallel size.")
      .def_prop_ro("ep", Open<P>([](const P& p) { return p.rank_plan().ep; }), "Expert-parallel size.")
      .def_prop_ro("rank", Open<P>([](const P& p) { return p.rank_plan().rank; }), "Global rank.")
      .def_prop_ro("segments", Open<P>([](const P& p) { return DescribeSegments(p); }),
                   "What each expert consists of, by local expert id.")
      .def("to", &CopyTo<P>, nb::arg("device").none(), nb::sig("def to(self, device: typing.Any) -> Experts"),
           "A copy on another device. Releases the GIL. DeviceError, CapacityError.");
  BindCommon<P>(experts, "Experts");

  using L = PreparedLinear;
  auto linear = nb::class_<Linear>(
      module, "Linear",
      "One dense EXL3 matrix in memory of one device: y = x W (+ bias). Made by prepare_linear(). Immutable; "
      "may\n"
      "be run from several threads at once. As a context manager it closes itself. UsageError: used after\n"
      "close().");
  linear.def_prop_ro("in_channels", Open<L>([](const L& l) { return l.in_channels(); }), "Channels of x.")
      .def_prop_ro("out_channels", Open<L>([](const L& l) { return l.out_channels(); }), "Channels of y.")
      .def_prop_ro("bits", Open<L>([](const L& l) { return int{l.matrix().bits}; }),
                   "Bits per weight, 1 to 8.")
      .def_prop_ro("codebook", Open<L>([](const L& l) { return CodebookName(l.matrix().codebook); }),
                   "\"3inst\", \"mcg\" or \"mul1\".")
      .def_prop_ro("has_bias",
                   Open<L>([](const L& l) { return l.matrix().bias_offset_bytes != kAbsentOffset; }),
                   "Whether y gets a bias.")
      .def("to", &CopyTo<L>, nb::arg("device").none(), nb::sig("def to(self, device: typing.Any) -> Linear"),
           "A copy on another device. Releases the GIL. DeviceError, CapacityError.");
  BindCommon<L>(linear, "Linear");

  module.def("load_experts", &LoadLayer, nb::arg("checkpoint"), nb::arg("layer").none(),
             nb::arg("extents").none(), nb::arg("rank"), nb::arg("device").none(),
             nb::arg("activation").none(), nb::arg("output_scale"), nb::arg("io").none(), nb::arg("hash"),
             nb::arg("staging_bytes"), nb::arg("num_threads"), nb::arg("progress").none(),
             nb::sig("def load_experts(checkpoint: Checkpoint, layer: int | str, extents: ExtentPlan | None, "
                     "rank: int, device: typing.Any, activation: str | None, output_scale: float, "
                     "io: typing.Any, hash: bool, staging_bytes: int, num_threads: int, "
                     "progress: collections.abc.Callable[[int, int], object] | None) -> Experts"),
             "What espalier.prepare() calls.");
  module.def("load_linear", &LoadMatrix, nb::arg("checkpoint"), nb::arg("name"), nb::arg("first_in"),
             nb::arg("in_channels"), nb::arg("first_out"), nb::arg("out_channels"), nb::arg("model_in"),
             nb::arg("model_out"), nb::arg("device").none(), nb::arg("staging_bytes"), nb::arg("num_threads"),
             nb::arg("progress").none(),
             nb::sig("def load_linear(checkpoint: Checkpoint, name: str, first_in: int, in_channels: int, "
                     "first_out: int, out_channels: int, model_in: int, model_out: int, "
                     "device: typing.Any, staging_bytes: int, num_threads: int, "
                     "progress: collections.abc.Callable[[int, int], object] | None) -> Linear"),
             "What espalier.prepare_linear() calls.");
}

}  // namespace espalier::python
