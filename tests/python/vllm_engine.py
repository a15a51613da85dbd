# SPDX-License-Identifier: Apache-2.0
"""Starts vLLM once and asks it what a test wants to know: JSON on stdin, JSON into the file named there.

    {"options": arguments of vllm.LLM, "gpu": bool, "environment": {...}, "ask": {question: arguments}, "out": path}

A process of its own, because an engine is not fully gone when it is deleted.
"""

import importlib.util
import json
import math
import os
import pathlib
import sys
import types

ROOT = pathlib.Path(__file__).parents[2]
WINDOW = 256


def generate(llm, prompts, **parameters):
    from vllm import SamplingParams

    return llm.generate(prompts, SamplingParams(temperature=0.0, **parameters), use_tqdm=False)


def perplexity(llm, windows=None):
    """Of the held-out text in consecutive windows of 256 tokens with one look-ahead."""
    tokens = llm.get_tokenizer().encode((ROOT / "data" / "heldout.txt").read_text())
    count = min(windows or len(tokens), (len(tokens) - 1) // WINDOW)
    prompts = [{"prompt_token_ids": tokens[w * WINDOW : (w + 1) * WINDOW + 1]} for w in range(count)]
    nats = 0.0
    for output in generate(llm, prompts, max_tokens=1, prompt_logprobs=0):
        scored = zip(output.prompt_token_ids, output.prompt_logprobs)
        nats -= sum(by_token[token].logprob for token, by_token in list(scored)[1:])
    return {"perplexity": math.exp(nats / (count * WINDOW)), "predictions": count * WINDOW}


def greedy(llm, prompt, tokens):
    (output,) = generate(llm, [prompt], max_tokens=tokens)
    return {"text": output.prompt + output.outputs[0].text, "ids": list(output.outputs[0].token_ids)}


def logprobs(llm, ids):
    """Log-probabilities of every token behind every proper prefix of `ids`: [len(ids) - 1][vocabulary]."""
    (output,) = generate(llm, [{"prompt_token_ids": ids}], max_tokens=1, prompt_logprobs=-1)
    return [[row[token].logprob for token in range(len(row))] for row in output.prompt_logprobs[1:]]


WITHOUT_KERNELS = {
    "attention_backend": "TRITON_ATTN",
    "compilation_config": {"custom_ops": ["none"]},
    "ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]},
}

# What vLLM asks its kernels while it is imported.
UNSUPPORTED = ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8", "cutlass_group_gemm_supported")
_libraries = []  # their operators go when they do


def stand_in_for_kernels():
    """A vLLM for GPUs that was built without its compiled kernels (scripts/stage_vllm.py) can import itself, and route.

    Gives the options with which it asks for no other kernel. One with kernels needs nothing and is left alone.
    """
    if importlib.util.find_spec("vllm._C_stable_libtorch") is not None:
        return {}
    import torch

    for name in ("_C_stable_libtorch", "_moe_C_stable_libtorch", "vllm_flash_attn._vllm_fa2_C"):
        sys.modules[f"vllm.{name}"] = types.ModuleType(name)
    routing, graphs = torch.library.Library("_moe_C", "DEF"), torch.library.Library("_C", "DEF")
    routing.define(
        "topk_softmax(Tensor(a!) weights, Tensor(b!) ids, Tensor(c!) places, Tensor logits, bool renormalize, "
        "Tensor? bias, Tensor? is_padding) -> ()"
    )

    def topk_softmax(weights, ids, places, logits, renormalize, bias, is_padding):
        assert bias is None and is_padding is None
        chosen, which = torch.softmax(logits.float(), dim=-1).topk(weights.shape[-1], dim=-1)
        weights.copy_(chosen / chosen.sum(dim=-1, keepdim=True) if renormalize else chosen)
        ids.copy_(which)

    routing.impl("topk_softmax", topk_softmax, "CompositeExplicitAutograd")
    for name in UNSUPPORTED:
        graphs.define(f"{name}(int capability) -> bool")
        graphs.impl(name, lambda capability: False, "CompositeExplicitAutograd")
    # That of vLLM does not keep the memory alive; this does, which only takes more of it.
    graphs.define("weak_ref_tensor(Tensor(a) tensor) -> Tensor(a)")
    graphs.impl("weak_ref_tensor", torch.ops.aten.alias.default, "CompositeExplicitAutograd")
    _libraries.extend((routing, graphs))
    return WITHOUT_KERNELS


QUESTIONS = {"perplexity": perplexity, "greedy": greedy, "logprobs": logprobs}


def main():
    request = json.load(sys.stdin)
    os.environ.update(request.get("environment", {}))
    options = request["options"]
    if request.get("gpu"):
        options |= stand_in_for_kernels()
    from vllm import LLM

    llm = LLM(**options)
    answers = {question: QUESTIONS[question](llm, **arguments) for question, arguments in request["ask"].items()}
    pathlib.Path(request["out"]).write_text(json.dumps(answers))
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        # The model ran in other processes. What vLLM's threads in this one do at its end ("terminate called without an
        # active exception", now and then) is no answer.
        os._exit(0)


if __name__ == "__main__":
    main()
