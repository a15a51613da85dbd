// SPDX-License-Identifier: Apache-2.0
//
// Calls of the cpu executor on a table of kernels of one's choice, not on the one that this process chose.
#ifndef ESPALIER_TESTS_SUPPORT_TABLE_CALL_H_
#define ESPALIER_TESTS_SUPPORT_TABLE_CALL_H_

#include <espalier/moe.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cpu/kernel_table.h"
#include "support/random_experts.h"

namespace espalier::test {

// Memory whose last byte is the last one of its page: the byte behind it cannot be read or written. In front
// of it are bytes of a pattern.
class EdgeMemory {
 public:
  // Filled with `pattern`. Throws where there is no memory.
  EdgeMemory(uint64_t size_bytes, std::byte pattern);
  ~EdgeMemory();
  EdgeMemory(const EdgeMemory&) = delete;
  EdgeMemory& operator=(const EdgeMemory&) = delete;

  std::byte* data() const { return pages_ + front_bytes_; }
  std::span<std::byte> span() const { return {data(), size_bytes_}; }
  // Throws when a byte in front was written.
  void CheckFront() const;

 private:
  std::byte* pages_ = nullptr;
  uint64_t front_bytes_ = 0;
  uint64_t size_bytes_ = 0;
  uint64_t page_bytes_ = 0;
  std::byte pattern_;
};

// As a name of a test may hold it.
std::string TableIdentifier(const cpu::KernelTable& table);

struct TableOptions {
  CpuMode mode = CpuMode::kFast;
  int num_threads = 1;
  uint64_t max_tokens = 0;  // capacity of the plan; 0 = that of the call
  std::byte poison{0xFF};   // of workspace and output before the run
};

// fp32 rows of y. The workspace has exactly the bytes that the table asks for, and it, x and y end at the
// edge of a page. `call` gives inputs, routes and input type. Throws on an error, and when a byte in front of
// an array was written.
std::vector<float> RunOnTable(const cpu::KernelTable& table, const PreparedExperts& experts,
                              const MoeCall& call, const TableOptions& options = {});
// The same for one matrix; x is [tokens][in].
std::vector<float> RunOnTable(const cpu::KernelTable& table, const PreparedLinear& linear,
                              const std::vector<float>& x, const TableOptions& options = {});

}  // namespace espalier::test

#endif  // ESPALIER_TESTS_SUPPORT_TABLE_CALL_H_
