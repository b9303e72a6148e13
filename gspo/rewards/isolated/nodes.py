"""What an answer can be, once it is read."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Number:
    """A number that is written out: `7`, `-3.50`, `2/3`, `1.2e3`."""

    value: Fraction
    """Exactly what is written."""
    unit_in_last_place: Fraction | None = None
    """Of a decimal with at least six significant digits, else None: then it stands for nothing but itself."""


@dataclass(frozen=True, slots=True)
class Word:
    """Words, or anything that is compared as text: `even`, `B`."""

    text: str
    """In lower case, unless it is a single letter; without white space at the ends."""


@dataclass(frozen=True, slots=True)
class Formula:
    """What math-verify is to read."""

    latex: str
    """Tidied LaTeX."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value with a unit."""

    value: Node
    """What stands before or after the unit."""
    unit: str
    """Its canonical name, such as `cm`, `m^2`, `%`, `$`, `deg`, `base 2`."""


@dataclass(frozen=True, slots=True)
class Named:
    """An equation that gives a name a value: `x = 5`, `f(x) = 2x`, `x \\in (1, 2)`."""

    name: str
    """The left side, without white space."""
    value: Node
    """The right side; a `Chain` where several follow the name."""
    latex: str
    """All of it."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Numeric expressions said to be equal: `3 + 4 = 7`."""

    links: tuple[Node, ...]
    """In order; the last is the answer, if all are equal."""


@dataclass(frozen=True, slots=True)
class Several:
    """Several answers, or one with parts."""

    kind: str
    """`list` (bare), `{}`, `()` (a tuple or an open interval), `[]`, `[)`, `(]`, `union`, or `:`."""
    items: tuple[Node, ...]
    """The parts in their order."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of entries."""

    fence: str
    """`|` for determinants, `||` for norms, empty for all others."""
    rows: tuple[tuple[Node, ...], ...]
    """[rows, columns], perhaps of unequal length."""


Node = Number | Word | Formula | Quantity | Named | Chain | Several | Matrix
