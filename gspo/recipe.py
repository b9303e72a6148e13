"""Reading a recipe: TOML, dotted overrides from the command line, and errors in one clear sentence each."""

from __future__ import annotations

import argparse
import difflib
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_settings import CliSettingsSource, SettingsError

from .config import Config
from .config.section import Word

KINDS = ("source", "type")
"""Keys that say of which kind a table is, and so which other keys it has."""

PLAIN = {
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "dict_type": "must be a table",
    "list_type": "must be a list",
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "finite_number": "must be a finite number",
    "greater_than_equal": "must be {ge} or more",
    "less_than_equal": "must be {le} or less",
    "too_short": "must have at least {min_length} item(s)",
}
"""pydantic's types of fault in the words of recipes."""


class RecipeError(Exception):
    """A recipe that cannot be run; the message says what, where and what to do."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a recipe file with dotted overrides laid over it.

    overrides: command-line words, `["--training.learning_rate", "1e-6"]`; tables and lists are given as JSON.
    Raises RecipeError for a missing file, bad TOML, unknown keys, and values that do not fit.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise RecipeError(f"{path}: there is no such recipe") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path}: is not TOML: {error}") from None
    given = parse_overrides(overrides)
    return build(_merged(values, given), str(path), given)


def build(values: Mapping[str, Any], where: str = "configuration", given: Mapping[str, Any] | None = None) -> Config:
    """A checked configuration from plain values. Raises RecipeError with one line a fault.

    where: what the lines name as the place of the fault; given: the part that came from the command line instead.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = [f"{'command line' if _holds(given or {}, key) else where}: {text}" for key, text in _sentences(error)]
        raise RecipeError("\n".join(lines)) from None


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Dotted command-line words as a nested dict. Raises RecipeError for unknown or incomplete ones."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> typing.NoReturn:
            unknown = message.removeprefix("unrecognized arguments: ")
            raise RecipeError(f"command line: {message if unknown == message else _unknown_word(unknown.split()[0])}")

    if not words:
        return {}
    parser = Parser(add_help=False, allow_abbrev=False)
    try:
        return _words(CliSettingsSource(Config, cli_parse_args=list(words), root_parser=parser)())  # type: ignore[arg-type]
    except SettingsError as error:
        fault = str(error).replace("Parsing error encountered for ", "--").replace("JSON Error encountered for ", "--")
        raise RecipeError(f"command line: {fault}") from None


def _words(given: Any) -> Any:
    if isinstance(given, dict):
        return {key: _words(value) for key, value in given.items()}
    if isinstance(given, list):
        return [_words(value) for value in given]
    return Word(given) if isinstance(given, str) else given


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ between two plain configurations."""
    out = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            out += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            out.append(f"{prefix}{key}")
    return out


def known_keys() -> list[str]:
    """Every dotted key that a recipe may hold; keys of list items stand under the list's name."""
    return sorted({key for key, _ in _walk(Config)})


def _walk(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, info in model.model_fields.items():
        yield prefix + name, info
        for inner in _models_in(info.annotation):
            yield from _walk(inner, f"{prefix}{name}.")


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for part in typing.get_args(annotation) for m in _models_in(part)]


def _merged(base: Mapping[str, Any], over: Mapping[str, Any], *, free: bool = False) -> dict[str, Any]:
    """over laid on base. A table of another kind replaces the old one: it has other keys. free: a table without kinds."""
    if not free and any(kind in over and over[kind] != base.get(kind) for kind in KINDS):
        return dict(over)
    out = dict(base)
    for key, value in over.items():
        old, nested = out.get(key), isinstance(value, Mapping)
        out[key] = _merged(old, value, free=key == "parameters") if nested and isinstance(old, Mapping) else value
    return out


def _holds(given: Any, key: str) -> bool:
    for part in key.split(".") if key else [""]:
        if isinstance(given, Mapping):
            if part not in given:
                return False
            given = given[part]
    return True


# ---- sentences --------------------------------------------------------------------------------------------


def _sentences(error: ValidationError) -> Iterator[tuple[str, str]]:
    """Of each fault the dotted key of what was given, which for a missing key is its table, and the sentence; faults of one
    value are one sentence."""
    faults: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    for fault in error.errors(include_url=False):
        key, table = _place(fault["loc"])
        faults.setdefault(key, []).append(_sentence(key, table, fault))
        given[key] = key.rpartition(".")[0] if fault["type"] == "missing" else key
    for key, texts in faults.items():
        start = texts[0].rpartition(": ")[0] + ": "
        yield given[key], texts[0] + "".join(f", or {t.removeprefix(start).removeprefix('must be ')}" for t in texts[1:])


def _sentence(key: str, table: type[BaseModel], fault: Mapping[str, Any]) -> str:
    type_, context, value = fault["type"], fault.get("ctx", {}), fault["input"]
    if type_ == "extra_forbidden":
        return _unknown_key(key, table)
    if type_ == "missing":
        return f"{key} is missing"
    if type_ == "value_error":
        return (f"{key}: " if key else "") + fault["msg"].removeprefix("Value error, ")
    kind = str(context.get("discriminator", "")).strip("'")
    if type_ == "union_tag_not_found":
        return f"{key}.{kind} is missing: use one of {', '.join(_kinds(table, key, kind))}"
    if type_ == "union_tag_invalid":
        return f"{key}.{kind} = {context['tag']!r}: must be one of {context['expected_tags']}"
    text = PLAIN[type_].format(**context) if type_ in PLAIN else fault["msg"].replace("Input should be", "must be")
    if type_ == "list_type" and isinstance(value, Mapping):
        text += f" of tables: write [[{key}]] with two brackets"
    shown = repr(value)
    return f"{key} = {shown if len(shown) <= 60 else shown[:57] + '...'}: {text}"


def _place(loc: Sequence[int | str]) -> tuple[str, type[BaseModel]]:
    """pydantic's location as a dotted key, and the table that holds its last name.

    pydantic names the chosen member of a union in it, recipes do not.
    """
    key: list[str] = []
    table, tables = Config, [Config]
    for part in loc:
        if isinstance(part, int):
            key.append(str(part))
        elif len(tables) > 1:
            tables = [t for t in tables if part in _tags(t)]
        elif tables:
            table = tables[0]
            key.append(part)
            tables = _models_in(table.model_fields[part].annotation) if part in table.model_fields else []
    return ".".join(key), table


def _tags(table: type[BaseModel]) -> list[str]:
    return [table.model_fields[kind].default for kind in KINDS if kind in table.model_fields]


def _kinds(table: type[BaseModel], key: str, kind: str) -> list[str]:
    name = next(part for part in reversed(key.split(".")) if not part.isdigit())
    return [t.model_fields[kind].default for t in _models_in(table.model_fields[name].annotation)]


def _unknown_key(key: str, table: type[BaseModel]) -> str:
    """A sentence about a key that its table does not have."""
    head, _, word = key.rpartition(".")
    prefix = f"{head}." if head else ""
    if others := [tag for t in _relatives(table) if word in t.model_fields for tag in _tags(t)]:
        return f"{key} does not go with {prefix}{_kind(table)}, only with {', '.join(others)}"
    if (near := _near(word, table.model_fields)) and word not in _tails():
        return f"unknown key {key}; the nearest known one is {prefix}{near}"
    return f"unknown key {key}; {_elsewhere(word, table.model_fields)}"


def _relatives(table: type[BaseModel]) -> list[type[BaseModel]]:
    """The other kinds of a table that comes in kinds."""
    for _, info in _walk(Config):
        kinds = _models_in(info.annotation)
        if len(kinds) > 1 and table in kinds:
            return [t for t in kinds if t is not table]
    return []


def _kind(table: type[BaseModel]) -> str:
    return next(f"{kind} = {table.model_fields[kind].default}" for kind in KINDS if kind in table.model_fields)


def _unknown_word(word: str) -> str:
    """A sentence about a word of the command line that is no setting."""
    key = word.split("=")[0].lstrip("-")
    if not word.startswith("-"):
        return f"{word!r} is no setting: give one as --table.key VALUE, e.g. --training.steps 10"
    right, tables = [], [Config]
    for i, part in enumerate(parts := key.split(".")):
        fields = {name: info for t in tables for name, info in t.model_fields.items()}
        near = _near(part, fields)
        if near is None or (part not in fields and part in _tails()):
            return f"unknown key {key}; {_elsewhere(parts[-1], fields)}"
        right.append(near)
        shape, tables = typing.get_origin(fields[near].annotation), _models_in(fields[near].annotation)
        if shape in (list, dict) and i + 1 < len(parts):
            name, example = ".".join(right), "[{...}]" if shape is list else f'{{"{parts[-1]}": ...}}'
            return f"unknown key {key}: {name} is given as JSON: --{name} '{example}'"
    return f"unknown key {key}; the nearest known one is {'.'.join(right)}"


def _near(word: str, names: Iterable[str]) -> str | None:
    """The name that was meant: itself, its initials, its beginning, or a slip of the keys."""
    names = list(names)
    if word in names:
        return word
    short = [n for n in names if len(word) > 1 and "".join(part[0] for part in n.split("_")) == word]
    begun = [n for n in names if len(word) > 2 and n.startswith(word)]
    return next(iter([*short, *begun, *difflib.get_close_matches(word, names, n=1, cutoff=0.6)]), None)


def _elsewhere(word: str, here: Iterable[str]) -> str:
    """The name in another table, or else the names in this one."""
    near = _near(word, _tails())
    return f"the nearest known one is {_tails()[near]}" if near else f"known here: {', '.join(here)}"


def _tails() -> dict[str, str]:
    """Every last name, and its least nested key."""
    return {key.rpartition(".")[2]: key for key in sorted(known_keys(), key=lambda k: -k.count("."))}
