"""Mathematical equality, through math-verify."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ..config import MathReward
from ..types import Sample, Score
from .verifier import RewardError, Verifier, each, quoted

_BOX = "\\boxed{"


def math(config: MathReward) -> Verifier:
    """1 if math-verify finds the content of the response's last `\\boxed{}` equal to the gold answer, else 0.

    A response without a box, with an unclosed last box, or with one in which there is nothing to parse, scores 0. An
    exception or timeout of math-verify is an exception here too, never a 0. Raises RewardError outside the main thread,
    where math-verify's time limit (SIGALRM) cannot work. Not covered: boxes without braces (`\\boxed 5`); a SIGALRM
    timer of somebody else's is lost; memory is not limited, nor the time of one long operation in C.
    """

    def judge(sample: Sample) -> Score:
        box = last_boxed(sample.text)
        if box is None:
            why = "its last \\boxed{} is not closed" if _BOX in sample.text else "the response has no \\boxed{}"
            return Score(0.0, why)
        gold, found = _parse(_gold_text(sample.answer), config.timeout_s), _parse(box, config.timeout_s)
        if not gold:
            raise ValueError(f"math-verify cannot parse the gold answer {quoted(sample.answer)}")
        if not found:
            return Score(0.0, f"math-verify cannot parse {quoted(box)}")
        right = _verify(gold, found, config.timeout_s)
        return Score(float(right), f"{quoted(box)} {'equals' if right else 'is not'} {quoted(sample.answer)}")

    def gold_check(answer: Any, columns: Mapping[str, Any]) -> str | None:
        if answer is None:
            return "needs a gold answer, and there is none"
        try:
            parsed = _parse(_gold_text(answer), config.timeout_s)
        except RewardError:
            raise
        except Exception as error:  # math-verify's own: it is what is wrong with this answer
            return f"math-verify fails on the gold answer {quoted(answer)}: {type(error).__name__}: {error}"
        return None if parsed else f"math-verify cannot parse the gold answer {quoted(answer)}"

    return Verifier(each(judge), gold_check, lambda answer, columns: f"{_BOX}{_gold_text(answer)}}}")


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` of a text, or None if there is none or its braces never close."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth, begin, escaped = 1, start + len(_BOX), False
    for i in range(begin, len(text)):
        if not escaped:
            depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i]
        escaped = text[i] == "\\" and not escaped
    return None


def _gold_text(answer: Any) -> str:
    text = str(answer)
    box = last_boxed(text)
    return text if box is None else box


def _parse(latex: str, timeout_s: int) -> list[Any]:
    """math-verify's readings of the content of a box; empty if it found no mathematics there, only a string."""
    from math_verify import LatexExtractionConfig, parse

    wanted = [LatexExtractionConfig()]
    boxed = f"{_BOX}{latex}}}"
    found = _limited(lambda: parse(boxed, wanted, parsing_timeout=timeout_s, raise_on_error=True), timeout_s)
    return found if any(not isinstance(reading, str) for reading in found) else []


def _verify(gold: list[Any], found: list[Any], timeout_s: int) -> bool:
    from math_verify import verify

    return _limited(lambda: verify(gold, found, timeout_seconds=timeout_s, raise_on_error=True), timeout_s)


def _limited(work: Callable[[], Any], timeout_s: int) -> Any:
    """Runs math-verify quietly; its timeout, which is no Exception, becomes a TimeoutError."""
    from math_verify.errors import TimeoutException

    if threading.current_thread() is not threading.main_thread():
        raise RewardError("reward math: works in the main thread only, because its time limit is a signal")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sympy's and antlr's, about what a model wrote
            return work()
    except TimeoutException:
        raise TimeoutError(f"math-verify took longer than {timeout_s} s") from None
