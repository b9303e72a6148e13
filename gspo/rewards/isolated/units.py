"""Units, percent, currencies, degrees, number bases and scale words around a value."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

from .nodes import Formula, Node, Number, Quantity

_SAME = {
    "m": "meter metre", "cm": "centimeter centimetre", "mm": "millimeter millimetre", "km": "kilometer kilometre",
    "in": "inch inches", "ft": "foot feet", "mi": "mile", "yd": "yard", "g": "gram gramme", "kg": "kilogram",
    "s": "second sec", "min": "minute mins", "h": "hour hr hrs", "day": "", "l": "liter litre L", "ml": "milliliter mL",
    "deg": "degree", "rad": "radian", "%": "percent pct percentage", "$": "dollar USD usd bucks", "€": "euro EUR",
    "£": "pound GBP", "¢": "cent", "mph": "", "lb": "lbs", "oz": "ounce", "N": "newton", "J": "joule", "W": "watt",
    "V": "volt",
    "unit": "", "square unit": "", "week": "", "month": "", "year": "yr", "people": "person",
}  # fmt: skip
_CANONICAL = {word: unit for unit, words in _SAME.items() for word in (unit, *words.split())}
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MATHEMATICS = re.compile("pi|sqrt|sin|cos|tan|log|ln|exp|frac|to|mod|is|times|over|i|e")
"""Words that are no unit unless \\text{} marks them as one."""
_CHANGING = re.compile(
    "and|or|not|nor|but|if|except|without|wrong|incorrect|is|isn't|to|at|than|least|most|more|less|fewer|greater|larger|"
    "smaller|plus|minus|over|by|divided|multiplied|mod|modulo|remainder|negative|factorial|twice|pi|sqrt|"
    "dozens?|hundreds?|thousands?|millions?|billions?|trillions?|tens|half|halves|zero|one|two|three|four|five|six|seven|"
    "eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
)
"""Words that change the number before them, or leave it open: they are no unit."""
_PART = re.compile(r"third|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|\w+teen|\w+tie|hundred|thousand|\w+llion)th")
_POWER = re.compile(r"(?<=[a-zA-Z])\s*\^\s*\{?\s*-?\d\s*\}?")
_BARE_POWER = re.compile(r"(?<![a-zA-Z])([mck]?m|ft|in)([23])(?!\w)")

_TEXT = re.compile(r"(.*?[^\s\\])((?:\s*\\text\{[^{}]*\}(?:\s*\^\s*\{?-?\d\}?)?(?:\s*/)?)+)")
_PLAIN = re.compile(r"([-+]?[\d.,/ ]*\d|.*[}\d])(\s*)([a-zA-Z][a-zA-Z /]*[a-zA-Z]|[a-zA-Z])(\s*\^\s*\{?\d\}?)?")
_MONEY = re.compile(r"([-+]?)\s*([$€£¥₹])\s*(.*\d.*)")
_PERCENT = re.compile(r"(.+?)\s*%")
_DEGREE = re.compile(r"(.+?)\s*\^\\circ ?(?:\\text\{\s*([CF])\s*\}|([CF]))?")
_MODULO = re.compile(r"(.+?)\s*(?:\\pmod\s*\{?\s*(\d+)\s*\}?|\(?\s*\\b?mod\s*\{?\s*(\d+)\s*\}?\s*\)?)")
_BASE = re.compile(r"(\d+(?:\.\d+)?)\s*_\s*(?:\{\s*(?:\\text\{)?\s*(\d+|two|eight|ten)\s*\}?\s*\}|(\d))")

Part = Callable[[str], Node]
Numeral = Callable[[str], Number | None]


def quantity(text: str, part: Part, number: Numeral) -> Node | None:
    """A value with a unit, or a scaled number (`5 million`), or None. `part` reads the value."""
    if base := _BASE.fullmatch(text):
        return Quantity(part(base[1]), f"base {base[2] or base[3]}")
    if money := _MONEY.fullmatch(text):
        return _with_unit(part(money[1] + money[3]), money[2])
    if percent := _PERCENT.fullmatch(text):
        return Quantity(part(percent[1]), "%")
    if (degree := _DEGREE.fullmatch(text)) and not re.search(r"\\(?:sin|cos|tan|cot|sec|csc|arc)", text):
        return Quantity(part(degree[1]), "deg" + (degree[2] or degree[3] or ""))
    if modulo := _MODULO.fullmatch(text):
        return Quantity(part(modulo[1]), f"mod {modulo[2] or modulo[3]}")
    if marked := _TEXT.fullmatch(text):
        return _marked(marked[1], marked[2], part)
    return _unmarked(text, part, number)


def _marked(value: str, unit: str, part: Part) -> Node | None:
    name = re.sub(r"\\text\{([^{}]*)\}", r"\1", unit)
    if not re.search(r"\d|\\pi|\\sqrt|\\infty", value) or not re.search("[a-zA-Z%$°]", name) or not _is_unit(name):
        return None
    return _with_unit(part(value), name)


def _unmarked(text: str, part: Part, number: Numeral) -> Node | None:
    """`5 apples`, `12cm`, `7 m^2`: a number, then words that are no mathematics."""
    match = _PLAIN.fullmatch(text)
    if match is None or ((value := number(match[1])) is None and not match[1].endswith("}")):
        return None
    words = match[3].split()
    if any(_MATHEMATICS.fullmatch(word.lower()) for word in words) or not _is_unit(match[3]):
        return None
    known = len(words) == 1 and len(words[0]) > 1 and _canonical(words[0]) in _SAME
    prose = bool(match[2]) and all(len(word) > 2 and re.search("[aeiouy]", word.lower()) for word in words)
    if not (known or prose):
        return None
    return _with_unit(value or part(match[1]), match[3] + compacted(match[4] or ""))


def _is_unit(name: str) -> bool:
    """Whether words behind a number leave it as it is, as `apples` and `m/s^2` do, unlike `dozen`, `or 43` and `tenths`."""
    words = re.findall(r"[^\W\d_]+(?:[-'][^\W\d_]+)*", name.lower())
    if words and words[0] in _SCALES:
        del words[0]
    if re.search(r"\d", _POWER.sub("", _BARE_POWER.sub("", name))) or any(map(_CHANGING.fullmatch, words)):
        return False
    parts = [word for word, after in pairwise([*words, "of"]) if after == "of" or word.endswith("s")]
    return words[:1] not in (["squared"], ["cubed"]) and not any(_PART.fullmatch(word.rstrip("s")) for word in parts)


def _with_unit(value: Node, name: str) -> Node:
    """The quantity; scale words are multiplied into a number first, and nothing but a scale leaves a number."""
    words = compacted(name).split(" ")
    if isinstance(value, Quantity) and value.unit == "$" and words[0] in ("dollar", "dollars", "USD"):
        return value
    if words[0].lower() in _SCALES and isinstance(value, Number):
        scale = Fraction(10) ** _SCALES[words.pop(0).lower()]
        place = value.unit_in_last_place
        value = Number(value.value * scale, None if place is None else place * scale)
        words = words[1:] if words[:1] == ["of"] else words
    elif words[0].lower() in _SCALES and isinstance(value, Formula):
        value = Formula(rf"10^{{{_SCALES[words.pop(0).lower()]}}} \cdot ({value.latex})")
    unit = _unit(" ".join(words))
    if isinstance(value, Quantity):
        return value if not unit or value.unit == unit else Formula(f"{value} {name}")
    return Quantity(value, unit) if unit else value


def _unit(name: str) -> str:
    name = re.sub(r"\s*\^\s*\{?(-?\d)\}?", r"^\1", _BARE_POWER.sub(r"\1^\2", name.strip().rstrip(".")))
    if square := re.fullmatch(r"(?:square|sq\.?) (\w+)|(\w+) squared", name.lower()):
        return _canonical(square[1] or square[2]) + "^2"
    if cube := re.fullmatch(r"(?:cubic|cu\.?) (\w+)|(\w+) cubed", name.lower()):
        return _canonical(cube[1] or cube[2]) + "^3"
    name = re.sub(r"\s*(?:/|\bper\b)\s*", "/", name)
    return "/".join(_power(piece) for piece in name.split("/"))


def _power(name: str) -> str:
    stem, caret, power = name.partition("^")
    return _canonical(stem.strip()) + caret + power


def _canonical(word: str) -> str:
    if word in _CANONICAL:
        return _CANONICAL[word]
    low = word.lower()
    single = low[:-1] if len(low) > 2 and low.endswith("s") else low
    return _CANONICAL.get(low) or _CANONICAL.get(single) or single


def compacted(text: str) -> str:
    """White space between words made one blank."""
    return " ".join(text.split())
