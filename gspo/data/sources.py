"""Rows of the prompt sources: plain dicts of columns, in the source's order."""

from __future__ import annotations

import codecs
import dataclasses
import difflib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from ..config import (
    DatasetSource,
    JsonlSource,
    ParquetSource,
    PythonSource,
    ReasoningGymSource,
    SourceConfig,
    VerifiersSource,
)
from ..functions import FunctionError, check_arguments, load_function
from ..verifiers_package import VerifiersError, load_environment
from .errors import DataError

Row = dict[str, Any]


def load_rows(source: SourceConfig) -> list[Row]:
    """The rows of a source as dicts of columns, at most `source.limit` of them; row k of the list is row k everywhere.

    A reasoning-gym row has question, answer, each entry of its metadata under its own name (`metadata_question` and
    the like where the name is taken), and three private columns for the scorer: `_entry` (the whole entry), `_task`
    and `_parameters` (size and seed included). Nested metadata stay nested.

    Raises DataError for missing files, broken lines (file and line), unknown tasks, parameters and splits, wrong
    function names, and a source without rows. Not covered: rows that do not fit into memory, and reasoning-gym's
    `composite`, whose parameters are tables of their own.
    """
    rows = _LOADERS[type(source)](source)
    if not rows:
        raise DataError(f"{describe(source)}: has no rows")
    return rows


def describe(source: SourceConfig) -> str:
    """A source in a word or two, for messages."""
    match source:
        case DatasetSource():
            return f"{source.path} (split {source.split})"
        case ReasoningGymSource():
            return f"reasoning-gym task {source.task}"
        case JsonlSource() | ParquetSource():
            return source.path
        case VerifiersSource():
            return f"verifiers environment {source.environment}"
        case PythonSource():
            return source.function
    raise TypeError(f"{type(source).__name__} is no prompt source")


def _jsonl(source: JsonlSource) -> list[Row]:
    try:
        with open(source.path, "rb") as file:
            lines = list(islice(file, source.limit))
    except OSError as error:
        raise _unreadable(source.path, error) from None
    while lines and not lines[-1].strip():  # blank lines at the end of a file are no rows
        lines.pop()
    if lines:
        lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)
    return [_json_row(line, f"{source.path}, line {number}") for number, line in enumerate(lines, 1)]


def _json_row(line: bytes, where: str) -> Row:
    if not line.strip():
        raise DataError(f"{where}: is empty; every line holds one JSON object")
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: holds a {type(row).__name__}; every line holds one JSON object")
    return row


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


def _parquet(source: ParquetSource) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    if not Path(source.path).exists():
        raise DataError(f"{source.path}: there is no such file")
    try:
        table = pyarrow.parquet.read_table(source.path)
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(source.path, error) from None
    return table.slice(0, source.limit).to_pylist()


def _dataset(source: DatasetSource) -> list[Row]:
    import datasets
    from datasets.exceptions import DatasetsError

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    folder = Path(source.path)
    if source.path.startswith((".", "/", "~")) and not folder.exists():
        raise DataError(f"{source.path}: there is no such folder")
    if folder.exists() and source.revision:
        raise DataError(f"{source.path}: revision = {source.revision!r} means nothing for a local folder; leave it out")
    saved = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        data = _from_disk(source) if saved else _from_hub(source)
    except (DatasetsError, OSError, ValueError) as error:
        raise DataError(f"{source.path}: cannot be loaded: {_first_line(error)}") from error
    count = min(source.limit or len(data), len(data))
    return [dict(row) for row in data.with_format(None).select(range(count))]


def _from_hub(source: DatasetSource) -> Any:
    import datasets

    return datasets.load_dataset(source.path, source.name, split=source.split, revision=source.revision)


def _from_disk(source: DatasetSource) -> Any:
    import datasets

    if source.name:
        raise DataError(f"{source.path}: was written by save_to_disk and has no configurations; leave name out")
    data = datasets.load_from_disk(source.path)
    whole = isinstance(data, datasets.Dataset)
    splits = {str(data.split or "train"): data} if whole else {str(name): part for name, part in data.items()}
    if source.split not in splits:
        raise DataError(f"{source.path}: has no split {source.split!r}; it has {', '.join(splits)}")
    return splits[source.split]


def _reasoning_gym(source: ReasoningGymSource) -> list[Row]:
    from reasoning_gym.factory import DATASETS, create_dataset

    if source.task not in DATASETS:
        raise DataError(f"reasoning-gym has no task {source.task!r}{_nearest(source.task, DATASETS)}")
    known = {field.name for field in dataclasses.fields(DATASETS[source.task][1])} - {"seed", "size"}
    for key in source.parameters:
        if key in ("seed", "size"):
            raise DataError(f"{describe(source)}: {key} is a setting beside parameters, not one of them")
        if key not in known:
            raise DataError(f"{describe(source)}: has no parameter {key!r}{_nearest(key, known)}")
    parameters = {**source.parameters, "seed": source.seed, "size": source.size}
    try:
        data = create_dataset(source.task, **parameters)
        entries = [data[i] for i in range(min(source.limit or source.size, source.size))]
    except (AssertionError, TypeError, ValueError) as error:  # how its tasks refuse parameters
        raise DataError(f"{describe(source)}: its parameters do not work: {_first_line(error)}") from error
    return [_gym_row(entry, source.task, parameters) for entry in entries]


def _gym_row(entry: Row, task: str, parameters: Row) -> Row:
    taken = {"question": entry["question"], "answer": entry["answer"]}
    metadata = {f"metadata_{k}" if k in taken else k: v for k, v in entry["metadata"].items()}
    return {**metadata, **taken, "_entry": entry, "_task": task, "_parameters": parameters}


def _verifiers(source: VerifiersSource) -> list[Row]:
    try:
        environment = load_environment(source.environment, source.parameters)
        data = environment.get_dataset() if source.split == "train" else environment.get_eval_dataset()
    except VerifiersError as error:
        raise DataError(str(error)) from error
    except Exception as error:  # foreign code: say whose failure it is
        raise DataError(f"{describe(source)}: has no data for {source.split}: {_first_line(error)}") from error
    origin = {"_environment": source.environment, "_parameters": source.parameters}
    return [dict(row) | origin for row in islice(data, source.limit)]


def _python(source: PythonSource) -> list[Row]:
    try:
        function = load_function(source.function)
        check_arguments(function, source.function, parameters=source.parameters)
    except FunctionError as error:
        raise DataError(str(error)) from error
    try:
        rows = function(**source.parameters)
        if isinstance(rows, Iterable) and not isinstance(rows, str | bytes | Mapping):
            rows = list(islice(rows, source.limit))
    except Exception as error:  # the function is the user's own: say whose failure it is
        raise DataError(f"{source.function}: failed with {type(error).__name__}: {_first_line(error)}") from error
    if not isinstance(rows, list):
        raise DataError(f"{source.function}: returned a {type(rows).__name__}; it must return an iterable of dicts")
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or not all(isinstance(key, str) for key in row):
            raise DataError(f"{source.function}: row {number} is a {type(row).__name__}, not a dict of named columns")
    return [dict(row) for row in rows]


def _unreadable(path: str, error: Exception) -> DataError:
    if isinstance(error, FileNotFoundError):
        return DataError(f"{path}: there is no such file")
    return DataError(f"{path}: cannot be read: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; the nearest are {', '.join(near)}" if near else f"; it has {', '.join(sorted(known))}"


_LOADERS: dict[type[SourceConfig], Callable[[Any], list[Row]]] = {
    JsonlSource: _jsonl,
    ParquetSource: _parquet,
    DatasetSource: _dataset,
    ReasoningGymSource: _reasoning_gym,
    VerifiersSource: _verifiers,
    PythonSource: _python,
}
