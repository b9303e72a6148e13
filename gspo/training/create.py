"""A small model made on the spot, so that a recipe needs no download."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ..chat import character_tokenizer
from ..config import CreateConfig


def create(config: CreateConfig) -> tuple[Any, Any]:
    """A small Qwen3 or Qwen3-MoE decoder with random weights, and a tokenizer with one token a character."""
    tokenizer = character_tokenizer(config.alphabet)
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.hidden_size // config.num_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if config.num_experts is None:
        return Qwen3ForCausalLM(Qwen3Config(**common)), tokenizer
    common |= {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.moe_intermediate_size,
        "norm_topk_prob": True,  # as in Qwen3's own
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common)), tokenizer
