"""Scored groups to advantages, and samples to what is trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .advantages import group_advantages, turn_advantages
from .config import AdvantageConfig, EnvironmentReward, Reward, reward_name
from .types import Advantage, Sample, Scored, Trajectory

NO_PENALTY: Mapping[str, float] = {}


def advantages(
    group: Sequence[Scored], config: AdvantageConfig, rewards: Sequence[Reward], penalty: Mapping[str, float] = NO_PENALTY
) -> list[Advantage]:
    """The advantage of each sample of a group, None where a reward abstained; with credit by turn a tuple, [turns].

    penalty: by sample id what is taken off the reward first, for credit by response alone. With credit by turn the reward
    of a turn is the environment's times its weight; the other rewards judge the episode and belong to its last turn.
    """
    if config.credit == "response":
        totals = [None if s.total is None else s.total - penalty.get(s.sample.id, 0.0) for s in group]
        return list(group_advantages(totals, baseline=config.baseline, std=config.std))
    by_turn = [_turn_rewards(s, rewards) for s in group]
    return list(turn_advantages(by_turn, discount=config.turn_discount, baseline=config.baseline, std=config.std))


def _turn_rewards(scored: Scored, rewards: Sequence[Reward]) -> list[float] | None:
    if scored.total is None:
        return None
    kinds = {reward_name(r): r for r in rewards}
    others = sum(
        kinds[name].weight * part.value
        for name, part in scored.parts.items()
        if part.value is not None and not isinstance(kinds[name], EnvironmentReward)
    )
    weight = sum(r.weight for r in rewards if isinstance(r, EnvironmentReward))
    given = [weight * float(turn.reply.reward or 0.0) for turn in scored.sample.turns]
    return [*given[:-1], given[-1] + others]


def trajectory(
    sample: Sample,
    advantage: float | Sequence[float] = 0.0,
    reference_logprobs: np.ndarray | None = None,
    version: int | None = None,
) -> Trajectory:
    """The tokens of a sample as they were read and sampled; those between responses are in its context and not trained on.

    advantage: of the sample, or of each of its turns. version: the policy's, by which tokens are stale; None: none is.
    """
    prompt = np.array(sample.prompt.token_ids, np.int64)
    sampled = [turn.completion.token_ids for turn in sample.turns] or [sample.completion.token_ids]
    between = [turn.reply_ids for turn in sample.turns] or [prompt[:0]]
    pieces = [(prompt, False)]
    for response, reply in zip(sampled, between, strict=True):
        pieces += [(response, True), (reply, False)]
    tokens = np.concatenate([ids for ids, _ in pieces])
    trained = np.concatenate([np.full(len(ids), own) for ids, own in pieces])
    if isinstance(advantage, Sequence):
        advantage_T = np.repeat(np.array(advantage, np.float32), [len(ids) for ids in sampled])
    else:
        advantage_T = advantage
    completion, stale = sample.completion, None
    if version is not None and completion.weight_version < version:  # versions only grow
        stale = completion.version_T < version
    return Trajectory(
        id=sample.id,
        group=sample.prompt.id,
        token_ids=tokens,
        trained=trained,
        engine_logprobs=completion.logprobs,
        advantage=advantage_T,
        reference_logprobs=reference_logprobs,
        stale=stale,
        routed_experts=completion.routed_experts,
    )
