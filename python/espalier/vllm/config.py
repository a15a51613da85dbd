# SPDX-License-Identifier: Apache-2.0
"""Quantization method ``exl3``: what of a checkpoint goes to which method, and which checkpoints it is for."""

from __future__ import annotations

import os
from typing import Any

import torch
import vllm
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import download_weights_from_hf
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform

import espalier
from espalier.vllm import TESTED_VERSIONS, _rules
from espalier.vllm._opened import Opened as _Opened
from espalier.vllm.experts import Exl3ExpertsMethod
from espalier.vllm.linear import DecodedLinearMethod, Exl3LinearMethod, Mxfp8LinearMethod

logger = init_logger("vllm.espalier")

METHOD = "exl3"
MODES = ("exact", "fast", "int8")

_PLAIN_DTYPES = ("BF16", "F16", "F32")


def selected_mode() -> str:
    """In which numbers the CPU takes products: --additional-config '{"espalier": {"mode": ...}}', else the environment
    variable ESPALIER_MODE, else "fast". UsageError for anything else.
    """
    vllm_config = get_current_vllm_config_or_none()
    additional = vllm_config.additional_config if vllm_config is not None else None
    options = additional.get("espalier", {}) if isinstance(additional, dict) else {}
    if not isinstance(options, dict) or not options.keys() <= {"mode"}:
        raise espalier.UsageError(
            f"additional_config['espalier'] is {options!r}; legal is {{'mode': {'|'.join(MODES)}}}"
        )
    source = "additional_config['espalier']['mode']" if "mode" in options else "ESPALIER_MODE"
    mode = options.get("mode") or os.environ.get("ESPALIER_MODE") or "fast"
    if mode not in MODES:
        raise espalier.UsageError(f"{source} is {mode!r}; legal: {', '.join(MODES)}")
    return mode


class Exl3Config(QuantizationConfig):
    """One per engine. vLLM makes it in the front process and sends it to the workers, where it opens the checkpoint."""

    def __init__(self, config: dict[str, Any] | None = None):
        super().__init__()
        config = config or {}
        self.dense_format: str | None = config.get("dense_format")
        if self.dense_format is not None and self.dense_format not in _rules.DENSE_FORMATS:
            raise espalier.UnsupportedError(
                f"quantization_config.dense_format is {self.dense_format!r}; legal: {', '.join(_rules.DENSE_FORMATS)}"
            )
        self.ignored_layers: list[str] = list(config.get("ignored_layers") or [])
        self.model: str | None = None
        self.revision: str | None = None
        self._mappers: list[WeightsMapper] = []
        self._opened: _Opened | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}  # every process opens the checkpoint itself

    # What vLLM asks of every method.

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        dtypes = [torch.bfloat16, torch.float16]
        return [*dtypes, torch.float32] if current_platform.is_cpu() else dtypes

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # where config.json says nothing, the tensors say all

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Exl3Config:
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Takes checkpoints that hold EXL3 experts or matrices whatever their config.json calls them.

        Never against --quantization.
        """
        if user_quant not in (None, METHOD):
            return None
        named = hf_quant_cfg.get("quant_method")
        if named == METHOD:
            return METHOD
        path = getattr(hf_config, "name_or_path", "")
        if not path or not os.path.isdir(path):
            return None
        try:
            checkpoint = espalier.Checkpoint(path)
        except espalier.EspalierError:
            return None  # not ours, so not ours to refuse
        if not checkpoint.layers and not checkpoint.linears:
            return None
        logger.warning(
            "%s: config.json says quant_method %r, tensors are EXL3 (%s): taking %s", path, named, checkpoint.layout,
            METHOD,
        )  # fmt: skip
        return METHOD

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Learns where the checkpoint is. One that cannot be read is refused here, before any worker starts."""
        self.model, self.revision = model_name, revision
        if os.path.isdir(model_name):
            for problem in self._open().checkpoint.problems:
                logger.warning("%s: %s %s: %s", model_name, problem.file, problem.tensor, problem.message)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        self._mappers.append(hf_to_vllm_mapper)
        if self._opened is not None:
            self._opened.rename(hf_to_vllm_mapper)

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """Keeps from vLLM's loader what only ours reads. Called when all layers exist: the time to miss some."""
        self._check_claims()
        return WeightsMapper(orig_to_new_regex={_rules.PAYLOAD: None})

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, prefix)
        if isinstance(layer, LinearBase):
            return self._linear_method(layer, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            return self._embedding_method(layer, prefix)
        return None

    # The checkpoint.

    def _open(self) -> _Opened:
        """Opened on first use. Errors of the core as they are."""
        if self._opened is not None:
            return self._opened
        path = self.model
        if path is None:
            raise espalier.UsageError("quantization method exl3 was given no model directory")
        if not os.path.isdir(path):
            vllm_config = get_current_vllm_config_or_none()
            cache = vllm_config.load_config.download_dir if vllm_config is not None else None
            path = download_weights_from_hf(path, cache, ["*.safetensors", "*.json"], self.revision)
        opened = _Opened(espalier.Checkpoint(path))
        for mapper in self._mappers:
            opened.rename(mapper)
        self._opened = opened
        return opened

    def _check_claims(self) -> None:
        """Every EXL3 matrix of the model's layers belongs to a layer that vLLM built."""
        vllm_config = get_current_vllm_config()
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            return  # other stages hold the rest
        opened = self._open()
        num_layers = vllm_config.model_config.get_total_num_hidden_layers()
        exl3 = [name for name, kind in opened.kinds.items() if kind == METHOD]
        exl3 += [f"{layer.prefix}.{layer.number}" for layer in opened.layers]
        unclaimed = [name for name in exl3 if name not in opened.claimed and not _is_draft(name, num_layers)]
        if unclaimed:
            shown = ", ".join(unclaimed[:4]) + (f" and {len(unclaimed) - 4} more" if len(unclaimed) > 4 else "")
            raise espalier.UnsupportedError(
                f"{opened.path}: no layer of {vllm_config.model_config.architecture} takes the EXL3 tensors of {shown}"
            )

    # Which method runs a layer.

    def _experts_method(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase:
        opened = self._open()
        for position, info in enumerate(opened.layers):
            stored = f"{info.prefix}.{info.number}"
            if any(prefix.startswith(f"{name}.") for name in opened.module_names(stored)):
                opened.claimed.add(stored)
                return Exl3ExpertsMethod(layer, opened, position, prefix, selected_mode())
        if any(name.startswith(f"{prefix}.") for name in opened.names):
            return UnquantizedFusedMoEMethod(layer.moe_config)
        raise espalier.UnsupportedError(
            f"{opened.path} has no routed experts for vLLM's layer {prefix}; it has those of "
            f"{', '.join(f'{info.prefix}.{info.number}' for info in opened.layers) or 'no layer'}"
        )

    def _linear_method(self, layer: LinearBase, prefix: str) -> QuantizeMethodBase:
        opened = self._open()
        try:
            names = _rules.constituents(prefix, self.packed_modules_mapping, opened.names)
        except ValueError as error:
            raise espalier.UnsupportedError(f"{opened.path}: vLLM's layer {prefix}: {error}") from None
        if not names:
            raise espalier.UnsupportedError(f"{opened.path} has no weights for vLLM's layer {prefix}")
        stored = [opened.names[name] for name in names]
        kinds = {opened.kinds[name] for name in stored}
        if len(kinds) > 1:
            each = ", ".join(f"{name} {opened.kinds[name]}" for name in stored)
            raise espalier.UnsupportedError(
                f"{opened.path}: vLLM's layer {prefix} joins matrices that are not stored alike ({each})"
            )
        kind = kinds.pop()
        opened.claimed.update(stored)
        if kind == METHOD:
            if prefix.endswith(".kv_b_proj") and get_current_vllm_config().model_config.use_mla:
                return DecodedLinearMethod(opened, stored, prefix)
            return Exl3LinearMethod(opened, stored, prefix, selected_mode())
        if not isinstance(layer, GateLinear) or kind not in _PLAIN_DTYPES:  # routers are plain, rule or no rule
            self._check_dense_format(opened, prefix, stored, kind)
        if kind == "F8_E4M3":
            return Mxfp8LinearMethod(opened, stored, prefix)
        return UnquantizedLinearMethod()

    def _check_dense_format(self, opened: _Opened, prefix: str, stored: list[str], kind: str) -> None:
        """The file holds a dense layer as the config says it does."""
        plain = [self.dense_format != "mxfp8" or _rules.is_plain(name, self.ignored_layers) for name in stored]
        if any(plain) != all(plain):
            raise espalier.UnsupportedError(
                f"{opened.path}: vLLM's layer {prefix} joins {', '.join(stored)}, of which ignored_layers names some "
                "and not all"
            )
        legal = _PLAIN_DTYPES if plain[0] else ("F8_E4M3",)
        if kind not in legal:
            rule = (
                "ignored_layers" if plain[0] and self.dense_format == "mxfp8" else f"dense_format {self.dense_format!r}"
            )
            raise espalier.FormatError(
                f"{opened.path}: {stored[0]}.weight is {kind}; by the config's {rule} legal is {', '.join(legal)}"
            )

    def _embedding_method(self, layer: VocabParallelEmbedding, prefix: str) -> QuantizeMethodBase | None:
        opened = self._open()
        stored = opened.names.get(prefix)
        if stored is None:
            return None  # tied to one that is stored
        kind = opened.kinds[stored]
        if kind == METHOD and isinstance(layer, ParallelLMHead):
            opened.claimed.add(stored)
            return Exl3LinearMethod(opened, [stored], prefix, selected_mode())
        if kind not in _PLAIN_DTYPES:
            raise espalier.UnsupportedError(
                f"{opened.path}: {stored} is stored as {kind}; legal for {type(layer).__name__} are "
                f"{', '.join(_PLAIN_DTYPES)}" + (" and EXL3" if isinstance(layer, ParallelLMHead) else "")
            )
        return None


def _is_draft(name: str, num_layers: int) -> bool:
    """A layer behind the model's last, which vLLM builds for speculative decoding only."""
    return any(part.isdecimal() and int(part) >= num_layers for part in name.split(".")[:4])


def register() -> None:
    if vllm.__version__.partition("+")[0] not in TESTED_VERSIONS:
        logger.warning_once(
            "espalier.vllm was tested with vLLM %s, this is %s", ", ".join(TESTED_VERSIONS), vllm.__version__
        )
    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(Exl3Config)
