"""The rows of a suite: from local files or the hub, with their gold answers found, or every fault said."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from .. import chat, data
from ..config import DatasetSource, JsonlSource, ParquetSource, SourceConfig
from ..functions import FunctionError
from ..rewards import Built, gold_checks
from ..types import Prompt
from .evaluate import EvaluationError
from .gold import RULES, rule_of
from .suite import Suite

Row = dict[str, Any]

NUM_SHOWN = 10

NO_LIMIT = 2**62
"""Longest prompt: the model's positions are the limit, and are checked for the whole run."""


def suite_rows(suite: Suite, folder: Path | None, limit: int | None = None) -> list[Row]:
    """The rows of a suite with the column `gold`, in the order of their source.

    folder: where local files are looked for, or one such file; None takes the hub. limit: the first rows, this many.
    Raises EvaluationError if neither has them, and for rows whose gold answer is not found, by number; DataError for
    files that cannot be read.
    """
    try:
        rule = rule_of(suite.gold)
    except (KeyError, FunctionError) as error:
        known = f"the rules are {', '.join(RULES)}"
        raise EvaluationError(f"suite {suite.name}: gold = {suite.gold!r} is no rule ({known}): {error}") from None
    rows, faults = [], []
    for number, row in enumerate(_raw(suite, folder)):
        try:
            if suite.window and not _inside(row, suite):
                continue
            added = rule(row, suite.answer_column)
        except KeyError as error:
            faults.append(f"row {number}: has no column {error}; it has {', '.join(row)}")
        except Exception as error:  # a rule may be anybody's function
            faults.append(f"row {number}: {error or type(error).__name__}")
        else:
            if not isinstance(added, Mapping | None):
                faults.append(f"row {number}: the rule {suite.gold!r} gave a {type(added).__name__}, not columns or None")
                continue
            rows += [] if added is None else [{**row, **added}]
        if limit is not None and len(rows) == limit:
            break
    if faults:
        more = f"\nand {len(faults) - NUM_SHOWN} more" if len(faults) > NUM_SHOWN else ""
        raise EvaluationError(f"suite {suite.name}: its rows have faults:\n" + "\n".join(faults[:NUM_SHOWN]) + more)
    if not rows:
        raise EvaluationError(f"suite {suite.name}: has no rows" + (" in its window of days" if suite.window else ""))
    _require_ratings(suite, rows)
    return rows


def _require_ratings(suite: Suite, rows: Sequence[Row]) -> None:
    column = suite.rating_column
    if column is None:
        return
    if not any(column in row for row in rows):
        raise EvaluationError(
            f"suite {suite.name}: rating_column = {column!r}: no row has it; they have {', '.join(rows[0])}"
        )
    for number, rating in enumerate(row.get(column) for row in rows):
        if rating is not None and not (isinstance(rating, int | float) and math.isfinite(rating)):
            raise EvaluationError(
                f"suite {suite.name}: row {number}: the rating {rating!r} in {column!r} is no number of points"
            )


def suite_prompts(suite: Suite, rows: Sequence[Row], tokenizer: Any, rewards: Sequence[Built]) -> list[Prompt]:
    """The rows as prompts with the ids `r0`, `r1`, ... Raises EvaluationError with the faults by row."""
    source = SourceConfig(template=suite.template, system=suite.system, format=suite.format, answer_column="gold")
    where = f"suite {suite.name}"
    try:
        prompts, faults = data.prepare(
            rows,
            source,
            encode=lambda prompt: chat.encode(tokenizer, prompt),
            max_prompt_tokens=NO_LIMIT,
            gold_checks=gold_checks(rewards),
            where=where,
        )
    except chat.ChatError as error:
        raise EvaluationError(f"{where}: {error}, here by --format text") from error
    if faults:
        raise EvaluationError(
            "\n".join(
                [f"{where}: {len(faults)} rows have faults:"] + [f"row {f.row}: {f.what}" for f in faults[:NUM_SHOWN]]
            )
        )
    return [replace(p, id=f"r{p.row}") for p in prompts]


def _raw(suite: Suite, folder: Path | None) -> list[Row]:
    if folder is None:
        if suite.hub is None:
            raise EvaluationError(f"suite {suite.name} is not on the hub: give the folder of its files by --data")
        return data.load_rows(DatasetSource(**suite.hub.model_dump()))
    if folder.is_file():
        return _file(folder)
    for name in suite.local:
        if (folder / name).is_file():
            return _file(folder / name)
    sought = ", ".join(suite.local) or "nothing (its list `local` is empty)"
    raise EvaluationError(f"suite {suite.name}: {folder} has none of its files; sought are {sought}")


def _file(path: Path) -> list[Row]:
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        return data.load_rows(ParquetSource(path=str(path)))
    if name == path.name and name.endswith(".jsonl"):
        return data.load_rows(JsonlSource(path=str(path)))
    try:
        text = (gzip.decompress(path.read_bytes()) if name != path.name else path.read_bytes()).decode("utf-8")
        rows = json.loads(text) if name.endswith(".json") else [json.loads(x) for x in text.splitlines() if x.strip()]
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise EvaluationError(f"{path}: cannot be read: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise EvaluationError(f"{path}: holds no list of JSON objects")
    return rows


def _inside(row: Row, suite: Suite) -> bool:
    window = suite.window
    assert window is not None
    day = str(row[window.column])[:10]
    try:
        date.fromisoformat(day)
    except ValueError:
        raise ValueError(f"{window.column} = {row[window.column]!r} does not begin with a day such as 2024-10-31") from None
    return window.first <= day <= window.last
