"""Tool calls in what a model wrote."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_TAG = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    """One call, as far as it could be read."""

    name: str
    """The tool's name; empty where the call could not be read."""
    arguments: dict[str, Any]
    """Its arguments."""
    fault: str = ""
    """What is wrong with it, in a sentence for the model; empty where nothing is."""
    text: str = ""
    """The call as it was written."""


def find_calls(text: str, call_format: str) -> list[Call]:
    """The calls of a response, in their order. What stands before a last `</think>` was thought, and calls nothing.

    `hermes`: every `<tool_call>` with a JSON object. `json`: the whole text is such an object, or a list of them. A call
    that cannot be read is in the list, with its fault.
    """
    said = text.rpartition("</think>")[2].strip()
    if "<think>" in said:  # a thought that never ended
        said = said.partition("<think>")[0]
    if call_format == "hermes":
        return [_closed(*match.groups()) for match in _TAG.finditer(said)]
    if not said.startswith(("{", "[")):
        return []
    value = _parsed(said)
    items = value if isinstance(value, list) else [value]
    if isinstance(value, str):
        return [Call("", {}, value, said)] if '"name"' in said else []
    return [_call(item, said) for item in items if isinstance(item, dict) and "name" in item]


def _closed(body: str, end: str) -> Call:
    if end != "</tool_call>":
        return Call("", {}, "the call has no </tool_call> at its end", body.strip())
    value = _parsed(body)
    return Call("", {}, value, body.strip()) if isinstance(value, str) else _call(value, body.strip())


def _parsed(text: str) -> Any:
    """The JSON object or list in a text, or in a sentence why there is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        what = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else "it cannot be read"
        return f"the call is not JSON: {what}"
    return value if isinstance(value, dict | list) else "the call is not a JSON object"


def _call(value: Any, text: str) -> Call:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return Call("", {}, 'the call is not an object with a "name"', text)
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write them as JSON inside JSON
        arguments = _parsed(arguments)
    if not isinstance(arguments, dict):
        return Call(name, {}, 'its "arguments" are not an object', text)
    return Call(name, arguments, "", text)
