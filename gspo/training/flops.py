"""How much arithmetic a step needs, by counting, and the memory in use; the denominator of nothing is guessed.

Forward, per token: 2 x (weights of all matrices it meets) for the matrix products, and 4 x layers x heads x head size x
(places it attends to) for attention. Backward is twice the forward. The output matrix counts only for tokens whose
log-probability is needed. Norms, rotations and the softmax are left out: they are under a percent.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable

import torch

from ..moe import Routing
from .packing import MicroBatch
from .policy import Policy


class FlopCounter:
    """Counts of one model. Of stacked experts count as many as compute a token."""

    def __init__(self, policy: Policy) -> None:
        config = policy.model.config
        embedding = policy.model.get_input_embeddings().weight
        matrices = {id(p): p for p in policy.backbone.parameters() if p.ndim >= 2 and p is not embedding}
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.body = 2 * sum(_met(p, policy.routing) for p in matrices.values())
        self.head = 2 * policy.head.numel()
        self.attention = 4 * config.num_hidden_layers * config.num_attention_heads * head_dim

    def forward(self, batch: MicroBatch) -> float:
        """One forward pass of a micro-batch."""
        return batch.num_tokens * self.body + batch.layout.num_pairs * self.attention + len(batch.target_T) * self.head

    def generation(self, prompt_and_response: Iterable[tuple[int, int]]) -> float:
        """Sampling responses with a cache; a group's shared prompt is given once, as (prompt, 0)."""
        total = 0.0
        for prompt, response in prompt_and_response:
            end = prompt + response
            new = response if response else prompt
            places = end * (end + 1) / 2 - (prompt * (prompt + 1) / 2 if response else 0)
            total += new * self.body + places * self.attention + response * self.head
        return total


def _met(weight: torch.Tensor, routing: Routing | None) -> float:
    """How many of its numbers a token meets: of stacked experts those of the few that compute it."""
    if routing is None or weight.ndim != 3 or len(weight) != routing.num_experts:
        return weight.numel()
    return weight.numel() * routing.top_k / routing.num_experts


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product here: the best of five. Utilisation is measured against it, not a data sheet."""
    size = 8192 if device.type == "cuda" else 1024 if dtype == torch.float32 else 256  # 16 bits: 1e9 FLOP/s on most CPUs
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        _settle(device)
        start = time.perf_counter()
        torch.mm(a, b)
        _settle(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def peak_memory(device: torch.device) -> int:
    """Most memory in use so far, bytes: the GPU's, on a CPU the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
