// SPDX-License-Identifier: Apache-2.0
//
// The processes that were started together. One source file implements this with MPI, another without; the
// build takes one of them (ESPALIER_MPI).
#ifndef ESPALIER_SRC_DIST_WORLD_H_
#define ESPALIER_SRC_DIST_WORLD_H_

#include <espalier/status.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>

#include "dist/communicator.h"

namespace espalier {

struct World {
  std::unique_ptr<Communicator> communicator;  // never null
  bool launched = false;                       // by mpirun or its like, be it alone
};

struct WorldOptions {
  // MPI counts in int. A smaller number is for tests.
  int64_t max_elements_per_call = std::numeric_limits<int>::max();
};

// Initialises MPI if a launcher started this process; a process of its own is a world of one and does
// without. At most once a process. Destroying the communicator finalises MPI, which waits for the other
// ranks; after a kDevice error, or while an exception passes, it does not, since they may be elsewhere: the
// process should end then, which makes the launcher end the others. Errors: kUnsupported when a launcher
// started several processes and this build has no MPI, or that of another vendor: each of them would do the
// whole work. kDevice when MPI does not start.
Result<World> JoinWorld(const WorldOptions& options = {});

// "Open MPI v4.1.4", empty in a build without MPI.
std::string MpiVersion();

}  // namespace espalier

#endif  // ESPALIER_SRC_DIST_WORLD_H_
