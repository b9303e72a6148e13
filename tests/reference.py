"""The objectives once more, in float64, with loops over sequences and tokens, value and analytic gradient.

Written from the equations alone: nothing here is shared with the package. A sequence is a `Row`; masked tokens are skipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Row:
    """One response: log-probabilities under the new, old and reference policy, and one advantage for each token."""

    new: list[float]
    old: list[float]
    mask: list[bool]
    advantage: list[float]
    reference: list[float] | None = None

    @property
    def live(self) -> list[int]:
        return [t for t, on in enumerate(self.mask) if on]


@dataclass
class Answer:
    """The loss, its gradient for each log-probability, and where the clipped branch was taken."""

    loss: float = 0.0
    gradient: list[list[float]] = field(default_factory=list)
    clipped: list[list[bool]] = field(default_factory=list)
    ratios: list[list[float]] = field(default_factory=list)


def exp(x: float) -> float:
    """e^x, infinite where a double cannot hold it."""
    return math.exp(x) if x < 709 else math.inf


def clipped_term(ratio: float, advantage: float, low: float, high: float) -> tuple[float, float, bool]:
    """min(ratio A, clip(ratio) A); how it changes with log ratio; whether the clipped branch was taken."""
    if advantage == 0:
        return 0.0, 0.0, False
    bound = min(max(ratio, 1 - low), 1 + high)
    free, held = ratio * advantage, bound * advantage
    return (held, 0.0, True) if held < free else (free, free, False)


def penalty(d: float, estimator: str) -> tuple[float, float]:
    """An estimate of KL(new, reference) from d = log new - log reference, and its derivative by log new."""
    if estimator == "k1":
        return d, 1.0
    if estimator == "k2":
        return d * d / 2, d
    return math.exp(-d) - 1 + d, 1 - math.exp(-d)


def sequence_ratio(row: Row) -> float:
    """s: the exponential of the mean log-ratio of the tokens that count."""
    return exp(sum(row.new[t] - row.old[t] for t in row.live) / len(row.live))


def objective(
    name: str,
    rows: list[Row],
    low: float,
    high: float,
    *,
    kl: tuple[float, str] | None = None,
    sequences: float | None = None,
    tokens: float | None = None,
) -> Answer:
    """Loss and gradient of `gspo`, `gspo_token`, `grpo` or `dapo` over rows; counts default to those of the rows."""
    sequences = len(rows) if sequences is None else sequences
    tokens = sum(len(row.live) for row in rows) if tokens is None else tokens
    answer = Answer()
    for row in rows:
        length = len(row.live)
        share = 1 / tokens if name == "dapo" else 1 / (sequences * length)  # of one token's term in the whole
        gradient, clipped, ratios = [0.0] * len(row.new), [False] * len(row.new), [1.0] * len(row.new)
        for t in row.live:
            token_ratio = name in ("grpo", "dapo")
            ratio = exp(row.new[t] - row.old[t]) if token_ratio else sequence_ratio(row)
            value, slope, clipped[t] = clipped_term(ratio, row.advantage[t], low, high)
            ratios[t] = ratio
            answer.loss -= share * value
            if name == "gspo":  # the sequence's one term, counted length times at 1/length: each token moves it by 1/length
                for u in row.live:
                    gradient[u] -= share * slope / length
            else:
                gradient[t] -= share * slope
            if kl is not None and row.reference is not None:
                cost, rise = penalty(row.new[t] - row.reference[t], kl[1])
                answer.loss += share * kl[0] * cost
                gradient[t] += share * kl[0] * rise
        answer.gradient.append(gradient)
        answer.clipped.append(clipped)
        answer.ratios.append(ratios)
    return answer
