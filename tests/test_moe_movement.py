"""Laws of what is told of routers' movement: what the updates of a step changed of their own choices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import sampled
from moe_support import moe_policy, with_experts
from test_moe_training import PROMPTS, REPLAY, updated

from gspo.moe.flips import flips
from gspo.training.optimizer import Optimizer
from gspo.training.routing import probe


def moved(state, settings, before, policy, part):
    """[N, L]: how many of the old policy's choices in a minibatch routers with these weights do not make of themselves."""
    policy.model.load_state_dict(state)
    found = []
    for micro in part.micro_batches:
        with torch.no_grad():
            before.score(micro)
            policy.routing.replay(before.routing.chosen() if settings.get("training__replay") == "trainer" else None)
            policy.score(micro)
        found.append(flips(before.routing.chosen(), policy.routing.own()))
    policy.routing.replay(None)
    return torch.cat(found).double()


@pytest.mark.parametrize("minibatches", [1, 4])
@pytest.mark.parametrize("settings", [*REPLAY.values(), {"rollout__old_logprobs": "engine"}], ids=[*REPLAY, "unknown"])
def test_what_each_update_changed_is_counted_by_one_more_pass(tmp_path, monkeypatch, settings, minibatches):
    """By routers' own choices, whatever was replayed, and whether or not later minibatches' old choices are known."""
    policy, before = moe_policy(), moe_policy()
    samples = with_experts(policy, sampled(policy, PROMPTS))
    rng = np.random.default_rng(5)  # an engine that chose others, which is no change of the policy
    others = [np.stack([rng.permutation(8)[:2] for _ in range(t.routed_experts[..., 0].size)]) for t in samples]
    wrong = [x.reshape(t.routed_experts.shape).astype(np.uint8) for x, t in zip(others, samples, strict=True)]
    samples = [replace(t, routed_experts=x) for t, x in zip(samples, wrong, strict=True)]
    states, step = [], Optimizer.step

    def noted(self):
        step(self)
        states.append({k: v.clone() for k, v in policy.model.state_dict().items()})

    monkeypatch.setattr(Optimizer, "step", noted)
    out, parts = updated(tmp_path, policy, samples, **settings, training__minibatches=minibatches)
    few = probe([t for m in parts[0].micro_batches for t in m.trajectories], policy.device)
    assert 1 <= len(few.trajectories) < 12 and len(states) == minibatches
    if settings.get("training__replay") == "engine":
        rows = np.zeros((few.num_tokens, 3, 2), np.uint8)
        for t, place_P in zip(few.trajectories, few.places, strict=True):
            rows[place_P] = t.routed_experts
        for one in (before, policy):
            one.routing.replay(torch.from_numpy(rows))

    def own(one):
        with torch.no_grad():
            one.score(few)
        chosen = one.routing.own()
        return torch.cat([chosen[torch.from_numpy(place_P)] for place_P in few.places])

    old, found = own(before), []
    for state in states:
        policy.model.load_state_dict(state)
        found.append(flips(old, own(policy)).double())
    if settings.get("rollout__old_logprobs") == "trainer":  # the next minibatch tells, by what routers chose of themselves
        found[:-1] = [moved(one, settings, before, policy, part) for one, part in zip(states, parts[1:], strict=False)]
    by_layer, told = [(x.mean(0) / 2).tolist() for x in found], out.routing["moe/flips_after_by_minibatch_and_layer"]
    assert len(told) == minibatches and np.array(told) == pytest.approx(np.array(by_layer), abs=1e-6)
    assert out.routing["moe/flips_after_by_layer"] == pytest.approx(by_layer[-1]) and found[-1].mean() > 0.02
    assert out.routing["moe/flips_after_by_minibatch"] == pytest.approx([np.mean(x) for x in by_layer])
    tokens = [float((x > 0).any(-1).double().mean()) for x in found]
    assert out.routing["moe/tokens_flipped_after_by_minibatch"] == pytest.approx(tokens)
    assert out.routing["moe/tokens_flipped_after"] == pytest.approx(tokens[-1])


def test_updates_that_move_nothing_flip_nothing_whatever_the_engine_chose(tmp_path):
    policy = moe_policy()
    samples = [replace(t, routed_experts=t.routed_experts[::-1]) for t in with_experts(policy, sampled(policy, PROMPTS))]
    for settings in REPLAY.values():
        still = settings | {"training__learning_rate": 1e-30, "rollout__routed_experts": True}
        out, _ = updated(tmp_path, moe_policy(), samples, **still)
        assert out.routing["moe/flips_after_by_minibatch"] == [0.0] * 4
        assert out.routing["moe/tokens_flipped_after"] == 0.0
        assert out.routing["moe/engine_flips"] > 0.1  # replayed or not


def test_an_update_without_a_signal_has_nothing_to_look_at_after_it(tmp_path):
    policy = moe_policy()
    samples = [replace(t, advantage=0.0) for t in sampled(policy, PROMPTS)]
    out, _ = updated(tmp_path, policy, samples, **REPLAY["trainer"])
    assert out.routing["moe/flips_after_by_minibatch"] == [None] * 4 and out.routing["moe/tokens_flipped_after"] is None


def test_few_samples_are_looked_at_and_of_long_ones_a_single_one(monkeypatch):
    policy = moe_policy()
    samples = sampled(policy, PROMPTS)
    assert probe([], policy.device) is None
    assert [len(probe(samples[:n], policy.device).trajectories) for n in (1, 4, 5, 12)] == [1, 1, 2, 3]
    monkeypatch.setattr("gspo.training.routing.PROBE_TOKENS", 1)
    assert len(probe(samples, policy.device).trajectories) == 1
