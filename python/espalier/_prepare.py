# SPDX-License-Identifier: Apache-2.0
"""Loading, with a bar where one is wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from . import _core
from ._extras import need

Progress = bool | Callable[[int, int], object] | None

DEFAULT_STAGING_BYTES = 64 << 20


def prepare(
    checkpoint: _core.Checkpoint,
    layer: int | str,
    *,
    extents: _core.ExtentPlan | None = None,
    rank: int = 0,
    device: Any = "cpu",
    activation: str | None = None,
    output_scale: float = 1.0,
    io: Any = None,
    hash: bool = False,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    num_threads: int = 0,
    progress: Progress = None,
) -> _core.Experts:
    """Reads the routed experts of one layer, or one rank's share of it, onto one device.

    layer: position in Checkpoint.layers, or a label.
    extents, rank: a plan of Checkpoint.extents() and a global rank of it; only what that rank owns is read.
    device: "cpu", "cuda", "cuda:1".
    activation: overrides the config: "silu[:LIMIT]", "gelu[:LIMIT]", "relu2", "situ:BETA,LINEAR_BETA",
        "swiglu-oai[:LIMIT]". Without either silu is assumed.
    output_scale: y is multiplied by it.
    io: the one dtype of x that plans may ask for; None = any.
    hash: compute content_sha256 while reading.
    staging_bytes: host memory beside the package while it is read, over all threads; at least 65536.
    num_threads: that read; 0 = all cores.
    progress: True shows a tqdm bar; or a function of (bytes done, bytes in all), called from one thread at a
        time. It stops the load by an exception, which is raised here, or by returning False: CancelledError.

    Releases the GIL; Ctrl-C takes effect when the load is over. Raises UsageError, IoError, FormatError,
    GeometryError, CapacityError, UnsupportedError, DeviceError; nothing is kept then, and the call may be repeated.
    """
    with _reporting(progress, f"layer {layer}") as report:
        return _core.load_experts(
            checkpoint, layer, extents, rank, device, activation, output_scale, io, hash, staging_bytes, num_threads, report
        )  # fmt: skip


def prepare_linear(
    checkpoint: _core.Checkpoint,
    name: str,
    *,
    first_in: int = 0,
    in_channels: int = 0,
    first_out: int = 0,
    out_channels: int = 0,
    model_in: int = 0,
    model_out: int = 0,
    device: Any = "cpu",
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    num_threads: int = 0,
    progress: Progress = None,
) -> _core.Linear:
    """Reads one dense EXL3 matrix, or a part of it, onto one device.

    name: as Checkpoint.linears gives it, or one slice of a routed matrix as Checkpoint.matrix() takes it.
    first_in, in_channels, first_out, out_channels: the part, in multiples of 128; 0 channels = to the end.
        Nothing else is read. Parts of the output axis stand side by side, parts of the input axis add up; a bias
        belongs to the part with first_in 0.
    model_in, model_out: widths of x and y as the model sees them, 0 = as stored; x is zero-extended, y is cut.
    Everything else, and the errors, as in prepare().
    """
    with _reporting(progress, name) as report:
        return _core.load_linear(
            checkpoint, name, first_in, in_channels, first_out, out_channels, model_in, model_out,
            device, staging_bytes, num_threads, report,
        )  # fmt: skip


@contextlib.contextmanager
def _reporting(progress: Progress, label: str) -> Iterator[Callable[[int, int], object] | None]:
    """The function that the core calls: the caller's own, or one that moves a bar."""
    if progress is None or progress is False:
        yield None
    elif progress is True:
        bar = need("tqdm.auto", "progress").tqdm(desc=label, unit="B", unit_scale=True, unit_divisor=1024)

        def move(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        with bar:
            yield move
    else:
        yield progress
