// SPDX-License-Identifier: Apache-2.0
//
// A table of "this checkpoint, changed like that, must end so": what the hostile tests are made of.
#ifndef ESPALIER_TESTS_SUPPORT_REFUSAL_CASES_H_
#define ESPALIER_TESTS_SUPPORT_REFUSAL_CASES_H_

#include <espalier/checkpoint.h>
#include <espalier/status.h>

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "support/checkpoint_writer.h"
#include "support/memory_file_system.h"

namespace espalier::testing {

// A checkpoint opened from memory, with the file system it lives in.
struct MemoryCheckpoint {
  std::unique_ptr<MemoryFileSystem> file_system;
  Result<Checkpoint> checkpoint;
};
// `path`: "" opens the directory, a file name opens that file.
MemoryCheckpoint OpenInMemory(const FileMap& files, const std::string& path = "");

// What the mutations start from. Small, without problems, one of each layout.
enum class Base {
  kStock,        // layers 1 and 2, 3 experts, dense parts, 2 shards and an index
  kStockSingle,  // the same in one file
  kStockShards,  // the same in 3 shards without an index
  kLegacy,       // su / sv
  kBias,         // up and down with bias
  kRankSliced,   // layers 3 and 4, 4 experts, 2 slices of 128, tier table
  kSharedH,
  kR7,
  kExl3V1,           // layers 1 and 2, 3 experts, hidden 128, intermediate 256, K 3
  kExl3V1PerExpert,  // [E, H] vectors
};
CheckpointFiles MakeBase(Base base);
const std::vector<Base>& AllBases();
std::string BaseName(Base base);

// Changes to a checkpoint. Those that name a tensor or a key throw when it is not there: a mutation that
// changes nothing would prove nothing.
using Mutation = std::function<void(CheckpointFiles&)>;
// Gives a tensor another dtype and shape, with as many bytes as they need.
Mutation Retype(std::string name, std::string dtype, std::vector<uint64_t> shape, uint64_t element_bytes);
Mutation Without(std::vector<std::string> names);
Mutation WithoutAll(std::string prefix);                   // every tensor whose name begins so
Mutation RenameAll(std::string from, std::string to);      // in every name that contains it
Mutation AddTensor(std::string near, NamedTensor tensor);  // into the file that holds `near`
Mutation SetJson(std::string file, std::string pointer, Json value);
Mutation EraseJson(std::string file, std::string pointer);
Mutation Both(Mutation first, Mutation second);

struct Expected {
  enum class Kind {
    kRefused,   // Open fails with one of `codes`, the message contains all of `words`
    kError,     // Open succeeds, an error among problems() contains all of `words`
    kWarning,   // Open succeeds, a warning does, and there is no error
    kAccepted,  // Open succeeds without problems
    kMarker,    // Open succeeds, CheckMarker of some matrix and LoadExperts of its layer fail with kFormat
    kPadding,   // Open succeeds, CheckPadding of some layer fails with kFormat
  };
  Kind kind = Kind::kRefused;
  std::vector<StatusCode> codes;
  std::vector<std::string> words;  // of the message, the file and the tensor together
};

Expected Format(std::vector<std::string> words);       // kFormat
Expected Unsupported(std::vector<std::string> words);  // kUnsupported
Expected Refused(std::vector<StatusCode> codes, std::vector<std::string> words);
Expected ErrorProblem(std::vector<std::string> words);
Expected Warning(std::vector<std::string> words);
Expected Accepted();

struct RefusalCase {
  std::string name;  // letters, digits and '_'
  Base base;
  Mutation mutate;
  Expected expected;
};
std::ostream& operator<<(std::ostream& out, const RefusalCase& refusal_case);

// Opens the mutated base and compares: empty when as expected, else what was different.
std::string RunCase(const RefusalCase& refusal_case);

}  // namespace espalier::testing

#endif  // ESPALIER_TESTS_SUPPORT_REFUSAL_CASES_H_
