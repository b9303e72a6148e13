"""Typed Python functions as tools: found by name, described by a JSON schema."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from ..config import ToolEnvironment
from ..functions import FunctionError, load_function
from . import tools as own
from .protocol import EpisodeError

BUILT_IN: dict[str, Callable[..., str]] = {"calculator": own.calculator, "search": own.search}


def find_tool(spec: str) -> Callable[..., Any]:
    """A tool that comes along, by its name, or a function of the user's. Raises FunctionError."""
    if spec in BUILT_IN:
        return BUILT_IN[spec]
    if ":" not in spec:
        raise FunctionError(f"there is no tool {spec!r}: use {', '.join(BUILT_IN)}, or path/to/file.py:name")
    return load_function(spec)


def tool_name(spec: str) -> str:
    """The name by which the model calls a tool."""
    return spec.rpartition(":")[2]


def schemas(config: ToolEnvironment) -> tuple[Mapping[str, Any], ...]:
    """The schema of each tool, without the arguments that the recipe gives. Raises EpisodeError for a function that cannot
    be found or described."""
    return tuple(_schema(spec, config.parameters.get(tool_name(spec), {})) for spec in config.tools)


def _schema(spec: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        function = find_tool(spec)
        schema = copy.deepcopy(get_json_schema(function))
    except (FunctionError, DocstringParsingException, TypeHintParsingException) as error:
        raise EpisodeError(f"environment.tools: {spec}: {error}") from error
    arguments = schema["function"]["parameters"]
    if strange := sorted(set(given) - set(arguments["properties"])):
        raise EpisodeError(f"environment.parameters: {spec} has no argument {strange[0]}")
    for name in given:
        del arguments["properties"][name]
    arguments["required"] = [name for name in arguments.get("required", []) if name not in given]
    schema["function"].pop("return", None)
    return schema
