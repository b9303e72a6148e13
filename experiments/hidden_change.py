"""Where length normalisation hides: few tokens moved far while s stays near 1. Exact, and as found in training.

    python experiments/hidden_change.py
    python experiments/hidden_change.py --draw

Run from the repository's folder. The exact part says how far k of n tokens can move before gspo's clip sees it. The other
part trains the decoder of sums.toml on responses of 128 tokens with gspo, at three learning rates and seeds, and reads of
each trained response its s, whether it was clipped, and its tokens' largest |d|. Writes docs/evidence/hidden_change.jsonl
(a row a step of a run, and one of responses a run) and hidden_change.png. d is log pi - log pi_old of a token, s the
exponential of its mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import EVIDENCE, SEEDS, Plan, main, metrics, read, shown, write
from sums import imitated

from gspo.objectives import GRPO_CLIP, GSPO_CLIP
from gspo.reporting.records import read_samples

RATES, STEPS, SHOWN = (1e-4, 1e-3, 5e-3), 30, 3
"""Learning rates from a careful one to one that is too high; single responses are kept of the last steps alone."""
EARLY, LATE = (4, 13), (21, 30)
"""Steps, the first and last included. The first three are left out: AdamW, without moments yet, moves all weights alike."""
FAR = math.log(1 + GRPO_CLIP.high)
"""A |d| that grpo's clip would not let pass: ln 1.2."""


def room(num_tokens: int) -> tuple[float, float]:
    """Sums of d over a response of so many tokens that gspo's clip does not see: the lowest and the highest, nats."""
    return num_tokens * math.log(1 - GSPO_CLIP.low), num_tokens * math.log(1 + GSPO_CLIP.high)


def largest_ratio(num_tokens: int, moved: int) -> float:
    """The ratio to which each of `moved` tokens may rise unseen, the others staying where they are."""
    return math.exp(room(num_tokens)[1] / moved)


def shortest_hiding(ratio: float, moved: int = 1) -> int:
    """The least number of tokens in which so many may rise by this ratio unseen."""
    return math.ceil(moved * math.log(ratio) / math.log(1 + GSPO_CLIP.high))


def inside_by_chance(sigma: float, num_tokens: int, bias: float = 0.0) -> float:
    """The share of responses inside gspo's band whose d are independent and normal with this mean (bias) and deviation."""
    low, high = room(num_tokens)
    scale = sigma * math.sqrt(num_tokens)
    below = [0.5 * (1 + math.erf((x - bias * num_tokens) / scale / math.sqrt(2))) for x in (low, high)]
    return below[1] - below[0]


def responses(lines: Iterable[Mapping[str, Any]]) -> list[dict]:
    """Of a step's samples, log s, largest |d|, and whether it was clipped, for each whose tokens had moved.

    In the first minibatch the policies are the same: those are left out, and so is what carried no signal.
    """
    return [
        {"log_s": math.log(line["ratio"]), "largest": line["largest_log_ratio"], "clipped": line["clipped"]}
        for line in lines
        if line["largest_log_ratio"]
    ]


def is_inside(response: dict) -> bool:
    """Whether s is inside gspo's band, so that it can be clipped for no advantage."""
    return math.log(1 - GSPO_CLIP.low) <= response["log_s"] <= math.log(1 + GSPO_CLIP.high)


def summary(found: Sequence[dict]) -> dict:
    """Of a step's responses: how many are clipped or inside the band, and what those that are not clipped hide. Where no
    token had moved there are none, and nothing more to say."""
    if not found:
        return {"responses": 0}
    free, inside = [r for r in found if not r["clipped"]], [r for r in found if is_inside(r)]
    out = {
        "responses": len(found),
        "clipped": 1 - len(free) / len(found),
        "inside": len(inside) / len(found),
        "all_past_grpo": float(np.mean([r["largest"] > FAR for r in found])),
        "abs_log_s_median": float(np.median([abs(r["log_s"]) for r in found])),
    }
    if inside:
        out["inside_past_grpo"] = float(np.mean([r["largest"] > FAR for r in inside]))
    if free:
        largest = np.array([r["largest"] for r in free])
        out |= {"free_past_grpo": float((largest > FAR).mean()), "free_past_2": float((largest > math.log(2)).mean())}
        out |= {"free_largest_median": float(np.median(largest))}
    return {key: float(f"{value:.5g}") for key, value in out.items()}


def run(output: Path) -> None:
    """Every learning rate at every seed."""
    plan, rows = Plan("experiments/sums.toml", output / "hidden_change", {"training.steps": STEPS}), []
    for rate in RATES:
        for seed in SEEDS:
            start = imitated(seed, output / "sums" / f"policy-{seed}")
            folder = plan.run(f"lr{rate:g}", seed, {"training.learning_rate": rate}, model=str(start))
            rows += rows_of(folder, {"seed": seed, "rate": rate})
    write("hidden_change", rows)


def rows_of(folder: Path, labels: Mapping[str, Any]) -> list[dict]:
    """A row a step of one run, and one with the responses of its last steps."""
    names = {"reward": "reward/mean", "entropy": "policy/entropy", "grad_norm": "update/grad_norm"}
    trained = [row for row in metrics(folder) if row["step"]]  # in step 0 is only evaluated
    found = {row["step"]: responses(read_samples(folder, row["step"])) for row in trained}
    rows = [
        {**labels, "step": row["step"], **{key: row[name] for key, name in names.items()}, **summary(found[row["step"]])}
        for row in trained
    ]
    last = [r for step, some in found.items() if step > max(found) - SHOWN for r in some]
    points = [[float(f"{r['log_s']:.3g}"), float(f"{r['largest']:.3g}"), r["clipped"]] for r in last]
    return [*rows, {**labels, "log_s_largest_clipped": points}]


def mean_of(rows: Sequence[dict], key: str, first: int, last: int) -> list[float]:
    """By seed, the mean of a number over steps first to last."""
    known = [r for r in rows if first <= r["step"] <= last and r.get(key) is not None]
    some = [[r[key] for r in known if r["seed"] == s] for s in sorted({r["seed"] for r in rows})]
    return [sum(v) / len(v) for v in some if v]


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's; ties, which means of measurements hardly have, are broken by order."""
    ranks = [np.argsort(np.argsort(v)) for v in (x, y)]
    return float(np.corrcoef(*ranks)[0, 1])


def lead(rows: Sequence[dict], key: str, ahead: int = 5) -> list[float]:
    """By seed, the rank correlation of a number at a step with the change of reward over the next `ahead` steps."""
    out = []
    for seed in sorted({r["seed"] for r in rows}):
        mine = [r for r in rows if r["seed"] == seed and r["step"] >= EARLY[0] and r.get(key) is not None]
        pairs = [(a[key], b["reward"] - a["reward"]) for a, b in zip(mine, mine[ahead:], strict=False)]
        out.append(rank_correlation(*zip(*pairs, strict=True)))
    return out


KEYS = ("reward", "entropy", "grad_norm", "clipped", "inside", "abs_log_s_median", "free_past_grpo", "free_past_2",
        "inside_past_grpo", "all_past_grpo", "free_largest_median")  # fmt: skip


def print_table(rows: Sequence[dict]) -> None:
    """The exact numbers, then those of training by learning rate: early, late, and whether they tell what follows."""
    for n in (32, 128, 512, 2048, 8192):
        low, high = room(n)
        ratios = ", ".join(f"{k}: {largest_ratio(n, k):.4g}" for k in (1, 4, 16))
        chance = ", ".join(f"{sigma}: {inside_by_chance(sigma, n):.3f}" for sigma in (0.01, 0.05, 0.2))
        print(f"n {n}: sum of d unseen {low:+.3f} to {high:+.3f}; ratio of k tokens {ratios}; inside by chance {chance}")
    print("least length that hides one token at 1.2, 2, 10:", [shortest_hiding(x) for x in (1.2, 2, 10)])
    for rate in RATES:
        mine = [r for r in rows if r["rate"] == rate and "step" in r]
        if {r["seed"] for r in mine} != set(SEEDS):
            print(f"{rate:g}: not all seeds have run")
            continue
        for key in KEYS:
            early, late = mean_of(mine, key, *EARLY), mean_of(mine, key, *LATE)
            parts = (early, late, [b - a for a, b in zip(early, late, strict=True)])
            said = [shown(values, 4) for values in parts]
            print(f"{rate:g} {key}: steps {EARLY} {said[0]}, {LATE} {said[1]}, change {said[2]}")
        points = [(abs(p[0]), p[1]) for r in rows if r["rate"] == rate for p in r.get("log_s_largest_clipped", [])]
        print(f"{rate:g} rank correlation of |log s| and largest |d|: {rank_correlation(*zip(*points, strict=True)):.2f}")
        for key in ("free_past_grpo", "free_past_2", "clipped", "grad_norm"):
            found = [round(x, 2) for x in lead(mine, key)]
            print(f"{rate:g} rank correlation of {key} with the reward's change in five steps, by seed: {found}")


COLOURS = dict(zip(RATES, ("tab:blue", "tab:orange", "tab:red"), strict=True))


def _draw_exact(ax) -> None:
    lengths = np.geomspace(8, 16384, 60).astype(int)
    for k, colour in ((1, "tab:purple"), (4, "tab:orange"), (16, "tab:green")):
        ax.plot(lengths, [math.exp(min(room(n)[1] / k, 4)) for n in lengths], color=colour, label=f"{k} of n tokens")
    ax.axhline(1.2, color="grey", linestyle=":", label="grpo's clip: 1.2")
    ax.set(
        xscale="log",
        yscale="log",
        ylim=(1, 20),
        xlabel="response length n, tokens",
        title="exact: what gspo's clip lets pass",
    )
    ax.set(ylabel="ratio to which those tokens all rise")
    ax.set_yticks([1, 1.2, 2, 5, 10, 20], ["1", "1.2", "2", "5", "10", "20"])
    ax.minorticks_off()
    ax.legend(frameon=False, fontsize=8)


def _draw_joint(ax, rows: Sequence[dict]) -> None:
    for rate in RATES:
        some = [point for r in rows if r["rate"] == rate for point in r.get("log_s_largest_clipped", [])]
        for wanted, marker in ((False, "o"), (True, "x")):
            points = [(max(abs(log_s), 1e-6), max(largest, 1e-3)) for log_s, largest, clipped in some if clipped == wanted]
            if points:
                label = f"rate {rate:g}, {'clipped' if wanted else 'not clipped'}"
                ax.plot(*zip(*points, strict=True), marker, markersize=2.5, alpha=0.4, color=COLOURS[rate], label=label)
    ax.axhline(FAR, color="grey", linestyle=":")
    ax.axvline(GSPO_CLIP.high, color="grey", linestyle="--")
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="|log s| (dashed: 4e-4)",
        ylabel="largest |d| of the response, nats (dotted: ln 1.2)",
    )
    ax.set(title="responses of the last three steps, all seeds")
    ax.legend(frameon=False, fontsize=8)


def _draw_time(ax, rows: Sequence[dict]) -> None:
    for rate, colour in COLOURS.items():
        for key, style, label in (("free_past_grpo", "-", "a token past 1.2 or 1/1.2"), ("reward", ":", "reward")):
            known = [r for r in rows if r["rate"] == rate and r.get(key) is not None]
            steps = sorted({r["step"] for r in known})
            values = [[r[key] for r in known if r["step"] == t] for t in steps]
            ax.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.12)
            ax.plot(steps, [sum(v) / len(v) for v in values], style, color=colour, label=f"{rate:g}: {label}")
    ax.set(
        xlabel="step", ylabel="share of the responses not clipped; reward", ylim=(0, 1.02), title="mean and range of seeds"
    )
    ax.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)


def draw() -> None:
    """What can hide by length; largest |d| against |log s| of responses; what unclipped responses hide, by step. Tables."""
    from matplotlib.figure import Figure

    rows = read("hidden_change")
    figure = Figure(figsize=(14, 4.8), layout="constrained")
    exact, joint, time = figure.subplots(1, 3)
    _draw_exact(exact)
    _draw_joint(joint, rows)
    _draw_time(time, [r for r in rows if "step" in r])
    figure.savefig(EVIDENCE / "hidden_change.png", dpi=100)
    print_table(rows)


if __name__ == "__main__":
    main(str(__doc__), run, draw)
