"""What gspo and grpo clip, and what each learns per sample and per second.

    python experiments/clipped_shares.py
    python experiments/clipped_shares.py --draw

Run from the repository's folder; Writes docs/evidence/clipped_shares.jsonl and .png.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

from common import (
    EVIDENCE,
    METHODS,
    SEEDS,
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

DIGITS = 8
ARMS = {
    "gspo": ("gspo", False),
    "grpo": ("grpo", False),
    "gspo, calibrated": ("gspo", True),
    "grpo, calibrated": ("grpo", True),
}
"""Arm to objective, and whether its range is calibrated or its authors' own."""


def run(output: Path) -> None:
    """Search, then run every arm at every seed; seeds outside, so that all arms meet the same neighbours on the machine."""
    plan, choices, rows = sorting(DIGITS, output), {}, []
    for arm, (objective, calibrated) in ARMS.items():
        choices[arm], found = search(plan, METHODS[objective], calibrated=calibrated)
        rows += [{"arm": arm, **row} for row in found]
    for seed in SEEDS:
        for arm, choice in choices.items():
            folder = plan.run(choice.name, seed, choice.settings)
            rows += labelled(folder, what="run", arm=arm, seed=seed, rate=choice.settings["training.learning_rate"])
        write("clipped_shares", rows)


# ---- what the rows say ------------------------------------------------------------------------------------

COLOURS = dict(zip(ARMS, ("tab:blue", "tab:red", "tab:cyan", "tab:orange"), strict=True))
COLUMNS: dict[str, Callable[[Rows], float]] = {
    "held-out pass@1": lambda rows: last(rows, "evaluation/pass@1"),
    "training reward, last 20 steps": score,
    "training reward, all steps": lambda rows: mean(rows, "reward/mean"),
    "clipped sequences": lambda rows: mean(rows, "clip/sequence"),
    "clipped tokens": lambda rows: mean(rows, "clip/token"),
    "seconds a step": lambda rows: mean(rows, "time/step_s"),
    "of the update": lambda rows: mean(rows, "time/update_s"),
}
"""What is told of each run; intervals are over seeds."""


def draw() -> None:
    """The figure, and on standard output the tables."""
    from matplotlib.figure import Figure

    rows = read("clipped_shares")
    runs = by_run([row for row in rows if row["what"] == "run"], "arm", "seed")
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    (reward, seconds), (tokens, sequences) = figure.subplots(2, 2)
    for arm, colour in COLOURS.items():
        mine = [run for (name, _), run in runs.items() if name == arm]
        band(reward, [smooth(run, "reward/mean") for run in mine], label=arm, colour=colour)
        for run in mine:
            spent = list(accumulate(row.get("time/step_s", 0) for row in run if "reward/mean" in row))
            curve = [y for _, y in smooth(run, "reward/mean")]
            seconds.plot(spent, curve, color=colour, linewidth=0.8)
        for axis, key in ((tokens, "clip/token"), (sequences, "clip/sequence")):
            band(axis, [smooth(run, key) for run in mine], label=arm, colour=colour)
    reward.set(xlabel="step (128 samples each)", ylabel="training reward", title="by samples: mean and range of seeds")
    seconds.set(xlabel="seconds", ylabel="training reward", title="by seconds: a line a seed")
    tokens.set(xlabel="step", ylabel="clipped tokens", yscale="log", title="share of tokens clipped")
    sequences.set(xlabel="step", ylabel="clipped sequences", yscale="log", title="share of sequences with anything clipped")
    reward.legend(frameon=False, fontsize=8)
    figure.savefig(EVIDENCE / "clipped_shares.png", dpi=110)
    print_tables(rows, runs)


def print_tables(rows: Rows, runs: dict[tuple, Rows]) -> None:
    """The search, then each arm's numbers, then the differences to gspo seed by seed."""
    for row in rows:
        if row["what"] != "run":
            print({key: value for key, value in row.items() if key != "what"})
    seeds = sorted({seed for _, seed in runs})
    print(table(ARMS, COLUMNS, lambda arm, value: shown([value(runs[arm, seed]) for seed in seeds])))

    def difference(arm: str, value: Callable[[Rows], float]) -> str:
        return shown([value(runs[arm, seed]) - value(runs["gspo", seed]) for seed in seeds])

    print(table([arm for arm in ARMS if arm != "gspo"], COLUMNS, difference))


if __name__ == "__main__":
    main(str(__doc__), run, draw)
