"""A contestant's rating from the problems it solved: maximum likelihood on the scale of Codeforces.

P problems.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

POINTS = 400.0
"""Points of a decade of odds: a contestant 400 above a problem solves it ten times for each time it fails. Elo's scale."""

FAR = 4000.0
"""How far beyond the easiest and the hardest problem a root is looked for. There odds are 1 to 10^10."""


@dataclass(frozen=True, slots=True)
class Rating:
    """A rating with its interval."""

    rating: float | None
    """The estimate, points; None where it is unbounded, `why` says in which direction."""
    low: float | None
    """Lower end of the interval, points; None: there is none."""
    high: float | None
    """Upper end of the interval, points; None: there is none."""
    dispersion: float
    """How much more the problems disagree than the model allows, 1 or more; the interval is wider by its root."""
    why: str
    """What a person must know beside the numbers; empty where there is nothing."""


def solve_probability(rating: float, problem_P: np.ndarray) -> np.ndarray:
    """Chance that a contestant solves each problem in one attempt: 1 / (1 + 10^((problem - rating) / 400)), float64 [P].

    rating and problem_P: points. Codeforces rates a problem so that contestants of its rating solve it in half of all
    cases, which is what makes one scale of both.
    """
    z_P = (rating - np.asarray(problem_P, float)) * (math.log(10) / POINTS)
    return np.exp(-np.logaddexp(0.0, -z_P))


def elo(problems: Sequence[float], solved: Sequence[int], attempts: Sequence[int], *, level: float = 0.95) -> Rating:
    """The rating under which the verdicts are likeliest, and its interval.

    problems: each problem's rating, points [P]. solved: attempts with an accepted verdict [P]. attempts: attempts made,
    1 or more [P]. The log-likelihood is sum of solved * log p + (attempts - solved) * log(1 - p), concave in the rating,
    so bisection finds its only top. The interval is the likelihood's: every rating whose log-likelihood is within half
    the chi-squared quantile of the top. Attempts at one problem are not independent (its topic suits the contestant or
    not), so that quantile is multiplied by the dispersion: the variance of the score summed by problem over the
    information, never less than 1.

    All solved or none: the likelihood has no top. The rating is None, the interval is open on that side, and its other
    end still holds. Raises ValueError for lists of different lengths, no problems, attempts below 1, solved outside
    [0, attempts], ratings that are not finite, and a level outside (0, 1).

    This is the logistic model of Elo (1978, The Rating of Chessplayers) with problems as opponents. CodeElo (Quan et al.
    2025, arXiv:2501.01257) instead ranks a model among a contest's human participants and inverts their expected rank;
    that needs every contest's standings, counts penalties for wrong attempts, and gives other numbers: do not compare
    the two. Not covered: the order of attempts, time, and a mix of topics unlike that of contests.
    """
    problem_P, solved_P, attempts_P = _checked(problems, solved, attempts, level)
    bound = NormalDist().inv_cdf(0.5 + level / 2) ** 2 / 2
    if solved_P.sum() in (0, attempts_P.sum()):
        return _open(problem_P, solved_P, attempts_P, bound, level)

    def likelihood(rating: float) -> float:
        return _log_likelihood(rating, problem_P, solved_P, attempts_P)

    def surplus(rating: float) -> float:
        return float((solved_P - attempts_P * solve_probability(rating, problem_P)).sum())

    low, high = _ends(problem_P, attempts_P)
    top = _root(surplus, low, high)
    dispersion = _dispersion(top, problem_P, solved_P, attempts_P)
    best, allowed = likelihood(top), bound * dispersion

    def inside(rating: float) -> float:
        return likelihood(rating) - best + allowed

    return Rating(top, _root(inside, low, top), _root(inside, top, high), dispersion, "")


def _open(problem_P: np.ndarray, solved_P: np.ndarray, attempts_P: np.ndarray, bound: float, level: float) -> Rating:
    low, high = _ends(problem_P, attempts_P)
    end = _root(lambda rating: _log_likelihood(rating, problem_P, solved_P, attempts_P) + bound, low, high)
    share = f"with {level:.0%} confidence it is"
    if solved_P.sum():
        return Rating(
            None, end, None, 1.0, f"every attempt succeeded: the rating has no upper bound; {share} above {end:.0f}"
        )
    return Rating(None, None, end, 1.0, f"no attempt succeeded: the rating has no lower bound; {share} below {end:.0f}")


def _ends(problem_P: np.ndarray, attempts_P: np.ndarray) -> tuple[float, float]:
    room = FAR + POINTS * math.log10(float(attempts_P.sum()))
    return float(problem_P.min()) - room, float(problem_P.max()) + room


def _log_likelihood(rating: float, problem_P: np.ndarray, solved_P: np.ndarray, attempts_P: np.ndarray) -> float:
    z_P = (rating - problem_P) * (math.log(10) / POINTS)
    return -float((solved_P * np.logaddexp(0, -z_P) + (attempts_P - solved_P) * np.logaddexp(0, z_P)).sum())


def _dispersion(rating: float, problem_P: np.ndarray, solved_P: np.ndarray, attempts_P: np.ndarray) -> float:
    p_P = solve_probability(rating, problem_P)
    return max(1.0, float(((solved_P - attempts_P * p_P) ** 2).sum() / (attempts_P * p_P * (1 - p_P)).sum()))


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that is monotone between low and high crosses 0, to a millionth of a point."""
    rises = function(high) > function(low)
    while high - low > 1e-6:
        middle = (low + high) / 2
        if (function(middle) > 0) == rises:
            high = middle
        else:
            low = middle
    return (low + high) / 2


def _checked(
    problems: Sequence[float], solved: Sequence[int], attempts: Sequence[int], level: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if not len(problems) == len(solved) == len(attempts):
        raise ValueError(f"{len(problems)} problems, {len(solved)} solved, {len(attempts)} attempts: one each a problem")
    if not len(problems):
        raise ValueError("no problems: a rating needs at least one")
    if not 0 < level < 1:
        raise ValueError(f"level = {level}: must lie strictly between 0 and 1, e.g. 0.95")
    for number, (problem, right, tries) in enumerate(zip(problems, solved, attempts, strict=True)):
        if not math.isfinite(problem):
            raise ValueError(f"problem {number} has the rating {problem}: it must be finite; leave unrated problems out")
        if tries < 1 or not 0 <= right <= tries:
            raise ValueError(
                f"problem {number}: {right} solved of {tries} attempts; needs 0 <= solved <= attempts, 1 or more"
            )
    return np.asarray(problems, float), np.asarray(solved, float), np.asarray(attempts, float)
