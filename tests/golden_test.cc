// SPDX-License-Identifier: Apache-2.0
//
// Outputs of the format's reference implementation, and the worked examples of docs/format.md.
#include <espalier/backend.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "base/half.h"
#include "base/sha256.h"
#include "reference/activation.h"
#include "reference/codebook.h"
#include "reference/hadamard.h"
#include "reference/trellis.h"
#include "support/random_experts.h"
#include "support/tensor_file.h"

namespace espalier {
namespace {

using test::Compare;
using test::SlabWriter;
using test::TensorFile;

const std::string kGolden = std::string(ESPALIER_TEST_DATA) + "/golden/";

const TensorFile& Golden() {
  static const TensorFile golden(kGolden + "golden.safetensors");
  return golden;
}

std::vector<std::string> NamesWith(const std::string& prefix, const std::string& suffix) {
  std::vector<std::string> names;
  for (const auto& [name, info] : Golden().tensors()) {
    if (name.starts_with(prefix) && name.ends_with(suffix)) names.push_back(name);
  }
  return names;
}

int BitsOf(const std::string& trellis_name) {
  return static_cast<int>(Golden().Info(trellis_name).shape.back() / kTileChannels);
}

Codebook CodebookOf(const std::string& name) {
  for (const CodebookInfo& info : AllCodebooks()) {
    if (name.find(fmt::format(".{}", info.name)) != std::string::npos) return info.codebook;
  }
  throw std::runtime_error("no codebook in " + name);
}

const std::byte* Bytes(const std::vector<uint16_t>& words) {
  return reinterpret_cast<const std::byte*>(words.data());
}

MatrixDesc AddGoldenMatrix(const std::string& prefix, Codebook codebook, SlabWriter& slab) {
  const TensorInfo& trellis = Golden().Info(prefix + ".trellis");
  MatrixDesc desc;
  desc.in_channels = static_cast<uint32_t>(trellis.shape[0] * kTileChannels);
  desc.out_channels = static_cast<uint32_t>(trellis.shape[1] * kTileChannels);
  desc.bits = static_cast<uint8_t>(BitsOf(prefix + ".trellis"));
  desc.codebook = codebook;
  desc.codes_offset_bytes = slab.Add(Golden().Read<uint16_t>(prefix + ".trellis"));
  desc.suh_offset_bytes = slab.Add(Golden().Read<uint16_t>(prefix + ".suh"));
  desc.svh_offset_bytes = slab.Add(Golden().Read<uint16_t>(prefix + ".svh"));
  return desc;
}

PreparedLinear GoldenLinear(const std::string& prefix) {
  SlabWriter slab;
  const MatrixDesc desc = AddGoldenMatrix(prefix, CodebookOf(prefix), slab);
  return PreparedLinear::Create(desc, 0, 0, slab.Take(), prefix).value();
}

std::vector<double> Doubles(const std::vector<float>& values) { return {values.begin(), values.end()}; }

// Workspace at the alignment that plans ask for.
HostBuffer Workspace(uint64_t bytes) { return HostBuffer::Create(bytes).value(); }

TEST(CodebookGolden, EveryStateIsBitEqual) {
  int tables = 0;
  for (const CodebookInfo& info : AllCodebooks()) {
    const std::vector<uint16_t> expected = Golden().Read<uint16_t>(fmt::format("codebook.{}", info.name));
    ASSERT_EQ(expected.size(), kNumStates);
    const auto table = CodebookTableFp16(info.codebook);
    const auto floats = CodebookTableFloat(info.codebook);
    for (uint32_t state = 0; state < kNumStates; ++state) {
      ASSERT_EQ(CodebookValueFp16(info.codebook, static_cast<uint16_t>(state)), expected[state])
          << info.name << " state " << state;
      ASSERT_EQ(table[state], expected[state]) << info.name << " state " << state;
      ASSERT_EQ(floats[state], Fp16ToFloat(expected[state])) << info.name << " state " << state;
    }
    ++tables;
  }
  EXPECT_EQ(tables, 3);
}

TEST(CodebookGolden, TablesHaveTheHashesOfTheFormat) {
  const std::map<std::string_view, std::string> hashes = {
      {"3inst", "ad88de2dcff5bb05fff2faec37cceceb43aa1c2e8203f9d81a6fbd6dd3393eea"},
      {"mcg", "95383563929baa9d1ae5de0be22490284382673620bdd85929feea7bdbef04a9"},
      {"mul1", "bc48d02cb1c14939dc47b90f870dd689d63e3b1ab69a157e65538db68677a6c8"}};
  for (const CodebookInfo& info : AllCodebooks()) {
    ASSERT_TRUE(hashes.contains(info.name)) << info.name;
    EXPECT_EQ(Sha256Hex(std::as_bytes(CodebookTableFp16(info.codebook))), hashes.at(info.name)) << info.name;
  }
}

TEST(TrellisGolden, InnerMatricesAreBitEqual) {
  int matrices = 0;
  for (const std::string& name : NamesWith("trellis.", "")) {
    const size_t inner = name.find(".inner.");
    if (inner == std::string::npos) continue;
    const std::string packed_name = name.substr(0, inner) + ".packed";
    const std::vector<uint16_t> packed = Golden().Read<uint16_t>(packed_name);
    const std::vector<uint16_t> expected = Golden().Read<uint16_t>(name);
    const int bits = BitsOf(packed_name);
    const Codebook codebook = CodebookOf(name);
    const uint64_t out = Golden().Info(name).shape[1];
    const uint64_t tile_columns = out / kTileChannels;
    const uint64_t num_tiles = packed.size() / static_cast<uint64_t>(16 * bits);
    ASSERT_EQ(num_tiles * kTileWeights, expected.size());
    for (uint64_t tile = 0; tile < num_tiles; ++tile) {
      uint16_t values[kTileWeights];
      DecodeTile(Bytes(packed) + tile * TileBytes(bits), bits, codebook, values);
      for (uint64_t i = 0; i < kTileWeights; ++i) {
        const uint64_t row = tile / tile_columns * kTileChannels + i / kTileChannels;
        const uint64_t column = tile % tile_columns * kTileChannels + i % kTileChannels;
        ASSERT_EQ(values[i], expected[row * out + column]) << name << " row " << row << " column " << column;
      }
    }
    ++matrices;
  }
  EXPECT_EQ(matrices, 13);
}

TEST(TrellisGolden, StatesUnpackAndPackAgain) {
  int checked = 0;
  std::vector<std::string> names = NamesWith("trellis.", ".states");
  for (const std::string& name : NamesWith("tiles.", ".states")) names.push_back(name);
  for (const std::string& name : names) {
    const std::string packed_name = name.substr(0, name.size() - 6) + "packed";
    const std::vector<uint16_t> packed = Golden().Read<uint16_t>(packed_name);
    const std::vector<uint16_t> expected = Golden().Read<uint16_t>(name);
    const int bits = BitsOf(packed_name);
    for (size_t tile = 0; tile * kTileWeights < expected.size(); ++tile) {
      const std::byte* bytes = Bytes(packed) + tile * TileBytes(bits);
      uint16_t states[kTileWeights];
      UnpackStates(bytes, bits, states);
      ASSERT_TRUE(std::equal(states, states + kTileWeights, expected.begin() + tile * kTileWeights))
          << name << " tile " << tile;
      std::vector<std::byte> again(TileBytes(bits));
      PackStates(states, bits, again.data());
      ASSERT_TRUE(std::equal(again.begin(), again.end(), bytes)) << name << " tile " << tile;
    }
    ++checked;
  }
  EXPECT_EQ(checked, 7);
}

TEST(TrellisGolden, TileOrderIsTheTensorCoreOrder) {
  const std::vector<int32_t> perm = Golden().Read<int32_t>("tiles.tensor_core_perm");
  ASSERT_EQ(perm.size(), kTileWeights);
  for (int i = 0; i < static_cast<int>(kTileWeights); ++i) {
    const TilePosition position = PositionOf(i);
    EXPECT_EQ(position.row * 16 + position.column, perm[i]) << i;
    EXPECT_EQ(IndexOf(position), i);
  }
}

TEST(TrellisGolden, QuantizedTilesDecodeToTheirOutputs) {
  int checked = 0;
  for (const std::string& name : NamesWith("tiles.", ".output_f32")) {
    const std::string stem = name.substr(0, name.size() - 10);
    const std::vector<float> expected = Golden().Read<float>(name);
    const std::vector<uint16_t> packed = Golden().Read<uint16_t>(stem + "packed");
    const int bits = BitsOf(stem + "packed");
    for (size_t i = 0; i < expected.size(); ++i) {
      const std::byte* tile = Bytes(packed) + i / kTileWeights * TileBytes(bits);
      const uint16_t state = TileState(tile, bits, static_cast<int>(i % kTileWeights));
      ASSERT_EQ(Fp16ToFloat(CodebookValueFp16(CodebookOf(name), state)), expected[i])
          << name << " weight " << i;
    }
    ++checked;
  }
  EXPECT_EQ(checked, 3);
}

TEST(HadamardGolden, SingleStepsAreBitEqual) {
  const std::vector<float> x = Golden().ReadHalves("had.x");
  const std::vector<float> pre = Golden().ReadHalves("had.pre");
  const std::vector<float> post = Golden().ReadHalves("had.post");
  const auto transformed = [&](bool with_pre, bool with_post, float factor) {
    std::vector<float> y = x;
    for (size_t i = 0; i < y.size(); ++i) y[i] *= with_pre ? pre[i % pre.size()] : 1.0f;
    Hadamard128Blocks(y.data(), static_cast<uint32_t>(y.size()));
    for (size_t i = 0; i < y.size(); ++i) y[i] *= (with_post ? post[i % post.size()] : 1.0f) * factor;
    return y;
  };
  EXPECT_EQ(transformed(false, false, 1), Golden().Read<float>("had.y32_plain"));
  EXPECT_EQ(transformed(true, false, 1), Golden().Read<float>("had.y32_pre"));
  EXPECT_EQ(transformed(false, true, 1), Golden().Read<float>("had.y32_post"));
  EXPECT_EQ(transformed(true, false, 0.5f), Golden().Read<float>("had.y32_pre_r0.5"));
}

TEST(HadamardGolden, SignsAreThoseOfTheMatrix) {
  const std::vector<int8_t> positive = Golden().Read<int8_t>("had.matrix_row_signs");
  ASSERT_EQ(positive.size(), kHadamardChannels * kHadamardChannels);
  for (uint32_t row = 0; row < kHadamardChannels; ++row) {
    double impulse[kHadamardChannels] = {};
    impulse[row] = 1;
    Hadamard128(impulse);
    for (uint32_t column = 0; column < kHadamardChannels; ++column) {
      const double sign = positive[row * kHadamardChannels + column] == 1 ? 1 : -1;
      EXPECT_DOUBLE_EQ(impulse[column], sign / std::sqrt(128.0)) << row << ", " << column;
    }
  }
}

std::vector<double> RunGoldenLinear(const PreparedLinear& linear, const std::vector<uint16_t>& x,
                                    const std::string& executor, Dtype output) {
  const uint64_t tokens = x.size() / linear.in_channels();
  const LinearPlan plan =
      LinearPlan::Create(linear,
                         {.max_tokens = tokens,
                          .input = Dtype::kF16,
                          .output = output,
                          .executor = test::ChoiceOf(executor).name,
                          .mode = test::ChoiceOf(executor).mode})
          .value();
  HostBuffer workspace = Workspace(plan.workspace_bytes());
  std::vector<double> doubles(tokens * linear.out_channels());
  std::vector<float> floats(doubles.size());
  const bool wide = output == Dtype::kF64;
  const Result<void> run = RunLinear(plan, linear,
                                     {.num_tokens = tokens,
                                      .x = x.data(),
                                      .x_row_stride = linear.in_channels(),
                                      .y = wide ? static_cast<void*>(doubles.data()) : floats.data(),
                                      .y_row_stride = linear.out_channels(),
                                      .workspace = workspace.data(),
                                      .workspace_bytes = workspace.size_bytes()});
  if (!run) throw std::runtime_error(run.error().message());
  if (!wide) doubles.assign(floats.begin(), floats.end());
  return doubles;
}

TEST(LinearGolden, ReferenceAndCpuAgreeWithTheExactProduct) {
  const std::vector<uint16_t> x = Golden().Read<uint16_t>("linear.x");
  int linears = 0;
  for (const std::string& name : NamesWith("linear.", ".y_f64")) {
    const PreparedLinear linear = GoldenLinear(name.substr(0, name.size() - 6));
    const std::vector<double> expected = Golden().Read<double>(name);
    EXPECT_LE(Compare(expected, RunGoldenLinear(linear, x, "reference", Dtype::kF64)).rel_l2, 1e-12) << name;
    const test::Difference cpu = Compare(expected, RunGoldenLinear(linear, x, "cpu", Dtype::kF32));
    EXPECT_LE(cpu.rel_l2, 2e-6) << name;
    EXPECT_GE(cpu.cosine, 1 - 1e-12) << name;
    ++linears;
  }
  EXPECT_EQ(linears, 5);
}

TEST(LinearGolden, DecodedMatricesAgree) {
  const PreparedLinear linear = GoldenLinear("linear.mcg.K3");
  const std::vector<float> expected_inner = Golden().ReadHalves("linear.mcg.K3.w_inner_f16");
  EXPECT_EQ(DecodeMatrix(linear, true).value(), expected_inner);

  // The other path of the library rounds to fp16 along the way: 9e-4 off.
  const std::vector<float> rounded = Golden().ReadHalves("linear.mcg.K3.w_original_basis_f16");
  const std::vector<float> decoded = DecodeMatrix(linear, false).value();
  EXPECT_LE(Compare(Doubles(rounded), Doubles(decoded)).rel_l2, 1.2e-3);

  int weights = 0;
  for (const std::string& name : NamesWith("quant.", ".Wq_f32")) {
    const std::vector<float> expected = Golden().Read<float>(name);
    const std::vector<float> w = DecodeMatrix(GoldenLinear(name.substr(0, name.size() - 7)), false).value();
    EXPECT_LE(Compare(Doubles(expected), Doubles(w)).rel_l2, 4e-4) << name;
    ++weights;
  }
  EXPECT_EQ(weights, 2);
}

PreparedExperts GoldenExperts() {
  SlabWriter slab;
  std::vector<SegmentDesc> segments;
  for (uint32_t expert = 0; expert < 8; ++expert) {
    SegmentDesc segment;
    segment.expert = expert;
    for (const Projection projection : {Projection::kGate, Projection::kUp, Projection::kDown}) {
      segment.matrices[static_cast<int>(projection)] = AddGoldenMatrix(
          fmt::format("moe.uni3.e{}.{}", expert, ProjectionName(projection)), Codebook::kMcg, slab);
    }
    segment.valid_intermediate_channels = segment.intermediate_channels();
    segments.push_back(segment);
  }
  const MoeGeometry geometry = {
      .experts = 8, .hidden_channels = 256, .stored_hidden_channels = 256, .activation = {}};
  return PreparedExperts::Create(geometry, segments, slab.Take(), "golden").value();
}

struct GoldenRoutes {
  std::vector<uint16_t> x;  // fp16
  std::vector<int64_t> ids;
  std::vector<float> weights;
  uint32_t top_k;
};

std::vector<double> RunGoldenExperts(const PreparedExperts& experts, const GoldenRoutes& routes,
                                     const std::string& executor, Dtype output) {
  const uint64_t hidden = experts.geometry().hidden_channels;
  const uint64_t tokens = routes.x.size() / hidden;
  const MoePlan plan = MoePlan::Create(experts, {.max_tokens = tokens,
                                                 .top_k = routes.top_k,
                                                 .id_type = IdType::kInt64,
                                                 .input = Dtype::kF16,
                                                 .output = output,
                                                 .checked_ids = true,
                                                 .executor = test::ChoiceOf(executor).name,
                                                 .mode = test::ChoiceOf(executor).mode})
                           .value();
  HostBuffer workspace = Workspace(plan.workspace_bytes());
  std::vector<double> doubles(routes.x.size());
  std::vector<float> floats(routes.x.size());
  const bool wide = output == Dtype::kF64;
  const Result<void> run = RunMoe(plan, experts,
                                  {.num_tokens = tokens,
                                   .x = routes.x.data(),
                                   .x_row_stride = hidden,
                                   .topk_ids = routes.ids.data(),
                                   .topk_ids_row_stride = routes.top_k,
                                   .topk_weights = routes.weights.data(),
                                   .topk_weights_row_stride = routes.top_k,
                                   .y = wide ? static_cast<void*>(doubles.data()) : floats.data(),
                                   .y_row_stride = hidden,
                                   .workspace = workspace.data(),
                                   .workspace_bytes = workspace.size_bytes()});
  if (!run) throw std::runtime_error(run.error().message());
  return wide ? doubles : Doubles(floats);
}

void ExpectGoldenExperts(const PreparedExperts& experts, const GoldenRoutes& routes,
                         const std::vector<double>& expected) {
  EXPECT_LE(Compare(expected, RunGoldenExperts(experts, routes, "reference", Dtype::kF64)).rel_l2, 1e-12);
  const test::Difference cpu = Compare(expected, RunGoldenExperts(experts, routes, "cpu", Dtype::kF32));
  EXPECT_LE(cpu.rel_l2, 2e-6);
  EXPECT_GE(cpu.cosine, 1 - 1e-12);
}

TEST(MoeGolden, UniformLayerAgrees) {
  const GoldenRoutes routes = {.x = Golden().Read<uint16_t>("moe.x"),
                               .ids = Golden().Read<int64_t>("moe.topk_ids"),
                               .weights = Golden().ReadHalves("moe.topk_weights"),
                               .top_k = 3};
  ExpectGoldenExperts(GoldenExperts(), routes, Golden().Read<double>("moe.uni3.y_f64"));
}

// Layer 0 of the bundled model, with mixed rates.
TEST(MoeGolden, BundledModelAgrees) {
  const TensorFile golden(kGolden + "model_golden.safetensors");
  const Checkpoint checkpoint = Checkpoint::Open(ESPALIER_BUNDLED_CHECKPOINT).value();
  const Result<PreparedExperts> experts = LoadExperts(checkpoint, checkpoint.FindLayer("0").value());
  ASSERT_TRUE(experts) << experts.error().message();
  const GoldenRoutes routes = {.x = golden.Read<uint16_t>("l0.mixed.moe_in_f16"),
                               .ids = golden.Read<int64_t>("l0.mixed.topk_ids"),
                               .weights = golden.ReadHalves("l0.mixed.topk_weights_f16"),
                               .top_k = 4};
  ExpectGoldenExperts(*experts, routes, golden.Read<double>("l0.mixed.moe_out_f64"));
}

// The generator of the worked examples: docs/format.md, appendix C.
class ExampleGenerator {
 public:
  explicit ExampleGenerator(uint32_t start) : x_(start) {}

  uint16_t Word() {
    x_ = x_ * 1664525u + 1013904223u;
    return static_cast<uint16_t>(x_ >> 16);
  }
  std::vector<uint16_t> Tiles(uint32_t rows, uint32_t columns, int bits) {
    std::vector<uint16_t> words(rows * columns * TileBytes(bits) / 2);
    for (uint16_t& word : words) word = Word();
    return words;
  }
  std::vector<uint16_t> Vector(uint32_t channels, double divisor) {
    std::vector<uint16_t> values(channels);
    for (uint16_t& value : values) {
      const uint16_t u = Word();
      const double magnitude = 0.75 + 0.5 * ((u >> 1) / 32768.0);
      value = DoubleToFp16(u % 2 != 0 ? -magnitude : magnitude);
      // Rounded to fp16 before and after the division.
      value = DoubleToFp16(double{Fp16ToFloat(value)} / divisor);
    }
    return values;
  }

 private:
  uint32_t x_;
};

std::vector<double> ExampleInput(uint32_t channels) {
  std::vector<double> x;
  for (uint32_t i = 0; i < channels; ++i) x.push_back((static_cast<double>(37 * i % 101) - 50) / 64);
  return x;
}

double Half(double value) { return Fp16ToFloat(DoubleToFp16(value)); }

// x[128] times the values of an 8 x 8 grid of tiles, summed in double and rounded to fp16 once.
std::vector<double> HalfProduct(const std::vector<double>& x, const std::vector<uint16_t>& tiles, int bits) {
  std::vector<double> y(128);
  for (uint32_t tile = 0; tile < 64; ++tile) {
    uint16_t values[kTileWeights];
    DecodeTile(Bytes(tiles) + tile * TileBytes(bits), bits, Codebook::kMcg, values);
    for (uint32_t i = 0; i < kTileWeights; ++i) {
      y[tile % 8 * 16 + i % 16] += x[tile / 8 * 16 + i / 16] * double{Fp16ToFloat(values[i])};
    }
  }
  for (double& value : y) value = Half(value);
  return y;
}

// fp16(H(fp16(x * suh))) in fp32, as the fp16 paths of the format do.
std::vector<double> HalfRotated(const std::vector<double>& x, const std::vector<uint16_t>& suh) {
  float values[kHadamardChannels];
  for (uint32_t i = 0; i < kHadamardChannels; ++i) {
    values[i] = static_cast<float>(Half(x[i] * double{Fp16ToFloat(suh[i])}));
  }
  Hadamard128(values);
  std::vector<double> rotated;
  for (const float value : values) rotated.push_back(Half(double{value}));
  return rotated;
}

// H(y) * svh in fp32.
std::vector<double> Finished(const std::vector<double>& y, const std::vector<uint16_t>& svh) {
  float values[kHadamardChannels];
  for (uint32_t i = 0; i < kHadamardChannels; ++i) values[i] = static_cast<float>(y[i]);
  Hadamard128(values);
  std::vector<double> finished;
  for (uint32_t i = 0; i < kHadamardChannels; ++i)
    finished.push_back(double{values[i] * Fp16ToFloat(svh[i])});
  return finished;
}

TEST(FormatExample, StatesOfTheFirstTile) {
  const std::vector<uint16_t> tiles = ExampleGenerator(1).Tiles(8, 8, 3);
  EXPECT_THAT(std::vector(tiles.begin(), tiles.begin() + 6),
              testing::ElementsAre(0x3c88, 0x5e88, 0x8116, 0xb473, 0x0cf0, 0x5e98));
  uint16_t states[kTileWeights];
  UnpackStates(Bytes(tiles), 3, states);
  EXPECT_THAT(std::vector(states, states + 4), testing::ElementsAre(0xf002, 0x8017, 0x00bd, 0x05e8));
  EXPECT_EQ(states[255], 0x7e00);
  uint16_t values[kTileWeights];
  DecodeTile(Bytes(tiles), 3, Codebook::kMcg, values);
  const auto at = [&](int row, int column) { return double{Fp16ToFloat(values[16 * row + column])}; };
  EXPECT_EQ(at(0, 0), -1.2421875);
  EXPECT_EQ(at(0, 1), 0.951171875);
  EXPECT_EQ(at(0, 2), -0.1571044921875);
  EXPECT_EQ(at(0, 3), -2.951171875);
  EXPECT_EQ(at(1, 0), 0.763671875);
  EXPECT_EQ(at(8, 0), -0.484130859375);
  EXPECT_EQ(at(0, 8), -1.0302734375);
}

TEST(FormatExample, CodebookValues) {
  struct Row {
    uint16_t state;
    double inst3, mcg, mul1;
  };
  const Row rows[] = {{0x0000, 0.76806640625, 1.84375, -3.453125},
                      {0x0001, -0.91943359375, 0.134521484375, 0.64111328125},
                      {0x0002, 0.931640625, -0.75927734375, -0.448486328125},
                      {0x1234, -2.19921875, 1.5146484375, -0.5771484375},
                      {0x8000, -0.498046875, -0.63525390625, -0.8681640625},
                      {0xFFFF, -0.158203125, 0.85009765625, -0.6513671875}};
  for (const Row& row : rows) {
    EXPECT_EQ(Fp16ToFloat(CodebookValueFp16(Codebook::k3Inst, row.state)), row.inst3) << row.state;
    EXPECT_EQ(Fp16ToFloat(CodebookValueFp16(Codebook::kMcg, row.state)), row.mcg) << row.state;
    EXPECT_EQ(Fp16ToFloat(CodebookValueFp16(Codebook::kMul1, row.state)), row.mul1) << row.state;
  }
}

TEST(FormatExample, OneLinearLayer) {
  ExampleGenerator generator(1);
  const std::vector<uint16_t> tiles = generator.Tiles(8, 8, 3);
  const std::vector<uint16_t> suh = generator.Vector(128, 1);
  const std::vector<uint16_t> svh = generator.Vector(128, 1);
  const std::vector<double> x = ExampleInput(128);
  const float first_suh[] = {0.7861328125f, 0.76416015625f, -1.146484375f, 0.974609375f};
  const float first_svh[] = {1.1533203125f, -0.8759765625f, -1.166015625f, 1.0888671875f};
  const double first_x[] = {-0.78125, -0.203125, 0.375, -0.625};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(Fp16ToFloat(suh[i]), first_suh[i]) << i;
    EXPECT_EQ(Fp16ToFloat(svh[i]), first_svh[i]) << i;
    EXPECT_EQ(x[i], first_x[i]) << i;
  }

  // The fp16 path of peers, bit for bit.
  const std::vector<double> rotated = HalfRotated(x, suh);
  EXPECT_THAT(std::vector(rotated.begin(), rotated.begin() + 4),
              testing::ElementsAre(0.1693115234375, 0.30615234375, -0.146240234375, 0.720703125));
  const std::vector<double> product = HalfProduct(rotated, tiles, 3);
  EXPECT_THAT(std::vector(product.begin(), product.begin() + 4),
              testing::ElementsAre(-6.6484375, 3.96484375, 2.71875, -4.1015625));
  const std::vector<double> y = Finished(product, svh);
  const double expected[] = {-1.8989437819, -4.5795779228, 3.1753282547, -1.6115925312};
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(y[i], expected[i], 1e-9) << i;
  EXPECT_NEAR(std::accumulate(y.begin(), y.end(), 0.0), -98.3762393, 1e-6);
  // The epilogue in fp16: the transform rounded, then its product with svh.
  std::vector<float> transformed(product.begin(), product.end());
  Hadamard128(transformed.data());
  const double in_half[] = {-1.8984375, -4.578125, 3.173828125, -1.6123046875};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(Half(Half(double{transformed[i]}) * double{Fp16ToFloat(svh[i])}), in_half[i]) << i;
  }

  // Exact arithmetic, through RunLinear.
  SlabWriter slab;
  MatrixDesc desc = {.in_channels = 128, .out_channels = 128, .bits = 3, .codebook = Codebook::kMcg};
  desc.codes_offset_bytes = slab.Add(tiles);
  desc.suh_offset_bytes = slab.Add(suh);
  desc.svh_offset_bytes = slab.Add(svh);
  const PreparedLinear linear = PreparedLinear::Create(desc, 0, 0, slab.Take(), "example").value();
  std::vector<uint16_t> x_halves;
  for (const double value : x) x_halves.push_back(DoubleToFp16(value));  // exact
  const std::vector<double> exact = RunGoldenLinear(linear, x_halves, "reference", Dtype::kF64);
  EXPECT_NEAR(exact[0], -1.8997801264, 1e-10);
  EXPECT_NEAR(exact[1], -4.5803439763, 1e-10);
  EXPECT_NEAR(exact[2], 3.1713763311, 1e-10);
  EXPECT_NEAR(exact[3], -1.6099458751, 1e-10);
}

struct OrdinaryExample {
  std::vector<uint16_t> gate, up, down;
  std::vector<uint16_t> gate_suh, up_suh, gate_svh, up_svh, down_suh, down_svh;
};

OrdinaryExample MakeOrdinaryExample() {
  ExampleGenerator generator(2);
  OrdinaryExample example;
  for (std::vector<uint16_t>* tiles : {&example.gate, &example.up, &example.down})
    *tiles = generator.Tiles(8, 8, 3);
  example.gate_suh = generator.Vector(128, 1);
  example.up_suh = generator.Vector(128, 1);
  example.gate_svh = generator.Vector(128, 64);
  example.up_svh = generator.Vector(128, 64);
  example.down_suh = generator.Vector(128, 1);
  example.down_svh = generator.Vector(128, 64);
  return example;
}

struct ExpectedExample {
  Activation activation;
  double mid[3];
  double y[4];
  double sum;
};

TEST(FormatExample, OneExpertWithTheRoundingOfPeers) {
  const OrdinaryExample example = MakeOrdinaryExample();
  const std::vector<double> x = ExampleInput(128);
  const std::vector<double> g =
      Finished(HalfProduct(HalfRotated(x, example.gate_suh), example.gate, 3), example.gate_svh);
  const std::vector<double> u =
      Finished(HalfProduct(HalfRotated(x, example.up_suh), example.up, 3), example.up_svh);
  EXPECT_NEAR(g[0], 0.0133650154, 1e-9);
  EXPECT_NEAR(g[1], -0.0895316824, 1e-9);
  EXPECT_NEAR(g[2], 0.0141661577, 1e-9);
  EXPECT_NEAR(u[0], -0.0601652339, 1e-9);
  EXPECT_NEAR(u[1], -0.1141628101, 1e-9);
  EXPECT_NEAR(u[2], -0.115484871, 1e-9);

  const ExpectedExample cases[] = {{{.kind = ActivationKind::kSilu},
                                    {0.0007576942443847656, 0.0051727294921875, 0.004150390625},
                                    {-0.00080850039, 0.00069155876, 0.00017316357, 0.00048587285},
                                    0.0110265059},
                                   {{.kind = ActivationKind::kSitu, .beta = 4, .linear_beta = 25},
                                    {0.0007567405700683594, 0.005168914794921875, 0.004146575927734375},
                                    {-0.00080841035, 0.0006912282, 0.00017310679, 0.0004853179},
                                    0.0110202249}};
  for (const ExpectedExample& expected : cases) {
    // The product with down_suh is taken in double here, then rotated in fp32.
    float values[kHadamardChannels];
    for (uint32_t i = 0; i < kHadamardChannels; ++i) {
      values[i] = static_cast<float>(Activate(expected.activation, g[i], u[i]) *
                                     double{Fp16ToFloat(example.down_suh[i])});
    }
    Hadamard128(values);
    std::vector<double> mid;
    for (const float value : values) mid.push_back(Half(double{value}));
    for (int i = 0; i < 3; ++i) EXPECT_EQ(mid[i], expected.mid[i]) << i;
    const std::vector<double> product = HalfProduct(mid, example.down, 3);
    if (expected.activation.kind == ActivationKind::kSilu) {
      EXPECT_THAT(std::vector(product.begin(), product.begin() + 3),
                  testing::ElementsAre(-0.0306549072265625, -0.0823974609375, -0.053924560546875));
    }
    const std::vector<double> y = Finished(product, example.down_svh);
    double sum = 0;
    for (const double value : y) sum += 0.625 * value;
    for (int i = 0; i < 4; ++i) EXPECT_NEAR(0.625 * y[i], expected.y[i], 1e-10) << i;
    EXPECT_NEAR(sum, expected.sum, 1e-9);
  }
}

}  // namespace
}  // namespace espalier
