"""gspo and gspo_token where one turn of an episode of four is scored: searches of rate and range, runs, a figure, a table.

    python experiments/turns.py
    python experiments/turns.py --draw

Run from the repository's folder. The recipe is recipes/turns.toml. The learning rate of a method, and then its clip range
at that rate, are chosen on another seed than those that are reported. Writes docs/evidence/turns.jsonl (a row for each
evaluation and for each ten training steps) and turns.png.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import common
from common import EVIDENCE, FACTORS, SEARCH_SEED, SEEDS, Plan, main, metrics, read, shown, write

from gspo.reporting.seeds import seed_interval

METHODS = {
    "gspo": {"objective.name": "gspo", "advantage.credit": "response"},
    "gspo_token, the turn's own reward": {
        "objective.name": "gspo_token", "advantage.credit": "turn", "advantage.turn_discount": 0.0,
    },
    "gspo_token, all later rewards": {
        "objective.name": "gspo_token", "advantage.credit": "turn", "advantage.turn_discount": 1.0,
    },
}  # fmt: skip
WHOLE, OWN, LATER = METHODS
PAIRS = ((OWN, WHOLE), (LATER, WHOLE), (OWN, LATER))
COLOURS = dict(zip(METHODS, ("tab:orange", "tab:blue", "tab:green"), strict=True))
RATES = (1e-4, 2e-4, 4e-4)
SEARCH_STEPS, COMPARED_AT = 150, 50
"""Of the search, whose runs are compared at the evaluation nearest to the length of the runs that are reported."""
STEPS = 60
TURNS = 4
EVERY = 10
"""Training steps to a row."""
EVALUATED = 30
"""Steps from one evaluation to the next; the search has them where it is compared."""
SAMPLES = 4
"""800 episodes an evaluation: a standard error of 0.03 or less, problems being the units."""


def right_by_turn(lines: list[dict]) -> list[float]:
    """Share of episodes right at each turn, scored or not, from an evaluation's samples; a turn that is missing is wrong.

    An answer that the limit of tokens cuts ends its episode; a first one so cut has no turns in its line.
    """
    counts = [0] * TURNS
    for line in lines:
        problem = line["prompt"]
        for k, turn in enumerate(line.get("turns", [])):
            a, b = problem.rstrip("=").split("+")
            counts[k] += turn["text"] == str(int(a) + int(b))
            problem = turn["reply"][0]["content"] if turn["reply"] else ""
    return [count / len(lines) for count in counts]


def right_by_problem(lines: list[dict]) -> str:
    """How many of a problem's episodes got the reward, a digit a problem in their order."""
    counts: dict[str, int] = {}
    for line in lines:
        problem = line["id"].split("/")[1]
        counts[problem] = counts.get(problem, 0) + int(line["reward"])
    return "".join(map(str, counts.values()))


def summary(what: dict, folder: Path) -> list[dict]:
    """A row for each evaluation of a run and for each EVERY training steps."""
    out = []
    for row in (r for r in metrics(folder) if "evaluation/reward" in r):
        lines = (folder / "evaluation" / f"step-{row['step']:06d}.jsonl").read_text("utf-8").splitlines()
        samples = [json.loads(line) for line in lines]
        scores = {"held_out": row["evaluation/reward"], "held_out_by_turn": [round(x, 4) for x in right_by_turn(samples)]}
        out.append(what | {"step": row["step"]} | scores | {"right_by_problem": right_by_problem(samples)})
    trained = [r for r in metrics(folder) if "reward/mean" in r]
    for part in (trained[i : i + EVERY] for i in range(0, len(trained), EVERY)):
        mean = {
            key: round(sum(r[name] for r in part) / len(part), 5)
            for key, name in (("reward", "reward/mean"), ("clipped", "clip/sequence"), ("grad_norm", "update/grad_norm"))
        }
        out.append(what | {"step": part[-1]["step"], **mean})
    return out


def at(rows: list[dict], step: int, **labels: Any) -> float | None:
    """Held-out reward at a step of the run with these labels, None where it has not run."""
    found = [r for r in rows if "held_out" in r and r["step"] == step and all(r[k] == v for k, v in labels.items())]
    return found[0]["held_out"] if found else None


def chosen_rate(rows: list[dict], method: str) -> float:
    """The learning rate with the highest held-out reward in the search."""
    return max(RATES, key=lambda rate: at(rows, COMPARED_AT, what="search", method=method, rate=rate) or 0.0)


def chosen_scale(rows: list[dict], method: str) -> float:
    """The factor on the authors' range with the highest held-out reward in its search."""
    searched = {x: at(rows, STEPS, what="range search", method=method, scale=x) or 0.0 for x in FACTORS["gspo"]}
    return max(searched, key=lambda scale: searched[scale])


def run(output: Path) -> None:
    """The search, then every method at every seed; then both again for the clip range."""
    plan, rows = Plan("recipes/turns.toml", output / "turns", {"evaluation.samples": SAMPLES}), []
    for method in METHODS:
        for rate in RATES:
            rows += rows_of(plan, "search", method, SEARCH_SEED, rate)
    rates = {method: chosen_rate(rows, method) for method in METHODS}
    for method, rate in rates.items():
        for seed in SEEDS:
            rows += rows_of(plan, "run", method, seed, rate)
    for method, rate in rates.items():
        for scale in FACTORS["gspo"]:
            rows += rows_of(plan, "range search", method, SEARCH_SEED, rate, scale)
    for method, rate in rates.items():
        for seed in SEEDS:
            rows += rows_of(plan, "range chosen", method, seed, rate, chosen_scale(rows, method))
    write("turns", rows)


def rows_of(plan: Plan, what: str, method: str, seed: int, rate: float, scale: float = 1.0) -> list[dict]:
    """The rows of one run, with the authors' clip range times `scale`."""
    steps, every = (SEARCH_STEPS, COMPARED_AT) if what == "search" else (STEPS, EVALUATED)
    own = {**common.METHODS["gspo"].settings(rate, scale), **METHODS[method]}
    name = f"{list(METHODS).index(method)}-lr{rate:g}-x{scale:g}-{steps}"
    folder = plan.run(name, seed, {**own, "training.steps": steps, "evaluation.every": every})
    return summary({"what": what, "seed": seed, "method": method, "rate": rate, "scale": scale}, folder)


def table(rows: list[dict]) -> None:
    """Print the searches, and what the runs give."""
    for machine in (None, 2):
        searched = [row for row in rows if (row["what"], row.get("machine")) == ("search", machine)]
        for method, rate in product(METHODS, RATES if searched else ()):
            found = [at(searched, step, method=method, rate=rate) for step in (0, 50, 100, 150)]
            print(f"search {machine or ''}, {method}, {rate:g}, at steps 0, 50, 100, 150: {found}")
        for rate in RATES if searched else ():
            over_problems([row for row in searched if row["rate"] == rate], SEARCH_STEPS)
    for method in METHODS:
        found = {x: at(rows, STEPS, what="range search", method=method, scale=x) for x in FACTORS["gspo"]}
        print(f"{method}, at step {STEPS}, by factor on the range: {found}")
    found = {}
    for what, machine in (("run", None), ("run", 2), ("range chosen", None)):
        there = [row for row in rows if (row["what"], row.get("machine")) == (what, machine)]
        mine = [row for row in there if row["rate"] == chosen_rate(rows, row["method"])]
        if not mine:
            continue
        print(what, machine or "", {row["method"]: (row["rate"], row["scale"]) for row in mine})
        over_problems(mine, STEPS)
        print(f"before: {[at(mine, 0, method=WHOLE, seed=seed) for seed in SEEDS]}")
        found[what] = {m: [at(mine, STEPS, method=m, seed=seed) for seed in SEEDS] for m in METHODS}
        table_of_runs(found[what])
        for method, rate in sorted(
            {(row["method"], row["rate"]) for row in there} - {(r["method"], r["rate"]) for r in mine}
        ):
            other = [at(there, STEPS, method=method, rate=rate, seed=seed) for seed in SEEDS]
            less = [a - b for a, b in zip(other, found[what][method], strict=True)]
            print(f"{method} at {rate:g}: {shown(other)}, by seed {other}, less its other rate {shown(less)}")
    for method in METHODS:  # from the same cold starts, where the authors' range has run on the second machine
        gained = [a - b for a, b in zip(found["range chosen"][method], found["run"][method], strict=True)]
        print(f"{method}, own range less authors': {shown(gained)}, by seed {[round(x, 3) for x in gained]}")


def over_problems(rows: list[dict], step: int) -> None:
    """Print the differences between methods over held-out problems, each problem's share being the mean over seeds."""
    from gspo.evaluation.statistics import paired

    found = [r for r in rows if r["step"] == step and "held_out" in r]
    for one, other in PAIRS:
        shares = [
            [sum(map(int, digits)) / len(digits) / SAMPLES for digits in zip(*strings, strict=True)]
            for strings in ([r["right_by_problem"] for r in found if r["method"] == m] for m in (one, other))
        ]
        p = paired(*shares)
        d = f"{p.difference.mean:+.3f} [{p.difference.low:+.3f}, {p.difference.high:+.3f}]"
        print(f"rate {found[0]['rate']:g}, step {step}: {one} - {other}: {d}, sign-flip p {p.p_value:.4f}")


def table_of_runs(scores: dict[str, list[float]]) -> None:
    """Print scores by method, and their differences by seed."""
    from gspo.evaluation.statistics import paired

    for method, values in scores.items():
        mean, low, high = seed_interval(values)
        said = [round(v, 3) for v in values]
        print(f"{method}: {mean:.3f} [{low:.3f}, {high:.3f}], by seed {said}")
    for one, other in PAIRS:
        differences = [a - b for a, b in zip(scores[one], scores[other], strict=True)]
        mean, low, high = seed_interval(differences)
        p, said = paired(scores[one], scores[other]).p_value, [round(d, 3) for d in differences]
        print(f"{one} - {other}: {mean:+.3f} [{low:+.3f}, {high:+.3f}], sign-flip p {p:.3f}, by seed {said}")


def draw() -> None:
    """Reward of the scored turn by step; a panel a rate of the search, and one of the runs. Then the tables."""
    from matplotlib.figure import Figure

    rows = read("turns")
    first = [r for r in rows if r["what"] == "search" and "machine" not in r]
    panels = {f"search, rate {x:g}": [r for r in first if r["rate"] == x] for x in RATES}
    panels["other seeds, mean and range"] = [r for r in rows if r["what"] == "run" and "machine" not in r]
    panels["from other cold starts"] = [r for r in rows if r["what"] == "run" and "machine" in r and r["rate"] == RATES[0]]
    panels["from these, own clip ranges"] = [r for r in rows if r["what"] == "range chosen"]
    figure = Figure(figsize=(3.4 * len(panels), 3.8), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True)
    for ax, (title, some) in zip(axes, panels.items(), strict=True):
        for method, colour in COLOURS.items():
            for key, style in (("reward", "-"), ("held_out", "o")):
                lines: dict[int, list[float]] = {}
                for r in (r for r in some if key in r and r["method"] == method):
                    lines.setdefault(r["step"], []).append(r[key])
                steps = sorted(lines)
                ax.fill_between(
                    steps, [min(lines[s]) for s in steps], [max(lines[s]) for s in steps], alpha=0.15, color=colour
                )
                label = method if key == "reward" else None
                ax.plot(steps, [sum(lines[s]) / len(lines[s]) for s in steps], style, color=colour, label=label)
        ax.set(title=title, xlabel="step", ylim=(0.2, 0.75))
    axes[0].set(ylabel="reward of the scored turn")
    axes[0].legend(
        frameon=False, fontsize=8, loc="lower right", title="lines: in training; dots: held out", title_fontsize=8
    )
    figure.savefig(EVIDENCE / "turns.png", dpi=110)
    table(rows)


if __name__ == "__main__":
    main(str(__doc__), run, draw)
