"""Rewards of a group to advantages. Plain float64 numbers: groups are small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

EQUAL = 1e-12
"""Rewards whose range is within this, or within this share of the largest, are equal: sums of weighted rewards differ by
rounding (0.1 + 0.2 and 0.3, or 0.1 + 0.2 - 0.3 and 0), and a standard deviation would blow that up to an advantage of 1."""


def group_advantages(
    rewards: Sequence[float | None],
    *,
    baseline: Literal["mean", "leave_one_out"] = "mean",
    std: Literal["sample", "population", "none"] = "sample",
) -> list[float | None]:
    """A_i = (r_i - baseline) / std over the rewards of one group [G] -> [G].

    `mean` with `sample` or `population` is GRPO's and GSPO's (arXiv:2507.18071, equation 6), `none` is Dr. GRPO's
    (arXiv:2503.20783), `leave_one_out` is RLOO's (arXiv:2402.14740): r_i minus the mean of the others.
    None is an abstention: it stays None and takes no part in the statistics. Equal rewards, and a single one left
    after abstentions, give exactly 0. Raises ValueError for fewer than two responses and for NaN or infinity.
    """
    if len(rewards) < 2:
        raise ValueError(f"a group of {len(rewards)} has no baseline: advantages need at least 2 responses to a prompt")
    if baseline not in ("mean", "leave_one_out") or std not in ("sample", "population", "none"):
        raise ValueError(f"unknown baseline {baseline!r} or std {std!r}: see the signature")
    known = [r for r in rewards if r is not None]
    if not all(math.isfinite(r) for r in known):
        raise ValueError(f"rewards must be finite, got {known}")
    if len(known) < 2 or max(known) - min(known) <= EQUAL * max(1.0, *map(abs, known)):
        return [None if r is None else 0.0 for r in rewards]
    mean = math.fsum(known) / len(known)
    scale = _deviation(known, mean, std)
    if baseline == "leave_one_out":  # r - (n mean - r)/(n - 1) = (r - mean) n/(n - 1)
        scale *= (len(known) - 1) / len(known)
    return [None if r is None else (r - mean) / scale for r in rewards]


def turn_advantages(
    rewards: Sequence[Sequence[float] | None],
    *,
    discount: float = 1.0,
    baseline: Literal["mean", "leave_one_out"] = "mean",
    std: Literal["sample", "population", "none"] = "sample",
) -> list[tuple[float, ...] | None]:
    """Advantages by turn of one group: rewards [G][turns of each] -> [G][turns of each]; None is an abstention and stays.

    The return of turn k is R_{i,k} = sum over l >= k of discount^(l - k) r_{i,l}. It is compared with the k-th turns of the
    group's other episodes, those that have one: A_{i,k} = group_advantages of R_{.,k}. A turn that no other episode has
    gets 0. Raises what `group_advantages` raises.
    """
    returns = [None if r is None else _returns(r, discount) for r in rewards]
    longest = max((len(r) for r in returns if r is not None), default=0)
    by_turn = [
        group_advantages([r[k] if r is not None and k < len(r) else None for r in returns], baseline=baseline, std=std)
        for k in range(longest)
    ]
    return [None if r is None else tuple(by_turn[k][i] or 0.0 for k in range(len(r))) for i, r in enumerate(returns)]


def _returns(rewards: Sequence[float], discount: float) -> list[float]:
    out, later = [], 0.0
    for reward in reversed(rewards):
        later = reward + discount * later
        out.append(later)
    return out[::-1]


def _deviation(known: Sequence[float], mean: float, std: str) -> float:
    if std == "none":
        return 1.0
    free = len(known) - 1 if std == "sample" else len(known)
    return math.hypot(*(r - mean for r in known)) / math.sqrt(free)  # squares alone would overflow at rewards of 1e160
