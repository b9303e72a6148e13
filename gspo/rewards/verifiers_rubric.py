"""The rubric of a single-turn `verifiers` environment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import VerifiersReward
from ..types import Sample, Score
from ..verifiers_package import is_single_turn, judge, load_environment
from .verifier import Verifier


def verifiers(config: VerifiersReward) -> Verifier:
    """The weighted sum of the reward functions of the environment that a prompt came from; what one that raises does, says
    `on_error`. Not covered: functions that score a group together (refused), time limits; environments of several turns,
    whose functions look at a state that the episode leaves: these are judged where they are played.
    """

    async def function(samples: Sequence[Sample]) -> list[Score]:
        return await asyncio.gather(*(_judge(sample) for sample in samples))

    return Verifier(function, _from_verifiers)


async def _judge(sample: Sample) -> Score:
    columns = sample.prompt.columns
    told = {
        "prompt": list(sample.prompt.messages or ()) or sample.prompt.text,
        "completion": [{"role": "assistant", "content": sample.text}] if sample.prompt.messages else sample.text,
        "answer": columns.get("answer", ""),
        "task": columns.get("task", "default"),
        "info": columns.get("info") or {},
    }
    try:
        environment = load_environment(columns["_environment"], columns["_parameters"])
        return await judge(environment, told | {"state": dict(told)})
    except Exception as error:
        error.add_note(f"at sample {sample.id}")
        raise


def _from_verifiers(answer: Any, columns: Mapping[str, Any]) -> str | None:
    if "_environment" not in columns:
        return 'scores only rows of a source = "verifiers"'
    if is_single_turn(load_environment(columns["_environment"], columns["_parameters"])):
        return None
    return (
        f'{columns["_environment"]} has several turns, which an [environment] of type = "verifiers" plays and judges: use '
        'type = "environment" for the reward'
    )
