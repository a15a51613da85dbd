// SPDX-License-Identifier: Apache-2.0
#include <espalier/status.h>

namespace espalier {

std::string_view StatusCodeName(StatusCode code) {
  switch (code) {
    case StatusCode::kUsage:
      return "usage";
    case StatusCode::kIo:
      return "io";
    case StatusCode::kFormat:
      return "format";
    case StatusCode::kUnsupported:
      return "unsupported";
    case StatusCode::kGeometry:
      return "geometry";
    case StatusCode::kCapacity:
      return "capacity";
    case StatusCode::kDevice:
      return "device";
    case StatusCode::kCancelled:
      return "cancelled";
  }
  return "unknown";
}

int ExitCode(StatusCode code) {
  switch (code) {
    case StatusCode::kUsage:
      return 2;
    case StatusCode::kIo:
      return 3;
    case StatusCode::kFormat:
      return 4;
    case StatusCode::kUnsupported:
      return 5;
    case StatusCode::kGeometry:
    case StatusCode::kCapacity:
      return 6;
    case StatusCode::kDevice:
      return 7;
    case StatusCode::kCancelled:
      return 8;
  }
  return 2;
}

}  // namespace espalier
