"""The probe: after each load the engine's log-probabilities are held against the trainer's, before a sample is used.

An engine can take weights without an error and be wrong: an update ignored, a tied matrix left stale, experts in another
order. On a few fixed tokens (the beginnings of the first prompts, scored) and a few fresh ones (sampled after them as
samples are), both sides must agree to their precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..config import SamplingConfig
from ..training.packing import TrainingError
from ..training.policy import Policy
from ..training.scoring import score_ends
from ..types import Prompt
from .engine import Engine, Request, sample_seed

TOLERANCE = {"float32": 0.002, "float16": 0.05, "bfloat16": 0.25}
"""Largest mean |log p(engine) - log p(trainer)| a token, nats, by the coarser of the two precisions. Right weights were
seen at 1e-6 (a CPU), 0.005 and 0.04 on average over responses; fixed tokens are less likely ones, and noisier."""

NUM_PROMPTS, PROMPT_TOKENS, FRESH_TOKENS = 4, 64, 8
"""Enough for a mean, and a few milliseconds."""


class ProbeError(TrainingError):
    """Engine and trainer do not have the same weights; both numbers are in the message."""


class Probe:
    """Compares an engine with its policy."""

    def __init__(self, policy: Policy, prompts: Sequence[Prompt], sampling: SamplingConfig, *, tolerance: float) -> None:
        """prompts: whose first tokens are the fixed ones. sampling: the rollout's temperature and limit are taken."""
        self.policy, self.tolerance = policy, tolerance
        self.fixed = [p.token_ids[:PROMPT_TOKENS] for p in prompts[:NUM_PROMPTS]]
        limit = min(FRESH_TOKENS, sampling.max_response_tokens)
        self.sampling = SamplingConfig(temperature=sampling.temperature, max_response_tokens=limit)

    def __call__(self, engine: Engine) -> float:
        """Mean |log p(engine) - log p(trainer)| over the tokens, nats. Raises ProbeError above the tolerance.

        Not covered: an engine that keeps a part of the old weights after a small update can stay below the tolerance. An
        engine that can makes its old weights unusable before each load, as vLLM's does.
        """
        fixed, fresh = self._compare(engine, *self._fixed(engine)), self._compare(engine, *self._fresh(engine))
        return float(np.concatenate([fixed, fresh]).mean())

    def _compare(self, engine: Engine, by_engine: np.ndarray, by_trainer: np.ndarray) -> np.ndarray:
        """The absolute differences [tokens]."""
        difference = np.abs(by_engine - by_trainer)
        if len(difference) and not difference.mean() <= self.tolerance:
            raise ProbeError(
                f"after loading weights of version {engine.version} the engine does not have the trainer's: mean "
                f"log-probability of {len(difference)} tokens {by_engine.mean():.4f} by the engine, "
                f"{by_trainer.mean():.4f} by the trainer, mean absolute difference {difference.mean():.2g} nats a token, "
                f'tolerance {self.tolerance:g}; no sample was used; try rollout.engine = "transformers"'
            )
        return difference

    def _fixed(self, engine: Engine) -> tuple[np.ndarray, np.ndarray]:
        sequences = [tokens for tokens in self.fixed if len(tokens) > 1]
        if not sequences:
            return np.zeros(0, np.float32), np.zeros(0, np.float32)
        counts = [len(tokens) - 1 for tokens in sequences]
        by_trainer = score_ends(self.policy, sequences, counts, temperature=1.0)
        return np.concatenate(engine.score(sequences)), np.concatenate(by_trainer)

    def _fresh(self, engine: Engine) -> tuple[np.ndarray, np.ndarray]:
        requests = [
            Request(f"probe {i}", tokens, sample_seed(0, engine.version, "probe", i)) for i, tokens in enumerate(self.fixed)
        ]
        completions = engine.generate(requests, self.sampling)
        sequences = [[*r.prompt, *c.token_ids] for r, c in zip(requests, completions, strict=True)]
        counts = [len(c.token_ids) for c in completions]
        by_trainer = score_ends(self.policy, sequences, counts, temperature=self.sampling.temperature)
        return np.concatenate([c.logprobs for c in completions]), np.concatenate(by_trainer)
