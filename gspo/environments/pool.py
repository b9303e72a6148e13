"""Processes that run tools, each killed and replaced where a call hangs or breaks it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import time
import weakref
from typing import Any

from ..config import ToolEnvironment
from .protocol import EpisodeError

START_S = 60.0
"""Seconds in which a process must be ready: it imports pydantic and the tools' files."""


class Pool:
    """Tools in processes of their own; `call` may be used from several threads."""

    def __init__(self, config: ToolEnvironment) -> None:
        self.config = config
        self._idle: queue.Queue[_Process] = queue.Queue()
        self._all = [_Process(config) for _ in range(config.workers)]
        for process in self._all:
            self._idle.put(process)

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[bool, str]:
        """Whether the tool returned, and its output, cut to the limit; or in a sentence what went wrong, for the model.

        Raises EpisodeError where no process can be started: that is nobody's call.
        """
        process = self._idle.get()
        try:
            return process.call(name, arguments)
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """End all processes."""
        for process in self._all:
            process.kill()


class _Process:
    """One process, started when it is first needed and again after it was killed."""

    def __init__(self, config: ToolEnvironment) -> None:
        self.config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[bool, str]:
        try:
            process = self._process or self._start()
            line = json.dumps({"name": name, "arguments": arguments}) + "\n"
            answer = self._ask(process, line.encode(), self.config.timeout_s)
        except BaseException:  # interrupted in the middle of a call: its answer must not become the next one's
            self.kill()
            raise
        if answer is None:
            code = self.kill()
            if code is None:
                return False, f"the tool was stopped: it ran longer than {self.config.timeout_s:g} seconds"
            return False, "the tool crashed: its process ended"
        ok, output = json.loads(answer)
        return bool(ok), output

    def _start(self) -> subprocess.Popen[bytes]:
        setting = self.config.model_dump(include={"tools", "parameters", "timeout_s", "max_output_characters"})
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._rest = b""
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", "gspo.environments.worker", json.dumps(setting)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # a signal to the trainer is not one to the tools, and a kill takes all they started
        )
        self._finalizer = weakref.finalize(self, _end, process)
        if self._ask(process, b"", START_S) is None:
            code = self.kill()
            raise EpisodeError(
                f"the process for tools does not start (exit {code}): try python -m gspo.environments.worker "
                f"'{json.dumps(setting)}'"
            )
        return process

    def _ask(self, process: subprocess.Popen[bytes], line: bytes, seconds: float) -> bytes | None:
        """The next line of answers, or None where the process ended or the time did."""
        assert process.stdin is not None and process.stdout is not None
        end = time.monotonic() + seconds
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError:
            return None
        while b"\n" not in self._rest:
            left = end - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                return None
            data = os.read(process.stdout.fileno(), 65536)
            if not data:
                process.wait(1)
                return None
            self._rest += data
        answer, _, self._rest = self._rest.partition(b"\n")
        return answer

    def kill(self) -> int | None:
        """End the process and what it started; its exit code if it had ended before."""
        process, self._process = self._process, None
        return None if process is None else _end(process)


def _end(process: subprocess.Popen[bytes]) -> int | None:
    code = process.poll()
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all of the group has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    return code
