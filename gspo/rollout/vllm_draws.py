"""Tokens drawn inside vLLM: a logits processor that leaves vLLM's argmax nothing to decide.

R rows of a decoding step, V vocabulary, N samples of a generate call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import SamplingConfig
from .engine import Request
from .sampling import draw, uniform


class Draws:
    """What one generate call draws: each sample's seed, and the log-probability of each of its tokens."""

    def begin(self, requests: Sequence[Request], sampling: SamplingConfig, device: torch.device) -> None:
        """Forget the call before. One place more than tokens: a step may be under way when a response has ended."""
        self.seeds_N, self.sampling = np.array([r.seed for r in requests], np.uint64), sampling
        self.drawn_N = np.array([r.drawn for r in requests])
        self.places = sampling.max_response_tokens + 1
        self.logps = torch.full((len(requests), self.places), torch.nan, device=device)
        self.one_launch = has_kernel(sampling, device)

    def mark(self, logits_RV: Tensor, sample_R: np.ndarray, token_R: np.ndarray) -> Tensor:
        """Draw token number token_R of the samples sample_R, and make each the argmax of its row, in place: [R, V].

        Log-probabilities are written down.
        """
        u_R = uniform(self.seeds_N[sample_R], self.drawn_N[sample_R] + token_R)
        at_R = sample_R * self.places + np.minimum(token_R, self.places - 1)
        if self.one_launch:
            return self._mark_in_one_launch(logits_RV, u_R, at_R)
        drawn_R, logp_R = draw(logits_RV, self.sampling, _sent(u_R, logits_RV.device))
        self.logps.view(-1)[_sent(at_R, logits_RV.device)] = logp_R
        return logits_RV.fill_(-torch.inf).scatter_(1, drawn_R[:, None], 0.0)

    def _mark_in_one_launch(self, logits_RV: Tensor, u_R: np.ndarray, at_R: np.ndarray) -> Tensor:
        """The same by a kernel, and one copy to the GPU: float64 holds places exactly too."""
        from .draw_kernel import mark_draws

        asked_R2 = np.empty((len(u_R), 2))
        asked_R2[:, 0], asked_R2[:, 1] = u_R, at_R
        mark_draws(logits_RV, _sent(asked_R2, logits_RV.device), self.logps, self.sampling.temperature)
        return logits_RV


def has_kernel(sampling: SamplingConfig, device: torch.device) -> bool:
    """Whether a kernel draws: on a GPU, from the whole softmax. A step of vLLM waits for the processor, which launches
    one kernel sooner than the many operations of `draw`."""
    return device.type == "cuda" and sampling.temperature > 0 and not sampling.truncated_support


def _sent(values: np.ndarray, device: torch.device) -> Tensor:
    """On the device, without waiting for it, so that the processor runs ahead of a GPU."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def draw_processor(draws: Draws) -> type:
    """A vLLM logits processor that draws, and makes the drawn token the one that vLLM takes."""
    from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality  # pyright: ignore[reportMissingImports]

    class DrawProcessor(LogitsProcessor):
        """Keeps which sample each row of vLLM's batch works on; a row's tokens so far are vLLM's own running list."""

        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            rows = vllm_config.scheduler_config.max_num_seqs
            self.samples = np.zeros(rows, np.int64)
            self.tokens: list[Any] = [None] * rows  # None where no sample is: it has no length, so such a row is no draw

        def is_argmax_invariant(self) -> bool:
            """No: it decides."""
            return False

        def update_state(self, batch_update: Any) -> None:
            """Follow the rows of the batch: removed, added, moved, in this order."""
            if batch_update is None:
                return
            samples, tokens = self.samples, self.tokens
            for row in batch_update.removed:
                tokens[row] = None
            for row, params, _, running in batch_update.added:
                samples[row], tokens[row] = params.extra_args["sample"], running
            for a, b, direction in batch_update.moved:
                samples[a], samples[b] = samples[b], samples[a]
                tokens[a], tokens[b] = tokens[b], tokens[a]
                if direction != MoveDirectionality.SWAP:
                    tokens[a] = None

        def apply(self, logits: Tensor) -> Tensor:
            """[R, V] -> [R, V], largest at the drawn tokens."""
            rows = len(logits)
            token_R = np.fromiter(map(len, self.tokens[:rows]), np.int64, rows)
            return draws.mark(logits, self.samples[:rows], token_R)

    return DrawProcessor
