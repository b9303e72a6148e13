"""From Gram matrices of gradients to variances, intervals, slopes, a figure and a table. See gradient_variance.py.

R groups, B resamples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gspo.reporting.seeds import seed_interval

RESAMPLES = 1000

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
    if np.isnan(values).any():
        return [math.nan, math.nan]
    return [float(x) for x in np.quantile(values[1:], [0.025, 0.975], method="nearest")]  # infinite values stay in order


def relative(trace: np.ndarray, mean2: np.ndarray) -> np.ndarray:
    """Variance over the squared mean; infinite where the mean is not told from 0."""
    return np.where(mean2 > 0, trace / np.where(mean2 > 0, mean2, 1), np.inf)


def slope(lengths: Sequence[int], values: np.ndarray) -> np.ndarray:
    """Least-squares slope of log value on log length: [lengths, B] -> [B]; NaN where a resample's value is not positive."""
    x = np.log(lengths) - np.log(lengths).mean()
    return x @ np.log(np.where(values > 0, values, np.nan)) / (x @ x)


def geometric_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """seed_interval of positive numbers on the log scale: geometric mean and ends."""
    mean, low, high = (math.exp(x) for x in seed_interval([math.log(v) for v in values]))
    return mean, low, high


def added(by_group: np.ndarray, arm: int, base: int, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How an arm's gradients are those of a base times one factor, plus a rest: the factor, and the rest's share, [B].

    The factor is least squares over all groups; the share is the rest's mean square over that of the scaled base.
    by_group: products of the arms' gradients, [R, arms, arms].
    """
    own, cross, other = (count @ by_group[:, i, j] for i, j in ((arm, arm), (arm, base), (base, base)))
    with np.errstate(divide="ignore", invalid="ignore"):  # a base whose every response is clipped: not a number
        factor = cross / other
        return factor, np.maximum(own - factor * cross, 0) / (factor * cross)


def _ratio_rows(path: Path) -> dict[str, dict]:
    """By arm what the ratios of a length were like, from the rows of its responses."""
    rows = json.loads(path.read_text("utf-8"))
    out = {}
    for arm in dict.fromkeys(r["arm"] for r in rows):
        mine = [r for r in rows if r["arm"] == arm]
        mean = {key: float(np.mean([r[key] for r in mine])) for key in ("abs_d", "w", "w2")}
        out[arm] = {
            "mean_abs_d": mean["abs_d"],
            "sd_token_ratio": math.sqrt(max(0.0, mean["w2"] - mean["w"] ** 2)),
            "sd_sequence_ratio": float(np.std(np.exp([r["log_s"] for r in mine]))),
            "mean_log_s": float(np.mean([r["log_s"] for r in mine])),
            "lost_positive": float(np.mean([r["lost"] for r in mine if r["sign"] > 0])),
            "lost_negative": float(np.mean([r["lost"] for r in mine if r["sign"] < 0])),
        }
    return out


def measured_rows(folder: Path, seeds: Sequence[int], lengths: Sequence[int], arms: Sequence[str]) -> list[dict]:
    """A row for each seed, arm and length that was measured, and one for the slopes of each seed and arm: over the lengths
    that all seeds have."""
    rows = []
    there = {seed: [n for n in lengths if (folder / f"gram-{seed}-{n}.npz").exists()] for seed in seeds}
    shared = [n for n in lengths if all(n in found for found in there.values())]
    for seed in seeds:
        products = {n: dict(np.load(folder / f"gram-{seed}-{n}.npz")) for n in there[seed]}
        count = {n: counts(p["by_arm"].shape[1], seed=n) for n, p in products.items()}
        ratios = {n: _ratio_rows(folder / f"ratios-{seed}-{n}.json") for n in there[seed]}
        for k, arm in enumerate(arms):
            place, noise, kind = arm.split("/", 2)
            none, quiet = arms.index(f"{place}/0/none/free"), arms.index(f"{place}/0/{kind}")
            measured = {n: _measured(p, k, none, quiet, count[n]) for n, p in products.items()}
            what = {"seed": seed, "arm": arm}
            for n, values in measured.items():
                rows.append(what | {"length": n, "groups": count[n].shape[1]} | _with_ends(values) | ratios[n][arm])
            keys = ["trace", *(["residual"] if k != none else []), *(["noise"] if noise != "0" else [])]
            of_lengths = {key: np.stack([measured[n][key] for n in shared]) for key in keys}
            rows.append(what | _with_ends({f"slope_{key}": slope(shared, x) for key, x in of_lengths.items()}))
    return [{k: _rounded(v) for k, v in row.items()} for row in rows]


def _measured(products, arm: int, none: int, quiet: int, count: np.ndarray) -> dict[str, np.ndarray]:
    """All numbers of an arm at a length, [B] each."""
    trace, mean2 = moments(products["by_arm"][arm], count)
    control = moments(products["by_arm"][none], count)
    factor, residual = added(products["by_group"], arm, none, count)
    return {
        "trace": trace,
        "mean2": mean2,
        "relative": relative(trace, mean2),
        "trace_ratio": trace / control[0],
        "relative_ratio": _quotient(relative(trace, mean2), relative(*control)),
        "factor": factor,
        "residual": residual,
        "noise": added(products["by_group"], arm, quiet, count)[1],
    }


def _quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x / y; not a number where y is infinite, being unknown."""
    return np.where(np.isfinite(y), x / np.where(np.isfinite(y), y, 1), np.nan)


def _with_ends(values: dict[str, np.ndarray]) -> dict:
    """Each number with the interval of its bootstrap."""
    return {k: v for key, x in values.items() for k, v in ((key, float(x[0])), (f"{key}_ci", ends(x)))}


def _rounded(value):
    """To four digits; what is not finite is null."""
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value


def across(rows: list[dict], arm: str, key: str, length: int | None = None) -> list[float]:
    """A number of an arm, by seed; without a length, of its slopes."""
    found = [r for r in rows if r["arm"] == arm and r.get("length") == length]
    return [r[key] for r in found if r.get(key) is not None]


def draw(rows: list[dict], path: Path) -> None:
    """Above, the variance of the gradient; below, what the ratio or its noise adds to the gradient; both against length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7.2), layout="constrained")
    axes = figure.subplots(2, len(PLACES), sharey="row", sharex=True)
    lengths = sorted({r["length"] for r in rows if "length" in r})
    for column, (place, title) in enumerate(PLACES.items()):
        above, below = axes[:, column]
        for kind in LABELS:
            arm = f"{place.split('/')[0]}/0/{kind}" if kind == "none/free" else f"{place}/{kind}"
            _line(above, rows, arm, "trace", lengths, kind)
            if kind != "none/free":
                _line(below, rows, arm, "residual" if place.endswith("/0") else "noise", lengths, kind)
        above.set(title=title, xscale="log", yscale="log")
        what = "against ratio 1" if place.endswith("/0") else "against the same without noise"
        below.set(title=what, xscale="log", yscale="log", xlabel="response length, tokens")
        below.set_xticks(lengths, [str(n) for n in lengths])
        below.minorticks_off()
    axes[0, 0].set(ylabel="variance of the gradient\n(trace of the covariance)")
    axes[1, 0].set(ylabel="mean square of what is added,\nover that of the gradient below")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=100)


def _line(ax, rows: list[dict], arm: str, key: str, lengths: Sequence[int], kind: str) -> None:
    """The seeds' values as points, their geometric mean as a line."""
    by_seed = [[v for v in across(rows, arm, key, n) if v > 0] for n in lengths]
    points = [(n, v) for n, values in zip(lengths, by_seed, strict=True) for v in values]
    if points:
        ax.plot(*zip(*points, strict=True), "o", markersize=3, alpha=0.5, color=COLOURS[kind])
    centre = [math.exp(sum(map(math.log, v)) / len(v)) if v else math.nan for v in by_seed]
    ax.plot(lengths, centre, color=COLOURS[kind], label=LABELS[kind])


def print_table(rows: list[dict]) -> None:
    """By arm: slopes with their interval over seeds, and numbers at each length, mean over seeds."""
    lengths = sorted({r["length"] for r in rows if "length" in r})
    for arm in dict.fromkeys(r["arm"] for r in rows):
        print(arm)
        for key in ("slope_trace", "slope_residual", "slope_noise"):
            if len(values := across(rows, arm, key)) > 1:
                print("    {} {:+.2f} [{:+.2f}, {:+.2f}]".format(key, *seed_interval(values)))
        for key in ("trace", "relative", "trace_ratio", "relative_ratio", "factor", "residual", "noise", "mean_abs_d",
                    "sd_token_ratio", "sd_sequence_ratio", "mean_log_s", "lost_positive", "lost_negative"):  # fmt: skip
            found = [across(rows, arm, key, n) for n in lengths]
            said = [_said(v, arithmetic=key in ("factor", "mean_log_s", "lost_positive", "lost_negative")) for v in found]
            print(f"    {key}: " + "; ".join(f"{n}: {one}" for n, one in zip(lengths, said, strict=True)))


def _said(values: Sequence[float], *, arithmetic: bool) -> str:
    """Mean and interval over seeds, geometric unless told otherwise; the values themselves where seeds are missing."""
    if len(values) < 3:
        return str(values)
    return "{:.3g} [{:.3g}, {:.3g}]".format(
        *(seed_interval if arithmetic or min(values) <= 0 else geometric_interval)(values)
    )
