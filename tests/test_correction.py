"""Laws of the weights between trainer and engine: what each level and mode does, and what it leaves alone."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import sampled, tiny_config, tiny_policy
from hypothesis import given
from hypothesis import strategies as st
from reference import Row, objective

from gspo.config import CorrectionConfig
from gspo.loop import train
from gspo.objectives import KL, OBJECTIVES, Clip, pack
from gspo.recipe import RecipeError
from gspo.reporting.names import table_key
from gspo.training.correction import correction_weights, weighted
from gspo.training.diagnosis import correction_metrics, mismatch_metrics
from gspo.training.optimizer import Optimizer
from gspo.training.update import Skips, pack_minibatches, update

LEVELS = ("token", "sequence_product", "sequence_mean")
MODES = ({"mode": "truncate", "high": 1.02}, {"mode": "mask", "high": 1.02, "low": 0.98})
CHOICES = [{"level": level, **mode} for level in LEVELS for mode in MODES]
FITTING = [
    (name, choice)
    for name in ("gspo", "gspo_token", "grpo", "dapo")
    for choice in CHOICES
    if (name, choice["level"]) != ("gspo", "token")
]
PROMPTS = [3, 9, 1, 5, 7, 2, 4, 6]


def limited(weight: float, choice: dict) -> float:
    """A weight within its bounds, from the words of the documentation."""
    if choice["mode"] == "truncate":
        return min(weight, choice["high"])
    return weight if choice["low"] <= weight <= choice["high"] else 0.0


def weights_of(gaps: list[float], choice: dict) -> list[float]:
    """The weight of each token of one response, from its log p(trainer) - log p(engine)."""
    if choice["level"] == "token":
        return [limited(math.exp(d), choice) for d in gaps]
    total = 0.0
    for d in gaps:
        total += d
    return [limited(math.exp(total if choice["level"] == "sequence_product" else total / len(gaps)), choice)] * len(gaps)


def joined(lists: list[list[float]]) -> torch.Tensor:
    """One after the other, in float64."""
    return torch.from_numpy(np.concatenate(lists).astype(np.float64))


@pytest.mark.parametrize(("name", "choice"), FITTING, ids=str)
def test_loss_and_gradient_are_those_of_loops_in_float64(name, choice):
    rng = np.random.default_rng(3)
    rows, gaps, advantages, seen = [], [], [], set()
    for length in (1, 4, 9, 2, 6, 12):
        old, advantage = rng.normal(-1, 0.5, length), rng.normal()
        gaps.append(rng.normal(0, 0.06, length).tolist())
        weights = weights_of(gaps[-1], choice)
        seen |= {w in (0.0, choice["high"]) for w in weights}
        new, reference = old + rng.normal(0, 3e-4, length), old + rng.normal(0, 0.1, length)
        advantages.append(advantage)
        weighed = [w * advantage for w in weights]
        rows.append(Row(new.tolist(), old.tolist(), [True] * length, weighed, reference.tolist()))
    assert seen == {True, False}  # the comparison covers weights within and beyond the bounds
    clip = Clip(3e-4, 4e-4)
    want = objective(name, rows, *clip, kl=(0.1, "k3"))

    flat = {k: joined([getattr(r, k) for r in rows]) for k in ("new", "old", "reference")}
    sequence_T = torch.tensor([i for i, r in enumerate(rows) for _ in r.new])
    batch = pack(flat["old"], sequence_T, torch.tensor(advantages, dtype=torch.float64), reference_logp_T=flat["reference"])
    engine_T = flat["old"] - joined(gaps)
    new_T = flat["new"].requires_grad_()
    weights = correction_weights(flat["old"], engine_T, batch, CorrectionConfig(**choice))
    result = OBJECTIVES[name].function(new_T, weighted(batch, weights), clip, KL(0.1, "k3"))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(want.loss, rel=1e-9)
    torch.testing.assert_close(new_T.grad, joined(want.gradient), rtol=1e-8, atol=1e-12)


def plain(policy, t):
    """Log-probabilities of one sample's trained tokens, alone and unpacked."""
    ids = torch.from_numpy(t.token_ids)
    logp = policy.model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return logp.gather(1, ids[1:, None])[:, 0][torch.from_numpy(t.trained[1:])]


def off(trajectories, scale, seed=0):
    """The same samples from an engine with another opinion of each token."""
    rng = np.random.default_rng(seed)
    return [
        replace(t, engine_logprobs=np.float32(t.engine_logprobs + rng.normal(0, scale, t.num_trained)))
        for t in trajectories
    ]


def gradients(folder, policy, trajectories, choice, *, minibatches=1, **changes):
    """Gradients of the first minibatch, and what the update did; no weight moves."""
    wanted = {} if choice is None else {"rollout__correction": choice}
    config = tiny_config(
        folder, training__minibatches=minibatches, rollout__old_logprobs="trainer", training__micro_batch_tokens=40,
        **wanted, **changes,
    )  # fmt: skip
    optimizer, caught = Optimizer(policy.trainable, config.training, 1), {}

    def no_step(norm):
        for k, m in optimizer.masters.items():
            caught.setdefault(k, m.grad.clone())

    optimizer._move = no_step
    parts = pack_minibatches(trajectories, config, seed=0, device=policy.device)
    return caught, update(policy, optimizer, parts, config, Skips())


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: f"{c['level']}-{c['mode']}")
def test_in_an_update_each_samples_gradient_has_its_weight(tmp_path, choice):
    policy = tiny_policy()
    told = off(sampled(policy, PROMPTS), 0.06)
    name = "grpo" if choice["level"] == "token" else "gspo"
    caught, out = gradients(tmp_path, policy, told, choice, objective__name=name)
    policy.model.zero_grad()
    loss, every = torch.zeros(()), []
    for t in told:
        logp = plain(policy, t)
        weights = weights_of((logp.detach().double().numpy() - t.engine_logprobs).tolist(), choice)
        every += weights if choice["level"] == "token" else weights[:1]
        loss = loss - (torch.tensor(weights) * logp).float().mean() * t.advantage / len(told)
    loss.backward()
    for key, p in policy.trainable.items():
        torch.testing.assert_close(caught[key], p.grad, rtol=1e-4, atol=2e-6)
    metrics = correction_metrics(out.ratios, on=True)
    assert metrics["correction/weight_mean"] == pytest.approx(np.mean(every), abs=1e-5)
    assert metrics["correction/truncated"] == pytest.approx(np.mean([w in (0, choice["high"]) for w in every]))


def test_later_minibatches_weigh_by_the_policy_before_any_step(tmp_path):
    policy, choice = tiny_policy(), CHOICES[4]
    told = off(sampled(policy, PROMPTS), 0.06)
    with torch.no_grad():
        gaps = {t.id: (plain(policy, t).double().numpy() - t.engine_logprobs).tolist() for t in told}
    config = tiny_config(
        tmp_path, rollout__old_logprobs="trainer", rollout__correction=choice, training__learning_rate=0.05
    )
    parts = pack_minibatches(told, config, seed=0, device=policy.device)
    out = update(policy, Optimizer(policy.trainable, config.training, 2), parts, config, Skips())
    assert out.ratios[1] and any((r.log_ratio_T.abs() > 1e-3).any() for r in out.ratios[1])  # weights did move
    for r in (r for part in out.ratios for r in part):
        for name, weight in zip(r.ids, r.weight.tolist(), strict=True):
            assert weight == pytest.approx(weights_of(gaps[name], choice)[0], abs=1e-4)


@pytest.mark.parametrize(("name", "choice"), FITTING, ids=str)
def test_where_engine_and_trainer_agree_nothing_changes_by_a_bit(tmp_path, choice, name):
    policy, agreeing = tiny_policy(), {}
    trajectories = sampled(policy, PROMPTS)
    config = tiny_config(tmp_path, training__micro_batch_tokens=40)
    with torch.no_grad():
        for part in pack_minibatches(trajectories, config, seed=0, device=policy.device):
            for micro in part.micro_batches:
                scores = policy.score(micro)[0].split([t.num_trained for t in micro.trajectories])
                agreeing |= {t.id: s.numpy() for t, s in zip(micro.trajectories, scores, strict=True)}
    told = [replace(t, engine_logprobs=agreeing[t.id]) for t in trajectories]
    without, plainly = gradients(tmp_path, policy, told, None, minibatches=2, objective__name=name)
    corrected, out = gradients(tmp_path, policy, told, choice, minibatches=2, objective__name=name)
    assert out.losses == plainly.losses
    assert all(torch.equal(corrected[key], without[key]) for key in without)
    assert correction_metrics(out.ratios, on=True) == {"correction/weight_mean": 1.0, "correction/truncated": 0.0}
    assert correction_metrics(plainly.ratios, on=False) == {}


def test_a_masked_sample_teaches_nothing_and_still_counts(tmp_path):
    policy, choice = tiny_policy(), {"level": "sequence_mean", "mode": "mask", "high": 1.5, "low": 0.5}
    trajectories = sampled(policy, PROMPTS)
    wild = [replace(t, engine_logprobs=t.engine_logprobs - np.float32(5 * (i == 3))) for i, t in enumerate(trajectories)]
    masked, out = gradients(tmp_path, policy, wild, choice)
    mute = [replace(t, advantage=0.0) if i == 3 else t for i, t in enumerate(trajectories)]
    without, _ = gradients(tmp_path, policy, mute, choice)
    assert correction_metrics(out.ratios, on=True)["correction/truncated"] == 1 / len(wild)
    for key in without:
        torch.testing.assert_close(masked[key], without[key], rtol=1e-4, atol=1e-6)


GAPS = st.lists(st.lists(st.floats(-200, 200), min_size=1, max_size=6), min_size=1, max_size=5)


@given(GAPS, st.sampled_from(CHOICES))
def test_weights_are_finite_within_their_bounds_and_marked_where_limited(gaps, choice):
    lengths = [len(g) for g in gaps]
    old_T = torch.zeros(sum(lengths))
    batch = pack(old_T, torch.repeat_interleave(torch.arange(len(gaps)), torch.tensor(lengths)), torch.ones(len(gaps)))
    engine_T = -joined(gaps).float()
    weights = correction_weights(old_T.requires_grad_(), engine_T, batch, CorrectionConfig(**choice))
    assert len(weights.weight) == (len(old_T) if choice["level"] == "token" else len(gaps))
    assert torch.isfinite(weights.weight).all() and not weights.weight.requires_grad
    high = torch.tensor(choice["high"])
    assert (weights.weight >= 0).all() and (weights.weight <= high).all()
    assert (weights.weight[weights.limited] == (high if choice["mode"] == "truncate" else 0)).all()
    if choice["mode"] == "mask":
        assert (weights.weight[~weights.limited] >= choice["low"]).all()


def test_product_and_mean_differ_by_the_length():
    old_T, batch = torch.zeros(10), pack(torch.zeros(10), torch.zeros(10, dtype=torch.long), torch.ones(1))
    product, mean = (
        correction_weights(old_T, old_T - 0.1, batch, CorrectionConfig(level=level, mode="truncate", high=10)).weight
        for level in ("sequence_product", "sequence_mean")
    )
    assert product.item() == pytest.approx(math.e, rel=1e-5)
    assert mean.item() == pytest.approx(math.exp(0.1), rel=1e-5)


# ---- configuration ----------------------------------------------------------------------------------------

GOOD = {"level": "sequence_mean", "mode": "truncate", "high": 2.0}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rollout__old_logprobs": "auto"}, 'old_logprobs = "auto" may lack some: use old_logprobs = "trainer"'),
        ({"rollout__old_logprobs": "engine"}, 'old_logprobs = "engine" may lack some: use old_logprobs = "trainer"'),
        ({"rollout__correction__level": "token"}, 'objective.name = "gspo_token", "grpo" or "dapo"'),
        ({"rollout__correction__low": 0.5}, 'low = 0.5 is for mode = "mask" alone'),
        ({"rollout__correction__mode": "mask"}, 'mode = "mask" needs low'),
        ({"rollout__correction__mode": "mask", "rollout__correction__low": 1.0, "rollout__correction__high": 1.0},
         "low = 1 must be smaller than high = 1"),
        ({"rollout__correction__high": 0.0}, "rollout.correction.high"),
        ({"rollout__correction__high": -2.0}, "rollout.correction.high"),
        ({"rollout__correction": {"mode": "truncate", "high": 2.0}}, "rollout.correction.level"),
        ({"rollout__correction": {"level": "sequence_mean", "high": 2.0}}, "rollout.correction.mode"),
        ({"rollout__correction": {"level": "sequence_mean", "mode": "truncate"}}, "rollout.correction.high"),
        ({"rollout__correction__level": "geometric"}, "rollout.correction.level"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused_by_name(tmp_path, changes, sentence):
    base = {"rollout__old_logprobs": "trainer", "rollout__correction": dict(GOOD)}
    with pytest.raises(RecipeError) as error:
        tiny_config(tmp_path, **(base | changes))
    assert sentence in str(error.value)
    assert str(error.value).count("\n") == 0


@pytest.mark.parametrize("name", ["gspo_token", "grpo", "dapo"])
def test_objectives_with_advantages_by_token_take_weights_by_token(tmp_path, name):
    choice = GOOD | {"level": "token"}
    assert tiny_config(tmp_path, objective__name=name, rollout__old_logprobs="trainer", rollout__correction=choice)


@pytest.mark.parametrize(
    ("name", "choice"),
    [("gspo", {"level": "sequence_mean", "mode": "mask", "high": 1.5, "low": 0.5}),
     ("dapo", {"level": "token", "mode": "truncate", "high": 2.0})],
)  # fmt: skip
def test_a_whole_run_logs_the_weights(tmp_path, name, choice):
    run = train(tiny_config(tmp_path, objective__name=name, rollout__old_logprobs="trainer", rollout__correction=choice))
    for row in (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()):
        assert row["correction/weight_mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["correction/truncated"] == 0.0
        assert all(table_key(key) for key in row)
    off_run = train(tiny_config(tmp_path, name="off"))
    assert not [key for key in json.loads((off_run / "metrics.jsonl").read_text().splitlines()[0]) if "correction" in key]


@pytest.mark.parametrize("name", ["gspo", "grpo"])
def test_a_weight_of_0_does_not_hide_the_clip_decisions_that_differ(tmp_path, name):
    """The engine's side is off by more than the clip range, and the mask takes every sample out of the update."""
    masked = {"level": "sequence_mean", "mode": "mask", "high": 1.0001, "low": 0.9999}
    told = []
    for correction in (None, masked):
        policy = tiny_policy()
        off = [replace(t, engine_logprobs=t.engine_logprobs + np.float32(0.5)) for t in sampled(policy, PROMPTS)]
        changes = {"rollout__old_logprobs": "trainer", "rollout__correction": correction, "objective__name": name}
        config = tiny_config(tmp_path, **changes)
        parts = pack_minibatches(off, config, seed=0, device=policy.device)[:1]
        out = update(policy, Optimizer(policy.trainable, config.training, 2), parts, config, Skips())
        told.append(mismatch_metrics(out.ratios, recomputed=False))
    assert all(r.limited is not None and r.limited.all() for r in out.ratios[0])
    assert told[0]["mismatch/decisions_differ"] == told[1]["mismatch/decisions_differ"] > 0
    assert told[0]["mismatch/decisions"] == told[1]["mismatch/decisions"]
