"""A run's report: one HTML page that needs nothing but itself."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .drawing import Run
from .figures import COLD_START, MIXTURE, REFERENCE, TRAINING, Drawn, draw_figures
from .pictures import spread
from .records import read_config, read_metrics, read_object, read_samples, sample_steps
from .strips import CUTS, MAX_BYTES, clips, require_whole_tokens, strips
from .text import visible

MAX_STEPS, MAX_SAMPLES = 40, 16  # embedded: this many steps, this many samples of each
MAX_EMBEDDED_BYTES = 3_000_000
_CUTS = (2000, 1000, 500, 250, 100)  # characters of a text that are embedded; shorter where all would be too large

_STRIPS_AFTER = 3  # sections of figures: one response follows on how far each update goes

_SUMMARY = (  # label, key, format
    ("training reward", "reward/mean", ".3f"),
    ("responses solved", "reward/solved", ".1%"),
    ("groups without signal", "reward/groups_without_signal", ".1%"),
    ("response length, tokens", "rollout/response_tokens_mean", ".1f"),
    ("responses truncated", "rollout/truncated", ".1%"),
    ("entropy, nats a token", "policy/entropy", ".3f"),
    ("standard deviation of s", "ratio/sequence_std", ".2e"),
    ("sequences clipped", "clip/sequence", ".2%"),
    ("gradient norm", "update/grad_norm", ".3g"),
    ("tokens sampled a second", "rollout/tokens_per_s", ",.0f"),
    ("seconds a step", "time/step_s", ".2f"),
)


def write_report(run_folder: str | Path) -> Path:
    """Write report.html into a run's folder, from the files in it, and return its path.

    Reads metrics.jsonl, and where they are there cold_start/metrics.jsonl, samples/, config.json and versions.json. The
    page refers to nothing outside itself and forbids the browser to load anything; texts of models are shown, never
    interpreted. Same files, same page, byte for byte, with the same version of matplotlib. Figures that lack metrics
    are left out and named; before the first step it holds the cold start and the settings. Raises FileNotFoundError for a
    folder that is no run, RecordsError for a file that is damaged.
    """
    folder = Path(run_folder)
    path = folder / "report.html"
    beside = path.with_name("report.html.part")
    beside.write_text(render(folder), encoding="utf-8", newline="\n")
    beside.replace(path)
    return path


def render(folder: Path) -> str:
    """The page as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    loader = PackageLoader("gspo.reporting", ".")
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    script, strip_script, style = (_asset(name) for name in ("report.js", "strips.js", "report.css"))
    script += strip_script
    steps = _kept_steps(folder)
    values = _contents(folder, [line for _, lines in steps for line in lines])
    svg = {"svg": Markup}  # ours, made by matplotlib from numbers and labels of this package
    page.filters |= svg
    return page.get_template("report.html.j2").render(
        **values,
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        samples=Markup(embed(_samples(folder, steps) | {"strips": _strips(folder, steps)})),
    )


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def embed(value: Any) -> str:
    """JSON that may stand inside a script element: no character in it can end the element or start another."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _contents(folder: Path, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    # Without either file it is no run, which is said.
    begun = (folder / "metrics.jsonl").exists() or not (folder / "config.json").exists()
    rows = read_metrics(folder) if begun else []
    config, versions = read_config(folder), read_object(folder / "versions.json")
    sections = _sections(folder, Run(rows, _clip(config), lines))
    drawn = [figure for _, figures in sections for figure in figures]
    return {
        "name": visible(str(config.get("name", folder.resolve().name))),
        "lead": _lead(rows, config),
        "summary": _summary(rows),
        "sections": _with_pictures(sections),
        "left_out": [f for f in drawn if f.missing],
        "config": visible(json.dumps(config, indent=2, ensure_ascii=False)) if config else "",
        "versions": sorted((visible(str(k)), visible(str(v))) for k, v in versions.items()),
        "band_known": _clip(config) is not None,
        "has_strips": any(line.get("tokens") for line in lines),
        "strips_after": min(_STRIPS_AFTER, len(_with_pictures(sections))),
    }


def _sections(folder: Path, run: Run) -> list[tuple[str, list[Drawn]]]:
    sections = [(title, draw_figures(specs, run) if run.rows else []) for title, specs in TRAINING]
    if run.keys(["kl/reference"]):
        sections[2][1].extend(draw_figures([REFERENCE], run))
    for figure in MIXTURE:
        if panels := tuple(panel for panel in figure.panels if run.keys(panel.needs)):  # a dense model lacks nothing
            sections[2][1].extend(draw_figures([replace(figure, panels=panels)], run))
    if (folder / "cold_start" / "metrics.jsonl").exists() and (cold := read_metrics(folder / "cold_start")):
        sections[0][1].extend(draw_figures([COLD_START], Run(cold)))
    return sections


def _with_pictures(sections: Sequence[tuple[str, list[Drawn]]]) -> list[tuple[str, list[Drawn]]]:
    # The first section stays in any case: the numbers stand in it.
    drawn = [(title, [figure for figure in figures if figure.panels]) for title, figures in sections]
    return drawn[:1] + [(title, figures) for title, figures in drawn[1:] if figures]


def _clip(config: Mapping[str, Any]) -> tuple[float, float] | None:
    objective = config.get("objective", {})
    low, high = objective.get("clip_low"), objective.get("clip_high")
    return None if low is None or high is None else (low, high)


def _lead(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[str]:
    if not rows:
        return ["no step was recorded"]
    last = rows[-1]
    steps = config.get("training", {}).get("steps")
    facts = [config.get("objective", {}).get("name", ""), f"{last['step']:,} {f'of {steps:,} ' if steps else ''}steps"]
    if last.get("update/updates") is not None:
        facts.append(f"{last['update/updates']:,} updates, {last.get('update/skipped') or 0:,} skipped")
    if tokens := sum(row.get("update/trained_tokens") or 0 for row in rows):
        facts.append(f"{tokens:,} trained tokens")
    facts.append(_duration(sum(row.get("time/step_s") or 0.0 for row in rows)))
    return [visible(fact) for fact in facts if fact]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _summary(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, tuple[str, str], tuple[str, str]]]:
    """(what, start, end), numbers with their interval: evaluations as they are, other metrics as means of up to 10."""
    run = Run(rows)
    table = []
    for key in sorted(run.keys(["evaluation/pass@<k>"]), key=lambda k: int(k.rpartition("@")[2])):
        held = [row for row in rows if row.get(key) is not None]
        table.append((f"{key.removeprefix('evaluation/')}, held out", _score(held[0], key), _score(held[-1], key)))
    for label, key, form in _SUMMARY:
        values = run.series(key)[1]
        if len(values):
            window = min(10, max(1, len(values) // 2))
            first, last = np.mean(values[:window]), np.mean(values[-window:])
            table.append((label, (f"{first:{form}}", ""), (f"{last:{form}}", "")))
    return table


def _score(row: Mapping[str, Any], key: str) -> tuple[str, str]:
    low, high = row.get(key + "_low"), row.get(key + "_high")
    return f"{row[key]:.3f}", "" if low is None or high is None else f"[{low:.3f}, {high:.3f}]"


# ---- samples ----------------------------------------------------------------------------------------------


Steps = Sequence[tuple[int, Sequence[Mapping[str, Any]]]]


def _kept_steps(folder: Path) -> Steps:
    """(step, lines of its samples file) of the steps that the page holds."""
    every = sample_steps(folder)
    kept = [(every[i], read_samples(folder, every[i])) for i in spread(len(every), MAX_STEPS)]
    for step, lines in kept:
        require_whole_tokens(step, lines)
    return kept


def _samples(folder: Path, kept: Steps) -> dict[str, Any]:
    for limit in _CUTS:
        steps = [_step(step, samples, limit) for step, samples in kept]
        if len(embed(steps).encode()) <= MAX_EMBEDDED_BYTES:
            break
    return {"recorded": len(sample_steps(folder)), "steps": steps}


def _strips(folder: Path, kept: Steps) -> dict[str, Any]:
    config = read_config(folder)
    for limit in CUTS:
        steps = strips(kept, limit)
        if len(embed(steps).encode()) <= MAX_BYTES:
            break
    return {"steps": steps, "clips": clips(config.get("objective", {}).get("name", ""), _clip(config))}


def _step(step: int, samples: Sequence[Mapping[str, Any]], limit: int) -> dict[str, Any]:
    shown = [_sample(samples[i], limit) for i in spread(len(samples), MAX_SAMPLES)]
    return {"step": step, "recorded": len(samples), "samples": shown}


def _sample(sample: Mapping[str, Any], limit: int) -> dict[str, Any]:
    out: dict[str, Any] = {key: _cut(sample.get(key), limit) for key in ("prompt", "response", "answer", "id")}
    parts = sample.get("parts") or {}
    out["parts"] = [
        {"name": _cut(name, 60), "value": part.get("value"), "why": _cut(part.get("why") or "", min(limit, 300))}
        for name, part in parts.items()
    ]
    plain = ("reward", "advantage", "num_tokens", "finish_reason", "seed", "weight_version", "ratio", "clipped")
    return out | {key: sample.get(key) for key in plain}


def _cut(value: Any, limit: int) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) <= limit:
        return visible(text)
    return f"{visible(text[:limit])} … [{len(text) - limit:,} more characters left out]"
