"""A deep mixture of experts under gspo and grpo, each with and without routing replay.

    python experiments/routing_replay.py
    python experiments/routing_replay.py --draw

Run from the repository's folder. Writes docs/evidence/routing_replay.jsonl and .png.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
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
    labelled,
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

DIGITS = 4
DECODER = {
    "model.create.num_layers": 24,
    "model.create.hidden_size": 64,
    "model.create.num_experts": 32,
    "model.create.experts_per_token": 4,
    "model.create.moe_intermediate_size": 32,
    "cold_start.learning_rate": 1e-3,
}
"""Five million parameters, of which a token meets a seventh. Deep, since flips are said to grow with depth."""
SCORED = {"rollout.old_logprobs": "trainer", "training.schedule": "constant", "evaluation.every": 20}
"""In all arms: the scoring pass that replay needs, so that arms differ in nothing else."""
ARMS = {
    f"{objective}{' with replay' if replay == 'trainer' else ''}": (objective, replay)
    for objective in ("gspo", "grpo")
    for replay in ("none", "trainer")
}
RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
"""Of the search: the highest are meant to break something."""
SEARCH_STEPS, STEPS, PUSHED_STEPS = 40, 60, 40
MINIBATCHES = {4: STEPS, 8: PUSHED_STEPS, 16: PUSHED_STEPS}
"""Minibatches a rollout batch to steps: the paper's number, twice and four times it; eight samples each at 16."""
BOUNDARY = ((3e-4, 4), (3e-4, 8), (3e-4, 16), (1e-3, 4))
"""Learning rates and minibatches at which every arm is pushed at every seed, for SEARCH_STEPS steps."""
RANGES = {"gspo": 64.0, "grpo": 1 / 64}
"""Factors on the authors' clip ranges at which both are pushed again, at APART: gspo's then drops less, grpo's more."""
APART = (3e-4, 8)
"""Learning rate and minibatches at which the two were apart."""
MOE = (
    "moe/flips_by_minibatch", "moe/flips_by_layer", "moe/tokens_flipped", "moe/auxiliary_loss", "moe/replay_bytes",
    "moe/replay_s", "moe/flips_after_by_minibatch", "moe/tokens_flipped_after",
)  # fmt: skip


def run(output: Path) -> None:
    """The search at its own seed; then every arm at its own rate; the same with more minibatches; pushed; own ranges."""
    plan = sorting(DIGITS, output)
    plan = Plan(plan.recipe, output / "routing", {**plan.settings, **DECODER})
    rows, chosen = [], {}
    for arm in ARMS:
        found = {rate: trial(plan, arm, SEARCH_SEED, rate, 4, SEARCH_STEPS) for rate in RATES}
        rows += [row for trial_rows in found.values() for row in trial_rows]
        chosen[arm] = max(RATES, key=lambda rate: score(found[rate]))
    for minibatches, steps in MINIBATCHES.items():
        for seed in SEEDS:
            for arm in ARMS:
                rows += trial(plan, arm, seed, chosen[arm], minibatches, steps)
            write("routing_replay", rows)
    for rate, minibatches in BOUNDARY:
        for seed in SEEDS:
            for arm in ARMS:
                rows += pushed(trial(plan, arm, seed, rate, minibatches, SEARCH_STEPS))
            write("routing_replay", rows)
    for seed in SEEDS:
        for arm, scale in RANGES.items():
            rate, minibatches = APART
            rows += pushed(trial(plan, arm, seed, rate, minibatches, SEARCH_STEPS, scale=scale), scale=scale)

    def trials(what: str, jobs: Sequence[tuple]) -> list[Rows]:
        return [of_range(trial(plan, *job[:-1], scale=job[-1]), what, job[-1]) for job in jobs]

    write("routing_replay", rows + ranges(trials, chosen, 4, SEARCH_STEPS, STEPS))


def ranges(
    trials: Callable[[str, Sequence[tuple]], list[Rows]],
    rates: Mapping[str, float],
    minibatches: int,
    search_steps: int,
    steps: int,
) -> list[Mapping[str, Any]]:
    """Rows of a search of every arm's clip range at its own rate, and of the arms with what it chose at all seeds. trials:
    gives the rows, so labelled, of each (arm, seed, rate, minibatches, steps, scale)."""
    tried = {
        arm: [(arm, SEARCH_SEED, rates[arm], minibatches, search_steps, scale) for scale in FACTORS[objective]]
        for arm, (objective, _) in ARMS.items()
    }
    chosen, rows = best(lambda jobs: trials("range search", jobs), tried)
    jobs = [(arm, seed, rates[arm], minibatches, steps, job[-1]) for arm, job in chosen.items() for seed in SEEDS]
    return rows + [row for some in trials("range chosen", jobs) for row in some]


def of_range(rows: Rows, what: str, scale: float) -> list[dict[str, Any]]:
    """Rows of a run with the authors' range times `scale`, without lists by layer."""
    return [{k: v for k, v in row.items() if k != "moe/flips_by_layer"} | {"what": what, "scale": scale} for row in rows]


def pushed(rows: Rows, **labels: Any) -> list[dict[str, Any]]:
    """Rows of a run that was pushed: without lists by layer or minibatch, which those at the arms' own rates have."""
    what = {"what": "ranges" if labels else "pushed", **labels}
    return [{k: v for k, v in row.items() if not isinstance(v, list)} | what for row in rows]


def trial(
    plan: Plan,
    arm: str,
    seed: int,
    rate: float,
    minibatches: int,
    steps: int,
    model: str | None = None,
    scale: float = 1.0,
) -> list[dict[str, Any]]:
    """The rows of one run, from the seed's cold start or from `model`, with the authors' clip range times `scale`."""
    objective, replay = ARMS[arm]
    settings = {
        **METHODS[objective].settings(rate, scale),
        **SCORED,
        "training.replay": replay,
        "training.minibatches": minibatches,
        "training.steps": steps,
    }
    name = f"{objective}-{replay}-lr{rate:g}-n{minibatches}-{steps}" + (f"-x{scale:.4g}" if scale != 1 else "")
    folder = plan.run(name, seed, settings, model=model)
    labels = {"arm": arm, "seed": seed, "rate": rate, "minibatches": minibatches}
    kept = labelled(folder, what="search" if seed == SEARCH_SEED else "run", **labels)
    return [a | experts(b) for a, b in zip(kept, metrics(folder), strict=True)]


def experts(row: Mapping[str, Any]) -> dict[str, Any]:
    """What is committed of a step's `moe/`: flips by layer of each fifth step, load and dead experts over all layers."""
    kept = {key: short(row[key]) for key in MOE if row.get(key) is not None}
    if row["step"] % 5:
        kept.pop("moe/flips_by_layer", None)
    if row.get("moe/load_by_layer"):
        kept |= {"load": short(max(row["moe/load_by_layer"])), "dead": sum(row["moe/dead_experts_by_layer"])}
    return kept


# ---- what the rows say ------------------------------------------------------------------------------------

COLOURS = dict(zip(ARMS, ("tab:blue", "tab:cyan", "tab:red", "tab:orange"), strict=True))
COLUMNS = {
    "held-out pass@1, before": lambda rows: rows[0]["evaluation/pass@1"],
    "after": lambda rows: last(rows, "evaluation/pass@1"),
    "training reward, last 20 steps": score,
    "clipped sequences": lambda rows: mean(rows, "clip/sequence"),
    "clipped tokens": lambda rows: mean(rows, "clip/token"),
    "choices flipped, last minibatch": lambda rows: mean_of(rows, "moe/flips_by_minibatch", -1),
    "tokens with any flip": lambda rows: mean(rows, "moe/tokens_flipped"),
    "busiest expert over the mean, worst layer": lambda rows: mean(rows, "load"),
    "experts that no token chose, all layers": lambda rows: mean(rows, "dead"),
    "replay, ms a step": lambda rows: 1000 * mean(rows, "moe/replay_s"),
}
AFTER = {
    **{f"update {n}": lambda rows, n=n: mean_of(rows, "moe/flips_after_by_minibatch", n - 1) for n in (1, 2, 3, 4)},
    "tokens with any after the last": lambda rows: mean(rows, "moe/tokens_flipped_after"),
}
"""Choices flipped after each update of a step, by what routers choose of themselves, where runs tell it."""


LAYERS = {"first six": slice(6), "last six": slice(-6, None)}
"""Of which the flips are told with intervals."""


def flipped(rows: Rows, part: slice) -> float:
    """Mean over these layers of the share of choices that flipped."""
    return fmean(by_layer(rows)[part])


def mean_of(rows: Rows, key: str, place: int) -> float:
    """Mean of one place of a metric that is a list; places without a number are left out."""
    values = [row[key][place] for row in rows if row.get(key) and row[key][place] is not None]
    return sum(values) / len(values) if values else 0.0


def draw() -> None:
    """The figure, and on standard output the tables."""
    picture("routing_replay", RATES, tuple(MINIBATCHES))


def picture(
    name: str, rates: Sequence[float], minibatches: Sequence[int], places: Sequence[tuple[float, int]] = (APART,)
) -> None:
    """The same of the committed rows of that name: curves at the fewest and the most minibatches, or beside a single number
    of them those of the search; flips at the fewest; what was pushed at one or two `places`, rates and minibatches."""
    from matplotlib.figure import Figure

    rows = read(name)
    runs = by_run([row for row in rows if row["what"] == "run"], "minibatches", "arm", "seed")
    minibatches = [n for n in minibatches if any(n == number for number, _, _ in runs)]
    fewest, most = minibatches[0], minibatches[-1]
    hard = [row for row in rows if row["what"] in ("pushed", "ranges")]
    figure = Figure(figsize=(10, 9.9 if hard else 6.6), layout="constrained")
    (paper, more), (layers, flips), *below = figure.subplots(3 if hard else 2, 2)
    for arm, colour in COLOURS.items():
        for axis, number in ((paper, fewest), (more, most)):
            if mine := [run for (n, other, _), run in runs.items() if (n, other) == (number, arm)]:
                band(axis, [smooth(run, "reward/mean") for run in mine], label=arm, colour=colour)
        mine = [run for (n, other, _), run in runs.items() if (n, other) == (fewest, arm)]
        if "replay" not in arm and mine:
            per_layer = [by_layer(run) for run in mine]
            band(layers, [list(enumerate(flip, 1)) for flip in per_layer], label=arm, colour=colour)
        band(flips, [smooth(run, "moe/tokens_flipped") for run in mine], label=arm, colour=colour)
    paper.set(xlabel="step", ylabel="training reward", title=f"{fewest} minibatches: mean and range of seeds")
    more.set(xlabel="step", ylabel="training reward", title=f"{most} minibatches")
    if fewest == most:
        more.clear()
        _draw_search(more, rows, rates)
    layers.set(xlabel="layer", ylabel="choices flipped", title=f"in the last of {fewest} minibatches, without replay")
    flips.set(xlabel="step", ylabel="tokens with any flip", title=f"share of tokens in the last of {fewest} minibatches")
    layers.set_ylim(bottom=0)
    paper.legend(frameon=False, fontsize=8)
    for axis, place in zip(below[0] if hard else (), places, strict=False):
        _draw_pushed(axis, hard, place)
    if any(row["what"] == "ranges" for row in hard):
        _draw_ranges(below[0][1], hard, places[0])
    figure.savefig(EVIDENCE / f"{name}.png", dpi=110)
    print_tables(rows, runs, rates, minibatches)


def _pushed_curves(rows: Rows, place: tuple[float, int]) -> dict[tuple[str, float], list[list[tuple[float, float]]]]:
    """Rewards of the runs at a rate and minibatches, a curve a seed, by arm and factor on its authors' range."""
    there = [{"scale": 1.0, **row} for row in rows if (row["rate"], row["minibatches"]) == place]
    runs: dict[tuple[str, float], list] = {}
    for (arm, scale, _), run in by_run(there, "arm", "scale", "seed").items():
        runs.setdefault((arm, scale), []).append(smooth(run, "reward/mean"))
    return runs


def _draw_pushed(axis: Any, rows: Rows, place: tuple[float, int]) -> None:
    """All arms with their authors' ranges."""
    for (arm, scale), curves in _pushed_curves(rows, place).items():
        if scale == 1:
            band(axis, curves, label=arm, colour=COLOURS[arm])
    _finish(axis, f"pushed: {place[0]:g}, {place[1]} minibatches")


def _draw_ranges(axis: Any, rows: Rows, place: tuple[float, int]) -> None:
    """Those without replay, with other ranges too."""
    for (arm, scale), curves in _pushed_curves(rows, place).items():
        if "replay" not in arm:
            shade = COLOURS[arm] if scale == 1 else COLOURS[f"{arm} with replay"]
            band(axis, curves, label=f"{arm}, range x{scale:.4g}", colour=shade)
    _finish(axis, "the same without replay, other clip ranges")


def _finish(axis: Any, title: str) -> None:
    axis.set(xlabel="step", ylabel="training reward", title=title)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=8, loc="lower left")


def _draw_search(axis: Any, rows: Rows, rates: Sequence[float]) -> None:
    found = by_run([row for row in rows if row["what"] == "search"], "arm", "rate")
    for style, rate in zip(("-", "--", "-.", ":", (0, (1, 5)))[: len(rates)], rates, strict=True):
        for arm, colour in COLOURS.items():
            axis.plot(*zip(*smooth(found[arm, rate], "reward/mean"), strict=True), style, color=colour, linewidth=1.2)
        axis.plot([], [], style, color="grey", label=f"{rate:g}")
    axis.set(xlabel="step", ylabel="training reward", title="the search, by learning rate")
    axis.legend(frameon=False, fontsize=8)


def by_layer(rows: Rows) -> list[float]:
    """Mean over the steps of the share of choices that flipped, by layer."""
    lists: Sequence[list[float]] = [row["moe/flips_by_layer"] for row in rows if row.get("moe/flips_by_layer")]
    return [sum(layer) / len(layer) for layer in zip(*lists, strict=True)]


def print_tables(rows: Rows, runs: dict[tuple, Rows], rates: Sequence[float], minibatches: Sequence[int]) -> None:
    """The search, then each arm's numbers by minibatches, then what replay changes, seed by seed."""
    found = by_run([row for row in rows if row["what"] == "search"], "arm", "rate")
    print(table(ARMS, {f"{rate:g}": rate for rate in rates}, lambda arm, rate: f"{score(found[arm, rate]):.3f}"))
    for number in minibatches:
        seeds = sorted({seed for n, _, seed in runs if n == number})
        if not seeds:
            continue

        def cell(arm: str, value: Any, n: int = number, seeds: list[int] = seeds) -> str:
            return shown([value(runs[n, arm, seed]) for seed in seeds])

        def difference(objective: str, value: Any, n: int = number, seeds: list[int] = seeds) -> str:
            return shown([value(runs[n, f"{objective} with replay", s]) - value(runs[n, objective, s]) for s in seeds])

        print(f"{number} minibatches\n" + table(ARMS, COLUMNS, cell))
        print("with replay less without\n" + table(METHODS, COLUMNS, difference))
        layers = table(METHODS, LAYERS, lambda arm, part: cell(arm, lambda run: flipped(run, part)))
        print(f"choices flipped by layer\n{layers}")
    if any(row["what"] == "ranges" for row in rows):
        _print_ranges(rows)
    if any(row["what"] == "range search" for row in rows):
        _print_chosen_ranges(rows)
    _print_pushed(by_run([row for row in rows if row["what"] == "pushed"], "rate", "minibatches", "arm", "seed"))


DIFFERENCES = (
    "gspo with replay less gspo", "grpo with replay less grpo", "gspo less grpo", "gspo with replay less grpo with replay",
)  # fmt: skip
PUSHED = {
    "training reward, last 20 steps": score,
    "held-out pass@1 after": lambda rows: last(rows, "evaluation/pass@1"),
}


def _print_pushed(runs: dict[tuple, Rows]) -> None:
    """Each arm where all were pushed, and with replay less without, seed by seed."""
    places = {f"{rate:g}, {n} minibatches": (rate, n) for rate, n, _, _ in runs}
    for title, value in PUSHED.items() if runs else ():

        def by_seed(arm: str, place: tuple[float, int], value: Any = value) -> list[float]:
            return [value(run) for (rate, n, of, _), run in sorted(runs.items()) if (rate, n, of) == (*place, arm)]

        def difference(pair: str, place: tuple[float, int]) -> str:
            more, less = (by_seed(arm, place) for arm in pair.split(" less "))
            return shown([a - b for a, b in zip(more, less, strict=True)])

        print(f"pushed: {title}\n" + table(ARMS, places, lambda arm, place: shown(by_seed(arm, place))))
        print(table(DIFFERENCES, places, difference))


def _print_chosen_ranges(rows: Rows) -> None:
    """The search of the range at each arm's own rate, the arms with what it chose, and less the authors' range."""
    searched = by_run([row for row in rows if row["what"] == "range search"], "arm", "rate", "scale")
    for (arm, rate, scale), run in searched.items():
        print(f"{arm} at {rate:g}, range x{scale:.4g}: {score(run):.3f}")
    runs = by_run([row for row in rows if row["what"] == "range chosen"], "arm", "seed")
    authors = by_run([row for row in rows if row["what"] == "range authors'"], "arm", "seed") or by_run(
        [row for row in rows if row["what"] == "run" and row["minibatches"] == 4], "arm", "seed"
    )

    def values(arm: str, value: Any, of: dict[tuple, Rows] = runs) -> list[float]:
        return [value(of[arm, seed]) for seed in SEEDS]

    def difference(pair: str, value: Any) -> str:
        more, less = (values(arm, value) for arm in pair.split(" less "))
        return shown([a - b for a, b in zip(more, less, strict=True)])

    def gained(arm: str, value: Any) -> str:
        return shown([a - b for a, b in zip(values(arm, value), values(arm, value, authors), strict=True)])

    moved = [arm for arm in ARMS if runs[arm, SEEDS[0]][0]["scale"] != 1 and (arm, SEEDS[0]) in authors]
    print("range chosen too", {arm: runs[arm, SEEDS[0]][0]["scale"] for arm in ARMS})
    print(table(ARMS, COLUMNS, lambda arm, value: shown(values(arm, value))) + table(DIFFERENCES, COLUMNS, difference))
    if all(any("moe/tokens_flipped_after" in row for row in run) for run in runs.values()):
        print("flips\n" + table(ARMS, AFTER, lambda arm, value: shown(values(arm, value), 4)))
    print("authors' range\n" + table(moved, COLUMNS, lambda arm, value: shown(values(arm, value, authors))))
    print("chosen less authors'\n" + table(moved, COLUMNS, gained))


def _print_ranges(rows: Rows) -> None:
    """Both objectives where they were apart, with the authors' ranges and with others."""
    rate, minibatches = APART
    own = [row for row in rows if row["what"] == "pushed" and (row["rate"], row["minibatches"]) == (rate, minibatches)]
    runs = by_run(
        [{"scale": 1.0, **row} for row in (*own, *(r for r in rows if r["what"] == "ranges"))], "arm", "scale", "seed"
    )
    lines = {f"{arm}, x{scale:.4g}": (arm, scale) for arm, other in RANGES.items() for scale in (1.0, other)}
    columns = PUSHED | {key: value for key, value in COLUMNS.items() if "clipped" in key}
    columns["sd of s"] = lambda run: mean(run, "ratio/sequence_std")
    print(table(lines, columns, lambda name, value: shown([value(runs[*lines[name], seed]) for seed in SEEDS])))


if __name__ == "__main__":
    main(str(__doc__), run, draw)
