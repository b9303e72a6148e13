"""What an arm reached: its last scores on a common axis, with intervals over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .arms import Arm, Recorded
from .curves import By, positions
from .records import RecordsError
from .seeds import seed_interval


@dataclass(frozen=True, slots=True)
class Score:
    """A mean over the runs of an arm."""

    mean: float
    """The estimate."""
    interval: tuple[float, float] | None
    """95%, None where one run recorded none."""
    over: Literal["seeds", "prompts"]
    """What the interval is over: seeds by Student's t, or, for one run, its own over prompts."""
    num: int
    """Runs that it is of."""


@dataclass(frozen=True, slots=True)
class Result:
    """One arm's row of the table."""

    arm: Arm
    """Whose."""
    scores: Mapping[str, Score | None]
    """Column to score; None where no run of the arm has it."""
    steps: tuple[int, int]
    """Least and most steps of its runs within the compared part."""
    evaluated: tuple[int, int] | None
    """Least and most step of their last evaluations, None without any."""
    totals: Mapping[By, float | None]
    """Mean over its runs of samples, seconds and GPU-seconds within the compared part; None where not recorded."""


def columns_of(runs: Sequence[Recorded]) -> dict[str, str]:
    """Heading to metric: every pass@k that an evaluation of the runs holds, the held-out and the training reward.

    The held-out reward only where it is not the smallest pass@k over again, as it is for rewards of 0 and 1.
    """
    held = {key for run in runs for row in run.rows for key, value in row.items() if value is not None}
    passes = sorted((k for k in held if k.startswith("evaluation/pass@") and k[16:].isdecimal()), key=lambda k: int(k[16:]))
    columns = {f"held-out {key.removeprefix('evaluation/')}": key for key in passes}
    pairs = [(row.get("evaluation/reward"), row.get(passes[0])) for run in runs for row in run.rows] if passes else []
    again = bool(pairs) and all(a == b or (a is not None and b is not None and abs(a - b) < 1e-9) for a, b in pairs)
    if "evaluation/reward" in held and not again:
        columns["held-out reward"] = "evaluation/reward"
    return columns | {"training reward": "reward/mean"}


def limit_of(runs: Sequence[Recorded], by: By) -> float:
    """How far along the axis all runs go."""
    return min(float(positions(run, by)[-1]) for run in runs)


def result(arm: Arm, by: By, limit: float, columns: Mapping[str, str]) -> Result:
    """The scores of an arm within `limit`: held out at the last evaluation, in training over the last tenth of steps."""
    parts = [_within(run, by, limit) for run in arm.runs]
    evaluated = [part.rows[i]["step"] for part in parts for i in _evaluations(part)[-1:]]
    steps = [part.rows[-1]["step"] for part in parts]
    return Result(
        arm,
        {heading: _score(parts, key) for heading, key in columns.items()},
        (min(steps), max(steps)),
        (min(evaluated), max(evaluated)) if evaluated else None,
        {axis: _total(parts, axis) for axis in ("samples", "seconds", "gpu-seconds")},
    )


def _within(run: Recorded, by: By, limit: float) -> Recorded:
    inside = positions(run, by) <= limit * (1 + 1e-9)
    rows = [row for row, keep in zip(run.rows, inside, strict=True) if keep]
    return Recorded(run.folder, run.config, run.versions, rows or run.rows[:1], run.torn)


def _evaluations(run: Recorded) -> list[int]:
    return [i for i, row in enumerate(run.rows) if any(k.startswith("evaluation/") and row[k] is not None for k in row)]


def _score(parts: Sequence[Recorded], key: str) -> Score | None:
    values = [(run, value) for run in parts if (value := _last(run, key)) is not None]
    if not values:
        return None
    if len(values) > 1:
        mean, low, high = seed_interval([value for _, value in values])
        return Score(mean, (low, high), "seeds", len(values))
    ((run, value),) = values
    low, high = _last(run, f"{key}_low"), _last(run, f"{key}_high")
    return Score(value, None if low is None or high is None else (low, high), "prompts", 1)


def _last(run: Recorded, key: str) -> float | None:
    """The last value of an evaluation; of a training metric the mean over the last tenth of the rows that hold it."""
    held = [row[key] for row in run.rows if isinstance(row.get(key), int | float)]
    if not held:
        return None
    return held[-1] if key.startswith("evaluation/") else statistics.fmean(held[-max(1, round(len(held) / 10)) :])


def _total(parts: Sequence[Recorded], axis: By) -> float | None:
    try:
        return float(np.mean([positions(run, axis)[-1] for run in parts]))
    except RecordsError:
        return None
