"""transformers' own continuous batching with a length for each request, which `generate_batch` cannot be given."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import GenerationConfig


def generate_batch(
    model: Any,
    prompt_ids: list[list[int]],
    lengths: np.ndarray,
    *,
    generation_config: GenerationConfig,
    continuous_batching_config: Any = None,
    progress_bar: bool = False,
) -> dict[str, Any]:
    """transformers' `generate_batch` with a length for each request; results in the order of the prompts."""
    from transformers.generation.continuous_batching.utils import WorkloadHints

    hints = WorkloadHints(
        max_prompt_length=max(map(len, prompt_ids)), max_generated_length=int(lengths.max()), num_requests=len(prompt_ids)
    )
    results: dict[str, Any] = {}
    with model.continuous_batching_context_manager(
        generation_config=generation_config,
        continuous_batching_config=continuous_batching_config,
        block=True,
        timeout=5,
        workload_hints=hints,
    ) as manager:
        names = [
            manager.add_request(list(ids), max_new_tokens=int(n), eos_token_id=-1)
            for ids, n in zip(prompt_ids, lengths, strict=True)
        ]
        while len(results) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                results[result.request_id] = result
            elif result is None and not manager.is_running():
                raise RuntimeError("continuous batching stopped before it had finished")
    return {name: results[name] for name in names}
