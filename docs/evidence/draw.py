"""Draws the figures beside this file from the committed metrics: `python docs/evidence/draw.py`."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).parent
FIGURES = {
    "quickstart": ("quickstart: two-digit addition, gspo, clip 3e-4/4e-4", 0.75),
    "smollm2": ("SmolLM2-135M-Instruct: What is a*b?", 0.45),
}

ENDS = ("", "_low", "_high")


def rows(run: Path) -> list[dict]:
    """The rows of a run's metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def draw(name: str, title: str, goal: float) -> None:
    """Held-out pass@1 with its 95% interval (left) and training reward (right) of every seed."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for run in sorted(HERE.glob(f"{name}-seed*")):
        label, table = run.name.rpartition("-")[2], rows(run)
        held = [r for r in table if "evaluation/pass@1" in r]
        score = [r["evaluation/pass@1"] for r in held]
        low = [s - r["evaluation/pass@1_low"] for s, r in zip(score, held, strict=True)]
        high = [r["evaluation/pass@1_high"] - s for s, r in zip(score, held, strict=True)]
        left.errorbar([r["step"] for r in held], score, yerr=[low, high], capsize=3, marker="o", markersize=3, label=label)
        steps = [r for r in table if "reward/mean" in r]
        right.plot([r["step"] for r in steps], [r["reward/mean"] for r in steps], linewidth=0.7, label=label)
    left.axhline(goal, linestyle=":", color="grey", linewidth=1)
    left.set(title=title, xlabel="step", ylabel="held-out pass@1, 95% interval", ylim=(0, 1))
    right.set(title="the same runs in training", xlabel="step", ylabel="mean reward")
    left.legend(frameon=False)
    figure.savefig(HERE / f"{name}.png", dpi=110)


def draw_precisions(name: str) -> None:
    """Training reward by precision, with the engine's and with the trainer's old likelihoods: mean and range of seeds."""
    table = [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, old in zip(axes, ("engine", "trainer"), strict=True):
        for dtype in ("bfloat16", "float16", "float32"):
            runs: dict[int, list[float]] = {}
            for row in table:
                if row["dtype"] == dtype and row["old"] == old and "reward/mean" in row:
                    runs.setdefault(row["step"], []).append(row["reward/mean"])
            steps = sorted(runs)
            ax.fill_between(steps, [min(runs[s]) for s in steps], [max(runs[s]) for s in steps], alpha=0.2)
            ax.plot(steps, [sum(runs[s]) / len(runs[s]) for s in steps], label=f"{dtype}, {len(runs[steps[0]])} seeds")
        ax.set(title=f"old log-probabilities: the {old}'s", xlabel="step", ylim=(0, 1), xticks=range(0, 21, 5))
    axes[0].set(ylabel="mean training reward, range of seeds")
    axes[1].legend(frameon=False, loc="lower right")
    figure.savefig(HERE / f"{name}.png", dpi=110)


def print_precisions(name: str) -> None:
    """The table of precisions.md, on standard output."""
    table = [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text().splitlines()]
    for dtype in ("bfloat16", "float16", "float32"):
        for old in ("engine", "trainer"):
            mine = [r for r in table if (r["dtype"], r["old"]) == (dtype, old)]
            runs = [[r for r in mine if r["seed"] == seed] for seed in sorted({r["seed"] for r in mine})]
            held = [[r for r in run if "evaluation/pass@1" in r][-1] for run in runs]
            after = ", ".join("{:.2f} [{:.2f}, {:.2f}]".format(*(r[f"evaluation/pass@1{e}"] for e in ENDS)) for r in held)
            reward = ", ".join(f"{sum(r['reward/mean'] for r in run if 16 <= r['step'] <= 20) / 5:.2f}" for run in runs)
            steps = [r for r in mine if "reward/mean" in r]
            clipped = sum(r["clip/sequence"] for r in steps) / len(steps)
            sizes = [r["mismatch/size"] for r in steps if r["mismatch/size"] is not None]
            size = (sum(x * x for x in sizes) / len(sizes)) ** 0.5
            differ, known = (sum(r[f"mismatch/{key}"] for r in steps) for key in ("decisions_differ", "decisions"))
            decisions = f"{differ} of {known} ({differ / known:.0%})"
            print(f"| {dtype} | {old} | {after} | {reward} | {clipped:.2f} | {size:.1e} | {decisions} |")


def draw_printing(name: str) -> None:
    """What the naive and the guarded reward say of the same responses, in runs that train on each: a thin line a seed, a
    thick one their mean."""
    table = [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, trained in zip(axes, ("naive", "guarded"), strict=True):
        for reward, colour in (("naive", "tab:orange"), ("guarded", "tab:blue")):
            runs: dict[int, list[float]] = {}
            for row in table:
                if row["trained"] == trained:
                    runs.setdefault(row["seed"], []).append(row[reward])
            for run in runs.values():
                ax.plot(range(1, len(run) + 1), run, color=colour, linewidth=0.6, alpha=0.6)
            means = [sum(values) / len(values) for values in zip(*runs.values(), strict=True)]
            ax.plot(range(1, len(means) + 1), means, color=colour, linewidth=1.8, label=f"{reward} reward")
        ax.set(title=f"trained on the {trained} reward, {len(runs)} seeds", xlabel="step", ylim=(0, 1.02))
    axes[0].set(ylabel="share of responses")
    axes[1].legend(frameon=False, loc="lower right")
    figure.savefig(HERE / f"{name}.png", dpi=110)


BAND = 3e-4
"""The lower side of gspo's clip range, the narrower one."""


def draw_mismatch(name: str) -> None:
    """What the gap between engine and trainer does to s, by their precisions, from the first table of the write-up."""
    lines = (HERE / f"{name}.md").read_text("utf-8").split("\n\n|")[1].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    labels = [f"{engine} / {trainer}" for engine, trainer, *_ in cells]
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    gap, moved = figure.subplots(1, 2, sharey=True)
    places = range(len(cells), 0, -1)
    gap.plot([float(row[2]) for row in cells], places, "o", label="mean", markersize=4)
    gap.plot([float(row[3]) for row in cells], places, "x", label="largest", markersize=4, color="grey")
    moved.plot([float(row[5]) for row in cells], places, "o", label="standard deviation", markersize=4)
    moved.plot([abs(float(row[4])) for row in cells], places, "x", label="size of the mean", markersize=4, color="grey")
    moved.axvline(BAND, linestyle=":", color="tab:red", linewidth=1, label="gspo's lower clip range")
    gap.set(xscale="log", title="a token", xlabel="log-probabilities apart, nats", yticks=places, yticklabels=labels)
    moved.set(xscale="log", title="a sequence, before any update", xlabel="s - 1")
    gap.set_ylabel("engine / trainer")
    for axis in (gap, moved):
        axis.grid(axis="y", linewidth=0.3)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(HERE / f"{name}.png", dpi=110)


def _interval(axis: Axes, found: dict, place: float, colour: str, label: str | None = None) -> None:
    """A mean and its interval, lying."""
    sides = [[found["mean"] - found["low"]], [found["high"] - found["mean"]]]
    axis.errorbar(found["mean"], place, xerr=sides, fmt="o", capsize=3, markersize=4, color=colour, label=label)


def draw_suites(name: str) -> None:
    """Pass@1 of both engines on each suite, with Wilson's intervals, and their difference with its bootstrap interval."""
    compared = json.loads((HERE / name / "comparison.json").read_text())["suites"]
    figure = Figure(figsize=(9, 3), layout="constrained")
    scores, apart = figure.subplots(1, 2, sharey=True)
    for engine, shift, colour in (("vllm", 0.12, "tab:blue"), ("transformers", -0.12, "tab:orange")):
        for place, suite in enumerate(compared):
            found = json.loads((HERE / name / engine / suite / "results.json").read_text())["scores"]["pass@1"]
            _interval(scores, found, place + shift, colour, engine if place == 0 else None)
    for place, one in enumerate(compared.values()):
        _interval(apart, one["difference"], place, "black")
    apart.axvline(0, linestyle=":", color="grey", linewidth=1)
    scores.set(xlabel="pass@1, 95% interval", yticks=range(len(compared)), yticklabels=list(compared))
    apart.set(xlabel="vLLM less transformers")
    scores.legend(frameon=False, fontsize=8)
    figure.savefig(HERE / f"{name}.png", dpi=110)


if __name__ == "__main__":
    draw_mismatch("mismatch")
    draw_suites("suites")
    draw_printing("printing")
    draw_precisions("vllm-precisions")
    print_precisions("vllm-precisions")
    for name, (title, goal) in FIGURES.items():
        draw(name, title, goal)
