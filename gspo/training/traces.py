"""The few responses of a step whose tokens are recorded one by one, taken from the diagnosis of the update.

T trained tokens, S sequences of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ..chat import token_texts
from ..reporting.tokens import Trace, token_record
from ..types import Completion
from .diagnosis import Ratios


def token_records(
    minibatches: Sequence[Sequence[Ratios]],
    completions: Mapping[str, Completion],
    decode: Callable[[Sequence[int]], str],
) -> dict[str, dict[str, Any]]:
    """Sample id to the `tokens` table of its line, of the samples that `traces` chooses. Waits for no GPU.

    completions: by sample id. decode: the tokenizer's, special tokens spelled out.
    """
    found = traces(minibatches, {name: completion.logprobs for name, completion in completions.items()})
    ids = {name: completions[name].token_ids.tolist() for name in found}
    return {name: token_record(trace, ids[name], token_texts(decode, ids[name])) for name, trace in found.items()}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a sequence stands among the micro-batches of a step."""

    ratios: Ratios
    """Its micro-batch."""
    at: int
    """Its number there."""
    minibatch: int
    """Counted from 1."""

    @property
    def id(self) -> str:
        return self.ratios.ids[self.at]

    @property
    def moved(self) -> float:
        """|log s|."""
        return abs(float(self.ratios.log_ratio_S[self.at]))

    @property
    def length(self) -> float:
        return float(self.ratios.length_S[self.at])

    def of(self, x_T: Tensor) -> Tensor:
        """What of a micro-batch's tokens is this sequence's."""
        return x_T[self.ratios.sequence_T == self.at]

    def trace(self, chosen: Sequence[str], engine_T: np.ndarray) -> Trace:
        """Its tokens. The trainer's log-probabilities follow from those that are kept: in minibatch 1 they are the old
        ones, later those less what moved."""
        d_T = self.of(self.ratios.log_ratio_T).numpy()
        gap_T = None if self.ratios.engine_gap_T is None else self.of(self.ratios.engine_gap_T).numpy()
        old_T = engine_T if gap_T is None else engine_T - gap_T
        trainer_T = old_T if self.minibatch == 1 else old_T + d_T
        return Trace(
            self.minibatch, tuple(chosen), d_T, trainer_T, engine_T, gap_T, self.of(self.ratios.advantage_T).numpy()
        )


def traces(minibatches: Sequence[Sequence[Ratios]], engine_logprobs: Mapping[str, np.ndarray]) -> dict[str, Trace]:
    """Sample id to its tokens, of up to four samples of a step that are worth looking at; of equals the first.

    Those with the largest |log s| and the largest |d| of a token, the one in the middle by |log s| of the last minibatch
    that trained any, and the longest of the first minibatch, where engine and trainer are compared with the same weights.
    engine_logprobs: float32 [trained tokens] by sample id.
    """
    parts = [[_Place(r, i, n) for r in part for i in range(len(r.ids))] for n, part in enumerate(minibatches, 1)]
    every = [place for part in parts for place in part]
    if not every:
        return {}
    token = max((r for part in minibatches for r in part), key=lambda r: float(r.log_ratio_T.abs().max()))
    holder = token.ids[int(token.sequence_T[token.log_ratio_T.abs().argmax()])]
    last = sorted(next(part for part in reversed(parts) if part), key=lambda place: place.moved)
    wanted = [
        ("largest |log s| of the step", max(every, key=lambda place: place.moved)),
        ("largest |d| of a token of the step", next(place for place in every if place.id == holder)),
        ("middle |log s| of its minibatch", last[len(last) // 2]),
    ]
    if parts[0]:
        wanted.append(("longest of the first minibatch", max(parts[0], key=lambda place: place.length)))
    places = {place.id: place for _, place in wanted}
    words = {name: [word for word, place in wanted if place.id == name] for name in places}
    return {name: place.trace(words[name], engine_logprobs[name]) for name, place in places.items()}
