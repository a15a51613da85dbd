# SPDX-License-Identifier: Apache-2.0
"""Routed experts: one package per layer and rank, read by Espalier's planner and loader."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.platforms import current_platform

import espalier
from espalier.vllm import _ops
from espalier.vllm._opened import Opened

_ACTIVATIONS = {
    MoEActivation.SILU: "silu",
    MoEActivation.GELU_TANH: "gelu",
    MoEActivation.RELU2_NO_MUL: "relu2",
}
_SWIGLU_OAI = (MoEActivation.SWIGLUOAI, MoEActivation.SWIGLUOAI_UNINTERLEAVE)


def activation_name(moe: FusedMoEConfig) -> str:
    """What espalier.prepare() calls the activation that vLLM wants. UnsupportedError when it has none."""
    if moe.activation in _SWIGLU_OAI and moe.swiglu_limit is not None:
        if moe.swiglu_alpha in (None, 1.702) and moe.swiglu_beta in (None, 1.0):
            return f"swiglu-oai:{moe.swiglu_limit:g}"
    elif moe.activation is MoEActivation.SITU:
        if moe.activation_situ_beta is not None and moe.activation_situ_linear_beta is not None:
            return f"situ:{moe.activation_situ_beta:g},{moe.activation_situ_linear_beta:g}"
    elif moe.activation in _ACTIVATIONS and moe.swiglu_limit is None:
        return _ACTIVATIONS[moe.activation]
    numbers = {
        name: getattr(moe, name)
        for name in (
            "swiglu_limit",
            "swiglu_alpha",
            "swiglu_beta",
            "activation_situ_beta",
            "activation_situ_linear_beta",
        )
        if getattr(moe, name) is not None
    }
    detail = "".join(f", {name} {value:g}" for name, value in numbers.items())
    raise espalier.UnsupportedError(
        f"activation {moe.activation.value}{detail}; legal: silu, gelu_tanh and relu2_no_mul without a limit, "
        "swigluoai with a limit, alpha 1.702 and beta 1, situ with both betas"
    )


class Exl3ExpertsMethod(FusedMoEMethodBase):
    """Runs the routed experts of one layer. Made while the model is built."""

    def __init__(self, layer: torch.nn.Module, opened: Opened, position: int, prefix: str, mode: str):
        """Refuses what cannot be run. layer: a RoutedExperts whose sizes are known. position: in Checkpoint.layers."""
        super().__init__(layer.moe_config)
        self.opened = opened
        self.position = position
        self.prefix = prefix
        self.mode = mode
        self._refuse_what_is_unsupported(layer)
        self._refuse_what_is_routed_otherwise(layer)
        self._check_geometry()
        try:
            self.activation = activation_name(self.moe)
        except espalier.UnsupportedError as error:
            raise espalier.UnsupportedError(f"{prefix}: {error}") from None

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: FusedMoEParallelConfig,
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition  # nothing is padded

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        return None

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        parallel = self.moe.moe_parallel_config
        self.extents = self.opened.extents(parallel.tp_size, parallel.ep_size)
        self.rank = parallel.ep_rank * parallel.tp_size + parallel.tp_rank
        self._check_expert_map(layer, num_experts)
        self.device = torch.empty(0).device  # vLLM builds models with the worker's device as the default

    def _refuse_what_is_unsupported(self, layer: torch.nn.Module) -> None:
        moe, parallel = self.moe, self.moe.moe_parallel_config
        vllm_config = get_current_vllm_config_or_none()
        elastic = vllm_config is not None and vllm_config.parallel_config.enable_elastic_ep
        found = {
            "LoRA": moe.is_lora_enabled,
            "EPLB (--enable-eplb)": parallel.enable_eplb or moe.num_experts != moe.num_logical_experts,
            "elastic expert parallelism": elastic,
            f"data parallelism (size {parallel.dp_size})": parallel.dp_size > 1,
            f"prefill context parallelism (size {parallel.pcp_size})": parallel.pcp_size > 1,
            "sequence parallelism": parallel.is_sequence_parallel,
            "biases of experts": moe.has_bias,
            "router weights applied to the input (apply_router_weight_on_input)": layer.apply_router_weight_on_input,
            "shared experts fused into the routed ones": layer.expert_map_manager.num_fused_shared_experts > 0,
        }
        names = [name for name, present in found.items() if present]
        if names:
            raise espalier.UnsupportedError(
                f"{self.prefix}: quantization method exl3 does not support {', '.join(names)}; leave it out"
            )

    def _refuse_what_is_routed_otherwise(self, layer: torch.nn.Module) -> None:
        """vLLM's router for CPUs leaves out the bias of an ungrouped softmax, and has no ungrouped sigmoid."""
        if not current_platform.is_cpu() or layer.use_grouped_topk or layer.custom_routing_function is not None:
            return
        if layer.scoring_func == "sigmoid" or (
            layer.scoring_func == "softmax" and layer.e_score_correction_bias is not None
        ):
            bias = "a" if layer.e_score_correction_bias is not None else "no"
            raise espalier.UnsupportedError(
                f"{self.prefix}: routing by {layer.scoring_func} with {bias} correction bias and without groups of "
                "experts, which vLLM's router for CPUs computes otherwise or not at all; legal on a CPU: softmax "
                "without bias, or groups"
            )

    def _check_geometry(self) -> None:
        info, moe = self.opened.layers[self.position], self.moe
        stored = {
            "experts": info.experts,
            "hidden channels": info.hidden,
            "intermediate channels": info.intermediate,
            "gate matrices": info.has_gate,
        }
        wanted = {
            "experts": moe.num_logical_experts,
            "hidden channels": moe.hidden_dim_unpadded,
            "intermediate channels": moe.intermediate_size,
            "gate matrices": moe.is_act_and_mul,
        }
        for what, value in wanted.items():
            if stored[what] != value:
                raise espalier.GeometryError(
                    f"{self.prefix}: the model has {what} {value}, {self.opened.path} has {stored[what]}"
                )
        if not 1 <= moe.experts_per_token <= info.experts:
            raise espalier.GeometryError(
                f"{self.prefix}: {moe.experts_per_token} experts a token; legal: 1 to {info.experts}"
            )

    def _check_expert_map(self, layer: torch.nn.Module, num_experts: int) -> None:
        ep_rank = self.moe.moe_parallel_config.ep_rank
        _, count = self.extents.experts(self.position, ep_rank)
        given = layer.expert_map_manager.expert_map
        same = given is None and self.extents.ep == 1
        if given is not None:
            same = given.tolist() == self.extents.expert_map(self.position, ep_rank)
        if not same or count != num_experts:
            raise espalier.UnsupportedError(
                f"{self.prefix}: expert placement {layer.expert_map_manager.placement_strategy!r} with {num_experts} "
                f"experts on expert-parallel rank {ep_rank}; legal is 'linear' with {count}"
            )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Reads what this rank owns. vLLM calls it when everything else is loaded."""
        if hasattr(layer, "espalier_package"):
            raise espalier.UnsupportedError(f"{self.prefix}: quantization method exl3 does not reload weights")
        experts = espalier.prepare(
            self.opened.checkpoint,
            self.position,
            extents=self.extents,
            rank=self.rank,
            device=str(self.device),
            activation=self.activation,
            io=str(self.moe.in_dtype).removeprefix("torch."),
        )
        for segment in experts.segments:
            if any(matrix is not None and matrix.has_bias for matrix in (segment.gate, segment.up, segment.down)):
                raise espalier.UnsupportedError(f"{self.prefix}: {self.opened.path} has biases of experts")
        layer.espalier_package = _ops.install(layer, experts, self.mode)

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: torch.nn.Module | None,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """x [M, hidden], topk [M, top_k] with global ids, -1 for none -> this rank's share of y [M, hidden]."""
        return torch.ops.espalier_vllm.moe(x, topk_ids, topk_weights, layer.espalier_package, layer.expert_map)
