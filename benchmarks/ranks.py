"""The update on more and more GPUs of one host, the same batch on each number of them, as one table.

    python benchmarks/ranks.py 0.6B --ranks 1 2 4
    python benchmarks/ranks.py tiny --device cpu --dtype float32 --shrink 16 --ranks 1 2      # without GPUs

MODEL is one of Qwen3's shapes (random weights) or a folder. The work is that of benchmarks/update.py: 128 responses, 8 to a
prompt of 128 tokens, four optimizer steps, W1 or W2. Each number of ranks is started by torchrun; ranks share each
minibatch by tokens. Seconds are those of the slowest rank, medians of the repeats after two that are not counted. Ranks
must compute the same: the first update's gradient norm is printed, and one that is off by more than --tolerance ends with
code 1.

Not covered: several hosts, generation, checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from workload import (
    LENGTHS,
    SHAPES,
    Interval,
    as_sampled,
    best_rate,
    make_model,
    parsed,
    positive,
    recipe,
    response_lengths,
    trajectories,
)

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.02, "float16": 0.01}
"""Relative difference of the gradient norm: weights are the same, sums are not in the same order."""


def measure(args: argparse.Namespace) -> None:
    """One rank's life; the first one writes what was measured to args.json."""
    from gspo.config import ModelConfig
    from gspo.distributed import open_world
    from gspo.training.flops import FlopCounter
    from gspo.training.optimizer import Optimizer
    from gspo.training.policy import load_policy, shard
    from gspo.training.update import Skips, pack_minibatches, update

    with open_world(args.device) as world:
        torch.set_num_threads(1)
        chosen = ModelConfig(path=args.model, device=args.device, dtype=args.dtype, kernels=args.kernels)
        policy = load_policy(chosen, temperature=1.0, seed=0)
        counter = FlopCounter(policy)
        wanted = response_lengths(args.lengths, args.responses, args.shrink)
        samples = trajectories(len(policy.head), wanted, prompt=max(1, args.prompt // args.shrink), group=8)
        samples = as_sampled(policy, samples, token_budget=args.micro)
        shard(policy, world)
        config = recipe(chosen, old_logprobs="engine", minibatches=args.minibatches, micro_tokens=args.micro)
        optimizer = Optimizer(policy.trainable, config.training, 10**6, policy.dtype)
        interval, rows, flops, norm = Interval(policy.device), [], 0.0, None
        print(f"rank {world.rank} of {world.size}: loaded", file=sys.stderr, flush=True)
        for k in range(2 + args.repeats):
            world.gather(None)  # start together
            interval.begin()
            parts = pack_minibatches(samples, config, seed=0, device=policy.device, world=world)
            updated = update(policy, optimizer, parts, config, Skips())
            row = interval.end()
            print(f"rank {world.rank} of {world.size}: update {k} took {row['seconds']:.2f} s", file=sys.stderr, flush=True)
            norm = updated.grad_norms[0] if norm is None else norm
            assert not any(bool(r.clipped_T.any()) for part in updated.ratios for r in part), (
                "ranks may leave out other work"
            )
            flops = sum(world.sums([3 * sum(counter.forward(m) for part in parts for m in part.micro_batches)]))
            every = world.gather(row)
            if k >= 2:
                rows.append({key: max(one[key] for one in every) for key in row})
        if world.is_main:
            Path(args.json).write_text(json.dumps({"rows": rows, "norm": norm, "flops": flops, "tokens": sum(wanted)}))


def started(args: argparse.Namespace, ranks: int, model: Path, folder: Path) -> dict[str, Any]:
    """What so many ranks measured, each a process of its own."""
    out = folder / f"{ranks}.json"
    names = ("lengths", "dtype", "device", "kernels", "micro", "repeats", "responses", "prompt", "minibatches", "shrink")
    words = [str(model), "--json", str(out), *(w for n in names for w in (f"--{n}", str(getattr(args, n))))]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    if ranks == 1:
        launch = [sys.executable]
    subprocess.run([*launch, __file__, *words, "--child"], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads(out.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"{', '.join(SHAPES)}, or a folder of a language model")
    parser.add_argument("--ranks", nargs="+", type=positive, default=[1, 2, 4])
    parser.add_argument("--lengths", choices=LENGTHS, default="W1")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernels", choices=("auto", "torch", "liger", "compile"), default="auto")
    parser.add_argument("--micro", type=positive, default=18432, help="training.micro_batch_tokens")
    for name, value in {"repeats": 5, "responses": 128, "prompt": 128, "minibatches": 4, "shrink": 1}.items():
        parser.add_argument(f"--{name}", type=positive, default=value)
    parser.add_argument("--tolerance", type=float, help="of the gradient norm; by --dtype")
    parser.add_argument("--json", default="", help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parsed(parser)
    if args.child:
        measure(args)
        return 0
    bound = TOLERANCE[args.dtype] if args.tolerance is None else args.tolerance
    lines = [
        "| ranks | seconds: median (all) | times one | response tokens/s | utilisation | peak GiB a rank | gradient norm |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    off = False
    with tempfile.TemporaryDirectory() as name:
        model = Path(args.model)
        if args.model in SHAPES:
            model = make_model(Path(name, "model"), SHAPES[args.model], args.dtype, "cpu")
        rate, whence = best_rate(torch.device(args.device), args.dtype)
        measured = {n: started(args, n, model, Path(name)) for n in args.ranks}
    first = measured[args.ranks[0]]
    base = statistics.median(row["seconds"] for row in first["rows"])
    for n, found in measured.items():
        seconds = [row["seconds"] for row in found["rows"]]
        median, norm = statistics.median(seconds), found["norm"]
        off |= abs(norm / first["norm"] - 1) > bound
        told = f"{median:.3f} ({', '.join(f'{s:.3f}' for s in seconds)})"
        peak = max(row["peak_gib"] for row in found["rows"])
        share = found["flops"] / median / rate / n
        speed = f"{base / median:.2f} | {found['tokens'] / median:,.0f} | {share:.3f}"
        lines.append(f"| {n} | {told} | {speed} | {peak:.2f} | {norm:.6g} |")
    print(f"{args.model}, {args.lengths}, {args.dtype}, {args.micro} tokens a micro-batch; utilisation against {whence}\n")
    print("\n".join(lines))
    if off:
        print(f"the gradient norms differ by more than {bound:g}", file=sys.stderr)
    return int(off)


if __name__ == "__main__":
    sys.exit(main())
