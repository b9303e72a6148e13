"""From the text of an answer to what it is. Rules in docs/mathematics.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

from .nodes import Chain, Formula, Matrix, Named, Node, Number, Quantity, Several, Word
from .tidy import closing, compact, split, tidy
from .units import quantity

MAX_DIGITS = 1000
"""Longest number that is read here, and largest exponent: what is beyond goes to sympy, at its own cost."""
SIGNIFICANT = 6
"""Digits from which a decimal stands for what rounds or truncates to it: a habit of textbooks, and math-verify's places."""

_COMMA = re.compile(r"[,;]")
_SEPARATOR = re.compile(
    r"(?:(?:[,;]\s*)?\\text\{\s*(?:and|or)\s*\}|(?:[,;]\s*|(?<=\s))(?:and|or|\\lor|\\vee)(?![a-zA-Z])"
    r"|;|,(?!(?<=\d,)\d{3}(?!\d))|,(?<!(?<!\d)\d,)(?<!(?<!\d)\d\d,)(?<!(?<!\d)\d\d\d,))"
)
_UNION = re.compile(r"\\cup(?![a-zA-Z])")
_EQUALS = re.compile(r"=(?![=<>])|\\equiv(?![a-zA-Z])")
_ORDER = re.compile(r"(?:\\le|\\ge|\\lt|\\gt|\\ne)(?![a-zA-Z])|[<>]=?")
_STRICT = ("<", ">", "\\lt", "\\gt")
_IN = re.compile(r"\\in(?![a-zA-Z])")
_SYMBOL = re.compile(
    r"(?:[a-zA-Z]|\\(?!frac|sqrt|pi|infty|text|log|ln|sin|cos|tan)[a-zA-Z]+)(?:_(?:\w|\{\w+\}|\\text\{\w+\}))?'*"
)
_NAME = re.compile(
    rf"(?:\\angle\s*)?{_SYMBOL.pattern}(?:\^\{{-1\}})?\s*(?:\([\w\s,+-]*\))?|\\angle\s*[A-Z]+"
    r"|\\text\{[^{}]+\}|[a-zA-Z][a-zA-Z ]{2,}|[A-Z]{2}"
    r"|\(\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])+\s*\)"
)
_NO_LETTERS = re.compile(
    r"\\(?:frac|sqrt|pi|cdot|times|div|text|log|ln|infty|circ|begin|end|pm|binom|sin|cos|tan)(?![a-zA-Z])"
)
_UNIT = re.compile(r"\\text\{[^{}]*\}(?:\s*\^\s*\{?-?\d\}?)?\s*$")
_MATRIX = re.compile(
    r"\\begin\s*\{(p|b|v|V|B|)(?:small)?(matrix|array)\}(?:\{[lcr|\s]*\})?(.*)\\end\s*\{\1(?:small)?\2\}", re.DOTALL
)
_COLON = re.compile(r"\d+(?:\s*:\s*\d+(?:\.\d+)?)+")
_FUNCTION = frozenset(
    (
        *("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"),
        *("log", "ln", "exp", "sqrt", "max", "min", "gcd", "lcm", "det", "mod", "deg", "pi", "frac"),
    )
)
_REALS = frozenset({r"\mathbb{R}", "all real numbers", "R"})
_PUNCTURED = re.compile(r"(?:\\mathbb\{R\}|R)\s*(?:\\setminus(?![a-zA-Z])|-|\\(?=\s*\\\{))\s*(\\\{.*\\\})")
_EITHER = re.compile(r"(?:,\s*)?(?:\\text\{\s*or\s*\}|(?<=\s)or(?![a-zA-Z])|\\(?:lor|vee)(?![a-zA-Z]))")
_BOTH = re.compile(r"(?:,\s*)?(?:\\text\{\s*and\s*\}|(?<=\s)and(?![a-zA-Z])|\\(?:land|wedge)(?![a-zA-Z]))")
_SUCH_THAT = re.compile(r"\\mid(?![a-zA-Z])|[|:]")

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?!\d)"
_PLAIN = re.compile(rf"(-|\+)?\s*({_INTEGER}|(?=\.\d))(\.\d*)?(?:[eE]([+-]?\d+))?")
_POWER = re.compile(
    r"(.*?\d)\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|\(\s*([+-]?\d+)\s*\)|([+-]?\d+))"
)
_SMALL = r"(\d+(?:\.\d+)?)"
_RATIO = re.compile(
    rf"(-|\+)?\s*(?:(\d+)(?:\s+|\s*(?=\\))(?:and )?)?"
    rf"(?:\\frac\{{\s*(-?)\s*{_SMALL}\s*\}}\{{\s*{_SMALL}\s*\}}|{_SMALL}\s*/\s*{_SMALL})"
)
_REPEATING = re.compile(r"(-)?(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
_TIMES = re.compile(r"(\d{1,2}:\d{2}(?::\d{2})?)\s*(?:\\text\{)?\s*([aApP])\.?\s?[mM]\.?\s*\}?")


def read(text: str) -> Node | None:
    """What a text is, tidied first; None if it is empty."""
    text = tidy(text)
    return part(text) if text else None


def part(text: str) -> Node:
    """What a tidied text is: the first of the readings that fits, else a formula for math-verify."""
    text = tidy(text)
    for reading in _READINGS:
        node = reading(text)
        if node is not None:
            return node
    return Formula(_plain_latex(text))


def number(text: str) -> Number | None:
    """A number in digits, as a fraction, mixed, repeating or in scientific notation; None for all else."""
    text = text.strip()
    if len(text) > MAX_DIGITS:
        return None
    for reading in (_decimal, _scientific, _ratio, _repeating):
        if (found := reading(text)) is not None:
            return found
    return None


def _decimal(text: str) -> Number | None:
    match = _PLAIN.fullmatch(text)
    if not match or abs(exponent := int(match[4] or 0)) > MAX_DIGITS:
        return None
    digits, decimals = re.sub("[, ]", "", match[2]), (match[3] or "")[1:]
    value = Fraction(int(digits + decimals or "0")) / 10 ** len(decimals) * Fraction(10) ** exponent
    is_decimal = len(decimals) > 0
    known = is_decimal and len((digits + decimals).lstrip("0")) >= SIGNIFICANT
    return Number(-value if match[1] == "-" else value, Fraction(10) ** (exponent - len(decimals)) if known else None)


def _scientific(text: str) -> Number | None:
    if (match := _POWER.fullmatch(text)) is None:
        sign, base = text.startswith("-"), re.fullmatch(r"-?10\s*\^\s*(?:\{\s*([+-]?\d{1,3})\s*\}|(\d))", text)
        return None if base is None else Number(Fraction(10) ** int(base[1] or base[2]) * (-1 if sign else 1))
    mantissa, exponent = number(match[1]), int(match[2] or match[3] or match[4])
    if mantissa is None or abs(exponent) > MAX_DIGITS:
        return None
    scale, place = Fraction(10) ** exponent, mantissa.unit_in_last_place
    return Number(mantissa.value * scale, None if place is None else place * scale)


def _ratio(text: str) -> Number | None:
    match = _RATIO.fullmatch(text)
    if match is None or (match[2] and match[3]):
        return None
    top, bottom = Fraction(match[4] or match[6]), Fraction(match[5] or match[7])
    if bottom == 0 or (match[2] and not top < bottom):
        return None
    value = int(match[2] or 0) + top / bottom
    return Number(value * (-1 if match[1] == "-" else 1) * (-1 if match[3] else 1))


def _repeating(text: str) -> Number | None:
    match = _REPEATING.fullmatch(text)
    if match is None:
        return None
    head, tail, scale = match[3], match[4], 10 ** len(match[3])
    value = int(match[2] or 0) + Fraction(int(head or 0), scale) + Fraction(int(tail), scale * (10 ** len(tail) - 1))
    return Number(-value if match[1] else value)


def _is_number(text: str) -> Node | None:
    return number(text)


def _is_time(text: str) -> Node | None:
    if half := _TIMES.fullmatch(text):
        return Quantity(part(half[1]), half[2].lower() + "m")
    if not _COLON.fullmatch(text):
        return None
    return Several(":", tuple(part(piece) for piece in text.split(":")))


def _is_matrix(text: str) -> Node | None:
    fence = "|" if text.startswith("|") and text.endswith("|") else ""
    inner = text.strip("|").strip()
    if inner[:1] in ("(", "[") and closing(inner, 0) == len(inner) - 1:
        inner = inner[1:-1].strip()
    match = _MATRIX.fullmatch(inner)
    if match is None or r"\begin" in match[3]:
        return None
    rows = [row for row in re.split(r"\\\\|\\cr(?![a-zA-Z])", match[3]) if row.strip()]
    fence = {"v": "|", "V": "||"}.get(match[1], fence)
    return Matrix(fence, tuple(tuple(part(cell) for cell in row.split("&")) for row in rows))


def _is_union(text: str) -> Node | None:
    pieces = split(text, _UNION)
    return Several("union", tuple(part(p) for p in pieces)) if len(pieces) > 1 and all(pieces) else None


def _is_bracketed(text: str) -> Node | None:
    if compact(text) in ("\\emptyset", "\\{\\}", "emptyset"):
        return Several("{}", ())
    if text in _REALS:
        return _without(())
    if (punctured := _PUNCTURED.fullmatch(text)) and isinstance(left_out := part(punctured[1]), Several):
        return _without(left_out.items)
    is_set = text.startswith("\\{")
    left, right = (2, 2) if is_set else (1, 1)
    if (open_interval := _outward(text)) is not None:
        return open_interval
    if len(text) < left + right or text[left - 1] not in "([{" or closing(text, left - 1) != len(text) - 1:
        return None
    inside = text[left : -right if is_set else -1]
    pieces = split(inside, _COMMA)
    kind = "{}" if is_set else text[0] + text[-1]
    if is_set and _SUCH_THAT.search(inside):
        return _described(inside)
    if not all(pieces) or (kind == "{}" and not is_set):
        return None
    if len(pieces) == 1 and not is_set:
        return part(inside)
    if len(pieces) > 2 and kind == "[]":
        kind = "()"
    return Several(kind, tuple(part(p) for p in pieces))


def _without(points: tuple[Node, ...]) -> Node | None:
    """The real numbers but some points, as the union of what is between them. Of several, each must be written out."""
    if len(points) > 1:
        if not all(isinstance(point, Number) for point in points):
            return None
        points = tuple(sorted(set(points), key=lambda point: point.value if isinstance(point, Number) else 0))
    ends = (Formula(r"-\infty"), *points, Formula(r"\infty"))
    pieces = tuple(Several("()", pair) for pair in pairwise(ends))
    return pieces[0] if len(pieces) == 1 else Several("union", pieces)


def _described(inside: str) -> Node | None:
    """A set of numbers by a condition on one symbol: `x \\mid x > 2`; None for other conditions."""
    symbol, *condition = split(inside, _SUCH_THAT)
    symbol = re.sub(r"\s*\\in\s*\\mathbb\{R\}", "", symbol)
    found = part(condition[0]) if len(condition) == 1 and _SYMBOL.fullmatch(symbol) else None
    if isinstance(found, Named) and found.name == compact(symbol) and _is_region(found.value):
        return found.value
    return None


def _is_region(node: Node) -> bool:
    """Whether it is an interval or a union of intervals."""
    return isinstance(node, Several) and node.kind in ("()", "[]", "[)", "(]", "union")


def _is_cases(text: str) -> Node | None:
    """Inequalities of one symbol: joined by `or` they are a union of intervals, by `and` what two have in common."""
    if not _ORDER.search(text):
        return None
    union, both = split(text, _EITHER), split(text, _BOTH)
    pieces = union if len(union) > 1 else both
    if len(pieces) < 2 or not all(pieces):
        return None
    found = [node for node in map(part, pieces) if isinstance(node, Named)]
    if len(found) < len(pieces) or len({node.name for node in found}) > 1 or not any(_is_region(n.value) for n in found):
        return None
    regions = [n.value if isinstance(n.value, Several) else Several("{}", (n.value,)) for n in found]
    if len(union) > 1:
        parts = [part for region in regions for part in (region.items if region.kind == "union" else (region,))]
        return Named(found[0].name, Several("union", tuple(parts)), text)
    low, high = regions if regions[0].items[-1:] == (Formula(r"\infty"),) else regions[::-1]
    if len(regions) != 2 or low.items[-1] != Formula(r"\infty") or high.items[0] != Formula(r"-\infty"):
        return None
    return Named(found[0].name, Several(low.kind[0] + high.kind[-1], (low.items[0], high.items[-1])), text)


def _outward(text: str) -> Node | None:
    """Intervals in the French spelling: `]1, 2[`."""
    match = re.fullmatch(
        r"\](?P<a>[^\[\]()]+)[,;](?P<b>[^\[\]()]+)([\[\]])|\[(?P<c>[^\[\]()]+)[,;](?P<d>[^\[\]()]+)\[", text
    )
    if match is None:
        return None
    kind = ("(" if match["a"] else "[") + ("]" if match[3] == "]" else ")")
    return Several(kind, (part(match["a"] or match["c"]), part(match["b"] or match["d"])))


def _is_list(text: str) -> Node | None:
    pieces = split(text, _SEPARATOR)
    if len(pieces) < 2 or not all(pieces):
        return None
    if any("\\ldots" in piece for piece in pieces):
        return Word(compact(text))
    items: list[Node] = []
    for node in map(part, pieces):
        items.extend(node.items if isinstance(node, Several) and node.kind == "list" else [node])
    return Several("list", tuple(items))


def _is_relation(text: str) -> Node | None:
    pieces = split(text, _IN)
    if len(pieces) == 2 and _SYMBOL.fullmatch(pieces[0]) and pieces[1]:
        return Named(compact(pieces[0]), part(pieces[1]), text)
    if _ORDER.search(text):
        return _interval(text)
    pieces = split(text, _EQUALS)
    if len(pieces) < 2 or not all(pieces):
        return None
    if len(pieces) == 2 and _NAME.fullmatch(pieces[1]) and not _NAME.fullmatch(pieces[0]):
        pieces.reverse()
    if _NAME.fullmatch(pieces[0]):
        return Named(compact(pieces[0]), _last_of(pieces[1:]), text)
    if any(map(_has_letters, pieces)):
        return Formula(text)
    return Chain(tuple(part(piece) for piece in pieces))


def _last_of(pieces: list[str]) -> Node:
    """What follows a name: a chain, of which links that say nothing about the last are left out, names and symbols."""
    *links, last = pieces
    symbolic = _has_letters(_UNIT.sub("", last))
    kept = [
        part(link)
        for link in links
        if link in ("e", "i") or (not _NAME.fullmatch(link) and (symbolic or not _has_letters(_UNIT.sub("", link))))
    ]
    return Chain((*kept, part(last))) if kept else part(last)


def _interval(text: str) -> Node:
    """An inequality that bounds one symbol, as the named interval; else a formula."""
    pieces, signs = split(text, _ORDER), [compact(m[0]) for m in _ORDER.finditer(text)]
    if len(signs) != len(pieces) - 1 or not all(pieces) or len(pieces) > 3 or _EQUALS.search(text):
        return Formula(text)
    if "\\ne" in signs:
        symbol, *others = sorted(pieces, key=lambda piece: not _SYMBOL.fullmatch(piece))
        if len(others) != 1 or not _SYMBOL.fullmatch(symbol) or _has_letters(others[0]):
            return Formula(text)
        return Named(compact(symbol), _without((part(others[0]),)) or Formula(text), text)
    falling = signs[0] in (">", ">=", "\\ge", "\\gt")
    if any((sign in (">", ">=", "\\ge", "\\gt")) != falling for sign in signs):
        return Formula(text)
    if falling:
        pieces, signs = pieces[::-1], signs[::-1]
    if len(pieces) == 2:
        low = _SYMBOL.fullmatch(pieces[0]) is not None
        pieces = [r"-\infty", *pieces] if low else [*pieces, r"\infty"]
        signs = ["<", *signs] if low else [*signs, "<"]
    low, symbol, high = pieces
    if not _SYMBOL.fullmatch(symbol) or _has_letters(low) or _has_letters(high):
        return Formula(text)
    kind = ("(" if signs[0] in _STRICT else "[") + (")" if signs[1] in _STRICT else "]")
    return Named(compact(symbol), Several(kind, (part(low), part(high))), text)


def _is_plus_minus(text: str) -> Node | None:
    if not re.search(r"\\(?:pm|mp)(?![a-zA-Z])", text):
        return None
    items: list[Node] = []
    for plus, minus in (("+", "-"), ("-", "+")):
        one = re.sub(r"\\pm(?![a-zA-Z])", plus, text)
        one = re.sub(r"\\mp(?![a-zA-Z])", minus, one).lstrip()
        items.append(part(one.removeprefix("+")))
    return Several("list", tuple(items))


def _is_quantity(text: str) -> Node | None:
    return quantity(text, part, number)


def _is_word(text: str) -> Node | None:
    said = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    said = re.sub(r"\s+", " ", said).strip()
    if "\\ldots" in text or re.fullmatch("[A-Z]", said):
        return Word(said)
    runs = re.findall(r"(?<![a-zA-Z\\])[a-zA-Z]+(?![a-zA-Z])", re.sub(r"\\[a-zA-Z]+", " ", said))
    if any(_is_prose(run, r"\text" in text) for run in runs):
        return Word(said.lower())
    return None


def _is_prose(run: str, marked: bool) -> bool:
    low = run.lower()
    if (
        len(run) < 3
        or low in _FUNCTION
        or any(low == f + x for f in ("sin", "cos", "tan", "log", "ln", "sqrt") for x in "xyzabnt")
    ):
        return low in ("no", "up", "on", "is") or (marked and len(run) == 2)
    return marked or (low not in "abcdefghijklmnopqrstuvwxyz" and any(vowel in low for vowel in "aeiouy"))


def _has_letters(text: str) -> bool:
    bare = _NO_LETTERS.sub(" ", text)
    return re.search("[a-zA-Z]", bare) is not None


def _plain_latex(text: str) -> str:
    """Where math-verify would misread: thousands separators, degrees in a function, an imaginary unit behind a digit."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\{?(\d+(?:\.\d+)?)\}?\s*\^\\circ ?", r"{(\1\\cdot\\frac{\\pi}{180})}", text)
    return re.sub(r"(?<=\d)i(?![a-zA-Z])", r" \\cdot i", text)


_READINGS: tuple[Callable[[str], Node | None], ...] = (
    _is_number,
    _is_time,
    _is_matrix,
    _is_union,
    _is_bracketed,
    _is_cases,
    _is_list,
    _is_relation,
    _is_plus_minus,
    _is_quantity,
    _is_word,
)
