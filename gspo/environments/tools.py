"""Tools that come along: a calculator and a search over a folder. Nothing here loads more than Python itself."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

MAX_EXPRESSION = 1000
"""Characters of an expression: bounds its depth."""
MAX_BITS = 4096
"""Bits of a whole number, about 1,200 digits: bounds the time of every operation."""


def _round(number: float, digits: int = 0) -> float:
    if abs(digits) > 400:  # the power of ten would not end
        raise ValueError("round takes up to 400 digits here")
    return round(number, digits) if digits else round(number)


_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "round": _round, "min": min, "max": max, "sqrt": math.sqrt, "floor": math.floor, "ceil": math.ceil,
    "gcd": math.gcd, "lcm": math.lcm, "exp": math.exp, "log": math.log, "log2": math.log2, "log10": math.log10,
    "sin": math.sin, "cos": math.cos, "tan": math.tan, "factorial": math.factorial, "comb": math.comb,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e}
_SMALL = {"factorial": 500, "comb": 500, "lcm": 2**64}
"""Largest argument of functions whose result outgrows their arguments."""


def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression in Python's notation.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, functions such as sqrt or round, e.g. "3*(2+5)".
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"the expression has {len(expression)} characters, more than {MAX_EXPRESSION}")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):  # the parser's own ways to refuse what is nested too deeply
        raise ValueError("this is not an arithmetic expression") from None
    return str(value)


def _value(node: ast.expr) -> int | float:
    """The value of a node. Only what stands here can be computed: no names, no attributes, no strings."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=inner) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(inner))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            a, b = _value(left), _value(right)
            if isinstance(op, ast.Pow):
                _refuse_large_power(a, b)
            return _bounded(_OPERATORS[type(op)](a, b))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            values = [_value(arg) for arg in args]
            if any(abs(v) > _SMALL.get(name, math.inf) for v in values):
                raise ValueError(f"{name} takes numbers up to {_SMALL[name]} here")
            return _bounded(_FUNCTIONS[name](*values))
    raise ValueError(f"{ast.unparse(node)[:60]!r} is not arithmetic")


def _refuse_large_power(base: int | float, exponent: int | float) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise ValueError(f"the power is too large: whole numbers may have {MAX_BITS} bits")


def _bounded(value: Any) -> int | float:
    if isinstance(value, complex) or not math.isfinite(value if isinstance(value, float) else 0):
        raise ValueError("the result is no finite real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError(f"a number is too large: whole numbers may have {MAX_BITS} bits")
    return value


# ---- search -----------------------------------------------------------------------------------------------

MAX_FILE_BYTES = 2**20
"""A larger file is passed over, and the result says so."""
SUFFIXES = (".txt", ".md", ".rst")


def search(query: str, folder: str, num_results: int = 3) -> str:
    """Search a collection of texts and return the passages that fit best.

    Args:
        query: The words to look for.
        folder: The folder that holds the texts.
        num_results: How many passages to return.
    """
    passages, too_large = _passages(folder)
    wanted = set(_words(query))
    if not wanted:
        raise ValueError("the query has no words")
    seen = Counter(word for _, words, _ in passages for word in wanted & words.keys())
    weight = {word: math.log(1 + len(passages) / seen[word]) for word in seen}
    scores = [sum(weight[w] * words[w] / (words[w] + 1) for w in wanted & words.keys()) for _, words, _ in passages]
    order = sorted(range(len(passages)), key=lambda i: -scores[i])[: max(1, min(num_results, 20))]
    best = [passages[i] for i in order if scores[i] > 0]
    found = [f"[{where}]\n{text}" for where, _, text in best] or ["no passage has any of these words"]
    return "\n\n".join(found + ([f"(not searched, too large: {', '.join(too_large)})"] if too_large else []))


@lru_cache(maxsize=4)
def _passages(folder: str) -> tuple[list[tuple[str, Counter[str], str]], list[str]]:
    """A folder's paragraphs as (file, words, text), and the files left out. Links out of the folder are not followed."""
    root = Path(folder).resolve()
    if not root.is_dir():
        raise ValueError(f"there is no folder {folder}")
    passages, too_large = [], []
    for path in sorted(p for p in root.rglob("*") if p.suffix in SUFFIXES and p.is_file()):
        if not path.resolve().is_relative_to(root):
            continue
        name = str(path.relative_to(root))
        if path.stat().st_size > MAX_FILE_BYTES:
            too_large.append(name)
            continue
        for text in re.split(r"\n\s*\n", path.read_text("utf-8", errors="replace")):
            if text.strip():
                passages.append((name, Counter(_words(text)), text.strip()))
    return passages, too_large


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
