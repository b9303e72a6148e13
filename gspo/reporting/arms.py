"""Runs that differ in nothing but the seed are one arm of a comparison, named by the settings that set it apart."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .records import RecordsError, read_config, read_metrics, read_object
from .text import visible

APART_FROM_SEEDS = ("seed", "name", "output", "tracking", "checkpoint")
"""Settings that runs of one arm may differ in: the seed, and what moves no weight."""

SCORED_BY = (
    "rewards", "solved_at", "environment", "data", "evaluation.temperature", "evaluation.top_p", "evaluation.top_k",
    "evaluation.min_p", "evaluation.max_response_tokens", "evaluation.samples",
)  # fmt: skip
"""Settings that a score depends on besides the policy: arms may differ in them, and are then warned about."""

LONGEST_VALUE = 40  # characters of a setting's value: a legend still fits a phone


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a run's folder says."""

    folder: Path
    """Where it is."""
    config: Mapping[str, Any]
    """Its resolved settings."""
    versions: Mapping[str, Any]
    """What else it depends on; empty where that was not recorded."""
    rows: Sequence[Mapping[str, Any]]
    """Rows of metrics.jsonl, by step; at least one of them of a training step."""
    torn: bool
    """Whether the last line was torn, and left out."""

    @property
    def seed(self) -> Any:
        """The seed of its recipe."""
        return self.config.get("seed")


@dataclass(frozen=True, slots=True)
class Arm:
    """Runs that differ in nothing but the seed."""

    label: str
    """As few settings as tell it from the others, `objective.name = gspo`."""
    runs: Sequence[Recorded]
    """By seed."""
    differing: Mapping[str, str]
    """All settings in which arms differ, dotted, to this arm's value."""


def read_run(folder: Path) -> Recorded:
    """The records of a run. Raises RecordsError if the folder holds no run, or one without a training step."""
    if not folder.is_dir():
        raise RecordsError(f"{folder}: there is no such folder; name the folders of runs, e.g. runs/quickstart")
    for name in ("config.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise RecordsError(f"{folder}: holds no {name}, so it is no folder of a run, or one that has not begun")
    rows = read_metrics(folder)
    if not any(row["step"] > 0 for row in rows):
        raise RecordsError(f"{folder}: no training step is recorded yet; leave the run out, or wait for its first step")
    end = (folder / "metrics.jsonl").read_bytes()[-1:]
    return Recorded(folder, read_config(folder), read_object(folder / "versions.json"), rows, end != b"\n")


def arms_of(runs: Sequence[Recorded]) -> list[Arm]:
    """The runs as arms, in the order in which their first runs stand.

    Two runs of the same settings and the same seed are no two seeds: they become arms of their own, told apart by name
    or, if the names are the same too, by folder.
    """
    groups: dict[str, list[Recorded]] = defaultdict(list)
    for run in runs:
        groups[json.dumps(_settings(run), sort_keys=True)].append(run)
    apart = [part for group in groups.values() for part in _apart(group)]
    settings = [_settings(part[0]) | extra for part, extra in apart]
    keys = [key for key in _ordered(settings) if len(_values(settings, key)) > 1]
    values = [{key: shown(held.get(key)) for key in keys} for held in settings]
    if len(apart) == 1:
        labels = [_only_label(runs)]
    else:
        labels = _labels(values, _ordered([dict(_flat(run.config)) for run in runs]))
    return [Arm(label, part, held) for label, (part, _), held in zip(labels, apart, values, strict=True)]


def notes_on(runs: Sequence[Recorded]) -> list[str]:
    """What a reader must know before believing a comparison of the runs, a sentence each.

    Raises RecordsError if a folder is named twice, or if runs are of different held-out problems (without an evaluation:
    of different prompts), so that their scores say nothing about each other.
    """
    for i, run in enumerate(runs):
        if run.folder.resolve() in [other.folder.resolve() for other in runs[:i]]:
            raise RecordsError(f"{run.folder}: is named twice; a run counts once")
    _require_same_task(runs)
    notes = []
    settings = [_settings(run) for run in runs]
    scored = [key for key in _ordered(settings) if key.startswith(SCORED_BY) and len(_values(settings, key)) > 1]
    if scored:
        notes.append(f"Runs are scored or prompted differently ({', '.join(scored)}): what differs may be that alone.")
    if not all(run.config.get("evaluation") for run in runs):
        without = [visible(str(run.folder)) for run in runs if not run.config.get("evaluation")]
        notes.append(f"Without an evaluation, so without held-out scores: {', '.join(without)}.")
    if torn := [visible(str(run.folder)) for run in runs if run.torn]:
        notes.append(f"The last line of metrics.jsonl is torn and left out: {', '.join(torn)}.")
    packages = sorted({str(key) for run in runs for key in run.versions})
    changed = [key for key in packages if len({str(run.versions.get(key)) for run in runs if run.versions}) > 1]
    if changed:
        notes.append(f"Runs were made with different versions or machines: {visible(', '.join(changed))}.")
    return notes


def shown(value: Any) -> str:
    """A setting's value as a short text, safe to look at: of long ones the end."""
    if isinstance(value, float):
        return f"{value:g}"
    if value is None:
        return "none"
    text = visible(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), keep="")
    return text if len(text) <= LONGEST_VALUE else "…" + text[-LONGEST_VALUE + 1 :]


def _settings(run: Recorded) -> dict[str, Any]:
    """Dotted settings that say what kind of run it is."""
    return {key: value for key, value in _flat(run.config) if key.split(".")[0] not in APART_FROM_SEEDS}


def _flat(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    out = []
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            out += _flat(value, f"{prefix}{key}.")
        else:
            out.append((prefix + key, value))
    return out


def _ordered(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every key of any of them, in the order of the configuration."""
    return list(dict.fromkeys(key for held in settings for key in held))


def _values(settings: Sequence[Mapping[str, Any]], key: str) -> set[str]:
    return {json.dumps(held.get(key), sort_keys=True) for held in settings}


def _apart(group: list[Recorded]) -> list[tuple[list[Recorded], dict[str, Any]]]:
    """A group of equal settings as one arm, or each run by itself where a seed comes twice; with what tells them apart."""
    group = sorted(group, key=lambda run: str(run.seed).zfill(20))
    if len({str(run.seed) for run in group}) == len(group):
        return [(group, {})]
    names = [str(run.config.get("name")) for run in group]
    unique = len(set(names)) == len(names)
    return [([run], {"run": name if unique else str(run.folder)}) for run, name in zip(group, names, strict=True)]


def _only_label(runs: Sequence[Recorded]) -> str:
    """A run's name, or the objective of several seeds."""
    first = runs[0]
    name = first.config.get("name") if len(runs) == 1 else first.config.get("objective", {}).get("name")
    return visible(str(name or first.folder.resolve().name), keep="")


def _labels(values: Sequence[Mapping[str, str]], known: Sequence[str]) -> list[str]:
    """The fewest settings that tell all arms apart, found one by one: the objective first, then what divides most.

    Each is named by the shortest end of its dotted name that no other setting has. known: all settings, dotted.
    """
    chosen: list[str] = []
    keys = list(values[0])

    def parts(by: Sequence[str]) -> int:
        return len({tuple(held[key] for key in by) for held in values})

    def liking(key: str) -> tuple[int, bool, bool, bool, int]:
        place = key.endswith("path")  # says where a file lies, seldom what a run is
        return parts([*chosen, key]), key == "run", key == "objective.name", not place, -keys.index(key)

    while parts(chosen) < parts(keys):
        chosen.append(max(keys, key=liking))
    names = {key: _short(key, known) for key in chosen}
    labels = [", ".join(f"{names[key]} = {held[key]}" for key in chosen) for held in values]
    return [label if labels.count(label) == 1 else f"{label} ({i})" for i, label in enumerate(labels, 1)]


def _short(key: str, known: Sequence[str]) -> str:
    words = key.split(".")
    ends = (".".join(words[i:]) for i in range(len(words) - 1, 0, -1))
    return next((end for end in ends if not any(f".{other}".endswith(f".{end}") for other in known if other != key)), key)


def _require_same_task(runs: Sequence[Recorded]) -> None:
    first = runs[0]
    for run in runs[1:]:
        both = bool(first.config.get("evaluation") and run.config.get("evaluation"))
        here, there = (r.config["evaluation"].get("data") if both else r.config.get("data") for r in (first, run))
        if here != there:
            place = "evaluation.data" if both else "data"
            differ = [f"{place}.{key}" for key in _differing(here or {}, there or {})]
            raise RecordsError(
                f"{first.folder} and {run.folder} are not of the same problems ({', '.join(differ)} differ): their scores "
                "say nothing about each other; compare runs with the same "
                + ("held-out problems" if both else "prompts, or with evaluations on the same held-out problems")
            )


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    settings = [dict(_flat(one)), dict(_flat(other))]
    return [key for key in _ordered(settings) if len(_values(settings, key)) > 1]
