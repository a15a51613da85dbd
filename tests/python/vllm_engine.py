# SPDX-License-Identifier: Apache-2.0
"""Starts vLLM once and asks it what a test wants to know: JSON on stdin, JSON into the file named there.

    {"options": arguments of vllm.LLM, "environment": {...}, "ask": {question: arguments}, "out": path}

A process of its own, because an engine is not fully gone when it is deleted.
"""

import json
import math
import os
import pathlib
import sys

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


QUESTIONS = {"perplexity": perplexity, "greedy": greedy, "logprobs": logprobs}


def main():
    request = json.load(sys.stdin)
    os.environ.update(request.get("environment", {}))
    from vllm import LLM

    llm = LLM(**request["options"])
    answers = {question: QUESTIONS[question](llm, **arguments) for question, arguments in request["ask"].items()}
    pathlib.Path(request["out"]).write_text(json.dumps(answers))
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        # The model ran in other processes. What vLLM's threads in this one do at its end ("terminate called without an
        # active exception", now and then) is no answer.
        os._exit(0)


if __name__ == "__main__":
    main()
