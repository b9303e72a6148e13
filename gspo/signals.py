"""Ctrl-C and SIGTERM: leave at the next place where nothing is lost."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self


class Interrupted(BaseException):
    """A signal asked the run to end; `number` says which.

    No Exception: whoever catches those, a reward's runner or a library, would take it for a failure of its own.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class Signals:
    """While entered, SIGINT and SIGTERM end the run through Interrupted, but only inside `interruptible()`.

    A second signal raises KeyboardInterrupt at once. Outside the main thread nothing is caught: Python cannot.
    """

    def __init__(self) -> None:
        self.caught: int | None = None
        self._open = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._old = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Work that can be dropped: a signal that came before, or comes inside, raises Interrupted."""
        if self.caught is not None:
            raise Interrupted(self.caught)
        self._open = True
        try:
            yield
        finally:
            self._open = False
        if self.caught is not None:  # somebody inside swallowed it
            raise Interrupted(self.caught)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.caught is not None:
            raise KeyboardInterrupt
        self.caught = number
        if self._open:
            raise Interrupted(number)
        sys.stderr.write("\nstopping where nothing is lost; once more to stop at once\n")
