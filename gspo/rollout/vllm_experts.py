"""Routed experts out of vLLM's outputs: those of 0.25, on a GPU (`python tests/vllm_gpu.py routed_experts replayed`). The
CPU build returns none; 0.32 is read as its source says, and has not been run.

vLLM's rows are [prompt + response tokens - 1, decoder layers, experts a token]; those of layers without experts are never
written.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..moe import RecordError, checked_rows
from ..training.policy import Policy
from .engine import EngineError, Request


class ExpertsOutput:
    """What vLLM is started with to return routed experts, and how they are read; where they are not wanted, nothing."""

    def __init__(self, policy: Policy, *, wanted: bool) -> None:
        self.routing = policy.routing if wanted else None
        self.num_layers = policy.model.config.num_hidden_layers
        self.start: dict[str, Any] = {} if self.routing is None else {"enable_return_routed_experts": True}
        """Arguments of vLLM. 0.25 serves them by its first model runner, as it does logits processors. 0.32 refuses them
        with that, and its second takes no processors of the kind that draws here: it then does not start, and says so."""

    def read(self, request: Request, output: Any) -> np.ndarray | None:
        """The experts of prompt and response but the last token, [tokens - 1, layers with experts, experts a token].

        Raises EngineError, by sample, for rows that are missing or cannot be its own.
        """
        if self.routing is None:
            return None
        response = output.outputs[0]
        rows = response.routed_experts
        if rows is None:
            raise EngineError(
                f"sample {request.id}: vLLM returned no routed experts: set rollout.routed_experts = false, or use "
                'rollout.engine = "transformers"'
            )
        if rows.ndim == 3 and rows.shape[1] == self.num_layers:
            rows = rows[:, list(self.routing.layers)]
        num_tokens, shape = len(request.prompt) + len(response.token_ids), (len(self.routing.layers), self.routing.top_k)
        try:
            return checked_rows(request.id, rows, num_tokens, shape, self.routing.num_experts)
        except RecordError as error:
            raise EngineError(str(error)) from error
