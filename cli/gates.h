// SPDX-License-Identifier: Apache-2.0
//
// How far an executor may lie from the reference.
#ifndef ESPALIER_CLI_GATES_H_
#define ESPALIER_CLI_GATES_H_

#include <espalier/experts.h>
#include <espalier/moe.h>

#include <string_view>

namespace espalier::cli {

// Bounds on the error against the reference, by what an executor rounds.
struct Gate {
  double max_rel_l2;
  double min_cosine;
};

// Of the executor of that name; `mode` counts for "cpu".
Gate GateOf(std::string_view executor, CpuMode mode, const PreparedExperts& experts);

// Relative L2 of one launch of mixed rates against the same rates one after the other.
inline constexpr double kSerialGate = 1e-4;

}  // namespace espalier::cli

#endif  // ESPALIER_CLI_GATES_H_
