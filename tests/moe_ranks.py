"""A program for tests: the updates of mixtures of experts as one and as two ranks, `python moe_ranks.py FOLDER`."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed.fsdp
from conftest import sampled, tiny_config
from moe_support import FAMILIES, experts_inputs, family_policy, with_experts
from ranks import run

from gspo.distributed import World, open_world
from gspo.training.optimizer import Optimizer
from gspo.training.packing import MicroBatch
from gspo.training.policy import shard
from gspo.training.routing import Passes
from gspo.training.update import Skips, pack_minibatches, update
from gspo.types import Metrics, Trajectory

PROMPTS = [9] * 9
REPLAY: dict[str, dict[str, Any]] = {
    "none": {},
    "trainer": {"training__replay": "trainer"},
    "engine": {"training__replay": "engine"},
}


def of_engine(calls: list[tuple[int, torch.Tensor]], micro_batches: list[MicroBatch]) -> list[bool]:
    """By call, whether its ids are those that the engine chose for all tokens of one of these micro-batches."""

    def fits(m: MicroBatch, layer: int, ids_NK: torch.Tensor) -> bool:
        places = zip(m.trajectories, m.places, strict=True)
        return m.num_tokens == len(ids_NK) and all(is_of(t, place_P, layer, ids_NK) for t, place_P in places)

    return [any(fits(m, *call) for m in micro_batches) for call in calls]


def without(calls: list[Any]) -> Callable[..., None]:
    """Passes.after, whose calls of experts are not kept: they are no part of the update."""
    after = Passes.after

    def quiet(passes: Passes, *, looking: bool) -> None:
        num = len(calls)
        after(passes, looking=looking)
        del calls[num:]

    return quiet


def is_of(t: Trajectory, place_P: np.ndarray, layer: int, ids_NK: torch.Tensor) -> bool:
    """Whether the rows of a sample's tokens are the engine's."""
    rows_PK = t.routed_experts[:, layer]
    return bool((ids_NK.numpy()[place_P[: len(rows_PK)]] == rows_PK).all())


def laws(folder: Path, family: str) -> None:
    """What each kind of replay does to a model of a family, with passes of unequal number and activations recomputed."""
    said = {}
    with open_world("cpu") as world:
        for name, changes in REPLAY.items():
            policy = family_policy(family, folder, checkpointing="full")
            samples = with_experts(policy, sampled(policy, PROMPTS))
            shard(policy, world)
            common = {"rollout__old_logprobs": "trainer", "rollout__routed_experts": True, "training__learning_rate": 3e-2}
            wide = {"objective__clip_low": 0.2, "objective__clip_high": 0.2, "training__micro_batch_tokens": 21}
            config = tiny_config(folder, **common | wide | changes)
            parts = pack_minibatches(samples, config, seed=0, device=policy.device, world=world)
            calls = experts_inputs(policy)
            with patch.object(Passes, "after", without(calls)):
                out = update(policy, Optimizer(policy.trainable, config.training, 2), parts, config, Skips())
            told = {k: v for k, v in out.routing.items() if k != "moe/replay_s"}
            kept = of_engine(calls, [m for p in parts for m in p.micro_batches])
            counts = {"calls": len(kept), "kept": sum(kept), "idle": sum(p.idle for p in parts)}
            given = {key: world.gather(number) for key, number in counts.items()}
            said[name] = told | {"norms": out.grad_norms, "given": given, "layers": len(policy.routing.layers)}
        said["single"] = of_a_single_sample(family, folder, world)
    if world.is_main:
        (folder / f"said-{family}-{world.size}.json").write_text(json.dumps(said))


def of_a_single_sample(family: str, folder: Path, world: World) -> Metrics:
    """`moe/` of an update in which the second of two ranks has nothing at all."""
    policy = family_policy(family, folder)
    samples = with_experts(policy, sampled(policy, PROMPTS[:1]))
    samples = [replace(t, advantage=1.0) for t in samples[:1]]
    shard(policy, world)
    one = {"training__minibatches": 1, "training__groups": "keep", "training__learning_rate": 3e-2}
    config = tiny_config(folder, **one, **REPLAY["engine"], rollout__routed_experts=True)
    parts = pack_minibatches(samples, config, seed=0, device=policy.device, world=world)
    assert sum(len(part.micro_batches) for part in parts) == (world.rank == 0)
    return update(policy, Optimizer(policy.trainable, config.training, 1), parts, config, Skips()).routing


def main(folder: Path) -> None:
    """All families, with both numbers of ranks."""
    torch.set_num_threads(1)
    for family, size in itertools.product(FAMILIES, (1, 2)):
        run(folder, f"{family}-{size}", size, lambda family=family: laws(folder, family))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
