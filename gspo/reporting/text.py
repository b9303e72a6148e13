"""Text that a model wrote, made safe to look at."""

from __future__ import annotations

import unicodedata

_DIRECTION = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}


def visible(text: str, keep: str = "\n\t") -> str:
    """The text with every character that a terminal or browser would obey written out instead.

    Control characters, overrides of writing direction, line separators and lone surrogates become `⟦U+202E⟧` and the
    like. Characters in `keep` stay. Letters of every script stay, right-to-left ones too. Markup (HTML, rich) is not
    touched: whoever shows the text must not read any.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in keep or not _obeyed(c) else f"⟦U+{ord(c):04X}⟧" for c in text)


def _obeyed(char: str) -> bool:
    category = unicodedata.category(char)
    return category in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(char) in _DIRECTION
