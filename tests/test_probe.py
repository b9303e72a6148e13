"""The probe's laws, on engines that can be wrong in one way each; none of them needs a backend."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from conftest import ALPHABET, tiny_config, tiny_policy

from gspo.config import SamplingConfig
from gspo.rollout import engines
from gspo.rollout.probe import TOLERANCE, Probe, ProbeError
from gspo.rollout.transformers import TransformersEngine
from gspo.training.policy import Policy
from gspo.types import Prompt


class CopyingEngine(TransformersEngine):
    """Has weights of its own, as an engine in another program would; `take` decides what a load brings over."""

    copies_weights = True

    def __init__(self, policy: Policy) -> None:
        super().__init__(copy.deepcopy(policy), max_rows=16)

    def take(self, name: str) -> bool:
        return True

    def load(self, policy: Policy) -> None:
        mine = dict(self.policy.model.named_parameters())
        with torch.no_grad():
            for name, tensor in policy.named_weights():
                if self.take(name):
                    mine[name].copy_(tensor)
        self.version = policy.version


class IgnoringEngine(CopyingEngine):
    def take(self, name: str) -> bool:
        return False


class StaleEmbedding(CopyingEngine):
    def take(self, name: str) -> bool:
        return "embed_tokens" not in name


def prompts() -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [Prompt(i, None, "", tuple(int(x) for x in rng.integers(2, len(ALPHABET) + 2, 9)), None) for i in range(5)]


def probe_of(policy: Policy, dtype: str = "float32") -> Probe:
    sampling = SamplingConfig(max_response_tokens=6, temperature=policy.temperature)
    return Probe(policy, prompts(), sampling, tolerance=TOLERANCE[dtype])


def move(policy: Policy, size: float) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(torch.randn_like(p) * size)
    policy.version += 1


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_an_engine_that_follows_passes_after_each_load(temperature):
    policy = tiny_policy(temperature=temperature)
    engine, probe = CopyingEngine(policy), probe_of(policy)
    assert probe(engine) < 1e-5
    for size in (1e-6, 1e-2, 0.1):
        move(policy, size)
        engine.load(policy)
        assert probe(engine) < 1e-5


@pytest.mark.parametrize("faulty", [IgnoringEngine, StaleEmbedding])
def test_an_engine_with_stale_weights_is_stopped_with_both_numbers(faulty):
    policy = tiny_policy()
    engine, probe = faulty(policy), probe_of(policy)
    probe(engine)
    move(policy, 0.05)
    engine.load(policy)
    with pytest.raises(ProbeError, match=r"by the engine, -\d.* by the trainer, mean absolute difference") as stop:
        probe(engine)
    assert "version 1" in str(stop.value) and "tolerance 0.002" in str(stop.value)


def test_loading_unmoved_weights_again_is_no_fault():
    policy = tiny_policy()
    engine, probe = CopyingEngine(policy), probe_of(policy)
    assert probe(engine) == probe(engine)


def test_a_fresh_token_is_compared_even_if_every_fixed_one_agrees(monkeypatch):
    """Scoring may read no cache while sampling reads a stale one."""
    policy = tiny_policy()
    engine, probe = CopyingEngine(policy), probe_of(policy)
    move(policy, 0.2)
    monkeypatch.setattr(engine, "score", lambda sequences: TransformersEngine(policy, max_rows=4).score(sequences))
    with pytest.raises(ProbeError):
        probe(engine)


def test_nan_from_an_engine_is_no_agreement(monkeypatch):
    policy = tiny_policy()
    engine, probe = CopyingEngine(policy), probe_of(policy)
    monkeypatch.setattr(engine, "score", lambda sequences: [np.full(len(s) - 1, np.nan, np.float32) for s in sequences])
    with pytest.raises(ProbeError):
        probe(engine)


def test_the_tolerance_is_that_of_the_coarser_side(tmp_path):
    for model, engine, coarser in (
        ("float32", "model", "float32"), ("float32", "bfloat16", "bfloat16"), ("bfloat16", "float32", "bfloat16"),
    ):  # fmt: skip
        config = tiny_config(tmp_path, model__dtype=model, rollout__vllm={"dtype": engine})
        policy = tiny_policy()
        assert engines.open_probe(config, policy, prompts()).tolerance == TOLERANCE[coarser]


def test_training_stops_before_a_sample_of_wrong_weights_is_used(tmp_path, monkeypatch):
    from gspo.loop import train
    from gspo.run import Run

    sampled = []
    monkeypatch.setattr("gspo.run.open_engine", lambda config, policy, say: IgnoringEngine(policy))
    collect = Run.collect
    monkeypatch.setattr(Run, "collect", lambda run, p: sampled.append(run.step + 1) or collect(run, p))
    config = tiny_config(tmp_path, training__learning_rate=0.05)
    with pytest.raises(ProbeError):
        train(config)
    assert sampled == [1]  # the update of step 1 was ignored by the engine: step 2 never samples
    assert not list((tmp_path / "tiny" / "checkpoints").glob("step-*"))  # moved weights are no checkpoint of step 0
