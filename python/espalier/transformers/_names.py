# SPDX-License-Identifier: Apache-2.0
"""Where transformers puts the tensors of a checkpoint."""

from __future__ import annotations

import re
from typing import Any

from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

_NUMBERED = re.compile(r"(.+?\.\d+)\.")


class Names:
    """The names that a model has for those of a file, by transformers' own rules."""

    def __init__(self, model: Any, transforms: list[Any]):
        """transforms: what transformers does to names and tensors of this model while it loads."""
        self.state = model.state_dict()
        self._prefix = model.base_model_prefix
        self._renamings = [rule for rule in transforms if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in transforms if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}

    def targets(self, stored: str) -> tuple[list[str], bool]:
        """The names in the model that a tensor of the file is part of, and whether it is joined with others or cut."""
        key, pattern = rename_source_key(stored, self._renamings, self._converters, self._prefix, self.state)
        if key not in self.state and stored in self.state:
            key, pattern = rename_source_key(stored, [], [], self._prefix, self.state)
        if pattern is None:
            return [key], False
        first, *others = self._by_pattern[pattern].target_patterns
        return [key, *(key.replace(first, other) for other in others)], True

    def module(self, stored: str) -> str | None:
        """The model's name of the layer whose weight a matrix of the file is; None: it has none of its own."""
        (key, *_), joined = self.targets(f"{stored}.weight")
        return None if joined or key not in self.state else key.removesuffix(".weight")

    def numbered(self, stored_names: Any) -> dict[str, str]:
        """Layers with a number: the file's name of each that has a tensor in the model, and the model's name."""
        found: dict[str, str] = {}
        for stored in stored_names:
            head = _NUMBERED.match(stored)
            if head is None or head[1] in found or not stored.endswith(".weight"):
                continue
            (key, *_), joined = self.targets(stored)
            here = _NUMBERED.match(key)
            if not joined and key in self.state and here is not None:
                found[head[1]] = here[1]
        return found
