#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""fp16 products of torch (cuBLAS) on the shapes and numbers of tokens of a `cuda_linear_bench` run.

    build/bench/cuda_linear_bench mcg cuda > linears.log
    bench/torch_linear.py linears.log

The alternative to a linear of many rows: its matrix decoded to fp16, then a dense product. For each number of
tokens of the log, --min-tokens or more, two ratios of times, above 1 where ours is faster:

  products  decode + cuBLAS to ours. What y needs beside them is in ours only.
  whole     prepare + cuBLAS + output to ours, all that it takes to have the same y from the same x: the rotation of
            inputs (suh, H128) and the matrix, both by our kernels in one graph ("prepare" of the log), and H128, svh
            and the fp32 store of outputs, by our kernel over sums that are still in the caches.

Each of these is a graph of its own. Of every one but the first the time of a graph of one kernel over one value is
taken, as a single graph could hold them all; no gap between kernels is added, so the alternative looks no slower
than it is. `output` reads fp32 sums, where cuBLAS here writes fp16; it would be shorter by up to half, and y less exact,
for a product whose sums were rounded.
"""

import argparse
import re
import statistics
import sys

COLD_BYTES = 512 << 20
# linear, tokens, class of kernels or step, error or "-", us; in parentheses: the class that was not chosen
LINE = re.compile(r"(\d+)x(\d+) K(\d)\s+(\d+)\s+([a-z]+)\s+\S+\s+(\d+\.\d+)\s")
STEPS = ("rotate", "decode", "prepare", "output")


def read_log(path):
    """{((in, out, bits), tokens): {"class": name, "ours": us, step: us}}, in the order of the log."""
    calls = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            if not (match := LINE.match(line)):
                continue
            shape = tuple(int(number) for number in match.groups()[:3])
            call = calls.setdefault((shape, int(match[4])), {})
            if match[5] in STEPS:
                call[match[5]] = float(match[6])
            else:
                call["class"], call["ours"] = match[5], float(match[6])
    return calls


def capture(torch, function):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def time_us(torch, cold, place, function, samples):
    """The median of a graph of `function` with everything cold but what `place` touches."""
    graph = capture(torch, function)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(samples):
        cold.sum()
        place()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times)


def launch_us(torch, cold, samples):
    one = torch.zeros(1, device="cuda")
    return time_us(torch, cold, lambda: one.add_(1), lambda: one.add_(1), samples)


def product_us(torch, cold, shape, tokens, samples):
    in_channels, out_channels, _ = shape
    torch.manual_seed(1)
    weights = torch.randn((out_channels, in_channels), device="cuda", dtype=torch.float16)
    x = torch.randn((tokens, in_channels), device="cuda", dtype=torch.float16)
    y = torch.empty((tokens, out_channels), device="cuda", dtype=torch.float16)
    # The inputs are warm, as in cuda_linear_bench.
    return time_us(torch, cold, lambda: x.mul_(1), lambda: torch.mm(x, weights.t(), out=y), samples)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", help="what cuda_linear_bench printed")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--min-tokens", type=int, default=144)
    arguments = parser.parse_args()
    calls = {
        key: call
        for key, call in read_log(arguments.log).items()
        if key[1] >= arguments.min_tokens and "ours" in call and all(step in call for step in STEPS)
    }
    if not calls:
        sys.exit(f"torch_linear.py: {arguments.log}: no lines of linears with their steps")
    import torch  # pylint: disable=import-outside-toplevel

    if not torch.cuda.is_available():
        sys.exit("torch_linear.py: torch finds no GPU")
    cold = torch.ones(COLD_BYTES // 4, device="cuda", dtype=torch.int32)
    launch = launch_us(torch, cold, arguments.samples)
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name()}, fp16, median of {arguments.samples}, us; "
        f"a launch {launch:.2f}"
    )
    print("products: decode + cuBLAS - a launch; whole: prepare + cuBLAS + output - two launches; both as ratios to ours")
    print(
        f"{'linear':<16} {'tokens':>6} {'class':>6} {'ours':>9} {'rotate':>8} {'decode':>8} {'prepare':>8} {'output':>8} "
        f"{'cuBLAS':>8} {'TFLOP/s':>8} {'products':>9} {'whole':>6}"
    )
    for (shape, tokens), call in calls.items():
        product = product_us(torch, cold, shape, tokens, arguments.samples)
        in_channels, out_channels, bits = shape
        tflops = 2e-6 * tokens * in_channels * out_channels / product
        products = (call["decode"] + product - launch) / call["ours"]
        whole = (call["prepare"] + product + call["output"] - 2 * launch) / call["ours"]
        steps = " ".join(f"{call[step]:>8.2f}" for step in STEPS)
        print(
            f"{f'{in_channels}x{out_channels} K{bits}':<16} {tokens:>6} {call['class']:>6} {call['ours']:>9.2f} {steps} "
            f"{product:>8.2f} {tflops:>8.0f} {products:>9.2f} {whole:>6.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
