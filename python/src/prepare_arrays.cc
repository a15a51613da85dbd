// SPDX-License-Identifier: Apache-2.0
//
// Packages from weights that are in memory already, described the way Python would.
#include <espalier/prepare.h>

#include <algorithm>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "array.h"
#include "packages.h"

namespace espalier::python {
namespace {

// A member of a dict, or of an object with attributes; None where it is absent.
nb::object Member(nb::handle object, const char* name) {
  if (nb::isinstance<nb::dict>(object)) return nb::borrow<nb::dict>(object).attr("get")(name);
  return nb::getattr(object, name, nb::none());
}

// A misspelt key would otherwise count as absent.
void CheckKeys(nb::handle object, const std::string& place, std::initializer_list<std::string_view> legal) {
  if (!nb::isinstance<nb::dict>(object)) return;
  for (const nb::handle key : nb::borrow<nb::dict>(object).keys()) {
    const std::string name = Str(key);
    if (std::find(legal.begin(), legal.end(), name) != legal.end()) continue;
    std::string names;
    for (const std::string_view one : legal) names += (names.empty() ? "" : ", ") + std::string(one);
    Raise(StatusCode::kUsage, place + " has a key '" + name + "'; legal: " + names);
  }
}

// Everything that PrepareExperts takes, and the arrays that its pointers point into.
class Collector {
 public:
  Collector(ExpertsSource source, bool has_gate) : source_(std::move(source)), has_gate_(has_gate) {}

  void AddExperts(nb::handle experts) {
    if (!nb::isinstance<nb::list>(experts) && !nb::isinstance<nb::tuple>(experts)) {
      Raise(StatusCode::kUsage,
            "experts is of type " + TypeName(experts) + "; legal: a list with one entry an expert");
    }
    for (const nb::handle expert : experts) {
      const std::string place = "expert " + std::to_string(source_.experts);
      if (nb::isinstance<nb::list>(expert) || nb::isinstance<nb::tuple>(expert)) {
        int slice = 0;
        for (const nb::handle segment : expert)
          AddSegment(segment, place + ", segment " + std::to_string(slice++));
      } else {
        AddSegment(expert, place);
      }
      ++source_.experts;
    }
  }

  // The channels of the matrices, where the caller named none.
  void SetHidden(const std::optional<Int>& hidden) {
    const uint32_t stored = source_.segments.empty() ? 0 : source_.segments[0].matrices[1].in_channels;
    if (hidden) source_.hidden_channels = ToCount<uint32_t>(*hidden, "hidden");
    if (!hidden && stored == 0)
      Raise(StatusCode::kUsage, "hidden is missing, and there is no matrix to take it from");
    if (!hidden) source_.hidden_channels = stored;
    source_.stored_hidden_channels = stored;
  }

  const ExpertsSource& source() const { return source_; }
  const std::vector<SegmentWeights>& weights() const { return weights_; }

 private:
  void AddSegment(nb::handle segment, const std::string& place) {
    CheckKeys(segment, place, {"gate", "up", "down", "valid_intermediate"});
    SegmentSpec spec;
    spec.expert = source_.experts;
    weights_.emplace_back();
    for (int p = 0; p < kNumProjections; ++p) {
      const std::string name(ProjectionName(static_cast<Projection>(p)));
      const nb::object matrix = Member(segment, name.c_str());
      const bool wanted = p != 0 || has_gate_;
      if (!wanted && !matrix.is_none()) {
        Raise(StatusCode::kUsage, place + " has a gate; legal: none, as the activation has none");
      }
      if (wanted && matrix.is_none()) Raise(StatusCode::kUsage, place + " has no " + name);
      if (wanted) spec.matrices[p] = AddMatrix(matrix, place + ", " + name, weights_.back().matrices[p]);
    }
    const nb::object valid = Member(segment, "valid_intermediate");
    spec.valid_intermediate_channels = valid.is_none()
                                           ? spec.matrices[2].in_channels
                                           : ToCount<uint32_t>(Int{valid}, place + ", valid_intermediate");
    source_.segments.push_back(spec);
  }

  MatrixSpec AddMatrix(nb::handle matrix, const std::string& place, MatrixWeights& weights) {
    CheckKeys(matrix, place, {"codes", "suh", "svh", "bias", "bits", "codebook"});
    const Imported& codes = Take(Member(matrix, "codes"), place + ", codes");
    if (codes.shape.size() != 3 || codes.shape[2] % kTileChannels != 0 || codes.shape[2] == 0) {
      Raise(StatusCode::kGeometry,
            codes.name + " is " + ShapeText(codes.shape) + "; legal: [in / 16, out / 16, 16 * bits]");
    }
    const std::vector<uint64_t> shape(codes.shape.begin(), codes.shape.end());
    CheckDense(codes, {Dtype::kU16, Dtype::kI16}, shape);
    constexpr uint64_t kMaxTiles = ~uint32_t{0} / kTileChannels;
    if (shape[0] > kMaxTiles || shape[1] > kMaxTiles || shape[2] > uint64_t{kTileChannels} * kMaxBits) {
      Raise(StatusCode::kGeometry, codes.name + " is " + ShapeText(codes.shape) +
                                       "; legal: up to 2^32 channels, " + std::to_string(kMaxBits) + " bits");
    }
    MatrixSpec spec{.in_channels = static_cast<uint32_t>(shape[0] * kTileChannels),
                    .out_channels = static_cast<uint32_t>(shape[1] * kTileChannels),
                    .bits = static_cast<int>(shape[2] / kTileChannels),
                    .codebook = ToCodebook(Member(matrix, "codebook"), place)};
    const nb::object bits = Member(matrix, "bits");
    if (!bits.is_none()) {
      const auto told = ToInteger(Int{bits}, place + ", bits", kMinBits, kMaxBits);
      if (told != static_cast<uint64_t>(spec.bits)) {
        Raise(StatusCode::kGeometry,
              place + ": bits is " + std::to_string(told) + " and codes have " + std::to_string(spec.bits));
      }
    }
    weights.codes = codes.data;
    weights.suh = Vector(Member(matrix, "suh"), place + ", suh", spec.in_channels, &spec.suh_key);
    weights.svh = Vector(Member(matrix, "svh"), place + ", svh", spec.out_channels, &spec.svh_key);
    const nb::object bias = Member(matrix, "bias");
    spec.has_bias = !bias.is_none();
    if (spec.has_bias) weights.bias = Vector(bias, place + ", bias", spec.out_channels, nullptr);
    return spec;
  }

  static Codebook ToCodebook(nb::handle codebook, const std::string& place) {
    const std::string name = Str(codebook);
    const std::optional<Codebook> found = CodebookFromName(name);
    if (found) return *found;
    std::string legal;
    for (const CodebookInfo& info : AllCodebooks())
      legal += (legal.empty() ? "" : ", ") + std::string(info.name);
    Raise(StatusCode::kUsage, place + ": codebook is '" + name + "'; legal: " + legal);
  }

  // The same memory twice is stored once.
  const uint16_t* Vector(nb::handle vector, const std::string& name, uint32_t channels, uint64_t* key) {
    const Imported& array = Take(vector, name);
    CheckDense(array, {Dtype::kF16}, {channels});
    if (reinterpret_cast<uintptr_t>(array.data) % sizeof(uint16_t) != 0)
      Raise(StatusCode::kUsage, name + " is not aligned to its elements of 2 bytes");
    if (key != nullptr) *key = keys_.try_emplace({array.data, channels}, keys_.size() + 1).first->second;
    return reinterpret_cast<const uint16_t*>(array.data);
  }

  const Imported& Take(nb::handle array, const std::string& name) {
    arrays_.push_back(std::make_unique<Imported>(Import(array, name, false)));
    return *arrays_.back();
  }

  ExpertsSource source_;
  bool has_gate_;
  std::vector<SegmentWeights> weights_;
  std::vector<std::unique_ptr<Imported>> arrays_;
  std::map<std::pair<const void*, uint32_t>, uint64_t> keys_;
};

Experts PrepareArrays(nb::object experts, std::optional<Int> hidden, const std::string& activation,
                      double output_scale, nb::object io, nb::object device, const std::string& identity,
                      bool hash, const Int& num_threads, const Int& tp, const Int& ep, const Int& rank) {
  ExpertsSource source{.identity = identity,
                       .activation = {.activation = Value(ParseActivation(activation))},
                       .output_scale = output_scale};
  if (!io.is_none()) source.activation.io = ToDtype(io, "io");
  source.rank_plan.tp = static_cast<int>(ToInteger(tp, "tp", 1, kMaxTp));
  source.rank_plan.ep =
      static_cast<int>(ToInteger(ep, "ep", 1, kMaxWorld / static_cast<uint64_t>(source.rank_plan.tp)));
  source.rank_plan.rank = static_cast<int>(
      ToInteger(rank, "rank", 0, static_cast<uint64_t>(source.rank_plan.tp) * source.rank_plan.ep - 1));
  const bool has_gate = ActivationHasGate(source.activation.activation.kind);
  Collector collector(std::move(source), has_gate);
  collector.AddExperts(experts);
  collector.SetHidden(hidden);
  LoadOptions options;
  options.device = ToDeviceArgument(device, "device");
  options.hash = hash;
  options.num_threads = ToCount<int>(num_threads, "num_threads");
  return Experts(
      Value(WithoutGil([&] { return PrepareExperts(collector.source(), collector.weights(), options); })));
}

}  // namespace

void BindPrepareArrays(nb::module_& module) {
  module.def(
      "prepare_arrays", &PrepareArrays, nb::arg("experts").none(), nb::kw_only(),
      nb::arg("hidden") = nb::none(), nb::arg("activation") = "silu", nb::arg("output_scale") = 1.0,
      nb::arg("io") = nb::none(), nb::arg("device").none() = "cpu", nb::arg("identity") = "arrays",
      nb::arg("hash") = false, nb::arg("num_threads") = 0, nb::arg("tp") = 1, nb::arg("ep") = 1,
      nb::arg("rank") = 0,
      nb::sig(
          "def prepare_arrays(experts: collections.abc.Sequence[typing.Any], *, hidden: int | None = None, "
          "activation: str = 'silu', output_scale: float = 1.0, io: typing.Any = None, "
          "device: typing.Any = 'cpu', identity: str = 'arrays', hash: bool = False, num_threads: int = 0, "
          "tp: int = 1, ep: int = 1, rank: int = 0) -> Experts"),
      "Experts from weights that are in memory already, which are copied once.\n\n"
      "experts: a list with one entry an expert: a dict (or an object with these attributes)\n"
      "    {\"gate\": matrix, \"up\": matrix, \"down\": matrix, \"valid_intermediate\": int | None},\n"
      "    without gate where the activation has none; or a list of such, whose outputs add up; or an empty\n"
      "    list, which contributes nothing. A matrix is a dict (or an object)\n"
      "    {\"codes\": uint16 or int16 [in / 16, out / 16, 16 * bits], in the order of the files,\n"
      "     \"suh\": float16 [in], \"svh\": float16 [out], \"bias\": float16 [out] | None,\n"
      "     \"bits\": int | None, checked against codes, \"codebook\": \"3inst\", \"mcg\" or \"mul1\"}\n"
      "    of arrays on the host without gaps; in and out are multiples of 128. Vectors that are the same\n"
      "    memory are stored once.\n"
      "hidden: channels of x and y where the matrices are padded; None = theirs.\n"
      "identity: the name that messages give it. tp, ep, rank: where it belongs, for plans to check.\n"
      "Everything else as in prepare(). Releases the GIL while it copies; the arrays must not change "
      "meanwhile.\n\n"
      "UsageError (a missing or misspelt part, dtype, strides), GeometryError (shapes), UnsupportedError,\n"
      "CapacityError, DeviceError.");
}

}  // namespace espalier::python
