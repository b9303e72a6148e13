"""The probe: after each load the engine's log-probabilities are held against the trainer's, before a sample is used.

An engine can take weights without an error and be wrong: an update ignored, a tied matrix left stale, experts in another
order. On a few fixed tokens (the beginnings of the first prompts, scored) and a few fresh ones (sampled after them, with
the caches that sampling uses), both sides must agree to their precision.
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

MOVED_SHARE = 0.5
"""Share of the fixed tokens that must have changed for the trainer before an engine that changed at none is suspected: a
bfloat16 weight that moved by one rounding can show on one side alone."""


class ProbeError(TrainingError):
    """Engine and trainer do not have the same weights; both numbers are in the message."""


class Probe:
    """Compares an engine with its policy; remembers what both said after the load before."""

    def __init__(self, policy: Policy, prompts: Sequence[Prompt], sampling: SamplingConfig, *, tolerance: float) -> None:
        """prompts: whose first tokens are the fixed ones. sampling: the rollout's temperature and limit are taken."""
        self.policy, self.tolerance = policy, tolerance
        self.fixed = [p.token_ids[:PROMPT_TOKENS] for p in prompts[:NUM_PROMPTS]]
        limit = min(FRESH_TOKENS, sampling.max_response_tokens)
        self.sampling = SamplingConfig(temperature=sampling.temperature, max_response_tokens=limit)
        self._before: tuple[np.ndarray, np.ndarray] | None = None

    def __call__(self, engine: Engine) -> float:
        """Mean |log p(engine) - log p(trainer)| over the tokens, nats. Raises ProbeError above the tolerance.

        Raises it too where the trainer's log-probabilities moved since the last load and the engine's did not at all: in
        bfloat16 an ignored update of 1e-6 is far below any tolerance.
        """
        fixed_engine, fixed_trainer = self._fixed(engine)
        fresh_engine, fresh_trainer = self._fresh(engine)
        both = np.concatenate([fixed_engine, fresh_engine]), np.concatenate([fixed_trainer, fresh_trainer])
        difference = float(np.abs(both[0] - both[1]).mean())
        if not difference <= self.tolerance:
            raise ProbeError(
                f"after loading weights of version {engine.version} the engine does not have the trainer's: mean "
                f"log-probability of {len(both[0])} tokens {both[0].mean():.4f} by the engine, {both[1].mean():.4f} by the "
                f"trainer, mean absolute difference {difference:.2g} nats a token, tolerance {self.tolerance:g}; "
                'no sample was used; try rollout.engine = "transformers"'
            )
        self._require_moved(engine, fixed_engine, fixed_trainer)
        self._before = (fixed_engine, fixed_trainer)
        return difference

    def _require_moved(self, engine: Engine, by_engine: np.ndarray, by_trainer: np.ndarray) -> None:
        if self._before is None or not len(by_engine):
            return
        old_engine, old_trainer = self._before
        moved = by_trainer != old_trainer
        if moved.mean() > MOVED_SHARE and np.array_equal(by_engine, old_engine):
            raise ProbeError(
                f"the engine ignored the weights of version {engine.version}: since the load before, the trainer's "
                f"log-probabilities of the fixed tokens moved by up to {np.abs(by_trainer - old_trainer).max():.2g} nats, "
                f'the engine\'s by 0; no sample was used; try rollout.engine = "transformers"'
            )

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
