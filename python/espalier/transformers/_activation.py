# SPDX-License-Identifier: Apache-2.0
"""Which of our activations a model's experts have.

Names would not do: a class may have an activation of its own, with limits from its config. So what it computes is
compared with what ours compute, on numbers that reach every branch.
"""

from __future__ import annotations

from typing import Any

import torch

import espalier

_LARGEST = 40.0
_TOLERANCE = 1e-5  # relative to the largest value; models compute in fp32


def _limited(gate: torch.Tensor, up: torch.Tensor, limit: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    return (gate, up) if not limit else (gate.clamp(max=limit), up.clamp(-limit, limit))


def _silu(gate, up, limit=None):
    gate, up = _limited(gate, up, limit)
    return torch.nn.functional.silu(gate) * up


def _gelu(gate, up, limit=None):
    gate, up = _limited(gate, up, limit)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def _situ(gate, up, beta, linear_beta):
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)


def _swiglu_oai(gate, up, limit=7.0):
    gate, up = _limited(gate, up, limit)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


_GATED = {"silu": _silu, "gelu": _gelu, "situ": _situ, "swiglu-oai": _swiglu_oai}


def _evaluate(name: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor | None:
    """docs/format.md, section 6. None where a name has no gate or is not a number away from these."""
    kind, _, parameters = name.partition(":")
    try:
        return _GATED[kind](gate, up, *(float(number) for number in parameters.split(",") if number))
    except (KeyError, ValueError):
        return None


def _close(found: torch.Tensor, expected: torch.Tensor | None) -> bool:
    if expected is None or found.shape != expected.shape:
        return False
    found, expected = found.double(), expected.double()
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _limits(experts: torch.nn.Module) -> list[float]:
    """Numbers of the module and its config that are called a limit."""
    values = []
    for holder in (experts, getattr(experts, "config", None)):
        for key, value in vars(holder).items() if holder is not None else ():
            if "limit" in key and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
                values.append(float(value))
    return sorted(set(values))


def activation_name(experts: Any, stored: str | None) -> str:
    """What espalier.prepare() calls the activation of `experts`, a module with the interface of transformers 5.

    stored: what the checkpoint's config says, None = nothing. UnsupportedError: none of ours.
    """
    wave = torch.linspace(-1, 1, 97, device="cpu", dtype=torch.float32)
    gate = (_LARGEST * wave**3).repeat_interleave(97)[None]
    up = (_LARGEST * wave**3).repeat(97)[None]
    if experts.has_gate:
        joined = torch.cat([gate, up], -1) if experts.is_concatenated else torch.stack([gate, up], -1).flatten(-2)
        found = experts._apply_gate(joined)
        names = [stored] if stored else []
        names += ["silu", "gelu"]
        names += [f"{kind}:{limit:g}" for limit in _limits(experts) for kind in ("silu", "gelu", "swiglu-oai")]
        for name in names:
            if _close(found, _evaluate(name, gate.double(), up.double())):
                return name
    else:
        found = experts.act_fn(up)
        if _close(found, up.double().clamp(min=0) ** 2):
            return "relu2"
    function = type(getattr(experts, "act_fn", None)).__name__
    raise espalier.UnsupportedError(
        f"the activation of {type(experts).__name__} ({function}, {'with' if experts.has_gate else 'without'} gate) is "
        "not one that Espalier has; legal: silu, gelu(tanh), situ, swiglu-oai, all but situ with a limit, "
        "and relu2 without gate"
    )
