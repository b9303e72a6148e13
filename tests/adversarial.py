"""Answers that a model should not have written: random, malformed, and made to hang or burst."""

import random

TOWERS = [
    "9^{9^{9^{9}}}",
    "9^9^9^9",
    "10^{10^{10}}",
    "((((9!)!)!)!)!",
    "100000000!",
    r"\binom{10^9}{5\cdot 10^8}",
    r"2^{2^{2^{2^{2^{2}}}}} \mod 7",
    r"\sum_{k=1}^{10^{9}} \frac{1}{k^2}",
    r"\int_0^1 \sin(e^{e^{x}}) \cos(x^x) dx",
    "(x+y+z+a+b+c)^{200}",
    r"1" + r"0" * 1900 + "!",
]
"""Each costs its limit, or is refused at once."""

NESTED = [
    "{" * 900 + "1" + "}" * 900,
    "(" * 900 + "1" + ")" * 900,
    r"\frac{1}{" * 150 + "2" + "}" * 150,
    r"\sqrt{" * 250 + "2" + "}" * 250,
    "-" * 1900 + "1",
    r"\text{" * 300 + "a" + "}" * 300,
    "[" * 700 + "," * 5 + "]" * 700,
    "x^{" * 400 + "2" + "}" * 400,
    "1+" * 900 + "1",
    "1," * 900 + "1",
    r"\pm" * 500 + "1",
]
MEGABYTE = "9" * 1_000_000
PIECES = [
    *"0123456789xyzabci+-*/^_=<>()[]{}|,.;:!%$&# ~'\"\\\n\t\x00",
    *(r"\frac{", r"\sqrt{", r"\text{", r"\boxed{", r"\begin{pmatrix}", r"\end{pmatrix}", r"\\", r"\pm", r"\cup", r"\infty"),
    *(
        r"\left(",
        r"\right)",
        r"\sin",
        r"\log_",
        r"\pi",
        r"\cdot",
        r"\le",
        r"\in",
        r"^\circ",
        r"\int_0^1",
        r"\sum_{k=1}^{5}",
    ),
    *(
        "½",
        "²",
        "−",
        "∞",
        "𝟘",
        "\u202e",
        "\ud800",
        "é",
        "数",
        "🙂",
        "nan",
        "inf",
        "None",
        "__import__('os')",
        "1e9",
        "0x10",
    ),
]
ORDINARY = ["7", "1/2", r"\frac{3}{4}", "0.25", "(1, 2)", "x = 5", r"2\sqrt{3}", "x^2+1", r"5\%", "even", r"[1, 2)", "3:30"]


def answers(number: int, seed: int, hanging: int) -> list[str]:
    """That many answers, `hanging` of them towers: ordinary ones, ones with a few faults, and noise."""
    dice = random.Random(seed)
    made = [dice.choice(TOWERS) for _ in range(hanging)] + NESTED + [MEGABYTE]
    while len(made) < number:
        kind = dice.random()
        if kind < 0.3:
            made.append(dice.choice(ORDINARY))
        elif kind < 0.6:
            made.append(_mutated(dice, dice.choice(ORDINARY)))
        else:
            made.append("".join(dice.choices(PIECES, k=dice.randint(1, 30))))
    dice.shuffle(made)
    return made


def _mutated(dice: random.Random, text: str) -> str:
    for _ in range(dice.randint(1, 4)):
        i = dice.randint(0, len(text))
        text = text[:i] + dice.choice([*PIECES, ""]) + text[i + dice.randint(0, 1) :]
    return text
