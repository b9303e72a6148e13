"""What it costs to replay expert choices, and which way of computing experts is fastest: milliseconds and bytes, as tables.

    python benchmarks/replay.py MODEL --tokens 8192                        # replay: routers, whole passes, records, bytes
    python benchmarks/replay.py MODEL --tokens 1024 --experts grouped_mm   # ways to compute experts, in whole passes

MODEL is a folder with a mixture of experts. One micro-batch of so many tokens, made of sequences of 512 random ones. The
first table has what replay adds: routers of all layers alone, of random hidden states, and whole passes, with live and with
replayed choices (made as the update makes them), and what is done to the records between passes. The second has whole
passes by way, and compares the log-probabilities of each with those of experts computed one after the other ("eager"),
whose choice of experts all replay. Medians of --repeats after one not counted; ways take turns. On a CPU the time is the
process's own, so that programs beside it count little; on a GPU it is the clock's.

Not covered: several devices, compiled layers, real text (random tokens may load experts more evenly).
"""

from __future__ import annotations

import argparse
import functools
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
KINDS = ("forward", "forward and backward")


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
    """Of a call: of the process on a CPU, until the device is done on a GPU."""
    on_gpu = policy.device.type == "cuda"
    wait, clock = (torch.cuda.synchronize, time.perf_counter) if on_gpu else (lambda: None, time.process_time)
    wait()
    start = clock()
    work()
    wait()
    return clock() - start


def medians(
    policy: Policy, ways: dict[str, Callable[[], object]], works: dict[str, Callable[[], object]], repeats: int
) -> dict[str, list[float]]:
    """By way the median milliseconds of each work; a way's call sets it up, and ways take turns."""
    taken: dict[tuple[str, str], list[float]] = {}
    for _ in range(repeats + 1):
        for way, choose in ways.items():
            choose()
            for kind, work in works.items():
                taken.setdefault((way, kind), []).append(seconds(policy, work))
    return {way: [1e3 * statistics.median(taken[way, kind][1:]) for kind in works] for way in ways}


def replaying(policy: Policy, micro: MicroBatch, repeats: int) -> None:
    """The table of replay."""
    routing = policy.routing
    assert routing is not None
    width, record = policy.head.shape[1], []
    hidden_NH = torch.randn(micro.num_tokens, width, device=policy.device, dtype=policy.dtype, requires_grad=True)

    def route() -> None:
        with torch.no_grad():
            for router in routing.routers:
                router(hidden_NH)

    def learn() -> None:
        sum(router(hidden_NH)[1].square().sum() for router in routing.routers).backward()  # type: ignore[union-attr]

    def keep() -> None:
        record[:] = [routing.chosen().cpu().numpy()]

    def give() -> None:
        records = [Record(record[0], place) for place in micro.places]
        routing.replay(torch.from_numpy(packed_ids(records, micro.places, micro.num_tokens)).to(policy.device))

    route()
    routing.take_logits()
    kept = medians(policy, {"": lambda: None}, {"keep": keep, "give": give}, repeats)[""]
    ways = {"live": lambda: routing.replay(None), "replayed": give}
    forward, both = passes(policy, micro)
    works = {"routers": (route, learn), "whole pass": (forward, both)}
    named = {f"{what}, {kind}": work for what, pair in works.items() for kind, work in zip(KINDS, pair, strict=True)}
    found = medians(policy, ways, named, repeats)
    routing.replay(None)
    shape = f"{len(routing.layers)} layers, {routing.top_k} of {routing.num_experts} experts"
    print(f"| {micro.num_tokens} tokens, {shape} | {', ms | '.join(ways)}, ms |\n|---|---|---|")
    for name, *times in zip(named, *found.values(), strict=True):
        print(f"| {name} | {' | '.join(f'{t:.1f}' for t in times)} |")
    print(f"| keeping the record | | {kept[0]:.1f} |\n| giving it to the routers | | {kept[1]:.1f} |")
    print(f"\nthe record: {record[0].nbytes} bytes, {record[0].nbytes / micro.num_tokens:.0f} a token\n")


def passes(policy: Policy, micro: MicroBatch) -> tuple[Callable[[], torch.Tensor], Callable[[], None]]:
    """A whole pass forward, which gives the log-probabilities, and one forward and backward."""

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return policy.score(micro)[0]

    def both() -> None:
        policy.score(micro)[0].sum().backward()

    return forward, both


def experts(policy: Policy, micro: MicroBatch, repeats: int, ways: list[str]) -> None:
    """The table of ways to compute experts, all by the choice of the first."""
    assert policy.routing is not None
    logps: dict[str, torch.Tensor] = {}
    forward, both = passes(policy, micro)
    for way in ("eager", *ways):
        policy.model.set_experts_implementation(way)
        logps[way] = forward()
        policy.routing.replay(policy.routing.chosen())  # else rounding flips choices, and the difference is of these
    choices = {way: functools.partial(policy.model.set_experts_implementation, way) for way in logps}
    found = medians(policy, choices, dict(zip(KINDS, (forward, both), strict=True)), repeats)
    print(f"| {micro.num_tokens} tokens, experts by | forward, ms | forward and backward, ms | largest difference |")
    print("|---|---|---|---|")
    for way, times in found.items():
        difference = float((logps[way] - logps["eager"]).abs().max())
        print(f"| {way} | {times[0]:.0f} | {times[1]:.0f} | {difference:.1e} |")


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--experts", nargs="+", metavar="WAY", help="compare these ways with eager: grouped_mm, batched_mm")
    args = parser.parse_args()
    settings = {"path": args.model, "device": args.device, "dtype": args.dtype, "kernels": "torch"}
    policy = load_policy(ModelConfig(**settings), temperature=1.0, seed=0)
    if policy.routing is None:
        parser.error(f"{args.model}: no router of experts is found in this model: give a mixture of experts")
    micro = micro_batch(policy, args.tokens)
    print(f"{args.model} on {policy.device}, {args.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    if args.experts:
        experts(policy, micro, args.repeats, args.experts)
    else:
        replaying(policy, micro, args.repeats)


if __name__ == "__main__":
    main()
