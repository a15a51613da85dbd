// SPDX-License-Identifier: Apache-2.0
//
// The load path when things go wrong: short reads, interrupted calls, read errors, files that shrink or are
// replaced, memory that runs out. A clear error, nothing leaked, and the next try succeeds.
#include <dlfcn.h>
#include <espalier/experts.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "support/checkpoint_writer.h"
#include "support/memory_file_system.h"
#include "support/temporary_directory.h"

namespace {

// What the next calls of pread do; 0 = as the system does.
std::atomic<int> g_interrupt_every{0};  // every n-th call fails with EINTR
std::atomic<size_t> g_most_bytes{0};
std::atomic<int> g_fail_from{-1};  // calls until one fails with EIO, and all after it
std::atomic<int> g_calls{0};

}  // namespace

// Stands before the C library's own in this program: the only way to have the system itself misbehave.
extern "C" ssize_t pread(int descriptor, void* target, size_t count, off_t offset) {
  using Pread = ssize_t (*)(int, void*, size_t, off_t);
  static const Pread system_pread = reinterpret_cast<Pread>(dlsym(RTLD_NEXT, "pread"));
  const int call = g_calls.fetch_add(1);
  const int every = g_interrupt_every, fail_from = g_fail_from;
  if (every > 0 && call % every == 0) {
    errno = EINTR;
    return -1;
  }
  if (fail_from >= 0 && call >= fail_from) {
    errno = EIO;
    return -1;
  }
  const size_t most = g_most_bytes;
  return system_pread(descriptor, target, most > 0 ? std::min(count, most) : count, offset);
}

namespace espalier {
namespace {

using testing::CheckpointFiles;
using ::testing::HasSubstr;
using testing::MemoryFileSystem;
using testing::ModelShape;
using testing::ReadFaults;
using testing::TemporaryDirectory;

struct Layout {
  std::string name;
  std::string file;  // one that every load reads
  std::function<CheckpointFiles()> write;
  CodeOrder order = CodeOrder::kNative;
};

ModelShape Shape() {
  ModelShape shape;
  shape.layers = {1};
  shape.experts = 3;
  shape.intermediate_channels = 384;
  shape.shared_hidden = true;
  shape.dense = false;
  return shape;
}

std::vector<Layout> Layouts() {
  ModelShape container = Shape();
  container.intermediate_channels = 512;
  container.bits = 3;
  container.codebook = Codebook::kMcg;
  ModelShape legacy = Shape();
  legacy.shared_hidden = false;
  legacy.unit_signs = true;
  std::vector<Layout> layouts = {
      {"stock", "model.safetensors", [] { return WriteStock(testing::RandomModel(Shape(), 1)); }},
      {"legacy_signs", "model.safetensors",
       [legacy] { return WriteStock(testing::RandomModel(legacy, 2), {.legacy_signs = true}); }},
      {"exl3_v1", "", [container] { return WriteExl3V1(testing::RandomModel(container, 3)); }}};
  for (size_t i = 0; i < 3; ++i) {
    Layout panels = layouts[i];
    panels.name += "_panels";
    panels.order = CodeOrder::kPanels;
    layouts.push_back(panels);
  }
  return layouts;
}

const LoadOptions kHashed = {.hash = true, .order = CodeOrder::kNative};

class LoadFaults : public ::testing::TestWithParam<Layout> {
 protected:
  void SetUp() override {
    for (const auto& [name, bytes] : GetParam().write().Serialize()) {
      files_.Write("/model/" + name, bytes);
      if (name.ends_with(".safetensors") && bytes.size() > shard_bytes_) {
        shard_ = "/model/" + name;
        shard_bytes_ = bytes.size();
      }
    }
    Open();
    plan_.emplace(ExtentPlan::Create(*checkpoint_, {.tp = 2}).value());
    for (int rank = 0; rank < 2; ++rank)  // in native order: the content has no other
      good_.push_back(Bytes(LoadExperts(*checkpoint_, *plan_, 0, rank, kHashed).value()));
  }

  void Open() { checkpoint_.emplace(Checkpoint::Open("/model", {.file_system = &files_}).value()); }

  Result<PreparedExperts> Load(int rank, LoadOptions options = {}) const {
    options.hash = true;
    options.order = GetParam().order;
    return LoadExperts(*checkpoint_, *plan_, 0, rank, options);
  }

  static std::string Bytes(const PreparedExperts& experts) { return experts.content_sha256(); }

  void ExpectGood() const {
    for (int rank = 0; rank < 2; ++rank) {
      const Result<PreparedExperts> experts = Load(rank);
      ASSERT_TRUE(experts) << experts.error().message();
      EXPECT_EQ(Bytes(*experts), good_[static_cast<size_t>(rank)]);
    }
  }

  MemoryFileSystem files_;
  std::string shard_;
  size_t shard_bytes_ = 0;
  std::optional<Checkpoint> checkpoint_;
  std::optional<ExtentPlan> plan_;
  std::vector<std::string> good_;
};
INSTANTIATE_TEST_SUITE_P(Layouts, LoadFaults, ::testing::ValuesIn(Layouts()),
                         [](const auto& parameter) { return parameter.param.name; });

TEST_P(LoadFaults, ShortReadsGiveTheSameBytes) {
  for (const size_t most : {1, 7, 4096}) {
    files_.SetLiveFaults(shard_, {.max_bytes_per_read = most});
    ExpectGood();
  }
}

TEST_P(LoadFaults, AReadErrorIsReportedAndTheNextTrySucceeds) {
  for (const int failing : {1, 2, 5}) {
    files_.SetLiveFaults(shard_, {.failing_reads = failing});
    const Result<PreparedExperts> experts = Load(1);
    ASSERT_FALSE(experts) << failing;
    EXPECT_EQ(experts.error().code(), StatusCode::kIo);
    EXPECT_THAT(experts.error().message(), HasSubstr(shard_));
    files_.SetLiveFaults(shard_, {});
    ExpectGood();
  }
}

TEST_P(LoadFaults, EveryPlaceOfAReadErrorIsSurvived) {
  uint64_t refused = 0;
  const size_t step = shard_bytes_ / 23;
  for (uint64_t at = 0; at < shard_bytes_; at += step) {
    files_.SetLiveFaults(shard_, {.fails_at = at});
    for (int rank = 0; rank < 2; ++rank) {
      const Result<PreparedExperts> experts = Load(rank);
      if (experts) {  // the rank does not read beyond that place
        EXPECT_EQ(Bytes(*experts), good_[static_cast<size_t>(rank)]);
        continue;
      }
      ++refused;
      EXPECT_EQ(experts.error().code(), StatusCode::kIo);
    }
  }
  EXPECT_GT(refused, 10u);
  files_.SetLiveFaults(shard_, {});
  ExpectGood();
}

TEST_P(LoadFaults, AFileThatShrankIsAnError) {
  for (const uint64_t size : {shard_bytes_ / 2, shard_bytes_ - 1}) {
    files_.SetLiveFaults(shard_, {.ends_at = size});
    bool refused = false;
    for (int rank = 0; rank < 2; ++rank) {
      const Result<PreparedExperts> experts = Load(rank);
      refused = refused || !experts;
      if (!experts) {
        EXPECT_EQ(experts.error().code(), StatusCode::kIo) << experts.error().message();
      }
    }
    EXPECT_TRUE(refused) << size;
  }
  files_.SetLiveFaults(shard_, {});
  ExpectGood();
}

TEST_P(LoadFaults, AReplacedShardIsAnErrorUntilItIsOpenedAgain) {
  const std::string original = GetParam().write().Serialize().at(shard_.substr(std::strlen("/model/")));
  files_.Write(shard_, original);  // equal bytes, but nobody could know
  const Result<PreparedExperts> experts = Load(0);
  ASSERT_FALSE(experts);
  EXPECT_EQ(experts.error().code(), StatusCode::kIo);
  EXPECT_THAT(experts.error().message(), ::testing::AllOf(HasSubstr(shard_), HasSubstr("replaced")));
  Open();
  ExpectGood();
  files_.Remove(shard_);
  EXPECT_FALSE(Load(0));
}

// Counts what it gives out and gets back.
struct Allocator {
  int given = 0, returned = 0;
  uint64_t missing_bytes = 0;
  bool refuses = false;

  Result<HostBuffer> operator()(uint64_t size_bytes) {
    if (refuses) return Error(StatusCode::kCapacity, "no memory on order");
    ++given;
    auto* data = static_cast<std::byte*>(::operator new(size_bytes + 1, std::align_val_t{64}));
    std::memset(data, 0xA5, size_bytes);
    return HostBuffer::Adopt(data, size_bytes - missing_bytes, [this](std::byte* memory) {
      ++returned;
      ::operator delete(memory, std::align_val_t{64});
    });
  }
};

TEST_P(LoadFaults, MemoryIsTakenOnceAndGivenBack) {
  Allocator allocator;
  LoadOptions options{.allocate = std::ref(allocator)};
  {
    const Result<PreparedExperts> experts = Load(0, options);
    ASSERT_TRUE(experts) << experts.error().message();
    EXPECT_EQ(Bytes(*experts), good_[0]) << "gaps of the slab do not count";
    EXPECT_EQ(allocator.given, 1);
    EXPECT_EQ(allocator.returned, 0);
  }
  EXPECT_EQ(allocator.returned, 1);
  files_.SetLiveFaults(shard_, {.fails_at = shard_bytes_ / 2});
  EXPECT_FALSE(Load(0, options));
  EXPECT_EQ(allocator.returned, allocator.given) << "a failed load keeps nothing";
  files_.SetLiveFaults(shard_, {});
  allocator.missing_bytes = 1;
  const Result<PreparedExperts> small = Load(0, options);
  ASSERT_FALSE(small);
  EXPECT_EQ(small.error().code(), StatusCode::kUsage);
  EXPECT_EQ(allocator.returned, allocator.given);
  allocator.refuses = true;
  const Result<PreparedExperts> none = Load(0, options);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code(), StatusCode::kCapacity);
  EXPECT_THAT(none.error().message(), ::testing::AllOf(HasSubstr("layer 1"), HasSubstr("on order")));
  ExpectGood();
}

TEST_P(LoadFaults, ThreadsAndStagingDoNotChangeABit) {
  for (const int threads : {1, 2, 7}) {
    for (const uint64_t staging : {uint64_t{1}, uint64_t{64} << 10, uint64_t{3} << 20}) {
      for (int rank = 0; rank < 2; ++rank) {
        const Result<PreparedExperts> experts =
            Load(rank, {.staging_bytes = staging, .num_threads = threads});
        ASSERT_TRUE(experts) << experts.error().message();
        EXPECT_EQ(Bytes(*experts), good_[static_cast<size_t>(rank)]);
      }
    }
  }
}

// Memory beside the slab: what was asked for or a row of tiles (and a buffer where rows of the file are taken
// apart), and only where bytes cannot go straight to their place.
TEST_P(LoadFaults, StagingIsBounded) {
  const bool takes_rows_apart = !GetParam().name.starts_with("stock");
  const bool panels = GetParam().order == CodeOrder::kPanels;
  const uint64_t least = (panels ? 4096 : 0) + (takes_rows_apart ? uint64_t{64} << 10 : 0);
  for (const uint64_t staging : {uint64_t{1}, uint64_t{64} << 10, uint64_t{256} << 10, uint64_t{64} << 20}) {
    for (const int threads : {1, 2, 7, 64}) {
      const LoadOptions options = {
          .order = GetParam().order, .staging_bytes = staging, .num_threads = threads};
      const LoadSizes sizes = SizeExperts(*checkpoint_, *plan_, 0, 0, options).value();
      EXPECT_LE(sizes.staging_bytes, std::max(staging, least)) << threads << " threads";
      EXPECT_EQ(sizes.staging_bytes == 0, least == 0);
      if (staging == 1) {
        EXPECT_EQ(sizes.staging_bytes, least);
      }
    }
  }
}

// Neither panels nor smaller parts cost another byte of the files.
TEST_P(LoadFaults, EveryByteIsReadOnce) {
  const LoadSizes sizes = SizeExperts(*checkpoint_, *plan_, 0, 1, {.order = GetParam().order}).value();
  const auto bytes_read = [&](CodeOrder order, uint64_t staging) {
    const uint64_t before = files_.bytes_read();
    EXPECT_TRUE(LoadExperts(*checkpoint_, *plan_, 0, 1, {.order = order, .staging_bytes = staging}));
    return files_.bytes_read() - before;
  };
  const uint64_t native = bytes_read(CodeOrder::kNative, kDefaultStagingBytes);
  EXPECT_GE(native, sizes.read_bytes) << "markers and padding are not counted";
  EXPECT_EQ(bytes_read(GetParam().order, kDefaultStagingBytes), native);
  EXPECT_EQ(bytes_read(GetParam().order, 1), native);
}

TEST_P(LoadFaults, ProgressGrowsToTheBytesThatWereForetold) {
  const LoadSizes sizes = SizeExperts(*checkpoint_, *plan_, 0, 1).value();
  std::vector<uint64_t> done;
  LoadOptions options;
  options.num_threads = 4;
  options.progress = [&](uint64_t bytes, uint64_t total) {
    EXPECT_EQ(total, sizes.read_bytes);
    done.push_back(bytes);
    return true;
  };
  const Result<PreparedExperts> experts = Load(1, options);
  ASSERT_TRUE(experts);
  EXPECT_TRUE(std::is_sorted(done.begin(), done.end()));
  EXPECT_EQ(done.front(), 0u);
  EXPECT_EQ(done.back(), sizes.read_bytes);
  EXPECT_EQ(sizes.read_bytes, plan_->layers()[0].ranks[1].weight_bytes);
  EXPECT_EQ(experts->slab_bytes(), sizes.table.slab_bytes());
}

TEST_P(LoadFaults, StopsWhereTheCallerSaysSo) {
  const LoadSizes sizes = SizeExperts(*checkpoint_, *plan_, 0, 1).value();
  for (const int threads : {1, 7}) {
    for (const size_t stop_at : {size_t{1}, size_t{2}, size_t{5}}) {
      Allocator allocator;
      std::vector<uint64_t> done;
      LoadOptions options{.allocate = std::ref(allocator), .num_threads = threads};
      options.progress = [&](uint64_t bytes, uint64_t) {
        done.push_back(bytes);
        return done.size() < stop_at;
      };
      const Result<PreparedExperts> experts = Load(1, options);
      ASSERT_FALSE(experts);
      EXPECT_EQ(experts.error().code(), StatusCode::kCancelled);
      EXPECT_THAT(experts.error().message(),
                  ::testing::AllOf(HasSubstr("layer 1"), HasSubstr("stopped by the caller")));
      EXPECT_EQ(done.size(), stop_at) << "no call comes behind the one that stopped it";
      EXPECT_LT(done.back(), sizes.read_bytes);
      EXPECT_EQ(allocator.given, 1);
      EXPECT_EQ(allocator.returned, 1) << "nothing is kept";
    }
  }
  ExpectGood();
}

// The padding behind the payload of a slot is all that tells a wrong rate in the manifest from a right one.
TEST(LoadPadding, IsCheckedForTheSlotsOfTheRank) {
  ModelShape shape = Shape();
  shape.intermediate_channels = 512;
  shape.bits = 3;
  shape.codebook = Codebook::kMcg;
  CheckpointFiles model = WriteExl3V1(testing::RandomModel(shape, 3));
  bool spoilt = false;
  for (auto& [name, shard] : model.shards) {
    for (testing::NamedTensor& tensor : shard.tensors) {
      if (tensor.shape.size() != 2 || tensor.shape[1] % 4096 != 0) continue;
      tensor.data[tensor.shape[1] - 1] = 1;  // of slot 0
      spoilt = true;
    }
  }
  ASSERT_TRUE(spoilt);
  MemoryFileSystem files;
  for (const auto& [name, bytes] : model.Serialize()) files.Write("/model/" + name, bytes);
  const Checkpoint checkpoint = Checkpoint::Open("/model", {.file_system = &files}).value();
  const ExtentPlan plan = ExtentPlan::Create(checkpoint, {.tp = 2}).value();
  for (int rank = 0; rank < 2; ++rank) {
    const bool owner = plan.layers()[0].ranks[static_cast<size_t>(rank)].first_channel == 0;
    const Result<PreparedExperts> experts = LoadExperts(checkpoint, plan, 0, rank);
    EXPECT_EQ(experts.has_value(), !owner);
    if (experts) continue;
    EXPECT_EQ(experts.error().code(), StatusCode::kFormat);
    EXPECT_THAT(experts.error().message(), HasSubstr("legal: 0 in the padding"));
  }
  EXPECT_FALSE(LoadExperts(checkpoint, 0));
  EXPECT_FALSE(LoadLinear(checkpoint, "model.layers.1.mlp.experts.0.gate_proj"));
}

// On real files, with the system's own failures.
class PosixFaults : public ::testing::TestWithParam<CodeOrder> {
 protected:
  void SetUp() override {
    const FileMapPtr files =
        std::make_unique<testing::FileMap>(WriteStock(testing::RandomModel(Shape(), 5)).Serialize());
    testing::WriteFiles(*files, directory_.path());
    Open();
    good_ = Load().value().content_sha256();
  }
  void TearDown() override { Calm(); }

  static void Calm() {
    g_interrupt_every = 0;
    g_most_bytes = 0;
    g_fail_from = -1;
  }
  void Open() { checkpoint_.emplace(Checkpoint::Open(directory_.path()).value()); }
  Result<PreparedExperts> Load() const {
    g_calls = 0;
    return LoadExperts(*checkpoint_, 0, {.hash = true, .order = GetParam()});
  }
  std::filesystem::path Shard() const { return directory_.path() / "model.safetensors"; }
  static size_t OpenDescriptors() {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                                             std::filesystem::directory_iterator()));
  }

  using FileMapPtr = std::unique_ptr<testing::FileMap>;
  TemporaryDirectory directory_;
  std::optional<Checkpoint> checkpoint_;
  std::string good_;
};

INSTANTIATE_TEST_SUITE_P(Orders, PosixFaults, ::testing::Values(CodeOrder::kNative, CodeOrder::kPanels),
                         [](const auto& parameter) {
                           return parameter.param == CodeOrder::kNative ? "native" : "panels";
                         });

TEST_P(PosixFaults, InterruptedAndShortCallsAreTakenUpAgain) {
  for (const auto& [every, most] : {std::pair<int, size_t>{2, 0}, {3, 100}, {0, 1000}, {5, 13}}) {
    g_interrupt_every = every;
    g_most_bytes = most;
    const Result<PreparedExperts> experts = Load();
    ASSERT_TRUE(experts) << experts.error().message();
    EXPECT_EQ(experts->content_sha256(), good_);
    EXPECT_GT(g_calls, 10);
  }
}

TEST_P(PosixFaults, AnErrorOfTheSystemIsNamedAndPasses) {
  const size_t descriptors = OpenDescriptors();
  for (const int from : {0, 1, 9, 20}) {
    g_fail_from = from;
    const Result<PreparedExperts> experts = Load();
    ASSERT_FALSE(experts) << from;
    EXPECT_EQ(experts.error().code(), StatusCode::kIo);
    EXPECT_THAT(experts.error().message(),
                ::testing::AllOf(HasSubstr("model.safetensors"), HasSubstr(std::strerror(EIO))));
    Calm();
    EXPECT_EQ(Load().value().content_sha256(), good_);
  }
  EXPECT_EQ(OpenDescriptors(), descriptors);
}

TEST_P(PosixFaults, ATruncatedFileIsAnError) {
  std::filesystem::resize_file(Shard(), std::filesystem::file_size(Shard()) / 2);
  const Result<PreparedExperts> experts = Load();
  ASSERT_FALSE(experts);
  EXPECT_EQ(experts.error().code(), StatusCode::kIo);
  EXPECT_THAT(experts.error().message(), HasSubstr("was written to since its header was read"));
}

TEST_P(PosixFaults, AFileWrittenInPlaceIsAnError) {
  std::fstream file(Shard(), std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(std::filesystem::file_size(Shard()) / 2));
  file.put('x');
  file.close();
  // A clock that ticks coarsely could leave the time of the last change as it was.
  std::filesystem::last_write_time(Shard(),
                                   std::filesystem::last_write_time(Shard()) + std::chrono::seconds(2));
  const Result<PreparedExperts> experts = Load();
  ASSERT_FALSE(experts);
  EXPECT_THAT(experts.error().message(), HasSubstr("was written to since its header was read"));
  Open();
  EXPECT_TRUE(Load());
}

TEST_P(PosixFaults, AReplacedFileIsAnErrorUntilItIsOpenedAgain) {
  const std::filesystem::path copy = directory_.path() / "new";
  std::filesystem::copy_file(Shard(), copy);
  std::filesystem::rename(copy, Shard());
  const Result<PreparedExperts> experts = Load();
  ASSERT_FALSE(experts);
  EXPECT_EQ(experts.error().code(), StatusCode::kIo);
  EXPECT_THAT(experts.error().message(), HasSubstr("was replaced or removed since its header was read"));
  Open();
  EXPECT_EQ(Load().value().content_sha256(), good_);
}

}  // namespace
}  // namespace espalier
