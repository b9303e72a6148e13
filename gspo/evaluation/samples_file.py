"""Every sample of an evaluation in one file that can be killed at any byte and gone on with."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from ..locks import lock
from ..recipe import differences
from .evaluate import EvaluationError

Key = tuple[str, int]
"""A problem's id and the number of the sample."""


class SamplesFile:
    """`samples.jsonl` of one suite and model, beside `settings.json`, which says what they were made with.

    A context manager that keeps other processes out. A torn last line is cut off. Not covered: file systems without locks,
    and a line changed by hand in between.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """settings: everything that decides a sample. Raises EvaluationError if the folder holds samples of others."""
        self.folder, self.settings = folder, dict(settings)
        self._path = folder / "samples.jsonl"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+b")
        if not lock(self._file.fileno()):
            self._file.close()
            raise EvaluationError(f"{self.folder}: another process is at work there: wait, or choose another --output")
        try:
            self._claim()
            self.rows = self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add samples, and wait until they are on the disk. Raises ValueError for a NaN."""
        new = [dict(row) for row in rows]
        # ASCII only: a model can write half a surrogate pair, which no file in UTF-8 takes.
        self._file.write("".join(json.dumps(row, allow_nan=False) + "\n" for row in new).encode("ascii"))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows += new

    def _claim(self) -> None:
        require_same(self.folder, self.settings)
        write_json(self.folder / "settings.json", self.settings)

    def _read(self) -> list[dict[str, Any]]:
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self._file.truncate(len(whole))
        try:
            return [json.loads(line) for line in whole.split(b"\n") if line]
        except ValueError as error:
            raise EvaluationError(f"{self._path}: is damaged: {error}; choose another --output") from None


def require_same(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raises EvaluationError, naming what differs, if a folder holds samples made with other settings."""
    samples, stored = folder / "samples.jsonl", folder / "settings.json"
    if not samples.exists() or not samples.stat().st_size:
        return
    try:
        old = json.loads(stored.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvaluationError(
            f"{folder} holds samples, but not what they were made with: {error}: choose another --output"
        ) from None
    # Through JSON, as the stored ones went: tuples are lists there, and keys are text.
    if changed := differences(old, json.loads(json.dumps(settings))):
        raise EvaluationError(
            f"{folder} holds samples made with other settings or data: {', '.join(changed)} differ; samples of both must "
            "not be mixed: set them back to go on, or choose another --output"
        )


def fingerprint(value: Any) -> str:
    """SHA-256 of a plain value, in hexadecimal: equal values have equal ones, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file beside and rename it, so that it is never half."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    beside.replace(path)
