"""The clip range that clips a set share of responses, by their length and the learning rate, and what it does to learning.

    python experiments/clip_range.py
    python experiments/clip_range.py --draw

Run from the repository's folder. Writes docs/evidence/clip_range.jsonl and clip_range.png.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import (
    EVIDENCE,
    METHODS,
    SEEDS,
    TARGET,
    Rows,
    band,
    by_run,
    labelled,
    last,
    main,
    mean,
    read,
    score,
    search,
    shown,
    smooth,
    sorting,
    table,
    write,
)

LENGTHS = (8, 24, 3)
"""Digits to sort. The runs on 8 are those of clipped_shares."""
ARMS = {"authors' range": False, "calibrated range": True}


def run(output: Path) -> None:
    """At each length: calibrate at each rate, choose each arm's rate, compare the two."""
    rows: list[dict[str, Any]] = []
    for digits in LENGTHS:
        plan, choices = sorting(digits, output), {}
        for arm, calibrated in ARMS.items():
            choices[arm], found = search(plan, METHODS["gspo"], calibrated=calibrated)
            rows += [{"digits": digits, "arm": arm, **row} for row in found]
        for seed in SEEDS:
            for arm, choice in choices.items():
                folder = plan.run(choice.name, seed, choice.settings)
                rate = choice.settings["training.learning_rate"]
                rows += labelled(folder, what="run", digits=digits, arm=arm, seed=seed, rate=rate)
            write("clip_range", rows)


# ---- what the rows say ------------------------------------------------------------------------------------

COLUMNS: dict[str, Callable[[Rows], float]] = {
    "held-out pass@1": lambda rows: last(rows, "evaluation/pass@1"),
    "training reward, last 20 steps": score,
    "training reward, all steps": lambda rows: mean(rows, "reward/mean"),
    "clipped sequences": lambda rows: mean(rows, "clip/sequence"),
    "response tokens": lambda rows: mean(rows, "rollout/response_tokens_mean"),
}
"""What is told of each run; intervals are over seeds."""


def chosen_ranges(rows: Rows) -> dict[int, list[tuple[float, float]]]:
    """By digits, (learning rate, upper clip range that the calibration chose)."""
    found = [row for row in rows if row["what"] == "search" and row["arm"] == "calibrated range"]
    return {
        digits: [(row["rate"], row["scale"] * METHODS["gspo"].high) for row in found if row["digits"] == digits]
        for digits in sorted(LENGTHS)
    }


def draw() -> None:
    """The figure, and on standard output the tables."""
    from matplotlib.figure import Figure

    rows = read("clip_range")
    runs = by_run([row for row in rows if row["what"] == "run"], "digits", "arm", "seed")
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    first, *others = figure.subplots(2, 2).flat
    for digits, points in chosen_ranges(rows).items():
        first.plot(*zip(*points, strict=True), marker="o", label=f"{digits + 1} tokens")
    first.axhline(METHODS["gspo"].high, color="grey", linestyle=":", label="the authors'")
    first.set(
        xscale="log", yscale="log", xlabel="learning rate", ylabel="upper clip range", title=f"range that clips {TARGET}"
    )
    first.legend(frameon=False, fontsize=8)
    for axis, digits in zip(others, sorted(LENGTHS), strict=True):
        for arm, colour in zip(ARMS, ("tab:blue", "tab:orange"), strict=True):
            mine = [
                smooth(run, "reward/mean") for (length, name, _), run in runs.items() if (length, name) == (digits, arm)
            ]
            band(axis, mine, label=f"{arm}, {len(mine)} seeds", colour=colour)
        axis.set(
            xlabel="step", ylabel="training reward", title=f"{digits + 1} tokens, each arm at its chosen rate", ylim=(0, 1)
        )
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(EVIDENCE / "clip_range.png", dpi=110)
    for row in rows:
        if row["what"] != "run" and row["arm"] != "authors' range":
            print({key: value for key, value in row.items() if key not in ("arm", "objective")})
    for digits in sorted(LENGTHS):
        print_table(digits, {(arm, seed): run for (length, arm, seed), run in runs.items() if length == digits})


def print_table(digits: int, runs: dict[tuple[str, int], Rows]) -> None:
    """Both arms at one length, and the difference seed by seed."""
    first, second = ARMS
    seeds = [seed for arm, seed in runs if arm == first]
    print(f"{digits} digits, rates", {arm: run[0]["rate"] for (arm, _), run in runs.items()})
    print(table(ARMS, COLUMNS, lambda arm, value: shown([value(runs[arm, seed]) for seed in seeds])))
    by_seed = [(runs[second, seed], runs[first, seed]) for seed in seeds]
    print(table(["calibrated - authors'"], COLUMNS, lambda _, value: shown([value(a) - value(b) for a, b in by_seed])))


if __name__ == "__main__":
    main(str(__doc__), run, draw)
