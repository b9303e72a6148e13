"""What several tests share: a tiny model, trajectories made of its own samples, and a recipe that trains in seconds."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from side_by_side import (  # hooks
    pytest_runtest_protocol,  # noqa: F401
    pytest_xdist_auto_num_workers,  # noqa: F401
    pytest_xdist_make_scheduler,  # noqa: F401
)

from gspo.config import Config, CreateConfig, ModelConfig, SamplingConfig
from gspo.recipe import build
from gspo.rollout.engine import Request
from gspo.rollout.transformers import TransformersEngine
from gspo.training.optimizer import Optimizer
from gspo.training.policy import Policy, load_policy
from gspo.types import Trajectory

ALPHABET = "0123456789+-= "

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
sys.path.append(BENCHMARKS)
sys.path.append(str(Path(__file__).parents[1] / "experiments"))


def tiny_model(dtype: str = "float32", **shape: Any) -> ModelConfig:
    """A Qwen3 of two layers."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2} | shape
    return ModelConfig(create=CreateConfig(alphabet=ALPHABET, **sizes), dtype=dtype)  # type: ignore[arg-type]


def tiny_policy(dtype: str = "float32", *, temperature: float = 1.0, **shape: Any) -> Policy:
    return load_policy(tiny_model(dtype, **shape), temperature=temperature, seed=0)


def sampled(policy: Policy, lengths: list[int], *, groups: int = 2, seed: int = 0, limit: int = 12) -> list[Trajectory]:
    """One trajectory for each prompt length, sampled from the policy itself, with random advantages."""
    rng = np.random.default_rng(seed)
    prompts = [tuple(int(x) for x in rng.integers(2, len(ALPHABET) + 2, n)) for n in lengths]
    requests = [Request(f"s0/p{i % groups}/{i}", p, 1000 + i) for i, p in enumerate(prompts)]
    engine = TransformersEngine(policy, max_rows=64)
    completions = engine.generate(requests, SamplingConfig(max_response_tokens=limit, temperature=policy.temperature))
    out = []
    for request, completion in zip(requests, completions, strict=True):
        tokens = np.concatenate([np.array(request.prompt), completion.token_ids])
        trained = np.arange(len(tokens)) >= len(request.prompt)
        group = request.id.split("/")[1]
        out.append(Trajectory(request.id, group, tokens, trained, completion.logprobs, float(rng.normal())))
    return out


def moments(optimizer: Optimizer) -> list[torch.Tensor]:
    """All that AdamW remembers, its numbers of steps included."""
    return [x for state in optimizer.adamw.state.values() for x in state.values()]


def group_of(rng: np.random.Generator, group: str, prompt: int, responses: list[int]) -> list[Trajectory]:
    """Trajectories of one group, with a shared prompt and responses of these lengths."""
    shared = rng.integers(2, 15, prompt)
    whole = [np.concatenate([shared, rng.integers(2, 15, n)]) for n in responses]
    return [
        Trajectory(f"{group}/{i}", group, tokens, np.arange(len(tokens)) >= prompt,
                   rng.normal(-2, 0.1, len(tokens) - prompt).astype(np.float32), float(rng.normal()))
        for i, tokens in enumerate(whole)
    ]  # fmt: skip


def plain_logprobs(policy: Policy, trajectory: Trajectory) -> torch.Tensor:
    """Log-probabilities of one trajectory by the model's own forward pass, alone and unpacked."""
    ids = torch.from_numpy(trajectory.token_ids)
    logits = policy.model(input_ids=ids[None], use_cache=False).logits[0, :-1].float() / policy.temperature
    logp = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return logp[torch.from_numpy(trajectory.trained[1:])]


def values(folder: Path, **changes: Any) -> dict[str, Any]:
    """The plain values of a recipe that trains a tiny model for three steps; dotted changes with __ for dots."""
    source = {
        "source": "reasoning_gym",
        "task": "chain_sum",
        "size": 64,
        "template": "{expression}=",
        "format": "text",
        "parameters": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    }
    recipe: dict[str, Any] = {
        "name": "tiny",
        "output": str(folder),
        "model": tiny_model().model_dump(),
        "data": source | {"seed": 1},
        "rewards": [{"type": "function", "function": f"{Path(__file__).parent / 'rewards_for_tests.py'}:even_sum"}],
        "rollout": {
            "prompts_per_step": 4, "group_size": 4, "max_prompt_tokens": 12, "max_response_tokens": 6,
        },
        "training": {"steps": 3, "minibatches": 2, "micro_batch_tokens": 64, "learning_rate": 1e-3},
        "checkpoint": {"every": 1, "keep": 2},
    }  # fmt: skip
    for key, value in changes.items():
        *tables, last = key.split("__")
        table = recipe
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = value
    return recipe


def tiny_config(folder: Path, **changes: Any) -> Config:
    return build(values(folder, **changes))


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)  # tiny models: a second thread only waits


@pytest.fixture
def interruptible():
    """What a shell starts in the background ignores SIGINT, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
