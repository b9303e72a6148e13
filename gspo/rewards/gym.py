"""The scorers of reasoning-gym, kept from running what a model wrote."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from ..config import ReasoningGymReward
from ..types import Sample, Score
from .verifier import Verifier, as_it_stands, each

_LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks whose scorer calls Python's eval on the response, to read a list."""

_EXPRESSIONS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Tasks whose scorer hands the response to sympy's parse_expr, which evaluates it as Python."""

_CHARACTERS = re.compile(r"(?:[0-9A-Za-z\s+\-*/^()=,]|\.(?!\s*[A-Za-z]))*")
_NAME = re.compile("a?(?:sin|cos|tan|sec|csc|cot)h?|exp|log|ln|sqrt|pi|[A-Za-z]")
_INTEGER = "-?[0-9]{1,2}"
_SMALL_POWER = re.compile(
    rf"\*\*\s*(?:{_INTEGER}|[A-Za-z]|\(\s*{_INTEGER}(?:\s*/\s*[0-9]{{1,2}})?\s*\))(?![\w.])(?!\s*\*\*)"
)


def reasoning_gym(config: ReasoningGymReward) -> Verifier:
    """The score of the reasoning-gym task that the prompt came from, white space around the response aside.

    The scorer is rebuilt with the row's own parameters. A wrong answer is not 0 in every task, and some scorers raise on
    text that is no answer (`prime_factorization`): `on_error` says what that does. No scorer gets to evaluate a response
    as Python: lists are read as literals, and where sympy would evaluate it, a response that is more than an expression
    of numbers, letters and elementary functions is scored as an empty one. Not covered: time and memory of a scorer.
    """
    scorers: dict[str, Any] = {}

    def judge(sample: Sample) -> Score:
        columns, answer = sample.prompt.columns, sample.text.strip()
        if wrong := _from_gym(sample.answer, columns):
            raise ValueError(wrong)
        task, key = columns["_task"], json.dumps([columns["_task"], columns["_parameters"]], sort_keys=True, default=str)
        if key not in scorers:
            scorers[key] = _scorer(task, columns["_parameters"])
        why = f"scored by {task}"
        if task in _EXPRESSIONS and not _is_expression(answer):
            answer, why = "", f"scored by {task} as an empty answer: it is more than an expression"
        with contextlib.redirect_stdout(io.StringIO()):  # some scorers print
            return Score(float(scorers[key].score_answer(answer, columns["_entry"])), why)

    return Verifier(each(judge), _from_gym, as_it_stands)


def _scorer(task: str, parameters: Mapping[str, Any]) -> Any:
    from reasoning_gym.factory import create_dataset

    dataset = create_dataset(task, **parameters)
    if task in _LISTS:  # shadows the builtin in that one module, whose only use of it is to read the response
        vars(sys.modules[type(dataset).__module__])["eval"] = ast.literal_eval
    return dataset


def _is_expression(text: str) -> bool:
    """Whether a text is safe to evaluate: arithmetic, elementary functions, one-letter names, and no tower of powers."""
    if not _CHARACTERS.fullmatch(text) or not all(_NAME.fullmatch(word) for word in re.findall("[A-Za-z]+", text)):
        return False
    nested = len(re.findall(r"\)\s*\*\*", text))
    return nested <= 2 and "**" not in _SMALL_POWER.sub("", text)


def _from_gym(answer: Any, columns: Mapping[str, Any]) -> str | None:
    if columns.keys() >= {"_entry", "_task", "_parameters"}:
        return None
    return 'scores only rows of a source = "reasoning_gym"'
