"""Where prompts come from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .section import Section


class SourceConfig(Section):
    """What every prompt source has."""

    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages (role, content)."""
    answer_column: str | None = "answer"
    """Column with the gold answer, or "" where rewards need none."""
    template: str | None = None
    """Text made of a row's columns, `"What is {a}*{b}?"`, used instead of the prompt column."""
    system: str | None = None
    """System message put before each chat. None by default: nothing is added that was not asked for."""
    format: Literal["chat", "text"] = "chat"
    """`chat` puts the prompt through the tokenizer's chat template; `text` tokenises it as it stands."""
    faults: Literal["refuse", "drop"] = "refuse"
    """What happens to faulty rows: refuse to start, or drop and count them. Refuse, so that no fault goes unseen."""
    limit: int | None = Field(default=None, gt=0)
    """Use only the first rows, this many. All by default."""


class JsonlSource(SourceConfig):
    """A file with one JSON object a line."""

    source: Literal["jsonl"] = "jsonl"
    """Kind of source."""
    path: str
    """The file."""


class ParquetSource(SourceConfig):
    """A Parquet file."""

    source: Literal["parquet"] = "parquet"
    """Kind of source."""
    path: str
    """The file."""


class DatasetSource(SourceConfig):
    """A local or hub dataset, loaded by the `datasets` library."""

    source: Literal["dataset"] = "dataset"
    """Kind of source."""
    path: str
    """Hub name, or a folder (also one written by `save_to_disk`)."""
    name: str | None = None
    """Configuration of the dataset, if it has several."""
    split: str = "train"
    """Split to read."""
    revision: str | None = None
    """Commit or tag on the hub. None takes the newest, which may change under you."""


class ReasoningGymSource(SourceConfig):
    """A task of reasoning-gym, generated from a seed. Its columns: question, answer, and the task's metadata."""

    source: Literal["reasoning_gym"] = "reasoning_gym"
    """Kind of source."""
    task: str
    """Name of the task, e.g. `chain_sum`."""
    size: int = Field(gt=0)
    """How many problems to generate."""
    seed: int = 0
    """Seed of the problems. reasoning-gym draws problem i from seed + i: two sources share no draw only where their
    seeds are further apart than `size`, so give training 0 and evaluation 1000000, say."""
    parameters: dict[str, Any] = {}
    """The task's own parameters, e.g. `min_terms`. Empty: the task's defaults."""
    prompt_column: str = "question"
    """Column with the prompt: reasoning-gym calls it question."""


class VerifiersSource(SourceConfig):
    """The data of an environment of the package `verifiers` (0.1), which has to be installed beside it. Of a single turn
    its rewards are [[rewards]] with type = "verifiers"; an [environment] with type = "verifiers" plays several turns."""

    source: Literal["verifiers"] = "verifiers"
    """Kind of source."""
    environment: str
    """Its name, as `verifiers.load_environment` takes it."""
    parameters: dict[str, Any] = {}
    """Keyword arguments of its `load_environment`."""
    split: Literal["train", "eval"] = "train"
    """Its data for training or for evaluation."""


class PythonSource(SourceConfig):
    """A Python function that returns rows."""

    source: Literal["python"] = "python"
    """Kind of source."""
    function: str
    """`path/to/file.py:name`; called once with `parameters`, returns an iterable of dicts."""
    parameters: dict[str, Any] = {}
    """Keyword arguments of the function."""


Source = Annotated[
    JsonlSource | ParquetSource | DatasetSource | ReasoningGymSource | VerifiersSource | PythonSource,
    Field(discriminator="source"),
]
