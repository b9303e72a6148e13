"""`gspo compare RUN RUN...`: runs side by side, a table and one page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arms import Arm, Recorded, arms_of, notes_on, read_run
from .curves import AXES, DASHES, FEWEST_FOR_T, MOST_ARMS, By, Chart, Curve, curve, painter
from .records import RecordsError
from .scores import Result, Score, columns_of, limit_of, result
from .svg import SERIES, figure_svg
from .text import visible

if TYPE_CHECKING:
    from rich.table import Table

CHARTS = (
    Chart("reward", "Training reward", "reward/mean"),
    Chart("held-out", "Held-out reward", "evaluation/reward", smoothed=False),
    Chart("pass", "Held-out pass@{k}", "evaluation/pass@{k}", smoothed=False),
    Chart("clipped", "Clipped sequences, log scale", "clip/sequence", log=True, percent=True),
    Chart("length", "Response length, tokens", "rollout/response_tokens_mean"),
    Chart("entropy", "Entropy, nats a token", "policy/entropy"),
    Chart("gradient", "Gradient norm, log scale", "update/grad_norm", log=True),
    Chart("seconds", "Seconds a step", "time/step_s"),
)
"""What is drawn of those metrics that a run has; {k} is the smallest k that was evaluated."""

_TOTALS: dict[By, str] = {"samples": "samples", "seconds": "seconds", "gpu-seconds": "GPU-seconds"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs laid along one axis."""

    by: By
    """The axis."""
    limit: float
    """How far along it all runs go: scores are read there."""
    columns: Mapping[str, str]
    """Heading of a score to its metric."""
    results: Sequence[Result]
    """A row an arm."""
    notes: Sequence[str]
    """What to know before believing it."""
    charts: Sequence[tuple[Chart, Sequence[Curve | None]]]
    """What can be drawn, with the curve of each arm."""
    missing: Sequence[str]
    """Titles of charts that no run has the metric of."""

    @property
    def num_runs(self) -> int:
        """Runs in all arms."""
        return sum(len(r.arm.runs) for r in self.results)


def compare(folders: Sequence[Path], by: By = "steps") -> Comparison:
    """Read the runs and lay them along the axis; runs that differ in nothing but the seed are one arm.

    Scores are read where the first of the runs ends, so that all had the same steps, samples or seconds; curves go on.
    Raises RecordsError, naming the folder, for what is no run or has no step, damaged records, runs of different held-out
    problems, and more arms than colours can tell apart. Not covered: whether a difference is more than chance; intervals
    that do not overlap say so, those that do say nothing.
    """
    runs = [read_run(folder) for folder in folders]
    notes, arms, limit = notes_on(runs), arms_of(runs), limit_of(runs, by)
    if len(arms) > MOST_ARMS:
        raise RecordsError(f"{len(arms)} arms: at most {MOST_ARMS} can be told apart; compare fewer runs at a time")
    columns = columns_of(runs)
    results = [result(arm, by, limit, columns) for arm in arms]
    again = "evaluation/reward" not in columns.values() and any(k.startswith("evaluation/") for k in columns.values())
    charts = [_at_smallest_k(chart, columns) for chart in CHARTS if not (again and chart.key == "evaluation/reward")]
    curves = [(chart, [curve(arm, by, chart.key, smoothed=chart.smoothed) for arm in arms]) for chart in charts]
    drawn = [(chart, held) for chart, held in curves if any(held)]
    missing = [chart.title for chart, held in curves if not any(held)]
    if again:
        notes.insert(
            0, "The held-out reward is the held-out pass@k of the smallest k in every evaluation, and is shown once."
        )
    notes = [*_ends(runs, results, by, limit), *_too_few_seeds(arms), *notes]
    return Comparison(by, limit, columns, results, notes, drawn, missing)


def table(comparison: Comparison) -> Table:
    """The final scores for a terminal, an arm a row."""
    from rich.table import Table
    from rich.text import Text

    out = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for i, heading in enumerate(headings(comparison)):
        out.add_column(heading, justify="left" if i == 0 else "right", no_wrap=i > 0, overflow="fold")
    for r in comparison.results:
        cells = [" ".join(part for part in cell if part) for cell in row(comparison, r)]
        out.add_row(*(Text(cell) for cell in cells))
    return out


def footnotes(comparison: Comparison) -> list[str]:
    """What the numbers are, and what to know about them, a sentence each."""
    seeds = {score.over for r in comparison.results for score in r.scores.values() if score and score.interval}
    out = ["Held-out scores are of the last evaluation, training reward is the mean over the last tenth of the steps."]
    if "seeds" in seeds:
        out.append("Intervals: 95% of the mean over seeds, Student's t.")
    if "prompts" in seeds:
        out.append("* one run: 95% as it recorded it, over prompts; it knows nothing of other seeds.")
    if any(r.totals[axis] is not None for r in comparison.results for axis in ("samples", "seconds")):
        out.append("Samples and seconds: means over the runs of an arm; seconds without evaluations and cold start.")
    return out + list(comparison.notes)


def headings(comparison: Comparison) -> list[str]:
    """Of the table's columns."""
    at = ["evaluated at"] if any(r.evaluated for r in comparison.results) else []
    return ["arm", "seeds", "steps", *at, *comparison.columns, *(_TOTALS[axis] for axis in _totals(comparison))]


def row(comparison: Comparison, r: Result) -> list[tuple[str, str]]:
    """The cells of an arm: what is in each, and its interval."""
    at = [(_range(r.evaluated) if r.evaluated else "-", "")] if any(x.evaluated for x in comparison.results) else []
    totals = [("-" if (total := r.totals[axis]) is None else f"{total:,.0f}", "") for axis in _totals(comparison)]
    scores = [_cell(score, len(r.arm.runs)) for score in r.scores.values()]
    return [(r.arm.label, ""), (str(len(r.arm.runs)), ""), (_range(r.steps), ""), *at, *scores, *totals]


def write_page(comparison: Comparison, path: Path) -> Path:
    """Write the page, and return its path. Raises RecordsError if it is no .html file in a folder that is there."""
    require_page(path)
    beside = path.with_name(path.name + ".part")
    beside.write_text(render(comparison), encoding="utf-8", newline="\n")
    beside.replace(path)
    return path


def require_page(path: Path) -> None:
    """Raises RecordsError unless the path ends in .html and its folder is there: nothing else is ever written over."""
    if path.suffix != ".html":
        raise RecordsError(f"{path}: the page is HTML, and nothing else is written over: name a file that ends in .html")
    if path.is_dir():
        raise RecordsError(f"{path}: is a folder: name a file for the page")
    if not path.parent.is_dir():
        raise RecordsError(f"{path}: the folder {path.parent} is not there; make it first")


def render(comparison: Comparison) -> str:
    """The page as text. It refers to nothing outside itself, runs no script and forbids the browser to load anything."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    loader = PackageLoader("gspo.reporting", ".")
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    style = "".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("report.css", "compare.css"))
    page.filters |= {"svg": Markup}  # ours, made by matplotlib from numbers and labels of this package
    return page.get_template("compare.html.j2").render(style=Markup(style), **_contents(comparison))


def _contents(comparison: Comparison) -> dict[str, Any]:
    num = len(comparison.results)
    arms = [
        {
            "label": r.arm.label,
            "swatch": f"c{i % len(SERIES) + 1} dash{i // len(SERIES) % len(DASHES)}",
            "cells": row(comparison, r)[1:],
            "settings": list(r.arm.differing.items()),
            "runs": [_run_line(run) for run in r.arm.runs],
        }
        for i, r in enumerate(comparison.results)
    ]
    return {
        "title": f"{arms[0]['label']}" if num == 1 else f"{num} arms side by side",
        "lead": [_count(comparison.num_runs, "run"), f"along {AXES[comparison.by]}", f"scores at {_reached(comparison)}"],
        "headings": headings(comparison)[1:],
        "arms": arms,
        "footnotes": footnotes(comparison),
        "charts": [
            (chart, _band(curves), chart.log and _has_zeros(curves), _svg(chart, curves, comparison))
            for chart, curves in comparison.charts
        ],
        "axis": comparison.by.replace("gpu", "GPU"),
        "missing": comparison.missing,
        "goes_on": any(c is not None and c.x[-1] > comparison.limit for _, curves in comparison.charts for c in curves),
    }


def _svg(chart: Chart, curves: Sequence[Curve | None], comparison: Comparison) -> str:
    alt = f"{chart.title} along {comparison.by}, a line an arm: {', '.join(r.arm.label for r in comparison.results)}"
    return figure_svg(chart.name, alt, painter(chart, curves, comparison.limit), beside=2)


def _band(curves: Sequence[Curve | None]) -> str:
    """What the band of a chart is, for the seeds that its curves have."""
    nums = {c.num_seeds for c in curves if c is not None}
    words = []
    if any(1 < n < FEWEST_FOR_T for n in nums):
        words.append("from the smallest to the largest seed")
    if any(n >= FEWEST_FOR_T for n in nums):
        words.append(f"Student's 95% interval of the mean (arms of {FEWEST_FOR_T} seeds and more)" if words else
                     "Student's 95% interval of the mean over seeds")  # fmt: skip
    return "; ".join(words)


def _has_zeros(curves: Sequence[Curve | None]) -> bool:
    return any(bool((c.low <= 0).any()) for c in curves if c is not None)


def _run_line(run: Recorded) -> str:
    last = run.rows[-1]["step"]
    return visible(f"seed {run.seed}, {_count(last, 'step')}: {run.folder}", keep="")


def _at_smallest_k(chart: Chart, columns: Mapping[str, str]) -> Chart:
    smallest = next((key[16:] for key in columns.values() if key.startswith("evaluation/pass@")), "1")
    fill = {"title": chart.title.replace("{k}", smallest), "key": chart.key.replace("{k}", smallest)}
    return Chart(chart.name, fill["title"], fill["key"], chart.smoothed, chart.log, chart.percent)


def _ends(runs: Sequence[Recorded], results: Sequence[Result], by: By, limit: float) -> list[str]:
    """Where scores are read, if runs do not all end there, and which arms have no evaluation up to there."""
    last = [run.rows[-1]["step"] for run in runs]
    out = []
    if by != "steps":
        out.append(f"Scores are read at {limit:,.0f} {_unit(by)}, which all runs reached.")
    elif min(last) < max(last):
        longer = [f"{visible(str(run.folder))} ({n:,})" for run, n in zip(runs, last, strict=True) if n > min(last)]
        out.append(f"Scores are read at step {min(last):,}, which all runs reached; longer are {', '.join(longer)}.")
    if untrained := [r.arm.label for r in results if r.evaluated and r.evaluated[0] == 0]:
        out.append(
            f"Up to there the only evaluation is the one before training, of a run at least: {'; '.join(untrained)}."
        )
    return out


def _too_few_seeds(arms: Sequence[Arm]) -> list[str]:
    few = [arm for arm in arms if len(arm.runs) < 3]
    if len(arms) < 2 or not few:
        return []
    return [
        f"{_count(len(few), 'arm')} of {len(arms)} with fewer than three seeds: what differs there may be the seed alone."
    ]


def _totals(comparison: Comparison) -> list[By]:
    """Those that are known; GPU-seconds only where they say more than seconds do."""
    known: list[By] = [axis for axis in _TOTALS if any(r.totals[axis] is not None for r in comparison.results)]
    same = comparison.by != "gpu-seconds" and all(
        r.totals["gpu-seconds"] == r.totals["seconds"] for r in comparison.results
    )
    return [axis for axis in known if not (same and axis == "gpu-seconds")]


def _cell(score: Score | None, num_runs: int) -> tuple[str, str]:
    if score is None:
        return "-", ""
    fewer = f" of {score.num}" if score.num < num_runs else ""
    if score.interval is None:
        return f"{score.mean:.3f}", fewer.strip()
    star = "*" if score.over == "prompts" else ""
    return f"{score.mean:.3f}", f"[{score.interval[0]:.3f}, {score.interval[1]:.3f}]{star}{fewer}"


def _reached(comparison: Comparison) -> str:
    return (
        f"{comparison.limit:,.0f} {_unit(comparison.by)}" if comparison.by != "steps" else f"step {comparison.limit:,.0f}"
    )


def _unit(by: By) -> str:
    return by.replace("gpu", "GPU")


def _range(ends: tuple[int, int]) -> str:
    return f"{ends[0]:,}" if ends[0] == ends[1] else f"{ends[0]:,} to {ends[1]:,}"


def _count(num: int, noun: str) -> str:
    return f"{num:,} {noun}{'' if num == 1 else 's'}"
