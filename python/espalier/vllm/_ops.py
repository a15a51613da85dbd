# SPDX-License-Identifier: Apache-2.0
"""The two operators that layers of vLLM call: torch.ops.espalier_vllm.moe and .linear.

They are torch.ops.espalier.moe and .linear with the package named by a tensor instead of a number. vLLM keeps compiled
graphs on disk and drops their guards: a number would be part of a graph and name another package, or none, in the next
process, and so would the mode. A tensor of a layer is an input of the graph, and equal layers share one.
"""

from __future__ import annotations

import weakref

import torch

import espalier
import espalier.torch

_library = torch.library.Library("espalier_vllm", "DEF")
_library.define("moe(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor package, Tensor? expert_map) -> Tensor")
_library.define("linear(Tensor x, Tensor package, int out_channels) -> Tensor")

# What install() was given, by the package's handle.
_installed: dict[int, tuple[espalier.Experts | espalier.Linear, str]] = {}


def _forget(handle: int) -> None:
    del _installed[handle]
    espalier.torch.release(handle)


def install(owner: object, package: espalier.Experts | espalier.Linear, mode: str) -> torch.Tensor:
    """A tensor that names a package to the operators: int64 [1], on the CPU whatever the package's device.

    The package is let go when `owner`, the layer, is. `mode` is of the CPU; a GPU has one, and refuses others.
    """
    handle = espalier.torch.handle(package)
    _installed[handle] = package, mode if package.device == "cpu" else "fast"
    weakref.finalize(owner, _forget, handle).atexit = False
    return torch.tensor([handle], dtype=torch.int64, device="cpu")


def installed(package: torch.Tensor) -> tuple[espalier.Experts | espalier.Linear, str]:
    """The package that a tensor of install() names, and its mode."""
    return _installed[package.item()]


def _moe(x, topk_ids, topk_weights, package, expert_map):
    handle = package.item()
    return torch.ops.espalier.moe(x, topk_ids, topk_weights, handle, _installed[handle][1], expert_map)


def _linear(x, package, out_channels):
    handle = package.item()
    return torch.ops.espalier.linear(x, handle, _installed[handle][1])


for _device in ("CPU", "CUDA"):
    _library.impl("moe", _moe, _device)
    _library.impl("linear", _linear, _device)


@torch.library.register_fake("espalier_vllm::moe", lib=_library)
def _moe_fake(x, topk_ids, topk_weights, package, expert_map):
    return x.new_empty(x.shape)


@torch.library.register_fake("espalier_vllm::linear", lib=_library)
def _linear_fake(x, package, out_channels):
    return x.new_empty((*x.shape[:-1], out_channels))
