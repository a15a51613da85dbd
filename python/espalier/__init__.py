# SPDX-License-Identifier: Apache-2.0
"""Runs mixture-of-experts models stored as EXL3 trellis codes.

    checkpoint = espalier.Checkpoint("model")
    experts = espalier.prepare(checkpoint, 0)
    plan = espalier.plan(experts, max_tokens=64, top_k=4)
    y = espalier.run(plan, experts, x, topk_ids, topk_weights)

Arrays are those of numpy, torch, cupy or jax, through DLPack and without copies. What the library refuses
arrives as an EspalierError. espalier.torch and espalier.vllm are imported by name.
"""

from ._core import (
    Array,
    Checkpoint,
    Experts,
    ExtentPlan,
    Layer,
    LayerExtents,
    Linear,
    LinearInfo,
    LinearPlan,
    Matrix,
    MoePlan,
    Problem,
    RankExtent,
    Segment,
    SliceExtent,
    TensorInfo,
    __version__,
    devices,
    kernels,
    plan,
    prepare_arrays,
    run,
    run_linear,
)
from ._errors import (
    CancelledError,
    CapacityError,
    DeviceError,
    EspalierError,
    FormatError,
    GeometryError,
    IoError,
    UnsupportedError,
    UsageError,
)
from ._prepare import prepare, prepare_linear

__all__ = [
    "Array",
    "CancelledError",
    "CapacityError",
    "Checkpoint",
    "DeviceError",
    "EspalierError",
    "Experts",
    "ExtentPlan",
    "FormatError",
    "GeometryError",
    "IoError",
    "Layer",
    "LayerExtents",
    "Linear",
    "LinearInfo",
    "LinearPlan",
    "Matrix",
    "MoePlan",
    "Problem",
    "RankExtent",
    "Segment",
    "SliceExtent",
    "TensorInfo",
    "UnsupportedError",
    "UsageError",
    "__version__",
    "devices",
    "kernels",
    "plan",
    "prepare",
    "prepare_arrays",
    "prepare_linear",
    "run",
    "run_linear",
]
