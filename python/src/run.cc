// SPDX-License-Identifier: Apache-2.0
//
// Plans, and running packages with them.
#include <espalier/backend.h>
#include <espalier/moe.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "arguments.h"
#include "array.h"
#include "packages.h"

namespace espalier::python {
namespace {

// Host workspaces that belong to a plan: a run takes one that is free or makes one, and puts it back. The GIL
// is the lock, so that a forked child never finds it taken.
class Workspaces {
 public:
  std::shared_ptr<HostBuffer> Take(uint64_t size_bytes) {
    if (!free_.empty()) {
      std::shared_ptr<HostBuffer> buffer = std::move(free_.back());
      free_.pop_back();
      return buffer;
    }
    return std::make_shared<HostBuffer>(Value(HostBuffer::Create(size_bytes)));
  }
  void Return(std::shared_ptr<HostBuffer> buffer) { free_.push_back(std::move(buffer)); }

 private:
  std::vector<std::shared_ptr<HostBuffer>> free_;
};

// One for the time of a run.
class LentWorkspace {
 public:
  explicit LentWorkspace(std::shared_ptr<Workspaces> owner, uint64_t size_bytes)
      : owner_(std::move(owner)), buffer_(owner_->Take(size_bytes)) {}
  ~LentWorkspace() { owner_->Return(std::move(buffer_)); }
  LentWorkspace(const LentWorkspace&) = delete;
  LentWorkspace& operator=(const LentWorkspace&) = delete;

  HostBuffer& buffer() { return *buffer_; }

 private:
  std::shared_ptr<Workspaces> owner_;
  std::shared_ptr<HostBuffer> buffer_;
};

template <typename CorePlan>
struct Plan {
  CorePlan core;
  std::shared_ptr<Workspaces> workspaces = std::make_shared<Workspaces>();

  const Device& device() const { return core.options().device; }
};
using PlanOfMoe = Plan<MoePlan>;
using PlanOfLinear = Plan<LinearPlan>;

template <typename Options>
Options CommonOptions(const Int& max_tokens, nb::handle input, nb::handle output, const Device& device,
                      const std::optional<std::string>& executor, const std::string& mode,
                      const Int& num_threads) {
  Options options;
  options.max_tokens = ToInteger(max_tokens, "max_tokens", 0, kMaxPlanTokens);
  options.input = ToDtype(input, "input");
  options.output = ToDtype(output, "output");
  options.device = device;
  options.executor = executor.value_or("");
  options.mode = ToMode(mode);
  options.num_threads = static_cast<int>(ToInteger(num_threads, "num_threads", 0, ThreadPool::kMaxThreads));
  return options;
}

IdType ToIdType(nb::handle ids) {
  const std::string text = Str(nb::getattr(ids, "name", nb::getattr(ids, "__name__", nb::str(ids))));
  if (text == "int32" || text == "torch.int32") return IdType::kInt32;
  if (text == "int64" || text == "torch.int64") return IdType::kInt64;
  Raise(StatusCode::kUsage, "ids is '" + text + "'; legal: int32, int64");
}

PlanOfMoe PlanExpertsRun(const Experts& what, const Int& max_tokens, std::optional<Int> top_k, nb::object ids,
                         nb::object input, nb::object output, std::optional<bool> checked_ids,
                         std::optional<std::string> executor, const std::string& mode,
                         const Int& num_threads) {
  const std::shared_ptr<const PreparedExperts> experts = what.Get();
  auto options = CommonOptions<MoePlanOptions>(max_tokens, input, output, experts->device(), executor, mode,
                                               num_threads);
  if (!top_k) {
    Raise(StatusCode::kUsage, "top_k is missing; legal: experts per token, 1 to " + std::to_string(kMaxTopK));
  }
  options.top_k = static_cast<uint32_t>(ToInteger(*top_k, "top_k", 1, kMaxTopK));
  options.id_type = ToIdType(ids);
  options.checked_ids = checked_ids.value_or(options.device.is_host());
  return {.core = Value(MoePlan::Create(*experts, options))};
}

PlanOfLinear PlanLinearRun(const Linear& what, const Int& max_tokens, nb::object input, nb::object output,
                           std::optional<std::string> executor, const std::string& mode,
                           const Int& num_threads) {
  const std::shared_ptr<const PreparedLinear> linear = what.Get();
  const auto options = CommonOptions<LinearPlanOptions>(max_tokens, input, output, linear->device(), executor,
                                                        mode, num_threads);
  return {.core = Value(LinearPlan::Create(*linear, options))};
}

// Output and scratch memory of a call.
struct Target {
  nb::object out;  // what run() returns
  Rows y;
  std::optional<Imported> workspace;
};

struct TargetWanted {
  Dtype dtype;
  uint64_t columns = 0;
  std::string_view columns_text;
  Device device;
  uint64_t workspace_bytes = 0;
};

Target MakeTarget(nb::object out, nb::object workspace, bool accumulate, const Rows& x,
                  const TargetWanted& wanted, std::optional<uint64_t> stream) {
  if (out.is_none() && accumulate)
    Raise(StatusCode::kUsage, "accumulate without out: there is nothing to add to");
  if (out.is_none() && !wanted.device.is_host())
    Raise(StatusCode::kUsage,
          "out is None; legal on " + DeviceText(wanted.device) + ": an array to write to");
  if (workspace.is_none() && !wanted.device.is_host() && wanted.workspace_bytes > 0) {
    Raise(StatusCode::kUsage, "workspace is None; legal on " + DeviceText(wanted.device) + ": " +
                                  std::to_string(wanted.workspace_bytes) + " bytes");
  }
  if (out.is_none()) out = nb::cast(Array::Create(wanted.dtype, {x.num_rows, wanted.columns}));
  Target target{.out = out,
                .y = ToRows(Import(out, "out", true, stream), {.dtypes = {wanted.dtype},
                                                               .columns = wanted.columns,
                                                               .columns_text = wanted.columns_text,
                                                               .device = wanted.device}),
                .workspace = std::nullopt};
  CheckSameRows(target.y, x);
  CheckApart(target.y.array, x.array);
  if (workspace.is_none()) return target;
  target.workspace = Import(workspace, "workspace", true, stream);
  CheckWorkspace(*target.workspace, wanted.device);
  CheckApart(*target.workspace, target.y.array);
  CheckApart(*target.workspace, x.array);
  return target;
}

uint64_t WorkspaceBytes(const Imported& workspace) {
  uint64_t elements = 1;
  for (const int64_t size : workspace.shape) elements *= static_cast<uint64_t>(size);
  return elements * workspace.element_bytes();
}

std::optional<uint64_t> ToStream(const std::optional<Int>& stream) {
  if (!stream) return std::nullopt;
  return ToCount<uint64_t>(*stream, "stream");
}

// Ids by position: an array of the plan's device, or on the host any list of integers.
struct ExpertMapArgument {
  std::vector<int32_t> values;
  std::optional<Imported> array;
  const int32_t* data = nullptr;
  uint32_t size = 0;
};

ExpertMapArgument ToExpertMap(nb::handle map, const Device& device, std::optional<uint64_t> stream) {
  ExpertMapArgument argument;
  if (map.is_none()) return argument;
  if (nb::isinstance<nb::list>(map) || nb::isinstance<nb::tuple>(map)) {
    if (!device.is_host()) {
      Raise(StatusCode::kDevice,
            "expert_map is a " + TypeName(map) + "; legal: an array on " + DeviceText(device));
    }
    if (!nb::try_cast(map, argument.values))
      Raise(StatusCode::kUsage, "expert_map has an entry that is no int32");
    argument.data = argument.values.data();
    argument.size = ToCount<uint32_t>(Int{nb::int_(argument.values.size())}, "length of expert_map");
    return argument;
  }
  argument.array = Import(map, "expert_map", false, stream);
  CheckVector(*argument.array, Dtype::kI32, device);
  argument.data = reinterpret_cast<const int32_t*>(argument.array->data);
  argument.size = static_cast<uint32_t>(argument.array->shape[0]);
  return argument;
}

// A workspace of the caller, or else one of the plan's for the time of the call.
template <typename Args, typename CorePlan>
std::unique_ptr<LentWorkspace> SetWorkspace(const Plan<CorePlan>& plan, const std::optional<Imported>& given,
                                            Args& args) {
  if (given) {
    args.workspace = given->data;
    args.workspace_bytes = WorkspaceBytes(*given);
    return nullptr;
  }
  auto lent = std::make_unique<LentWorkspace>(plan.workspaces, plan.core.workspace_bytes());
  args.workspace = lent->buffer().data();
  args.workspace_bytes = lent->buffer().size_bytes();
  return lent;
}

nb::object RunExperts(const PlanOfMoe& plan, const Experts& handle, nb::object x, nb::object topk_ids,
                      nb::object topk_weights, nb::object out, bool accumulate, nb::object expert_map,
                      nb::object workspace, std::optional<Int> stream_argument) {
  const std::shared_ptr<const PreparedExperts> experts = handle.Get();
  const MoePlanOptions& options = plan.core.options();
  const uint64_t hidden = plan.core.geometry().hidden_channels;
  const std::optional<uint64_t> stream = ToStream(stream_argument);
  const Rows rows = ToRows(
      Import(x, "x", false, stream),
      {.dtypes = {options.input}, .columns = hidden, .columns_text = "hidden", .device = options.device});
  const Dtype id_type = options.id_type == IdType::kInt64 ? Dtype::kI64 : Dtype::kI32;
  const Rows ids = ToRows(
      Import(topk_ids, "topk_ids", false, stream),
      {.dtypes = {id_type}, .columns = options.top_k, .columns_text = "top_k", .device = options.device});
  const Rows weights = ToRows(
      Import(topk_weights, "topk_weights", false, stream),
      {.dtypes = {Dtype::kF32}, .columns = options.top_k, .columns_text = "top_k", .device = options.device});
  CheckSameRows(ids, rows);
  CheckSameRows(weights, rows);
  const ExpertMapArgument map = ToExpertMap(expert_map, options.device, stream);
  const Target target = MakeTarget(std::move(out), std::move(workspace), accumulate, rows,
                                   {.dtype = options.output,
                                    .columns = hidden,
                                    .columns_text = "hidden",
                                    .device = options.device,
                                    .workspace_bytes = plan.core.workspace_bytes()},
                                   stream);
  for (const Imported* read : {&ids.array, &weights.array}) {
    CheckApart(target.y.array, *read);
    if (target.workspace) CheckApart(*target.workspace, *read);
  }
  MoeArgs args{.num_tokens = rows.num_rows,
               .x = rows.data(),
               .x_row_stride = rows.row_stride,
               .topk_ids = ids.data(),
               .topk_ids_row_stride = ids.row_stride,
               .topk_weights = static_cast<const float*>(weights.data()),
               .topk_weights_row_stride = weights.row_stride,
               .expert_map = map.data,
               .expert_map_size = map.size,
               .y = target.y.data(),
               .y_row_stride = target.y.row_stride,
               .accumulate = accumulate,
               .stream = reinterpret_cast<void*>(stream.value_or(0))};
  const std::unique_ptr<LentWorkspace> lent = SetWorkspace(plan, target.workspace, args);
  Value(WithoutGil([&] { return RunMoe(plan.core, *experts, args); }));
  return target.out;
}

nb::object RunMatrix(const PlanOfLinear& plan, const Linear& handle, nb::object x, nb::object out,
                     bool accumulate, nb::object workspace, std::optional<Int> stream_argument) {
  const std::shared_ptr<const PreparedLinear> linear = handle.Get();
  const LinearPlanOptions& options = plan.core.options();
  const std::optional<uint64_t> stream = ToStream(stream_argument);
  const Rows rows = ToRows(Import(x, "x", false, stream), {.dtypes = {options.input},
                                                           .columns = plan.core.in_channels(),
                                                           .columns_text = "in_channels",
                                                           .device = options.device});
  const Target target = MakeTarget(std::move(out), std::move(workspace), accumulate, rows,
                                   {.dtype = options.output,
                                    .columns = plan.core.out_channels(),
                                    .columns_text = "out_channels",
                                    .device = options.device,
                                    .workspace_bytes = plan.core.workspace_bytes()},
                                   stream);
  LinearArgs args{.num_tokens = rows.num_rows,
                  .x = rows.data(),
                  .x_row_stride = rows.row_stride,
                  .y = target.y.data(),
                  .y_row_stride = target.y.row_stride,
                  .accumulate = accumulate,
                  .stream = reinterpret_cast<void*>(stream.value_or(0))};
  const std::unique_ptr<LentWorkspace> lent = SetWorkspace(plan, target.workspace, args);
  Value(WithoutGil([&] { return RunLinear(plan.core, *linear, args); }));
  return target.out;
}

// An address as a plain number.
template <typename T = void>
T* Pointer(uint64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// Without a workspace on the host: the plan's own.
template <typename Args, typename CorePlan>
std::unique_ptr<LentWorkspace> LendIfNone(const Plan<CorePlan>& plan, Args& args) {
  if (args.workspace != nullptr || args.workspace_bytes != 0 || !plan.device().is_host()) return nullptr;
  return SetWorkspace(plan, std::nullopt, args);
}

void RunExpertsAt(const PlanOfMoe& plan, const Experts& handle, uint64_t num_tokens, uint64_t x,
                  uint64_t x_row_stride, uint64_t ids, uint64_t ids_row_stride, uint64_t weights,
                  uint64_t weights_row_stride, uint64_t y, uint64_t y_row_stride, uint64_t workspace,
                  uint64_t workspace_bytes, uint64_t expert_map, uint32_t expert_map_size, bool accumulate,
                  uint64_t stream) {
  const std::shared_ptr<const PreparedExperts> experts = handle.Get();
  MoeArgs args{.num_tokens = num_tokens,
               .x = Pointer(x),
               .x_row_stride = x_row_stride,
               .topk_ids = Pointer(ids),
               .topk_ids_row_stride = ids_row_stride,
               .topk_weights = Pointer<float>(weights),
               .topk_weights_row_stride = weights_row_stride,
               .expert_map = Pointer<int32_t>(expert_map),
               .expert_map_size = expert_map_size,
               .y = Pointer(y),
               .y_row_stride = y_row_stride,
               .accumulate = accumulate,
               .workspace = Pointer(workspace),
               .workspace_bytes = workspace_bytes,
               .stream = Pointer(stream)};
  const std::unique_ptr<LentWorkspace> lent = LendIfNone(plan, args);
  Value(WithoutGil([&] { return RunMoe(plan.core, *experts, args); }));
}

void RunMatrixAt(const PlanOfLinear& plan, const Linear& handle, uint64_t num_tokens, uint64_t x,
                 uint64_t x_row_stride, uint64_t y, uint64_t y_row_stride, uint64_t workspace,
                 uint64_t workspace_bytes, bool accumulate, uint64_t stream) {
  const std::shared_ptr<const PreparedLinear> linear = handle.Get();
  LinearArgs args{.num_tokens = num_tokens,
                  .x = Pointer(x),
                  .x_row_stride = x_row_stride,
                  .y = Pointer(y),
                  .y_row_stride = y_row_stride,
                  .accumulate = accumulate,
                  .workspace = Pointer(workspace),
                  .workspace_bytes = workspace_bytes,
                  .stream = Pointer(stream)};
  const std::unique_ptr<LentWorkspace> lent = LendIfNone(plan, args);
  Value(WithoutGil([&] { return RunLinear(plan.core, *linear, args); }));
}

template <typename P, typename Class>
void BindCommonPlan(Class& bound, const char* type) {
  bound
      .def_prop_ro(
          "workspace_bytes", [](const P& plan) { return plan.core.workspace_bytes(); },
          "Exact size of the scratch memory of one call, at 64 bytes; its contents do not matter.")
      .def_prop_ro(
          "max_tokens", [](const P& plan) { return plan.core.options().max_tokens; },
          "Rows that a call may have at most.")
      .def_prop_ro(
          "executor", [](const P& plan) { return plan.core.backend().name(); },
          "\"cpu\", \"cuda\", \"reference\".")
      .def_prop_ro(
          "mode", [](const P& plan) { return CpuModeName(plan.core.options().mode); },
          "\"fast\", \"exact\", \"int8\"; says something on the cpu executor only.")
      .def_prop_ro(
          "device", [](const P& plan) { return DeviceText(plan.device()); },
          "Where package, arrays and workspace lie: \"cpu\", \"cuda:0\".")
      .def_prop_ro(
          "input", [](const P& plan) { return ArrayDtypeName(plan.core.options().input); },
          nb::sig("def input(self) -> str"), "Type of x: \"float32\".")
      .def_prop_ro(
          "output", [](const P& plan) { return ArrayDtypeName(plan.core.options().output); },
          nb::sig("def output(self) -> str"), "Type of y: \"float32\".")
      .def_prop_ro(
          "num_threads", [](const P& plan) { return plan.core.options().num_threads; },
          "Threads of a call on the host.")
      .def("__repr__", [type](const P& plan) {
        return "<espalier." + std::string(type) + " of " + std::to_string(plan.core.options().max_tokens) +
               " tokens on " + DeviceText(plan.device()) + ", executor " +
               std::string(plan.core.backend().name()) + ">";
      });
}

}  // namespace

void BindRun(nb::module_& module) {
  auto moe_plan = nb::class_<PlanOfMoe>(
      module, "MoePlan",
      "How calls of run() go: their capacity, types and executor. Made by plan(). Immutable; usable from "
      "several\n"
      "threads at once. On the host it keeps a workspace for each call that ran at the same time.");
  BindCommonPlan<PlanOfMoe>(moe_plan, "MoePlan");
  moe_plan
      .def_prop_ro(
          "top_k", [](const PlanOfMoe& plan) { return plan.core.options().top_k; }, "Experts per token.")
      .def_prop_ro(
          "ids",
          [](const PlanOfMoe& plan) {
            return plan.core.options().id_type == IdType::kInt64 ? "int64" : "int32";
          },
          nb::sig("def ids(self) -> str"), "Type of topk_ids: \"int32\", \"int64\".")
      .def_prop_ro(
          "checked_ids", [](const PlanOfMoe& plan) { return plan.core.options().checked_ids; },
          "Whether an id outside the experts is an error.")
      .def_prop_ro(
          "hidden", [](const PlanOfMoe& plan) { return plan.core.geometry().hidden_channels; },
          "Channels of x and y.");
  auto linear_plan = nb::class_<PlanOfLinear>(
      module, "LinearPlan", "The same for run_linear(). Immutable; usable from several threads at once.");
  BindCommonPlan<PlanOfLinear>(linear_plan, "LinearPlan");
  linear_plan
      .def_prop_ro(
          "in_channels", [](const PlanOfLinear& plan) { return plan.core.in_channels(); }, "Channels of x.")
      .def_prop_ro(
          "out_channels", [](const PlanOfLinear& plan) { return plan.core.out_channels(); },
          "Channels of y.");

  module.def(
      "plan", &PlanExpertsRun, nb::arg("what"), nb::kw_only(), nb::arg("max_tokens") = 4096,
      nb::arg("top_k") = nb::none(), nb::arg("ids").none() = "int32", nb::arg("input").none() = "float32",
      nb::arg("output").none() = "float32", nb::arg("checked_ids") = nb::none(),
      nb::arg("executor") = nb::none(), nb::arg("mode") = "fast", nb::arg("num_threads") = 0,
      nb::sig("def plan(what: Experts, *, max_tokens: int = 4096, top_k: int | None = None, "
              "ids: typing.Any = 'int32', input: typing.Any = 'float32', output: typing.Any = 'float32', "
              "checked_ids: bool | None = None, executor: str | None = None, mode: str = 'fast', "
              "num_threads: int = 0) -> MoePlan"),
      "Plans calls of run() for packages like this one.\n\n"
      "max_tokens: a call has 0 to this many rows; at most 2**20.\n"
      "top_k: experts per token, 1 to 1024; required for Experts.\n"
      "ids: \"int32\" or \"int64\". input: \"float32\", \"float16\", \"bfloat16\". output: the same, and\n"
      "\"float64\" on the reference executor. A dtype of numpy or torch will do.\n"
      "checked_ids: an id outside the experts, but -1, raises GeometryError before anything is written;\n"
      "otherwise it contributes nothing. None = True on the host, and False on a GPU, which cannot.\n"
      "executor: \"cpu\", \"cuda\", \"reference\"; None = the best that supports the package.\n"
      "mode: of the cpu executor: \"fast\" (16-bit products), \"exact\" (fp32), \"int8\".\n"
      "num_threads: 0 = all cores; results do not depend on it.\n\n"
      "UsageError, UnsupportedError, CapacityError, GeometryError, DeviceError.");
  module.def("plan", &PlanLinearRun, nb::arg("what"), nb::kw_only(), nb::arg("max_tokens") = 4096,
             nb::arg("input").none() = "float32", nb::arg("output").none() = "float32",
             nb::arg("executor") = nb::none(), nb::arg("mode") = "fast", nb::arg("num_threads") = 0,
             nb::sig("def plan(what: Linear, *, max_tokens: int = 4096, input: typing.Any = 'float32', "
                     "output: typing.Any = 'float32', executor: str | None = None, mode: str = 'fast', "
                     "num_threads: int = 0) -> LinearPlan"),
             "Plans calls of run_linear() for matrices like this one.");
  module.def(
      "run", &RunExperts, nb::arg("plan"), nb::arg("experts"), nb::arg("x").none(),
      nb::arg("topk_ids").none(), nb::arg("topk_weights").none(), nb::kw_only(), nb::arg("out") = nb::none(),
      nb::arg("accumulate") = false, nb::arg("expert_map") = nb::none(), nb::arg("workspace") = nb::none(),
      nb::arg("stream") = nb::none(),
      nb::sig("def run(plan: MoePlan, experts: Experts, x: typing.Any, topk_ids: typing.Any, "
              "topk_weights: typing.Any, *, out: typing.Any = None, accumulate: bool = False, "
              "expert_map: typing.Any = None, workspace: typing.Any = None, stream: int | None = None) "
              "-> typing.Any"),
      "Runs the experts: y[t] = sum over j of topk_weights[t, j] * Expert(topk_ids[t, j])(x[t]).\n\n"
      "x: [tokens, hidden], the plan's input type.\n"
      "topk_ids: [tokens, top_k], the plan's id type; -1 = no expert.\n"
      "topk_weights: [tokens, top_k] float32, final weights.\n"
      "out: [tokens, hidden] of the plan's output type, written to and returned. None = a new Array; "
      "required\n"
      "on a GPU. accumulate: out += instead of out =.\n"
      "expert_map: int32 [global experts], local ids or -1 = not here; topk_ids are global then. A list "
      "will\n"
      "do on the host. workspace: workspace_bytes of scratch memory at 64 bytes, required on a GPU.\n"
      "stream: a cudaStream_t as an integer, None = the default stream.\n\n"
      "Arrays are anything with __dlpack__ (numpy, torch, cupy, jax) or a buffer, on the plan's device, with "
      "any\n"
      "distance between rows; nothing is copied. They are kept alive until the call returns: on a GPU they "
      "must\n"
      "stay until the stream has come past it. Releases the GIL; safe from several threads at once.\n\n"
      "UsageError (dtypes, strides, read-only or overlapping out, a closed handle), GeometryError (shapes, "
      "ids),\n"
      "CapacityError (more tokens than planned, a small workspace), DeviceError. Nothing is written then.");
  module.def(
      "run_linear", &RunMatrix, nb::arg("plan"), nb::arg("linear"), nb::arg("x").none(), nb::kw_only(),
      nb::arg("out") = nb::none(), nb::arg("accumulate") = false, nb::arg("workspace") = nb::none(),
      nb::arg("stream") = nb::none(),
      nb::sig("def run_linear(plan: LinearPlan, linear: Linear, x: typing.Any, *, out: typing.Any = None, "
              "accumulate: bool = False, workspace: typing.Any = None, stream: int | None = None) "
              "-> typing.Any"),
      "y = x W (+ bias): x [tokens, in_channels], out [tokens, out_channels]. Everything else as in run().");
  module.def(
      "run_moe_at", &RunExpertsAt, nb::arg("plan"), nb::arg("experts"), nb::arg("num_tokens"), nb::arg("x"),
      nb::arg("x_row_stride"), nb::arg("ids"), nb::arg("ids_row_stride"), nb::arg("weights"),
      nb::arg("weights_row_stride"), nb::arg("y"), nb::arg("y_row_stride"), nb::arg("workspace"),
      nb::arg("workspace_bytes"), nb::arg("expert_map"), nb::arg("expert_map_size"), nb::arg("accumulate"),
      nb::arg("stream"),
      "run() for callers that have checked their arrays themselves: plain addresses, 0 = null, strides in\n"
      "elements. A workspace of 0 and 0 bytes is the plan's own on the host. What the addresses hold is not\n"
      "checked: a wrong one ends the process. Releases the GIL.");
  module.def("run_linear_at", &RunMatrixAt, nb::arg("plan"), nb::arg("linear"), nb::arg("num_tokens"),
             nb::arg("x"), nb::arg("x_row_stride"), nb::arg("y"), nb::arg("y_row_stride"),
             nb::arg("workspace"), nb::arg("workspace_bytes"), nb::arg("accumulate"), nb::arg("stream"),
             "run_linear() with plain addresses; see run_moe_at().");
}

}  // namespace espalier::python
