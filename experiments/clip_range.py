"""The clip range that clips a set share of responses, by their length and the learning rate, and what it does to learning.

    python experiments/clip_range.py
    python experiments/clip_range.py --draw

Run from the repository's folder. Writes docs/evidence/clip_range.jsonl and clip_range.png.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from common import (
    EVIDENCE,
    METHODS,
    SEEDS,
    TARGET,
    Plan,
    Rows,
    band,
    by_run,
    calibrate,
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
    trial,
    write,
)

from gspo.reporting.seeds import seed_interval

LENGTHS = (3, 8, 24)
"""Digits to sort, at which the range is calibrated."""
TRAINED = (8, 3, 24)
"""Those at which training is compared. The runs on 8 are those of clipped_shares."""
RATES = (3e-5, 1e-4, 3e-4)
"""Of the calibration. Training is compared at the better of the last two; ten times the second one collapses."""
WIDEST = 1024
"""Factor on the authors' range from which the calibration goes no further: 0.4, where nothing is clipped."""
ARMS = {"authors' range": False, "calibrated range": True}


def around_target(plan: Plan, rate: float, seed: int) -> list[dict[str, Any]]:
    """The calibration's trials, and wider ranges until one clips less than TARGET."""
    _, trials = calibrate(plan, METHODS["gspo"], rate, seed)
    while min(t["share"] for t in trials) > TARGET and trials[-1]["scale"] < WIDEST:
        trials.append(trial(plan, METHODS["gspo"], rate, trials[-1]["scale"] * 4, seed))
    return [{**t, "what": "range"} for t in trials]


def range_trials(plans: dict[int, Plan]) -> list[dict[str, Any]]:
    """Trials at every length, rate and seed."""
    places = [(digits, plan, rate, seed) for digits, plan in plans.items() for rate in RATES for seed in SEEDS]
    return [{"digits": digits, **row} for digits, plan, rate, seed in places for row in around_target(plan, rate, seed)]


def run(output: Path) -> None:
    """Calibrate everywhere; then, a length after the other, choose each arm's rate and compare the two."""
    plans = {digits: sorting(digits, output) for digits in LENGTHS}
    rows = range_trials(plans)
    for digits in TRAINED:
        plan, choices = plans[digits], {}
        for arm, calibrated in ARMS.items():
            choices[arm], found = search(plan, METHODS["gspo"], calibrated=calibrated, rates=RATES[1:])
            rows += [{"digits": digits, "arm": arm, **row} for row in found if row["what"] == "search"]
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


def range_at_target(trials: Rows) -> float | None:
    """The upper clip range that clips a share of TARGET, between the two trials next to it by the logarithms; None where no
    trial is on one of its sides."""
    points = sorted((t["scale"], t["share"]) for t in trials)
    pairs = [(a, b) for a, b in pairwise(points) if a[1] > TARGET >= b[1]]
    if not pairs:
        return None
    (x0, y0), (x1, y1) = ((math.log(x), math.log(max(y, 1e-4))) for x, y in pairs[0])
    return METHODS["gspo"].high * math.exp(x0 + (x1 - x0) * (math.log(TARGET) - y0) / (y1 - y0))


def ranges(rows: Rows) -> dict[int, dict[float, list[float]]]:
    """By digits and learning rate, the upper range at the target of each seed, less what no trial reached."""
    out: dict[int, dict[float, list[float]]] = {digits: {rate: [] for rate in RATES} for digits in LENGTHS}
    trials = by_run([row for row in rows if row["what"] == "range"], "digits", "rate", "seed")
    for (digits, rate, _), some in trials.items():
        if (found := range_at_target(some)) is not None:
            out[digits][rate].append(found)
    return out


def geometric(values: list[float]) -> str:
    """Mean and Student's 95% interval over seeds of the logarithms, as ranges."""
    if len(values) < 2:
        return ", ".join(f"{v:.4f}" for v in values) or "none"
    middle, low, high = (math.exp(x) for x in seed_interval([math.log(v) for v in values]))
    return f"{middle:.4f} [{low:.4f}, {high:.4f}], {len(values)} seeds"


def draw() -> None:
    """The figure, and on standard output the tables."""
    from matplotlib.figure import Figure

    rows = [{"machine": 1, **row} for row in read("clip_range")]
    runs = by_run([row for row in rows if row["what"] == "run"], "digits", "arm", "machine", "seed")
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    first, *others = figure.subplots(1, 1 + len(TRAINED))
    found = ranges(rows)
    for digits, colour in zip(LENGTHS, ("tab:blue", "tab:orange", "tab:green"), strict=True):
        points = [[(rate, one) for one in by_seed] for rate, by_seed in found[digits].items()]
        middle = [(some[0][0], math.exp(fmean(math.log(y) for _, y in some))) for some in points if some]
        first.plot(*zip(*middle, strict=True), color=colour, label=f"{digits + 1} tokens")
        first.scatter(*zip(*[p for some in points for p in some], strict=True), s=14, color=colour)
    first.axhline(METHODS["gspo"].high, color="grey", linestyle=":", label="the authors'")
    first.set(
        xscale="log", yscale="log", xlabel="learning rate", ylabel="upper clip range", title=f"range that clips {TARGET}"
    )
    first.minorticks_off()
    first.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    first.legend(frameon=False, fontsize=8)
    for axis, digits in zip(others, sorted(TRAINED), strict=True):
        for arm, colour in zip(ARMS, ("tab:blue", "tab:orange"), strict=True):
            mine = [
                smooth(run, "reward/mean") for (length, name, *_), run in runs.items() if (length, name) == (digits, arm)
            ]
            band(axis, mine, label=f"{arm}, {len(mine)} runs", colour=colour)
        axis.set(xlabel="step", ylabel="training reward", title=f"{digits + 1} tokens", ylim=(0, 1))
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(EVIDENCE / "clip_range.png", dpi=110)
    print(table(map(str, LENGTHS), {f"{r:g}": r for r in RATES}, lambda n, rate: geometric(found[int(n)][rate])))
    for row in rows:
        if row["what"] in ("range", "search"):
            print({key: value for key, value in row.items() if key not in ("what", "objective")})
    for digits in sorted(TRAINED):
        mine = {(arm, tuple(run_id)): run for (length, arm, *run_id), run in runs.items() if length == digits}
        sets = sorted({machine for _, (machine, _) in mine})
        for machine in sets:
            print(f"machine {machine}")
            print_table(digits, {key: run for key, run in mine.items() if key[1][0] == machine})
        if len(sets) > 1:
            print("all of them")
            print_table(digits, mine)


def print_table(digits: int, runs: dict[tuple[str, tuple], Rows]) -> None:
    """Both arms at one length, and the difference seed by seed."""
    first, second = ARMS
    seeds = [seed for arm, seed in runs if arm == first]
    print(f"{digits} digits, rates", {arm: run[0]["rate"] for (arm, _), run in runs.items()})
    print(table(ARMS, COLUMNS, lambda arm, value: shown([value(runs[arm, seed]) for seed in seeds])))
    by_seed = [(runs[second, seed], runs[first, seed]) for seed in seeds]
    print(table(["calibrated - authors'"], COLUMNS, lambda _, value: shown([value(a) - value(b) for a, b in by_seed])))


if __name__ == "__main__":
    main(str(__doc__), run, draw)
