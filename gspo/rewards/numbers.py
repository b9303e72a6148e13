"""Numbers in text, exactly: as fractions, never as floats."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_DIGITS = 1000
"""Longest number read, in characters: a model that writes digits for ever must not cost quadratic time."""
MAX_EXPONENT = 1000
"""Largest exponent read: 1e999999999 is ten characters, but would fill the memory."""

_PLAIN = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_PLAIN}(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_NUMBER = rf"(?:[0-9]+/[0-9]+|{_DECIMAL})"
_SIGN = r"[+\-\u2212]"
_WHOLE = re.compile(rf"{_SIGN}?{_NUMBER}")
_ANYWHERE = re.compile(rf"(?:(?<![\w.)\]]){_SIGN})?{_NUMBER}")


def parse_number(text: str) -> Fraction | None:
    """The number that a text is, white space around it aside, or None.

    Read are `42`, `-3.5`, `+7`, `.5`, `1,234,567.8`, `1e3`, `2/3`; the minus sign may be U+2212. Not read are words,
    units, `$5`, `5%`, `5.`, `1,23`, `1.234,5`, `1_000`, `1 000`, `1 1/2`, `1.5/2`, `½`, `0x10`, `inf`, `nan`, LaTeX,
    digits other than 0 to 9, division by zero, more than 1,000 characters, and exponents beyond 1,000.
    """
    text = text.strip()
    return _value(text) if len(text) <= MAX_DIGITS and _WHOLE.fullmatch(text) else None


def last_number(text: str) -> str | None:
    """The last number written in a text, as it stands there, or None.

    A sign belongs to it unless a letter, digit or closing bracket stands before the sign: `5-3` ends in 3, `x = -3` in
    -3. A full stop after it does not. `1, 2` are two numbers, `1,234` is one, `3/4` is one fraction; of what
    `parse_number` does not read, the digits are read: `1.5/2` ends in 2, `5%` in 5, `x2` in 2.
    """
    found = None
    for match in _ANYWHERE.finditer(text):
        found = match
    return found.group() if found else None


def to_number(value: Any) -> Fraction | None:
    """A gold answer as a number, or None. Floats count as the decimal they are printed as: 0.1 is one tenth."""
    if isinstance(value, str):
        return parse_number(value)
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal | Fraction):
        return None
    if isinstance(value, float):
        return Fraction(repr(float(value))) if math.isfinite(value) else None
    if isinstance(value, Decimal) and (not value.is_finite() or abs(value.adjusted()) > MAX_EXPONENT):
        return None
    return Fraction(value)


def _value(text: str) -> Fraction | None:
    text = text.replace("\u2212", "-").replace(",", "")
    numerator, slash, denominator = text.partition("/")
    if slash:
        return Fraction(int(numerator), int(denominator)) if int(denominator) else None
    exponent = re.split("[eE]", text)[1:]
    if exponent and abs(int(exponent[0])) > MAX_EXPONENT:
        return None
    return Fraction(text)
