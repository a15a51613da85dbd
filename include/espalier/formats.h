// SPDX-License-Identifier: Apache-2.0
//
// Names and sizes of what EXL3 files are made of. Generated from formats.def.
// Source of the format: docs/format.md.
#ifndef ESPALIER_FORMATS_H_
#define ESPALIER_FORMATS_H_

#include <espalier/status.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace espalier {

enum class Codebook : uint8_t {
#define ESPALIER_CODEBOOK(enumerator, number, name, marker_tensor, multiplier) enumerator = number,
#include <espalier/formats.def>
};

enum class Dtype : uint8_t {
#define ESPALIER_DTYPE(enumerator, number, name, bits_per_element) enumerator = number,
#include <espalier/formats.def>
};

enum class ActivationKind : uint8_t {
#define ESPALIER_ACTIVATION(enumerator, number, name, has_gate, num_parameters) enumerator = number,
#include <espalier/formats.def>
};

// The three matrices of an expert, in the order in which files and descriptors store them.
enum class Projection : uint8_t { kGate = 0, kUp = 1, kDown = 2 };
inline constexpr int kNumProjections = 3;

inline constexpr int kMinBits = 1;
inline constexpr int kMaxBits = 8;
inline constexpr uint32_t kTileChannels = 16;       // a tile is 16 input x 16 output channels
inline constexpr uint32_t kTileWeights = 256;       // weights in a tile
inline constexpr uint32_t kHadamardChannels = 128;  // block of the rotation: the unit of legal cuts

struct CodebookInfo {
  Codebook codebook;
  std::string_view name;           // "3inst", "mcg", "mul1"
  std::string_view marker_tensor;  // suffix of the marker tensor; empty = none
  uint32_t multiplier;             // what the marker tensor must hold
};

// Every codebook, in the order of formats.def.
std::span<const CodebookInfo> AllCodebooks();
std::string_view CodebookName(Codebook codebook);
std::optional<Codebook> CodebookFromName(std::string_view name);

std::string_view DtypeName(Dtype dtype);
std::optional<Dtype> DtypeFromName(std::string_view name);
// Bits of one element: 4 and 6 for the packed sub-byte types.
int DtypeBits(Dtype dtype);

std::string_view ProjectionName(Projection projection);  // "gate", "up", "down"

// Bytes of the codes of one tile at `bits` bits per weight: 32 * bits.
constexpr uint64_t TileBytes(int bits) { return 32u * static_cast<uint64_t>(bits); }

// Order of the 32-bit code words of a matrix in a slab.
//   native  [in/16][out/16][8 groups][bits], as in files; what the cuda executor reads
//   panels  [out/32][in/16][bits][2 tiles][8 groups]: what the cpu executor streams. A group is 32 successive
//           weights of a tile, so that one vector of 16 words holds the same bits of 16 output channels.
enum class CodeOrder : uint8_t { kNative, kPanels };

// The function between FC1 and FC2. All of it is computed in the executor's working precision.
//   silu        g * sigmoid(g) * u; with limit L > 0: g = min(g, L), u = clamp(u, -L, L) first
//   gelu        0.5 g (1 + tanh(0.797884560803 (g + 0.044715 g^3))) * u; limit as for silu
//   relu2       max(u, 0)^2; the expert has no gate matrix
//   situ        beta tanh(g / beta) * sigmoid(g) * linear_beta tanh(u / linear_beta)
//   swiglu-oai  g = min(g, L), u = clamp(u, -L, L); (u + 1) * g * sigmoid(1.702 g); L = 7 by default
struct Activation {
  ActivationKind kind = ActivationKind::kSilu;
  double limit = 0;         // silu, gelu, swiglu-oai; 0 = no limit
  double beta = 4;          // situ
  double linear_beta = 25;  // situ; 0 = none: the up value passes as it is

  friend bool operator==(const Activation&, const Activation&) = default;
};

// False for relu2 only.
bool ActivationHasGate(ActivationKind kind);

// Parses "silu[:L]", "gelu[:L]", "relu2", "situ:BETA,LINEAR_BETA" (LINEAR_BETA may be "none"),
// "swiglu-oai[:L]".
// Error: kUsage, with the list of names.
Result<Activation> ParseActivation(std::string_view text);

// The text that ParseActivation reads back: "situ:4,25", "swiglu-oai:7", "silu".
std::string ActivationText(const Activation& activation);

}  // namespace espalier

#endif  // ESPALIER_FORMATS_H_
