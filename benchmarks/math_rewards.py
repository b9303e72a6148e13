"""Short answers a second through the `math` reward, all of it: boxes found, workers asked, scores made.

    python benchmarks/math_rewards.py [workers]

Three loads. `distinct`: no answer occurs twice, none has been seen: what the workers do. `groups`: 8 answers to each
prompt, of which models give about three different ones: what training sees. `algebra`: distinct ones that all go through
math-verify. Prints answers a second on the clock, and CPU seconds of this process and its workers.
"""

from __future__ import annotations

import os
import random
import sys
import time

import numpy as np
import psutil

from gspo.config import MathReward
from gspo.rewards import Built, build, score
from gspo.types import Completion, Prompt, Sample

NUMBER = 3000
WARM = 400
"""Answers before the clock starts: workers have started then, and antlr's tables of LaTeX are filled."""

SHAPES = (
    ("{a}", "{b}"), ("{a},{c}00", "{a}{c}00"), (r"\frac{{{a}}}{{{b}}}", "{a}/{b}"), ("0.{a}", r"\frac{{{b}}}{{7}}"),
    ("({a}, {b})", r"\left({a},{b}\right)"), ("x = {a}", "{a}"), (r"{a}\sqrt{{{c}}}", r"\sqrt{{{b}}}"),
    (r"{a}\text{{ cm}}", "{a}"), ("x^2 + {a}x", "x(x + {b})"), (r"[{a}, \infty)", r"x \ge {a}"),
)  # fmt: skip
"""Gold answer and answer: seven kinds in ten are read without math-verify, as of the answers of GSM8K and MATH."""
ALGEBRA = (
    (r"{a}\sqrt{{{c}}} + {b}", r"{b} + {a}\sqrt{{{c}}}"),
    ("x^2 + {a}x + {b}", "x(x + {a}) + {b}"),
    (r"\frac{{{a}\pi}}{{{c}}}", r"{a}\pi/{c}"),
)


def samples(shapes: tuple[tuple[str, str], ...], dice: random.Random, copies: int) -> list[Sample]:
    completion = Completion(np.zeros(1, np.int64), np.zeros(1, np.float32), "stop", 0, 0)
    made = []
    while len(made) < NUMBER:
        numbers = {"a": dice.randint(100, 99999), "b": dice.randint(100, 99999), "c": dice.randint(2, 9)}
        gold, answer = (form.format(**numbers) for form in dice.choice(shapes))
        prompt = Prompt(len(made), None, "?", (1,), gold, {}, f"r{len(made)}")
        texts = [answer, gold, "0"] * copies if copies > 1 else [answer]
        made += [
            Sample(f"s/{prompt.id}/{i}", prompt, completion, rf"So \boxed{{{t}}}.") for i, t in enumerate(texts[:copies])
        ]
    return made


def cpu() -> float:
    me = psutil.Process()
    return sum(sum(p.cpu_times()[:2]) for p in [me, *me.children()])


def measure(name: str, built: list[Built], load: list[Sample]) -> None:
    start, used = time.perf_counter(), cpu()
    scored = score(built, load)
    took, used = time.perf_counter() - start, cpu() - used
    right = sum(s.total or 0 for s in scored) / len(scored)
    print(f"{name:9} {len(load) / took:7,.0f} a second; {used / len(load) * 1e3:.2f} ms of CPU each; {right:.0%} equal")


def main(num_workers: int = 2) -> None:
    built, dice = build([MathReward(num_workers=num_workers)]), random.Random(0)
    for shapes in (SHAPES, ALGEBRA):
        score(built, samples(shapes, dice, 1)[:WARM])
    print(f"{num_workers} workers, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}, {NUMBER:,} answers each")
    measure("distinct", built, samples(SHAPES, dice, 1))
    measure("groups", built, samples(SHAPES, dice, 8))
    measure("algebra", built, samples(ALGEBRA, dice, 1))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
