"""Log-probabilities without gradients, through the packed path of the update."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..types import Trajectory
from .packing import make_micro_batches
from .policy import Policy


@torch.no_grad()
def score_trajectories(
    policy: Policy, trajectories: Sequence[Trajectory], *, token_budget: int, temperature: float | None = None
) -> dict[str, np.ndarray]:
    """By id the log-probability of each trained token, float32 [trained tokens]; at the sampling temperature unless told.

    token_budget: tokens that go through the model at once. Raises ValueError for a trajectory longer than that, by id.
    Ranks that share the policy call it together, each with trajectories of its own.
    """
    out = {}
    with policy.whole():
        for micro in make_micro_batches(trajectories, token_budget=token_budget, device=policy.device):
            logp_T = policy.score(micro, temperature=temperature)[0].float().cpu().numpy()
            ends = np.cumsum([t.num_trained for t in micro.trajectories])[:-1]
            out |= {t.id: x for t, x in zip(micro.trajectories, np.split(logp_T, ends), strict=True)}
    return out


def score_ends(
    policy: Policy, sequences: Sequence[Sequence[int]], counts: Sequence[int], *, temperature: float
) -> list[np.ndarray]:
    """Log-probability of the last counts[i] tokens of each sequence, given all before them: float32 [counts[i]] each."""
    trajectories = [
        Trajectory(
            id=str(i),
            group=str(i),
            token_ids=np.array(tokens, np.int64),
            trained=np.arange(len(tokens)) >= len(tokens) - count,
            engine_logprobs=np.zeros(count, np.float32),
            advantage=0.0,
        )
        for i, (tokens, count) in enumerate(zip(sequences, counts, strict=True))
    ]
    budget = sum(len(tokens) for tokens in sequences)
    by_id = score_trajectories(policy, trajectories, token_budget=budget, temperature=temperature)
    return [by_id[t.id] for t in trajectories]
