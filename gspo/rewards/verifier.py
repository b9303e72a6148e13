"""What a reward is to the rest of this room."""

from __future__ import annotations

import textwrap
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..types import Sample, Score

Verdicts = Sequence[float | Score | None]
"""One for each sample: a number, a Score, or None to abstain."""

RewardFunction = Callable[[Sequence[Sample]], Verdicts | Awaitable[Verdicts]]

GoldCheck = Callable[[Any, Mapping[str, Any]], str | None]
"""(gold answer or None, the row's columns) -> what is wrong with the answer, as a sentence, or None."""

GoldResponse = Callable[[Any, Mapping[str, Any]], str]
"""(gold answer, the row's columns) -> a response that deserves the reward's top: the answer as this reward reads it."""


class RewardError(Exception):
    """A reward that cannot be built, failed, or gave no usable verdict; the message names it and the sample."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """A reward function, and what it asks of gold answers."""

    function: RewardFunction
    """Samples [samples] -> verdicts [samples], or an awaitable of them."""
    gold_check: GoldCheck | None = None
    """Finds gold answers that the function cannot use; None where it needs none."""
    gold_response: GoldResponse | None = None
    """Writes a gold answer as a response, for `gspo check`; None where the reward knows no right response."""
    top: float | None = 1.0
    """What a right response gets; None where no value means that a response is right."""
    note: str = ""
    """What people should read when a run starts; empty for nothing."""


@dataclass(frozen=True, slots=True)
class Built:
    """A reward of the recipe, ready to run."""

    name: str
    """Its name in records and messages."""
    weight: float
    """Its factor in the total."""
    on_error: Literal["raise", "abstain"]
    """What an exception does: stop, or leave the sample out."""
    function: RewardFunction
    """Samples [samples] -> verdicts [samples], or an awaitable of them."""
    gold_check: GoldCheck | None
    """Finds gold answers that the function cannot use; None where it needs none."""
    gold_response: GoldResponse | None = None
    """Writes a gold answer as a response, for `gspo check`; None where the reward knows no right response."""
    top: float | None = 1.0
    """What a right response gets; None where no value means that a response is right."""
    note: str = ""
    """What people should read when a run starts; empty for nothing."""


def each(judge: Callable[[Sample], Score]) -> RewardFunction:
    """The reward function that judges one sample after the other; an exception carries the sample's id as a note."""

    def function(samples: Sequence[Sample]) -> list[Score]:
        scores = []
        for sample in samples:
            try:
                scores.append(judge(sample))
            except Exception as error:
                error.add_note(f"at sample {sample.id}")
                raise
        return scores

    return function


def as_it_stands(answer: Any, columns: Mapping[str, Any]) -> str:
    """The gold answer as text: the gold response of rewards that read the bare answer."""
    return str(answer)


def quoted(value: Any, width: int = 60) -> str:
    """A value in quotes on one line, control characters escaped, shortened: for sentences that people read."""
    text = value if isinstance(value, str) else str(value)
    return repr(text if len(text) <= width else text[: width - 1] + "…")


def reason(error: BaseException) -> str:
    """An exception on one line: its type, message and notes."""
    text = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return textwrap.shorten(text, 300, placeholder=" …")
