"""Weights that are handed to another engine have the names and values of a checkpoint, whatever the model keeps stacked."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, OlmoeConfig, Qwen3MoeConfig

from gspo.rollout.vllm import checkpoint_weights
from gspo.training.policy import Policy

SHAPE = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "num_experts_per_tok": 2,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
MIXTURES = [
    MixtralConfig(**SHAPE, num_local_experts=4),
    OlmoeConfig(**SHAPE, num_experts=4),
    Qwen3MoeConfig(**SHAPE, num_experts=4, moe_intermediate_size=16, head_dim=16),
    DeepseekV3Config(
        **SHAPE, **LATENT, n_routed_experts=4, n_group=2, topk_group=1, moe_intermediate_size=16, first_k_dense_replace=1
    ),
]


@pytest.mark.parametrize("shape", MIXTURES, ids=lambda shape: shape.model_type)
def test_the_weights_of_a_mixture_of_experts_are_those_of_its_checkpoint(shape, tmp_path: Path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape)
    model.save_pretrained(tmp_path)
    saved = {name: x for file in tmp_path.glob("*.safetensors") for name, x in load_file(file).items()}
    policy = Policy(model, None, torch.device("cpu"), 1.0)
    given = dict(checkpoint_weights(policy))
    assert given.keys() == saved.keys()
    assert any(".experts.3." in name for name in given)  # one by one, as other engines read them
    assert all(torch.equal(given[name], saved[name]) for name in saved)
