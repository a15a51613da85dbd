# SPDX-License-Identifier: Apache-2.0
"""bench/moe_bench.py: one row for every combination, checked before it is timed."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BINARY = os.environ.get("ESPALIER_BINARY", str(ROOT / "build" / "espalier"))


def run(*arguments):
    command = [sys.executable, str(ROOT / "bench" / "moe_bench.py"), "--binary", BINARY, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_gives_a_row_for_every_combination():
    done = run(
        *("--geometries", "qwen3-30b-a3b", "--tiers", "qwen3-30b-a3b=3:96,4:32", "glm-5.2-tp4-64e=3:64"),
        *("--codebooks", "mul1,mcg", "--modes", "fast,int8", "--tokens", "1,2", "--threads", "1", "--samples", "1"),
    )
    assert done.returncode == 0, done.stderr
    rows = [row for report in json.loads(done.stdout) for row in report["results"]]
    found = [(row["codebook"], row["mode"], row["tokens"]) for row in rows]
    # int8 is a mode of its own for mul1 alone.
    assert found == [(codebook, mode, tokens) for codebook, mode in (("mul1", "fast"), ("mul1", "int8"), ("mcg", "fast"))
                     for tokens in (1, 2)]  # fmt: skip
    assert all(row["gate_passed"] and row["tiers"] == {"3": 96, "4": 32} for row in rows)
    assert all(len(row["samples_us"]) == 1 for row in rows)
    assert done.stderr.count("qwen3-30b-a3b    mul1") == 4


def test_passes_on_what_the_program_refuses():
    done = run("--geometries", "gpt-5", "--tiers", "", "--codebooks", "mcg", "--modes", "fast", "--tokens", "1")
    assert done.returncode == 2
    assert "legal: glm-5.2-tp4" in done.stderr
