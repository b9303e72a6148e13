"""gspo and gspo_token where one turn of an episode of four is scored: a search of learning rates, runs, a figure, a table.

    python experiments/turns.py                    # the search, then the runs: about 50 minutes on one core
    python experiments/turns.py --draw             # figure and tables from the committed rows

Run from the folder above experiments. The recipe is recipes/turns.toml; any other option is a setting of it, such as
`--rollout.group_size 4`. Each seed has one cold start, from which every method trains. The learning rate of a method is
chosen on other seeds than those that are reported. Rows that are there are not run again. Writes docs/evidence/turns.jsonl
(a row for each evaluation and for each ten training steps) and turns.png beside it.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence"
ROWS = EVIDENCE / "turns.jsonl"

METHODS = {
    "gspo": {"objective": {"name": "gspo"}, "advantage": {"credit": "response"}},
    "gspo_token, the turn's own reward": {"advantage": {"credit": "turn", "turn_discount": 0.0}},
    "gspo_token, all later rewards": {"advantage": {"credit": "turn", "turn_discount": 1.0}},
}
WHOLE, OWN, LATER = METHODS
PAIRS = ((OWN, WHOLE), (LATER, WHOLE), (OWN, LATER))
COLOURS = dict(zip(METHODS, ("tab:orange", "tab:blue", "tab:green"), strict=True))
RATES = (1e-4, 2e-4, 4e-4)
SEARCH_SEEDS, SEARCH_STEPS, COMPARED_AT = (100,), 150, 50
"""Of the search, whose runs are compared at the evaluation nearest to the length of the runs that are reported."""
SEEDS = (0, 1, 2)
STEPS = 60
TURNS = 4
EVERY = 10
"""Training steps to a row."""
EVALUATION = {"samples": 4, "every": 30}
"""800 episodes an evaluation: a standard error of 0.03 or less, problems being the units."""

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t with n - 1 degrees of freedom at 0.975, by n."""


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean and the ends of its 95% interval by Student's t: seeds are few, and a bootstrap of six is too narrow."""
    n, mean = len(values), math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = T_95[n] * deviation / math.sqrt(n)
    return mean, mean - half, mean + half


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


def train_one(seed: int, method: str, rate: float, steps: int, output: str, overrides: list[str]) -> list[dict]:
    """The rows of one run."""
    from gspo.cold_start import cold_start
    from gspo.loop import train
    from gspo.recipe import build, load

    values = load("recipes/turns.toml", overrides).model_dump(mode="json")
    values |= {"seed": seed, "output": output}
    imitated = cold_start(build(values | {"name": f"turns-{seed}-start"}), resume=True)
    values |= {"cold_start": None, "model": {"path": str(imitated)}}
    values["evaluation"] |= EVALUATION | ({"every": COMPARED_AT} if seed in SEARCH_SEEDS else {})
    values["training"] |= {"steps": steps, "learning_rate": rate}
    name = f"turns-{seed}-{list(METHODS).index(method)}-{rate:g}"
    folder = train(build(values | METHODS[method] | {"name": name}), resume=(Path(output) / name).exists())
    return summary({"seed": seed, "method": method, "rate": rate}, folder)


def summary(what: dict, folder: Path) -> list[dict]:
    """A row for each evaluation of a run and for each EVERY training steps."""
    from gspo.reporting.records import read_metrics

    metrics = list(read_metrics(folder))
    out = []
    for row in (r for r in metrics if "evaluation/reward" in r):
        lines = (folder / "evaluation" / f"step-{row['step']:06d}.jsonl").read_text("utf-8").splitlines()
        samples = [json.loads(line) for line in lines]
        scores = {"held_out": row["evaluation/reward"], "held_out_by_turn": [round(x, 4) for x in right_by_turn(samples)]}
        out.append(what | {"step": row["step"]} | scores | {"right_by_problem": right_by_problem(samples)})
    trained = [r for r in metrics if "reward/mean" in r]
    for part in (trained[i : i + EVERY] for i in range(0, len(trained), EVERY)):
        mean = {
            key: round(sum(r[name] for r in part) / len(part), 5)
            for key, name in (("reward", "reward/mean"), ("clipped", "clip/sequence"), ("grad_norm", "update/grad_norm"))
        }
        out.append(what | {"step": part[-1]["step"], **mean})
    return out


def read() -> list[dict]:
    """All rows so far."""
    return [json.loads(line) for line in ROWS.read_text("utf-8").splitlines()] if ROWS.exists() else []


def at(rows: list[dict], method: str, seed: int, rate: float, step: int) -> float | None:
    """Held-out reward of a run at a step, None where it has not run."""
    found = [r for r in rows if "held_out" in r and (r["method"], r["seed"], r["rate"]) == (method, seed, rate)]
    return next((r["held_out"] for r in found if r["step"] == step), None)


def chosen_rate(rows: list[dict], method: str) -> float:
    """The learning rate with the highest held-out reward, mean over the seeds of the search."""
    return max(RATES, key=lambda rate: sum(at(rows, method, s, rate, COMPARED_AT) or 0.0 for s in SEARCH_SEEDS))


def run_missing(wanted: list[tuple[int, str, float]], steps: int, output: str, overrides: list[str]) -> None:
    """Run what has no rows, and write them after each run."""
    for seed, method, rate in wanted:
        if at(read(), method, seed, rate, steps) is None:
            rows = train_one(seed, method, rate, steps, output, overrides)
            ROWS.write_text("".join(json.dumps(row) + "\n" for row in read() + rows), "utf-8")


def table(rows: list[dict], seeds: tuple[int, ...]) -> None:
    """Print the search, and what the runs give."""
    for method in METHODS:
        for rate in RATES:
            found = [[at(rows, method, s, rate, step) for step in (0, 50, 100, 150)] for s in SEARCH_SEEDS]
            print(f"search, {method}, {rate:g}, at steps 0, 50, 100, 150: {found}")
    for rate in RATES:
        over_problems(rows, rate, SEARCH_STEPS, SEARCH_SEEDS)
    scores = {m: [at(rows, m, s, chosen_rate(rows, m), STEPS) for s in seeds] for m in METHODS}
    known = [k for k in range(len(seeds)) if all(values[k] is not None for values in scores.values())]
    print(f"seeds with all methods: {[seeds[k] for k in known]}")
    if len(known) > 1:
        over_problems(rows, chosen_rate(rows, WHOLE), STEPS, tuple(seeds[k] for k in known))
        table_of_runs(rows, {m: [values[k] for k in known] for m, values in scores.items()})


def over_problems(rows: list[dict], rate: float, step: int, seeds: tuple[int, ...]) -> None:
    """Print the differences between methods over held-out problems, each problem's share being the mean over seeds."""
    from gspo.evaluation.statistics import paired

    found = [r for r in rows if (r["rate"], r["step"]) == (rate, step) and r["seed"] in seeds and "held_out" in r]
    for one, other in PAIRS:
        shares = [
            [sum(map(int, digits)) / len(digits) / EVALUATION["samples"] for digits in zip(*strings, strict=True)]
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
        mean, low, high = interval(values)
        said = [round(v, 3) for v in values]
        print(f"{method} at {chosen_rate(rows, method):g}: {mean:.3f} [{low:.3f}, {high:.3f}], by seed {said}")
    for one, other in PAIRS:
        differences = [a - b for a, b in zip(scores[one], scores[other], strict=True)]
        mean, low, high = interval(differences)
        p, said = paired(scores[one], scores[other]).p_value, [round(d, 3) for d in differences]
        print(f"{one} - {other}: {mean:+.3f} [{low:+.3f}, {high:+.3f}], sign-flip p {p:.3f}, by seed {said}")


def draw(rows: list[dict], seeds: tuple[int, ...]) -> None:
    """turns.png: reward of the scored turn by step; a panel a rate of the search, and one of the runs."""
    from matplotlib.figure import Figure

    panels = {
        f"search, rate {rate:g}": [r for r in rows if r["seed"] in SEARCH_SEEDS and r["rate"] == rate] for rate in RATES
    }
    if reported := [r for r in rows if r["seed"] in seeds and r["rate"] == chosen_rate(rows, r["method"])]:
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


def main() -> None:
    """Search, run, draw, print: what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", choices=("search", "runs"), help="one stage; both when left out")
    parser.add_argument("--draw", action="store_true", help="only draw and print what the committed rows say")
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--output", default="runs")
    options, overrides = parser.parse_known_args()
    if not options.draw and options.only in (None, "search"):
        search = [(s, m, r) for s in SEARCH_SEEDS for m in METHODS for r in RATES]
        run_missing(search, SEARCH_STEPS, options.output, overrides)
    if not options.draw and options.only in (None, "runs"):
        rows = read()
        wanted = [(s, m, chosen_rate(rows, m)) for m in METHODS for s in options.seeds]
        run_missing(wanted, STEPS, options.output, overrides)
    draw(read(), tuple(options.seeds))
    table(read(), tuple(options.seeds))


if __name__ == "__main__":
    main()
