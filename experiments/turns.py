"""gspo and gspo_token where one turn of an episode of four is scored: searches of rate and range, runs, a figure, a table.

    python experiments/turns.py
    python experiments/turns.py --draw

Run from the repository's folder. The recipe is recipes/turns.toml. The learning rate of a method, and then its clip range
at that rate, are chosen on another seed than those that are reported. Writes docs/evidence/turns.jsonl (a row for each
evaluation and for each ten training steps) and turns.png.
"""

from __future__ import annotations

import json
from pathlib import Path

from common import EVIDENCE, SEARCH_SEED, SEEDS, Plan, main, metrics, read, write
from common import METHODS as OBJECTIVES

from gspo.reporting.seeds import seed_interval

METHODS = {
    "gspo": {"objective.name": "gspo", "advantage.credit": "response"},
    "gspo_token, the turn's own reward": {"advantage.credit": "turn", "advantage.turn_discount": 0.0},
    "gspo_token, all later rewards": {"advantage.credit": "turn", "advantage.turn_discount": 1.0},
}
WHOLE, OWN, LATER = METHODS
PAIRS = ((OWN, WHOLE), (LATER, WHOLE), (OWN, LATER))
COLOURS = dict(zip(METHODS, ("tab:orange", "tab:blue", "tab:green"), strict=True))
RATES = (1e-4, 2e-4, 4e-4)
SEARCH_STEPS, COMPARED_AT = 150, 50
"""Of the search, whose runs are compared at the evaluation nearest to the length of the runs that are reported."""
STEPS = 60
SCALES = (1.0, 4.0, 16.0, 64.0, 256.0)
"""Factors on the authors' clip range, searched at each method's own rate in runs of STEPS."""
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


def at(rows: list[dict], method: str, seed: int, rate: float, step: int, scale: float | None = None) -> float | None:
    """Held-out reward of a run at a step, None where it has not run. scale: of runs whose range was searched or chosen."""
    found = [r for r in rows if "held_out" in r and (r["method"], r["seed"], r["rate"]) == (method, seed, rate)]
    return next((r["held_out"] for r in found if r["step"] == step and r.get("scale") == scale), None)


def chosen_rate(rows: list[dict], method: str) -> float:
    """The learning rate with the highest held-out reward in the search."""
    return max(RATES, key=lambda rate: at(rows, method, SEARCH_SEED, rate, COMPARED_AT) or 0.0)


def chosen_scale(rows: list[dict], method: str) -> float:
    """The factor on the range with the highest held-out reward in its search."""
    rate = chosen_rate(rows, method)
    return max(SCALES, key=lambda scale: at(rows, method, SEARCH_SEED, rate, STEPS, scale) or 0.0)


def run(output: Path) -> None:
    """The search, then every method at every seed; then both again for the clip range."""
    plan, rows = Plan("recipes/turns.toml", output / "turns", {"evaluation.samples": SAMPLES}), []
    for method in METHODS:
        for rate in RATES:
            rows += rows_of(plan, method, SEARCH_SEED, rate)
    for method in METHODS:
        for seed in SEEDS:
            rows += rows_of(plan, method, seed, chosen_rate(rows, method))
    for method in METHODS:
        for scale in SCALES:
            rows += rows_of(plan, method, SEARCH_SEED, chosen_rate(rows, method), scale)
    for method in METHODS:
        for seed in SEEDS:
            rows += rows_of(plan, method, seed, chosen_rate(rows, method), chosen_scale(rows, method))
    write("turns", rows)


def rows_of(plan: Plan, method: str, seed: int, rate: float, scale: float | None = None) -> list[dict]:
    """The rows of one run, with the authors' range times `scale`; None is the recipe's range and a search of rates."""
    steps, every = (SEARCH_STEPS, COMPARED_AT) if seed == SEARCH_SEED and scale is None else (STEPS, EVALUATED)
    settings = {"training.steps": steps, "training.learning_rate": rate, "evaluation.every": every, **METHODS[method]}
    name, labels = f"{list(METHODS).index(method)}-lr{rate:g}", {"seed": seed, "method": method, "rate": rate}
    if scale is not None:
        ranges = OBJECTIVES["gspo"].settings(rate, scale)
        settings |= {key: ranges[key] for key in ("objective.clip_low", "objective.clip_high")}
        name, labels = f"{name}-x{scale:g}", labels | {"scale": scale}
    return summary(labels, plan.run(name, seed, settings))


def table(rows: list[dict]) -> None:
    """Print the search, and what the runs give."""
    for method in METHODS:
        for rate in RATES:
            found = [at(rows, method, SEARCH_SEED, rate, step) for step in (0, 50, 100, 150)]
            print(f"search, {method}, {rate:g}, at steps 0, 50, 100, 150: {found}")
    for rate in RATES:
        over_problems(rows, rate, SEARCH_STEPS, (SEARCH_SEED,))
    scores = {m: [at(rows, m, s, chosen_rate(rows, m), STEPS) for s in SEEDS] for m in METHODS}
    over_problems(rows, chosen_rate(rows, WHOLE), STEPS, SEEDS)
    table_of_runs(rows, scores)


def table_of_ranges(rows: list[dict], chosen: list[dict]) -> None:
    """Print the search of the range, and what the runs give with what it chose. chosen: the rows of other ranges."""
    for method in METHODS:
        rate = chosen_rate(rows, method)
        found = {f"{scale:g}": at(rows, method, SEARCH_SEED, rate, STEPS, scale) for scale in SCALES}
        print(f"{method} at {rate:g}, step {STEPS}, by factor on the range: {found}")
    scales = {m: chosen_scale(rows, m) for m in METHODS}
    print(f"factors chosen: {scales}")
    over_problems([r for r in chosen if r["scale"] == scales[r["method"]]], chosen_rate(rows, WHOLE), STEPS, SEEDS)
    table_of_runs(rows, {m: [at(rows, m, s, chosen_rate(rows, m), STEPS, scales[m]) for s in SEEDS] for m in METHODS})
    for method in METHODS:
        rate, scale = chosen_rate(rows, method), scales[method]
        more = [at(rows, method, s, rate, STEPS, scale) - at(rows, method, s, rate, STEPS) for s in SEEDS]
        mean, low, high = seed_interval(more)
        print(f"{method}, less the authors' range: {mean:+.3f} [{low:+.3f}, {high:+.3f}]")


def over_problems(rows: list[dict], rate: float, step: int, seeds: tuple[int, ...]) -> None:
    """Print the differences between methods over held-out problems, each problem's share being the mean over seeds."""
    from gspo.evaluation.statistics import paired

    found = [r for r in rows if (r["rate"], r["step"]) == (rate, step) and r["seed"] in seeds and "held_out" in r]
    for one, other in PAIRS:
        shares = [
            [sum(map(int, digits)) / len(digits) / SAMPLES for digits in zip(*strings, strict=True)]
            for strings in ([r["right_by_problem"] for r in found if r["method"] == m] for m in (one, other))
        ]
        if all(shares):
            p = paired(*shares)
            d = f"{p.difference.mean:+.3f} [{p.difference.low:+.3f}, {p.difference.high:+.3f}]"
            print(f"rate {rate:g}, step {step}, seeds {seeds}: {one} - {other}: {d}, sign-flip p {p.p_value:.4f}")


def table_of_runs(rows: list[dict], scores: dict[str, list[float]]) -> None:
    """Print scores by method, and their differences by seed."""
    from gspo.evaluation.statistics import paired

    for method, values in scores.items():
        mean, low, high = seed_interval(values)
        said = [round(v, 3) for v in values]
        print(f"{method} at {chosen_rate(rows, method):g}: {mean:.3f} [{low:.3f}, {high:.3f}], by seed {said}")
    for one, other in PAIRS:
        differences = [a - b for a, b in zip(scores[one], scores[other], strict=True)]
        mean, low, high = seed_interval(differences)
        p, said = paired(scores[one], scores[other]).p_value, [round(d, 3) for d in differences]
        print(f"{one} - {other}: {mean:+.3f} [{low:+.3f}, {high:+.3f}], sign-flip p {p:.3f}, by seed {said}")


def draw() -> None:
    """Reward of the scored turn by step; a panel a rate of the search, and one of the runs. Then the tables."""
    from matplotlib.figure import Figure

    every = read("turns")
    rows = [row for row in every if "scale" not in row]
    panels = {
        f"search, rate {rate:g}": [r for r in rows if r["seed"] == SEARCH_SEED and r["rate"] == rate] for rate in RATES
    }
    reported = [r for r in rows if r["seed"] in SEEDS and r["rate"] == chosen_rate(rows, r["method"])]
    panels["other seeds, mean and range"] = reported
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
    if chosen := [row for row in every if "scale" in row]:
        table_of_ranges(every, chosen)


if __name__ == "__main__":
    main(str(__doc__), run, draw)
