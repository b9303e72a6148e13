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

from common import SEARCH_SEED, SEEDS, Plan, Rows, main, read, score, side_by_side, sorting, write
from routing_replay import ARMS, of_range, picture, print_tables, pushed, ranges, trial

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
RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
"""Of the search, which is a boundary too."""
SEARCH_STEPS, STEPS = 28, 55
MINIBATCHES = 4
MORE_MINIBATCHES = (8, 16)
"""Of further runs of each arm at its own rate, SEARCH_STEPS long: eight samples a minibatch at 16."""
BOUNDARY = ((1e-4, 4), (1e-4, 8), (1e-4, 16), (3e-4, 4))
"""Learning rates and minibatches at which every arm is pushed at every seed, for SEARCH_STEPS steps."""
DRAWN = BOUNDARY[1:3]
"""Those of them that are drawn."""


def run(output: Path) -> None:
    """Cold starts; the comparison; the same with more minibatches; all pushed; then own ranges."""
    plan, seeds = sorting(DIGITS, output), (SEARCH_SEED, *SEEDS)
    plan = Plan(plan.recipe, output / "deep_mixture", {**plan.settings, **DECODER})
    starts = dict(zip(seeds, side_by_side(plan.start, [(seed,) for seed in seeds]), strict=True))
    chosen, rows = compared(plan, starts, RATES, SEARCH_STEPS, STEPS)

    def everywhere(rate: Mapping[str, float], minibatches: int) -> list[list[dict[str, Any]]]:
        return side_by_side(
            trial, [(plan, arm, s, rate[arm], minibatches, SEARCH_STEPS, starts[s]) for s in SEEDS for arm in ARMS]
        )

    for number in MORE_MINIBATCHES:
        rows += [row for some in everywhere(chosen, number) for row in some]
    for rate, number in BOUNDARY:
        rows += [row for some in everywhere(dict.fromkeys(ARMS, rate), number) for row in pushed(some)]
    rows += own_ranges(plan, starts, chosen, SEARCH_STEPS)
    write("deep_mixture", rows)


def own_ranges(plan: Plan, starts: Mapping[int, str], chosen: Mapping[str, float], steps: int) -> list[Mapping[str, Any]]:
    """Rows of `ranges`, all of so many steps, and of the authors' range at all seeds where another was chosen."""

    def trials(what: str, jobs: Sequence[tuple]) -> list[Rows]:
        found = side_by_side(trial, [(plan, *job[:-1], starts[job[1]], job[-1]) for job in jobs])
        return [of_range(some, what, job[-1]) for job, some in zip(jobs, found, strict=True)]

    rows = ranges(trials, chosen, MINIBATCHES, steps, steps)
    other = {row["arm"] for row in rows if row["what"] == "range chosen" and row["scale"] != 1}
    jobs = [(arm, seed, chosen[arm], MINIBATCHES, steps, 1.0) for arm in ARMS if arm in other for seed in SEEDS]
    return rows + [row for some in trials("range authors'", jobs) for row in some]


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
    rows = read("deep_mixture")
    print_tables(rows)
    picture("deep_mixture", rows, DRAWN)


if __name__ == "__main__":
    main(str(__doc__), run, draw)
