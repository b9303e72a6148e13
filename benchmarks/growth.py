"""How measured cost grows with size: least squares, and criteria that noise on a shared machine does not decide.

Every y is the least of several repeats: other programs only ever add to a time, so the least is the nearest to its own
cost, and more repeats can only bring it nearer.

Not covered: confidence intervals. A criterion asks whether growth is of another kind (twice the cost a unit at four times
the size), not whether it is a few percent steeper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Numbers = Sequence[float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a curve grows as it should."""

    ok: bool
    """False where it does not."""
    why: str
    """What was compared with what, as a sentence."""


def line(x: Numbers, y: Numbers) -> tuple[float, float]:
    """Least squares of y = a + b x: (a, b)."""
    slope, start = np.polyfit(np.asarray(x, float), np.asarray(y, float), 1)
    return float(start), float(slope)


def exponent(x: Numbers, y: Numbers) -> float:
    """p of y = c x^p, by least squares on logarithms."""
    return line(np.log(np.asarray(x, float)).tolist(), np.log(np.asarray(y, float)).tolist())[1]


def marginal_ratio(x: Numbers, y: Numbers) -> float:
    """Cost of one more unit in the upper half of the sizes over that in the lower half; the middle point is in both.

    1 for a line whatever its start, 4 for a square at five doubling sizes. A lower half that does not grow gives infinity,
    or 0 where the upper half does not grow either.
    """
    middle = len(x) // 2
    lower, upper = line(x[: middle + 1], y[: middle + 1])[1], line(x[middle:], y[middle:])[1]
    if lower <= 0:
        return float("inf") if upper > 0 else 0.0
    return max(0.0, upper / lower)


def grows_linearly(x: Numbers, y: Numbers, *, bound: float, slack: float = 0.0) -> Verdict:
    """The upper half's cost a unit is at most bound times the lower half's. slack: growth in all that is no growth."""
    ratio = marginal_ratio(x, y)
    ok = ratio <= bound or max(y) - min(y) <= slack
    return Verdict(
        ok, f"one more unit costs {ratio:.2f} times as much in the upper half as in the lower; allowed {bound:g}"
    )


def stays_flat(x: Numbers, y: Numbers, *, bound: float, slack: float = 0.0) -> Verdict:
    """No y is above bound times that of the least size, plus slack."""
    ratio = max(y) / y[0] if y[0] > 0 else float("inf")
    return Verdict(
        max(y) <= bound * y[0] + slack, f"the largest is {ratio:.2f} times that of the least size; allowed {bound:g}"
    )


def grows_as(work: Numbers, y: Numbers, *, bound: float) -> Verdict:
    """In the upper half y = c work^p with p at most bound, work being counted arithmetic."""
    middle = len(work) // 2
    power = exponent(work[middle:], y[middle:])
    return Verdict(
        power <= bound, f"seconds grow as counted FLOPs to the power {power:.2f} in the upper half; allowed {bound:g}"
    )


def slope_below(x: Numbers, y: Numbers, *, bound: float, unit: str) -> Verdict:
    """The slope of a line through all points is at most bound, in `unit`."""
    slope = line(x, y)[1]
    return Verdict(slope <= bound, f"grows by {slope:,.3g} {unit}; allowed {bound:,.3g}")
