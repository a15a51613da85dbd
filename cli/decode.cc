// SPDX-License-Identifier: Apache-2.0
//
// espalier decode: one matrix as fp32.
#include <espalier/experts.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "command.h"

namespace espalier::cli {
namespace {

struct DecodeOptions {
  std::string checkpoint;
  std::string tensor;
  std::string output;
  bool inner = false;
};

struct Decoded {
  uint64_t in_channels = 0;
  uint64_t out_channels = 0;
  int bits = 0;
  Codebook codebook = Codebook::k3Inst;
  std::vector<float> weight;  // [in, out]
};

// Label of the layer that a dense matrix lies in, for its problems: the first all-digit part of the
// name ("model.layers.3.self_attn.q_proj"), or of the group of MoE layers that it belongs to.
std::string LayerLabel(const Checkpoint& checkpoint, const std::string& name) {
  for (const MoeLayer& layer : checkpoint.layers()) {
    if (name.starts_with(fmt::format("{}.{}.", layer.prefix, layer.number))) return layer.label;
  }
  for (size_t start = 0; start < name.size();) {
    const size_t end = std::min(name.find('.', start), name.size());
    const std::string part = name.substr(start, end - start);
    if (!part.empty() && std::all_of(part.begin(), part.end(), [](char c) { return c >= '0' && c <= '9'; })) {
      return part;
    }
    start = end + 1;
  }
  return name;
}

Result<Decoded> DecodeOne(const Checkpoint& checkpoint, const std::string& name, bool inner) {
  const Result<PreparedLinear> linear = LoadLinear(checkpoint, name);
  if (!linear) return tl::unexpected(linear.error());
  Result<std::vector<float>> weight = DecodeMatrix(*linear, inner);
  if (!weight) return tl::unexpected(weight.error());
  return Decoded{.in_channels = linear->matrix().in_channels,
                 .out_channels = linear->matrix().out_channels,
                 .bits = linear->matrix().bits,
                 .codebook = linear->matrix().codebook,
                 .weight = *std::move(weight)};
}

// The slices of an expert side by side: on the output axis for gate and up, on the input axis for down.
Decoded Concatenate(const std::vector<Decoded>& slices, Projection projection) {
  Decoded whole = slices.front();
  if (slices.size() == 1) return whole;
  whole.weight.clear();
  if (projection == Projection::kDown) {
    whole.in_channels = 0;
    for (const Decoded& slice : slices) {
      whole.in_channels += slice.in_channels;
      whole.weight.insert(whole.weight.end(), slice.weight.begin(), slice.weight.end());
    }
    return whole;
  }
  whole.out_channels = 0;
  for (const Decoded& slice : slices) whole.out_channels += slice.out_channels;
  whole.weight.reserve(whole.in_channels * whole.out_channels);
  for (uint64_t row = 0; row < whole.in_channels; ++row) {
    for (const Decoded& slice : slices) {
      const float* source = slice.weight.data() + row * slice.out_channels;
      whole.weight.insert(whole.weight.end(), source, source + slice.out_channels);
    }
  }
  return whole;
}

Result<Decoded> DecodeRouted(const Checkpoint& checkpoint, const Checkpoint::MatrixRef& ref, bool inner) {
  std::vector<uint32_t> wanted;
  if (ref.slice) {
    wanted.push_back(*ref.slice);
  } else {
    for (uint32_t slice = 0; slice < checkpoint.layers()[ref.layer].slices; ++slice) wanted.push_back(slice);
  }
  if (inner && wanted.size() > 1) {
    return Error(
        StatusCode::kUsage,
        fmt::format("--inner takes one matrix, this expert is {} slices with rotations of their own; "
                    "name one with .rank0 to .rank{}",
                    wanted.size(), wanted.size() - 1));
  }
  std::vector<Decoded> slices;
  for (const uint32_t slice : wanted) {
    Result<Decoded> decoded =
        DecodeOne(checkpoint, checkpoint.MatrixName(ref.layer, ref.expert, ref.projection, slice), inner);
    if (!decoded) return decoded;
    slices.push_back(*std::move(decoded));
  }
  return Concatenate(slices, ref.projection);
}

Result<int> Decode(const DecodeOptions& options, Output& output) {
  const Result<Checkpoint> checkpoint = Checkpoint::Open(options.checkpoint);
  if (!checkpoint) return tl::unexpected(checkpoint.error());
  const Result<Checkpoint::MatrixRef> ref = checkpoint->FindMatrix(options.tensor);
  if (!ref) return tl::unexpected(ref.error());
  const std::string label = ref->routed ? checkpoint->layers()[ref->layer].label
                                        : LayerLabel(*checkpoint, checkpoint->linears()[ref->linear].name);
  if (Result<void> usable = checkpoint->CheckUsable(label); !usable) return tl::unexpected(usable.error());
  if (auto other = CheckOutputPath("-o", options.output, *checkpoint); !other)
    return tl::unexpected(other.error());
  const Result<Decoded> decoded =
      ref->routed ? DecodeRouted(*checkpoint, *ref, options.inner)
                  : DecodeOne(*checkpoint, checkpoint->linears()[ref->linear].name, options.inner);
  if (!decoded) return tl::unexpected(decoded.error());

  const TensorData weight{.name = "weight",
                          .dtype = Dtype::kF32,
                          .shape = {decoded->in_channels, decoded->out_channels},
                          .data = std::as_bytes(std::span(decoded->weight))};
  if (Result<void> written = WriteSafetensors(options.output, std::span(&weight, 1)); !written) {
    return tl::unexpected(written.error());
  }
  output.Print("{}: {} x {}, K {}, {}{}\nwrote {}\n", options.tensor, decoded->in_channels,
               decoded->out_channels, decoded->bits, CodebookName(decoded->codebook),
               options.inner ? ", inner" : "", options.output);
  output.Document({{"schema", "espalier.decode/1"},
                   {"tensor", options.tensor},
                   {"in_channels", decoded->in_channels},
                   {"out_channels", decoded->out_channels},
                   {"bits", decoded->bits},
                   {"codebook", CodebookName(decoded->codebook)},
                   {"inner", options.inner},
                   {"output", options.output}});
  return kExitOk;
}

}  // namespace

void AddDecode(CLI::App& app, Invocation& invocation) {
  auto options = std::make_shared<DecodeOptions>();
  CLI::App* command = AddCommand(
      app, invocation, "decode", "Write one matrix as fp32 [in, out]",
      "TENSOR is model.layers.L.mlp.experts.E.{gate,up,down}_proj in every layout, or the file's own name\n"
      "without .trellis; .rankN picks one slice of a rank-sliced expert. The output's tensor is 'weight'.\n"
      "\n"
      "Example:\n"
      "  espalier decode /models/glm model.layers.3.mlp.experts.0.up_proj -o up.safetensors\n");
  command->add_option("CKPT", options->checkpoint, "Checkpoint: a directory or one .safetensors file")
      ->required();
  command->add_option("TENSOR", options->tensor, "Name of the matrix")->required();
  command->add_option("-o,--output", options->output, "Safetensors file to write")->required();
  command->add_flag("--inner", options->inner, "Leave the rotations and scale vectors off");
  command->callback([options, &invocation] {
    invocation.run = [options](Output& output) { return Decode(*options, output); };
  });
}

}  // namespace espalier::cli
