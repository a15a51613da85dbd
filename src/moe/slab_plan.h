// SPDX-License-Identifier: Apache-2.0
//
// Places matrices and vectors in a slab, before there is one.
#ifndef ESPALIER_SRC_MOE_SLAB_PLAN_H_
#define ESPALIER_SRC_MOE_SLAB_PLAN_H_

#include <espalier/prepare.h>

#include <cstdint>
#include <map>
#include <string_view>
#include <utility>

#include "base/checked.h"

namespace espalier {

class SlabPlan {
 public:
  // All codes get this order; sizes and offsets do not depend on it.
  explicit SlabPlan(CodeOrder order) : order_(order) {}

  // Equal specs in equal order give equal offsets. `name` is for messages. Error: kGeometry.
  Result<MatrixDesc> Add(const MatrixSpec& spec, std::string_view name);

  // Error: kCapacity beyond 2^64.
  Result<uint64_t> SizeBytes() const;

 private:
  uint64_t Place(uint64_t size);
  uint64_t PlaceVector(uint64_t key, uint64_t channels);

  CodeOrder order_;
  CheckedBytes size_bytes_;
  std::map<std::pair<uint64_t, uint64_t>, uint64_t> shared_;  // (key, channels) -> offset
};

}  // namespace espalier

#endif  // ESPALIER_SRC_MOE_SLAB_PLAN_H_
