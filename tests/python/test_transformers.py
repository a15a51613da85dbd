# SPDX-License-Identifier: Apache-2.0
"""espalier.transformers: the bundled model, every family against plain transformers with the decoded weights, refusals.

ESPALIER_TINY_LM names the program tiny_lm. The same file runs on a machine with a GPU.
"""

import copy
import json
import math
import os
import re
import subprocess
import sys

import pytest
from package_support import FIXTURES, ROOT, TINY, needs_gpu

import espalier

torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)
transformers = pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)
import safetensors.torch  # noqa: E402
import transformers_checkpoints as checkpoints  # noqa: E402

import espalier.transformers  # noqa: E402
from espalier.transformers import Exl3Config, Exl3Experts, Exl3Linear  # noqa: E402

on_a_gpu = needs_gpu(torch)
DEVICES = ["cpu", pytest.param("cuda", marks=on_a_gpu)]
WINDOW = 256
GOLDEN = ROOT / "tests" / "data" / "golden" / "model_golden.safetensors"
TINY_LM = os.environ.get("ESPALIER_TINY_LM", "")

transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _no_choice_of_the_caller(monkeypatch):
    monkeypatch.delenv("ESPALIER_MODE", raising=False)


def load(path, mode="exact", dtype=torch.float32, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, quantization_config=Exl3Config(mode=mode), **options
    )


def load_plain(path, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def some_ids(rows=2, columns=17, seed=5):
    return torch.randint(3, checkpoints.VOCAB, (rows, columns), generator=torch.Generator().manual_seed(seed))


def rel_l2(expected, found):
    expected, found = expected.double().cpu(), found.double().cpu()
    return ((expected - found).norm() / expected.norm()).item()


def logits(model, ids):
    with torch.no_grad():
        return model(ids.to(model.device)).logits


@pytest.fixture(scope="module")
def tiny():
    return load(TINY)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoints of a family, written once."""
    found = {}

    def make(family, **changes):
        key = (family, *sorted(changes))
        if key not in found:
            found[key] = checkpoints.make(tmp_path_factory.mktemp(family), checkpoints.config(family, **changes))
        return found[key]

    return make


# The bundled model.


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_one_sentence_says_what_is_missing(missing):
    program = f"import espalier, sys\nsys.modules[{missing!r}] = None\n"  # to Python: not installed
    program += "try:\n  import espalier.transformers\nexcept ImportError as error:\n  print(error)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == f"{missing} is not installed; pip install 'espalier[transformers]' brings it\n"


def perplexity(model, text):
    ids = transformers.AutoTokenizer.from_pretrained(TINY)(text, return_tensors="pt").input_ids[0]
    windows = ids[: (len(ids) - 1) // WINDOW * WINDOW].view(-1, WINDOW)
    following = ids[1 : windows.numel() + 1].view(-1, WINDOW)
    nats = 0.0
    for some, wanted in zip(windows.split(11), following.split(11)):
        chances = torch.log_softmax(logits(model, some).double().cpu(), -1)
        nats -= chances.gather(-1, wanted[..., None]).sum().item()
    return math.exp(nats / windows.numel()), windows.numel()


@pytest.mark.parametrize(
    "mode, device", [("exact", "cpu"), ("fast", "cpu"), ("int8", "cpu"), pytest.param("fast", "cuda", marks=on_a_gpu)]
)
def test_perplexity_is_that_of_the_reference(mode, device):
    value, predictions = perplexity(load(TINY, mode).to(device), (ROOT / "data" / "heldout.txt").read_text())
    assert predictions == 77 * WINDOW
    assert abs(value - 38.11) <= 0.05, value


@pytest.mark.parametrize("device", DEVICES)
def test_logits_are_those_of_the_reference(device):
    golden = safetensors.torch.load_file(GOLDEN)
    found = logits(load(TINY).to(device), golden["prompt_ids"][None])[0]
    assert rel_l2(golden["logits_fp32ref_mixed"], found) <= 2e-3


@pytest.mark.skipif(not TINY_LM, reason="ESPALIER_TINY_LM does not name the program tiny_lm")
def test_greedy_text_is_that_of_the_example_program(tiny):
    done = subprocess.run(
        [TINY_LM, TINY, "--tokens", "32", "--prompt", "Mr. Darcy"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    prompt = tokenizer("Mr. Darcy", return_tensors="pt")
    answer = tiny.generate(**prompt, max_new_tokens=32, do_sample=False)[0]
    assert len(answer) == prompt.input_ids.shape[1] + 32
    assert done.stdout.split("\n", 1)[1] == tokenizer.decode(answer) + "\n"


def test_everything_quantized_is_ours_and_stays_out_of_the_state(tiny):
    checkpoint = espalier.Checkpoint(TINY)
    kinds = [type(module) for module in tiny.modules()]
    assert kinds.count(Exl3Experts) == len(checkpoint.layers) == 4
    assert kinds.count(Exl3Linear) == len(checkpoint.linears) == 17
    assert torch.nn.Linear not in kinds
    assert set(tiny.state_dict()) == {name for name in checkpoint.tensors if name.endswith(".weight")}
    assert not any(tensor.is_meta for tensor in [*tiny.parameters(), *tiny.buffers()])


def test_the_documented_example():
    text = (ROOT / "docs" / "transformers.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == text.split("```text\n")[1].split("```")[0]


def test_the_benchmark_measures():
    arguments = ["--engine", "transformers", "--requests", "1,2", "--samples", "1", "--tokens", "8", "--windows", "4"]
    done = subprocess.run(
        [sys.executable, ROOT / "bench" / "serve_bench.py", *arguments, "--mode", "exact"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert [row["requests"] for row in report["results"]] == [1, 2]
    for row in report["results"]:
        assert row["tokens_per_second"] > 0 and 0 < row["first_token_seconds"] < 300
    assert report["perplexity"]["predictions"] == 1024
    assert report["perplexity"]["perplexity"] == pytest.approx(28.67, abs=0.3)  # of the first 4 windows


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_is_eager(device):
    torch._dynamo.reset()
    model = load(TINY).to(device).model
    compiled = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
    for columns in (5, 9, 40):
        ids = some_ids(2, columns).to(device)
        with torch.no_grad():
            expected = model(ids, use_cache=False).last_hidden_state
            found = compiled(ids, use_cache=False).last_hidden_state
        # On a GPU torch itself decomposes some of its operators into others that round elsewhere; ours keep their bits
        # (test_torch.py).
        if device == "cpu":
            assert torch.equal(found, expected)
        else:
            assert rel_l2(expected, found) <= 3e-3


@on_a_gpu
@pytest.mark.parametrize("cache", [None, "static"])  # with the second, transformers compiles the model into graphs
def test_a_gpu_writes_the_text_of_the_cpu(tiny, cache):
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    model = load(TINY, device_map="cuda")
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"cuda"}
    prompt = transformers.AutoTokenizer.from_pretrained(TINY)("Mr. Darcy", return_tensors="pt")
    options = {"max_new_tokens": 32, "do_sample": False}
    expected = tiny.generate(**prompt, **options)
    found = model.generate(**prompt.to("cuda"), **options, cache_implementation=cache)
    assert torch.equal(found.cpu(), expected)


@on_a_gpu
def test_exl3_layers_stay_on_the_gpu_when_the_plain_ones_of_a_layer_wait_on_the_host(tiny):
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    places = {name: "cuda" for name in ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")}
    places |= {f"model.layers.{layer}": "cpu" if layer == 1 else "cuda" for layer in range(4)}
    model = load(TINY, device_map=places)
    assert model.model.layers[1].input_layernorm.weight.device.type == "meta"  # accelerate has it
    packages = [module.package.device for module in model.modules() if isinstance(module, Exl3Experts | Exl3Linear)]
    assert len(packages) == 21 and set(packages) == {"cuda:0"}
    expected = logits(tiny, some_ids())
    rows = (logits(model, some_ids()).cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert rows.median() <= 3e-3


def test_a_copy_runs_when_the_original_is_gone():
    original = load(TINY)
    expected = logits(original, some_ids())
    twin = copy.deepcopy(original)
    del original
    assert torch.equal(logits(twin, some_ids()), expected)


# Families.


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_a_family_computes_what_transformers_computes_with_the_decoded_weights(made, family):
    exl3, plain = made(family)
    ids = some_ids()
    expected = logits(load_plain(plain), ids)
    model = load(exl3)
    assert rel_l2(expected, logits(model, ids)) <= 1e-5
    matrices = {type(module) for module in model.modules()}
    assert Exl3Experts in matrices and Exl3Linear in matrices
    # A token whose two best experts are near each other may take another route: the median row has none of that.
    rows = (logits(load(exl3, "fast"), ids) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert rows.median() <= 2e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])  # Mixtral's tensors are renamed
def test_other_dtypes(made, family, dtype):
    exl3, plain = made(family)
    model = load(exl3, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    expected, found = logits(load_plain(plain), some_ids()), logits(model, some_ids())
    assert found.dtype == dtype
    rows = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert rows.median() <= (5e-2 if dtype == torch.bfloat16 else 1e-2)


@on_a_gpu
def test_a_gpu_computes_what_the_cpu_does(made):
    for family in ("Qwen3Moe", "DeepseekV3", "Mixtral"):
        exl3, _ = made(family)
        model = load(exl3)
        expected = logits(model, some_ids())
        rows = (logits(model.to("cuda"), some_ids()).cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert rows.median() <= 3e-3
        assert torch.equal(logits(model.to("cpu"), some_ids()), expected)


def test_padded_matrices(tmp_path):
    settings = checkpoints.config("Qwen3Moe", hidden_size=192, moe_intermediate_size=96, intermediate_size=320)
    exl3, plain = checkpoints.make(tmp_path, settings, padded=True)
    assert rel_l2(logits(load_plain(plain), some_ids()), logits(load(exl3), some_ids())) <= 1e-5


def test_only_routed_experts(tmp_path):
    exl3, plain = checkpoints.make(tmp_path, checkpoints.config("Glm4Moe"), routed_only=True)
    model = load(exl3)
    assert Exl3Linear not in {type(module) for module in model.modules()}
    assert rel_l2(logits(load_plain(plain), some_ids()), logits(model, some_ids())) <= 1e-5


@pytest.mark.parametrize("kind", ["AutoModel", "AutoModelForSequenceClassification"])
def test_a_model_without_the_head(made, kind):
    exl3, plain = made("Qwen3Moe")
    automatic = getattr(transformers, kind)
    if kind == "AutoModelForSequenceClassification":
        with pytest.raises(
            espalier.FormatError, match="lacks 1 tensors of Qwen3MoeForSequenceClassification.*: score.weight"
        ):
            automatic.from_pretrained(exl3)
        return
    model = automatic.from_pretrained(exl3, dtype=torch.float32, quantization_config=Exl3Config(mode="exact"))
    expected = automatic.from_pretrained(plain, dtype=torch.float32)
    with torch.no_grad():
        ids = some_ids()
        assert rel_l2(expected(ids).last_hidden_state, model(ids).last_hidden_state) <= 1e-5


LAYOUTS = {
    "rs-per-expert": {"n_routed_experts": 4, "num_hidden_layers": 5, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 2},
    "rs-shared-h": {"n_routed_experts": 4, "num_hidden_layers": 4, "mlp_layer_types": ["dense"] * 3 + ["sparse"]},
    "rs-r7": {"n_routed_experts": 3, "num_hidden_layers": 4, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_with_plain_dense_layers(tmp_path, layout):
    settings = checkpoints.config("GlmMoeDsa", moe_intermediate_size=512, **LAYOUTS[layout])
    exl3, plain = checkpoints.around(tmp_path, FIXTURES / layout, settings)
    expected = logits(load_plain(plain), some_ids())
    assert rel_l2(expected, logits(load(exl3), some_ids())) <= 1e-5


CONTAINERS = {
    "v1-k3": {"moe_intermediate_size": 768},
    "v1-k2-per-expert": {"moe_intermediate_size": 512, "num_hidden_layers": 2},
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_container_with_plain_dense_layers(tmp_path, container):
    settings = checkpoints.config("Qwen3Moe", num_experts=3, **CONTAINERS[container])
    exl3, plain = checkpoints.around(tmp_path, FIXTURES / container, settings)
    expected = logits(load_plain(plain), some_ids())
    assert rel_l2(expected, logits(load(exl3), some_ids())) <= 1e-5


def test_draft_layers_are_left_out(tmp_path):
    def add(tensors):
        for name in list(tensors):
            if "layers.2." in name:
                tensors[name.replace("layers.2.", "layers.3.")] = tensors[name].clone()

    exl3, plain = checkpoints.make(tmp_path, checkpoints.config("DeepseekV3"), change=add)
    assert rel_l2(logits(load_plain(plain), some_ids()), logits(load(exl3), some_ids())) <= 1e-5


# Which method is chosen.


def test_the_callers_mode_wins_over_the_environments_which_wins_over_the_default(made, monkeypatch):
    exl3, _ = made("Qwen3Moe")

    def mode(**options):
        model = transformers.AutoModelForCausalLM.from_pretrained(exl3, **options)
        return {module.mode for module in model.modules() if isinstance(module, Exl3Experts | Exl3Linear)}

    assert mode() == {"fast"}
    monkeypatch.setenv("ESPALIER_MODE", "exact")
    assert mode() == {"exact"}
    assert mode(quantization_config=Exl3Config(mode="int8")) == {"int8"}
    monkeypatch.setenv("ESPALIER_MODE", "quick")
    with pytest.raises(espalier.UsageError, match="ESPALIER_MODE is 'quick'; legal: exact, fast, int8"):
        mode()
    with pytest.raises(espalier.UsageError, match="mode is 'quick'; legal: exact, fast, int8"):
        Exl3Config(mode="quick")


def test_a_config_that_does_not_say_exl3(tmp_path):
    exl3, plain = checkpoints.make(tmp_path, checkpoints.config("Olmoe"))
    settings = json.loads((exl3 / "config.json").read_text())
    del settings["quantization_config"]
    (exl3 / "config.json").write_text(json.dumps(settings))
    assert rel_l2(logits(load_plain(plain), some_ids()), logits(load(exl3), some_ids())) <= 1e-5


def test_another_method_is_refused_by_transformers_itself(made):
    with pytest.raises(ValueError, match="quantized with Exl3Config but you are passing a TorchAoConfig"):
        transformers.AutoModelForCausalLM.from_pretrained(made("Qwen3Moe")[0], quantization_config=torchao())


def torchao():
    config = transformers.TorchAoConfig.__new__(transformers.TorchAoConfig)  # without the package torchao
    config.quant_method = "torchao"
    return config


def test_a_plain_checkpoint_is_no_exl3_checkpoint(made):
    with pytest.raises(espalier.FormatError, match="has no EXL3 tensors"):
        load(made("Qwen3Moe")[1])
    assert "Qwen3MoeExperts" in {type(module).__name__ for module in load_plain(made("Qwen3Moe")[1]).modules()}


# Refusals.


def refuse(tmp_path, error, text, family="Qwen3Moe", change=lambda tensors: None, options=None, **changes):
    exl3, _ = checkpoints.make(tmp_path, checkpoints.config(family, **changes), change=change)
    with pytest.raises(error, match=text):
        load(exl3, **(options or {}))


def test_a_missing_tensor_is_refused_by_name(tmp_path):
    def drop(tensors):
        del tensors["model.layers.1.self_attn.q_norm.weight"]

    refuse(
        tmp_path, espalier.FormatError, r"lacks 1 tensors .*: model\.layers\.1\.self_attn\.q_norm\.weight", change=drop
    )


def test_a_matrix_that_is_neither_plain_nor_exl3_is_refused_by_name(tmp_path):
    def drop(tensors):
        for part in ("trellis", "suh", "svh", "mcg"):
            tensors.pop(f"model.layers.2.self_attn.o_proj.{part}", None)

    text = r"neither plain nor EXL3: model\.layers\.2\.self_attn\.o_proj\.weight"
    refuse(tmp_path, espalier.FormatError, text, change=drop)


def test_other_quantized_tensors_are_refused_by_name(tmp_path):
    def cast(tensors):
        name = "model.layers.1.mlp.gate.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    text = r"model\.layers\.1\.mlp\.gate\.weight is F8_E4M3: quantized in a way that is not EXL3"
    refuse(tmp_path, espalier.UnsupportedError, text, change=cast)


def test_a_matrix_without_a_place_is_refused_by_name(tmp_path):
    def add(tensors):
        for part in ("trellis", "suh", "svh", "mcg"):
            if f"lm_head.{part}" in tensors:
                tensors[f"model.layers.0.self_attn.r_proj.{part}"] = tensors[f"lm_head.{part}"].clone()

    text = r"model\.layers\.0\.self_attn\.r_proj: EXL3, but Qwen3MoeForCausalLM has no linear layer"
    refuse(tmp_path, espalier.UnsupportedError, text, change=add)


def test_a_plain_tensor_of_another_shape_is_refused_by_name(tmp_path):
    def cut(tensors):
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)

    text = r"q_norm\.weight is \[16\], the model has \[32\]"
    refuse(tmp_path, espalier.GeometryError, text, change=cut)


def test_sizes_that_differ_are_refused_by_name(made, tmp_path):
    exl3, _ = made("Qwen3Moe")
    text = re.escape(
        "model.layers.1.mlp.experts (Qwen3MoeExperts): the checkpoint has (experts, hidden, intermediate) (5, 128, 128)"
    )
    with pytest.raises(espalier.GeometryError, match=text):
        load(exl3, config=checkpoints.config("Qwen3Moe", num_experts=7, quantization_config={"quant_method": "exl3"}))
    with pytest.raises(
        espalier.GeometryError, match=r"lm_head: the checkpoint has \[in, out\] \(128, 256\), the model \(128, 512\)"
    ):
        load(exl3, config=checkpoints.config("Qwen3Moe", vocab_size=512, quantization_config={"quant_method": "exl3"}))


def test_an_activation_that_is_not_ours_is_refused_by_name(made):
    exl3, _ = made("Olmoe")
    settings = checkpoints.config("Olmoe", hidden_act="quick_gelu", quantization_config={"quant_method": "exl3"})
    with pytest.raises(
        espalier.UnsupportedError, match=r"mlp\.experts: the activation of OlmoeExperts \(QuickGELU.*legal: silu"
    ):
        load(exl3, config=settings)


def test_a_bias_is_refused_where_the_model_has_none(tmp_path):
    def add(tensors):
        tensors["model.layers.1.mlp.experts.3.up_proj.bias"] = torch.zeros(128).half()
        tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(128).half()

    refuse(tmp_path, espalier.FormatError, r"q_proj: the checkpoint has a bias, the model none", change=add)

    def add_to_an_expert(tensors):
        tensors["model.layers.1.mlp.experts.3.up_proj.bias"] = torch.zeros(128).half()

    text = "expert 3 has a bias that the model has not"
    refuse(tmp_path / "expert", espalier.UnsupportedError, text, change=add_to_an_expert)


@pytest.mark.parametrize("container", ["v1-coupled", "v1-lut-fp16"])
def test_containers_that_are_not_executed_are_refused_by_name(tmp_path, container):
    stored, settings = checkpoints.saved(tmp_path, checkpoints.config("Qwen3Moe", num_experts=3))
    checkpoints.wrap(tmp_path / "exl3", FIXTURES / container, stored, settings)
    with pytest.raises(espalier.UnsupportedError, match="codebook: 'lut_.*' is not executed yet"):
        load(tmp_path / "exl3")


def test_experts_with_biases_are_refused_by_name(tmp_path):
    exl3, _ = checkpoints.make(tmp_path, checkpoints.config("Olmoe", intermediate_size=128))
    settings = json.loads((exl3 / "config.json").read_text())
    settings |= {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 5,
        "head_dim": 32,
    }
    (exl3 / "config.json").write_text(json.dumps(settings))
    with pytest.raises(espalier.UnsupportedError, match=r"mlp\.experts \(GptOssExperts\): experts with biases"):
        load(exl3)


def test_what_is_not_inference_is_refused(made, tmp_path):
    exl3, _ = made("Qwen3Moe")
    model = load(exl3)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model(some_ids())  # needs no no_grad()
    embedded = model.get_input_embeddings()(some_ids()).requires_grad_()
    with pytest.raises(espalier.UnsupportedError, match="no gradients"):
        model(inputs_embeds=embedded)
    with pytest.raises(ValueError, match="exl3 and is not serializable"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(espalier.UnsupportedError, match="dtype torch.float64; legal: torch.float32"):
        load(exl3, dtype=torch.float64)
    with pytest.raises(espalier.UsageError, match="Exl3Experts cannot be pickled"):
        torch.save(model.model.layers[1].mlp.experts, tmp_path / "experts.pt")
    with pytest.raises(espalier.UsageError, match="cannot be put on meta"):
        model.to("meta")


def test_several_processes_are_refused_by_name(made):
    settings = transformers.AutoConfig.from_pretrained(made("Qwen3Moe")[0])
    settings.distributed_config = {"tp_size": 2}  # what from_pretrained(tp_plan=...) sets before it asks
    with pytest.raises(espalier.UnsupportedError, match="tensor, expert or data parallel loading"):
        load(made("Qwen3Moe")[0], config=settings)
