"""Packing's laws: every token once within the budget, a shared prompt once, and no sample touches another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import group_of, plain_logprobs, sampled, tiny_policy
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.training.packing import make_micro_batches, split_minibatches
from gspo.types import Trajectory

LENGTHS = [3, 9, 1, 5, 7, 2, 4, 6]


def test_packed_scores_equal_one_sequence_at_a_time():
    policy = tiny_policy(temperature=0.7)
    trajectories = sampled(policy, LENGTHS)
    for micro in make_micro_batches(trajectories, token_budget=40):
        logp_T, entropy_T = policy.score(micro)
        wanted_T = torch.cat([plain_logprobs(policy, t) for t in micro.trajectories])
        torch.testing.assert_close(logp_T, wanted_T, rtol=1e-5, atol=1e-5)
        assert (entropy_T > 0).all()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=20), st.integers(33, 200))
def test_packing_keeps_every_token_once_within_the_budget(lengths, budget):
    rng = np.random.default_rng(0)
    policy_free = [replace(_trajectory(rng, n, 12), id=f"s{i}") for i, n in enumerate(lengths)]
    micro_batches = make_micro_batches(policy_free, token_budget=budget)
    seen = [t.id for m in micro_batches for t in m.trajectories]
    assert sorted(seen) == sorted(t.id for t in policy_free)
    for m in micro_batches:
        assert sum(len(t.token_ids) for t in m.trajectories) <= budget
        assert m.num_tokens == sum(len(t.token_ids) - 1 for t in m.trajectories)  # no padding
        targets = np.concatenate([t.token_ids[t.trained] for t in m.trajectories])
        assert (m.target_T.numpy() == targets).all()
        assert (m.token_ids_N[m.predict_T].numpy() == np.concatenate([_before(t) for t in m.trajectories])).all()


def _trajectory(rng, prompt, response):
    tokens = rng.integers(2, 15, prompt + response)
    trained = np.arange(prompt + response) >= prompt
    return Trajectory("s", "g", tokens, trained, np.zeros(response, np.float32), 1.0)


def _before(t):
    return t.token_ids[:-1][t.trained[1:]]


def test_a_sample_longer_than_the_budget_is_named():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"sample s has 25 tokens, more than training.micro_batch_tokens = 20"):
        make_micro_batches([_trajectory(rng, 13, 12)], token_budget=20)


def test_other_sequences_of_a_micro_batch_change_nothing():
    policy = tiny_policy()
    trajectories = sampled(policy, LENGTHS)
    together = make_micro_batches(trajectories, token_budget=1000)[0]
    logp = dict(zip((t.id for t in together.trajectories), _split(policy.score(together)[0], together), strict=True))
    for t in trajectories:
        alone = policy.score(make_micro_batches([t], token_budget=1000)[0])[0]
        torch.testing.assert_close(alone, logp[t.id], rtol=1e-5, atol=1e-6)


# ---- shared prompts ---------------------------------------------------------------------------------------


def _apart(trajectories):
    """The same samples, each in a group of its own, so that nothing is shared."""
    return [replace(t, group=t.id) for t in trajectories]


GROUPS = [("a", 9, [5, 1, 7, 7]), ("b", 4, [12, 3]), ("c", 6, [2])]


@pytest.mark.parametrize("budget", [21, 30, 1000])
def test_shared_prompts_change_neither_scores_nor_gradients(budget):
    rng, policy = np.random.default_rng(0), tiny_policy()
    samples = [t for g in GROUPS for t in group_of(rng, *g)]
    results = []
    for some in (samples, _apart(samples)):
        policy.model.zero_grad()
        scores, tokens = {}, 0
        for micro in make_micro_batches(some, token_budget=budget):
            logp_T = policy.score(micro)[0]
            (logp_T * torch.tensor([t.advantage for t in micro.trajectories])[micro.sequence_T]).sum().backward()
            parts = _split(logp_T.detach(), micro)
            scores |= {t.id: x for t, x in zip(micro.trajectories, parts, strict=True)}
            tokens += micro.num_tokens
        results.append((scores, [p.grad.clone() for p in policy.trainable.values()], tokens))
    (one, one_grads, few), (other, other_grads, many) = results
    for t in samples:
        torch.testing.assert_close(one[t.id], other[t.id], rtol=1e-5, atol=1e-6)
    for a, b in zip(one_grads, other_grads, strict=True):
        assert float((a - b).norm()) <= 1e-5 * float(b.norm())
    assert few < many


def test_a_prompt_goes_through_the_model_once_for_all_its_responses():
    rng = np.random.default_rng(0)
    samples = [t for g in GROUPS for t in group_of(rng, *g)]
    (micro,) = make_micro_batches(samples, token_budget=1000)
    assert micro.num_tokens == (9 + 4 + 0 + 6 + 6) + (4 + 11 + 2) + (6 + 1)
    (apart,) = make_micro_batches(_apart(samples), token_budget=1000)
    assert apart.num_tokens == sum(len(t.token_ids) - 1 for t in samples)
    assert micro.layout.num_pairs < apart.layout.num_pairs


def test_prompts_that_differ_are_never_shared_even_in_onegroup_of():
    rng = np.random.default_rng(0)
    a, b = group_of(rng, "a", 9, [5, 5])
    b = replace(b, token_ids=np.concatenate([b.token_ids[:4], [3 if b.token_ids[4] != 3 else 5], b.token_ids[5:]]))
    (micro,) = make_micro_batches([a, b], token_budget=1000)
    assert micro.num_tokens == 2 * 13
    longer = replace(b, token_ids=a.token_ids, trained=np.arange(14) >= 8, engine_logprobs=np.zeros(6, np.float32))
    (micro,) = make_micro_batches([a, longer], token_budget=1000)
    assert micro.num_tokens == 2 * 13


def test_prompts_that_are_short_beside_their_responses_are_not_shared():
    rng = np.random.default_rng(0)
    (micro,) = make_micro_batches(group_of(rng, "a", 3, [40, 40]), token_budget=1000)
    assert micro.num_tokens == 2 * 42


FAMILIES = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(1, 12), min_size=1, max_size=6)), min_size=1, max_size=5
)


@settings(max_examples=30, deadline=None)
@given(FAMILIES, st.integers(33, 90))
def test_shared_or_not_every_trained_token_is_predicted_once_within_the_budget(groups, budget):
    rng = np.random.default_rng(0)
    samples = [t for i, (prompt, responses) in enumerate(groups) for t in group_of(rng, f"g{i}", prompt, responses)]
    micro_batches = make_micro_batches(samples, token_budget=budget)
    assert sorted(t.id for m in micro_batches for t in m.trajectories) == sorted(t.id for t in samples)
    for m in micro_batches:
        assert m.num_tokens <= budget
        assert (m.target_T.numpy() == np.concatenate([t.token_ids[t.trained] for t in m.trajectories])).all()
        assert (m.token_ids_N[m.predict_T].numpy() == np.concatenate([_before(t) for t in m.trajectories])).all()
        places = [np.flatnonzero(t.trained) - 1 for t in m.trajectories]
        assert (m.position_N[m.predict_T].numpy() == np.concatenate(places)).all()


def _split(x_T, micro):
    return x_T.split([t.num_trained for t in micro.trajectories])


# ---- minibatches ------------------------------------------------------------------------------------------


def test_minibatches_keep_or_spread_groups():
    rng = np.random.default_rng(0)
    trajectories = [replace(_trajectory(rng, 3, 4), id=f"g{i // 4}/{i}", group=f"g{i // 4}") for i in range(32)]
    kept = split_minibatches(trajectories, num_minibatches=4, groups="keep", seed=1)
    spread = split_minibatches(trajectories, num_minibatches=4, groups="spread", seed=1)
    for parts in (kept, spread):
        assert [len(p) for p in parts] == [8] * 4
        assert sorted(t.id for p in parts for t in p) == sorted(t.id for t in trajectories)
    assert all(len({t.group for t in p}) == 2 for p in kept)
    assert any(len({t.group for t in p}) > 2 for p in spread)
    again = split_minibatches(trajectories, num_minibatches=4, groups="spread", seed=1)
    assert [[t.id for t in p] for p in again] == [[t.id for t in p] for p in spread]
