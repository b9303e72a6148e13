"""Evaluation: k samples to each held-out prompt, scored by the rewards of the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import EvaluationConfig
from ..environments import SINGLE_TURN, Environment
from ..rewards import Built, score
from ..rollout.collect import collect
from ..rollout.engine import Engine, Progress
from ..types import Metrics, Prompt, Scored
from .statistics import bootstrap_interval, mean_interval, pass_at_k


class EvaluationError(Exception):
    """An evaluation whose numbers would be undefined; the message says why."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One evaluation."""

    metrics: Metrics
    """`evaluation/...`, see reporting/names.py."""
    groups: list[list[Scored]]
    """Every sample with its scores, a list a prompt."""


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    rewards: Sequence[Built],
    config: EvaluationConfig,
    tokenizer: Any,
    *,
    solved_at: float,
    progress: Progress = lambda n: None,
    environment: Environment = SINGLE_TURN,
) -> Evaluated:
    """Sample, score and summarise. Seeds depend on config.seed and the row alone, so that every evaluation is alike.

    Raises EvaluationError where abstentions leave no prompt with k samples for a pass@k.
    """
    scored = sample_and_score(engine, prompts, rewards, config, tokenizer, progress, environment)
    return summarise(scored, config, solved_at=solved_at)


def sample_and_score(
    engine: Engine,
    prompts: Sequence[Prompt],
    rewards: Sequence[Built],
    config: EvaluationConfig,
    tokenizer: Any,
    progress: Progress = lambda n: None,
    environment: Environment = SINGLE_TURN,
) -> list[list[Scored]]:
    """config.samples scored samples to each prompt, one list a prompt, in their order."""
    groups = collect(
        engine,
        prompts,
        config,
        tokenizer,
        group_size=config.samples,
        seed=config.seed,
        step=0,
        progress=progress,
        environment=environment,
    )
    scored = score(rewards, [s for group in groups for s in group])
    size = config.samples
    return [scored[i : i + size] for i in range(0, len(scored), size)]


def summarise(groups: list[list[Scored]], config: EvaluationConfig, *, solved_at: float) -> Evaluated:
    """Mean pass@1, the unbiased pass@k, and their 95% intervals over prompts, from scored groups.

    A prompt with fewer than k scored samples takes no part in pass@k; abstentions are counted beside the scores.
    """
    known = [[s.total for s in group if s.total is not None] for group in groups]
    metrics: Metrics = {}
    for k in config.pass_at:
        enough = [rewards for rewards in known if len(rewards) >= k]
        if not enough:
            raise EvaluationError(
                f"pass@{k} is undefined: verifiers abstained until no prompt had {k} scored samples; mend the verifier, or "
                "raise evaluation.samples"
            )
        interval = mean_interval([pass_at_k(len(r), sum(x >= solved_at for x in r), k) for r in enough])
        metrics |= {
            f"evaluation/pass@{k}": interval.mean,
            f"evaluation/pass@{k}_low": interval.low,
            f"evaluation/pass@{k}_high": interval.high,
        }
    samples = [s for group in groups for s in group]
    rewards = [s.total for s in samples if s.total is not None]
    means = [float(np.mean(group)) for group in known if group]
    spread = bootstrap_interval(means) if means else None
    metrics |= {
        "evaluation/reward": float(np.mean(rewards)) if rewards else None,
        "evaluation/reward_low": spread.low if spread else None,
        "evaluation/reward_high": spread.high if spread else None,
        "evaluation/response_tokens_mean": float(np.mean([s.sample.num_tokens for s in samples])),
        "evaluation/truncated": float(np.mean([s.sample.completion.finish_reason == "length" for s in samples])),
        "evaluation/abstained": len(samples) - len(rewards),
    }
    return Evaluated(metrics, groups)
