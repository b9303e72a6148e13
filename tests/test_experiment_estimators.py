"""The estimators of experiments/ on cases whose answer is known."""

import copy
import math
from functools import partial
from types import SimpleNamespace

import gradient_variance
import gradient_variance_numbers as numbers
import hidden_change
import numpy as np
import pytest
import sums
import torch
import turns
from conftest import tiny_policy

from gspo.objectives import OBJECTIVES, gspo, pack
from gspo.training.packing import make_micro_batches
from gspo.types import Completion, Trajectory

WHOLE = partial(gradient_variance.Sketch, width=None)


def once(groups):
    return np.ones((1, groups), int)


def test_variance_and_mean_from_a_gram_matrix_are_those_of_the_vectors():
    x = np.random.default_rng(0).normal(size=(7, 3)) + 2
    trace, mean2 = numbers.moments(x @ x.T, once(7))
    assert trace[0] == pytest.approx(np.trace(np.cov(x.T)))
    assert mean2[0] == pytest.approx((x.mean(0) ** 2).sum() - trace[0] / 7)


def test_a_resample_counts_no_pair_of_a_group_with_itself():
    x = np.random.default_rng(1).normal(size=(400, 12, 50))  # no signal at all: |mean|^2 is 0
    counts = numbers.counts(12)
    resampled = np.mean([numbers.moments(one @ one.T, counts)[1][1:].mean() for one in x[:40]])
    assert abs(resampled) < 0.4  # with such pairs counted it would be 50 / 12


def test_a_sketch_is_linear_and_keeps_products():
    numbers, width = torch.Generator().manual_seed(1), 4096
    parts = [torch.randn(2, 3000, generator=numbers), torch.randn(2, 50, 40, generator=numbers)]
    sketch = gradient_variance.Sketch([part[0] for part in parts], width)
    a, b = (sketch(tuple(part[i] for part in parts)) for i in (0, 1))
    torch.testing.assert_close(sketch(tuple(2 * part[0] - part[1] for part in parts)), 2 * a - b, rtol=1e-4, atol=1e-4)
    whole = torch.cat([part.reshape(2, -1) for part in parts], 1)
    spread = float(whole[0].norm() * whole[1].norm()) / math.sqrt(width)
    assert abs(float(a @ b - whole[0] @ whole[1])) < 4 * spread
    assert abs(float(a @ a - whole[0] @ whole[0])) < 4 * math.sqrt(2) * float(whole[0] @ whole[0]) / math.sqrt(width)
    assert sketch.width == width < sketch.size == 5000


def test_a_power_law_has_its_exponent_as_slope():
    lengths = (32, 128, 512)
    values = 3.0 * np.array(lengths, float)[:, None] ** np.array([[-1.0, 0.5]])
    assert numbers.slope(lengths, values) == pytest.approx([-1.0, 0.5])


def test_what_an_arm_adds_is_what_is_left_beside_a_multiple_of_the_base():
    base, rest = np.array([[3.0, 4.0, 0.0]] * 2), np.array([[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]])
    vectors = np.stack([base, 2 * base + rest])
    factor, share = numbers.added(np.einsum("arp,brp->rab", vectors, vectors), 1, 0, once(2))
    assert factor[0] == pytest.approx(2.0)
    assert share[0] == pytest.approx(1 / 100)


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1)


@pytest.fixture
def group(policy, monkeypatch):
    """Three policies that differ, and responses of a group with what they know of the old one."""
    rng, advantages, lengths = np.random.default_rng(0), [1.2, -0.4, -0.8], [5, 9, 7]
    monkeypatch.setattr(gradient_variance, "G", 4)
    policies = {"old": policy, **{name: copy.deepcopy(policy) for name in gradient_variance.STEPS}}
    with torch.no_grad():
        for scale, name in ((0.02, "near"), (0.1, "far")):
            for p in policies[name].trainable.values():
                p += scale * torch.from_numpy(rng.normal(size=p.shape)).float()
    some = []
    for k, n in enumerate(lengths):
        tokens, old_T = rng.integers(3, 15, n + 2), -3 + 0.5 * rng.normal(size=n).astype(np.float32)
        some.append(Trajectory(f"{k}", "", tokens, np.arange(n + 2) >= 2, old_T, advantages[k]))
    return policies, some, {t.id: rng.normal(size=t.num_trained).astype(np.float32) for t in some}


@pytest.mark.parametrize("budget", [100, 14])
def test_every_arms_gradient_is_that_of_the_groups_loss(group, monkeypatch, budget):
    policies, some, noises = group
    monkeypatch.setattr(gradient_variance, "TOKENS", budget)
    found, rows = gradient_variance.group_gradients(policies, some, noises, WHOLE(list(policies["old"].trainable.values())))
    (micro,) = make_micro_batches(some, token_budget=100)
    for k, arm in enumerate(gradient_variance.ARMS):
        policy, algorithm = policies[arm.policy], OBJECTIVES["grpo" if arm.ratio == "token" else "gspo"]
        logp_T = policy.score(micro)[0]
        old_T = torch.from_numpy(np.concatenate([t.engine_logprobs + arm.noise * noises[t.id] for t in micro.trajectories]))
        below_T = logp_T.detach() if arm.ratio == "none" else old_T
        advantage_S = torch.tensor([t.advantage for t in micro.trajectories])
        packed = pack(below_T, micro.sequence_T, advantage_S, global_sequences=4)
        clip = algorithm.clip if arm.clipped else gradient_variance.UNCLIPPED
        loss = algorithm.function(logp_T, packed, clip, None).loss
        whole = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.trainable.values()))])
        torch.testing.assert_close(found[k], -whole, rtol=1e-4, atol=1e-6)
        mine = [row for row in rows if row["arm"] == arm.name]
        assert len(mine) == 3 and sum(row["sign"] for row in mine) == -1
        d = (logp_T.detach() - old_T).double()
        by_response = [float(d[micro.sequence_T == i].mean()) for i in range(3)]
        assert sorted(row["log_s"] for row in mine) == pytest.approx(sorted(by_response), abs=1e-6)
        assert arm.clipped or not any(row["lost"] for row in mine)
    assert any(row["lost"] for row in rows)


def test_responses_without_a_signal_are_left_out_and_every_group_has_its_gradient(group, monkeypatch):
    policies, rng = group[0], np.random.default_rng(1)
    completions = [Completion(rng.integers(3, 15, 9), np.full(9, -3, np.float32), "length", 0, k) for k in range(12)]
    signals = np.array([1.0, -1.0, 0.0, 0.0, 0.5, 0.0, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0])
    monkeypatch.setattr(gradient_variance, "sample", lambda *args: completions)
    monkeypatch.setattr(gradient_variance, "advantages", lambda *args: signals)
    ground = gradient_variance.Ground(None, "1+", {}, {9: 3})
    products, rows = gradient_variance.gradients(policies, ground, 9, 0)
    assert len(rows) == 4 * len(gradient_variance.ARMS)
    squares = np.einsum("agg->ag", products["by_arm"])
    assert (squares[0, :2] > 0).all() and not squares[:, 2].any()
    assert np.allclose(squares.T, np.einsum("gaa->ga", products["by_group"]))


def test_a_pull_does_not_take_one_weighing_for_another(policy):
    t = Trajectory("a", "g", np.array([4, 5, 6, 7]), np.arange(4) >= 1, np.zeros(3, np.float32), 1.0)
    (micro,) = make_micro_batches([t], token_budget=100)
    parameters = list(policy.trainable.values())
    pull = gradient_variance.Pull(policy.score(micro)[0], parameters, WHOLE(parameters))
    first, other = pull(torch.tensor([1.0, 1.0, 1.0])), pull(torch.tensor([1.0, 1.0, 0.9]))
    torch.testing.assert_close(pull(torch.tensor([0.5, 0.5, 0.5])), first / 2)
    assert float((first - other).norm()) > 0.01 * float(first.norm())
    assert not pull(torch.zeros(3)).any()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_room_is_what_gspo_leaves_unclipped(sign):
    n, k = 200, 4
    for share, clipped in ((0.99, False), (1.01, True)):
        d_T = torch.zeros(n, dtype=torch.float64)
        d_T[:k] = share * (math.log(hidden_change.largest_ratio(n, k)) if sign > 0 else hidden_change.room(n)[0] / k)
        result = gspo(d_T, pack(torch.zeros_like(d_T), torch.zeros(n, dtype=torch.int64), torch.tensor([sign])))
        assert bool(result.clipped_T.any()) == clipped


def test_the_shortest_response_that_hides_a_ratio():
    n = hidden_change.shortest_hiding(1.2)
    assert hidden_change.largest_ratio(n, 1) >= 1.2 > hidden_change.largest_ratio(n - 1, 1)


def test_the_share_inside_by_chance_is_that_of_a_simulation():
    d = np.random.default_rng(0).normal(-1e-4, 0.01, (20_000, 64))
    s = np.exp(d.mean(1))
    simulated = ((s >= 1 - 3e-4) & (s <= 1 + 4e-4)).mean()
    assert hidden_change.inside_by_chance(0.01, 64, -1e-4) == pytest.approx(simulated, abs=0.02)


def test_responses_and_what_the_unclipped_hide():
    moved = [
        {"ratio": 1.0, "largest_log_ratio": 0.5, "clipped": False},
        {"ratio": math.exp(0.1), "largest_log_ratio": 0.1, "clipped": True},
    ]
    still = [{"ratio": 1.0, "largest_log_ratio": 0.0, "clipped": False}]  # the first minibatch moves nothing
    untrained = [{"ratio": None, "largest_log_ratio": None, "clipped": None}]
    found = hidden_change.responses([*still, *moved, *untrained])
    assert [(r["largest"], r["clipped"]) for r in found] == [(0.5, False), (0.1, True)]
    step = hidden_change.summary(found)
    assert (step["clipped"], step["inside"], step["inside_past_grpo"]) == (0.5, 0.5, 1.0)
    assert (step["free_past_grpo"], step["free_past_2"], step["all_past_grpo"]) == (1, 0, 0.5)


def test_a_number_that_foretells_a_fall_of_reward_is_seen_to():
    rows = [{"seed": 0, "step": t, "reward": -0.001 * t**2, "x": math.sqrt(t), "y": -t} for t in range(20)]
    assert hidden_change.lead(rows, "x") == [pytest.approx(-1.0)]  # it falls by more from each step to the next
    assert hidden_change.lead(rows, "y") == [pytest.approx(1.0)]
    assert hidden_change.rank_correlation([1, 2, 3, 4], [1, 8, 27, 64]) == pytest.approx(1.0)


def test_additions_are_scored_one_by_one():
    completion = Completion(np.zeros(1, np.int64), np.zeros(1, np.float32), "length", 0, 0)
    samples = [
        SimpleNamespace(prompt=SimpleNamespace(text="7+5="), text=text, completion=completion)
        for text in ("12 3+4=7 8+", "12 3+4=8 1+1=2", "1", "12 3+=3 ")
    ]
    assert sums.right_share(samples) == [1.0, 0.5, 0.0, 0.5]


def test_turns_that_are_missing_are_wrong():
    turn = {"text": "12", "reply": [{"role": "user", "content": "3+4="}]}
    lines = [{"prompt": "7+5=", "turns": [turn, {"text": "7", "reply": []}]}, {"prompt": "7+5="}]
    assert turns.right_by_turn(lines) == [0.5, 0.5, 0.0, 0.0]
