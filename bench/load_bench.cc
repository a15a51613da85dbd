// SPDX-License-Identifier: Apache-2.0
//
// load_bench [DIRECTORY [GIB]]
//
// What a rank reads, holds and waits for while it loads its share of one layer. Writes a checkpoint of GIB
// (default 4) into DIRECTORY (default: a temporary one), checks that loading puts every byte in its place,
// and then times loading against a plain parallel read of the same byte ranges into memory of the same size.
// Every sample runs in a process of its own, so that its peak memory is its own. Files come from the page
// cache.
#include <espalier/experts.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/parallel.h"
#include "bench/provenance.h"
#include "support/checkpoint_writer.h"
#include "support/temporary_directory.h"

namespace espalier {
namespace {

constexpr uint64_t kHidden = 6144, kIntermediate = 2048;
constexpr int kBits = 4;
constexpr int kSamples = 5;
constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr const char* kShard = "model.safetensors";

// Writes a file piece by piece; the payload repeats 64 MiB of random bytes at an odd period, so that no two
// matrices are equal.
class Writer {
 public:
  explicit Writer(const std::filesystem::path& path)
      : file_(path, std::ios::binary), block_(64 * kMiB + 4097) {
    std::mt19937_64 random(1);
    for (size_t i = 0; i + 8 <= block_.size(); i += 8) {
      const uint64_t word = random();
      std::memcpy(block_.data() + i, &word, 8);
    }
  }
  void Text(const std::string& text) { file_.write(text.data(), static_cast<std::streamsize>(text.size())); }
  void Noise(uint64_t bytes) {
    while (bytes > 0) {
      const uint64_t count = std::min<uint64_t>(bytes, block_.size() - at_);
      file_.write(block_.data() + at_, static_cast<std::streamsize>(count));
      at_ = (at_ + count) % block_.size();
      bytes -= count;
    }
  }
  void Finish() {
    if (!file_.flush()) throw std::runtime_error("cannot write the checkpoint");
  }

 private:
  std::ofstream file_;
  std::vector<char> block_;
  size_t at_ = 0;
};

void WriteCheckpoint(const std::filesystem::path& directory, uint64_t bytes) {
  const uint64_t codes = kHidden * kIntermediate / 8 * kBits;
  const uint64_t experts = std::max<uint64_t>(bytes / (3 * codes), 1);
  nlohmann::ordered_json header;
  uint64_t end = 0;
  std::vector<std::pair<bool, uint64_t>> parts;  // is a marker, bytes
  const auto add = [&](const std::string& name, const char* dtype, std::vector<uint64_t> shape,
                       uint64_t size) {
    header[name] = {{"dtype", dtype}, {"shape", std::move(shape)}, {"data_offsets", {end, end + size}}};
    parts.emplace_back(name.ends_with(".mcg"), size);
    end += size;
  };
  for (uint64_t e = 0; e < experts; ++e) {
    for (const auto projection : {Projection::kGate, Projection::kUp, Projection::kDown}) {
      const bool down = projection == Projection::kDown;
      const uint64_t in = down ? kIntermediate : kHidden, out = down ? kHidden : kIntermediate;
      const std::string name =
          fmt::format("model.layers.0.mlp.experts.{}.{}_proj", e, ProjectionName(projection));
      add(name + ".trellis", "I16", {in / 16, out / 16, 16 * kBits}, codes);
      add(name + ".suh", "F16", {in}, in * 2);
      add(name + ".svh", "F16", {out}, out * 2);
      add(name + ".mcg", "I32", {}, 4);
    }
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  Writer writer(directory / kShard);
  std::string length(8, '\0');
  const uint64_t header_bytes = text.size();
  std::memcpy(length.data(), &header_bytes, 8);
  writer.Text(length + text);
  const uint32_t marker = 0xCBAC1FED;
  for (const auto& [is_marker, size] : parts) {
    if (is_marker) {
      writer.Text(std::string(reinterpret_cast<const char*>(&marker), 4));
    } else {
      writer.Noise(size);
    }
  }
  writer.Finish();
}

struct Sample {
  double seconds = 0;
  uint64_t read_bytes = 0;
  uint64_t peak_bytes = 0;
};

uint64_t ProcNumber(const char* file, const std::string& key) {
  std::ifstream in(file);
  for (std::string word; in >> word;) {
    uint64_t value = 0;
    if (word == key && in >> value) return value;
  }
  return 0;
}

// Runs `work` in a child; it returns the seconds it took.
Sample InChild(const std::function<double()>& work) {
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error("no pipe");
  const pid_t child = fork();
  if (child == 0) {
    int status = 1;
    try {
      const uint64_t before = ProcNumber("/proc/self/io", "rchar:");
      Sample sample{.seconds = work()};
      sample.read_bytes = ProcNumber("/proc/self/io", "rchar:") - before;
      sample.peak_bytes = ProcNumber("/proc/self/status", "VmHWM:") * 1024;
      status = write(ends[1], &sample, sizeof(sample)) == sizeof(sample) ? 0 : 1;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "load_bench: %s\n", error.what());
    }
    _exit(status);
  }
  Sample sample;
  int status = 0;
  close(ends[1]);
  const bool complete = read(ends[0], &sample, sizeof(sample)) == sizeof(sample);
  close(ends[0]);
  if (waitpid(child, &status, 0) != child || status != 0 || !complete)
    throw std::runtime_error("a sample failed");
  return sample;
}

template <typename T>
T Take(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().message());
  if constexpr (!std::is_void_v<T>) return *std::move(result);
}

template <typename Function>
double Seconds(const Function& function) {
  const auto start = std::chrono::steady_clock::now();
  function();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Case {
  int tp = 1;
  bool hash = false;
  CodeOrder order = CodeOrder::kPanels;
};

double LoadOnce(const std::filesystem::path& directory, const Case& c) {
  const Checkpoint checkpoint = Take(Checkpoint::Open(directory));
  const ExtentPlan plan = Take(ExtentPlan::Create(checkpoint, {.tp = c.tp}));
  return Seconds(
      [&] { Take(LoadExperts(checkpoint, plan, 0, c.tp - 1, {.hash = c.hash, .order = c.order})); });
}

// The same ranges as the rank's, row by row, one after the other into fresh memory; a run of rows in one
// piece.
double ReadPlainly(const std::filesystem::path& directory, const Case& c) {
  struct Range {
    uint64_t offset, bytes, target;
  };
  const Checkpoint checkpoint = Take(Checkpoint::Open(directory));
  const ExtentPlan plan = Take(ExtentPlan::Create(checkpoint, {.tp = c.tp}));
  std::vector<std::vector<Range>> tasks;
  uint64_t total = 0;
  for (uint32_t e = 0; e < checkpoint.layers()[0].experts; ++e) {
    for (int p = 0; p < kNumProjections; ++p) {
      const MatrixSource source =
          Take(checkpoint.Source(0, e, static_cast<Projection>(p),
                                 plan.layers()[0].ranks[static_cast<size_t>(c.tp - 1)].segments[0]));
      tasks.emplace_back();
      const auto add = [&](const std::vector<CopyRegion>& regions) {
        for (const CopyRegion& region : regions) {
          const bool run = region.rows == 1 || region.source_stride == region.row_bytes;
          const uint64_t rows = run ? 1 : region.rows;
          const uint64_t bytes = run ? region.rows * region.row_bytes : region.row_bytes;
          for (uint64_t row = 0; row < rows; ++row) {
            tasks.back().push_back({region.source_offset + row * region.source_stride, bytes, total});
            total += bytes;
          }
        }
      };
      add(source.codes);
      add(source.suh.regions);
      add(source.svh.regions);
    }
  }
  const int file = open((directory / kShard).c_str(), O_RDONLY);
  std::atomic<bool> failed{file < 0};
  const double seconds = Seconds([&] {
    HostBuffer target = Take(HostBuffer::Create(total));
    ParallelFor(0, tasks.size(), [&](uint64_t task) {
      for (const Range& range : tasks[task]) {
        for (uint64_t done = 0; done < range.bytes;) {
          const ssize_t count = pread(file, target.data() + range.target + done, range.bytes - done,
                                      static_cast<off_t>(range.offset + done));
          if (count <= 0) {
            failed = true;
            return;
          }
          done += static_cast<uint64_t>(count);
        }
      }
    });
  });
  if (failed) throw std::runtime_error("the plain read failed");
  return seconds;
}

// Every 13th expert, bit by bit, against the file as the tests read it.
void CheckBytes(const std::filesystem::path& directory, int tp) {
  const Checkpoint checkpoint = Take(Checkpoint::Open(directory));
  const ExtentPlan plan = Take(ExtentPlan::Create(checkpoint, {.tp = tp}));
  const PreparedExperts experts =
      Take(LoadExperts(checkpoint, plan, 0, tp - 1, {.order = CodeOrder::kNative}));
  for (uint32_t e = 0; e < experts.geometry().experts; e += 13) {
    for (int p = 0; p < kNumProjections; ++p) {
      const MatrixDesc& desc = experts.ExpertSegments(e)[0].matrices[p];
      const testing::MatrixModel expected = Take(testing::ReadSource(
          checkpoint,
          Take(checkpoint.Source(0, e, static_cast<Projection>(p),
                                 plan.layers()[0].ranks[static_cast<size_t>(tp - 1)].segments[0]))));
      const bool same = std::memcmp(expected.codes.data(), experts.slab() + desc.codes_offset_bytes,
                                    desc.code_bytes()) == 0 &&
                        std::memcmp(expected.suh.data(), experts.slab() + desc.suh_offset_bytes,
                                    desc.in_channels * 2) == 0 &&
                        std::memcmp(expected.svh.data(), experts.slab() + desc.svh_offset_bytes,
                                    desc.out_channels * 2) == 0;
      if (!same) throw std::runtime_error(fmt::format("tp {}: expert {} has wrong bytes", tp, e));
    }
  }
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

bool Report(const std::filesystem::path& directory, const Case& c) {
  const Checkpoint checkpoint = Take(Checkpoint::Open(directory));
  const ExtentPlan plan = Take(ExtentPlan::Create(checkpoint, {.tp = c.tp}));
  const LoadSizes sizes = Take(SizeExperts(checkpoint, plan, 0, c.tp - 1, {.order = c.order}));
  std::vector<double> load, plain;
  uint64_t read_bytes = 0, peak_bytes = 0;
  for (int i = 0; i < kSamples; ++i) {  // in turns, so that both see the same machine
    const Sample sample = InChild([&] { return LoadOnce(directory, c); });
    load.push_back(sample.seconds);
    read_bytes = std::max(read_bytes, sample.read_bytes);
    peak_bytes = std::max(peak_bytes, sample.peak_bytes);
    plain.push_back(InChild([&] { return ReadPlainly(directory, c); }).seconds);
  }
  const Sample open = InChild([&] { return Seconds([&] { Take(Checkpoint::Open(directory)); }); });
  const uint64_t allowed = sizes.table.slab_bytes() + kDefaultStagingBytes + 64 * kMiB;
  const uint64_t payload_read = read_bytes - std::min(open.read_bytes, read_bytes);
  const double extra = static_cast<double>(payload_read) / static_cast<double>(sizes.read_bytes) - 1;
  const double share = Median(plain) / Median(load);
  const double gb = static_cast<double>(sizes.read_bytes) / 1e9;
  fmt::print("tp {}, rank {}, {}{}: owned {} bytes, slab {}\n", c.tp, c.tp - 1,
             c.order == CodeOrder::kPanels ? "panels" : "native order", c.hash ? ", with SHA-256" : "",
             sizes.read_bytes, sizes.table.slab_bytes());
  fmt::print("  load   s: {:.3f}  median {:.3f}, {:.2f} GB/s\n", fmt::join(load, " "), Median(load),
             gb / Median(load));
  fmt::print("  plain  s: {:.3f}  median {:.3f}, {:.2f} GB/s\n", fmt::join(plain, " "), Median(plain),
             gb / Median(plain));
  fmt::print(
      "  load / plain throughput {:.3f}{}; bytes beyond the owned {:.4f} %, goal <= 2 %; peak memory {} MiB, "
      "goal <= {} MiB\n",
      share, c.hash ? "" : ", goal >= 0.8", extra * 100, peak_bytes / kMiB, allowed / kMiB);
  return extra <= 0.02 && peak_bytes <= allowed && (c.hash || share >= 0.8);
}

int Main(int argc, char** argv) {
  const testing::TemporaryDirectory temporary;
  const std::filesystem::path directory = argc > 1 ? std::filesystem::path(argv[1]) : temporary.path();
  const uint64_t gib = argc > 2 ? std::stoull(argv[2]) : 4;
  fmt::print("commit {}, {}, {}, {} threads\n", ESPALIER_COMMIT, ESPALIER_COMPILER, bench::ProcessorName(),
             HardwareThreads());
  if (!std::filesystem::exists(directory / kShard)) WriteCheckpoint(directory, gib << 30);
  fmt::print("checkpoint: {} bytes, hidden {}, intermediate {}, {} bits, page cache warm\n",
             std::filesystem::file_size(directory / kShard), kHidden, kIntermediate, kBits);
  for (const int tp : {1, 8}) CheckBytes(directory, tp);
  fmt::print("bytes: right at tp 1 and 8\n");
  bool passed = true;
  for (const CodeOrder order : {CodeOrder::kPanels, CodeOrder::kNative}) {
    for (const auto& [tp, hash] : {std::pair{1, false}, {2, false}, {4, false}, {8, false}, {1, true}})
      passed = Report(directory, {.tp = tp, .hash = hash, .order = order}) && passed;
  }
  fmt::print("{}\n", passed ? "goals met" : "GOALS MISSED");
  return passed ? 0 : 1;
}

}  // namespace
}  // namespace espalier

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    return espalier::Main(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "load_bench: %s\n", error.what());
    return 2;
  }
}
