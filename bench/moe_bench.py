#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""MoE layers on the CPU: `espalier bench` for every geometry, codebook, tiers, mode and number of threads.

    bench/moe_bench.py --binary build/release/espalier > moe.json
    bench/moe_bench.py --binary build/release/espalier --geometries glm-5.2-tp4-64e --codebooks mul1 --modes fast,int8

Every row is compared with the reference before it is timed; rows that fail are shown, not timed, and make the
exit code 1. The limits are measured anew by every run of the program, beside the rows that are told as shares
of them. JSON with all raw samples on stdout, the table on stderr. Takes no packages but Python's own.
"""

import argparse
import json
import statistics
import subprocess
import sys

HEAD = (
    f"{'geometry':<16} {'codebook':<8} {'tiers':<13} {'mode':<5} {'thr':>3} {'M':>5} {'rel_l2':>9} {'ms':>9} "
    f"{'spread':>7} {'Gw/s':>6} {'GB/s':>6} {'read':>6} {'matrix':>7} {'serial':>6}"
)


def run_bench(options, geometry, codebook, tiers, mode, threads):
    command = [options.binary, "bench", "--geometry", geometry, "--codebook", codebook, "--mode", mode]
    command += ["--tokens", options.tokens, "--threads", str(threads), "--json"]
    command += ["--tiers", tiers] if tiers else []
    command += ["--samples", str(options.samples)] if options.samples else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # 1: a row failed its gate, which its row says.
    if done.returncode not in (0, 1):
        print(f"moe_bench: {' '.join(command)}: exit code {done.returncode}\n{done.stderr}", file=sys.stderr)
        sys.exit(done.returncode)
    return json.loads(done.stdout)


def print_row(report, row, threads):
    tiers = ",".join(f"{bits}:{count}" for bits, count in row["tiers"].items())
    line = f"{row['geometry']:<16} {row['codebook']:<8} {tiers:<13} {row['mode']:<5} {threads:>3} {row['tokens']:>5} "
    if not row["gate_passed"]:
        print(f"{line}FAILED: {row['failure']}", file=sys.stderr)
        return
    seconds = row["median_us"] * 1e-6
    samples = row["samples_us"]
    spread = (max(samples) - min(samples)) / row["median_us"]
    serial = f"{row['serial_ratio']:6.2f}" if row["serial_ratio"] else f"{'-':>6}"
    print(
        f"{line}{row['rel_l2']:9.2g} {seconds * 1e3:9.3f} {spread:7.0%} {row['weights_touched'] / seconds / 1e9:6.1f} "
        f"{row['packed_bytes'] / seconds / 1e9:6.1f} {row['share_of_read']:6.0%} {row['share_of_matrix']:7.0%} {serial}",
        file=sys.stderr,
        flush=True,
    )


def print_provenance(report):
    provenance, limits = report["provenance"], report["limits"]
    print(
        f"{provenance['command']}\n  {provenance['device']}, commit {provenance['commit']}, {provenance['time']}; "
        f"read {limits['read_gb_s']:.1f} GB/s, matrix {limits['matrix_tflop_s']:.3g} TFLOP/s ({limits['matrix']})",
        file=sys.stderr,
    )


def tiers_of(text, geometry):
    """'qwen3-30b-a3b=3:96,4:32' applies to that geometry only, '' is the geometry's own."""
    name, _, tiers = text.rpartition("=")
    return tiers if name in ("", geometry) else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--binary", default="build/release/espalier", help="the espalier program")
    parser.add_argument("--geometries", default="qwen3-30b-a3b,glm-5.2-tp4-64e")
    parser.add_argument("--codebooks", default="mul1,mcg,3inst")
    parser.add_argument(
        "--tiers",
        nargs="*",
        default=["qwen3-30b-a3b=3:128", "qwen3-30b-a3b=4:128", "qwen3-30b-a3b=3:96,4:32", "glm-5.2-tp4-64e=3:64"],
        help="GEOMETRY=K:EXPERTS,..., as many as wanted",
    )
    parser.add_argument("--modes", default="fast,int8,exact")
    parser.add_argument("--tokens", default="1,4,16,64,512")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, 0 for all")
    parser.add_argument("--samples", type=int, help="timed runs a row; as many as take a second by default")
    options = parser.parse_args()

    reports = []
    failed = False
    for geometry in options.geometries.split(","):
        for tiers in filter(lambda t: t is not None, (tiers_of(text, geometry) for text in options.tiers)):
            for codebook in options.codebooks.split(","):
                for mode in options.modes.split(","):
                    if mode == "int8" and codebook != "mul1":
                        continue  # runs as fast does
                    for threads in map(int, options.threads.split(",")):
                        report = run_bench(options, geometry, codebook, tiers, mode, threads)
                        print_provenance(report)
                        print(HEAD, file=sys.stderr)
                        for row in report["results"]:
                            print_row(report, row, report["provenance"]["threads"])
                        failed = failed or not report["ok"]
                        reports.append(report)
    rates = [report["limits"]["read_gb_s"] for report in reports]
    if rates:
        print(f"read rates: median {statistics.median(rates):.1f} GB/s of {len(rates)} runs", file=sys.stderr)
    json.dump(reports, sys.stdout, indent=1)
    print()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
