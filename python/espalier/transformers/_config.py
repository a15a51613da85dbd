# SPDX-License-Identifier: Apache-2.0
"""What from_pretrained() can be told about an EXL3 checkpoint."""

from __future__ import annotations

import os
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

import espalier

METHOD = "exl3"
MODES = ("exact", "fast", "int8")


class Exl3Config(QuantizationConfigMixin):
    """`from_pretrained(path, quantization_config=Exl3Config(mode="exact"))`.

    mode: in which numbers the CPU takes products: "exact" (fp32), "fast" (16 bits), "int8". None = the environment
        variable ESPALIER_MODE, else "fast". A GPU has one mode.
    stored: what the checkpoint's config.json says; kept, and not used: the tensors say what they are.

    UsageError: another mode.
    """

    def __init__(self, mode: str | None = None, **stored: Any):
        self.quant_method = METHOD
        _check(mode, "mode")
        self.mode = mode
        stored.pop("quant_method", None)
        for key, value in stored.items():
            setattr(self, key, value)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any):
        # A converter may have a "mode" of its own.
        stored = dict(config_dict)
        if stored.get("mode") not in (None, *MODES):
            stored.pop("mode")
        return super().from_dict(stored, return_unused_kwargs, **kwargs)

    def get_loading_attributes(self) -> dict[str, Any]:
        """What the caller's object overrides in the checkpoint's."""
        return {"mode": self.mode}

    def chosen_mode(self) -> str:
        """UsageError for an environment variable that is none."""
        environment = os.environ.get("ESPALIER_MODE") or None
        _check(environment, "ESPALIER_MODE")
        return self.mode or environment or "fast"


def _check(mode: str | None, what: str) -> None:
    if mode not in (None, *MODES):
        raise espalier.UsageError(f"{what} is {mode!r}; legal: {', '.join(MODES)}")
