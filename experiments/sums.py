"""Endless additions, `7+5=12 8+6=14 ...`: rows, reward, and a policy that imitates them. See sums.toml."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gspo.types import Sample, Trajectory

SHORT, LONG, LONG_UPDATES = 512, 2112, 80
"""Tokens of a window to imitate: the last updates are on long ones, so that the policy knows distances past 2,048."""


def problem(numbers: random.Random) -> tuple[str, str]:
    """Two digits to add, and their sum."""
    a, b = numbers.randrange(10), numbers.randrange(10)
    return f"{a}+{b}=", str(a + b)


def problems(seed: int, size: int, shown: int = 0):
    """Rows with a first problem each, after `shown` that are solved."""
    numbers = random.Random(seed)
    for _ in range(size):
        yield {"prompt": solved(numbers, shown) + problem(numbers)[0]}


def solved(numbers: random.Random, count: int) -> str:
    """So many right additions."""
    return "".join("".join(problem(numbers)) + " " for _ in range(count))


def stream(numbers: random.Random, length: int) -> str:
    """`length` characters of right additions."""
    text = ""
    while len(text) < length:
        text += "".join(problem(numbers)) + " "
    return text[:length]


def right(addition: str) -> bool:
    """Whether a piece of text is a right addition, written as in `stream`."""
    left, equal, total = addition.partition("=")
    terms = left.split("+")
    if not equal or len(terms) != 2 or not all(part.isdigit() for part in (*terms, total)):
        return False
    return int(terms[0]) + int(terms[1]) == int(total)


def right_share(samples: Sequence[Sample]) -> list[float]:
    """Of the additions in prompt and response that a space ends, the share that is right; 0 where there is none."""
    pieces = [(s.prompt.text + s.text).split(" ")[:-1] for s in samples]
    return [sum(map(right, some)) / len(some) if some else 0.0 for some in pieces]


def imitated(seed: int, folder: Path) -> Path:
    """A policy that imitates streams, saved in `folder` unless it is there already."""
    from gspo.cold_start import imitate
    from gspo.recipe import load
    from gspo.training.optimizer import Optimizer
    from gspo.training.policy import load_policy

    if (folder / "config.json").exists():
        return folder
    config, numbers = load("experiments/sums.toml"), random.Random(f"streams {seed}")
    table = config.cold_start
    assert table is not None
    policy = load_policy(config.model, temperature=1.0, seed=seed)
    optimizer = Optimizer(policy.trainable, table, table.steps, policy.dtype)
    for update in range(table.steps):
        length = LONG if update >= table.steps - LONG_UPDATES else SHORT
        texts = [stream(numbers, length) for _ in range(table.batch_size * SHORT // length)]
        loss, _ = imitate(policy, optimizer, [_example(policy.tokenizer, text) for text in texts])
        if update % 50 == 0 or update == table.steps - 1:
            print(f"imitation, seed {seed}, update {update}: {loss:.3f} nats a token", flush=True)
    policy.save(folder)
    return folder


def _example(tokenizer, text: str) -> Trajectory:
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
    trained = np.arange(len(ids)) > 0
    return Trajectory(text[:20], text[:20], ids, trained, np.zeros(len(ids) - 1, np.float32), 0.0)
