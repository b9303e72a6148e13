"""Locks on files, which the operating system frees when their process ends, however it ends."""

from __future__ import annotations

import fcntl
import time

PATIENCE_S = 2.0
"""A process killed while it starts a program leaves, until that program runs, a copy of itself with the lock: some
milliseconds, or tenths of a second on a busy machine. What goes on at once after a kill waits that long."""


def lock(file: int) -> bool:
    """Lock an open file against other processes; False if another one still holds it after `PATIENCE_S`.

    Not covered: network file systems without locks.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        else:
            return True
