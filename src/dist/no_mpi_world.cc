// SPDX-License-Identifier: Apache-2.0
#include <optional>

#include "dist/launcher.h"
#include "dist/world.h"

namespace espalier {

Result<World> JoinWorld(const WorldOptions&) {
  const std::optional<Launcher> launcher = FindLauncher();
  // A launcher that does not tell the number is believed to have started more when this is not its first.
  if (launcher && (launcher->processes > 1 || launcher->rank > 0)) {
    return Error(StatusCode::kUnsupported,
                 "started by mpirun or its like as one of several processes, but this build has no MPI; "
                 "legal: one process, which runs all ranks by itself");
  }
  return World{.communicator = LocalCommunicator(), .launched = launcher.has_value()};
}

std::string MpiVersion() { return ""; }

}  // namespace espalier
