"""Rewards that an environment gave."""

from __future__ import annotations

import math

from ..config import EnvironmentReward
from ..types import Sample, Score
from .verifier import Verifier, each


def environment(config: EnvironmentReward) -> Verifier:
    """The sum over an episode's turns, a turn without a reward being 0.

    Raises ValueError where an environment ended an episode and scored none of its turns. One that a limit of turns or
    tokens broke off before is worth 0. There is no top: the environment alone knows what an episode can earn.
    """
    return Verifier(each(_sum), top=None)


def _sum(sample: Sample) -> Score:
    rewards = [turn.reply.reward for turn in sample.turns]
    given = [float(r) for r in rewards if r is not None]
    if not given and not sample.turns[-1].reply.done:
        return Score(0.0, "the episode broke off before a turn was scored")
    if not given:
        raise ValueError("the environment scored none of the turns: let step return Reply(reward=...) at one at least")
    return Score(math.fsum(given), "by turn: " + ", ".join("-" if r is None else f"{r:g}" for r in rewards))
