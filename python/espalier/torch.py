# SPDX-License-Identifier: Apache-2.0
"""PyTorch operators over prepared packages: torch.ops.espalier.moe and torch.ops.espalier.linear.

    moe(Tensor x, Tensor topk_ids, Tensor topk_weights, int experts, str mode="fast", Tensor? expert_map=None,
        ScalarType? out_dtype=None) -> Tensor
    linear(Tensor x, int linear, str mode="fast", ScalarType? out_dtype=None) -> Tensor

Both have fake kernels: torch.compile takes them with dynamic rows, and on a GPU they can be captured in a graph. They
run on the current stream and can be called from any thread; the GIL is released while a package runs. There are no
gradients: an input that wants one is refused (UnsupportedError) unless gradients are off.
"""

from __future__ import annotations

import copy
import itertools
import threading
import weakref
import zlib

from . import _core
from ._errors import DeviceError, GeometryError, UnsupportedError, UsageError
from ._extras import need

torch = need("torch", "torch")

_MAX_ROWS = 1 << 20  # of a plan; more rows go in several calls
_MIN_ROWS = 64  # smaller capacities save nothing

_numbers = itertools.count(1)
_packages: dict[int, _core.Experts | _core.Linear] = {}
_plans: dict[int, dict[tuple, _core.MoePlan | _core.LinearPlan]] = {}
_scratch = threading.local()  # host memory that the calls of a thread share

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_ID_DTYPES = {torch.int32: "int32", torch.int64: "int64"}


def handle(package: _core.Experts | _core.Linear) -> int:
    """A number that names a package to the operators, and keeps it, until release().

    It holds the widths: torch keeps compiled graphs on disk, with the number in them, and a process that gives the same
    count to a package of other widths must not find that graph.
    """
    if isinstance(package, _core.Linear):
        widths = f"linear {package.in_channels} {package.out_channels}"
    else:
        widths = f"experts {package.hidden}"
    number = zlib.crc32(widths.encode()) % (1 << 30) << 32 | next(_numbers)
    _packages[number] = package
    _plans[number] = {}
    return number


def release(number: int) -> None:
    """Forgets a package. UsageError for a number that handle() did not give, or that was released."""
    if _packages.pop(number, None) is None:
        raise UsageError(f"handle {number} is unknown or was released")
    del _plans[number]


def _find(number: int, kind: type) -> _core.Experts | _core.Linear:
    package = _packages.get(number)
    if not isinstance(package, kind):
        found = "unknown or was released" if package is None else f"that of {type(package).__name__}"
        raise UsageError(f"handle {number} is {found}; legal: one of {kind.__name__} from espalier.torch.handle()")
    return package


def _dtype_name(what: str, dtype: torch.dtype, legal: dict[torch.dtype, str] = _DTYPES) -> str:
    if dtype not in legal:
        raise UsageError(f"{what} is {dtype}; legal: {', '.join(legal.values())}")
    return legal[dtype]


def _plan(number: int, package: _core.Experts | _core.Linear, rows: int, **options: object):
    """The cached plan with the next power of two as its capacity."""
    capacity = min(max(_MIN_ROWS, 1 << max(rows - 1, 0).bit_length()), _MAX_ROWS)
    plans = _plans.get(number, {})  # another thread may have released it since it was found
    key = (capacity, *options.values())
    if key not in plans:
        plans[key] = _core.plan(package, max_tokens=capacity, **options)
    return plans[key]


def _workspace(size_bytes: int, device: torch.device) -> torch.Tensor:
    """On a GPU from torch's allocator, which knows streams and graphs; on the host one for each thread."""
    if device.type != "cpu":
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    kept = getattr(_scratch, "buffer", None)
    if kept is None or kept.numel() < size_bytes + 64:
        kept = _scratch.buffer = torch.empty(size_bytes + 64, dtype=torch.uint8)
    return kept[-kept.data_ptr() % 64 :][:size_bytes]


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Rows may lie apart; what is in a row may not."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _check_no_gradient(*tensors: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise UnsupportedError("EXL3 packages have no gradients; legal: torch.no_grad() or torch.inference_mode()")


def _check_same_device(x: torch.Tensor, package: _core.Experts | _core.Linear, **others: torch.Tensor | None) -> None:
    found = "cpu" if x.device.type == "cpu" else f"{x.device.type}:{x.device.index}"
    if found != package.device:
        raise DeviceError(f"x is on {found}, {package.identity} on {package.device}")
    for name, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            raise DeviceError(f"{name} is on {tensor.device}, x on {x.device}")


def _moe(x, topk_ids, topk_weights, experts, mode="fast", expert_map=None, out_dtype=None):
    package = _find(experts, _core.Experts)
    _check_no_gradient(x, topk_weights)
    _check_same_device(x, package, topk_ids=topk_ids, topk_weights=topk_weights, expert_map=expert_map)
    if x.dim() != 2 or x.shape[1] != package.hidden:
        raise GeometryError(f"x is {list(x.shape)}; legal: [tokens, {package.hidden}]")
    if topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0] or topk_weights.shape != topk_ids.shape:
        raise GeometryError(
            f"topk_ids is {list(topk_ids.shape)}, topk_weights {list(topk_weights.shape)}; "
            f"legal: [{x.shape[0]}, top_k] both"
        )
    if expert_map is not None and (expert_map.dtype != torch.int32 or expert_map.dim() != 1):
        raise UsageError(f"expert_map is {expert_map.dtype} {list(expert_map.shape)}; legal: int32 [experts]")
    out_dtype = out_dtype or x.dtype
    options = {
        "top_k": topk_ids.shape[1],
        "ids": _dtype_name("topk_ids", topk_ids.dtype, _ID_DTYPES),
        "input": _dtype_name("x", x.dtype),
        "output": _dtype_name("out_dtype", out_dtype),
        "mode": mode,
    }
    y = x.new_empty(x.shape, dtype=out_dtype)
    x, topk_ids, topk_weights = _rows(x), _rows(topk_ids), _rows(topk_weights.float())
    expert_map = None if expert_map is None else expert_map.contiguous()
    map_size = 0 if expert_map is None else expert_map.numel()
    map_address = 0 if expert_map is None else expert_map.data_ptr()
    for first in range(0, x.shape[0], _MAX_ROWS):
        rows = min(x.shape[0] - first, _MAX_ROWS)
        plan = _plan(experts, package, rows, **options)
        workspace = _workspace(plan.workspace_bytes, x.device)
        _core.run_moe_at(
            plan, package, rows, x[first:].data_ptr(), x.stride(0), topk_ids[first:].data_ptr(), topk_ids.stride(0),
            topk_weights[first:].data_ptr(), topk_weights.stride(0), y[first:].data_ptr(), y.stride(0),
            workspace.data_ptr(), workspace.numel(), map_address, map_size, False, _stream(x.device),
        )  # fmt: skip
    return y


def _linear(x, linear, mode="fast", out_dtype=None):
    package = _find(linear, _core.Linear)
    _check_no_gradient(x)
    _check_same_device(x, package)
    if x.dim() < 1 or x.shape[-1] != package.in_channels:
        raise GeometryError(f"x is {list(x.shape)}; legal: [..., {package.in_channels}]")
    out_dtype = out_dtype or x.dtype
    options = {"input": _dtype_name("x", x.dtype), "output": _dtype_name("out_dtype", out_dtype), "mode": mode}
    y = x.new_empty((*x.shape[:-1], package.out_channels), dtype=out_dtype)
    x, y_rows = _rows(x.reshape(-1, x.shape[-1])), y.view(-1, package.out_channels)
    for first in range(0, x.shape[0], _MAX_ROWS):
        rows = min(x.shape[0] - first, _MAX_ROWS)
        plan = _plan(linear, package, rows, **options)
        workspace = _workspace(plan.workspace_bytes, x.device)
        _core.run_linear_at(
            plan, package, rows, x[first:].data_ptr(), x.stride(0), y_rows[first:].data_ptr(), y_rows.stride(0),
            workspace.data_ptr(), workspace.numel(), False, _stream(x.device),
        )  # fmt: skip
    return y


_library = torch.library.Library("espalier", "DEF")
_library.define(
    "moe(Tensor x, Tensor topk_ids, Tensor topk_weights, int experts, str mode='fast', Tensor? expert_map=None, "
    "ScalarType? out_dtype=None) -> Tensor"
)
_library.define("linear(Tensor x, int linear, str mode='fast', ScalarType? out_dtype=None) -> Tensor")
for _device in ("CPU", "CUDA"):
    _library.impl("moe", _moe, _device)
    _library.impl("linear", _linear, _device)


@torch.library.register_fake("espalier::moe", lib=_library)
def _moe_fake(x, topk_ids, topk_weights, experts, mode="fast", expert_map=None, out_dtype=None):
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype)


@torch.library.register_fake("espalier::linear", lib=_library)
def _linear_fake(x, linear, mode="fast", out_dtype=None):
    out_channels = _find(linear, _core.Linear).out_channels
    return x.new_empty((*x.shape[:-1], out_channels), dtype=out_dtype or x.dtype)


class PackageModule(torch.nn.Module):
    """What Moe and Linear share: a package that goes where the module goes, and away with it.

    handle: of the package, for the operators; it changes with the device. 0 before install().
    mode: of the cpu executor.

    No parameters: the package stays out of the state_dict. `.to(device)`, `.cuda()` and `.cpu()` copy it, a deep copy
    of the module shares it. It cannot be pickled. Moving a module while another thread runs it is an error, as it is
    for any module.
    """

    def __init__(self, package: _core.Experts | _core.Linear | None = None, mode: str = "fast"):
        super().__init__()
        self.mode = mode
        self.handle = 0
        self._package = None
        self._release = None
        # Follows every way in which torch moves a module.
        self.register_buffer("place", torch.empty(1, dtype=torch.uint8), persistent=False)
        if package is not None:
            self.install(package)

    def install(self, package: _core.Experts | _core.Linear) -> None:
        """Takes a package, in place of the one before, and goes to its device."""
        self.place = torch.empty(1, dtype=torch.uint8, device=package.device)
        forget = self._release
        self._package = package
        self.handle = handle(package)
        self._release = weakref.finalize(self, release, self.handle)
        self._release.atexit = False
        if forget is not None:
            forget()

    @property
    def package(self) -> _core.Experts | _core.Linear | None:
        """What runs; None before install()."""
        return self._package

    def _apply(self, fn, *arguments, **options):
        super()._apply(fn, *arguments, **options)
        if self._package is not None:
            if self.place.device.type == "meta":
                raise UsageError(f"{self._package.identity} cannot be put on meta; legal: cpu, cuda")
            if self.place.device != torch.device(self._package.device):
                self.install(self._package.to(str(self.place.device)))
        return self

    def __deepcopy__(self, memo):
        twin = memo[id(self)] = type(self).__new__(type(self))
        own = {"handle": 0, "_package": None, "_release": None}
        twin.__dict__.update(
            {key: own[key] if key in own else copy.deepcopy(v, memo) for key, v in self.__dict__.items()}
        )
        if self._package is not None:
            twin.install(self._package)
        return twin

    def __reduce_ex__(self, protocol):
        raise UsageError(f"{type(self).__name__} cannot be pickled; load the checkpoint again instead")

    def extra_repr(self) -> str:
        return f"{self._package!r}, mode={self.mode!r}"


class Moe(PackageModule):
    """The routed experts of one layer."""

    def forward(self, x, topk_ids, topk_weights, expert_map=None, out_dtype=None):
        """x [M, hidden], topk_ids and topk_weights [M, top_k] -> [M, hidden]."""
        return torch.ops.espalier.moe(x, topk_ids, topk_weights, self.handle, self.mode, expert_map, out_dtype)


class Linear(PackageModule):
    """One EXL3 matrix."""

    def forward(self, x, out_dtype=None):
        """x [..., in] -> [..., out]."""
        return torch.ops.espalier.linear(x, self.handle, self.mode, out_dtype)
