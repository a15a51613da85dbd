// SPDX-License-Identifier: Apache-2.0
//
// The choice of an executor can be forced, and the forced one is the one that runs.
#include <espalier/backend.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

#include "support/random_experts.h"

namespace espalier {
namespace {

using test::MakeExperts;
using test::RandomCall;
using test::RunCall;

class ForcedBackend {
 public:
  explicit ForcedBackend(const char* name) { setenv("ESPALIER_FORCE_BACKEND", name, 1); }
  ~ForcedBackend() { unsetenv("ESPALIER_FORCE_BACKEND"); }
};

PreparedExperts SmallExperts() { return MakeExperts({.experts = 2, .hidden_channels = 128}); }

// Runs one call and gives the name of the executor whose counter moved.
std::string WhoRuns(const std::string& executor) {
  const PreparedExperts experts = SmallExperts();
  std::map<std::string, uint64_t> before;
  for (const Backend* backend : Backends()) before[std::string(backend->name())] = backend->num_runs();
  RunCall(experts, RandomCall(experts, 2, 1, 1), executor);
  std::string ran;
  for (const Backend* backend : Backends()) {
    if (backend->num_runs() != before[std::string(backend->name())]) ran += backend->name();
  }
  return ran;
}

TEST(Backends, ListEndsInTheReference) {
  ASSERT_GE(Backends().size(), 2u);
  EXPECT_EQ(Backends().back()->name(), "reference");
  for (const Backend* backend : Backends()) {
    EXPECT_FALSE(backend->description().empty());
    if (!backend->Usable()) continue;  // a GPU's, on a machine without one
    EXPECT_EQ(BackendByName(backend->name()).value(), backend);
  }
}

TEST(Backends, BestOneThatSupportsThePackageRuns) {
  unsetenv("ESPALIER_FORCE_BACKEND");
  EXPECT_EQ(WhoRuns(""), "cpu");
  // Only the reference writes doubles.
  const MoePlan plan = MoePlan::Create(SmallExperts(), {.output = Dtype::kF64}).value();
  EXPECT_EQ(plan.backend().name(), "reference");
}

TEST(Backends, ExecutorOptionForces) {
  EXPECT_EQ(WhoRuns("cpu"), "cpu");
  EXPECT_EQ(WhoRuns("reference"), "reference");
}

TEST(Backends, EnvironmentForces) {
  {
    const ForcedBackend forced("reference");
    EXPECT_EQ(WhoRuns(""), "reference");
    // What the caller names wins: the oracle must stay the oracle, whatever the environment says.
    EXPECT_EQ(WhoRuns("cpu"), "cpu");
  }
  const ForcedBackend empty("");
  EXPECT_EQ(WhoRuns(""), "cpu");
}

TEST(Backends, EnvironmentForcesLinearsToo) {
  const PreparedLinear linear = test::MakeLinear(128, 128, 0, 0, {}, 1);
  const ForcedBackend forced("reference");
  EXPECT_EQ(LinearPlan::Create(linear, {}).value().backend().name(), "reference");
}

TEST(Backends, UnknownNamesAreRefusedWithTheList) {
  const Result<const Backend*> unknown = BackendByName("gpu");
  ASSERT_FALSE(unknown);
  EXPECT_EQ(unknown.error().code(), StatusCode::kUsage);
  const std::string cuda = CudaRuntimeVersion() != 0 ? "cuda, " : "";
  EXPECT_EQ(unknown.error().message(), "unknown executor 'gpu'; legal: " + cuda + "cpu, reference");
  const Result<MoePlan> plan = MoePlan::Create(SmallExperts(), {.executor = "gpu"});
  ASSERT_FALSE(plan);
  EXPECT_EQ(plan.error().code(), StatusCode::kUsage);
  const ForcedBackend forced("gpu");
  EXPECT_EQ(MoePlan::Create(SmallExperts(), {}).error().code(), StatusCode::kUsage);
}

TEST(Backends, CudaIsADeviceErrorWhereItCannotRun) {
  const Result<std::vector<DeviceInfo>> devices = CudaDevices();
  if (devices) GTEST_SKIP() << "there is a GPU here";
  const Result<const Backend*> cuda = BackendByName("cuda");
  ASSERT_FALSE(cuda);
  EXPECT_EQ(cuda.error().code(), StatusCode::kDevice);
  const char* reason = CudaRuntimeVersion() != 0 ? "no usable GPU" : "this build has no CUDA";
  EXPECT_THAT(cuda.error().message(), testing::HasSubstr(reason));
  EXPECT_THAT(devices.error().message(), testing::HasSubstr(reason));
  // A package of the host for it is the same error, and so is a plan that names a GPU only.
  EXPECT_EQ(MoePlan::Create(SmallExperts(), {.executor = "cuda"}).error().code(), StatusCode::kDevice);
  const Result<MoePlan> plan =
      MoePlan::Create(SmallExperts().table(), {.device = {.type = DeviceType::kCuda}});
  ASSERT_FALSE(plan);
  EXPECT_EQ(plan.error().code(), StatusCode::kDevice);
  EXPECT_THAT(plan.error().message(), testing::HasSubstr(reason));
}

// A forced executor that cannot do it is an error, never another executor.
TEST(Backends, NoSilentFallback) {
  const Result<MoePlan> plan = MoePlan::Create(SmallExperts(), {.output = Dtype::kF64, .executor = "cpu"});
  ASSERT_FALSE(plan);
  EXPECT_EQ(plan.error().code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace espalier
