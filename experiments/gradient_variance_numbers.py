"""From Gram matrices of gradients to variances, intervals, slopes, a figure and a table. See gradient_variance.py.

R groups, B resamples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

RESAMPLES = 1000
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t with n - 1 degrees of freedom at 0.975, by n."""

LABELS = {
    "none/free": "ratio 1",
    "token/free": "token ratios",
    "token/clipped": "token ratios, clip 0.2 (grpo)",
    "sequence/free": "sequence ratio",
    "sequence/clipped": "sequence ratio, clip 3e-4/4e-4 (gspo)",
}
COLOURS = dict(zip(LABELS, ("black", "tab:red", "tab:orange", "tab:cyan", "tab:blue"), strict=True))
PLACES = {
    "near/0": "two steps on",
    "near/0.05": "two steps on, noise 0.05 a token",
    "near/0.5": "two steps on, noise 0.5 a token",
    "far/0": "twenty steps on",
}


def counts(groups: int, *, seed: int = 0) -> np.ndarray:
    """How often each group is in each bootstrap resample, [B, R]; the first row is the sample itself."""
    drawn = np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), RESAMPLES)
    return np.concatenate([np.ones((1, groups), int), drawn])


def moments(gram: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Trace of the covariance and squared norm of the mean of R vectors, both without bias, for each row of counts [B].

    |mean|^2 is the mean product of two different groups; a resample's pairs of a group with itself are left out, as they
    would count noise for signal. The trace is the mean square less that.
    """
    diagonal = np.diag(gram)
    square = count @ diagonal / count.sum(1)
    pairs = np.einsum("br,rs,bs->b", count, gram, count) - count**2 @ diagonal
    mean2 = pairs / (count.sum(1) ** 2 - (count**2).sum(1))
    return square - mean2, mean2


def ends(values: np.ndarray) -> list[float]:
    """Percentile interval of a bootstrap, its first value being the estimate itself."""
    return [float(x) for x in np.quantile(values[1:], [0.025, 0.975])]


def relative(trace: np.ndarray, mean2: np.ndarray) -> np.ndarray:
    """Variance over the squared mean; infinite where the mean is not told from 0."""
    return np.where(mean2 > 0, trace / np.where(mean2 > 0, mean2, 1), np.inf)


def slope(lengths: Sequence[int], values: np.ndarray) -> np.ndarray:
    """Least-squares slope of log value on log length: [lengths, B] -> [B]."""
    x = np.log(lengths) - np.log(lengths).mean()
    return x @ np.log(values) / (x @ x)


def over_seeds(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and the ends of its 95% interval by Student's t."""
    n, mean = len(values), math.fsum(values) / len(values)
    half = T_95[n] * math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return mean, mean - half, mean + half


def _ratio_rows(path: Path) -> dict[str, dict]:
    """By arm what the ratios of a length were like, from the rows of its responses."""
    rows = json.loads(path.read_text("utf-8"))
    out = {}
    for arm in dict.fromkeys(r["arm"] for r in rows):
        mine = [r for r in rows if r["arm"] == arm]
        mean = {key: float(np.mean([r[key] for r in mine])) for key in ("abs_d", "w", "w2", "lost+", "lost-")}
        out[arm] = {
            "mean_abs_d": mean["abs_d"],
            "sd_token_ratio": math.sqrt(max(0.0, mean["w2"] - mean["w"] ** 2)),
            "sd_sequence_ratio": float(np.std(np.exp([r["log_s"] for r in mine]))),
            "mean_log_s": float(np.mean([r["log_s"] for r in mine])),
            "lost": (mean["lost+"] + mean["lost-"]) / 2,
        }
    return out


def measured_rows(folder: Path, seeds: Sequence[int], lengths: Sequence[int], arms: Sequence[str]) -> list[dict]:
    """A row for each seed, reward, arm and length, and one for each slope."""
    rows = []
    for seed in seeds:
        grams = {n: np.load(folder / f"gram-{seed}-{n}.npz") for n in lengths}
        ratios = {n: _ratio_rows(folder / f"ratios-{seed}-{n}.json") for n in lengths}
        count = {n: counts(len(next(iter(g.values()))), seed=n) for n, g in grams.items()}
        for reward in ("sums", "coin"):
            for arm in arms:
                control = f"{reward} {arm.split('/')[0]}/0/none/free"
                pairs = {
                    n: (moments(g[f"{reward} {arm}"], count[n]), moments(g[control], count[n])) for n, g in grams.items()
                }
                what = {"seed": seed, "reward": reward, "arm": arm}
                rows += [what | {"length": n} | _numbers(n, *pair) | ratios[n][arm] for n, pair in pairs.items()]
                rows.append(what | _slopes(lengths, [mine for mine, _ in pairs.values()]))
    return [{k: _rounded(v) for k, v in row.items()} for row in rows]


def _numbers(length: int, mine: tuple[np.ndarray, np.ndarray], control: tuple[np.ndarray, np.ndarray]) -> dict:
    """Variance of an arm at a length, and against the same policy's with every ratio 1."""
    (trace, mean2), ratio = mine, relative(*mine)
    excess, trace_ratio = ratio / relative(*control), trace / control[0]
    return {
        "trace": float(trace[0]), "trace_ci": ends(trace), "trace_by_tokens": float(trace[0] * length),
        "mean2": float(mean2[0]), "mean2_ci": ends(mean2), "relative": float(ratio[0]), "relative_ci": ends(ratio),
        "excess": float(excess[0]), "excess_ci": ends(excess),
        "trace_ratio": float(trace_ratio[0]), "trace_ratio_ci": ends(trace_ratio),
    }  # fmt: skip


def _slopes(lengths: Sequence[int], of_arm: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict:
    trace = slope(lengths, np.stack([t for t, _ in of_arm]))
    with np.errstate(invalid="ignore"):
        ratio = slope(lengths, np.stack([relative(*m) for m in of_arm]))
    ratio = ratio[np.isfinite(ratio)]
    out = {"slope_trace": float(trace[0]), "slope_trace_ci": ends(trace)}
    return out | ({"slope_relative": float(ratio[0]), "slope_relative_ci": ends(ratio)} if len(ratio) > 1 else {})


def _rounded(value):
    """To four digits; what is not finite is null."""
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value


def across(rows: list[dict], arm: str, key: str, *, reward: str, length: int | None) -> list[float]:
    """A number of an arm, by seed; without a length, of its slopes."""
    found = [r for r in rows if r["arm"] == arm and r["reward"] == reward and r.get("length") == length]
    return [r[key] for r in found if r.get(key) is not None]


def draw(rows: list[dict], path: Path) -> None:
    """Variance over the squared mean against length, a panel for each distance between the policies, on log axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.9), layout="constrained")
    axes = figure.subplots(1, len(PLACES), sharey=True)
    lengths = sorted({r["length"] for r in rows if "length" in r})
    for ax, (place, title) in zip(axes, PLACES.items(), strict=True):
        for k, (kind, label) in enumerate(LABELS.items()):
            arm = f"{place.split('/')[0]}/0/{kind}" if kind == "none/free" else f"{place}/{kind}"
            by_seed = [across(rows, arm, "relative", reward="sums", length=n) for n in lengths]
            at = [n * 1.07 ** (k - 2) for n in lengths]
            points = [(x, v) for x, values in zip(at, by_seed, strict=True) for v in values]
            ax.plot(*zip(*points, strict=True), "o", markersize=3, alpha=0.6, color=COLOURS[kind])
            centre = [math.exp(sum(map(math.log, v)) / len(v)) if v else math.nan for v in by_seed]
            slopes = across(rows, arm, "slope_relative", reward="sums", length=None)
            said = f", slope {sum(slopes) / len(slopes):+.2f}" if slopes else ""
            ax.plot(at, centre, color=COLOURS[kind], linewidth=1.2, label=f"{label}{said}")
        ax.set(title=title, xscale="log", yscale="log", xlabel="response length, tokens")
        ax.set_xticks(lengths, [str(n) for n in lengths])
        ax.minorticks_off()
        ax.legend(frameon=False, fontsize=6.5)
    axes[0].set(ylabel="variance of the gradient / |mean|²")
    figure.savefig(path, dpi=110)


def print_table(rows: list[dict]) -> None:
    """By arm: slopes with their interval over seeds, and the variance against ratio 1 at each length, mean over seeds."""
    lengths = sorted({r["length"] for r in rows if "length" in r})
    for reward in ("sums", "coin"):
        for arm in dict.fromkeys(r["arm"] for r in rows):
            parts = []
            for key in ("slope_trace", "slope_relative"):
                values = across(rows, arm, key, reward=reward, length=None)
                if len(values) > 1:
                    parts.append("{} {:+.2f} [{:+.2f}, {:+.2f}]".format(key, *over_seeds(values)))
            key = "excess" if reward == "sums" else "trace_ratio"
            for n in lengths:
                some = across(rows, arm, key, reward=reward, length=n)
                lost, d = (across(rows, arm, k, reward=reward, length=n) for k in ("lost", "mean_abs_d"))
                if len(some) > 1:
                    mean, low, high = over_seeds(some)
                    parts.append(f"{n}: {mean:.3f} [{low:.3f}, {high:.3f}] lost {np.mean(lost):.2f} |d| {np.mean(d):.3f}")
            print(f"{reward} {arm}: " + "; ".join(parts))
