"""How metrics are drawn on one pair of axes: lines, shares on log scales, nested quantiles, stacked seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .names import LENGTHS, QUANTILES, table_key
from .svg import BAND, EDGE, GRID, MUTED, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SAMPLES = "samples: "
"""Before the key of a line of samples/step-N.jsonl, where a figure names what it is drawn from."""

FILL_POINTS = 600  # filled areas are not simplified by the SVG writer: beyond this, neighbours are averaged


@dataclass(frozen=True, slots=True)
class Run:
    """What figures are drawn from."""

    rows: Sequence[Mapping[str, Any]]
    """Rows of metrics.jsonl, by step."""
    clip: tuple[float, float] | None = None
    """How far below and above 1 the ratio is clipped, or None where the configuration does not say."""
    lines: Sequence[Mapping[str, Any]] = ()
    """Lines of samples/step-N.jsonl, of the steps that the page holds."""

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps [n] and values [n] (or [n, list length]) of the rows that hold a value for the key."""
        held = [(row["step"], row[key]) for row in self.rows if row.get(key) is not None]
        return np.array([s for s, _ in held]), np.array([v for _, v in held], dtype=float)

    def keys(self, wanted: Sequence[str]) -> list[str]:
        """The run's keys that hold a value and fall under the wanted keys of the table, in that order."""
        held = dict.fromkeys(key for row in self.rows for key, value in row.items() if value is not None)
        found = [key for want in wanted for key in held if want in (key, table_key(key))]
        return found + [want for want in wanted if want.startswith(SAMPLES) and self.has_sampled(want)]

    def has_sampled(self, wanted: str) -> bool:
        """Whether a line of the samples holds the key, `tokens/engine_gap` the key of a table in it."""
        table, _, inner = wanted.removeprefix(SAMPLES).partition("/")
        values = (line[table] for line in self.lines if line.get(table) is not None)
        return any((value.get(inner) if inner else value) is not None for value in values)


Draw = Callable[["Axes", Run, Sequence[str]], None]
"""Draws on axes those keys of a run that are there."""

RATIO_QUANTILES = ("ratio/sequence_quantiles", "ratio/token_quantiles")


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred running mean over about a thirtieth of the points, cut off at the ends. [n] -> [n]"""
    half = len(values) // 60
    total = np.concatenate(([0.0], np.cumsum(values)))
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return (total[high] - total[low]) / (high - low)


def binned(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Steps [n] and values [n, ...] as means of neighbours, so that at most FILL_POINTS are left."""
    size = math.ceil(len(steps) / FILL_POINTS) or 1
    starts = np.arange(0, len(steps), size)
    counts = np.diff(np.append(starts, len(steps)))
    means = np.add.reduceat(values, starts, axis=0) / counts.reshape(-1, *[1] * (values.ndim - 1))
    return np.add.reduceat(steps, starts) / counts, means


def _line(
    axes: Axes, steps: np.ndarray, values: np.ndarray, mean: np.ndarray, colour: str, label: str, width: float = 1.7
) -> None:
    """Thin as measured, thick as the mean given; a single point is a dot."""
    if len(steps) == 1:
        axes.plot(steps, values, "o", color=colour, label=label)
        return
    axes.plot(steps, values, color=colour, alpha=0.28, linewidth=0.9)
    axes.plot(steps, mean, color=colour, label=label, linewidth=width)


def lines(labels: Mapping[str, str], *, percent: bool = False, bottom: float | None = 0.0, exact: bool = False) -> Draw:
    """A drawing of keys as lines: thin as measured, thick as running means.

    percent: shares are shown in percent. bottom: lower end of the y axis. exact: no running mean, for what is set
    and not measured.
    """

    def draw(axes: Axes, run: Run, keys: Sequence[str]) -> None:
        for i, (key, label) in enumerate(labels.items()):
            if key in keys:
                steps, values = run.series(key)
                _line(axes, steps, values, values if exact else smooth(values), SERIES[i], label)
        if percent:
            _share_axis(axes, bottom)
        else:
            axes.set_ylim(bottom=bottom)
            _plain_numbers(axes)

    return draw


def log_lines(labels: Mapping[str, str], *, percent: bool = False) -> Draw:
    """Absolute values of keys as lines on a log scale; what is 0 lies on a lane of its own, below the scale."""

    def draw(axes: Axes, run: Run, keys: Sequence[str]) -> None:
        shown = {key: run.series(key) for key in labels if key in keys}
        sizes = np.abs(np.concatenate([values for _, values in shown.values()]))
        positive = sizes[sizes > 0]
        floor = 10 ** math.floor(math.log10(positive.min())) if len(positive) else 1e-4
        top = 10 ** math.ceil(math.log10(positive.max()) + 1e-9) if len(positive) else 1.0
        axes.set_yscale("log")
        step = (top / floor) ** 0.055  # lanes of zero by series, just below the scale
        for i, (key, label) in enumerate(labels.items()):
            if key in shown:
                steps, values = shown[key]
                with np.errstate(invalid="ignore"):
                    thin, thick = (np.where(v > 0, v, np.nan) for v in (np.abs(values), smooth(np.abs(values))))
                width = 3.2 if i == 0 and len(shown) > 1 else 1.6  # so that of equal lines both are seen
                _line(axes, steps, thin, thick, SERIES[i], label, width)
                _zeros(axes, steps[values == 0], floor / step ** (1 + 0.6 * i), SERIES[i])
        zero = floor / step ** (1 + 0.3 * (len(labels) - 1)) if (sizes == 0).any() else None
        axes.set_ylim(floor if zero is None else floor / step ** (2 + 0.6 * (len(labels) - 1)), top)
        _log_ticks(axes, floor, top, zero, share if percent else power)

    return draw


def _zeros(axes: Axes, steps: np.ndarray, lane: float, colour: str) -> None:
    """A dash for each step at which the value was 0."""
    if len(steps):
        axes.plot(*_dashes(steps, lane), color=colour, linewidth=2.4, solid_capstyle="butt")


def _dashes(steps: np.ndarray, lane: float) -> tuple[np.ndarray, np.ndarray]:
    starts = steps[np.diff(steps, prepend=-np.inf) > 1]
    ends = steps[np.diff(steps, append=np.inf) > 1]
    x = np.stack([starts - 0.45, ends + 0.45, np.full(len(starts), np.nan)], 1)
    return x.ravel(), np.where(np.isnan(x), np.nan, lane).ravel()


def _log_ticks(axes: Axes, floor: float, top: float, zero: float | None, name: Callable[[float], str]) -> None:
    """Ticks at powers of ten, seven at most, and one of the lane of zeros."""
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    low, high = round(math.log10(floor)), round(math.log10(top))
    every = -(-(high - low) // 7) or 1
    places = [m * 10.0**e for e in range(low, high) for m in (1, 2, 5)] if high - low == 1 else []
    places = [*places, top] if places else [10.0**e for e in range(high, low - 1, -every)]
    names = {place: name(place) for place in places}
    if zero is not None:
        places, names = [zero, *places], names | {zero: "0"}
        axes.axhline(floor, color=GRID, linewidth=0.8)
    axes.yaxis.set_major_locator(FixedLocator(places))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda place, _: names.get(place, ""))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _share_axis(axes: Axes, bottom: float | None) -> None:
    high = max(axes.get_ylim()[1], 1e-3)
    axes.set_ylim(bottom, 1.02 if high > 0.6 else high)
    axes.yaxis.set_major_formatter(share)


def share(value: float, _: float | None = None) -> str:
    """0.025 -> 2.5%, as a formatter of ticks."""
    return f"{100 * value:.10g}%"


def power(value: float, _: float | None = None) -> str:
    """0.001 -> 10⁻³, with letters of the page's own fonts."""
    if value == 0:
        return "0"
    exponent = math.log10(abs(value))
    if abs(exponent - round(exponent)) > 1e-6 or -3 <= exponent <= 3:
        return f"{value:g}"
    raised = str(round(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return ("-" if value < 0 else "") + "10" + raised


def _plain_numbers(axes: Axes) -> None:
    from matplotlib.ticker import EngFormatter, FuncFormatter

    large = max(map(abs, axes.get_ylim())) >= 1e4
    axes.yaxis.set_major_formatter(EngFormatter(sep="") if large else FuncFormatter(lambda v, _: f"{v:.6g}"))


def rewards(axes: Axes, run: Run, keys: Sequence[str]) -> None:
    """Training reward as a line, evaluation scores as points with their intervals."""
    if "reward/mean" in keys:
        steps, values = run.series("reward/mean")
        _line(axes, steps, values, smooth(values), SERIES[0], "training reward")
    for i, key in enumerate(sorted((k for k in keys if k.startswith("evaluation/")), key=_k_of), 1):
        steps, values = run.series(key)
        axes.plot(steps, values, "o-", color=SERIES[i % 8], markersize=4, label=key.removeprefix("evaluation/"))
        if len(run.series(key + "_low")[0]):
            (at, low), (_, high) = run.series(key + "_low"), run.series(key + "_high")
            axes.vlines(at, low, high, color=SERIES[i % 8], linewidth=1.2, alpha=0.7)
    _plain_numbers(axes)


def _k_of(key: str) -> int:
    return int(key.rpartition("@")[2])


def quantiles(axes: Axes, run: Run, keys: Sequence[str]) -> None:
    """Quantiles of ratios as nested bands of log-ratios on a signed-log scale, with the clip band behind."""
    steps, values = run.series(keys[0])
    logs = _log(values)
    limit = ratio_limit(run)
    if run.clip:
        low, high = math.log1p(-run.clip[0]), math.log1p(run.clip[1])
        axes.axhspan(low, high, color=BAND, linewidth=0, label="clip band")
        axes.hlines((low, high), steps[0], steps[-1], color=EDGE, linewidth=1.2, linestyle=(0, (4, 2)), zorder=3)
    at = dict(zip(QUANTILES, logs.T, strict=True))
    for low, alpha, label in ((0.01, 0.14, "1% to 99%"), (0.05, 0.18, "5% to 95%"), (0.25, 0.26, "25% to 75%")):
        x, y = binned(steps, np.stack([at[low], at[1 - low]], 1))
        axes.fill_between(x, y[:, 0], y[:, 1], color=SERIES[0], alpha=alpha, linewidth=0, label=label)
    axes.plot(steps, at[0.0], color=MUTED, linewidth=0.7, label="least, largest")
    axes.plot(steps, at[1.0], color=MUTED, linewidth=0.7)
    axes.plot(steps, at[0.5], color=SERIES[0], label="median")
    signed_log_axis(axes, limit, 1e-4)


def signed_log_axis(axes: Axes, limit: float, linear: float) -> None:
    """A y axis from -limit to limit, linear within `linear` of 0 and logarithmic outside, with seven ticks at most."""
    first, last = round(math.log10(linear)), math.floor(math.log10(limit) + 1e-9)
    every = -(-(last - first + 1) // 3) or 1
    sizes = [10.0**e for e in range(last, first - (every == 1), -every)]  # of many none at `linear`: it would touch the 0
    axes.set_yscale("symlog", linthresh=linear, linscale=0.5)
    axes.set_ylim(-limit, limit)
    axes.set_yticks([sign * size for size in sizes for sign in (-1, 1)] + [0.0])
    axes.yaxis.set_major_formatter(power)


def _log(ratios: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(ratios, 1e-38))  # a ratio that underflowed to 0 is drawn at float32's limit


def ratio_limit(run: Run) -> float:
    """One y limit for the quantiles of sequences and tokens: the largest absolute log-ratio of both, rounded up."""
    every = [run.series(k)[1].ravel() for k in run.keys(RATIO_QUANTILES)]
    largest = np.abs(_log(np.concatenate(every))).max()
    return max(float(largest) * 1.3, 1e-3)


def seconds(labels: Mapping[str, str]) -> Draw:
    """Seconds of each stage, stacked."""

    def draw(axes: Axes, run: Run, keys: Sequence[str]) -> None:
        stages = [key for key in labels if key in keys]
        rows = [row for row in run.rows if any(row.get(key) is not None for key in stages)]
        values = np.array([[row.get(key) or 0.0 for key in stages] for row in rows], dtype=float)
        x, y = binned(np.array([row["step"] for row in rows]), values)
        axes.stackplot(x, y.T, colors=SERIES, labels=[labels[key] for key in stages], linewidth=0, alpha=0.85)
        typical = np.quantile(y.sum(1), 0.98) * 1.25
        axes.set_ylim(0, min(y.sum(1).max() * 1.05, typical) or 1)
        _plain_numbers(axes)

    return draw


def largest(axes: Axes, run: Run, keys: Sequence[str]) -> None:
    """The largest absolute log-ratio of a token beside |log s| of the sequence that holds it, on a log scale."""
    labels = {"ratio/largest_log_ratio": "largest token |d|", "ratio/sequence_at_largest": "|log s| of its sequence"}
    logs = Run([{"step": row["step"]} | {k: _distance(k, row.get(k)) for k in keys} for row in run.rows])
    log_lines(labels)(axes, logs, keys)


def differing(axes: Axes, run: Run, keys: Sequence[str]) -> None:
    """Share of the clip decisions compared that the other side's old log-probabilities would change."""
    differ, compared = "mismatch/decisions_differ", "mismatch/decisions"
    held = [row for row in run.rows if row.get(compared) and row.get(differ) is not None]
    shares = Run([{"step": row["step"], differ: row[differ] / row[compared]} for row in held])
    lines({differ: "share"}, percent=True)(axes, shares, shares.keys([differ]))


BY_LENGTH = ("mismatch/sequence_mean_by_length", "mismatch/sequence_std_by_length", "mismatch/sequences_by_length")


def pooled_by_length(run: Run) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean [bins] and standard deviation [bins] of s over all steps, and how many sequences they are of [bins].

    What a bin is too empty for is NaN.
    """
    held = [row for row in run.rows if all(row.get(key) is not None for key in BY_LENGTH)]
    mean, std, num = (np.array([row[key] for row in held], dtype=float).reshape(-1, len(LENGTHS) + 1) for key in BY_LENGTH)
    mean, std, total = np.nan_to_num(mean), np.nan_to_num(std), num.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        whole = (num * mean).sum(0) / total
        squares = ((num - 1).clip(0) * std**2 + num * (mean - whole) ** 2).sum(0)
        return whole, np.where(total > 1, np.sqrt(squares / (total - 1)), np.nan), total


def mismatch_by_length(axes: Axes, run: Run, keys: Sequence[str]) -> None:
    """Mean of s - 1 with one standard deviation each way by response length, before the clip band; signed-log scale."""
    mean, std, num = pooled_by_length(run)
    shown = np.flatnonzero(num)
    centre, spread = mean[shown] - 1, np.nan_to_num(std[shown])
    if run.clip:
        axes.axhspan(-run.clip[0], run.clip[1], color=BAND, linewidth=0, label="clip band")
        axes.axhline(-run.clip[0], color=EDGE, linewidth=1.2, linestyle=(0, (4, 2)))
        axes.axhline(run.clip[1], color=EDGE, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.vlines(shown, centre - spread, centre + spread, color=SERIES[0], linewidth=5, alpha=0.35, label="± deviation")
    axes.plot(shown, centre, "o", color=SERIES[0], markersize=4, label="mean of s - 1")
    limit = max([1e-3, *np.abs(centre) + spread, *(run.clip or ())]) * 1.3
    signed_log_axis(axes, limit, 1e-4)
    _length_axis(axes, shown)


def deviation_by_length(axes: Axes, run: Run, keys: Sequence[str]) -> None:
    """Standard deviation of s by response length on a log scale, with the narrower clip bound as a line."""
    std = pooled_by_length(run)[1]
    shown = np.flatnonzero(std > 0)
    axes.set_yscale("log")
    axes.plot(shown, std[shown], "o-", color=SERIES[0], markersize=4, label="deviation of s")
    if run.clip:
        axes.axhline(min(run.clip), color=EDGE, linewidth=1.2, linestyle=(0, (4, 2)), label="narrower clip bound")
    sizes = [*std[shown], *(run.clip or ())] or [1.0]
    axes.set_ylim(10 ** math.floor(math.log10(min(sizes))), 10 ** math.ceil(math.log10(max(sizes)) + 1e-9))
    axes.yaxis.set_major_formatter(power)
    _length_axis(axes, shown)


def _length_axis(axes: Axes, shown: np.ndarray) -> None:
    """Bins of LENGTHS as places on the x axis, each named by the longest response in it."""
    from matplotlib.ticker import NullFormatter

    first, last = (int(shown[0]), int(shown[-1])) if len(shown) else (0, 1)
    places = range(first, last + 1, 1 + (last - first) // 7)
    names = [f"{n // 1024}k" if n >= 1024 else str(n) for n in LENGTHS] + ["more"]
    axes.set_xlim(first - 0.5, last + 0.5)
    axes.set_xticks(list(places), [f"≤{names[i]}" if i < len(LENGTHS) else names[i] for i in places])
    axes.yaxis.set_minor_formatter(NullFormatter())


def _distance(key: str, value: float | None) -> float | None:
    if value is None or key == "ratio/largest_log_ratio":
        return value
    return abs(float(_log(np.array(value))))
