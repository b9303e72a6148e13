"""Ctrl-C, SIGTERM and a terminal that closes: leave at the next place where nothing is lost."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from .distributed import ALONE, SharedError, World

REPEAT_S = 10.0
"""Among several ranks a signal within this time of the first is the same one: torchrun hands on to its workers what the
terminal may have sent them too."""


class Interrupted(BaseException):
    """A signal asked the run to end; `number` says which.

    No Exception: whoever catches those, a reward's runner or a library, would take it for a failure of its own.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class Signals:
    """While entered, SIGINT, SIGTERM and SIGHUP end the run through Interrupted, but only inside `interruptible()`.

    SIGHUP stays ignored where it is, as nohup has it.

    A second signal raises KeyboardInterrupt at once. Outside the main thread nothing is caught: Python cannot. Several
    ranks decide together, at the same place, whichever of them got the signal.
    """

    def __init__(self, world: World = ALONE) -> None:
        self.caught: int | None = None
        self._world = world
        self._inside = self._open = False
        self._at = 0.0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            gone = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
            self._old = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM, *gone)}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Work that can be dropped: a signal that came before, or comes inside, raises Interrupted.

        Among several ranks one that comes inside does so in `apart` alone: elsewhere ranks wait for each other.
        """
        self._stop_if_asked()
        self._inside, self._open = True, self._world.size == 1
        try:
            yield
        finally:
            self._inside = self._open = False
        if self.caught is not None and self._world.size == 1:  # somebody inside swallowed it
            raise Interrupted(self.caught)

    @contextmanager
    def apart(self, *expected: type[Exception]) -> Iterator[None]:
        """Work that each rank does by itself, with no collective in it, so that all ranks end it alike.

        One of the expected errors on one rank is a SharedError on the others, and a signal, where the work can be dropped,
        is Interrupted on all. Any other error ends this rank alone, and the others when they miss it.
        """
        if self._world.size == 1:
            yield
            return
        error = None
        try:
            self._open = self._inside
            if self._open and self.caught is not None:
                raise Interrupted(self.caught)
            yield
        except Interrupted:
            pass  # raised again below, on all ranks
        except expected as failed:
            error = failed
        finally:
            self._open = False
        if self._inside:
            self._stop_if_asked()
        self._world.agree(error, SharedError)

    def asked(self) -> int | None:
        """The signal that this or another rank has caught. All ranks call it at the same place, and hear the same."""
        (number,) = self._world.most([self.caught or 0])
        if number:
            self.caught, self._at = number, time.monotonic()
        return number or None

    def _stop_if_asked(self) -> None:
        if number := self.asked():
            raise Interrupted(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._world.size > 1 and self.caught is not None and time.monotonic() - self._at < REPEAT_S:
            return
        if self.caught is not None:
            raise KeyboardInterrupt
        self.caught, self._at = number, time.monotonic()
        if self._open:
            raise Interrupted(number)
        if self._world.is_main:
            sys.stderr.write("\nstopping where nothing is lost; once more to stop at once\n")
