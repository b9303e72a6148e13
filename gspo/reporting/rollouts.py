"""Metrics of a rollout batch: rewards, groups without a signal, lengths. And the lines of its samples file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..types import Metrics, Scored

Groups = Sequence[Sequence[Scored]]


def reward_metrics(groups: Groups, advantages: Sequence[Sequence[float | None]], *, solved_at: float) -> Metrics:
    """`reward/` of a rollout batch; groups and advantages are [prompts][samples]. Nothing scored: null."""
    samples = [s for group in groups for s in group]
    totals = np.array([s.total for s in samples if s.total is not None])
    names = samples[0].parts if samples else {}
    parts = {name: [s.parts[name].value for s in samples if s.parts[name].value is not None] for name in names}
    return {
        "reward/mean": _mean(totals),
        "reward/std": float(totals.std(ddof=1)) if len(totals) > 1 else None,
        "reward/solved": _mean(totals >= solved_at),
        "reward/groups_without_signal": _mean([not any(a for a in group) for group in advantages]),
        "reward/abstained": len(samples) - len(totals),
        **{f"reward/part/{name}": _mean(values) for name, values in parts.items()},
    }


def rollout_metrics(groups: Groups, *, seconds: float) -> Metrics:
    """`rollout/` of a rollout batch that took so many seconds to sample."""
    samples = [s.sample for group in groups for s in group]
    lengths = [s.num_tokens for s in samples]
    return {
        "rollout/responses": len(samples),
        "rollout/response_tokens_mean": _mean(lengths),
        "rollout/response_tokens_max": max(lengths),
        "rollout/truncated": _mean([s.completion.finish_reason == "length" for s in samples]),
        "rollout/tokens_per_s": sum(lengths) / seconds,
    }


def sample_lines(
    groups: Groups,
    advantages: Sequence[Sequence[float | None]],
    updated: Mapping[str, tuple[float, bool]],
    *,
    step: int,
) -> Iterable[dict[str, Any]]:
    """A record of every sample. updated: sample id to (s at its update, whether it was clipped), where it was trained."""
    for group, group_advantages in zip(groups, advantages, strict=True):
        for scored, advantage in zip(group, group_advantages, strict=True):
            sample = scored.sample
            ratio, clipped = updated.get(sample.id, (None, None))
            yield {
                "id": sample.id,
                "step": step,
                "prompt": sample.prompt.text,
                "response": sample.text,
                "answer": None if sample.answer is None else str(sample.answer),
                "reward": scored.total,
                "parts": {name: {"value": part.value, "why": part.why} for name, part in scored.parts.items()},
                "advantage": advantage,
                "num_tokens": sample.num_tokens,
                "finish_reason": sample.completion.finish_reason,
                "seed": sample.completion.seed,
                "weight_version": sample.completion.weight_version,
                "ratio": ratio,
                "clipped": clipped,
            }


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None
