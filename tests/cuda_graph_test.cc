// SPDX-License-Identifier: Apache-2.0
//
// Runs in CUDA graphs, on several streams and from several threads: always the bits of a run on its own.
#include <fmt/format.h>

#include <memory>
#include <thread>
#include <vector>

#include "gpu_test.h"

namespace espalier {
namespace {

using test::MakeExperts;
using test::MoeCall;
using test::MoeOutput;
using test::PlacedCall;
using test::RandomCall;

constexpr uint64_t kCapacity = 130;

class CudaGraph : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    experts_.emplace(OnGpu(MakeExperts({.experts = 12,
                                        .hidden_channels = 384,
                                        .activation = {},
                                        .segments = {{.channels = 256}},
                                        .format = MixedFormat,
                                        .seed = 17})));
  }

  MoeCall Call(uint64_t tokens, uint64_t seed) const {
    MoeCall call = RandomCall(*experts_, tokens, 4, seed);
    call.max_tokens = kCapacity;
    call.input = Dtype::kBF16;
    return call;
  }

  std::unique_ptr<PlacedCall> Place(const MoeCall& call) const {
    return PlacedCall::Create(*experts_, call, "cuda").value();
  }

  MoeOutput Eager(const MoeCall& call) const {
    const auto placed = Place(call);
    EXPECT_TRUE(placed->Run());
    return placed->Finish();
  }

  static cuda::Graph Capture(const PlacedCall& placed) {
    return cuda::Graph::Capture(placed.stream(), [&] { return placed.Run(); }).value();
  }

  std::optional<PreparedExperts> experts_;
};

TEST_F(CudaGraph, EqualsEagerForEveryTokenCount) {
  for (const uint64_t tokens : {0, 1, 2, 7, 8, 9, 31, 32, 33, 64, 65, 129, 130}) {
    SCOPED_TRACE(tokens);
    const MoeCall call = Call(static_cast<uint64_t>(tokens), 3);
    const MoeOutput eager = Eager(call);
    const auto placed = Place(call);
    const cuda::Graph graph = Capture(*placed);
    for (int repeat = 0; repeat < 3; ++repeat) {
      placed->Fill(call);  // poisoned again
      ASSERT_TRUE(graph.Launch(placed->stream()));
      EXPECT_EQ(placed->Finish().bytes, eager.bytes) << "launch " << repeat;
    }
  }
}

TEST_F(CudaGraph, SeesWhatIsInItsArraysAtTheLaunch) {
  const auto placed = Place(Call(33, 3));
  const cuda::Graph graph = Capture(*placed);
  for (const uint64_t seed : {4, 5, 6}) {
    const MoeCall call = Call(33, static_cast<uint64_t>(seed));
    placed->Fill(call);
    ASSERT_TRUE(graph.Launch(placed->stream()));
    EXPECT_EQ(placed->Finish().bytes, Eager(call).bytes) << seed;
  }
}

// An engine captures for a full batch and pads with ids of -1.
TEST_F(CudaGraph, FewerLiveRowsThanCaptured) {
  const uint64_t captured = 64;
  const auto placed = Place(Call(captured, 3));
  const cuda::Graph graph = Capture(*placed);
  const uint64_t row_bytes = experts_->geometry().hidden_channels * sizeof(float);
  for (const uint64_t live : {0, 1, 9, 40, 64}) {
    SCOPED_TRACE(live);
    MoeCall call = Call(captured, 7);
    for (uint64_t i = static_cast<uint64_t>(live) * call.top_k; i < call.ids.size(); ++i) call.ids[i] = -1;
    placed->Fill(call);
    ASSERT_TRUE(graph.Launch(placed->stream()));
    const MoeOutput padded = placed->Finish();
    EXPECT_EQ(padded.bytes, Eager(call).bytes);
    for (size_t i = static_cast<size_t>(live) * row_bytes; i < padded.bytes.size(); ++i)
      ASSERT_EQ(padded.bytes[i], std::byte{0}) << i;
  }
}

TEST_F(CudaGraph, LaunchesAddUpWhenAccumulating) {
  MoeCall call = Call(9, 3);
  call.accumulate = true;
  call.y.assign(9 * experts_->geometry().hidden_channels, 1.0);
  const auto placed = Place(call);
  const cuda::Graph graph = Capture(*placed);
  for (int launch = 0; launch < 3; ++launch) {
    ASSERT_TRUE(graph.Launch(placed->stream()));
    call.y = Eager(call).values;  // one step further
  }
  const std::vector<double> sum = placed->Finish().values;
  EXPECT_EQ(sum, call.y);
}

TEST_F(CudaGraph, TwoStreamsSideBySide) {
  const MoeCall calls[] = {Call(33, 3), Call(130, 4)};
  const MoeOutput expected[] = {Eager(calls[0]), Eager(calls[1])};
  const std::unique_ptr<PlacedCall> placed[] = {Place(calls[0]), Place(calls[1])};
  for (int round = 0; round < 20; ++round) {
    for (const auto& call : placed) ASSERT_TRUE(call->Run());
  }
  for (int i = 0; i < 2; ++i) EXPECT_EQ(placed[i]->Finish().bytes, expected[i].bytes) << i;
}

TEST_F(CudaGraph, TwoGraphsSideBySide) {
  const MoeCall calls[] = {Call(64, 3), Call(64, 4)};
  const MoeOutput expected[] = {Eager(calls[0]), Eager(calls[1])};
  const std::unique_ptr<PlacedCall> placed[] = {Place(calls[0]), Place(calls[1])};
  const cuda::Graph graphs[] = {Capture(*placed[0]), Capture(*placed[1])};
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < 2; ++i) ASSERT_TRUE(graphs[i].Launch(placed[i]->stream()));
  }
  for (int i = 0; i < 2; ++i) EXPECT_EQ(placed[i]->Finish().bytes, expected[i].bytes) << i;
}

TEST_F(CudaGraph, ThreadsCaptureAndRunAtOnce) {
  std::vector<MoeCall> calls;
  std::vector<MoeOutput> expected;
  for (uint64_t i = 0; i < 4; ++i) {
    calls.push_back(Call(10 + 20 * i, i));
    expected.push_back(Eager(calls.back()));
  }
  std::vector<int> right(calls.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < calls.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 5; ++round) {
        const auto placed = Place(calls[i]);
        const Result<cuda::Graph> graph =
            cuda::Graph::Capture(placed->stream(), [&] { return placed->Run(); });
        if (!graph || !graph->Launch(placed->stream())) return;
        right[i] += placed->Finish().bytes == expected[i].bytes ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < right.size(); ++i) EXPECT_EQ(right[i], 5) << "thread " << i;
}

// The caller's error comes out, and the stream is usable afterwards.
TEST_F(CudaGraph, AFailedCaptureLeavesTheStream) {
  const MoeCall call = Call(8, 3);
  const auto placed = Place(call);
  const Result<cuda::Graph> graph = cuda::Graph::Capture(
      placed->stream(), []() -> Result<void> { return Error(StatusCode::kUsage, "not today"); });
  ASSERT_FALSE(graph);
  EXPECT_EQ(graph.error().message(), "not today");
  ASSERT_TRUE(placed->Run());
  EXPECT_EQ(placed->Finish().bytes, Eager(call).bytes);
}

TEST_F(CudaGraph, TheTimerTellsAStreamApart) {
  const auto placed = Place(Call(64, 3));
  const cuda::Timer timer = cuda::Timer::Create(test::kFirstGpu).value();
  ASSERT_TRUE(timer.Start(placed->stream()));
  ASSERT_TRUE(placed->Run());
  ASSERT_TRUE(timer.Stop(placed->stream()));
  EXPECT_GT(timer.Microseconds().value(), 0);
}

}  // namespace
}  // namespace espalier
