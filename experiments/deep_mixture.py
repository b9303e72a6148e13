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
from routing_replay import ARMS, picture, pushed, trial

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
    "checkpoint.every": None,
}
"""78 million parameters, of which a token meets a sixth. Layers uncompiled: compiling takes as long as a run. No
checkpoints: each would take a gigabyte, and none is started from."""
RATES = (3e-5, 1e-4, 3e-4, 1e-3)
"""Of the search, which is a boundary too."""
LOWER_RATES = (1e-5, 3e-5)
"""Of fewer steps at the search's seed: whether the lowest rate is too low shows in what is learnt at first."""
SEARCH_STEPS, STEPS, LOWER_STEPS = 28, 55, 14
MINIBATCHES = 4
MORE_MINIBATCHES = (8, 16)
"""Of further runs of each arm at its own rate, SEARCH_STEPS long: eight samples a minibatch at 16."""
BOUNDARY = ((1e-4, 4), (1e-4, 8), (1e-4, 16))
"""Learning rates and minibatches at which every arm is pushed at every seed, for SEARCH_STEPS steps."""
DRAWN = BOUNDARY[1:]
"""Those of them that are drawn."""


def run(output: Path) -> None:
    """Cold starts; the comparison; the same with more minibatches; then all pushed."""
    plan, seeds = sorting(DIGITS, output), (SEARCH_SEED, *SEEDS)
    plan = Plan(plan.recipe, output / "deep_mixture", {**plan.settings, **DECODER})
    starts = dict(zip(seeds, side_by_side(plan.start, [(seed,) for seed in seeds]), strict=True))
    chosen, rows = compared(plan, starts, RATES, SEARCH_STEPS, STEPS)

    def everywhere(rate: Mapping[str, float], minibatches: int) -> list[list[dict[str, Any]]]:
        return side_by_side(
            trial, [(plan, arm, s, rate[arm], minibatches, SEARCH_STEPS, starts[s]) for s in SEEDS for arm in ARMS]
        )

    low = [(plan, arm, SEARCH_SEED, r, MINIBATCHES, LOWER_STEPS, starts[SEARCH_SEED]) for r in LOWER_RATES for arm in ARMS]
    found = [row | {"what": "lower rate"} for some in side_by_side(trial, low) for row in some]
    rows += [row for row in found if row["step"] <= LOWER_STEPS]
    for number in MORE_MINIBATCHES:
        rows += [row for some in everywhere(chosen, number) for row in some]
    for rate, number in BOUNDARY:
        rows += [row for some in everywhere(dict.fromkeys(ARMS, rate), number) for row in pushed(some)]
    write("deep_mixture", rows)


def compared(
    plan: Plan, starts: Mapping[int, str], rates: Sequence[float], search_steps: int, steps: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Each arm's rate, the best of its search; and rows of the search, each arm at each rate, then of each arm at its own
    rate at all seeds. starts: models by seed."""
    searched = [
        (plan, arm, SEARCH_SEED, rate, MINIBATCHES, search_steps, starts[SEARCH_SEED]) for arm in ARMS for rate in rates
    ]
    found = side_by_side(trial, searched)
    scores = {(job[1], job[3]): score(some) for job, some in zip(searched, found, strict=True)}
    chosen = {arm: max(rates, key=lambda rate, arm=arm: scores[arm, rate]) for arm in ARMS}
    wanted = [(plan, arm, s, chosen[arm], MINIBATCHES, steps, starts[s]) for s in SEEDS for arm in ARMS]
    return chosen, [row for some in (*found, *side_by_side(trial, wanted)) for row in some]


def draw() -> None:
    """The figure, and on standard output the tables."""
    picture("deep_mixture", RATES, (MINIBATCHES, *MORE_MINIBATCHES), DRAWN)


if __name__ == "__main__":
    main(str(__doc__), run, draw)
