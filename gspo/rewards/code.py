"""Programs in responses, run against the tests of their rows."""

from __future__ import annotations

import ast
import os
import re
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from ..config import CodeReward
from ..types import Sample, Score
from .code_tests import Assertions, Calls, Pairs, Tests, UnusableTests, difference, read_tests
from .sandbox import Limits, Sandbox, SandboxError
from .verifier import RewardError, Verifier

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[ \t]*([\w+.-]*)([^\n]*)\n?", re.MULTILINE)
_LANGUAGES = frozenset({"", "python", "python3", "py", "py3"})


def code(config: CodeReward) -> Verifier:
    """1 if the program in the response passes all tests of its row, else 0 with what failed first.

    The program is the last closed block fenced by ``` or ~~~, marked as Python or not at all; without any fenced block
    the whole response, unless `fence` is `required`. Everything that the program does is its own fault and a 0: an
    exception, a limit reached, an early end, an answer that is no plain value. A sandbox that cannot start and tests that
    cannot run raise. Raises RewardError if the walls that the recipe asks for cannot stand on this machine.
    """
    limits = Limits(config.cpu_s, config.wall_s, config.memory_mib, config.output_kib)
    try:
        sandbox = Sandbox(config.sandbox, limits)
    except SandboxError as error:
        raise RewardError(f"reward code: {error}") from error
    workers = config.workers or len(os.sched_getaffinity(0))

    def function(samples: Sequence[Sample]) -> list[Score]:
        mine = sandbox.again()
        first = {(s.prompt.id, s.text): s for s in samples}  # equal responses to a prompt are run once
        with ThreadPoolExecutor(workers) as pool:
            try:
                running = {key: pool.submit(_judged, config, mine, one) for key, one in first.items()}
                for ended in wait(running.values(), return_when=FIRST_EXCEPTION).done:
                    ended.result()  # a fault comes first, whoever has it
                return [running[s.prompt.id, s.text].result() for s in samples]
            except BaseException:  # a fault, or Ctrl-C: what still runs would be waited for
                mine.stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    gold = None if config.solution is None else partial(_solution, config)
    return Verifier(function, partial(_usable, config), gold, note=f"programs run behind {sandbox.description}")


def program(text: str, *, fence_required: bool = False) -> str | None:
    """The program in a response, or None if there is none."""
    fences = list(_FENCE.finditer(text))
    if not fences:
        return text if text.strip() and not fence_required else None
    language, body = _last_block(text, fences)
    return body if language.lower() in _LANGUAGES and body.strip() else None


def _last_block(text: str, fences: Sequence[re.Match[str]]) -> tuple[str, str]:
    """Language and body of the last closed block, empty if none is closed. Time grows with the text and no faster.

    fences: the lines that begin with a fence. A block ends at the next line that is the fence of its first line and
    nothing else; where none follows, at one that is as much as possible of that fence.
    """
    ends: dict[tuple[str, int], deque[int]] = {}  # by character and length
    for i, fence in enumerate(fences):
        if not fence[2] and not fence[3].strip(" \t"):
            ends.setdefault((fence[1][0], len(fence[1])), deque()).append(i)
    found, after = ("", ""), 0
    for i, fence in enumerate(fences):
        if i < after:  # inside of a block
            continue
        mark, whole = fence[1][0], len(fence[1])
        for length in range(whole, 2, -1):
            closing = ends.get((mark, length))
            while closing and closing[0] <= i:
                closing.popleft()
            if closing:
                found = fence[2] if length == whole else "", text[fence.end() : fences[closing[0]].start()]
                after = closing[0] + 1
                break
    return found


def _judged(config: CodeReward, sandbox: Sandbox, sample: Sample) -> Score:
    source = program(sample.text, fence_required=config.fence == "required")
    if source is None:
        return Score(0.0, "the response has no Python program in a closed fenced block")
    try:
        tests = _tests(config, sample.answer, sample.prompt.columns)
        why = _pairs(config, sandbox, source, tests) if isinstance(tests, Pairs) else _asked(sandbox, source, tests)
    except Exception as error:
        error.add_note(f"at sample {sample.id}")
        raise
    return Score(0.0, why) if why else Score(1.0, f"passes all {len(tests)} tests")


def _tests(config: CodeReward, answer: Any, columns: Mapping[str, Any]) -> Tests:
    source = answer if config.tests is None else columns.get(config.tests)
    given = "" if config.given is None else columns.get(config.given)
    return read_tests(source, columns.get(config.entry_point), columns.get(config.setup), given)


def _usable(config: CodeReward, answer: Any, columns: Mapping[str, Any]) -> str | None:
    try:
        _tests(config, answer, columns)
    except UnusableTests as error:
        return str(error)
    if config.solution is not None and not isinstance(columns.get(config.solution), str):
        return f"column {config.solution}, named as solution, holds no program"
    return None


def _solution(config: CodeReward, answer: Any, columns: Mapping[str, Any]) -> str:
    text = str(columns[str(config.solution)])
    return f"```python\n{text}\n```" if config.fence == "required" else text


def _pairs(config: CodeReward, sandbox: Sandbox, source: str, tests: Pairs) -> str:
    """What went wrong first, or nothing. Expected outputs stay in this process."""
    for number, (given, expected) in enumerate(tests.pairs, 1):
        ended = sandbox.run(source, given)
        if ended.why:
            return f"test {number} of {len(tests)}: {ended.why}"
        if wrong := difference(ended.output, expected, config.compare, config.tolerance):
            return f"test {number} of {len(tests)}: {wrong}"
    return ""


def _asked(sandbox: Sandbox, source: str, tests: Assertions | Calls) -> str:
    task: dict[str, Any] = {"entry_point": tests.entry_point}
    if isinstance(tests, Calls):
        sources, task["calls"] = [source], tests.calls
    else:
        sources = _with_given(source, tests)
        task |= {"setup": tests.setup, "tests": tests.source, "given": tests.helpers}
    verdict = sandbox.judge(sources, task)
    return "" if verdict.passed else verdict.why


def _with_given(source: str, tests: Assertions) -> list[str]:
    """Helpers and program; or, if the program does not define the entry point, what was given with it as continuation.

    A continuation ends before the first line that is not indented: base models go on with something else.
    """
    if not tests.given or tests.entry_point is None or _defines(source, tests.entry_point):
        return [tests.helpers, source]
    lines = source.splitlines(keepends=True)
    end = next((i for i, line in enumerate(lines) if i and line[:1] not in (" ", "\t", "\n", "\r", "#", "")), len(lines))
    return [tests.given.rstrip(" \t") + "".join(lines[:end])]


def _defines(source: str, name: str) -> bool:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return re.search(rf"^(?:async )?def {re.escape(name)}\b", source, re.MULTILINE) is not None
    nodes = ast.walk(ast.Module([n for n in tree.body if not isinstance(n, ast.FunctionDef | ast.ClassDef)], []))
    bound = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    named = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    return name in bound | named | {a.asname or a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
