"""The tests of a row, in the formats that data sets have, and when two outputs are equal."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .verifier import quoted

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?", re.ASCII)
_WITH_POINT = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d{1,4})?", re.ASCII)


class UnusableTests(ValueError):
    """Tests that nobody could run; the message is a sentence about the row."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Standard inputs and the outputs expected for them."""

    pairs: tuple[tuple[str, str], ...]
    """(input, output) [tests]."""

    def __len__(self) -> int:
        return len(self.pairs)


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of one function and the results expected of them, all plain JSON."""

    entry_point: str
    """The function, or a method of a class `Solution`."""
    calls: tuple[tuple[list[Any], Any], ...]
    """(arguments, result) [tests]."""

    def __len__(self) -> int:
        return len(self.calls)


@dataclass(frozen=True, slots=True)
class Assertions:
    """Python that raises if a program is wrong."""

    source: str
    """The assertions, or a function `check(candidate)` of them."""
    entry_point: str | None
    """The function under test, or None to look for names that only the program can define."""
    setup: str
    """Python that runs before them."""
    given: str
    """What stood before the program, with the function that it was to continue."""
    helpers: str
    """The same without that function: imports and helpers."""

    def __len__(self) -> int:
        return max(1, len(re.findall(r"^\s*assert\b", self.source, re.MULTILINE)))


Tests = Pairs | Calls | Assertions


def read_tests(tests: Any, entry_point: Any = None, setup: Any = None, given: Any = None) -> Tests:
    """The tests of a row. Raises UnusableTests with a sentence for what is none of the formats.

    tests: `{"inputs": [...], "outputs": [...]}` with or without `"fn_name"` (APPS, CodeContests); a list of `{"input":
    ..., "output": ..., "testtype": "stdin" or "functional"}` (LiveCodeBench); either as JSON text; or Python, as text or a
    list of texts (HumanEval, MBPP). Not covered: LiveCodeBench's private tests as they are stored, which are a pickle.
    """
    tests = _from_json(tests)
    name = _text(entry_point, "entry point") or None
    if isinstance(tests, Mapping):
        return _from_table(tests, name)
    if isinstance(tests, str | list | tuple) and tests:
        if isinstance(tests, str) or all(isinstance(test, str) for test in tests):
            source = tests if isinstance(tests, str) else "\n".join(tests)
            return _assertions(source, name, _text(setup, "setup"), _text(given, "given code"))
        if all(isinstance(test, Mapping) and test.keys() >= {"input", "output"} for test in tests):
            return _from_list(tests, name)
    raise UnusableTests(
        f"the tests are {quoted(tests)}: neither Python with assertions nor inputs with outputs (see the code reward)"
    )


def _from_json(tests: Any) -> Any:
    if isinstance(tests, str) and tests.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(tests)
        except (ValueError, RecursionError):  # Python may begin with a bracket too
            return tests
    return tests


def _text(value: Any, what: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UnusableTests(f"the {what} is a {type(value).__name__}, not text")
    return value


def _from_table(tests: Mapping[str, Any], name: str | None) -> Tests:
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or not inputs or len(inputs) != len(outputs):
        raise UnusableTests("the tests need as many inputs as outputs, at least one of each")
    if function := tests.get("fn_name") or None:
        if not all(isinstance(args, list) for args in inputs):
            raise UnusableTests(f"the calls of {function} need a list of arguments each")
        return Calls(function, tuple(zip(inputs, outputs, strict=True)))
    return Pairs(tuple((_stream(i), _stream(o)) for i, o in zip(inputs, outputs, strict=True)))


def _from_list(tests: Sequence[Mapping[str, Any]], name: str | None) -> Tests:
    kinds = {test.get("testtype", "stdin") for test in tests}
    if kinds == {"stdin"}:
        return Pairs(tuple((_stream(test["input"]), _stream(test["output"])) for test in tests))
    if kinds != {"functional"}:
        raise UnusableTests(f"the tests are of the types {sorted(map(str, kinds))}, not all stdin or all functional")
    if name is None:
        raise UnusableTests("functional tests need the name of the function, in the column entry_point")
    try:
        calls = [([json.loads(x) for x in t["input"].splitlines() if x.strip()], json.loads(t["output"])) for t in tests]
    except (ValueError, AttributeError) as error:
        raise UnusableTests(f"functional tests need JSON, an argument a line: {error}") from error
    return Calls(name, tuple(calls))


def _stream(value: Any) -> str:
    """Text as it is; a list of lines joined, as some rows of APPS have it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise UnusableTests(f"an input or output is {quoted(value)}, which is no text")


def _assertions(source: str, name: str | None, setup: str, given: str) -> Assertions:
    _parsed(source, "tests")
    _parsed(setup, "setup")
    helpers = [n for n in _parsed(given, "given code").body if not (isinstance(n, ast.FunctionDef) and n.name == name)]
    return Assertions(source, name, setup, given, ast.unparse(ast.Module(helpers, [])))


def _parsed(source: str, what: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnusableTests(f"the {what} cannot be read as Python: {error}") from error


# ---- outputs ----------------------------------------------------------------------------------------------


def difference(output: bytes, expected: str, compare: Literal["tokens", "lines", "exact"], tolerance: float) -> str:
    """Where an output differs from what was expected, as a sentence, or an empty string.

    `tokens`: both are split at white space; words must be the same, or numbers within `tolerance` (absolute or relative)
    where the expected one is written with a point or an exponent. `lines`: white space at the end of lines and empty lines
    at the end do not count. `exact`: the bytes. Not covered: problems with several right outputs.
    """
    try:
        found = output.decode()
    except UnicodeDecodeError:
        return "its output is no UTF-8"
    if compare == "exact":
        return "" if found == expected else f"it printed {quoted(found)}, expected was {quoted(expected)}"
    split = str.split if compare == "tokens" else _lines
    ours, theirs = split(found), split(expected)
    unit = "word" if compare == "tokens" else "line"
    for number, (a, b) in enumerate(zip(ours, theirs, strict=False), 1):
        if a != b and not (compare == "tokens" and _close(a, b, tolerance)):
            return f"its {unit} {number} is {quoted(a)}, expected was {quoted(b)}"
    if len(ours) != len(theirs):
        return f"it printed {len(ours)} {unit}s, expected were {len(theirs)}"
    return ""


def _lines(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.split("\n")).rstrip("\n").split("\n")


def _close(found: str, expected: str, tolerance: float) -> bool:
    if not _WITH_POINT.fullmatch(expected) or not _NUMBER.fullmatch(found):
        return False
    a, b = float(found), float(expected)
    return abs(a - b) <= tolerance * max(1.0, abs(b))
