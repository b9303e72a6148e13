"""The rubric of a `verifiers` environment."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..config import VerifiersReward
from ..types import Sample, Score
from ..verifiers_package import load_environment
from .verifier import Verifier

_OF_GROUPS = frozenset({"states", "prompts", "completions", "answers", "tasks", "infos"})


def verifiers(config: VerifiersReward) -> Verifier:
    """The weighted sum of the reward functions of the environment that a prompt came from.

    The functions are called here and not by the rubric, which logs an exception and makes it a 0: here it is an exception,
    and `on_error` says what that does. Functions of weight 0 are metrics and are not called. Not covered: functions that
    score a group together (refused), time limits.
    """

    async def function(samples: Sequence[Sample]) -> list[Score]:
        return await asyncio.gather(*(_judge(sample) for sample in samples))

    return Verifier(function, _from_verifiers)


async def _judge(sample: Sample) -> Score:
    columns = sample.prompt.columns
    environment = load_environment(columns["_environment"], columns["_parameters"])
    try:
        parts = [(f.__name__, w, await _called(f, sample, known)) for f, w, known in _functions(environment.rubric)]
    except Exception as error:
        error.add_note(f"at sample {sample.id}")
        raise
    return Score(sum(w * v for _, w, v in parts), ", ".join(f"{name} {value:g}" for name, _, value in parts))


def _functions(rubric: Any) -> Iterator[tuple[Callable[..., Any], float, Mapping[str, Any]]]:
    """The functions that count, with weight and the objects that they may ask for; of a group of rubrics those of all."""
    for one in getattr(rubric, "rubrics", [rubric]):
        for function, weight in zip(one.funcs, one.weights, strict=True):
            if not weight:
                continue
            if _OF_GROUPS & inspect.signature(function).parameters.keys():
                raise ValueError(f"{function.__name__} scores a group of responses together, which is not supported")
            yield function, float(weight), getattr(one, "class_objects", {})


async def _called(function: Callable[..., Any], sample: Sample, known: Mapping[str, Any]) -> float:
    columns = sample.prompt.columns
    told = {
        "prompt": list(sample.prompt.messages or ()) or sample.prompt.text,
        "completion": [{"role": "assistant", "content": sample.text}] if sample.prompt.messages else sample.text,
        "answer": columns.get("answer", ""),
        "task": columns.get("task", "default"),
        "info": columns.get("info") or {},
    }
    told |= {"state": dict(told)} | dict(known)
    takes = inspect.signature(function).parameters
    if not any(p.kind == p.VAR_KEYWORD for p in takes.values()):
        told = {name: value for name, value in told.items() if name in takes}
    value = function(**told)
    return float(await value if inspect.isawaitable(value) else value)


def _from_verifiers(answer: Any, columns: Mapping[str, Any]) -> str | None:
    return None if "_environment" in columns else 'scores only rows of a source = "verifiers"'
