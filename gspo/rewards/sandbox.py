"""Running a stranger's program: processes of their own behind walls, watched from here, judged elsewhere.

A program is one Python process. It may compute, use memory up to its limit, start threads, read Python's own library and
write to a scratch folder in memory. It has no network, sees no other file or process, starts none, and is gone, with all
that it wrote, when its time is over. docs/sandbox.md says which wall does what, and what is not covered.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal

from . import kinds
from .kinds import MINIMUM, Kind

START_S = 60.0
"""Seconds for a process to put up its walls. They take 0.05; 60 is for a machine that is busy with everything else."""
_STDERR_BYTES = 4096
_KILLED = frozenset(n for s in (signal.SIGKILL, signal.SIGXCPU, signal.SIGSEGV) for n in (-s, 128 + s))
"""Exit statuses of a process that met a limit, and of the process that waited for it and says so."""


class SandboxError(Exception):
    """A fault of the sandbox or of the tests, not of the program: nothing is known about the program then."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use."""

    cpu_s: int = 10
    """Seconds of computing, whole ones: the kernel counts no finer."""
    wall_s: float = 20.0
    """Seconds by the clock, from the moment that the walls stand."""
    memory_mib: int = 1024
    """Address space of the process."""
    output_kib: int = 1024
    """What it may write to standard output and error."""
    files_mib: int = 16
    """All files in the scratch folder together, and each."""
    num_files: int = 64
    """Files and folders in the scratch folder; open files as well."""
    num_threads: int = 32
    """Threads, where each process has a user of its own (kind `namespaces`, started by root)."""

    def scratch(self) -> str:
        """Options of the file system in memory that is the scratch folder, which counts as one of its files."""
        return f"size={self.files_mib}m,nr_inodes={self.num_files + 1}"

    def kernel(self) -> dict[str, int]:
        """The same for setrlimit."""
        return {
            "CPU": self.cpu_s,
            "AS": self.memory_mib << 20,
            "FSIZE": self.files_mib << 20,
            "NOFILE": self.num_files,
            "NPROC": self.num_threads,
            "CORE": 0,
        }


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended that ran as a script."""

    output: bytes
    """Its standard output."""
    why: str
    """Empty if it ended by itself with status 0, else a sentence."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the judge found."""

    passed: bool
    """Whether all tests passed."""
    why: str
    """A sentence: what failed first."""


class Sandbox:
    """Runs programs, several at a time from several threads if asked. Raises SandboxError where the walls cannot stand.

    kind: which walls, or `auto` for the first of `kinds.KINDS` that this machine allows. The rest has to be named.
    """

    def __init__(self, kind: Kind | Literal["auto"] = "auto", limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.stop = threading.Event()
        """Ends every program that runs, and every one that is started."""
        self.kind: Kind = _first_that_stands(self.limits) if kind == "auto" else kind
        """Which walls stand."""
        if kind != "auto" and (wrong := _try(kind, self.limits)):
            raise SandboxError(f'sandbox "{kind}" cannot stand here: {wrong}')
        self.description = kinds.DESCRIPTIONS[self.kind]
        """The walls, for people."""

    def again(self) -> Sandbox:
        """The same sandbox with a `stop` of its own."""
        other = copy.copy(self)
        other.stop = threading.Event()
        return other

    def run(self, source: str, stdin: str) -> Ended:
        """Run a script on a standard input. Raises SandboxError if it could not be started."""
        with contextlib.ExitStack() as stack:
            process = stack.enter_context(self._process("run", {"sources": [source]}, stdin.encode()))
            assert process.popen.stdout is not None and process.popen.stderr is not None
            pipes = {process.popen.stdout: self.limits.output_kib << 10, process.popen.stderr: self.limits.output_kib << 10}
            read, over = self._watch([process], pipes, until=None)
            output, errors = read[process.popen.stdout], read[process.popen.stderr]
            if over:
                return Ended(output, over)
            return Ended(output, self._how(process.status(), errors))

    def judge(self, sources: Sequence[str], task: dict[str, Any]) -> Verdict:
        """Run tests against what a program defines. sources: run one after the other in one module.

        task: for `inside.judge`. The tests run in a process of their own, which alone can write the verdict. Raises
        SandboxError if a process could not be started, or if the tests are broken, whatever the program does.
        """
        with contextlib.ExitStack() as stack:
            asks, asked = _pipe(stack)
            answers, answered = _pipe(stack)
            verdict, written = _pipe(stack)
            given = {"channel": [asks.fileno(), answered.fileno()], "sources": list(sources)}
            program = stack.enter_context(self._process("serve", given, b"", (asks, answered)))
            task = task | {"channel": [answers.fileno(), asked.fileno()], "verdict": written.fileno()}
            judge = stack.enter_context(self._process("judge", task, b"", (answers, asked, written)))
            for mine in (asks, asked, answers, answered, written):
                mine.close()
            read, over = self._watch([program, judge], {verdict: 1 << 16}, until=verdict)
            if over:
                return Verdict(False, over)
            return self._believed(read[verdict], program, judge)

    def _believed(self, written: bytes, program: _Process, judge: _Process) -> Verdict:
        if not written:
            status = judge.status()
            if status in _KILLED:  # its limits are the program's: what it computes on are the program's answers
                return Verdict(False, "the tests were killed by their limits while they worked on the program's answers")
            raise SandboxError(f"the judge ended without a verdict: {self._how(status, b'')}")
        said = json.loads(written)
        if said["verdict"] == "tests":
            raise SandboxError(f"these tests cannot be run: {said['why']}")
        why = said["why"]
        if why.endswith("did not answer: ended"):
            why = f"the program ended before it answered: {self._how(program.status(), b'') or 'by itself'}"
        return Verdict(said["verdict"] == "passed", why or "all tests pass")

    def _how(self, status: int | None, errors: bytes) -> str:
        if status == 0:
            return ""
        if status is None:
            return "it had closed its channel and went on"
        number = status - 128 if status > 128 else -status if status < 0 else 0
        if status in _KILLED:
            return f"it was killed, as by the limits of {self.limits.cpu_s} s of computing or of the stack"
        lines = errors.decode(errors="replace").strip().splitlines()
        what = f"signal {signal.Signals(number).name}" if number in list(signal.Signals) else f"status {status}"
        return f"it ended with {what}" + (f": {lines[-1][:200]}" if lines else "")

    # ---- processes ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _process(
        self, role: str, task: dict[str, Any], stdin: bytes, pipes: Sequence[IO[bytes]] = ()
    ) -> Iterator[_Process]:
        with contextlib.ExitStack() as stack:
            files = kinds.files(self.kind, self.limits.scratch())
            if self.kind == "limits":
                files["scratch"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="gspo-program-"))
            walls, limits = kinds.WALLS[self.kind], self.limits.kernel()
            data = json.dumps(task | {"role": role, "walls": walls, "files": files, "limits": limits}).encode()
            status, written = _pipe(stack)
            given = stack.enter_context(_sealed(len(data).to_bytes(8, "big") + data + stdin))
            popen = subprocess.Popen(
                [*kinds.before(self.kind, files), *kinds.python(self.kind), str(written.fileno())],
                stdin=given,
                stdout=subprocess.PIPE if role == "run" else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[written.fileno(), *(pipe.fileno() for pipe in pipes)],
                start_new_session=True,
                cwd="/",
                env={"LC_ALL": "C.UTF-8", "PATH": "/nonexistent", "PYTHONHASHSEED": "0"},
            )
            written.close()
            process = _Process(popen, status)
            try:
                yield process
            finally:
                process.close()

    def _watch(
        self, processes: Sequence[_Process], pipes: dict[IO[bytes], int], until: IO[bytes] | None
    ) -> tuple[dict[IO[bytes], bytes], str]:
        """What came through the pipes, and which limit of clock or output was reached, if one was.

        pipes: with the bytes that may come. until: the pipe whose end is the end; else that of all, and of the processes.
        """
        self._started(processes)
        read: dict[IO[bytes], bytearray] = {pipe: bytearray() for pipe in pipes}
        end = time.monotonic() + self.limits.wall_s
        over = ""
        with selectors.DefaultSelector() as selector:
            for pipe in pipes:
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map() and not over:
                over = self._time_is_over(end)
                for key, _ in selector.select(min(0.2, max(0.0, end - time.monotonic()))):
                    pipe: IO[bytes] = key.fileobj  # type: ignore[assignment]
                    part = os.read(pipe.fileno(), 1 << 16)
                    read[pipe] += part
                    if len(read[pipe]) > pipes[pipe]:
                        over = f"it wrote more than {pipes[pipe] >> 10} KiB"
                    if not part:
                        selector.unregister(pipe)
                        if pipe is until:
                            return {pipe: bytes(data) for pipe, data in read.items()}, ""
        while not over and any(process.popen.poll() is None for process in processes):
            over = self._time_is_over(end)
            time.sleep(0.002)
        return {pipe: bytes(data) for pipe, data in read.items()}, over

    def _time_is_over(self, end: float) -> str:
        if self.stop.is_set():
            raise SandboxError("stopped from outside while it ran")
        return f"it took longer than {self.limits.wall_s:g} s" if time.monotonic() >= end else ""

    def _started(self, processes: Sequence[_Process]) -> None:
        """Wait until the walls of all stand. Raises SandboxError with what a process said if they do not."""
        end = time.monotonic() + START_S
        for process in processes:
            said = process.hello(end, self.stop)
            if said != b"R":
                process.end()
                words = said or process.errors() or b"it ended without a word"
                raise SandboxError(
                    f"a sandbox of kind {self.kind!r} could not be started: {words.decode(errors='replace')}"
                )


class _Process:
    """A started process and its two ways to speak before the walls stand."""

    def __init__(self, popen: subprocess.Popen[bytes], said: IO[bytes]) -> None:
        self.popen, self.said = popen, said

    def hello(self, end: float, stop: threading.Event) -> bytes:
        """`R`, or a sentence, or nothing if it ended or did not speak in time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.said, selectors.EVENT_READ)
            while time.monotonic() < end and not stop.is_set():
                if selector.select(0.2):
                    return os.read(self.said.fileno(), 2000)
        return b""

    def errors(self) -> bytes:
        """The standard error of a process that has ended, its beginning."""
        assert self.popen.stderr is not None
        return os.read(self.popen.stderr.fileno(), _STDERR_BYTES).strip()

    def status(self) -> int | None:
        """Its exit status, or None if it still runs after a second."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.popen.wait(1)
        return None

    def end(self) -> None:
        """End it and its group, and wait until nothing of it is left."""
        with contextlib.suppress(ProcessLookupError):
            if self.popen.poll() is None:
                os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def close(self) -> None:
        """End it, and close what came from it."""
        self.end()
        for pipe in (self.popen.stdout, self.popen.stderr):
            if pipe is not None:
                pipe.close()


def _pipe(stack: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    out, into = os.pipe()
    return stack.enter_context(open(out, "rb", 0)), stack.enter_context(open(into, "wb", 0))


def _sealed(data: bytes) -> IO[bytes]:
    """A file in memory with these bytes, which nobody can change or lengthen."""
    file = open(  # noqa: SIM115 (the caller closes it)
        os.memfd_create("task", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b", 0
    )
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
    file.seek(0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return file


# ---- what this machine allows -----------------------------------------------------------------------------


def _first_that_stands(limits: Limits) -> Kind:
    wrong: dict[str, str] = {}
    for kind in kinds.KINDS:
        if not (why := _try(kind, limits)):
            return kind
        wrong[kind] = why
    reasons = "; ".join(f"{kind}: {why}" for kind, why in wrong.items())
    raise SandboxError(
        f"no sandbox can stand on this machine ({reasons}). {MINIMUM}. Install bubblewrap, start the container with user "
        'namespaces allowed, or write sandbox = "filter" or "limits" if this machine holds nothing of worth'
    )


def _try(kind: Kind, limits: Limits) -> str:
    """Why a kind cannot stand here, or an empty string."""
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    sandbox = Sandbox.__new__(Sandbox)
    sandbox.limits, sandbox.kind, sandbox.stop = limits, kind, threading.Event()
    try:
        ended = sandbox.run("print(sum(map(int, input().split())))", "40 2\n")
    except (SandboxError, OSError) as error:
        return str(error).removeprefix(f"a sandbox of kind {kind!r} could not be started: ")
    return "" if ended.output.strip() == b"42" else f"a first program did not run: {ended.why or ended.output[:100]}"
