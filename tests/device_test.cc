// SPDX-License-Identifier: Apache-2.0
//
// Devices without a GPU: names, memory, and what is refused before anything is touched.
#include <espalier/espalier.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cuda/device_runtime.h"
#include "support/random_experts.h"

namespace espalier {
namespace {

using test::MakeExperts;
using test::MakeLinear;
using testing::AllOf;
using testing::HasSubstr;

constexpr Device kGpu = {.type = DeviceType::kCuda, .index = 0};
// More than any machine has.
constexpr Device kNoGpu = {.type = DeviceType::kCuda, .index = 999};

template <typename T>
StatusCode CodeOf(const Result<T>& result) {
  return result ? StatusCode{} : result.error().code();
}

TEST(Device, ParsesAndPrints) {
  EXPECT_EQ(ParseDevice("cpu").value(), Device{});
  EXPECT_EQ(ParseDevice("cuda").value(), kGpu);
  EXPECT_EQ(ParseDevice("cuda:0").value(), kGpu);
  EXPECT_EQ(ParseDevice("cuda:17").value(), (Device{.type = DeviceType::kCuda, .index = 17}));
  for (const char* text : {"cpu", "cuda:0", "cuda:17"})
    EXPECT_EQ(DeviceText(ParseDevice(text).value()), text);
  for (const char* text : {"", "CPU", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:+1", "cuda: 1", "cuda:1x",
                           "cuda1", "cuda:99999", "cuda:4294967296", "cpu:0"}) {
    const Result<Device> device = ParseDevice(text);
    ASSERT_FALSE(device) << text;
    EXPECT_EQ(device.error().code(), StatusCode::kUsage);
    EXPECT_EQ(device.error().message(), "device '" + std::string(text) + "'; legal: cpu, cuda, cuda:INDEX");
  }
  EXPECT_EQ(CudaVersionText(13020), "13.2");
  EXPECT_EQ(CudaVersionText(12080), "12.8");
}

TEST(Device, TheListIsNeverEmpty) {
  const Result<std::vector<DeviceInfo>> devices = CudaDevices();
  if (!devices) {
    EXPECT_EQ(devices.error().code(), StatusCode::kDevice);
    EXPECT_FALSE(devices.error().message().empty());
    EXPECT_EQ(CodeOf(cuda::LimitsOf(kGpu)), StatusCode::kDevice);
    return;
  }
  ASSERT_FALSE(devices->empty());
  for (size_t i = 0; i < devices->size(); ++i) {
    const DeviceInfo& info = (*devices)[i];
    EXPECT_EQ(info.index, static_cast<int>(i));
    EXPECT_FALSE(info.name.empty());
    EXPECT_GT(info.compute_capability, 10);
    EXPECT_GT(info.num_sms, 0);
    EXPECT_GT(info.memory_bytes, 0u);
    EXPECT_GT(info.driver_version, 0);
    EXPECT_EQ(info.runtime_version, CudaRuntimeVersion());
  }
}

TEST(DeviceBuffer, OnTheHostIsAHostBuffer) {
  DeviceBuffer buffer = DeviceBuffer::Create({}, 1000).value();
  EXPECT_TRUE(buffer.device().is_host());
  EXPECT_EQ(buffer.size_bytes(), 1000u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 256, 0u);
  std::memset(buffer.data(), 1, 1000);
  std::byte* data = buffer.data();
  DeviceBuffer moved = std::move(buffer);
  EXPECT_EQ(moved.data(), data);
  EXPECT_EQ(moved.size_bytes(), 1000u);
  DeviceBuffer assigned;
  EXPECT_EQ(assigned.data(), nullptr);
  assigned = std::move(moved);
  EXPECT_EQ(assigned.data(), data);
}

TEST(DeviceBuffer, AdoptedMemoryIsHandedBackOnce) {
  std::byte memory[64];
  for (const Device& device : {Device{}, kGpu}) {
    int returned = 0;
    const auto release = [&](std::byte* data) {
      EXPECT_EQ(data, memory);
      ++returned;
    };
    {
      DeviceBuffer first = DeviceBuffer::Adopt(device, memory, sizeof(memory), release);
      EXPECT_EQ(first.device(), device);
      DeviceBuffer second = std::move(first);
      first = DeviceBuffer();
      EXPECT_EQ(second.data(), memory);
      EXPECT_EQ(second.device(), device);
      EXPECT_EQ(returned, 0);
    }
    EXPECT_EQ(returned, 1) << DeviceText(device);
  }
}

TEST(DeviceBuffer, OfADeviceThatIsNotThereIsADeviceError) {
  EXPECT_EQ(CodeOf(DeviceBuffer::Create(kNoGpu, 64)), StatusCode::kDevice);
  EXPECT_EQ(CodeOf(DeviceBuffer::Create(kNoGpu, 0)), StatusCode::kDevice);
  const Result<PreparedExperts> experts =
      ToDevice(MakeExperts({.experts = 1, .hidden_channels = 128}), kNoGpu);
  ASSERT_FALSE(experts);
  EXPECT_EQ(experts.error().code(), StatusCode::kDevice);
  EXPECT_THAT(experts.error().message(), HasSubstr("random experts"));
  EXPECT_EQ(CodeOf(ToDevice(MakeLinear(128, 128, 0, 0, {}, 1), kNoGpu)), StatusCode::kDevice);
  EXPECT_EQ(CodeOf(cuda::LimitsOf(kNoGpu)), StatusCode::kDevice);
  EXPECT_EQ(CodeOf(cuda::Stream::Create(kNoGpu)), StatusCode::kDevice);
  EXPECT_EQ(CodeOf(cuda::Timer::Create(kNoGpu)), StatusCode::kDevice);
}

// A copy on the same device is a package of its own.
TEST(ToDevice, FromHostToHostCopies) {
  const PreparedExperts experts = MakeExperts({.experts = 2, .hidden_channels = 128});
  const PreparedExperts copy = ToDevice(experts, {}).value();
  EXPECT_NE(copy.slab(), experts.slab());
  ASSERT_EQ(copy.slab_bytes(), experts.slab_bytes());
  EXPECT_EQ(std::memcmp(copy.slab(), experts.slab(), copy.slab_bytes()), 0);
  EXPECT_EQ(copy.device_table().size_bytes(), 0u);
  const test::MoeCall call = test::RandomCall(experts, 3, 2, 1);
  EXPECT_EQ(test::RunCall(copy, call, "cpu").bytes, test::RunCall(experts, call, "cpu").bytes);
}

TEST(DevicePlans, RefuseAnExecutorOfAnotherDevice) {
  const PreparedExperts experts = MakeExperts({.experts = 2, .hidden_channels = 128});
  for (const char* executor : {"cpu", "reference"}) {
    const Result<MoePlan> plan = MoePlan::Create(experts.table(), {.device = kGpu, .executor = executor});
    ASSERT_FALSE(plan);
    EXPECT_EQ(plan.error().code(), StatusCode::kDevice);
    EXPECT_THAT(plan.error().message(),
                AllOf(HasSubstr(executor), HasSubstr("runs on the host"), HasSubstr("cuda:0")));
  }
  EXPECT_EQ(CodeOf(MoePlan::Create(experts, {.executor = "cuda"})), StatusCode::kDevice);
}

TEST(DevicePlans, RefuseAPackageOfAnotherDevice) {
  const PreparedExperts experts = MakeExperts({.experts = 2, .hidden_channels = 128});
  const Result<MoePlan> plan = MoePlan::Create(experts, {.device = kGpu});
  ASSERT_FALSE(plan);
  EXPECT_EQ(plan.error().code(), StatusCode::kDevice);
  EXPECT_THAT(plan.error().message(), AllOf(HasSubstr("random experts"), HasSubstr("on cpu"),
                                            HasSubstr("cuda:0"), HasSubstr("ToDevice")));
  EXPECT_EQ(CodeOf(LinearPlan::Create(MakeLinear(128, 128, 0, 0, {}, 1), {.device = kGpu})),
            StatusCode::kDevice);
}

TEST(DevicePlans, RefuseCheckedIdsOnAGpu) {
  const PreparedExperts experts = MakeExperts({.experts = 2, .hidden_channels = 128});
  const Result<MoePlan> plan = MoePlan::Create(experts.table(), {.checked_ids = true, .device = kGpu});
  ASSERT_FALSE(plan);
  EXPECT_EQ(plan.error().code(), StatusCode::kUnsupported);
  EXPECT_THAT(plan.error().message(), HasSubstr("does not wait"));
}

TEST(DevicePlans, ModesAreOfTheCpuExecutor) {
  const PreparedExperts experts = MakeExperts({.experts = 2, .hidden_channels = 128});
  EXPECT_EQ(CodeOf(MoePlan::Create(experts.table(), {.device = kGpu, .mode = CpuMode::kExact})),
            StatusCode::kDevice);
}

TEST(DeviceRuns, RefuseAStreamOnTheHost) {
  const PreparedExperts experts = MakeExperts({.experts = 2, .hidden_channels = 128});
  const MoePlan plan = MoePlan::Create(experts, {.max_tokens = 1}).value();
  HostBuffer workspace = HostBuffer::Create(plan.workspace_bytes()).value();
  const std::vector<float> x(128, 1.0f);
  std::vector<float> y(128, 7.0f);
  const int32_t id = 0;
  const float weight = 1;
  MoeArgs args = {.num_tokens = 1,
                  .x = x.data(),
                  .x_row_stride = 128,
                  .topk_ids = &id,
                  .topk_ids_row_stride = 1,
                  .topk_weights = &weight,
                  .topk_weights_row_stride = 1,
                  .y = y.data(),
                  .y_row_stride = 128,
                  .workspace = workspace.data(),
                  .workspace_bytes = plan.workspace_bytes()};
  args.stream = &workspace;
  EXPECT_EQ(CodeOf(RunMoe(plan, experts, args)), StatusCode::kUsage);
  EXPECT_THAT(y, testing::Each(7.0f));
  args.stream = nullptr;
  EXPECT_TRUE(RunMoe(plan, experts, args));

  const PreparedLinear linear = MakeLinear(128, 128, 0, 0, {}, 1);
  const LinearPlan linear_plan = LinearPlan::Create(linear, {.max_tokens = 1}).value();
  HostBuffer linear_workspace = HostBuffer::Create(linear_plan.workspace_bytes()).value();
  LinearArgs linear_args = {.num_tokens = 1,
                            .x = x.data(),
                            .x_row_stride = 128,
                            .y = y.data(),
                            .y_row_stride = 128,
                            .workspace = linear_workspace.data(),
                            .workspace_bytes = linear_plan.workspace_bytes()};
  linear_args.stream = &workspace;
  EXPECT_EQ(CodeOf(RunLinear(linear_plan, linear, linear_args)), StatusCode::kUsage);
  linear_args.stream = nullptr;
  EXPECT_TRUE(RunLinear(linear_plan, linear, linear_args));
}

// Memory that only claims to be a GPU's: it must be refused before it is read.
TEST(DevicePackages, AreNotReadOnTheHost) {
  const PreparedLinear host = MakeLinear(128, 128, 0, 0, {}, 1);
  DeviceBuffer claimed = DeviceBuffer::Adopt(kGpu, nullptr, host.slab_bytes(), [](std::byte*) {});
  const PreparedLinear linear =
      PreparedLinear::Create(host.matrix(), 0, 0, std::move(claimed), "a linear").value();
  EXPECT_EQ(linear.device(), kGpu);
  const Result<std::vector<float>> weights = DecodeMatrix(linear, false);
  ASSERT_FALSE(weights);
  EXPECT_EQ(weights.error().code(), StatusCode::kDevice);
  EXPECT_THAT(weights.error().message(), AllOf(HasSubstr("a linear"), HasSubstr("cuda:0")));
  for (const char* executor : {"cpu", "reference", ""})
    EXPECT_EQ(CodeOf(LinearPlan::Create(linear, {.executor = executor})), StatusCode::kDevice);
  const LinearPlan plan = LinearPlan::Create(host, {.max_tokens = 1}).value();
  EXPECT_EQ(CodeOf(RunLinear(plan, linear, {.num_tokens = 1})), StatusCode::kDevice);
}

TEST(DeviceLoads, RefuseWhatCannotBe) {
  const Checkpoint checkpoint = Checkpoint::Open(ESPALIER_BUNDLED_CHECKPOINT).value();
  const Result<PreparedExperts> absent = LoadExperts(checkpoint, 0, {.device = kNoGpu});
  ASSERT_FALSE(absent);
  EXPECT_EQ(absent.error().code(), StatusCode::kDevice);
  EXPECT_THAT(absent.error().message(), HasSubstr("layer 0"));
  LoadOptions options = {.device = kGpu};
  options.allocate = [](uint64_t size_bytes) { return HostBuffer::Create(size_bytes); };
  EXPECT_EQ(CodeOf(LoadExperts(checkpoint, 0, options)), StatusCode::kUsage);
}

// Memory on the host for a GPU's slab is bounded by what was asked for, and foretold without a GPU.
TEST(DeviceLoads, StagingIsBounded) {
  const Checkpoint checkpoint = Checkpoint::Open(ESPALIER_BUNDLED_CHECKPOINT).value();
  const ExtentPlan plan = ExtentPlan::Create(checkpoint, {.tp = 2}).value();
  for (const uint64_t staging :
       {uint64_t{64} << 10, uint64_t{256} << 10, uint64_t{1} << 20, uint64_t{64} << 20}) {
    for (const int threads : {1, 2, 7, 64}) {
      const LoadOptions options = {.device = kGpu, .staging_bytes = staging, .num_threads = threads};
      const Result<LoadSizes> sizes = SizeExperts(checkpoint, plan, 0, 0, options);
      ASSERT_TRUE(sizes) << sizes.error().message();
      EXPECT_GT(sizes->staging_bytes, 0u);
      EXPECT_LE(sizes->staging_bytes, staging) << threads << " threads";
    }
  }
}

}  // namespace
}  // namespace espalier
