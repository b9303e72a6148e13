"""The questions of clipped_shares.py, clip_range.py and hidden_change.py, of a language model in bfloat16 on a GPU.

    python experiments/language_model.py
    python experiments/language_model.py --draw

Run from the repository's folder. The recipe's model learns the recipe's task. All runs of a phase go side by side, up to
sixteen. Writes docs/evidence/language_model.jsonl and .png.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clip_range import geometric, range_at_target
from common import (
    EVIDENCE,
    FACTORS,
    METHODS,
    SEARCH_SEED,
    SEEDS,
    Plan,
    Rows,
    band,
    by_run,
    labelled,
    last,
    main,
    mean,
    read,
    score,
    shown,
    side_by_side,
    smooth,
    table,
    write,
)
from common import trial as calibration
from hidden_change import FAR, mean_of, rows_of

RECIPE = "recipes/smollm2.toml"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The recipe's; --model FOLDER for another place."""
SETTINGS = {
    "model.dtype": "bfloat16",
    "model.head_dtype": "float32",
    "model.kernels": "torch",
    "rollout.old_logprobs": "trainer",
    "rollout.max_response_tokens": 32,
    "training.schedule": "constant",
    "training.micro_batch_tokens": 8192,
    "evaluation.max_response_tokens": 32,
    "evaluation.every": 20,
    "checkpoint.every": None,
}
"""The trainer's old log-probabilities: in bfloat16 the engine's move s by more than the clip range, and what updates do is
asked here. Layers uncompiled: compiling takes as long as a run. No checkpoints: none is started from."""
RATES = (1e-5, 3e-5, 1e-4)
"""Of the search, and of what hides. The recipe's is the first."""
SCALES = {1e-5: (4, 16, 64), 3e-5: (16, 64, 256, 1024)}
"""Learning rate to factors on the authors' range, around the one that clips 0.15, at the reported seeds: what share a range
clips is told of them, none runs on with it. The highest rate may break all."""
WIDER = {"gspo": (), "grpo": (4.0, 16.0)}
"""Further factors, on the side that a search over FACTORS leaves out."""
SEARCH_STEPS, STEPS = 20, 40
ALONE_STEPS = SEARCH_STEPS
"""Of the runs whose seconds are told, one after the other."""
WARM = 3
"""First steps of those that the seconds leave out: the process is not warm yet."""
GOOD = 0.7
"""Training reward, over ten steps, whose seconds are told."""


def run(output: Path, model: str) -> None:
    """Search and calibration beside each other; a search of ranges; every arm at every seed; a few steps of both alone."""
    plan = Plan(RECIPE, output / "language_model", SETTINGS, model=model)
    searched = [(trial, plan, name, rate, 1.0, SEARCH_SEED, SEARCH_STEPS) for name in METHODS for rate in RATES]
    ranged = [(share, plan, rate, scale, seed) for rate, scales in SCALES.items() for scale in scales for seed in SEEDS]
    found = side_by_side(call, [*searched, *ranged])
    rows = [row for some in found for row in some]
    scores = {(job[2], job[3]): score(some) for job, some in zip(searched, found, strict=False)}
    best = {name: max(RATES, key=lambda rate, name=name: scores[name, rate]) for name in METHODS}
    own = [(trial, plan, n, best[n], x, SEARCH_SEED, SEARCH_STEPS) for n in METHODS for x in (*FACTORS[n], *WIDER[n])]
    for (_, _, name, *_), some in zip(own, side_by_side(call, own), strict=True):
        rows += [row | {"what": "range search", "arm": name} for row in some]
    wanted = [(trial, plan, "gspo", rate, 1.0, seed, STEPS) for rate in RATES for seed in SEEDS]
    wanted += [(trial, plan, "grpo", rate, 1.0, s, STEPS) for rate in sorted({RATES[0], best["grpo"]}) for s in SEEDS]
    if upper := searched_range(rows):
        wanted += [(trial, plan, "gspo", best["gspo"], upper / METHODS["gspo"].high, seed, STEPS) for seed in SEEDS]
    rows += [row for some in side_by_side(call, wanted) for row in some]
    write("language_model", rows)
    alone = [seconds(plan, name, best[name], seed) for seed in SEEDS for name in METHODS]
    write("language_model", rows + [row for some in alone for row in some])


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """For processes that do different work in one phase."""
    return function(*arguments)


def trial(plan: Plan, objective: str, rate: float, scale: float, seed: int, steps: int) -> list[dict[str, Any]]:
    """The rows of one run with the authors' range times `scale`, those of what hides in gspo's responses too."""
    settings = {**METHODS[objective].settings(rate, scale), "training.steps": steps}
    folder = plan.run(f"{objective}-lr{rate:g}-x{scale:.4g}-{steps}", seed, settings)
    what = "search" if seed == SEARCH_SEED else "run"
    rows = labelled(folder, what=what, arm=arm_of(objective, scale), seed=seed, rate=rate, scale=scale)
    if what == "run" and scale == 1 and objective == "gspo":
        rows += [row | {"what": "hidden"} for row in rows_of(folder, {"seed": seed, "rate": rate})]
    return rows


def share(plan: Plan, rate: float, scale: float, seed: int) -> list[dict[str, Any]]:
    """The share that gspo clips with the authors' range times `scale`, as one row."""
    return [{**calibration(plan, METHODS["gspo"], rate, scale, seed), "what": "range"}]


def arm_of(objective: str, scale: float) -> str:
    """An arm's name in tables and figure."""
    return objective if scale == 1 else f"{objective}, calibrated"


def seconds(plan: Plan, objective: str, rate: float, seed: int) -> list[dict[str, Any]]:
    """The rows of a run with the authors' range that has a GPU alone and is not evaluated."""
    settings = {**METHODS[objective].settings(rate, 1.0), "training.steps": ALONE_STEPS, "evaluation": None}
    folder = plan.run(f"alone-{objective}-lr{rate:g}-{ALONE_STEPS}", seed, settings)
    return labelled(folder, what="seconds", arm=objective, seed=seed, rate=rate)


# ---- what the rows say ------------------------------------------------------------------------------------

COLOURS = {"gspo": "tab:blue", "grpo": "tab:red", "gspo, calibrated": "tab:cyan"}
COLUMNS: dict[str, Callable[[Rows], float]] = {
    "held-out pass@1, before": lambda rows: rows[0]["evaluation/pass@1"],
    "after": lambda rows: last(rows, "evaluation/pass@1"),
    "training reward, last 20 steps": score,
    "first ten steps": lambda rows: mean([row for row in rows if row["step"] <= 10], "reward/mean"),
    "first 20": lambda rows: mean([row for row in rows if row["step"] <= SEARCH_STEPS], "reward/mean"),
    "training reward, all steps": lambda rows: mean(rows, "reward/mean"),
    "clipped sequences": lambda rows: mean(rows, "clip/sequence"),
    "clipped tokens": lambda rows: mean(rows, "clip/token"),
    "sd of s": lambda rows: mean(rows, "ratio/sequence_std"),
    "sd of token ratios": lambda rows: mean(rows, "ratio/token_std"),
}
HIDDEN = ("clipped", "inside", "inside_past_grpo", "free_past_grpo", "all_past_grpo", "abs_log_s_median")


def searched_range(rows: Rows) -> float | None:
    """The upper range of gspo that clips the target at the search's seed, by its first search over FACTORS."""
    mine = [row for row in rows if row["what"] == "range search" and row["arm"] == "gspo"]
    trials = by_run(mine, "scale").items()
    return range_at_target([{"scale": scale, "share": mean(some, "clip/sequence")} for (scale,), some in trials])


def ranges_at(rows: Rows, rate: float) -> list[float]:
    """The upper range that clips the target at a rate, by seed, less what no trial reached."""
    trials = by_run([row for row in rows if row["what"] == "range" and row["rate"] == rate], "seed")
    return [found for some in trials.values() if (found := range_at_target(some)) is not None]


def draw() -> None:
    """The figure, and on standard output the tables."""
    from matplotlib.figure import Figure

    rows = [{"machine": 1, **row} for row in read("language_model")]
    runs = by_run([row for row in rows if row["what"] == "run"], "arm", "rate", "machine", "seed")
    best = {arm: best_rate(rows, arm) for arm in COLOURS}
    figure = Figure(figsize=(10, 6.6), layout="constrained")
    (reward, clipped), (ranges, hidden) = figure.subplots(2, 2)
    for arm, colour in COLOURS.items():
        mine = [run for (name, rate, *_), run in runs.items() if (name, rate) == (arm, best[arm])]
        if mine:
            band(reward, [smooth(run, "reward/mean") for run in mine], label=f"{arm}, {best[arm]:g}", colour=colour)
            band(clipped, [smooth(run, "clip/token") for run in mine], label=arm, colour=colour)
    colours = dict(zip(RATES, ("tab:blue", "tab:orange", "tab:red"), strict=False))
    for rate in SCALES:
        for (seed,), some in by_run([r for r in rows if r["what"] == "range" and r["rate"] == rate], "seed").items():
            points = sorted((METHODS["gspo"].high * t["scale"], t["share"]) for t in some)
            label = f"{rate:g}" if seed == SEEDS[0] else None
            ranges.plot(*zip(*points, strict=True), ".-", color=colours[rate], linewidth=1, label=label)
    ranges.axhline(0.15, color="grey", linestyle=":")
    for rate, colour in colours.items():
        some = [p for r in hiding(rows, 1) if r["rate"] == rate for p in r.get("log_s_largest_clipped", [])]
        points = [(max(abs(log_s), 1e-6), max(largest, 1e-3)) for log_s, largest, _ in some]
        hidden.plot(*zip(*points, strict=True), "o", markersize=2.5, alpha=0.4, color=colour, label=f"{rate:g}")
    hidden.axhline(FAR, color="grey", linestyle=":")
    hidden.axvline(METHODS["gspo"].high, color="grey", linestyle="--")
    reward.set(xlabel="step (128 samples each)", ylabel="training reward", title="mean and range of seeds")
    clipped.set(xlabel="step", ylabel="clipped tokens", yscale="log", title="share of tokens clipped")
    ranges.set(xscale="log", xlabel="upper clip range", ylabel="clipped sequences", title="a line a seed, by learning rate")
    hidden.set(xscale="log", yscale="log", xlabel="|log s| (dashed: 4e-4)", ylabel="largest |d|, nats (dotted: ln 1.2)")
    hidden.set(title="gspo, last three steps, by learning rate")
    for axis in (reward, ranges, hidden):
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(EVIDENCE / "language_model.png", dpi=110)
    print_tables(rows, runs, best)


def best_rate(rows: Rows, arm: str) -> float:
    """The rate at which an arm is compared: its own in the search, or the one that its range was calibrated at."""
    objective = arm.split(",")[0]
    if objective != arm:
        return next((row["rate"] for row in rows if row.get("arm") == arm), RATES[0])
    found = by_run([row for row in rows if row["what"] == "search" and row["arm"] == objective], "rate")
    return max(found, key=lambda key: score(found[key]))[0]


def hiding(rows: Rows, machine: int) -> list[Mapping[str, Any]]:
    """What hides, of a machine's runs."""
    return [row for row in rows if row["what"] == "hidden" and row["machine"] == machine]


def print_tables(rows: Rows, runs: dict[tuple, Rows], best: dict[str, float]) -> None:
    """The search, the ranges, the arms on each machine and over all, what hides, and seconds."""
    found = by_run([row for row in rows if row["what"] == "search"], "arm", "rate")
    print(table(METHODS, {f"{rate:g}": rate for rate in RATES}, lambda arm, rate: f"{score(found[arm, rate]):.3f}"))
    ranged = [row for row in rows if row["what"] == "range search"]
    for (arm, rate, scale, machine), some in by_run(ranged, "arm", "rate", "scale", "machine").items():
        clipped = f"{METHODS[arm].share} {mean(some, METHODS[arm].share):.3f}"
        print(f"{arm} at {rate:g}, range x{scale:.4g}, machine {machine}: {score(some):.3f}, {clipped}")
    print(f"upper range at 0.15 at the search's seed: {searched_range(rows):.4g}")
    for rate in SCALES:
        print(f"{rate:g}: upper range at 0.15: {geometric(ranges_at(rows, rate))}")
        for scale, some in by_run([r for r in rows if r["what"] == "range" and r["rate"] == rate], "scale").items():
            learnt = shown([r["reward/mean"] for r in some])
            print(f"  x{scale[0]:.4g}: clipped {shown([r['share'] for r in some])}, reward {learnt}")

    for machine in sorted({machine for *_, machine, _ in runs}):
        print(f"machine {machine}")
        print_arms({key: run for key, run in runs.items() if key[2] == machine}, best)
    print("all machines")
    print_arms(runs, best)
    for (machine,), some in by_run([row for row in rows if row["what"] == "hidden" and "step" in row], "machine").items():
        at = by_run(some, "rate")

        def hides(rate: str, key: str, at: Mapping[tuple, Rows] = at) -> str:
            return shown(mean_of(at[float(rate),], key, SEARCH_STEPS + 1, STEPS))

        print(
            f"what hides, machine {machine}\n" + table([f"{rate:g}" for (rate,) in at], {key: key for key in HIDDEN}, hides)
        )
    print_alone(by_run([row for row in rows if row["what"] == "seconds"], "arm", "seed"))


def print_arms(runs: dict[tuple, Rows], best: dict[str, float]) -> None:
    """The arms and their differences to gspo, and each objective at each rate."""

    def values(arm: str, rate: float, value: Callable[[Rows], float]) -> list[float]:
        return [value(run) for (name, at, *_), run in sorted(runs.items()) if (name, at) == (arm, rate)]

    arms = [arm for arm in COLOURS if values(arm, best[arm], score)]
    print({arm: best[arm] for arm in arms}, table(arms, COLUMNS, lambda arm, f: shown(values(arm, best[arm], f))), sep="\n")

    def difference(arm: str, f: Callable[[Rows], float], less: str = "gspo") -> str:
        pairs = zip(values(arm, best[arm], f), values(less, best[less], f), strict=True)
        return shown([a - b for a, b in pairs])

    print("less gspo\n" + table(arms[1:], COLUMNS, difference))
    if arms[2:]:
        print("less grpo\n" + table(arms[2:], COLUMNS, lambda arm, f: difference(arm, f, "grpo")))
    for name in METHODS:
        rates = [f"{rate:g}" for rate in RATES if values(name, rate, score)]
        print(f"{name}\n" + table(rates, COLUMNS, lambda rate, f, name=name: shown(values(name, float(rate), f))))


ALONE: dict[str, Callable[[Rows], float]] = {
    "seconds a step": lambda rows: mean(rows[WARM:], "time/step_s"),
    "of generation": lambda rows: mean(rows[WARM:], "time/collect_s"),
    "of the update": lambda rows: mean(rows[WARM:], "time/update_s"),
    "tokens a response": lambda rows: mean(rows[WARM:], "rollout/response_tokens_mean"),
    f"seconds from there to a reward of {GOOD}": lambda rows: until_good(rows, "time/step_s"),
    "that step": lambda rows: until_good(rows),
    "training reward, all steps": lambda rows: mean(rows, "reward/mean"),
}
"""What is told of runs that had a GPU alone."""


def until_good(rows: Rows, key: str | None = None) -> float:
    """The step at which the mean reward of ten was GOOD, or the sum of a metric up to it. NaN where it never was."""
    done = next((step for step, reward in smooth(rows, "reward/mean") if step >= 10 and reward >= GOOD), math.nan)
    return done if key is None or math.isnan(done) else sum(row[key] for row in rows if WARM < row["step"] <= done)


def print_alone(runs: Mapping[tuple, Rows]) -> None:
    """What runs cost that had a GPU alone, and grpo's less gspo's, seed by seed."""

    def cell(values: Sequence[float]) -> str:
        return "not reached by all" if any(map(math.isnan, values)) else shown(values)

    if runs:
        print(table(METHODS, ALONE, lambda arm, f: cell([f(runs[arm, seed]) for seed in SEEDS])))
        less = table(["grpo"], ALONE, lambda arm, f: cell([f(runs[arm, s]) - f(runs["gspo", s]) for s in SEEDS]))
        print(f"less gspo, seed by seed\n{less}")


if __name__ == "__main__":
    main(str(__doc__), run, draw, MODEL)
