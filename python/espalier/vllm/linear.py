# SPDX-License-Identifier: Apache-2.0
"""Dense layers: EXL3 matrices cut for one rank, and the MXFP8 layers of containers."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.parameter import ModelWeightParameter

import espalier
from espalier.vllm import _ops, _rules
from espalier.vllm._opened import Opened

_CUT_HERE = (QKVParallelLinear, MergedColumnParallelLinear, ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)


def _check_cuts(layer: torch.nn.Module, prefix: str) -> None:
    """A class with weight loaders of its own may cut its weights in a way that is not known here."""
    known = next((base for base in type(layer).__mro__ if base in _CUT_HERE), None)
    if known is None or type(layer).weight_loader is not known.weight_loader:
        raise espalier.UnsupportedError(
            f"{prefix}: {type(layer).__name__} cuts its weights in a way of its own; legal: "
            f"{', '.join(base.__name__ for base in _CUT_HERE)}"
        )


def _sections(layer: torch.nn.Module, prefix: str, partition_sizes: list[int]) -> list[_rules.Section]:
    """What the layer's output axis consists of, and what of it this rank holds."""
    if isinstance(layer, ParallelLMHead):
        shard = layer.shard_indices
        if shard.num_added_elements_padded:
            raise espalier.UnsupportedError(f"{prefix}: added vocabulary is not supported with an EXL3 head")
        first = min(shard.org_vocab_start_index, layer.org_vocab_size)
        return [_rules.Section(layer.org_vocab_size, first, shard.num_org_elements)]
    _check_cuts(layer, prefix)
    if isinstance(layer, QKVParallelLinear):
        heads, kv_heads, v_size = layer.total_num_heads, layer.total_num_kv_heads, layer.v_head_size
        kv_rank = layer.tp_rank // layer.num_kv_head_replicas
        widths = (heads * layer.head_size, kv_heads * layer.head_size, kv_heads * v_size)
        ranks = (layer.tp_rank, kv_rank, kv_rank)
    elif isinstance(layer, ColumnParallelLinear):
        widths = tuple(size * layer.tp_size for size in partition_sizes)
        ranks = (layer.tp_rank,) * len(widths)
    else:
        widths, ranks = tuple(partition_sizes), (0,) * len(partition_sizes)
    return [_rules.Section(width, rank * local, local) for width, rank, local in zip(widths, ranks, partition_sizes)]


class Exl3LinearMethod(LinearMethodBase):
    """One or more stored EXL3 matrices behind each other on the output axis, a rank's parts of them."""

    def __init__(self, opened: Opened, names: list[str], prefix: str, mode: str):
        self.opened = opened
        self.names = names
        self.prefix = prefix
        self.mode = mode

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        vllm_config = get_current_vllm_config_or_none()
        if vllm_config is not None and vllm_config.lora_config is not None:
            raise espalier.UnsupportedError(
                f"{self.prefix}: quantization method exl3 does not support LoRA; leave it out"
            )
        infos = {name: self.opened.linears[name] for name in self.names}
        self._check_bias(layer, infos)
        sections = _sections(layer, self.prefix, output_partition_sizes)
        first_in = layer.tp_rank * input_size_per_partition if isinstance(layer, RowParallelLinear) else 0
        try:
            for info in infos.values():
                _rules.check_width(f"the input axis of {info.name}", info.in_channels, input_size)
            placed = _rules.assign(self.names, {name: infos[name].out_channels for name in self.names}, sections)
            parts = [
                _rules.cut_part(
                    name,
                    infos[name].in_channels,
                    infos[name].out_channels,
                    first_in,
                    input_size_per_partition,
                    begin + section.first,
                    section.local,
                )  # fmt: skip
                for name, begin, section in placed
            ]
        except ValueError as error:
            raise espalier.GeometryError(f"{self.opened.path}: vLLM's layer {self.prefix}: {error}") from None
        self.parts = [part for part in _rules.merge(parts) if part.local]
        for part in self.parts:
            if infos[part.name].has_bias and first_in > 0 and part.first_in == 0:
                raise espalier.UnsupportedError(
                    f"{self.prefix}: {part.name} has a bias and is cut at input channel {first_in}, inside its first "
                    f"{_rules.BLOCK}: two ranks would add the bias"
                )
        # Rows of a head that no token has: the last ranks'.
        self.missing = sum(output_partition_sizes) - sum(part.local for part in self.parts)
        self.device = torch.empty(0).device

    def _check_bias(self, layer: torch.nn.Module, infos: dict[str, espalier.LinearInfo]) -> None:
        stored = {info.has_bias for info in infos.values()}
        if len(stored) > 1 or stored != {bool(layer.has_bias)}:
            raise espalier.UnsupportedError(
                f"{self.opened.path}: vLLM's layer {self.prefix} has {'a' if layer.has_bias else 'no'} bias, of "
                f"{', '.join(self.names)} {sum(info.has_bias for info in infos.values())} of {len(infos)} have one"
            )
        if layer.has_bias and getattr(layer, "skip_bias_add", False):
            raise espalier.UnsupportedError(f"{self.prefix}: skip_bias_add is not supported with an EXL3 matrix")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Reads this rank's parts. vLLM calls it when everything else is loaded."""
        if hasattr(layer, "espalier_packages"):
            raise espalier.UnsupportedError(f"{self.prefix}: quantization method exl3 does not reload weights")
        layer.espalier_packages = []
        for part in self.parts:
            linear = espalier.prepare_linear(
                self.opened.checkpoint,
                part.name,
                first_in=part.first_in,
                in_channels=part.in_channels,
                first_out=part.first_out,
                out_channels=part.out_channels,
                # Zeros on the right and surplus on the right are the core's business.
                model_in=part.in_channels - part.pad_right,
                model_out=part.skip + part.local,
                device=str(self.device),
            )
            layer.espalier_packages.append(_ops.install(layer, linear, self.mode))

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., in] -> [..., out] of this rank. Stored biases are part of the matrices; `bias` is the same again."""
        pieces = []
        for part, package in zip(self.parts, layer.espalier_packages):
            part_x = torch.nn.functional.pad(x, (part.pad_left, 0)) if part.pad_left else x
            y = torch.ops.espalier_vllm.linear(part_x, package, part.skip + part.local)
            pieces.append(y[..., part.skip :] if part.skip else y)
        if self.missing:
            pieces.append(x.new_zeros((*x.shape[:-1], self.missing)))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        raise espalier.UnsupportedError(
            f"{self.prefix}: the config ties it to the embedding, {self.opened.path} has an EXL3 matrix for it; "
            "set tie_word_embeddings to false"
        )


@register_weight_loader_v2_supported_method
class DecodedLinearMethod(UnquantizedLinearMethod):
    """An EXL3 matrix that vLLM takes apart itself, as latent attention does with kv_b_proj: this rank's part of it is
    decoded once to the model's dtype, and run by vLLM as any plain layer."""

    supports_pre_processed_weights = False

    def __init__(self, opened: Opened, names: list[str], prefix: str):
        super().__init__()
        self.stored = Exl3LinearMethod(opened, names, prefix, "exact")

    def create_weights(self, layer: torch.nn.Module, *arguments: Any, **options: Any) -> None:
        self.stored.create_weights(layer, *arguments, **options)
        super().create_weights(layer, *arguments, **options)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pieces = []
        for part in self.stored.parts:
            whole = torch.from_dlpack(self.stored.opened.checkpoint.matrix(part.name))
            rows = whole[part.first_in + part.pad_left : part.first_in + part.in_channels - part.pad_right]
            first = part.first_out + part.skip
            pieces.append(rows[:, first : first + part.local].T)
        layer.weight.data.copy_(torch.cat(pieces))
        super().process_weights_after_loading(layer)


MXFP8_BLOCK = 32  # input channels that share a scale
_DECODED_ROWS = 256  # at a time: the doubles of that many rows


def decode_mxfp8(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weight F8_E4M3 [out, in], scale uint8 [out, ceil(in / 32)] -> [out, in]; exact in bfloat16 and float32."""
    decoded = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for begin in range(0, weight.shape[0], _DECODED_ROWS):
        rows = slice(begin, begin + _DECODED_ROWS)
        factors = torch.exp2(scale[rows].double() - 127).masked_fill_(scale[rows] == 255, torch.nan)
        factors = factors.repeat_interleave(MXFP8_BLOCK, dim=1)[:, : weight.shape[1]]
        decoded[rows] = (weight[rows].double() * factors).to(dtype)
    return decoded


@register_weight_loader_v2_supported_method
class Mxfp8LinearMethod(UnquantizedLinearMethod):
    """A dense MXFP8 layer, decoded once to the model's dtype and run by vLLM as any plain layer."""

    supports_pre_processed_weights = False

    def __init__(self, opened: Opened, names: list[str], prefix: str):
        super().__init__()
        self.prefix = prefix
        dtypes = {name: opened.scale_dtypes.get(name) for name in names}
        for name, dtype in dtypes.items():
            if dtype not in ("U8", "F8_E8M0"):
                found = "is missing" if dtype is None else f"is {dtype}"
                raise espalier.FormatError(f"{opened.path}: {name}.weight_scale {found}; legal: U8, F8_E8M0")
        if len(set(dtypes.values())) > 1:
            raise espalier.UnsupportedError(
                f"{opened.path}: {prefix} joins {', '.join(names)}, whose scales differ in type"
            )
        self.scale_dtype = torch.uint8 if dtypes[names[0]] == "U8" else torch.float8_e8m0fnu

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        if params_dtype not in (torch.bfloat16, torch.float32):
            raise espalier.UnsupportedError(
                f"{self.prefix}: MXFP8 does not fit into {params_dtype}; legal: --dtype bfloat16 or float32"
            )
        if input_size_per_partition != input_size and input_size_per_partition % MXFP8_BLOCK:
            raise espalier.GeometryError(
                f"{self.prefix}: {input_size} input channels cut to {input_size_per_partition} a rank; MXFP8 is cut on "
                f"multiples of {MXFP8_BLOCK}"
            )
        rows = sum(output_partition_sizes)
        loader = extra_weight_attrs["weight_loader"]
        for name, columns, dtype in (
            ("weight", input_size_per_partition, torch.float8_e4m3fn),
            ("weight_scale", -(-input_size_per_partition // MXFP8_BLOCK), self.scale_dtype),
        ):
            data = torch.empty(rows, columns, dtype=dtype)
            layer.register_parameter(
                name, ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
            )
        self.params_dtype = params_dtype

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        scale = layer.weight_scale.data.view(torch.uint8)
        decoded = decode_mxfp8(layer.weight.data, scale, self.params_dtype)
        del layer.weight_scale
        layer.weight = torch.nn.Parameter(decoded, requires_grad=False)
        super().process_weights_after_loading(layer)
