# SPDX-License-Identifier: Apache-2.0
"""An open checkpoint with what vLLM's layers ask of it, put in order once: large ones have half a million tensors."""

from __future__ import annotations

from typing import Any

import espalier

EXL3 = "exl3"


class Opened:
    """Not for several threads at once: vLLM builds a model in one."""

    def __init__(self, checkpoint: espalier.Checkpoint):
        """FormatError when the checkpoint has no EXL3 tensors, or problems that make it unusable."""
        self.checkpoint = checkpoint
        self.path = checkpoint.path
        self.layers = checkpoint.layers
        self.linears = {linear.name: linear for linear in checkpoint.linears}
        if not self.layers and not self.linears:
            raise espalier.FormatError(f"{self.path} has no EXL3 tensors")
        for problem in checkpoint.problems:
            if problem.severity == "error":
                where = " ".join(filter(None, (problem.file, problem.tensor)))
                raise espalier.FormatError(f"{self.path}: {where}: {problem.message}")
        self.kinds: dict[str, str] = {}  # of dense layers by the file's name: EXL3, or the dtype of the weight
        self.scale_dtypes: dict[str, str] = {}  # of those with a weight_scale
        for name, info in checkpoint.tensors.items():
            if name.endswith(".weight"):
                self.kinds[name.removesuffix(".weight")] = info.dtype
            elif name.endswith(".weight_scale"):
                self.scale_dtypes[name.removesuffix(".weight_scale")] = info.dtype
        self.kinds.update(dict.fromkeys(self.linears, EXL3))
        self.names = {name: name for name in self.kinds}  # vLLM's name -> the file's
        self.claimed: set[str] = set()  # names of the file that a layer of vLLM took
        self._mappers: list[Any] = []
        self._extents: dict[tuple[int, int], espalier.ExtentPlan] = {}

    def rename(self, mapper: Any) -> None:
        """Learns names that a model has for the checkpoint's; `mapper` is a WeightsMapper of vLLM."""
        self._mappers.append(mapper)
        for current, stored in list(self.names.items()):
            self.names.setdefault(_renamed(mapper, current), stored)

    def module_names(self, stored: str) -> set[str]:
        """A module of the checkpoint as vLLM may call it."""
        names = {stored}
        for mapper in self._mappers:
            names |= {_renamed(mapper, name) for name in names}
        return names

    def extents(self, tp: int, ep: int) -> espalier.ExtentPlan:
        """Of all layers, planned once. GeometryError."""
        if (tp, ep) not in self._extents:
            self._extents[tp, ep] = self.checkpoint.extents(tp=tp, ep=ep)
        return self._extents[tp, ep]


def _renamed(mapper: Any, name: str) -> str:
    mapped = mapper.map_name(f"{name}.weight")
    return name if mapped is None else mapped.removesuffix(".weight")
