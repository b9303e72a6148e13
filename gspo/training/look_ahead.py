"""Where most of a minibatch is clipped: which sequences still move the weights, packed for passes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import Config
from ..types import Trajectory
from .diagnosis import Ratios
from .packing import MicroBatch, make_micro_batches


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass over a micro-batch, and what the loss makes of it."""

    micro: MicroBatch
    logp_T: Tensor
    """Log-probabilities of the trained tokens."""
    grad_T: Tensor
    """Gradient of the loss with respect to them."""
    loss: float
    """The micro-batch's share of the minibatch's."""
    ratios: Ratios
    """Diagnosis, in the host's memory."""


def clipped_tokens(ratios: Sequence[Ratios]) -> tuple[int, int]:
    """Trained tokens in sequences whose every token is clipped, and all of them."""
    clipped = total = 0
    for r in ratios:
        free_S = torch.zeros(len(r.ids)).index_add(0, r.sequence_T, (~r.clipped_T).float())
        clipped += int((free_S[r.sequence_T] == 0).sum())
        total += len(r.sequence_T)
    return clipped, total


def moving(passes: Sequence[Pass], config: Config) -> list[tuple[MicroBatch, Tensor]]:
    """The sequences with a gradient, packed anew, with the gradient that was found of their log-probabilities.

    It is not found again: packed otherwise a log-probability is rounded otherwise, in bfloat16 by enough to move s by the
    clip range, while those that were looked at stood in the very micro-batches of the old ones.
    """
    live: dict[str, tuple[Trajectory, Tensor]] = {}
    for one in passes:
        trajectories = one.micro.trajectories
        by_sequence = one.grad_T.split([t.num_trained for t in trajectories])
        moves_S = torch.zeros(len(trajectories), device=one.grad_T.device).index_add(
            0,
            one.micro.sequence_T,
            (one.grad_T != 0).float(),  # NaN moves too: the step has to find it
        )
        for t, grad_T, moves in zip(trajectories, by_sequence, moves_S.tolist(), strict=True):
            if moves:
                live[t.id] = t, grad_T
    if not live:
        return []
    packed = make_micro_batches(
        [t for t, _ in live.values()],
        token_budget=config.training.micro_batch_tokens,
        device=passes[0].grad_T.device,
    )
    return [(micro, torch.cat([live[t.id][1] for t in micro.trajectories])) for micro in packed]
