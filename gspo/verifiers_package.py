"""Environments of the package `verifiers` (0.1): loaded by name, and judged by their rubrics."""

from __future__ import annotations

import importlib
import inspect
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from .types import Score

_OF_GROUPS = frozenset({"states", "prompts", "completions", "answers", "tasks", "infos"})


class VerifiersError(Exception):
    """An environment of `verifiers` that cannot be used; the message says why and what to do."""


def load_environment(name: str, parameters: Mapping[str, Any]) -> Any:
    """The environment `verifiers.load_environment(name, **parameters)`, once a process. Raises VerifiersError."""
    return _load(name, json.dumps(parameters, sort_keys=True))


@lru_cache(maxsize=8)
def _load(name: str, parameters: str) -> Any:
    try:
        package = importlib.import_module("verifiers")
    except ImportError as error:
        raise VerifiersError(
            f"environment {name} needs the package verifiers: pip install 'verifiers<0.2' ({error})"
        ) from error
    if not hasattr(package, "load_environment") or not hasattr(package, "MultiTurnEnv"):
        raise VerifiersError("this version of verifiers has another interface: pip install 'verifiers<0.2'")
    try:
        with _signals_kept():
            environment = package.load_environment(name, **json.loads(parameters))
    except Exception as error:  # foreign code: say whose failure it is
        raise VerifiersError(f"verifiers cannot load the environment {name}: {error}") from error
    if not isinstance(environment, package.MultiTurnEnv):
        raise VerifiersError(
            f"the environment {name} is a {type(environment).__name__}, not a SingleTurnEnv or MultiTurnEnv, and cannot be "
            "used: load the environments that it is made of one by one"
        )
    return environment


@contextmanager
def _signals_kept() -> Iterator[None]:
    """An environment takes SIGINT and SIGTERM for itself when it is made; a run would then end without a checkpoint."""
    on_main = threading.current_thread() is threading.main_thread()
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if on_main else {}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def is_single_turn(environment: Any) -> bool:
    """Whether its episodes end with the first response."""
    return isinstance(environment, importlib.import_module("verifiers").SingleTurnEnv)


async def judge(environment: Any, told: Mapping[str, Any]) -> Score:
    """The weighted sum of the environment's reward functions.

    told: what they may ask for, by argument name. They are called here and not by the rubric, which logs an exception and
    makes it a 0: here it is an exception. Functions of weight 0 are metrics and are not called. Raises ValueError for one
    that scores a group together.
    """
    parts = [(f.__name__, w, await _called(f, dict(told) | dict(known))) for f, w, known in _functions(environment.rubric)]
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


async def _called(function: Callable[..., Any], told: Mapping[str, Any]) -> float:
    takes = inspect.signature(function).parameters
    if not any(p.kind == p.VAR_KEYWORD for p in takes.values()):
        told = {name: value for name, value in told.items() if name in takes}
    value = function(**told)
    return float(await value if inspect.isawaitable(value) else value)
