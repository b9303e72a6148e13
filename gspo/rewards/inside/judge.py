"""The side of the tests: runs them on stand-ins for what the program defined, and says how it went.

The program's process never holds a test, an expected value or this process's channel to the trainer. What it can do is
answer questions ("call f with these arguments") with plain values or with handles; all comparisons happen here.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import sys
from types import ModuleType
from typing import Any

from .values import Channel, ChannelError, decode, encode

_PASSED, _FAILED, _BROKEN = "passed", "failed", "tests"
_NOT_RAISED = (StopIteration, StopAsyncIteration)
"""Exceptions that would end a loop of the tests as if it were done: they arrive as RuntimeError."""


class ProgramError(Exception):
    """An exception of the program whose type is not a builtin one."""


class _Over(BaseException):
    """The program can no longer be asked; no `except Exception` of the tests may catch it."""


class _Broken(BaseException):
    """The tests cannot be run by this judge."""


class Program:
    """The program, from afar."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.asked, self.over = channel, 0, ""
        self.raised: Exception | None = None

    def ask(self, ask: str, **question: Any) -> Any:
        """One question and its answer. Raises what the program raised, and _Over if it does not answer."""
        if self.over:
            raise _Over
        self.asked += ask != "load"
        try:
            self.channel.send({"ask": ask} | question)
            answer = self.channel.receive()
            if not isinstance(answer, dict) or answer.keys() not in ({"value"}, {"raised"}):
                raise ChannelError("an answer that is none")
            if "value" in answer:
                return decode(answer["value"], self._stand_in)
            error = self._error(*answer["raised"])
        except (ChannelError, TypeError, ValueError) as wrong:
            self.over = f"the program did not answer: {wrong}"
            raise _Over from None
        self.raised = error
        raise error

    def names(self, names: list[str]) -> dict[str, Any]:
        """What the program calls by these names. Raises _Over for an answer that is no table of them."""
        found = self.ask("names", names=names)
        if not isinstance(found, dict) or not found.keys() <= set(names):
            self.over = "the program did not answer: names that nobody asked for"
            raise _Over
        return found

    def send(self, value: Any) -> Any:
        """A value of the tests as a message. Raises _Broken for what cannot leave this process."""
        return encode(value, self._handle)

    def _handle(self, value: Any) -> int:
        if type(value) is StandIn:
            return object.__getattribute__(value, "_number")
        raise _Broken(f"they pass a {type(value).__name__} to the program: only plain values can be passed")

    def _stand_in(self, number: Any) -> StandIn:
        if type(number) is not int:
            raise ChannelError("a handle that is none")
        return StandIn(self, number)

    def _error(self, name: Any, text: Any, line: Any) -> Exception:
        said = f"{str(text)[:300]} (line {line} of the program)" if isinstance(line, int) else str(text)[:300]
        kind = getattr(builtins, name, None) if isinstance(name, str) else None
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            return ProgramError(f"{str(name)[:60]}: {said}")
        if issubclass(kind, _NOT_RAISED):
            return RuntimeError(f"{name}: {said}")
        try:
            return kind(said)
        except TypeError:  # UnicodeDecodeError wants five arguments
            return ProgramError(f"{name}: {said}")


class StandIn:
    """Something of the program's that is not a plain value. It equals only itself, whatever the program would say."""

    def __init__(self, program: Program, number: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)

    def _ask(self, ask: str, **question: Any) -> Any:
        return object.__getattribute__(self, "_program").ask(ask, on=object.__getattribute__(self, "_number"), **question)

    def _special(self, name: str, *args: Any) -> Any:
        send = object.__getattribute__(self, "_program").send
        return self._ask(name, args=[send(a) for a in args])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        send = object.__getattribute__(self, "_program").send
        return self._ask("call", args=[send(a) for a in args], kwargs=send(kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("get", name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name=name, value=object.__getattribute__(self, "_program").send(value))

    def __len__(self) -> int:
        return self._special("__len__")

    def __getitem__(self, key: Any) -> Any:
        return self._special("__getitem__", key)

    def __iter__(self) -> Any:
        iterator = self._special("__iter__")
        while True:
            try:
                yield iterator._special("__next__")
            except RuntimeError as error:
                if str(error).startswith("StopIteration"):
                    return
                raise

    def __bool__(self) -> bool:
        raise TypeError("the program returned something that is no plain value where a truth value is needed")


def judge(spec: dict[str, Any]) -> int:
    """Run the tests and write the verdict, a JSON object with `verdict` and `why`, to its own file descriptor."""
    program = Program(Channel(*spec["channel"]))
    try:
        why = _load(program) or (_calls if "calls" in spec else _assertions)(program, spec)
        verdict = _FAILED if why or program.over else _PASSED
    except _Over:
        verdict, why = _FAILED, ""
    except _Broken as error:
        verdict, why = _BROKEN, str(error)
    except BaseException as error:
        verdict, why = _FAILED if program.asked else _BROKEN, f"they raised {_said(error)}"
    if verdict == _PASSED and not program.asked:
        verdict, why = _BROKEN, "they never ask the program for anything"
    os.write(spec["verdict"], json.dumps({"verdict": verdict, "why": (program.over or why)[:500]}).encode())
    return 0


def _load(program: Program) -> str:
    try:
        program.ask("load")
    except Exception as error:
        return f"the program raised {_said(error)}"
    return ""


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, ProgramError) else f"{type(error).__name__}: {error}"


# ---- calls with expected results --------------------------------------------------------------------------


def _calls(program: Program, spec: dict[str, Any]) -> str:
    name = spec["entry_point"]
    function = _function(program, name)
    if function is None:
        return f"the program does not define {name}"
    for number, (args, expected) in enumerate(spec["calls"], 1):
        try:
            found = function(*args)
        except Exception as error:
            return f"call {number} raised {_said(error)}"
        if _listed(found) != _listed(expected):
            return f"call {number}: {name} returned something else than expected"
    return ""


def _function(program: Program, name: str) -> Any:
    found = program.names([name, "Solution"])
    if name in found or "Solution" not in found:
        return found.get(name)
    return getattr(found["Solution"](), name, None)


def _listed(value: Any) -> Any:
    """Tuples as lists, since expected results are JSON."""
    if isinstance(value, list | tuple):
        return [_listed(item) for item in value]
    return {k: _listed(v) for k, v in value.items()} if isinstance(value, dict) else value


# ---- assertions -------------------------------------------------------------------------------------------


def _assertions(program: Program, spec: dict[str, Any]) -> str:
    setup, tests = (_parsed(spec[key]) for key in ("setup", "tests"))
    space = _given(spec["given"])
    both = ast.Module([*setup.body, *tests.body], [])
    space |= _modules(both, _free(both, set(space)) - {spec["entry_point"]})
    names = _wanted(both, spec["entry_point"], set(space))
    found = program.names(sorted(names))
    if missing := sorted(names - found.keys()):
        return f"the program does not define {', '.join(missing)}"
    asked = program.asked - any(type(value) is not StandIn for value in found.values())  # a plain value is an answer
    space |= found | ({"candidate": found[spec["entry_point"]]} if spec["entry_point"] else {})
    try:
        exec(compile(setup, "setup", "exec"), space)
        exec(compile(tests, "tests", "exec"), space)
        if spec["entry_point"] and _defines(tests, "check"):
            space["check"](found[spec["entry_point"]])
    except Exception as error:
        if isinstance(error, ImportError) and error is not program.raised:
            raise _Broken(f"they need a module: {error}") from error
        if program.asked == asked:
            raise _Broken(f"they raised {_said(error)} before the program was asked for anything") from error
        return _failure(error, spec["tests"])
    if program.asked == asked:
        program.asked = 0
    return ""


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise _Broken(f"they are no Python: {error}") from error


def _given(source: str) -> dict[str, Any]:
    """What the row gives beside the tests: imports and helpers. Taken from the row, so no program can replace them."""
    space: dict[str, Any] = {"__name__": "tests"}
    exec(compile(_parsed(source), "given", "exec"), space)
    return space


def _defines(tree: ast.Module, name: str) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)


def _wanted(tree: ast.Module, entry_point: str | None, given: set[str]) -> set[str]:
    """The names that the tests expect of the program: the entry point, and what nobody else defines.

    A builtin name counts only where no other name is left, `assert sum(10, 15) == 6`: else a program could define its own
    `abs` or `all` and be its own judge.
    """
    free = _free(tree, given)
    wanted = {name for name in free if not hasattr(builtins, name)} - {"candidate"}
    if entry_point:
        return wanted | {entry_point}
    if wanted:
        return wanted
    called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)} & free
    if len(called) != 1:
        raise _Broken("it is unclear which function they test: give the row an entry_point")
    return called


def _free(tree: ast.Module, given: set[str]) -> set[str]:
    """The names that the tests read and neither they nor the row define."""
    read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    own = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)} | given
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler) and node.name:
            own.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            own |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.arg):
            own.add(node.arg)
    return read - own


def _modules(tree: ast.Module, names: set[str]) -> dict[str, ModuleType]:
    """Python's own modules that the tests use without an import, `math.isclose(...)`: those that have all that is used.

    Such a name is not the program's: else it could bring an `isclose` of its own. It is where the tests do anything else
    with it, as with a class `datetime`.
    """
    used, bases, found = {}, set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used.setdefault(node.value.id, set()).add(node.attr)
            bases.add(node.value)
    otherwise = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and n not in bases}
    for name in (names & used.keys() & sys.stdlib_module_names) - otherwise:
        try:
            module = importlib.import_module(name)
        except ImportError:  # a part of Python that is not installed, or of another system
            continue
        if all(hasattr(module, attribute) for attribute in used[name]):
            found[name] = module
    return found


def _failure(error: Exception, tests: str) -> str:
    """The assertion that failed, or what a test raised, with its line of the tests."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "tests":
            line = trace.tb_lineno
        trace = trace.tb_next
    text = tests.splitlines()[line - 1].strip() if line else "the tests"
    what = "failed" if isinstance(error, AssertionError) else f"raised {_said(error)}"
    return f"{text[:160]} {what}"
