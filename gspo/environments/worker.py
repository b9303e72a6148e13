"""The other side of the pipe: a process that runs tools. A line of JSON in is a call, a line of JSON out its output."""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError, validate_call

from .schemas import find_tool, tool_name

GRACE_S = 1.0
"""Seconds beyond its limit after which a call ends the process: the trainer, if there is one, has long killed it."""


def main() -> None:
    """Serve until the pipe ends. What tools print goes to standard error and not between the lines. A call that outlives
    its limit although nobody kills it ends the process: the trainer, who would have, is gone."""
    config = json.loads(sys.argv[1])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # kills, even inside one long operation in C
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    tools = {tool_name(spec): validate_call(find_tool(spec)) for spec in config["tools"]}
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        given = config["parameters"].get(call["name"], {})
        signal.setitimer(signal.ITIMER_REAL, config["timeout_s"] + GRACE_S)
        ok, output = run(tools[call["name"]], call["arguments"], given)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps([ok, cut(output, config["max_output_characters"])]), file=answers, flush=True)


def run(tool: Callable[..., Any], arguments: dict[str, Any], given: dict[str, Any]) -> tuple[bool, str]:
    """Whether the tool returned, and what: text as it is, everything else as JSON; or in a sentence what went wrong."""
    try:
        if taken := sorted(set(arguments) & set(given)):
            raise TypeError(f"unexpected argument {taken[0]}")
        inspect.signature(tool).bind(**arguments, **given)
        value = tool(**arguments, **given)
        return True, value if isinstance(value, str) else json.dumps(value, default=str)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, f['loc']))}: {f['msg']}" for f in error.errors(include_url=False)]
        return False, f"wrong arguments: {'; '.join(faults)}"
    except SystemExit:
        return False, "the tool tried to end its process"
    except Exception as error:  # the model's to hear, whatever it is
        return False, f"{type(error).__name__}: {error}"


def cut(text: str, most: int) -> str:
    """The text, or its beginning and a sentence that says what is missing. Halves of surrogate pairs become `?`."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= most:
        return text
    return f"{text[:most]}\n[cut here: these are the first {most} of {len(text)} characters]"


if __name__ == "__main__":
    main()
