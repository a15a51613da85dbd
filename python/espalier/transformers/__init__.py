# SPDX-License-Identifier: Apache-2.0
"""EXL3 checkpoints in Hugging Face transformers.

    import espalier.transformers
    model = AutoModelForCausalLM.from_pretrained("model")

Importing it registers the quantization method "exl3". Routed experts and dense EXL3 matrices are run by Espalier,
everything else is loaded and run by transformers. What cannot be run is refused by name while the model is loaded.
"""

from __future__ import annotations

from espalier._extras import need

need("torch", "transformers")
need("transformers", "transformers")

from espalier.transformers._config import Exl3Config  # noqa: E402
from espalier.transformers._modules import Exl3Experts, Exl3Linear  # noqa: E402
from espalier.transformers._quantizer import Exl3Quantizer, register  # noqa: E402

register()

__all__ = ["Exl3Config", "Exl3Experts", "Exl3Linear", "Exl3Quantizer"]
