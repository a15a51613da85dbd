// SPDX-License-Identifier: Apache-2.0
#include "reference/codebook.h"

#include <array>

#include "base/half.h"

namespace espalier {
namespace {

struct CodebookTable {
  std::array<uint16_t, kNumStates> fp16;
  std::array<float, kNumStates> fp32;
};

// Static storage, filled in place: 384 KiB a codebook, only for codebooks that are used.
template <Codebook kCodebook>
const CodebookTable& TableOf() {
  struct Filled : CodebookTable {
    Filled() {
      for (uint32_t state = 0; state < kNumStates; ++state) {
        fp16[state] = DecodeState<kCodebook>(static_cast<uint16_t>(state));
        fp32[state] = Fp16ToFloat(fp16[state]);
      }
    }
  };
  static const Filled table;
  return table;
}

const CodebookTable& Table(Codebook codebook) {
  switch (codebook) {
#define ESPALIER_CODEBOOK(enumerator, number, name, marker_tensor, multiplier) \
  case Codebook::enumerator:                                                   \
    return TableOf<Codebook::enumerator>();
#include <espalier/formats.def>
  }
  return TableOf<Codebook::k3Inst>();
}

}  // namespace

std::span<const uint16_t, kNumStates> CodebookTableFp16(Codebook codebook) { return Table(codebook).fp16; }

std::span<const float, kNumStates> CodebookTableFloat(Codebook codebook) { return Table(codebook).fp32; }

}  // namespace espalier
