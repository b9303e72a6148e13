"""Writes the documents that are made from code: `python docs/generate.py`, or `--check` to compare without writing.

recipes.md comes from the docstrings of gspo/config, metrics.md from the table in gspo/reporting/names.py.
"""

from __future__ import annotations

import json
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gspo.config import Config, EnvironmentConfig, RewardConfig, SourceConfig
from gspo.reporting.names import HISTOGRAM, LENGTHS, METRICS, ONLY_WHEN, QUANTILES

HERE = Path(__file__).parent

RECIPES_HEAD = """# Every setting of a recipe

<!-- Written by docs/generate.py from the docstrings of gspo/config: change those, not this file. -->

A recipe is a TOML file. Each heading below is a table of it, each row a key of that table, written with its dots.
*required* means that there is no default, *unset* that the key may be left out and is then as the text says.

On the command line the dotted key goes after the recipe, `gspo train RECIPE --rollout.group_size 16`, and wins over the
file. Tables and lists are given as JSON: `--rewards '[{"type": "exact"}]'` replaces the whole list. `null` takes a
recipe's value away: `--evaluation null`. A key that does not exist is refused with the nearest known one, and values
that do not fit each other are refused with the nearest ones that do. What a run was made with stands in its
`config.json`.
"""

METRICS_HEAD = """# What is measured

<!-- Written by docs/generate.py from gspo/reporting/names.py: change that, not this file. -->

`metrics.jsonl` in a run's folder holds one JSON object a line: one for each step of training, and one for step 0 if the
recipe has an evaluation. The keys below stand in the row of every training step, but for those under *Only when*. A
value that is undefined in a step (`clip/positive` without a positive advantage) is null. `<name>` is a reward's name,
`<k>` a number of samples.
"""

WORDS = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    Any: "anything",
}
BOUNDS = {
    annotated_types.Gt: "> {.gt}",
    annotated_types.Ge: "≥ {.ge}",
    annotated_types.Lt: "< {.lt}",
    annotated_types.Le: "≤ {.le}",
}


def recipes() -> str:
    """docs/recipes.md."""
    return "\n".join([RECIPES_HEAD, *_table(Config, "")]).rstrip() + "\n"


def _table(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """The settings of a table, then the tables inside it."""
    fields = model.model_fields
    inner = {name: kinds for name, info in fields.items() if (kinds := _models_in(info.annotation))}
    yield from _rows({n: i for n, i in fields.items() if n not in inner}, prefix)
    for name, kinds in inner.items():
        key, info = f"{prefix}{name}", fields[name]
        brackets = f"[[{key}]]" if typing.get_origin(info.annotation) is list else f"[{key}]"
        yield from [f"## `{brackets}`", "", _about(info, kinds), ""]
        if len(kinds) == 1:
            yield from _table(kinds[0], f"{key}.")
        elif name == "data" and prefix:
            yield from ["The same keys as those of [`[data]`](#data).", ""]
        else:
            yield from _kinds(kinds, key)


def _kinds(kinds: list[type[BaseModel]], key: str) -> Iterator[str]:
    """A table that comes in kinds: what all have, then what each has."""
    common = next(c for c in (SourceConfig, EnvironmentConfig, RewardConfig) if issubclass(kinds[0], c))
    tag = "source" if common is SourceConfig else "type"
    names = ", ".join(f'`"{kind.model_fields[tag].default}"`' for kind in kinds)
    yield from [f"`{key}.{tag}` says of which kind it is: {names}. Every kind has:", ""]
    yield from _rows(common.model_fields, f"{key}.")
    for kind in kinds:
        yield from [f'### `{tag} = "{kind.model_fields[tag].default}"`', "", _text(kind.__doc__), ""]
        own = {n: i for n, i in kind.model_fields.items() if n != tag and n in kind.__annotations__}
        yield from _rows(own, f"{key}.")


def _rows(fields: dict[str, FieldInfo], prefix: str) -> Iterator[str]:
    if not fields:
        return
    yield from ["| key | value | default | what it does, and why |", "|---|---|---|---|"]
    for name, info in fields.items():
        cells = (f"`{prefix}{name}`", _kind(info), _default(info), _text(info.description))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for part in typing.get_args(annotation) for m in _models_in(part)]


def _kind(info: FieldInfo) -> str:
    return ", ".join([_words(info.annotation), *_bounds(info.metadata)])


def _bounds(metadata: Iterable[Any]) -> list[str]:
    texts = [text.format(m) for m in metadata for kind, text in BOUNDS.items() if isinstance(m, kind)]
    return [text.replace(str(2**63), "2^63") for text in texts]


def _words(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in WORDS:
        return WORDS[annotation]
    if origin is Literal:
        return ", ".join(f"`{json.dumps(a)}`" for a in args)
    if origin is typing.Annotated:
        bounds = _bounds(m for extra in args[1:] for m in getattr(extra, "metadata", [extra]))
        return " ".join([_words(args[0]), *bounds])
    if origin is list:
        return f"list of: {_words(args[0])}"
    if origin is dict:
        return "table"
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(_words(a) for a in args if a is not type(None))
    raise TypeError(f"{annotation} has no words here: add some")


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "*required*"
    if info.default is None:
        return "*unset*"
    if isinstance(info.default, float):
        return f"`{info.default:g}`"
    return f"`{json.dumps(info.default)}`"


def _about(info: FieldInfo, kinds: list[type[BaseModel]]) -> str:
    """What a table is for: of the setting that holds it, and of the table itself where that says more."""
    texts = [_text(info.description)]
    if len(kinds) == 1 and (more := _text(kinds[0].__doc__)) not in texts:
        texts.append(more)
    need = "*required*" if info.is_required() else "*unset* by default" if info.default is None else "may be left out"
    return f"{' '.join(texts)} ({need})"


def _text(text: str | None) -> str:
    if not text:
        raise ValueError("a setting or table without a docstring")
    return " ".join(text.split())


def metrics() -> str:
    """docs/metrics.md."""
    lines = [METRICS_HEAD, "## Only when", ""]
    lines += [f"- `{start}{'…' if start.endswith('/') else ''}`: {when}" for start, when in ONLY_WHEN.items()]
    stages: dict[str, list[str]] = {}
    for key in METRICS:
        stages.setdefault(key.partition("/")[0] if "/" in key else "row", []).append(key)
    for stage, keys in stages.items():
        lines += ["", f"## {stage}", "", "| key | meaning and unit |", "|---|---|"]
        lines += [f"| `{key}` | {METRICS[key]} |" for key in keys]
    quantiles, edges = (", ".join(f"{x:.3g}" for x in values) for values in (QUANTILES, HISTOGRAM))
    lines += ["", "## Lists", "", f"QUANTILES are {quantiles}; 0 is the least value and 1 the largest.", ""]
    lines += [f"HISTOGRAM's {len(HISTOGRAM)} edges, in nats of log-ratio, are {edges}.", ""]
    lines += [
        "A histogram has one count more than there are edges: count i, from 0, is of edge[i-1] < log ratio ≤ edge[i],"
    ]
    lines += ["and the first and the last bin are open.", ""]
    ends = f"{LENGTHS[0]} to {LENGTHS[-1]:,}"
    lines += [
        f"LENGTHS' {len(LENGTHS)} edges are the powers of two from {ends} tokens. A list by length has one entry more:"
    ]
    lines += ["entry i is of edge[i-1] < length ≤ edge[i], and the last of all longer responses."]
    return "\n".join(lines) + "\n"


DOCUMENTS = {HERE / "recipes.md": recipes, HERE / "metrics.md": metrics}


def main(words: list[str]) -> int:
    """Write, or with --check compare; returns 1 if a file is stale."""
    if words not in ([], ["--check"]):
        print("usage: python docs/generate.py [--check]", file=sys.stderr)
        return 2
    stale = [path for path, make in DOCUMENTS.items() if not path.exists() or path.read_text("utf-8") != make()]
    for path in stale:
        if words:
            print(f"{path.name} is stale: run python docs/generate.py", file=sys.stderr)
        else:
            path.write_text(DOCUMENTS[path](), "utf-8")
            print(f"wrote {path}")
    return int(bool(stale and words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
