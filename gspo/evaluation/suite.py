"""A suite: a small TOML file that says where problems come from, how they are asked, and what an answer is worth."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from ..config import Reward, RewardConfig, SamplingConfig, Section, reward_name
from .evaluate import EvaluationError

FOLDER = Path(__file__).parent / "suites"
"""The suites that come with the package."""


class Hub(Section):
    """A data set on the hub, loaded by the `datasets` library."""

    path: str
    """Its name."""
    name: str | None = None
    """Its configuration, if it has several."""
    split: str = "test"
    """Split to read."""
    revision: str | None = None
    """Commit or tag. None takes the newest; the results hold a hash of what was asked."""


class Window(Section):
    """Only the problems of certain days."""

    column: str
    """Column with the day, a date or text that begins with one as 2024-10-31."""
    first: str
    """First day that is in."""
    last: str
    """Last day that is in."""

    @model_validator(mode="after")
    def _days_are_days(self) -> Self:
        first, last = (_day(text) for text in (self.first, self.last))
        if first > last:
            raise ValueError(f"first = {self.first} is after last = {self.last}: no day lies between")
        return self


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is no day: write it as 2024-10-31") from None


class SuiteSampling(SamplingConfig):
    """How the responses are drawn. All of it is stated in each suite."""

    samples: int = Field(default=1, gt=0)
    """Responses to each problem; pass@1 is their mean."""
    pass_at: list[Annotated[int, Field(gt=0)]] = Field(default=[1], min_length=1)
    """The k of each pass@k to report. Each needs at least k samples."""

    @model_validator(mode="after")
    def _samples_differ_and_suffice(self) -> Self:
        if max(self.pass_at, default=1) > self.samples:
            raise ValueError(f"pass@{max(self.pass_at)} needs samples = {max(self.pass_at)} or more, not {self.samples}")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"temperature = 0 with samples = {self.samples}: all would be alike; use a temperature above 0, or 1 sample"
            )
        return self


class Suite(Section):
    """Problems, the way of asking, and the rewards."""

    name: str
    """The file's name without its ending."""
    about: str
    """One sentence: what is asked, how much of it, from where."""
    settings_from: str
    """Whose the sampling settings and the prompt format are."""
    hub: Hub | None = None
    """Where the problems are on the hub. None: local files only."""
    local: list[str] = []
    """Files that are looked for in the folder given by `--data`; the first that is there is read."""
    window: Window | None = None
    """Only the problems of certain days. None: all."""
    template: str
    """The prompt, made of a row's columns."""
    system: str | None = None
    """System message. None: none is added."""
    format: Literal["chat", "text"] = "chat"
    """`chat` puts the prompt through the tokenizer's chat template; `text` tokenises it as it stands (base models)."""
    answer_column: str
    """Column from which the gold answer is made."""
    gold: str = "as_is"
    """How: a rule of gspo/evaluation/gold.py, or a function of your own, `path/to/file.py:name`."""
    rating_column: str | None = None
    """Column with the problem's rating on Codeforces, for an Elo rating. None: there is none."""
    solved_at: float = 1.0
    """A response counts as solved when its total reward is at least this. 1: full marks of one reward."""
    rewards: list[dict[str, Any]] = Field(min_length=1)
    """What a response is worth: `[[rewards]]` as in a recipe. Checked by `rewards_of`."""
    sampling: SuiteSampling
    """How the responses are drawn."""
    presets: dict[str, dict[str, Any]] = {}
    """Named changes to `sampling`, by `--preset`."""

    @model_validator(mode="after")
    def _presets_are_sampling(self) -> Self:
        for changes in self.presets.values():
            SuiteSampling.model_validate(self.sampling.model_dump() | changes)
        return self


def names() -> list[str]:
    """The suites that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_suite(name: str, *, preset: str | None = None, changes: Mapping[str, Any] | None = None) -> Suite:
    """A suite by its name, or by its file (`path/to/suite.toml`), with a preset's and the caller's sampling settings.

    changes: fields of Suite, and of its `sampling`, that replace the file's. Raises EvaluationError for an unknown name
    or preset, bad TOML, unknown keys and values that do not fit, each fault with the file's name.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"the nearest known one is {near[0]}" if near else f"there are {', '.join(names())}"
        raise EvaluationError(f"there is no suite {name!r}: {hint}; a file of your own ends in .toml")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: is not TOML: {error}") from None
    if "name" in values:
        raise EvaluationError(f"{path}: name: a suite is called as its file is, {path.stem}: leave it out")
    suite = _checked(Suite, values | {"name": path.stem}, str(path))
    if preset is not None and preset not in suite.presets:
        raise EvaluationError(f"{path}: has no preset {preset!r}; it has {', '.join(suite.presets) or 'none'}")
    given = dict(changes or {})
    sampling = {k: given.pop(k) for k in list(given) if k in SuiteSampling.model_fields}
    sampling = suite.sampling.model_dump() | (suite.presets[preset] if preset else {}) | sampling
    return _checked(Suite, suite.model_dump() | given | {"sampling": sampling}, f"suite {suite.name}, as set here")


def rewards_of(suite: Suite) -> list[RewardConfig]:
    """The suite's rewards, checked as a recipe's are. Raises EvaluationError for a kind that this version does not have."""
    known = {kind.model_fields["type"].default for kind in RewardConfig.__subclasses__() if "type" in kind.model_fields}
    for table in suite.rewards:
        if not isinstance(table.get("type"), str):
            raise EvaluationError(
                f"suite {suite.name}: a table [[rewards]] has no type: name one of {', '.join(sorted(known))}"
            )
        if table["type"] not in known:
            raise EvaluationError(
                f"suite {suite.name} needs the reward type = {table['type']!r}, which this version of gspo does not "
                f"have (it has {', '.join(sorted(known))}): its problems can be loaded, but not scored"
            )
        if table["type"] == "environment":
            raise EvaluationError(
                f"suite {suite.name}: a suite has no environment, whose reward type = 'environment' is: drop it"
            )
    adapter: TypeAdapter[Any] = TypeAdapter(list[Reward])
    rewards = _checked(adapter, suite.rewards, f"suite {suite.name}, rewards")
    called = [reward_name(r) for r in rewards]
    if twice := sorted({name for name in called if called.count(name) > 1}):
        raise EvaluationError(f"suite {suite.name}: two rewards are called {', '.join(twice)}: give each a name of its own")
    return rewards


def _checked(kind: Any, values: Any, where: str) -> Any:
    validate = kind.validate_python if isinstance(kind, TypeAdapter) else kind.model_validate
    try:
        return validate(values)
    except ValidationError as error:
        faults = [(".".join(map(str, f["loc"])), _said(f)) for f in error.errors()]
        raise EvaluationError("\n".join(f"{where}: {key + ': ' if key else ''}{text}" for key, text in faults)) from None


def _said(fault: Mapping[str, Any]) -> str:
    """What is wrong, in words; for a key that nothing has, the nearest one that something of a suite has."""
    if fault["type"] != "extra_forbidden":
        return fault["msg"].removeprefix("Value error, ")
    known = [name for kind in (Suite, SuiteSampling, Hub, Window) for name in kind.model_fields]
    near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1)
    return f"unknown key; the nearest known one is {near[0]}" if near else "unknown key"
