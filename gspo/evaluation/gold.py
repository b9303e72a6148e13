"""The gold answer of a row: rules that a suite names.

A rule takes a row and the suite's answer column, and returns the columns to add, `gold` among them, or None for a row that
is not part of the suite. It raises ValueError for a row that it cannot read. The gold of a program is in one of the plain
forms that the reward of type `code` takes:

    Python text, or a list of such texts: assertions, or a function `check(candidate)` of them
    {"inputs": [text, ...], "outputs": [text, ...]}: standard input and output
    [{"input": text, "output": text, "testtype": "stdin" or "functional"}, ...]: the same, or arguments of a call of the
        function in the column `entry_point`, a line of JSON each, and its result as JSON
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from ..functions import load_function
from ..rewards.mathematics import last_boxed
from ..rewards.numbers import to_number

Row = Mapping[str, Any]
Rule = Callable[[Row, str], Mapping[str, Any] | None]

LARGEST = 2**31
"""Bytes of the largest set of tests that is unpacked: 2 GiB, against archives made to fill the memory."""

MBPP_TEST = range(11, 511)
"""Task ids of MBPP's test split (Austin et al. 2021, arXiv:2108.07732, section 2.1)."""


def as_is(row: Row, column: str) -> dict[str, Any]:
    """The column as it stands."""
    return {"gold": row[column]}


def after_hashes(row: Row, column: str) -> dict[str, Any]:
    """What stands behind the last `####`, thousands separators removed: GSM8K's solutions end so."""
    _, marks, answer = str(row[column]).rpartition("####")
    if not marks:
        raise ValueError(f"column {column} has no ####, behind which the answer should stand")
    return {"gold": answer.strip().replace(",", "")}


def number(row: Row, column: str) -> dict[str, Any]:
    """The column as an exact number, `145.0` as 145: SVAMP writes its answers as floats."""
    value = to_number(row[column])
    if value is None:
        raise ValueError(f"column {column} holds {row[column]!r}, which is no number")
    return {"gold": str(value)}


def boxed(row: Row, column: str) -> dict[str, Any]:
    """The content of the last `\\boxed{}` of a solution: MATH's are written so."""
    content = last_boxed(str(row[column]))
    if content is None:
        raise ValueError(f"column {column} has no \\boxed{{}}")
    return {"gold": content}


def aime(row: Row, column: str) -> dict[str, Any]:
    """A whole number from 0 to 999, leading zeros removed, as every answer of the AIME is."""
    text = str(row[column]).strip()
    if not (text.isascii() and text.isdigit() and int(text) <= 999):
        raise ValueError(f"column {column} holds {text!r}, but an answer of the AIME is a whole number from 0 to 999")
    return {"gold": str(int(text))}


def humaneval(row: Row, column: str) -> dict[str, Any]:
    """HumanEval's `check`, which is called with the function that `entry_point` names; the prompt must define that."""
    name = row["entry_point"]
    if f"def {name}(" not in row["prompt"]:
        raise ValueError(f"the prompt does not define {name}")
    return {"gold": row[column]}


def mbpp(row: Row, column: str) -> dict[str, Any] | None:
    """MBPP's assertions, for the rows of its test split; `tests` holds them as the prompt shows them."""
    if int(row["task_id"]) not in MBPP_TEST:
        return None
    tests = list(row[column])
    return {"gold": tests, "tests": "\n".join(tests), "task": row["text"] if "text" in row else row["prompt"]}


def livecodebench(row: Row, column: str) -> dict[str, Any]:
    """LiveCodeBench's public and private tests. Private ones may be packed, see `unpack_tests`.

    `entry_point` holds the function that they call, None for standard input. `instructions` is what the prompt says of
    the form of the answer: starter code, or that input and output are the standard ones.
    """
    tests = [*_json_tests(row["public_test_cases"]), *unpack_tests(row[column])]
    kinds = {test["testtype"] for test in tests}
    if len(kinds) != 1 or not kinds <= {"stdin", "functional"}:
        raise ValueError(
            f"its tests are of the kinds {', '.join(sorted(kinds)) or 'none'}; must be all stdin or all functional"
        )
    inside = json.loads(row["metadata"]) if isinstance(row["metadata"], str) else row["metadata"]
    name = inside.get("func_name") if kinds == {"functional"} else None
    if kinds == {"functional"} and not name:
        raise ValueError("its tests call a function, but its metadata has no func_name")
    starter = row["starter_code"]
    shape = f"Complete this code:\n\n```python\n{starter}\n```" if starter else STANDARD_INPUT
    return {"gold": tests, "entry_point": name, "instructions": shape}


STANDARD_INPUT = "Write a program that reads standard input and writes its answer to standard output."


def code_contests(row: Row, column: str) -> dict[str, Any] | None:
    """CodeContests' tests as pairs of standard input and output, in either of two layouts.

    A row with `tests` = {inputs, outputs} is taken as it stands. One of the original data set has public, private and
    generated tests, of which all are taken, and a rating of 0 where it has none: that becomes no rating.
    """
    if "tests" in row:
        parts = [(row["tests"]["inputs"], row["tests"]["outputs"])]
    else:
        parts = [(row[k]["input"], row[k]["output"]) for k in ("public_tests", "private_tests", "generated_tests")]
    inputs, outputs = [x for a, _ in parts for x in a], [x for _, b in parts for x in b]
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"it has {len(inputs)} test inputs and {len(outputs)} outputs")
    statement = row["problem"] if "problem" in row else row[column]
    gold = {"inputs": inputs, "outputs": outputs}
    return {"gold": gold, "problem": str(statement).strip(), "cf_rating": row.get("cf_rating") or None}


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (as_is, after_hashes, number, boxed, aime, humaneval, mbpp, livecodebench, code_contests)
}


def rule_of(name: str) -> Rule:
    """The rule that a suite names, or a function of the user's own. Raises FunctionError or KeyError if there is none."""
    return load_function(name) if ".py:" in name else RULES[name]


def unpack_tests(packed: Any) -> list[dict[str, str]]:
    """LiveCodeBench's private tests: a list, JSON text, or base64 of a zlib stream of a pickled JSON text.

    Pickles of strangers can run anything, so none is loaded: its opcodes are read, and one that holds more than a single
    string is refused. Raises ValueError for that, and for anything that does not unpack, or unpacks beyond LARGEST.
    """
    if not isinstance(packed, str) or packed.lstrip().startswith("["):
        return _json_tests(packed)
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(base64.b64decode(packed, validate=True), LARGEST)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"its private tests do not unpack: {error}") from None
    if not unpacker.eof:
        raise ValueError(f"its private tests are cut short, or larger than {LARGEST} bytes")
    return _json_tests(_pickled_text(data))


_PLUMBING = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}
_TEXTS = {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}


def _pickled_text(data: bytes) -> str:
    texts = []
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in _TEXTS:
                texts.append(argument)
            elif opcode.name not in _PLUMBING:
                raise ValueError(
                    f"its private tests hold a pickle with {opcode.name}, which is more than one text: refused"
                )
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(str(error) or "its private tests hold a broken pickle") from None
    if len(texts) != 1:
        raise ValueError(f"its private tests hold a pickle of {len(texts)} texts, not of one")
    return texts[0]


def _json_tests(value: Any) -> list[dict[str, str]]:
    tests = json.loads(value) if isinstance(value, str) else value
    if not isinstance(tests, list) or not all(isinstance(t, dict) and {"input", "output"} <= t.keys() for t in tests):
        raise ValueError("its tests are no list of objects with input and output")
    return [{"testtype": "stdin"} | test for test in tests]
