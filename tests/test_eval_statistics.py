"""Intervals cover what they say, and p-values are those of chance where nothing differs."""

from __future__ import annotations

import numpy as np
import pytest

from gspo.evaluation import statistics
from gspo.evaluation.statistics import bootstrap_interval, mean_interval, paired


@pytest.fixture
def fewer(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)  # simulations draw hundreds of intervals


def outcomes(rng, problems, samples, mean):
    """Per-problem means of k samples, where problems differ in difficulty (beta distributed)."""
    return (rng.binomial(samples, rng.beta(2 * mean, 2 * (1 - mean), problems)) / samples).tolist()


@pytest.mark.parametrize(("problems", "samples", "mean"), [(40, 1, 0.5), (200, 1, 0.2), (100, 8, 0.3), (30, 32, 0.6)])
def test_both_intervals_cover_the_true_mean(fewer, problems, samples, mean):
    rng = np.random.default_rng(problems)
    drawn = [outcomes(rng, problems, samples, mean) for _ in range(400)]
    for interval in (bootstrap_interval, mean_interval):
        covered = np.mean([i.low <= mean <= i.high for i in map(interval, drawn)])
        assert 0.905 <= covered <= 0.985, (interval.__name__, covered)


def test_for_rare_successes_the_bootstrap_covers_too_little_and_wilson_does_not(fewer):
    rng = np.random.default_rng(1)
    drawn = [outcomes(rng, 40, 1, 0.02) for _ in range(400)]
    by_bootstrap, by_wilson = (
        np.mean([i.low <= 0.02 <= i.high for i in map(f, drawn)]) for f in (bootstrap_interval, mean_interval)
    )
    assert by_bootstrap < 0.7 and by_wilson > 0.92
    nothing = bootstrap_interval([0.0] * 40)
    assert nothing.low == nothing.high == 0 and mean_interval([0.0] * 40).high > 0.05


def test_the_same_values_give_the_same_interval_and_it_holds_its_mean():
    values = np.random.default_rng(0).normal(size=50).tolist()
    assert bootstrap_interval(values) == bootstrap_interval(values) != bootstrap_interval(values, seed=1)
    one_sided = bootstrap_interval([0.1] * 3)
    assert one_sided.low <= one_sided.mean <= one_sided.high
    exact = 1.96 * np.std(values) / np.sqrt(50)
    interval = bootstrap_interval(values)
    assert (interval.high - interval.low) / 2 == pytest.approx(exact, rel=0.06)


def test_p_is_uniform_where_two_models_are_alike(fewer):
    rng = np.random.default_rng(2)
    p = []
    for _ in range(600):
        skill = rng.beta(1, 1, 80)
        p.append(paired(*((rng.binomial(16, skill) / 16).tolist() for _ in range(2))).p_value)
    for alpha in (0.05, 0.1, 0.25, 0.5, 0.75):
        assert np.mean(np.array(p) <= alpha) == pytest.approx(alpha, abs=4 * np.sqrt(alpha * (1 - alpha) / 600))


def test_p_is_small_where_they_differ_and_pairing_finds_what_two_intervals_do_not():
    rng = np.random.default_rng(3)
    skill = rng.beta(0.4, 0.4, 300)
    first, second = (rng.binomial(16, np.clip(skill + shift, 0, 1)) / 16 for shift in (0.05, 0.0))
    found = paired(first.tolist(), second.tolist())
    assert found.p_value < 0.001 and found.difference.low > 0 and found.num_better > found.num_worse
    assert mean_interval(first.tolist()).low < mean_interval(second.tolist()).high  # apart, they overlap


def test_few_problems_that_differ_give_no_small_p():
    assert paired([1.0] * 3 + [0.0] * 50, [0.0] * 53).p_value == pytest.approx(0.25, abs=0.03)  # 2^(1-3)
    same = paired([0.5, 0.25], [0.5, 0.25])
    assert same.p_value == 1.0 and same.difference.low == same.difference.high == 0


def test_values_that_are_none_are_refused():
    with pytest.raises(ValueError, match="the same problems"):
        paired([1.0], [1.0, 0.0])
    with pytest.raises(ValueError, match="finite"):
        bootstrap_interval([float("nan")])
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_interval([])
    with pytest.raises(ValueError, match="level = 1"):
        bootstrap_interval([1.0], level=1)
