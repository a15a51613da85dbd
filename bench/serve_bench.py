#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What users get from an engine: tokens a second at 1, 4 and 8 requests, time to the first token, perplexity.

    VENV/bin/python bench/serve_bench.py > serve.json                        the bundled model in `vllm serve`
    VENV/bin/python bench/serve_bench.py --engine transformers --mode exact  the same in transformers, in this process
    VENV/bin/python bench/serve_bench.py --vllm-arguments "--enforce-eager --dtype float32"

The perplexity comes first: a bundled model that gives another than it should is not timed. All requests of a round
start at once, each with another part of the text as its prompt; a round that is not timed comes first. For vLLM a
server of its own runs on a free port of 127.0.0.1, streams, and is stopped in any case; in transformers a round is one
batch. JSON with all raw samples on stdout, the table on stderr.
"""

import argparse
import concurrent.futures
import contextlib
import json
import math
import os
import pathlib
import platform
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import PackageNotFoundError, version

ROOT = pathlib.Path(__file__).parents[1]
WINDOW = 256  # tokens, as everywhere in this project
START_SECONDS = 600
BUNDLED = ROOT / "data" / "tiny-qwen3moe-exl3-mixed"
BUNDLED_PERPLEXITY, PERPLEXITY_BOUND = 38.11, 0.05
BUNDLED_PREDICTIONS = 77 * WINDOW


class Vllm:
    """`vllm serve`, spoken to as any client would."""

    name = "vllm"
    packages = ("vllm", "torch", "espalier")

    def __init__(self, options):
        self.model, self.arguments = options.model, shlex.split(options.vllm_arguments)
        if options.mode:
            # Inherited by the server.
            os.environ["ESPALIER_MODE"] = options.mode

    def __enter__(self):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [pathlib.Path(sys.executable).with_name("vllm"), "serve", str(self.model), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--served-model-name", "model", *self.arguments]
        self.command = shlex.join(str(word) for word in command)
        self.server = subprocess.Popen(command, stdout=sys.stderr, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for how in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.server.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.server.wait(timeout=20)

    def _wait(self):
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.server.poll() is not None:
                sys.exit(f"serve_bench: the server ended with {self.server.returncode}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.5)
        sys.exit(f"serve_bench: the server is not ready after {START_SECONDS} s")

    def _post(self, path, **body):
        request = urllib.request.Request(
            f"{self.url}/{path}", json.dumps({"model": "model", **body}).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=START_SECONDS)

    def tokenize(self, text):
        with self._post("tokenize", prompt=text) as answer:
            return json.load(answer)["tokens"]

    def generate(self, prompts, tokens):
        """Continues prompts of token ids, all at once, by exactly so many tokens. Seconds to the first of each."""
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self._generate, prompts, [tokens] * len(prompts)))

    def _generate(self, prompt, tokens):
        options = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        begin, first = time.perf_counter(), None
        with self._post("v1/completions", prompt=prompt, **options) as answer:
            for line in answer:
                if first is None and line.startswith(b"data: {"):
                    first = time.perf_counter() - begin
        return first

    def nats(self, windows):
        """The sum of -log p over all tokens of the windows but the first of each."""
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            return sum(pool.map(self._nats, windows))

    def _nats(self, window):
        with self._post("v1/completions", prompt=window, max_tokens=1, temperature=0, prompt_logprobs=0) as answer:
            scored = json.load(answer)["choices"][0]["prompt_logprobs"]
        return -sum(row[str(token)]["logprob"] for token, row in list(zip(window, scored))[1:])


class Transformers:
    """`generate()` of a model in this process."""

    name = "transformers"
    packages = ("transformers", "torch", "espalier")

    def __init__(self, options):
        import torch
        import transformers

        from espalier.transformers import Exl3Config

        transformers.utils.logging.disable_progress_bar()
        self.torch = torch
        self.command = shlex.join(sys.argv)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, dtype=options.dtype, quantization_config=Exl3Config(mode=options.mode)
        ).to(options.device)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def tokenize(self, text):
        return self.tokenizer(text).input_ids

    def generate(self, prompts, tokens):
        ids = self.torch.tensor(prompts, device=self.model.device)
        begin, first = time.perf_counter(), []

        def note(seen, _scores, **_options):
            """Asked after every token whether to stop."""
            if not first:
                seen[:, -1].tolist()  # is there
                first.append(time.perf_counter() - begin)
            return self.torch.zeros(len(seen), dtype=self.torch.bool, device=seen.device)

        options = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False, "stopping_criteria": [note]}
        answer = self.model.generate(ids, attention_mask=self.torch.ones_like(ids), **options).tolist()
        assert all(len(row) == len(prompt) + tokens for row, prompt in zip(answer, prompts))
        return first * len(prompts)

    def nats(self, windows):
        total = 0.0
        for window in windows:
            ids = self.torch.tensor([window], device=self.model.device)
            with self.torch.no_grad():
                logits = self.model(ids).logits[0, :-1].double()
            total -= self.torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None]).sum().item()
        return total


ENGINES = {engine.name: engine for engine in (Vllm, Transformers)}


def measure(engine, text, requests, options):
    """`requests` at once, as often as asked for."""
    span = options.prompt_tokens
    prompts = [text[i * span : (i + 1) * span] for i in range(requests * (options.samples + 1))]
    samples, firsts = [], []
    for sample in range(options.samples + 1):
        batch = prompts[sample * requests : (sample + 1) * requests]
        begin = time.perf_counter()
        done = engine.generate(batch, options.tokens)
        seconds = time.perf_counter() - begin
        if sample > 0:
            samples.append(requests * options.tokens / seconds)
            firsts += done
    row = {
        "requests": requests,
        "prompt_tokens": span,
        "tokens": options.tokens,
        "tokens_per_second": statistics.median(samples),
        "tokens_per_second_samples": samples,
        "first_token_seconds": statistics.median(firsts),
        "first_token_seconds_samples": firsts,
    }
    print(
        f"{engine.name:<12} {requests:>8} {row['tokens_per_second']:>10.1f} {row['first_token_seconds'] * 1e3:>12.1f}",
        file=sys.stderr,
    )
    return row


def perplexity(engine, text, windows):
    count = min(windows, (len(text) - 1) // WINDOW)
    nats = engine.nats([text[w * WINDOW : (w + 1) * WINDOW + 1] for w in range(count)])
    value = math.exp(nats / (count * WINDOW))
    print(f"{engine.name:<12} perplexity {value:.3f} over {count * WINDOW} predictions", file=sys.stderr)
    return {"perplexity": value, "predictions": count * WINDOW}


def versions(packages):
    found = {}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def processor():
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(": ")[2]
    return platform.machine()


def commit():
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--model", type=pathlib.Path, default=BUNDLED)
    parser.add_argument("--text", type=pathlib.Path, default=ROOT / "data" / "heldout.txt")
    parser.add_argument("--requests", default="1,4,8", help="how many at once")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128, help="to generate for each request")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--windows", type=int, default=65536, help="measure the perplexity of no more, 0 = none")
    parser.add_argument("--mode", choices=("exact", "fast", "int8"), help="of the CPU")
    parser.add_argument("--dtype", default="auto", help="of the model in transformers; vLLM has --vllm-arguments")
    parser.add_argument("--device", default="cpu", help="of the model in transformers")
    parser.add_argument("--vllm-arguments", default="--kv-cache-memory-bytes 1073741824", help="for vllm serve")
    options = parser.parse_args()
    with ENGINES[options.engine](options) as engine:
        text = engine.tokenize(options.text.read_text())
        found = perplexity(engine, text, options.windows) if options.windows else None
        if found and options.model == BUNDLED and found["predictions"] == BUNDLED_PREDICTIONS:
            if abs(found["perplexity"] - BUNDLED_PERPLEXITY) > PERPLEXITY_BOUND:
                sys.exit(f"serve_bench: the perplexity should be {BUNDLED_PERPLEXITY}; nothing is timed")
        print(f"{'engine':<12} {'requests':>8} {'tokens/s':>10} {'first ms':>12}", file=sys.stderr)
        rows = [measure(engine, text, int(requests), options) for requests in options.requests.split(",")]
        report = {
            "schema": "espalier.serve_bench/1",
            "provenance": {
                "command": engine.command,
                "environment": {"ESPALIER_MODE": os.environ.get("ESPALIER_MODE")},
                "commit": commit(),
                "processor": processor(),
                "cores": len(os.sched_getaffinity(0)),
                "versions": versions(engine.packages),
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
            "results": [{"engine": engine.name, **row} for row in rows],
        }
        if found:
            report["perplexity"] = {"engine": engine.name, **found}
    json.dump(report, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
