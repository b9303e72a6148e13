"""Estimates of success and how sure they are. Pure arithmetic on plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its confidence interval; all three lie in [0, 1]."""

    mean: float
    """The estimate."""
    low: float
    """Lower end."""
    high: float
    """Upper end."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of k samples is correct, estimated without bias from num_samples samples.

    1 - C(n - c, k) / C(n, k): the share of all subsets of size k that hold a correct sample (Chen et al. 2021,
    arXiv:2107.03374, eq. 1), in exact integers. Raises ValueError where it is undefined: k < 1, k > num_samples, or a
    count of correct samples outside [0, num_samples].
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} is undefined with {num_samples} samples: k must lie between 1 and the samples")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"{num_correct} correct of {num_samples} samples: must lie between 0 and the samples")
    return float(1 - Fraction(math.comb(num_samples - num_correct, k), math.comb(num_samples, k)))


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Confidence interval of the mean of per-prompt estimates in [0, 1], one value a prompt.

    Prompts are the independent units; samples of one prompt are not, so their spread must not be counted again.
    Wilson's score interval (Wilson 1927, doi:10.1080/01621459.1927.10502953) with the effective sample size
    p(1-p)/se^2 (Kish 1965, Survey Sampling, ch. 8), where se^2 is the sample variance over the prompts divided by
    their number. With no variance (all prompts alike, or one prompt) the number of prompts stands in, so that the
    interval has a width at 0 and 1 too. Approximate: below about 30 prompts it may cover a few points less than
    `level`, and it says nothing about prompts of another kind. Raises ValueError for no values, values outside
    [0, 1], and a level outside (0, 1).
    """
    if not values:
        raise ValueError("no values: an interval needs the estimate of at least one prompt")
    if faulty := [v for v in values if not 0 <= v <= 1]:
        raise ValueError(f"{faulty[0]} is no per-prompt estimate: each must lie between 0 and 1")
    if not 0 < level < 1:
        raise ValueError(f"level = {level}: must lie strictly between 0 and 1, e.g. 0.95")
    mean = min(math.fsum(values) / len(values), 1.0)
    z = NormalDist().inv_cdf(0.5 + level / 2)
    return _wilson(mean, _effective_size(values, mean), z)


def _effective_size(values: Sequence[float], mean: float) -> float:
    prompts = len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / max(prompts - 1, 1)
    if variance == 0:
        return float(prompts)
    return max(mean * (1 - mean) / (variance / prompts), prompts - 1.0)  # it is no less, but for underflow


def _wilson(mean: float, size: float, z: float) -> Interval:
    # At 0 and 1 the exact bound is the mean itself; rounding must not put it on the wrong side.
    shrink = 1 + z * z / size
    centre = (mean + z * z / (2 * size)) / shrink
    half = z / shrink * math.sqrt(mean * (1 - mean) / size + z * z / (4 * size * size))
    return Interval(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))
