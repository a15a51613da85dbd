// SPDX-License-Identifier: Apache-2.0
//
// Runs on a few SMs of a GPU, as MPS, a sliced GPU or another stream's work may leave them: nothing waits for
// what cannot be placed, and the bits are those of the whole GPU. The SMs are a green context's.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cuda/launch.h"
#include "gpu_test.h"
#include "support/elements.h"

namespace espalier {
namespace {

using test::kFirstGpu;
using test::MoeCall;
using test::PlacedBytes;
using test::PlacedCall;
using test::RandomCall;

// The least that a partition of any GPU may be asked for; it gets what its hardware can part with.
constexpr unsigned kAskedSms = 8;
constexpr unsigned kMaxSms = 16;

// One token is a row an expert and needs no pack, 8 are few rows, 64 many and 600, on a GPU that has that
// class, wide ones.
constexpr uint32_t kExperts = 96;
constexpr uint32_t kTopK = 8;
constexpr uint32_t kIntermediate = 256;
constexpr uint64_t kMoeTokens[] = {1, 8, 64, 600};
static_assert(cuda::DirectRows(1 * kTopK, kExperts, kIntermediate));
static_assert(!cuda::DirectRows(8 * kTopK, kExperts, kIntermediate));
static_assert(cuda::ClassOf(8 * kTopK, kExperts, 90) == cuda::RowClass::kFew);
static_assert(cuda::ClassOf(64 * kTopK, kExperts, 90) == cuda::RowClass::kMany);
static_assert(cuda::ClassOf(600 * kTopK, kExperts, 90) == cuda::RowClass::kWide);

constexpr uint64_t kLinearTokens[] = {1, 16, 144};
static_assert(cuda::LinearClassOf(1, 90) == cuda::RowClass::kFew);
static_assert(cuda::LinearClassOf(16, 90) == cuda::RowClass::kMany);
static_assert(cuda::LinearClassOf(144, 90) == cuda::RowClass::kWide);

// A function of the driver, which nothing here is linked with; null where the driver has none of that name.
template <typename Function>
Function DriverFunction(const char* name, unsigned cuda_version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, cuda_version, cudaEnableDefault, &found);
  if (error != cudaSuccess) cudaGetLastError();
  const bool usable = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
  return usable ? reinterpret_cast<Function>(function) : nullptr;
}

struct Driver {
  PFN_cuDeviceGet_v2000 device_get = DriverFunction<PFN_cuDeviceGet_v2000>("cuDeviceGet", 2000);
  PFN_cuDeviceGetDevResource_v12040 device_resource =
      DriverFunction<PFN_cuDeviceGetDevResource_v12040>("cuDeviceGetDevResource", 12040);
  PFN_cuDevSmResourceSplitByCount_v12040 split =
      DriverFunction<PFN_cuDevSmResourceSplitByCount_v12040>("cuDevSmResourceSplitByCount", 12040);
  PFN_cuDevResourceGenerateDesc_v12040 describe =
      DriverFunction<PFN_cuDevResourceGenerateDesc_v12040>("cuDevResourceGenerateDesc", 12040);
  PFN_cuGreenCtxCreate_v12040 create = DriverFunction<PFN_cuGreenCtxCreate_v12040>("cuGreenCtxCreate", 12040);
  PFN_cuGreenCtxDestroy_v12040 destroy =
      DriverFunction<PFN_cuGreenCtxDestroy_v12040>("cuGreenCtxDestroy", 12040);
  PFN_cuGreenCtxGetDevResource_v12040 context_resource =
      DriverFunction<PFN_cuGreenCtxGetDevResource_v12040>("cuGreenCtxGetDevResource", 12040);
  PFN_cuStreamGetGreenCtx_v12040 context_of =
      DriverFunction<PFN_cuStreamGetGreenCtx_v12040>("cuStreamGetGreenCtx", 12040);
  PFN_cuGreenCtxStreamCreate_v12050 stream_create =
      DriverFunction<PFN_cuGreenCtxStreamCreate_v12050>("cuGreenCtxStreamCreate", 12050);

  bool HasGreenContexts() const {
    return device_get != nullptr && device_resource != nullptr && split != nullptr && describe != nullptr &&
           create != nullptr && destroy != nullptr && context_resource != nullptr && context_of != nullptr &&
           stream_create != nullptr;
  }
};

// Some SMs of the first GPU and a stream that runs on no others.
class Partition {
 public:
  Partition(const Driver& driver, CUdevResource sms) : driver_(driver) {
    CUdevice device = 0;
    CUdevResourceDesc description = nullptr;
    EXPECT_EQ(driver_.device_get(&device, kFirstGpu.index), CUDA_SUCCESS);
    EXPECT_EQ(driver_.describe(&description, &sms, 1), CUDA_SUCCESS);
    EXPECT_EQ(driver_.create(&context_, description, device, CU_GREEN_CTX_DEFAULT_STREAM), CUDA_SUCCESS);
    EXPECT_EQ(driver_.stream_create(&stream_, context_, CU_STREAM_NON_BLOCKING, 0), CUDA_SUCCESS);
  }
  ~Partition() {
    if (stream_ != nullptr) {
      EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    }
    if (context_ != nullptr) {
      EXPECT_EQ(driver_.destroy(context_), CUDA_SUCCESS);
    }
  }
  Partition(const Partition&) = delete;
  Partition& operator=(const Partition&) = delete;

  cudaStream_t stream() const { return stream_; }

  // Those that the stream may use, by the driver's word.
  unsigned StreamSms() const {
    CUgreenCtx context = nullptr;
    CUdevResource resource = {};
    EXPECT_EQ(driver_.context_of(stream_, &context), CUDA_SUCCESS);
    EXPECT_NE(context, nullptr);
    if (context == nullptr) return 0;
    EXPECT_EQ(driver_.context_resource(context, &resource, CU_DEV_RESOURCE_TYPE_SM), CUDA_SUCCESS);
    return resource.sm.smCount;
  }

  void Synchronize() const { ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess); }

 private:
  const Driver& driver_;
  CUgreenCtx context_ = nullptr;
  CUstream stream_ = nullptr;
};

// A layer's call on a stream of the test's own.
class LayerOnStream {
 public:
  LayerOnStream(const PreparedExperts& experts, uint64_t tokens, uint64_t seed)
      : experts_(experts), call_(RandomCall(experts, tokens, kTopK, seed)) {
    call_.input = Dtype::kBF16;
    placed_ = PlacedCall::Create(experts_, call_, "cuda").value();
  }

  void Poison() { placed_->Fill(call_); }
  Result<void> Run(cudaStream_t stream) const {
    MoeArgs args = placed_->args();
    args.stream = stream;
    return RunMoe(placed_->plan(), experts_, args);
  }
  Result<void> RunOnAllSms() const { return Run(static_cast<cudaStream_t>(placed_->stream().get())); }
  // Of a run that is over, or on the stream of RunOnAllSms.
  std::vector<std::byte> Output() { return placed_->Finish().bytes; }

 private:
  const PreparedExperts& experts_;
  MoeCall call_;
  std::unique_ptr<PlacedCall> placed_;
};

// The same of a single matrix.
class LinearOnStream {
 public:
  LinearOnStream(const PreparedLinear& linear, uint64_t tokens, uint64_t seed)
      : linear_(linear),
        tokens_(tokens),
        plan_(LinearPlan::Create(linear, {.max_tokens = tokens, .device = kFirstGpu}).value()),
        x_bytes_(tokens * linear.in_channels() * sizeof(float)),
        y_bytes_(tokens * linear.out_channels() * sizeof(float)),
        work_bytes_(plan_.workspace_bytes()),
        x_(kFirstGpu, x_bytes_),
        y_(kFirstGpu, y_bytes_),
        work_(kFirstGpu, work_bytes_) {
    test::Random random(seed);
    for (size_t at = 0; at < x_bytes_.size(); at += sizeof(float))
      test::Encode(Dtype::kF32, random.Normal(), &x_bytes_[at]);
    x_.Push();
    Poison();
  }

  void Poison() {
    std::ranges::fill(y_bytes_, std::byte{0xFF});
    std::ranges::fill(work_bytes_, std::byte{0xFF});
    y_.Push();
    work_.Push();
  }
  Result<void> Run(cudaStream_t stream) {
    return RunLinear(plan_, linear_,
                     {.num_tokens = tokens_,
                      .x = x_.data(),
                      .x_row_stride = linear_.in_channels(),
                      .y = y_.data(),
                      .y_row_stride = linear_.out_channels(),
                      .workspace = work_.data(),
                      .workspace_bytes = work_bytes_.size(),
                      .stream = stream});
  }
  Result<void> RunOnAllSms() { return Run(static_cast<cudaStream_t>(stream_.get())); }
  std::vector<std::byte> Output() {
    EXPECT_TRUE(stream_.Synchronize());
    y_.Pull();
    return y_bytes_;
  }

 private:
  const PreparedLinear& linear_;
  uint64_t tokens_;
  LinearPlan plan_;
  std::vector<std::byte> x_bytes_, y_bytes_, work_bytes_;
  PlacedBytes x_, y_, work_;
  cuda::Stream stream_ = cuda::Stream::Create(kFirstGpu).value();
};

// Captures a run on the partition's stream and launches the graph there.
template <typename Work>
void RunAsGraph(Work& work, const Partition& partition) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(partition.stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  const Result<void> enqueued = work.Run(partition.stream());
  ASSERT_EQ(cudaStreamEndCapture(partition.stream(), &graph), cudaSuccess);
  ASSERT_TRUE(enqueued) << enqueued.error().message();
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  ASSERT_EQ(cudaGraphLaunch(executable, partition.stream()), cudaSuccess);
  partition.Synchronize();
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

class CudaPartition : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    if (!driver_.HasGreenContexts()) GTEST_SKIP() << "the driver has no green contexts (CUDA 12.5)";
    ASSERT_EQ(cudaSetDevice(kFirstGpu.index), cudaSuccess);
    CUdevice device = 0;
    ASSERT_EQ(driver_.device_get(&device, kFirstGpu.index), CUDA_SUCCESS);
    CUdevResource all = {};
    const CUresult result = driver_.device_resource(device, &all, CU_DEV_RESOURCE_TYPE_SM);
    // Where the device itself is a part already: MPS, virtual GPUs.
    if (result == CUDA_ERROR_NOT_SUPPORTED || result == CUDA_ERROR_NOT_PERMITTED)
      GTEST_SKIP() << "the driver gives no green contexts on this GPU: error " << result;
    ASSERT_EQ(result, CUDA_SUCCESS);
    if (all.sm.smCount <= 2 * kMaxSms)
      GTEST_SKIP() << "the GPU has " << all.sm.smCount << " SMs; this needs more than " << 2 * kMaxSms;
    CUdevResource parts[2] = {};
    unsigned count = 2;
    ASSERT_EQ(driver_.split(parts, &count, &all, nullptr, 0, kAskedSms), CUDA_SUCCESS);
    ASSERT_EQ(count, 2u);
    for (const CUdevResource& part : parts) {
      partitions_.push_back(std::make_unique<Partition>(driver_, part));
      ASSERT_GE(partitions_.back()->StreamSms(), 1u);
      ASSERT_LE(partitions_.back()->StreamSms(), kMaxSms);
    }
  }

  const Partition& partition(size_t index) const { return *partitions_[index]; }

  template <typename Work>
  static std::vector<std::byte> OnAllSms(Work& work) {
    EXPECT_TRUE(work.RunOnAllSms());
    return work.Output();
  }

  // Eagerly and as a graph, each over poisoned memory.
  template <typename Work>
  void ExpectTheBitsOfAllSms(Work& work) {
    const std::vector<std::byte> expected = OnAllSms(work);
    work.Poison();
    ASSERT_TRUE(work.Run(partition(0).stream()));
    partition(0).Synchronize();
    EXPECT_EQ(work.Output(), expected) << "eager";
    work.Poison();
    RunAsGraph(work, partition(0));
    EXPECT_EQ(work.Output(), expected) << "graph";
  }

  // Runs of both at once, on a partition and over a workspace each.
  template <typename First, typename Second>
  void ExpectTheBitsOfAllSmsSideBySide(First& first, Second& second) {
    const std::vector<std::byte> expected_first = OnAllSms(first);
    const std::vector<std::byte> expected_second = OnAllSms(second);
    first.Poison();
    second.Poison();
    for (int round = 0; round < 20; ++round) {
      ASSERT_TRUE(first.Run(partition(0).stream()));
      ASSERT_TRUE(second.Run(partition(1).stream()));
    }
    partition(0).Synchronize();
    partition(1).Synchronize();
    EXPECT_EQ(first.Output(), expected_first);
    EXPECT_EQ(second.Output(), expected_second);
  }

  static PreparedExperts Layer() {
    return OnGpu(test::MakeExperts({.experts = kExperts,
                                    .hidden_channels = 384,
                                    .activation = {},
                                    .segments = {{.channels = kIntermediate}},
                                    .format = MixedFormat,
                                    .seed = 17}));
  }
  static PreparedLinear Linear() {
    return ToDevice(test::MakeLinear(2048, 2048, 0, 0, {.bits = 3, .codebook = Codebook::kMcg}, 3), kFirstGpu)
        .value();
  }

 private:
  Driver driver_;
  std::vector<std::unique_ptr<Partition>> partitions_;
};

TEST_F(CudaPartition, ALayerHasTheSameBitsOnFewSms) {
  const PreparedExperts experts = Layer();
  for (const uint64_t tokens : kMoeTokens) {
    SCOPED_TRACE(fmt::format("{} tokens", tokens));
    LayerOnStream layer(experts, tokens, 3);
    ExpectTheBitsOfAllSms(layer);
  }
}

TEST_F(CudaPartition, ALinearHasTheSameBitsOnFewSms) {
  const PreparedLinear linear = Linear();
  for (const uint64_t tokens : kLinearTokens) {
    SCOPED_TRACE(fmt::format("{} tokens", tokens));
    LinearOnStream work(linear, tokens, 3);
    ExpectTheBitsOfAllSms(work);
  }
}

TEST_F(CudaPartition, TwoPartitionsSideBySide) {
  const PreparedExperts experts = Layer();
  const PreparedLinear linear = Linear();
  LayerOnStream wide(experts, 600, 3), few(experts, 8, 4);
  LinearOnStream matrix(linear, 144, 5);
  ExpectTheBitsOfAllSmsSideBySide(wide, few);
  ExpectTheBitsOfAllSmsSideBySide(matrix, wide);
}

}  // namespace
}  // namespace espalier
