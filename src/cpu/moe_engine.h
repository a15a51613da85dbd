// SPDX-License-Identifier: Apache-2.0
//
// The routed experts of a layer on the host. Tokens are taken in chunks. Per chunk:
//   load   every row of x as fp32, scaled by a power of two where its range asks for it
//   FC1    a task is (group of up to 64 routes of one segment, 128 intermediate channels): rotate and pack the
//          inputs, unless the thread just had the same group; multiply, activate, rotate, pack
//   FC2    a task is 128 hidden channels: all experts in order, added up into the block of every row
//   store  one rounding
// A row's result depends on its own inputs and, in modes fast and int8, on the number of routes of its expert
// in the chunk (by which operands are chosen): neither on the thread count nor on what the other rows hold.
#ifndef ESPALIER_SRC_CPU_MOE_ENGINE_H_
#define ESPALIER_SRC_CPU_MOE_ENGINE_H_

#include <espalier/moe.h>

#include "cpu/kernel_table.h"

namespace espalier::cpu {

Result<uint64_t> MoeWorkspaceBytes(const KernelTable& table, const ExpertsTable& experts,
                                   const MoePlanOptions& options);
Result<void> RunMoeOn(const KernelTable& table, const MoePlan& plan, const PreparedExperts& experts,
                      const MoeArgs& args);

Result<uint64_t> LinearWorkspaceBytes(const KernelTable& table, const PreparedLinear& linear,
                                      const LinearPlanOptions& options);
Result<void> RunLinearOn(const KernelTable& table, const LinearPlan& plan, const PreparedLinear& linear,
                         const LinearArgs& args);

}  // namespace espalier::cpu

#endif  // ESPALIER_SRC_CPU_MOE_ENGINE_H_
