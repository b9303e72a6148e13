"""Credit by turn: the formula by hand, and what reaches the objective."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.advantages import group_advantages, turn_advantages
from gspo.config import AdvantageConfig, EnvironmentReward, ExactReward
from gspo.credit import advantages, trajectory
from gspo.types import Completion, Prompt, Reply, Sample, Score, Scored, Turn

NUMBERS = st.floats(-5, 5, allow_nan=False)


def episode(name, rewards, lengths, done=True):
    """An episode with these rewards, responses of these lengths and two tokens between them."""
    turns = []
    for k, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        tokens = np.full(length, 10 * (k + 1))
        completion = Completion(tokens, np.full(length, -1.0, np.float32), "stop", k, 0)
        last = k == len(rewards) - 1
        between = np.zeros(0 if last else 2, np.int64)
        turns.append(Turn(completion, "", Reply(done=last and done, reward=reward), between))
    joined = Completion(
        np.concatenate([t.completion.token_ids for t in turns]),
        np.concatenate([t.completion.logprobs for t in turns]), "stop", 0, 0,
    )  # fmt: skip
    prompt = Prompt(0, None, "?", (7, 8, 9), None, {}, "r0")
    return Sample(name, prompt, joined, "", tuple(turns))


def scored(sample, outcome, weight=1.0):
    given = sum(t.reply.reward or 0.0 for t in sample.turns)
    parts = {"environment": Score(given), "exact": Score(outcome)}
    return Scored(sample, weight * given + outcome, parts)


def test_turns_of_one_index_are_compared_with_each_other():
    own = turn_advantages([[1, 0], [0, 1], [1]], discount=0.0, std="none")
    assert np.allclose(own[0], [1 / 3, -0.5]) and np.allclose(own[1], [-2 / 3, 0.5]) and np.allclose(own[2], [1 / 3])
    later = turn_advantages([[0, 1], [0, 0]], discount=0.5, std="none")
    assert later == [(0.25, 0.5), (-0.25, -0.5)]


def test_a_turn_that_nobody_else_has_and_equal_returns_give_0_and_abstentions_stay():
    assert turn_advantages([[1, 1, 5], [1, 1], None], discount=0.0) == [(0.0, 0.0, 0.0), (0.0, 0.0), None]


@given(st.lists(NUMBERS, min_size=2, max_size=8), st.floats(0, 1))
def test_with_one_turn_the_advantage_is_the_groups(rewards, discount):
    assert turn_advantages([[r] for r in rewards], discount=discount) == [(a,) for a in group_advantages(rewards)]


@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=2, max_size=6))
def test_without_a_discount_the_first_turn_has_the_advantage_of_the_whole(rewards):
    first = [a[0] for a in turn_advantages(rewards, std="none") if a is not None]
    assert np.allclose(first, group_advantages([sum(r) for r in rewards], std="none"), atol=1e-9)


def test_other_rewards_belong_to_the_last_turn_and_weights_count():
    rewards = [EnvironmentReward(weight=2.0), ExactReward()]
    group = [scored(episode("a", [1, None], [2, 3]), 0.0, 2.0), scored(episode("b", [0, None], [1, 1]), 1.0, 2.0)]
    config = AdvantageConfig(credit="turn", turn_discount=0.0, std="none")
    assert advantages(group, config, rewards) == [(1.0, -0.5), (-1.0, 0.5)]
    whole = AdvantageConfig(std="none")
    assert advantages(group, whole, rewards) == [0.5, -0.5]


def test_every_trained_token_has_the_advantage_of_its_turn():
    t = trajectory(episode("a", [1, 0, 0], [2, 1, 3]), (0.5, -1.0, 2.0))
    assert t.token_ids.tolist() == [7, 8, 9, 10, 10, 0, 0, 20, 0, 0, 30, 30, 30]
    assert t.trained.tolist() == [i in (3, 4, 7, 10, 11, 12) for i in range(13)]
    assert isinstance(t.advantage, np.ndarray) and t.advantage.tolist() == [0.5, 0.5, -1.0, 2.0, 2.0, 2.0]
    assert t.num_trained == 6


@pytest.mark.parametrize("abstained", [0, 1])
def test_an_abstention_leaves_the_sample_out(abstained):
    group = [scored(episode(n, [r], [1]), 0.0) for n, r in (("a", 1.0), ("b", 0.0), ("c", 1.0))]
    group[abstained] = Scored(group[abstained].sample, None, group[abstained].parts)
    got = advantages(group, AdvantageConfig(credit="turn"), [EnvironmentReward(), ExactReward()])
    assert [a is None for a in got] == [i == abstained for i in range(3)]
