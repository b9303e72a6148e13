"""Text that a model wrote, made safe to look at."""

from __future__ import annotations

import unicodedata

_DIRECTION = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}


def visible(text: str, keep: str = "\n\t") -> str:
    """The text with every character that a terminal or browser would obey written out instead.

    Control characters become their pictures (escape: `␛`); overrides of writing direction, lone surrogates and the
    like become `⟦U+202E⟧`. Characters in `keep` stay. Letters of every script stay, right-to-left ones too. Markup
    (HTML, rich) is not touched: whoever shows the text must not read any.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in keep or not _obeyed(c) else _picture(ord(c)) for c in text)


def _obeyed(char: str) -> bool:
    category = unicodedata.category(char)
    return category in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(char) in _DIRECTION


def _picture(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "\N{SYMBOL FOR DELETE}" if code == 0x7F else f"⟦U+{code:04X}⟧"
