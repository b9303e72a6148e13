"""What a rollout engine is: token ids in, sampled token ids and their log-probabilities out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..config import SamplingConfig
from ..types import Completion

Progress = Callable[[int], None]
"""Called with the number of responses that have just finished."""


@dataclass(frozen=True, slots=True)
class Request:
    """One response to sample."""

    id: str
    """The sample's id; errors name it."""
    prompt: tuple[int, ...]
    """Token ids of the prompt."""
    seed: int
    """Seed of this sample's own random stream, 64 bits."""
    limit: int | None = None
    """Tokens to sample at most, where that is fewer than the sampling's max_response_tokens; at least 1."""
    drawn: int = 0
    """Tokens of this response that were sampled before and end the prompt: its random numbers go on behind theirs."""


class Engine(Protocol):
    """Samples from a policy."""

    copies_weights: bool
    """Whether it has weights of its own, which a load can leave wrong: the probe then compares after each."""
    version: int
    """Number of weight updates that its weights have seen; stamped on every sample."""

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig, progress: Progress = ...) -> list[Completion]:
        """One completion a request, in their order. A request's tokens depend on its seed, not on its neighbours.

        Log-probabilities are float32, of the distribution sampled from, at the temperature. Raises EngineError naming
        the sample whose logits are not finite.
        """
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """log p of each token but the first of each sequence, given those before it, at temperature 1: float32 [N - 1]."""
        ...

    def load(self, policy: Any) -> None:
        """Take up the policy's weights and version as they are now; nothing computed under the old ones is used again."""
        ...

    def rest(self) -> None:
        """Until the next `load` nothing will be asked: memory may go back to the trainer."""
        ...

    def close(self) -> None:
        """Give everything back: memory, processes, sockets, files."""
        ...


class EngineError(Exception):
    """An engine that cannot go on; the message names the sample."""


def most_tokens(request: Request, sampling: SamplingConfig) -> int:
    """Tokens of the response at most."""
    most = sampling.max_response_tokens
    return most if request.limit is None else min(request.limit, most)


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a sample's turn, counted from 0: the first has the sample's own, each later one a hash of it and turn."""
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/turn {turn}".encode(), digest_size=8).digest(), "little")


def sample_seed(run_seed: int, step: int, prompt_id: str, index: int) -> int:
    """The 64-bit seed of one sample: a hash of (run, step, prompt, sample)."""
    text = f"{run_seed}/{step}/{prompt_id}/{index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
