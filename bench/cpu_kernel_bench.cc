// SPDX-License-Identifier: Apache-2.0
//
// One thread on panels of 32 output channels by every table of kernels that this machine has:
//   decode/TABLE/OPERAND/CODEBOOK/K    decoding blocks of 128 x 32 weights into a buffer; items are weights
//   whole/TABLE/CODEBOOK/K/rows:R      decoding and products of mode fast as a layer takes them for R rows:
//   in
//                                      one loop where the table has it ("fused" in the label)
//   split/TABLE/CODEBOOK/K/rows:R      the same, decoded into a buffer first
// The codes of a run do not fit into the caches. Before anything is timed, whole and split are compared.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "bench/provenance.h"
#include "cpu/group_product.h"
#include "cpu/kernel_table.h"

namespace espalier {
namespace {

constexpr uint32_t kBlocks = 16;  // 2048 input channels
constexpr uint32_t kPanels = 3072;
constexpr uint64_t kBlockWeights = uint64_t{cpu::kBlockChannels} * kPanelChannels;
constexpr uint64_t kWeights = kPanels * kBlocks * kBlockWeights;
constexpr uint32_t kRows[] = {1, 2, 3, 4, 5, 6, 7, 8, 12, 32};
constexpr double kMostDifference = 1e-5;  // of sums in fp32, whose order differs

uint64_t BlockWordsOf(int bits) { return kBlockWeights / 32 * static_cast<uint64_t>(bits); }

// Decoding fetches the block behind the last one, products 4 KiB behind their own.
const std::vector<uint32_t>& Codes() {
  static const std::vector<uint32_t> codes = [] {
    std::mt19937 random(1);
    std::vector<uint32_t> words(kPanels * kBlocks * BlockWordsOf(kMaxBits) + 8192);
    for (uint32_t& word : words) word = static_cast<uint32_t>(random());
    return words;
  }();
  return codes;
}

void DecodeBlocks(benchmark::State& state, cpu::KernelTable::Decode decode, int bits) {
  std::vector<uint32_t> weights(kBlockWeights);
  const uint32_t* codes = Codes().data();
  uint64_t block = 0;
  for (auto _ : state) {
    decode(codes + block * BlockWordsOf(bits), weights.data());
    benchmark::DoNotOptimize(weights.data());
    benchmark::ClobberMemory();
    block = (block + 1) % (kWeights / kBlockWeights);
  }
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(kBlockWeights));
}

// Products of some rows with 128 output channels at a time.
class Product {
 public:
  Product(const cpu::KernelTable& table, Codebook codebook, int bits, uint32_t rows)
      : table_(table), bits_(bits), rows_(rows), operand_(table.operand(CpuMode::kFast, codebook, rows)) {
    const int number = static_cast<int>(codebook);
    decode_ = table.decode[static_cast<int>(operand_)][number][bits];
    fused_ = rows <= cpu::kMaxFusedRows ? table.fused[number][bits][rows] : nullptr;
    inputs_ = {.operand = operand_, .rows = rows, .words = nullptr, .scales = nullptr, .starts = nullptr};
    // One block more: products fetch the inputs of the next one.
    words_.resize((kBlocks + 1) * inputs_.BlockStride());
    scales_.resize(kBlocks * rows);
    starts_.resize(kBlocks * rows);
    inputs_.words = words_.data();
    inputs_.scales = scales_.data();
    inputs_.starts = starts_.data();
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    for (uint32_t row = 0; row < rows; ++row) {
      for (uint32_t block = 0; block < kBlocks; ++block) {
        alignas(64) float values[cpu::kBlockChannels];
        for (float& value : values) value = normal(random);
        cpu::PackRow(table, inputs_, row, block, values);
      }
    }
  }

  bool has_fused() const { return fused_ != nullptr; }

  const std::vector<float>& Sums(uint32_t first_panel, bool split) {
    std::fill(sums_.begin(), sums_.end(), 0.0f);
    for (uint32_t p = 0; p < cpu::kBlockPanels; ++p) {
      const uint32_t* codes = Codes().data() + uint64_t{first_panel + p} * kBlocks * BlockWordsOf(bits_);
      float* sums = sums_.data() + p * kPanelChannels;
      if (fused_ != nullptr && !split) {
        fused_(codes, kBlocks,
               {.first = Rows(0, 0), .word_stride = inputs_.BlockStride(), .row_stride = rows_}, sums,
               cpu::kBlockChannels);
      } else {
        Split(codes, sums);
      }
    }
    return sums_;
  }

 private:
  cpu::PackedRows Rows(uint32_t block, uint32_t first) const {
    const uint64_t place = uint64_t{block} * rows_ + first;
    return {.words = words_.data() + place * cpu::BlockWords(operand_),
            .scales = scales_.data() + place,
            .starts = starts_.data() + place};
  }

  void Split(const uint32_t* codes, float* sums) {
    const cpu::RowRuns runs(rows_, table_.max_rows);
    for (uint32_t block = 0; block < kBlocks; ++block) {
      decode_(codes + block * BlockWordsOf(bits_), weights_.data());
      for (uint32_t run = 0; run < runs.runs; ++run) {
        const uint32_t first = runs.First(run);
        table_.multiply[static_cast<int>(operand_)][runs.Length(run)](
            weights_.data(), Rows(block, first), sums + uint64_t{first} * cpu::kBlockChannels,
            cpu::kBlockChannels);
      }
    }
  }

  const cpu::KernelTable& table_;
  int bits_;
  uint32_t rows_;
  cpu::Operand operand_;
  cpu::KernelTable::Decode decode_ = nullptr;
  cpu::KernelTable::Fused fused_ = nullptr;
  cpu::GroupInputs inputs_;
  std::vector<uint32_t> words_;
  std::vector<float> scales_;
  std::vector<int32_t> starts_;
  std::vector<uint32_t> weights_ = std::vector<uint32_t>(kBlockWeights);
  std::vector<float> sums_ = std::vector<float>(uint64_t{rows_} * cpu::kBlockChannels);
};

bool Agree(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(double{a[i]} - double{b[i]}, 2);
    norm += std::pow(double{b[i]}, 2);
  }
  return norm > 0 && std::sqrt(difference / norm) <= kMostDifference;
}

void Multiply(benchmark::State& state, const cpu::KernelTable& table, Codebook codebook, int bits,
              bool split) {
  Product product(table, codebook, bits, static_cast<uint32_t>(state.range(0)));
  const std::vector<float> whole = product.Sums(0, false);
  if (!Agree(whole, product.Sums(0, true))) return state.SkipWithError("sums differ");
  uint32_t panel = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(product.Sums(panel, split).data());
    panel = (panel + cpu::kBlockPanels) % kPanels;
  }
  const auto weights = static_cast<int64_t>(kBlocks * cpu::kBlockPanels * kBlockWeights);
  state.SetItemsProcessed(state.iterations() * weights);
  state.counters["products"] = benchmark::Counter(static_cast<double>(weights * state.range(0)),
                                                  benchmark::Counter::kIsIterationInvariantRate);
  state.SetLabel(product.has_fused() && !split ? "fused" : "split");
}

void RegisterFormat(const cpu::KernelTable& table, const CodebookInfo& info, int bits) {
  for (int operand = 0; operand < cpu::kNumOperands; ++operand) {
    const auto decode = table.decode[operand][static_cast<int>(info.codebook)][bits];
    if (decode == nullptr) continue;
    const std::string name =
        fmt::format("decode/{}/{}/{}/K{}", table.name, cpu::OperandName(static_cast<cpu::Operand>(operand)),
                    info.name, bits);
    benchmark::RegisterBenchmark(name.c_str(), DecodeBlocks, decode, bits);
  }
  for (const bool split : {false, true}) {
    const std::string name =
        fmt::format("{}/{}/{}/K{}/rows", split ? "split" : "whole", table.name, info.name, bits);
    auto* registered = benchmark::RegisterBenchmark(
        name.c_str(), [&table, codebook = info.codebook, bits, split](benchmark::State& state) {
          Multiply(state, table, codebook, bits, split);
        });
    for (const uint32_t rows : kRows) registered->Arg(rows);
  }
}

void RegisterAll() {
  for (const cpu::KernelTable* table : cpu::UsableTables()) {
    for (const CodebookInfo& info : AllCodebooks()) {
#define ESPALIER_BITS(bits) RegisterFormat(*table, info, bits);
#include <espalier/formats.def>
    }
  }
}

}  // namespace
}  // namespace espalier

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  espalier::bench::AddProvenance();
  espalier::RegisterAll();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
