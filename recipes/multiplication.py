"""Problems for recipes/smollm2.toml: every product of two numbers from 2 to 12, split once into training and held-out.

Pairs are ordered: 3*7 may be held out while 7*3 is trained.
"""

import random


def problems(part, held_out=24):
    """Rows with columns a, b and answer; part is "train" or "test". The split is always the same."""
    pairs = [(a, b) for a in range(2, 13) for b in range(2, 13)]
    random.Random(0).shuffle(pairs)
    chosen = pairs[:held_out] if part == "test" else pairs[held_out:]
    return [{"a": a, "b": b, "answer": str(a * b)} for a, b in chosen]
