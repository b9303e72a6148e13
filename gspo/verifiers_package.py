"""Environments of the package `verifiers` (0.1), of which data and rewards are taken."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any


class VerifiersError(Exception):
    """An environment of `verifiers` that cannot be used; the message says why and what to do."""


def load_environment(name: str, parameters: Mapping[str, Any]) -> Any:
    """The environment `verifiers.load_environment(name, **parameters)`, once a process. Raises VerifiersError.

    Not covered: environments of several turns, whose loops call a model over HTTP and would return text, not tokens; write
    their rules as an `[environment]` of type "function" instead.
    """
    return _load(name, json.dumps(parameters, sort_keys=True))


@lru_cache(maxsize=8)
def _load(name: str, parameters: str) -> Any:
    try:
        package = importlib.import_module("verifiers")
    except ImportError as error:
        raise VerifiersError(
            f"environment {name} needs the package verifiers: pip install 'verifiers<0.2' ({error})"
        ) from error
    if not hasattr(package, "load_environment") or not hasattr(package, "SingleTurnEnv"):
        raise VerifiersError("this version of verifiers has another interface: pip install 'verifiers<0.2'")
    try:
        environment = package.load_environment(name, **json.loads(parameters))
    except Exception as error:  # foreign code: say whose failure it is
        raise VerifiersError(f"verifiers cannot load the environment {name}: {error}") from error
    if not isinstance(environment, package.SingleTurnEnv):
        raise VerifiersError(
            f"the environment {name} is a {type(environment).__name__}: only those of a single turn (SingleTurnEnv) can be "
            'used; write an [environment] with type = "function" for its turns'
        )
    return environment
