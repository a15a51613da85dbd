// SPDX-License-Identifier: Apache-2.0
//
// Sums between GPUs. Here a world of one, on any machine with a GPU; several GPUs, one a rank, are started as
// `mpirun -n N nccl_test`, where every rank runs the same cases.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "dist/nccl_communicator.h"
#include "dist/world.h"

namespace espalier {
namespace {

// The processes of this test, joined once.
Communicator& Bootstrap() {
  static const Result<World> world = JoinWorld();
  if (!world) {
    ADD_FAILURE() << world.error().message();
    std::exit(1);
  }
  return *world->communicator;
}

class DeviceFloats {
 public:
  explicit DeviceFloats(const std::vector<float>& values) : size_(values.size()) {
    EXPECT_EQ(cudaMalloc(&data_, size_ * sizeof(float) + 1), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, values.data(), size_ * sizeof(float), cudaMemcpyHostToDevice), cudaSuccess);
  }
  DeviceFloats(const DeviceFloats&) = delete;
  DeviceFloats& operator=(const DeviceFloats&) = delete;
  ~DeviceFloats() { cudaFree(data_); }

  std::span<float> span() { return {static_cast<float*>(data_), size_}; }
  std::vector<float> Read() const {
    std::vector<float> values(size_);
    EXPECT_EQ(cudaMemcpy(values.data(), data_, size_ * sizeof(float), cudaMemcpyDeviceToHost), cudaSuccess);
    return values;
  }

 private:
  void* data_ = nullptr;
  size_t size_;
};

class Nccl : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    const cudaError_t found = cudaGetDeviceCount(&devices);
    if (found != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "no GPU here: " << cudaGetErrorString(found);
    }
    if (devices < Bootstrap().world())
      GTEST_SKIP() << devices << " GPUs for " << Bootstrap().world() << " ranks";
    device_ = Bootstrap().rank();
    ASSERT_EQ(cudaSetDevice(device_), cudaSuccess);
    auto communicator = NcclCommunicator(Bootstrap(), {.device = device_, .stream = nullptr});
    ASSERT_TRUE(communicator) << communicator.error().message();
    communicator_ = *std::move(communicator);
  }

  // Whole numbers, so that every order of additions gives the same sum.
  static float Value(int rank, uint64_t index) { return static_cast<float>((rank + 1) * (index % 97 + 1)); }
  float Sum(uint64_t index) const {
    float sum = 0;
    for (int rank = 0; rank < communicator_->world(); ++rank) sum += Value(rank, index);
    return sum;
  }
  std::vector<float> Mine(uint64_t size) const {
    std::vector<float> values(size);
    for (uint64_t i = 0; i < size; ++i) values[i] = Value(communicator_->rank(), i);
    return values;
  }

  int device_ = 0;
  std::unique_ptr<Communicator> communicator_;
};

TEST_F(Nccl, AllReduceSums) {
  for (const uint64_t size : {0, 1, 1000, 1 << 20}) {
    DeviceFloats values(Mine(size));
    Result<void> done = communicator_->AllReduceSum(values.span());
    ASSERT_TRUE(done) << done.error().message();
    done = communicator_->Synchronize();
    ASSERT_TRUE(done) << done.error().message();
    const std::vector<float> sums = values.Read();
    for (uint64_t i = 0; i < size; ++i) ASSERT_EQ(sums[i], Sum(i)) << i;
  }
}

TEST_F(Nccl, ReduceScatterSumsEvenAndUnevenPieces) {
  for (const bool even : {true, false}) {
    std::vector<uint64_t> counts;
    uint64_t size = 0;
    uint64_t first = 0;
    for (int rank = 0; rank < communicator_->world(); ++rank) {
      if (rank == communicator_->rank()) first = size;
      counts.push_back(even ? 1000 : 1000u * static_cast<uint64_t>(rank));
      size += counts.back();
    }
    DeviceFloats in(Mine(size));
    DeviceFloats out(std::vector<float>(counts[static_cast<size_t>(communicator_->rank())], -1));
    Result<void> done = communicator_->ReduceScatterSum(in.span(), counts, out.span());
    ASSERT_TRUE(done) << done.error().message();
    done = communicator_->Synchronize();
    ASSERT_TRUE(done) << done.error().message();
    const std::vector<float> sums = out.Read();
    for (uint64_t i = 0; i < sums.size(); ++i) ASSERT_EQ(sums[i], Sum(first + i)) << i;
    EXPECT_EQ(in.Read(), Mine(size));
  }
}

TEST_F(Nccl, WordsGoThroughTheHost) {
  int root = Bootstrap().rank();
  ASSERT_TRUE(communicator_->Broadcast(std::as_writable_bytes(std::span(&root, 1)), 0));
  EXPECT_EQ(root, 0);
  EXPECT_EQ(*communicator_->AllReduceMax(Bootstrap().rank()), communicator_->world() - 1);
  EXPECT_TRUE(AgreeOn(*communicator_, {}));
}

TEST(NcclWithoutAGpu, ADeviceThatIsNotThereIsAnError) {
  if (Bootstrap().world() > 1) GTEST_SKIP() << "a world of one is enough";
  const auto communicator = NcclCommunicator(Bootstrap(), {.device = 4096, .stream = nullptr});
  ASSERT_FALSE(communicator);
  EXPECT_EQ(communicator.error().code(), StatusCode::kDevice);
  EXPECT_NE(communicator.error().message().find("cuda:4096"), std::string::npos);
}

// The library that is loaded may be another release than the header, but not of another major version.
TEST(NcclWithoutAGpu, TheVersionIsOfTheHeadersMajor) {
  const std::string header = ESPALIER_NCCL_VERSION;
  const std::string major = header.substr(0, header.find('.') + 1);
  EXPECT_TRUE(NcclVersion().starts_with(major)) << NcclVersion() << ", header " << header;
}

}  // namespace
}  // namespace espalier
