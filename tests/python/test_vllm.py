# SPDX-License-Identifier: Apache-2.0
"""espalier.vllm in stock vLLM on the CPU: the bundled checkpoint, refusals, and a served request.

ESPALIER_TEST_VLLM=0 leaves these tests out, =all adds the long ones (two ranks, containers, compiled graphs).
ESPALIER_TINY_LM names the program tiny_lm.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import urllib.request

import numpy
import pytest

ROOT = pathlib.Path(__file__).parents[2]
CHECKPOINT = ROOT / "data" / "tiny-qwen3moe-exl3-mixed"
FIXTURES = ROOT / "tests" / "data" / "fixtures"
CHOICE = os.environ.get("ESPALIER_TEST_VLLM", "")
# vLLM reads its own settings from files of the user and counts uses; neither is a test's business.
CLEAN = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
SECONDS = 300  # for a program that is stuck


def test_without_vllm_one_sentence_says_what_is_missing():
    program = "import espalier, sys\nsys.modules['vllm'] = None\n"  # to Python: not installed
    program += "try:\n  import espalier.vllm\nexcept ImportError as error:\n  print(error)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS)
    assert done.stderr == "" and done.returncode == 0
    assert re.fullmatch(r"espalier\.vllm needs vLLM, which is not installed: pip install vllm .*\n", done.stdout)


needs_vllm = pytest.mark.skipif(
    CHOICE == "0" or importlib.util.find_spec("vllm") is None,
    reason="ESPALIER_TEST_VLLM=0"
    if CHOICE == "0"
    else "vLLM is not installed: scripts/vllm_environment.sh VENV does that",
)
long_running = pytest.mark.skipif(CHOICE != "all", reason="takes minutes: ESPALIER_TEST_VLLM=all runs it")


@pytest.fixture(scope="session")
def ask(tmp_path_factory):
    """Starts an engine and returns its answers; see vllm_engine.py. Fails with the end of its output."""

    def start(questions, environment=None, gpu=False, **options):
        out = tmp_path_factory.mktemp("engine") / "answers.json"
        cache = tmp_path_factory.mktemp("cache")
        request = {
            "options": {
                "model": str(CHECKPOINT),
                "kv_cache_memory_bytes": 1 << 28,
                "max_num_seqs": 8,
                "max_logprobs": -1,
                **options,
            },
            "gpu": gpu,
            "environment": {**CLEAN, "VLLM_CACHE_ROOT": str(cache), **(environment or {})},
            "ask": questions,
            "out": str(out),
        }
        # A group of its own: what an engine leaves behind goes with it. A file, because that may still hold a pipe.
        log = out.with_name("log")
        with open(log, "w") as output:
            program = subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "python" / "vllm_engine.py")],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            try:
                program.communicate(json.dumps(request), timeout=SECONDS)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)
        if program.returncode != 0:
            pytest.fail(f"the engine ended with {program.returncode}:\n{log.read_text()[-6000:]}")
        return json.loads(out.read_text())

    return start


def golden(name):
    from safetensors.numpy import load_file

    return load_file(ROOT / "tests" / "data" / "golden" / "model_golden.safetensors")[name]


def relative_l2(logprobs, logits):
    """Of log-probabilities against logits, which are the same but for a number per row: rows with mean 0 compare."""
    ours, theirs = (numpy.asarray(rows, numpy.float64) for rows in (logprobs, logits))
    ours, theirs = (rows - rows.mean(axis=-1, keepdims=True) for rows in (ours, theirs))
    return numpy.linalg.norm(ours - theirs) / numpy.linalg.norm(theirs)


PROMPT = "Mr. Darcy"
TOKENS = 32
EXACT = {"dtype": "float32", "enforce_eager": True, "additional_config": {"espalier": {"mode": "exact"}}}
# One engine in one process: starts in half the time.
ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# Several: on the same cores, where vLLM would bind each to a NUMA node of its own.
TOGETHER = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def exact(ask):
    questions = {
        "perplexity": {},
        "greedy": {"prompt": PROMPT, "tokens": TOKENS},
        "logprobs": {"ids": golden("prompt_ids").tolist()},
    }
    return ask(questions, environment=ALONE, **EXACT)


@needs_vllm
def test_perplexity_of_the_held_out_text(exact):
    assert exact["perplexity"]["predictions"] == 19712
    assert exact["perplexity"]["perplexity"] == pytest.approx(38.11, abs=0.05)


@needs_vllm
def test_logits_are_those_of_the_reference(exact):
    assert relative_l2(exact["logprobs"], golden("logits_fp32ref_mixed")[:-1]) < 2e-3
    # The bound notices other weights: those before quantization.
    assert relative_l2(exact["logprobs"], golden("logits_fp32ref_bf16")[:-1]) > 1e-2


@needs_vllm
def test_greedy_text_is_that_of_tiny_lm(exact):
    program = os.environ.get("ESPALIER_TINY_LM")
    if not program:
        pytest.skip("ESPALIER_TINY_LM does not name the program")
    done = subprocess.run(
        [program, str(CHECKPOINT), "--prompt", PROMPT, "--tokens", str(TOKENS), "--mode", "exact"],
        capture_output=True, text=True, timeout=SECONDS, check=True,
    )  # fmt: skip
    assert len(exact["greedy"]["ids"]) == TOKENS
    assert done.stdout.partition("\n")[2] == exact["greedy"]["text"] + "\n"


# On a GPU, eagerly and as vLLM's CUDA graphs. What differs from the CPU is how attention, norms and products of plain
# layers round float16.


def needs_gpu(function):
    """Skips where torch sees no GPU; with ESPALIER_REQUIRE_GPU there has to be one, and the test fails."""
    found = importlib.util.find_spec("torch") is not None
    if found:
        import torch

        found = torch.cuda.is_available()
    skip = not found and not os.environ.get("ESPALIER_REQUIRE_GPU")
    return pytest.mark.skipif(skip, reason="no GPU")(function)


@needs_vllm
@needs_gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_gpu_gives_the_numbers_of_the_reference(ask, graphs):
    questions = {
        "perplexity": {},
        "greedy": {"prompt": PROMPT, "tokens": 8},
        "logprobs": {"ids": golden("prompt_ids").tolist()},
    }
    # One process, and the model runner that needs no kernel for its buffers.
    environment = {**ALONE, "VLLM_USE_V2_MODEL_RUNNER": "0"}
    answers = ask(questions, environment, gpu=True, dtype="float16", enforce_eager=not graphs)
    assert answers["perplexity"]["predictions"] == 19712
    assert answers["perplexity"]["perplexity"] == pytest.approx(38.11, abs=0.05)
    assert relative_l2(answers["logprobs"], golden("logits_fp32ref_mixed")[:-1]) < 5e-3
    assert answers["greedy"]["text"] == "Mr. Darcy, who had\nbeen the only one"


# Other families, with the decoded weights in transformers or, where vLLM itself computes something else on a CPU, in
# vLLM. What vLLM asks of a config that transformers does not write into it is what real checkpoints say.

SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
# The widths that latent attention has in vLLM on a CPU.
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
FAMILIES = [
    ("Glm4Moe", {"hidden_act": "silu"}, "transformers"),
    ("DeepseekV3", {**SIGMOID, **LATENT}, "vllm"),
    pytest.param("Qwen2Moe", {"tie_word_embeddings": False}, "transformers", marks=long_running),
    pytest.param("Mixtral", {}, "transformers", marks=long_running),
    pytest.param("Olmoe", {}, "transformers", marks=long_running),
    pytest.param("Dots1", SIGMOID, "transformers", marks=long_running),
]


@pytest.fixture
def float32_is_the_default():
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@needs_vllm
@pytest.mark.parametrize(("family", "changes", "oracle"), FAMILIES)
def test_another_family_computes_what_its_decoded_twin_does(
    ask, tmp_path, float32_is_the_default, family, changes, oracle
):
    import torch
    import transformers
    import transformers_checkpoints as checkpoints

    # Padded, because latent attention has matrices whose sides are no multiples of 128.
    exl3, plain = checkpoints.make(tmp_path, checkpoints.config(family, **changes), padded=True)
    ids = torch.randint(3, checkpoints.VOCAB, (1, 34), generator=torch.Generator().manual_seed(5))

    def logprobs(path):
        options = {"model": str(path), "skip_tokenizer_init": True, "max_model_len": 64, **EXACT}
        return ask({"logprobs": {"ids": ids[0].tolist()}}, environment=ALONE, **options)["logprobs"]

    if oracle == "vllm":
        expected = logprobs(plain)
    else:
        with torch.no_grad():
            expected = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)(ids).logits[0, :-1]
    assert relative_l2(logprobs(exl3), expected) < 1e-5


# The example of docs/vllm.md.


def blocks(language):
    text = (ROOT / "docs" / "vllm.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def served(arguments, log):
    """The command `vllm`; stopped in any case, with all that it started."""
    with open(log, "w") as output:
        program = subprocess.Popen(
            [pathlib.Path(sys.executable).with_name("vllm"), *arguments],
            stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
            env={**os.environ, **CLEAN, "VLLM_CACHE_ROOT": str(log.parent / "cache")},
        )  # fmt: skip
        try:
            yield program
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(timeout=20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)


def wait_until_ready(program, url, log):
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if program.poll() is not None:
            pytest.fail(f"the server ended with {program.returncode}:\n{log.read_text()[-6000:]}")
        with contextlib.suppress(OSError):
            if urllib.request.urlopen(f"{url}/health", timeout=5).status == 200:
                return
        time.sleep(0.5)
    pytest.fail(f"the server is not ready after {SECONDS} s:\n{log.read_text()[-6000:]}")


@needs_vllm
def test_the_documented_example_serves_a_request(tmp_path):
    (command,) = blocks("sh serve")
    (client,) = blocks("python")
    port = free_port()
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == ["vllm", "serve"] and "8000" in words and ":8000/" in client
    arguments = [str(port) if word == "8000" else word for word in words[1:]]
    log = tmp_path / "server.log"
    with served(arguments, log) as program:
        wait_until_ready(program, f"http://127.0.0.1:{port}", log)
        done = subprocess.run(
            [sys.executable, "-c", client.replace(":8000/", f":{port}/")],
            capture_output=True, text=True, timeout=SECONDS, cwd=ROOT,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr + log.read_text()[-4000:]
    (shown,) = blocks("text answer")
    assert done.stdout == shown


# What is refused, and who decides. In this process: no engine is started.


@pytest.fixture(scope="module")
def vllm_config():
    """What `vllm serve CHECKPOINT` would have its workers do, and a world of one rank to build layers in."""
    os.environ.update(CLEAN)
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    config = EngineArgs(model=str(CHECKPOINT), kv_cache_memory_bytes=1 << 28).create_engine_config()
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, backend="gloo")
        initialize_model_parallel()
        yield config
        cleanup_dist_env_and_memory()
    torch.set_default_dtype(before)


EXPERTS = {"num_experts": 16, "top_k": 4, "hidden_size": 256, "intermediate_size": 512}


def experts_layer(config, prefix="model.layers.0.mlp.experts", **options):
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

    config.compilation_config.static_forward_context.clear()
    arguments = {**EXPERTS, "quant_config": config.quant_config, "prefix": prefix, **options}
    return FusedMoEFactory(**arguments)


@needs_vllm
def test_a_vllm_without_a_needed_interface_goes_on_without_the_method(vllm_config, monkeypatch):
    import logging

    import espalier.vllm

    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logger = logging.getLogger("vllm.espalier")
    logger.addHandler(handler)
    monkeypatch.setitem(sys.modules, "espalier.vllm.config", None)
    monkeypatch.delattr(espalier.vllm, "config")
    espalier.vllm.register()
    logger.removeHandler(handler)
    assert len(seen) == 1 and re.match(r"espalier\.vllm was tested with vLLM 0\.32\.0 and cannot work with ", seen[0])


@needs_vllm
def test_the_checkpoint_is_recognised(vllm_config):
    assert vllm_config.model_config.quantization == "exl3"
    assert vllm_config.quant_config.get_name() == "exl3"
    method = experts_layer(vllm_config).routed_experts.quant_method
    assert type(method).__name__ == "Exl3ExpertsMethod" and method.activation == "silu"


@needs_vllm
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"activation": "gelu"}, "activation gelu; legal: silu, gelu_tanh"),
        ({"activation": "swigluoai"}, "activation swigluoai; legal"),
        ({"swiglu_limit": 7.0}, "activation silu, swiglu_limit 7; legal"),
        ({"activation": "situ"}, "activation situ; legal"),
        (
            {"apply_router_weight_on_input": True},
            r"does not support router weights applied to the input \(apply_router",
        ),
        ({"has_bias": True}, "does not support biases of experts"),
        ({"num_experts": 8}, "the model has experts 8, .* has 16"),
        ({"hidden_size": 512}, "the model has hidden channels 512, .* has 256"),
        ({"intermediate_size": 1024}, "the model has intermediate channels 1024, .* has 512"),
        ({"top_k": 17}, "17 experts a token; legal: 1 to 16"),
        ({"prefix": "model.layers.9.mlp.experts"}, "has no routed experts for vLLM's layer model.layers.9.mlp.experts"),
    ],
)
def test_experts_that_cannot_be_run_are_refused_by_name(vllm_config, options, sentence):
    import espalier

    with pytest.raises(espalier.EspalierError, match=sentence):
        experts_layer(vllm_config, **options)


@needs_vllm
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"is_lora_enabled": True}, "LoRA"),
        ({"num_logical_experts": 12}, r"EPLB \(--enable-eplb\)"),
        ({"dp_size": 2}, r"data parallelism \(size 2\)"),
        ({"pcp_size": 2}, r"prefill context parallelism \(size 2\)"),
        ({"sp_size": 2}, "sequence parallelism"),
    ],
)
def test_unsupported_kinds_of_parallelism_are_refused_by_name(vllm_config, change, sentence):
    import dataclasses

    import espalier
    from espalier.vllm.experts import Exl3ExpertsMethod

    layer = experts_layer(vllm_config).routed_experts
    moe = layer.moe_config
    for name, value in change.items():
        if hasattr(moe.moe_parallel_config, name):
            moe.moe_parallel_config = dataclasses.replace(moe.moe_parallel_config, **{name: value})
        else:
            setattr(moe, name, value)
    opened = layer.quant_method.opened
    with pytest.raises(espalier.UnsupportedError, match=f"does not support {sentence}; leave it out"):
        Exl3ExpertsMethod(layer, opened, 0, "model.layers.0.mlp.experts", "fast")


@needs_vllm
@pytest.mark.parametrize(
    ("scoring", "bias", "groups", "refused"),
    [
        ("softmax", False, False, False),
        ("softmax", True, False, True),  # as ERNIE 4.5
        ("sigmoid", True, False, True),  # as MiniMax-M2
        ("sigmoid", False, False, True),
        ("sigmoid", True, True, False),
    ],
)
def test_routing_that_vllm_lacks_on_cpus_is_refused_by_name(vllm_config, scoring, bias, groups, refused):
    import torch

    import espalier

    options = {"scoring_func": scoring, "e_score_correction_bias": torch.zeros(16) if bias else None}
    if groups:
        options |= {"use_grouped_topk": True, "num_expert_group": 2, "topk_group": 1}
    if refused:
        with pytest.raises(espalier.UnsupportedError, match=f"layers.0.mlp.experts: routing by {scoring} with"):
            experts_layer(vllm_config, **options)
    else:
        assert experts_layer(vllm_config, **options).routed_experts.quant_method.activation == "silu"


@needs_vllm
def test_expert_placements_other_than_the_planner_s_are_refused(vllm_config):
    import torch

    import espalier

    layer = experts_layer(vllm_config).routed_experts
    method = layer.quant_method
    layer.expert_map_manager._expert_map = torch.arange(16).roll(1)
    with pytest.raises(espalier.UnsupportedError, match="expert placement 'linear' with 16 experts"):
        method.create_weights(layer, 16, 256, 512, torch.bfloat16)


@needs_vllm
@pytest.mark.parametrize(("tp", "ep"), [(3, 1), (4, 1), (1, 3), (2, 2)])
def test_ranks_hold_what_the_planner_gives_them_and_add_up(vllm_config, tp, ep):
    import dataclasses

    import torch

    import espalier
    from espalier.vllm import _ops
    from espalier.vllm.experts import Exl3ExpertsMethod

    layer = experts_layer(vllm_config).routed_experts
    opened, whole = layer.quant_method.opened, layer.moe_config
    plan = espalier.Checkpoint(CHECKPOINT).extents(tp=tp, ep=ep)
    x = torch.randn(9, 256, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(36, dtype=torch.int32).view(9, 4) * 5 % 17 - 1  # -1 among them, as in padding rows
    weights = torch.full((9, 4), 0.25)
    layer.quant_method.process_weights_after_loading(layer)
    expected = layer.quant_method.apply(layer, x, weights, ids, None, None).float()
    total = torch.zeros_like(expected)
    for rank in range(tp * ep):
        ep_rank, tp_rank = divmod(rank, tp)
        rank_layer = experts_layer(vllm_config).routed_experts
        rank_layer.moe_config.moe_parallel_config = dataclasses.replace(
            whole.moe_parallel_config, tp_size=tp, tp_rank=tp_rank, ep_size=ep, ep_rank=ep_rank, use_ep=ep > 1
        )
        method = Exl3ExpertsMethod(rank_layer, opened, 0, "model.layers.0.mlp.experts", "exact")
        rank_layer.quant_method = method
        count = plan.experts(0, ep_rank)[1]
        if ep > 1:
            rank_layer._expert_map = torch.tensor(plan.expert_map(0, ep_rank), dtype=torch.int32)
            rank_layer.expert_map_manager._expert_map = rank_layer._expert_map
        method.create_weights(rank_layer, count, 256, 512 // tp, torch.bfloat16)
        method.process_weights_after_loading(rank_layer)
        assert not list(rank_layer.parameters())
        package, mode = _ops.installed(rank_layer.espalier_package)
        assert mode == "exact"
        owned = plan.layers[0].ranks[tp_rank]
        assert package.experts == count and package.rank == rank
        assert {segment.intermediate for segment in package.segments} == {owned.channels}
        total += method.apply(rank_layer, x, weights, ids, None, None).float()
    assert torch.linalg.norm(total - expected) / torch.linalg.norm(expected) < 1e-2  # bfloat16, a rounding each


def linear_layer(kind, config, *sizes, prefix, **options):
    from vllm.model_executor.layers import linear

    return getattr(linear, kind)(
        *sizes, bias=options.pop("bias", False), quant_config=config.quant_config, prefix=prefix, **options
    )


def matrix(name):
    import torch

    import espalier

    return torch.from_dlpack(espalier.Checkpoint(CHECKPOINT).matrix(name))


def error(y, expected):
    import torch

    return (torch.linalg.norm(y.float() - expected) / torch.linalg.norm(expected)).item()


BF16_ERROR = 1e-2  # a rounding of y, and the operands of mode fast


# Every layout: the fixture, position of the layer, what vLLM says of its activation.
SITU = {"activation": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
LAYOUTS = [
    ("stock-qwen3", 0, {}),
    ("stock-mixtral", 1, {}),
    ("stock-deepseek-padded", 0, {}),
    ("stock-legacy-signs", 0, {}),
    ("stock-situ", 0, SITU),
    ("rs-per-expert", 1, {}),
    ("rs-shared-h", 0, {}),
    ("rs-r7", 1, {}),
    ("v1-k2-per-expert", 0, {}),
    ("v1-k3", 1, {}),
]


def fixture_layer(vllm_config, name, position=0, **options):
    """An experts layer of vLLM for a layer of a fixture, and what the checkpoint says of it."""
    from espalier.vllm.config import Exl3Config

    quant_config = Exl3Config()
    quant_config.maybe_update_config(str(FIXTURES / name))
    info = quant_config._open().layers[position]
    sizes = {"num_experts": info.experts, "hidden_size": info.hidden, "intermediate_size": info.intermediate}
    prefix = f"{info.prefix}.{info.number}.mlp.experts"
    options = {"quant_config": quant_config, "top_k": 2, **sizes, **options}
    return experts_layer(vllm_config, prefix, **options).routed_experts, info


@needs_vllm
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("name", "position", "activation"), LAYOUTS)
def test_every_layout_computes_what_the_oracle_does(vllm_config, name, position, activation, ranks):
    import dataclasses

    import torch

    import espalier
    from espalier.vllm.experts import Exl3ExpertsMethod

    package = espalier.prepare(espalier.Checkpoint(FIXTURES / name), position)
    plan = espalier.plan(package, max_tokens=7, top_k=2, executor="reference")
    random = torch.Generator().manual_seed(4)
    x = torch.randn(7, package.hidden, generator=random).bfloat16()
    ids = torch.randint(-1, package.experts, (7, 2), generator=random, dtype=torch.int32)
    weights = torch.rand(7, 2, generator=random, dtype=torch.float32)
    expected = torch.from_dlpack(espalier.run(plan, package, x.float(), ids, weights)).float()
    total = torch.zeros_like(expected)
    for rank in range(ranks):
        layer, info = fixture_layer(vllm_config, name, position, **activation)
        parallel = layer.moe_config.moe_parallel_config
        layer.moe_config.moe_parallel_config = dataclasses.replace(parallel, tp_size=ranks, tp_rank=rank)
        opened, prefix = layer.quant_method.opened, layer.quant_method.prefix
        method = Exl3ExpertsMethod(layer, opened, position, prefix, "exact")
        method.create_weights(layer, info.experts, info.hidden, -(-info.intermediate // ranks), torch.bfloat16)
        method.process_weights_after_loading(layer)
        total += method.apply(layer, x, weights, ids, None, None).float()
    assert error(total, expected) < BF16_ERROR


@needs_vllm
def test_experts_with_biases_are_refused_by_name(vllm_config):
    import espalier

    layer, _ = fixture_layer(vllm_config, "stock-bias")
    text = r"model\.layers\.0\.mlp\.experts: .*stock-bias has biases of experts"
    with pytest.raises(espalier.UnsupportedError, match=text):
        layer.quant_method.process_weights_after_loading(layer)


@needs_vllm
@pytest.mark.parametrize("name", ["v1-coupled", "v1-lut-fp16"])
def test_containers_that_are_not_executed_are_refused_by_name(vllm_config, name):
    import espalier

    with pytest.raises(espalier.UnsupportedError, match="codebook: 'lut_.*' is not executed yet"):
        fixture_layer(vllm_config, name)


@needs_vllm
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_of_linears_inside_a_block_give_the_same_numbers(vllm_config, ranks):
    import torch

    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    columns, total, local = [], 0, 256 // ranks
    for rank in range(ranks):
        layer = linear_layer("ColumnParallelLinear", vllm_config, 256, 256, prefix="model.layers.1.self_attn.q_proj",
                             tp_rank=rank, tp_size=ranks)  # fmt: skip
        layer.quant_method.process_weights_after_loading(layer)
        columns.append(layer(x)[0])
        layer = linear_layer("RowParallelLinear", vllm_config, 256, 256, prefix="model.layers.1.self_attn.o_proj")
        layer.tp_rank = rank
        layer.quant_method.create_weights(layer, local, [256], 256, 256, torch.bfloat16)
        layer.quant_method.process_weights_after_loading(layer)
        total = total + layer.quant_method.apply(layer, x[:, rank * local : (rank + 1) * local]).float()
    assert {tuple(y.shape) for y in columns} == {(5, local)}
    assert error(torch.cat(columns, 1), x.float() @ matrix("model.layers.1.self_attn.q_proj")) < BF16_ERROR
    assert error(total, x.float() @ matrix("model.layers.1.self_attn.o_proj")) < BF16_ERROR


@needs_vllm
def test_key_and_value_heads_are_those_of_the_rank(vllm_config):
    import torch

    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    prefix = "model.layers.2.self_attn"
    quant_config = vllm_config.quant_config
    packed, quant_config.packed_modules_mapping = (
        quant_config.packed_modules_mapping,
        {"qkv_proj": ["q_proj", "k_proj", "v_proj"]},
    )
    expected = [x.float() @ matrix(f"{prefix}.{name}") for name in ("q_proj", "k_proj", "v_proj")]
    for rank in range(4):  # 4 query heads, 2 of keys and values: two ranks share one
        layer = linear_layer("QKVParallelLinear", vllm_config, 256, 64, 4, 2, prefix=f"{prefix}.qkv_proj")
        layer.tp_rank, layer.num_kv_head_replicas = rank, 2
        layer.quant_method.create_weights(layer, 256, [64, 64, 64], 256, 768, torch.bfloat16)
        layer.quant_method.process_weights_after_loading(layer)
        heads = layer.quant_method.apply(layer, x).split(64, dim=1)
        for y, whole, head in zip(heads, expected, (rank, rank // 2, rank // 2)):
            assert error(y, whole[:, head * 64 : (head + 1) * 64]) < BF16_ERROR
    quant_config.packed_modules_mapping = packed


@needs_vllm
def test_a_head_of_a_padded_vocabulary(vllm_config):
    import torch
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    head = ParallelLMHead(4000, 256, quant_config=vllm_config.quant_config, prefix="lm_head")
    head.quant_method.process_weights_after_loading(head)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(4)).bfloat16()
    y = head.quant_method.apply(head, x)
    assert y.shape == (3, 4032) and not y[:, 4000:].any()
    assert error(y[:, :4000], (x.float() @ matrix("lm_head"))[:, :4000]) < BF16_ERROR


@needs_vllm
@pytest.mark.parametrize(
    ("kind", "sizes", "prefix", "sentence"),
    [
        ("RowParallelLinear", (512, 256), "model.layers.0.self_attn.o_proj", "has 256 channels, the model 512"),
        (
            "RowParallelLinear",
            (256, 300),
            "model.layers.0.self_attn.o_proj",
            "256 channels, the model 300; legal is 300 or 384",
        ),
        ("RowParallelLinear", (256, 256), "model.layers.0.self_attn.z_proj", "has no weights for vLLM's layer"),
        ("ReplicatedLinear", (256, 16), "model.layers.0.mlp.experts.3.gate_proj", "has no weights for vLLM's layer"),
    ],
)
def test_linears_that_do_not_fit_are_refused_by_name(vllm_config, kind, sizes, prefix, sentence):
    import espalier

    with pytest.raises(espalier.EspalierError, match=sentence):
        linear_layer(kind, vllm_config, *sizes, prefix=prefix)


@needs_vllm
def test_a_bias_that_the_checkpoint_does_not_have_is_refused(vllm_config):
    import espalier

    with pytest.raises(espalier.UnsupportedError, match="o_proj has a bias, of .* 0 of 1 have one"):
        linear_layer("RowParallelLinear", vllm_config, 256, 256, prefix="model.layers.0.self_attn.o_proj", bias=True)


@needs_vllm
def test_a_tied_head_is_refused_when_the_file_has_its_own(vllm_config):
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    import espalier

    head = ParallelLMHead(4096, 256, quant_config=vllm_config.quant_config, prefix="lm_head")
    with pytest.raises(espalier.UnsupportedError, match="set tie_word_embeddings to false"):
        head.tie_weights(None)


@needs_vllm
def test_tensors_that_no_layer_takes_are_refused(vllm_config):
    import copy

    import espalier

    quant_config = copy.deepcopy(vllm_config.quant_config)
    quant_config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    with pytest.raises(
        espalier.UnsupportedError, match="no layer of Qwen3MoeForCausalLM takes the EXL3 tensors of lm_head"
    ):
        quant_config.get_checkpoint_weight_mapper()


@needs_vllm
def test_the_user_s_choice_of_a_method_wins(vllm_config):
    from espalier.vllm.config import Exl3Config
    from vllm.config import ModelConfig

    # vLLM itself refuses to read an exl3 checkpoint as something else; nothing here may talk it out of that.
    with pytest.raises(ValueError, match=r"\(exl3\) does not match .* \(fp8\)"):
        ModelConfig(model=str(CHECKPOINT), quantization="fp8")
    assert Exl3Config.override_quantization_method({"quant_method": "exl3"}, "fp8") is None
    assert ModelConfig(model=str(CHECKPOINT), quantization="exl3").quantization == "exl3"


@needs_vllm
@pytest.mark.parametrize("user_quant", [None, "exl3"])
def test_tensors_decide_where_the_config_says_something_else(vllm_config, tmp_path, user_quant):
    from vllm.config import ModelConfig

    shutil.copytree(CHECKPOINT, tmp_path / "model")
    config = json.loads((CHECKPOINT / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "fp8"
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert ModelConfig(model=str(tmp_path / "model"), quantization=user_quant).quantization == "exl3"
    assert ModelConfig(model=str(tmp_path / "model"), quantization="fp8").quantization == "fp8"


@needs_vllm
def test_a_checkpoint_of_others_stays_theirs(vllm_config, tmp_path):
    from espalier.vllm.config import Exl3Config

    named = types.SimpleNamespace(name_or_path=str(tmp_path))
    assert Exl3Config.override_quantization_method({"quant_method": "fp8"}, None, hf_config=named) is None


@needs_vllm
def test_a_broken_checkpoint_is_refused_before_any_worker_starts(vllm_config, tmp_path):
    from vllm.engine.arg_utils import EngineArgs

    shutil.copytree(CHECKPOINT, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    # FormatError is a ValueError, which vLLM's config classes wrap with its text.
    with pytest.raises(ValueError, match="but the file holds only .* truncated"):
        EngineArgs(model=str(tmp_path / "model"), kv_cache_memory_bytes=1 << 28).create_engine_config()


@needs_vllm
@pytest.mark.parametrize(
    ("additional", "environment", "expected"),
    [
        ({}, None, "fast"),
        ({}, "", "fast"),
        ({}, "int8", "int8"),
        ({"espalier": {"mode": "exact"}}, "int8", "exact"),
        ({}, "quick", "ESPALIER_MODE is 'quick'; legal: exact, fast, int8"),
        ({"espalier": {"mode": "quick"}}, None, r"additional_config\['espalier'\]\['mode'\] is 'quick'"),
        ({"espalier": {"speed": "fast"}}, None, r"additional_config\['espalier'\] is \{'speed': 'fast'\}; legal"),
    ],
)
def test_the_mode_comes_from_the_command_line_or_the_environment(
    vllm_config, monkeypatch, additional, environment, expected
):
    import espalier
    from espalier.vllm.config import MODES, selected_mode

    monkeypatch.setattr(vllm_config, "additional_config", additional)
    monkeypatch.delenv("ESPALIER_MODE", raising=False)
    if environment is not None:
        monkeypatch.setenv("ESPALIER_MODE", environment)
    if expected in MODES:
        assert selected_mode() == expected
    else:
        with pytest.raises(espalier.UsageError, match=expected):
            selected_mode()


@needs_vllm
def test_mxfp8_is_decoded_exactly(vllm_config):
    import torch
    from espalier.vllm.linear import decode_mxfp8

    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = codes.repeat(256, 1)  # every weight under every scale; 256 columns, 8 scales a row
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    decoded = decode_mxfp8(weight, scale, torch.float32)
    # E4M3: 3 bits of fraction, bias 7, no infinities. E8M0: a power of two, 255 is NaN.
    byte = numpy.arange(256)
    sign, exponent, fraction = numpy.where(byte < 128, 1.0, -1.0), byte >> 3 & 15, byte & 7
    values = sign * numpy.where(exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    values[(byte & 127) == 127] = numpy.nan
    factors = 2.0 ** (numpy.arange(256) - 127.0)
    factors[255] = numpy.nan
    with numpy.errstate(over="ignore"):
        expected = (values[None, :] * factors[:, None]).astype(numpy.float32)
    numpy.testing.assert_array_equal(decoded.numpy(), expected)
    # Three bits of fraction fit into bfloat16, wherever it is not beyond its range.
    normal = slice(20, 240)
    short = decode_mxfp8(weight[normal], scale[normal], torch.bfloat16)
    numpy.testing.assert_array_equal(short.float().numpy(), expected[normal])


# Longer ones.


@needs_vllm
@long_running
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["tensor", "expert"])
def test_two_ranks_write_the_same_text(ask, exact, expert_parallel):
    questions = {
        "greedy": {"prompt": PROMPT, "tokens": TOKENS},
        "logprobs": {"ids": golden("prompt_ids").tolist()},
    }
    answers = ask(questions, TOGETHER, tensor_parallel_size=2, enable_expert_parallel=expert_parallel, **EXACT)
    assert answers["greedy"] == exact["greedy"]
    # Sums over ranks are taken in another order.
    assert relative_l2(answers["logprobs"], exact["logprobs"]) < 1e-5


@needs_vllm
@long_running
def test_compiled_graphs_in_mode_fast(ask):
    answers = ask({"perplexity": {}}, environment=ALONE)  # bfloat16, torch.compile, as vLLM comes
    assert answers["perplexity"]["perplexity"] == pytest.approx(38.11, abs=0.15)


@needs_vllm
@long_running
@pytest.mark.parametrize("ranks", [1, 2])
def test_mxfp8_containers_give_what_their_decoded_twins_give(ask, tmp_path, ranks):
    containers = {form: tmp_path / form for form in ("mxfp8", "bf16")}
    write_containers(containers)
    questions = {"greedy": {"prompt": PROMPT, "tokens": TOKENS}, "perplexity": {"windows": 4}}
    options = {"dtype": "float32", "enforce_eager": True, "tensor_parallel_size": ranks}
    environment = {"ESPALIER_MODE": "exact", **(ALONE if ranks == 1 else TOGETHER)}
    mxfp8, bf16 = (ask(questions, environment, model=str(path), **options) for path in containers.values())
    assert mxfp8 == bf16
    assert mxfp8["perplexity"]["perplexity"] < 60


@needs_vllm
@long_running
def test_the_serving_benchmark_measures(tmp_path):
    arguments = ["--requests", "1,2", "--samples", "1", "--tokens", "8", "--windows", "4"]
    arguments += ["--vllm-arguments", "--enforce-eager --kv-cache-memory-bytes 268435456"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "serve_bench.py"), *arguments],
        capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **CLEAN, "VLLM_CACHE_ROOT": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert [row["requests"] for row in report["results"]] == [1, 2]
    for row in report["results"]:
        assert row["tokens_per_second"] > 0 and 0 < row["first_token_seconds"] < SECONDS
    assert report["perplexity"]["predictions"] == 1024
    assert report["perplexity"]["perplexity"] == pytest.approx(28.67, abs=0.3)  # of the first 4 windows


def write_containers(paths):
    """The bundled model with attention as MXFP8, and the same numbers as BF16; the head is plain in both."""
    import torch
    from espalier.vllm.linear import decode_mxfp8
    from safetensors.torch import load_file, save_file

    import espalier

    checkpoint = espalier.Checkpoint(CHECKPOINT)
    names = [linear.name for linear in checkpoint.linears]
    kept = {
        name: tensor
        for name, tensor in load_file(CHECKPOINT / "model.safetensors").items()
        if not any(name.startswith(f"{dense}.") for dense in names)
    }
    dense = {form: dict(kept) for form in paths}
    for name in names:
        weight = torch.from_numpy(numpy.array(numpy.from_dlpack(checkpoint.matrix(name)))).T.contiguous()
        if name == "lm_head":
            for tensors in dense.values():
                tensors[f"{name}.weight"] = weight.bfloat16()
            continue
        blocks_of_32 = weight.view(weight.shape[0], -1, 32)
        exponent = torch.ceil(torch.log2(blocks_of_32.abs().amax(-1) / 448)).clamp(-127, 127)
        codes = (blocks_of_32 / torch.exp2(exponent)[..., None]).to(torch.float8_e4m3fn).view_as(weight)
        scale = (exponent + 127).to(torch.uint8)
        dense["mxfp8"][f"{name}.weight"], dense["mxfp8"][f"{name}.weight_scale"] = codes, scale
        dense["bf16"][f"{name}.weight"] = decode_mxfp8(codes, scale, torch.bfloat16)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    for form, path in paths.items():
        shutil.copytree(CHECKPOINT, path, ignore=shutil.ignore_patterns("*.safetensors", "quantization_config.json"))
        save_file(dense[form], path / "model.safetensors")
        config["quantization_config"] = {"quant_method": "exl3", "dense_format": form, "ignored_layers": []}
        (path / "config.json").write_text(json.dumps(config))
