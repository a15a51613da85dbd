# SPDX-License-Identifier: Apache-2.0
"""What stands in a model where transformers has its experts and its linear layers."""

from __future__ import annotations

from typing import Any

import torch

from espalier.torch import PackageModule


def _mode_on(device: torch.device, mode: str) -> str:
    """A mode is what the user chose for the CPU; a GPU has one, and refuses others."""
    return mode if device.type == "cpu" else "fast"


class Exl3Experts(PackageModule):
    """The routed experts of one layer, called as experts of transformers 5 are. They have no gradients."""

    def __init__(self, config: Any, num_experts: int, mode: str):
        super().__init__(mode=mode)
        self.config = config
        self.num_experts = num_experts

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [..., hidden], top_k_index and top_k_weights [..., top_k] -> [..., hidden]."""
        top_k = top_k_index.shape[-1]
        return torch.ops.espalier.moe(
            hidden_states.reshape(-1, hidden_states.shape[-1]),
            top_k_index.reshape(-1, top_k),
            top_k_weights.reshape(-1, top_k),
            self.handle,
            _mode_on(hidden_states.device, self.mode),
        ).view(hidden_states.shape)


class Exl3Linear(PackageModule):
    """One dense EXL3 matrix in the place of a torch.nn.Linear. It has no weight and no gradients."""

    def __init__(self, in_features: int, out_features: int, mode: str):
        super().__init__(mode=mode)
        self.in_features = in_features
        self.out_features = out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features], in the dtype of x."""
        return torch.ops.espalier.linear(x, self.handle, _mode_on(x.device, self.mode))
