"""A mixture of experts out of a dense model of Llama's kind, for experiments on mixtures that already know a language.

    python experiments/upcycle.py HuggingFaceTB/SmolLM2-135M-Instruct FOLDER

Sparse upcycling (Komatsuzaki et al., arXiv:2212.05055): every expert is the model's own MLP, the router is random. Mixtral
weighs its chosen experts to a sum of 1, so that without noise the mixture would compute what the dense model does whatever
the router chose. Each expert therefore gets noise of its own: which ones a token meets then matters.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

EXPERTS, TOP_K = 4, 2
NOISE = 0.05
"""Standard deviation of the noise over that of the matrix it is added to. Of SmolLM2-135M, which gets 0.21 of products
right, 0.1 leaves 0.06 and 0.3 nothing; at 0.05 another second expert for 1% of the choices moves the log-probability of a
token by 0.009 in the mean, thirty times gspo's clip range."""
ROUTER = 0.05
"""Standard deviation of the router's weights."""
SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
"""What the mixture's configuration takes from the dense model's."""


@torch.no_grad()
def upcycle(dense: str, folder: Path, *, noise: float = NOISE, seed: int = 0) -> Path:
    """Write the mixture of a model to a folder, in the model's own precision, unless it is there. Gives the folder."""
    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(dense, dtype="auto")
    own = {key: getattr(model.config, key) for key in SHARED}
    config = MixtralConfig(**own, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K, sliding_window=None)
    mixture = MixtralForCausalLM(config).to(model.dtype)
    differ = mixture.load_state_dict(model.state_dict(), strict=False)
    if left := [name for names in differ for name in names if ".mlp." not in name]:
        raise SystemExit(f"{dense}: not a model of Llama's kind: {left[0]} is in one of the two models alone")
    for old, new in zip(model.model.layers, mixture.model.layers, strict=True):
        torch.nn.init.normal_(new.mlp.gate.weight, std=ROUTER)
        gate_up = torch.cat([old.mlp.gate_proj.weight, old.mlp.up_proj.weight])
        experts = new.mlp.experts
        for stacked, weight in ((experts.gate_up_proj, gate_up), (experts.down_proj, old.mlp.down_proj.weight)):
            for expert in stacked.data:
                expert.copy_(weight + noise * weight.std() * torch.randn_like(weight))
    mixture.save_pretrained(folder)
    AutoTokenizer.from_pretrained(dense).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense", help="folder or hub name of the model")
    parser.add_argument("folder", type=Path, help="of the mixture")
    parser.add_argument("--noise", type=float, default=NOISE)
    args = parser.parse_args()
    print(upcycle(args.dense, args.folder, noise=args.noise))
