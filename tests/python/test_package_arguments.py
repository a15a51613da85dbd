# SPDX-License-Identifier: Apache-2.0
"""Hostile arguments: every one ends in an exception that names what was found, never in a crash."""

import ctypes
import re

import numpy
import pytest
from package_support import FIXTURES, TINY, random_tokens

import espalier

E = espalier


@pytest.fixture(scope="module")
def tiny():
    return E.Checkpoint(TINY)


@pytest.fixture(scope="module")
def layer0(tiny):
    return E.prepare(tiny, 0)


@pytest.fixture(scope="module")
def plan(layer0):
    return E.plan(layer0, max_tokens=8, top_k=4)


X, IDS, WEIGHTS = random_tokens(3, 256, 16, 4)
CATEGORIES = {
    "usage": (E.UsageError, ValueError), "io": (E.IoError, OSError), "format": (E.FormatError, ValueError),
    "unsupported": (E.UnsupportedError, NotImplementedError), "geometry": (E.GeometryError, ValueError),
    "capacity": (E.CapacityError, MemoryError), "device": (E.DeviceError, RuntimeError),
    "cancelled": (E.CancelledError, RuntimeError),
}  # fmt: skip


def test_categories():
    for category, (kind, base) in CATEGORIES.items():
        assert issubclass(kind, E.EspalierError) and issubclass(kind, base) and kind.category == category
        assert str(kind("a sentence")) == "a sentence"


def cut_file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((TINY / "model.safetensors").read_bytes()[:5000])
    return path


@pytest.mark.parametrize(("category", "call", "text"), [
    ("usage", lambda c, t: E.prepare(c, "nine"), "nine"),
    ("usage", lambda c, t: c.matrix("nothing"), "nothing"),
    ("io", lambda c, t: E.Checkpoint(t / "absent"), "absent"),
    ("format", lambda c, t: E.Checkpoint(cut_file(t)), "model.safetensors"),
    ("unsupported", lambda c, t: E.Checkpoint(FIXTURES / "v1-coupled"), "lut_"),
    ("geometry", lambda c, t: c.extents(3, equal=True), "equal|legal"),
    ("capacity", lambda c, t: E.run(E.plan(E.prepare(c, 0), max_tokens=1, top_k=4), E.prepare(c, 0), X, IDS, WEIGHTS),
     "3 tokens; the plan was made for at most 1"),
    ("device", lambda c, t: E.prepare(c, 0, device="cuda:63"), "cuda|CUDA|GPU"),
    ("cancelled", lambda c, t: E.prepare(c, 0, progress=lambda done, total: False), "stopped by the caller"),
])  # fmt: skip
def test_every_category_is_raised(tiny, tmp_path, category, call, text):
    kind, base = CATEGORIES[category]
    with pytest.raises(kind, match=text) as error:
        call(tiny, tmp_path)
    assert error.value.category == category and isinstance(error.value, base)


class Lying:
    """An array whose methods do what they like."""

    def __init__(self, device=(1, 0), capsule=None):
        self.device, self.capsule = device, capsule

    def __dlpack_device__(self):
        if isinstance(self.device, BaseException):
            raise self.device
        return self.device

    def __dlpack__(self, **arguments):
        if isinstance(self.capsule, BaseException):
            raise self.capsule
        return self.capsule(**arguments) if callable(self.capsule) else self.capsule


def make_capsule(array, name=None, **changes):
    """The capsule of an array with some of its fields overwritten."""

    class Tensor(ctypes.Structure):
        _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                    ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                    ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                    ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]  # fmt: skip

    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = array.__dlpack__()
    tensor = Tensor.from_address(pointer(capsule, b"dltensor"))
    for field, value in changes.items():
        if field in ("shape", "strides"):
            for i, element in enumerate(value):
                getattr(tensor, field)[i] = element
        else:
            setattr(tensor, field, value)
    if name:
        rename = ctypes.pythonapi.PyCapsule_SetName
        rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
        rename(capsule, name)
    return capsule


def changed(array, **changes):
    return Lying(capsule=lambda **arguments: make_capsule(array.copy(), **changes))


SELF = object()
BAD_X = {
    "none": (None, E.UsageError, "x is None"),
    "a list": ([[1.0] * 256], E.UsageError, "x is of type list"),
    "a string": ("x", E.UsageError, "x is of type str"),
    "a number": (3.5, E.UsageError, "x is of type float"),
    "a class": (numpy.ndarray, E.UsageError, "x is of type type"),
    "an address": (X.ctypes.data, E.UsageError, "x is of type int"),
    "float64": (X.astype(numpy.float64), E.UsageError, "x is float64; legal: float32"),
    "float16": (X.astype(numpy.float16), E.UsageError, "x is float16; legal: float32"),
    "complex": (X.astype(numpy.complex64), E.UsageError, "x is complex64"),
    "bool": (X > 0, E.UsageError, "x is bool"),
    "bytes": (X.tobytes(), E.UsageError, "x is uint8"),
    "strings": (numpy.full((3, 256), "a"), E.UsageError, "x"),
    "objects": (numpy.full((3, 256), SELF), E.UsageError, "x"),
    "a structure": (numpy.zeros((3, 256), "f4,f4"), E.UsageError, "x"),
    "big-endian": (X.astype(">f4"), E.UsageError, "x"),
    "long double": (X.astype(numpy.longdouble), E.UsageError, "x"),
    "a scalar": (numpy.float32(1), E.GeometryError, r"x is \[\]"),
    "no axes": (numpy.array(1, numpy.float32), E.GeometryError, r"x is \[\]; legal: \[tokens, 256\]"),
    "one axis": (X[0], E.GeometryError, r"x is \[256\]"),
    "three axes": (X[None], E.GeometryError, r"x is \[1, 3, 256\]"),
    "too narrow": (X[:, :255], E.GeometryError, r"x is \[3, 255\]"),
    "too wide": (numpy.zeros((3, 257), numpy.float32), E.GeometryError, r"x is \[3, 257\]"),
    "other count": (X[:2], E.GeometryError, "topk_ids has 3 rows and x has 2"),
    "columns apart": (numpy.zeros((3, 512), numpy.float32)[:, ::2], E.UsageError, "1 inside a row"),
    "columns backwards": (X[:, ::-1], E.UsageError, "1 inside a row"),
    "columns first": (numpy.asfortranarray(X), E.UsageError, "1 inside a row"),
    "rows backwards": (X[::-1], E.GeometryError, r"strides of \[-256, 1\]"),
    "rows repeated": (numpy.broadcast_to(X[0], (3, 256)), E.GeometryError, r"strides of \[0, 1\]"),
    "rows overlapping": (numpy.lib.stride_tricks.as_strided(numpy.zeros(900, numpy.float32), (3, 256), (40, 4)),
                         E.GeometryError, r"strides of \[10, 1\]"),
    "misaligned": (numpy.frombuffer(b"0" * (4 * 768 + 1), numpy.uint8)[1:].view(numpy.float32).reshape(3, 256),
                   E.UsageError, "x is not aligned"),
    "capsule": (X.__dlpack__(), E.UsageError, "x is of type PyCapsule"),
    "no pair": (Lying(device=None), E.UsageError, "__dlpack_device__"),
    "text for a device": (Lying(device=("cpu", 0)), E.UsageError, "__dlpack_device__"),
    "failing device": (Lying(device=RuntimeError("gone")), E.UsageError, r"__dlpack_device__\(\) failed: gone"),
    "failing export": (Lying(capsule=RuntimeError("gone")), E.UsageError, r"__dlpack__\(\) failed: gone"),
    "no capsule": (Lying(capsule=3), E.UsageError, "gave int; legal: a capsule"),
    "none for a capsule": (Lying(), E.UsageError, "gave NoneType"),
    "strange capsule": (Lying(capsule=lambda **a: make_capsule(X, name=b"other")), E.UsageError, "cannot be read"),
    "used capsule": (Lying(capsule=lambda **a: make_capsule(X, name=b"used_dltensor")), E.UsageError, "cannot be read"),
    "GPU that is none": (Lying(device=(2, 0), capsule=lambda **a: X.__dlpack__()), None, ""),
    "really a GPU": (changed(X, device_type=2, device_id=3), E.DeviceError, "x is on cuda:3; legal: cpu"),
    "another device": (changed(X, device_type=7), E.DeviceError, "x is on DLPack device 7:0"),
    "lanes": (changed(X, lanes=4), E.UsageError, "4 lanes"),
    "unknown type": (changed(X, code=200), E.UsageError, "DLPack type 200"),
    "negative axis": (changed(X, shape=[-3, 256]), E.GeometryError, r"\[-3, 256\], which no array is"),
    "negative axes": (changed(X, ndim=-1), E.UsageError, "cannot be read"),
    "a thousand axes": (changed(X, ndim=1000), E.UsageError, "cannot be read"),
    "stride of 2^62": (changed(X, strides=[2**62, 1]), E.GeometryError, "row stride of x"),
    "rows of 2^62": (changed(X, shape=[2**62, 256]), E.GeometryError, "x has 4611686018427387904"),
    "no data": (changed(X, data=0), E.UsageError, "x is null"),
}  # fmt: skip


# numpy's capsules complain when they die under another name.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", BAD_X)
def test_bad_x(plan, layer0, name):
    x, kind, text = BAD_X[name]
    out = numpy.full((3, 256), 7, numpy.float32)
    if kind is None:  # numpy knows no streams, and says so
        kind, text = E.EspalierError, "x"
        x = Lying(device=(2, 0), capsule=lambda stream=None, **a: X.__dlpack__(stream=stream))
    with pytest.raises(kind, match=text):
        E.run(plan, layer0, x, IDS, WEIGHTS, out=out)
    assert (out == 7).all()


def test_interrupts_pass_through(plan, layer0):
    for interrupt in (KeyboardInterrupt, SystemExit):
        with pytest.raises(interrupt):
            E.run(plan, layer0, Lying(capsule=interrupt()), IDS, WEIGHTS)


READ_ONLY = X.copy()
READ_ONLY.flags.writeable = False
BAD_CALLS = {
    "ids int64": (dict(topk_ids=IDS.astype(numpy.int64)), E.UsageError, "topk_ids is int64; legal: int32"),
    "ids uint32": (dict(topk_ids=IDS.astype(numpy.uint32)), E.UsageError, "topk_ids is uint32"),
    "ids float": (dict(topk_ids=IDS.astype(numpy.float32)), E.UsageError, "topk_ids is float32"),
    "ids none": (dict(topk_ids=None), E.UsageError, "topk_ids is None"),
    "ids narrow": (dict(topk_ids=IDS[:, :3]), E.GeometryError, r"topk_ids is \[3, 3\]; legal: \[tokens, 4\]"),
    "ids beyond": (dict(topk_ids=IDS + 16), E.GeometryError, "legal"),
    "ids negative": (dict(topk_ids=IDS * 0 - 2), E.GeometryError, "legal"),
    "ids huge": (dict(topk_ids=IDS * 0 + (2**31 - 1)), E.GeometryError, "2147483647"),
    "weights float64": (dict(topk_weights=WEIGHTS.astype(float)), E.UsageError, "topk_weights is float64"),
    "weights short": (dict(topk_weights=WEIGHTS[:2]), E.GeometryError, "topk_weights has 2 rows"),
    "weights none": (dict(topk_weights=None), E.UsageError, "topk_weights is None"),
    "out read-only": (dict(out=READ_ONLY), E.UsageError, "out is read-only"),
    "out bytes": (dict(out=b"0" * 3072), E.UsageError, "out is read-only"),
    "out float16": (dict(out=X.astype(numpy.float16)), E.UsageError, "out is float16; legal: float32"),
    "out short": (dict(out=numpy.zeros((2, 256), numpy.float32)), E.GeometryError, "out has 2 rows"),
    "out long": (dict(out=numpy.zeros((4, 256), numpy.float32)), E.GeometryError, "out has 4 rows"),
    "out backwards": (dict(out=numpy.zeros((3, 256), numpy.float32)[::-1]), E.GeometryError, "out has strides"),
    "out a list": (dict(out=[]), E.UsageError, "out is of type list"),
    "out is x": (dict(out=SELF), E.UsageError, "out overlaps x"),
    "nothing to add to": (dict(accumulate=True), E.UsageError, "accumulate without out"),
    "workspace small": (dict(workspace=numpy.zeros(64, numpy.uint8)), E.EspalierError, "workspace"),
    "workspace read-only": (dict(workspace=b"0" * 4096), E.UsageError, "workspace is read-only"),
    "workspace with gaps": (dict(workspace=numpy.zeros(10**7, numpy.uint8)[::2]), E.UsageError, "without gaps"),
    "workspace a number": (dict(workspace=4096), E.UsageError, "workspace is of type int"),
    "map of floats": (dict(expert_map=numpy.zeros(16, numpy.float32)), E.UsageError, "expert_map is float32"),
    "map of int64": (dict(expert_map=numpy.zeros(16, numpy.int64)), E.UsageError, "expert_map is int64"),
    "map of two axes": (dict(expert_map=numpy.zeros((4, 4), numpy.int32)), E.GeometryError, "legal: a vector"),
    "map with gaps": (dict(expert_map=numpy.zeros(32, numpy.int32)[::2]), E.UsageError, "strides"),
    "map too short": (dict(expert_map=[0]), E.GeometryError, "legal"),
    "map beyond": (dict(expert_map=[99] * 16), E.GeometryError, "99"),
    "map of text": (dict(expert_map=["a"] * 16), E.UsageError, "no int32"),
    "map of huge": (dict(expert_map=[2**40] * 16), E.UsageError, "no int32"),
    "map a dict": (dict(expert_map={0: 1}), E.UsageError, "expert_map is of type dict"),
    "stream on the host": (dict(stream=1), E.UsageError, "a stream on the host"),
    "stream negative": (dict(stream=-1), E.UsageError, "stream is -1"),
    "stream huge": (dict(stream=2**70), E.UsageError, "stream is 1180591620717411303424"),
    "stream text": (dict(stream="1"), TypeError, "stream"),
    "unknown keyword": (dict(hidden=3), TypeError, "incompatible"),
    "plan none": (dict(plan=None), TypeError, "incompatible"),
    "experts none": (dict(experts=None), TypeError, "incompatible"),
    "experts text": (dict(experts="layer 0"), TypeError, "incompatible"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(plan, layer0, name):
    changes, kind, text = BAD_CALLS[name]
    arguments = {"plan": plan, "experts": layer0, "x": X, "topk_ids": IDS, "topk_weights": WEIGHTS, **changes}
    if arguments.get("out") is SELF:
        arguments["out"] = X
    before = X.copy()
    with pytest.raises(kind, match=text):
        E.run(**arguments)
    assert (X == before).all()


BAD_PLANS = {
    "top_k missing": ({"top_k": None}, E.UsageError, "top_k is missing"),
    "top_k zero": ({"top_k": 0}, E.UsageError, "top_k is 0; legal: 1 to 1024"),
    "top_k negative": ({"top_k": -4}, E.UsageError, "top_k is -4"),
    "top_k large": ({"top_k": 1025}, E.UsageError, "top_k is 1025"),
    "top_k real": ({"top_k": 1.5}, TypeError, "top_k"),
    "max_tokens negative": ({"max_tokens": -1}, E.UsageError, "max_tokens is -1; legal: 0 to 1048576"),
    "max_tokens large": ({"max_tokens": 2**20 + 1}, E.UsageError, "max_tokens is 1048577"),
    "max_tokens 2^64": ({"max_tokens": 2**64}, E.UsageError, "max_tokens is 18446744073709551616"),
    "max_tokens huge": ({"max_tokens": 10**5000}, E.UsageError, "max_tokens is 0x"),
    "max_tokens none": ({"max_tokens": None}, TypeError, "max_tokens"),
    "ids text": ({"ids": "int16"}, E.UsageError, "ids is 'int16'; legal: int32, int64"),
    "ids none": ({"ids": None}, E.UsageError, "ids is 'None'"),
    "input unknown": ({"input": "float8"}, E.UsageError, "input is 'float8'"),
    "input float64": ({"input": "float64"}, E.UnsupportedError, "F32, F16 and BF16"),
    "input int": ({"input": 32}, E.UsageError, "input is '32'"),
    "input none": ({"input": None}, E.UsageError, "input is 'None'"),
    "output float64": ({"output": "float64", "executor": "cpu"}, E.UnsupportedError, "F32, F16 and BF16"),
    "output dtype": ({"output": numpy.int32}, E.UsageError, "output is 'int32'"),
    "mode unknown": ({"mode": "faster"}, E.UsageError, "mode is 'faster'; legal: exact, fast, int8"),
    "mode none": ({"mode": None}, TypeError, "mode"),
    "executor unknown": ({"executor": "tpu"}, E.UsageError, "tpu"),
    "executor of a GPU": ({"executor": "cuda"}, E.DeviceError, "cuda|CUDA"),
    "threads negative": ({"num_threads": -1}, E.UsageError, "num_threads is -1"),
    "threads many": ({"num_threads": 5000}, E.UsageError, "num_threads is 5000"),
    "unknown keyword": ({"topk": 4}, TypeError, "topk"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PLANS)
def test_bad_plans(layer0, name):
    changes, kind, text = BAD_PLANS[name]
    with pytest.raises(kind, match=text):
        E.plan(layer0, **{"top_k": 4, **changes})


def test_plans_of_other_things(tiny):
    for thing in (None, tiny, "layer", 3, E.plan):
        with pytest.raises(TypeError, match="incompatible"):
            E.plan(thing, top_k=1)
    linear = E.prepare_linear(tiny, "lm_head")
    with pytest.raises(TypeError):
        E.plan(linear, top_k=1)


BAD_LOADS = {
    "layer beyond": ((4,), {}, E.UsageError, "layer is 4; legal: 0 to 3"),
    "layer negative": ((-1,), {}, E.UsageError, "layer is -1"),
    "layer huge": ((2**90,), {}, E.UsageError, "layer is 1237940039285380274899124224"),
    "layer none": ((None,), {}, E.UsageError, "layer is of type NoneType"),
    "layer real": ((0.0,), {}, E.UsageError, "layer is of type float"),
    "label unknown": (("4",), {}, E.UsageError, "4"),
    "label empty": (("",), {}, E.UsageError, "legal|layers"),
    "rank alone": ((0,), {"rank": 1}, E.UsageError, "rank is 1 without extents"),
    "rank negative": ((0,), {"rank": -1}, E.UsageError, "rank is -1"),
    "rank beyond": ((0,), {"rank": 2, "extents": SELF}, E.UsageError, "rank 2; legal: 0 to 1"),
    "extents a dict": ((0,), {"extents": {}}, TypeError, "incompatible"),
    "extents of another": ((0,), {"extents": "other"}, E.GeometryError, "layers"),
    "device unknown": ((0,), {"device": "gpu"}, E.UsageError, "device: .*gpu"),
    "device none": ((0,), {"device": None}, E.UsageError, "device: .*None"),
    "device index": ((0,), {"device": "cpu:1"}, E.UsageError, "device"),
    "device huge": ((0,), {"device": "cuda:99999999999999999999"}, E.UsageError, "device"),
    "activation unknown": ((0,), {"activation": "swish"}, E.UsageError, "swish"),
    "activation number": ((0,), {"activation": 7}, E.UsageError, "7"),
    "io unknown": ((0,), {"io": "int8"}, E.UsageError, "io is 'int8'"),
    "scale text": ((0,), {"output_scale": "1"}, TypeError, "incompatible"),
    "staging negative": ((0,), {"staging_bytes": -1}, E.UsageError, "staging_bytes is -1"),
    "threads negative": ((0,), {"num_threads": -2}, E.UsageError, "num_threads is -2"),
    "threads huge": ((0,), {"num_threads": 2**31}, E.UsageError, "num_threads is 2147483648"),
    "progress text": ((0,), {"progress": "bar"}, E.UsageError, "progress is no function"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_LOADS)
def test_bad_loads(tiny, name):
    arguments, keywords, kind, text = BAD_LOADS[name]
    keywords = dict(keywords)
    if keywords.get("extents") is SELF:
        keywords["extents"] = tiny.extents(2)
    elif keywords.get("extents") == "other":
        keywords["extents"] = E.Checkpoint(FIXTURES / "stock-mixtral").extents(1)
    with pytest.raises(kind, match=text):
        E.prepare(tiny, *arguments, **keywords)


def test_bad_linears(tiny):
    for keywords, kind, text in (
        ({"first_in": -128}, E.UsageError, "first_in is -128"),
        ({"first_in": 512}, E.GeometryError, "512"),
        ({"first_in": 64}, E.GeometryError, "64"),
        ({"out_channels": 2**64}, E.UsageError, "out_channels is 18446744073709551616"),
        ({"out_channels": 2**63}, E.GeometryError, "legal|lm_head"),
        ({"first_out": 2**63, "out_channels": 2**63}, E.GeometryError, "legal|lm_head"),
        ({"model_in": 2**32}, E.UsageError, "model_in is 4294967296"),
        ({"model_in": 300}, E.GeometryError, "300"),
        ({"model_out": 5000}, E.GeometryError, "5000"),
        ({"name": "model.norm.weight"}, E.UsageError, "model.norm"),
        ({"name": ""}, E.UsageError, "matrix"),
        ({"name": "\udcff"}, (E.UsageError, UnicodeEncodeError, TypeError), "."),
        ({"name": None}, TypeError, "incompatible"),
    ):
        with pytest.raises(kind, match=text):
            E.prepare_linear(tiny, **{"name": "lm_head", **keywords})


def test_bad_checkpoints(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.safetensors").write_text("no header")
    for path, kind in (
        (None, TypeError), (3, TypeError), (b"\xff", (TypeError, E.IoError)), ("", E.EspalierError),
        ("a\0b", (ValueError, TypeError)), ("x" * 5000, E.EspalierError), (tmp_path / "empty", E.EspalierError),
        (tmp_path / "text.safetensors", E.FormatError), ("/dev/null", E.EspalierError), ("\udcff", E.IoError),
    ):  # fmt: skip
        with pytest.raises(kind):
            E.Checkpoint(path)
    with pytest.raises(TypeError):
        E.Checkpoint()


def test_half_made_objects():
    for kind in (E.Checkpoint, E.Experts, E.Linear, E.Array, E.MoePlan, E.LinearPlan, E.ExtentPlan, E.Layer):
        bare = kind.__new__(kind)
        for name in ("path", "identity", "shape", "max_tokens", "tp", "label"):
            if hasattr(type(bare), name):
                with pytest.raises((TypeError, RuntimeError)), pytest.warns(RuntimeWarning):
                    getattr(bare, name)


def test_bad_reads(tiny):
    for name, kind in (("nothing", E.UsageError), ("", E.UsageError), (None, TypeError), (3, TypeError)):
        with pytest.raises(kind):
            tiny.read(name)
        with pytest.raises(kind):
            tiny.matrix(name)
    with pytest.raises(E.UsageError, match="slices"):
        E.Checkpoint(FIXTURES / "rs-per-expert").matrix("model.layers.3.mlp.experts.1.gate_proj")
    array = tiny.read("lm_head.suh")
    for dtype in ("float32", "uint8", "bfloat17", None, 3):
        with pytest.raises(E.UsageError):
            array.view(dtype)
    with pytest.raises(BufferError):
        array.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        array.__dlpack__(dl_device=(2, 0))


def test_bad_extents(tiny):
    for tp, ep in ((0, 1), (1, 0), (2000, 1), (1, 2**20)):
        with pytest.raises(E.GeometryError):
            tiny.extents(tp, ep)
    for tp in (-1, 2**31, 2**70):
        with pytest.raises(E.UsageError, match="tp is"):
            tiny.extents(tp)
    extents = tiny.extents(2, 2)
    for rank in (-1, 4, 2**70):
        with pytest.raises(E.UsageError, match="rank is"):
            extents.weight_bytes(rank)
    for call in (extents.experts, extents.expert_map):
        for layer, ep_rank in ((4, 0), (-1, 0), (0, 2), (0, -1)):
            with pytest.raises(E.UsageError):
                call(layer, ep_rank)


def test_closed_handles(tiny):
    experts = E.prepare(tiny, 0)
    plan = E.plan(experts, top_k=4)
    assert not experts.closed and "closed" not in repr(experts)
    experts.close()
    experts.close()
    assert experts.closed and repr(experts).endswith("(closed)>")
    used = f"{experts.identity}: used after close()"
    members = [name for name in dir(E.Experts) if not name.startswith("_")]
    assert len(members) >= 15
    for name in set(members) - {"identity", "closed", "close", "to"}:
        with pytest.raises(E.UsageError, match=re.escape(used)):
            getattr(experts, name)
    for use in (lambda: experts.to("cpu"), lambda: E.plan(experts, top_k=4),
                lambda: E.run(plan, experts, X, IDS, WEIGHTS),
                lambda: E._core.run_moe_at(plan, experts, 0, *[0] * 12, False, 0)):  # fmt: skip
        with pytest.raises(E.UsageError, match=re.escape(used)):
            use()
    with E.prepare_linear(tiny, "lm_head") as linear:
        linear_plan = E.plan(linear)
        assert E.run_linear(linear_plan, linear, X).shape == (3, 4096)
    for use in (lambda: linear.bits, lambda: E.run_linear(linear_plan, linear, X), lambda: E.plan(linear),
                lambda: linear.to("cpu"), lambda: E._core.run_linear_at(linear_plan, linear, 0, *[0] * 6, False, 0)):  # fmt: skip
        with pytest.raises(E.UsageError, match="used after close"):
            use()


def test_package_of_another_shape(tiny, plan):
    other = E.prepare(E.Checkpoint(FIXTURES / "stock-mixtral"), 0)
    with pytest.raises(E.GeometryError, match="the plan was made for"):
        E.run(plan, other, X, IDS, WEIGHTS)
    rank = E.prepare(tiny, 0, extents=tiny.extents(2), rank=1)
    with pytest.raises(E.GeometryError, match="rank 1 of tp 2"):
        E.run(plan, rank, X, IDS, WEIGHTS)


def one_expert(**changes):
    """A whole expert of 128 x 256 channels whose gate has these changes."""
    random = numpy.random.default_rng(3)

    def matrix(inputs, outputs, bits):
        return {
            "codes": random.integers(0, 2**16, (inputs // 16, outputs // 16, 16 * bits), numpy.uint16),
            "suh": numpy.ones(inputs, numpy.float16), "svh": numpy.ones(outputs, numpy.float16),
            "bits": bits, "codebook": "mcg",
        }  # fmt: skip

    gate = matrix(128, 256, 3)
    for name, change in changes.items():
        gate[name] = change(gate[name]) if callable(change) else change
    return {"gate": gate, "up": matrix(128, 256, 2), "down": matrix(256, 128, 4)}


BAD_ARRAYS = {
    "no list": (lambda: {"gate": {}}, E.UsageError, "experts is of type dict"),
    "none": (lambda: None, E.UsageError, "experts is of type NoneType"),
    "nobody": (lambda: [], E.UsageError, "hidden is missing"),
    "an expert of none": (lambda: [None], E.UsageError, "expert 0 has no gate"),
    "no down": (lambda: [{k: v for k, v in one_expert().items() if k != "down"}], E.UsageError, "expert 0 has no down"),
    "misspelt": (lambda: [{**one_expert(), "gates": 1}], E.UsageError, "has a key 'gates'; legal: gate, up, down"),
    "misspelt part": (lambda: [one_expert(codez=1)], E.UsageError, "expert 0, gate has a key 'codez'"),
    "codes none": (lambda: [one_expert(codes=None)], E.UsageError, "expert 0, gate, codes is None"),
    "codes flat": (lambda: [one_expert(codes=lambda c: c.ravel())], E.GeometryError, r"legal: \[in / 16"),
    "codes of 15": (lambda: [one_expert(codes=lambda c: c[:, :, :47])], E.GeometryError, r"legal: \[in / 16"),
    "codes of none": (lambda: [one_expert(codes=lambda c: c[:, :, :0])], E.GeometryError, r"legal: \[in / 16"),
    "codes float": (lambda: [one_expert(codes=lambda c: c.astype("f4"))], E.UsageError, "codes is float32"),
    "codes with gaps": (lambda: [one_expert(codes=lambda c: c[:, ::2], svh=lambda s: s[:128])], E.UsageError, "without gaps"),
    "codes off the grid": (lambda: [one_expert(codes=lambda c: c[:7].copy(), suh=lambda s: s[:112])],
                           E.GeometryError, "128"),
    "nine bits": (lambda: [one_expert(codes=lambda c: numpy.zeros((8, 16, 144), "u2"), bits=None)],
                  E.GeometryError, "8 bits"),
    "other bits": (lambda: [one_expert(bits=4)], E.GeometryError, "bits is 4 and codes have 3"),
    "no bits": (lambda: [one_expert(bits=0)], E.UsageError, "bits is 0; legal: 1 to 8"),
    "codebook none": (lambda: [one_expert(codebook=None)], E.UsageError, "codebook is 'None'; legal: 3inst, mcg, mul1"),
    "codebook unknown": (lambda: [one_expert(codebook="lut")], E.UsageError, "codebook is 'lut'"),
    "suh missing": (lambda: [one_expert(suh=None)], E.UsageError, "suh is None"),
    "suh short": (lambda: [one_expert(suh=lambda s: s[:64])], E.GeometryError, r"suh is \[64\]; legal: \[128\]"),
    "suh float32": (lambda: [one_expert(suh=lambda s: s.astype("f4"))], E.UsageError, "suh is float32; legal: float16"),
    "svh backwards": (lambda: [one_expert(svh=lambda s: s[::-1])], E.UsageError, "without gaps"),
    "bias wide": (lambda: [one_expert(bias=numpy.zeros((1, 256), "f2"))], E.GeometryError, "bias is"),
    "widths differ": (lambda: [{**one_expert(), "down": one_expert()["gate"]}], E.GeometryError, "128|256"),
    "valid beyond": (lambda: [{**one_expert(), "valid_intermediate": 300}], E.GeometryError, "300"),
    "valid negative": (lambda: [{**one_expert(), "valid_intermediate": -1}], E.UsageError, "valid_intermediate is -1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_bad_arrays(name):
    make, kind, text = BAD_ARRAYS[name]
    with pytest.raises(kind, match=text):
        E.prepare_arrays(make())


def test_bad_terms_of_arrays():
    for keywords, kind in (
        ({"activation": "relu2"}, E.UsageError), ({"activation": "no"}, E.UsageError), ({"hidden": 200}, E.GeometryError),
        ({"hidden": -1}, E.UsageError), ({"tp": 0}, E.UsageError), ({"rank": 1}, E.UsageError), ({"ep": 2**17}, E.UsageError),
        ({"device": "cuda:63"}, E.DeviceError), ({"io": "float12"}, E.UsageError), ({"num_threads": -1}, E.UsageError),
    ):  # fmt: skip
        with pytest.raises(kind):
            E.prepare_arrays([one_expert()], **keywords)


def arrays_of(checkpoint, layer):
    """The weights of a stock layer, as prepare_arrays takes them."""
    experts = []
    for expert in range(layer.experts):
        matrices = {}
        for projection in ("gate", "up", "down"):
            name = f"{layer.prefix}.{layer.number}.mlp.experts.{expert}.{projection}_proj"
            part = {p: checkpoint.read(f"{name}.{p}") for p in ("suh", "svh")}
            matrices[projection] = {"codes": checkpoint.read(f"{name}.trellis"), "codebook": "mcg", **part}
        experts.append(matrices)
    return experts


def test_arrays_are_the_loaded_package(tiny, layer0, plan):
    expected = numpy.asarray(E.run(plan, layer0, X, IDS, WEIGHTS))
    weights = arrays_of(tiny, tiny.layers[0])
    experts = E.prepare_arrays(weights, hash=True)
    assert experts.content_sha256 == E.prepare(tiny, 0, hash=True).content_sha256
    assert experts.identity == "arrays"
    assert numpy.array_equal(numpy.asarray(E.run(plan, experts, X, IDS, WEIGHTS)), expected)

    class Part:
        def __init__(self, members):
            self.__dict__.update(members)

    objects = [Part({name: Part(matrix) for name, matrix in expert.items()}) for expert in weights]
    experts = E.prepare_arrays([[expert] for expert in objects], identity="mine", tp=2, rank=1)
    assert (experts.identity, experts.tp, experts.rank) == ("mine", 2, 1)
    rank = E.plan(experts, top_k=4)
    assert numpy.array_equal(numpy.asarray(E.run(rank, experts, X, IDS, WEIGHTS)), expected)
    experts = E.prepare_arrays([expert if i % 2 else [] for i, expert in enumerate(weights)])
    assert [s.expert for s in experts.segments] == list(range(1, 16, 2))


def test_vectors_of_the_same_memory_are_stored_once():
    def shared():
        expert = one_expert()
        expert["up"]["suh"] = expert["gate"]["suh"]
        return expert

    assert E.prepare_arrays([one_expert()]).slab_bytes - E.prepare_arrays([shared()]).slab_bytes == 256
