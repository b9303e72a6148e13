"""The order in which prompts are used: a pure function of the seed, so that a place in it is two numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from ..types import Prompt
from .errors import DataError


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the endless stream of prompts: `index` prompts of epoch `epoch` are used."""

    epoch: int = 0
    """Full passes over the prompts, counted from 0."""
    index: int = 0
    """Prompts already taken of this epoch; always less than their number."""

    def state(self) -> dict[str, int]:
        """The cursor as a JSON object."""
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, int]) -> Cursor:
        """The cursor of a `state()`. Raises DataError if it is none."""
        values = dict(state)
        if values.keys() != {"epoch", "index"} or any(type(v) is not int or v < 0 for v in values.values()):
            raise DataError(f"{values} is no cursor: it needs epoch and index, whole numbers of 0 or more")
        return cls(**values)


def take(prompts: Sequence[Prompt], cursor: Cursor, n: int, seed: int) -> tuple[list[Prompt], Cursor]:
    """The next n prompts of the stream, each with the id `e{epoch}-r{row}`, and the cursor behind them.

    Each epoch is a permutation of all prompts, drawn from (seed, epoch) alone. A batch that crosses an epoch's end takes
    the rest and goes on with the next epoch: how the stream is cut into batches changes nothing in it.

    prompts [prompts] · n: prompts to take, 0 to len(prompts). Raises DataError if it is another number, and if the
    cursor lies outside the prompts, as it does when the data have changed since it was saved.
    """
    if not 0 <= n <= len(prompts):
        raise DataError(f"cannot take {n} prompts at once from {len(prompts)}: take 0 to {len(prompts)}")
    if cursor.index >= len(prompts):
        raise DataError(
            f"the cursor stands at prompt {cursor.index} of an epoch, but there are {len(prompts)} prompts: "
            "the data have changed since the cursor was saved"
        )
    end = cursor.index + n
    batch = _epoch(prompts, cursor.epoch, seed, slice(cursor.index, end))
    if end < len(prompts):
        return batch, Cursor(cursor.epoch, end)
    rest = end - len(prompts)
    if rest:
        batch += _epoch(prompts, cursor.epoch + 1, seed, slice(rest))
    return batch, Cursor(cursor.epoch + 1, rest)


def _epoch(prompts: Sequence[Prompt], epoch: int, seed: int, part: slice) -> list[Prompt]:
    order = np.random.default_rng([seed, epoch]).permutation(len(prompts))[part]
    return [replace(prompts[i], id=f"e{epoch}-r{prompts[i].row}") for i in order]
