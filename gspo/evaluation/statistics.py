"""Estimates of success and how sure they are. Pure arithmetic on plain numbers.

P problems, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist

import numpy as np

RESAMPLES = 10_000
"""Resamples of a bootstrap and sign flips of a test: ends move by a hundredth of the interval's width, and p-values of
0.05 by 0.002."""
BLOCK = 500
"""Resamples drawn at once, so that thousands of problems need megabytes."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its confidence interval."""

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


def bootstrap_interval(values: Sequence[float], level: float = 0.95, *, seed: int = 0) -> Interval:
    """Percentile bootstrap of the mean over problems (Efron 1979, doi:10.1214/aos/1176344552): one value a problem [P].

    Problems are drawn with replacement, RESAMPLES times, from a generator with a fixed seed: the same values give the
    same interval. It takes any quantity (tokens, rewards, differences of two models), which `mean_interval` does not.
    Two faults that it has for rare successes: where all values are equal it has no width at all, and below a few dozen
    problems it covers less than `level` (tests/test_eval_statistics.py measures both); for shares near 0 or 1 trust
    `mean_interval`. Raises ValueError for no values, values that are not finite, and a level outside (0, 1).
    """
    value_P = _finite(values)
    if not 0 < level < 1:
        raise ValueError(f"level = {level}: must lie strictly between 0 and 1, e.g. 0.95")
    rng = np.random.default_rng(seed)
    mean_R = np.concatenate([value_P[rng.integers(0, len(value_P), (BLOCK, len(value_P)))].mean(1) for _ in _blocks()])
    low, high = np.quantile(mean_R, [0.5 - level / 2, 0.5 + level / 2])
    mean = float(value_P.mean())
    return Interval(mean, min(mean, float(low)), max(mean, float(high)))  # rounding must not put the mean outside


@dataclass(frozen=True, slots=True)
class Paired:
    """Two models on the same problems."""

    difference: Interval
    """Mean of first minus second over problems, with its paired bootstrap interval."""
    p_value: float
    """Two-sided, of the sign-flip test."""
    num_better: int
    """Problems on which the first has the higher value."""
    num_worse: int
    """Problems on which the second has."""


def paired(first: Sequence[float], second: Sequence[float], *, level: float = 0.95, seed: int = 0) -> Paired:
    """Compare two models by their values on the same problems, in the same order [P].

    The p-value is that of a sign-flip permutation test over problems (Fisher 1935, The Design of Experiments, s. 21): if
    the models are alike, each problem's difference could as well have had the other sign, so the mean difference is held
    against those under RESAMPLES random flips, itself counted as one; hence it is never below 1 / (RESAMPLES + 1). With
    few problems on which the models differ it is conservative: k of them cannot give less than 2^(1 - k). The interval is
    the bootstrap's over the differences. Both take the problems as independent and say nothing of problems of another
    kind. Raises ValueError for lists of different lengths, no values, and values that are not finite.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} values: a paired comparison needs the same problems")
    difference_P = _finite(first) - _finite(second)
    rng = np.random.default_rng(seed)
    moved_P = difference_P[difference_P != 0]  # the others are 0 under every flip
    observed = abs(float(moved_P.sum()))
    signs = (rng.integers(0, 2, (BLOCK, len(moved_P)), dtype=np.int8) * 2 - 1 for _ in _blocks())
    as_far = sum(int((np.abs(sign_RP @ moved_P) >= observed * (1 - 1e-9)).sum()) for sign_RP in signs)
    return Paired(
        bootstrap_interval(difference_P.tolist(), level, seed=seed),
        (1 + as_far) / (1 + RESAMPLES),
        int((difference_P > 0).sum()),
        int((difference_P < 0).sum()),
    )


def _blocks() -> range:
    return range(RESAMPLES // BLOCK)


def _finite(values: Sequence[float]) -> np.ndarray:
    if not len(values):
        raise ValueError("no values: an interval needs the estimate of at least one prompt")
    array = np.asarray(values, float)
    if not np.isfinite(array).all():
        raise ValueError(f"{array[~np.isfinite(array)][0]} is no estimate: each must be a finite number")
    return array


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
