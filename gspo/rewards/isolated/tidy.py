"""Different spellings of the same thing made one, before anything is read."""

from __future__ import annotations

import re
import unicodedata

_SIGNS = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "π": r"\pi ",
    "∞": r"\infty ", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "∪": r"\cup ",
    "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "±": r"\pm ", "∓": r"\mp ", "°": r"^\circ ",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "…": r"\ldots ", "％": "%", "＝": "=", "，": ",", "\u2044": "/",
    "（": "(", "）": ")", "：": ":", "∨": r"\lor ", "∖": r"\setminus ", "⟨": "(", "⟩": ")",
}  # fmt: skip
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "₀₁₂₃₄₅₆₇₈₉₋₊ₙ"
_LEVEL = str.maketrans(_RAISED + _LOWERED, "0123456789-+n" * 2)
_SHIFTED = re.compile(f"([{_RAISED}]+)|[{_LOWERED}]+")

_NAMES = {
    r"\\[dtc]frac(?![a-zA-Z])": r"\\frac",
    r"\\(?:leq|leqslant)(?![a-zA-Z])": r"\\le ",
    r"\\(?:geq|geqslant)(?![a-zA-Z])": r"\\ge ",
    r"\\neq(?![a-zA-Z])": r"\\ne ",
    r"\\(?:varnothing)(?![a-zA-Z])": r"\\emptyset ",
    r"\\(?:dots|cdots|dotsc)(?![a-zA-Z])|(?<![\d.])\.{3,}": r"\\ldots ",
    r"\\[dt]binom(?![a-zA-Z])": r"\\binom",
    r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}": r"\\binom{\1}{\2}",
    r"\\lg(?![a-zA-Z])": r"\\log_{10} ",
    r"\\mathbb\s*(?:\{\s*R\s*\}|R(?![a-zA-Z]))|\\R(?:eals)?(?![a-zA-Z])": r"\\mathbb{R}",
    r"\\backslash(?![a-zA-Z])": r"\\setminus ",
    r"(?<![a-zA-Z\\])infinity(?![a-zA-Z])": r"\\infty ",
    r"\\(?:mathrm|text|operatorname)\s*\{\s*([ei])\s*\}": r" \1",
    r"\\lbrace(?![a-zA-Z])": r"\\{",
    r"\\rbrace(?![a-zA-Z])": r"\\}",
    r"\\(?:mathrm|textbf|textit|textrm|operatorname|mbox|mathbf|mathit|bold|boldsymbol|textnormal|mathsf)\s*\{": r"\\text{",
    r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?": "",
    r"\\langle(?![a-zA-Z])": "(",
    r"\\rangle(?![a-zA-Z])": ")",
    r"\\(?:displaystyle|textstyle|bf|rm|limits|nolimits|centering)(?![a-zA-Z])": "",
    r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![a-zA-Z])|\\degree(?![a-zA-Z])": r"^\\circ ",
    r"(?<=\d),\s*\\!\s*(?=\d{3})": ",",
    r"(?<=\d)(?:\{,\}|\\,)(?=\d{3}(?!\d))": ",",
    r"(?<=\d)\{,\}(?=\d)": ".",
    r"(?<!\\)\\(?:[,;:! ]|quad|qquad)|~": " ",
    r"\\([%$])": r"\1",
}
_RENAMED = [(re.compile(pattern), to) for pattern, to in _NAMES.items()]

_WRAPPERS = (
    ("**", "**"), ("__", "__"), ("`", "`"), ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("*", "*"),
)  # fmt: skip
_HEADS = (r"\boxed{", r"\fbox{", r"\text{", r"\text {", "{")
_SQRT = re.compile(r"(?:√|(?<![\\a-zA-Z])sqrt)\s*(?:\(([^()]*)\)|(\d+|[a-zA-Z]))|\\sqrt\s*([0-9a-zA-Z])")
_TOKEN = r"(?:\{([^{}]*)\}|(\d|[a-zA-Z]|\\[a-zA-Z]+(?![a-zA-Z{])))"
_FRACTION = re.compile(rf"\\frac\s*{_TOKEN}\s*{_TOKEN}")
_BINOMIAL = re.compile(rf"\\binom\s*{_TOKEN}\s*{_TOKEN}")
_CHOOSE = re.compile(r"([^{}]+)\\choose(?![a-zA-Z])([^{}]+)")
_PREFIX = re.compile(r"^(?:(?:the )?(?:final )?answer(?: is)?|thus|so|therefore)\s*[:,]?\s+", re.IGNORECASE)


def tidy(text: str) -> str:
    """One spelling for signs, spaces, fractions and roots; markdown, dollars and a box around all of it taken off."""
    text = _SHIFTED.sub(_shifted, text)
    text = _unwrapped("".join(_sign(character) for character in text))
    for pattern, to in _RENAMED:
        text = pattern.sub(to, text)
    text = _SQRT.sub(lambda m: rf"\sqrt{{{m[1] or m[2] or m[3]}}}", text)
    text = _FRACTION.sub(lambda m: rf"\frac{{{m[1] or m[2] or ''}}}{{{m[3] or m[4] or ''}}}", text)
    text = _BINOMIAL.sub(lambda m: rf"\binom{{{m[1] or m[2] or ''}}}{{{m[3] or m[4] or ''}}}", text)
    text = _unwrapped(_PREFIX.sub("", _unwrapped(text)))
    if pair := _CHOOSE.fullmatch(text):
        text = rf"\binom{{{pair[1].strip()}}}{{{pair[2].strip()}}}"
    return re.sub(r"\s+", " ", text).strip()


def compact(text: str) -> str:
    """A tidied text without white space that LaTeX ignores."""
    return re.sub(r"(\\[a-zA-Z]+) (?=[a-zA-Z])|\s", lambda m: f"{m[1]} " if m[1] else "", text)


def closing(text: str, start: int) -> int:
    """Where the bracket at `start` closes, brackets of all kinds counted alike, or -1. `\\{` and `\\}` are brackets too."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] in "([{":
            depth += 1
        elif text[i] in ")]}":
            depth -= 1
            if depth == 0:
                return i
    return -1


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """A text split where the pattern matches outside all brackets, environments and absolute values of the text."""
    depth, parts, begin, i = 0, [], 0, 0
    while i < len(text):
        if text[i] in "([{":
            depth += 1
        elif text[i] in ")]}":
            depth -= 1
        elif depth == 0 and (match := separator.match(text, i)) and match.end() > i:
            parts.append(text[begin:i].strip())
            begin = i = match.end()
            continue
        i += 1
    return [*parts, text[begin:].strip()]


def _sign(character: str) -> str:
    if character < "\x7f":
        return character
    if character in _SIGNS:
        return _SIGNS[character]
    if unicodedata.category(character) == "No":  # vulgar fractions: ½ is 1⁄2
        top, slash, bottom = unicodedata.normalize("NFKC", character).partition("\u2044")
        return rf"\frac{{{top}}}{{{bottom}}}" if slash else character
    return " " if character.isspace() else character


def _shifted(match: re.Match[str]) -> str:
    """A run of raised or lowered digits as one exponent or index: 10¹² is 10^{12}, not 10^1^2."""
    run = match[0].translate(_LEVEL)
    return ("^" if match[1] else "_") + (run if len(run) == 1 else f"{{{run}}}")


def _unwrapped(text: str) -> str:
    before = None
    while text != before:
        before = text
        text = _without_tail(text)
        for left, right in _WRAPPERS:
            inner = text[len(left) : len(text) - len(right)]
            if _wraps(text, left, right) and right not in inner and not inner.endswith("\\"):
                text = inner
        for head in _HEADS:
            if text.startswith(head) and closing(text, len(head) - 1) == len(text) - 1:
                text = text[len(head) : -1]
    return text


def _without_tail(text: str) -> str:
    """No white space at the ends, and neither punctuation nor the spaces of LaTeX (`\\,`) after it."""
    text = text.strip()
    while text.endswith((".", ",", ";", ":", "!", "\\")):
        escaped = (len(text) - 1 - len(text[:-1].rstrip("\\"))) % 2 == 1
        if escaped and text[-1] in ",;:!":
            text = text[:-2].rstrip()
        elif not escaped and text[-1] in ".,;\\" and not text.endswith("..."):
            text = text[:-1].rstrip()
        else:
            break
    return text


def _wraps(text: str, left: str, right: str) -> bool:
    return text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right)
