"""What every table of a recipe is."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator


def _leaves(annotation: Any) -> set[Any]:
    parts = get_args(annotation)
    return {leaf for part in parts for leaf in _leaves(part)} if parts else {annotation}


class Section(BaseModel):
    """A table of a recipe: frozen, and without room for unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _truth_is_no_number(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            kinds = _leaves(cls.model_fields[name].annotation) if name in cls.model_fields else set()
            items = value if isinstance(value, list) else [value]
            if any(isinstance(x, bool) for x in items) and kinds & {int, float} and bool not in kinds:
                raise ValueError(f"{name} must be a number, not true or false")  # pydantic would take true as 1
        return values


def nearest(wanted: int, valid: list[int]) -> str:
    """The valid values next to the wanted one, for a sentence. valid: ascending."""
    below, above = [k for k in valid if k < wanted], [k for k in valid if k > wanted]
    return either(*below[-1:], *above[:1])


def either(*values: int) -> str:
    """The positive ones of the values, for a sentence: `8 or 16`."""
    return " or ".join(str(k) for k in values if k > 0)
