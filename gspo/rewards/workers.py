"""A pool of worker processes, each with a hard limit of time and memory, for work on what a model wrote.

A worker is a fresh interpreter that imports one function of `isolated/` and nothing of torch, whatever threads, devices
or start method its parent has. Questions and answers are JSON lines. Libraries were looked at: the pools that limit time
(pebble) are built on multiprocessing, which imports the parent's main module into each worker, and none limits memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .verifier import RewardError

BATCH = 32
"""Most questions sent to a worker at once: a round trip costs more than a short answer."""
BATCH_BYTES = 32_000
"""Most bytes of a batch of several questions: they fit into a pipe, so that sending never waits for one that hangs."""
START_S = 120.0
"""Seconds in which a worker must be ready: a cold disk may need some, and a hang must not be for ever."""
RECYCLE = 20_000
"""Questions after which a worker is replaced, so that what a library keeps cannot grow for ever."""

_BOOT = """
import json, sys, types
path, packages, call = json.loads(sys.argv[1])
sys.path[:] = path
for name, folder in packages:  # the packages without their __init__, which import much that a worker does not need
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from gspo.rewards.isolated.serve import main
main(*call)
"""


class WorkerError(RewardError):
    """A worker that failed for a reason of ours, not of the question: it is never a verdict."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one question: a result, or the limit that it ran into, or the exception that it raised."""

    result: Any = None
    """What the function returned; None if it returned nothing."""
    limit: str = ""
    """The limit as a sentence without a subject, such as `took longer than 5 s`; empty if none was reached."""
    error: str = ""
    """Type and message of an exception; empty if none was raised."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one question may cost, and how many workers there are."""

    timeout_s: float
    """Seconds on the wall clock."""
    memory_mib: int
    """MiB of address space of the whole worker, its libraries included (about 250)."""
    num_workers: int
    """Worker processes."""


class Pool:
    """Workers that answer questions through one function of `gspo.rewards.isolated`, started when first needed.

    Any thread may call `run`, several at once. Nothing is left running: workers end when the pool is closed, collected or
    left at exit; when the parent dies, idle ones end at once, as do all that the main thread started, and any other at
    most a second past its limit. After a fork the child has workers of its own. Not covered: processes that a question
    starts, and the file system and network: the function must not give a question a way there.
    """

    def __init__(self, function: str, limits: Limits) -> None:
        self.function, self.limits = function, limits
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._free = threading.Condition()
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _kill_all, self._all, self._owner)

    def run(self, questions: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """Each question's outcome, in order: [questions] -> [questions].

        A question at its limit costs its worker, which is replaced, and nothing of the other questions'. Running out of
        memory and crashing are believed only of a worker that had done nothing before. Raises WorkerError if a worker
        cannot start, or dies twice of something that is not a limit.
        """
        if not questions:
            return []
        self._notice_fork()
        workers = self._take(min(self.limits.num_workers, math.ceil(len(questions) / 4)))
        try:
            return _Run(self, questions, workers).outcomes()
        finally:
            self._give_back(workers)

    def close(self) -> None:
        """Ends all workers. A later `run` starts new ones."""
        with self._free:
            self._idle.clear()
            _kill_all(self._all, self._owner)

    def start(self) -> _Worker:
        """A new worker, which is getting ready."""
        try:
            worker = _Worker(self.function, self.limits)
        except OSError as error:
            raise WorkerError(f"a worker of {self.function} cannot start: {error}") from error
        self._all.add(worker)
        return worker

    def end(self, worker: _Worker) -> None:
        """Kills a worker, idle or busy, and waits until it is gone."""
        worker.kill()
        self._all.discard(worker)

    def _take(self, wanted: int) -> list[_Worker]:
        """At least one worker, at most as many as wanted; waits while other threads have them all."""
        with self._free:
            self._free.wait_for(lambda: self._idle or len(self._all) < self.limits.num_workers)
            taken: list[_Worker] = []
            while len(taken) < wanted and self._idle:
                taken.append(self._idle.pop())
            try:
                while len(taken) < wanted and len(self._all) < self.limits.num_workers:
                    taken.append(self.start())
            except BaseException:
                self._give_back(taken)
                raise
            return taken

    def _give_back(self, workers: list[_Worker]) -> None:
        """Workers without open questions are kept; the others, after an exception or Ctrl-C, are killed."""
        with self._free:
            for worker in workers:
                if worker.alive and not worker.asked and worker.answered < RECYCLE and worker in self._all:
                    self._idle.append(worker)
                else:
                    self.end(worker)
            self._free.notify_all()

    def _notice_fork(self) -> None:
        if self._owner != os.getpid():  # the workers are the parent's: forget them, and never speak to them
            self._finalizer.detach()
            for worker in self._all:
                worker.forget()
            self.__init__(self.function, self.limits)


_POOLS: weakref.WeakValueDictionary[tuple[str, Limits], Pool] = weakref.WeakValueDictionary()
_POOLS_LOCK = threading.Lock()


def shared_pool(function: str, limits: Limits) -> Pool:
    """The pool of this function and these limits: one for all who hold it, closed when nobody does."""
    with _POOLS_LOCK:
        pool = _POOLS.get((function, limits))
        if pool is None:
            pool = _POOLS[function, limits] = Pool(function, limits)
        return pool


class _Run:
    """One call of `run`: questions dealt to workers, answers taken in as they come, the clock watched."""

    def __init__(self, pool: Pool, questions: Sequence[Mapping[str, Any]], workers: list[_Worker]) -> None:
        self.pool, self.workers = pool, workers
        self.lines = [json.dumps(question).encode() + b"\n" for question in questions]
        self.pending = deque(range(len(questions)))
        self.suspects: set[int] = set()
        self.found: dict[int, Outcome] = {}
        self.selector = selectors.DefaultSelector()

    def outcomes(self) -> list[Outcome]:
        with self.selector:
            for worker in self.workers:
                self._watch(worker)
            while len(self.found) < len(self.lines):
                for worker in list(self.workers):
                    self._deal(worker)
                for key, _ in self.selector.select(self._patience()):
                    self._listen(key.data)
                for worker in list(self.workers):
                    self._look_at_the_clock(worker)
        return [self.found[i] for i in range(len(self.lines))]

    def _watch(self, worker: _Worker) -> None:
        self.selector.register(worker.output, selectors.EVENT_READ, worker)

    def _deal(self, worker: _Worker) -> None:
        if not worker.ready or worker.asked or not self.pending:
            return
        if self.pending[0] in self.suspects:  # by a worker that has done nothing else, and alone
            if worker.answered:
                worker = self._replace(worker)
            if worker.ready:
                worker.ask([self._next()])
            return
        share = math.ceil(len(self.pending) / (2 * len(self.workers)))
        batch = [self._next()]
        while self._more_fits(batch, min(BATCH, share)):
            batch.append(self._next())
        worker.ask(batch)

    def _next(self) -> tuple[int, bytes]:
        i = self.pending.popleft()
        return i, self.lines[i]

    def _more_fits(self, batch: Sequence[tuple[int, bytes]], most: int) -> bool:
        if not self.pending or self.pending[0] in self.suspects or len(batch) >= most:
            return False
        return sum(len(line) for _, line in batch) + len(self.lines[self.pending[0]]) <= BATCH_BYTES

    def _patience(self) -> float:
        deadlines = [worker.deadline for worker in self.workers if worker.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else 1.0

    def _listen(self, worker: _Worker) -> None:
        replies = worker.receive()
        if replies is None:
            self._mourn(worker)
            return
        for reply in replies:
            self._take_in(worker, *reply)

    def _take_in(self, worker: _Worker, i: int, reply: dict[str, Any]) -> None:
        limit = {"": "", "memory": self._memory(), "depth": "is nested too deeply"}[reply.get("limit", "")]
        if reply.get("limit") == "memory" and worker.answered > 1 and i not in self.suspects:
            self._suspect(i)
        else:
            self.found[i] = Outcome(reply.get("result"), limit, reply.get("error", ""))
        if reply.get("limit") == "memory":
            self._replace(worker)

    def _memory(self) -> str:
        return f"needed more than {self.pool.limits.memory_mib} MiB of memory"

    def _look_at_the_clock(self, worker: _Worker) -> None:
        if worker.deadline is None or time.monotonic() < worker.deadline:
            return
        if not worker.ready:
            raise WorkerError(f"a worker of {self.pool.function} was not ready after {START_S:g} s{worker.last_words()}")
        self._time_out(worker)

    def _time_out(self, worker: _Worker) -> None:
        self.found[worker.asked[0]] = Outcome(limit=f"took longer than {self.pool.limits.timeout_s:g} s")
        worker.asked.popleft()
        self._replace(worker)

    def _mourn(self, worker: _Worker) -> None:
        """A worker ended by itself: of its question, of its own timer, or of something that is ours."""
        code = worker.wait()
        if not worker.ready:
            raise WorkerError(f"a worker of {self.pool.function} cannot start (exit {code}){worker.last_words()}")
        if not worker.asked:
            self._replace(worker)
        elif code == -signal.SIGALRM:
            self._time_out(worker)
        elif worker.asked[0] not in self.suspects:
            self._suspect(worker.asked.popleft())
            self._replace(worker)
        elif code in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE):
            self.found[worker.asked.popleft()] = Outcome(limit=f"crashed its worker ({signal.Signals(-code).name})")
            self._replace(worker)
        else:
            raise WorkerError(
                f"a worker of {self.pool.function} died twice on one question (exit {code}; negative: the signal). "
                f"Is the machine out of memory?{worker.last_words()}"
            )

    def _suspect(self, i: int) -> None:
        self.suspects.add(i)
        self.pending.append(i)

    def _replace(self, worker: _Worker) -> _Worker:
        self.pending.extendleft(reversed(worker.asked))
        worker.asked.clear()
        self.selector.unregister(worker.output)
        self.workers.remove(worker)
        self.pool.end(worker)
        new = self.pool.start()
        self.workers.append(new)
        self._watch(new)
        return new


class _Worker:
    """One process, the pipes to it, and the questions that it has not answered yet."""

    def __init__(self, function: str, limits: Limits) -> None:
        self.timeout_s = limits.timeout_s
        self.asked: deque[int] = deque()
        self.answered, self.ready = 0, False
        self.deadline: float | None = time.monotonic() + START_S
        self._read = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        # The kernel's signal at a parent's death comes when the *thread* ends that started the process.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, _boot(function, limits, parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for the parent
            bufsize=0,
        )
        assert self._process.stdin and self._process.stdout
        self._input, self.output = self._process.stdin, self._process.stdout

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, batch: Sequence[tuple[int, bytes]]) -> None:
        """Sends questions with their numbers to a worker that has nothing to do."""
        self.asked.extend(i for i, _ in batch)
        self.deadline = time.monotonic() + self.timeout_s
        with contextlib.suppress(BrokenPipeError):  # it is dead: its output ends, and says so to the one who listens
            left = memoryview(b"".join(line for _, line in batch))
            while left:
                left = left[self._input.write(left) or 0 :]

    def receive(self) -> list[tuple[int, dict[str, Any]]] | None:
        """Replies that have come, with the numbers of their questions; None if the worker is gone."""
        piece = os.read(self.output.fileno(), 1 << 16)
        if not piece:
            return None
        *lines, self._read = (self._read + piece).split(b"\n")
        replies = []
        for line in lines:
            if not self.ready:
                self.ready, self.deadline = True, None
                continue
            self.answered += 1
            replies.append((self.asked.popleft(), json.loads(line)))
        if replies:
            self.deadline = time.monotonic() + self.timeout_s if self.asked else None
        return replies

    def wait(self) -> int:
        return self._process.wait()

    def last_words(self) -> str:
        """The end of its standard error, for messages."""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 2000))
        said = self._errors.read().decode(errors="replace").strip()
        return f": {said}" if said else ""

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.forget()

    def forget(self) -> None:
        """Closes this process's ends of the pipes."""
        self._process.returncode = self._process.returncode or 0  # a fork's copy is nobody's child: do not wait for it
        for file in (self._input, self.output, self._errors):
            file.close()


def _kill_all(workers: set[_Worker], owner: int) -> None:
    if owner != os.getpid():
        return
    while workers:
        workers.pop().kill()


def _boot(function: str, limits: Limits, parent: int) -> str:
    here = Path(__file__).resolve().parent
    packages = [("gspo", str(here.parent)), ("gspo.rewards", str(here))]
    return json.dumps([sys.path, packages, [function, limits.timeout_s, limits.memory_mib, parent]])


def _environment() -> dict[str, str]:
    """No secret of the parent's, one thread, and the same order of sets in every run."""
    kept = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "HOME", "TMPDIR", "VIRTUAL_ENV")
    return {k: os.environ[k] for k in kept if k in os.environ} | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
