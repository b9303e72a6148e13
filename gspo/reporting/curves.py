"""A metric of an arm as one curve with a band over its seeds, along steps, samples, seconds or GPU-seconds.

R rows of a run, P points of a curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .arms import Arm, Recorded
from .drawing import smooth
from .records import RecordsError
from .seeds import seed_interval
from .svg import EDGE, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

By = Literal["steps", "samples", "seconds", "gpu-seconds"]
"""What runs are laid along."""
AXES: dict[By, str] = {
    "steps": "steps",
    "samples": "samples",
    "seconds": "seconds of training, evaluations left out",
    "gpu-seconds": "GPU-seconds of training (seconds times processes), evaluations left out",
}
FEWEST_FOR_T = 5
"""Seeds from which on a band is Student's interval of the mean; of fewer it would be wider than all that was measured."""
MOST_POINTS = 300  # of a curve: more than a chart has columns of ink, and areas are not simplified by the SVG writer
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
MOST_ARMS = len(SERIES) * len(DASHES)
"""Arms that colours and dashes can tell apart."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of one arm."""

    x: np.ndarray
    """Places on the axis [P]."""
    mean: np.ndarray
    """Mean over the seeds [P]."""
    low: np.ndarray
    """Lower edge of the band [P]; the mean itself for one seed without an interval of its own."""
    high: np.ndarray
    """Upper edge [P]."""
    num_seeds: int
    """Runs that hold the metric."""


def positions(run: Recorded, by: By) -> np.ndarray:
    """Where each row of a run lies on the axis [R]; the evaluation before training lies at 0.

    Seconds are those of whole steps less their evaluations, GPU-seconds the same times the processes of each step. Raises
    RecordsError if a row does not hold what that takes.
    """
    if by == "steps":
        return np.array([row["step"] for row in run.rows], dtype=float)
    return np.cumsum([_cost(run, row, by) if row["step"] > 0 else 0.0 for row in run.rows])


def _cost(run: Recorded, row: Mapping[str, Any], by: By) -> float:
    needs = {"samples": ("rollout/responses",), "seconds": ("time/step_s",), "gpu-seconds": ("time/step_s", "system/ranks")}
    for key in needs[by]:
        if not isinstance(row.get(key), int | float):
            hint = " (it was made before processes were counted)" if key == "system/ranks" else ""
            raise RecordsError(
                f"{run.folder}: step {row['step']} holds no {key}{hint}: {by} are unknown; choose another --by"
            )
    if by == "samples":
        return float(row["rollout/responses"])
    seconds = row["time/step_s"] - (row.get("time/evaluate_s") or 0.0)
    return seconds * (row["system/ranks"] if by == "gpu-seconds" else 1)


def series(run: Recorded, x: np.ndarray, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Places and values of the rows that hold a value for the key."""
    held = [(at, row[key]) for at, row in zip(x, run.rows, strict=True) if isinstance(row.get(key), int | float)]
    return np.array([at for at, _ in held]), np.array([value for _, value in held], dtype=float)


def curve(arm: Arm, by: By, key: str, *, smoothed: bool) -> Curve | None:
    """The arm's mean of a metric with its band, None where none of its runs holds it.

    Each run is taken as a running mean over a thirtieth of its steps if `smoothed`, and between its rows as a straight
    line; the curve goes as far as all its runs do. Band: smallest to largest for 2 to 4 seeds, Student's 95% interval of
    the mean for 5 and more; for one seed the interval that the run recorded, if it did.
    """
    held = [(run, *series(run, positions(run, by), key)) for run in arm.runs]
    held = [(run, x, y) for run, x, y in held if len(x)]
    if not held:
        return None
    if len(held) == 1:
        ((run, x, y),) = held
        y = smooth(y) if smoothed else y
        return Curve(x, y, *_own_interval(run, by, key, y), 1)
    grid = _grid([x for _, x, _ in held])
    values = np.stack([np.interp(grid, x, smooth(y) if smoothed else y) for _, x, y in held])
    if len(held) < FEWEST_FOR_T:
        return Curve(grid, values.mean(0), values.min(0), values.max(0), len(held))
    edges = np.array([seed_interval(column.tolist()) for column in values.T])
    return Curve(grid, values.mean(0), edges[:, 1], edges[:, 2], len(held))


def _own_interval(run: Recorded, by: By, key: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    low, high = (series(run, positions(run, by), f"{key}_{end}")[1] for end in ("low", "high"))
    return (low, high) if len(low) == len(high) == len(values) else (values, values)


def _grid(places: Sequence[np.ndarray]) -> np.ndarray:
    """The places of all runs between where the last of them begins and the first ends, at most MOST_POINTS of them."""
    first, last = max(x[0] for x in places), min(x[-1] for x in places)
    every = np.unique(np.concatenate(places))
    every = every[(every >= first) & (every <= last)]
    if not len(every):  # runs that do not overlap: nothing can be averaged but at one place
        return np.array([last])
    return every[np.unique(np.linspace(0, len(every) - 1, MOST_POINTS).round().astype(int))]


@dataclass(frozen=True, slots=True)
class Chart:
    """One metric to draw."""

    name: str
    """Of the element in the page."""
    title: str
    """What it shows."""
    key: str
    """The metric."""
    smoothed: bool = True
    """Whether running means are drawn."""
    log: bool = False
    """Whether on a log scale; what is 0 then lies on the lower edge."""
    percent: bool = False
    """Whether it is a share."""


def painter(chart: Chart, curves: Sequence[Curve | None], limit: float) -> Callable[[Axes], None]:
    """What draws the curves of all arms on one pair of axes, each in the colour of its place.

    limit: the place up to which all runs go, marked where some go further.
    """

    def draw(axes: Axes) -> None:
        held = [(i, c) for i, c in enumerate(curves) if c is not None]
        floor = _floor([c for _, c in held]) if chart.log else None
        if floor is not None:
            _log_axis(axes, floor, max(float(np.max(c.high)) for _, c in held))  # first: nothing is then scaled to fit
        for i, c in held:
            _one(axes, c, SERIES[i % len(SERIES)], DASHES[i // len(SERIES)], floor, points=not chart.smoothed)
        if max(c.x[-1] for _, c in held) > limit * (1 + 1e-9):
            axes.axvline(limit, color=EDGE, linewidth=1.1, linestyle=(0, (4, 2)), zorder=1)
        _axis(axes, chart, [c for _, c in held])

    return draw


def _one(axes: Axes, c: Curve, colour: str, dash: Any, floor: float | None, *, points: bool) -> None:
    low, mean, high = (v if floor is None else np.maximum(v, floor) for v in (c.low, c.mean, c.high))
    if c.num_seeds == 1 and points:
        axes.vlines(c.x, low, high, color=colour, linewidth=1.2, alpha=0.6)
    elif len(c.x) > 1:
        axes.fill_between(c.x, low, high, color=colour, alpha=0.16, linewidth=0)
    else:
        axes.vlines(c.x, low, high, color=colour, linewidth=6, alpha=0.25)
    few = points and len(c.x) <= 40
    axes.plot(c.x, mean, color=colour, linestyle=dash, marker="o" if few or len(c.x) == 1 else None, markersize=3.5)


def _floor(curves: Sequence[Curve]) -> float:
    """The decade under the smallest mean above 0."""
    means = np.concatenate([c.mean for c in curves])
    positive = means[means > 0]
    return 10.0 ** math.floor(math.log10(positive.min())) if len(positive) else 1e-4


def _axis(axes: Axes, chart: Chart, curves: Sequence[Curve]) -> None:
    from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

    if not chart.log and all(float(np.min(c.low)) >= 0 for c in curves):
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.6g}%" if chart.percent else f"{v:.6g}"))
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10], integer=True))
    if axes.get_xlim()[1] >= 1e4:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _log_axis(axes: Axes, floor: float, top: float) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    decades = max(1, math.ceil(math.log10(top / floor) - 1e-9)) if top > 0 else 1
    axes.set_yscale("log")
    axes.set_ylim(floor, floor * 10.0**decades)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades <= 2 else (1.0,)))
    axes.yaxis.set_minor_formatter(NullFormatter())
