# SPDX-License-Identifier: Apache-2.0
"""What the tests of the Python package share."""

import json
import os
import pathlib

import numpy
import pytest

import espalier

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("ESPALIER_BINARY", str(ROOT / "build" / "espalier"))
TINY = ROOT / "data" / "tiny-qwen3moe-exl3-mixed"
FIXTURES = ROOT / "tests" / "data" / "fixtures"
# Containers with rank-table codebooks: refused by name.
REFUSED = {"v1-coupled", "v1-lut-fp16"}


def needs_gpu(torch):
    """Skips a test where torch sees no GPU; with ESPALIER_REQUIRE_GPU there has to be one, and the test fails."""
    skip = not torch.cuda.is_available() and not os.environ.get("ESPALIER_REQUIRE_GPU")
    return pytest.mark.skipif(skip, reason="no GPU")


def fixture_list(key):
    return json.loads((FIXTURES / "fixtures.json").read_text())[key]


class Tokens:
    """x, topk_ids and topk_weights of a safetensors file, as arrays of the library."""

    def __init__(self, path):
        file = espalier.Checkpoint(path)
        self.x = file.read("x")
        self.ids = file.read("topk_ids")
        self.weights = file.read("topk_weights")

    def plan(self, experts, **options):
        return espalier.plan(
            experts, max_tokens=self.x.shape[0], top_k=self.ids.shape[1], ids=self.ids.dtype, input=self.x.dtype, **options
        )

    def run(self, experts, **options):
        return numpy.asarray(espalier.run(self.plan(experts, **options), experts, self.x, self.ids, self.weights))


def rel_l2(expected, found):
    """Over the positions where not both are NaN; both 0 gives 0."""
    expected, found = numpy.asarray(expected, numpy.float64), numpy.asarray(found, numpy.float64)
    both = numpy.isnan(expected) & numpy.isnan(found)
    expected, found = expected[~both], found[~both]
    norm = numpy.linalg.norm(expected)
    difference = numpy.linalg.norm(expected - found)
    return difference / norm if norm else (0.0 if difference == 0 else float("inf"))


def random_tokens(num_tokens, hidden, experts, top_k, seed=1):
    random = numpy.random.default_rng(seed)
    x = random.standard_normal((num_tokens, hidden)).astype(numpy.float32)
    ids = random.integers(0, experts, (num_tokens, top_k)).astype(numpy.int32)
    weights = random.random((num_tokens, top_k)).astype(numpy.float32)
    return x, ids, weights
