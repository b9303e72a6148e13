"""Metrics of a rollout batch: rewards, groups without a signal, lengths. And the lines of its samples file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ..types import Advantage, Metrics, Sample, Scored, Trajectory, Unfinished

Groups = Sequence[Sequence[Scored]]


def reward_metrics(groups: Groups, advantages: Sequence[Sequence[Advantage]], *, solved_at: float) -> Metrics:
    """`reward/` of a rollout batch; groups and advantages are [prompts][samples]. Nothing scored: null."""
    samples = [s for group in groups for s in group]
    totals = np.array([s.total for s in samples if s.total is not None])
    names = samples[0].parts if samples else {}
    parts = {name: [s.parts[name].value for s in samples if s.parts[name].value is not None] for name in names}
    return {
        "reward/mean": _mean(totals),
        "reward/std": float(totals.std(ddof=1)) if len(totals) > 1 else None,
        "reward/solved": _mean(totals >= solved_at),
        "reward/groups_without_signal": _mean([not any(_signal(a) for a in group) for group in advantages]),
        "reward/abstained": len(samples) - len(totals),
        **{f"reward/part/{name}": _mean(values) for name, values in parts.items()},
    }


def rollout_metrics(groups: Groups, *, sampled_tokens: int, seconds: float) -> Metrics:
    """`rollout/` of a rollout batch; so many tokens were sampled in so many seconds, those of waiting groups among them."""
    samples = [s.sample for group in groups for s in group]
    lengths = [s.num_tokens for s in samples]
    return {
        "rollout/responses": len(samples),
        "rollout/response_tokens_mean": _mean(lengths),
        "rollout/response_tokens_max": max(lengths),
        "rollout/truncated": _mean([s.completion.finish_reason == "length" for s in samples]),
        "rollout/tokens_per_s": sampled_tokens / seconds,
    }


def partial_metrics(
    groups: Groups, trained: Sequence[Trajectory], waiting: Sequence[Sequence[Sample | Unfinished]], *, on: bool
) -> Metrics:
    """`partial/` of a rollout batch, of what is trained on of it, and of the groups that go on in the next step; empty
    where rollout.max_step_tokens is not set."""
    if not on:
        return {}
    ages = [s.sample.completion.versions[-1][0] - s.sample.completion.weight_version for group in groups for s in group]
    continued = [age for age in ages if age]
    unfinished = [s for group in waiting for s in group if isinstance(s, Unfinished)]
    return {
        "partial/continued": len(continued) / len(ages),
        "partial/age_mean": _mean(continued),
        "partial/age_max": max(continued, default=None),
        "partial/stale_tokens": sum(int(t.stale.sum()) for t in trained if t.stale is not None),
        "partial/suspended": len(unfinished),
        "partial/waiting_groups": len(waiting),
        "partial/carried_tokens": sum(s.num_tokens for group in waiting for s in group),
    }


def episode_metrics(groups: Groups, *, on: bool) -> Metrics:
    """`environment/` of a rollout batch; empty where the recipe has none."""
    if not on:
        return {}
    samples = [s.sample for group in groups for s in group]
    turns = [s.turns for s in samples]
    calls = [[call for turn in episode for call in turn.reply.calls] for episode in turns]
    every = [call for episode in calls for call in episode]
    rewards = [[e[k].reply.reward for e in turns if len(e) > k] for k in range(max(map(len, turns)))]
    return {
        "environment/turns_mean": _mean([len(episode) for episode in turns]),
        "environment/unfinished": _mean([not episode[-1].reply.done for episode in turns]),
        "environment/reply_tokens_mean": _mean([s.num_reply_tokens for s in samples]),
        "environment/tool_calls_mean": _mean([len(episode) for episode in calls]),
        "environment/tool_errors": _mean([call.failed for call in every]),
        "environment/reward_by_turn": [_mean([r for r in by_turn if r is not None]) for by_turn in rewards],
    }


def sample_lines(
    groups: Groups,
    advantages: Sequence[Sequence[Advantage]],
    updated: Mapping[str, tuple[float, bool, float]],
    *,
    step: int,
    tokens: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterable[dict[str, Any]]:
    """A record of every sample. updated: sample id to (s at its update, whether it was clipped, largest |d| of
    its tokens), where it was trained.

    tokens: sample id to what `token_record` made of its tokens, for the few whose tokens are recorded.
    """
    for group, group_advantages in zip(groups, advantages, strict=True):
        for scored, advantage in zip(group, group_advantages, strict=True):
            sample = scored.sample
            ratio, clipped, largest = updated.get(sample.id, (None, None, None))
            yield {
                "id": sample.id,
                "step": step,
                "prompt": sample.prompt.text,
                "response": _transcript(sample),
                "answer": None if sample.answer is None else str(sample.answer),
                "reward": scored.total,
                "parts": {name: {"value": part.value, "why": part.why} for name, part in scored.parts.items()},
                "advantage": advantage,
                "num_tokens": sample.num_tokens,
                "finish_reason": sample.completion.finish_reason,
                "seed": sample.completion.seed,
                "weight_version": sample.completion.weight_version,
                **({"weight_versions": sample.completion.versions} if sample.completion.later else {}),
                "ratio": ratio,
                "clipped": clipped,
                "largest_log_ratio": largest,
                **({"turns": _turns(sample)} if _is_episode(sample) else {}),
                **({"tokens": tokens[sample.id]} if tokens and sample.id in tokens else {}),
            }


def _is_episode(sample: Sample) -> bool:
    """Whether more happened than a response."""
    return len(sample.turns) > 1 or any(turn.reply.calls or turn.reply.reward is not None for turn in sample.turns)


def _signal(advantage: Advantage) -> bool:
    return any(advantage) if isinstance(advantage, tuple) else bool(advantage)


def _transcript(sample: Sample) -> str:
    """The response; of an episode its conversation after the prompt."""
    if len(sample.turns) < 2:
        return sample.text
    start = len(sample.prompt.messages or "1")
    return "\n".join(
        m["content"] if m["role"] == "assistant" else f"[{m['role']}] {m['content']}" for m in sample.conversation[start:]
    )


def _turns(sample: Sample) -> list[dict[str, Any]]:
    """A record of each turn."""
    return [
        {
            "text": turn.text,
            "num_tokens": len(turn.completion.token_ids),
            "finish_reason": turn.completion.finish_reason,
            "weight_version": turn.completion.weight_version,
            **({"weight_versions": turn.completion.versions} if turn.completion.later else {}),
            "seed": turn.completion.seed,
            "reward": turn.reply.reward,
            "calls": [asdict(call) for call in turn.reply.calls],
            "reply": [dict(message) for message in turn.reply.messages],
            "reply_tokens": len(turn.reply_ids),
        }
        for turn in sample.turns
    ]


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None
