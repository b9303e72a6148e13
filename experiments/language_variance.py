"""The question of gradient_variance.py, of a language model in float32 on a GPU.

    python experiments/language_variance.py
    python experiments/language_variance.py --draw

Run from the repository's folder. The model goes on with additions after some that are solved; gradients are sketched.
Writes docs/evidence/language_variance.jsonl and .png.
"""

from __future__ import annotations

import random
from pathlib import Path

from common import EVIDENCE, SEEDS, Plan, main, read, side_by_side, write
from gradient_variance import ARMS, Ground, measure, moved
from gradient_variance_numbers import draw, measured_rows, print_table
from language_model import MODEL
from sums import problem, solved

SHOWN = 8
"""Solved additions before the first of a response: with fewer the model often turns to something else."""
GROUPS = {32: 12, 128: 12, 512: 8, 2048: 8}
"""Resampled groups by length."""
STEPS = {"near": (2, 1e-5), "far": (20, 2e-5)}
"""Steps on batches of their own between the old policy and the current one, and their learning rate."""
WIDTH = 2**21
"""Numbers that a gradient of 135 million is sketched to: a product of two is then off by 0.0007 of their lengths."""
SETTINGS = {
    "model.dtype": "float32",
    "model.kernels": "torch",
    "data.parameters": {"seed": 1, "size": 4000, "shown": SHOWN},
    "rollout.max_prompt_tokens": 128,
    "rollout.max_response_tokens": 64,
    "training.minibatches": 1,
    "training.micro_batch_tokens": 8192,
    "checkpoint.keep": 1,
}


def run(output: Path, model: str) -> None:
    """A seed is a set of batches and samples; the old policy is the same model in all."""
    plan = Plan("experiments/sums.toml", output / "language_variance", SETTINGS, model=model)
    numbers = random.Random(0)
    ground = Ground(plan, solved(numbers, SHOWN) + problem(numbers)[0], STEPS, GROUPS, WIDTH)
    side_by_side(moved, [(ground, model, seed) for seed in SEEDS])
    jobs = [(ground, model, seed, length) for length in sorted(GROUPS, reverse=True) for seed in SEEDS]
    side_by_side(measure, jobs, at_once=6)  # a process takes up to 43 GB
    write("language_variance", measured_rows(plan.folder, SEEDS, list(GROUPS), [arm.name for arm in ARMS]))


def show() -> None:
    """The figure, and on standard output the tables."""
    rows = read("language_variance")
    draw(rows, EVIDENCE / "language_variance.png")
    print_table(rows)


if __name__ == "__main__":
    main(str(__doc__), run, show, MODEL)
