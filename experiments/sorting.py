"""Digits to be sorted: `7291=` is answered by `1279`. The number of digits is the length of the answer."""

from __future__ import annotations

import random
from collections.abc import Iterator


def problems(digits: int, seed: int, size: int) -> Iterator[dict[str, str]]:
    """Rows: `digits` digits, and the same in order."""
    numbers = random.Random(seed)
    for _ in range(size):
        row = "".join(str(numbers.randrange(10)) for _ in range(digits))
        yield {"prompt": f"{row}=", "answer": "".join(sorted(row))}
