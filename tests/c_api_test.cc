// SPDX-License-Identifier: Apache-2.0
//
// The C interface against the C++ one: the same numbers, every category of error, and nothing that a caller
// passes can crash it.
#include <espalier/espalier.h>
#include <espalier/espalier_c.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "support/random_experts.h"
#include "support/require.h"
#include "support/temporary_directory.h"

namespace espalier {
namespace {

using test::Require;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr const char* kBundled = ESPALIER_BUNDLED_CHECKPOINT;
constexpr uint32_t kTopK = 3;
constexpr uint64_t kTokens = 9;

template <typename Struct>
Struct Sized() {
  Struct value = {};
  value.size = sizeof(Struct);
  return value;
}

#define EXPECT_OK(call) EXPECT_EQ(call, ESPALIER_OK) << espalier_last_error()
#define ASSERT_OK(call) ASSERT_EQ(call, ESPALIER_OK) << espalier_last_error()

// The status, and a message that says `text`.
void ExpectFailure(int32_t status, int32_t expected, const std::string& text) {
  EXPECT_EQ(status, expected);
  EXPECT_THAT(espalier_last_error(), HasSubstr(text));
}

std::vector<std::string> Names(int32_t which) {
  uint64_t count = 0;
  EXPECT_OK(espalier_list_names(which, nullptr, &count));
  std::vector<const char*> names(count);
  EXPECT_OK(espalier_list_names(which, names.data(), &count));
  return {names.begin(), names.end()};
}

TEST(CLibrary, TellsItsVersionAndCapabilities) {
  EXPECT_STREQ(espalier_version(), ESPALIER_VERSION);
  EXPECT_EQ(espalier_abi_version(), ESPALIER_C_ABI);
  auto capabilities = Sized<espalier_capabilities>();
  ASSERT_OK(espalier_get_capabilities(&capabilities));
  EXPECT_EQ(capabilities.abi_version, ESPALIER_C_ABI);
  EXPECT_EQ(capabilities.min_bits, kMinBits);
  EXPECT_EQ(capabilities.max_bits, kMaxBits);
  EXPECT_EQ(capabilities.max_plan_tokens, kMaxPlanTokens);
  EXPECT_EQ(capabilities.max_top_k, kMaxTopK);
  EXPECT_EQ(capabilities.workspace_alignment_bytes, kWorkspaceAlignmentBytes);
  EXPECT_EQ(capabilities.has_cuda != 0, CudaRuntimeVersion() != 0);
  const auto gpus = CudaDevices();
  EXPECT_EQ(capabilities.num_gpus, gpus ? static_cast<int32_t>(gpus->size()) : 0);
  auto gpu = Sized<espalier_gpu_info>();
  if (gpus) {
    ASSERT_OK(espalier_get_gpu(0, &gpu));
    EXPECT_EQ(gpu.name, (*gpus)[0].name);
    EXPECT_EQ(espalier_get_gpu(gpus->size(), &gpu), ESPALIER_USAGE);
  } else {
    ExpectFailure(espalier_get_gpu(0, &gpu), ESPALIER_DEVICE, gpus.error().message());
  }
}

TEST(CLibrary, ListsNames) {
  std::vector<std::string> backends;
  for (const Backend* backend : Backends()) backends.emplace_back(backend->name());
  EXPECT_EQ(Names(ESPALIER_NAMES_BACKENDS), backends);
  EXPECT_THAT(Names(ESPALIER_NAMES_CODEBOOKS), ElementsAre("3inst", "mcg", "mul1"));
  EXPECT_EQ(Names(ESPALIER_NAMES_DTYPES)[ESPALIER_DTYPE_BF16], "BF16");
  EXPECT_EQ(Names(ESPALIER_NAMES_ACTIVATIONS)[0], "silu");
  EXPECT_EQ(Names(ESPALIER_NAMES_CPU_KERNELS).back(), UsableCpuKernels().back());
  uint64_t count = 1;
  const char* name = nullptr;
  ExpectFailure(espalier_list_names(ESPALIER_NAMES_CODEBOOKS, &name, &count), ESPALIER_USAGE, "3 or more");
  EXPECT_EQ(count, 3u);
  EXPECT_EQ(name, nullptr);
  ExpectFailure(espalier_list_names(5, nullptr, &count), ESPALIER_USAGE, "list 5; legal: 0 to 4");
  EXPECT_EQ(espalier_list_names(-1, nullptr, &count), ESPALIER_USAGE);
  EXPECT_EQ(espalier_list_names(0, nullptr, nullptr), ESPALIER_USAGE);
}

TEST(CLibrary, NamesEveryStatus) {
  EXPECT_STREQ(espalier_status_name(ESPALIER_OK), "ok");
  EXPECT_STREQ(espalier_status_name(ESPALIER_INTERNAL), "internal");
  EXPECT_STREQ(espalier_status_name(ESPALIER_DEVICE), "device");
  EXPECT_STREQ(espalier_status_name(ESPALIER_CANCELLED), "cancelled");
  EXPECT_STREQ(espalier_status_name(10), "unknown");
  EXPECT_STREQ(espalier_status_name(-1), "unknown");
  std::set<std::string> names;
  for (int32_t status = ESPALIER_OK; status <= ESPALIER_CANCELLED; ++status)
    names.insert(espalier_status_name(status));
  EXPECT_EQ(names.size(), 10u);
}

// One call of a layer, in memory of the caller.
struct Call {
  std::vector<float> x, weights;
  std::vector<int32_t> ids;

  Call(uint64_t hidden, uint32_t experts) {
    test::Random random(7);
    for (uint64_t i = 0; i < kTokens * hidden; ++i) x.push_back(static_cast<float>(random.Normal()));
    for (uint64_t i = 0; i < kTokens * kTopK; ++i) {
      ids.push_back(static_cast<int32_t>(random.Below(experts)));
      weights.push_back(static_cast<float>(random.Uniform()));
    }
  }
};

class CApi : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(espalier_checkpoint_open(kBundled, &checkpoint_));
    cpp_.emplace(Require(Checkpoint::Open(kBundled)));
  }
  void TearDown() override { EXPECT_OK(espalier_checkpoint_free(checkpoint_)); }

  espalier_experts* Load(uint64_t layer) {
    espalier_experts* experts = nullptr;
    EXPECT_OK(espalier_experts_load(checkpoint_, layer, nullptr, &experts));
    return experts;
  }

  static espalier_moe_plan* Plan(const espalier_experts* experts, const espalier_plan_options& options) {
    espalier_moe_plan* plan = nullptr;
    EXPECT_OK(espalier_moe_plan_create(experts, &options, &plan));
    return plan;
  }

  static espalier_plan_options Options() {
    auto options = Sized<espalier_plan_options>();
    options.max_tokens = kTokens;
    options.top_k = kTopK;
    return options;
  }

  static espalier_moe_args Args(const Call& call, std::vector<float>& y, HostBuffer& workspace) {
    auto args = Sized<espalier_moe_args>();
    args.num_tokens = kTokens;
    args.x = call.x.data();
    args.x_row_stride = args.y_row_stride = call.x.size() / kTokens;
    args.topk_ids = call.ids.data();
    args.topk_weights = call.weights.data();
    args.topk_ids_row_stride = args.topk_weights_row_stride = kTopK;
    args.y = y.data();
    args.workspace = workspace.data();
    args.workspace_bytes = workspace.size_bytes();
    return args;
  }

  static std::vector<float> Run(const espalier_moe_plan* plan, const espalier_experts* experts,
                                const Call& call) {
    auto info = Sized<espalier_plan_info>();
    EXPECT_OK(espalier_moe_plan_get_info(plan, &info));
    HostBuffer workspace = Require(HostBuffer::Create(info.workspace_bytes));
    std::vector<float> y(kTokens * info.out_channels);
    const espalier_moe_args args = Args(call, y, workspace);
    EXPECT_OK(espalier_moe_run(plan, experts, &args));
    return y;
  }

  static std::vector<float> RunCpp(const PreparedExperts& experts, CpuMode mode, const std::string& executor,
                                   const Call& call) {
    const MoePlan plan = Require(MoePlan::Create(
        experts, {.max_tokens = kTokens, .top_k = kTopK, .executor = executor, .mode = mode}));
    HostBuffer workspace = Require(HostBuffer::Create(plan.workspace_bytes()));
    const uint64_t hidden = experts.geometry().hidden_channels;
    std::vector<float> y(kTokens * hidden);
    Require(RunMoe(plan, experts,
                   {.num_tokens = kTokens,
                    .x = call.x.data(),
                    .x_row_stride = hidden,
                    .topk_ids = call.ids.data(),
                    .topk_ids_row_stride = kTopK,
                    .topk_weights = call.weights.data(),
                    .topk_weights_row_stride = kTopK,
                    .y = y.data(),
                    .y_row_stride = hidden,
                    .workspace = workspace.data(),
                    .workspace_bytes = workspace.size_bytes()}));
    return y;
  }

  espalier_checkpoint* checkpoint_ = nullptr;
  std::optional<Checkpoint> cpp_;
};

TEST_F(CApi, TellsWhatTheCheckpointHolds) {
  auto info = Sized<espalier_checkpoint_info>();
  ASSERT_OK(espalier_checkpoint_get_info(checkpoint_, &info));
  EXPECT_STREQ(info.path, kBundled);
  EXPECT_STREQ(info.layout, "stock");
  EXPECT_STREQ(info.activation, "silu");
  EXPECT_EQ(info.architecture, cpp_->config().architecture);
  EXPECT_EQ(info.num_layers, cpp_->layers().size());
  EXPECT_EQ(info.num_linears, cpp_->linears().size());
  EXPECT_EQ(info.num_tensors, cpp_->tensors().size());
  EXPECT_EQ(info.num_problems, cpp_->problems().size());
  EXPECT_EQ(info.top_k, 4u);
  EXPECT_EQ(info.attention_heads, 4u);
  EXPECT_OK(espalier_checkpoint_check(checkpoint_, ""));

  uint64_t count = 0;
  ASSERT_OK(espalier_checkpoint_legal_tp(checkpoint_, nullptr, &count));
  std::vector<int32_t> legal(count);
  ASSERT_OK(espalier_checkpoint_legal_tp(checkpoint_, legal.data(), &count));
  EXPECT_EQ(legal, cpp_->LegalTpSizes());

  uint64_t layer = 0;
  ASSERT_OK(espalier_checkpoint_find_layer(checkpoint_, "2", &layer));
  auto layer_info = Sized<espalier_layer_info>();
  ASSERT_OK(espalier_checkpoint_get_layer(checkpoint_, layer, &layer_info));
  EXPECT_STREQ(layer_info.label, "2");
  EXPECT_EQ(layer_info.experts, 16u);
  EXPECT_EQ(layer_info.hidden_channels, 256u);
  EXPECT_EQ(layer_info.intermediate_channels, 512u);
  EXPECT_EQ(layer_info.has_gate, 1);

  auto matrix = Sized<espalier_matrix_info>();
  for (uint64_t i = 0; i < info.num_linears; ++i) {
    ASSERT_OK(espalier_checkpoint_get_linear(checkpoint_, i, &matrix));
    EXPECT_EQ(matrix.name, cpp_->linears()[i].name);
    EXPECT_EQ(matrix.bits, cpp_->linears()[i].matrix.bits);
  }
  EXPECT_EQ(espalier_checkpoint_get_linear(checkpoint_, info.num_linears, &matrix), ESPALIER_USAGE);
  ASSERT_OK(espalier_checkpoint_get_matrix(checkpoint_, layer, 15, ESPALIER_PROJECTION_DOWN, 0, &matrix));
  EXPECT_EQ(matrix.name, nullptr);
  EXPECT_EQ(matrix.in_channels, 512u);
  EXPECT_EQ(matrix.out_channels, 256u);
  EXPECT_EQ(matrix.code_bytes, cpp_->Matrix(layer, 15, Projection::kDown, 0).code_bytes());
  uint64_t bytes = 0;
  ASSERT_OK(espalier_checkpoint_matrix_name(checkpoint_, layer, 15, 2, 0, nullptr, &bytes));
  std::string name(bytes, 'x');
  ASSERT_OK(espalier_checkpoint_matrix_name(checkpoint_, layer, 15, 2, 0, name.data(), &bytes));
  EXPECT_EQ(name.c_str(), cpp_->MatrixName(layer, 15, Projection::kDown, 0));
  EXPECT_EQ(name.size(), name.find('\0') + 1);
}

TEST_F(CApi, ReadsTensors) {
  uint64_t index = 0;
  ASSERT_OK(espalier_checkpoint_find_tensor(checkpoint_, "model.norm.weight", &index));
  auto info = Sized<espalier_tensor_info>();
  ASSERT_OK(espalier_checkpoint_get_tensor(checkpoint_, index, &info));
  EXPECT_STREQ(info.name, "model.norm.weight");
  ASSERT_EQ(info.num_dimensions, 1u);
  EXPECT_EQ(info.shape[0], 256u);
  const TensorInfo* tensor = cpp_->FindTensor("model.norm.weight");
  EXPECT_EQ(info.dtype, static_cast<int32_t>(tensor->dtype));
  std::vector<std::byte> bytes(info.size_bytes), expected(info.size_bytes);
  ASSERT_OK(espalier_checkpoint_read_tensor(checkpoint_, index, bytes.data(), bytes.size()));
  Require(cpp_->Read(*tensor, expected));
  EXPECT_EQ(bytes, expected);
  EXPECT_EQ(espalier_checkpoint_read_tensor(checkpoint_, index, bytes.data(), 1), ESPALIER_USAGE);
  EXPECT_EQ(espalier_checkpoint_read_tensor(checkpoint_, index, nullptr, bytes.size()), ESPALIER_USAGE);
  ExpectFailure(espalier_checkpoint_find_tensor(checkpoint_, "nothing", &index), ESPALIER_USAGE, "'nothing'");
}

TEST_F(CApi, RunsBitForBitAsCpp) {
  const Call call(256, 16);
  for (uint64_t layer = 0; layer < cpp_->layers().size(); ++layer) {
    const PreparedExperts prepared = Require(LoadExperts(*cpp_, layer));
    espalier_experts* experts = Load(layer);
    for (const auto& [number, mode, executor] : {std::tuple{ESPALIER_MODE_DEFAULT, CpuMode::kFast, ""},
                                                 {ESPALIER_MODE_EXACT, CpuMode::kExact, "cpu"},
                                                 {ESPALIER_MODE_FAST, CpuMode::kFast, "cpu"},
                                                 {ESPALIER_MODE_INT8, CpuMode::kInt8, "cpu"},
                                                 {ESPALIER_MODE_DEFAULT, CpuMode::kFast, "reference"}}) {
      espalier_plan_options options = Options();
      options.mode = number;
      options.executor = *executor != '\0' ? executor : nullptr;
      espalier_moe_plan* plan = Plan(experts, options);
      auto info = Sized<espalier_plan_info>();
      ASSERT_OK(espalier_moe_plan_get_info(plan, &info));
      EXPECT_STREQ(info.executor, *executor != '\0' ? executor : "cpu");
      EXPECT_EQ(info.top_k, kTopK);
      EXPECT_EQ(info.input, ESPALIER_DTYPE_F32);
      EXPECT_EQ(Run(plan, experts, call), RunCpp(prepared, mode, executor, call)) << layer << " " << executor;
      EXPECT_OK(espalier_moe_plan_free(plan));
    }
    EXPECT_OK(espalier_experts_free(experts));
  }
}

// Ranks of tp 2, ep 2 add up to the layer, through the maps and the strides of a call that accumulates.
TEST_F(CApi, RanksAddUpToTheLayer) {
  auto options = Sized<espalier_extents_options>();
  options.tp = options.ep = 2;
  espalier_extents* extents = nullptr;
  ASSERT_OK(espalier_extents_create(checkpoint_, &options, &extents));
  const ExtentPlan cpp = Require(ExtentPlan::Create(*cpp_, {.tp = 2, .ep = 2}));
  auto info = Sized<espalier_extents_info>();
  ASSERT_OK(espalier_extents_get_info(extents, &info));
  EXPECT_EQ(info.tp * info.ep, 4);
  const Call call(256, 16);
  std::vector<float> y(kTokens * 256, 0.0f);
  for (int32_t rank = 0; rank < 4; ++rank) {
    uint64_t bytes = 0, count = 0, first = 0, num_experts = 0;
    ASSERT_OK(espalier_extents_weight_bytes(extents, rank, &bytes));
    EXPECT_EQ(bytes, cpp.WeightBytes(rank));
    ASSERT_OK(espalier_extents_experts(extents, 0, rank / 2, &first, &num_experts));
    EXPECT_EQ(first, rank / 2 * 8u);
    EXPECT_EQ(num_experts, 8u);
    ASSERT_OK(espalier_extents_expert_map(extents, 0, rank / 2, nullptr, &count));
    std::vector<int32_t> map(count);
    ASSERT_OK(espalier_extents_expert_map(extents, 0, rank / 2, map.data(), &count));
    EXPECT_EQ(map, ExpertMap(cpp, 0, rank / 2));
    auto extent = Sized<espalier_rank_extent>();
    ASSERT_OK(espalier_extents_get_rank(extents, 0, rank % 2, &extent));
    EXPECT_EQ(extent.channels, 256u);
    count = 1;
    espalier_slice_extent segment = {};
    ASSERT_OK(espalier_extents_segments(extents, 0, rank % 2, &segment, &count));
    EXPECT_EQ(segment.channels, 256u);

    auto sizes = Sized<espalier_load_sizes>();
    ASSERT_OK(espalier_experts_load_sizes(checkpoint_, extents, 0, rank, nullptr, &sizes));
    espalier_experts* experts = nullptr;
    ASSERT_OK(espalier_experts_load_rank(checkpoint_, extents, 0, rank, nullptr, &experts));
    auto loaded = Sized<espalier_experts_info>();
    ASSERT_OK(espalier_experts_get_info(experts, &loaded));
    EXPECT_EQ(loaded.slab_bytes, sizes.slab_bytes);
    EXPECT_EQ(loaded.rank, rank);
    EXPECT_EQ(loaded.first_expert, first);
    espalier_plan_options plan_options = Options();
    plan_options.mode = ESPALIER_MODE_EXACT;
    espalier_moe_plan* plan = Plan(experts, plan_options);
    auto plan_info = Sized<espalier_plan_info>();
    ASSERT_OK(espalier_moe_plan_get_info(plan, &plan_info));
    HostBuffer workspace = Require(HostBuffer::Create(plan_info.workspace_bytes));
    espalier_moe_args args = Args(call, y, workspace);
    args.expert_map = map.data();
    args.expert_map_size = map.size();
    args.accumulate = 1;
    ASSERT_OK(espalier_moe_run(plan, experts, &args));
    EXPECT_OK(espalier_moe_plan_free(plan));
    EXPECT_OK(espalier_experts_free(experts));
  }
  const std::vector<float> whole = RunCpp(Require(LoadExperts(*cpp_, 0)), CpuMode::kExact, "", call);
  EXPECT_LE(
      test::Compare(std::vector<double>(whole.begin(), whole.end()), std::vector<double>(y.begin(), y.end()))
          .rel_l2,
      2e-6);
  EXPECT_EQ(espalier_extents_weight_bytes(extents, 4, nullptr), ESPALIER_USAGE);
  uint64_t bytes = 0;
  ExpectFailure(espalier_extents_weight_bytes(extents, 4, &bytes), ESPALIER_USAGE, "rank 4; legal: 0 to 3");
  EXPECT_EQ(espalier_extents_expert_map(extents, 0, 2, nullptr, &bytes), ESPALIER_USAGE);
  EXPECT_EQ(espalier_extents_expert_map(extents, 99, 0, nullptr, &bytes), ESPALIER_USAGE);
  EXPECT_EQ(espalier_extents_segments(extents, 0, -1, nullptr, &bytes), ESPALIER_USAGE);
  EXPECT_OK(espalier_extents_free(extents));
}

TEST_F(CApi, LinearsAndTheirPartsRunAsCpp) {
  const std::string name = cpp_->linears()[0].name;
  auto extent = Sized<espalier_linear_extent>();
  extent.out_channels = 128;
  const espalier_linear_extent* const parts[] = {nullptr, &extent};
  for (const espalier_linear_extent* part : parts) {
    espalier_linear* linear = nullptr;
    ASSERT_OK(espalier_linear_load(checkpoint_, name.c_str(), part, nullptr, &linear));
    const LinearExtent cpp_part{.out_channels = part != nullptr ? 128u : 0u};
    const PreparedLinear expected = Require(LoadLinear(*cpp_, name, cpp_part));
    auto info = Sized<espalier_linear_info>();
    ASSERT_OK(espalier_linear_get_info(linear, &info));
    EXPECT_EQ(info.out_channels, expected.out_channels());
    EXPECT_EQ(info.bits, expected.matrix().bits);
    EXPECT_EQ(info.slab_bytes, expected.slab_bytes());

    uint64_t count = 0;
    ASSERT_OK(espalier_linear_decode(linear, 0, nullptr, &count));
    ASSERT_EQ(count, info.stored_in_channels * info.stored_out_channels);
    std::vector<float> weights(count);
    ASSERT_OK(espalier_linear_decode(linear, 0, weights.data(), &count));
    EXPECT_EQ(weights, Require(DecodeMatrix(expected, false)));
    count -= 1;
    EXPECT_EQ(espalier_linear_decode(linear, 0, weights.data(), &count), ESPALIER_USAGE);

    espalier_linear_plan* plan = nullptr;
    auto options = Sized<espalier_plan_options>();
    options.max_tokens = 2;
    options.mode = ESPALIER_MODE_EXACT;
    ASSERT_OK(espalier_linear_plan_create(linear, &options, &plan));
    auto plan_info = Sized<espalier_plan_info>();
    ASSERT_OK(espalier_linear_plan_get_info(plan, &plan_info));
    HostBuffer workspace = Require(HostBuffer::Create(plan_info.workspace_bytes));
    const std::vector<float> x(2 * info.in_channels, 0.25f);
    std::vector<float> y(2 * info.out_channels);
    auto args = Sized<espalier_linear_args>();
    args.num_tokens = 2;
    args.x = x.data();
    args.x_row_stride = info.in_channels;
    args.y = y.data();
    args.y_row_stride = info.out_channels;
    args.workspace = workspace.data();
    args.workspace_bytes = workspace.size_bytes();
    ASSERT_OK(espalier_linear_run(plan, linear, &args));
    const std::vector<double> same = test::RunLinearCall(expected, x, "cpu", Dtype::kF32);
    EXPECT_EQ(std::vector<double>(y.begin(), y.end()), same);
    args.num_tokens = 3;
    EXPECT_EQ(espalier_linear_run(plan, linear, &args), ESPALIER_CAPACITY);
    EXPECT_OK(espalier_linear_plan_free(plan));
    EXPECT_OK(espalier_linear_free(linear));
  }
  extent.first_in = 64;
  espalier_linear* linear = nullptr;
  ExpectFailure(espalier_linear_load(checkpoint_, name.c_str(), &extent, nullptr, &linear), ESPALIER_GEOMETRY,
                name + ": found input channels [64, +0)");
  EXPECT_EQ(linear, nullptr);
}

// Weights in memory give the package that the file gives.
TEST_F(CApi, PreparesFromMemory) {
  auto load = Sized<espalier_load_options>();
  load.hash = 1;
  load.order = ESPALIER_ORDER_NATIVE;
  espalier_experts* loaded = nullptr;
  ASSERT_OK(espalier_experts_load(checkpoint_, 1, &load, &loaded));
  const PreparedExperts native = Require(LoadExperts(*cpp_, 1, {.order = CodeOrder::kNative}));
  std::vector<espalier_segment> segments;
  for (const SegmentDesc& segment : native.segments()) {
    espalier_segment& target = segments.emplace_back();
    target.expert = segment.expert;
    for (int p = 0; p < kNumProjections; ++p) {
      const MatrixDesc& matrix = segment.matrices[p];
      const auto vector = [&](uint64_t offset) {
        return reinterpret_cast<const uint16_t*>(native.slab() + offset);
      };
      target.matrices[p] = {.in_channels = matrix.in_channels,
                            .out_channels = matrix.out_channels,
                            .bits = matrix.bits,
                            .codebook = static_cast<int32_t>(matrix.codebook),
                            .suh_key = 0,
                            .svh_key = 0,
                            .codes = native.slab() + matrix.codes_offset_bytes,
                            .suh = vector(matrix.suh_offset_bytes),
                            .svh = vector(matrix.svh_offset_bytes),
                            .bias = nullptr};
    }
  }
  auto source = Sized<espalier_experts_source>();
  source.identity = "layer 1 in memory";
  source.experts = 16;
  source.hidden_channels = 256;
  source.segments = segments.data();
  source.num_segments = segments.size();
  auto sizes = Sized<espalier_load_sizes>();
  ASSERT_OK(espalier_experts_prepare_sizes(&source, &load, &sizes));
  espalier_experts* prepared = nullptr;
  ASSERT_OK(espalier_experts_prepare(&source, &load, &prepared));
  auto from_file = Sized<espalier_experts_info>(), from_memory = Sized<espalier_experts_info>();
  ASSERT_OK(espalier_experts_get_info(loaded, &from_file));
  ASSERT_OK(espalier_experts_get_info(prepared, &from_memory));
  EXPECT_STREQ(from_memory.identity, "layer 1 in memory");
  EXPECT_EQ(std::string(from_memory.content_sha256).size(), 64u);
  EXPECT_EQ(from_memory.slab_bytes, sizes.slab_bytes);
  EXPECT_EQ(from_memory.code_bytes, from_file.code_bytes);
  const Call call(256, 16);
  espalier_moe_plan* plan = Plan(prepared, Options());
  EXPECT_EQ(Run(plan, prepared, call), Run(plan, loaded, call));
  espalier_experts* other = nullptr;
  const auto expect_place = [&](int32_t tp, int32_t ep, int32_t rank) {
    espalier_experts_source placed = source;
    placed.tp = tp;
    placed.ep = ep;
    placed.rank = rank;
    ExpectFailure(espalier_experts_prepare(&placed, &load, &other), ESPALIER_USAGE, "source: rank ");
  };
  expect_place(-1, 1, 0);
  expect_place(1 << 30, 1 << 30, 0);
  expect_place(2, 2, 4);
  expect_place(0, 0, -1);
  segments[0].matrices[0].codes = nullptr;
  EXPECT_EQ(espalier_experts_prepare(&source, &load, &other), ESPALIER_USAGE);
  segments[0].matrices[0].codebook = 17;
  ExpectFailure(espalier_experts_prepare(&source, &load, &other), ESPALIER_USAGE,
                "codebook 17; legal: 0 to 2");
  segments[0].matrices[0].codebook = 0;
  segments[0].matrices[0].bits = 9;
  EXPECT_EQ(espalier_experts_prepare(&source, &load, &other), ESPALIER_UNSUPPORTED);
  EXPECT_EQ(other, nullptr);
  EXPECT_OK(espalier_moe_plan_free(plan));
  EXPECT_OK(espalier_experts_free(prepared));
  EXPECT_OK(espalier_experts_free(loaded));
}

TEST_F(CApi, ReportsProgress) {
  auto load = Sized<espalier_load_options>();
  std::vector<std::pair<uint64_t, uint64_t>> seen;
  load.progress_context = &seen;
  load.progress = [](void* context, uint64_t done, uint64_t total) {
    static_cast<std::vector<std::pair<uint64_t, uint64_t>>*>(context)->emplace_back(done, total);
  };
  espalier_experts* experts = nullptr;
  ASSERT_OK(espalier_experts_load(checkpoint_, 0, &load, &experts));
  ASSERT_GE(seen.size(), 2u);
  EXPECT_EQ(seen.back().first, seen.back().second);
  EXPECT_OK(espalier_experts_free(experts));
}

TEST_F(CApi, StopsALoad) {
  struct Seen {
    int progress = 0;
    int asked = 0;
    int stops_at = 0;
  };
  auto load = Sized<espalier_load_options>();
  load.stop = [](void* context) {
    auto* seen = static_cast<Seen*>(context);
    return ++seen->asked == seen->stops_at ? 1 : 0;
  };
  for (const bool with_progress : {false, true}) {
    Seen seen{.stops_at = 2};
    load.progress_context = &seen;
    if (with_progress)
      load.progress = [](void* context, uint64_t, uint64_t) { ++static_cast<Seen*>(context)->progress; };
    espalier_experts* experts = nullptr;
    ExpectFailure(espalier_experts_load(checkpoint_, 0, &load, &experts), ESPALIER_CANCELLED,
                  "stopped by the caller");
    EXPECT_EQ(experts, nullptr);
    EXPECT_EQ(seen.asked, 2);
    EXPECT_EQ(seen.progress, with_progress ? 2 : 0);
    seen = {.stops_at = 1};
    espalier_linear* linear = nullptr;
    ExpectFailure(espalier_linear_load(checkpoint_, "lm_head", nullptr, &load, &linear), ESPALIER_CANCELLED,
                  "lm_head");
    EXPECT_EQ(linear, nullptr);
    seen = {.stops_at = -1};
    ASSERT_OK(espalier_experts_load(checkpoint_, 0, &load, &experts));
    EXPECT_OK(espalier_experts_free(experts));
  }
}

TEST_F(CApi, LoadsForOneTypeOfInput) {
  auto load = Sized<espalier_load_options>();
  load.io = ESPALIER_DTYPE_BF16;
  espalier_experts* experts = nullptr;
  ASSERT_OK(espalier_experts_load(checkpoint_, 0, &load, &experts));
  espalier_plan_options options = Options();
  espalier_moe_plan* plan = nullptr;
  ExpectFailure(espalier_moe_plan_create(experts, &options, &plan), ESPALIER_GEOMETRY,
                "prepared for inputs of type BF16; the plan asks for F32");
  options.input = ESPALIER_DTYPE_BF16;
  EXPECT_OK(espalier_moe_plan_create(experts, &options, &plan));
  EXPECT_OK(espalier_moe_plan_free(plan));
  EXPECT_OK(espalier_experts_free(experts));

  espalier_experts* other = nullptr;
  load.io = ESPALIER_DTYPE_F64;
  ExpectFailure(espalier_experts_load(checkpoint_, 0, &load, &other), ESPALIER_UNSUPPORTED, "type F64");
  load.io = 99;
  ExpectFailure(espalier_experts_load(checkpoint_, 0, &load, &other), ESPALIER_USAGE, "io 99; legal: ");
  load.io = 0;
  load.reserved_2 = 1;
  ExpectFailure(espalier_experts_load(checkpoint_, 0, &load, &other), ESPALIER_USAGE, "reserved_2 is 1");
  EXPECT_EQ(other, nullptr);
}

// What a program of the first version has behind its structs is none of the library's business.
TEST_F(CApi, TakesStructsOfTheFirstVersion) {
  auto load = Sized<espalier_load_options>();
  load.size = offsetof(espalier_load_options, io);
  load.io = 99;
  espalier_experts* experts = nullptr;
  ASSERT_OK(espalier_experts_load(checkpoint_, 0, &load, &experts));
  espalier_plan_options options = Options();
  options.size = offsetof(espalier_plan_options, pool);
  options.pool = reinterpret_cast<const espalier_thread_pool*>(uintptr_t{1} << 40);
  espalier_moe_plan* plan = Plan(experts, options);
  EXPECT_OK(espalier_moe_plan_free(plan));
  EXPECT_OK(espalier_experts_free(experts));
  load.size -= 1;
  EXPECT_EQ(espalier_experts_load(checkpoint_, 0, &load, &experts), ESPALIER_USAGE);
}

TEST_F(CApi, PlansShareAThreadPool) {
  espalier_thread_pool* pool = nullptr;
  ExpectFailure(espalier_thread_pool_create(-1, &pool), ESPALIER_USAGE, "-1");
  EXPECT_EQ(espalier_thread_pool_create(ThreadPool::kMaxThreads + 1, &pool), ESPALIER_USAGE);
  EXPECT_EQ(pool, nullptr);
  ASSERT_OK(espalier_thread_pool_create(3, &pool));
  int32_t size = 0;
  ASSERT_OK(espalier_thread_pool_get_size(pool, &size));
  EXPECT_EQ(size, 3);

  espalier_experts* experts = Load(0);
  espalier_linear* linear = nullptr;
  ASSERT_OK(espalier_linear_load(checkpoint_, "lm_head", nullptr, nullptr, &linear));
  const Call call(256, 16);
  espalier_plan_options options = Options();
  options.num_threads = 3;
  espalier_moe_plan* alone = Plan(experts, options);
  options.num_threads = 0;
  options.pool = pool;
  espalier_moe_plan* shared = Plan(experts, options);
  espalier_linear_plan* linear_plan = nullptr;
  ASSERT_OK(espalier_linear_plan_create(linear, &options, &linear_plan));
  auto info = Sized<espalier_plan_info>(), expected = Sized<espalier_plan_info>();
  ASSERT_OK(espalier_moe_plan_get_info(shared, &info));
  ASSERT_OK(espalier_moe_plan_get_info(alone, &expected));
  EXPECT_EQ(info.workspace_bytes, expected.workspace_bytes) << "scratch memory of three threads";

  // The plans keep the threads.
  EXPECT_OK(espalier_thread_pool_free(pool));
  EXPECT_EQ(Run(shared, experts, call), Run(alone, experts, call));
  espalier_moe_plan* other = nullptr;
  ExpectFailure(espalier_moe_plan_create(experts, &options, &other), ESPALIER_USAGE, "espalier_thread_pool");
  EXPECT_EQ(espalier_thread_pool_get_size(pool, &size), ESPALIER_USAGE);
  EXPECT_EQ(other, nullptr);

  ASSERT_OK(espalier_linear_plan_get_info(linear_plan, &info));
  HostBuffer workspace = Require(HostBuffer::Create(info.workspace_bytes));
  std::vector<float> y(kTokens * info.out_channels);
  auto args = Sized<espalier_linear_args>();
  args.num_tokens = kTokens;
  args.x = call.x.data();
  args.x_row_stride = info.in_channels;
  args.y = y.data();
  args.y_row_stride = info.out_channels;
  args.workspace = workspace.data();
  args.workspace_bytes = workspace.size_bytes();
  EXPECT_OK(espalier_linear_run(linear_plan, linear, &args));
  EXPECT_OK(espalier_linear_plan_free(linear_plan));
  EXPECT_OK(espalier_linear_free(linear));
  EXPECT_OK(espalier_moe_plan_free(shared));
  EXPECT_OK(espalier_moe_plan_free(alone));
  EXPECT_OK(espalier_experts_free(experts));
}

TEST_F(CApi, ReachesEveryCategory) {
  espalier_checkpoint* other = nullptr;
  ExpectFailure(espalier_checkpoint_open("/nonexistent", &other), ESPALIER_IO, "/nonexistent");
  const testing::TemporaryDirectory folder;
  std::ofstream(folder.path() / "model.safetensors") << "no header";
  EXPECT_EQ(espalier_checkpoint_open(folder.path().c_str(), &other), ESPALIER_FORMAT);
  EXPECT_EQ(other, nullptr);

  espalier_experts* experts = Load(0);
  espalier_moe_plan* plan = nullptr;
  espalier_plan_options options = Options();
  options.output = ESPALIER_DTYPE_F64;
  options.executor = "cpu";
  EXPECT_EQ(espalier_moe_plan_create(experts, &options, &plan), ESPALIER_UNSUPPORTED);
  options = Options();
  options.top_k = 0;
  EXPECT_EQ(espalier_moe_plan_create(experts, &options, &plan), ESPALIER_GEOMETRY);
  options = Options();
  options.max_tokens = kMaxPlanTokens + 1;
  EXPECT_EQ(espalier_moe_plan_create(experts, &options, &plan), ESPALIER_CAPACITY);
  options = Options();
  options.executor = "abacus";
  ExpectFailure(espalier_moe_plan_create(experts, &options, &plan), ESPALIER_USAGE, "abacus");
  for (int32_t espalier_plan_options::* field :
       {&espalier_plan_options::mode, &espalier_plan_options::id_type, &espalier_plan_options::input,
        &espalier_plan_options::output, &espalier_plan_options::num_threads,
        &espalier_plan_options::reserved}) {
    for (const int32_t bad : {-1, 1 << 20}) {
      options = Options();
      options.*field = bad;
      EXPECT_EQ(espalier_moe_plan_create(experts, &options, &plan), ESPALIER_USAGE);
    }
  }
  EXPECT_EQ(plan, nullptr);

  espalier_experts* copy = nullptr;
  EXPECT_EQ(espalier_experts_to_device(experts, {.type = ESPALIER_DEVICE_CUDA, .index = 99}, &copy),
            ESPALIER_DEVICE);
  EXPECT_EQ(espalier_experts_to_device(experts, {.type = 2, .index = 0}, &copy), ESPALIER_USAGE);
  EXPECT_EQ(espalier_experts_to_device(experts, {.type = ESPALIER_DEVICE_CPU, .index = 1}, &copy),
            ESPALIER_USAGE);
  ASSERT_OK(espalier_experts_to_device(experts, {.type = ESPALIER_DEVICE_CPU, .index = 0}, &copy));
  const Call call(256, 16);
  plan = Plan(experts, Options());
  EXPECT_EQ(Run(plan, copy, call), Run(plan, experts, call));

  std::vector<float> y(kTokens * 256);
  HostBuffer workspace = Require(HostBuffer::Create(uint64_t{1} << 24));
  const espalier_moe_args good = Args(call, y, workspace);
  espalier_moe_args args = good;
  args.x = nullptr;
  EXPECT_EQ(espalier_moe_run(plan, experts, &args), ESPALIER_USAGE);
  args = good;
  args.num_tokens = kTokens + 1;
  EXPECT_EQ(espalier_moe_run(plan, experts, &args), ESPALIER_CAPACITY);
  args = good;
  args.workspace_bytes = 1;
  EXPECT_EQ(espalier_moe_run(plan, experts, &args), ESPALIER_CAPACITY);
  args = good;
  args.x_row_stride = 1;
  EXPECT_EQ(espalier_moe_run(plan, experts, &args), ESPALIER_GEOMETRY);
  args = good;
  args.expert_map_size = uint64_t{1} << 32;
  EXPECT_EQ(espalier_moe_run(plan, experts, &args), ESPALIER_USAGE);
  args = good;
  args.num_tokens = 0;
  EXPECT_OK(espalier_moe_run(plan, experts, &args));
  EXPECT_OK(espalier_moe_plan_free(plan));
  EXPECT_OK(espalier_experts_free(copy));
  EXPECT_OK(espalier_experts_free(experts));
}

TEST_F(CApi, RefusesStructsOfAnotherSize) {
  auto info = Sized<espalier_checkpoint_info>();
  info.size = 0;
  ExpectFailure(espalier_checkpoint_get_info(checkpoint_, &info), ESPALIER_USAGE, "size is 0; legal: ");
  info.size = sizeof(info) - 1;
  EXPECT_EQ(espalier_checkpoint_get_info(checkpoint_, &info), ESPALIER_USAGE);
  // Of a header with one field more.
  struct Grown {
    espalier_extents_options known;
    uint64_t more;
  } grown = {};
  grown.known.size = sizeof(grown);
  espalier_extents* extents = nullptr;
  ASSERT_OK(espalier_extents_create(checkpoint_, &grown.known, &extents));
  grown.more = 1;
  espalier_extents* other = nullptr;
  ExpectFailure(espalier_extents_create(checkpoint_, &grown.known, &other), ESPALIER_UNSUPPORTED,
                "byte 24 of 32");
  EXPECT_EQ(other, nullptr);
  struct GrownInfo {
    espalier_extents_info known;
    uint64_t more;
  } grown_info = {};
  grown_info.known.size = sizeof(grown_info);
  grown_info.more = 77;
  ASSERT_OK(espalier_extents_get_info(extents, &grown_info.known));
  EXPECT_EQ(grown_info.known.size, sizeof(grown_info));
  EXPECT_EQ(grown_info.known.tp, 1);
  EXPECT_EQ(grown_info.more, 77u);
  EXPECT_OK(espalier_extents_free(extents));
}

TEST_F(CApi, RefusesNull) {
  espalier_experts* experts = Load(0);
  espalier_moe_plan* plan = Plan(experts, Options());
  auto args = Sized<espalier_moe_args>();
  uint64_t number = 0;
  const int32_t refused[] = {
      espalier_get_capabilities(nullptr),
      espalier_thread_pool_create(1, nullptr),
      espalier_thread_pool_get_size(nullptr, nullptr),
      espalier_checkpoint_open(nullptr, nullptr),
      espalier_checkpoint_open(kBundled, nullptr),
      espalier_checkpoint_get_info(nullptr, nullptr),
      espalier_checkpoint_get_info(checkpoint_, nullptr),
      espalier_checkpoint_legal_tp(checkpoint_, nullptr, nullptr),
      espalier_checkpoint_check(checkpoint_, nullptr),
      espalier_checkpoint_get_problem(checkpoint_, 0, nullptr),
      espalier_checkpoint_get_layer(checkpoint_, 0, nullptr),
      espalier_checkpoint_find_layer(checkpoint_, nullptr, &number),
      espalier_checkpoint_find_layer(checkpoint_, "0", nullptr),
      espalier_checkpoint_get_matrix(checkpoint_, 0, 0, 0, 0, nullptr),
      espalier_checkpoint_matrix_name(checkpoint_, 0, 0, 0, 0, nullptr, nullptr),
      espalier_checkpoint_matrix_name(checkpoint_, 0, 16, 0, 0, nullptr, &number),
      espalier_checkpoint_matrix_name(checkpoint_, 0, 0, 3, 0, nullptr, &number),
      espalier_checkpoint_matrix_name(checkpoint_, 0, 0, 0, 1, nullptr, &number),
      espalier_checkpoint_find_tensor(checkpoint_, nullptr, &number),
      espalier_checkpoint_get_tensor(checkpoint_, ~uint64_t{0}, nullptr),
      espalier_extents_create(nullptr, nullptr, nullptr),
      espalier_extents_create(checkpoint_, nullptr, nullptr),
      espalier_extents_get_info(nullptr, nullptr),
      espalier_experts_load(nullptr, 0, nullptr, &experts),
      espalier_experts_load(checkpoint_, 0, nullptr, nullptr),
      espalier_experts_load(checkpoint_, 99, nullptr, &experts),
      espalier_experts_load_rank(checkpoint_, nullptr, 0, 0, nullptr, &experts),
      espalier_experts_prepare(nullptr, nullptr, &experts),
      espalier_experts_prepare(nullptr, nullptr, nullptr),
      espalier_experts_get_info(experts, nullptr),
      espalier_linear_load(checkpoint_, nullptr, nullptr, nullptr, nullptr),
      espalier_linear_decode(nullptr, 0, nullptr, &number),
      espalier_moe_plan_create(experts, nullptr, &plan),
      espalier_moe_plan_create(nullptr, nullptr, &plan),
      espalier_moe_plan_get_info(plan, nullptr),
      espalier_moe_run(nullptr, experts, &args),
      espalier_moe_run(plan, nullptr, &args),
      espalier_moe_run(plan, experts, nullptr),
      espalier_linear_run(nullptr, nullptr, nullptr),
  };
  for (size_t i = 0; i < std::size(refused); ++i) EXPECT_EQ(refused[i], ESPALIER_USAGE) << "call " << i;
  EXPECT_OK(espalier_checkpoint_free(nullptr));
  EXPECT_OK(espalier_extents_free(nullptr));
  EXPECT_OK(espalier_experts_free(nullptr));
  EXPECT_OK(espalier_linear_free(nullptr));
  EXPECT_OK(espalier_moe_plan_free(nullptr));
  EXPECT_OK(espalier_linear_plan_free(nullptr));
  EXPECT_OK(espalier_moe_plan_free(plan));
  EXPECT_OK(espalier_experts_free(experts));
}

TEST_F(CApi, RefusesFreedAndForeignHandles) {
  espalier_experts* experts = Load(0);
  espalier_moe_plan* plan = Plan(experts, Options());
  auto args = Sized<espalier_moe_args>();
  auto info = Sized<espalier_experts_info>();
  ASSERT_OK(espalier_experts_free(experts));
  ExpectFailure(espalier_experts_free(experts), ESPALIER_USAGE, "espalier_experts: the handle was freed");
  EXPECT_EQ(espalier_experts_get_info(experts, &info), ESPALIER_USAGE);
  EXPECT_EQ(espalier_moe_run(plan, experts, &args), ESPALIER_USAGE);
  // A new one never takes the number of an old one.
  espalier_experts* next = Load(0);
  EXPECT_NE(next, experts);
  EXPECT_EQ(espalier_experts_get_info(experts, &info), ESPALIER_USAGE);
  EXPECT_EQ(espalier_experts_get_info(reinterpret_cast<espalier_experts*>(plan), &info), ESPALIER_USAGE);
  EXPECT_EQ(espalier_experts_get_info(reinterpret_cast<espalier_experts*>(&info), &info), ESPALIER_USAGE);
  EXPECT_OK(espalier_experts_free(next));
  EXPECT_OK(espalier_moe_plan_free(plan));
  EXPECT_EQ(espalier_moe_plan_free(plan), ESPALIER_USAGE);
}

TEST_F(CApi, ThreadsHaveErrorsOfTheirOwn) {
  ASSERT_EQ(espalier_checkpoint_open("/mine", &checkpoint_), ESPALIER_IO);
  std::string other, before;
  std::thread([&] {
    before = espalier_last_error();
    espalier_checkpoint* checkpoint = nullptr;
    EXPECT_EQ(espalier_checkpoint_open("/theirs", &checkpoint), ESPALIER_IO);
    other = espalier_last_error();
  }).join();
  EXPECT_EQ(before, "");
  EXPECT_THAT(other, HasSubstr("/theirs"));
  EXPECT_THAT(espalier_last_error(), HasSubstr("/mine"));
}

// Runs side by side give the same bits, and a package that is freed under them lives until they are done.
TEST_F(CApi, RunsFromManyThreadsWhileHandlesAreFreed) {
  const Call call(256, 16);
  espalier_experts* experts = Load(0);
  espalier_plan_options options = Options();
  options.num_threads = 1;
  espalier_moe_plan* plan = Plan(experts, options);
  const std::vector<float> expected = Run(plan, experts, call);
  auto info = Sized<espalier_plan_info>();
  ASSERT_OK(espalier_moe_plan_get_info(plan, &info));
  std::atomic<int> started{0}, ran{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      HostBuffer workspace = Require(HostBuffer::Create(info.workspace_bytes));
      for (;;) {
        std::vector<float> y(kTokens * 256);
        const espalier_moe_args args = Args(call, y, workspace);
        const int32_t status = espalier_moe_run(plan, experts, &args);
        ++started;
        if (status == ESPALIER_USAGE) return;
        EXPECT_EQ(status, ESPALIER_OK);
        EXPECT_EQ(y, expected);
        ++ran;
      }
    });
  }
  while (started < 30) std::this_thread::yield();
  EXPECT_OK(espalier_experts_free(experts));
  for (std::thread& thread : threads) thread.join();
  EXPECT_GE(ran, 27);
  EXPECT_OK(espalier_moe_plan_free(plan));
}

}  // namespace
}  // namespace espalier
