"""gspo and gspo_token where only one turn of an episode matters: runs, their rows, a figure.

    python docs/evidence/turns.py --seeds 0 --steps 200
    python docs/evidence/turns.py --draw

Run from the folder above docs. Any other option is a setting of the recipe, `--training.learning_rate 1e-4`. Each seed has
one cold start, from which all three train. Writes turns.jsonl (a row for each evaluation and each training step: seed,
method, step, reward) and turns.png beside this file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HERE = Path(__file__).parent
ROWS = HERE / "turns.jsonl"

METHODS = {
    "gspo": {"objective": {"name": "gspo"}, "advantage": {"credit": "response"}},
    "gspo_token, the turn's own reward": {"advantage": {"credit": "turn", "turn_discount": 0.0}},
    "gspo_token, all later rewards": {"advantage": {"credit": "turn", "turn_discount": 1.0}},
}


def run(seed: int, steps: int, output: str, overrides: list[str]) -> list[dict]:
    """The rows of all methods at one seed."""
    from gspo.cold_start import cold_start
    from gspo.loop import train
    from gspo.recipe import build, load

    values = load("recipes/turns.toml", overrides).model_dump(mode="json") | {"seed": seed, "output": output}
    imitated = cold_start(build(values | {"name": f"turns-{seed}-start"}), resume=True)
    values |= {"cold_start": None, "model": {"path": str(imitated)}}
    values["training"] |= {"steps": steps}
    rows = []
    for number, (method, changes) in enumerate(METHODS.items()):
        folder = train(build(values | changes | {"name": f"turns-{seed}-{number}"}))
        for row in map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines()):
            rows.append({
                "seed": seed, "method": method, "step": row["step"], "held_out": row.get("evaluation/reward"),
                "reward": row.get("reward/mean"), "by_turn": row.get("environment/reward_by_turn"),
                "clipped": row.get("clip/token"), "grad_norm": row.get("update/grad_norm"),
            })  # fmt: skip
    return rows


def draw(rows: list[dict]) -> None:
    """turns.png: the held-out reward of the scored turn by step, a line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for method, colour in zip(METHODS, ("tab:orange", "tab:blue", "tab:green"), strict=True):
        for number, seed in enumerate(sorted({row["seed"] for row in rows})):
            line = [(r["step"], r["held_out"]) for r in rows
                    if r["method"] == method and r["seed"] == seed and r["held_out"] is not None]  # fmt: skip
            axes.plot(*zip(*line, strict=True), color=colour, label=method if number == 0 else None)
    axes.set(xlabel="step", ylabel="held-out reward of the scored turn")
    axes.legend()
    figure.tight_layout()
    figure.savefig(HERE / "turns.png", dpi=120)


def main() -> None:
    """Run what is asked for, then draw."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", default="runs")
    parser.add_argument("--draw", action="store_true", help="only draw what is in turns.jsonl")
    options, overrides = parser.parse_known_args()
    rows = [json.loads(line) for line in ROWS.read_text("utf-8").splitlines()] if ROWS.exists() else []
    for seed in [] if options.draw else options.seeds:
        rows = [r for r in rows if r["seed"] != seed] + run(seed, options.steps, options.output, overrides)
        ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    draw(rows)


if __name__ == "__main__":
    main()
