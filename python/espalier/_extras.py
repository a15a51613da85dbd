# SPDX-License-Identifier: Apache-2.0
"""Modules that are not always there."""

import importlib
from types import ModuleType


def need(module: str, extra: str) -> ModuleType:
    """Imports `module`, or raises ImportError with one sentence that says which extra brings it.

    A module that is there and fails inside keeps its own error.
    """
    package = module.split(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != package:
            raise
        raise ImportError(
            f"{package} is not installed; pip install 'espalier[{extra}]' brings it", name=package
        ) from None
