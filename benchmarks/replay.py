"""What it costs to replay expert choices, and which way of computing experts is fastest: milliseconds and bytes, as tables.

    python benchmarks/replay.py MODEL --tokens 8192

MODEL is a folder with a mixture of experts. One micro-batch of so many tokens, made of sequences of 512 random ones, goes
forward, and forward and backward, as the update does it; the median of --repeats is told, after one pass that is not
counted. The ways take turns within a repeat. Numerics are compared too: the log-probabilities of each way with those of
experts computed one after the other ("eager").

Not covered: several devices, compiled layers, real text (random tokens may load experts more evenly).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from gspo.config import ModelConfig
from gspo.moe import Record, packed_ids
from gspo.training.packing import MicroBatch, make_micro_batches
from gspo.training.policy import Policy, load_policy
from gspo.types import Trajectory

LENGTH = 512


def micro_batch(policy: Policy, num_tokens: int) -> MicroBatch:
    """One micro-batch of this many tokens."""
    rng = np.random.default_rng(0)
    length = min(LENGTH, num_tokens)
    trajectories = [
        Trajectory(
            id=f"s1/p{i}/0",
            group=f"p{i}",
            token_ids=rng.integers(0, len(policy.head), length + 1),
            trained=np.arange(length + 1) > length // 4,
            engine_logprobs=np.zeros(length - length // 4, np.float32),
            advantage=1.0,
        )
        for i in range(num_tokens // length)
    ]
    (micro,) = make_micro_batches(trajectories, token_budget=2 * num_tokens, device=policy.device)
    return micro


def seconds(policy: Policy, work: Callable[[], object]) -> float:
    """Of a call, until the device is done."""
    wait = torch.cuda.synchronize if policy.device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def passes(policy: Policy, micro: MicroBatch) -> dict[str, Callable[[], object]]:
    """A pass without and with gradients."""

    def forward() -> None:
        with torch.no_grad():
            policy.score(micro)

    def both() -> None:
        policy.score(micro)[0].sum().backward()

    return {"forward": forward, "forward and backward": both}


def medians(
    policy: Policy, micro: MicroBatch, ways: dict[str, Callable[[], object]], repeats: int
) -> dict[str, list[float]]:
    """By way the median milliseconds of each kind of pass; ways take turns. A way's call sets it up."""
    taken: dict[tuple[str, str], list[float]] = {}
    for _ in range(repeats + 1):
        for way, choose in ways.items():
            choose()
            for kind, work in passes(policy, micro).items():
                taken.setdefault((way, kind), []).append(seconds(policy, work))
    kinds = list(passes(policy, micro))
    return {way: [1e3 * statistics.median(taken[way, kind][1:]) for kind in kinds] for way in ways}


def replaying(policy: Policy, micro: MicroBatch, repeats: int) -> None:
    """The table of replay."""
    routing = policy.routing
    assert routing is not None
    with torch.no_grad():
        policy.score(micro)
    record: list[np.ndarray] = []

    def keep() -> None:
        record[:] = [routing.chosen().cpu().numpy()]

    def give() -> None:
        records = [Record(record[0], place) for place in micro.places]
        routing.replay(torch.from_numpy(packed_ids(records, micro.places, micro.num_tokens)).to(policy.device))

    keep_s, give_s = (statistics.median(seconds(policy, work) for _ in range(repeats)) for work in (keep, give))
    found = medians(policy, micro, {"live": lambda: routing.replay(None), "replayed": give}, repeats)
    routing.replay(None)
    print(f"| {micro.num_tokens} tokens, {len(routing.layers)} layers, {routing.top_k} of {routing.num_experts} | ms |")
    print("|---|---|")
    for way, (forward, both) in found.items():
        print(f"| choices {way}: forward | {forward:.0f} |\n| choices {way}: forward and backward | {both:.0f} |")
    print(f"| keeping the record | {1e3 * keep_s:.2f} |\n| giving it to the routers | {1e3 * give_s:.2f} |")
    print(f"\nthe record: {record[0].nbytes} bytes, {record[0].nbytes / micro.num_tokens:.0f} a token\n")


def experts(policy: Policy, micro: MicroBatch, repeats: int) -> None:
    """The table of ways to compute experts."""
    ways = ("eager", "grouped_mm", "batched_mm")
    logps: dict[str, torch.Tensor] = {}
    for way in ways:
        policy.model.set_experts_implementation(way)
        try:
            with torch.no_grad():
                logps[way] = policy.score(micro)[0]
        except (RuntimeError, torch.OutOfMemoryError) as error:
            print(f"{way}: {str(error).splitlines()[0]}")
    choices = {way: lambda way=way: policy.model.set_experts_implementation(way) for way in logps}
    found = medians(policy, micro, choices, repeats)
    print("| experts by | forward, ms | forward and backward, ms | largest difference of a log-probability from eager |")
    print("|---|---|---|---|")
    for way, (forward, both) in found.items():
        difference = float((logps[way] - logps["eager"]).abs().max())
        print(f"| {way} | {forward:.0f} | {both:.0f} | {difference:.1e} |")


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--checkpointing", default="none")
    parser.add_argument("--experts", action="store_true", help="compare the ways to compute experts, not replay")
    args = parser.parse_args()
    settings = {"path": args.model, "device": args.device, "dtype": args.dtype, "checkpointing": args.checkpointing}
    policy = load_policy(ModelConfig(**settings), temperature=1.0, seed=0)
    micro = micro_batch(policy, args.tokens)
    print(f"{args.model} on {policy.device}, {args.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    (experts if args.experts else replaying)(policy, micro, args.repeats)


if __name__ == "__main__":
    main()
