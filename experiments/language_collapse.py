"""The question of collapse.py, of a language model in bfloat16 on a GPU.

    python experiments/language_collapse.py
    python experiments/language_collapse.py --draw

Run from the repository's folder. The recipe's model learns the recipe's task while the learning rate rises from step to
step until it falls, then starts again from before. A rate that is too high from the start undoes the model within eight
steps, before there is anything to come back to. Eighteen runs go side by side; their checkpoints take about 30 GB of disk.
Writes docs/evidence/language_collapse.jsonl and .png.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from collapse import OTHER, again, checkpoints, collapsed_at, model_at, picture, settings
from common import SEARCH_SEED, SEEDS, Plan, labelled, main, metrics, side_by_side, write
from language_model import MODEL, RECIPE, SETTINGS

RATES = (4e-4, 8e-4, 1.6e-3)
"""Reached in the last step; from the lowest up, the first that collapses at the search's seed is taken."""
STEPS, AGAIN = 40, 20
"""Of the runs that collapse, and of those that start again."""
MINIBATCHES = 4
"""Of a step, the recipe's: the rate rises with each."""
EVERY = 8
"""Steps between checkpoints, of 2 GB each; the search keeps none."""


def run(output: Path, model: str) -> None:
    """All rates at the search's seed; the lowest that collapses, at every seed; new starts from everywhere."""
    plan = Plan(RECIPE, output / "language_collapse", SETTINGS, model=model)
    jobs = [(plan, rate, SEARCH_SEED) for rate in RATES]
    searched = side_by_side(provoked, jobs)
    rows = [row for some in searched for row in labelled_as("search", some)]
    rate = next((some[0]["rate"] for some in searched if some[0]["fallen"]), RATES[-1])
    found = side_by_side(provoked, [(plan, rate, seed) for seed in SEEDS])
    rows += [row for some in found for row in labelled_as("provoked", some)]
    write("language_collapse", rows)
    jobs = [
        (plan, rate, seed, some[0]["fallen"], when, step, change)
        for seed, some in zip(SEEDS, found, strict=True)
        for when, step in some[0]["starts"].items()
        for change in OTHER
    ]
    rows += [row for some in side_by_side(started_again, jobs, at_once=18) for row in some] if jobs else []
    write("language_collapse", rows)


def name_of(rate: float) -> str:
    """Of the runs that are provoked with that rate in the last step."""
    return f"provoke-lr{rate:g}"


def provoked(plan: Plan, rate: float, seed: int) -> list[dict[str, Any]]:
    """The rows of a run whose rate rises, with the step at which it fell and those to start again from."""
    rising = {**settings(rate, 1, STEPS), "training.warmup_updates": STEPS * MINIBATCHES}
    kept = {"checkpoint.every": None if seed == SEARCH_SEED else EVERY, "checkpoint.keep": STEPS, "evaluation.every": 10}
    folder = plan.run(name_of(rate), seed, {**rising, "training.minibatches": MINIBATCHES, **kept})
    fallen = collapsed_at(metrics(folder))
    starts = checkpoints(metrics(folder), fallen, EVERY) if fallen else {}
    return labelled(folder, rate=rate, seed=seed, fallen=fallen, starts=starts)


def labelled_as(what: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that say what they are of."""
    return [{"what": what, **{key: value for key, value in row.items() if key != "starts"}} for row in rows]


def started_again(
    plan: Plan, rate: float, seed: int, fallen: int, when: str, step: int, change: str
) -> list[dict[str, Any]]:
    """The rows of one new start, at the rate at which the run had fallen or a part of it, constant."""
    reached = rate * fallen / STEPS
    folder = plan.folder / f"{name_of(rate)}-seed{seed}"
    run = again(plan, model_at(folder, step), when, change, reached, seed, AGAIN)
    return labelled(run, what="again", rate=reached, seed=seed, since=when, at=step, change=change)


def draw() -> None:
    """The figure, and on standard output the tables."""
    picture("language_collapse", "provoked: learning rate rising to")


if __name__ == "__main__":
    main(str(__doc__), run, draw, MODEL)
