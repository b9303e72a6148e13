"""Laws of running rewards: nothing that they return is believed unseen."""

import asyncio

import numpy as np
import pytest
import torch
from rewards_support import own, refused, reward, sample

from gspo.rewards import RewardError, score
from gspo.types import Score

THREE = [sample(text, number=i) for i, text in enumerate(["a", "bb", "ccc"])]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ([1.0], ["1 verdicts", "3 samples", THREE[2].id]),
        ([1.0] * 4, ["4 verdicts", "3 samples"]),
        (1.0, ["float", "not a list"]),
        (None, ["NoneType", "not a list"]),
        ("abc", ["str", "not a list"]),
        ({"a": 1}, ["dict", "not a list"]),
        ([1.0, "0.5", 1.0], [THREE[1].id, "str", "0.5"]),
        ([1.0, [1.0], 1.0], [THREE[1].id, "list"]),
        ([1.0, 1j, 1.0], [THREE[1].id, "complex"]),
        ([1.0, 1.0, float("nan")], [THREE[2].id, "nan", "finite"]),
        ([float("-inf"), 1.0, 1.0], [THREE[0].id, "-inf", "finite"]),
        (np.array([1.0, np.nan, 0.0]), [THREE[1].id, "nan"]),
        ([1.0, torch.zeros(2), 1.0], [THREE[1].id, "Tensor"]),
        ([1.0, Score("1"), 1.0], [THREE[1].id, "str"]),
        ([1.0, Score(1.0, None), 1.0], [THREE[1].id, "why", "NoneType"]),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", "abstain"])
def test_a_wrong_result_names_reward_and_sample_whatever_the_setting(result, words, on_error):
    refused(lambda: score([own(lambda samples: result, "odd", on_error=on_error)], THREE), "reward odd", *words)


@pytest.mark.parametrize(
    "one", [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), torch.tensor(1.0), Score(1), np.ones(1)]
)
def test_every_kind_of_number_is_a_number(one):
    (scored,) = score([own(lambda samples: [one])], THREE[:1])
    assert scored.total == 1.0
    assert type(scored.total) is float
    assert type(scored.parts["own"].value) is float


def test_whole_arrays_are_results_too():
    for result in (np.array([0.0, 0.5, 1.0]), torch.tensor([0.0, 0.5, 1.0]), (0, 0.5, True)):
        assert [s.total for s in score([own(lambda samples, r=result: r)], THREE)] == [0, 0.5, 1]


def test_the_total_is_the_weighted_sum_without_rounding_on_the_way():
    rewards = [("a", 1e16, 1), ("b", 2, 0.5), ("c", 1e16, -1)]
    built = [own(lambda s, v=v: [Score(v, "why")] * len(s), n, w) for n, v, w in rewards]
    for scored in score(built, THREE):
        assert scored.total == 1.0
        assert scored.parts == {"a": Score(1e16, "why"), "b": Score(2.0, "why"), "c": Score(1e16, "why")}


def test_samples_keep_their_order_and_none_need_no_reward():
    assert [s.sample for s in score([own(lambda s: [0.0] * len(s))], THREE)] == THREE
    assert score([own(lambda s: [0.0] * 7)], []) == []


def test_a_total_is_missing_where_one_reward_abstains():
    built = [own(lambda s: [None, Score(None, "unsure"), 1.0], "a"), own(lambda s: [1.0] * 3, "b")]
    out = score(built, THREE)
    assert [o.total for o in out] == [None, None, 2.0]
    assert out[0].parts["a"].why == "the reward abstained"
    assert out[1].parts["a"].why == "unsure"
    assert out[1].parts["b"].value == 1.0


def picky(samples):
    if any(s.text == "bb" for s in samples):
        raise ZeroDivisionError("two b")
    return [1.0] * len(samples)


async def picky_later(samples):
    await asyncio.sleep(0)
    return picky(samples)


@pytest.mark.parametrize("function", [picky, picky_later])
def test_an_exception_stops_or_leaves_out_only_the_sample_that_failed(function):
    message = refused(lambda: score([own(function, "picky")], THREE), "picky", *[s.id for s in THREE], "ZeroDivisionError")
    assert "two b" in message
    out = score([own(function, "picky", on_error="abstain")], THREE)
    assert [o.total for o in out] == [1.0, None, 1.0]
    assert out[1].parts["picky"] == Score(None, "ZeroDivisionError: two b")


def test_the_exception_of_a_reward_is_the_cause_of_the_error():
    with pytest.raises(RewardError) as caught:
        score([own(picky)], THREE)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_builtin_names_the_very_sample_that_failed():
    samples = [sample("1", "1"), sample("2", "x", number=1), sample("3", "3", number=2)]
    refused(lambda: score([reward(type="numeric")], samples), f"at sample {samples[1].id}")


def test_many_samples_are_counted_and_not_all_named():
    samples = [sample("bb", number=i) for i in range(30)]
    message = refused(lambda: score([own(picky)], samples), samples[0].id, "and 22 more")
    assert samples[29].id not in message


def test_interrupts_are_never_taken_for_a_verdict():
    def interrupted(samples):
        raise KeyboardInterrupt

    async def cancelled(samples):
        raise asyncio.CancelledError

    for function, error in ((interrupted, KeyboardInterrupt), (cancelled, asyncio.CancelledError)):
        with pytest.raises(error):
            score([own(function, on_error="abstain")], THREE)


def test_async_rewards_wait_together():
    meeting = []

    async def meets(samples):
        meeting.append(1)
        while len(meeting) < 2:  # would never end if the other were not running
            await asyncio.sleep(0.001)
        return [1.0] * len(samples)

    out = score([own(meets, "a"), own(meets, "b")], THREE)
    assert [o.total for o in out] == [2.0] * 3


def test_async_rewards_work_inside_a_running_loop():
    async def notebook():
        return score([own(picky_later)], THREE[:1])

    assert asyncio.run(notebook())[0].total == 1.0


def test_a_failing_sync_reward_leaves_no_coroutine_unawaited():
    refused(lambda: score([own(picky_later, "later", on_error="abstain"), own(picky, "now")], THREE), "now")


def test_a_rewards_own_error_travels_from_a_second_try_too():
    """`abstain` is for exceptions; a RewardError says that the reward itself cannot be trusted."""

    def picky(samples):
        if len(samples) > 1:
            raise ValueError("the batch as a whole")
        raise RewardError("no verifier here")

    refused(lambda: score([own(picky, "picky", on_error="abstain")], THREE), "picky", THREE[0].id, "no verifier here")
