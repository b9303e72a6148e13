"""A deep mixture of experts under gspo and grpo, each with and without routing replay.

    python experiments/routing_replay.py
    python experiments/routing_replay.py --draw

Run from the repository's folder. Writes docs/evidence/routing_replay.jsonl and .png.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import cpu_count
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
    by_run,
    last,
    main,
    mean,
    read,
    score,
    shown,
    side_by_side,
    smooth,
    sorting,
    table,
    write,
)
from replay_arms import ARMS, PARTS, all_pushed, trials_of, with_own_rates

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
RATES = {4: (3e-5, 1e-4, 3e-4, 1e-3, 3e-3), 8: (3e-5, 1e-4, 3e-4), 16: (3e-5, 1e-4, 3e-4)}
"""Of the search, by minibatches a rollout batch: the paper's number, twice and four times it, eight samples each at 16. The
highest rates are meant to break something."""
SEARCH_STEPS = 40
STEPS = {4: 60, 8: 40, 16: 40}
"""Of the runs that are compared."""
BOUNDARY = ((3e-4, 4), (3e-4, 8), (3e-4, 16), (1e-3, 4))
"""Learning rates and minibatches at which every arm is pushed at every seed, for SEARCH_STEPS steps, with its authors' clip
range and with its own."""
DRAWN = BOUNDARY[1:2]
"""Where arms were apart."""


def run(output: Path) -> None:
    """By minibatches the search of every arm's rate, and the arms at it; then all pushed; everywhere own ranges too."""
    plan, seeds = sorting(DIGITS, output), (SEARCH_SEED, *SEEDS)
    plan = Plan(plan.recipe, output / "routing", {**plan.settings, **DECODER})
    starts = dict(zip(seeds, side_by_side(plan.start, [(seed,) for seed in seeds], cpu_count()), strict=True))
    trials, rows = trials_of(plan, starts, cpu_count() or 1), list[Mapping[str, Any]]()
    for number, steps in STEPS.items():
        rows += with_own_rates(trials, FACTORS, RATES[number], number, SEARCH_STEPS, steps)
    for rate, number in BOUNDARY:
        rows += all_pushed(trials, FACTORS, rate, number, SEARCH_STEPS)
    write("routing_replay", rows)


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
    **{f"update {n}": lambda rows, n=n: mean_of(rows, "moe/flips_after_by_minibatch", n - 1) for n in (1, 2, 3)},
    "the last": lambda rows: mean_of(rows, "moe/flips_after_by_minibatch", -1),
    "tokens with any after it": lambda rows: mean(rows, "moe/tokens_flipped_after"),
}
"""Choices flipped after each update of a step, by what routers choose of themselves, where runs tell it."""


LAYERS = {name: lambda rows, part=part: fmean(by_layer(rows)[part]) for name, part in PARTS.items()}
"""Mean over layers of the share of choices that flipped."""
AFTER_LAYERS = {
    **{
        f"{name}, {when}": lambda rows, key=f"after, {name}", at=at: mean_of(rows, key, at)
        for name in PARTS
        for when, at in {"update 1": 0, "update 2": 1, "the last": -1}.items()
    },
    **{
        f"tokens with any, update {n}": lambda rows, n=n: mean_of(rows, "moe/tokens_flipped_after_by_minibatch", n - 1)
        for n in (1, 2)
    },
}
"""The same by layer, and of tokens with any flip, where runs tell it after each update."""


def mean_of(rows: Rows, key: str, place: int) -> float:
    """Mean of one place of a metric that is a list; places without a number are left out."""
    values = [row[key][place] for row in rows if row.get(key) and row[key][place] is not None]
    return sum(values) / len(values) if values else 0.0


def draw() -> None:
    """The figure, of the last machine's runs; on standard output the tables of each machine's, and of what ran on both."""
    rows = [{"machine": 1, **row} for row in read("routing_replay")]
    for (machine,), some in by_run(rows, "machine").items():
        print(f"machine {machine}")
        print_tables(some)
    picture("routing_replay", some, DRAWN)
    for what, columns in {"run": COLUMNS, "pushed": PUSHED}.items():
        averaged = {name: lambda pair, value=value: fmean(map(value, pair)) for name, value in columns.items()}
        for (rate, n), there in by_run([row for row in rows if row["what"] == what], "rate", "minibatches").items():
            runs: dict[tuple, list[Rows]] = {}
            for (arm, seed, _), run in by_run(there, "arm", "seed", "machine").items():
                runs.setdefault((arm, seed), []).append(run)
            if both := {key: pair for key, pair in runs.items() if len(pair) == 2}:
                print(f"both machines, a seed's two runs averaged, {what}: {rate:g}, {n} minibatches")
                _print_arms(both, averaged)


def picture(name: str, rows: Rows, places: Sequence[tuple[float, int]] = ()) -> None:
    """The same of such rows: curves at the fewest and the most minibatches, or beside a single number of them those of the
    search; flips at the fewest; what was pushed at two `places`, rates and minibatches, or at one with either range."""
    from matplotlib.figure import Figure

    runs = by_run([row for row in rows if row["what"] == "run"], "minibatches", "arm", "seed")
    fewest, most = min(n for n, _, _ in runs), max(n for n, _, _ in runs)
    figure = Figure(figsize=(10, 9.9 if places else 6.6), layout="constrained")
    (paper, more), (layers, flips), *below = figure.subplots(3 if places else 2, 2)
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
        _draw_search(more, rows)
    layers.set(xlabel="layer", ylabel="choices flipped", title=f"in the last of {fewest} minibatches, without replay")
    flips.set(xlabel="step", ylabel="tokens with any flip", title=f"share of tokens in the last of {fewest} minibatches")
    layers.set_ylim(bottom=0)
    paper.legend(frameon=False, fontsize=8)
    for axis, place in zip(below[0] if places else (), places, strict=False):
        _draw_pushed(axis, rows, "pushed", place)
    if len(places) == 1:
        _draw_pushed(below[0][1], rows, "pushed range chosen", places[0])
    figure.savefig(EVIDENCE / f"{name}.png", dpi=110)


def _draw_pushed(axis: Any, rows: Rows, what: str, place: tuple[float, int]) -> None:
    """Rewards of the arms at a rate and minibatches, all with their authors' ranges or with their own."""
    there = [{"scale": 1.0, **row} for row in rows if row["what"] == what and (row["rate"], row["minibatches"]) == place]
    for (arm, scale), some in by_run(there, "arm", "scale").items():
        curves = [smooth(run, "reward/mean") for run in by_run(some, "seed").values()]
        band(axis, curves, label=arm + (f", range x{scale:.4g}" if scale != 1 else ""), colour=COLOURS[arm])
    title = f"pushed: {place[0]:g}, {place[1]} minibatches" + (", own clip ranges" if "chosen" in what else "")
    axis.set(xlabel="step", ylabel="training reward", title=title)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=8, loc="lower left")


def _draw_search(axis: Any, rows: Rows) -> None:
    found = by_run([row for row in rows if row["what"] == "search"], "arm", "rate")
    rates = sorted({rate for _, rate in found})
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


def print_tables(rows: Rows) -> None:
    """By minibatches the searches and each arm's numbers, with either clip range; then what was pushed."""
    for (n,), some in by_run([row for row in rows if row["what"] == "search"], "minibatches").items():
        found = by_run(some, "arm", "rate")
        rates = {f"{rate:g}": rate for rate in sorted({rate for _, rate in found})}
        print(f"search, {n} minibatches\n" + table(ARMS, rates, lambda arm, rate, of=found: f"{score(of[arm, rate]):.3f}"))
    for (n,), some in by_run([row for row in rows if row["what"] == "run"], "minibatches").items():
        runs = by_run(some, "arm", "seed")
        print(f"{n} minibatches, rates { {arm: run[0]['rate'] for (arm, _), run in runs.items()} }")
        _print_arms(runs)
        layers = table(METHODS, LAYERS, lambda arm, part, of=runs: shown(_values(of, arm, part)))
        print(f"choices flipped by layer\n{layers}")
    for (rate, n), some in by_run([row for row in rows if row["what"] == "pushed"], "rate", "minibatches").items():
        print(f"pushed: {rate:g}, {n} minibatches")
        _print_arms(by_run(some, "arm", "seed"), PUSHED)
    searched = by_run(
        [row for row in rows if row["what"].endswith("range search")], "what", "minibatches", "arm", "rate", "scale"
    )
    for (what, n, arm, rate, scale), run in searched.items():
        print(f"{what}, {n} minibatches: {arm} at {rate:g}, range x{scale:.4g}: {score(run):.3f}")
    for (n,), some in by_run([row for row in rows if row["what"] == "range chosen"], "minibatches").items():
        print(f"range chosen, {n} minibatches")
        _print_ranges([row for row in rows if row["minibatches"] == n], "range", by_run(some, "arm", "seed"), COLUMNS)
    for place, some in by_run([row for row in rows if row["what"] == "pushed range chosen"], "rate", "minibatches").items():
        print("pushed range chosen: {:g}, {} minibatches".format(*place))
        there = [row for row in rows if (row["rate"], row["minibatches"]) == place]
        _print_ranges(there, "pushed range", by_run(some, "arm", "seed"), PUSHED)


DIFFERENCES = (
    "gspo with replay less gspo", "grpo with replay less grpo", "gspo less grpo", "gspo with replay less grpo with replay",
)  # fmt: skip
PUSHED = {
    "training reward, last 20 steps": score,
    "held-out pass@1 after": lambda rows: last(rows, "evaluation/pass@1"),
    "clipped sequences": lambda rows: mean(rows, "clip/sequence"),
    "clipped tokens": lambda rows: mean(rows, "clip/token"),
    "sd of s": lambda rows: mean(rows, "ratio/sequence_std"),
}


def _values(runs: Mapping[tuple, Any], arm: str, value: Callable[[Any], float]) -> list[float]:
    return [value(run) for (other, _), run in sorted(runs.items()) if other == arm]


def _print_arms(runs: Mapping[tuple, Any], columns: Mapping[str, Any] = COLUMNS) -> None:
    """Each arm's numbers, and what of them differs, seed by seed; runs by arm and seed."""
    arms = [arm for arm in ARMS if any(arm == other for other, _ in runs)]
    pairs = [pair for pair in DIFFERENCES if set(pair.split(" less ")) <= set(arms)]

    def difference(pair: str, value: Any) -> str:
        more, less = (_values(runs, arm, value) for arm in pair.split(" less "))
        return shown([a - b for a, b in zip(more, less, strict=True)])

    print(table(arms, columns, lambda arm, value: shown(_values(runs, arm, value))) + table(pairs, columns, difference))
    if all(any("moe/flips_after_by_minibatch" in row for row in run) for run in runs.values()):
        print("flips\n" + table(arms, AFTER, lambda arm, value: shown(_values(runs, arm, value), 4)))
    if all(any("after, first six" in row for row in run) for run in runs.values()):
        print("flips by layer\n" + table(arms, AFTER_LAYERS, lambda arm, value: shown(_values(runs, arm, value), 4)))


def _print_ranges(rows: Rows, what: str, runs: Mapping[tuple, Rows], columns: Mapping[str, Any]) -> None:
    """The arms with what the search of their range chose, and less the authors' range at their rate."""
    scales = {arm: (run[0]["rate"], run[0]["scale"]) for (arm, _), run in runs.items()}
    same = "pushed" if "pushed" in what else "run"
    there = [row for row in rows if row["what"] == f"{what} authors'"] or [row for row in rows if row["what"] == same]
    authors = by_run([row for row in there if row["rate"] == scales.get(row["arm"], (None,))[0]], "arm", "seed")
    moved = [arm for arm, (_, scale) in scales.items() if scale != 1 and _values(authors, arm, score)]

    def gained(arm: str, value: Any) -> str:
        return shown([a - b for a, b in zip(_values(runs, arm, value), _values(authors, arm, value), strict=True)])

    print(f"rates and ranges {scales}")
    _print_arms(runs, columns)
    print("authors' range\n" + table(moved, columns, lambda arm, value: shown(_values(authors, arm, value))))
    print("chosen less authors'\n" + table(moved, columns, gained))


if __name__ == "__main__":
    main(str(__doc__), run, draw)
