"""Rewards that read the response as text or as a number, and the one that counts its tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from ..config import ExactReward, FormatReward, LastNumberReward, LengthPenalty, NumericReward
from ..types import Sample, Score
from .numbers import last_number, parse_number, to_number
from .verifier import RewardError, Verifier, as_it_stands, each, quoted


def exact(config: ExactReward) -> Verifier:
    """1 if response and gold answer are the same string, white space around them aside, else 0."""

    def judge(sample: Sample) -> Score:
        response, gold = sample.text.strip(), str(sample.answer).strip()
        if response == gold:
            return Score(1.0, "equals the gold answer")
        return Score(0.0, f"{quoted(response)} is not {quoted(gold)}")

    return Verifier(each(judge), _is_text, as_it_stands)


def numeric(config: NumericReward) -> Verifier:
    """1 if the whole response is a number (`numbers.parse_number`) within `tolerance` of the gold answer, else 0."""
    return _number(config.tolerance, lambda text: text.strip(), "the response {} is not a number")


def last(config: LastNumberReward) -> Verifier:
    """1 if the last number of the response (`numbers.last_number`) is within `tolerance` of the gold answer, else 0."""
    return _number(config.tolerance, last_number, "the response {} holds no number")


def form(config: FormatReward) -> Verifier:
    """1 if the regular expression matches the whole response, else 0. `.` matches newlines too.

    Raises RewardError for a pattern that does not compile. Not covered: patterns that take exponential time.
    """
    try:
        pattern = re.compile(config.pattern, re.DOTALL)
    except re.error as error:
        raise RewardError(f"reward format: pattern {config.pattern!r} is no regular expression: {error}") from None

    def judge(sample: Sample) -> Score:
        fits = pattern.fullmatch(sample.text) is not None
        return Score(float(fits), "has the format" if fits else f"{quoted(sample.text)} has not the format")

    return Verifier(each(judge))


def length_penalty(config: LengthPenalty) -> Verifier:
    """0 up to `free_tokens` response tokens, -1 from `max_tokens` on, linear between (DAPO, arXiv:2503.14476, eq. 13)."""

    def judge(sample: Sample) -> Score:
        over = (sample.num_tokens - config.free_tokens) / (config.max_tokens - config.free_tokens)
        value = -min(max(over, 0.0), 1.0)
        return Score(value + 0.0, f"{sample.num_tokens} tokens, {config.free_tokens} are free")  # + 0.0: never -0.0

    return Verifier(each(judge), top=None)


def _number(tolerance: float, find: Callable[[str], str | None], no_number: str) -> Verifier:
    allowed = Fraction(repr(tolerance))

    def judge(sample: Sample) -> Score:
        gold = to_number(sample.answer)
        if gold is None:
            raise ValueError(f"the gold answer {quoted(sample.answer)} is not a number")
        found = find(sample.text)
        number = None if found is None else parse_number(found)
        if number is None:
            return Score(0.0, no_number.format(quoted(sample.text)))
        right = abs(number - gold) <= allowed
        return Score(float(right), f"{quoted(found)} {'equals' if right else 'is not'} {quoted(sample.answer)}")

    return Verifier(each(judge), _is_number, as_it_stands)


def _is_text(answer: Any, columns: Mapping[str, Any]) -> str | None:
    if answer is None:
        return "needs a gold answer, and there is none"
    if not isinstance(answer, str | int | float):
        return f"needs text or a number, and the gold answer is a {type(answer).__name__}"
    return None


def _is_number(answer: Any, columns: Mapping[str, Any]) -> str | None:
    if answer is None:
        return "needs a gold answer, and there is none"
    return None if to_number(answer) is not None else f"the gold answer {quoted(answer)} is not a number"
