// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include "checkpoint/layout.h"

namespace espalier {

std::vector<int> GeneralLegalTpSizes(uint64_t min_blocks) {
  std::vector<int> sizes;
  for (int n = 1; n <= kMaxLegalTp && static_cast<uint64_t>(n) <= min_blocks; ++n) sizes.push_back(n);
  return sizes;
}

std::vector<int> BarrierLegalTpSizes(uint64_t num_slots, uint64_t alignment_slots) {
  std::vector<int> sizes = {1};
  const uint64_t half = num_slots / 2;
  if (num_slots % 2 != 0 || half % alignment_slots != 0) return sizes;
  const uint64_t blocks = half / alignment_slots;
  constexpr uint64_t kCutSlots = kHadamardChannels / 32;
  for (uint64_t n = 2; n <= kMaxLegalTp; ++n) {
    // Owners 0 .. front-1 share the lower half, the others the upper one; the larger share of owners
    // decides whether one is left empty. Cuts of blocks finer than 128 channels must still fall on 128.
    const uint64_t front = (n + 1) / 2;
    if (front > blocks) break;
    bool on_grid = true;
    for (const uint64_t owners : {front, n - front}) {
      for (uint64_t i = 1; i <= owners; ++i) {
        const uint64_t end = i * (blocks / owners) + std::min(i, blocks % owners);
        on_grid = on_grid && end * alignment_slots % kCutSlots == 0;
      }
    }
    if (on_grid) sizes.push_back(static_cast<int>(n));
  }
  return sizes;
}

}  // namespace espalier
