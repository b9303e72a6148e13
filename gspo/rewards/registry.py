"""From the recipe's rewards to functions that run: the table of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from ..config import (
    CodeReward,
    EnvironmentReward,
    ExactReward,
    FormatReward,
    FunctionReward,
    JudgeReward,
    LastNumberReward,
    LengthPenalty,
    MathReward,
    ModelReward,
    NumericReward,
    ReasoningGymReward,
    RewardConfig,
    VerifiersReward,
    reward_name,
)
from ..functions import FunctionError, check_arguments, load_function
from .code import code
from .episodes import environment
from .gym import reasoning_gym
from .judge import judge
from .mathematics import math
from .text import exact, form, last, length_penalty, numeric
from .verifier import Built, GoldCheck, RewardError, Verifier
from .verifiers_rubric import verifiers


def own_function(config: FunctionReward) -> Verifier:
    """The user's function, with the recipe's parameters. Raises RewardError if it cannot be found or take them."""
    try:
        function = load_function(config.function)
        check_arguments(function, config.function, [], parameters=config.parameters)
        gold = None if config.gold_response is None else load_function(config.gold_response)
        if gold is not None:
            check_arguments(gold, str(config.gold_response), "", {}, parameters={})
    except FunctionError as error:
        raise RewardError(f"reward {reward_name(config)}: {error}") from error
    return Verifier(partial(function, **config.parameters), gold_response=gold)


def reward_model(config: ModelReward) -> Verifier:
    """A sequence-classification model, see preference.py. Raises RewardError if it cannot be loaded."""
    from .preference import preference  # brings torch and transformers along

    return preference(config)


BUILDERS: dict[type[RewardConfig], Callable[[Any], Verifier]] = {
    ExactReward: exact,
    NumericReward: numeric,
    LastNumberReward: last,
    MathReward: math,
    FormatReward: form,
    ReasoningGymReward: reasoning_gym,
    VerifiersReward: verifiers,
    LengthPenalty: length_penalty,
    CodeReward: code,
    ModelReward: reward_model,
    JudgeReward: judge,
    EnvironmentReward: environment,
    FunctionReward: own_function,
}


def build(rewards: Sequence[RewardConfig]) -> list[Built]:
    """The recipe's rewards, ready to run, in its order. Raises RewardError for one that cannot be built."""
    return [_built(config, BUILDERS[type(config)](config)) for config in rewards]


def notes(built: Sequence[Built]) -> list[str]:
    """What these rewards say when a run starts, a line each, with their names."""
    return [f"reward {b.name}: {b.note}" for b in built if b.note]


def gold_checks(built: Sequence[Built]) -> list[GoldCheck]:
    """The checks of gold answers that these rewards ask for; each sentence names its reward."""
    return [partial(_named, b.name, b.gold_check) for b in built if b.gold_check is not None]


def _built(config: RewardConfig, verifier: Verifier) -> Built:
    names = {f.name: getattr(verifier, f.name) for f in fields(Verifier)}
    return Built(name=reward_name(config), weight=config.weight, on_error=config.on_error, **names)


def _named(name: str, check: GoldCheck, answer: Any, columns: Mapping[str, Any]) -> str | None:
    wrong = check(answer, columns)
    return f"reward {name}: {wrong}" if wrong else None
