#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""fp16 products of torch (cuBLAS) on the shapes and numbers of tokens of a `cuda_linear_bench` run.

    build/bench/cuda_linear_bench mcg cuda > linears.log
    bench/torch_linear.py linears.log

The alternative to a linear of many rows: its matrix decoded to fp16, then a dense product. For each line of the
log with as many tokens as --min-tokens or more, the time of torch's product alone as a CUDA graph with cold
weights, and how many times ours decoding and that product take together. The rotations of inputs and outputs,
which such a product would need too, are in our time and not in its.
"""

import argparse
import re
import statistics
import sys

COLD_BYTES = 512 << 20
# linear, tokens and error or "decode", then us, the fastest and the slowest sample
LINE = re.compile(r"(\d+)x(\d+) K(\d)\s+(?:decode|(\d+)\s+\S+)\s+(\d+\.\d+)\s+\d+\.\d+\s+\d+\.\d+\s")


def read_log(path):
    """[((in, out, bits), tokens, us)] and {(in, out, bits): us of decoding}."""
    linears, decoding = [], {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            match = LINE.match(line)
            if not match:
                continue
            shape = tuple(int(number) for number in match.groups()[:3])
            if match[4] is None:
                decoding[shape] = float(match[5])
            else:
                linears.append((shape, int(match[4]), float(match[5])))
    return linears, decoding


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


def product_us(torch, cold, shape, tokens, samples):
    in_channels, out_channels, _ = shape
    torch.manual_seed(1)
    weights = torch.randn((out_channels, in_channels), device="cuda", dtype=torch.float16)
    x = torch.randn((tokens, in_channels), device="cuda", dtype=torch.float16)
    y = torch.empty((tokens, out_channels), device="cuda", dtype=torch.float16)
    graph = capture(torch, lambda: torch.mm(x, weights.t(), out=y))
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(samples):
        cold.sum()
        # The inputs are warm, as in cuda_linear_bench.
        x.mul_(1)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", help="what cuda_linear_bench printed")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--min-tokens", type=int, default=144)
    arguments = parser.parse_args()
    linears, decoding = read_log(arguments.log)
    if not linears or not decoding:
        sys.exit(f"torch_linear.py: {arguments.log}: no lines of linears and of decoding")
    import torch  # pylint: disable=import-outside-toplevel

    if not torch.cuda.is_available():
        sys.exit("torch_linear.py: torch finds no GPU")
    cold = torch.ones(COLD_BYTES // 4, device="cuda", dtype=torch.int32)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, fp16, median of {arguments.samples}, us")
    print(f"{'linear':<16} {'tokens':>6} {'ours':>9} {'decode':>9} {'cuBLAS':>9} {'TFLOP/s':>8} {'ratio':>6}")
    for shape, tokens, ours in linears:
        if tokens < arguments.min_tokens:
            continue
        product = product_us(torch, cold, shape, tokens, arguments.samples)
        in_channels, out_channels, bits = shape
        tflops = 2e-6 * tokens * in_channels * out_channels / product
        print(
            f"{f'{in_channels}x{out_channels} K{bits}':<16} {tokens:>6} {ours:>9.2f} {decoding[shape]:>9.2f} "
            f"{product:>9.2f} {tflops:>8.0f} {(decoding[shape] + product) / ours:>6.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
