"""What a rollout engine is: token ids in, sampled token ids and their log-probabilities out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


class Engine(Protocol):
    """Samples from a policy."""

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig, progress: Progress = ...) -> list[Completion]:
        """One completion a request, in their order. A request's tokens depend on its seed, not on its neighbours.

        Log-probabilities are float32, of the distribution sampled from, at the temperature. Raises EngineError naming
        the sample whose logits are not finite.
        """
        ...

    def load(self, policy: Any) -> None:
        """Take up the policy's weights and version as they are now."""
        ...


class EngineError(Exception):
    """An engine that cannot go on; the message names the sample."""


def sample_seed(run_seed: int, step: int, prompt_id: str, index: int) -> int:
    """The 64-bit seed of one sample: a hash of (run, step, prompt, sample)."""
    text = f"{run_seed}/{step}/{prompt_id}/{index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
