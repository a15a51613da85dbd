// SPDX-License-Identifier: Apache-2.0
//
// Scratch memory of one thread, inside a workspace.
#ifndef ESPALIER_SRC_CPU_LANE_H_
#define ESPALIER_SRC_CPU_LANE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/group_product.h"

namespace espalier::cpu {

// Every offset is a multiple of 64.
struct LaneLayout {
  uint64_t state = 0;
  uint64_t scratch = 0;
  uint64_t sums = 0;       // float [2][rows][128]
  uint64_t offsets = 0;    // float [2][rows]
  uint64_t exponents = 0;  // int32 [rows]
  uint64_t scales = 0;     // float [rows][blocks]
  uint64_t input_words = 0;
  uint64_t input_places = 0;  // of scales and starts
  uint64_t input_bytes = 0;   // of the words of one of the two inputs
  uint64_t rows = 0;
  uint64_t blocks = 0;  // of an input
  uint64_t total_bytes = 0;
};

// For inputs of in_channels and groups of at most max_rows rows; `mid_blocks` blocks have scales of their own.

class Lane {
 public:
  // What a thread remembers from task to task.
  struct State {
    const void* group = nullptr;  // whose inputs are packed
  };

  Lane(const LaneLayout& layout, std::byte* base) : layout_(layout), base_(base) {}

  State& state() { return *At<State>(layout_.state); }
  ProductScratch& scratch() { return *At<ProductScratch>(layout_.scratch); }
  float* sums(int which) { return At<float>(layout_.sums) + uint64_t(which) * layout_.rows * kBlockChannels; }
  float* offsets(int which) { return At<float>(layout_.offsets) + uint64_t(which) * layout_.rows; }
  int32_t* exponents() { return At<int32_t>(layout_.exponents); }
  float* scales() { return At<float>(layout_.scales); }
  GroupInputs Inputs(int which, Operand operand, uint32_t rows) {
    const uint64_t places = layout_.rows * layout_.blocks;
    float* scales = At<float>(layout_.input_places) + uint64_t(which) * 2 * places;
    return {.operand = operand,
            .rows = rows,
            .words = At<uint32_t>(layout_.input_words + uint64_t(which) * layout_.input_bytes),
            .scales = scales,
            .starts = reinterpret_cast<int32_t*>(scales + places)};
  }

 private:
  template <typename T>
  T* At(uint64_t offset) {
    return reinterpret_cast<T*>(base_ + offset);
  }

  const LaneLayout& layout_;
  std::byte* base_;
};

inline LaneLayout LayOutLane(const KernelTable& table, CpuMode mode, uint64_t in_channels, uint64_t max_rows,
                             uint64_t mid_blocks) {
  LaneLayout layout;
  const auto add = [&](uint64_t bytes) {
    const uint64_t offset = layout.total_bytes;
    layout.total_bytes += (bytes + 63) / 64 * 64;
    return offset;
  };
  layout.rows = std::min<uint64_t>(kGroupRows, std::max<uint64_t>(max_rows, 1));
  layout.blocks = in_channels / kBlockChannels;
  uint64_t words = 0;  // of the largest group
  for (uint32_t rows = 1; rows <= layout.rows; ++rows) {
    for (int codebook = 0; codebook < kNumCodebooks; ++codebook) {
      const Operand operand = table.operand(mode, static_cast<Codebook>(codebook), rows);
      words = std::max<uint64_t>(words, uint64_t{rows} * BlockWords(operand));
    }
  }
  layout.state = add(sizeof(Lane::State));
  layout.scratch = add(sizeof(ProductScratch));
  layout.sums = add(2 * layout.rows * kBlockChannels * sizeof(float));
  layout.offsets = add(2 * layout.rows * sizeof(float));
  layout.exponents = add(layout.rows * sizeof(int32_t));
  layout.scales = add(layout.rows * mid_blocks * sizeof(float));
  layout.input_bytes = words * layout.blocks * sizeof(uint32_t);
  layout.input_words = add(2 * layout.input_bytes);
  layout.input_places = add(4 * layout.rows * layout.blocks * sizeof(float));
  return layout;
}

}  // namespace espalier::cpu

#endif  // ESPALIER_SRC_CPU_LANE_H_
