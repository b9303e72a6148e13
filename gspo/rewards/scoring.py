"""Running the rewards on samples, and believing nothing that they return."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..types import Sample, Score, Scored
from .verifier import Built, RewardError, quoted, reason

LARGEST = 1e30
"""Largest reward taken: squares and sums of what is beyond it leave the range of floats."""

NUM_SHOWN = 8

Call = tuple[Built, Sequence[Sample]]


def score(built: Sequence[Built], samples: Sequence[Sample]) -> list[Scored]:
    """Every reward's verdict on every sample, and the weighted total. built [rewards], samples [samples] -> [samples].

    Sync rewards run one after the other in this thread; what async ones return is awaited together, in an event loop
    of its own (in a thread of its own if one is running here already). A total is None if a reward abstained.

    Raises RewardError, with the names of reward and samples, for a result of the wrong length, a verdict that is no
    number (strings are refused; booleans and one-element arrays are numbers), NaN or infinity, and for an exception
    where `on_error` is `raise`. Where it is `abstain`, the samples are given to the reward once more, one by one, and
    those that fail again abstain. A RewardError that a reward raises itself always travels. Not covered: time limits.
    """
    if not samples:
        return []
    columns = [_verdicts(call, outcome) for call, outcome in _run([(b, samples) for b in built])]
    parts = [dict(zip([b.name for b in built], row, strict=True)) for row in zip(*columns, strict=True)]
    return [Scored(s, _total(built, p), p) for s, p in zip(samples, parts, strict=True)]


def _total(built: Sequence[Built], parts: Mapping[str, Score]) -> float | None:
    weighted = []
    for b in built:
        value = parts[b.name].value
        if value is None:
            return None
        weighted.append(b.weight * value)
    return math.fsum(weighted)


def _verdicts(call: Call, outcome: Any) -> list[Score]:
    b, samples = call
    if not isinstance(outcome, Exception):
        return _checked(b, samples, outcome)
    if b.on_error == "raise" or isinstance(outcome, RewardError):
        raise RewardError(f"reward {b.name} failed on {_ids(samples)}: {reason(outcome)}") from outcome
    return [_alone(*again) for again in _run([(b, [s]) for s in samples])]


def _alone(call: Call, outcome: Any) -> Score:
    if isinstance(outcome, RewardError):
        raise RewardError(f"reward {call[0].name} failed on {_ids(call[1])}: {reason(outcome)}") from outcome
    if isinstance(outcome, Exception):
        return Score(None, reason(outcome))
    return _checked(*call, outcome)[0]


def _run(calls: Sequence[Call]) -> Iterable[tuple[Call, Any]]:
    """Each call with what it returned, or with the Exception that it raised."""
    outcomes = [_outcome(call) for call in calls]
    waiting = [i for i, outcome in enumerate(outcomes) if inspect.isawaitable(outcome)]
    for i, outcome in zip(waiting, _await_all([outcomes[i] for i in waiting]), strict=True):
        outcomes[i] = outcome
    return zip(calls, outcomes, strict=True)


def _outcome(call: Call) -> Any:
    b, samples = call
    try:
        return b.function(list(samples))  # its own list, to do with as it likes
    except SystemExit as error:
        raise RewardError(f"reward {b.name} tried to end the process ({error!r}) on {_ids(samples)}") from error
    except Exception as error:  # not ours: what it means is the recipe's on_error
        return error


def _await_all(waiting: Sequence[Awaitable[Any]]) -> list[Any]:
    if not waiting:
        return []

    async def together() -> list[Any]:
        return await asyncio.gather(*waiting, return_exceptions=True)

    try:
        asyncio.get_running_loop()
    except RuntimeError:  # the usual case: no loop is running in this thread
        outcomes = asyncio.run(together())
    else:  # a notebook's, say
        with ThreadPoolExecutor(1) as pool:
            outcomes = pool.submit(asyncio.run, together()).result()
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
            raise outcome  # cancelled, interrupted: not a failure of a reward
    return outcomes


def _checked(b: Built, samples: Sequence[Sample], outcome: Any) -> list[Score]:
    if isinstance(outcome, str | bytes | Mapping) or not hasattr(outcome, "__len__") or not hasattr(outcome, "__iter__"):
        raise RewardError(
            f"reward {b.name} returned a {type(outcome).__name__} for {_ids(samples)}, not a list with a verdict each"
        )
    if len(outcome) != len(samples):
        raise RewardError(f"reward {b.name} returned {len(outcome)} verdicts for {len(samples)} samples, {_ids(samples)}")
    return [_one(b, sample, verdict) for sample, verdict in zip(samples, outcome, strict=True)]


def _one(b: Built, sample: Sample, verdict: Any) -> Score:
    given = verdict if isinstance(verdict, Score) else Score(verdict)
    if not isinstance(given.why, str):
        raise RewardError(f"reward {b.name} gave sample {sample.id} a why that is a {type(given.why).__name__}, not text")
    if given.value is None:
        return Score(None, given.why or "the reward abstained")
    value = _number(given.value)
    if value is None:
        raise RewardError(
            f"reward {b.name} gave sample {sample.id} a {type(given.value).__name__} ({quoted(given.value)}), "
            "not a number, a Score or None"
        )
    if not math.isfinite(value) or abs(value) > LARGEST:
        raise RewardError(
            f"reward {b.name} gave sample {sample.id} the value {value}: "
            f"a reward must be finite and at most {LARGEST:g} in size"
        )
    return Score(value, given.why)


def _number(value: Any) -> float | None:
    """Numbers, and one-element arrays and tensors (they have `item`), as a float; None for anything else."""
    if not isinstance(value, numbers.Real) and getattr(value, "size", None) is not None and hasattr(value, "item"):
        try:
            value = value.item()
        except (ValueError, RuntimeError):  # more than one element
            return None
    try:
        return float(value) if isinstance(value, numbers.Real) else None
    except OverflowError:  # a whole number beyond all floats
        return math.inf


def _ids(samples: Sequence[Sample]) -> str:
    shown = ", ".join(sample.id for sample in samples[:NUM_SHOWN])
    more = f" and {len(samples) - NUM_SHOWN} more" if len(samples) > NUM_SHOWN else ""
    return f"sample{'s' if len(samples) > 1 else ''} {shown}{more}"
