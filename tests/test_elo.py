"""The rating of a contestant: right on simulated ones, honest where it has no bound."""

from __future__ import annotations

import numpy as np
import pytest

from gspo.evaluation.elo import elo, solve_probability


def contest(rng, rating, *, problems=400, attempts=1, luck=0.0):
    """Verdicts of a contestant of known rating; luck: points by which a problem suits it or not, standard deviation."""
    difficulty = rng.choice(np.arange(800, 3501, 100), problems).astype(float)
    p = solve_probability(rating, difficulty + luck * rng.normal(size=problems))
    return difficulty.tolist(), rng.binomial(attempts, p).tolist(), [attempts] * problems


def test_four_hundred_points_are_a_decade_of_odds():
    p = solve_probability(1500.0, np.array([1100.0, 1500.0, 1900.0]))
    assert p / (1 - p) == pytest.approx([10, 1, 0.1])


def errors(rating, attempts, contestants=100):
    rng = np.random.default_rng(7 * rating + attempts)
    return np.array([elo(*contest(rng, rating, attempts=attempts)).rating - rating for _ in range(contestants)])


@pytest.mark.parametrize("rating", [1000, 1500, 2000, 2500, 3000])
def test_known_contestants_are_found_within_thirty_points_at_400_problems(rating):
    """By 8 attempts at each, 19 times in 20; one attempt at each holds too little for that, whatever the estimator."""
    assert np.mean(np.abs(errors(rating, 8)) < 30) >= 0.95
    assert np.mean(np.abs(errors(rating, 16)) < 30) >= 0.99


@pytest.mark.parametrize(("rating", "attempts"), [(1000, 1), (2000, 1), (3000, 4)])
def test_errors_are_no_larger_than_they_must_be(rating, attempts):
    p = solve_probability(rating, np.arange(800, 3501, 100.0))  # each equally often among the problems
    bound = 1 / np.sqrt(400 * attempts * (p * (1 - p)).mean()) * 400 / np.log(10)  # Cramer-Rao
    found = errors(rating, attempts, 300)
    assert 0.87 < np.sqrt(np.mean(found**2)) / bound < 1.13 and abs(found.mean()) < 0.2 * bound


@pytest.mark.parametrize("luck", [0, 300])
def test_the_interval_covers_the_true_rating_also_where_attempts_at_one_problem_agree(luck):
    rng = np.random.default_rng(luck)
    symmetric = 2150  # the middle of the problems, where luck moves the spread and not the mean
    found = [elo(*contest(rng, symmetric, problems=200, attempts=8, luck=luck)) for _ in range(300)]
    assert 0.91 <= np.mean([r.low <= symmetric <= r.high for r in found]) <= 0.985
    assert (np.mean([r.dispersion for r in found]) > 1.5) == (luck > 0)


def test_several_attempts_are_worth_more_than_one_and_rounds_of_the_same_are_the_same():
    rng = np.random.default_rng(5)
    problems, solved, attempts = contest(rng, 1900, attempts=4)
    whole = elo(problems, solved, attempts)
    singles = [(b, 1 if k < s else 0, 1) for b, s in zip(problems, solved, strict=True) for k in range(4)]
    apart = elo(*map(list, zip(*singles, strict=True)))
    assert whole.rating == pytest.approx(apart.rating, abs=1e-3)


def test_all_solved_and_none_solved_have_no_rating_but_a_bound():
    every, none = elo([1200, 1600], [3, 3], [3, 3]), elo([1200, 1600], [0, 0], [3, 3])
    assert every.rating is None and every.high is None and every.low > 1600 and "no upper bound" in every.why
    assert none.rating is None and none.low is None and none.high < 1200 and "no lower bound" in none.why
    # The end of an open interval is where this outcome has the chance exp(-3.84 / 2).
    assert np.prod(solve_probability(every.low, np.array([1200, 1600.0])) ** 3) == pytest.approx(np.exp(-1.9207), rel=1e-3)


def test_verdicts_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="problem 1: 3 solved of 2 attempts"):
        elo([1000, 1100], [1, 3], [2, 2])
    with pytest.raises(ValueError, match="leave unrated problems out"):
        elo([float("nan")], [1], [1])
    with pytest.raises(ValueError, match="one each a problem"):
        elo([1000], [1, 1], [1])
    with pytest.raises(ValueError, match="no problems"):
        elo([], [], [])
