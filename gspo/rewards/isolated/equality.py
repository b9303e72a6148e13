"""Whether two answers are the same mathematics: our rules first, math-verify for what is left to algebra."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from .nodes import Chain, Formula, Matrix, Named, Node, Number, Quantity, Several, Word
from .reading import read
from .tidy import compact, split, tidy

logging.disable(logging.CRITICAL)  # math-verify's, about what a model wrote
warnings.simplefilter("ignore")

DIGITS = 50
"""Digits to which constants are computed: two that agree in all but the last ten are taken as equal."""

NO_LIMIT = 0
"""To math-verify: its time limit, a signal, stays off; the parent has a hard one."""
ROUGHLY = 1e-5
"""Relative difference beyond which two functions differ at a point, decimals that were rounded included."""

_AS_WRITTEN = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
)
"""math-verify's own, but units, which it takes off without a look: `5m` is not 5."""
_LATEX = [LatexExtractionConfig(normalization_config=_AS_WRITTEN)]
_ROOT = re.compile(r"(-?)(\d{0,9})\\sqrt\{(\d{1,9})\}")  # frequent, and 4 ms for math-verify's parser
_SERIES = (sympy.Sum, sympy.Product, sympy.Limit)
_RELATION = re.compile(r"=|<|>|\\(?:le|ge|ne|lt|gt|in)(?![a-zA-Z])")
_CHOICE = re.compile(r"\(?([A-J])[).:]\s*(\S.*)", re.DOTALL)
_MORE_CHOICES = re.compile(
    r"\s*(?:[,;/&+|]|(?:and|or|nor|is\s+not|isn't|is\s+(?:wrong|incorrect|false))\b)|.*(?<![a-zA-Z\\])[A-J][).:]"
    r"|.*(?:[,;/&+|]|\b(?:and|or|nor))\s*\(?[A-J](?![a-zA-Z])|\s*\(?[A-J]\)?\s*$",
    re.DOTALL,
)
"""Behind the letter of a choice: another letter, or words that take the choice back."""


class Unreadable(Exception):
    """There is no mathematics in a text."""


def judge(question: dict[str, Any]) -> dict[str, Any]:
    """{"gold"} -> {"wrong": what is wrong with the gold answer, or ""}; {"gold", "answer"} -> {"wrong", "equal", "why"}.

    `why` is empty, or says that the answer cannot be read. What an answer makes sympy raise in comparing is raised.
    """
    gold = question["gold"]
    if (wrong := _wrong_with(gold)) or "answer" not in question:
        return {"wrong": wrong}
    return {"wrong": "", **_compared(_read(gold), question)}


def _compared(node: Node, question: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"equal": _chosen(node, question["answer"]) or equal(node, _read(question["answer"])), "why": ""}
    except Unreadable:
        return {"equal": False, "why": "cannot be read as mathematics"}


def equal(gold: Node, answer: Node) -> bool:
    """Whether an answer is the gold answer, by the rules of docs/mathematics.md."""
    if gold == answer and not isinstance(gold, Chain | Named):
        return True
    for kind, compare in _RULES:
        if isinstance(gold, kind) or isinstance(answer, kind):
            return compare(gold, answer)
    raise TypeError(f"no rule for {type(gold).__name__} and {type(answer).__name__}")


@lru_cache(maxsize=4096)
def _wrong_with(gold: str) -> str:
    try:
        node = _read(gold)
        for formula in _formulas(node):
            _computed(formula)
        return "" if equal(node, node) else "does not equal itself"
    except Unreadable:
        return "cannot be read as mathematics"


@lru_cache(maxsize=4096)
def _read(text: str) -> Node:
    node = read(text)
    if node is None:
        raise Unreadable
    for formula in _formulas(node):
        _sympy(formula)  # raises Unreadable
    return node


def _formulas(node: Node) -> list[str]:
    match node:
        case Formula(latex):
            return [latex]
        case Quantity(value) | Named(_, value):
            return _formulas(value)
        case Several(_, items) | Chain(items):
            return [f for item in items for f in _formulas(item)]
        case Matrix(_, rows):
            return [f for row in rows for cell in row for f in _formulas(cell)]
    return []


def _chosen(gold: Node, answer: str) -> bool:
    """The letter of a choice, with or without what it stands for: `(B) 12` is B."""
    if not isinstance(gold, Word) or not re.fullmatch("[A-J]", gold.text):
        return False
    match = _CHOICE.fullmatch(tidy(re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", tidy(answer))))
    return match is not None and match[1] == gold.text and not _MORE_CHOICES.match(match[2])


def _chains(gold: Node, answer: Node) -> bool:
    """The last link of a chain counts, if the chain is true. Between units nothing is converted, and nothing held false."""
    sides = []
    for node in (gold, answer):
        if isinstance(node, Chain):
            last = node.links[-1]
            if not all(_in_other_units(last, link) or equal(last, link) for link in node.links[:-1]):
                return False
            node = last
        sides.append(node)
    return equal(*sides)


def _in_other_units(one: Node, two: Node) -> bool:
    """Such as `100\\text{ cm}` and `1\\text{ m}`, or degrees and radians."""
    units = [node.unit if isinstance(node, Quantity) else None for node in (one, two)]
    return units[0] != units[1] and (None not in units or "deg" in units)


def _names(gold: Node, answer: Node) -> bool:
    """A name on one side only is left away; two must be the same; an equation is left to math-verify."""
    if isinstance(gold, Named) and isinstance(answer, Named):
        if gold.name == answer.name:
            return equal(gold.value, answer.value)
        return "=" in gold.latex and "=" in answer.latex and _both_equations(gold, answer)
    named, other = (gold, answer) if isinstance(gold, Named) else (answer, gold)
    assert isinstance(named, Named)
    if isinstance(other, Formula) and _is_relation(other.latex):
        return _verified(*(n.latex for n in (gold, answer)))  # type: ignore[union-attr]
    return equal(gold.value, answer) if isinstance(gold, Named) else equal(gold, named.value)


def _both_equations(gold: Named, answer: Named) -> bool:
    """`y = 2x + 1` and `x = (y - 1)/2` are one line; `x = 5` and `y = 5` are not."""
    return gold.name in answer.latex and answer.name in gold.latex and _verified(gold.latex, answer.latex)


def _units(gold: Node, answer: Node) -> bool:
    """A unit may be missing on one side; two must be the same. A percentage is also its hundredth."""
    if isinstance(gold, Quantity) and isinstance(answer, Quantity):
        return gold.unit == answer.unit and equal(gold.value, answer.value)
    quantity, other = (gold, answer) if isinstance(gold, Quantity) else (answer, gold)
    assert isinstance(quantity, Quantity)
    if equal(quantity.value, other):
        return True
    if quantity.unit != "%" or not isinstance(quantity.value, Number):
        return False
    place = quantity.value.unit_in_last_place
    return equal(Number(quantity.value.value / 100, place and place / 100), other)


_SAME_ORDER = frozenset({"()", "[]", "[)", "(]", ":"})


def _several(gold: Node, answer: Node) -> bool:
    """Tuples and intervals in order; lists in any, as often; sets in any, however often; a list may stand for either."""
    one, two = _parts(gold), _parts(answer)
    if one is None or two is None or ("list" in (one.kind, two.kind) and "one" in (one.kind, two.kind)):
        return False
    kinds = {one.kind, two.kind}
    if (kinds <= {"list", "()"} and "()" in kinds) or (len(kinds) == 1 and kinds <= _SAME_ORDER):
        return len(one.items) == len(two.items) and all(map(equal, one.items, two.items))
    if kinds == {"list"} and _all_named(one) != _all_named(two):
        return len(one.items) == len(two.items) and all(map(equal, one.items, two.items))
    if kinds in ({"list"}, {"union"}) or (kinds == {"list", "union"} and _all_named(one, 1) != _all_named(two, 1)):
        return len(one.items) == len(two.items) and _covers(one.items, two.items, once=True)
    if kinds <= {"list", "{}", "one"}:
        return _covers(one.items, two.items) and _covers(two.items, one.items)
    return False


def _parts(node: Node) -> Several | None:
    if isinstance(node, Several):
        return node
    if isinstance(node, Matrix):
        flat = [cell for row in node.rows for cell in row]
        return Several("()", tuple(flat)) if not node.fence and 1 in (len(node.rows), len(node.rows[0])) else None
    return Several("one", (node,))  # a set of one is what is in it


def _all_named(several: Several, num_names: int = 0) -> bool:
    """Whether each part has a name of its own: `x = 1, y = 2`, but not `x = 1, x = 2`. Or that many names in all."""
    names = [item.name for item in several.items if isinstance(item, Named)]
    return len(names) == len(several.items) > 1 and len(set(names)) == (num_names or len(names))


def _covers(wanted: Sequence[Node], given: Sequence[Node], once: bool = False) -> bool:
    """Whether each wanted part is among those given; with `once`, each of these is used up."""
    left = list(given)
    for item in wanted:
        found = next((i for i, other in enumerate(left) if equal(item, other)), None)
        if found is None:
            return False
        if once:
            del left[found]
    return True


def _matrices(gold: Node, answer: Node) -> bool:
    if not (isinstance(gold, Matrix) and isinstance(answer, Matrix)):
        return (
            not isinstance(gold, Formula | Number) and not isinstance(answer, Formula | Number) and _several(gold, answer)
        )
    if gold.fence != answer.fence or [len(row) for row in gold.rows] != [len(row) for row in answer.rows]:
        return False
    return all(equal(a, b) for r, s in zip(gold.rows, answer.rows, strict=True) for a, b in zip(r, s, strict=True))


def _words(gold: Node, answer: Node) -> bool:
    a, b = (_text(node) for node in (gold, answer))
    return a is not None and a == b


def _text(node: Node) -> str | None:
    text = node.text if isinstance(node, Word) else node.latex if isinstance(node, Formula) else None
    return None if text is None else compact(text).strip("().")


def _numbers(gold: Node, answer: Node) -> bool:
    """Exactly, or what a long decimal rounds or is cut off from."""
    if any(isinstance(n, Formula) and _is_relation(n.latex) for n in (gold, answer)):
        return False
    if isinstance(gold, Number) and isinstance(answer, Number):
        if gold.value == answer.value:
            return True
        return _stands_for(gold, answer.value) or _stands_for(answer, gold.value)
    a, b = _exact(gold), _exact(answer)
    if a is None or b is None:
        return _cancels(a, b, *(n.latex for n in (gold, answer) if isinstance(n, Formula)))
    if _same_constant(a, b):
        return True
    value = sympy.N(b if isinstance(gold, Number) else a, DIGITS)
    decimal = gold if isinstance(gold, Number) else answer
    return bool(value.is_Float) and isinstance(decimal, Number) and _stands_for(decimal, Fraction(str(value)))


def _stands_for(decimal: Number, value: Fraction) -> bool:
    place = decimal.unit_in_last_place
    if place is None or (decimal.value < 0) != (value < 0):
        return False
    return -place / 2 <= abs(value) - abs(decimal.value) < place


def _formulas_agree(gold: Node, answer: Node) -> bool:
    assert isinstance(gold, Formula) and isinstance(answer, Formula)
    if compact(gold.latex) == compact(answer.latex):
        return True
    if _is_relation(gold.latex) != _is_relation(answer.latex):
        return False
    a, b = _exact(gold), _exact(answer)
    if a is not None and b is not None:
        return _same_constant(a, b)
    if (a is None) != (b is None):
        return _cancels(a, b, gold.latex if a is None else answer.latex)
    f, g = _expression(gold.latex), _expression(answer.latex)
    known = None if f is None or g is None else _same_function(f, g)
    return _verified(gold.latex, answer.latex) if known is None else known


def _cancels(a: Any, b: Any, latex: str) -> bool:
    """A constant, the one of `a` and `b` that is not None, against a formula with symbols: equal only if they cancel."""
    constant, found = b if a is None else a, _expression(latex)
    if found is None or constant is None or not constant.is_finite or not found.free_symbols:
        return False
    gap = abs(_values(found - constant)[0])
    if gap.is_Float and gap > ROUGHLY * max(1, abs(sympy.N(constant))):
        return False
    return bool(sympy.simplify(found - constant) == 0)


def _is_relation(latex: str) -> bool:
    """Whether a formula is an equation or an inequality: the `=` of `\\sum_{k=1}` stands in braces, and is none."""
    return _RELATION.search(latex) is not None and len(split(latex, _RELATION)) > 1


def _exact(node: Node) -> Any:
    """The constant that a node is, its decimals as the fractions that are written; None if it holds symbols."""
    if isinstance(node, Number):
        return sympy.Rational(node.value.numerator, node.value.denominator)
    return _computed(node.latex)[0] if isinstance(node, Formula) else None


@lru_cache(maxsize=4096)
def _expression(latex: str) -> Any:
    """What a formula is, its sums, products and limits carried out where they converge; None if it is no expression."""
    found = _sympy(latex)[0]
    if not isinstance(found, sympy.Expr) or not found.has(*_SERIES):
        return found if isinstance(found, sympy.Expr) else None
    return found.doit().replace(sympy.Piecewise, _where_it_converges)


def _where_it_converges(value: Any, *others: Any) -> Any:
    """The first of the cases into which sympy takes a sum apart, if the only other is the sum as it stands."""
    if len(others) == 1 and others[0][0].has(*_SERIES):
        return value[0]
    return sympy.Piecewise(value, *others)


@lru_cache(maxsize=4096)
def _computed(latex: str) -> tuple[Any, Any]:
    """The constant that a formula is, and its value to many digits; (None, None) if it holds symbols."""
    found = _expression(latex)
    if found is None:
        return None, None
    found = found.xreplace({s: sympy.I for s in found.free_symbols if str(s) == "i"})  # math-verify leaves a symbol
    if not found.is_number:
        return None, None
    found = found.replace(lambda e: isinstance(e, sympy.Float), lambda e: sympy.Rational(str(e))).doit()
    return found, sympy.N(found, DIGITS)


def _same_constant(a: Any, b: Any) -> bool:
    if a == b:
        return a is not sympy.nan and a is not sympy.zoo
    if (a.is_Rational and b.is_Rational) or False in (a.is_finite, b.is_finite):
        return False
    x, y = sympy.N(a, DIGITS), sympy.N(b, DIGITS)
    if sympy.nan in (a, b, x, y):
        return False
    if not (x.is_comparable or x.is_finite) or not x or not y:
        return bool(sympy.simplify(a - b) == 0)
    return bool(abs(x - y) <= abs(y) * sympy.Float(10) ** (10 - DIGITS))


def _same_function(a: Any, b: Any) -> bool | None:
    """Of two expressions with symbols: False if their values differ, True if they expand to the same, else None.

    It is a short way: math-verify's simplification, to which None leads, takes ten times as long.
    """
    if a.has(*_SERIES) or b.has(*_SERIES):
        return None
    x, y = _values(a, b)
    if x.is_Float and y.is_Float and abs(x - y) > ROUGHLY * max(abs(x), abs(y)):
        return False
    return True if sympy.expand(a - b) == 0 else None


def _values(*expressions: Any) -> list[Any]:
    """The values of expressions at one point, in 20 digits. What a sum or an integral runs over is no symbol of it."""
    symbols = sorted({s for e in expressions for s in e.free_symbols}, key=str)
    point = {s: sympy.Rational(p, 7) for s, p in zip(symbols, (11, 17, 23, 31, 37, 43), strict=False)}
    return [sympy.N(e.subs(point) if e.has(sympy.Integral, *_SERIES) else e.xreplace(point), 20) for e in expressions]


@lru_cache(maxsize=4096)
def _sympy(latex: str) -> list[Any]:
    """math-verify's readings of a formula. Raises Unreadable if it found only a string, or failed."""
    if root := _ROOT.fullmatch(latex.replace(" ", "")):
        return [sympy.Integer(root[1] + (root[2] or "1")) * sympy.sqrt(int(root[3]))]
    try:
        found = parse(f"\\boxed{{{latex}}}", _LATEX, parsing_timeout=NO_LIMIT, raise_on_error=True)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:
        raise Unreadable from error
    if not any(not isinstance(reading, str) for reading in found):
        raise Unreadable
    return found


@lru_cache(maxsize=4096)
def _verified(gold: str, answer: str) -> bool:
    a, b = ([r for r in _sympy(latex) if not isinstance(r, str)] for latex in (gold, answer))
    return bool(verify(a, b, timeout_seconds=NO_LIMIT, raise_on_error=True))


_RULES: tuple[tuple[type, Any], ...] = (
    (Chain, _chains),
    (Named, _names),
    (Quantity, _units),
    (Matrix, _matrices),
    (Several, _several),
    (Word, _words),
    (Number, _numbers),
    (Formula, _formulas_agree),
)
