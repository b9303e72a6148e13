"""Laws of the estimates: unbiased pass@k, and intervals that cover."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.evaluation.statistics import mean_interval, pass_at_k


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample():
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([1] * c + [0] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(max, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_1_is_the_share_of_correct_samples():
    assert pass_at_k(3, 1, 1) == 1 / 3
    assert pass_at_k(10**4, 1, 1) == 1e-4


def test_pass_at_k_is_exact_for_large_counts():
    assert pass_at_k(10**5, 1, 10**5 - 1) == (10**5 - 1) / 10**5


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (0, 0, 1), (4, 5, 1), (4, -1, 1)])
def test_undefined_pass_at_k_is_refused(n, c, k):
    with pytest.raises(ValueError, match=r"undefined|correct of"):
        pass_at_k(n, c, k)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0.5, 0.999))
def test_interval_holds_its_mean_and_stays_inside_0_and_1(values, level):
    interval = mean_interval(values, level)
    assert 0 <= interval.low <= interval.mean <= interval.high <= 1


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("prompts", [1, 2, 50])
def test_interval_at_0_and_1_is_never_of_zero_width(value, prompts):
    interval = mean_interval([value] * prompts)
    assert interval.high - interval.low == pytest.approx(1.959964**2 / (prompts + 1.959964**2), rel=1e-5)


def test_binary_values_give_the_textbook_wilson_interval():
    # 8 of 10: the effective size is n - 1 with the sample variance, so compare against Wilson at 9.
    interval = mean_interval([1.0] * 8 + [0.0] * 2)
    n, p, z = 9, 0.8, 1.959963985
    centre, half = p + z * z / (2 * n), z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert interval.low == pytest.approx((centre - half) / (1 + z * z / n), abs=1e-8)
    assert interval.high == pytest.approx((centre + half) / (1 + z * z / n), abs=1e-8)


@pytest.mark.parametrize(("prompts", "samples", "a", "b"), [(40, 4, 0.4, 1.2), (100, 8, 2, 2), (200, 1, 0.5, 4.5)])
def test_interval_covers_the_true_mean_as_often_as_it_says(prompts, samples, a, b):
    # Prompts of unequal difficulty (beta), some samples each: the true mean must be covered about 95 times in 100.
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(1500):
        values = rng.binomial(samples, rng.beta(a, b, prompts)) / samples
        interval = mean_interval(values.tolist())
        covered += interval.low <= a / (a + b) <= interval.high
    assert 0.93 <= covered / 1500 <= 0.97


def test_samples_of_one_prompt_do_not_count_as_independent():
    # 20 prompts, each always or never solved: eight samples of each tell no more than one.
    prompts = [1.0] * 10 + [0.0] * 10
    honest, naive = mean_interval(prompts), mean_interval(prompts * 8)
    assert honest.high - honest.low > 2 * (naive.high - naive.low)


@pytest.mark.parametrize(
    ("values", "level", "word"),
    [([], 0.95, "no values"), ([1.5], 0.95, "1.5"), ([float("nan")], 0.95, "nan"), ([1.0], 1, "level")],
)
def test_interval_refuses_what_it_cannot_answer(values, level, word):
    with pytest.raises(ValueError, match=word):
        mean_interval(values, level)
