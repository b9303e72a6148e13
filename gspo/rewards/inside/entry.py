"""Where a sandboxed process starts: it reads what it is to do, puts up the walls, says so, and then does it."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from . import judge, program, walls

COULD_NOT_START = 70
"""Exit status where a wall could not be put up. EX_SOFTWARE of sysexits.h."""


def main(status: int) -> None:
    """Read the task from file descriptor 0 (8 bytes of length, JSON; the rest is the program's standard input) and do it.

    `R` goes to the file descriptor `status` once all walls stand, and a sentence if one does not.
    """
    try:
        spec = _read()
        walls.put_up(spec)
        os.write(status, b"R")
        os.close(status)
    except BaseException as error:
        os.write(status, f"{type(error).__name__}: {error}".encode()[:2000])
        os._exit(COULD_NOT_START)
    os._exit(_finish(spec))


def _finish(spec: dict[str, Any]) -> int:
    try:
        code = ROLES[spec["role"]](spec)
    except BaseException as error:
        code = program.report(error)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        code = code or 1
    return code & 255


def _read() -> dict[str, Any]:
    size = int.from_bytes(os.read(0, 8), "big")
    data = b""
    while len(data) < size:
        data += os.read(0, size - len(data))
    return json.loads(data)


ROLES = {"run": program.run, "serve": program.serve, "judge": judge.judge}
