"""What every table of a recipe is."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator


def _leaves(annotation: Any) -> set[Any]:
    parts = get_args(annotation)
    return {leaf for part in parts for leaf in _leaves(part)} if parts else {annotation}


def _reads(kind: type, text: str) -> bool:
    """Whether pydantic would make such a value of the text."""
    try:
        TypeAdapter(kind).validate_python(text)
    except ValidationError:
        return False
    return True


class Word(str):
    """A value from the command line, where all is text: it may stand for a number, which a text in a file may not."""


class Section(BaseModel):
    """A table of a recipe: frozen, and without room for unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _kinds_as_written(cls, values: Any) -> Any:
        """What pydantic would turn into a number or a truth without a word is refused: true for 1, "3" for 3."""
        for name, value in values.items() if isinstance(values, dict) else ():
            kinds = _leaves(cls.model_fields[name].annotation) if name in cls.model_fields else set()
            if not kinds & {int, float, bool} or any(k is str or isinstance(k, str) for k in kinds):
                continue
            wanted = "a number" if kinds & {int, float} else "true or false"
            for x in value if isinstance(value, list) else [value]:
                if isinstance(x, bool) and bool not in kinds:
                    raise ValueError(f"{name} must be a number, not true or false")
                if type(x) is str and any(_reads(kind, x) for kind in kinds & {int, float, bool}):
                    raise ValueError(f'{name} must be {wanted}, not the text "{x}": leave out the quotation marks')
        return values


def nearest(wanted: int, valid: list[int]) -> str:
    """The valid values next to the wanted one, for a sentence. valid: ascending."""
    below, above = [k for k in valid if k < wanted], [k for k in valid if k > wanted]
    return either(*below[-1:], *above[:1])


def either(*values: int) -> str:
    """The positive ones of the values, for a sentence: `8 or 16`."""
    return " or ".join(str(k) for k in values if k > 0)
