"""Peak memory does not grow with the vocabulary, beyond the weights and one chunk."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import sys
import numpy as np, torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from gspo.config import SamplingConfig
from gspo.rollout.engine import Request
from gspo.rollout.transformers import TransformersEngine
from gspo.training.attention import NAME
from gspo.training.packing import make_micro_batches
from gspo.training.policy import Policy
from gspo.types import Trajectory

torch.set_num_threads(1)
vocabulary = int(sys.argv[1])
def peak():  # of this process; getrusage would count what the parent had before
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
shape = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
             head_dim=32, tie_word_embeddings=True)
model = Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, **shape)).eval()
model.set_attn_implementation(NAME)
for p in model.parameters(): p.grad = torch.zeros_like(p)
policy = Policy(model, None, torch.device("cpu"), 1.0, eos_ids=frozenset([0]))
engine = TransformersEngine(policy, max_rows=256)
def step(rows, tokens):
    requests = [Request(str(i), (5, 6, 7, i % 9), i) for i in range(rows)]
    done = engine.generate(requests, SamplingConfig(max_response_tokens=tokens))
    batch = []
    for r, c in zip(requests, done):
        ids = np.concatenate([np.array(r.prompt), c.token_ids])
        batch.append(Trajectory(r.id, "g", ids, np.arange(len(ids)) >= 4, c.logprobs, 1.0))
    for micro in make_micro_batches(batch, token_budget=100_000):
        policy.score(micro)[0].sum().backward()
step(2, 1)
before = peak()
step(256, 6)
print(peak() - before)
"""


def growth_mib(*vocabularies: int) -> list[float]:
    """MiB that sampling 256 rows of 6 tokens, scoring and backward add to the weights and their gradients."""
    returns = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back at once: no luck in the peak
    words = [[sys.executable, "-c", CODE, str(vocabulary)] for vocabulary in vocabularies]
    children = [subprocess.Popen(w, stdout=subprocess.PIPE, text=True, env=returns) for w in words]
    said = [child.communicate()[0] for child in children]
    assert not any(child.returncode for child in children)
    return [float(text) for text in said]


def test_a_whole_step_needs_the_same_memory_at_8_000_and_152_000():
    small, large = growth_mib(8_000, 152_000)
    weights = (152_000 - 8_000) * 64 * 4 / 2**20  # backward holds one gradient of the output matrix beside the sum
    full = 256 * 6 * 152_000 * 4 / 2**20  # [tokens, vocabulary] would take 891 MiB, once
    assert large < small + weights, f"{small:.0f} MiB at 8,000 and {large:.0f} MiB at 152,000"
    assert large < full / 5
