# SPDX-License-Identifier: Apache-2.0
"""The quantizer that transformers asks while it loads a model.

before the weights   the checkpoint is opened; experts and linear layers that it stores as EXL3 give way to modules of
                     ours, without ever getting memory; everything that can be refused is refused
transformers         loads what is left, and decides which module goes to which device
after the weights    each package is read from the checkpoint straight to the device of its module
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging

import espalier
from espalier.transformers._activation import activation_name
from espalier.transformers._config import METHOD, Exl3Config
from espalier.transformers._modules import Exl3Experts, Exl3Linear
from espalier.transformers._names import Names

logger = logging.get_logger(__name__)

# Tensors of EXL3 matrices, which transformers need not know.
_PARTS = re.compile(r"\.(trellis|(\w+_)?(suh|svh)|su|sv|mcg|mul1)$")
_LOADED = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "BOOL"}  # types whose tensors are what they say
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _list(names: Iterable[str], limit: int = 5) -> str:
    names = sorted(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


@dataclass
class _Place:
    """A module that waits for its package."""

    name: str  # in the model
    module: Exl3Experts | Exl3Linear
    size_bytes: int
    prepare: Callable[[torch.device], espalier.Experts | espalier.Linear]


class Exl3Quantizer(HfQuantizer):
    """Made by from_pretrained(); not for several threads at once."""

    requires_calibration = False

    def __init__(self, quantization_config: Exl3Config, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        # With True, transformers takes renamed plain tensors for parts of a quantized one, and leaves them in their
        # stored type whatever dtype was asked for.
        self.pre_quantized = False
        self.mode = quantization_config.chosen_mode()
        self._model: Any = None
        self._checkpoint: espalier.Checkpoint | None = None
        self._places: list[_Place] = []
        self._sizes: dict[str, int] = {}
        self._shapes: dict[str, torch.Size] = {}

    # What transformers asks about the method.

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        logger.warning("EXL3 packages are not saved; the checkpoint that they were loaded from has everything.")
        return False

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in _DTYPES:
            raise espalier.UnsupportedError(f"dtype {dtype}; legal: {', '.join(map(str, _DTYPES))}")
        return dtype

    def update_tp_plan(self, config: Any) -> Any:
        if getattr(config, "distributed_config", None) is not None:
            raise espalier.UnsupportedError(
                "tensor, expert or data parallel loading of EXL3 checkpoints in transformers (tp_plan, "
                "distributed_config); legal: one process, device_map; espalier.vllm has ranks"
            )
        return config

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes of one element; the one element of our modules stands for their package."""
        return self._sizes.get(param_name, param.element_size())

    # Before the weights.

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> Any:
        checkpoint = self._checkpoint = _open(checkpoint_files)
        self._model = model
        names = Names(model, get_model_conversion_mapping(model))
        tensors = checkpoint.tensors
        ignored = _ignored_by(model)
        left_out = []

        stems = names.numbered(tensors)
        experts = {name: module for name, module in model.named_modules() if _is_experts(module)}
        for position, layer in enumerate(checkpoint.layers):
            stored = f"{layer.prefix}.{layer.number}"
            stem = stems.get(stored)
            here = [name for name in experts if stem is not None and name.startswith(f"{stem}.")]
            if len(here) == 1:
                self._place_experts(here[0], experts[here[0]], position, layer)
            elif stem is None and ignored(f"{stored}.mlp", layer.number):
                left_out.append(stored)
            else:
                raise espalier.UnsupportedError(
                    f"{stored}: EXL3 experts, but {type(model).__name__} has "
                    + (f"{len(here)} modules of experts in {stem}" if stem else "no such layer")
                    + "; legal: one module with the experts interface of transformers 5"
                )
        for linear in checkpoint.linears:
            name = names.module(linear.name)
            if name is not None:
                self._place_linear(name, model.get_submodule(name), linear)
            elif ignored(linear.name):
                left_out.append(linear.name)
            else:
                raise espalier.UnsupportedError(
                    f"{linear.name}: EXL3, but {type(model).__name__} has no linear layer of its own for it"
                )
        if not self._places:
            raise espalier.FormatError(f"{checkpoint.path} has no EXL3 tensors for {type(model).__name__}")
        if left_out:
            logger.info("not part of %s: %s", type(model).__name__, _list(left_out))
        for place in self._places:
            parent, _, last = place.name.rpartition(".")
            setattr(model.get_submodule(parent), last, place.module)
            self._sizes[f"{place.name}.place"] = place.size_bytes
        self._untie(model)
        self._ignore_parts(model)
        return model

    def _place_experts(self, name: str, module: Any, position: int, layer: espalier.Layer) -> None:
        checkpoint, where = self._checkpoint, f"{name} ({type(module).__name__})"
        if module.has_bias:
            raise espalier.UnsupportedError(f"{where}: experts with biases")
        num_experts, second, third = module.down_proj.shape
        hidden, intermediate = (third, second) if module.is_transposed else (second, third)
        found, wanted = (layer.experts, layer.hidden, layer.intermediate), (num_experts, hidden, intermediate)
        if found != wanted or layer.has_gate != module.has_gate:
            raise espalier.GeometryError(
                f"{where}: the checkpoint has (experts, hidden, intermediate) {found}, "
                f"{'a' if layer.has_gate else 'no'} gate; the model {wanted}, {'a' if module.has_gate else 'no'} gate"
            )
        try:
            activation = activation_name(module, checkpoint.config["activation"])
        except espalier.UnsupportedError as error:
            raise espalier.UnsupportedError(f"{name}: {error}") from None

        def prepare(device: torch.device) -> espalier.Experts:
            package = espalier.prepare(checkpoint, position, device=str(device), activation=activation)
            for segment in package.segments:
                if any(matrix is not None and matrix.has_bias for matrix in (segment.gate, segment.up, segment.down)):
                    raise espalier.UnsupportedError(
                        f"{where}: expert {segment.expert} has a bias that the model has not"
                    )
            return package

        size = checkpoint.extents().layers[position].ranks[0].weight_bytes
        self._places.append(_Place(name, Exl3Experts(module.config, num_experts, self.mode), size, prepare))

    def _place_linear(self, name: str, module: Any, linear: espalier.LinearInfo) -> None:
        if type(module) is not torch.nn.Linear:
            raise espalier.UnsupportedError(f"{name}: EXL3, but a {type(module).__name__}; legal: Linear")
        stored, wanted = (linear.in_channels, linear.out_channels), (module.in_features, module.out_features)
        if any(have != -(-want // 128) * 128 for have, want in zip(stored, wanted)):
            raise espalier.GeometryError(f"{name}: the checkpoint has [in, out] {stored}, the model {wanted}")
        if linear.has_bias != (module.bias is not None):
            raise espalier.FormatError(
                f"{name}: the checkpoint has {'a' if linear.has_bias else 'no'} bias, "
                f"the model {'one' if module.bias is not None else 'none'}"
            )
        checkpoint = self._checkpoint

        def prepare(device: torch.device) -> espalier.Linear:
            return espalier.prepare_linear(
                checkpoint, linear.name, model_in=wanted[0], model_out=wanted[1], device=str(device)
            )

        size = stored[0] * stored[1] * linear.bits // 8
        self._places.append(_Place(name, Exl3Linear(*wanted, self.mode), size, prepare))

    def _untie(self, model: Any) -> None:
        """A head that is stored on its own is not the embedding, whatever the config says."""
        ours = {f"{place.name}.weight" for place in self._places}
        tied = model.all_tied_weights_keys
        cut = [key for key, source in tied.items() if key in ours or source in ours]
        for key in cut:
            del tied[key]
        if cut:
            for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
                config.tie_word_embeddings = False

    def _ignore_parts(self, model: Any) -> None:
        """Keeps the tensors that we read ourselves out of transformers' report."""
        patterns = set(model._keys_to_ignore_on_load_unexpected or ()) | {_PARTS.pattern}
        biases = [re.escape(f"{place.name}.bias") for place in self._places if isinstance(place.module, Exl3Linear)]
        if biases:
            patterns.add(f"^({'|'.join(biases)})$")
        model._keys_to_ignore_on_load_unexpected = patterns

    def update_weight_conversions(self, weight_conversions: list[Any]) -> list[Any]:
        """The last word before transformers loads: whatever it does not find it would fill with random numbers."""
        model, checkpoint = self._model, self._checkpoint
        names = Names(model, weight_conversions)
        found = set()
        for stored, info in checkpoint.tensors.items():
            if _PARTS.search(stored):
                continue
            targets, _ = names.targets(stored)
            here = [target for target in targets if target in names.state]
            found.update(here)
            if here and info.dtype not in _LOADED:
                raise espalier.UnsupportedError(
                    f"{stored} is {info.dtype}: quantized in a way that is not EXL3; "
                    f"legal: {', '.join(sorted(_LOADED))}"
                )
        optional = model._keys_to_ignore_on_load_missing or ()
        missing = [
            key
            for key in names.state
            if key not in found
            and key not in model.all_tied_weights_keys
            and not any(re.search(p, key) for p in optional)
        ]
        if missing:
            raise espalier.FormatError(
                f"{checkpoint.path} lacks {len(missing)} tensors of {type(model).__name__}, "
                f"neither plain nor EXL3: {_list(missing)}"
            )
        self._shapes = {key: tensor.shape for key, tensor in names.state.items()}
        return weight_conversions + self.get_weight_conversions()

    # After the weights.

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for key, tensor in model.state_dict().items():
            # transformers leaves out this check where there is a quantizer.
            if tensor.shape != self._shapes[key]:
                raise espalier.GeometryError(f"{key} is {list(tensor.shape)}, the model has {list(self._shapes[key])}")
        for place in logging.tqdm(self._places, desc="Preparing EXL3 packages"):
            device = place.module.place.device
            if device.type not in ("cpu", "cuda"):
                raise espalier.UnsupportedError(f"{place.name} on {device}: offloaded or elsewhere; legal: cpu, cuda")
            if device.type == "cpu" and _has_hook_for_gpu(place.module):
                raise espalier.UnsupportedError(
                    f"{place.name}: in the memory of the host, to be run on a GPU; legal: a device_map that keeps EXL3 "
                    "layers on the device that runs them"
                )
            place.module.install(place.prepare(device))
        model.requires_grad_(False)  # inference only: without it every forward would have to be under no_grad
        self._model, self._checkpoint, self._places, self._shapes = None, None, [], {}
        return model


def _open(checkpoint_files: Any) -> espalier.Checkpoint:
    folders = {os.path.dirname(os.path.abspath(file)) for file in checkpoint_files or ()}
    if len(folders) != 1:
        raise espalier.UsageError(f"an EXL3 checkpoint is the files of one folder, not of {len(folders)}")
    checkpoint = espalier.Checkpoint(folders.pop())
    for problem in checkpoint.problems:
        if problem.severity == "error":
            where = " ".join(filter(None, (problem.file, problem.tensor)))
            raise espalier.FormatError(f"{checkpoint.path}: {where}: {problem.message}")
    return checkpoint


def _is_experts(module: Any) -> bool:
    """Has the experts interface of transformers 5: its decorator wraps forward and sets these."""
    names = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "down_proj", "_apply_gate")
    return hasattr(type(module).forward, "__wrapped__") and all(hasattr(module, name) for name in names)


def _ignored_by(model: Any) -> Callable[[str, int | None], bool]:
    """Tells names of a file that a model leaves out on purpose: draft layers, and the head where it has none."""
    patterns = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    headless = model.get_output_embeddings() is None

    def ignored(stored: str, number: int | None = None) -> bool:
        if number is None and (layer := re.search(r"\blayers\.(\d+)\.", stored)):
            number = int(layer[1])
        behind = number is not None and layers is not None and number >= layers
        return (
            behind
            or any(pattern.search(f"{stored}.weight") for pattern in patterns)
            or (headless and stored.split(".")[-1] in ("lm_head", "head"))
        )

    return ignored


def _has_hook_for_gpu(module: Any) -> bool:
    """accelerate moves the inputs of a module that it offloads to the host."""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return device is not None and torch.device(device).type != "cpu"


def register() -> None:
    """Makes "exl3" known to transformers, once. UsageError: another package did."""
    present = auto.AUTO_QUANTIZER_MAPPING.get(METHOD)
    if present is Exl3Quantizer:
        return
    if present is not None or METHOD in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise espalier.UsageError(f'transformers has a quantizer "{METHOD}" already: {present!r}')
    auto.register_quantization_config(METHOD)(Exl3Config)
    auto.register_quantizer(METHOD)(Exl3Quantizer)
    # Only these may change what config.json says; there is no call that adds one.
    auto.LOADING_ATTRIBUTES_CONFIG_TYPES += (Exl3Config,)
