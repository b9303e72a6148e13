"""Typed Python functions as tools: found by name, described by a JSON schema."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
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


def _uncallable(function: Callable[..., Any]) -> str:
    """Why a call by named arguments could not give a text, or nothing."""
    if inspect.isclass(function):
        return "is a class: name a function"
    later = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if any(is_kind(function) for is_kind in later):
        return "is async or a generator, which gives no text when called: write a plain function"
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            return f"argument {name} cannot be given by its name, as models give them: write it without * and /"
    return ""


def _schema(spec: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        function = find_tool(spec)
        if fault := _uncallable(function):
            raise FunctionError(fault)
        schema = copy.deepcopy(get_json_schema(function))
    except (FunctionError, DocstringParsingException, TypeHintParsingException, NameError, ValueError) as error:
        raise EpisodeError(f"environment.tools: {spec}: {error}") from error
    arguments = schema["function"]["parameters"]
    if strange := sorted(set(given) - set(arguments["properties"])):
        raise EpisodeError(f"environment.parameters: {spec} has no argument {strange[0]}")
    if function is own.search and not ("folder" in given and Path(str(given["folder"])).is_dir()):
        found = f"there is no folder {given['folder']} in {Path.cwd()}" if "folder" in given else "no folder is given"
        raise EpisodeError(
            f"environment.tools: search: {found}, and the model is not to choose one: set "
            'parameters = { search = { folder = "path/to/texts" } }'
        )
    for name in given:
        del arguments["properties"][name]
    arguments["required"] = [name for name in arguments.get("required", []) if name not in given]
    schema["function"].pop("return", None)
    return schema
