# SPDX-License-Identifier: Apache-2.0
"""import espalier: what checkpoints hold, and results against the fixtures and the command line."""

import json
import pathlib
import subprocess
import sys

import numpy
import pytest
import safetensors.numpy
from package_support import BINARY, FIXTURES, REFUSED, ROOT, TINY, Tokens, fixture_list, random_tokens, rel_l2

import espalier


@pytest.fixture(scope="module")
def tiny():
    return espalier.Checkpoint(TINY)


@pytest.fixture(scope="module")
def layer0(tiny):
    return espalier.prepare(tiny, 0)


@pytest.mark.parametrize("run", [r for r in fixture_list("runs") if r["checkpoint"] not in REFUSED],
                         ids=lambda run: run["expected"].split("/")[-1])  # fmt: skip
def test_fixture_runs(run):
    experts = espalier.prepare(espalier.Checkpoint(FIXTURES / run["checkpoint"]), str(run["layer"]))
    tokens = Tokens(FIXTURES / run["input"])
    expected = numpy.asarray(espalier.Checkpoint(FIXTURES / run["expected"]).read("y"))
    for options, bound in (({"executor": "reference"}, 5e-7), ({"mode": "exact"}, 2e-6), ({}, 6e-3)):
        assert rel_l2(expected, tokens.run(experts, **options)) <= bound, options


@pytest.mark.parametrize("checkpoint", sorted(REFUSED))
def test_fixtures_that_are_refused(checkpoint):
    with pytest.raises(espalier.UnsupportedError, match="lut_") as error:
        espalier.Checkpoint(FIXTURES / checkpoint)
    assert error.value.category == "unsupported"
    assert isinstance(error.value, NotImplementedError)


@pytest.mark.parametrize("decode", [d for d in fixture_list("decodes") if d["checkpoint"] not in REFUSED],
                         ids=lambda decode: decode["checkpoint"])  # fmt: skip
def test_fixture_matrices(decode):
    expected = safetensors.numpy.load_file(FIXTURES / decode["expected"])["weight"]
    found = espalier.Checkpoint(FIXTURES / decode["checkpoint"]).matrix(decode["matrix"])
    assert (found.dtype, found.shape) == ("float32", expected.shape)
    assert rel_l2(expected, found) <= 5e-7


@pytest.mark.parametrize("mode", ["fast", "exact", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_bits_are_those_of_the_command_line(tmp_path, layer0, mode, dtype):
    x, ids, weights = random_tokens(5, 256, 16, 4)
    x = x.astype(dtype)
    safetensors.numpy.save_file({"x": x, "topk_ids": ids, "topk_weights": weights}, tmp_path / "in.safetensors")
    subprocess.run(
        [BINARY, "run", str(TINY), "--layer", "0", "--mode", mode, "--input", str(tmp_path / "in.safetensors"),
         "-o", str(tmp_path / "out.safetensors")],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    expected = safetensors.numpy.load_file(tmp_path / "out.safetensors")["y"]
    plan = espalier.plan(layer0, max_tokens=8, top_k=4, mode=mode, input=dtype)
    assert numpy.array_equal(numpy.asarray(espalier.run(plan, layer0, x, ids, weights)), expected)


def test_checkpoint_tells_what_is_in_it(tiny):
    assert tiny.path == str(TINY)
    assert tiny.layout == "stock"
    assert tiny.legal_tp == [1, 2, 3, 4]
    assert tiny.problems == []
    assert tiny.config["experts"] == 16 and tiny.config["top_k"] == 4 and tiny.config["activation"] == "silu"
    assert [layer.label for layer in tiny.layers] == ["0", "1", "2", "3"]
    layer = tiny.layers[2]
    assert (layer.number, layer.experts, layer.hidden, layer.intermediate) == (2, 16, 256, 512)
    assert (layer.slices, layer.has_gate, layer.prefix) == (1, True, "model.layers")
    linears = {linear.name: linear for linear in tiny.linears}
    assert len(linears) == 17
    head = linears["lm_head"]
    assert (head.in_channels, head.out_channels, head.bits, head.codebook, head.has_bias) == (256, 4096, 6, "mcg", False)
    assert len(tiny.tensors) == 858
    info = tiny.tensors["model.embed_tokens.weight"]
    assert (info.dtype, info.shape, info.file) == ("BF16", (4096, 256), "model.safetensors")
    assert info.size_bytes == 4096 * 256 * 2


def test_padded_sizes():
    layer = espalier.Checkpoint(FIXTURES / "stock-deepseek-padded").layers[0]
    assert (layer.hidden, layer.intermediate) == (320, 200)
    assert (layer.stored_hidden, layer.stored_intermediate) == (384, 256)


def test_problems(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(TINY / "model.safetensors")
    text = (TINY / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"num_experts": 16', '"num_experts": 15'))
    try:
        problems = espalier.Checkpoint(tmp_path).problems
    except espalier.FormatError:
        return  # refused outright is as good
    assert problems and problems[0].severity in ("warning", "error") and problems[0].message


def test_read_is_the_file(tiny):
    raw = (TINY / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for name in ("model.embed_tokens.weight", "lm_head.trellis", "lm_head.suh", "lm_head.mcg"):
        begin, end = header[name]["data_offsets"]
        array = tiny.read(name)
        assert array.shape == tuple(header[name]["shape"])
        plain = array.view("uint16") if array.dtype == "bfloat16" else array
        assert memoryview(plain).tobytes() == raw[8 + length + begin : 8 + length + end]


def test_every_stored_type_can_be_read(tmp_path):
    types = {
        "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "F16": "float16",
        "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32", "F64": "float64", "I64": "int64",
        "U64": "uint64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "C64": "complex64", "F4": "uint8",
        "F6_E2M3": "uint8", "F6_E3M2": "uint8",
    }  # fmt: skip
    bits = {"BOOL": 8, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
    header, data = [], b""
    for name in types:
        size = 8 * bits.get(name, int("".join(c for c in name.split("_")[0] if c.isdigit()) or 8)) // 8
        header.append(f'"{name}":{{"dtype":"{name}","shape":[2,4],"data_offsets":[{len(data)},{len(data) + size}]}}')
        data += bytes(range(size)) if name != "BOOL" else bytes(size)
    text = "{" + ",".join(header) + "}"
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + data)
    checkpoint = espalier.Checkpoint(path)
    for name, dtype in types.items():
        array = checkpoint.read(name)
        assert array.dtype == dtype
        assert array.shape == ((2, 4) if bits.get(name, 8) >= 8 else (array.nbytes,))
        assert array.nbytes == checkpoint.tensors[name].size_bytes


def test_arrays_share_their_memory(tiny):
    array = tiny.read("lm_head.suh")
    seen, other = numpy.asarray(array), numpy.from_dlpack(array)
    assert seen.dtype == numpy.float16
    seen[0] = 7
    assert other[0] == 7 and memoryview(array).tobytes() == seen.tobytes()
    assert array.__dlpack_device__() == (1, 0)
    assert numpy.array(array, dtype=numpy.float64).dtype == numpy.float64
    del array
    assert other[0] == 7 and other.sum() == seen.sum()


def test_bfloat16_and_numpy(tiny):
    array = tiny.read("model.embed_tokens.weight")
    with pytest.raises(BufferError, match="bfloat16"):
        memoryview(array)
    bits = numpy.asarray(array.view("uint16")).astype(numpy.uint32) << 16
    # Without ml_dtypes there is a sentence; with it, the type.
    code = (
        "import sys, espalier, numpy\n"
        f"array = espalier.Checkpoint({str(TINY)!r}).read('model.embed_tokens.weight')\n"
        "sys.modules['ml_dtypes'] = None\n"
        "try: numpy.asarray(array)\n"
        "except TypeError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.startswith("numpy has no bfloat16; install ml_dtypes")
    pytest.importorskip("ml_dtypes")
    assert numpy.array_equal(numpy.asarray(array).astype(numpy.float32), bits.view(numpy.float32))
    assert numpy.asarray(array, dtype=numpy.float32).dtype == numpy.float32


def test_matrix_is_what_the_linear_multiplies_by(tiny):
    name = "model.layers.0.self_attn.q_proj"
    linear = espalier.prepare_linear(tiny, name)
    x, _, _ = random_tokens(3, linear.in_channels, 1, 1)
    plan = espalier.plan(linear, max_tokens=3, mode="exact")
    expected = x.astype(numpy.float64) @ numpy.asarray(tiny.matrix(name)).astype(numpy.float64)
    assert rel_l2(expected, espalier.run_linear(plan, linear, x)) <= 2e-6
    inner = numpy.asarray(tiny.matrix(name, inner=True))
    assert numpy.array_equal(inner, inner.astype(numpy.float16)) and rel_l2(inner, tiny.matrix(name)) > 0.1


def test_parts_of_a_linear_make_the_whole(tiny):
    name = "lm_head"
    x, _, _ = random_tokens(4, 256, 1, 1)

    def run(x, **part):
        linear = espalier.prepare_linear(tiny, name, **part)
        return numpy.asarray(espalier.run_linear(espalier.plan(linear, mode="exact"), linear, x))

    whole = run(x)
    outputs = [run(x, first_out=first, out_channels=1024) for first in range(0, 4096, 1024)]
    assert numpy.array_equal(numpy.concatenate(outputs, axis=1), whole)
    inputs = [run(x[:, first : first + 128].copy(), first_in=first, in_channels=128) for first in (0, 128)]
    assert rel_l2(whole, inputs[0] + inputs[1]) <= 2e-6
    assert run(x, model_out=1000).shape == (4, 1000)
    assert numpy.array_equal(run(x, model_out=1000), whole[:, :1000])
    with pytest.raises(espalier.GeometryError, match="64"):
        run(x, first_out=64)


@pytest.mark.parametrize(("tp", "ep"), [(3, 1), (1, 3), (2, 2)])
def test_ranks_add_up(tiny, layer0, tp, ep):
    extents = tiny.extents(tp, ep)
    assert (extents.tp, extents.ep, extents.world) == (tp, ep, tp * ep)
    x, ids, weights = random_tokens(6, 256, 16, 4)
    whole = numpy.asarray(
        espalier.run(espalier.plan(layer0, max_tokens=6, top_k=4, mode="exact"), layer0, x, ids, weights)
    )
    y = numpy.zeros_like(whole)
    seen = []
    for rank in range(extents.world):
        experts = espalier.prepare(tiny, "0", extents=extents, rank=rank)
        assert (experts.tp, experts.ep, experts.rank) == (tp, ep, rank)
        ep_rank = rank // tp
        first, count = extents.experts(0, ep_rank)
        assert experts.experts == count
        mapping = extents.expert_map(0, ep_rank)
        assert [e for e in range(16) if mapping[e] >= 0] == list(range(first, first + count))
        seen += range(first, first + count) if rank % tp == 0 else []
        plan = espalier.plan(experts, max_tokens=6, top_k=4, mode="exact")
        forms = (mapping, tuple(mapping), numpy.array(mapping, numpy.int32))
        assert espalier.run(plan, experts, x, ids, weights, out=y, accumulate=True, expert_map=forms[rank % 3]) is y
    assert seen == list(range(16))
    assert rel_l2(whole, y) <= 2e-6
    rank0 = extents.layers[0].ranks[0]
    assert extents.layers[0].layer == 0 and rank0.channels == sum(s.channels for s in rank0.segments)
    assert extents.weight_bytes(0) == sum(layer.ranks[0].weight_bytes for layer in extents.layers) or ep > 1


def test_package_tells_what_it_is(tiny):
    experts = espalier.prepare(tiny, "1", hash=True, io="float16", output_scale=0.5, activation="gelu:3")
    assert (experts.experts, experts.hidden, experts.intermediate) == (16, 256, 512)
    assert (experts.device, experts.activation, experts.io, experts.output_scale) == ("cpu", "gelu:3", "float16", 0.5)
    assert experts.identity == f"layer 1 of {TINY}"
    assert experts.code_bytes < experts.slab_bytes
    assert len(experts.content_sha256) == 64
    assert espalier.prepare(tiny, 1, hash=True).content_sha256 != experts.content_sha256
    assert len(experts.segments) == 16
    segment = experts.segments[12]
    assert (segment.expert, segment.intermediate, segment.valid_intermediate) == (12, 512, 512)
    assert (segment.gate.bits, segment.down.codebook, segment.up.out_channels) == (4, "mcg", 512)
    assert sum(m.code_bytes for s in experts.segments for m in (s.gate, s.up, s.down)) == experts.code_bytes
    with pytest.raises(espalier.GeometryError, match="F16"):
        espalier.plan(experts, top_k=4)
    assert espalier.plan(experts, top_k=4, input="float16").input == "float16"


def test_copy_to_the_same_device(layer0):
    copy = layer0.to("cpu")
    x, ids, weights = random_tokens(2, 256, 16, 4)
    plan = espalier.plan(layer0, top_k=4)
    first = numpy.asarray(espalier.run(plan, layer0, x, ids, weights))
    assert numpy.array_equal(first, numpy.asarray(espalier.run(plan, copy, x, ids, weights)))


def test_plan_tells_what_it_is(layer0):
    plan = espalier.plan(layer0, max_tokens=7, top_k=3, ids="int64", input=numpy.float16, output=numpy.dtype("float32"),
                         mode="exact", num_threads=1)  # fmt: skip
    assert (plan.max_tokens, plan.top_k, plan.ids, plan.input, plan.output) == (7, 3, "int64", "float16", "float32")
    assert (plan.executor, plan.mode, plan.device, plan.num_threads, plan.hidden) == ("cpu", "exact", "cpu", 1, 256)
    assert plan.checked_ids is True and plan.workspace_bytes > 0
    assert espalier.plan(layer0, top_k=1).mode == "fast"
    assert espalier.plan(layer0, top_k=1, executor="reference").executor == "reference"


def test_output_types_and_memory(layer0):
    x, ids, weights = random_tokens(5, 256, 16, 4)
    plan = espalier.plan(layer0, max_tokens=5, top_k=4)
    expected = numpy.asarray(espalier.run(plan, layer0, x, ids, weights))
    half = espalier.plan(layer0, max_tokens=5, top_k=4, output="float16")
    assert numpy.array_equal(numpy.asarray(espalier.run(half, layer0, x, ids, weights)), expected.astype(numpy.float16))
    brain = espalier.run(espalier.plan(layer0, max_tokens=5, top_k=4, output="bfloat16"), layer0, x, ids, weights)
    bits = numpy.asarray(brain.view("uint16")).astype(numpy.uint32) << 16
    assert numpy.abs(bits.view(numpy.float32) - expected).max() <= numpy.abs(expected).max() / 256
    # Rows apart, read-only inputs, a workspace of the caller's, and a buffer that knows no DLPack.
    wide = numpy.full((5, 300), numpy.nan, numpy.float32)
    wide[:, :256] = x
    for array in (x, ids, weights):
        array.flags.writeable = False
    out = numpy.full((5, 512), 3, numpy.float32)
    block = numpy.empty(plan.workspace_bytes + 64, numpy.uint8)
    begin = -block.ctypes.data % 64
    workspace = block[begin : begin + plan.workspace_bytes]
    result = espalier.run(plan, layer0, wide[:, :256], memoryview(ids), weights, out=out[:, 128:384], workspace=workspace)
    assert numpy.shares_memory(result, out)
    assert numpy.array_equal(out[:, 128:384], expected)
    assert (out[:, :128] == 3).all() and (out[:, 384:] == 3).all()
    out[:] = 1
    espalier.run(plan, layer0, x, ids, weights, out=out[:, :256], accumulate=True)
    assert numpy.allclose(out[:, :256], expected + 1, atol=1e-6)


def test_no_tokens(layer0):
    plan = espalier.plan(layer0, max_tokens=0, top_k=4)
    x, ids, weights = random_tokens(0, 256, 16, 4)
    assert espalier.run(plan, layer0, x, ids, weights).shape == (0, 256)


def test_unchecked_ids_contribute_nothing(layer0):
    x, ids, weights = random_tokens(2, 256, 16, 4)
    ids[0, 0], ids[1, 2] = 16, -2
    without = ids.copy()
    without[0, 0] = without[1, 2] = -1
    checked = espalier.plan(layer0, top_k=4)
    with pytest.raises(espalier.GeometryError, match="16"):
        espalier.run(checked, layer0, x, ids, weights)
    plan = espalier.plan(layer0, top_k=4, checked_ids=False)
    assert numpy.array_equal(
        numpy.asarray(espalier.run(plan, layer0, x, ids, weights)),
        numpy.asarray(espalier.run(checked, layer0, x, without, weights)),
    )


def test_plain_addresses(layer0, tiny):
    core = espalier._core
    x, ids, weights = random_tokens(3, 256, 16, 4)
    plan = espalier.plan(layer0, max_tokens=3, top_k=4)
    expected = numpy.asarray(espalier.run(plan, layer0, x, ids, weights))
    y = numpy.zeros((3, 256), numpy.float32)
    arrays = (x.ctypes.data, 256, ids.ctypes.data, 4, weights.ctypes.data, 4, y.ctypes.data, 256)
    core.run_moe_at(plan, layer0, 3, *arrays, 0, 0, 0, 0, False, 0)
    assert numpy.array_equal(y, expected)
    with pytest.raises(espalier.CapacityError, match="workspace has 64 bytes"):
        core.run_moe_at(plan, layer0, 3, *arrays, y.ctypes.data // 64 * 64, 64, 0, 0, False, 0)
    with pytest.raises(espalier.UsageError, match="x is null"):
        core.run_moe_at(plan, layer0, 3, 0, 256, *arrays[2:], 0, 0, 0, 0, False, 0)
    with pytest.raises(TypeError):
        core.run_moe_at(plan, layer0, -3, *arrays, 0, 0, 0, 0, False, 0)
    linear = espalier.prepare_linear(tiny, "lm_head")
    plan = espalier.plan(linear, max_tokens=3)
    expected = numpy.asarray(espalier.run_linear(plan, linear, x))
    y = numpy.zeros((3, 4096), numpy.float32)
    core.run_linear_at(plan, linear, 3, x.ctypes.data, 256, y.ctypes.data, 4096, 0, 0, False, 0)
    assert numpy.array_equal(y, expected)


def test_progress(tiny):
    calls = []
    espalier.prepare(tiny, 0, progress=lambda done, total: calls.append((done, total)))
    assert calls[0][0] == 0 and calls[-1][0] == calls[-1][1] > 2_000_000
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    calls.clear()
    espalier.prepare_linear(tiny, "lm_head", progress=lambda done, total: calls.append(done))
    assert calls


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ZeroDivisionError])
def test_exception_of_a_progress_function(tiny, kind):
    calls = []

    def fail(done, total):
        calls.append(done)
        raise kind("stop")

    with pytest.raises(kind, match="stop"):
        espalier.prepare(tiny, 0, progress=fail)
    assert len(calls) == 1
    assert espalier.prepare(tiny, 0).experts == 16  # and the call may be repeated


def test_a_progress_function_stops_the_load(tiny):
    calls = []

    def stop(done, total):
        calls.append((done, total))
        return len(calls) < 3

    with pytest.raises(espalier.CancelledError, match=r"layer 0 of .*: stopped by the caller, \d+ of \d+ bytes were read"):
        espalier.prepare(tiny, 0, progress=stop)
    assert len(calls) == 3 and calls[-1][0] < calls[-1][1]
    with pytest.raises(espalier.CancelledError, match="lm_head"):
        espalier.prepare_linear(tiny, "lm_head", progress=lambda done, total: False)
    assert espalier.prepare(tiny, 0, progress=lambda done, total: 0).experts == 16  # only False itself stops it


def test_bar(tiny, monkeypatch):
    tqdm = pytest.importorskip("tqdm.auto")
    bars = []

    class Bar(tqdm.tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            bars.append(self)

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    espalier.prepare(tiny, 0, progress=True)
    assert len(bars) == 1 and bars[0].n == bars[0].total > 2_000_000


def test_missing_extras_have_a_sentence(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError) as error:
        espalier.prepare(tiny, 0, progress=True)
    assert str(error.value) == "tqdm is not installed; pip install 'espalier[progress]' brings it"


def test_imports_only_the_standard_library():
    code = (
        "import sys, espalier\n"
        f"experts = espalier.prepare(espalier.Checkpoint({str(TINY)!r}), 0)\n"
        "heavy = {'numpy', 'torch', 'transformers', 'vllm', 'tqdm', 'ml_dtypes', 'jax', 'cupy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_library_is_told_of_itself():
    assert espalier.__version__ == subprocess.run(
        [BINARY, "--version"], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()[-1]  # fmt: skip
    assert espalier.kernels() in ("avx512-bf16", "avx512-vnni", "avx512", "avx2-vnni", "avx2", "portable")
    for device in espalier.devices():
        assert device["memory_bytes"] > 0 and device["name"]
    assert set(espalier.__all__) <= set(dir(espalier))
    for name in espalier.__all__:
        assert getattr(espalier, name).__doc__, name


def test_example_of_the_documentation(tmp_path):
    text = (ROOT / "docs" / "python.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    whole = [block for block in blocks if "import espalier" in block]
    assert len(whole) == 1
    done = subprocess.run([sys.executable, "-c", whole[0]], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    shown = text.split("It prints\n\n```text\n")[1].split("```")[0]
    assert done.stdout == shown


def test_readme_example():
    text = (ROOT / "README.md").read_text().split("## From Python")[1].split("\n## ")[0]
    code = text.split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_torch_arrays(layer0):
    torch = pytest.importorskip("torch", reason="torch is not installed: its arrays are not tried")
    x, ids, weights = random_tokens(5, 256, 16, 4)
    plan = espalier.plan(layer0, max_tokens=5, top_k=4, input=torch.bfloat16, output=torch.bfloat16, ids=torch.int64)
    tx, tids = torch.from_numpy(x).bfloat16(), torch.from_numpy(ids).long()
    out = torch.empty(5, 256, dtype=torch.bfloat16)
    assert espalier.run(plan, layer0, tx, tids, torch.from_numpy(weights), out=out) is out
    fresh = torch.from_dlpack(espalier.run(plan, layer0, tx, tids, torch.from_numpy(weights)))
    assert fresh.dtype == torch.bfloat16 and torch.equal(fresh, out)
    plain = espalier.plan(layer0, max_tokens=5, top_k=4)
    expected = torch.from_dlpack(espalier.run(plain, layer0, tx.float(), ids, weights))
    assert torch.equal(out, expected.bfloat16())
    with pytest.raises(espalier.UsageError, match="require gradient"):
        espalier.run(plan, layer0, tx.requires_grad_(), tids, torch.from_numpy(weights))


def test_pathlike(tmp_path):
    class Path:
        def __fspath__(self):
            return str(TINY)

    for path in (str(TINY), pathlib.Path(TINY), Path(), str(TINY / "model.safetensors")):
        assert espalier.Checkpoint(path).layers[0].experts == 16
