"""Which experts computed each token of a sample: records by sample and position, so that they outlive any packing.

N packed tokens of a micro-batch, P positions of a sample that go through the model (all but its last token), L layers with
experts, K experts to each token. Records lie in the host's memory, in the smallest integer type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


class RecordError(ValueError):
    """A record that cannot be of this sample; the message names it."""


@dataclass(frozen=True, slots=True)
class Record:
    """The experts of one sample."""

    ids_NLK: np.ndarray
    """uint8 or int16: of the row of tokens in which the sample was computed, which others may share."""
    place_P: np.ndarray
    """int64: where each of the sample's positions stands in that row."""


def packed_ids(records: Sequence[Record], places: Sequence[np.ndarray], num_tokens: int) -> np.ndarray:
    """The ids [N, L, K] of a row of num_tokens tokens in which sample i's positions stand at places[i].

    A prompt that samples share stands once in the row: its experts are those of the first of them.
    """
    first = records[0].ids_NLK
    out = np.empty((num_tokens, *first.shape[1:]), first.dtype)
    for record, place_P in zip(reversed(records), reversed(places), strict=True):
        out[place_P] = record.ids_NLK[record.place_P]
    return out


def checked_rows(name: str, rows: np.ndarray, num_tokens: int, shape: tuple[int, int], num_experts: int) -> np.ndarray:
    """An engine's rows for a sample of so many tokens, [num_tokens - 1, L, K] with shape = (L, K), in the smallest type.

    The last sampled token never went through the engine's model, so rows may be one short of the tokens. Raises RecordError
    for any other number of rows, another shape, ids that are no experts, and a row that names an expert twice: no top-k
    does, but rows that were never written hold zeros. (With K = 1 such a row cannot be told from a choice.)
    """
    if rows.ndim != 3 or rows.shape[1:] != shape or num_tokens - len(rows) not in (0, 1):
        raise RecordError(
            f"sample {name}: the engine returned routed experts of the shape {list(rows.shape)} for {num_tokens} tokens; "
            f"with this model it must be {[num_tokens, *shape]}, or one row less"
        )
    rows = rows[: num_tokens - 1]
    if rows.size and not (rows.min() >= 0 and rows.max() < num_experts):
        wrong = rows.min() if rows.min() < 0 else rows.max()
        raise RecordError(f"sample {name}: the engine routed to expert {wrong} of a model with {num_experts}")
    ordered = np.sort(rows, -1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    if twice.any():
        token, layer = np.argwhere(twice)[0]
        raise RecordError(
            f"sample {name}: the engine's row for token {token} in layer {layer} of those with experts names an expert "
            f"twice, {rows[token, layer].tolist()}: it was not filled in"
        )
    return rows.astype(np.uint8 if num_experts <= 256 else np.int16)
