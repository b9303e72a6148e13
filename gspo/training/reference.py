"""The reference policy of a KL term: the policy as training found it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from ..config import Config
from ..types import Trajectory
from .policy import Policy, load_policy, shard
from .scoring import score_trajectories

ReferenceScore = Callable[[Sequence[Trajectory]], dict[str, np.ndarray]]


def open_reference(config: Config, policy: Policy, path: Path | None) -> ReferenceScore | None:
    """A function from trajectories to their log-probabilities under the reference, float32 by id; None without a KL term.

    path: the weights that training started from (a cold start's), None for the recipe's model. With LoRA the reference
    is the policy without its adapters; otherwise it is a second model in memory, dealt over ranks as the policy is.
    """
    if config.objective.kl is None:
        return None
    if policy.adapter is not None:
        reference, scope = policy, policy.adapter.disable_adapter
    else:
        reference = load_policy(config.model, temperature=policy.temperature, seed=config.seed, path=path)
        reference.model.requires_grad_(False)
        shard(reference, policy.world)
        scope = nullcontext

    def score(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
        with scope():
            return score_trajectories(reference, trajectories, token_budget=config.training.micro_batch_tokens)

    return score
