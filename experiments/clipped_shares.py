"""What gspo and grpo clip, and what each learns per sample and per second.

    python experiments/clipped_shares.py
    python experiments/clipped_shares.py --draw

Run from the repository's folder. Writes docs/evidence/clipped_shares.jsonl and .png.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import fmean

from common import (
    EVIDENCE,
    METHODS,
    SEARCH_SEED,
    SEEDS,
    Rows,
    band,
    by_run,
    labelled,
    last,
    main,
    mean,
    metrics,
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
BEST = ("gspo, calibrated", "grpo")
"""Of each objective's arms the one with the higher score at the search's seed, in both sets."""
WIDER = (4.0, 16.0)
"""Factors on grpo's range, at its rate and the search's seed: of the calibrated ones none is wider than the authors'."""
TIMED = (10, 40)
"""Steps of the runs whose processor seconds are compared: a clock also counts what else the machine does."""


def run(output: Path) -> None:
    """Search, then run every arm at every seed; seeds outside, so that all arms meet the same neighbours on the machine."""
    plan, choices, rows = sorting(DIGITS, output), {}, []
    for arm, (objective, calibrated) in ARMS.items():
        choices[arm], found = search(plan, METHODS[objective], calibrated=calibrated)
        rows += [{"arm": arm, **row} for row in found]
    rate = choices["grpo"].settings["training.learning_rate"]
    for scale in WIDER:
        folder = plan.run(f"grpo-lr{rate:g}-x{scale:g}", SEARCH_SEED, METHODS["grpo"].settings(rate, scale))
        told = {"score": score(metrics(folder)), "share": mean(metrics(folder), "clip/token")}
        rows.append({"arm": "grpo", "what": "wider", "rate": rate, "scale": scale, **told})
    for seed, steps in product(SEEDS, TIMED):
        for arm, choice in choices.items():
            settings = {**choice.settings, "training.steps": steps, "evaluation": None}
            folder = plan.run(f"timed-{choice.name}-{steps}", seed, settings)
            cpu_s = json.loads((folder / "cpu_s.json").read_text())
            rows.append({"what": "seconds", "arm": arm, "seed": seed, "steps": steps, "cpu_s": cpu_s})
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
    "steps to a reward of 0.7": lambda rows: next(step for step, y in smooth(rows, "reward/mean") if y >= 0.7),
    "clipped sequences": lambda rows: mean(rows, "clip/sequence"),
    "clipped tokens": lambda rows: mean(rows, "clip/token"),
}
"""What is told of each run; intervals are over seeds."""


def cpu_seconds(rows: Rows) -> dict[str, list[float]]:
    """Processor seconds a step of each arm, one a seed: longer less shorter runs, so that loading does not count."""
    timed = by_run([row for row in rows if row["what"] == "seconds"], "arm", "seed")
    out: dict[str, list[float]] = {}
    for (arm, _), (short, long) in timed.items():
        out.setdefault(arm, []).append((long["cpu_s"] - short["cpu_s"]) / (long["steps"] - short["steps"]))
    return out


def draw() -> None:
    """The figure, and on standard output the tables; of each machine, and at the end over the runs of all."""
    from matplotlib.figure import Figure

    rows = [{"machine": 1, **row} for row in read("clipped_shares")]
    everywhere = by_run([row for row in rows if row["what"] == "run"], "arm", "machine", "seed")
    for (machine,), some in by_run(rows, "machine").items():
        print(f"machine {machine}")
        print_tables(some, by_run([row for row in some if row["what"] == "run"], "arm", "seed"))
    print("both machines")
    print_runs({(arm, (machine, seed)): run for (arm, machine, seed), run in everywhere.items()})
    rows = some
    runs = by_run([row for row in rows if row["what"] == "run"], "arm", "seed")
    seconds_a_step = {arm: fmean(s) for arm, s in cpu_seconds(rows).items()}
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    (reward, seconds), (tokens, sequences) = figure.subplots(2, 2)
    for arm, colour in COLOURS.items():
        mine = [run for (name, _), run in runs.items() if name == arm]
        band(reward, [smooth(run, "reward/mean") for run in mine], label=arm, colour=colour)
        for run in mine:
            points = [(step * seconds_a_step[arm], reward) for step, reward in smooth(run, "reward/mean")]
            seconds.plot(*zip(*points, strict=True), color=colour, linewidth=0.8)
        for axis, key in ((tokens, "clip/token"), (sequences, "clip/sequence")):
            band(axis, [smooth(run, key) for run in mine], label=arm, colour=colour)
    reward.set(xlabel="step (128 samples each)", ylabel="training reward", title="by samples: mean and range of seeds")
    seconds.set(xlabel="processor seconds", ylabel="training reward", title="by seconds: a line a seed")
    tokens.set(xlabel="step", ylabel="clipped tokens", yscale="log", title="share of tokens clipped")
    sequences.set(xlabel="step", ylabel="clipped sequences", yscale="log", title="share of sequences with anything clipped")
    reward.legend(frameon=False, fontsize=8)
    figure.savefig(EVIDENCE / "clipped_shares.png", dpi=110)


def print_tables(rows: Rows, runs: dict[tuple, Rows]) -> None:
    """The search, the seconds, then what the runs say."""
    for row in rows:
        if row["what"] in ("calibration", "search", "wider"):
            print({key: value for key, value in row.items() if key != "what"})
    seeds = sorted({seed for _, seed in runs})
    spent = cpu_seconds(rows)
    steps = COLUMNS["steps to a reward of 0.7"]
    needed = {arm: [a * steps(runs[arm, seed]) for a, seed in zip(spent[arm], seeds, strict=True)] for arm in ARMS}
    by_seconds = {"processor seconds a step": spent, "to a reward of 0.7": needed}
    print(table(ARMS, by_seconds, lambda arm, of: shown(of[arm])))
    print(table(ARMS, by_seconds, lambda arm, of: shown([a - b for a, b in zip(of[arm], of["gspo"], strict=True)])))
    print_runs(runs)


def print_runs(runs: dict[tuple, Rows]) -> None:
    """Each arm's numbers, then the differences to gspo seed by seed, on the same machine; last of BEST."""
    seeds = sorted({seed for _, seed in runs})
    print(table(ARMS, COLUMNS, lambda arm, value: shown([value(runs[arm, seed]) for seed in seeds])))

    def difference(arm: str, value: Callable[[Rows], float], less: str = "gspo") -> str:
        return shown([value(runs[arm, seed]) - value(runs[less, seed]) for seed in seeds])

    print(table([arm for arm in ARMS if arm != "gspo"], COLUMNS, difference))
    print(table([" less ".join(BEST)], COLUMNS, lambda _, value: difference(BEST[0], value, BEST[1])))


if __name__ == "__main__":
    main(str(__doc__), run, draw)
