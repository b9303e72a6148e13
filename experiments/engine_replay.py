"""The mixture of routing_replay.py in bfloat16, where engine and trainer choose different experts: the engine's replayed.

    python experiments/engine_replay.py
    python experiments/engine_replay.py --draw

Run from the repository's folder. Writes docs/evidence/engine_replay.jsonl and .png.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import (
    EVIDENCE,
    FACTORS,
    METHODS,
    SEARCH_SEED,
    SEEDS,
    Plan,
    Rows,
    band,
    best,
    by_run,
    last,
    main,
    mean,
    metrics,
    read,
    score,
    short,
    shown,
    smooth,
    sorting,
    table,
    write,
)
from routing_replay import DECODER, DIGITS, mean_of

RATES = (3e-5, 1e-4, 3e-4)
"""Of the search: what routing_replay.py's chose with as many minibatches, and a third and three times that."""
SEARCH_STEPS, STEPS = 20, 40
PRECISION = {"model.dtype": "bfloat16", "model.head_dtype": "float32"}
SCORED = {
    "rollout.old_logprobs": "trainer",
    "rollout.routed_experts": True,
    "training.schedule": "constant",
    "training.minibatches": 4,
    "evaluation.every": 20,
}
"""In all arms: the scoring pass that R2 needs, and the engine's choices, that its flips are counted."""
REPLAYS = {"": "none", ", R2": "trainer", ", R3": "engine"}
ARMS = {f"{objective}{name}": (objective, replay) for objective in METHODS for name, replay in REPLAYS.items()}
KEPT = (
    "step", "reward/mean", "evaluation/pass@1", "clip/sequence", "clip/token", "ratio/sequence_std", "mismatch/size",
    "mismatch/k3", "mismatch/sequence_std", "moe/flips_by_minibatch", "moe/tokens_flipped", "moe/engine_flips",
    "moe/replay_bytes", "moe/replay_s",
)  # fmt: skip


def run(output: Path) -> None:
    """A search of every arm's rate; the arms, from routing_replay.py's cold starts; then each with its own clip range."""
    sorts = sorting(DIGITS, output)
    start = Plan(sorts.recipe, output / "routing", {**sorts.settings, **DECODER})
    plan = Plan(sorts.recipe, output / "engine_replay", {**sorts.settings, **DECODER, **PRECISION})

    def trials(jobs: Sequence[tuple]) -> list[Rows]:
        return [trial(plan, arm, seed, start.start(seed), *job) for arm, seed, *job in jobs]

    tried = {arm: [(arm, SEARCH_SEED, rate, SEARCH_STEPS, 1.0) for rate in RATES] for arm in ARMS}
    chosen, found = best(trials, tried)
    rate = {arm: job[2] for arm, job in chosen.items()}
    rows = [row | {"what": "search"} for row in found]
    rows += [row for some in trials([(arm, s, rate[arm], STEPS, 1.0) for s in SEEDS for arm in ARMS]) for row in some]
    tried = {
        arm: [(arm, SEARCH_SEED, rate[arm], SEARCH_STEPS, x) for x in FACTORS[which[0]][:4]] for arm, which in ARMS.items()
    }
    chosen, found = best(trials, tried)
    again = trials([(arm, s, rate[arm], STEPS, job[-1]) for arm, job in chosen.items() if job[-1] != 1 for s in SEEDS])
    rows += [row | {"what": "range search"} for row in found]
    rows += [row | {"what": "range chosen"} for some in again for row in some]
    write("engine_replay", rows)


def trial(plan: Plan, arm: str, seed: int, model: str, rate: float, steps: int, scale: float) -> list[dict[str, Any]]:
    """The rows of one run from a model, with the authors' clip range times `scale`."""
    objective, replay = ARMS[arm]
    clip = METHODS[objective].settings(rate, scale)
    settings = {**clip, **SCORED, "training.replay": replay, "training.steps": steps}
    name = f"{objective}-{replay}-lr{rate:g}-{steps}" + (f"-x{scale:.4g}" if scale != 1 else "")
    folder = plan.run(name, seed, settings, model=model)
    labels = {"what": "run", "arm": arm, "seed": seed, "rate": rate, "scale": scale}
    return [labels | {k: short(row[k]) for k in KEPT if k in row} for row in metrics(folder)]


# ---- what the rows say ------------------------------------------------------------------------------------

COLOURS = dict(zip(ARMS, ("tab:blue", "tab:cyan", "navy", "tab:red", "tab:orange", "maroon"), strict=True))
COLUMNS = {
    "held-out pass@1, before": lambda rows: rows[0]["evaluation/pass@1"],
    "after": lambda rows: last(rows, "evaluation/pass@1"),
    "training reward, last 20 steps": score,
    "clipped sequences": lambda rows: mean(rows, "clip/sequence"),
    "engine's choices that the trainer does not make": lambda rows: mean(rows, "moe/engine_flips"),
    "engine against trainer, k3": lambda rows: mean(rows, "mismatch/k3"),
    "deviation of s that it makes": lambda rows: mean(rows, "mismatch/sequence_std"),
    "choices flipped, last minibatch": lambda rows: mean_of(rows, "moe/flips_by_minibatch", -1),
    "sd of s": lambda rows: mean(rows, "ratio/sequence_std"),
    "replay, ms a step": lambda rows: 1000 * mean(rows, "moe/replay_s"),
}
DIFFERENCES = [f"{objective}, R3 less {objective}{other}" for objective in METHODS for other in ("", ", R2")]


def draw() -> None:
    """The figure, and on standard output the tables."""
    from matplotlib.figure import Figure

    rows = read("engine_replay")
    runs = by_run([row for row in rows if row["what"] == "run"], "arm", "seed")
    seeds = sorted({seed for _, seed in runs})
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    reward, gap = figure.subplots(1, 2)
    for arm, colour in COLOURS.items():
        band(reward, [smooth(runs[arm, seed], "reward/mean") for seed in seeds], label=arm, colour=colour)
        band(gap, [smooth(runs[arm, seed], "mismatch/k3") for seed in seeds], label=arm, colour=colour)
    reward.set(xlabel="step", ylabel="training reward", title="mean and range of seeds", ylim=(0, None))
    gap.set(xlabel="step", ylabel="k3, nats a token", title="engine against trainer at the old policy", yscale="log")
    reward.legend(frameon=False, fontsize=8)
    figure.savefig(EVIDENCE / "engine_replay.png", dpi=110)

    searched = by_run([row for row in rows if row["what"] == "search"], "arm", "rate")
    print(table(ARMS, {f"{rate:g}": rate for rate in RATES}, lambda arm, rate: f"{score(searched[arm, rate]):.3f}"))
    print_tables(runs, seeds)
    for (arm, scale), some in by_run([row for row in rows if row["what"] == "range search"], "arm", "scale").items():
        print(f"{arm}, range x{scale:.4g}: {score(some):.3f}")
    chosen = by_run([row for row in rows if row["what"] == "range chosen"], "arm", "seed")
    if chosen:
        print("with", {arm: run[0]["scale"] for (arm, _), run in chosen.items()}, "and the authors' for the others")
        print_tables(runs | chosen, seeds)


def print_tables(runs: dict[tuple, Rows], seeds: list[int]) -> None:
    """The numbers of each arm, and their differences seed by seed."""

    def difference(pair: str, value: Any) -> str:
        more, less = (by_seed(arm, value) for arm in pair.split(" less "))
        return shown([a - b for a, b in zip(more, less, strict=True)], 4)

    def by_seed(arm: str, value: Any) -> list[float]:
        return [value(runs[arm, seed]) for seed in seeds]

    print(table(ARMS, COLUMNS, lambda arm, value: shown(by_seed(arm, value), 4)))
    print(table(DIFFERENCES, COLUMNS, difference))


if __name__ == "__main__":
    main(str(__doc__), run, draw)
