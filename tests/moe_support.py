"""Tiny mixtures of experts of four families, with random weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import ALPHABET, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from gspo.chat import character_tokenizer
from gspo.config import ModelConfig, SamplingConfig
from gspo.rollout.engine import Request
from gspo.rollout.transformers import TransformersEngine
from gspo.training.policy import Policy, load_policy
from gspo.types import Trajectory

EXPERTS = {"num_experts": 8, "experts_per_token": 2, "moe_intermediate_size": 32, "num_layers": 3}
"""A Qwen3-MoE for `model.create`."""

COMMON = {
    "vocab_size": 20, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 8, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 8, "head_dim": 8},
    "olmoe": {"num_experts": 8},
    "deepseek_v3": {
        "n_routed_experts": 8, "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "n_shared_experts": 1, "num_key_value_heads": 4,
    },
}  # fmt: skip
ROUTED = FAMILIES | {"deepseek_v2": {k: v for k, v in FAMILIES["deepseek_v3"].items() if "group" not in k}}
"""With one more whose router alone is tested."""
LAYERS = dict.fromkeys(("deepseek_v2", "deepseek_v3"), (1, 2))
"""Layers with experts, where not all three have them."""


def family(name: str, **changes: Any) -> Any:
    """A model with routers that are not indifferent: their logits spread by about 1."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **COMMON | ROUTED.get(name, {}) | changes)).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "gate.weight" in key or "router.weight" in key:
                p.normal_(std=0.3)
    return model


def moe_policy(**settings: Any) -> Policy:
    """A Qwen3-MoE of three layers, with routers that are not indifferent."""
    policy = load_policy(tiny_model(**EXPERTS).model_copy(update=settings), temperature=1.0, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if name.endswith("gate.weight"):
                p.normal_(std=0.3, generator=generator)
    return policy


def family_policy(name: str, folder: Path, **settings: Any) -> Policy:
    """A model of a family read from its checkpoint in the folder, which is written if it is not there."""
    path = folder / name
    if not path.exists():
        model, tokenizer = family(name), character_tokenizer(ALPHABET)
        model.config.eos_token_id, model.config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return load_policy(ModelConfig(path=str(path), dtype="float32", **settings), temperature=1.0, seed=0)


def with_experts(policy: Policy, trajectories: list[Trajectory]) -> list[Trajectory]:
    """The same samples drawn again by the embedded engine, with the experts that it chose."""
    prompts = [tuple(t.token_ids[: int(t.trained.argmax())].tolist()) for t in trajectories]
    requests = [Request(t.id, p, 1000 + i) for i, (t, p) in enumerate(zip(trajectories, prompts, strict=True))]
    engine = TransformersEngine(policy, max_rows=4, routed_experts=True)
    again = engine.generate(requests, SamplingConfig(max_response_tokens=12))
    for t, c in zip(trajectories, again, strict=True):
        np.testing.assert_array_equal(t.token_ids[-len(c.token_ids) :], c.token_ids)
    return [replace(t, routed_experts=c.routed_experts) for t, c in zip(trajectories, again, strict=True)]


def experts_inputs(policy: Policy) -> list[tuple[int, torch.Tensor]]:
    """Filled as passes go: by call of a layer's experts, the layer's place and the ids [N, K] that they were given."""
    seen: list[tuple[int, torch.Tensor]] = []
    for layer, router in enumerate(policy.routing.routers):
        block = next(m for m in policy.model.modules() if getattr(m, "gate", None) is router)
        block.experts.register_forward_pre_hook(lambda module, args, layer=layer: seen.append((layer, args[1].clone())))
    return seen
