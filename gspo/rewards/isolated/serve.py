"""A worker's life: read a question, answer it, a JSON line each, until the pipe ends.

The parent watches the clock and kills. What is here holds where the parent cannot: the kernel limits memory, and ends a
process that outlives its question although nobody kills it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

Answerer = Callable[[dict[str, Any]], dict[str, Any]]

GRACE_S = 1.0
"""Seconds beyond its limit after which a worker ends itself: the parent, if there is one, has long killed it."""
FILE_BYTES = 1 << 20
"""Largest file a worker can write; its one file is where its standard error goes."""
PR_SET_PDEATHSIG = 1


def main(function: str, timeout_s: float, memory_mib: int, parent: int) -> None:
    """Serves `module:name` over standard input and output. Never returns."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a library that prints must not speak to the parent
    if parent:
        _die_with(parent)
    module, _, name = function.partition(":")
    answer = getattr(importlib.import_module(module), name)
    _limit(memory_mib)
    _say(output, {"ready": True})
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE_S)  # SIGALRM kills, even inside one long operation in C
        reply = _reply(answer, json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _say(output, reply)
        if reply.get("limit") == "memory":
            break
    os._exit(0)


def _reply(answer: Answerer, question: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": answer(question)}
    except MemoryError:
        return {"limit": "memory"}
    except RecursionError:
        return {"limit": "depth"}
    except Exception as error:  # what it means is the parent's business
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def _say(output: Any, message: dict[str, Any]) -> None:
    output.write(json.dumps(message) + "\n")
    output.flush()


def _die_with(parent: int) -> None:
    """Killed by the kernel when the parent ends, kill -9 included. Linux only; elsewhere the pipe's end does it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before we asked
            os._exit(0)


def _limit(memory_mib: int) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    size = memory_mib << 20
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
