"""Rewards: verifiers of responses, built from the recipe and run on samples.

A reward is a callable `(samples, **parameters) -> one number, Score or None for each sample`, sync or async. A new
built-in one is a function from its configuration to a `Verifier`, and a line in `registry.BUILDERS`.
"""

from .registry import BUILDERS, build, gold_checks, notes
from .scoring import score
from .verifier import Built, RewardError, Verifier

__all__ = ["BUILDERS", "Built", "RewardError", "Verifier", "build", "gold_checks", "notes", "score"]
