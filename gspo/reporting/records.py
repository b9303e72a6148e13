"""A run's records on disk: metrics.jsonl, a line a step, and a line a response in samples/step-000012.jsonl (training) and
evaluation/step-000012.jsonl."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import numpy as np

from .names import HISTOGRAM

Kind = Literal["samples", "evaluation"]
"""Folder of a samples file: of training, or of evaluation."""

MEASURES = ("reward", "num_tokens", "ratio")
"""What a sample's line has as numbers, or null; its advantage may be a list, a number for each turn."""


class RecordsError(ValueError):
    """Records that are damaged; the message names file and line."""


class RunRecords:
    """Writes the records of one run, and cuts them back where a run resumes from an earlier step.

    One writer a folder; nothing guards against two.
    """

    def __init__(self, folder: str | Path):
        """folder: the run's folder; made if it is not there."""
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._metrics = self.folder / "metrics.jsonl"
        self._checked = False

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row of metrics: numbers, None, strings, and lists of numbers; numpy's kinds are taken too.

        Raises ValueError naming the key of a NaN or infinity, TypeError naming that of any other kind of value, and
        ValueError if metrics.jsonl ends in a torn line (`truncate_after` mends it). The line is flushed, not fsynced.
        """
        line = _line(row, "metrics")
        self._refuse_torn_end()
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(line)

    def write_samples(self, step: int, samples: Iterable[Mapping[str, Any]], kind: Kind = "samples") -> Path:
        """Write the samples of one step, replacing any of the same step; written beside and renamed, so never half.

        Raises ValueError or TypeError as `append` does. Returns the file.
        """
        path = _samples_path(self.folder, step, kind)
        path.parent.mkdir(exist_ok=True)
        lines = [_line(s, f"sample {s.get('id', i)}") for i, s in enumerate(samples)]
        _replace(path, "".join(lines))
        return path

    def truncate_after(self, step: int) -> None:
        """Go back to when `step` was recorded: later rows and sample files go, and so does a torn last line."""
        if self._metrics.exists():
            rows = [row for row in read_metrics(self.folder) if row["step"] <= step]
            _replace(self._metrics, "".join(_line(row, "metrics") for row in rows))
        for kind in get_args(Kind):
            for later in (s for s in sample_steps(self.folder, kind) if s > step):
                _samples_path(self.folder, later, kind).unlink()

    def _refuse_torn_end(self) -> None:
        if not self._checked and self._metrics.exists():
            data = self._metrics.read_bytes()
            if data and not data.endswith(b"\n"):
                raise ValueError(f"{self._metrics} ends in a torn line: call truncate_after(step) before appending")
        self._checked = True


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl. A torn last line (a run killed while writing) is left out.

    Raises FileNotFoundError if there is no such file, RecordsError with file and line number for any other bad line, for
    steps that do not rise, and for what is no number, list of numbers or null.
    """
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        raise FileNotFoundError(f"{path}: not there; is {folder} the folder of a run?")
    rows = _read_lines(path, torn_end=True)
    before = -1
    for number, row in enumerate(rows, 1):
        step = row.get("step")
        if type(step) is not int or not 0 <= step < 2**31:
            raise RecordsError(f"{path}, line {number}: has no step")
        if step <= before:
            raise RecordsError(f"{path}, line {number}: step {step} comes after step {before}: rows must rise by step")
        if wrong := next((key for key, value in row.items() if not _is_measure(value)), None):
            raise RecordsError(f"{path}, line {number}: {wrong} is no number, list of numbers or null")
        if wrong := next((key for key in row if key.endswith("_histogram") and not _is_histogram(row[key])), None):
            raise RecordsError(f"{path}, line {number}: {wrong} has not the {len(HISTOGRAM) + 1} bins of a histogram")
        before = step
    return rows


def _is_measure(value: Any) -> bool:
    return value is None or is_number(value) or (isinstance(value, list) and all(map(_is_measure, value)))


def _is_histogram(value: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) == len(HISTOGRAM) + 1)


def is_number(value: Any) -> bool:
    """Whether a value from JSON is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_config(folder: str | Path) -> dict[str, Any]:
    """A run's config.json; empty if there is none.

    Raises RecordsError, naming the file, if it is damaged in what pages are drawn by.
    """
    path = Path(folder) / "config.json"
    config = read_object(path)
    for table in ("model", "data", "objective", "rollout", "training", "evaluation"):
        if table in config and not isinstance(config[table], dict) and (table, config[table]) != ("evaluation", None):
            raise RecordsError(f"{path}: is damaged: {table} is no table of settings")
    for table, key in (("training", "steps"), ("objective", "clip_low"), ("objective", "clip_high")):
        value = config.get(table, {}).get(key)
        if value is not None and not is_number(value):
            raise RecordsError(f"{path}: is damaged: {table}.{key} is no number")
    return config


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, config.json or versions.json; empty if there is no such file.

    Raises RecordsError, naming the file, if it holds anything else.
    """
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecordsError(f"{path}: is damaged: {error}") from None
    if not isinstance(value, dict):
        raise RecordsError(f"{path}: holds no JSON object")
    return value


def read_samples(folder: str | Path, step: int) -> list[dict[str, Any]]:
    """The samples of one step. Raises FileNotFoundError if none were written, RecordsError for a bad line."""
    path = _samples_path(Path(folder), step)
    if not path.exists():
        raise FileNotFoundError(f"{path}: not there; samples exist for the steps {sample_steps(folder)}")
    rows = _read_lines(path, torn_end=False)
    for number, row in enumerate(rows, 1):
        parts = row.get("parts") or {}
        if not (isinstance(parts, dict) and all(isinstance(part, dict) for part in parts.values())):
            raise RecordsError(f"{path}, line {number}: parts is no table with a table a reward")
        if wrong := next((key for key in MEASURES if not (row.get(key) is None or is_number(row[key]))), None):
            raise RecordsError(f"{path}, line {number}: {wrong} is no number")
        if not _is_measure(row.get("advantage")):
            raise RecordsError(f"{path}, line {number}: advantage is no number or list of numbers")
    return rows


def sample_steps(folder: str | Path, kind: Kind = "samples") -> list[int]:
    """Steps that have a file of samples, ascending."""
    names = (re.fullmatch(r"step-(\d+)\.jsonl", p.name) for p in (Path(folder) / kind).glob("step-*.jsonl"))
    return sorted(int(match[1]) for match in names if match)


def _samples_path(folder: Path, step: int, kind: Kind = "samples") -> Path:
    return folder / kind / f"step-{step:06d}.jsonl"


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".part")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _line(row: Mapping[str, Any], what: str) -> str:
    # ASCII only: lone surrogates and line separators in a model's text then cannot tear a line or fail to encode.
    return json.dumps({k: _plain(v, f"{what}: {k}") for k, v in row.items()}, allow_nan=False) + "\n"


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}: records hold finite numbers only; use None for what is undefined")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, Sequence):
        return [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    raise TypeError(f"{where} is a {type(value).__name__}: records hold numbers, strings, None, lists and tables")


def _read_lines(path: Path, *, torn_end: bool) -> list[dict[str, Any]]:
    # Split at newlines only: str.splitlines would also split at separators inside a text.
    lines = [(n, raw) for n, raw in enumerate(path.read_bytes().split(b"\n"), 1) if raw.strip()]
    rows = []
    for number, raw in lines:
        try:
            rows.append(_object(raw))
        except ValueError as error:
            if not (torn_end and number == lines[-1][0]):
                raise RecordsError(f"{path}, line {number}: {error}") from None
    return rows


def _object(raw: bytes) -> dict[str, Any]:
    row = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    if not isinstance(row, dict):
        raise ValueError("is no JSON object")
    return row


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"holds {name}, which is no JSON number")
