"""The bindings behind `espalier`: the library's objects, one to one."""

from collections.abc import Callable, Sequence
import os
from typing import Any, Self, overload


class Array:
    """
    A row-major array in host memory that the library made and the caller may write to.

    numpy.asarray(a), torch.from_dlpack(a) and memoryview(a) see the same memory; it lives as
    long as any of them. Not safe to write from one thread while another reads it.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis; () for a scalar."""

    @property
    def dtype(self) -> str:
        """
        Name of the element type as numpy or torch has it: "float32", "bfloat16".
        """

    @property
    def ndim(self) -> int:
        """Number of axes."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""

    def view(self, dtype: Any) -> Array:
        """
        The same memory as elements of another dtype of the same size, e.g. "uint16" for bfloat16.

        UsageError: the sizes differ, or there is no such dtype.
        """

    def __dlpack__(self, *, stream: Any = None, max_version: tuple[int, int] | None = None, dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> Any:
        """
        A DLPack capsule over the same memory. BufferError for a copy or another device.
        """

    def __dlpack_device__(self) -> tuple[int, int]:
        """(1, 0): the host."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """
        What numpy.asarray asks for. TypeError for types that numpy does not have, unless ml_dtypes has them.
        """

    def __len__(self) -> int: ...

    def __repr__(self) -> str: ...

class Problem:
    """
    Something readable but wrong in a checkpoint. Errors make the layer fail.
    """

    @property
    def severity(self) -> str:
        """"warning" or "error"."""

    @property
    def file(self) -> str:
        """Name of the file; may be empty."""

    @property
    def tensor(self) -> str:
        """Name of the tensor; may be empty."""

    @property
    def message(self) -> str:
        """What is wrong."""

    @property
    def layer(self) -> str:
        """Label of the layer, empty for the whole checkpoint."""

    def __repr__(self) -> str: ...

class Layer:
    """The routed experts of one layer, as a checkpoint has them."""

    @property
    def label(self) -> str:
        """
        What prepare() takes: "3", or "PREFIX.3" for the smaller of two groups.
        """

    @property
    def number(self) -> int:
        """The layer's number in the model."""

    @property
    def prefix(self) -> str:
        """"model.layers"."""

    @property
    def experts(self) -> int:
        """Number of routed experts."""

    @property
    def slices(self) -> int:
        """Independently quantized slices of every expert."""

    @property
    def hidden(self) -> int:
        """Channels of x and y, as the model sees them."""

    @property
    def intermediate(self) -> int:
        """Intermediate channels of an expert, as the model sees them."""

    @property
    def stored_hidden(self) -> int:
        """Channels of the stored matrices."""

    @property
    def stored_intermediate(self) -> int:
        """Intermediate channels as stored, slices summed."""

    @property
    def has_gate(self) -> bool:
        """False where experts have no gate matrix."""

    def __repr__(self) -> str: ...

class LinearInfo:
    """One EXL3 matrix outside the routed experts."""

    @property
    def name(self) -> str:
        """Name in the file, without ".trellis"."""

    @property
    def in_channels(self) -> int:
        """Stored input channels."""

    @property
    def out_channels(self) -> int:
        """Stored output channels."""

    @property
    def bits(self) -> int:
        """Bits per weight, 1 to 8."""

    @property
    def codebook(self) -> str:
        """"3inst", "mcg" or "mul1"."""

    @property
    def has_bias(self) -> bool:
        """Whether it has a bias."""

    def __repr__(self) -> str: ...

class TensorInfo:
    """One tensor of a safetensors file."""

    @property
    def name(self) -> str:
        """Name in the file."""

    @property
    def dtype(self) -> str:
        """Type as safetensors names it: "BF16", "F8_E4M3"."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis; () for a scalar."""

    @property
    def file(self) -> str:
        """Name of the file that it lies in."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its payload."""

    def __repr__(self) -> str: ...

class SliceExtent:
    """One extent of the intermediate axis inside one slice."""

    @property
    def slice(self) -> int:
        """Number of the slice."""

    @property
    def first_channel(self) -> int:
        """Inside the slice; a multiple of 128."""

    @property
    def channels(self) -> int:
        """A multiple of 128."""

    def __repr__(self) -> str: ...

class RankExtent:
    """What one tensor-parallel rank owns of every expert of a layer."""

    @property
    def first_channel(self) -> int:
        """Of the layer; 0 where it owns nothing."""

    @property
    def channels(self) -> int:
        """A multiple of 128; may be 0."""

    @property
    def segments(self) -> list[SliceExtent]:
        """The same inside the slices, ascending."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of codes and vectors, all experts."""

    def __repr__(self) -> str: ...

class LayerExtents:
    """The ranks of one layer."""

    @property
    def layer(self) -> int:
        """Position in Checkpoint.layers."""

    @property
    def ranks(self) -> list[RankExtent]:
        """By tensor-parallel rank."""

    def __repr__(self) -> str: ...

class ExtentPlan:
    """
    Who owns which channels and experts of every layer, before any weight is read. Made by
    Checkpoint.extents(). Immutable; usable from any thread. Global rank = ep_rank * tp + tp_rank.
    """

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""

    @property
    def ep(self) -> int:
        """Expert-parallel size."""

    @property
    def world(self) -> int:
        """tp * ep."""

    @property
    def layers(self) -> list[LayerExtents]:
        """By position in Checkpoint.layers."""

    def weight_bytes(self, rank: int) -> int:
        """
        Bytes of codes and vectors that a global rank reads over all layers. UsageError: no such rank.
        """

    def experts(self, layer: int, ep_rank: int) -> tuple[int, int]:
        """
        (first, count) of the global experts of one expert-parallel rank. `layer` is a position in
        Checkpoint.layers. UsageError: out of range.
        """

    def expert_map(self, layer: int, ep_rank: int) -> list[int]:
        """
        Local expert ids by global ones, -1 = on another rank: what run(expert_map=...) takes.
        UsageError: out of range.
        """

    def __repr__(self) -> str: ...

class Checkpoint:
    """
    A checkpoint on disk, whatever its layout: a directory, or one .safetensors file.

    Opening reads headers, index and config only. Immutable; usable from any thread at once, and everything
    that reads releases the GIL.

    IoError, FormatError, UnsupportedError: with the file and what is wrong in it.
    """

    def __init__(self, path: str | os.PathLike) -> None: ...

    @property
    def path(self) -> str:
        """As it was opened."""

    @property
    def layout(self) -> str:
        """"stock", "rank-sliced", "r7", "exl3-v1"."""

    @property
    def config(self) -> dict[str, int | str | None]:
        """
        What the config says of the model; absent numbers are 0, an absent activation is None.
        """

    @property
    def legal_tp(self) -> list[int]:
        """
        Tensor-parallel sizes up to 24 at which every rank of every layer owns something.
        """

    @property
    def problems(self) -> list[Problem]:
        """What is readable but wrong."""

    @property
    def layers(self) -> list[Layer]:
        """Layers with routed experts, in ascending order."""

    @property
    def linears(self) -> list[LinearInfo]:
        """EXL3 matrices outside the routed experts, by name."""

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor by its name. A new dict each time."""

    def read(self, name: str) -> Array:
        """
        One whole tensor in its own shape and dtype; F4 and F6 types as [bytes] of uint8.

        UsageError: no such tensor. IoError. CapacityError.
        """

    def matrix(self, name: str, *, inner: bool = False) -> Array:
        """
        An EXL3 matrix as float32 [in, out] of its stored size: y = x @ matrix.

        name: as in `linears`, or model.layers.{L}.mlp.experts.{E}.{gate,up,down}_proj[.rank{slice}].
        inner: leave rotations and vectors off. Takes in * out * 4 bytes.
        UsageError: no such matrix. IoError, FormatError, CapacityError.
        """

    def extents(self, tp: int = 1, ep: int = 1, equal: bool = False) -> ExtentPlan:
        """
        Who owns what at these sizes. equal: refuse unless every rank owns as much as the others.

        GeometryError: with the sizes that are legal.
        """

    def __repr__(self) -> str: ...

class Matrix:
    """One EXL3 matrix of a package."""

    @property
    def in_channels(self) -> int:
        """Stored input channels."""

    @property
    def out_channels(self) -> int:
        """Stored output channels."""

    @property
    def bits(self) -> int:
        """Bits per weight, 1 to 8."""

    @property
    def codebook(self) -> str:
        """"3inst", "mcg" or "mul1"."""

    @property
    def has_bias(self) -> bool:
        """Whether it has a bias."""

    @property
    def code_bytes(self) -> int:
        """Bytes of its packed codes."""

    def __repr__(self) -> str: ...

class Segment:
    """One (gate, up, down) triple: a whole expert, or a slice of one."""

    @property
    def expert(self) -> int:
        """Local expert id."""

    @property
    def intermediate(self) -> int:
        """Intermediate channels of its matrices."""

    @property
    def valid_intermediate(self) -> int:
        """Those that are not padding."""

    @property
    def gate(self) -> Matrix | None:
        """None where the activation has no gate."""

    @property
    def up(self) -> Matrix | None:
        """Hidden to intermediate."""

    @property
    def down(self) -> Matrix | None:
        """Intermediate to hidden."""

    def __repr__(self) -> str: ...

class Experts:
    """
    The routed experts of one layer, or one rank's share of it, in memory of one device, packed as they are
    stored. Made by prepare() or prepare_arrays(). Immutable; may be run from several threads at once. As a
    context manager it closes itself. UsageError: used after close().
    """

    @property
    def experts(self) -> int:
        """Number of local experts."""

    @property
    def hidden(self) -> int:
        """Channels of x and y."""

    @property
    def intermediate(self) -> int:
        """Intermediate channels of the widest segment."""

    @property
    def activation(self) -> str:
        """"silu", "situ:4,25"."""

    @property
    def io(self) -> str | None:
        """The one type of x that plans may take, None = any."""

    @property
    def output_scale(self) -> float:
        """y is multiplied by it."""

    @property
    def code_bytes(self) -> int:
        """Bytes of packed codes."""

    @property
    def content_sha256(self) -> str:
        """Lower-case hex over descriptors and bytes; empty unless hash=True."""

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""

    @property
    def ep(self) -> int:
        """Expert-parallel size."""

    @property
    def rank(self) -> int:
        """Global rank."""

    @property
    def segments(self) -> list[Segment]:
        """What each expert consists of, by local expert id."""

    def to(self, device: Any) -> Experts:
        """
        A copy on another device. Releases the GIL. DeviceError, CapacityError.
        """

    @property
    def identity(self) -> str:
        """
        What it is and where it came from, as messages name it. Known after close() too.
        """

    @property
    def device(self) -> str:
        """"cpu", "cuda:0"."""

    @property
    def slab_bytes(self) -> int:
        """Memory that it takes on its device."""

    @property
    def closed(self) -> bool:
        """Whether close() was called."""

    def close(self) -> None:
        """
        Gives the memory back, at the latest when the runs that are in progress have ended. Every later use
        raises UsageError; closing again does nothing.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *args: object) -> None: ...

    def __repr__(self) -> object: ...

class Linear:
    """
    One dense EXL3 matrix in memory of one device: y = x W (+ bias). Made by prepare_linear(). Immutable; may
    be run from several threads at once. As a context manager it closes itself. UsageError: used after
    close().
    """

    @property
    def in_channels(self) -> int:
        """Channels of x."""

    @property
    def out_channels(self) -> int:
        """Channels of y."""

    @property
    def bits(self) -> int:
        """Bits per weight, 1 to 8."""

    @property
    def codebook(self) -> str:
        """"3inst", "mcg" or "mul1"."""

    @property
    def has_bias(self) -> bool:
        """Whether y gets a bias."""

    def to(self, device: Any) -> Linear:
        """
        A copy on another device. Releases the GIL. DeviceError, CapacityError.
        """

    @property
    def identity(self) -> str:
        """
        What it is and where it came from, as messages name it. Known after close() too.
        """

    @property
    def device(self) -> str:
        """"cpu", "cuda:0"."""

    @property
    def slab_bytes(self) -> int:
        """Memory that it takes on its device."""

    @property
    def closed(self) -> bool:
        """Whether close() was called."""

    def close(self) -> None:
        """
        Gives the memory back, at the latest when the runs that are in progress have ended. Every later use
        raises UsageError; closing again does nothing.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *args: object) -> None: ...

    def __repr__(self) -> object: ...

def load_experts(checkpoint: Checkpoint, layer: int | str, extents: ExtentPlan | None, rank: int, device: Any, activation: str | None, output_scale: float, io: Any, hash: bool, staging_bytes: int, num_threads: int, progress: Callable[[int, int], object] | None) -> Experts:
    """What espalier.prepare() calls."""

def load_linear(checkpoint: Checkpoint, name: str, first_in: int, in_channels: int, first_out: int, out_channels: int, model_in: int, model_out: int, device: Any, staging_bytes: int, num_threads: int, progress: Callable[[int, int], object] | None) -> Linear:
    """What espalier.prepare_linear() calls."""

def prepare_arrays(experts: Sequence[Any], *, hidden: int | None = None, activation: str = 'silu', output_scale: float = 1.0, io: Any = None, device: Any = 'cpu', identity: str = 'arrays', hash: bool = False, num_threads: int = 0, tp: int = 1, ep: int = 1, rank: int = 0) -> Experts:
    """
    Experts from weights that are in memory already, which are copied once.

    experts: a list with one entry an expert: a dict (or an object with these attributes)
        {"gate": matrix, "up": matrix, "down": matrix, "valid_intermediate": int | None},
        without gate where the activation has none; or a list of such, whose outputs add up; or an empty
        list, which contributes nothing. A matrix is a dict (or an object)
        {"codes": uint16 or int16 [in / 16, out / 16, 16 * bits], in the order of the files,
         "suh": float16 [in], "svh": float16 [out], "bias": float16 [out] | None,
         "bits": int | None, checked against codes, "codebook": "3inst", "mcg" or "mul1"}
        of arrays on the host without gaps; in and out are multiples of 128. Vectors that are the same
        memory are stored once.
    hidden: channels of x and y where the matrices are padded; None = theirs.
    identity: the name that messages give it. tp, ep, rank: where it belongs, for plans to check.
    Everything else as in prepare(). Releases the GIL while it copies; the arrays must not change meanwhile.

    UsageError (a missing or misspelt part, dtype, strides), GeometryError (shapes), UnsupportedError,
    CapacityError, DeviceError.
    """

class MoePlan:
    """
    How calls of run() go: their capacity, types and executor. Made by plan(). Immutable; usable from several
    threads at once. On the host it keeps a workspace for each call that ran at the same time.
    """

    @property
    def workspace_bytes(self) -> int:
        """
        Exact size of the scratch memory of one call, at 64 bytes; its contents do not matter.
        """

    @property
    def max_tokens(self) -> int:
        """Rows that a call may have at most."""

    @property
    def executor(self) -> str:
        """"cpu", "cuda", "reference"."""

    @property
    def mode(self) -> str:
        """"fast", "exact", "int8"; says something on the cpu executor only."""

    @property
    def device(self) -> str:
        """Where package, arrays and workspace lie: "cpu", "cuda:0"."""

    @property
    def input(self) -> str:
        """Type of x: "float32"."""

    @property
    def output(self) -> str:
        """Type of y: "float32"."""

    @property
    def num_threads(self) -> int:
        """Threads of a call on the host."""

    def __repr__(self) -> str: ...

    @property
    def top_k(self) -> int:
        """Experts per token."""

    @property
    def ids(self) -> str:
        """Type of topk_ids: "int32", "int64"."""

    @property
    def checked_ids(self) -> bool:
        """Whether an id outside the experts is an error."""

    @property
    def hidden(self) -> int:
        """Channels of x and y."""

class LinearPlan:
    """
    The same for run_linear(). Immutable; usable from several threads at once.
    """

    @property
    def workspace_bytes(self) -> int:
        """
        Exact size of the scratch memory of one call, at 64 bytes; its contents do not matter.
        """

    @property
    def max_tokens(self) -> int:
        """Rows that a call may have at most."""

    @property
    def executor(self) -> str:
        """"cpu", "cuda", "reference"."""

    @property
    def mode(self) -> str:
        """"fast", "exact", "int8"; says something on the cpu executor only."""

    @property
    def device(self) -> str:
        """Where package, arrays and workspace lie: "cpu", "cuda:0"."""

    @property
    def input(self) -> str:
        """Type of x: "float32"."""

    @property
    def output(self) -> str:
        """Type of y: "float32"."""

    @property
    def num_threads(self) -> int:
        """Threads of a call on the host."""

    def __repr__(self) -> str: ...

    @property
    def in_channels(self) -> int:
        """Channels of x."""

    @property
    def out_channels(self) -> int:
        """Channels of y."""

@overload
def plan(what: Experts, *, max_tokens: int = 4096, top_k: int | None = None, ids: Any = 'int32', input: Any = 'float32', output: Any = 'float32', checked_ids: bool | None = None, executor: str | None = None, mode: str = 'fast', num_threads: int = 0) -> MoePlan:
    """
    Plans calls of run() for packages like this one.

    max_tokens: a call has 0 to this many rows; at most 2**20.
    top_k: experts per token, 1 to 1024; required for Experts.
    ids: "int32" or "int64". input: "float32", "float16", "bfloat16". output: the same, and
    "float64" on the reference executor. A dtype of numpy or torch will do.
    checked_ids: an id outside the experts, but -1, raises GeometryError before anything is written;
    otherwise it contributes nothing. None = True on the host, and False on a GPU, which cannot.
    executor: "cpu", "cuda", "reference"; None = the best that supports the package.
    mode: of the cpu executor: "fast" (16-bit products), "exact" (fp32), "int8".
    num_threads: 0 = all cores; results do not depend on it.

    UsageError, UnsupportedError, CapacityError, GeometryError, DeviceError.
    """

@overload
def plan(what: Linear, *, max_tokens: int = 4096, input: Any = 'float32', output: Any = 'float32', executor: str | None = None, mode: str = 'fast', num_threads: int = 0) -> LinearPlan:
    """Plans calls of run_linear() for matrices like this one."""

def run(plan: MoePlan, experts: Experts, x: Any, topk_ids: Any, topk_weights: Any, *, out: Any = None, accumulate: bool = False, expert_map: Any = None, workspace: Any = None, stream: int | None = None) -> Any:
    """
    Runs the experts: y[t] = sum over j of topk_weights[t, j] * Expert(topk_ids[t, j])(x[t]).

    x: [tokens, hidden], the plan's input type.
    topk_ids: [tokens, top_k], the plan's id type; -1 = no expert.
    topk_weights: [tokens, top_k] float32, final weights.
    out: [tokens, hidden] of the plan's output type, written to and returned. None = a new Array; required
    on a GPU. accumulate: out += instead of out =.
    expert_map: int32 [global experts], local ids or -1 = not here; topk_ids are global then. A list will
    do on the host. workspace: workspace_bytes of scratch memory at 64 bytes, required on a GPU.
    stream: a cudaStream_t as an integer, None = the default stream.

    Arrays are anything with __dlpack__ (numpy, torch, cupy, jax) or a buffer, on the plan's device, with any
    distance between rows; nothing is copied. They are kept alive until the call returns: on a GPU they must
    stay until the stream has come past it. Releases the GIL; safe from several threads at once.

    UsageError (dtypes, strides, read-only or overlapping out, a closed handle), GeometryError (shapes, ids),
    CapacityError (more tokens than planned, a small workspace), DeviceError. Nothing is written then.
    """

def run_linear(plan: LinearPlan, linear: Linear, x: Any, *, out: Any = None, accumulate: bool = False, workspace: Any = None, stream: int | None = None) -> Any:
    """
    y = x W (+ bias): x [tokens, in_channels], out [tokens, out_channels]. Everything else as in run().
    """

def run_moe_at(plan: MoePlan, experts: Experts, num_tokens: int, x: int, x_row_stride: int, ids: int, ids_row_stride: int, weights: int, weights_row_stride: int, y: int, y_row_stride: int, workspace: int, workspace_bytes: int, expert_map: int, expert_map_size: int, accumulate: bool, stream: int) -> None:
    """
    run() for callers that have checked their arrays themselves: plain addresses, 0 = null, strides in
    elements. A workspace of 0 and 0 bytes is the plan's own on the host. What the addresses hold is not
    checked: a wrong one ends the process. Releases the GIL.
    """

def run_linear_at(plan: LinearPlan, linear: Linear, num_tokens: int, x: int, x_row_stride: int, y: int, y_row_stride: int, workspace: int, workspace_bytes: int, accumulate: bool, stream: int) -> None:
    """run_linear() with plain addresses; see run_moe_at()."""

def devices() -> list[dict[str, int | str]]:
    """
    The GPUs that can be used, as dicts: index, name, compute_capability (90 for 9.0), num_sms,
    memory_bytes, l2_bytes, clock_mhz, driver_version, runtime_version (13020 for 13.2). [] without.
    """

def kernels() -> str:
    """
    Kernels of the cpu executor in this process: "avx512-bf16", ..., "portable". UsageError where
    ESPALIER_CPU_ISA names none of this machine's.
    """
