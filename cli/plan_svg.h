// SPDX-License-Identifier: Apache-2.0
#ifndef ESPALIER_CLI_PLAN_SVG_H_
#define ESPALIER_CLI_PLAN_SVG_H_

#include <espalier/checkpoint.h>
#include <espalier/extent_plan.h>

#include <span>
#include <string>

#include "preflight.h"

namespace espalier::cli {

// A drawing of a plan: a band per layer, cut where the tensor-parallel ranks' channels end and coloured by
// owner; the same for the experts where there is expert parallelism; a bar of bytes per rank. Standalone SVG,
// under a title of `name`.
std::string PlanSvg(const std::string& name, const Checkpoint& checkpoint, const ExtentPlan& plan,
                    std::span<const RankMemory> memory);

}  // namespace espalier::cli

#endif  // ESPALIER_CLI_PLAN_SVG_H_
