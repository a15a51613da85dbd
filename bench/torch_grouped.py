#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bf16 grouped products of torch on the layer, routes and numbers of tokens of an `espalier bench` run.

    espalier bench --geometry glm-5.2-tp4 --device cuda --json > bench.json
    bench/torch_grouped.py bench.json > grouped.json

Gate and up as one grouped product, the activation, down, the weighted sum: once with the routes sorted
beforehand ("products", what the ratio is taken against) and once with the sorting ("whole"), each as a CUDA
graph with cold weights. JSON on stdout, the table with ratios on stderr. `--table` prints it of files that
are there already, without torch.
"""

import argparse
import json
import math
import statistics
import sys

GAMMA = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
COLD_BYTES = 512 << 20
MAX_REL_L2 = 2e-2  # bf16 operands, outputs and sums of a few hundred to a few thousand terms
CHECKED_TOKENS = 4


class Random:
    """SplitMix64, as cli/random.h has it."""

    def __init__(self, seed):
        self.state = seed & MASK

    def next(self):
        self.state = (self.state + GAMMA) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def uniform(self):
        return (self.next() >> 11) * 2.0**-53

    def below(self, limit):
        return int(self.uniform() * limit)


def draw_routes(seed, tokens, sample, experts, top_k):
    """Ids and weights [tokens][top_k] of a timed sample (1, 2, ...) of `espalier bench`; 0 is its gate."""
    random = Random((seed * GAMMA + tokens) * 0xBF58476D1CE4E5B9 + sample)
    deck = list(range(experts))
    ids, weights = [], []
    for _ in range(tokens):
        for j in range(top_k):
            pick = j + random.below(experts - j)
            deck[j], deck[pick] = deck[pick], deck[j]
        ids.append(deck[:top_k])
        drawn = [0.05 + random.uniform() for _ in range(top_k)]
        total = math.fsum(drawn)
        weights.append([value / total for value in drawn])
    return ids, weights


def activate(torch, text, gate, up):
    name, _, parameters = text.partition(":")
    if name == "silu" and not parameters:
        return torch.nn.functional.silu(gate) * up
    if name == "gelu" and not parameters:
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    if name == "situ":
        beta, linear_beta = parameters.split(",")
        beta = float(beta)
        if linear_beta != "none":
            up = float(linear_beta) * torch.tanh(up / float(linear_beta))
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up
    sys.exit(f"torch_grouped.py: activation {text} is not here; legal: silu, gelu, situ:BETA,LINEAR_BETA")


def find_grouped_mm(torch):
    public = getattr(torch.nn.functional, "grouped_mm", None)
    function = public or getattr(torch, "_grouped_mm", None)
    if function is None:
        sys.exit(f"torch_grouped.py: torch {torch.__version__} has no grouped_mm")
    return function


class Layer:
    """Random weights about 1/sqrt(in), and the arrays of one number of tokens."""

    def __init__(self, torch, package, top_k):
        self.torch = torch
        self.package = package
        self.top_k = top_k
        self.grouped_mm = find_grouped_mm(torch)
        experts, hidden = package["experts"], package["hidden_channels"]
        intermediate = package["intermediate_channels"]
        torch.manual_seed(1)

        def matrices(out_channels, in_channels):
            shape = (experts, out_channels, in_channels)
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(in_channels**-0.5)

        self.gate_up = matrices(2 * intermediate, hidden)
        self.down = matrices(hidden, intermediate)
        self.cold = torch.ones(COLD_BYTES // 4, device="cuda", dtype=torch.int32)
        self.ids_of_experts = torch.arange(experts, device="cuda")

    def prepare(self, tokens):
        torch = self.torch
        hidden = self.package["hidden_channels"]
        self.tokens = tokens
        self.x = torch.randn((tokens, hidden), device="cuda", dtype=torch.bfloat16)
        self.ids = torch.zeros((tokens, self.top_k), device="cuda", dtype=torch.int64)
        self.weights = torch.zeros((tokens, self.top_k), device="cuda", dtype=torch.bfloat16)
        routes = tokens * self.top_k
        self.token_of = torch.zeros(routes, device="cuda", dtype=torch.int64)
        self.place_of = torch.zeros(routes, device="cuda", dtype=torch.int64)
        self.ends = torch.zeros(self.package["experts"], device="cuda", dtype=torch.int32)
        self.set_routes(*self.draw(0))
        self.graphs = {"products": self.capture(self.products), "whole": self.capture(self.whole)}

    def draw(self, sample):
        ids, weights = draw_routes(self.package["seed"], self.tokens, sample, self.package["experts"], self.top_k)
        return self.torch.tensor(ids), self.torch.tensor(weights)

    def set_routes(self, ids, weights):
        self.ids.copy_(ids)
        self.weights.copy_(weights)
        self.sort()

    def sort(self):
        torch = self.torch
        flat = self.ids.view(-1)
        sorted_ids, order = torch.sort(flat, stable=True)
        self.token_of.copy_(order // self.top_k)
        self.place_of.scatter_(0, order, torch.arange(flat.numel(), device="cuda"))
        self.ends.copy_(torch.searchsorted(sorted_ids, self.ids_of_experts, right=True))

    def products(self):
        torch = self.torch
        rows = self.x[self.token_of]
        both = self.grouped_mm(rows, self.gate_up.transpose(-2, -1), offs=self.ends)
        gate, up = both.chunk(2, dim=-1)
        middle = activate(torch, self.package["activation"], gate, up)
        outputs = self.grouped_mm(middle.contiguous(), self.down.transpose(-2, -1), offs=self.ends)
        outputs = outputs[self.place_of].view(self.tokens, self.top_k, -1)
        return torch.einsum("tkh,tk->th", outputs, self.weights)

    def whole(self):
        self.sort()
        return self.products()

    def capture(self, function):
        torch = self.torch
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                function()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = function()
        return graph, output

    def rel_l2(self):
        """Of some tokens of the captured output against plain products in fp32."""
        torch = self.torch
        graph, output = self.graphs["whole"]
        graph.replay()
        worst_error = worst_norm = 0.0
        for token in range(0, self.tokens, max(1, self.tokens // CHECKED_TOKENS)):
            x = self.x[token].float()
            expected = torch.zeros_like(x)
            for expert, weight in zip(self.ids[token].tolist(), self.weights[token].tolist()):
                gate, up = (self.gate_up[expert].float() @ x).chunk(2)
                middle = activate(torch, self.package["activation"], gate, up)
                expected += weight * (self.down[expert].float() @ middle)
            worst_error += (output[token].float() - expected).square().sum().item()
            worst_norm += expected.square().sum().item()
        return math.sqrt(worst_error / worst_norm)

    def time_us(self, form):
        torch = self.torch
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.cold.sum()
        start.record()
        self.graphs[form][0].replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3

    def close(self):
        self.graphs = {}


def measure(bench, samples):
    import torch  # pylint: disable=import-outside-toplevel

    if not torch.cuda.is_available():
        sys.exit("torch_grouped.py: torch finds no GPU")
    rows = bench["results"]
    package = dict(bench["package"], seed=bench["provenance"]["seed"])
    layer = Layer(torch, package, rows[0]["top_k"])
    results = []
    for row in rows:
        layer.prepare(row["tokens"])
        rel_l2 = layer.rel_l2()
        result = {"tokens": row["tokens"], "rel_l2": rel_l2, "gate_passed": rel_l2 <= MAX_REL_L2}
        times = {"products": [], "whole": []}
        for sample in range(1, (samples if result["gate_passed"] else 0) + 1):
            layer.set_routes(*layer.draw(sample))
            for form, taken in times.items():
                taken.append(layer.time_us(form))
        layer.close()
        result["median_us"] = statistics.median(times["products"]) if times["products"] else None
        result["whole_median_us"] = statistics.median(times["whole"]) if times["whole"] else None
        result["samples_us"] = times["products"]
        result["whole_samples_us"] = times["whole"]
        results.append(result)
    return {
        "schema": "espalier.torch-grouped/1",
        "provenance": {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "bench": bench["provenance"],
        },
        "geometry": rows[0]["geometry"],
        "results": results,
    }


def number(value, digits):
    return "-" if value is None else f"{value:.{digits}f}"


def table(bench, grouped):
    """One line a number of tokens: ours, our tiers one by one, torch's, and how many times ours they take."""
    by_tokens = {row["tokens"]: row for row in grouped["results"]} if grouped else {}
    first = bench["results"][0]
    tiers = " + ".join(f"{count} x K{rate}" for rate, count in first["tiers"].items())
    lines = [
        f"{first['geometry']}, {tiers}, {first['codebook']}, {first['executor']}",
        f"{'tokens':>7} {'rel_l2':>9} {'us':>10} {'read':>7} {'matrix':>7} {'serial':>10} {'ratio':>6} "
        f"{'grouped':>10} {'ratio':>6} {'sorted in':>10}",
    ]
    for row in bench["results"]:
        if not row["gate_passed"]:
            lines.append(f"{row['tokens']:>7} {row['rel_l2']:>9.2g}  gate failed: {row['failure']}")
            continue
        peer = by_tokens.get(row["tokens"], {})
        ours, grouped_us = row["median_us"], peer.get("median_us")
        lines.append(
            f"{row['tokens']:>7} {row['rel_l2']:>9.2g} {ours:>10.1f} {row['share_of_read']:>6.1%} "
            f"{row['share_of_matrix']:>6.1%} {number(row['serial_median_us'], 1):>10} "
            f"{number(row['serial_ratio'], 2):>6} {number(grouped_us, 1):>10} "
            f"{number(grouped_us / ours if grouped_us else None, 2):>6} {number(peer.get('whole_median_us'), 1):>10}"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", help="what espalier bench --json printed")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--table", metavar="GROUPED", nargs="?", const="", help="print the table and measure nothing")
    arguments = parser.parse_args()
    with open(arguments.bench, encoding="utf-8") as file:
        bench = json.load(file)
    if not bench.get("results"):
        sys.exit(f"torch_grouped.py: {arguments.bench}: no results of espalier bench")
    if arguments.table is not None:
        grouped = None
        if arguments.table:
            with open(arguments.table, encoding="utf-8") as file:
                grouped = json.load(file)
        print(table(bench, grouped))
        return 0
    grouped = measure(bench, arguments.samples)
    json.dump(grouped, sys.stdout, indent=2)
    print()
    print(table(bench, grouped), file=sys.stderr)
    return 0 if all(row["gate_passed"] for row in grouped["results"]) else 1


if __name__ == "__main__":
    sys.exit(main())
