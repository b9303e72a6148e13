"""From a recipe's `[environment]` to one that runs: the table of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..config import EnvironmentConfig, FunctionEnvironment, ToolEnvironment, VerifiersEnvironment
from ..functions import FunctionError, check_arguments, load_function
from .protocol import SINGLE_TURN, Environment, EpisodeError
from .schemas import schemas
from .tool_calling import tools
from .verifiers_turns import oai_tools, verifiers


def own_function(config: FunctionEnvironment) -> Environment:
    """The user's own. Raises EpisodeError if it cannot be found or take a row and the recipe's parameters."""
    try:
        function = load_function(config.function)
        check_arguments(function, config.function, {}, parameters=config.parameters)
    except FunctionError as error:
        raise EpisodeError(f"environment: {error}") from error
    return Environment(
        start=partial(function, **config.parameters),
        max_turns=config.max_turns,
        max_turn_tokens=config.max_turn_tokens,
        workers=config.workers,
    )


BUILDERS: dict[type[EnvironmentConfig], Callable[[Any], Environment]] = {
    FunctionEnvironment: own_function,
    ToolEnvironment: tools,
    VerifiersEnvironment: verifiers,
}


def open_environment(config: EnvironmentConfig | None) -> Environment:
    """The recipe's environment, ready to run; close it. None: the single turn. Raises EpisodeError."""
    return SINGLE_TURN if config is None else BUILDERS[type(config)](config)


def reply_roles(config: EnvironmentConfig | None) -> tuple[str, ...]:
    """Roles of the messages that the model reads between its responses; none where it reads none. Raises EpisodeError."""
    match config:
        case EnvironmentConfig(max_turns=1) | None:
            return ()
        case ToolEnvironment():
            return (config.role,)
        case VerifiersEnvironment():
            return ("tool",) if oai_tools(config) else ("user",)
    return tuple(config.roles)  # type: ignore[attr-defined]


def tool_schemas(config: EnvironmentConfig | None) -> tuple[Mapping[str, Any], ...]:
    """The schemas that the chat template tells the model of, without opening the environment. Raises EpisodeError."""
    match config:
        case ToolEnvironment(tell="template"):
            return schemas(config)
        case VerifiersEnvironment(tell="template"):
            return oai_tools(config)
    return ()
