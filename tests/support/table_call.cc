// SPDX-License-Identifier: Apache-2.0
#include "support/table_call.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "base/checked.h"
#include "cpu/moe_engine.h"
#include "support/elements.h"
#include "support/require.h"

namespace espalier::test {
namespace {

std::vector<float> Floats(const EdgeMemory& memory) {
  std::vector<float> values(memory.span().size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), memory.data(), memory.span().size());
  return values;
}

}  // namespace

EdgeMemory::EdgeMemory(uint64_t size_bytes, std::byte pattern) : size_bytes_(size_bytes), pattern_(pattern) {
  page_bytes_ = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  // At least one byte in front, so that there is something to look at.
  const uint64_t usable = RoundUp(size_bytes + 1, page_bytes_);
  front_bytes_ = usable - size_bytes;
  void* pages =
      mmap(nullptr, usable + page_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) throw std::runtime_error("no memory for a test");
  pages_ = static_cast<std::byte*>(pages);
  if (mprotect(pages_ + usable, page_bytes_, PROT_NONE) != 0) throw std::runtime_error("mprotect failed");
  std::memset(pages_, static_cast<int>(pattern), usable);
}

EdgeMemory::~EdgeMemory() { munmap(pages_, front_bytes_ + size_bytes_ + page_bytes_); }

void EdgeMemory::CheckFront() const {
  if (std::any_of(pages_, data(), [this](std::byte byte) { return byte != pattern_; }))
    throw std::runtime_error("written in front of an array");
}

std::string TableIdentifier(const cpu::KernelTable& table) {
  std::string text(table.name);
  std::ranges::replace(text, '-', '_');
  return text;
}

std::vector<float> RunOnTable(const cpu::KernelTable& table, const PreparedExperts& experts,
                              const MoeCall& call, const TableOptions& options) {
  const uint64_t hidden = experts.geometry().hidden_channels;
  const MoePlan plan = Require(
      MoePlan::Create(experts, {.max_tokens = options.max_tokens != 0 ? options.max_tokens : call.num_tokens,
                                .top_k = call.top_k,
                                .id_type = IdType::kInt64,
                                .input = call.input,
                                .executor = "cpu",
                                .mode = options.mode,
                                .num_threads = options.num_threads}));
  const uint64_t workspace_bytes = Require(cpu::MoeWorkspaceBytes(table, experts.table(), plan.options()));
  const EdgeMemory workspace(workspace_bytes, options.poison);
  const EdgeMemory x(call.x.size() * BytesOf(call.input), options.poison);
  const EdgeMemory y(call.x.size() * sizeof(float), options.poison);
  for (uint64_t i = 0; i < call.x.size(); ++i)
    Encode(call.input, call.x[i], x.data() + i * BytesOf(call.input));
  Require(cpu::RunMoeOn(table, plan, experts,
                        {.num_tokens = call.num_tokens,
                         .x = x.data(),
                         .x_row_stride = hidden,
                         .topk_ids = call.ids.data(),
                         .topk_ids_row_stride = call.top_k,
                         .topk_weights = call.weights.data(),
                         .topk_weights_row_stride = call.top_k,
                         .y = y.data(),
                         .y_row_stride = hidden,
                         .workspace = workspace.data(),
                         .workspace_bytes = workspace_bytes}));
  workspace.CheckFront();
  y.CheckFront();
  return Floats(y);
}

std::vector<float> RunOnTable(const cpu::KernelTable& table, const PreparedLinear& linear,
                              const std::vector<float>& x, const TableOptions& options) {
  const uint64_t tokens = x.size() / linear.in_channels();
  const LinearPlan plan =
      Require(LinearPlan::Create(linear, {.max_tokens = options.max_tokens != 0 ? options.max_tokens : tokens,
                                          .executor = "cpu",
                                          .mode = options.mode,
                                          .num_threads = options.num_threads}));
  const uint64_t workspace_bytes = Require(cpu::LinearWorkspaceBytes(table, linear, plan.options()));
  const EdgeMemory workspace(workspace_bytes, options.poison);
  const EdgeMemory inputs(x.size() * sizeof(float), options.poison);
  const EdgeMemory y(tokens * linear.out_channels() * sizeof(float), options.poison);
  std::memcpy(inputs.data(), x.data(), inputs.span().size());
  Require(cpu::RunLinearOn(table, plan, linear,
                           {.num_tokens = tokens,
                            .x = inputs.data(),
                            .x_row_stride = linear.in_channels(),
                            .y = y.data(),
                            .y_row_stride = linear.out_channels(),
                            .workspace = workspace.data(),
                            .workspace_bytes = workspace_bytes}));
  workspace.CheckFront();
  y.CheckFront();
  return Floats(y);
}

}  // namespace espalier::test
