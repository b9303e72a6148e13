"""What samples/step-N.jsonl holds of single tokens: of a few responses of a step, and of long ones both ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_TOKENS = 512
"""Tokens of a response that are recorded: of a longer one the first and the last half of so many. At about 60 bytes each a
response then takes 30 kB, no more than the texts of the dozens of others in the same file."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The tokens of one response at its own update. Arrays are float32 [trained tokens]."""

    minibatch: int
    """Which gradient step of the rollout batch, counted from 1: the first is on-policy."""
    chosen: tuple[str, ...]
    """What it was chosen for, in the words that the report shows."""
    log_ratio: np.ndarray
    """d: log-probability under the policy at the update less the old one."""
    trainer_logprobs: np.ndarray
    """The trainer's log-probabilities at the update, before its step."""
    engine_logprobs: np.ndarray
    """The engine's, with which the tokens were sampled."""
    engine_gap: np.ndarray | None
    """Engine less trainer with the same weights, or None where the trainer's old ones were not computed."""
    advantage: np.ndarray
    """Advantage of each token, as the loss took it (the correction's weights included)."""


def token_record(trace: Trace, token_ids: Sequence[int], texts: Sequence[str]) -> dict[str, Any]:
    """The `tokens` table of a sample's line. Numbers at four significant digits, which is more than a picture shows.

    Of more than MAX_TOKENS tokens the middle ones are left out: `left_out` counts them, `left_out_largest` is the largest
    |d| among them.
    """
    num = len(trace.log_ratio)
    shown = np.array(ends(num, MAX_TOKENS), dtype=int)
    hidden = np.setdiff1d(np.arange(num), shown)
    one = len(trace.advantage) > 0 and bool((trace.advantage == trace.advantage[0]).all())
    return {
        "minibatch": trace.minibatch,
        "chosen": list(trace.chosen),
        "left_out": len(hidden),
        "left_out_largest": rounded(np.abs(trace.log_ratio[hidden]).max()) if len(hidden) else None,
        "ids": [int(token_ids[i]) for i in shown],
        "texts": [texts[i] for i in shown],
        "log_ratio": _rounded(trace.log_ratio[shown]),
        "trainer_logprobs": _rounded(trace.trainer_logprobs[shown]),
        "engine_logprobs": _rounded(trace.engine_logprobs[shown]),
        "engine_gap": None if trace.engine_gap is None else _rounded(trace.engine_gap[shown]),
        "advantage": rounded(trace.advantage[0]) if one else _rounded(trace.advantage[shown]),
    }


def ends(num: int, limit: int) -> list[int]:
    """Of the positions 0 to num - 1 the first and last halves of `limit`, all where they are no more."""
    if num <= limit:
        return list(range(num))
    first = (limit + 1) // 2
    return [*range(first), *range(num - limit + first, num)]


def rounded(value: float) -> float:
    """At four significant digits."""
    return float(f"{value:.4g}")


def _rounded(values: np.ndarray) -> list[float]:
    return [rounded(v) for v in values.tolist()]
