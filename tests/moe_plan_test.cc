// SPDX-License-Identifier: Apache-2.0
//
// What plans and calls refuse, and that a refused call writes nothing.
#include <espalier/backend.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "support/random_experts.h"

namespace espalier {
namespace {

using test::ExpertsSpec;
using test::MakeExperts;
using test::MakeLinear;
using testing::HasSubstr;

PreparedExperts SmallExperts(uint32_t experts = 3) {
  return MakeExperts({.experts = experts, .hidden_channels = 128});
}

StatusCode CodeOf(const Result<MoePlan>& plan) { return plan ? StatusCode{} : plan.error().code(); }

TEST(MoePlan, RefusesOptionsOutOfRange) {
  const PreparedExperts experts = SmallExperts();
  EXPECT_EQ(CodeOf(MoePlan::Create(experts, {.max_tokens = kMaxPlanTokens + 1})), StatusCode::kCapacity);
  EXPECT_EQ(CodeOf(MoePlan::Create(experts, {.top_k = 0})), StatusCode::kGeometry);
  EXPECT_EQ(CodeOf(MoePlan::Create(experts, {.top_k = kMaxTopK + 1})), StatusCode::kGeometry);
  EXPECT_EQ(CodeOf(MoePlan::Create(experts, {.num_threads = -1})), StatusCode::kUsage);
  EXPECT_EQ(CodeOf(MoePlan::Create(experts, {.num_threads = 1 << 30})), StatusCode::kUsage);
  EXPECT_TRUE(MoePlan::Create(experts, {.max_tokens = kMaxPlanTokens, .top_k = kMaxTopK}));
  EXPECT_TRUE(MoePlan::Create(experts, {.max_tokens = 0}));
}

TEST(MoePlan, RefusesTypesAndModesWithAReason) {
  const PreparedExperts experts = SmallExperts();
  for (const std::string executor : {"cpu", "reference"}) {
    EXPECT_EQ(CodeOf(MoePlan::Create(experts, {.input = Dtype::kI32, .executor = executor})),
              StatusCode::kUnsupported);
    EXPECT_EQ(CodeOf(MoePlan::Create(experts, {.output = Dtype::kI32, .executor = executor})),
              StatusCode::kUnsupported);
  }
  EXPECT_EQ(CodeOf(MoePlan::Create(experts, {.output = Dtype::kF64, .executor = "cpu"})),
            StatusCode::kUnsupported);
  for (const CpuMode mode : {CpuMode::kExact, CpuMode::kFast, CpuMode::kInt8}) {
    EXPECT_EQ(MoePlan::Create(experts, {.mode = mode}).value().backend().name(), "cpu");
    EXPECT_EQ(MoePlan::Create(experts, {.mode = mode}).value().options().mode, mode);
  }
  for (const CpuMode mode : {CpuMode::kExact, CpuMode::kInt8}) {
    // Asking for a mode is asking for the cpu executor: no other one steps in.
    const Result<MoePlan> plan = MoePlan::Create(experts, {.output = Dtype::kF64, .mode = mode});
    ASSERT_FALSE(plan);
    EXPECT_THAT(plan.error().message(), HasSubstr("cpu executor"));
  }
}

TEST(MoePlan, DescribesThePackage) {
  const PreparedExperts experts =
      MakeExperts({.experts = 4, .hidden_channels = 256, .segments = {{.channels = 128}, {.channels = 384}}});
  const MoePlan plan = MoePlan::Create(experts, {.max_tokens = 9, .top_k = 2}).value();
  EXPECT_EQ(plan.num_segments(), 8u);
  EXPECT_EQ(plan.max_segments_per_expert(), 2u);
  EXPECT_EQ(plan.max_intermediate_channels(), 384u);
  EXPECT_EQ(plan.geometry(), experts.geometry());
  EXPECT_EQ(plan.workspace_bytes(), plan.backend().WorkspaceBytes(experts.table(), plan.options()).value());
  EXPECT_GT(plan.workspace_bytes(), 0u);
  EXPECT_GE(plan.options().num_threads, 1);
}

TEST(MoePlan, WorkspaceIsBoundedForAnyCapacity) {
  const PreparedExperts experts = SmallExperts();
  for (const std::string executor : {"cpu", "reference"}) {
    const auto bytes = [&](uint64_t tokens, uint32_t top_k = 8) {
      return MoePlan::Create(experts, {.max_tokens = tokens, .top_k = top_k, .executor = executor})
          .value()
          .workspace_bytes();
    };
    EXPECT_LE(bytes(1), bytes(64));
    EXPECT_EQ(bytes(4096), bytes(kMaxPlanTokens));  // tokens are taken in chunks
    EXPECT_LT(bytes(kMaxPlanTokens), uint64_t{64} << 20);
    EXPECT_LT(bytes(kMaxPlanTokens, kMaxTopK), uint64_t{64} << 20);
  }
}

// A legal call, to be spoilt in one place at a time.
class RefusedCalls : public testing::TestWithParam<std::string> {
 protected:
  RefusedCalls() {
    args_ = {.num_tokens = 4,
             .x = x_.data(),
             .x_row_stride = 128,
             .topk_ids = ids_.data(),
             .topk_ids_row_stride = 2,
             .topk_weights = weights_.data(),
             .topk_weights_row_stride = 2,
             .y = y_.data(),
             .y_row_stride = 128,
             .workspace = workspace_.data(),
             .workspace_bytes = plan_.workspace_bytes()};
  }

  // Runs the call; a refusal must leave output and workspace as they were.
  StatusCode Refusal(const PreparedExperts& experts) {
    std::memset(workspace_.data(), 0x5A, workspace_.size_bytes());
    y_.assign(y_.size(), 7.0f);
    const Result<void> run = RunMoe(plan_, experts, args_);
    if (run) return StatusCode{};
    message_ = run.error().message();
    EXPECT_THAT(y_, testing::Each(7.0f));
    for (const std::byte byte : workspace_.span()) EXPECT_EQ(byte, std::byte{0x5A});
    return run.error().code();
  }
  StatusCode Refusal() { return Refusal(experts_); }

  PreparedExperts experts_ = SmallExperts();
  MoePlan plan_ =
      MoePlan::Create(
          experts_,
          {.max_tokens = 4, .top_k = 2, .checked_ids = true, .executor = GetParam(), .num_threads = 1})
          .value();
  HostBuffer workspace_ = HostBuffer::Create(plan_.workspace_bytes() + 64).value();
  std::vector<float> x_ = std::vector<float>(5 * 128, 1.0f);
  std::vector<int32_t> ids_ = {0, 1, 2, -1, 0, 0, 1, 2, 0, 0};
  std::vector<float> weights_ = std::vector<float>(10, 0.5f);
  std::vector<float> y_ = std::vector<float>(5 * 128);
  MoeArgs args_;
  std::string message_;
};
INSTANTIATE_TEST_SUITE_P(Backends, RefusedCalls, testing::Values("cpu", "reference"),
                         [](const auto& parameter) { return parameter.param; });

TEST_P(RefusedCalls, TheCallItselfIsLegal) { EXPECT_EQ(Refusal(), StatusCode{}); }

TEST_P(RefusedCalls, Capacity) {
  args_.num_tokens = 5;
  EXPECT_EQ(Refusal(), StatusCode::kCapacity);
  EXPECT_EQ(message_, "5 tokens; the plan was made for at most 4");
  args_.num_tokens = 4;
  args_.workspace_bytes -= 1;
  EXPECT_EQ(Refusal(), StatusCode::kCapacity);
}

TEST_P(RefusedCalls, NullPointers) {
  const MoeArgs legal = args_;
  for (const int argument : {0, 1, 2, 3, 4}) {
    args_ = legal;
    if (argument == 0) args_.x = nullptr;
    if (argument == 1) args_.topk_ids = nullptr;
    if (argument == 2) args_.topk_weights = nullptr;
    if (argument == 3) args_.y = nullptr;
    if (argument == 4) args_.workspace = nullptr;
    EXPECT_EQ(Refusal(), StatusCode::kUsage) << argument;
    EXPECT_THAT(message_, HasSubstr("is null"));
  }
}

TEST_P(RefusedCalls, Alignment) {
  args_.workspace = workspace_.data() + 32;
  EXPECT_EQ(Refusal(), StatusCode::kUsage);
  args_.workspace = workspace_.data();
  args_.x = reinterpret_cast<const std::byte*>(x_.data()) + 1;
  EXPECT_EQ(Refusal(), StatusCode::kUsage);
}

TEST_P(RefusedCalls, Strides) {
  const MoeArgs legal = args_;
  for (const uint64_t MoeArgs::* stride : {&MoeArgs::x_row_stride, &MoeArgs::topk_ids_row_stride,
                                           &MoeArgs::topk_weights_row_stride, &MoeArgs::y_row_stride}) {
    for (const uint64_t wrong : {legal.*stride - 1, uint64_t{0}, ~uint64_t{0}, uint64_t{1} << 60}) {
      args_ = legal;
      args_.*const_cast<uint64_t MoeArgs::*>(stride) = wrong;
      EXPECT_EQ(Refusal(), StatusCode::kGeometry) << wrong;
    }
  }
}

TEST_P(RefusedCalls, CheckedIds) {
  ids_[5] = 3;
  EXPECT_EQ(Refusal(), StatusCode::kGeometry);
  EXPECT_EQ(message_, "topk_ids[2][1] is 3; legal: -1 and 0 to 2");
  ids_[5] = -2;
  EXPECT_EQ(Refusal(), StatusCode::kGeometry);
}

TEST_P(RefusedCalls, AnotherPackage) {
  EXPECT_EQ(Refusal(SmallExperts(4)), StatusCode::kGeometry);
  EXPECT_EQ(Refusal(MakeExperts({.experts = 3, .hidden_channels = 256})), StatusCode::kGeometry);
  EXPECT_EQ(Refusal(MakeExperts({.experts = 3, .hidden_channels = 128, .segments = {{.channels = 256}}})),
            StatusCode::kGeometry);
  EXPECT_EQ(Refusal(MakeExperts({.experts = 3, .hidden_channels = 128, .segments = {{}, {}}})),
            StatusCode::kGeometry);
  EXPECT_EQ(Refusal(MakeExperts({.experts = 3, .hidden_channels = 128, .activation = {.limit = 2}})),
            StatusCode::kGeometry);
  EXPECT_THAT(message_, HasSubstr("random experts"));
  // Other weights of the same geometry are welcome.
  EXPECT_EQ(Refusal(MakeExperts({.experts = 3, .hidden_channels = 128, .seed = 99})), StatusCode{});
}

TEST_P(RefusedCalls, NoTokensTouchNothing) {
  const uint64_t runs = plan_.backend().num_runs();
  EXPECT_TRUE(RunMoe(plan_, experts_, {}));
  EXPECT_EQ(plan_.backend().num_runs(), runs);
}

}  // namespace
}  // namespace espalier
