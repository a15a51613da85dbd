# SPDX-License-Identifier: Apache-2.0
"""torch.ops.espalier.moe and .linear against the oracle, eager, compiled and captured."""

import subprocess
import sys
import threading

import numpy
import pytest
from package_support import ROOT, TINY, needs_gpu, rel_l2

import espalier

torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)
import espalier.torch as faces  # noqa: E402

HIDDEN, EXPERTS, TOP_K = 256, 16, 4
LINEAR = "model.layers.0.self_attn.q_proj"
on_a_gpu = needs_gpu(torch)
DEVICES = ["cpu", pytest.param("cuda", marks=on_a_gpu)]
ROUNDING = {torch.float32: 0.0, torch.float16: 1e-3, torch.bfloat16: 8e-3}
ROWS = [0, 1, 2, 7, 33, 130]


@pytest.fixture(scope="module")
def checkpoint():
    return espalier.Checkpoint(TINY)


@pytest.fixture(scope="module")
def experts(checkpoint):
    return espalier.prepare(checkpoint, 0)


@pytest.fixture(scope="module")
def linear(checkpoint):
    return espalier.prepare_linear(checkpoint, LINEAR)


def tokens(rows, dtype=torch.float32, ids=torch.int32, device="cpu", experts=EXPERTS, seed=3):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, HIDDEN, generator=random).to(dtype)
    topk_ids = torch.randint(-1, experts, (rows, TOP_K), generator=random).to(ids)
    weights = torch.rand(rows, TOP_K, generator=random)
    return x.to(device), topk_ids.to(device), weights.to(device)


def oracle(experts, x, topk_ids, weights):
    plan = espalier.plan(
        experts, max_tokens=max(len(x), 1), top_k=topk_ids.shape[1], ids="int64", executor="reference", input="float32"
    )
    y = espalier.run(plan, experts, x.float().cpu(), topk_ids.long().cpu(), weights.cpu())
    return numpy.asarray(y)


def gate(device, mode, dtype):
    return (1e-3 if device == "cuda" else {"exact": 2e-6, "fast": 6e-3, "int8": 2.5e-2}[mode]) + ROUNDING[dtype]


def modes(device):
    return ["exact", "fast", "int8"] if device == "cpu" else ["fast"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_moe_is_what_the_oracle_says(experts, device, dtype, ids):
    number = faces.handle(experts.to(device))
    for rows in ROWS:
        args = tokens(rows, dtype, ids, device)
        expected = oracle(experts, *args)
        for mode in modes(device):
            y = torch.ops.espalier.moe(*args, number, mode)
            assert y.dtype == dtype and y.shape == (rows, HIDDEN) and y.device == args[0].device
            assert rel_l2(expected, y.float().cpu().numpy()) <= gate(device, mode, dtype), (rows, mode)
            assert torch.equal(y, torch.ops.espalier.moe(*args, number, mode))
    faces.release(number)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_linear_is_the_decoded_matrix(checkpoint, linear, device, dtype):
    matrix = torch.from_dlpack(checkpoint.matrix(LINEAR)).double()
    number = faces.handle(linear.to(device))
    for rows in ROWS:
        x = tokens(rows, dtype, device=device)[0]
        expected = (x.double().cpu() @ matrix).numpy()
        for mode in modes(device):
            y = torch.ops.espalier.linear(x, number, mode, torch.float32)
            assert rel_l2(expected, y.cpu().numpy()) <= gate(device, mode, torch.float32), (rows, mode)
    batched = torch.ops.espalier.linear(x.view(2, 65, HIDDEN), number)
    assert batched.shape == (2, 65, matrix.shape[1])
    assert torch.equal(batched.view(130, -1), torch.ops.espalier.linear(x, number))
    faces.release(number)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_may_lie_apart(experts, device):
    number = faces.handle(experts.to(device))
    x, ids, weights = tokens(9, device=device)
    wide = torch.full((9, 3 * HIDDEN), float("nan"), device=device)
    wide[:, HIDDEN : 2 * HIDDEN] = x
    y = torch.ops.espalier.moe(wide[:, HIDDEN : 2 * HIDDEN], ids, weights, number)
    assert torch.equal(y, torch.ops.espalier.moe(x, ids, weights, number))
    crosswise = torch.ops.espalier.moe(x.t().contiguous().t(), ids, weights, number)
    assert torch.equal(crosswise, y)
    faces.release(number)


@pytest.mark.parametrize("device", DEVICES)
def test_an_expert_map_leaves_out_what_is_elsewhere(checkpoint, experts, device):
    extents = checkpoint.extents(ep=2)
    x, ids, weights = tokens(12, device=device)
    total = torch.zeros_like(x)
    for rank in range(2):
        share = espalier.prepare(checkpoint, 0, extents=extents, rank=rank).to(device)
        expert_map = torch.tensor(extents.expert_map(0, rank), dtype=torch.int32, device=device)
        total += faces.Moe(share)(x, ids, weights, expert_map)
    assert rel_l2(oracle(experts, x, ids, weights), total.cpu().numpy()) <= gate(device, "fast", torch.float32)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_is_eager_with_any_number_of_rows(experts, linear, device, backend):
    moe, projection = faces.Moe(experts.to(device)), faces.Linear(linear.to(device))

    def block(x, ids, weights):
        return moe(x, ids, weights) + 1, projection(x * 2)

    compiled = torch.compile(block, dynamic=True, fullgraph=True, backend=backend)
    with torch.inference_mode():
        for rows in (2, 5, 64, 65, 200):
            args = tokens(rows, torch.bfloat16, device=device)
            for eager, graph in zip(block(*args), compiled(*args)):
                assert torch.equal(eager, graph), rows


def test_the_operators_keep_the_rules_of_torch(experts, linear):
    numbers = faces.handle(experts), faces.handle(linear)
    args = tokens(5)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.espalier.moe.default, (*args, numbers[0]), test_utils=checks)
    torch.library.opcheck(torch.ops.espalier.linear.default, (args[0], numbers[1]), test_utils=checks)
    for number in numbers:
        faces.release(number)


@on_a_gpu
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_a_captured_graph_gives_the_bits_of_eager(experts, rows):
    moe = faces.Moe(experts.to("cuda"))
    args = tokens(rows, torch.bfloat16, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        eager = moe(*args)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = moe(*args)
    for seed in (3, 4):
        for target, source in zip(args, tokens(rows, torch.bfloat16, device="cuda", seed=seed)):
            target.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, moe(*args)), seed
    assert not torch.equal(y, eager)


@on_a_gpu
def test_graphs_made_by_torch_compile_give_the_bits_of_eager(experts, linear):
    moe, projection = faces.Moe(experts.to("cuda")), faces.Linear(linear.to("cuda"))

    def block(x, ids, weights):
        return moe(x, ids, weights), projection(x)

    compiled = torch.compile(block, dynamic=False, fullgraph=True, mode="reduce-overhead")
    for dtype in ROUNDING:
        for seed in range(4):  # eager, then captured, then replayed
            args = tokens(7, dtype, device="cuda", seed=seed)
            with torch.inference_mode():
                torch.compiler.cudagraph_mark_step_begin()
                for eager, graph in zip(block(*args), compiled(*args)):
                    assert torch.equal(eager, graph), (dtype, seed)


@on_a_gpu
def test_a_call_runs_on_the_current_stream(experts, linear):
    """The stream sleeps before it writes x: on any other stream the calls would find zeros."""
    moe, projection = faces.Moe(experts.to("cuda")), faces.Linear(linear.to("cuda"))
    x, ids, weights = tokens(33, device="cuda")
    expected = moe(x, ids, weights), projection(x)
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(500_000_000)
        late.copy_(x)
        found = moe(late, ids, weights), projection(late)
    side.synchronize()
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@on_a_gpu
def test_arrays_of_torch_on_a_gpu_in_the_package_itself(experts):
    on_gpu = experts.to("cuda")
    x, ids, weights = tokens(33, device="cuda")
    plan = espalier.plan(on_gpu, max_tokens=33, top_k=TOP_K)
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        out = torch.full_like(x, float("nan"))
        y = espalier.run(plan, on_gpu, x, ids, weights, out=out, workspace=workspace, stream=side.cuda_stream)
    side.synchronize()
    assert y is out
    assert rel_l2(oracle(experts, x, ids, weights), y.cpu().numpy()) <= gate("cuda", "fast", torch.float32)
    with pytest.raises(espalier.DeviceError, match="x is on cpu"):
        espalier.run(plan, on_gpu, x.cpu(), ids, weights, out=out, workspace=workspace)


@pytest.mark.parametrize("device", DEVICES)
def test_threads_may_call_at_once(experts, device):
    moe = faces.Moe(experts.to(device))
    cases = [tokens(rows, seed=rows, device=device) for rows in range(1, 17)]
    expected = [moe(*args) for args in cases]

    def work(index):
        # A stream each, so that the calls of a GPU overlap too.
        with torch.cuda.stream(torch.cuda.Stream() if device == "cuda" else None):
            for _ in range(20):
                if not torch.equal(moe(*cases[index]), expected[index]):
                    wrong.append(index)

    wrong = []
    if device == "cuda":
        torch.cuda.synchronize()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_module_has_no_state_and_lets_go(experts, linear):
    moe, projection = faces.Moe(experts), faces.Linear(linear)
    assert not moe.state_dict() and not projection.state_dict()
    number = moe.handle
    del moe
    with pytest.raises(espalier.UsageError, match=f"handle {number} is unknown or was released"):
        torch.ops.espalier.moe(*tokens(1), number)
    with pytest.raises(espalier.UsageError, match="unknown or was released"):
        faces.release(number)


def test_a_call_in_progress_outlives_the_release(experts, monkeypatch):
    number, find = faces.handle(experts), faces._find
    expected = torch.ops.espalier.moe(*tokens(3), number)

    def release_then_go_on(*args):
        package = find(*args)
        faces.release(number)
        return package

    monkeypatch.setattr(faces, "_find", release_then_go_on)
    assert torch.equal(torch.ops.espalier.moe(*tokens(3), number), expected)
    assert number not in faces._packages and number not in faces._plans


def refused(error, text, call):
    with pytest.raises(error, match=text):
        call()


def test_what_does_not_fit_is_refused_by_name(experts, linear):
    number, matrix = faces.handle(experts), faces.handle(linear)
    x, ids, weights = tokens(3)
    moe, project = torch.ops.espalier.moe, torch.ops.espalier.linear
    refused(espalier.GeometryError, r"x is \[3, 128\]; legal: \[tokens, 256\]", lambda: moe(x[:, :128], ids, weights, number))
    refused(espalier.GeometryError, "topk_ids is", lambda: moe(x, ids[:2], weights, number))
    refused(espalier.GeometryError, "topk_weights", lambda: moe(x, ids, weights[:, :2], number))
    refused(espalier.UsageError, "x is torch.float64", lambda: moe(x.double(), ids, weights, number))
    refused(espalier.UsageError, "topk_ids is torch.float32", lambda: moe(x, weights, weights, number))
    refused(espalier.UsageError, "out_dtype is torch.int32", lambda: moe(x, ids, weights, number, out_dtype=torch.int32))
    refused(espalier.UsageError, "expert_map is torch.int64", lambda: moe(x, ids, weights, number, "fast", ids[0].long()))
    refused(espalier.UsageError, "quick", lambda: moe(x, ids, weights, number, "quick"))
    refused(espalier.UsageError, "is that of Linear", lambda: moe(x, ids, weights, matrix))
    refused(espalier.UsageError, "is that of Experts", lambda: project(x, number))
    refused(espalier.GeometryError, r"legal: \[\.\.\., 256\]", lambda: project(x[:, :128], matrix))
    refused(espalier.GeometryError, "16", lambda: moe(x, torch.full_like(ids, EXPERTS), weights, number))
    refused(espalier.UnsupportedError, "no gradients", lambda: moe(x.clone().requires_grad_(), ids, weights, number))
    refused(espalier.UnsupportedError, "no gradients", lambda: project(x.clone().requires_grad_(), matrix))
    with torch.no_grad():
        assert torch.equal(project(x.clone().requires_grad_(), matrix), project(x, matrix))
    if torch.cuda.is_available():
        refused(espalier.DeviceError, "x is on cuda:0", lambda: project(x.cuda(), matrix))
    faces.release(number)
    faces.release(matrix)


def test_a_closed_package_is_an_error_and_no_crash(checkpoint):
    experts = espalier.prepare(checkpoint, 1)
    number = faces.handle(experts)
    torch.ops.espalier.moe(*tokens(2), number)
    experts.close()
    refused(espalier.UsageError, "used after close", lambda: torch.ops.espalier.moe(*tokens(2), number))
    faces.release(number)


def test_example_of_the_documentation():
    text = (ROOT / "docs" / "torch.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == text.split("```text\n")[1].split("```")[0]
