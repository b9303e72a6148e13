"""The side of the program. Everything in this process is the program's to change: nothing here is believed."""

from __future__ import annotations

import sys
from typing import Any

from .values import Channel, decode, encode


def run(spec: dict[str, Any]) -> int:
    """Run the program as a script on the standard input. The exit status."""
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(spec["sources"][0], "program", "exec"), namespace)
    return 0


def serve(spec: dict[str, Any]) -> int:
    """Run the program as a module, then do what the judge asks with what it defined, until the judge is gone."""
    channel, namespace, things = Channel(*spec["channel"]), {"__name__": "program"}, {}

    def leave(value: Any) -> int:
        things[id(value)] = value
        return id(value)

    while True:
        question = channel.receive()
        try:
            answer = {"value": encode(_do(question, spec, namespace, things), leave)}
        except BaseException as error:
            answer = {"raised": [type(error).__name__, _text(error), _line(error)]}
        channel.send(answer)


def _do(question: dict[str, Any], spec: dict[str, Any], namespace: dict[str, Any], things: dict[int, Any]) -> Any:
    match question["ask"]:
        case "load":
            for source in spec["sources"]:
                exec(compile(source, "program", "exec"), namespace)
        case "names":
            return {name: namespace[name] for name in question["names"] if name in namespace}
        case "call":
            args, kwargs = (decode(question[key], things.__getitem__) for key in ("args", "kwargs"))
            return things[question["on"]](*args, **kwargs)
        case "get":
            return getattr(things[question["on"]], question["name"])
        case "set":
            return setattr(things[question["on"]], question["name"], decode(question["value"], things.__getitem__))
        case other:
            special = getattr(type(things[question["on"]]), other, None)
            if special is None:
                raise TypeError(f"a {type(things[question['on']]).__name__} has no {other}")
            return special(things[question["on"]], *decode(question["args"], things.__getitem__))


def _text(error: BaseException) -> str:
    try:
        return str(error)[:300]
    except BaseException:
        return ""


def _line(error: BaseException) -> int | None:
    if isinstance(error, SyntaxError):
        return error.lineno
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "program":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def report(error: BaseException) -> int:
    """Say how a script ended, as Python does; the exit status."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    print(f"{type(error).__name__}: {_text(error)} (line {_line(error)})", file=sys.stderr)
    return 1
