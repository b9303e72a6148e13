"""The update alone, on rollouts that are made up: seconds, model FLOP utilisation and peak memory by kernels and lengths.

    python benchmarks/update.py MODEL [--lengths W1 W2] [--kernels torch liger compile] [--profile FOLDER]

128 responses to prompts of 128 tokens, four optimizer steps, micro-batches of so many tokens. W1: every response has 1,024
tokens. W2: lengths drawn once from a log-normal distribution cut to 64 and 2,048, mean about 450. Each row is a process of
its own; medians of three updates after two to warm up. Utilisation counts the output matrix and attention, as
docs/metrics.md says, against 989 TFLOP/s, an H100's and H200's dense bfloat16 rate on its data sheet.

Not covered: generation, several GPUs, rollouts whose sequences are clipped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

PROMPT, ROWS, MINIBATCHES = 128, 128, 4
DATA_SHEET = 989e12
KERNELS = ("torch", "liger", "compile")


def response_lengths(name: str) -> list[int]:
    """Tokens of each response."""
    import numpy as np

    if name == "W1":
        return [1024] * ROWS
    drawn = np.random.default_rng(0).lognormal(5.65, 1.0, ROWS).astype(int).clip(64, 2048)
    return [int(n) for n in drawn]


def trajectories(vocabulary: int, lengths: list[int]) -> list[Any]:
    """Random tokens with advantages of both signs."""
    import numpy as np

    from gspo.types import Trajectory

    rng = np.random.default_rng(1)
    out = []
    for i, n in enumerate(lengths):
        tokens = rng.integers(0, vocabulary, PROMPT + n)
        trained = np.arange(PROMPT + n) >= PROMPT
        out.append(Trajectory(f"{i // 8}/{i}", f"{i // 8}", tokens, trained, np.zeros(n, np.float32), (-1.0) ** i))
    return out


def measure(model: str, kernels: str, lengths: str, micro: int, head: str, dtype: str, profile: str) -> dict[str, float]:
    """One row, in this process."""
    import torch

    from gspo.config import Config, ModelConfig
    from gspo.training.flops import FlopCounter
    from gspo.training.optimizer import Optimizer
    from gspo.training.policy import load_policy
    from gspo.training.scoring import score_trajectories
    from gspo.training.update import Skips, pack_minibatches, update

    chosen = ModelConfig(path=model, dtype=dtype, head_dtype=head, kernels=kernels)  # type: ignore[arg-type]
    start = time.perf_counter()
    policy = load_policy(chosen, temperature=1.0, seed=0)
    config = Config.model_validate(
        {
            "name": "bench",
            "model": chosen.model_dump(),
            "data": {"source": "reasoning_gym", "task": "chain_sum", "size": 8, "template": "{expression}"},
            "rewards": [{"type": "exact"}],
            "rollout": {"old_logprobs": "engine", "max_prompt_tokens": PROMPT, "max_response_tokens": 2048},
            "training": {"steps": 8, "minibatches": MINIBATCHES, "micro_batch_tokens": micro},
        }
    )  # fmt: skip
    made = trajectories(len(policy.head), response_lengths(lengths))
    old = score_trajectories(policy, made, token_budget=micro)
    made = [replace(t, engine_logprobs=old[t.id]) for t in made]
    optimizer = Optimizer(policy.trainable, config.training, 40)
    parts = pack_minibatches(made, config, seed=0, device=policy.device)
    flops = 3 * sum(FlopCounter(policy).forward(m) for part in parts for m in part.micro_batches)

    def once() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        update(policy, optimizer, parts, config, Skips())
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    warm = [once(), once()]
    ready = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    took = statistics.median(once() for _ in range(3))
    tokens = sum(m.num_tokens for part in parts for m in part.micro_batches)
    if profile:
        write_profile(once, Path(profile) / f"{kernels}-{lengths}.txt")
    return {
        "update_s": round(took, 3),
        "tokens_per_s": round(tokens / took),
        "utilisation": round(flops / took / DATA_SHEET, 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "held_gib": round(held / 2**30, 2),
        "first_s": round(warm[0], 2),
        "ready_s": round(ready, 1),
    }


def write_profile(work: Any, path: Path) -> None:
    """What one call does on the GPU, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        work()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(trace.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a language model; weights may be random")
    parser.add_argument("--lengths", nargs="+", choices=("W1", "W2"), default=("W1", "W2"))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--micro", type=int, default=18432, help="training.micro_batch_tokens")
    parser.add_argument("--head", choices=("same", "float32"), default="same")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--profile", default="", help="folder for a table of the GPU's kernels")
    parser.add_argument("--here", action="store_true", help="the one row in this process (used by the script itself)")
    args = parser.parse_args()
    if args.here:
        row = measure(args.model, args.kernels[0], args.lengths[0], args.micro, args.head, args.dtype, args.profile)
        print("RESULT " + json.dumps(row), flush=True)
        return
    more = ["--micro", str(args.micro), "--head", args.head, "--dtype", args.dtype, "--profile", args.profile, "--here"]
    for lengths in args.lengths:
        for kernels in args.kernels:
            words = [sys.executable, __file__, args.model, "--lengths", lengths, "--kernels", kernels, *more]
            done = subprocess.run(words, capture_output=True, text=True)
            found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            told = found[0].removeprefix("RESULT ") if found else f"failed: {done.stderr[-1500:]}"
            print(lengths, kernels, args.micro, told, flush=True)


if __name__ == "__main__":
    main()
