"""Reading a recipe: TOML, dotted overrides from the command line, and errors in one clear sentence each."""

from __future__ import annotations

import argparse
import difflib
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_settings import CliSettingsSource

from .config import Config


class RecipeError(Exception):
    """A recipe that cannot be run; the message says what, where and what to do."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a recipe file with dotted overrides laid over it.

    overrides: command-line words, `["--training.learning_rate", "1e-6"]`; tables and lists are given as JSON.
    Raises RecipeError for a missing file, bad TOML, unknown keys, and values that do not fit.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"{path}: there is no such recipe") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path}: is not TOML: {error}") from None
    return build(_merged(values, parse_overrides(overrides)), str(path))


def build(values: Mapping[str, Any], where: str = "configuration") -> Config:
    """A checked configuration from plain values. Raises RecipeError with one line a fault."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise RecipeError("\n".join(f"{where}: {line}" for line in _sentences(error))) from None


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Dotted command-line words as a nested dict. Raises RecipeError for unknown or incomplete ones."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> typing.NoReturn:
            unknown = message.removeprefix("unrecognized arguments: ")
            if unknown == message:
                raise RecipeError(f"command line: {message}")
            key = unknown.split()[0].split("=")[0].lstrip("-")
            raise RecipeError(f"command line: {_unknown(key)}")

    if not words:
        return {}
    parser = Parser(add_help=False, allow_abbrev=False)
    return CliSettingsSource(Config, cli_parse_args=list(words), root_parser=parser)()  # type: ignore[arg-type]


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


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        out[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out


def _unknown(key: str) -> str:
    near = difflib.get_close_matches(key, known_keys(), n=1, cutoff=0.5)
    if not near:  # right name, wrong table: compare the last part alone
        tails = {known.rpartition(".")[2]: known for known in known_keys()}
        tail = difflib.get_close_matches(key.rpartition(".")[2], tails, n=1, cutoff=0.7)
        near = [tails[t] for t in tail]
    return f"unknown key {key}" + (f"; the nearest known one is {near[0]}" if near else "")


def _sentences(error: ValidationError) -> Iterator[str]:
    for fault in error.errors(include_url=False):
        unknown = fault["type"] == "extra_forbidden"
        key, plain = _dotted(fault["loc"], keep_last=unknown)
        if unknown:
            yield _unknown(plain).replace(plain, key, 1)
        elif fault["type"] == "missing":
            yield f"{key} is missing"
        elif fault["type"] == "value_error":
            yield (f"{key}: " if key else "") + fault["msg"].removeprefix("Value error, ")
        else:
            yield f"{key} = {fault['input']!r}: {fault['msg'][0].lower()}{fault['msg'][1:]}"


def _dotted(loc: Sequence[int | str], *, keep_last: bool) -> tuple[str, str]:
    """pydantic's location as a dotted key, with and without list positions; it names union members, recipes do not."""
    known, key, plain = set(known_keys()), [], []
    for i, part in enumerate(loc):
        if isinstance(part, int):
            key.append(str(part))
        elif ".".join([*plain, part]) in known or (keep_last and i == len(loc) - 1):
            key.append(part)
            plain.append(part)
    return ".".join(key), ".".join(plain)
