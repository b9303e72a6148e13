"""Prompts to samples: a group of responses to each prompt, decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..chat import decode
from ..config import SamplingConfig
from ..types import Prompt, Sample
from .engine import Engine, Progress, Request, sample_seed


def collect(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: SamplingConfig,
    tokenizer: Any,
    *,
    group_size: int,
    seed: int,
    step: int,
    progress: Progress = lambda n: None,
) -> list[list[Sample]]:
    """group_size samples to each prompt, one list a prompt instance, in their order.

    Raises ValueError if two prompts share an id: they would share their random numbers too.
    """
    if len({p.id for p in prompts}) < len(prompts):
        raise ValueError("prompts that are sampled together need ids of their own: seeds are made from them")
    requests = [
        Request(f"s{step}/{p.id}/{k}", p.token_ids, sample_seed(seed, step, p.id, k))
        for p in prompts
        for k in range(group_size)
    ]
    completions = iter(zip(requests, engine.generate(requests, sampling, progress), strict=True))
    return [
        [Sample(r.id, prompt, c, decode(tokenizer, c.token_ids)) for r, c in (next(completions) for _ in range(group_size))]
        for prompt in prompts
    ]
