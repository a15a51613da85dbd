# SPDX-License-Identifier: Apache-2.0
"""Small models of every family, with random weights: as EXL3 checkpoints, and the same decoded."""

import json
import re
import shutil

import numpy
import safetensors.torch
import torch
import transformers

import espalier

HIDDEN, WIDE, VOCAB, EXPERTS, TOP_K = 128, 256, 256, 5, 2
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "num_experts_per_tok": TOP_K,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_HEADS = {"head_dim": 32}
_DEEPSEEK = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "q_lora_rank": 128,
    "kv_lora_rank": 96,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
}
# What a config takes beside the common keys; the name is that of the config's class.
FAMILIES = {
    "Qwen3Moe": {**_HEADS, "num_experts": EXPERTS, "moe_intermediate_size": 128, "mlp_only_layers": [0]},
    "Qwen2Moe": {
        "num_experts": EXPERTS,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": WIDE,
        "tie_word_embeddings": True,
    },
    "Mixtral": {**_HEADS, "num_local_experts": EXPERTS},
    "DeepseekV3": _DEEPSEEK,
    "DeepseekV2": {**_DEEPSEEK, "topk_method": "greedy"},
    "Glm4Moe": {
        **_HEADS,
        **{k: _DEEPSEEK[k] for k in ("n_routed_experts", "n_shared_experts", "moe_intermediate_size")},
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "GlmMoeDsa": {
        **_DEEPSEEK,
        "n_group": 1,
        "index_topk": 64,
        "index_n_heads": 4,
        "index_head_dim": 64,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "MiniMaxM2": {**_HEADS, "num_local_experts": EXPERTS, "rotary_dim": 16},
    "MiniMax": {**_HEADS, "num_local_experts": EXPERTS, "layer_types": ["full_attention"] * 3},
    "Olmoe": {"num_experts": EXPERTS},
    "Dots1": {**_HEADS, **{k: v for k, v in _DEEPSEEK.items() if "_" in k and "rank" not in k and "head" not in k}},
    # Experts without gate, relu2.
    "NemotronH": {
        **_HEADS,
        "n_routed_experts": EXPERTS,
        "moe_intermediate_size": 128,
        "moe_shared_expert_intermediate_size": 128,
        "n_group": 1,
        "topk_group": 1,
        "layers_block_type": ["moe", "attention", "moe"],
    },
    "Ernie4_5_Moe": {
        "moe_num_experts": EXPERTS,
        "moe_k": TOP_K,
        "moe_intermediate_size": 128,
        "moe_num_shared_experts": 1,
    },
}


def config(family, **changes):
    return getattr(transformers, f"{family}Config")(**{**_COMMON, **FAMILIES[family], **changes})


def _is_matrix(name, tensor, routed_only, padded):
    if tensor.dim() != 2 or "indexer" in name or (not padded and any(size % 128 for size in tensor.shape)):
        return False
    if re.search(r"\.experts\.\d+\.", name):
        return True
    return not routed_only and re.search(r"(_proj|_mqa|lm_head)\.weight$", name) is not None


def _encoded(name, tensor, random):
    """Random codes: any are legal. Vectors that give the decoded matrix the size of a trained one."""
    out_channels, in_channels = (-(-size // 128) * 128 for size in tensor.shape)
    bits = int(random.integers(2, 7))
    signs = lambda size: random.choice([-1.0, 1.0], size)  # noqa: E731
    suh = signs(in_channels) * random.uniform(0.5, 1.5, in_channels)
    svh = signs(out_channels) * random.uniform(0.5, 1.5, out_channels) * in_channels**-0.5
    codes = random.integers(-32768, 32768, (in_channels // 16, out_channels // 16, 16 * bits)).astype(numpy.int16)
    parts = {
        "trellis": torch.from_numpy(codes),
        "suh": torch.from_numpy(suh).half(),
        "svh": torch.from_numpy(svh).half(),
    }
    if bits % 2:
        parts["mcg"] = torch.tensor(0xCBAC1FED - (1 << 32), dtype=torch.int32)
    stem = name.removesuffix(".weight")
    return {f"{stem}.{part}": value for part, value in parts.items()}


def save(folder, tensors, settings):
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings))


def saved(folder, settings, seed=1):
    """Tensors and config of a random model, as transformers itself names them in a checkpoint of the family."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(settings)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and ("bias" in name or "norm" in name):
            tensor.data += 0.1 * torch.randn_like(tensor)  # neither zero nor one
    model.save_pretrained(folder / "saved")
    stored = safetensors.torch.load_file(folder / "saved" / "model.safetensors")
    stored_settings = json.loads((folder / "saved" / "config.json").read_text())
    shutil.rmtree(folder / "saved")
    return stored, stored_settings


def make(folder, settings, routed_only=False, padded=False, change=lambda tensors: None):
    """Writes folder/exl3 and folder/plain; returns the two.

    routed_only: dense matrices stay plain. padded: matrices of any size, padded to 128. change: of the EXL3 tensors, in
    place.
    """
    random = numpy.random.default_rng(1)
    stored, stored_settings = saved(folder, settings)
    if "lm_head.weight" not in stored and not routed_only:
        stored["lm_head.weight"] = torch.empty(VOCAB, HIDDEN)  # a tied head is stored as a matrix of its own

    exl3, matrices = {}, []
    for name, tensor in stored.items():
        if _is_matrix(name, tensor, routed_only, padded):
            exl3 |= _encoded(name, tensor, random)
            matrices.append(name)
            if f"{name.removesuffix('weight')}bias" in stored:
                stored[f"{name.removesuffix('weight')}bias"] = (
                    stored[f"{name.removesuffix('weight')}bias"].half().float()
                )
        else:
            exl3[name] = tensor
    for name in matrices:
        bias = f"{name.removesuffix('weight')}bias"
        if bias in exl3:
            exl3[bias] = stored[bias].half()
    change(exl3)
    save(folder / "exl3", exl3, {**stored_settings, "quantization_config": {"quant_method": "exl3"}})

    checkpoint = espalier.Checkpoint(folder / "exl3")
    plain = dict(stored)
    for name in matrices:
        if name.removesuffix("weight") + "trellis" in exl3:
            out_channels, in_channels = stored[name].shape
            decoded = torch.from_dlpack(checkpoint.matrix(name.removesuffix(".weight"))).T
            plain[name] = decoded[:out_channels, :in_channels]
    untied = {"tie_word_embeddings": False} if "lm_head.weight" in matrices else {}
    save(folder / "plain", plain, {**stored_settings, **untied})
    return folder / "exl3", folder / "plain"


def _decoded(checkpoint, name):
    """[in, out]; the slices of a rank-sliced matrix side by side on its intermediate axis."""
    slices = checkpoint.layers[0].slices
    names = [name] if slices == 1 else [f"{name}.rank{rank}" for rank in range(slices)]
    parts = [torch.from_dlpack(checkpoint.matrix(part)) for part in names]
    return torch.cat(parts, 0 if name.endswith("down_proj") else 1)


_ROUTED = re.compile(r"\.experts\.\d+\.")


def wrap(exl3, fixture, stored, stored_settings):
    """Writes a model around the experts of a fixture: everything else plain."""
    described = json.loads((fixture / "config.json").read_text())
    dense = {name: tensor for name, tensor in stored.items() if not _ROUTED.search(name)}
    kept = {key: described[key] for key in ("quantization_config", "hybrid_tr3_tail") if key in described}
    shutil.copytree(fixture, exl3, ignore=shutil.ignore_patterns("*.index.json", "model*.safetensors"))
    for file in fixture.glob("model*.safetensors"):
        dense |= safetensors.torch.load_file(file)
    save(exl3, dense, {**stored_settings, **kept})


def around(folder, fixture, settings):
    """A random model around the experts of a fixture. Returns as make()."""
    stored, stored_settings = saved(folder, settings)
    exl3 = folder / "exl3"
    wrap(exl3, fixture, stored, stored_settings)
    checkpoint = espalier.Checkpoint(exl3)
    plain = {}
    for name, tensor in stored.items():
        if _ROUTED.search(name):
            tensor = _decoded(checkpoint, name.removesuffix(".weight")).T
        plain[name] = tensor
    save(folder / "plain", plain, stored_settings)
    return exl3, folder / "plain"
