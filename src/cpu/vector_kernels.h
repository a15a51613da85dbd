// SPDX-License-Identifier: Apache-2.0
//
// The kernels of cpu/kernel_table.h for a vector unit `V`: one algorithm, written once. Included by one file
// per instruction set, which is compiled for it and gives V:
//   kLanes                          32-bit lanes, 8 or 16
//   Int, Float                      vectors of integers and floats
//   Load, Store, Set, SetFloat      unaligned access; one value in all lanes
//   And, Or, Xor, Add, Multiply     on 32-bit lanes; ShiftRight<n>, ShiftLeft<n>, ShiftRightSigned<n>,
//                                   ShiftRightSigned16<n> (16-bit lanes), AndXor(a, b, c) = (a & b) ^ c
//   PreviousGroup                   lane i of every 8 gets lane i - 1, lane 0 lane 7
//   Straddle(before, word)          what StraddleRight shifts: the low half of `before`, then the high half
//   of
//                                   `word`; StraddleRight<n> gives its bits n and up, with junk above bit 15
//   LowThenHigh(a, b)               the low halves of a's lanes and the high halves of b's
//   ByteSums, ByteSumPair, ...      see the kernels
// Everything here is in an unnamed namespace and calls no inline function of another header: a function that
// was compiled for this instruction set must not be linked into code that runs on others.
#ifndef ESPALIER_SRC_CPU_VECTOR_KERNELS_H_
#define ESPALIER_SRC_CPU_VECTOR_KERNELS_H_

#include <type_traits>
#include <utility>

#include "cpu/kernel_table.h"

#define ESPALIER_INLINE inline __attribute__((always_inline))
#define ESPALIER_LAMBDA_INLINE __attribute__((always_inline))

namespace espalier::cpu {
namespace {

constexpr uint32_t kStepLanes = 32;  // words of a row of a panel step is 16; of a vector of weights 32
constexpr uint32_t kPrefetchBytes = 4096;

// f.template operator()<0>() to <count - 1>(). Not a loop: g++ 12 unrolls loops after it has decided which
// arrays may live in registers, and keeps the sums of a product in memory.
template <int... kIndices, class F>
ESPALIER_INLINE void UnrollOf(std::integer_sequence<int, kIndices...>, const F& f) {
  (f.template operator()<kIndices>(), ...);
}
template <int kCount, class F>
ESPALIER_INLINE void Unroll(const F& f) {
  UnrollOf(std::make_integer_sequence<int, kCount>(), f);
}
#define ESPALIER_UNROLL(index, count) Unroll<(count)>([&]<int index>() ESPALIER_LAMBDA_INLINE

// ---- States ----------------------------------------------------------------------------------------------

// The words of one step: 32 successive states of 8 output channels and of the 8 beside them, in 16 lanes.
// With fewer lanes a step is taken in two parts, one per tile.
template <class V, int kBits>
struct Step {
  typename V::Int words[kBits];
  typename V::Int straddles[kBits];  // of word - 1 and word

  ESPALIER_INLINE void Read(const uint32_t* codes) {
    ESPALIER_UNROLL(i, kBits) { words[i] = V::Load(codes + i * 16); });
    straddles[0] = V::Straddle(V::PreviousGroup(words[kBits - 1]), words[0]);
    ESPALIER_UNROLL(i, kBits - 1) { straddles[i + 1] = V::Straddle(words[i], words[i + 1]); });
  }

  // State i of every lane: 16 bits, the last of which is the last bit of symbol i.
  template <int kIndex>
  ESPALIER_INLINE typename V::Int State() const {
    constexpr int kEnd = (kIndex + 1) * kBits;
    constexpr int kWord = (kEnd - 1) / 32;
    constexpr int kShift = 32 * (kWord + 1) - kEnd;  // bits of the word behind the state
    if constexpr (kShift == 16) return V::template ShiftRight<16>(words[kWord]);
    const typename V::Int mask = V::Set(0xFFFF);
    if constexpr (kShift == 0) return V::And(words[kWord], mask);
    if constexpr (kShift < 16) return V::And(V::template ShiftRight<kShift>(words[kWord]), mask);
    return V::And(V::template StraddleRight<kShift - 16>(straddles[kWord]), mask);
  }
};

// The same by 16-bit lanes: one vector holds two states of every output channel, i in the lower half of its
// 32-bit lane and i + 16 in the upper one. Shifts and multiplications of 16 bits then do 16 states with 8
// lanes, and of those the multiplications are also the cheaper ones on many processors.
template <class V, int kBits>
struct HalfStep {
  const uint32_t* codes;

  ESPALIER_INLINE void Read(const uint32_t* step) { codes = step; }

  // States 0 to 15, in the lower halves.
  template <int kIndex>
  ESPALIER_INLINE typename V::Int States() const {
    constexpr int kEnd = (kIndex + 1) * kBits;
    constexpr int kWindow = (kEnd - 1) / 16;
    constexpr int kShift = 16 * (kWindow + 1) - kEnd;  // bits of the window behind the state
    const typename V::Int window = Window<kWindow>();
    if constexpr (kShift == 0) {
      return window;
    } else {
      const typename V::Int before = V::template ShiftLeft16<16 - kShift>(WindowBefore<kWindow>());
      return V::Or(V::template ShiftRight16<kShift>(window), before);
    }
  }

 private:
  // Bits 16i to 16i + 15 of every lane's stream, beside those that are 16 states later.
  template <int kIndex>
  ESPALIER_INLINE typename V::Int Window() const {
    constexpr int kLater = kIndex + kBits;
    const typename V::Int word = V::Load(codes + kIndex / 2 * 16);
    const typename V::Int later = V::Load(codes + kLater / 2 * 16);
    // A word's first 16 bits are its upper half.
    if constexpr (kIndex % 2 == 0 && kLater % 2 == 0) {
      return V::LowThenHigh(V::template ShiftRight<16>(word), later);
    } else if constexpr (kIndex % 2 == 0) {
      return V::SwapHalves(V::LowThenHigh(later, word));
    } else if constexpr (kLater % 2 == 0) {
      return V::LowThenHigh(word, later);
    } else {
      return V::LowThenHigh(word, V::template ShiftLeft<16>(later));
    }
  }
  template <int kIndex>
  ESPALIER_INLINE typename V::Int WindowBefore() const {
    if constexpr (kIndex > 0) {
      return Window<kIndex - 1>();
    } else {
      // The stream is a circle: before its first 16 bits are the last ones of the lane before.
      const typename V::Int last = Window<kBits - 1>();
      return V::LowThenHigh(V::PreviousGroup(V::template ShiftRight<16>(last)),
                            V::template ShiftLeft<16>(last));
    }
  }
};

template <class V, Operand kOperand, int kBits>
using StepOf = std::conditional_t<kOperand == Operand::kInt16Apart || kOperand == Operand::kCutFloat,
                                  HalfStep<V, kBits>, Step<V, kBits>>;

// f.template operator()<pair, half>(first, second) for the states of input channels 2 * pair and 2 * pair + 1
// and of output channels 8 * half and up, in the order in which the stream has them.
template <class S, int... kPlaces, class F>
ESPALIER_INLINE void ForPairsOf(const S& step, std::integer_sequence<int, kPlaces...>, const F& f) {
  (f.template operator()<(kPlaces >> 2) + 4 * (kPlaces & 1), (kPlaces >> 1 & 1)>(
       step.template State<kPlaces * 2>(), step.template State<kPlaces * 2 + 1>()),
   ...);
}
template <class S, class F>
ESPALIER_INLINE void ForPairs(const S& step, const F& f) {
  ForPairsOf(step, std::make_integer_sequence<int, 16>(), f);
}

// ---- Codebooks -------------------------------------------------------------------------------------------

constexpr uint32_t kMaskOfHalf = 0x81FF;   // sign, two bits of the exponent, 7 of the mantissa
constexpr uint32_t kFlipsOfHalf = 0x3F6C;  // format.md's 0x3B60 moved by 3, and the exponent of bf16

template <Codebook kCodebook, class V>
ESPALIER_INLINE typename V::Int Scramble(typename V::Int state) {
  if constexpr (kCodebook == Codebook::k3Inst) {
    return V::Add(V::Multiply(state, V::Set(89226354u)), V::Set(64248484u));
  } else if constexpr (kCodebook == Codebook::kMcg) {
    return V::Multiply(state, V::Set(0xCBAC1FEDu));
  } else {
    return V::Multiply(state, V::Set(0x83DCD12Du));
  }
}

// Both fp16 terms of a scrambled word as bf16, cut. Their exponents are four adjacent ones, so that moving
// the bits by 3 and setting the upper bits of the exponent is the whole conversion.
template <class V>
ESPALIER_INLINE typename V::Int Bf16Halves(typename V::Int word) {
  return V::AndXor(V::template ShiftRightSigned16<3>(word), V::Set(kMaskOfHalf * 0x10001u),
                   V::Set(kFlipsOfHalf * 0x10001u));
}

// The same for one term, exactly, as fp32. The term is the upper half of `word`.
template <class V>
ESPALIER_INLINE typename V::Float UpperTerm(typename V::Int word) {
  return V::AsFloat(V::AndXor(V::template ShiftRightSigned<3>(word), V::Set(kMaskOfHalf << 16 | 0xE000u),
                              V::Set(kFlipsOfHalf << 16)));
}

// The exact value as fp32.
template <Codebook kCodebook, class V>
ESPALIER_INLINE typename V::Float Value(typename V::Int state) {
  const typename V::Int word = Scramble<kCodebook, V>(state);
  if constexpr (kCodebook == Codebook::kMul1) {
    constexpr float kUnit = 1.0f / (1 << 18);
    const typename V::Float sum = V::ToFloat(V::ByteSums(word));
    return V::RoundToFp16(V::Fma(sum, V::SetFloat(1774 * kUnit), V::SetFloat(-905216 * kUnit)));
  } else {
    return V::RoundToFp16(V::AddFloat(UpperTerm<V>(word), UpperTerm<V>(V::template ShiftLeft<16>(word))));
  }
}

// ---- Weights of a step as operands -----------------------------------------------------------------------

template <Operand kOperand, Codebook kCodebook, class V>
ESPALIER_INLINE typename V::Int PairOperand(typename V::Int first, typename V::Int second) {
  const typename V::Int a = Scramble<kCodebook, V>(first);
  const typename V::Int b = Scramble<kCodebook, V>(second);
  if constexpr (kOperand == Operand::kFixed16) {
    return V::LowPair(V::FixedSum(Bf16Halves<V>(a)), V::FixedSum(Bf16Halves<V>(b)));
  } else {
    return V::ByteSumPair(a, b);
  }
}

template <Operand kOperand, Codebook kCodebook, class V>
ESPALIER_INLINE typename V::Int SingleOperand(typename V::Int state) {
  if constexpr (kOperand == Operand::kFloat) {
    return V::AsInt(Value<kCodebook, V>(state));
  } else {
    return Bf16Halves<V>(Scramble<kCodebook, V>(state));
  }
}

// Scrambled words by 16-bit lanes, of two vectors of states, in a lower and an upper half. The instructions
// for the two alternate: a scheduler of 36 entries (Zen 2) holds two such chains if they lie behind one
// another, and waits for them.
template <Codebook kCodebook, class V>
ESPALIER_INLINE void ScrambleApart(typename V::Int (&states)[2], typename V::Int (&low)[2],
                                   typename V::Int (&high)[2]) {
  using Int = typename V::Int;
  constexpr uint32_t kFactor = kCodebook == Codebook::k3Inst ? 89226354u
                               : kCodebook == Codebook::kMcg ? 0xCBAC1FEDu
                                                             : 0x83DCD12Du;
  const Int low_factor = V::Set((kFactor & 0xFFFF) * 0x10001u);
  const Int high_factor = V::Set((kFactor >> 16) * 0x10001u);
  V::Alternate(states);
  low[0] = V::Multiply16(states[0], low_factor);
  low[1] = V::Multiply16(states[1], low_factor);
  high[0] = V::MultiplyHigh16(states[0], low_factor);
  high[1] = V::MultiplyHigh16(states[1], low_factor);
  Int more[2] = {V::Multiply16(states[0], high_factor), V::Multiply16(states[1], high_factor)};
  V::Alternate(low);
  V::Alternate(high);
  V::Alternate(more);
  high[0] = V::Add16(high[0], more[0]);
  high[1] = V::Add16(high[1], more[1]);
  if constexpr (kCodebook == Codebook::k3Inst) {
    constexpr uint32_t kMore = 64248484u;
    const Int low_more = V::Set((kMore & 0xFFFF) * 0x10001u);
    const Int high_more = V::Set(((kMore >> 16) + 1) * 0x10001u);  // with a carry
    low[0] = V::Add16(low[0], low_more);
    low[1] = V::Add16(low[1], low_more);
    high[0] = V::Add16(V::Add16(high[0], high_more), V::NoCarry16(low[0], low_more));
    high[1] = V::Add16(V::Add16(high[1], high_more), V::NoCarry16(low[1], low_more));
  }
}

// Byte sums of mul1, in place of the states.
template <class V>
ESPALIER_INLINE void ByteSumsOf(typename V::Int (&states)[2]) {
  using Int = typename V::Int;
  Int low[2], high[2];
  ScrambleApart<Codebook::kMul1, V>(states, low, high);
  Int low_sums[2] = {V::ByteHalves(low[0]), V::ByteHalves(low[1])};
  Int high_sums[2] = {V::ByteHalves(high[0]), V::ByteHalves(high[1])};
  V::Alternate(low_sums);
  V::Alternate(high_sums);
  states[0] = V::Add16(low_sums[0], high_sums[0]);
  states[1] = V::Add16(low_sums[1], high_sums[1]);
  V::Alternate(states);
}

// Both terms of 3inst or mcg, cut to bf16 and added as fp32: values of the lower halves of states, then those
// of the upper ones.
template <Codebook kCodebook, class V>
ESPALIER_INLINE void CutValuesOf(typename V::Int (&states)[2], typename V::Int (&near)[2],
                                 typename V::Int (&far)[2]) {
  using Int = typename V::Int;
  Int low[2], high[2];
  ScrambleApart<kCodebook, V>(states, low, high);
  low[0] = Bf16Halves<V>(low[0]);
  low[1] = Bf16Halves<V>(low[1]);
  high[0] = Bf16Halves<V>(high[0]);
  high[1] = Bf16Halves<V>(high[1]);
  V::Alternate(low);
  V::Alternate(high);
  const auto sum = [](Int a, Int b)
                       ESPALIER_LAMBDA_INLINE { return V::AsInt(V::AddFloat(V::AsFloat(a), V::AsFloat(b))); };
  const Int upper = V::Set(0xFFFF0000u);
  near[0] = sum(V::template ShiftLeft<16>(low[0]), V::template ShiftLeft<16>(high[0]));
  near[1] = sum(V::template ShiftLeft<16>(low[1]), V::template ShiftLeft<16>(high[1]));
  far[0] = sum(V::And(low[0], upper), V::And(high[0], upper));
  far[1] = sum(V::And(low[1], upper), V::And(high[1], upper));
  V::Alternate(near);
  V::Alternate(far);
}

// f.template operator()<word, half>(vector) for the words of kInt16Apart and kCutFloat.
template <Operand kOperand, Codebook kCodebook, class V, class S, int... kPairs, class F>
ESPALIER_INLINE void ForApart(const S& step, std::integer_sequence<int, kPairs...>, const F& f) {
  const auto pair = [&]<int kPair>() ESPALIER_LAMBDA_INLINE {
    // States 2p and 2p + 1 are pair p of ForPairs; those 16 later are 4 input channels further on.
    constexpr int kHalf = kPair >> 1 & 1;
    typename V::Int states[2] = {step.template States<2 * kPair>(), step.template States<2 * kPair + 1>()};
    if constexpr (kOperand == Operand::kInt16Apart) {
      constexpr int kWord = (kPair >> 2) * 2 + (kPair & 1) * 4;
      ByteSumsOf<V>(states);
      f.template operator()<kWord, kHalf>(states[0]);
      f.template operator()<kWord + 1, kHalf>(states[1]);
    } else {
      constexpr int kWord = (kPair >> 2) * 2 + (kPair & 1) * 8;
      typename V::Int near[2], far[2];
      CutValuesOf<kCodebook, V>(states, near, far);
      f.template operator()<kWord, kHalf>(near[0]);
      f.template operator()<kWord + 1, kHalf>(near[1]);
      f.template operator()<kWord + 4, kHalf>(far[0]);
      f.template operator()<kWord + 5, kHalf>(far[1]);
    }
  };
  (pair.template operator()<kPairs>(), ...);
}

// f.template operator()<word, half>(vector): every vector of weights of a step; `word` counts the
// activations' words in a tile.
template <Operand kOperand, Codebook kCodebook, class V, class S, class F>
ESPALIER_INLINE void ForOperands(const S& step, const F& f) {
  if constexpr (kOperand == Operand::kInt16Apart || kOperand == Operand::kCutFloat) {
    static_assert((kOperand == Operand::kInt16Apart) == (kCodebook == Codebook::kMul1));
    ForApart<kOperand, kCodebook, V>(step, std::make_integer_sequence<int, 8>(), f);
  } else if constexpr (kOperand == Operand::kInt8) {
    typename V::Int low = V::Set(0);
    ForPairs(step,
             [&]<int kPair, int kHalf>(typename V::Int first, typename V::Int second) ESPALIER_LAMBDA_INLINE {
               const typename V::Int sums = PairOperand<Operand::kInt16, kCodebook, V>(first, second);
               // Pairs 0 .. 3 come just before the pairs 4 .. 7 of the same output channels.
               if constexpr (kPair < 4) {
                 low = V::template ShiftRight<2>(sums);
               } else {
                 f.template operator()<kPair - 4, kHalf>(V::MergeBytes(low, V::template ShiftLeft<6>(sums)));
               }
             });
  } else if constexpr (kOperand == Operand::kFixed16 || kOperand == Operand::kInt16) {
    ForPairs(step,
             [&]<int kPair, int kHalf>(typename V::Int first, typename V::Int second) ESPALIER_LAMBDA_INLINE {
               f.template operator()<kPair, kHalf>(PairOperand<kOperand, kCodebook, V>(first, second));
             });
  } else {
    ForPairs(step,
             [&]<int kPair, int kHalf>(typename V::Int first, typename V::Int second) ESPALIER_LAMBDA_INLINE {
               f.template operator()<2 * kPair, kHalf>(SingleOperand<kOperand, kCodebook, V>(first));
               f.template operator()<2 * kPair + 1, kHalf>(SingleOperand<kOperand, kCodebook, V>(second));
             });
  }
}

template <class V, Operand kOperand, Codebook kCodebook, int kBits>
void DecodePanelBlock(const uint32_t* codes, uint32_t* weights) {
  constexpr uint32_t kStepWords = BlockWords(kOperand) / kBlockSteps;
  for (uint32_t s = 0; s < kBlockSteps; ++s) {
    for (uint32_t part = 0; part < 16; part += V::kLanes) {
      StepOf<V, kOperand, kBits> step;
      step.Read(codes + part);
      ForOperands<kOperand, kCodebook, V>(
          step, [&]<int kWord, int kHalf>(typename V::Int vector) ESPALIER_LAMBDA_INLINE {
            V::Store(weights + kWord * kStepLanes + kHalf * 16 + part, vector);
          });
    }
    // The next block, which is wanted after the products with this one.
    for (int i = 0; i < kBits; ++i)
      __builtin_prefetch(codes + (static_cast<int>(kBlockSteps) * kBits + i) * 16);
    codes += kBits * 16;
    weights += kStepWords * kStepLanes;
  }
}

// ---- Products --------------------------------------------------------------------------------------------

template <Operand kOperand, class V>
struct Sums {
  static constexpr bool kIsFloat =
      kOperand == Operand::kFloat || kOperand == Operand::kCutFloat || kOperand == Operand::kBf16Halves;

  // A sum is kept as an integer vector; floats are the same bits.
  static ESPALIER_INLINE typename V::Int Start(int32_t start) {
    return V::Set(kIsFloat ? 0u : static_cast<uint32_t>(start));
  }
  static ESPALIER_INLINE typename V::Int Dot(typename V::Int sum, typename V::Int weights,
                                             typename V::Int input) {
    if constexpr (kOperand == Operand::kFloat || kOperand == Operand::kCutFloat) {
      return V::DotFloat(sum, weights, input);
    } else if constexpr (kIsFloat) {
      return V::DotBf16(sum, weights, input);
    } else if constexpr (kOperand == Operand::kInt8) {
      return V::DotInt8(sum, weights, input);
    } else {
      return V::DotInt16(sum, weights, input);
    }
  }
  static ESPALIER_INLINE typename V::Int Add(typename V::Int a, typename V::Int b) {
    if constexpr (kIsFloat) {
      return V::AsInt(V::AddFloat(V::AsFloat(a), V::AsFloat(b)));
    } else {
      return V::Add(a, b);
    }
  }
  static ESPALIER_INLINE typename V::Float Float(typename V::Int sum) {
    if constexpr (kIsFloat) {
      return V::AsFloat(sum);
    } else {
      return V::ToFloat(sum);
    }
  }
};

// The order in which ForOperands comes to words of one value each. Sums in fp32 depend on the order.
constexpr uint32_t StreamWord(uint32_t i) { return (i & ~15u) | (i << 2 & 8) | (i >> 1 & 6) | (i & 1); }

// Sums of `kRows` rows and two vectors of output channels stay in registers.
template <class V, Operand kOperand, int kRows>
ESPALIER_INLINE void MultiplyTwoVectors(const uint32_t* weights, uint32_t second, const PackedRows& rows,
                                        float* sums, uint64_t sums_stride) {
  using Sum = Sums<kOperand, V>;
  typename V::Int acc[kRows][2];
  ESPALIER_UNROLL(r, kRows) { acc[r][0] = acc[r][1] = Sum::Start(rows.starts[r]); });
  const uint32_t* words = rows.words;
  for (uint32_t i = 0; i < BlockWords(kOperand); ++i) {
    const uint32_t word = kOperand == Operand::kFloat ? StreamWord(i) : i;
    const typename V::Int w0 = V::Load(weights + word * kStepLanes);
    const typename V::Int w1 = V::Load(weights + word * kStepLanes + second);
    ESPALIER_UNROLL(r, kRows) {
      const typename V::Int input = V::Set(words[r * BlockWords(kOperand) + word]);
      acc[r][0] = Sum::Dot(acc[r][0], w0, input);
      acc[r][1] = Sum::Dot(acc[r][1], w1, input);
    });
  }
  ESPALIER_UNROLL(r, kRows) {
    const typename V::Float scale = V::SetFloat(rows.scales[r]);
    float* row = sums + uint64_t{r} * sums_stride;
    V::StoreFloat(row, V::Fma(Sum::Float(acc[r][0]), scale, V::LoadFloat(row)));
    V::StoreFloat(row + second, V::Fma(Sum::Float(acc[r][1]), scale, V::LoadFloat(row + second)));
  });
}

template <class V, Operand kOperand, int kRows>
void MultiplyPanelBlock(const uint32_t* weights, const PackedRows& rows, float* sums, uint64_t sums_stride) {
  constexpr uint32_t kLanes = V::kLanes;
  for (uint32_t first = 0; first < kStepLanes; first += 2 * kLanes) {
    MultiplyTwoVectors<V, kOperand, kRows>(weights + first, kLanes, rows, sums + first, sums_stride);
  }
}

// Decoded weights go from their register straight into the products. With few rows a row and vector has
// several sums, as a chain of additions takes five cycles a link; fp32 has the one of MultiplyTwoVectors.
template <class V, Operand kOperand, Codebook kCodebook, int kBits, int kRows>
ESPALIER_INLINE void MultiplyCodesPart(const uint32_t* codes, uint32_t num_blocks, const PackedInputs& inputs,
                                       float* sums, uint64_t sums_stride) {
  using Sum = Sums<kOperand, V>;
  constexpr uint32_t kStepWords = BlockWords(kOperand) / kBlockSteps;
  constexpr bool kOneChain = kRows > 2 || kOperand == Operand::kFloat;
  constexpr int kChains = kOneChain ? 1 : kStepWords == 8 || kRows > 1 || V::kLanes == 8 ? 2 : 4;
  typename V::Float totals[kRows][2];
  ESPALIER_UNROLL(r, kRows) {
    totals[r][0] = V::LoadFloat(sums + uint64_t{r} * sums_stride);
    totals[r][1] = V::LoadFloat(sums + uint64_t{r} * sums_stride + 16);
  });
  for (uint32_t block = 0; block < num_blocks; ++block) {
    const uint32_t* words = inputs.first.words + block * inputs.word_stride;
    const int32_t* starts = inputs.first.starts + block * inputs.row_stride;
    const float* scales = inputs.first.scales + block * inputs.row_stride;
    typename V::Int acc[kRows][2][kChains];
    ESPALIER_UNROLL(i, kRows * kChains) {
      constexpr int r = i / kChains, c = i % kChains;
      acc[r][0][c] = acc[r][1][c] = Sum::Start(c == 0 ? starts[r] : 0);
    });
    for (uint32_t s = 0; s < kBlockSteps; ++s) {
      StepOf<V, kOperand, kBits> step;
      step.Read(codes);
      for (int i = 0; i < kBits; ++i)
        __builtin_prefetch(reinterpret_cast<const char*>(codes + i * 16) + kPrefetchBytes);
      // Of the next block's inputs, which are beyond the first-level cache.
      if constexpr (kRows > 2) {
        constexpr uint32_t kLineWords = 16, kLines = BlockWords(kOperand) * kRows / kLineWords / kBlockSteps;
        const uint32_t* next = inputs.first.words + (block + 1) * inputs.word_stride;
        for (uint32_t i = s * kLines; i < (s + 1) * kLines; ++i) __builtin_prefetch(next + i * kLineWords);
      }
      ForOperands<kOperand, kCodebook, V>(
          step, [&]<int kWord, int kHalf>(typename V::Int vector) ESPALIER_LAMBDA_INLINE {
            ESPALIER_UNROLL(r, kRows) {
              typename V::Int& sum = acc[r][kHalf][kWord % kChains];
              sum = Sum::Dot(sum, vector, V::Set(words[r * BlockWords(kOperand) + kWord]));
            });
          });
      words += kStepWords;
      codes += kBits * 16;
    }
    ESPALIER_UNROLL(i, kRows * 2) {
      constexpr int r = i / 2, h = i % 2;
      typename V::Int sum = acc[r][h][0];
      ESPALIER_UNROLL(c, kChains - 1) { sum = Sum::Add(sum, acc[r][h][c + 1]); });
      totals[r][h] = V::Fma(Sum::Float(sum), V::SetFloat(scales[r]), totals[r][h]);
    });
  }
  ESPALIER_UNROLL(r, kRows) {
    V::StoreFloat(sums + uint64_t{r} * sums_stride, totals[r][0]);
    V::StoreFloat(sums + uint64_t{r} * sums_stride + 16, totals[r][1]);
  });
}

template <class V, Operand kOperand, Codebook kCodebook, int kBits, int kRows>
void MultiplyCodes(const uint32_t* codes, uint32_t num_blocks, const PackedInputs& inputs, float* sums,
                   uint64_t sums_stride) {
  for (uint32_t part = 0; part < 16; part += V::kLanes) {
    MultiplyCodesPart<V, kOperand, kCodebook, kBits, kRows>(codes + part, num_blocks, inputs, sums + part,
                                                            sums_stride);
  }
}

// ---- Rows ------------------------------------------------------------------------------------------------

template <class V>
struct Block {
  static constexpr uint32_t kVectors = kBlockChannels / V::kLanes;
  typename V::Float v[kVectors];

  ESPALIER_INLINE void Load(const float* values) {
    ESPALIER_UNROLL(i, kVectors) { v[i] = V::LoadFloat(values + i * V::kLanes); });
  }
  ESPALIER_INLINE void Store(float* values) const {
    ESPALIER_UNROLL(i, kVectors) { V::StoreFloat(values + i * V::kLanes, v[i]); });
  }
  ESPALIER_INLINE void Times(const uint16_t* factors) {
    ESPALIER_UNROLL(i, kVectors) { v[i] = V::MultiplyFloat(v[i], V::LoadFp16(factors + i * V::kLanes)); });
  }
  template <int kStride>
  ESPALIER_INLINE void Butterflies() {
    ESPALIER_UNROLL(pair, kVectors / 2) {
      constexpr int i = pair / kStride * 2 * kStride + pair % kStride;
      const typename V::Float a = v[i], b = v[i + kStride];
      v[i] = V::AddFloat(a, b);
      v[i + kStride] = V::SubtractFloat(a, b);
    });
  }
  ESPALIER_INLINE void Hadamard() {
    ESPALIER_UNROLL(i, kVectors) { v[i] = V::HadamardLanes(v[i]); });
    Butterflies<1>();
    Butterflies<2>();
    Butterflies<4>();
    if constexpr (kVectors == 16) Butterflies<8>();
    const typename V::Float scale = V::SetFloat(0.08838834764831844055f);
    ESPALIER_UNROLL(i, kVectors) { v[i] = V::MultiplyFloat(v[i], scale); });
  }
  // The largest magnitude; NaN where there is one.
  ESPALIER_INLINE float Largest() const {
    // As integers: there a NaN is larger than everything.
    typename V::Int largest = V::AsInt(V::Abs(v[0]));
    ESPALIER_UNROLL(i, kVectors) { largest = V::LargerInt(largest, V::AsInt(V::Abs(v[i]))); });
    return V::LargestLane(largest);
  }
};

template <class V>
void RotateRow(const float* x, const uint16_t* suh, float* rotated) {
  Block<V> block;
  block.Load(x);
  if (suh != nullptr) block.Times(suh);
  block.Hadamard();
  block.Store(rotated);
}

// Cutting shrinks the values of 3inst and mcg; this much on average, as the best factor over all states says.
constexpr float kCutTermsScale = 1.0021f;
// 128 products of the largest weights (510 from the middle; 4094) stay below 2^31.
constexpr float kInt16Limit = 32767;
constexpr float kFixed16Limit = 4095;
constexpr float kInt8Limit = 127;
constexpr float kMul1Unit = 1774.0f / (1 << 18);

// Integer activations: the largest magnitude becomes the limit. A block that is not finite has no integers;
// its scale is NaN and makes every sum NaN.
template <class V>
ESPALIER_INLINE void Quantize(const Block<V>& block, float limit, int32_t middle, float unit, float* scale,
                              int32_t* start, typename V::Int* integers) {
  const float largest = block.Largest();
  const bool finite = largest <= 3.4028235e38f;
  // Below this the factor would overflow; such a block counts as zero (its row is scaled long before).
  const bool zero = largest < 1e-30f;
  const float factor = finite && !zero ? limit / largest : 0.0f;
  *scale = finite ? (zero ? 0.0f : largest / limit * unit) : __builtin_nanf("");
  typename V::Int sum = V::Set(0);
  // Zero where the block is not finite: then the sums do not matter, but must be the same on every machine.
  const typename V::Int keep = V::Set(finite ? 0xFFFFFFFFu : 0);
  ESPALIER_UNROLL(i, Block<V>::kVectors) {
    integers[i] = V::And(V::ToInt(V::MultiplyFloat(block.v[i], V::SetFloat(factor))), keep);
    sum = V::Add(sum, integers[i]);
  });
  *start = -middle * V::SumOfLanes(sum);
}

template <class V>
ESPALIER_INLINE void PackBf16Twice(const Block<V>& block, uint32_t* words) {
  if constexpr (requires { V::UpperBf16(block.v[0]); }) {
    for (uint32_t i = 0; i < Block<V>::kVectors; ++i) {
      const typename V::Int upper = V::UpperBf16(block.v[i]);
      V::Store(words + i * V::kLanes, V::Or(upper, V::template ShiftRight<16>(upper)));
    }
  }
}

template <class V>
ESPALIER_INLINE void PackInt8(const typename V::Int* integers, uint32_t* words) {
  if constexpr (requires { V::StoreInt8(words, integers[0]); }) {
    for (uint32_t i = 0; i < Block<V>::kVectors; ++i) V::StoreInt8(words + i * V::kLanes / 4, integers[i]);
  }
}

template <class V>
ESPALIER_INLINE void PackInt16(const typename V::Int* integers, uint32_t* words) {
  for (uint32_t i = 0; i < Block<V>::kVectors; ++i) V::StoreLow16(words + i * V::kLanes / 2, integers[i]);
}

template <class V>
ESPALIER_INLINE void PackInt16Apart(const typename V::Int* integers, uint32_t* words) {
  if constexpr (requires { V::StoreLow16Apart(words, integers[0]); }) {
    for (uint32_t i = 0; i < Block<V>::kVectors; ++i)
      V::StoreLow16Apart(words + i * V::kLanes / 2, integers[i]);
  }
}

// Asked only for operands that V has.
template <class V>
void PackBlock(Operand operand, const float* values, uint32_t* words, float* scale, int32_t* start) {
  Block<V> block;
  block.Load(values);
  typename V::Int integers[Block<V>::kVectors];
  *scale = 1;
  *start = 0;
  switch (operand) {
    case Operand::kFloat:
      block.Store(reinterpret_cast<float*>(words));
      break;
    case Operand::kCutFloat:
      *scale = kCutTermsScale;
      block.Store(reinterpret_cast<float*>(words));
      break;
    case Operand::kBf16Halves:
      *scale = kCutTermsScale;
      PackBf16Twice<V>(block, words);
      break;
    case Operand::kFixed16:
      Quantize<V>(block, kFixed16Limit, 0, kCutTermsScale / 1024, scale, start, integers);
      PackInt16<V>(integers, words);
      break;
    case Operand::kInt16:
    case Operand::kInt16Apart:
      Quantize<V>(block, kInt16Limit, 510, kMul1Unit, scale, start, integers);
      if (operand == Operand::kInt16) {
        PackInt16<V>(integers, words);
      } else {
        PackInt16Apart<V>(integers, words);
      }
      break;
    case Operand::kInt8:
      Quantize<V>(block, kInt8Limit, 127, 4 * kMul1Unit, scale, start, integers);
      PackInt8<V>(integers, words);
      break;
  }
}

template <class V>
void FinishRow(const float* sums, float offset, const uint16_t* svh, const uint16_t* bias, float* values) {
  Block<V> block;
  V::LoadLaneOrder(sums, block.v);
  const typename V::Float more = V::SetFloat(offset);
  ESPALIER_UNROLL(i, Block<V>::kVectors) { block.v[i] = V::AddFloat(block.v[i], more); });
  block.Hadamard();
  block.Times(svh);
  if (bias != nullptr) {
    for (uint32_t i = 0; i < Block<V>::kVectors; ++i)
      block.v[i] = V::AddFloat(block.v[i], V::LoadFp16(bias + i * V::kLanes));
  }
  block.Store(values);
}

// e^x for x <= 0, to 2 ulp; NaN stays NaN.
template <class V>
ESPALIER_INLINE typename V::Float ExpOfNegative(typename V::Float x) {
  const typename V::Float clamped =
      V::Max(V::SetFloat(-87.0f), x);  // NaN comes through in the second operand
  const typename V::Float n = V::Round(V::MultiplyFloat(clamped, V::SetFloat(1.44269504088896341f)));
  typename V::Float r = V::Fma(n, V::SetFloat(-0.693359375f), clamped);
  r = V::Fma(n, V::SetFloat(2.12194440e-4f), r);
  typename V::Float p = V::SetFloat(1.0f / 5040);
  p = V::Fma(p, r, V::SetFloat(1.0f / 720));
  p = V::Fma(p, r, V::SetFloat(1.0f / 120));
  p = V::Fma(p, r, V::SetFloat(1.0f / 24));
  p = V::Fma(p, r, V::SetFloat(1.0f / 6));
  p = V::Fma(p, r, V::SetFloat(0.5f));
  p = V::Fma(p, r, V::SetFloat(1.0f));
  p = V::Fma(p, r, V::SetFloat(1.0f));
  return V::MultiplyFloat(p, V::PowerOfTwo(n));
}

template <class V>
ESPALIER_INLINE typename V::Float SigmoidOf(typename V::Float z) {
  const typename V::Float one = V::SetFloat(1);
  const typename V::Float e = ExpOfNegative<V>(V::Negated(V::Abs(z)));
  const typename V::Float numerator = V::SelectNegative(z, e, one);
  return V::DivideFloat(numerator, V::AddFloat(one, e));
}

template <class V>
ESPALIER_INLINE typename V::Float TanhOf(typename V::Float z) {
  const typename V::Float one = V::SetFloat(1);
  const typename V::Float e = ExpOfNegative<V>(V::MultiplyFloat(V::Abs(z), V::SetFloat(-2)));
  return V::WithSignOf(V::DivideFloat(V::SubtractFloat(one, e), V::AddFloat(one, e)), z);
}

template <class V>
ESPALIER_INLINE typename V::Float ActivateVector(const Activation& a, typename V::Float g,
                                                 typename V::Float u) {
  using Float = typename V::Float;
  if (a.limit > 0) {
    const Float limit = V::SetFloat(static_cast<float>(a.limit));
    g = V::Min(limit, g);  // NaN comes through in the second operand
    u = V::Max(V::Negated(limit), V::Min(limit, u));
  }
  switch (a.kind) {
    case ActivationKind::kSilu:
      return V::MultiplyFloat(V::MultiplyFloat(g, SigmoidOf<V>(g)), u);
    case ActivationKind::kGelu: {
      const Float cube = V::MultiplyFloat(V::MultiplyFloat(g, g), g);
      const Float inner =
          V::MultiplyFloat(V::SetFloat(0.797884560803f), V::Fma(cube, V::SetFloat(0.044715f), g));
      const Float half = V::MultiplyFloat(V::SetFloat(0.5f), g);
      return V::MultiplyFloat(V::MultiplyFloat(half, V::AddFloat(V::SetFloat(1), TanhOf<V>(inner))), u);
    }
    case ActivationKind::kRelu2: {
      const Float positive = V::Max(V::SetFloat(0), u);
      return V::MultiplyFloat(positive, positive);
    }
    case ActivationKind::kSitu: {
      const Float beta = V::SetFloat(static_cast<float>(a.beta));
      Float value = u;
      if (a.linear_beta > 0) {
        const Float linear = V::SetFloat(static_cast<float>(a.linear_beta));
        value = V::MultiplyFloat(linear, TanhOf<V>(V::DivideFloat(u, linear)));
      }
      const Float saturated = V::MultiplyFloat(beta, TanhOf<V>(V::DivideFloat(g, beta)));
      return V::MultiplyFloat(V::MultiplyFloat(saturated, SigmoidOf<V>(g)), value);
    }
    case ActivationKind::kSwigluOai: {
      const Float sigmoid = SigmoidOf<V>(V::MultiplyFloat(V::SetFloat(1.702f), g));
      return V::MultiplyFloat(V::MultiplyFloat(V::AddFloat(u, V::SetFloat(1)), g), sigmoid);
    }
  }
  return u;
}

template <class V>
float ActivateRow(const Activation& activation, const float* gate, const float* up, const uint16_t* suh,
                  float* values) {
  Block<V> block;
  for (uint32_t i = 0; i < Block<V>::kVectors; ++i) {
    block.v[i] =
        ActivateVector<V>(activation, V::LoadFloat(gate + i * V::kLanes), V::LoadFloat(up + i * V::kLanes));
  }
  block.Times(suh);
  block.Store(values);
  return block.Largest();
}

template <class V>
void AccumulateRow(float weight, const float* values, float* y) {
  for (uint32_t i = 0; i < kBlockChannels; i += V::kLanes) {
    V::StoreFloat(y + i, V::Fma(V::SetFloat(weight), V::LoadFloat(values + i), V::LoadFloat(y + i)));
  }
}

// ---- Tables ----------------------------------------------------------------------------------------------

template <class V, Operand kOperand, Codebook kCodebook>
void FillDecode(KernelTable& table) {
  auto& decode = table.decode[static_cast<int>(kOperand)][static_cast<int>(kCodebook)];
#define ESPALIER_BITS(bits) decode[bits] = DecodePanelBlock<V, kOperand, kCodebook, bits>;
#include <espalier/formats.def>
}

template <class V, Operand kOperand, Codebook kCodebook, int kBits, int kFirstRows, int... kMore>
void FillFusedRows(KernelTable::Fused* fused, std::integer_sequence<int, kMore...>) {
  ((fused[kFirstRows + kMore] = MultiplyCodes<V, kOperand, kCodebook, kBits, kFirstRows + kMore>), ...);
}
// For kFirstRows to kLastRows rows, or as many as V's registers hold. `fused` is one codebook's.
template <class V, Operand kOperand, Codebook kCodebook, int kFirstRows, int kLastRows>
void FillFused(KernelTable::Fused (&fused)[kMaxBits + 1][kMaxFusedRows + 1]) {
  static_assert(kLastRows <= static_cast<int>(kMaxFusedRows));
#define ESPALIER_BITS(bits)                                                                    \
  constexpr int kLast##bits = V::FusedRows(bits) < kLastRows ? V::FusedRows(bits) : kLastRows; \
  FillFusedRows<V, kOperand, kCodebook, bits, kFirstRows>(                                     \
      fused[bits], std::make_integer_sequence<int, kLast##bits - kFirstRows + 1>());
#include <espalier/formats.def>
}

template <class V, Operand kOperand, int... kRowsMinus1>
void FillMultiplyRows(KernelTable& table, std::integer_sequence<int, kRowsMinus1...>) {
  ((table.multiply[static_cast<int>(kOperand)][kRowsMinus1 + 1] =
        MultiplyPanelBlock<V, kOperand, kRowsMinus1 + 1>),
   ...);
}
template <class V, Operand kOperand>
void FillMultiply(KernelTable& table) {
  FillMultiplyRows<V, kOperand>(table, std::make_integer_sequence<int, V::kMaxRows>());
  table.max_rows = V::kMaxRows;
}

template <class V>
void FillRows(KernelTable& table) {
  table.rotate = RotateRow<V>;
  table.pack = PackBlock<V>;
  table.finish = FinishRow<V>;
  table.activate = ActivateRow<V>;
  table.accumulate = AccumulateRow<V>;
}

// What every table has: exact operands for every codebook.
template <class V>
void FillExact(KernelTable& table) {
#define ESPALIER_CODEBOOK(enumerator, number, name, marker_tensor, multiplier) \
  FillDecode<V, Operand::kFloat, Codebook::enumerator>(table);
#include <espalier/formats.def>
  FillMultiply<V, Operand::kFloat>(table);
  FillRows<V>(table);
}

// One row in fp32: of mode exact, and of mode fast where the codebook has no integers here. Not for plain
// C++, whose registers do not hold it.
template <class V>
void FillFusedFloat(KernelTable& table) {
#define ESPALIER_CODEBOOK(enumerator, number, name, marker_tensor, multiplier) \
  FillFused<V, Operand::kFloat, Codebook::enumerator, 1, 1>(                   \
      table.fused_float[static_cast<int>(Codebook::enumerator)]);
#include <espalier/formats.def>
}

}  // namespace
}  // namespace espalier::cpu

#endif  // ESPALIER_SRC_CPU_VECTOR_KERNELS_H_
