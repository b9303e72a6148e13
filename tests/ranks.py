"""A program for torchrun, or for one process: `python ranks.py FOLDER`. It computes what must not depend on the number of
ranks and writes it to FOLDER, for tests to compare.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from conftest import sampled, tiny_config, tiny_model, tiny_policy
from safetensors.torch import save_file

from gspo.distributed import World, open_world
from gspo.training.optimizer import Optimizer
from gspo.training.policy import Policy, load_policy, shard
from gspo.training.sharding import gathered
from gspo.training.update import Skips, Updated, pack_minibatches, update
from gspo.types import Trajectory

LENGTHS = [3, 9, 1, 5, 7, 2, 4, 6, 8]
"""Prompt lengths: nine samples, so that two ranks never have equal numbers of them."""

CASES: dict[str, dict[str, Any]] = {
    "gspo": {"objective__name": "gspo"},
    "grpo": {"objective__name": "grpo"},
    "gspo, one sample each": {"objective__name": "gspo", "training__micro_batch_tokens": 21},
    "dapo, old ones of the trainer": {"objective__name": "dapo", "rollout__old_logprobs": "trainer"},
}


def batch(policy: Policy, *, live: int = len(LENGTHS)) -> list[Trajectory]:
    """Samples of the policy itself, moved a little off it; all but the first `live` without a signal."""
    drawn = sampled(policy, LENGTHS, limit=10)
    moved = [replace(t, engine_logprobs=t.engine_logprobs - 1e-4) for t in drawn]
    return [t if i < live else replace(t, advantage=0.0) for i, t in enumerate(moved)]


def updated(policy: Policy, config: Any, trajectories: list[Trajectory], world: World, optimizer: Optimizer) -> Updated:
    """The updates on one batch."""
    parts = pack_minibatches(trajectories, config, seed=0, device=policy.device, world=world)
    return update(policy, optimizer, parts, config, Skips())


def gradients(folder: Path, world: World, name: str, changes: dict[str, Any], live: int) -> dict[str, Any]:
    """Writes the gradient of one minibatch before any step; returns what else is to be compared."""
    policy = tiny_policy()
    trajectories = batch(policy, live=live)
    shard(policy, world)
    config = tiny_config(folder, **{"training__minibatches": 1, "training__micro_batch_tokens": 42} | changes)
    optimizer = Optimizer(policy.trainable, config.training, 1)
    held: dict[str, torch.Tensor] = {}

    def no_step() -> float:
        held.update({n: m.grad.clone() for n, m in optimizer.masters.items() if m.grad is not None})
        return 0.0

    optimizer.step = no_step
    parts = pack_minibatches(trajectories, config, seed=0, device=policy.device, world=world)
    out = update(policy, optimizer, parts, config, Skips())
    save(folder / f"{name}.safetensors", held, world)
    return {
        "losses": out.losses,
        "mismatch": out.mismatch,
        "samples": sorted(name for part in out.ratios for r in part for name in r.ids),
        "micro_batches": world.gather([len(p.micro_batches) for p in parts]),
    }


def save(path: Path, tensors: dict[str, torch.Tensor], world: World) -> None:
    whole = gathered(tensors.items(), world)
    if world.is_main:
        save_file(whole, path)


def trained(folder: Path, world: World, dtype: str, source: Path | None) -> None:
    """Three steps of four minibatches, from a checkpoint if there is one; writes a checkpoint."""
    from gspo.training import checkpoint

    path = source / "model" if source else None
    policy = load_policy(tiny_model(dtype), temperature=1.0, seed=0, path=path)
    origin = tiny_policy()
    shard(policy, world)
    config = tiny_config(folder, model__dtype=dtype, training__minibatches=4, rollout__old_logprobs="trainer")
    optimizer = Optimizer(policy.trainable, config.training, 100, policy.dtype)
    if source:
        checkpoint.load(source).restore(optimizer)
    for live in (9, 1, 5):
        updated(policy, config, batch(origin, live=live), world, optimizer)
    checkpoint.save(folder, policy, optimizer, {}, step=optimizer.updates, keep=9)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with open_world("cpu") as world:
        here = folder / f"ranks-{world.size}"
        here.mkdir(parents=True, exist_ok=True)
        said = {}
        for name, changes in CASES.items():
            for live in (9, 1):
                said[f"{name} {live}"] = gradients(here, world, f"{name} {live}", changes, live)
        for dtype in ("float32", "bfloat16", "float16"):
            trained(here / dtype, world, dtype, None)
        if world.is_main:
            (here / "said.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
