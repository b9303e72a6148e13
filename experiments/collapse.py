"""A collapse is provoked by a high learning rate; then training starts again from checkpoints before and after it.

    python experiments/collapse.py
    python experiments/collapse.py --draw

Run from the repository's folder. Writes docs/evidence/collapse.jsonl and collapse.png.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

from common import (
    EVIDENCE,
    METHODS,
    SEARCH_SEED,
    SEEDS,
    Plan,
    Rows,
    Settings,
    by_run,
    labelled,
    last,
    main,
    metrics,
    read,
    shown,
    smooth,
    sorting,
    table,
    write,
)

DIGITS = 8
RATES = (5e-4, 7e-4, 1e-3)
"""From the lowest up; the first that collapses at the search's seed is taken."""
STEPS, AGAIN = 80, 30
"""Of the run that collapses, and of those that start again."""
EVERY = 2
"""Steps between checkpoints."""
WINDOW = 10
"""Steps that a reward is averaged over before it is judged."""
OTHER = {
    "the same settings": (1.0, 1.0),
    "a tenth of the rate": (0.1, 1.0),
    "a tenth of the clip range": (1.0, 0.1),
}
"""What a new start changes: factors on the learning rate and the clip range. Optimizer and prompt order are new in all."""
NEW = 10
"""Added to the seed of what starts again, so that prompts and samples are others."""
RUN = ("seed", "machine")
"""What tells provoked runs apart. Rows without the second are of the first machine."""
WHEN = ("well before", "last before", "half fallen", "after")
"""Where training starts again."""


def collapsed_at(rows: Rows) -> int | None:
    """The first step whose smoothed reward is under half of the best before it; None if the run ends above that."""
    curve = [y for _, y in smooth(rows, "reward/mean")]
    fallen = [i for i in range(WINDOW, len(curve)) if curve[i] < max(curve[: i + 1]) / 2]
    return fallen[0] + 1 if fallen and curve[-1] < max(curve) / 2 else None


def checkpoints(rows: Rows, fallen: int, every: int) -> dict[str, int]:
    """Steps to start again from, of a run that has fallen under half at a step and was saved each `every` steps.

    Last before: the last checkpoint before the smoothed reward left nine tenths of its best; well before: half of that;
    half fallen: the first one under half.
    """
    curve = [y for _, y in smooth(rows, "reward/mean")]
    best = max(curve[:fallen])
    left = max(i for i in range(fallen) if curve[i] >= 0.9 * best) + 1
    last = max(every, left // every * every)
    early, half = max(every, last // 2 // every * every), -(-fallen // every) * every
    return dict(zip(WHEN, (early, last, half, len(curve)), strict=True))


def settings(rate: float, clip: float, steps: int) -> Settings:
    """gspo at a constant rate with the authors' range times `clip`."""
    return {**METHODS["gspo"].settings(rate, clip), "training.schedule": "constant", "training.steps": steps}


def provoke(plan: Plan, rate: float, seed: int, steps: int, every: int | None) -> Path:
    """A run at a high rate that keeps all its checkpoints, of which there are none without `every`."""
    kept = {"checkpoint.every": every, "checkpoint.keep": steps, "evaluation.every": 10}
    return plan.run(f"provoke-lr{rate:g}", seed, {**settings(rate, 1, steps), **kept})


def again(plan: Plan, model: str, when: str, change: str, rate: float, seed: int, steps: int) -> Path:
    """A run that starts again from a model, of which only one thing is changed."""
    name = f"again-{when} {list(OTHER).index(change)}".replace(" ", "-")
    factor, clip = OTHER[change]
    return plan.run(name, seed + NEW, settings(rate * factor, clip, steps), model=model)


def run(output: Path) -> None:
    """Find the rate, collapse at every seed, start again from everywhere with everything."""
    plan, rows, rate = sorting(DIGITS, output), [], RATES[-1]
    for rate in RATES:
        folder = provoke(plan, rate, SEARCH_SEED, STEPS, EVERY)
        rows += labelled(folder, what="search", rate=rate, seed=SEARCH_SEED)
        if collapsed_at(metrics(folder)):
            break
    for seed in SEEDS:
        folder = provoke(plan, rate, seed, STEPS, EVERY)
        fallen = collapsed_at(metrics(folder))
        rows += labelled(folder, what="provoked", rate=rate, seed=seed, fallen=fallen)
        steps = checkpoints(metrics(folder), fallen, EVERY) if fallen else {}  # a seed that holds is reported as such
        for (when, step), change in product(steps.items(), OTHER):
            run = again(plan, model_at(folder, step), when, change, rate, seed, AGAIN)
            rows += labelled(run, what="again", seed=seed, since=when, at=step, change=change)
        write("collapse", rows)


def model_at(folder: Path, step: int) -> str:
    """The model of a run's checkpoint."""
    return str(folder / "checkpoints" / f"step-{step:06d}" / "model")


# ---- what the rows say ------------------------------------------------------------------------------------

COLOURS = dict(zip(OTHER, ("tab:red", "tab:blue", "tab:green"), strict=True))


def draw() -> None:
    """The figure, and on standard output the tables."""
    picture("collapse")


def picture(name: str, provoked: str = "provoked: learning rate") -> None:
    """The same of the committed rows of that name; `provoked`: what to say of the runs that fell, before their rate."""
    from matplotlib.figure import Figure

    rows = [{"machine": 1, **row} for row in read(name)]
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    axes = figure.subplots(2, 3, sharey=True).flat
    for run_id, run in by_run([row for row in rows if row["what"] == "provoked"], *RUN).items():
        axes[0].plot(*zip(*smooth(run, "reward/mean"), strict=True), label=run_name(run_id))
    rate = next(row["rate"] for row in rows if row["what"] == "provoked")
    axes[0].set(title=f"{provoked} {rate:g}", ylim=(0, 1), xlabel="step", ylabel="training reward")
    axes[0].legend(frameon=False, fontsize=8)
    starts = by_run([row for row in rows if row["what"] == "again"], "since", "change", *RUN)
    starts = {(since, change, (seed, machine)): run for (since, change, seed, machine), run in starts.items()}
    first = min(run_id for *_, run_id in starts)
    for axis, since in zip(axes[1:], WHEN, strict=False):
        for (when, change, run_id), run in starts.items():
            if when == since:
                label = change if run_id == first else None
                axis.plot(*zip(*smooth(run, "reward/mean"), strict=True), color=COLOURS[change], linewidth=1, label=label)
        axis.set(title=f"again from: {since}", xlabel="step since the new start")
    axes[1].legend(frameon=False, fontsize=8)
    axes[5].set_axis_off()
    figure.savefig(EVIDENCE / f"{name}.png", dpi=110)
    print_tables(rows, starts)


def run_name(run_id: tuple[int, int]) -> str:
    """Of one run that was provoked; on another GPU of the same kind a seed's run is another."""
    seed, machine = run_id
    return f"seed {seed}" + (f", machine {machine}" if machine > 1 else "")


def print_tables(rows: Rows, starts: dict[tuple, Rows]) -> None:
    """When each run fell and what it starts again from; then held-out pass@1 before and after each new start."""
    for run_id, run in by_run([row for row in rows if row["what"] == "provoked"], *RUN).items():
        curve = [y for _, y in smooth(run, "reward/mean")]
        at = {since: again[0]["at"] for (since, _, whose), again in starts.items() if whose == run_id}
        print(
            f"{run_name(run_id)}: best {max(curve):.3f}, end {curve[-1]:.3f}, fallen at {run[0]['fallen']}, again from {at}"
        )

    same = next(iter(OTHER))

    def ids(since: str, *changes: str) -> list[tuple[int, int]]:
        """Runs that fell and were started again from there with all of these, to the end."""
        found = [{run_id for when, change, run_id in starts if (when, change) == (since, c)} for c in changes]
        return sorted(set.intersection(*found))

    def begin(since: str, change: str, run_id: tuple[int, int]) -> float:
        return next(row["evaluation/pass@1"] for row in starts[since, change, run_id] if "evaluation/pass@1" in row)

    def end(since: str, change: str, run_id: tuple[int, int]) -> float:
        return last(starts[since, change, run_id], "evaluation/pass@1")

    def cell(since: str, change: str) -> str:
        before, after = ([of(since, change, run_id) for run_id in ids(since, change)] for of in (begin, end))
        return f"{shown(before)} -> {shown(after)}"

    def gain(since: str, change: str) -> str:
        return shown([end(since, change, run_id) - begin(since, change, run_id) for run_id in ids(since, change)])

    def against_same(since: str, change: str) -> str:
        both = ids(since, change, same)
        return shown([end(since, change, run_id) - end(since, same, run_id) for run_id in both])

    columns = {change: change for change in OTHER}
    print(table(WHEN, columns, cell), "gain\n", table(WHEN, columns, gain), "less the same settings\n", sep="", end="")
    print(table(WHEN, columns, against_same))


if __name__ == "__main__":
    main(str(__doc__), run, draw)
