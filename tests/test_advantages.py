"""Rewards to advantages: the definitions, what is left out, and what does not change them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.advantages import group_advantages

BASELINES, STDS = ("mean", "leave_one_out"), ("sample", "population", "none")
GROUPS = ([1, 0, 1, 0], [0.8, 0.4, 0.6], [0.25, -3, 7, 7, 0.1], [1e-3, 2e-3])
every_choice = pytest.mark.parametrize(("baseline", "std"), [(b, s) for b in BASELINES for s in STDS])
rewards = st.lists(st.floats(-100, 100).map(lambda r: round(r, 3)), min_size=2, max_size=16)


def close(values, **tolerance):
    return pytest.approx(list(values), **({"rel": 1e-12, "abs": 1e-12} | tolerance))


def test_the_worked_example():
    assert group_advantages([1, 0, 1, 0], std="population") == [1, -1, 1, -1]
    assert group_advantages([1, 0, 1, 0], std="sample") == close([0.86603, -0.86603, 0.86603, -0.86603], abs=5e-6)
    assert group_advantages([0.8, 0.4, 0.6], std="sample") == close([1, -1, 0])


def test_the_default_is_the_mean_over_the_sample_deviation():
    assert group_advantages(GROUPS[2]) == group_advantages(GROUPS[2], baseline="mean", std="sample")


@pytest.mark.parametrize("group", GROUPS)
@every_choice
def test_each_choice_is_its_definition(group, baseline, std):
    r, n = np.array(group, float), len(group)
    others = np.array([np.delete(r, i).mean() for i in range(n)])
    centred = r - (r.mean() if baseline == "mean" else others)
    scale = {"sample": r.std(ddof=1), "population": r.std(ddof=0), "none": 1.0}[std]
    assert group_advantages(group, baseline=baseline, std=std) == close(centred / scale)


@pytest.mark.parametrize(
    "group", [[0.0] * 4, [1.0] * 8, [-0.1] * 3, [0.1 + 0.2, 0.3], [0.1 + 0.2 - 0.3, 0.0], [1e9, 1e9 + 1e-7], [0.7] * 7]
)
@every_choice
def test_equal_rewards_give_exactly_zero(group, baseline, std):
    assert group_advantages(group, baseline=baseline, std=std) == [0.0] * len(group)


@pytest.mark.parametrize("group", [[0.0, 1e-9], [1.0, 1.0 + 1e-9], [1e6, 1e6 + 1e-3]])
def test_small_differences_are_still_differences(group):
    assert group_advantages(group, std="population") == close([-1, 1], abs=1e-5)


@every_choice
def test_abstentions_take_no_part(baseline, std):
    kept = iter(group_advantages([1, 0.5, 0], baseline=baseline, std=std))
    with_gaps = group_advantages([None, 1, 0.5, None, 0], baseline=baseline, std=std)
    assert with_gaps == [None, next(kept), next(kept), None, next(kept)]


@every_choice
def test_a_single_known_reward_gives_zero_and_none_at_all_nothing(baseline, std):
    assert group_advantages([None, 1.0, None], baseline=baseline, std=std) == [None, 0.0, None]
    assert group_advantages([None, None], baseline=baseline, std=std) == [None, None]


@pytest.mark.parametrize("group", [[], [1.0], [None]])
def test_a_group_without_a_second_response_is_refused(group):
    with pytest.raises(ValueError, match=f"a group of {len(group)} has no baseline: advantages need at least 2 responses"):
        group_advantages(group)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("beside", [[1.0, 0.0], [None, None]])
def test_rewards_that_are_not_finite_are_refused(bad, beside):
    with pytest.raises(ValueError, match="rewards must be finite"):
        group_advantages([bad, *beside])


@pytest.mark.parametrize("size", [1e-11, 1e160, 1e300])
def test_rewards_whose_squares_no_double_holds_are_normalised_all_the_same(size):
    assert group_advantages([size, 0, size, 0], std="population") == close([1, -1, 1, -1])


@settings(deadline=None)
@given(rewards)
def test_advantages_sum_to_zero(group):
    for std in STDS:
        for baseline in BASELINES:
            total = math.fsum(a for a in group_advantages(group, baseline=baseline, std=std) if a is not None)
            assert abs(total) < 1e-9


@settings(deadline=None)
@given(rewards, st.integers(-1000, 1000))
def test_a_shift_of_all_rewards_changes_nothing(group, shift):
    for std in STDS:
        shifted = group_advantages([r + shift for r in group], std=std)
        assert shifted == close(group_advantages(group, std=std), rel=1e-6, abs=1e-6)


@settings(deadline=None)
@given(rewards, st.sampled_from([0.125, 3.0, 1000.0]))
def test_a_scale_of_all_rewards_changes_nothing_where_they_are_divided_by_a_deviation(group, scale):
    for std in ("sample", "population"):
        assert group_advantages([r * scale for r in group], std=std) == close(group_advantages(group, std=std), abs=1e-9)
    unscaled = group_advantages([r * scale for r in group], std="none")
    assert unscaled == close([a * scale for a in group_advantages(group, std="none")], abs=1e-9)


@settings(deadline=None)
@given(rewards)
def test_the_order_of_rewards_is_the_order_of_advantages(group):
    got = group_advantages(group)
    if max(group) > min(group):
        assert np.array_equal(np.argsort(got, kind="stable"), np.argsort(group, kind="stable"))
