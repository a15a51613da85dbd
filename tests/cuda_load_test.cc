// SPDX-License-Identifier: Apache-2.0
//
// Packages on a GPU: a load through staging gives the bytes that a load on the host gives, for every layout.
#include <espalier/prepare.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/device_table.h"
#include "gpu_test.h"
#include "moe/device_memory.h"
#include "support/checkpoint_writer.h"
#include "support/memory_file_system.h"

namespace espalier {
namespace {

using test::kFirstGpu;
using testing::CheckpointFiles;
using testing::MemoryFileSystem;
using testing::ModelShape;

struct Layout {
  std::string name;
  std::function<CheckpointFiles()> write;
};

ModelShape Shape() {
  ModelShape shape;
  shape.layers = {1};
  shape.experts = 3;
  shape.intermediate_channels = 512;
  shape.shared_hidden = true;
  shape.dense = false;
  return shape;
}

std::vector<Layout> Layouts() {
  ModelShape container = Shape();
  container.bits = 3;
  container.codebook = Codebook::kMcg;
  ModelShape legacy = Shape();
  legacy.shared_hidden = false;
  legacy.unit_signs = true;
  ModelShape biased = Shape();
  biased.shared_hidden = false;
  biased.bias = true;
  ModelShape sliced = Shape();
  sliced.slices = 2;
  sliced.bits_by_expert = true;
  return {{"stock", [biased] { return WriteStock(testing::RandomModel(biased, 1)); }},
          {"legacy_signs",
           [legacy] { return WriteStock(testing::RandomModel(legacy, 2), {.legacy_signs = true}); }},
          {"rank_sliced",
           [sliced] { return WriteRankSliced(testing::RandomModel(sliced, 3), {.shared_h = true}); }},
          {"r7", [] { return WriteR7(testing::RandomModel(Shape(), 4)); }},
          {"exl3_v1", [container] { return WriteExl3V1(testing::RandomModel(container, 5)); }}};
}

std::vector<std::byte> Bytes(const DeviceBuffer& buffer, uint64_t offset, uint64_t size_bytes) {
  std::vector<std::byte> bytes(size_bytes);
  EXPECT_TRUE(ReadBuffer(buffer, offset, bytes));
  return bytes;
}

std::vector<std::byte> SlabBytes(const PreparedExperts& experts, uint64_t offset, uint64_t size_bytes) {
  std::vector<std::byte> bytes(size_bytes);
  if (experts.device().is_host()) {
    std::memcpy(bytes.data(), experts.slab() + offset, size_bytes);
  } else {
    EXPECT_TRUE(CopyBytes(experts.device(), bytes.data(), experts.slab() + offset, size_bytes));
  }
  return bytes;
}

// Every code and vector; the gaps between them do not count.
void ExpectSameContent(const PreparedExperts& expected, const PreparedExperts& actual) {
  ASSERT_EQ(actual.segments().size(), expected.segments().size());
  for (size_t s = 0; s < expected.segments().size(); ++s) {
    for (int p = 0; p < kNumProjections; ++p) {
      const MatrixDesc& matrix = expected.segments()[s].matrices[p];
      if (!matrix.present()) continue;
      const std::pair<uint64_t, uint64_t> parts[] = {
          {matrix.codes_offset_bytes, matrix.code_bytes()},
          {matrix.suh_offset_bytes, uint64_t{matrix.in_channels} * 2},
          {matrix.svh_offset_bytes, uint64_t{matrix.out_channels} * 2},
          {matrix.bias_offset_bytes, uint64_t{matrix.out_channels} * 2}};
      for (const auto& [offset, size_bytes] : parts) {
        if (offset == kAbsentOffset) continue;
        ASSERT_EQ(SlabBytes(actual, offset, size_bytes), SlabBytes(expected, offset, size_bytes))
            << "segment " << s << ", matrix " << p << ", byte " << offset;
      }
    }
  }
}

class CudaLoad : public GpuTest, public ::testing::WithParamInterface<Layout> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    for (const auto& [name, bytes] : GetParam().write().Serialize()) files_.Write("/model/" + name, bytes);
    checkpoint_.emplace(Checkpoint::Open("/model", {.file_system = &files_}).value());
  }

  MemoryFileSystem files_;
  std::optional<Checkpoint> checkpoint_;
};
INSTANTIATE_TEST_SUITE_P(Layouts, CudaLoad, ::testing::ValuesIn(Layouts()),
                         [](const auto& parameter) { return parameter.param.name; });

TEST_P(CudaLoad, EqualsTheHostAtAnyStaging) {
  const PreparedExperts host =
      LoadExperts(*checkpoint_, 0, {.hash = true, .order = CodeOrder::kNative}).value();
  for (const uint64_t staging : {uint64_t{1}, uint64_t{64} << 10, uint64_t{1} << 20, uint64_t{64} << 20}) {
    for (const int threads : {1, 3}) {
      SCOPED_TRACE(::testing::Message() << staging << " bytes, " << threads << " threads");
      const Result<PreparedExperts> loaded =
          LoadExperts(*checkpoint_, 0,
                      {.hash = true, .device = kFirstGpu, .staging_bytes = staging, .num_threads = threads});
      ASSERT_TRUE(loaded) << loaded.error().message();
      EXPECT_EQ(loaded->device(), kFirstGpu);
      EXPECT_EQ(loaded->content_sha256(), host.content_sha256());
      ExpectSameContent(host, *loaded);
    }
  }
}

TEST_P(CudaLoad, RanksEqualTheHost) {
  const ExtentPlan plan = ExtentPlan::Create(*checkpoint_, {.tp = 2}).value();
  for (int rank = 0; rank < 2; ++rank) {
    const PreparedExperts host = LoadExperts(*checkpoint_, plan, 0, rank).value();
    const PreparedExperts native =
        LoadExperts(*checkpoint_, plan, 0, rank, {.order = CodeOrder::kNative}).value();
    const PreparedExperts loaded = LoadExperts(*checkpoint_, plan, 0, rank, {.device = kFirstGpu}).value();
    ExpectSameContent(native, loaded);
    ExpectSameContent(native, OnGpu(host));  // out of panels
    const test::MoeCall call = test::RandomCall(host, 9, 2, 3);
    EXPECT_EQ(test::RunCall(loaded, call, "cuda").bytes, test::RunCall(OnGpu(host), call, "cuda").bytes);
  }
}

TEST_P(CudaLoad, AReadErrorGivesEverythingBack) {
  std::string shard;
  size_t shard_bytes = 0;
  for (const auto& [name, bytes] : GetParam().write().Serialize()) {
    if (!name.ends_with(".safetensors") || bytes.size() <= shard_bytes) continue;
    shard = "/model/" + name;
    shard_bytes = bytes.size();
  }
  files_.SetLiveFaults(shard, {.fails_at = shard_bytes / 2});
  const Result<PreparedExperts> failed = LoadExperts(*checkpoint_, 0, {.device = kFirstGpu});
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code(), StatusCode::kIo);
  files_.SetLiveFaults(shard, {});
  EXPECT_TRUE(LoadExperts(*checkpoint_, 0, {.device = kFirstGpu}));
}

using CudaPackage = GpuTest;

TEST_F(CudaPackage, ToDeviceAndBack) {
  const PreparedExperts host =
      test::MakeExperts({.experts = 3, .hidden_channels = 256, .format = MixedFormat});
  const PreparedExperts placed = OnGpu(host);
  EXPECT_EQ(placed.device(), kFirstGpu);
  EXPECT_EQ(placed.identity(), host.identity());
  ExpectSameContent(host, placed);
  ExpectSameContent(host, ToDevice(placed, {}).value());
  ExpectSameContent(host, ToDevice(placed, kFirstGpu).value());
}

// What the kernels read: pointers into the slab, and where the segments of each expert begin.
TEST_F(CudaPackage, TheTablePointsIntoTheSlab) {
  const PreparedExperts placed = OnGpu(test::MakeExperts({.experts = 3,
                                                          .hidden_channels = 256,
                                                          .activation = {.kind = ActivationKind::kRelu2},
                                                          .segments = {{.channels = 128}, {.channels = 256}},
                                                          .format = MixedFormat}));
  const size_t num_segments = placed.segments().size();
  ASSERT_EQ(num_segments, 6u);
  std::vector<cuda::DeviceSegment> segments(num_segments);
  std::vector<uint32_t> first(4);
  const uint64_t segment_bytes = num_segments * sizeof(cuda::DeviceSegment);
  ASSERT_EQ(placed.device_table().size_bytes(), segment_bytes + 4 * sizeof(uint32_t));
  const std::vector<std::byte> table = Bytes(placed.device_table(), 0, placed.device_table().size_bytes());
  std::memcpy(segments.data(), table.data(), segment_bytes);
  std::memcpy(first.data(), table.data() + segment_bytes, 4 * sizeof(uint32_t));
  EXPECT_EQ(first, (std::vector<uint32_t>{0, 2, 4, 6}));
  for (size_t s = 0; s < num_segments; ++s) {
    EXPECT_EQ(segments[s].expert, placed.segments()[s].expert);
    EXPECT_EQ(segments[s].matrices[0].codes, nullptr);
    const MatrixDesc& down = placed.segments()[s].down();
    const cuda::DeviceMatrix& matrix = segments[s].matrices[2];
    EXPECT_EQ(reinterpret_cast<const std::byte*>(matrix.codes), placed.slab() + down.codes_offset_bytes);
    EXPECT_EQ(reinterpret_cast<const std::byte*>(matrix.svh), placed.slab() + down.svh_offset_bytes);
    EXPECT_EQ(matrix.bias, nullptr);
    EXPECT_EQ(matrix.in_channels, down.in_channels);
    EXPECT_EQ(matrix.bits, down.bits);
    EXPECT_EQ(matrix.codebook, static_cast<uint32_t>(down.codebook));
  }
}

TEST_F(CudaPackage, LinearsLoadToo) {
  ModelShape shape = Shape();
  shape.dense = true;
  MemoryFileSystem files;
  for (const auto& [name, bytes] : WriteStock(testing::RandomModel(shape, 7)).Serialize())
    files.Write("/model/" + name, bytes);
  const Checkpoint checkpoint = Checkpoint::Open("/model", {.file_system = &files}).value();
  ASSERT_FALSE(checkpoint.linears().empty());
  const std::string name = checkpoint.linears()[0].name;
  const PreparedLinear host = LoadLinear(checkpoint, name).value();
  const PreparedLinear loaded = LoadLinear(checkpoint, name, {.device = kFirstGpu}).value();
  const PreparedLinear back = ToDevice(loaded, {}).value();
  EXPECT_EQ(DecodeMatrix(back, false).value(), DecodeMatrix(host, false).value());
  EXPECT_EQ(DecodeMatrix(loaded, false).error().code(), StatusCode::kDevice);
}

// Weights of a framework go straight to the device.
TEST_F(CudaPackage, PreparedFromMemoryEqualsTheHost) {
  const testing::CheckpointModel model = testing::RandomModel(Shape(), 8);
  ExpertsSource source;
  source.identity = "layer 1 of a framework";
  source.experts = 3;
  source.hidden_channels = static_cast<uint32_t>(model.hidden_channels);
  source.rank_plan.experts.experts = 3;
  std::vector<SegmentWeights> weights;
  for (uint32_t expert = 0; expert < 3; ++expert) {
    SegmentSpec segment{.expert = expert, .valid_intermediate_channels = 512};
    SegmentWeights bytes;
    for (int p = 0; p < kNumProjections; ++p) {
      const testing::MatrixModel& matrix = model.layers[0].experts[expert].slices[0][static_cast<size_t>(p)];
      segment.matrices[p] = {.in_channels = static_cast<uint32_t>(matrix.in_channels),
                             .out_channels = static_cast<uint32_t>(matrix.out_channels),
                             .bits = matrix.bits,
                             .codebook = matrix.codebook};
      bytes.matrices[p] = {
          .codes = matrix.codes.data(), .suh = matrix.suh.data(), .svh = matrix.svh.data(), .bias = nullptr};
    }
    source.segments.push_back(segment);
    weights.push_back(bytes);
  }
  const PreparedExperts host =
      PrepareExperts(source, weights, {.hash = true, .order = CodeOrder::kNative}).value();
  const PreparedExperts placed = PrepareExperts(source, weights, {.hash = true, .device = kFirstGpu}).value();
  EXPECT_EQ(placed.device(), kFirstGpu);
  EXPECT_EQ(placed.content_sha256(), host.content_sha256());
  ExpectSameContent(host, placed);
}

// Memory of the device itself: taken once, given back.
TEST_F(CudaPackage, MemoryIsGivenBack) {
  const uint64_t bytes = uint64_t{1} << 30;
  for (int round = 0; round < 200; ++round) {  // more than any device holds
    const Result<DeviceBuffer> buffer = DeviceBuffer::Create(kFirstGpu, bytes);
    ASSERT_TRUE(buffer) << round << ": " << buffer.error().message();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % 256, 0u);
  }
  const Result<DeviceBuffer> endless = DeviceBuffer::Create(kFirstGpu, uint64_t{1} << 50);
  ASSERT_FALSE(endless);
  EXPECT_EQ(endless.error().code(), StatusCode::kCapacity);
  EXPECT_TRUE(DeviceBuffer::Create(kFirstGpu, 64)) << "the failure left nothing behind";
}

}  // namespace
}  // namespace espalier
