"""Both sets of prompts of a recipe, checked and held apart before any work is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from . import chat, data
from .config import Config, EnvironmentConfig, Source
from .environments import reply_roles, tool_schemas
from .rewards import Built, gold_checks
from .types import Prompt

Say = Callable[[str], None]


def load_prompts(
    source: Source,
    tokenizer: Any,
    rewards: Sequence[Built],
    *,
    max_prompt_tokens: int,
    where: str,
    say: Say,
    environment: EnvironmentConfig | None = None,
) -> list[Prompt]:
    """The prompts of a source, faults settled, each with the id `r{row}`. Raises DataError with every fault by row number.

    The id is part of a sample's seed: prompts without one of their own would all draw the same random numbers. Raises
    ChatError where the chat template cannot tell of the environment's tools, or what follows a response.
    """
    tools = tool_schemas(environment)
    if tools and source.format == "text":
        raise data.DataError(f'{where}.format = "text" has no chat template to tell of tools: use format = "chat"')
    chat.require_tools(tokenizer, tools)
    if source.format == "chat" and tokenizer.chat_template:  # without one its first prompt is refused
        chat.require_continuation(tokenizer, reply_roles(environment))
    prompts, faults = data.prepare(
        data.load_rows(source),
        source,
        encode=lambda prompt: chat.encode(tokenizer, prompt, tools),
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
    load = partial(
        load_prompts,
        tokenizer=tokenizer,
        rewards=rewards,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        say=say,
        environment=config.environment,
    )
    training = load(config.data, where="data")
    if config.evaluation is None:
        evaluation = []
    else:
        evaluation = load(config.evaluation.data, where="evaluation.data")
        training, dropped = data.separate(training, evaluation, config.evaluation.overlap)
        if dropped:
            say(f"data: dropped {dropped} training prompts that are also evaluation prompts; {len(training)} are left")
    data.require_batch(training, config.rollout.prompts_per_step)
    return training, evaluation
