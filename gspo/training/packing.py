"""Trajectories to micro-batches: one row of tokens, no padding, a group's prompt once, no attention across samples.

N packed tokens, T trained tokens among them, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..types import Trajectory
from .attention import Layout, Segment


class TrainingError(Exception):
    """Training cannot go on; the message names the samples."""


def on_device(array: np.ndarray, device: torch.device | str) -> Tensor:
    """An array on a device. The host does not wait for what a GPU has still to do before."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else host.to(device)


SHARED_FROM = {"cpu": 0.1, "cuda": 0.25}
"""Prompts are shared where that leaves out this share of the tokens or more, by kind of device. On a CPU less did not pay
at unequal lengths; on an H200 attention's second pair of kernels cost a quarter of a layer, so that a sixth fewer tokens
took 1.06 times as long, and more than half fewer 0.56 times."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What goes through the model at once."""

    trajectories: tuple[Trajectory, ...]
    """The S sequences, in the order in which their trained tokens stand."""
    token_ids_N: Tensor
    """int64. A prompt that sequences share stands once; the last token of each sequence is left out: nothing is predicted
    from it."""
    position_N: Tensor
    """int64, counted from 0 in each sequence."""
    layout: Layout
    """How attention finds the sequences."""
    places: tuple[np.ndarray, ...]
    """int64 [tokens - 1] of each sequence: the packed place of each of its tokens but the last."""
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


Family = list[Trajectory]
"""Trajectories that share their prompt in a micro-batch, longest first; one alone shares nothing."""


def make_micro_batches(
    trajectories: Sequence[Trajectory], *, token_budget: int, device: torch.device | str = "cpu"
) -> list[MicroBatch]:
    """Pack trajectories, longest first, into micro-batches of at most token_budget tokens each.

    The prompt of a group goes through the model once for all its responses in a micro-batch; where that saves little, each
    sequence has its own, and those of like length share a micro-batch. The sum of losses over micro-batches is that of the
    minibatch however it is split. Raises ValueError for a trajectory longer than the budget, by name.
    """
    by_length = sorted(trajectories, key=lambda t: -len(t.token_ids))
    if by_length and len(by_length[0].token_ids) > token_budget:
        raise ValueError(
            f"sample {by_length[0].id} has {len(by_length[0].token_ids)} tokens, more than "
            f"training.micro_batch_tokens = {token_budget}"
        )
    return [_pack(bin_, device) for bin_ in _fill(families(by_length, device), token_budget)]


def families(trajectories: Sequence[Trajectory], device: torch.device | str) -> list[Family]:
    """Trajectories by the prompts that they share, in the order of first members; each alone where that saves little."""
    found: dict[tuple[str, bytes], Family] = {}
    for t in trajectories:
        found.setdefault((t.group, t.token_ids[: _prompt_length(t)].tobytes()), []).append(t)
    left_out = sum(len(t.token_ids) for t in trajectories) - sum(num_tokens(f) for f in found.values())
    if left_out < SHARED_FROM[torch.device(device).type] * sum(len(t.token_ids) for t in trajectories):
        return [[t] for t in trajectories]
    return list(found.values())


def num_tokens(family: Family) -> int:
    """Tokens of a family whose prompt stands once."""
    return sum(len(t.token_ids) for t in family) - _prompt_length(family[0]) * (len(family) - 1)


def _prompt_length(trajectory: Trajectory) -> int:
    """Tokens before the first trained one."""
    return int(trajectory.trained.argmax())


def _fill(some: Sequence[Family], token_budget: int) -> list[list[Family]]:
    """Micro-batches, filled one after the other; a family that does not fit into one goes on in the next."""
    bins: list[list[Family]] = []
    filled = token_budget
    for family in some:
        prompt, new = _prompt_length(family[0]), True
        for t in family:
            more = len(t.token_ids) - (0 if new else prompt)
            if filled + more > token_budget:
                bins.append([])
                filled, new, more = 0, True, len(t.token_ids)
            if new:
                bins[-1].append([])
            bins[-1][-1].append(t)
            filled, new = filled + more, False
    return bins


def _pack(some: Sequence[Family], device: torch.device | str) -> MicroBatch:
    """Shared prompts first, then what is left of the sequences after each, then the other sequences."""
    shared, alone = [f for f in some if len(f) > 1], [f for f in some if len(f) == 1]
    segments, ids, positions = [], [], []
    for family in shared:
        length = _prompt_length(family[0])
        segments.append(Segment(length))
        ids.append(family[0].token_ids[:length])
        positions.append(np.arange(length))
    start_of_prompt = np.cumsum([0, *(s.length for s in segments)])
    place, places, predict, target = int(start_of_prompt[-1]), [], [], []
    trajectories: list[Trajectory] = []
    for number, family in enumerate((*shared, *alone)):
        prompt = number if number < len(shared) else None
        for t in family:
            first = 0 if prompt is None else segments[prompt].length
            own = len(t.token_ids) - 1 - first
            before = [] if prompt is None else start_of_prompt[prompt] + np.arange(first)
            place_of_token = np.concatenate([before, place + np.arange(own)]).astype(np.int64)
            trajectories.append(t)
            places.append(place_of_token)
            predict.append(place_of_token[t.trained[1:]])
            target.append(t.token_ids[1:][t.trained[1:]])
            if own:
                segments.append(Segment(own, prompt))
                ids.append(t.token_ids[first:-1])
                positions.append(np.arange(first, first + own))
                place += own

    def tensor(parts: list[np.ndarray]) -> Tensor:
        return on_device(np.ascontiguousarray(np.concatenate(parts)), device)

    return MicroBatch(
        trajectories=tuple(trajectories),
        token_ids_N=tensor(ids),
        position_N=tensor(positions),
        layout=Layout.of(segments, device),
        places=tuple(places),
        predict_T=tensor(predict),
        target_T=tensor(target),
        sequence_T=tensor([np.repeat(np.arange(len(trajectories)), [len(p) for p in predict])]),
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
