# SPDX-License-Identifier: Apache-2.0
"""Names and cuts of espalier.vllm, which need neither vLLM nor torch."""

import importlib.util
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def load_rules():
    path = ROOT / "python" / "espalier" / "vllm" / "_rules.py"
    spec = importlib.util.spec_from_file_location("espalier_vllm_rules", path)
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


rules = load_rules()


@pytest.mark.parametrize(
    ("entry", "name", "expected"),
    [
        ("b_proj", "model.layers.0.self_attn.b_proj", True),
        ("b_proj", "model.layers.0.self_attn.kv_b_proj", False),
        ("b_proj", "model.layers.0.self_attn.f_b_proj", False),
        ("self_attn.g_proj", "model.layers.3.self_attn.g_proj", True),
        ("attn.g_proj", "model.layers.3.self_attn.g_proj", False),
        ("vision_tower", "vision_tower.encoder.layers.0.fc1", True),
        ("layers.1", "model.layers.11.mlp.up_proj", False),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
    ],
)
def test_rules_match_whole_path_components(entry, name, expected):
    assert rules.matches(entry, name) is expected


def test_the_head_and_vision_are_plain_without_a_rule():
    assert rules.is_plain("lm_head", [])
    assert rules.is_plain("model.vision_tower.blocks.0.mlp.fc1", [])
    assert rules.is_plain("model.layers.0.self_attn.g_proj", ["g_proj"])
    assert not rules.is_plain("model.layers.0.self_attn.q_proj", ["g_proj"])


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.experts.3.gate_proj.trellis",
        "model.layers.3.mlp.experts.0.up_proj.rank2.suh",
        "model.layers.3.mlp.experts.shared_h.down_proj.rank0.svh",
        "model.layers.2.mlp.experts.r7_shared.gate_up_suh",
        "model.layers.0.self_attn.q_proj.mcg",
        "model.layers.0.mlp.experts.0.gate_proj.su",
        "codes",
        "sign_pattern",
    ],
)
def test_payload_of_every_layout_is_recognised(name):
    assert rules.PAYLOAD.search(name)


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias", "model.norm.weight", "model.codes.weight"],
)
def test_plain_tensors_are_no_payload(name):
    assert not rules.PAYLOAD.search(name)


def test_a_packed_layer_stands_for_its_parts():
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    stored = {"a.q_proj", "a.k_proj", "a.v_proj", "b.qkv_proj", "c.q_proj"}
    assert rules.constituents("a.qkv_proj", packed, stored) == ["a.q_proj", "a.k_proj", "a.v_proj"]
    assert rules.constituents("b.qkv_proj", packed, stored) == ["b.qkv_proj"]
    assert rules.constituents("d.qkv_proj", packed, stored) == []
    with pytest.raises(ValueError, match="has c.q_proj but not c.k_proj, c.v_proj"):
        rules.constituents("c.qkv_proj", packed, stored)


@pytest.mark.parametrize("first_in", range(0, 512, 64))
@pytest.mark.parametrize("first_out", range(0, 512, 64))
def test_parts_are_whole_blocks_that_cover_what_a_rank_owns(first_in, first_out):
    part = rules.cut_part("w", 512, 512, first_in, 64, first_out, 64)
    assert part.first_in % 128 == part.in_channels % 128 == part.first_out % 128 == part.out_channels % 128 == 0
    assert part.first_in + part.pad_left == first_in
    assert part.pad_left + 64 + part.pad_right == part.in_channels == 128
    assert part.first_out + part.skip == first_out
    assert part.skip + part.local <= part.out_channels == 128


def test_a_part_outside_its_matrix_is_refused():
    with pytest.raises(ValueError, match="w is 256 x 128, too small"):
        rules.cut_part("w", 256, 128, 0, 256, 64, 128)


def test_neighbouring_parts_of_one_matrix_become_one():
    sections = [rules.Section(256, 0, 256), rules.Section(64, 0, 64), rules.Section(64, 0, 64)]
    placed = rules.assign(["qkv"], {"qkv": 384}, sections)
    assert [(name, begin) for name, begin, _ in placed] == [("qkv", 0), ("qkv", 256), ("qkv", 320)]
    parts = [rules.cut_part(name, 128, 384, 0, 128, begin + s.first, s.local) for name, begin, s in placed]
    (part,) = rules.merge(parts)
    assert (part.first_out, part.out_channels, part.skip, part.local) == (0, 384, 0, 384)


def test_parts_with_a_gap_stay_apart():
    # Rank 1 of 2: the second halves of q, k and v of one fused matrix.
    sections = [rules.Section(256, 128, 128), rules.Section(128, 64, 64), rules.Section(128, 64, 64)]
    placed = rules.assign(["qkv"], {"qkv": 512}, sections)
    parts = [rules.cut_part(name, 128, 512, 0, 128, begin + s.first, s.local) for name, begin, s in placed]
    merged = rules.merge(parts)
    assert [(p.first_out, p.out_channels, p.skip, p.local) for p in merged] == [
        (128, 128, 0, 128),
        (256, 128, 64, 64),
        (384, 128, 64, 64),
    ]


def test_widths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="has 512 channels, the model 200; legal is 200 or 256"):
        rules.assign(["w"], {"w": 512}, [rules.Section(200, 0, 200)])
    with pytest.raises(ValueError, match="do not fit the stored matrices"):
        rules.assign(["a", "b"], {"a": 128, "b": 128}, [rules.Section(128, 0, 128)] * 3)
