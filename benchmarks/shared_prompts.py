"""The update with and without shared prompts: `python benchmarks/shared_prompts.py MODEL [--prompts 128 1024 4096]`.

MODEL is one of Qwen3's shapes (0.6B, 1.7B, 4B, or tiny; random weights) or a folder.

So many groups of eight responses of 512 tokens that each row has about 65,536 tokens without sharing; one minibatch, the
groups whole in it, unless --minibatches and --groups say otherwise: dealt sample by sample (training.groups = "spread") a
group shares what meets. Both updates are of the same model, and take turns; without sharing every sample is a group of its
own, which changes nothing else. Medians; peak memory is that of the update beyond what was held before.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from workload import SHAPES, make_model, parsed, positive

from gspo.config import Config, ModelConfig
from gspo.training.optimizer import Optimizer
from gspo.training.policy import Policy, load_policy
from gspo.training.update import Skips, pack_minibatches, update
from gspo.types import Trajectory

GROUP = 8


def groups(vocabulary: int, prompt: int, response: int, tokens: int) -> list[Trajectory]:
    """Groups of random tokens, with advantages of both signs."""
    rng, out = np.random.default_rng(0), []
    for g in range(max(1, round(tokens / (GROUP * (prompt + response))))):
        shared = rng.integers(0, vocabulary, prompt)
        for k in range(GROUP):
            ids = np.concatenate([shared, rng.integers(0, vocabulary, response)])
            trained, logp = np.arange(len(ids)) >= prompt, np.full(response, -np.log(vocabulary), np.float32)
            out.append(Trajectory(f"{g}/{k}", str(g), ids, trained, logp, (-1.0) ** k))
    return out


def recipe(model: ModelConfig, prompt: int, args: argparse.Namespace) -> Config:
    """Of a prompt's tokens, and the rest as the command line says; with the engine's old log-probabilities."""
    return Config.model_validate(
        {
            "name": "bench",
            "model": model.model_dump(),
            "data": {"source": "reasoning_gym", "task": "chain_sum", "size": 8, "template": "{expression}"},
            "rewards": [{"type": "exact"}],
            "rollout": {"max_prompt_tokens": prompt, "max_response_tokens": args.response, "old_logprobs": "engine"},
            "training": {
                "steps": 8,
                "minibatches": args.minibatches,
                "groups": args.groups,
                "micro_batch_tokens": args.micro,
            },
        }
    )


def once(policy: Policy, optimizer: Optimizer, config: Config, samples: list[Trajectory]) -> tuple[float, float, int]:
    """Seconds of one update, peak GiB beyond what was held, tokens through the model."""
    parts: Any = pack_minibatches(samples, config, seed=0, device=policy.device)
    on_gpu = policy.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    held, start = torch.cuda.memory_allocated() if on_gpu else 0, time.perf_counter()
    update(policy, optimizer, parts, config, Skips())
    if on_gpu:
        torch.cuda.synchronize()
    took = time.perf_counter() - start
    peak = (torch.cuda.max_memory_allocated() - held) / 2**30 if on_gpu else float("nan")
    return took, peak, sum(m.num_tokens for part in parts for m in part.micro_batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"{', '.join(SHAPES)}, or a folder of a language model")
    parser.add_argument("--prompts", type=positive, nargs="+", default=[128, 1024, 4096], help="tokens of a prompt")
    parser.add_argument("--response", type=positive, default=512, help="tokens of a response")
    parser.add_argument("--tokens", type=positive, default=65536, help="tokens of a row without sharing, about")
    parser.add_argument("--micro", type=positive, default=18432, help="training.micro_batch_tokens, without sharing")
    parser.add_argument("--minibatches", type=positive, default=1, help="training.minibatches")
    parser.add_argument("--groups", choices=("keep", "spread"), default="keep", help="training.groups")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    args = parsed(parser)
    if args.micro < (longest := max(args.prompts) + args.response):
        parser.error(f"--micro {args.micro}: a sequence of {longest} tokens does not fit")
    with tempfile.TemporaryDirectory() as name:
        made = args.model in SHAPES
        path = make_model(Path(name), SHAPES[args.model], args.dtype, "cpu") if made else args.model
        model = ModelConfig(path=str(path), dtype=args.dtype)
        policy = load_policy(model, temperature=1.0, seed=0)
    print("| prompt tokens | tokens apart | shared | s apart | shared | times faster | peak GiB apart | shared |")
    print("|---|---|---|---|---|---|---|---|")
    for prompt in args.prompts:
        config = recipe(model, prompt, args)
        optimizer = Optimizer(policy.trainable, config.training, 100)
        shared = groups(len(policy.head), prompt, args.response, args.tokens)
        apart = [replace(t, group=t.id) for t in shared]
        for _ in range(2):  # warm up
            once(policy, optimizer, config, apart), once(policy, optimizer, config, shared)
        pairs = [[once(policy, optimizer, config, some) for some in (apart, shared)] for _ in range(3)]
        (s1, peak1, n1), (s2, peak2, n2) = (
            (statistics.median(r[0] for r in runs), runs[0][1], runs[0][2]) for runs in zip(*pairs, strict=True)
        )
        print(f"| {prompt} | {n1} | {n2} | {s1:.3f} | {s2:.3f} | {s1 / s2:.2f} | {peak1:.2f} | {peak2:.2f} |", flush=True)


if __name__ == "__main__":
    main()
