"""What an error of vLLM means for a recipe."""

from __future__ import annotations

import torch
from pydantic import ValidationError


def first_line(error: BaseException) -> str:
    """What an error says, shortened to its first sentence."""
    # pydantic's own first line only counts the faults
    text = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error).strip()
    return (text or type(error).__name__).splitlines()[0].rstrip(".")


def what_to_do(error: BaseException, *, on_cpu: bool) -> str:
    """The setting to change, for the end of the sentence."""
    text = (first_line(error) + str(error)).lower()
    if isinstance(error, OSError) and error.errno:
        return "set TMPDIR to a folder with room that can be written to"
    if "max_num_seqs" in text:
        return "lower rollout.max_rows"
    if (isinstance(error, torch.OutOfMemoryError) or "memory" in text or "kv cache" in text) and on_cpu:
        return (
            "lower rollout.max_prompt_tokens or max_response_tokens: the longest sample needs more cache than vLLM may "
            "take on a CPU, or the machine is full"
        )
    if isinstance(error, torch.OutOfMemoryError) or "memory" in text or "kv cache" in text:
        return (
            "lower rollout.max_rows, rollout.max_response_tokens or training.micro_batch_tokens, set rollout.vllm.sleep = "
            "true, or change rollout.vllm.memory_fraction: lower where the GPU is full, higher where the engine lacks room"
        )
    return 'if vLLM cannot run this model, use rollout.engine = "transformers"'
