"""Training prompts that are also evaluation prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..types import Prompt
from .errors import DataError

NUM_SHOWN = 20


def overlap(training: Sequence[Prompt], evaluation: Sequence[Prompt]) -> list[Prompt]:
    """The training prompts whose tokens are also an evaluation prompt's, in their order.

    Not covered: paraphrases, and the same problem in another template; only identical tokens count.
    """
    seen = {prompt.token_ids for prompt in evaluation}
    return [prompt for prompt in training if prompt.token_ids in seen]


def separate(
    training: Sequence[Prompt], evaluation: Sequence[Prompt], policy: Literal["refuse", "drop", "allow"]
) -> tuple[list[Prompt], int]:
    """The training prompts to use beside these evaluation prompts, and how many were dropped.

    policy: `evaluation.overlap` of the recipe. Raises DataError under `refuse` if there is an overlap, and under `drop`
    if nothing would be left.
    """
    common = [] if policy == "allow" else overlap(training, evaluation)
    if common and policy == "refuse":
        rows = ", ".join(str(prompt.row) for prompt in common[:NUM_SHOWN])
        more = f" and {len(common) - NUM_SHOWN} more" if len(common) > NUM_SHOWN else ""
        raise DataError(
            f"{len(common)} of {len(training)} training prompts are also evaluation prompts (rows {rows}{more}): "
            'set evaluation.overlap = "drop" to leave them out of training, or "allow" to keep them'
        )
    rows_out = {prompt.row for prompt in common}
    kept = [prompt for prompt in training if prompt.row not in rows_out]
    if common and not kept:
        raise DataError(f"all {len(training)} training prompts are also evaluation prompts: nothing is left to train on")
    return kept, len(common)
