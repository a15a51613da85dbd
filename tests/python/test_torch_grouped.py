# SPDX-License-Identifier: Apache-2.0
"""The part of bench/torch_grouped.py that needs no GPU: its routes are those of `espalier bench`."""

import importlib.util
import json
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("ESPALIER_BINARY", str(ROOT / "build" / "espalier"))
CHECKPOINT = ROOT / "data" / "tiny-qwen3moe-exl3-mixed"
# Of the layer: which experts have 4 bits, from its config.
EXPERT_WEIGHTS = 3 * 256 * 512

spec = importlib.util.spec_from_file_location("torch_grouped", ROOT / "bench" / "torch_grouped.py")
torch_grouped = importlib.util.module_from_spec(spec)
spec.loader.exec_module(torch_grouped)


def bench(*arguments):
    done = subprocess.run(
        [BINARY, "bench", str(CHECKPOINT), "--layer", "2", "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("seed", [1, 12345678901234567890])
def test_routes_are_those_that_were_timed(seed):
    samples = 3
    code, document = bench("--tokens", "1,2,5", "--samples", str(samples), "--seed", str(seed))
    assert code == 0
    config = json.loads((CHECKPOINT / "config.json").read_text())
    wide = set(config["quantization_config"]["experts_at_4_bits_per_layer"]["2"])
    for row in document["results"]:
        touched = []
        for sample in range(1, samples + 1):
            ids, weights = torch_grouped.draw_routes(seed, row["tokens"], sample, 16, row["top_k"])
            assert all(len(set(of_token)) == row["top_k"] for of_token in ids)
            assert all(abs(sum(of_token) - 1) < 1e-12 and min(of_token) > 0 for of_token in weights)
            touched.append({expert for of_token in ids for expert in of_token})
        assert row["experts_touched"] == pytest.approx(sum(map(len, touched)) / samples)
        bits = sum(4 if expert in wide else 3 for experts in touched for expert in experts)
        assert row["packed_bytes"] == pytest.approx(bits * EXPERT_WEIGHTS / 8 / samples, abs=0.5)


def test_table_has_ratios_and_failures():
    _, document = bench("--tokens", "1,4", "--samples", "1")
    grouped = {"results": [{"tokens": 4, "median_us": 3 * document["results"][1]["median_us"], "whole_median_us": 7.0}]}
    lines = torch_grouped.table(document, grouped).splitlines()
    assert len(lines) == 4
    assert lines[2].split()[-3:] == ["-", "-", "-"]
    assert lines[3].split()[-2:] == ["3.00", "7.0"]
    code, document = bench("--tokens", "1", "--samples", "1", "--max-rel-l2", "0")
    assert code == 1
    assert "gate failed: rel_l2" in torch_grouped.table(document, None)
