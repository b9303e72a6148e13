"""What several seeds say together: a mean with Student's interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def seed_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """Mean, lower and upper end of its confidence interval, by Student's t over the runs' values (Student 1908).

    Runs are the independent units. It assumes values that are nearly normal over seeds, is not kept within the bounds of a
    share, and is very wide for two seeds, which say little. Raises ValueError for fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"{len(values)} values: an interval over seeds needs at least two")
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    half = t_quantile(len(values) - 1, level) * deviation / math.sqrt(len(values))
    return mean, mean - half, mean + half


def t_quantile(freedom: int, level: float = 0.95) -> float:
    """The t that Student's distribution stays within, either side of 0, with probability `level`.

    freedom: degrees of freedom, 1 or more. Abramowitz and Stegun, 26.7.3 and 26.7.4, inverted by bisection.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        angle = (low + high) / 2
        low, high = (angle, high) if _within(angle, freedom) < level else (low, angle)
    return math.tan(low) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """Probability of |t| < tan(angle) sqrt(freedom): a finite sum for whole degrees of freedom."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
