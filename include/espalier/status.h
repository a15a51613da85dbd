// SPDX-License-Identifier: Apache-2.0
//
// Error values. No function of the library throws, aborts or prints: what can fail returns
// Result<T>. A Status carries a category, which decides what a caller can do about it (and the exit
// code of the command line), and a message that names the file, the tensor, what was found and what
// would have been legal.
#ifndef ESPALIER_STATUS_H_
#define ESPALIER_STATUS_H_

#include <string>
#include <string_view>
#include <tl/expected.hpp>
#include <utility>

namespace espalier {

// The numbers are part of the C interface: never renumber.
enum class StatusCode {
  kUsage = 2,        // the caller asked for something that has no meaning: unknown layer, bad argument
  kIo = 3,           // a path is missing, not a regular file, or could not be read or written
  kFormat = 4,       // the bytes break a rule of their format
  kUnsupported = 5,  // well-formed, but a feature that this build does not implement
  kGeometry = 6,     // sizes that do not fit each other
  kCapacity = 7,     // more than a plan, a buffer or the machine's memory holds
  kDevice = 8,       // a device is absent or failed
  kCancelled = 9,    // the caller stopped it
};

// "usage", "io", "format", "unsupported", "geometry", "capacity", "device", "cancelled".
std::string_view StatusCodeName(StatusCode code);

// 2 usage, 3 io, 4 format, 5 unsupported, 6 geometry and capacity, 7 device, 8 cancelled.
int ExitCode(StatusCode code);

// Immutable; safe to share between threads.
class [[nodiscard]] Status {
 public:
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_;
  std::string message_;
};

template <typename T>
using Result = tl::expected<T, Status>;

inline tl::unexpected<Status> Error(StatusCode code, std::string message) {
  return tl::unexpected<Status>(Status(code, std::move(message)));
}

}  // namespace espalier

#endif  // ESPALIER_STATUS_H_
