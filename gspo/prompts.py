"""Both sets of prompts of a recipe, checked and held apart before any work is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from . import chat, data
from .config import Config, Source
from .rewards import Built, gold_checks
from .types import Prompt

Say = Callable[[str], None]


def load_prompts(
    source: Source, tokenizer: Any, rewards: Sequence[Built], *, max_prompt_tokens: int, where: str, say: Say
) -> list[Prompt]:
    """The prompts of a source, faults settled, each with the id `r{row}`. Raises DataError with every fault by row number.

    The id is part of a sample's seed: prompts without one of their own would all draw the same random numbers.
    """
    prompts, faults = data.prepare(
        data.load_rows(source),
        source,
        encode=lambda prompt: chat.encode(tokenizer, prompt),
        max_prompt_tokens=max_prompt_tokens,
        gold_checks=gold_checks(rewards),
        where=where,
    )
    kept, dropped = data.settle(prompts, faults, source, where)
    if dropped:
        say(
            f"{where}: dropped {dropped} faulty rows of {len(prompts) + dropped}, "
            f"e.g. row {faults[0].row}: {faults[0].what}"
        )
    return [replace(p, id=f"r{p.row}") for p in kept]


def training_and_evaluation_prompts(
    config: Config, tokenizer: Any, rewards: Sequence[Built], say: Say
) -> tuple[list[Prompt], list[Prompt]]:
    """Both sets, held apart as the recipe says, and enough of the first for a batch. Raises DataError."""
    limit = config.rollout.max_prompt_tokens
    training = load_prompts(config.data, tokenizer, rewards, max_prompt_tokens=limit, where="data", say=say)
    if config.evaluation is None:
        evaluation = []
    else:
        evaluation = load_prompts(
            config.evaluation.data, tokenizer, rewards, max_prompt_tokens=limit, where="evaluation.data", say=say
        )
        training, dropped = data.separate(training, evaluation, config.evaluation.overlap)
        if dropped:
            say(f"data: dropped {dropped} training prompts that are also evaluation prompts; {len(training)} are left")
    data.require_batch(training, config.rollout.prompts_per_step)
    return training, evaluation
