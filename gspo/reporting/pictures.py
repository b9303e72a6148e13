"""The method's own pictures on one pair of axes: histograms of ratios, s by length, flips by layer, engine by trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .drawing import Draw, Run, power, share, signed_log_axis
from .names import HISTOGRAM
from .svg import BAND, EDGE, MUTED, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 1000  # of a scatter; about 100 bytes each in the page
HEAT_COLUMNS, HEAT_LEVELS = 50, 12  # of a heat map: the eye tells no more shades apart
HISTOGRAMS = ("ratio/sequence_histogram", "ratio/token_histogram")


def spread(num: int, limit: int) -> list[int]:
    """At most `limit` of the positions 0 to num - 1, evenly spread; the first and the last are among them."""
    if num <= limit:
        return list(range(num))
    return sorted({round(i * (num - 1) / (limit - 1)) for i in range(limit)})


# ---- histograms -------------------------------------------------------------------------------------------


def place(log_ratio: float) -> float:
    """Where a log-ratio lies on an axis on which every bin of HISTOGRAM is one unit wide: edge i lies at i."""
    size, half = abs(log_ratio), len(HISTOGRAM) // 2
    within = HISTOGRAM[half]  # the bin around 0 is linear, all others are logarithmic
    if size <= within:
        return half - 0.5 + log_ratio / (2 * within)
    return half - 0.5 + math.copysign(0.5 + 2 * math.log10(size / within), log_ratio)


def histogram(axes: Axes, run: Run, keys: Sequence[str]) -> None:
    """Shares of log-ratios by bin: of all steps as bars, of the first and last tenth as outlines; the clip band behind."""
    counts = run.series(keys[0])[1]
    tenth = -(-len(counts) // 10)
    if run.clip:
        low, high = place(math.log1p(-run.clip[0])), place(math.log1p(run.clip[1]))
        axes.axvspan(low, high, color=BAND, linewidth=0, label="clip band")
        for edge in (low, high):
            axes.axvline(edge, color=EDGE, linewidth=1.2, linestyle=(0, (4, 2)), zorder=3)
    left = np.arange(counts.shape[1]) - 1  # bin k lies between the edges k - 1 and k
    whole = _shares(counts)
    axes.bar(left + 0.5, whole, 0.94, color=SERIES[0], alpha=0.5, linewidth=0, label="all steps")
    if len(counts) > 1:
        edges = np.append(left, left[-1] + 1)
        for rows, colour, label in ((counts[:tenth], SERIES[1], "first tenth"), (counts[-tenth:], SERIES[0], "last tenth")):
            axes.stairs(_shares(rows), edges, color=colour, linewidth=1.6, label=label)
    _histogram_axis(axes, run)
    axes.set_ylim(0, None)
    axes.yaxis.set_major_formatter(share)


def _shares(counts: np.ndarray) -> np.ndarray:
    return counts.sum(0) / max(counts.sum(), 1)


def _histogram_axis(axes: Axes, run: Run) -> None:
    """The same x axis for sequences and tokens: all bins that hold anything, and the clip band."""
    total = sum(run.series(key)[1].sum(0) for key in run.keys(HISTOGRAMS))
    held = np.flatnonzero(total) - 0.5
    half = len(HISTOGRAM) // 2 - 0.5
    reach = max([4.5, *np.abs(held - half), *(abs(place(math.log1p(x)) - half) for x in _band(run))]) + 1
    axes.set_xlim(half - reach, half + reach)
    decades = [e for e in range(-4, 2) if place(10.0**e) <= half + reach]
    some = decades[:: 2 if len(decades) > 3 else 1]
    ticks = [(place(sign * 10.0**e), power(sign * 10.0**e)) for e in some for sign in (-1, 1)]
    axes.set_xticks([half, *(at for at, _ in ticks)], ["0", *(name for _, name in ticks)])  # 1e-6 would touch the 0


def _band(run: Run) -> tuple[float, ...]:
    return (-run.clip[0], run.clip[1]) if run.clip else ()


# ---- scatters ---------------------------------------------------------------------------------------------


def ratio_by_length(axes: Axes, run: Run, keys: Sequence[str]) -> None:
    """s - 1 against the length of its response, a point each, before the clip band; signed-log scale."""
    held = [line for line in run.lines if line.get("ratio") is not None and line.get("num_tokens")]
    held = [held[i] for i in spread(len(held), MAX_POINTS)]
    length = np.array([line["num_tokens"] for line in held], dtype=float)
    moved = np.array([line["ratio"] for line in held], dtype=float) - 1
    clipped = np.array([bool(line.get("clipped")) for line in held])
    if run.clip:
        axes.axhspan(*_band(run), color=BAND, linewidth=0, label="clip band")
        for edge in _band(run):
            axes.axhline(edge, color=EDGE, linewidth=1.2, linestyle=(0, (4, 2)))
    at = _beside(length)
    for rows, colour, label in ((~clipped, SERIES[0], "not clipped"), (clipped, SERIES[1], "clipped")):
        _points(axes, at[rows], moved[rows], colour, label)
    limit = max([1e-3, *np.abs(moved), *map(abs, _band(run))]) * 1.3
    signed_log_axis(axes, limit, 1e-4)
    if length.max() > 8 * length.min():
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    else:
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))


def _beside(length: np.ndarray) -> np.ndarray:
    """Lengths [n], those that are equal moved a little to the sides, so that their points do not hide one another."""
    golden = np.arange(len(length)) * 0.618033988749895 % 1
    return length + (golden - 0.5) * 0.5 * np.minimum(1.0, np.ptp(length) / 6 + 0.2)


def _points(axes: Axes, x: np.ndarray, y: np.ndarray, colour: str, label: str) -> None:
    if len(x):
        axes.plot(x, y, "o", color=colour, markersize=3.4, alpha=0.5, markeredgewidth=0, label=label)


def compared_tokens(lines: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Engine's log-probability [n] and engine less trainer with the same weights [n] of the tokens that hold both."""
    held = [line["tokens"] for line in lines if line.get("tokens") and line["tokens"].get("engine_gap") is not None]
    pairs = [pair for table in held for pair in zip(table["engine_logprobs"], table["engine_gap"], strict=True)]
    pairs = [pairs[i] for i in spread(len(pairs), MAX_POINTS)]
    engine, gap = np.array(pairs, dtype=float).reshape(-1, 2).T
    return engine, gap


def engine_by_trainer(axes: Axes, run: Run, keys: Sequence[str]) -> None:
    """Log-probability of the same tokens by engine (y) and trainer (x), with the diagonal."""
    engine, gap = compared_tokens(run.lines)
    low = min(engine.min(), (engine - gap).min(), -1e-3) * 1.04
    axes.plot([low, 0], [low, 0], color=MUTED, linewidth=1.1, linestyle=(0, (4, 2)), label="equal")
    _points(axes, engine - gap, engine, SERIES[0], "tokens")
    axes.set_xlim(low, -low * 0.02)
    axes.set_ylim(low, -low * 0.02)


def gap_by_trainer(axes: Axes, run: Run, keys: Sequence[str]) -> None:
    """Engine less trainer against the trainer's log-probability; signed-log scale down to the smallest gaps."""
    engine, gap = compared_tokens(run.lines)
    sizes = np.abs(gap[gap != 0])
    smallest = 10.0 ** math.floor(math.log10(np.quantile(sizes, 0.1))) if len(sizes) else 1e-6
    axes.axhline(0, color=MUTED, linewidth=1.1, linestyle=(0, (4, 2)))
    _points(axes, engine - gap, gap, SERIES[0], "tokens")
    signed_log_axis(axes, max([*sizes, smallest]) * 1.6, smallest)


# ---- heat map ---------------------------------------------------------------------------------------------


def by_layer(*, percent: bool) -> Draw:
    """A drawing of a list by layer (y, the first at the top) and step (x): the stronger the colour, the larger.

    percent: the legend gives shares in percent, else plain numbers. At most HEAT_COLUMNS columns, means of neighbours.
    """

    def draw(axes: Axes, run: Run, keys: Sequence[str]) -> None:
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path

        edges, means = _columns(*run.series(keys[0]))
        top = float(means.max()) or 1.0
        levels = np.ceil(means / top * HEAT_LEVELS).astype(int)  # 0 for what is exactly 0: no colour
        for level in range(1, HEAT_LEVELS + 1):
            cells = [
                _cell(float(edges[c]), float(edges[c + 1]), layer)
                for c, layer in zip(*np.nonzero(levels == level), strict=True)
            ]
            named = level in (1, HEAT_LEVELS // 2, HEAT_LEVELS)
            if cells or named:
                path = Path.make_compound_path(*cells) if cells else Path(np.zeros((0, 2)))
                upper = top * level / HEAT_LEVELS
                label = f"up to {f'{100 * upper:.2g}%' if percent else f'{upper:.2g}'}" if named else None
                shade = 0.06 + 0.9 * level / HEAT_LEVELS
                axes.add_patch(PathPatch(path, facecolor=SERIES[3], alpha=shade, linewidth=0, label=label))
        _layer_axis(axes, means.shape[1])

    return draw


def _columns(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Edges [columns + 1] in steps and means [columns, layers] of at most HEAT_COLUMNS columns."""
    starts = np.arange(0, len(steps), -(-len(steps) // HEAT_COLUMNS))
    means = np.add.reduceat(values, starts, axis=0) / np.diff(np.append(starts, len(steps)))[:, None]
    return np.append(steps[starts] - 0.5, steps[-1] + 0.5), means


def _layer_axis(axes: Axes, num: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_ylim(num - 0.5, -0.5)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.grid(visible=False)


def _cell(left: float, right: float, layer: int) -> Any:
    from matplotlib.path import Path

    low, high = layer - 0.47, layer + 0.47
    corners = [(left, low), (right, low), (right, high), (left, high), (left, low)]
    return Path(corners, [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY])
