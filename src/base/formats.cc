// SPDX-License-Identifier: Apache-2.0
#include <espalier/formats.h>
#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>
#include <vector>

namespace espalier {
namespace {

constexpr CodebookInfo kCodebooks[] = {
#define ESPALIER_CODEBOOK(enumerator, number, name, marker_tensor, multiplier) \
  {Codebook::enumerator, name, marker_tensor, multiplier},
#include <espalier/formats.def>
};

struct DtypeRow {
  Dtype dtype;
  std::string_view name;
  int bits;
};
constexpr DtypeRow kDtypes[] = {
#define ESPALIER_DTYPE(enumerator, number, name, bits_per_element) \
  {Dtype::enumerator, name, bits_per_element},
#include <espalier/formats.def>
};

struct ActivationRow {
  ActivationKind kind;
  std::string_view name;
  bool has_gate;
  int num_parameters;
};
constexpr ActivationRow kActivations[] = {
#define ESPALIER_ACTIVATION(enumerator, number, name, has_gate, num_parameters) \
  {ActivationKind::enumerator, name, has_gate, num_parameters},
#include <espalier/formats.def>
};

const ActivationRow& Row(ActivationKind kind) {
  for (const ActivationRow& row : kActivations) {
    if (row.kind == kind) return row;
  }
  return kActivations[0];
}

tl::unexpected<Status> BadActivation(std::string_view text, std::string_view reason) {
  return Error(StatusCode::kUsage,
               fmt::format("activation '{}': {}; legal: silu, gelu, relu2, situ:BETA,LINEAR_BETA, "
                           "swiglu-oai[:LIMIT]",
                           text, reason));
}

// Comma-separated finite numbers; "none" reads as 0.
std::optional<std::vector<double>> ParseNumbers(std::string_view text) {
  std::vector<double> numbers;
  while (true) {
    const size_t comma = text.find(',');
    const std::string_view item = text.substr(0, comma);
    double value = 0;
    if (item == "none") {
      numbers.push_back(0);
      if (comma == std::string_view::npos) return numbers;
      text.remove_prefix(comma + 1);
      continue;
    }
    const auto [end, error] = std::from_chars(item.data(), item.data() + item.size(), value);
    if (value <= 0 || error != std::errc() || end != item.data() + item.size() || !std::isfinite(value)) {
      return std::nullopt;
    }
    numbers.push_back(value);
    if (comma == std::string_view::npos) return numbers;
    text.remove_prefix(comma + 1);
  }
}

}  // namespace

std::span<const CodebookInfo> AllCodebooks() { return kCodebooks; }

std::string_view CodebookName(Codebook codebook) {
  for (const CodebookInfo& info : kCodebooks) {
    if (info.codebook == codebook) return info.name;
  }
  return "unknown";
}

std::optional<Codebook> CodebookFromName(std::string_view name) {
  for (const CodebookInfo& info : kCodebooks) {
    if (info.name == name) return info.codebook;
  }
  return std::nullopt;
}

std::string_view DtypeName(Dtype dtype) {
  for (const DtypeRow& row : kDtypes) {
    if (row.dtype == dtype) return row.name;
  }
  return "unknown";
}

std::optional<Dtype> DtypeFromName(std::string_view name) {
  for (const DtypeRow& row : kDtypes) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

int DtypeBits(Dtype dtype) {
  for (const DtypeRow& row : kDtypes) {
    if (row.dtype == dtype) return row.bits;
  }
  return 0;
}

std::string_view ProjectionName(Projection projection) {
  constexpr std::string_view kNames[kNumProjections] = {"gate", "up", "down"};
  return kNames[static_cast<int>(projection)];
}

bool ActivationHasGate(ActivationKind kind) { return Row(kind).has_gate; }

Result<Activation> ParseActivation(std::string_view text) {
  const size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  std::vector<double> parameters;
  if (colon != std::string_view::npos) {
    std::optional<std::vector<double>> parsed = ParseNumbers(text.substr(colon + 1));
    if (!parsed) return BadActivation(text, "parameters must be numbers greater than 0");
    parameters = *std::move(parsed);
  }
  for (const ActivationRow& row : kActivations) {
    if (row.name != name) continue;
    if (parameters.size() > static_cast<size_t>(row.num_parameters)) {
      return BadActivation(text, fmt::format("takes at most {} parameters", row.num_parameters));
    }
    const bool none_allowed = row.kind == ActivationKind::kSitu;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i] == 0 && !(none_allowed && i == 1)) {
        return BadActivation(text, "'none' is legal for LINEAR_BETA only");
      }
    }
    Activation activation{.kind = row.kind};
    if (row.kind == ActivationKind::kSitu) {
      if (parameters.size() == 1) return BadActivation(text, "situ takes two parameters or none");
      if (!parameters.empty()) {
        activation.beta = parameters[0];
        activation.linear_beta = parameters[1];
      }
    } else {
      if (row.kind == ActivationKind::kSwigluOai) activation.limit = 7;
      if (!parameters.empty()) activation.limit = parameters[0];
    }
    return activation;
  }
  return BadActivation(text, "unknown name");
}

std::string ActivationText(const Activation& activation) {
  const std::string_view name = Row(activation.kind).name;
  if (activation.kind == ActivationKind::kSitu) {
    if (activation.linear_beta == 0) return fmt::format("{}:{},none", name, activation.beta);
    return fmt::format("{}:{},{}", name, activation.beta, activation.linear_beta);
  }
  if (activation.limit > 0) return fmt::format("{}:{}", name, activation.limit);
  return std::string(name);
}

}  // namespace espalier
