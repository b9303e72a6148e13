"""Trajectories to micro-batches: one row of tokens, no padding, no attention across samples.

N packed tokens, T trained tokens among them, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..types import Trajectory
from .attention import Layout


class TrainingError(Exception):
    """Training cannot go on; the message names the samples."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What goes through the model at once."""

    trajectories: tuple[Trajectory, ...]
    """The S sequences, in packed order."""
    token_ids_N: Tensor
    """int64. The last token of each sequence is left out: nothing is predicted from it."""
    position_N: Tensor
    """int64, counted from 0 in each sequence."""
    layout: Layout
    """How attention finds the sequences."""
    predict_T: Tensor
    """int64, the packed place from which each trained token is predicted."""
    target_T: Tensor
    """int64, the trained tokens."""
    sequence_T: Tensor
    """int64, the sequence of each trained token."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes (N)."""
        return len(self.token_ids_N)


def make_micro_batches(
    trajectories: Sequence[Trajectory], *, token_budget: int, device: torch.device | str = "cpu"
) -> list[MicroBatch]:
    """Pack trajectories, longest first, into micro-batches of at most token_budget tokens each.

    Sequences of like length share a micro-batch, so that attention, which pads on its own inside, pads little. The sum
    of losses over micro-batches is that of the minibatch however it is split. Raises ValueError for a trajectory longer
    than the budget, by name.
    """
    by_length = sorted(trajectories, key=lambda t: -len(t.token_ids))
    if by_length and len(by_length[0].token_ids) > token_budget:
        raise ValueError(
            f"sample {by_length[0].id} has {len(by_length[0].token_ids)} tokens, more than "
            f"training.micro_batch_tokens = {token_budget}"
        )
    bins: list[list[Trajectory]] = []
    filled = token_budget
    for trajectory in by_length:
        if filled + len(trajectory.token_ids) > token_budget:
            bins.append([])
            filled = 0
        bins[-1].append(trajectory)
        filled += len(trajectory.token_ids)
    return [_pack(tuple(b), device) for b in bins]


def _pack(trajectories: tuple[Trajectory, ...], device: torch.device | str) -> MicroBatch:
    lengths = [len(t.token_ids) - 1 for t in trajectories]
    trained_N = np.concatenate([t.trained[1:] for t in trajectories])
    targets_N = np.concatenate([t.token_ids[1:] for t in trajectories])
    sequence_N = np.repeat(np.arange(len(trajectories)), lengths)

    def tensor(x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(device)

    return MicroBatch(
        trajectories=trajectories,
        token_ids_N=tensor(np.concatenate([t.token_ids[:-1] for t in trajectories])),
        position_N=tensor(np.concatenate([np.arange(n) for n in lengths])),
        layout=Layout.of(lengths, device),
        predict_T=tensor(np.flatnonzero(trained_N)),
        target_T=tensor(targets_N[trained_N]),
        sequence_T=tensor(sequence_N[trained_N]),
    )


def split_minibatches(
    trajectories: Sequence[Trajectory], *, num_minibatches: int, groups: str, seed: int
) -> list[list[Trajectory]]:
    """Deal a rollout batch into minibatches, at random from the seed.

    groups = "spread" deals samples one by one, "keep" deals whole groups. Abstentions can leave the parts unequal by one
    sample or group. Raises TrainingError if there are fewer units than minibatches.
    """
    units: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        units.setdefault(trajectory.group if groups == "keep" else trajectory.id, []).append(trajectory)
    if len(units) < num_minibatches:
        what = "groups" if groups == "keep" else "samples"
        raise TrainingError(
            f"{len(units)} {what} were scored, which does not fill training.minibatches = {num_minibatches}: the rewards "
            "abstained on the others"
        )
    order = np.random.default_rng(seed).permutation(len(units))
    dealt = list(units.values())
    return [[t for k in part for t in dealt[k]] for part in np.array_split(order, num_minibatches)]
