"""The question of routing_replay.py, of a mixture fifteen times as large, twice as deep, with longer answers, on GPUs.

    python experiments/deep_mixture.py
    python experiments/deep_mixture.py --draw

Run from the repository's folder. All runs of a phase go side by side, a process each, over all GPUs that are visible; a GPU
holds a dozen of them. Writes docs/evidence/deep_mixture.jsonl and .png.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import SEARCH_SEED, SEEDS, Plan, main, score, side_by_side, sorting, write
from routing_replay import ARMS, picture, trial

DIGITS = 16
DECODER = {
    "model.dtype": "bfloat16",
    "model.kernels": "torch",
    "model.head_dtype": "float32",
    "model.create.num_layers": 48,
    "model.create.hidden_size": 128,
    "model.create.num_experts": 64,
    "model.create.experts_per_token": 8,
    "model.create.moe_intermediate_size": 64,
    "cold_start.learning_rate": 1e-3,
}
"""78 million parameters, of which a token meets a sixth. Layers uncompiled: compiling takes as long as a run."""
RATES = (3e-5, 1e-4, 3e-4, 1e-3)
"""Of the search, which is the boundary too."""
SEARCH_STEPS, STEPS = 28, 55
MINIBATCHES = 4


def run(output: Path) -> None:
    """Cold starts, then the comparison."""
    plan, seeds = sorting(DIGITS, output), (SEARCH_SEED, *SEEDS)
    plan = Plan(plan.recipe, output / "deep_mixture", {**plan.settings, **DECODER})
    starts = dict(zip(seeds, side_by_side(plan.start, [(seed,) for seed in seeds]), strict=True))
    write("deep_mixture", compared(plan, starts, RATES, SEARCH_STEPS, STEPS))


def compared(
    plan: Plan, starts: Mapping[int, str], rates: Sequence[float], search_steps: int, steps: int
) -> list[dict[str, Any]]:
    """Rows of the search, each arm at each rate, then of each arm at its own rate at all seeds. starts: models by seed."""
    searched = [
        (plan, arm, SEARCH_SEED, rate, MINIBATCHES, search_steps, starts[SEARCH_SEED]) for arm in ARMS for rate in rates
    ]
    found = side_by_side(trial, searched)
    scores = {(job[1], job[3]): score(some) for job, some in zip(searched, found, strict=True)}
    chosen = {arm: max(rates, key=lambda rate, arm=arm: scores[arm, rate]) for arm in ARMS}
    wanted = [(plan, arm, s, chosen[arm], MINIBATCHES, steps, starts[s]) for s in SEEDS for arm in ARMS]
    return [row for some in (*found, *side_by_side(trial, wanted)) for row in some]


def draw() -> None:
    """The figure, and on standard output the tables."""
    picture("deep_mixture", RATES, (MINIBATCHES,))


if __name__ == "__main__":
    main(str(__doc__), run, draw)
