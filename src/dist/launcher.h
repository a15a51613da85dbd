// SPDX-License-Identifier: Apache-2.0
//
// Was this process started by mpirun or its like? Asked of the environment, since MPI itself can only be
// asked after it has been initialised, which a process of its own should not pay for.
#ifndef ESPALIER_SRC_DIST_LAUNCHER_H_
#define ESPALIER_SRC_DIST_LAUNCHER_H_

#include <functional>
#include <optional>

namespace espalier {

struct Launcher {
  int processes = 0;  // 0 where it does not say
  int rank = 0;
};

// Recognised: Open MPI's mpirun, MPICH's and Intel's (PMI), MVAPICH's, and PMIx, with the size from Slurm if
// srun is behind it.
std::optional<Launcher> FindLauncher();

// The same with another environment; null = not set.
std::optional<Launcher> FindLauncher(const std::function<const char*(const char*)>& variable);

}  // namespace espalier

#endif  // ESPALIER_SRC_DIST_LAUNCHER_H_
